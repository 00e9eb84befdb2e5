"""The engine's Prometheus metrics, published through Triton's own /metrics.

Every call here must come from one thread: two threads in Triton's metric calls at once crash the whole server. The
engine thread is that thread. Triton's own latency metrics count only the hand-over of a streaming request, so the times
that users feel are measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nibble.runtime import EngineStats, TokenEvent
from serve.tensors import MODEL_NAME

TTFT_BUCKETS_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
TPOT_BUCKETS_S = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0]
REQUEST_BUCKETS_S = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]

Gauge = tuple[str, str, dict[str, str], Callable[[EngineStats], float]]
GAUGES: tuple[Gauge, ...] = (
    ("nibble_kv_bytes_per_token", "Bytes of a sealed token, all layers", {}, lambda s: s.bytes_per_token),
    ("nibble_kv_bytes_per_token_fp16", "The same token in fp16", {}, lambda s: s.bytes_per_token_fp16),
    ("nibble_pages", "Pages by pool and state", {"pool": "sealed", "state": "free"}, lambda s: s.pages_free),
    ("nibble_pages", "Pages by pool and state", {"pool": "sealed", "state": "used"}, lambda s: s.pages_used),
    ("nibble_pages", "Pages by pool and state", {"pool": "open", "state": "free"}, lambda s: s.open_pages_free),
    ("nibble_pages", "Pages by pool and state", {"pool": "open", "state": "used"}, lambda s: s.open_pages_used),
    ("nibble_requests", "Requests in the engine", {"state": "running"}, lambda s: s.running),
    ("nibble_requests", "Requests in the engine", {"state": "waiting"}, lambda s: s.waiting),
)
COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], int]], ...] = (
    ("nibble_prompt_tokens_total", "Tokens of prompts taken", lambda s: s.prompt_tokens),
    ("nibble_generated_tokens_total", "Tokens generated", lambda s: s.tokens_generated),
    ("nibble_prefix_hit_tokens_total", "Prompt tokens found in the prefix cache", lambda s: s.prefix_hit_tokens),
    ("nibble_preemptions_total", "Sequences evicted because the pool was full", lambda s: s.preemptions),
)


@dataclass
class RequestTimes:
    """When a request arrived and when its first token left, in seconds of the monotonic clock."""

    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None


class EngineMetrics:
    """Families and metrics of one engine. family_class: pb_utils.MetricFamily."""

    def __init__(
        self,
        family_class: Any,
        kv_name: str,
        fallback_reason: str | None,
        certificate: str = "unchecked",
        engine: str = MODEL_NAME,
    ) -> None:
        """engine: Triton's name of it, which tells engines side by side apart."""
        self._family_class = family_class
        self._labels = {"kv": kv_name, "engine": engine}
        self._families: dict[str, Any] = {}
        self._info = self._metric(
            "nibble_kv_info",
            "KV format in use and why it is not the one built",
            "GAUGE",
            {"fallback_reason": fallback_reason or ""},
        )
        self._info.set(1)
        self._certificate = self._metric(
            "nibble_certificate", "What the engine's certificate is worth", "GAUGE", {"standing": certificate}
        )
        self._certificate.set(1)
        self._gauges = [(self._metric(name, text, "GAUGE", labels), read) for name, text, labels, read in GAUGES]
        self._counters = [[self._metric(name, text, "COUNTER", {}), read, 0] for name, text, read in COUNTERS]
        self._steps = self._metric("nibble_steps_total", "Rounds of the engine thread, idle ones too", "COUNTER", {})
        self._finished: dict[str, Any] = {}
        self._layers: dict[str, Any] = {}
        self._ttft = self._histogram("nibble_ttft_seconds", "Arrival to first token", TTFT_BUCKETS_S)
        self._tpot = self._histogram("nibble_tpot_seconds", "Mean time per token after the first", TPOT_BUCKETS_S)
        self._request = self._histogram("nibble_request_seconds", "Arrival to last token", REQUEST_BUCKETS_S)

    def publish(self, stats: EngineStats, steps: int = 0) -> None:
        """Set every gauge, and move every counter up to what the engine counts. steps: rounds since the last call."""
        self._steps.increment(float(steps))
        for gauge, read_gauge in self._gauges:
            gauge.set(float(read_gauge(stats)))
        for name, count in stats.layers_by_format.items():
            if name not in self._layers:
                self._layers[name] = self._metric("nibble_kv_layers", "Layers by KV format", "GAUGE", {"format": name})
            self._layers[name].set(float(count))
        for counter in self._counters:
            metric, read_counter, before = counter
            metric.increment(float(max(0, read_counter(stats) - before)))
            counter[2] = read_counter(stats)

    def withdraw(self) -> None:
        """Set every gauge to 0: Triton goes on showing the metrics of an engine that is unloaded."""
        for gauge in (self._info, self._certificate, *(gauge for gauge, _ in self._gauges), *self._layers.values()):
            gauge.set(0.0)

    def observe(self, event: TokenEvent, times: RequestTimes) -> None:
        """Record the times of a request at its first token and at its end."""
        if times.first_token is not None and not event.finish_reason:
            return
        now = time.monotonic()
        if times.first_token is None and event.token_id is not None:
            times.first_token = now
            self._ttft.observe(now - times.arrived)
        if event.finish_reason:
            self.count_finished(event.finish_reason)
            self._request.observe(now - times.arrived)
            if times.first_token is not None and event.generated_tokens > 1:
                self._tpot.observe((now - times.first_token) / (event.generated_tokens - 1))

    def count_finished(self, finish_reason: str) -> None:
        """Count a request that ended; "rejected" is one that the engine never took."""
        if finish_reason not in self._finished:
            self._finished[finish_reason] = self._metric(
                "nibble_requests_total", "Requests ended", "COUNTER", {"finish_reason": finish_reason}
            )
        self._finished[finish_reason].increment(1)

    def _metric(self, name: str, text: str, kind: str, labels: dict[str, str]) -> Any:
        return self._family(name, text, kind).Metric(labels={**self._labels, **labels})

    def _histogram(self, name: str, text: str, buckets: list[float]) -> Any:
        return self._family(name, text, "HISTOGRAM").Metric(labels=self._labels, buckets=buckets)

    def _family(self, name: str, text: str, kind: str) -> Any:
        if name not in self._families:
            self._families[name] = self._family_class(
                name=name, description=text, kind=getattr(self._family_class, kind)
            )
        return self._families[name]
