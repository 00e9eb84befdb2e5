"""Token events of one request become responses: one for each event or for several that came at once, or a single one
when the request doesn't stream.

Errors take two ways. Before the first response they are Triton errors, which clients see as failed requests. After it
they travel inside a last response as finish_reason "error", because Triton loses or blocks on mid-stream errors in
ensembles and BLS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nibble.errors import NibbleError
from nibble.runtime import TokenEvent
from serve.backend.requests import Question
from serve.tensors import OUTPUTS

Describe = Callable[[TokenEvent], dict[str, Any]]
COUNTS = ("prompt_tokens", "generated_tokens", "cached_tokens")
NUMPY_TYPES = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32}


class Channel(Protocol):
    """The way back to one client."""

    def send(self, tensors: Mapping[str, np.ndarray], is_final: bool) -> None:
        """Send one response; nothing may follow a final one."""

    def fail(self, code: str, message: str) -> None:
        """End the request with a Triton error. code: a name of TritonError such as INVALID_ARG."""

    def close(self) -> None:
        """End the request without another response."""

    def is_cancelled(self) -> bool:
        """True when the client has gone or given up."""


class Answer:
    """Sends the events of one request through its channel."""

    def __init__(
        self,
        channel: Channel,
        question: Question | NibbleError,
        closing: Mapping[str, str],
        describe: Describe | None = None,
    ) -> None:
        """closing: texts added to the last response (kv_format, kv_fallback_reason). describe: see token_report.py."""
        self._channel = channel
        self._describe = describe if isinstance(question, Question) and question.top_log_probs is not None else None
        self._streams = isinstance(question, Question) and question.stream
        self._has_log_probs = isinstance(question, Question) and question.return_log_probs
        self._closing = closing
        self._pending: list[TokenEvent] = []
        self._has_sent = False

    @property
    def is_cancelled(self) -> bool:
        return self._channel.is_cancelled()

    def take(self, events: Sequence[TokenEvent]) -> None:
        """Send what these events, consecutive ones of the request, make ready: one response of a stream."""
        last = events[-1]
        if last.finish_reason == "error":
            self._pending += events[:-1]
            if self._streams and self._pending:
                self._flush()
            self.fail("INTERNAL", last.error or "the engine gave no reason")
            return
        self._pending += events
        if last.finish_reason == "cancelled" and self._channel.is_cancelled():
            self._channel.close()
        elif self._streams or last.finish_reason:
            self._flush()

    def fail(self, code: str, message: str) -> None:
        """End the request with an error, before or after its first response."""
        if not self._has_sent:
            self._channel.fail(code, message)
            return
        tensors = {"text_output": "", "finish_reason": "error", "error_message": message, **self._closing}
        self._channel.send({name: as_tensor(name, [text]) for name, text in tensors.items()}, is_final=True)

    def _flush(self) -> None:
        is_final = self._pending[-1].finish_reason is not None
        tensors = response_tensors(
            self._pending, has_log_probs=self._has_log_probs, has_counts=is_final or not self._has_sent
        )
        if self._describe is not None:
            report = [self._describe(event) for event in self._pending if event.token_id is not None]
            tensors["token_log_probs"] = as_tensor("token_log_probs", [json.dumps(report)])
        if is_final:
            tensors |= {name: as_tensor(name, [text]) for name, text in self._closing.items()}
        self._channel.send(tensors, is_final)
        self._pending = []
        self._has_sent = True


def response_tensors(events: list[TokenEvent], *, has_log_probs: bool, has_counts: bool) -> dict[str, np.ndarray]:
    """One response for consecutive events of a request.

    has_counts: with what a client knows by itself between the first response and the last. A tensor costs the thread
    that sends, and with it the engine, a tenth of a response.
    """
    last = events[-1]
    with_token = [event for event in events if event.token_id is not None]
    values: dict[str, list[object]] = {
        "text_output": ["".join([event.text for event in events])],
        "token_ids": [event.token_id for event in with_token],
    }
    if has_counts:
        values["finish_reason"] = [last.finish_reason or ""]
        values |= {name: [getattr(last, name)] for name in COUNTS}
    if has_log_probs:
        values["output_log_probs"] = [np.nan if event.logprob is None else event.logprob for event in with_token]
    return {name: as_tensor(name, items) for name, items in values.items()}


def as_tensor(name: str, items: list[object]) -> np.ndarray:
    """An output array of shape [1, len(items)]."""
    encoded = [item.encode() if isinstance(item, str) else item for item in items]
    return np.array([encoded], dtype=NUMPY_TYPES[OUTPUTS[name].data_type])
