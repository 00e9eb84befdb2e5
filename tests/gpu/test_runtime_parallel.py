"""Two ranks on GPUs give the answers of one: on two GPUs over NCCL, in graphs; on one GPU, which NCCL refuses to share,
over gloo, with steps launched one kernel at a time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.decode_graphs import DecodeGraphs
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.parallel import LeadingEngine, follow, join
from nibble.runtime.shards import WHOLE, Shards
from nibble.runtime.weight_sources import ModelWeights
from tests.unit.runtime_cases import LetterTokenizer, make_model, make_spec, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def make_rank(shards: Shards, gpu: int, engine_class: type[Engine]) -> Engine:
    torch.cuda.set_device(gpu)
    model = make_model("qwen2", head_dim=64)
    device = torch.device("cuda", gpu)
    weights = DecoderWeights.read(model.config, ModelWeights(model), torch.float32, device, shards)
    limits = EngineLimits(max_context=1024, max_running=4, chunk_tokens=256)
    return engine_class(weights, LetterTokenizer(), make_spec(model, "int4"), limits)  # type: ignore[arg-type]


def make_rank_of_two(
    rank: int, address: str, tensors_over: str, engine_class: type[Engine], patch: pytest.MonkeyPatch
) -> Engine:
    gpu = rank if tensors_over == "nccl" else 0
    if tensors_over == "gloo":  # its sums can't be recorded
        patch.setattr(DecodeGraphs, "_capture", lambda self: None)
    torch.cuda.set_device(gpu)
    return make_rank(join(rank, 2, address, tensors_over), gpu, engine_class)


def run_follower(address: str, tensors_over: str) -> None:
    follow(make_rank_of_two(1, address, tensors_over, Engine, pytest.MonkeyPatch()))


@pytest.mark.parametrize(
    "tensors_over",
    [
        "gloo",
        pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")),
    ],
)
def test_two_ranks_give_the_answers_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors_over: str) -> None:
    """Greedy tokens of prompts that are not near a tie, and logits within rounding."""
    prompts = [random_prompt(length, seed=length) for length in (5, 130, 300)]
    alone = make_rank(WHOLE, 0, Engine)
    want = alone.generate(prompts, SamplingParams(max_tokens=20))
    address = f"file://{tmp_path}/meeting"
    follower = multiprocessing.get_context("spawn").Process(
        target=run_follower, args=(address, tensors_over), daemon=True
    )
    follower.start()
    engine = make_rank_of_two(0, address, tensors_over, LeadingEngine, monkeypatch)
    assert isinstance(engine, LeadingEngine)
    got = engine.generate(prompts, SamplingParams(max_tokens=20))
    logits = [torch.cat(list(each.logits(random_prompt(300)))) for each in (alone, engine)]
    engine.close()
    follower.join(timeout=60)
    assert follower.exitcode == 0
    assert ((logits[1] - logits[0]).norm() / logits[0].norm()).item() < 1e-2
    assert [completion.token_ids[:5] for completion in got] == [completion.token_ids[:5] for completion in want]
