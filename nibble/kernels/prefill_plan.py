"""The plan of a prefill step: which query tiles there are, heaviest first, and which pages the scratch must hold.

It is made once per step on the host from lengths alone and is shared by all layers, so that no kernel searches for its
work and nothing is read back from the device:

    tiles         [tiles, 2]          sequence, page of queries (64 tokens); the most keys first
    page_pairs    [pairs, 2]          sequence, even page: the same pages two by two, for kernels that take two at once
    sequences     [sequences, 8]      first query row, position of the first query, length, far base, tail page,
                                      tail slot, 0, 0
    scratch_pages [scratch pages, 4]  sequence, page, tokens of a tail page (0: a sealed page to dequantize), 0

The scratch holds, for each sequence, the pages that some query of the chunk sees quantized (page p of sequence b lies
in slot `far base` + p), and a copy of its last page when that is partly filled, with zeros behind the last token:
memory that nothing wrote may hold NaN, and zero probabilities do not silence it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.visibility import PagePolicy

SEQUENCE_COLUMNS = 8


@dataclass(frozen=True)
class PrefillPlan:
    """Tables for the kernels, int32 on the device, and what the host must know of them."""

    tiles: torch.Tensor
    page_pairs: torch.Tensor
    sequences: torch.Tensor
    scratch_pages: torch.Tensor
    policy: PagePolicy
    sliding_window: int | None
    num_queries: int  # tokens
    max_pages: int  # pages of the longest sequence

    @property
    def num_sequences(self) -> int:
        return self.sequences.shape[0]


@dataclass(frozen=True)
class _Chunk:
    """The new queries of one sequence: the last `query_len` positions before `seq_len`."""

    query_len: int
    seq_len: int

    @property
    def first_position(self) -> int:
        return self.seq_len - self.query_len

    @property
    def query_pages(self) -> range:
        return (
            range(self.first_position // PAGE_TOKENS, -(-self.seq_len // PAGE_TOKENS)) if self.query_len else range(0)
        )

    @property
    def tail_tokens(self) -> int:
        """Tokens in the last page when it is partly filled, else 0."""
        return self.seq_len % PAGE_TOKENS if self.query_len else 0

    def far_pages(self, policy: PagePolicy, sliding_window: int | None) -> range:
        """The pages that some query of the chunk sees quantized."""
        if not self.query_len:
            return range(0)
        last = policy.first_recent_page(self.seq_len - 1)
        first = 0 if sliding_window is None else max(0, self.first_position - sliding_window + 1) // PAGE_TOKENS
        return range(max(policy.sink_pages, first), last)


def plan_prefill(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    policy: PagePolicy,
    *,
    sliding_window: int | None = None,
    device: torch.device | str = "cuda",
) -> PrefillPlan:
    """Plan the attention of one chunk for each sequence.

    query_lens, seq_lens: tokens, one entry a sequence; the sequence length includes the chunk. A chunk may be empty.
    Raises NibbleError for lengths that do not fit each other.
    """
    _check_lengths(query_lens, seq_lens, sliding_window)
    chunks = [_Chunk(int(query_len), int(seq_len)) for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
    tiles = [(index, page) for index, chunk in enumerate(chunks) for page in chunk.query_pages]
    tiles.sort(key=lambda tile: -tile[1])
    page_pairs = list(dict.fromkeys((index, page // 2 * 2) for index, page in tiles))
    sequences, scratch_pages = _tabulate(chunks, policy, sliding_window)
    return PrefillPlan(
        tiles=_table(tiles, 2, device),
        page_pairs=_table(page_pairs, 2, device),
        sequences=_table(sequences, SEQUENCE_COLUMNS, device),
        scratch_pages=_table(scratch_pages, 4, device),
        policy=policy,
        sliding_window=sliding_window,
        num_queries=sum(chunk.query_len for chunk in chunks),
        max_pages=max((-(-chunk.seq_len // PAGE_TOKENS) for chunk in chunks), default=0),
    )


def _tabulate(
    chunks: list[_Chunk], policy: PagePolicy, sliding_window: int | None
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    sequences: list[tuple[int, ...]] = []
    scratch_pages: list[tuple[int, ...]] = []
    query_row = 0
    for index, chunk in enumerate(chunks):
        far = chunk.far_pages(policy, sliding_window)
        far_base = len(scratch_pages) - far.start
        scratch_pages += [(index, page, 0, 0) for page in far]
        tail_page, tail_slot = -1, 0
        if chunk.tail_tokens:
            tail_page, tail_slot = chunk.seq_len // PAGE_TOKENS, len(scratch_pages)
            scratch_pages.append((index, tail_page, chunk.tail_tokens, 0))
        sequences.append((query_row, chunk.first_position, chunk.seq_len, far_base, tail_page, tail_slot, 0, 0))
        query_row += chunk.query_len
    return sequences, scratch_pages


def _table(rows: Sequence[tuple[int, ...]], columns: int, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, columns).to(device, non_blocking=True)


def _check_lengths(query_lens: Sequence[int], seq_lens: Sequence[int], sliding_window: int | None) -> None:
    if len(query_lens) != len(seq_lens):
        raise NibbleError(
            f"prefill: got {len(query_lens)} query lengths and {len(seq_lens)} sequence lengths; give one of each for "
            "every sequence"
        )
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not 0 <= query_len <= seq_len:
            raise NibbleError(
                f"prefill: sequence {index} has {query_len} queries and {seq_len} tokens; allowed 0 to {seq_len} "
                "queries, the sequence length includes the chunk"
            )
    if sliding_window is not None and sliding_window < 1:
        raise NibbleError(f"sliding window: got {sliding_window}, allowed 1 or more, or None")
