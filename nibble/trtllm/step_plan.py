"""What one step of TensorRT-LLM's executor means for our pages: where tokens go, what is sealed, who reads which page.

Made on the host from what the executor says of each sequence, before anything is launched, so that kernels find all of
it in tensors and a captured graph serves any lengths.

A page is sealed in the step that fills it, sinks included: then every full block that TensorRT-LLM keeps for later
requests holds its sealed bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.trtllm.page_ledger import PageLedger


@dataclass(frozen=True)
class SequenceStep:
    """One sequence in a step. cached: tokens before it; new: tokens of it; blocks: ids in order, for all of them.

    is_generation: past its prompt, one token a step. is_dummy: made by TensorRT-LLM to pad a batch or to warm up; what
    its pages hold is never asked for.
    """

    request: int
    cached: int
    new: int
    blocks: Sequence[int]
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

    open_rows, sealed_rows: of each sequence, by page, the slot and the sealed page; -1 where there is none.
    """

    slots: list[int] = field(default_factory=list)
    seal: list[tuple[int, int]] = field(default_factory=list)
    open_rows: list[list[int]] = field(default_factory=list)
    sealed_rows: list[list[int]] = field(default_factory=list)


def plan_step(ledger: PageLedger, sequences: Sequence[SequenceStep]) -> StepPlan:
    """The plan of a step; takes slots from the ledger. Raises NibbleError when a page that must be there is not."""
    plan = StepPlan()
    for sequence in sequences:
        _plan_sequence(ledger, sequence, plan)
    return plan


def mixed_row(plan: StepPlan, index: int, length: int, ledger: PageLedger) -> list[int]:
    """A row of decode's one block table: of each page the slot where its newest token sees fp16, else the block."""
    first_recent = ledger.policy.first_recent_page(length - 1)
    opened, sealed = plan.open_rows[index], plan.sealed_rows[index]
    far = range(ledger.policy.sink_pages, first_recent)
    return [sealed[page] if page in far else opened[page] for page in range(len(opened))]


def _plan_sequence(ledger: PageLedger, sequence: SequenceStep, plan: StepPlan) -> None:
    first, policy = sequence.cached // PAGE_TOKENS, ledger.policy
    near = {*range(min(policy.sink_pages, sequence.pages)), *range(max(first - policy.recent_pages, 0), sequence.pages)}
    ledger.pin(sequence.request, (sequence.blocks[page] for page in near))
    for page in range(first, sequence.pages):
        _write_page(ledger, sequence, page, plan)
    opened = [-1] * sequence.pages
    for page in sorted(near):
        slot = ledger.find(sequence.blocks[page])
        opened[page] = (
            ledger.take(sequence.blocks[page]) if slot is None and sequence.is_dummy else _require(slot, sequence, page)
        )
    plan.open_rows.append(opened)
    blocks = sequence.blocks[: sequence.pages]
    plan.sealed_rows.append([ledger.page_of(block) if ledger.is_sealed(block) else -1 for block in blocks])


def _write_page(ledger: PageLedger, sequence: SequenceStep, page: int, plan: StepPlan) -> None:
    """Slots of the page's new tokens, and its sealing when they fill it."""
    block, start = sequence.blocks[page], page * PAGE_TOKENS
    slot, is_written = ledger.find(block), True
    if start >= sequence.cached:
        if sequence.is_generation or sequence.is_dummy:  # a block that was added for this token
            ledger.mark_fresh([block])
            slot = None
        is_written = slot is None  # else another request of the same prefix has it already
    if slot is None and (start >= sequence.cached or sequence.is_dummy):
        slot = ledger.take(block)
    slot = _require(slot, sequence, page)
    for position in range(max(start, sequence.cached), min(start + PAGE_TOKENS, sequence.length)):
        plan.slots.append(slot * PAGE_TOKENS + position - start if is_written else -1)
    if start + PAGE_TOKENS <= sequence.length and not ledger.is_sealed(block):
        plan.seal.append((slot, ledger.page_of(block)))
        ledger.mark_sealed(block)


def _require(slot: int | None, sequence: SequenceStep, page: int) -> int:
    if slot is None:
        raise NibbleError(
            f"request {sequence.request}: page {page} of {sequence.pages} is not there in fp16, though its next token "
            "sees it; TensorRT-LLM reused or moved a block without its KV-cache manager (please report it)"
        )
    return slot
