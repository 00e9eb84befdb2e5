"""Fake caches give the engine's own numbers, and a measurement may start at the first layer that differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from calibrate.search_measure import FP16, ROW_STRIDE, SearchModel
from nibble.balance import balanced_rotation
from nibble.fake_cache import FAKE_CACHE
from nibble.formats import FORMATS
from nibble.key_transform import KeyTransform
from nibble.models import ModelShape
from nibble.runtime import Engine, EngineLimits
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy
from tests.unit.runtime_cases import LetterTokenizer, make_model, make_spec, random_prompt

TOKENS = random_prompt(650)
POLICIES = [PagePolicy(1, 1), PagePolicy(0, 0), PagePolicy(2, 1), PagePolicy(0, 2)]


def engine_logits(family: str, spec: CacheSpec) -> torch.Tensor:
    limits = EngineLimits(max_context=1024, max_running=1, chunk_tokens=128)
    engine = Engine(make_model(family), LetterTokenizer(), spec, limits)  # type: ignore[arg-type]
    return torch.cat(list(engine.logits(TOKENS)))


def fake_logits(family: str, spec: CacheSpec) -> torch.Tensor:
    model = make_model(family)
    model.set_attn_implementation(FAKE_CACHE)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS]), use_cache=False, fake_cache=spec).logits[0]


def mean_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("kv", ["int4", "int8-static"])
def test_fake_caches_are_the_engines(family: str, policy: PagePolicy, kv: str) -> None:
    spec = make_spec(make_model(family), kv, policy)
    exact, fake = engine_logits(family, spec), fake_logits(family, spec)
    fp16 = fake_logits(family, make_spec(make_model(family), "fp16", policy))
    assert mean_kl(exact, fake) < 0.02 * mean_kl(fp16, exact) + 1e-7


@pytest.mark.parametrize("policy", POLICIES)
def test_fake_mixes_with_a_basis_are_the_engines(policy: PagePolicy) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2, 2, 100, 32, generator=generator)
    basis = balanced_rotation(factors[0].mT @ factors[0], factors[1].mT @ factors[1])
    spec = make_spec(make_model(), "int4", policy)
    spec = replace(spec, formats=(FORMATS["k8v4"], FORMATS["int4"]), key_transforms={1: KeyTransform(basis)})
    exact, fake = engine_logits("llama", spec), fake_logits("llama", spec)
    fp16 = fake_logits("llama", make_spec(make_model(), "fp16", policy))
    assert mean_kl(exact, fake) < 0.02 * mean_kl(fp16, exact) + 1e-7


def test_a_measurement_that_starts_late_is_the_whole_models() -> None:
    shape = ModelShape(num_layers=2, num_kv_heads=2, head_dim=32, max_positions=4096)
    subject = SearchModel(make_model(), {}, {}, shape)
    trace = subject.trace(TOKENS)
    fp16 = fake_logits("llama", make_spec(make_model(), "fp16"))
    for formats in ([FP16, FORMATS["int4"]], [FORMATS["int4"], FORMATS["k8v4"]]):
        whole = fake_logits("llama", replace(make_spec(make_model(), "int4"), formats=tuple(formats)))
        rows = slice(ROW_STRIDE - 1, None, ROW_STRIDE)
        assert subject.kl(trace, formats, PagePolicy()) == pytest.approx(mean_kl(fp16[rows], whole[rows]), rel=1e-3)
    assert subject.kl(trace, [FP16, FP16], PagePolicy()) == 0


def test_errors_of_k_and_v_follow_the_bits() -> None:
    shape = ModelShape(num_layers=2, num_kv_heads=2, head_dim=32, max_positions=4096)
    subject = SearchModel(make_model(), {}, {}, shape)
    candidates = [FORMATS[name] for name in ("fp16", "int8", "k8v4", "int4")]
    for layer in subject.errors(subject.trace(TOKENS), candidates):
        assert layer["fp16"].k == layer["fp16"].v == 0
        assert layer["int8"].k < layer["int4"].k and layer["int8"].v < layer["k8v4"].v
        assert layer["k8v4"].v == layer["int4"].v
