"""One forward pass of the engine: which tokens of which sequences, and where their pages lie.

The tokens of all sequences stand in one row, one span after the other:

    row     | sequence A: 1 token | sequence B: 200 tokens of its prompt | sequence C: 1 token |
    spans     A.start = 0           B.start = 1                            C.start = 201
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from nibble.formats import PAGE_TOKENS
from nibble.runtime.decode_batch import DecodeBatch
from nibble.runtime.sequence import Sequence
from nibble.visibility import PagePolicy, may_attend


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence in a step: row positions [start, start + length), sequence positions from `context`.

    Its pages are looked up when they are asked for, which must be before the step is committed. A GPU's runner keeps
    tables of its own and never asks.
    """

    sequence: Sequence
    start: int
    length: int
    policy: PagePolicy

    @cached_property
    def open_ids(self) -> torch.Tensor:
        """int64: pages of the open pool that the span's queries read, in sequence order."""
        return torch.tensor([self.sequence.open_pages[page] for page in self._open_pages])

    @cached_property
    def sealed_ids(self) -> torch.Tensor:
        """int64: pages of the sealed pool that they read, in sequence order."""
        sealed = self.sequence.sealed_pages
        return torch.tensor([sealed[page] for page in sorted(sealed)], dtype=torch.long)

    @cached_property
    def _open_pages(self) -> list[int]:
        last_page = (self.context + self.length - 1) // PAGE_TOKENS
        return sorted(page for page in self.sequence.open_pages if page <= last_page)

    @property
    def context(self) -> int:
        """Tokens of the sequence that were in the cache before this step."""
        return self.sequence.num_computed

    @cached_property
    def key_positions(self) -> torch.Tensor:
        """Positions of the keys that are read: the sealed pages' tokens, then the open pages' tokens.

        The unwritten rest of the last open page is left out.
        """
        sealed = torch.arange(len(self.sealed_ids) * PAGE_TOKENS) + self.policy.sink_pages * PAGE_TOKENS
        opened = (torch.tensor(self._open_pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
        written = self.context + self.length
        return torch.cat((sealed, opened[opened < written]))

    def mask(self, sliding_window: int | None, repeat: int) -> torch.Tensor | None:
        """Boolean [repeat * length, keys]: which read keys each query sees, `repeat` times over; None when all of them.

        A page that is read in both forms is seen once by each query.
        """
        if sliding_window not in self._masks:
            queries = torch.arange(self.context, self.context + self.length)
            is_open = torch.arange(len(self.key_positions)) >= len(self.sealed_ids) * PAGE_TOKENS
            right_form = self.policy.sees_fp16(queries, self.key_positions) == is_open[None, :]
            mask = right_form & may_attend(queries, self.key_positions, sliding_window)
            self._masks[sliding_window] = None if mask.all() else mask.repeat(repeat, 1)
        return self._masks[sliding_window]

    @cached_property
    def _masks(self) -> dict[int | None, torch.Tensor | None]:
        return {}


@dataclass(frozen=True)
class Step:
    """A forward pass. seal_pairs: (open page, sealed page) pairs to seal once the new tokens are in."""

    spans: tuple[Span, ...]
    seal_pairs: tuple[tuple[int, int], ...]

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """int64 [1, tokens]"""
        tokens = [t for span in self.spans for t in span.sequence.tokens[span.context : span.context + span.length]]
        return torch.tensor([tokens])

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [1, tokens]: each token's position in its sequence."""
        return torch.cat([torch.arange(span.context, span.context + span.length) for span in self.spans])[None]

    @cached_property
    def open_page_of_token(self) -> torch.Tensor:
        """int64 [tokens]: the open page that each new token is written to."""
        pages = [span.sequence.open_pages[int(at) // PAGE_TOKENS] for span in self.spans for at in self._own(span)]
        return torch.tensor(pages)

    @cached_property
    def decode_batch(self) -> DecodeBatch:
        """The spans of one token, together."""
        return DecodeBatch.of([span for span in self.spans if span.length == 1])

    @cached_property
    def prompt_spans(self) -> list[Span]:
        """The spans of more than one token."""
        return [span for span in self.spans if span.length > 1]

    @cached_property
    def seal_from(self) -> torch.Tensor:
        return torch.tensor([source for source, _ in self.seal_pairs], dtype=torch.long)

    @cached_property
    def seal_to(self) -> torch.Tensor:
        return torch.tensor([target for _, target in self.seal_pairs], dtype=torch.long)

    def last_rows(self) -> torch.Tensor:
        """int64 [spans]: the row of each span's last token."""
        return torch.tensor([span.start + span.length - 1 for span in self.spans])

    def _own(self, span: Span) -> range:
        return range(span.context, span.context + span.length)
