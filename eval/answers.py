"""Asks engines, and keeps the answers of a run that has not ended: what an engine was asked once is not asked again.

One JSON line for each set of questions (a task, a row of needles) and engine, beside the finished windows and under the
same key (eval/partial.py). When the run ends the file becomes `answers.jsonl` of its folder: what each engine said.
Short sets are asked together, since a step of sixteen answers takes hardly longer than a step of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.hosts import LanguageHost, Prompt
from eval.progress import show_progress

SIDE_BY_SIDE = 16  # answers that are written at once
CHARACTERS_OF_A_TOKEN = 4  # roughly, for the progress line


@dataclass(frozen=True)
class Questions:
    """Prompts to answer, or pairs (context, continuation) to score. name: unique in a run, tells the content."""

    name: str
    prompts: tuple[Prompt, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def tokens(self) -> int:
        """About how many are read and written."""
        read = sum(len(prompt.text) for prompt in self.prompts) + sum(len(a + b) for a, b in self.pairs)
        return read // CHARACTERS_OF_A_TOKEN + sum(prompt.max_tokens for prompt in self.prompts)


class KeptAnswers:
    """The answers in a file; a line torn by a kill is dropped and asked again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[str, Any] = {}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
                self._answers[record["asked"]] = record["answers"]
            except (ValueError, KeyError, TypeError):
                continue
        workspace = path.with_suffix(".tmp")
        workspace.write_text("".join(_to_line(*item) for item in self._answers.items()), encoding="utf-8")
        workspace.replace(path)

    def ask_all(self, host_name: str, host: LanguageHost, sets: list[Questions]) -> list[list[Any]]:
        """For each set its answers in order: a text for a prompt, a log-likelihood for a pair."""
        missing = [asked for asked in sets if _key(host_name, asked) not in self._answers]
        total = sum(asked.tokens for asked in sets)
        done = total - sum(asked.tokens for asked in missing)
        with show_progress(total, done, f"questions, {host_name} engine", "tokens") as advance:
            for group in _groups(missing):
                for asked, answers in zip(group, _ask(host, group), strict=True):
                    self._add(_key(host_name, asked), answers)
                advance(sum(asked.tokens for asked in group))
        return [self._answers[_key(host_name, asked)] for asked in sets]

    def _add(self, key: str, answers: list[Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(_to_line(key, answers))
            stream.flush()
            os.fsync(stream.fileno())
        self._answers[key] = answers


def _groups(sets: list[Questions]) -> Iterator[list[Questions]]:
    """Neighbouring sets with at most SIDE_BY_SIDE prompts together, or one set."""
    group: list[Questions] = []
    for asked in sets:
        if group and sum(len(each.prompts) for each in [*group, asked]) > SIDE_BY_SIDE:
            yield group
            group = []
        group.append(asked)
    if group:
        yield group


def _ask(host: LanguageHost, group: list[Questions]) -> list[list[Any]]:
    said = iter(host.generate_until([prompt for asked in group for prompt in asked.prompts]))
    scores = iter(host.log_likelihood([pair for asked in group for pair in asked.pairs]))
    return [[next(said) for _ in asked.prompts] + [next(scores).log_likelihood for _ in asked.pairs] for asked in group]


def _key(host_name: str, asked: Questions) -> str:
    return f"{host_name}: {asked.name}"


def _to_line(key: str, answers: list[Any]) -> str:
    return json.dumps({"asked": key, "answers": answers}) + "\n"
