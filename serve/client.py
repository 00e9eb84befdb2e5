"""A small typed client of the served model, over tritonclient's gRPC streaming.

    >>> llm = TritonLLM("127.0.0.1:8001")
    >>> llm.generate("The capital of France is", max_tokens=8).text      # doctest: +SKIP
    ' Paris.'

A prompt is text, or a chat as a list of {role, content}. Parameters are the model's inputs (serve/tensors.py). A server
whose model dies sends a stream nothing at all, so silence is an error here after `inactivity_timeout_s`.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from nibble.errors import NibbleError
from serve.tensors import INPUTS, MODEL_NAME

Prompt = str | Sequence[dict[str, str]]
NUMPY_TYPES = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}
_Event = tuple[Any, InferenceServerException | None]


class ServerError(NibbleError):
    """The server refused or lost a request; the message is the server's."""


@dataclass(frozen=True)
class Chunk:
    """One response. text and token_ids: what is new in it; the counts: so far. kv_format and kv_fallback_reason: only
    in the last one.

    token_log_probs: on request, what serve/backend/token_report.py says of each new token.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str | None
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    kv_format: str = ""
    kv_fallback_reason: str = ""
    token_log_probs: tuple[dict[str, Any], ...] = ()


class TritonLLM:
    """The model behind one gRPC endpoint (host:port). Safe to use from several threads: each call has its stream."""

    def __init__(self, url: str = "127.0.0.1:8001", *, model: str = MODEL_NAME, inactivity_timeout_s: float = 120.0):
        self.url = url
        self.model = model
        self.inactivity_timeout_s = inactivity_timeout_s

    def is_ready(self) -> bool:
        """True when the server answers and has the model loaded."""
        try:
            with grpcclient.InferenceServerClient(self.url) as client:
                return bool(client.is_model_ready(self.model))
        except InferenceServerException:
            return False

    def generate(self, prompt: Prompt, *, request_id: str = "", **parameters: Any) -> Chunk:
        """The whole answer as one chunk. Raises ServerError, or NibbleError for a parameter that doesn't exist."""
        (answer,) = self.stream(prompt, request_id=request_id, **{**parameters, "stream": False})
        return answer

    def stream(self, prompt: Prompt, *, request_id: str = "", **parameters: Any) -> Generator[Chunk, None, None]:
        """The answer as it comes. Closing the iterator (or leaving its loop) cancels the request on the server."""
        inputs = self._inputs(prompt, {"stream": True, **parameters})
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        with grpcclient.InferenceServerClient(self.url) as client:
            client.start_stream(partial(_put_event, events))
            is_complete = False
            try:
                client.async_stream_infer(self.model, inputs, request_id=request_id, enable_empty_final_response=True)
                yield from self._read(self._results(events))
                is_complete = True
            except InferenceServerException as error:
                raise ServerError(f"{self.url}: {_first_error(events, error).message()}") from error
            finally:
                client.stop_stream(cancel_requests=not is_complete)

    def _inputs(self, prompt: Prompt, parameters: dict[str, Any]) -> list[grpcclient.InferInput]:
        """Input tensors of a request."""
        return request_inputs(prompt, parameters)

    def _read(self, results: Iterator[grpcclient.InferResult]) -> Iterator[Chunk]:
        """Chunks of an answer's responses."""
        chunk = None
        for result in results:
            chunk = read_chunk(result, chunk)
            yield chunk

    def _results(self, events: queue.SimpleQueue[_Event]) -> Iterator[grpcclient.InferResult]:
        while True:
            try:
                result, error = events.get(timeout=self.inactivity_timeout_s)
            except queue.Empty:
                raise ServerError(f"{self.url}: no response for {self.inactivity_timeout_s:g} s") from None
            if error is not None:
                raise error
            if result.get_response().outputs:
                yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def request_inputs(prompt: Prompt, parameters: dict[str, Any]) -> list[grpcclient.InferInput]:
    """Input tensors of a request. Raises NibbleError that lists the inputs when a name is unknown."""
    key, text = ("text_input", prompt) if isinstance(prompt, str) else ("messages", json.dumps(list(prompt)))
    values = {key: text, **{name: value for name, value in parameters.items() if value is not None}}
    if unknown := values.keys() - INPUTS.keys():
        raise NibbleError(f"parameter: got {', '.join(sorted(unknown))}, allowed {', '.join(INPUTS)}")
    return [_input(name, value) for name, value in values.items()]


def read_chunk(result: grpcclient.InferResult, before: Chunk | None = None) -> Chunk:
    """A response of the server. before: the one before it, whose counts are carried on where this one has none.

    Raises ServerError when it is an answer that ended with an error.
    """
    text = partial(_text, result)
    if text("finish_reason") == "error":
        raise ServerError(f"the answer ended early: {text('error_message')}")
    token_ids = tuple(_values(result, "token_ids"))
    counts = [_values(result, name) for name in ("prompt_tokens", "generated_tokens", "cached_tokens")]
    if before is not None and not any(counts):
        counts = [[before.prompt_tokens], [before.generated_tokens + len(token_ids)], [before.cached_tokens]]
    return Chunk(
        text=text("text_output"),
        token_ids=token_ids,
        log_probs=tuple(_values(result, "output_log_probs")),
        finish_reason=text("finish_reason") or None,
        prompt_tokens=counts[0][0],
        generated_tokens=counts[1][0],
        cached_tokens=counts[2][0],
        kv_format=text("kv_format"),
        kv_fallback_reason=text("kv_fallback_reason"),
        token_log_probs=tuple(json.loads(text("token_log_probs") or "[]")),
    )


def _first_error(events: queue.SimpleQueue[_Event], error: InferenceServerException) -> InferenceServerException:
    """The stream's own error, when it broke before the request was sent and tritonclient says only that it broke."""
    waiting = events.get_nowait()[1] if not events.empty() else None
    return waiting or error


def _put_event(events: queue.SimpleQueue[_Event], result: Any, error: InferenceServerException | None) -> None:
    events.put((result, error))


def _input(name: str, value: Any) -> grpcclient.InferInput:
    spec = INPUTS[name]
    items = list(value) if spec.is_list and not isinstance(value, str) else [value]
    encoded = [item.encode() if isinstance(item, str) else item for item in items]
    array: np.ndarray = np.array([encoded], dtype=NUMPY_TYPES[spec.data_type])
    tensor = grpcclient.InferInput(name, list(array.shape), spec.data_type)
    tensor.set_data_from_numpy(array)
    return tensor


def _values(result: grpcclient.InferResult, name: str) -> list[Any]:
    array = result.as_numpy(name)
    return [] if array is None else array.reshape(-1).tolist()


def _text(result: grpcclient.InferResult, name: str) -> str:
    values = _values(result, name)
    return values[0].decode() if values else ""
