"""Which pages each sequence holds: taking, sealing, sharing and letting go, in both pools.

A step over tokens [computed, computed + n) of a sequence, with c = its next token's page:

    before   reserve: an open page for every page those tokens touch, a sealed page for every page that becomes far
    forward  the backend appends, seals and attends
    after    commit: full pages get their keys, open copies of sealed pages are let go

Pages that were let go keep their keys in the pools until they are handed out again, so a prompt that was seen before
finds them: an fp16 page behind the match as well, which a quantized copy could not replace without changing the answer.
"""

from __future__ import annotations

from nibble.formats import PAGE_TOKENS
from nibble.runtime.page_pool import PagePool
from nibble.runtime.sequence import Sequence
from nibble.visibility import PagePolicy


class PageTable:
    def __init__(self, open_pool: PagePool, sealed_pool: PagePool, policy: PagePolicy) -> None:
        self.open_pool = open_pool
        self.sealed_pool = sealed_pool
        self.policy = policy

    def needs_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """False for a token within a page: what it sees was reserved when its page began."""
        return num_tokens > 1 or sequence.num_computed % PAGE_TOKENS == 0

    def can_reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        open_needed = len(self._open_pages_to_add(sequence, num_tokens))
        sealed_needed = len(self.pages_to_seal(sequence, num_tokens))
        return open_needed <= self.open_pool.num_free and sealed_needed <= self.sealed_pool.num_free

    def can_admit(self, sequence: Sequence, first_chunk: int) -> bool:
        """Is there room to start: open pages for the first chunk, sealed pages for all that is known of it?"""
        sealed_needed = len(self.pages_to_seal(sequence, sequence.num_pending))
        return self.can_reserve(sequence, first_chunk) and sealed_needed <= self.sealed_pool.num_free

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Take the pages for the next `num_tokens`; returns (open page, sealed page) pairs to seal in this step."""
        for page in self._open_pages_to_add(sequence, num_tokens):
            sequence.open_pages[page] = self.open_pool.allocate()
        pairs = []
        for page in self.pages_to_seal(sequence, num_tokens):
            sequence.sealed_pages[page] = self.sealed_pool.allocate()
            pairs.append((sequence.open_pages[page], sequence.sealed_pages[page]))
        return pairs

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` are in the cache now."""
        began_page = self.needs_pages(sequence, num_tokens)
        sequence.num_computed += num_tokens
        self._name_full_pages(sequence)
        if not began_page:
            return
        for page in [page for page in sequence.open_pages if page in sequence.sealed_pages]:
            self.sealed_pool.register(sequence.sealed_pages[page], sequence.key_of_page(page))
            self.open_pool.release(sequence.open_pages.pop(page))

    def pages_to_seal(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Pages that a query among the next tokens sees quantized, and that are not sealed yet."""
        last_position = sequence.num_computed + num_tokens - 1
        first_unsealed = self.policy.sink_pages + len(sequence.sealed_pages)  # pages are sealed in order
        return list(range(first_unsealed, self.policy.first_recent_page(last_position)))

    def match_prefix(self, sequence: Sequence) -> None:
        """Start a waiting sequence from the longest cached prefix that gives the same answer as computing it.

        A start at page c needs the sinks and the pages its first query sees in fp16 as open pages, the rest sealed.
        At least one token is left to compute.
        """
        sequence.cached_tokens = 0
        full = (len(sequence.tokens) - 1) // PAGE_TOKENS
        longest = next((page for page in range(full) if not self._is_known(sequence.key_of_page(page))), full)
        for start in range(longest, 0, -1):
            found = self._find_prefix(sequence, start)
            if found is not None:
                sequence.open_pages, sequence.sealed_pages = found
                for page in sequence.open_pages.values():
                    self.open_pool.share(page)
                for page in sequence.sealed_pages.values():
                    self.sealed_pool.share(page)
                sequence.num_computed = start * PAGE_TOKENS
                sequence.num_named_pages = start
                sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_tokens)
                return

    def release_all(self, sequence: Sequence) -> None:
        """Let every page go; the sequence starts anew when it runs again."""
        self._name_full_pages(sequence)
        for page in reversed(sequence.open_pages.values()):
            self.open_pool.release(page)
        for page in reversed(sequence.sealed_pages.values()):
            self.sealed_pool.release(page)
        sequence.open_pages, sequence.sealed_pages = {}, {}
        sequence.num_computed = sequence.num_named_pages = 0

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """AssertionError when pages are lost, held twice, or not where the page rule wants them."""
        self.open_pool.check_integrity(page for s in sequences for page in s.open_pages.values())
        self.sealed_pool.check_integrity(page for s in sequences for page in s.sealed_pages.values())
        for sequence in sequences:
            used = -(-sequence.num_computed // PAGE_TOKENS)
            assert sequence.open_pages.keys() | sequence.sealed_pages.keys() == set(range(used)), "a page is missing"
            assert not sequence.open_pages.keys() & sequence.sealed_pages.keys(), "a page is both open and sealed"

    def _open_pages_to_add(self, sequence: Sequence, num_tokens: int) -> list[int]:
        first = sequence.num_computed // PAGE_TOKENS
        last = (sequence.num_computed + num_tokens - 1) // PAGE_TOKENS
        return [page for page in range(first, last + 1) if page not in sequence.open_pages]

    def _name_full_pages(self, sequence: Sequence) -> None:
        """Full pages get their keys once all their tokens are known: a step later when tokens are read back late."""
        full = min(sequence.num_computed, len(sequence.tokens)) // PAGE_TOKENS
        for page in range(sequence.num_named_pages, full):
            self.open_pool.register(sequence.open_pages[page], sequence.key_of_page(page))
        sequence.num_named_pages = max(full, sequence.num_named_pages)

    def _is_known(self, key: bytes) -> bool:
        return self.open_pool.find(key) is not None or self.sealed_pool.find(key) is not None

    def _find_prefix(self, sequence: Sequence, start: int) -> tuple[dict[int, int], dict[int, int]] | None:
        first_recent = self.policy.first_recent_page(start * PAGE_TOKENS)
        open_pages: dict[int, int] = {}
        sealed_pages: dict[int, int] = {}
        for page in range(start):
            is_open = page < self.policy.sink_pages or page >= first_recent
            pool, pages = (self.open_pool, open_pages) if is_open else (self.sealed_pool, sealed_pages)
            found = pool.find(sequence.key_of_page(page))
            if found is None:
                return None
            pages[page] = found
        return open_pages, sealed_pages
