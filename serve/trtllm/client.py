"""The client of `serve.client`, for TensorRT-LLM's endpoints: the same calls, the same chunks.

    TrtllmLLM("127.0.0.1:8001", ENSEMBLE).generate("The capital of France is", max_tokens=8).text

What the endpoint has no input for is refused by name. Answers hold text but no token ids: neither returns them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from nibble.errors import NibbleError
from serve.client import NUMPY_TYPES, Chunk, Prompt, TritonLLM
from serve.trtllm.models import Row, rows


@dataclass(frozen=True)
class Endpoint:
    """A served model. recorded: its name in data/models.yaml. names: our parameter to its input.

    is_batched: inputs carry a batch dimension of 1. is_cumulative: each response holds the whole text so far.
    """

    model: str
    recorded: str
    names: dict[str, str]
    constants: dict[str, Any]
    is_batched: bool
    is_cumulative: bool


_COMMON = ("text_input", "max_tokens", "temperature", "top_k", "top_p", "seed")
ENSEMBLE = Endpoint(
    model="ensemble",
    recorded="ensemble",
    names={name: name for name in (*_COMMON, "stop_words", "stream", "return_log_probs")},
    constants={"exclude_input_in_output": True, "return_num_input_tokens": True, "return_num_output_tokens": True},
    is_batched=True,
    is_cumulative=False,
)
LLMAPI = Endpoint(
    model="tensorrt_llm",
    recorded="llmapi",
    names={
        "text_input": "text_input",
        "stream": "streaming",
        "stop_words": "sampling_param_stop",
        **{name: f"sampling_param_{name}" for name in _COMMON[1:]},
    },
    constants={"sampling_param_exclude_input_from_output": True, "return_finish_reason": True},
    is_batched=False,
    is_cumulative=True,
)


class TrtllmLLM(TritonLLM):
    """A model of TensorRT-LLM behind one gRPC endpoint (host:port)."""

    def __init__(self, url: str = "127.0.0.1:8001", endpoint: Endpoint = ENSEMBLE, inactivity_timeout_s: float = 120.0):
        super().__init__(url, model=endpoint.model, inactivity_timeout_s=inactivity_timeout_s)
        self.endpoint = endpoint

    def _inputs(self, prompt: Prompt, parameters: dict[str, Any]) -> list[grpcclient.InferInput]:
        return endpoint_inputs(self.endpoint, prompt, parameters)

    def _read(self, results: Iterator[grpcclient.InferResult]) -> Iterator[Chunk]:
        before, generated = "", 0
        for result in results:
            chunk = read_chunk(self.endpoint, result, before, generated)
            before, generated = before + chunk.text, chunk.generated_tokens
            yield chunk


def endpoint_inputs(endpoint: Endpoint, prompt: Prompt, parameters: dict[str, Any]) -> list[grpcclient.InferInput]:
    """Input tensors of a request. Temperature 0 is greedy: top_k 1 there, which knows no such temperature."""
    if not isinstance(prompt, str):
        raise NibbleError(
            "prompt: got a chat, allowed text: TensorRT-LLM's endpoints have no chat template; render it first with "
            "tokenizer.apply_chat_template"
        )
    given = {name: value for name, value in parameters.items() if value is not None}
    if given.get("temperature") == 0.0:
        given = {**given, "top_k": 1}
        del given["temperature"]
    if unknown := sorted(given.keys() - endpoint.names.keys()):
        allowed = ", ".join(name for name in endpoint.names if name != "text_input")
        raise NibbleError(f"parameter of {endpoint.model}: got {', '.join(unknown)}, allowed {allowed}")
    values = {endpoint.names[name]: value for name, value in {"text_input": prompt, **given}.items()}
    specs = {row.name: row for row in rows(endpoint.recorded, "inputs")}
    return [_tensor(specs[name], value, endpoint) for name, value in {**values, **endpoint.constants}.items()]


def read_chunk(endpoint: Endpoint, result: grpcclient.InferResult, before: str, generated: int) -> Chunk:
    """A response. before: the text so far, which a cumulative endpoint repeats; generated: tokens so far."""
    text = b"".join(_values(result, "text_output")).decode(errors="replace")
    counts = [_values(result, name) for name in ("num_input_tokens", "num_output_tokens")]
    reason = _values(result, "finish_reason")
    return Chunk(
        text=text.removeprefix(before) if endpoint.is_cumulative else text,
        token_ids=(),
        log_probs=tuple(_values(result, "output_log_probs")),
        finish_reason=(reason[0].decode() if reason and reason[0] != b"None" else None),
        prompt_tokens=counts[0][0] if counts[0] else 0,
        generated_tokens=counts[1][0] if counts[1] else generated,
        cached_tokens=0,
    )


def _tensor(row: Row, value: Any, endpoint: Endpoint) -> grpcclient.InferInput:
    data_type = "BYTES" if row.data_type == "STRING" else row.data_type
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    array = np.array([item.encode() if isinstance(item, str) else item for item in items], dtype=NUMPY_TYPES[data_type])
    array = array[None] if endpoint.is_batched else array
    tensor = grpcclient.InferInput(row.name, list(array.shape), data_type)
    tensor.set_data_from_numpy(array)
    return tensor


def _values(result: grpcclient.InferResult, name: str) -> list[Any]:
    array = result.as_numpy(name)
    return [] if array is None else array.reshape(-1).tolist()
