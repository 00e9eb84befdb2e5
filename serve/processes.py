"""Processes as /proc shows them: an identity that a reused process id can't fake, and a server's stub processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
STUB_COMMAND = "triton_python_b"  # /proc cuts names to 15 characters


@dataclass(frozen=True)
class ProcessIdentity:
    """A process id and the clock tick at which it started."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this id now. Raises ProcessLookupError."""
        stat = _read_stat(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(pid, stat.started)

    @property
    def is_alive(self) -> bool:
        """Running, and neither a zombie nor another process under the same id."""
        stat = _read_stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state not in "ZX"


def stubs_of(server_pid: int) -> list[ProcessIdentity]:
    """The Python stub processes of a tritonserver, dead ones left out."""
    return [
        ProcessIdentity(pid, stat.started)
        for pid, stat in _all_stats()
        if stat.parent == server_pid and stat.command == STUB_COMMAND and stat.state not in "ZX"
    ]


def orphaned_stubs(shm_prefix: str) -> list[ProcessIdentity]:
    """Stub processes that outlived their tritonserver, known by the shared memory that their command line names."""
    return [
        ProcessIdentity(pid, stat.started)
        for pid, stat in _all_stats()
        if stat.command == STUB_COMMAND and shm_prefix in _command_line(pid) and stat.state not in "ZX"
    ]


def die_with_parent() -> None:
    """For a child before exec: the kernel sends it SIGTERM when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def kill(process: ProcessIdentity) -> None:
    """SIGKILL to one process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """SIGKILL to a process that leads its group, and to all in the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@dataclass(frozen=True)
class _Stat:
    command: str
    state: str
    parent: int
    started: int


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return _Stat(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _all_stats() -> list[tuple[int, _Stat]]:
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [(pid, stat) for pid in pids if (stat := _read_stat(pid)) is not None]
