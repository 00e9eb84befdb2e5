"""Reading tritonserver's log: the one line that explains a failure, and the noise that explains nothing."""

from __future__ import annotations

import re
from pathlib import Path

NOISE = re.compile(
    r"CUDA driver version is insufficient|CudaDriverHelper|Failed to initialize NVML|DCGM unable to start|"
    r"Unable to allocate pinned system memory|cudaGetDeviceCount|Please switch to|^[+|]|^\s*$"
)
FATAL = (  # lines after which the server never gets ready, best explanation first
    re.compile(r"error while loading shared libraries: (.+)"),
    re.compile(r"failed to load 'llm' version 1: \w+: (?:TritonModelException: )?(.+)"),
    re.compile(r"(failed to stat file .+|[Aa]ddress already in use.*)"),
    re.compile(r"(Stub process '[^']+' is not healthy.*|Signal \(\d+\) received.*)"),
)
TRACE = r"\n\nAt:"  # Triton writes a message on one line, newlines as backslash and n, then the Python trace
OWN_LINE = re.compile(r'"nibble: (.+)"$')


def failure_reason(log_path: Path) -> str | None:
    """What made the server fail, or None when the log shows no failure."""
    text = _read(log_path)
    found = next((match for pattern in FATAL if (match := pattern.search(text))), None)
    return None if found is None else _plain(found[1])


def tail(log_path: Path, count: int = 15) -> str:
    """The last lines that are not noise."""
    return "\n".join([line for line in _read(log_path).splitlines() if not NOISE.search(line)][-count:])


def progress(log_path: Path) -> str:
    """The newest line that the model itself logged, or an empty string."""
    own = [match[1] for line in _read(log_path).splitlines() if (match := OWN_LINE.search(line))]
    return own[-1] if own else ""


def _plain(message: str) -> str:
    return message.split(TRACE)[0].replace(r"\n", "\n").replace(r"\"", '"').strip()


def _read(log_path: Path) -> str:
    return log_path.read_text(errors="replace") if log_path.is_file() else ""
