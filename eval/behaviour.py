"""What the two engines do, not only what they predict: tasks and needles, document by document, in pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from eval.config import NeedlePlan, TaskPlan
from eval.hosts import LanguageHost
from eval.needle import SCORED_FROM, Trial, make_trials, recall
from eval.records import Estimate, NeedleCell, NeedleFigures, TaskFigures
from eval.statistics import bootstrap_interval
from eval.suite import Task, TaskAnswers, load_task, run_task


def compare_tasks(quantized: LanguageHost, fp16: LanguageHost, plan: TaskPlan, seed: int) -> list[TaskFigures]:
    """Every task of the plan on both hosts."""
    tasks = [load_task(name, plan.documents) for name in plan.names]
    return [task_figures(task, run_task(quantized, task), run_task(fp16, task), seed) for task in tasks]


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


def compare_needles(
    quantized: LanguageHost, fp16: LanguageHost, tokenizer: Any, plan: NeedlePlan, seed: int
) -> NeedleFigures:
    """The grid on both hosts."""
    trials = make_trials(tokenizer, plan.lengths, plan.depths, seed)
    return needle_figures(trials, recall(quantized, trials), recall(fp16, trials), seed)


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
