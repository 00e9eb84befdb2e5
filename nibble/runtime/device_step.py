"""What a GPU must know of a step: tensors made once a step and shared by all layers.

A decode step has fixed buffers, so that a captured graph reads the same addresses whatever the batch:

    rows         int32 [5, batch]            token (-1: the device has it), position, slot, place in a page, length
    tables       int32 [slots + 1, pages]    the page of each slot's sequence, in the pool that its position says
    last_tokens  int64 [slots + 1]           the newest token of each slot
    seals        int32 [2, slots]            open pages to seal, and where to; -1: nothing

A running sequence keeps its slot, so only what changes of its table is sent. The last slot belongs to padded rows,
which have length 0 and write nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import torch

from nibble.formats import PAGE_TOKENS
from nibble.kernels.prefill_plan import PrefillPlan, plan_prefill
from nibble.runtime.sequence import Sequence
from nibble.runtime.step import Span
from nibble.visibility import PagePolicy

NOWHERE = -1
SMALL_BUCKETS = (1, 2, 4, 8)


def batch_buckets(max_running: int) -> list[int]:
    """The padded batch sizes of decode graphs: powers of two, then eights, then steps of an eighth."""
    buckets = list(SMALL_BUCKETS)
    while buckets[-1] < max_running:
        buckets.append(buckets[-1] + max(8, buckets[-1] // 64 * 8))
    return [size for size in buckets if size < max_running] + [max_running]


def pages_to_seal(sequence: Sequence) -> list[tuple[int, int]]:
    """(open page, sealed page) of the sequence's pages that are to be sealed in the step it is reserved for."""
    held = sequence.open_pages
    return [(held[page], sequence.sealed_pages[page]) for page in held if page in sequence.sealed_pages]


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of host values, copied without waiting for the device."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def fill(target: torch.Tensor, values: Any) -> None:
    """Overwrite a tensor with host values, without waiting for the device."""
    host = torch.tensor(values, dtype=target.dtype)
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)


@dataclass(frozen=True)
class DecodeStep:
    """One token of each sequence of a padded batch; tensors as the module says, cut to the batch.

    token_ids int64, positions int32, slots int64, append_slots int32, seq_lens int32: [batch]; block_table: int32
    [batch, pages].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    append_slots: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class DecodeBuffers:
    """The fixed buffers of decode steps, and what the host remembers of them."""

    def __init__(self, max_running: int, max_pages: int, device: torch.device) -> None:
        self.padding_slot = max_running
        self.max_pages = max_pages
        self.device = device
        self.tables = torch.zeros(max_running + 1, max_pages, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_running + 1, dtype=torch.int64, device=device)
        self.seals = torch.full((2, max_running), NOWHERE, dtype=torch.int32, device=device)
        self._rows = torch.zeros(5 * max_running, dtype=torch.int32, device=device)
        self._known: dict[int, tuple[Sequence, int, int]] = {}  # slot -> sequence, which admission, next position

    def rows(self, batch: int) -> torch.Tensor:
        """The rows of a padded batch, int32 [5, batch]."""
        return self._rows[: 5 * batch].view(5, batch)

    def keep(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """The newest token of each slot, where the next step looks for it; int64 [rows] both, on the device."""
        self.last_tokens.index_copy_(0, slots, tokens)

    def step(self, batch: int) -> DecodeStep:
        """The step in the buffers; runs on the device, so it belongs into the graph."""
        known, positions, slots, places, lengths = self.rows(batch).unbind(0)
        slots = slots.long()
        tokens = torch.where(known < 0, self.last_tokens[slots], known.long())
        return DecodeStep(tokens, positions, slots, places, lengths, self.tables[slots])

    def write(self, sequences: Rows[Sequence], batch: int) -> bool:
        """Describe the next token of each sequence, padded to `batch`; True when pages are to be sealed first."""
        padding = (0, 0, self.padding_slot, NOWHERE, 0)
        rows = [_describe(sequence) for sequence in sequences] + [padding] * (batch - len(sequences))
        fill(self.rows(batch), list(zip(*rows, strict=True)))
        self._update_tables(sequences)
        beginning = [sequence for sequence in sequences if sequence.num_computed % PAGE_TOKENS == 0]
        pairs = [pair for sequence in beginning for pair in pages_to_seal(sequence)]
        if pairs:
            filled = pairs + [(NOWHERE, NOWHERE)] * (self.seals.shape[1] - len(pairs))
            fill(self.seals, list(zip(*filled, strict=True)))
        return bool(pairs)

    def _update_tables(self, sequences: Rows[Sequence]) -> None:
        places: list[int] = []
        pages: list[int] = []
        for sequence in sequences:
            position = sequence.num_computed
            table = sequence.slot * self.max_pages
            if self._known.get(sequence.slot) != (sequence, sequence.num_admissions, position):
                entries = list(enumerate(_whole_table(sequence)))
            elif position % PAGE_TOKENS == 0:
                entries = _changed_entries(sequence)
            else:
                entries = []
            places += [table + page for page, _ in entries]
            pages += [place for _, place in entries]
            self._known[sequence.slot] = (sequence, sequence.num_admissions, position + 1)
        if places:
            changes = to_device([places, pages], torch.int32, self.device)
            self.tables.view(-1).index_copy_(0, changes[0].long(), changes[1])


def _describe(sequence: Sequence) -> tuple[int, int, int, int, int]:
    position = sequence.num_computed
    token = sequence.tokens[position] if position < len(sequence.tokens) else NOWHERE
    place = sequence.open_pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
    return token, position, sequence.slot, place, position + 1


def _whole_table(sequence: Sequence) -> list[int]:
    """Every page of the sequence up to its next token's; sealed ones are all the far ones."""
    last = sequence.num_computed // PAGE_TOKENS
    sealed, opened = sequence.sealed_pages, sequence.open_pages
    return [sealed[page] if page in sealed else opened[page] for page in range(last + 1)]


def _changed_entries(sequence: Sequence) -> list[tuple[int, int]]:
    """What a new page changes: itself, and the pages that it makes far."""
    page = sequence.num_computed // PAGE_TOKENS
    far = [(p, sequence.sealed_pages[p]) for p in sequence.open_pages if p in sequence.sealed_pages]
    return [(page, sequence.open_pages[page]), *far]


@dataclass(frozen=True)
class PrefillStep:
    """Chunks of prompts, one after another.

    token_ids int64, positions int32, append_slots int32: [tokens]; open_table, sealed_table: int32 [sequences, pages],
    -1 where there is none; seal_open, seal_sealed: int32 [pages to seal]; query_lens, seq_lens: of each sequence.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    append_slots: torch.Tensor
    open_table: torch.Tensor
    sealed_table: torch.Tensor
    seal_open: torch.Tensor
    seal_sealed: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    policy: PagePolicy
    _plans: dict[int | None, PrefillPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Rows[Span], policy: PagePolicy, device: torch.device) -> PrefillStep:
        """The step of these spans; their pages are reserved."""
        parts = [(span.sequence, span.sequence.num_computed, span.length) for span in spans]
        tokens = [token for s, start, n in parts for token in s.tokens[start : start + n]]
        positions = [position for _, start, n in parts for position in range(start, start + n)]
        places = [
            s.open_pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
            for s, start, n in parts
            for at in range(start, start + n)
        ]
        pages = max(-(-(start + n) // PAGE_TOKENS) for _, start, n in parts)
        tables = [[[held.get(page, NOWHERE) for page in range(pages)] for held in (s.open_pages, s.sealed_pages)]
                  for s, _, _ in parts]  # fmt: skip
        both = to_device(tables, torch.int32, device)
        pairs = [pair for s, _, _ in parts for pair in pages_to_seal(s)]
        seals = to_device(list(zip(*pairs, strict=True)) if pairs else [[], []], torch.int32, device)
        at, slots = to_device([positions, places], torch.int32, device)
        opened, sealed = both.unbind(1)
        return cls(
            token_ids=to_device(tokens, torch.int64, device),
            positions=at,
            append_slots=slots,
            open_table=opened.contiguous(),
            sealed_table=sealed.contiguous(),
            seal_open=seals[0],
            seal_sealed=seals[1],
            query_lens=[n for _, _, n in parts],
            seq_lens=[start + n for _, start, n in parts],
            policy=policy,
        )

    def plan(self, sliding_window: int | None) -> PrefillPlan:
        """The plan for layers with that window, made once."""
        if sliding_window not in self._plans:
            device = self.token_ids.device
            plan = plan_prefill(
                self.query_lens, self.seq_lens, self.policy, sliding_window=sliding_window, device=device
            )
            self._plans[sliding_window] = plan
        return self._plans[sliding_window]
