"""The decoding sequences of a step, page by page: one query each, and every page in the one form that the query sees.

Scores and weights of all of them lie in one grid with a place for each page of the longest sequence:

    grid [queries * pages, kv_heads, group, 64]      place = query * pages + page in the sequence
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from nibble.formats import PAGE_TOKENS

if TYPE_CHECKING:
    from nibble.runtime.step import Span


@dataclass(frozen=True)
class PageReads:
    """Pages of one pool, int64 vectors of one length. ids: in the pool; queries: who reads it; places: in the grid."""

    ids: torch.Tensor
    queries: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, reads: Iterable[tuple[int, int, int]], pages: int) -> PageReads:
        """From (pool page, query, page in the sequence)."""
        ids, queries, numbers = torch.tensor(list(reads), dtype=torch.long).reshape(-1, 3).unbind(1)
        return cls(ids, queries, queries * pages + numbers)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class DecodeBatch:
    """rows: where the queries stand in the step, int64 [queries]; positions: of each in its sequence, int64 [queries].

    pages: of the longest sequence.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    pages: int
    sealed: PageReads
    open: PageReads

    @classmethod
    def of(cls, spans: list[Span]) -> DecodeBatch:
        """The batch of spans of one token each."""
        positions = [span.context for span in spans]
        pages = max(positions, default=-1) // PAGE_TOKENS + 1
        sealed, opened = [], []
        for query, span in enumerate(spans):
            for page in range(span.context // PAGE_TOKENS + 1):
                if span.policy.sink_pages <= page < span.policy.first_recent_page(span.context):
                    sealed.append((span.sequence.sealed_pages[page], query, page))
                else:
                    opened.append((span.sequence.open_pages[page], query, page))
        return cls(
            torch.tensor([span.start for span in spans], dtype=torch.long),
            torch.tensor(positions, dtype=torch.long),
            pages,
            PageReads.of(sealed, pages),
            PageReads.of(opened, pages),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def hidden(self, sliding_window: int | None) -> torch.Tensor:
        """Boolean [queries, pages, 1, 1, 64]: the keys that a query does not see."""
        if sliding_window not in self._hidden:
            distance = self.positions[:, None] - torch.arange(self.pages * PAGE_TOKENS)
            hidden = distance < 0
            if sliding_window is not None:
                hidden |= distance >= sliding_window
            self._hidden[sliding_window] = hidden.unflatten(1, (self.pages, 1, 1, PAGE_TOKENS))
        return self._hidden[sliding_window]

    @cached_property
    def unwritten(self) -> torch.Tensor:
        """Boolean [open pages, 1, 64, 1]: the tokens of the open pages that are yet to come."""
        return self.hidden(None).flatten(0, 1)[self.open.places].mT

    @cached_property
    def _hidden(self) -> dict[int | None, torch.Tensor]:
        return {}
