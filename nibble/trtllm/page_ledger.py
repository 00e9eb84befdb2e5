"""Which fp16 copy belongs to which block of TensorRT-LLM's pool, and which blocks hold a sealed page.

TensorRT-LLM hands out blocks, matches prefixes and evicts; it knows block ids alone. A block is a sealed page of ours.
Sink, recent and open pages are also needed in fp16, so each has a slot in a small pool beside it. A slot stays with its
block after the sequence is gone, until it is needed for another, so that a prefix hit finds the fp16 pages it must see.

    block 17  sealed bytes in TensorRT-LLM's pool      slot 4 of the fp16 pool, while it is there
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nibble.errors import NibbleError
from nibble.visibility import PagePolicy

Row = NDArray[np.int32]  # a number for each page of a sequence
Blocks = NDArray[np.int64]  # ids of TensorRT-LLM's blocks


class PageLedger:
    """num_slots: fp16 pages. policy: which pages a sequence sees in fp16.

    pages_per_block: how far apart the pages of one layer are in the pool of all layers.
    """

    def __init__(self, num_slots: int, policy: PagePolicy, pages_per_block: int = 1) -> None:
        self.policy = policy
        self._pages_per_block = pages_per_block
        self._free = list(range(num_slots))
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # by block, the longest unused first
        self._sealed = np.zeros(0, dtype=bool)  # by block
        self._pinned: dict[int, frozenset[int]] = {}  # by request
        self._pins: Counter[int] = Counter()  # by block

    def find(self, block: int) -> int | None:
        """The slot with a block's fp16 copy."""
        return self._slot_of.get(block)

    def take(self, block: int) -> int:
        """A slot for a block; the copy of the block that nobody has needed for the longest time goes."""
        if not self._free:
            self._evict()
        self._slot_of[block] = slot = self._free.pop()
        return slot

    def page_of(self, block: int) -> int:
        """The block's page in a layer's view of the pool."""
        return block * self._pages_per_block

    def pages_of(self, blocks: Blocks) -> Row:
        """The same for several blocks."""
        return (blocks * self._pages_per_block).astype(np.int32)

    def is_sealed(self, block: int) -> bool:
        return block < len(self._sealed) and bool(self._sealed[block])

    def are_sealed(self, blocks: Blocks) -> NDArray[np.bool_]:
        """The same for several blocks."""
        self._know(int(blocks.max(initial=0)))
        return self._sealed[blocks]

    def mark_sealed(self, block: int) -> None:
        """The block's bytes are those of a whole page from the coming step on."""
        self._know(block)
        self._sealed[block] = True

    def mark_fresh(self, blocks: Iterable[int]) -> None:
        """These blocks were handed out for new content: what they held is gone."""
        for block in blocks:
            self._know(block)
            self._sealed[block] = False
            if (slot := self._slot_of.pop(block, None)) is not None:
                self._free.append(slot)

    def pin(self, request: int, blocks: Iterable[int]) -> None:
        """A running request needs the fp16 copies of these blocks, and no others any more."""
        needed = frozenset(blocks)
        self._pins.update(needed)
        self.release(request)
        self._pinned[request] = needed
        for block in sorted(needed & self._slot_of.keys()):  # the same order on every rank
            self._slot_of.move_to_end(block)

    def release(self, request: int) -> None:
        """The request is gone or needs nothing; copies stay until their slots are needed."""
        for block in self._pinned.pop(request, frozenset()):
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]

    def usable_pages(self, blocks: Sequence[int], matched: int) -> int:
        """How many of the first `matched` pages a new request may take over.

        All must be sealed; the sinks and the newest `recent` of them must be there in fp16, since the request's first
        query sees them so. What is left out is computed again, which changes nothing but time.
        """
        while matched and not self._has_neighbours(blocks, matched):
            matched -= 1
        return matched

    def check_integrity(self) -> None:
        """Raise AssertionError when a slot is lost, held twice, or pinned by nobody."""
        held = list(self._slot_of.values())
        assert len(set(held)) == len(held) and not set(held) & set(self._free)
        assert sum(self._pins.values()) == sum(map(len, self._pinned.values()))

    def _has_neighbours(self, blocks: Sequence[int], matched: int) -> bool:
        sinks, recent = self.policy.sink_pages, self.policy.recent_pages
        needed = {*blocks[: min(sinks, matched)], *blocks[max(matched - recent, 0) : matched]}
        return (
            bool(self.are_sealed(np.array(blocks[:matched], dtype=np.int64)).all()) and needed <= self._slot_of.keys()
        )

    def _know(self, block: int) -> None:
        """Make room for a block's number."""
        if block >= len(self._sealed):
            self._sealed = np.pad(self._sealed, (0, 2 * block + 1 - len(self._sealed)))

    def _evict(self) -> None:
        block = next((block for block in self._slot_of if not self._pins[block]), None)
        if block is None:
            raise NibbleError(
                f"fp16 pages: all {len(self._slot_of)} are in use; lower max_batch_size or max_num_tokens in llm.yaml "
                "(this is a mistake in their count: please report it)"
            )
        self._free.append(self._slot_of.pop(block))
