"""The runtime's answers: those of transformers with an fp16 cache, those of the oracle with any other, and the same
answers whichever way the work was cut up."""

from __future__ import annotations

import pytest
import torch

from nibble.formats import FORMATS
from nibble.runtime import Engine, SamplingParams
from nibble.runtime.cache import PoolSizes
from nibble.visibility import PagePolicy
from tests.unit.runtime_cases import (
    FAMILIES,
    attend_over_fp16_keys_and_values,
    make_engine,
    make_model,
    make_spec,
    oracle_logits,
    random_prompt,
)

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 191, 200, 321]
GREEDY = SamplingParams(max_tokens=12)


def assert_near(got: torch.Tensor, want: torch.Tensor, bound: float = 5e-3) -> None:
    """A value next to a rounding boundary may get the neighbouring code, so the whole is compared, not each element."""
    assert torch.isfinite(got).all()
    assert ((got - want).norm() / want.norm()).item() < bound


def all_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    return torch.cat(list(engine.logits(tokens)))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp16_answers_are_those_of_transformers(family: str) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    engine = make_engine("fp16", family)
    completions = engine.generate(prompts, GREEDY)
    model = make_model(family)
    attend_over_fp16_keys_and_values(model)
    for prompt, completion in zip(prompts, completions, strict=True):
        reference = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert completion.token_ids == reference[0, len(prompt) :].tolist(), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_oracle(kv: str, family: str) -> None:
    engine = make_engine(kv, family)
    model = make_model(family)
    tokens = random_prompt(400)
    want = oracle_logits(model, make_spec(model, kv), tokens)
    assert_near(all_logits(engine, tokens), want)
    engine.check_integrity()


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (0, 1), (2, 0), (2, 2)])
def test_every_page_policy_is_the_oracles(sinks: int, recent: int) -> None:
    policy = PagePolicy(sinks, recent)
    model = make_model()
    tokens = random_prompt(330)
    want = oracle_logits(model, make_spec(model, "int4", policy), tokens)
    assert_near(all_logits(make_engine("int4", policy=policy), tokens), want)


@pytest.mark.parametrize("kv", ["int4", "int8", "k8v4", "int4-static"])
def test_chunks_do_not_change_the_answer(kv: str) -> None:
    tokens = random_prompt(500)
    whole = all_logits(make_engine(kv, chunk_tokens=512), tokens)
    for chunk in (64, 100, 16):
        assert_near(all_logits(make_engine(kv, chunk_tokens=chunk), tokens), whole)


def test_decoding_is_prefill_one_token_at_a_time() -> None:
    engine = make_engine("int4")
    completion = engine.generate([random_prompt(150)], SamplingParams(max_tokens=120))[0]
    whole = all_logits(make_engine("int4"), random_prompt(150) + completion.token_ids)
    for index, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert whole[149 + index].log_softmax(-1)[token].item() == pytest.approx(logprob, abs=5e-3)


def answers(engine: Engine, prompts: list[list[int]], max_tokens: int = 80) -> list[list[int]]:
    completions = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
    return [completion.token_ids for completion in completions]


def test_a_batch_gives_the_answers_of_single_requests() -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 64, 190, 333)]
    alone = [answers(make_engine(), [prompt])[0] for prompt in prompts]
    assert answers(make_engine(), prompts) == alone


def test_a_warm_prefix_cache_gives_the_answers_of_a_cold_one() -> None:
    shared = random_prompt(300)
    prompts = [shared + random_prompt(20, seed=seed) for seed in range(3)]
    cold = [answers(make_engine(), [prompt])[0] for prompt in prompts]
    engine = make_engine()
    warm = [answers(engine, [prompt])[0] for prompt in prompts]
    assert warm == cold
    assert engine.stats().prefix_hit_tokens == 2 * 256  # four whole pages, twice


def test_a_conversation_reuses_its_own_pages() -> None:
    engine = make_engine()
    history = random_prompt(130)
    for turn in range(3):
        completion = engine.generate([history], SamplingParams(max_tokens=70))[0]
        assert completion.cached_tokens == (0 if turn == 0 else (len(history) - 3) // 64 * 64)
        assert answers(make_engine(), [history], 70) == [completion.token_ids]
        history = history + completion.token_ids + [7, 8]


def test_a_full_pool_preempts_and_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(200, seed=seed) for seed in range(4)]
    roomy = answers(make_engine(), prompts, 150)
    monkeypatch.setattr(PoolSizes, "for_limits", lambda *_: PoolSizes(open_pages=12, sealed_pages=9))
    engine = make_engine(chunk_tokens=64)
    assert answers(engine, prompts, 150) == roomy
    assert engine.stats().preemptions > 0
    assert engine.stats().pages_used == engine.stats().open_pages_used == 0


def test_the_fp16_fallback_of_a_rotated_format_is_fp16() -> None:
    """V rotated in the weights does not change what an fp16 cache answers."""
    model = make_model()
    want = oracle_logits(model, make_spec(model, "fp16"), random_prompt(200))
    assert_near(all_logits(make_engine("fp16"), random_prompt(200)), want)


@pytest.mark.parametrize("kv", FORMATS)
def test_what_was_in_the_pools_before_does_not_matter(kv: str) -> None:
    """Every value that is read was written: the pools start as NaN, and the rest of an open page enters no range."""
    tokens = random_prompt(300)
    want = all_logits(make_engine(kv), tokens)
    engine = make_engine(kv)
    storage = engine.runner.backend.storage
    for opened, sealed in zip(storage.open, storage.sealed, strict=True):
        opened.fill_(torch.nan)
        sealed.fill_(255)
    assert torch.equal(all_logits(engine, tokens), want)
