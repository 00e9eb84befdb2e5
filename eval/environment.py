"""The stamp of a run: commit, hash of the code that decides the numbers, versions of what it runs on, the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch

from eval.records import Environment
from nibble.paths import REPOSITORY_ROOT
from nibble.versions import versions

CODE = ("nibble/**/*.py", "nibble/**/*.cu*", "eval/compare.py", "eval/measures.py")


def describe_environment() -> Environment:
    """The environment of this process."""
    return Environment(
        commit=current_commit(), code_sha256=code_sha256(), versions=versions(), machine=describe_machine()
    )


def current_commit() -> str:
    """NIBBLE_COMMIT; else git's commit, with `-dirty` when tracked files differ from it; else `unknown`."""
    if asked := os.environ.get("NIBBLE_COMMIT"):
        return asked
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def code_sha256(root: Path = REPOSITORY_ROOT) -> str:
    """One hash over the sources that measured numbers depend on."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in CODE for path in root.glob(pattern)}):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, torch threads and, when there is one, the GPU."""
    machine: dict[str, str | int] = {
        "system": platform.system(),
        "processor": _processor_name(),
        "cores": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY_ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
