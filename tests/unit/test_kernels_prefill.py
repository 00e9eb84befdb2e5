"""The plan of a prefill step and the checks of its inputs: all that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.kernels.prefill import PrefillCache, check_prefill, prefill_attention
from nibble.kernels.prefill_plan import PrefillPlan, plan_prefill
from nibble.visibility import PagePolicy

KV_HEADS, HEAD_DIM, PAGES = 2, 64, 5


def make_cache(kv: str = "int4", **changes: torch.Tensor) -> PrefillCache:
    fmt = KVFormat.named(kv)
    page_bytes = SealedPageLayout(fmt, HEAD_DIM).page_bytes
    cache = PrefillCache(
        fmt,
        open_pool=torch.zeros(PAGES, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM, dtype=torch.float16),
        sealed_pool=torch.zeros(PAGES, KV_HEADS, page_bytes, dtype=torch.uint8),
        open_table=torch.zeros(1, PAGES, dtype=torch.int32),
        sealed_table=torch.zeros(1, PAGES, dtype=torch.int32),
    )
    return replace(cache, **changes)


def make_plan(query_len: int = 100, seq_len: int = 300) -> PrefillPlan:
    return plan_prefill([query_len], [seq_len], PagePolicy(), device="cpu")


def make_queries(tokens: int = 100, heads: int = 8, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(tokens, heads, HEAD_DIM, dtype=dtype)


def test_tiles_are_the_pages_of_the_queries_with_the_most_keys_first() -> None:
    plan = plan_prefill([65, 0, 100], [65, 70, 300], PagePolicy(), device="cpu")
    assert plan.tiles.tolist() == [[2, 4], [2, 3], [0, 1], [0, 0]]
    assert plan.page_pairs.tolist() == [[2, 4], [2, 2], [0, 0]]
    assert (plan.num_queries, plan.max_pages) == (165, 5)


def test_scratch_holds_far_pages_and_a_copy_of_a_partly_filled_last_page() -> None:
    plan = make_plan(query_len=100, seq_len=300)  # queries in pages 3 and 4, a last page of 44 tokens
    assert plan.scratch_pages[:, :3].tolist() == [[0, 1, 0], [0, 2, 0], [0, 4, 44]]
    query_row, first_position, seq_len, far_base, tail_page, tail_slot, *_ = plan.sequences[0].tolist()
    assert (query_row, first_position, seq_len) == (0, 200, 300)
    assert (far_base + 1, tail_page, tail_slot) == (0, 4, 2)


@pytest.mark.parametrize("sliding_window", [None, 1, 64, 100, 300])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (1, 1), (2, 3)])
def test_far_pages_are_those_that_the_rule_says(sinks: int, recent: int, sliding_window: int | None) -> None:
    policy, query_len, seq_len = PagePolicy(sinks, recent), 150, 700
    queries, keys = torch.arange(seq_len - query_len, seq_len), torch.arange(seq_len)
    distance = queries[:, None] - keys[None, :]
    seen = (distance >= 0) & (distance < (sliding_window or seq_len)) & ~policy.sees_fp16(queries, keys)
    expected = sorted(set((keys[seen.any(0)] // PAGE_TOKENS).tolist()))
    plan = plan_prefill([query_len], [seq_len], policy, sliding_window=sliding_window, device="cpu")
    planned = [page for _, page, tail, _ in plan.scratch_pages.tolist() if not tail]
    assert set(expected) <= set(planned)
    assert len(planned) <= len(expected) + 3  # a window's edge may be rounded out to whole pages


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "message"),
    [([1], [1, 2], "one of each"), ([3], [2], "allowed 0 to 2"), ([-1], [2], "allowed 0 to 2")],
)
def test_lengths_that_do_not_fit(query_lens: list[int], seq_lens: list[int], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        plan_prefill(query_lens, seq_lens, PagePolicy(), device="cpu")


def test_sliding_window_of_nothing() -> None:
    with pytest.raises(NibbleError, match="sliding window: got 0"):
        plan_prefill([1], [1], PagePolicy(), sliding_window=0, device="cpu")


def test_good_inputs_pass() -> None:
    check_prefill(make_queries(dtype=torch.bfloat16), make_cache("k8v4"), make_plan())


@pytest.mark.parametrize(
    ("q", "cache", "message"),
    [
        (lambda: make_queries(dtype=torch.float32), make_cache, "queries: got float32"),
        (lambda: make_queries(tokens=99), make_cache, "the plan was made for 100"),
        (lambda: make_queries(heads=7), make_cache, "GQA: got 7 query heads over 2"),
        (lambda: make_queries(heads=34), make_cache, "groups of 1 to 16"),
        (lambda: make_queries()[:, :, :32], make_cache, "head size: got queries of 32"),
        (make_queries, lambda: make_cache(open_pool=torch.zeros(1, 2, KV_HEADS, 32, HEAD_DIM).half()), "open pool"),
        (make_queries, lambda: make_cache(sealed_pool=torch.zeros(1, KV_HEADS, 7, dtype=torch.uint8)), "sealed pool"),
        (make_queries, lambda: make_cache(open_table=torch.zeros(1, 5)), "open table: got float32"),
        (make_queries, lambda: make_cache(sealed_table=torch.zeros(1, 4, dtype=torch.int32)), "5 pages"),
        (make_queries, lambda: make_cache("int4-static"), "without calibrated scales"),
    ],
)
def test_inputs_that_do_not_fit(q: Callable[[], torch.Tensor], cache: Callable[[], PrefillCache], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        check_prefill(q(), cache(), make_plan())


def test_operator_under_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        result = prefill_attention(make_queries(), make_cache(), make_plan(), softmax_scale=0.1, with_log_sum_exp=True)
        assert result.log_sum_exp is not None
        assert (result.out.shape, result.log_sum_exp.shape) == ((100, 8, HEAD_DIM), (100, 8))
