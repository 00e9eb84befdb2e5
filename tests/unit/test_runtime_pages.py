"""The page pool and the page table under every order of events."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nibble.formats import PAGE_TOKENS
from nibble.runtime import SamplingParams
from nibble.runtime.page_pool import PagePool
from nibble.visibility import PagePolicy
from tests.unit.runtime_cases import make_engine, random_prompt


class PagePoolMachine(RuleBasedStateMachine):
    """Holders take, share, name and drop pages in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(5)
        self.held: list[int] = []
        self.names: dict[bytes, int] = {}

    @precondition(lambda self: self.pool.num_free > 0)
    @rule()
    def allocate(self) -> None:
        page = self.pool.allocate()
        assert page not in self.held
        self.held.append(page)
        self.names = {key: named for key, named in self.names.items() if named != page}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.release(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def register(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.pool.register(page, key)
        if key not in self.names and page not in self.names.values():
            self.names[key] = page

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share_a_known_page(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.names)))
        page = self.pool.find(key)
        assert page == self.names[key]
        assert self.pool.is_cached(page) == (page not in self.held)
        self.pool.share(page)
        self.held.append(page)

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check_integrity(self.held)
        assert self.pool.num_used == len(Counter(self.held))


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_empty_pool_says_so() -> None:
    pool = PagePool(1)
    pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()


def test_the_page_let_go_longest_ago_is_given_out_first() -> None:
    pool = PagePool(3)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.register(page, bytes([page]))
    for page in (pages[1], pages[0], pages[2]):
        pool.release(page)
    assert [pool.allocate() for _ in range(3)] == [pages[1], pages[0], pages[2]]
    assert pool.find(bytes([pages[0]])) is None


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (1, 1), (2, 2)])
def test_only_the_pages_of_the_rule_stay_open(sinks: int, recent: int) -> None:
    engine = make_engine(policy=PagePolicy(sinks, recent))
    request_id = engine.submit(random_prompt(250), SamplingParams(max_tokens=300))
    sequence = engine._requests[request_id]
    while engine.has_work:
        engine.step()
        if sequence.num_computed:
            current = (sequence.num_computed - 1) // PAGE_TOKENS
            far = set(range(sinks, current - recent))
            assert set(sequence.sealed_pages) == far
            assert set(sequence.open_pages) == set(range(current + 1)) - far
            engine.check_integrity()
    assert engine.stats().open_pages_used == 0
