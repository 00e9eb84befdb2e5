"""Files and folders that appear whole or not at all, so that a killed stage leaves nothing half written.

Everything is written beside its target and renamed into place. Whoever makes a folder holds its lock, which the system
releases when a process dies; so what lies beside the target when the lock is free is a leftover, and is swept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def exclusive(target: Path, announce: Callable[[str], object] = lambda message: None) -> Iterator[None]:
    """Hold the lock of a file or folder; `announce` is told once when another process has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        announce(f"another process is writing {target}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` when the block ends well and vanishes when it raises.

    Call it while holding `exclusive(target)`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace, retired = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for leftover in (workspace, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    workspace.mkdir()
    try:
        yield workspace
        if target.exists():
            target.rename(retired)
        workspace.rename(target)
    finally:
        for leftover in (workspace, retired):
            shutil.rmtree(leftover, ignore_errors=True)


def write_bytes(target: Path, content: bytes) -> None:
    """Write a file whole: readers see the old content or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with workspace.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        workspace.replace(target)
    finally:
        workspace.unlink(missing_ok=True)


def write_text(target: Path, content: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(target, content.encode())
