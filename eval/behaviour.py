"""What the two engines do, not only what they predict: tasks and needles, document by document, in pairs."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from eval.answers import KeptAnswers
from eval.config import EvalPlan
from eval.hosts import LanguageHost
from eval.needle import SCORED_FROM, Trial, make_trials, prompts_sha256, recall
from eval.needle import questions_of as needle_questions
from eval.records import Estimate, NeedleCell, NeedleFigures, TaskFigures
from eval.statistics import bootstrap_interval
from eval.suite import Task, TaskAnswers, judge, load_task
from eval.suite import questions_of as task_questions

Hosts = dict[str, LanguageHost]


def compare_behaviour(
    hosts: Hosts, tokenizer: Any, plan: EvalPlan, kept: KeptAnswers
) -> tuple[list[TaskFigures], NeedleFigures | None]:
    """The plan's tasks and needle grid on both hosts, `quantized` and `fp16`."""
    tasks = [load_task(name, plan.tasks.documents) for name in plan.tasks.names] if plan.tasks else []
    trials = make_trials(tokenizer, plan.needle.lengths, plan.needle.depths, plan.seed) if plan.needle else []
    rows = [list(row) for _, row in groupby(trials, key=lambda trial: (trial.tokens, trial.variant))]
    asked = [*map(task_questions, tasks), *map(needle_questions, rows)]
    ours, theirs = (kept.ask_all(name, hosts[name], asked) for name in ("quantized", "fp16"))
    figures = [
        task_figures(task, judge(task, left), judge(task, right), plan.seed)
        for task, left, right in zip(tasks, ours, theirs, strict=False)
    ]
    if not trials:
        return figures, None
    return figures, needle_figures(trials, _recalls(rows, ours), _recalls(rows, theirs), plan.seed)


def _recalls(rows: list[list[Trial]], answers: list[list[Any]]) -> list[float]:
    """Of every trial; answers: to tasks and, after them, to the rows."""
    return [share for row, said in zip(rows, answers[-len(rows) :], strict=True) for share in recall(row, said)]


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


def needle_figures(trials: list[Trial], quantized: list[float], fp16: list[float], seed: int) -> NeedleFigures:
    """Every cell, and recall of both over the cells that fp16 passes. A cell is the mean of its trials."""
    asked: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for trial, *recalled in zip(trials, quantized, fp16, strict=True):
        asked.setdefault((trial.variant, trial.tokens, trial.depth), []).append((recalled[0], recalled[1]))
    cells = []
    for (variant, length, depth), recalls in asked.items():
        ours, theirs = (float(mean) for mean in np.mean(recalls, axis=0))
        scored = theirs >= SCORED_FROM
        cells.append(
            NeedleCell(variant=variant, length=length, depth=depth, recall=ours, recall_fp16=theirs, scored=scored)
        )
    passed = [cell for cell in cells if cell.scored]
    drops = np.array([cell.recall_fp16 - cell.recall for cell in passed])
    return NeedleFigures(
        cells=cells,
        scored=len(passed),
        recall=float(np.mean([cell.recall for cell in passed])) if passed else None,
        recall_fp16=float(np.mean([cell.recall_fp16 for cell in passed])) if passed else None,
        drop=_estimate(drops, seed) if passed else None,
        sha256=prompts_sha256(trials),
    )


def _estimate(values: np.ndarray, seed: int) -> Estimate:
    interval = bootstrap_interval(values[None], lambda rows: rows[0], seed) if len(values) > 1 else None
    return Estimate(value=float(values.mean()), interval=interval)


def _shared_share(left: str, right: str) -> float:
    """The share of the longer text up to which both are the same."""
    longest = max(len(left), len(right))
    same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return same / longest if longest else 1.0
