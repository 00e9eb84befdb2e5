"""Stand-ins for what the serving code talks to: the engine, a client's channel, Triton's metric family."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from nibble.errors import NibbleError
from nibble.runtime import EngineStats, FinishReason, QueueFullError, SamplingParams, TokenEvent


class FakeEngine:
    """Answers a prompt with its own bytes, one a step. "crash" raises in `step`, "error" ends in an error."""

    kv_name = "int4"
    fallback_reason = None

    def __init__(self, max_waiting: int = 8) -> None:
        self.max_waiting = max_waiting
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.generated: dict[str, int] = {}
        self.cancelled: set[str] = set()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(messages[-1]["content"])

    def submit(self, prompt_ids: list[int], params: SamplingParams, request_id: str, priority: int = 0) -> str:
        if not prompt_ids:
            raise NibbleError("prompt: got no tokens, allowed 1 or more")
        if len(self.requests) >= self.max_waiting:
            raise QueueFullError("queue is full")
        assert request_id not in self.requests
        self.requests[request_id] = (prompt_ids, params)
        self.generated[request_id] = 0
        return request_id

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self, waiting: AbstractContextManager[object]) -> list[TokenEvent]:
        return [self._next(request_id) for request_id in list(self.requests)]

    def _next(self, request_id: str) -> TokenEvent:
        prompt, params = self.requests[request_id]
        if request_id in self.cancelled:
            return self._end(request_id, None, "", FinishReason.CANCELLED)
        if bytes(prompt) == b"crash":
            raise RuntimeError("boom")
        if bytes(prompt) == b"error" and self.generated[request_id] == 1:
            return self._end(request_id, None, "", FinishReason.ERROR, "bad thing")
        token = prompt[self.generated[request_id] % len(prompt)]
        self.generated[request_id] += 1
        if self.generated[request_id] >= params.max_tokens:
            return self._end(request_id, token, chr(token), FinishReason.LENGTH)
        return self._event(request_id, token, chr(token), None, None)

    def _end(
        self, request_id: str, token: int | None, text: str, reason: FinishReason, error: str | None = None
    ) -> TokenEvent:
        event = self._event(request_id, token, text, reason, error)
        del self.requests[request_id]
        return event

    def _event(
        self, request_id: str, token: int | None, text: str, reason: FinishReason | None, error: str | None
    ) -> TokenEvent:
        return TokenEvent(
            request_id,
            token,
            text,
            logprob=-0.5,
            finish_reason=reason,
            prompt_tokens=len(self.requests[request_id][0]),
            generated_tokens=self.generated[request_id],
            error=error,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            pages_free=9,
            pages_used=len(self.requests),
            open_pages_free=3,
            open_pages_used=0,
            running=len(self.requests),
            waiting=0,
            prefix_hit_tokens=0,
            preemptions=0,
            prompt_tokens=0,
            tokens_generated=sum(self.generated.values()),
            bytes_per_token=140.0,
            bytes_per_token_fp16=512.0,
            pool_bytes=1,
        )


class FakeChannel:
    """Keeps what was sent to one client. log: what a client would see, in order."""

    def __init__(self, is_cancelled: bool = False) -> None:
        self.sent: list[dict[str, list[Any]]] = []
        self.failures: list[tuple[str, str]] = []
        self.is_final = False
        self.cancelled = is_cancelled

    def send(self, tensors: Mapping[str, np.ndarray], is_final: bool) -> None:
        assert not self.is_final, "a response after the final one"
        self.sent.append({name: array.reshape(-1).tolist() for name, array in tensors.items()})
        self.is_final = is_final

    def fail(self, code: str, message: str) -> None:
        assert not self.is_final, "an error after the final response"
        self.failures.append((code, message))
        self.is_final = True

    def close(self) -> None:
        self.is_final = True

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def text(self) -> str:
        return b"".join(response["text_output"][0] for response in self.sent).decode()


class FakeMetric:
    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        self.value += value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class FakeFamily:
    """Triton's MetricFamily: refuses a family made twice, as Triton does for a metric of the same labels."""

    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
    metrics: dict[tuple[str, frozenset[tuple[str, str]]], FakeMetric]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:
        key = (self.name, frozenset(labels.items()))
        assert key not in self.metrics, f"{key} made twice"
        self.metrics[key] = FakeMetric()
        return self.metrics[key]


def new_family_class() -> type[FakeFamily]:
    """A family class with its own, empty registry."""
    return type("Family", (FakeFamily,), {"metrics": {}})
