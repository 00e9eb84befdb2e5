"""Measurements of a format search as they come: shown in a progress bar, kept so that an interrupt loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nibble import atomic

PARTIAL_FILE = ".search.partial.json"


class SearchMemory:
    """Figures by name. A run of the same identity finds those of an interrupted one."""

    def __init__(self, folder: Path, identity: str, total: int, console: Console) -> None:
        """total: the work of all measurements, in layers that are run."""
        self._path, self._identity = folder / PARTIAL_FILE, identity
        self._found = self._read()
        if self._found:
            console.print(f"resuming an interrupted search: {len(self._found)} measurements are done")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True, compact=False),
            console=console,
        )
        self._bar = self._progress.add_task("searching", total=total)

    def __enter__(self) -> SearchMemory:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def figure(self, name: str, work: int, measure: Callable[[], float]) -> float:
        """The figure of that name, measured when it is not known yet."""
        if name not in self._found:
            self._found[name] = measure()
            text = json.dumps({"identity": self._identity, "figures": self._found})
            atomic.write_text(self._path, text)
        self._progress.update(self._bar, advance=work, description=f"searching: {name}")
        return self._found[name]

    def forget(self) -> None:
        """Remove the state: the result is written."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, float]:
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            return dict(state["figures"]) if state["identity"] == self._identity else {}
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
            return {}
