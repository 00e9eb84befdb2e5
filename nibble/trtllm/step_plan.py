"""What one step of TensorRT-LLM's executor means for our pages: where tokens go, what is sealed, who reads which page.

Made on the host from what the executor says of each sequence, before anything is launched, so that kernels find all of
it in tensors and a captured graph serves any lengths.

A page is sealed in the step that fills it, sinks included: then every full block that TensorRT-LLM keeps for later
requests holds its sealed bytes.

Inside a page nothing of a generating sequence changes but the place of its token. So its row of the block table is made
when a page begins and kept until the next one does: a step costs the host time for each sequence, not for each page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.trtllm.page_ledger import PageLedger, Row


@dataclass(frozen=True)
class SequenceStep:
    """One sequence in a step. cached: tokens before it; new: tokens of it.

    is_generation: past its prompt, one token a step. is_dummy: made by TensorRT-LLM to pad a batch or to warm up; what
    its pages hold is never asked for.
    """

    request: int
    cached: int
    new: int
    is_generation: bool = False
    is_dummy: bool = False

    @property
    def length(self) -> int:
        return self.cached + self.new

    @property
    def pages(self) -> int:
        return -(-self.length // PAGE_TOKENS)


@dataclass
class StepPlan:
    """slots: of each token, slot * 64 + place, -1 for "already there". seal: (slot, sealed page) pairs.

    Rows have a number for each page of a sequence. Of chunks of prompts: the slot and the sealed page, -1 where there
    is none. Of generating sequences: the slot where the newest token sees fp16, else the sealed page.
    """

    slots: list[int] = field(default_factory=list)
    seal: list[tuple[int, int]] = field(default_factory=list)
    open_rows: list[Row] = field(default_factory=list)
    sealed_rows: list[Row] = field(default_factory=list)
    generation_rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class _KeptRow:
    """A generating sequence's row while its newest token is in `page`. block, slot: of that page."""

    page: int
    block: int
    slot: int
    row: Row


class StepPlanner:
    """Plans steps over one ledger. blocks_of: for some requests, the block ids of each in order."""

    def __init__(self, ledger: PageLedger, blocks_of: Callable[[list[int]], Sequence[Sequence[int]]]) -> None:
        self._ledger, self._blocks_of = ledger, blocks_of
        self._kept: dict[int, _KeptRow] = {}

    def plan(self, sequences: Sequence[SequenceStep]) -> StepPlan:
        """The plan of a step; takes slots from the ledger. NibbleError when a page that must be there is not."""
        plan, fresh = StepPlan(), [sequence for sequence in sequences if not self._is_kept(sequence)]
        requests = [sequence.request for sequence in fresh]
        blocks = dict(zip(requests, self._blocks_of(requests), strict=True)) if fresh else {}
        for sequence in sequences:
            if sequence.request in blocks:
                self._plan_sequence(sequence, blocks[sequence.request][: sequence.pages], plan)
            else:
                self._continue_page(sequence, plan)
        for sequence in fresh:  # what only this step needed may go in the next
            first = sequence.length // PAGE_TOKENS
            near = _near_pages(self._ledger, first, sequence.pages)
            self._ledger.pin(sequence.request, (blocks[sequence.request][page] for page in near))
        return plan

    def release(self, request: int) -> None:
        """The request is gone; its id may come again."""
        self._kept.pop(request, None)
        self._ledger.release(request)

    def _is_kept(self, sequence: SequenceStep) -> bool:
        kept = self._kept.get(sequence.request)
        return kept is not None and sequence.is_generation and sequence.cached // PAGE_TOKENS == kept.page

    def _continue_page(self, sequence: SequenceStep, plan: StepPlan) -> None:
        """One more token in the page of the last one."""
        kept, place = self._kept[sequence.request], sequence.cached % PAGE_TOKENS
        plan.slots.append(kept.slot * PAGE_TOKENS + place)
        plan.generation_rows.append(kept.row)
        if place == PAGE_TOKENS - 1:
            _seal(self._ledger, kept.block, kept.slot, plan)

    def _plan_sequence(self, sequence: SequenceStep, blocks: Sequence[int], plan: StepPlan) -> None:
        self._kept.pop(sequence.request, None)
        ledger, first = self._ledger, sequence.cached // PAGE_TOKENS
        near = _near_pages(ledger, first, sequence.pages)
        ledger.pin(sequence.request, (blocks[page] for page in near))
        for page in range(first, sequence.pages):
            _write_page(ledger, sequence, blocks[page], page, plan)
        slots = [_find(ledger, sequence, blocks[page], page) for page in near]
        ids = np.array(blocks, dtype=np.int64)
        pages, is_sealed = ledger.pages_of(ids), ledger.are_sealed(ids)
        if not sequence.is_generation:
            opened = np.full_like(pages, -1)
            opened[near] = slots
            plan.open_rows.append(opened)
            plan.sealed_rows.append(np.where(is_sealed, pages, -1))
            return
        pages[near] = slots
        plan.generation_rows.append(pages)
        if sequence.is_dummy:
            return
        is_sealed[near] = True
        _require_sealed(is_sealed, sequence)
        self._kept[sequence.request] = _KeptRow(first, blocks[first], slots[-1], pages)


def _near_pages(ledger: PageLedger, first: int, pages: int) -> list[int]:
    """Pages of `pages` that tokens of page `first` and later ones see in fp16, in order."""
    sinks, recent = ledger.policy.sink_pages, ledger.policy.recent_pages
    return sorted({*range(min(sinks, pages)), *range(max(first - recent, 0), pages)})


def _write_page(ledger: PageLedger, sequence: SequenceStep, block: int, page: int, plan: StepPlan) -> None:
    """Slots of the page's new tokens, and its sealing when they fill it."""
    start = page * PAGE_TOKENS
    slot, is_written = ledger.find(block), True
    if start >= sequence.cached:
        if sequence.is_generation or sequence.is_dummy:  # a block that was added for this token
            ledger.mark_fresh([block])
            slot = None
        is_written = slot is None  # else another request of the same prefix has it already
    if slot is None and (start >= sequence.cached or sequence.is_dummy):
        slot = ledger.take(block)
    slot = _require(slot, sequence, page)
    first, last = max(start, sequence.cached) - start, min(sequence.length - start, PAGE_TOKENS)
    places = range(slot * PAGE_TOKENS + first, slot * PAGE_TOKENS + last)
    plan.slots.extend(places if is_written else [-1] * len(places))
    if last == PAGE_TOKENS:
        _seal(ledger, block, slot, plan)


def _seal(ledger: PageLedger, block: int, slot: int, plan: StepPlan) -> None:
    if not ledger.is_sealed(block):
        plan.seal.append((slot, ledger.page_of(block)))
        ledger.mark_sealed(block)


def _find(ledger: PageLedger, sequence: SequenceStep, block: int, page: int) -> int:
    """The slot of a page that the step sees in fp16."""
    slot = ledger.find(block)
    return ledger.take(block) if slot is None and sequence.is_dummy else _require(slot, sequence, page)


def _require(slot: int | None, sequence: SequenceStep, page: int) -> int:
    if slot is None:
        raise NibbleError(
            f"request {sequence.request}: page {page} of {sequence.pages} is not there in fp16, though its next token "
            "sees it; TensorRT-LLM reused or moved a block without its KV-cache manager (please report it)"
        )
    return slot


def _require_sealed(is_there: np.ndarray, sequence: SequenceStep) -> None:
    if not is_there.all():
        raise NibbleError(
            f"request {sequence.request}: page {int(np.argmin(is_there))} of {sequence.pages} was never sealed, though "
            "its next token reads it; TensorRT-LLM gave a block whose tokens were not computed here (please report it)"
        )
