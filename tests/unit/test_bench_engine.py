"""The benchmark's counting and bookkeeping; what it times is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.engine_cpu import TARGETS, BenchPlan, Rates, TokenClock, make_record, measure_capacity, time_transformers
from bench.pool_capacity import fill_pool
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat
from nibble.models import load_model
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy

TOKENS = 2048
PLAN = BenchPlan(
    model="m",
    kv="int4",
    prompt_tokens=8,
    decode_tokens=4,
    streams=2,
    repeats=1,
    pool_mb=64,
    pool_context=TOKENS,
    seed=0,
)


def spec(kv: str) -> CacheSpec:
    return CacheSpec((KVFormat.named(kv),) * 4, num_kv_heads=3, head_dim=64, policy=PagePolicy())


@pytest.mark.parametrize("kv", ["fp16", "int8", "int4"])
def test_a_pool_is_filled_with_whole_sequences(kv: str) -> None:
    capacity = fill_pool(spec(kv), 64 * 2**20, TOKENS)
    sealed_of_one = TOKENS // PAGE_TOKENS - 3  # a sink, a recent page and the page being filled stay open
    assert capacity.sealed_tokens == capacity.sequences * sealed_of_one * PAGE_TOKENS
    assert capacity.sealed_bytes <= capacity.pool_bytes < capacity.sealed_bytes * (1 + 1 / capacity.sequences) + 2**20
    assert capacity.open_bytes == capacity.sequences * 3 * spec(kv).open_page_bytes


def test_int4_holds_the_promised_multiple_of_fp16() -> None:
    quantized, fp16 = measure_capacity(spec("int4"), PLAN)
    assert quantized.sealed_tokens / fp16.sealed_tokens >= TARGETS["sealed_tokens_ratio"]


def test_a_pool_too_small_for_one_sequence_is_an_error() -> None:
    with pytest.raises(NibbleError, match="room for a sequence of 2048 tokens"):
        fill_pool(spec("fp16"), 2**20, TOKENS)


def test_the_record_says_which_targets_are_met() -> None:
    rates = Rates(transformers=[10.0, 12.0, 11.0], one_stream=[9.0, 8.8, 9.2], all_streams=[30.0, 18.0, 20.0])
    record = make_record(PLAN, rates, *measure_capacity(spec("int4"), PLAN))
    assert record["figures"]["decode_ratio_to_transformers"] == pytest.approx(9.0 / 11.0)
    assert record["met"] == {
        "decode_ratio_to_transformers": True,
        "streams_ratio": False,
        "sealed_tokens_ratio": True,
    }
    assert json.loads(json.dumps(record)) == record


def test_transformers_is_timed_over_its_generated_tokens(tiny_llama_dir: Path) -> None:
    assert time_transformers(load_model(tiny_llama_dir, "float32"), [1, 2, 3], decode_tokens=5) > 0


def test_the_clock_does_not_count_the_prompt() -> None:
    clock = TokenClock()
    for value in ([1, 2, 3], [4], [5]):
        clock.put(torch.tensor(value))
    assert len(clock.arrivals) == 2
