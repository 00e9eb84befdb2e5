"""Finished windows of a run that has not ended, so that an interrupted evaluation goes on where it stopped.

One JSON line a window, in a file whose name is a hash of everything that decides the numbers: both engines, the
windows, the code. Anything else changed means another file. A line torn by a kill is dropped and measured again.
When the run ends the file becomes `positions.jsonl` of its folder: all positions, for any later statistic.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from eval.answers import KeptAnswers
from eval.measures import PositionMeasures
from eval.windows import Window
from nibble.errors import NibbleError

SIGNIFICANT_DIGITS = 9


def partial_key(*parts: str) -> str:
    """A short name for the combination of engine, window and code hashes."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class PartialRun:
    """The windows measured and the answers given so far; made by `open_partial`, which holds the folder's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = KeptAnswers(path.with_suffix(".answers.jsonl"))
        self._measured = dict(_read_lines(path))
        _rewrite(path, self._measured)

    def __len__(self) -> int:
        return len(self._measured)

    def measured(self, window: Window) -> PositionMeasures | None:
        """The window's positions when an earlier run finished it."""
        return self._measured.get(window.sha256)

    def add(self, window: Window, measures: PositionMeasures) -> PositionMeasures:
        """Append a finished window. Returns it as it reads back, so that a resumed run gives the same report."""
        line = _to_line(window.sha256, measures)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        self._measured[window.sha256] = _from_line(line)[1]
        return self._measured[window.sha256]


@contextmanager
def open_partial(folder: Path, key: str) -> Iterator[PartialRun]:
    """Lock the folder and read the partial run of that key; NibbleError when another process has it locked."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NibbleError(
                f"evaluation in {folder.parent}: got a second one of this model and KV, allowed one at a time; "
                "wait for the other one to end, or stop it"
            ) from error
        yield PartialRun(folder / f"{key}.jsonl")


def _read_lines(path: Path) -> Iterator[tuple[str, PositionMeasures]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield _from_line(line)
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill: this window is measured again


def _rewrite(path: Path, measured: dict[str, PositionMeasures]) -> None:
    """Drop torn lines for good, or the next append would be glued to one."""
    lines = "".join(_to_line(sha256, measures) for sha256, measures in measured.items())
    workspace = path.with_suffix(".tmp")
    workspace.write_text(lines, encoding="utf-8")
    workspace.replace(path)


def _to_line(sha256: str, measures: PositionMeasures) -> str:
    record = {
        "window": sha256,
        "kl": _rounded(measures.kl),
        "nll": _rounded(measures.nll),
        "nll_fp16": _rounded(measures.nll_fp16),
        "top1_same": [int(same) for same in measures.top1_same],
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def _from_line(line: str) -> tuple[str, PositionMeasures]:
    record = json.loads(line)
    kl, nll, nll_fp16 = (np.array(record[name], dtype=np.float64) for name in ("kl", "nll", "nll_fp16"))
    return str(record["window"]), PositionMeasures(kl, nll, nll_fp16, np.array(record["top1_same"], dtype=bool))


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values]
