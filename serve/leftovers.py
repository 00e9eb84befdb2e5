"""What a killed server leaves behind, and its removal: an orphan process, shared memory, a record.

Each server writes `server.json` with the identities of its supervisor and of tritonserver. A record whose supervisor
is gone marks an orphan: the next start ends it. A record whose supervisor lives is another server and is left alone.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nibble.atomic import write_text
from serve.processes import ProcessIdentity, kill, kill_group, orphaned_stubs

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Triton's Python backend keeps its regions


@dataclass(frozen=True)
class ServerRecord:
    """Who runs a server. server, front: None until they are started. restarts: of tritonserver, so far."""

    name: str
    http_port: int
    shm_prefix: str
    supervisor: ProcessIdentity
    server: ProcessIdentity | None = None
    front: ProcessIdentity | None = None
    restarts: int = 0

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, path: Path) -> ServerRecord | None:
        """The record at `path`; None when it is missing or not one of ours."""
        try:
            fields = json.loads(path.read_text())
            supervisor = ProcessIdentity(**fields.pop("supervisor"))
            server, front = (_identity(fields.pop(name, None)) for name in ("server", "front"))
            return cls(**fields, supervisor=supervisor, server=server, front=front)
        except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None


def _identity(fields: dict[str, int] | None) -> ProcessIdentity | None:
    return ProcessIdentity(**fields) if fields else None


def sweep(run_root: Path) -> list[str]:
    """End orphans of killed supervisors under `run_root` and remove their shared memory; says what was done."""
    done = []
    for path in sorted(run_root.glob("*/server.json")):
        record = ServerRecord.read(path)
        if record is None:
            path.unlink()
        elif not record.supervisor.is_alive:
            done.append(_sweep_one(record))
            path.unlink()
    return done


def remove_shared_memory(prefix: str) -> int:
    """Delete the regions that start with `prefix`; how many there were."""
    regions = list(SHARED_MEMORY.glob(f"{prefix}*"))
    for region in regions:
        region.unlink(missing_ok=True)
    return len(regions)


def _sweep_one(record: ServerRecord) -> str:
    orphaned = record.server is not None and record.server.is_alive
    if record.server is not None and orphaned:
        kill_group(record.server.pid)
        _wait_until_gone(record.server)
    if record.front is not None and record.front.is_alive:
        kill_group(record.front.pid)
        _wait_until_gone(record.front)
    for stub in orphaned_stubs(record.shm_prefix):
        kill(stub)
        _wait_until_gone(stub)
    regions = remove_shared_memory(record.shm_prefix)
    process = "ended its tritonserver, " if orphaned else ""
    return (
        f"cleaned up after a killed {record.name} on port {record.http_port}: {process}{regions} shared memory regions"
    )


def _wait_until_gone(process: ProcessIdentity, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
