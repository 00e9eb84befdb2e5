"""The served model's inputs and outputs: one table for config.pbtxt, the model, the client and the docs.

Names and types are those of TensorRT-LLM's ensemble, so that a client written for one serves both. As there, requests
carry a batch dimension of 1: a scalar has shape [1, 1] on the wire, a list [1, n]. HTTP's generate adds it itself.

    >>> INPUTS["max_tokens"].data_type
    'INT32'
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_NAME = "llm"
CANARY_ID = "nibble-canary"  # requests of this id are left out of the metrics of requests


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model. data_type: Triton's name of it. is_list: shape [1, n] and not [1, 1]."""

    name: str
    data_type: str
    meaning: str
    is_list: bool = False

    @property
    def dims(self) -> list[int]:
        """The shape in config.pbtxt, without the batch dimension."""
        return [-1 if self.is_list else 1]


def _table(*specs: TensorSpec) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


INPUTS = _table(
    TensorSpec("text_input", "BYTES", "the prompt, as it is"),
    TensorSpec("messages", "BYTES", "a chat as JSON [{role, content}, ...], instead of text_input"),
    TensorSpec("max_tokens", "INT32", "longest answer in tokens"),
    TensorSpec("temperature", "FP32", "0 is greedy"),
    TensorSpec("top_k", "INT32", "0 is off"),
    TensorSpec("top_p", "FP32", "1 is off"),
    TensorSpec("stop_words", "BYTES", "strings that end the answer and are not part of it", is_list=True),
    TensorSpec("seed", "UINT64", "the same seed gives the same answer"),
    TensorSpec("stream", "BOOL", "one response a token, or one in all"),
    TensorSpec("return_log_probs", "BOOL", "fill output_log_probs"),
    TensorSpec("top_log_probs", "INT32", "fill token_log_probs, with so many alternatives to each token (0 to 20)"),
    TensorSpec("priority", "INT32", "higher goes first"),
    TensorSpec("ignore_eos", "BOOL", "go on to max_tokens"),
)

OUTPUTS = _table(
    TensorSpec("text_output", "BYTES", "new text since the last response"),
    TensorSpec("token_ids", "INT32", "new tokens since the last response", is_list=True),
    TensorSpec("output_log_probs", "FP32", "their natural log-probabilities", is_list=True),
    TensorSpec("token_log_probs", "BYTES", "JSON list: token, bytes, logprob and top of each new token"),
    TensorSpec("finish_reason", "BYTES", "empty, stop, length, cancelled or error (first and last response)"),
    TensorSpec("error_message", "BYTES", "why, when an answer that had begun ends with error"),
    TensorSpec("prompt_tokens", "INT32", "tokens of the prompt (first and last response)"),
    TensorSpec("generated_tokens", "INT32", "tokens of the answer so far (first and last response)"),
    TensorSpec("cached_tokens", "INT32", "tokens of the prompt found in the prefix cache (first and last response)"),
    TensorSpec("kv_format", "BYTES", "format of the KV cache that gave this answer (last response)"),
    TensorSpec("kv_fallback_reason", "BYTES", "why the cache is fp16 and not what was built (last response)"),
)
