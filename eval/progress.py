"""Progress of an evaluation on stderr: a bar with an estimate in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Advance(Protocol):
    """Called with how many positions were done since the last call."""

    def __call__(self, positions: int) -> None: ...


@contextmanager
def position_progress(total: int, done: int = 0) -> Iterator[Advance]:
    """Show how many of `total` positions are measured; `done` of them were when this run began."""
    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task("comparing", total=total, completed=done)
            yield lambda positions: bar.advance(task, positions)
    else:
        yield _LogLines(console, total, done).advance


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("positions"))
    return Progress(*columns, TimeRemainingColumn(), console=console)


class _LogLines:
    """One line every ten seconds, with the time left at this run's own pace."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total, self._before, self._done = console, total, done, done
        self._start = self._last = time.monotonic()

    def advance(self, positions: int) -> None:
        self._done += positions
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_LINES and self._done < self._total:
            return
        self._last = now
        left = (now - self._start) * (self._total - self._done) / max(1, self._done - self._before)
        self._console.print(f"comparing: {self._done:,} of {self._total:,} positions, about {left:.0f} s left")
