"""What one front is: where it listens, which Triton it fronts, whom it serves and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nibble.errors import NibbleError
from serve.front import DEFAULT_PORT
from serve.front.keys import Limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class FrontSettings:
    """triton_url: host:port of gRPC. models: Triton's names of the engines. record: server.json of the supervisor.

    Sizes in bytes, times in seconds. log_path: None is standard output.
    """

    triton_url: str = "127.0.0.1:8001"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    models: tuple[str, ...] = ("llm",)
    split: Mapping[str, float] = field(default_factory=dict)
    key_file: Path | None = None
    limits: Limits = Limits()
    max_body_bytes: int = 1 << 20
    inactivity_timeout_s: float = 120.0
    body_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    record: Path | None = None
    log_path: Path | None = None


def check_open(host: str, key_file: Path | None, *, is_open: bool) -> None:
    """Raise NibbleError when the front would answer other machines without asking for a key, unless told so."""
    if host not in LOOPBACK and key_file is None and not is_open:
        raise NibbleError(
            f"front: got the address {host} and no API keys, so anybody could use it; give keys with OPENAI_KEYS=FILE "
            "(--keys), or say --no-keys (OPENAI_NO_KEYS=1) if something in front of it asks for them"
        )
