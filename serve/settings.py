"""What one running server is: which engine, which ports, which limits, and where its files lie.

triton_repo/run/<name>-<port>/     one folder for each server, git-ignored, rewritten at each start
    models/llm/config.pbtxt        the model repository
    models/llm/1/model.py
    models/llm-fp16/               the same of each engine served beside the first
    backends/python/               Triton's Python backend with the stub of our Python
    server.json                    process ids, for the next start after a kill
    admin.key                      what Triton's model control asks for, read by serve/control.py
    triton.log
    events.jsonl, requests.jsonl   what the supervisor did; one line for each request of the front
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nibble.paths import REPOSITORY_ROOT
from serve.tensors import MODEL_NAME

RUN_ROOT = Path(os.environ.get("NIBBLE_RUN") or REPOSITORY_ROOT / "triton_repo" / "run")


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is loaded inside the server. Sizes in tokens, sequences and MB; None leaves it to the engine.

    certificate: what the engine's certificate is worth. kv_fallback_reason: why kv_fallback is set, if not by request.
    """

    max_context: int = 2048
    max_running: int = 16
    chunk_tokens: int | None = None
    max_waiting: int = 256
    threads: int | None = None
    pool_mb: int | None = None
    kv_fallback: str | None = None
    kv_fallback_reason: str | None = None
    certificate: str | None = None


@dataclass(frozen=True)
class BesideEngine:
    """Another engine of the same server. kv: what it is called by. labels: see ServeSettings."""

    kv: str
    engine_dir: Path
    options: EngineOptions
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def triton_model(self) -> str:
        return f"{MODEL_NAME}-{self.kv}"


@dataclass(frozen=True)
class FrontOptions:
    """The OpenAI-compatible front beside Triton. arguments: more of the command line of serve.front.run."""

    host: str
    port: int
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeSettings:
    """A server to start. name: <model>-<kv>. Times in seconds.

    labels: parameters of the model's configuration that the front reads (model_name, built_kv, engine_hash). trace: a
    file for Triton's traces, or the URL of an OpenTelemetry collector. canary_timeout_s: 0 is no canary.
    """

    name: str
    engine_dir: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    options: EngineOptions = EngineOptions()
    start_timeout_s: float = 900.0
    drain_timeout_s: float = 30.0
    labels: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[BesideEngine, ...] = ()
    front: FrontOptions | None = None
    trace: str | None = None
    canary_timeout_s: float = 10.0
    log_to_stdout: bool = False
    metrics_host: str | None = None

    @property
    def triton_models(self) -> tuple[str, ...]:
        """Triton's names of all engines, the first one first."""
        return (MODEL_NAME, *(engine.triton_model for engine in self.beside))

    @property
    def grpc_port(self) -> int:
        return self.http_port + 1

    @property
    def metrics_port(self) -> int:
        return self.http_port + 2

    @property
    def ports(self) -> dict[str, int]:
        """Port of each endpoint by its name."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    def address(self, endpoint: str) -> str:
        """Where an endpoint listens; metrics may be open to a scraper while the rest is not."""
        return self.metrics_host or self.host if endpoint == "metrics" else self.host

    @property
    def client_host(self) -> str:
        """An address on which a client of this machine reaches the server."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host  # noqa: S104

    @property
    def run_dir(self) -> Path:
        return RUN_ROOT / f"{self.name}-{self.http_port}"

    @property
    def models_dir(self) -> Path:
        return self.run_dir / "models"

    @property
    def backends_dir(self) -> Path:
        return self.run_dir / "backends"

    @property
    def log_path(self) -> Path:
        return self.run_dir / "triton.log"

    @property
    def record_path(self) -> Path:
        return self.run_dir / "server.json"

    @property
    def admin_key_path(self) -> Path:
        return self.run_dir / "admin.key"

    @property
    def events_path(self) -> Path | None:
        """Where events go; None is standard output."""
        return None if self.log_to_stdout else self.run_dir / "events.jsonl"

    @property
    def requests_path(self) -> Path | None:
        """Where the front's lines go; None is standard output."""
        return None if self.log_to_stdout else self.run_dir / "requests.jsonl"

    @property
    def shm_prefix(self) -> str:
        """Prefix of this server's regions in /dev/shm: the same at each start, so that a killed one's are found."""
        return f"nibble_{hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:12]}_"
