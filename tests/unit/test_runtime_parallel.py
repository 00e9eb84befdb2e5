"""Two ranks on a CPU give the answers of one: split heads, products added up, orders followed step by step."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nibble.errors import NibbleError
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.cache import CacheSpec
from nibble.runtime.decoder_shape import DecoderShape
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.parallel import Follower, LeadingEngine, end_with_the_first, follow, join
from nibble.runtime.shards import WHOLE, Shards
from nibble.runtime.weight_sources import ModelWeights
from tests.unit.oracle_kernels import ORACLE_KERNELS
from tests.unit.runtime_cases import LetterTokenizer, make_model, make_spec, random_prompt

LIMITS = EngineLimits(max_context=512, max_running=3, chunk_tokens=128)
FAMILY = "qwen2"  # biases are split as well


def make_rank(shards: Shards, engine_class: type[Engine]) -> Engine:
    model = make_model(FAMILY)
    weights = DecoderWeights.read(model.config, ModelWeights(model), torch.float32, torch.device("cpu"), shards)
    return engine_class(weights, LetterTokenizer(), spec_of(), LIMITS)  # type: ignore[arg-type]


def spec_of() -> CacheSpec:
    return make_spec(make_model(FAMILY), "int4-static")


def run_follower(address: str) -> None:
    use_oracle(pytest.MonkeyPatch())
    follow(make_rank(join(1, 2, address, "gloo"), Engine))


def use_oracle(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("nibble.runtime.device_runner.AttentionKernels", lambda: ORACLE_KERNELS)


@pytest.fixture
def leading_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeadingEngine]:
    use_oracle(monkeypatch)
    address = f"file://{tmp_path}/meeting"
    follower = multiprocessing.get_context("spawn").Process(target=run_follower, args=(address,))
    follower.start()
    engine = make_rank(join(0, 2, address, "gloo"), LeadingEngine)
    assert isinstance(engine, LeadingEngine)
    yield engine
    engine.close()
    follower.join(timeout=60)
    assert follower.exitcode == 0


def test_two_ranks_give_the_answers_of_one(leading_engine: LeadingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 130)]
    params = [SamplingParams(max_tokens=70), SamplingParams(max_tokens=8, temperature=0.7, top_k=3, seed=1)]
    alone = make_rank(WHOLE, Engine)
    assert [c.token_ids for c in leading_engine.generate(prompts, params)] == [
        c.token_ids for c in alone.generate(prompts, params)
    ]
    gone = leading_engine.submit(random_prompt(90), SamplingParams(max_tokens=50, temperature=1.0))
    for _ in range(4):
        leading_engine.step()
    leading_engine.cancel(gone)
    while leading_engine.has_work:
        leading_engine.step()
    leading_engine.check_integrity()
    want, got = (torch.cat(list(engine.logits(random_prompt(200)))) for engine in (alone, leading_engine))
    assert ((got - want).norm() / want.norm()).item() < 1e-2


def test_heads_that_do_not_come_out_even_are_refused() -> None:
    shape = DecoderShape.of(make_model().config)
    with pytest.raises(NibbleError, match="tensor parallel: got 4 GPUs for 6 query heads, allowed a divisor of 6"):
        shape.split(Shards(0, 4))


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[int]:
    """What this process would have ended with."""
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr("nibble.runtime.parallel.os._exit", codes.put)
    return codes


def test_a_rank_that_ends_takes_the_first_along(exit_codes: queue.SimpleQueue[int]) -> None:
    killed = Follower([sys.executable, "-c", "import time; time.sleep(60)"])
    killed.kill()
    killed.process.wait(10)
    assert exit_codes.empty()
    Follower([sys.executable, "-c", "raise SystemExit(3)"])
    assert exit_codes.get(timeout=20) == 1


def test_the_first_rank_takes_the_others_along(
    exit_codes: queue.SimpleQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads) as standard_input:
        monkeypatch.setattr("sys.stdin", standard_input)
        end_with_the_first()
        assert exit_codes.empty()
        os.close(writes)
        assert exit_codes.get(timeout=20) == 1
