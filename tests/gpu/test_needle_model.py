"""Exact retrieval from 32,768 tokens through the kernels: prefill, sealing, decode, the prefix cache, every format."""

from __future__ import annotations

import pytest
import torch

from bench.needle import Needles
from eval.hosts import NativeHost
from eval.needle import make_trials, questions_of, recall
from eval.needle_words import DEPTHS, Language
from nibble.formats import FORMATS
from nibble.models import load_model, load_tokenizer, resolve_source
from nibble.recipes import load_model_recipe
from nibble.runtime import Engine, EngineLimits
from nibble.runtime.weight_sources import load_decoder_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LONGEST = 32768


@pytest.mark.parametrize("kv", FORMATS)
def test_every_needle_of_the_longest_haystack_is_found(kv: str) -> None:
    folder, device = resolve_source(load_model_recipe("needle")), torch.device("cuda")
    tokenizer = load_tokenizer(folder)
    language = Language.of(tokenizer)
    assert language is not None
    spec = Needles(load_model(folder, "float32"), language).spec(FORMATS[kv])
    weights = load_decoder_weights(folder, "float32", device, rotated=spec.rotated_layers)
    engine = Engine(weights, tokenizer, spec, EngineLimits(max_context=LONGEST))
    for variant in ("single", "multikey"):
        trials = [
            trial for trial in make_trials(tokenizer, [LONGEST], list(DEPTHS), seed=1) if trial.variant == variant
        ]
        recalled = recall(trials, NativeHost(engine).generate_until(questions_of(trials).prompts))
        assert len(recalled) == 4 * len(DEPTHS)
        assert sum(recalled) >= len(recalled) - (kv == "int4-static"), variant
    engine.check_integrity()
