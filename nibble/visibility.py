"""The one rule that says which cached tokens a query sees in fp16 and which it sees quantized.

    query i sees key j in fp16  <=>  page(j) is a sink page, or page(i) - page(j) <= recent pages

It depends on positions alone, so that chunk sizes, batches and scheduling can't change an answer. Seen from a running
sequence whose next token is at position n, in page c = page(n):

    pages   0 .. sinks-1 | sinks ..... c-recent-1 | c-recent .. c-1 | c
            sink, fp16   | sealed                 | recent, fp16    | open, fp16
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS


@dataclass(frozen=True)
class PagePolicy:
    """How many pages stay in fp16 at the start of a sequence (sinks) and behind its open page (recent)."""

    sink_pages: int = 1
    recent_pages: int = 1

    def __post_init__(self) -> None:
        for name in ("sink_pages", "recent_pages"):
            if not 0 <= getattr(self, name) <= 16:
                raise NibbleError(f"{name}: got {getattr(self, name)}, allowed 0 to 16")

    def first_recent_page(self, position: int) -> int:
        """The first page behind the sinks that a query at `position` sees in fp16; pages [sinks, this) are sealed."""
        return max(self.sink_pages, position // PAGE_TOKENS - self.recent_pages)

    def sees_fp16(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Boolean [queries, keys]: True where the key is seen in fp16. Positions are int64 vectors."""
        query_pages = (query_positions // PAGE_TOKENS)[:, None]
        key_pages = (key_positions // PAGE_TOKENS)[None, :]
        return (key_pages < self.sink_pages) | (query_pages - key_pages <= self.recent_pages)


def may_attend(
    query_positions: torch.Tensor, key_positions: torch.Tensor, sliding_window: int | None = None
) -> torch.Tensor:
    """Boolean [queries, keys]: causal, and inside the sliding window when the layer has one.

    A window of w lets a query see itself and the w - 1 tokens before it (as in transformers).
    """
    distance = query_positions[:, None] - key_positions[None, :]
    allowed = distance >= 0
    return allowed if sliding_window is None else allowed & (distance < sliding_window)
