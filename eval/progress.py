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
    """Called with how much was done since the last call."""

    def __call__(self, more: int, /) -> None: ...


@contextmanager
def show_progress(total: int, done: int, what: str, unit: str) -> Iterator[Advance]:
    """Show how much of `total` `unit`s is done; `done` of them were when this run began."""
    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, unit) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda more: bar.advance(task, more)
    else:
        yield _LogLines(console, total, done, what, unit).advance


def _bar(console: Console, unit: str) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    return Progress(*columns, TimeRemainingColumn(), console=console)


class _LogLines:
    """One line every ten seconds, with the time left at this run's own pace."""

    def __init__(self, console: Console, total: int, done: int, what: str, unit: str) -> None:
        self._console, self._what, self._unit = console, what, unit
        self._total, self._before, self._done = total, done, done
        self._start = self._last = time.monotonic()

    def advance(self, more: int) -> None:
        self._done += more
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_LINES and self._done < self._total:
            return
        self._last = now
        left = (now - self._start) * (self._total - self._done) / max(1, self._done - self._before)
        self._console.print(
            f"{self._what}: {self._done:,} of {self._total:,} {self._unit}, about {left:.0f} s left", soft_wrap=True
        )
