"""The front's own Prometheus metrics, beside those of Triton and the engines: what clients asked and what they got."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from serve.front.health import Health
from serve.leftovers import ServerRecord

disable_created_metrics()


class FrontMetrics:
    """One registry a front, so that several in one process don't collide."""

    def __init__(self, health: Health, record: Path | None) -> None:
        """record: the supervisor's server.json, which knows how often the server was restarted."""
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "nibble_front_requests", "Requests by endpoint and status", ["endpoint", "status"], registry=self._registry
        )
        self.errors = Counter("nibble_front_errors", "Errors by code", ["code"], registry=self._registry)
        self.abandoned = Counter("nibble_front_abandoned", "Requests whose client went away", registry=self._registry)
        self.in_flight = Gauge("nibble_front_in_flight", "Requests being answered", registry=self._registry)
        ready = Gauge("nibble_front_ready", "1 when the canary is answered", registry=self._registry)
        ready.set_function(lambda: float(health.problem is None))
        canary = Gauge("nibble_front_canary_seconds", "Time of the newest canary", registry=self._registry)
        canary.set_function(lambda: health.canary_s)
        restarts = Gauge("nibble_server_restarts", "Restarts of Triton by the supervisor", registry=self._registry)
        restarts.set_function(lambda: float(_restarts(record)))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


def _restarts(record: Path | None) -> int:
    found = ServerRecord.read(record) if record else None
    return found.restarts if found else 0
