"""The offline tasks through one host: each document right or wrong, with what was answered.

The task files are lm-evaluation-harness's (eval/tasks/*.yaml with JSONL beside them), of which this reads what they
use: multiple choice by log-likelihood, and greedy generation judged by a regular expression and exact match.
`eval.harness` runs the same files, and any other task, through the harness itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.answers import Questions
from eval.hosts import Prompt
from nibble.errors import NibbleError
from nibble.strict_yaml import read_mapping

TASK_FOLDER = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class Task:
    """One task file and its documents. longest_answer: tokens (0 for multiple choice)."""

    name: str
    documents: list[dict[str, Any]]
    stop: tuple[str, ...]
    longest_answer: int
    pattern: str
    sha256: str

    @property
    def is_choice(self) -> bool:
        return self.longest_answer == 0


@dataclass(frozen=True)
class TaskAnswers:
    """What a host made of a task, document by document. said: the generated texts; [] for multiple choice."""

    right: list[bool]
    said: list[str]


def task_names() -> list[str]:
    """The offline tasks."""
    return sorted(path.stem for path in TASK_FOLDER.glob("*.yaml"))


def load_task(name: str, limit: int | None = None) -> Task:
    """A task by its file's name, with its first `limit` documents. NibbleError lists the names."""
    if name not in task_names():
        raise NibbleError(f"task: got {name!r}, allowed {', '.join(task_names())} (others: python -m eval.harness)")
    settings = read_mapping(TASK_FOLDER / f"{name}.yaml")
    data = (TASK_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    documents = [json.loads(line) for line in data.splitlines()][:limit]
    digest = hashlib.sha256(json.dumps([settings, documents], sort_keys=True).encode()).hexdigest()
    if settings["output_type"] == "multiple_choice":
        return Task(name, documents, (), 0, "", digest)
    generation = settings["generation_kwargs"]
    pattern = settings["filter_list"][0]["filter"][0]["regex_pattern"]
    return Task(name, documents, tuple(generation["until"]), int(generation["max_gen_toks"]), pattern, digest)


def questions_of(task: Task) -> Questions:
    """What a host is asked for the documents of a task."""
    name = f"task {task.name} {task.sha256[:12]}"
    if task.is_choice:
        pairs = ((document["text"], choice) for document in task.documents for choice in document["choices"])
        return Questions(name, pairs=tuple(pairs))
    prompts = (Prompt(document["text"], task.stop, task.longest_answer) for document in task.documents)
    return Questions(name, prompts=tuple(prompts))


def judge(task: Task, answers: list[Any]) -> TaskAnswers:
    """Each document right or wrong. answers: to `questions_of(task)`."""
    return _judge_choices(task, answers) if task.is_choice else _judge_texts(task, answers)


def _judge_choices(task: Task, log_likelihoods: list[float]) -> TaskAnswers:
    each = iter(log_likelihoods)
    right = []
    for document in task.documents:
        scores = [next(each) for _ in document["choices"]]
        right.append(scores.index(max(scores)) == document["label"])
    return TaskAnswers(right, [])


def _judge_texts(task: Task, said: list[str]) -> TaskAnswers:
    found = [re.findall(task.pattern, text) for text in said]
    right = [bool(f) and f[0].strip() == doc["target"] for f, doc in zip(found, task.documents, strict=True)]
    return TaskAnswers(right, said)
