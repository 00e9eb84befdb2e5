"""How many sequences a pool of fixed bytes holds, counted by filling the engine's own allocator until it refuses.

The sealed pool is really allocated, and sequences take pages from it as they do when running: chunk after chunk, until
the next chunk has no page. What is counted is what whole sequences hold, sealed tokens and the fp16 pages beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.runtime import SamplingParams
from nibble.runtime.cache import CacheSpec, CacheStorage, PoolSizes
from nibble.runtime.page_pool import PagePool
from nibble.runtime.page_table import PageTable
from nibble.runtime.sequence import Sequence
from nibble.runtime.text import TextStream

CHUNK_TOKENS = 256


@dataclass(frozen=True)
class PoolCapacity:
    """What a sealed pool of `pool_bytes` held: whole sequences, their sealed tokens, bytes of both kinds of page."""

    pool_bytes: int
    sequences: int
    sealed_tokens: int
    sealed_bytes: int
    open_bytes: int

    @property
    def bytes_per_sequence(self) -> float:
        """Sealed and open pages of one sequence."""
        return (self.sealed_bytes + self.open_bytes) / self.sequences


def fill_pool(spec: CacheSpec, pool_bytes: int, tokens_per_sequence: int) -> PoolCapacity:
    """Fill a sealed pool of `pool_bytes` with sequences; NibbleError when not even one fits."""
    sealed_pages = pool_bytes // spec.sealed_page_bytes
    open_pages = sealed_pages + tokens_per_sequence // PAGE_TOKENS + 1  # never the limit here
    storage = CacheStorage(spec, PoolSizes(open_pages=1, sealed_pages=sealed_pages))
    assert sum(layer.nbytes for layer in storage.sealed) <= pool_bytes
    table = PageTable(PagePool(open_pages), PagePool(sealed_pages), spec.policy)
    held: list[Sequence] = []
    for number in count():
        sequence = Sequence(str(number), [number] * tokens_per_sequence, SamplingParams(), TextStream(lambda ids: ""))
        if not _run_to_its_end(table, sequence):
            break
        held.append(sequence)
    if not held:
        raise NibbleError(f"pool: got {pool_bytes} bytes, allowed room for a sequence of {tokens_per_sequence} tokens")
    return _counted(spec, pool_bytes, held)


def _run_to_its_end(table: PageTable, sequence: Sequence) -> bool:
    """Take the sequence's pages chunk by chunk; False, and every page back, when the pool has no more."""
    while sequence.num_pending:
        length = min(CHUNK_TOKENS, sequence.num_pending)
        if not table.can_reserve(sequence, length):
            table.release_all(sequence)
            return False
        table.reserve(sequence, length)
        table.commit(sequence, length)
    return True


def _counted(spec: CacheSpec, pool_bytes: int, held: list[Sequence]) -> PoolCapacity:
    sealed = sum(len(sequence.sealed_pages) for sequence in held)
    opened = sum(len(sequence.open_pages) for sequence in held)
    return PoolCapacity(
        pool_bytes=pool_bytes,
        sequences=len(held),
        sealed_tokens=sealed * PAGE_TOKENS,
        sealed_bytes=sealed * spec.sealed_page_bytes,
        open_bytes=opened * spec.open_page_bytes,
    )
