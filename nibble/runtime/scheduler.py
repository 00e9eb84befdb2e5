"""Which sequences run in the next step, and with how many tokens.

Every running sequence that decodes gets its one token first, so that a long prompt can't hold up the others; what is
left of the step's budget goes to prompts, in chunks. When pages run out, the sequence that came last gives its own up
and waits; its cached pages may spare it the work when it comes back. The first to come can take everybody's pages, and
the pools hold one sequence of full length, so the engine always moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from nibble.runtime.page_table import PageTable
from nibble.runtime.request import EngineLimits, QueueFullError
from nibble.runtime.sequence import Sequence
from nibble.runtime.step import Span, Step


@dataclass
class Counters:
    """Since the start."""

    preemptions: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    def __init__(self, pages: PageTable, limits: EngineLimits) -> None:
        self.pages = pages
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._arrivals = 0
        self._free_slots = list(range(limits.max_running - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; QueueFullError at the limit."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFullError(
                f"queue: {len(self.waiting)} requests wait, allowed {self.limits.max_waiting}; try again later"
            )
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.waiting.append(sequence)
        self.waiting.sort(key=_rank)

    def schedule(self) -> Step | None:
        """Reserve the pages of the next step; None when there is nothing to do."""
        self._admit()
        budget = self.limits.step_tokens
        planned: list[tuple[Sequence, int]] = []
        seal_pairs: list[tuple[int, int]] = []
        for sequence in sorted(self.running, key=lambda s: (s.num_pending > 1, *_rank(s))):
            length = min(sequence.num_pending, budget)
            if length == 0 or sequence.slot < 0 or sequence.ends_with_unread(self.limits.max_context):
                continue
            if self.pages.needs_pages(sequence, length):
                if not self._make_room(sequence, length, planned):
                    continue
                seal_pairs += self.pages.reserve(sequence, length)
            planned.append((sequence, length))
            budget -= length
        return self._step(planned, seal_pairs) if planned else None

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done: out of the queue, pages let go."""
        sequence.ended = True
        self.pages.release_all(sequence)
        if sequence in self.running:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting[0]
            self.pages.match_prefix(sequence)
            first_chunk = min(sequence.num_pending, self.limits.step_tokens)
            if self.running and not self.pages.can_admit(sequence, first_chunk):
                self.pages.release_all(sequence)
                return
            self.counters.prefix_hit_tokens += sequence.cached_tokens
            sequence.slot = self._free_slots.pop()
            sequence.num_admissions += 1
            self.running.append(self.waiting.pop(0))

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _make_room(self, sequence: Sequence, length: int, planned: list[tuple[Sequence, int]]) -> bool:
        """Preempt sequences that rank after this one until `length` tokens fit; False when it has to wait a step."""
        while not self.pages.can_reserve(sequence, length):
            taken = {id(other) for other, _ in planned}
            later = [s for s in self.running if id(s) not in taken and _rank(s) > _rank(sequence)]
            if not later:
                assert planned or _rank(sequence) > min(map(_rank, self.running)), "the first to come has no pages"
                return False
            self._preempt(max(later, key=_rank))
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.pages.release_all(victim)
        self._stop_running(victim)
        self.waiting.insert(0, victim)
        self.waiting.sort(key=_rank)
        self.counters.preemptions += 1

    def _step(self, planned: list[tuple[Sequence, int]], seal_pairs: list[tuple[int, int]]) -> Step:
        spans, start = [], 0
        for sequence, length in planned:
            spans.append(Span(sequence, start, length, self.pages.policy))
            start += length
        return Step(tuple(spans), tuple(seal_pairs))


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Order of service: higher priority first, then first come."""
    return -sequence.priority, sequence.arrival
