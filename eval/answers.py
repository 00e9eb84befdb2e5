"""Answers of a run that has not ended: what an engine was asked once is not asked again.

One JSON line for each piece of work (a task, a row of needles, on one engine), beside the finished windows and under
the same key (eval/partial.py). When the run ends the file becomes `answers.jsonl` of its folder: what each engine said.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.progress import show_progress


@dataclass(frozen=True)
class Work:
    """What is asked of one engine. name: unique in a run. size: in the unit of the progress line. ask: JSON values."""

    name: str
    size: int
    ask: Callable[[], Any]


class KeptAnswers:
    """The answers in a file; a line torn by a kill is dropped and asked again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[str, Any] = {}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
                self._answers[record["asked"]] = record["answer"]
            except (ValueError, KeyError, TypeError):
                continue
        workspace = path.with_suffix(".tmp")
        workspace.write_text("".join(_to_line(*item) for item in self._answers.items()), encoding="utf-8")
        workspace.replace(path)

    def ask_all(self, works: list[Work], what: str, unit: str) -> list[Any]:
        """The answers to all works, in order, as they read back from the file. what, unit: for the progress line."""
        done = sum(work.size for work in works if work.name in self._answers)
        with show_progress(sum(work.size for work in works), done, what, unit) as advance:
            for work in works:
                if work.name not in self._answers:
                    self._add(work.name, work.ask())
                    advance(work.size)
        return [self._answers[work.name] for work in works]

    def _add(self, name: str, answer: Any) -> None:
        line = _to_line(name, answer)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        self._answers[name] = json.loads(line)["answer"]


def _to_line(name: str, answer: Any) -> str:
    return json.dumps({"asked": name, "answer": answer}) + "\n"
