"""Host time to plan one decode step of our cache in TensorRT-LLM's PyTorch runtime: `python -m bench.trtllm_step`.

For each batch and context: `prepare()` of the attention metadata without what TensorRT-LLM itself does there, that is
planning the step and starting the copies of its tables. Steps go on over a page's end, so that some sequences begin a
page in each (`row_made`: all of them do, the worst step). TensorRT-LLM runs it between two steps, with the overlap
scheduler off: it is added to each step's time on the GPU.

Writes bench/results/trtllm_step.json; the last line is the same JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.measured_commit import measured_commit
from eval.environment import describe_machine
from nibble.atomic import write_text
from nibble.formats import PAGE_TOKENS
from nibble.stage import run_stage
from nibble.trtllm.metadata import StepTables
from nibble.trtllm.page_ledger import PageLedger
from nibble.trtllm.step_plan import SequenceStep, StepPlanner
from nibble.versions import versions
from nibble.visibility import PagePolicy

RESULT = Path(__file__).parent / "results" / "trtllm_step.json"
CASES = ((1, 32768), (64, 4096), (64, 32768), (256, 8192))  # sequences, tokens of each
STEPS = 2 * PAGE_TOKENS
LAYERS = 80  # how far apart the pages of one layer are; no time depends on it


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.trtllm_step", description="Host time of a step's plan.")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "what": "host time to plan a decode step in TensorRT-LLM's PyTorch runtime",
        "tables_on": str(device),
        "cases": [time_case(batch, context, device) for batch, context in CASES],
        "machine": describe_machine(),
        "versions": versions(),
        "commit": measured_commit(),
    }
    write_text(arguments.out, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def time_case(batch: int, context: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds a step: sequences whose pages begin in different steps, then all in the same one."""
    spread = [context + 7 * index % PAGE_TOKENS for index in range(batch)]
    steps = time_steps(spread, STEPS, device)
    worst = min(time_steps([context] * batch, 1, device)[0] for _ in range(5))
    return {
        "batch": batch,
        "context": context,
        "ms": {"median": round(median(steps), 3), "longest": round(max(steps), 3), "row_made": round(worst, 3)},
    }


def time_steps(cached: list[int], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each step, of sequences that have so many tokens before the first."""
    pages = (max(cached) + steps) // PAGE_TOKENS + 1
    blocks = [list(range(pages * index, pages * (index + 1))) for index in range(len(cached))]
    ledger = PageLedger(8 * len(cached), PagePolicy(), LAYERS)
    planner = StepPlanner(ledger, lambda requests: [blocks[request] for request in requests])
    tables = StepTables(len(cached), len(cached), pages, device)
    for request, tokens in enumerate(cached):
        hold(ledger, blocks[request], tokens)
    times = []
    for step in range(steps):
        start = time.perf_counter()
        sequences = [SequenceStep(request, tokens + step, 1, True) for request, tokens in enumerate(cached)]
        tables.fill(planner.plan(sequences), sequences, 0, is_graph=True)
        times.append(1000 * (time.perf_counter() - start))
    return times


def hold(ledger: PageLedger, blocks: list[int], tokens: int) -> None:
    """As after a prompt of so many tokens: its pages sealed, those that are seen in fp16 there."""
    full = tokens // PAGE_TOKENS
    for block in blocks[:full]:
        ledger.mark_sealed(block)
    for block in {blocks[0], *blocks[max(full - ledger.policy.recent_pages, 0) : -(-tokens // PAGE_TOKENS)]}:
        ledger.take(block)


if __name__ == "__main__":
    run_stage(main)
