"""A step's plan by itself: what it asks TensorRT-LLM for, and which fp16 pages it holds afterwards."""

from __future__ import annotations

import pytest

from nibble.errors import NibbleError
from nibble.trtllm.page_ledger import PageLedger
from nibble.trtllm.step_plan import SequenceStep, StepPlanner
from nibble.visibility import PagePolicy

PAGES = 12


class Blocks:
    """Block ids of each request, 100 apart; counts who was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, requests: list[int]) -> list[list[int]]:
        self.asked += requests
        return [[100 * request + page for page in range(PAGES)] for request in requests]


def make_planner(slots: int) -> tuple[StepPlanner, PageLedger, Blocks]:
    ledger, blocks = PageLedger(slots, PagePolicy(), pages_per_block=2), Blocks()
    return StepPlanner(ledger, blocks), ledger, blocks


def test_a_row_is_made_when_a_page_begins() -> None:
    planner, ledger, blocks = make_planner(16)
    planner.plan([SequenceStep(1, 0, 300)])
    blocks.asked.clear()
    slots, seals, rows = [], [], []
    for cached in range(300, 450):
        plan = planner.plan([SequenceStep(1, cached, 1, is_generation=True)])
        slots += plan.slots
        seals += plan.seal
        rows.append(plan.generation_rows[0].tolist())
    assert blocks.asked == [1, 1, 1, 1]  # after the prompt, at 320, 384 and 448
    assert [slot % 64 for slot in slots] == [position % 64 for position in range(300, 450)]
    assert [page for _, page in seals] == [2 * 104, 2 * 105, 2 * 106]
    newest = [ledger.find(block) for block in (100, 106, 107)]
    assert rows[-1] == [newest[0], *(2 * block for block in range(101, 106)), *newest[1:]]
    planner.release(1)
    planner.plan([SequenceStep(1, 0, 70)])  # the same id again
    assert planner.plan([SequenceStep(1, 70, 1, is_generation=True)]).slots[0] % 64 == 6


def test_prompts_that_wait_hold_only_what_their_next_token_sees() -> None:
    planner, ledger, _ = make_planner(12)
    for request in range(4):
        planner.plan([SequenceStep(request, 0, 256)])  # four pages each, of which a sink and a recent one are held
    assert all(ledger.find(100 * request + page) is not None for request in range(4) for page in (0, 3))
    ledger.check_integrity()
    with pytest.raises(NibbleError, match="all 12 are in use"):
        planner.plan([SequenceStep(9, 0, 64 * 9)])


def test_rows_of_dummies_have_pages_that_exist() -> None:
    planner, _, _ = make_planner(16)
    row = planner.plan([SequenceStep(1, 600, 1, is_generation=True, is_dummy=True)]).generation_rows[0]
    assert len(row) == 10 and row.min() >= 0
    with pytest.raises(NibbleError, match="request 2: page 9 of 10 is not there in fp16"):
        planner.plan([SequenceStep(2, 601, 1, is_generation=True)])
