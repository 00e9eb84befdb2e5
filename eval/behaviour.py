"""What the two engines do, not only what they predict: tasks and needles, document by document, in pairs."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from eval.answers import KeptAnswers, Work
from eval.config import NeedlePlan, TaskPlan
from eval.hosts import LanguageHost
from eval.needle import SCORED_FROM, Trial, make_trials, recall
from eval.records import Estimate, NeedleCell, NeedleFigures, TaskFigures
from eval.statistics import bootstrap_interval
from eval.suite import Task, TaskAnswers, load_task, run_task

Hosts = dict[str, LanguageHost]


def compare_tasks(hosts: Hosts, plan: TaskPlan, seed: int, kept: KeptAnswers) -> list[TaskFigures]:
    """Every task of the plan on both hosts, `quantized` and `fp16`."""
    tasks = [load_task(name, plan.documents) for name in plan.names]

    def ask(host: LanguageHost, task: Task) -> dict[str, Any]:
        return asdict(run_task(host, task))

    works = [
        Work(f"task {task.name} {task.sha256[:12]}, {name}", len(task.documents), partial(ask, host, task))
        for task in tasks
        for name, host in hosts.items()
    ]
    said = [TaskAnswers(**answer) for answer in kept.ask_all(works, "tasks, both engines", "documents")]
    by_task = [dict(zip(hosts, said[at : at + len(hosts)], strict=True)) for at in range(0, len(said), len(hosts))]
    return [
        task_figures(task, answers["quantized"], answers["fp16"], seed)
        for task, answers in zip(tasks, by_task, strict=True)
    ]


def task_figures(task: Task, quantized: TaskAnswers, fp16: TaskAnswers, seed: int) -> TaskFigures:
    """Accuracy of both, the paired difference with interval and standard error, flips, and how long answers agree."""
    ours, theirs = np.array(quantized.right, dtype=float), np.array(fp16.right, dtype=float)
    difference = ours - theirs
    shared = [_shared_share(left, right) for left, right in zip(quantized.said, fp16.said, strict=True)]
    return TaskFigures(
        task=task.name,
        documents=len(task.documents),
        accuracy=float(ours.mean()),
        accuracy_fp16=float(theirs.mean()),
        difference=_estimate(difference, seed),
        standard_error=float(difference.std(ddof=1) / len(difference) ** 0.5) if len(difference) > 1 else 0.0,
        flips=int((difference != 0).sum()),
        same_text=float(np.mean(shared)) if shared else None,
        sha256=task.sha256,
    )


def compare_needles(hosts: Hosts, tokenizer: Any, plan: NeedlePlan, seed: int, kept: KeptAnswers) -> NeedleFigures:
    """The grid on both hosts, `quantized` and `fp16`; asked a length and variant at a time, all depths together."""
    trials = make_trials(tokenizer, plan.lengths, plan.depths, seed)
    rows = [list(row) for _, row in groupby(trials, key=lambda trial: (trial.tokens, trial.variant))]
    works = {
        name: [
            Work(f"needles {digest(row)}, {name}", sum(trial.tokens for trial in row), partial(recall, host, row))
            for row in rows
        ]
        for name, host in hosts.items()
    }
    in_turn = [work for pair in zip(*works.values(), strict=True) for work in pair]
    found = kept.ask_all(in_turn, "needles, both engines", "tokens")
    recalls = {name: [share for row in found[at :: len(hosts)] for share in row] for at, name in enumerate(hosts)}
    return needle_figures(trials, recalls["quantized"], recalls["fp16"], seed)


def digest(trials: list[Trial]) -> str:
    """Variant, length and a hash of the prompts."""
    text = "\n".join(trial.prompt for trial in trials)
    return f"{trials[0].variant} {trials[0].tokens} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def needle_figures(trials: list[Trial], quantized: list[float], fp16: list[float], seed: int) -> NeedleFigures:
    """Every cell, and recall of both over the cells that fp16 passes."""
    cells = [
        NeedleCell(
            variant=t.variant, length=t.tokens, depth=t.depth, recall=ours, recall_fp16=theirs,
            scored=theirs >= SCORED_FROM,
        )
        for t, ours, theirs in zip(trials, quantized, fp16, strict=True)
    ]  # fmt: skip
    scored = [cell for cell in cells if cell.scored]
    drops = np.array([cell.recall_fp16 - cell.recall for cell in scored])
    return NeedleFigures(
        cells=cells,
        scored=len(scored),
        recall=float(np.mean([cell.recall for cell in scored])) if scored else None,
        recall_fp16=float(np.mean([cell.recall_fp16 for cell in scored])) if scored else None,
        drop=_estimate(drops, seed) if scored else None,
    )


def _estimate(values: np.ndarray, seed: int) -> Estimate:
    interval = bootstrap_interval(values[None], lambda rows: rows[0], seed) if len(values) > 1 else None
    return Estimate(value=float(values.mean()), interval=interval)


def _shared_share(left: str, right: str) -> float:
    """The share of the longer text up to which both are the same."""
    longest = max(len(left), len(right))
    same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return same / longest if longest else 1.0
