"""A `serve.run` process as the tests see it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nibble.paths import engine_dir
from nibble.runtime import EngineLimits
from serve.client import TritonLLM
from serve.leftovers import SHARED_MEMORY, ServerRecord
from serve.processes import ProcessIdentity, stubs_of
from serve.settings import ServeSettings

MODEL, KV = "smollm2-135m", "int4"
LIMITS = EngineLimits(max_context=512, max_running=8, max_waiting=8)
START_S = 120.0
# The server may compute an answer in one batch with the canary's: products of another shape add in another order, and
# K and V rounded to fp16 carry that on. Seen: up to 0.00102.
LOG_PROB_TOLERANCE = 5e-3


@dataclass
class RunningServer:
    """A `serve.run` process and how to reach it."""

    process: subprocess.Popen[str]
    port: int
    output_path: Path

    @property
    def llm(self) -> TritonLLM:
        return TritonLLM(f"127.0.0.1:{self.port + 1}", inactivity_timeout_s=60)

    @property
    def settings(self) -> ServeSettings:
        return ServeSettings(f"{MODEL}-{KV}", engine_dir(MODEL, KV), http_port=self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v2/models/llm"

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    @property
    def record(self) -> ServerRecord:
        record = ServerRecord.read(self.settings.record_path)
        assert record is not None
        return record

    @property
    def triton(self) -> ProcessIdentity:
        server = self.record.server
        assert server is not None
        return server

    @property
    def stub(self) -> ProcessIdentity:
        (stub,) = stubs_of(self.triton.pid)
        return stub

    @property
    def shared_memory(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"{self.settings.shm_prefix}*"))

    @property
    def front_url(self) -> str:
        return f"http://127.0.0.1:{self.port + 3}/v1"

    @property
    def request_log(self) -> list[str]:
        assert self.settings.requests_path is not None
        return self.settings.requests_path.read_text().splitlines()

    def front(self, path: str) -> tuple[int, str]:
        """Status and text of a page of the front; 0 when it does not listen."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 3}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_front(self, is_ready: bool = True) -> None:
        """Wait until the front says that it is ready, or that it is not."""
        wait_for(lambda: (self.front("/health/ready")[0] == 200) == is_ready, START_S, f"readiness to be {is_ready}")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        return sum(sample.value for sample in self._samples(name) if labels.items() <= sample.labels.items())

    def metric_labels(self, name: str) -> dict[str, str]:
        """The labels of a metric that has one sample."""
        (sample,) = self._samples(name)
        return dict(sample.labels)

    @property
    def metrics_text(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 2}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def _samples(self, name: str) -> list[Sample]:
        families = list(text_string_to_metric_families(self.metrics_text))
        return [sample for family in families for sample in family.samples if sample.name == name]

    def wait_ready(self, times: int = 1) -> None:
        """Wait until the supervisor has said `times` times that it is ready."""
        said = "ready after"
        wait_for(lambda: self.process.poll() is not None or self.output.count(said) >= times, START_S, "a ready server")
        assert self.process.poll() is None, self.output

    def terminate(self) -> int:
        """SIGTERM and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until the condition holds; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)


def serve_command(port: int, *extra: str) -> list[str]:
    limits = ["--context", str(LIMITS.max_context), "--batch", str(LIMITS.max_running)]
    limits += ["--queue", str(LIMITS.max_waiting), "--threads", "1", "--port", str(port)]
    limits += ["--certificate", "warn"]  # these tests serve an engine that nobody has certified
    return [sys.executable, "-m", "serve.run", "--model", MODEL, "--kv", KV, *limits, *extra]
