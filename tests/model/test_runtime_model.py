"""The runtime over the real small model: transformers' answers with an fp16 cache, near ones with a quantized one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nibble.formats import FORMATS
from nibble.models import load_model, load_tokenizer, read_shape
from nibble.runtime import Engine, EngineLimits, FinishReason, SamplingParams
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy

pytestmark = pytest.mark.model

PROMPTS = [
    "The lighthouse keeper climbed the stairs every evening, and",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a " * 40,
]


@pytest.fixture(scope="module")
def make_engine(smollm2_source: Path) -> Callable[[str], Engine]:
    shape = read_shape(smollm2_source)

    def make(kv: str) -> Engine:
        spec = CacheSpec((FORMATS[kv],) * shape.num_layers, shape.num_kv_heads, shape.head_dim, PagePolicy())
        model, tokenizer = load_model(smollm2_source, "float32"), load_tokenizer(smollm2_source)
        return Engine(model, tokenizer, spec, EngineLimits(max_context=1024, max_running=4))

    return make


def test_fp16_greedy_answers_are_those_of_transformers(
    make_engine: Callable[[str], Engine], smollm2_source: Path
) -> None:
    engine = make_engine("fp16")
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    completions = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    model = load_model(smollm2_source, "float32")
    for prompt, completion in zip(prompts, completions, strict=True):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        assert completion.token_ids == output[0, len(prompt) :].tolist()


def test_a_quantized_cache_answers_like_the_fp16_one(make_engine: Callable[[str], Engine]) -> None:
    text = "The harbour town had two mills, a church and a market where fish was sold every morning. " * 18
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engines = [make_engine(kv) for kv in ("fp16", "int4", "int8")]
    want, *answers = (engine.generate([engine.encode(text)], params)[0] for engine in engines)
    assert want.prompt_tokens > 300  # so that sealed pages are read
    for got in answers:
        assert got.token_ids == want.token_ids
        assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < 0.2


def test_a_chat_ends_by_itself(make_engine: Callable[[str], Engine]) -> None:
    engine = make_engine("int4")
    prompt = engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    completion = engine.generate([prompt], SamplingParams(max_tokens=40))[0]
    assert "Paris" in completion.text
    assert completion.finish_reason is FinishReason.STOP
    engine.check_integrity()
