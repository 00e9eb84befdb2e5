"""Two GPUs give the answers of one."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.parallel import LeadingEngine, follow, join
from nibble.runtime.shards import WHOLE, Shards
from nibble.runtime.weight_sources import ModelWeights
from tests.unit.runtime_cases import LetterTokenizer, make_model, make_spec, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


def make_rank(shards: Shards, engine_class: type[Engine]) -> Engine:
    torch.cuda.set_device(shards.rank)
    model = make_model("qwen2", head_dim=64)
    device = torch.device("cuda", shards.rank)
    weights = DecoderWeights.read(model.config, ModelWeights(model), torch.float32, device, shards)
    limits = EngineLimits(max_context=1024, max_running=4, chunk_tokens=256)
    return engine_class(weights, LetterTokenizer(), make_spec(model, "int4"), limits)  # type: ignore[arg-type]


def run_follower(address: str) -> None:
    torch.cuda.set_device(1)
    follow(make_rank(join(1, 2, address), Engine))


def test_two_ranks_give_the_answers_of_one(tmp_path: Path) -> None:
    """Greedy tokens of prompts that are not near a tie, and logits within rounding."""
    prompts = [random_prompt(length, seed=length) for length in (5, 130, 300)]
    alone = make_rank(WHOLE, Engine)
    want = alone.generate(prompts, SamplingParams(max_tokens=20))
    address = f"file://{tmp_path}/meeting"
    follower = multiprocessing.get_context("spawn").Process(target=run_follower, args=(address,))
    follower.start()
    torch.cuda.set_device(0)
    engine = make_rank(join(0, 2, address), LeadingEngine)
    assert isinstance(engine, LeadingEngine)
    got = engine.generate(prompts, SamplingParams(max_tokens=20))
    logits = [torch.cat(list(each.logits(random_prompt(300)))) for each in (alone, engine)]
    engine.close()
    follower.join(timeout=60)
    assert follower.exitcode == 0
    assert ((logits[1] - logits[0]).norm() / logits[0].norm()).item() < 1e-2
    assert [completion.token_ids[:5] for completion in got] == [completion.token_ids[:5] for completion in want]
