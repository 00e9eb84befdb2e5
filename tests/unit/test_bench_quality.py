"""The quality bench computes what the oracle computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.quality_attention import Layer, attend
from bench.quality_measure import Measured
from bench.quality_schemes import scheme
from bench.quality_statistics import LayerStatistics
from nibble.formats import FORMATS
from nibble.reference import reference_attention
from nibble.rotation import rotate
from nibble.visibility import PagePolicy

SCHEMES = {"fp16": ("16 none", "16 none"), "int4": ("4 page", "4 token hadamard"), "int8": ("8 token", "8 token")}


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("name", SCHEMES)
def test_bench_attention_is_the_oracles(name: str, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 330, 32, generator=generator) for heads in (6, 2, 2))
    output = torch.eye(32, dtype=torch.float64).expand(2, -1, -1)
    k_words, v_words = SCHEMES[name]
    case = scheme(name, k_words, v_words)
    view = case.viewer([LayerStatistics(q, k, v, output)])(Layer(0, q, k, v))
    got = attend(view, case.policy, 0.2, window)[0].transpose(0, 1)
    stored = rotate(v) if FORMATS[name].v.rotated else v
    tokens = (tensor[0].transpose(0, 1) for tensor in (q, k.half(), stored.half()))
    options = {"fmt": FORMATS[name], "policy": PagePolicy(), "softmax_scale": 0.2, "sliding_window": window}
    want = reference_attention(*tokens, **options).out  # type: ignore[arg-type]
    if FORMATS[name].v.rotated:
        want = rotate(want)  # the matrix is symmetric
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)


def test_buckets_of_every_nth_position_are_those_of_the_tokens() -> None:
    positions = np.arange(63, 4096, 64)  # the last of every 64 tokens
    kl = (positions >= 1024).astype(float)[None]
    record = Measured(kl, kl, kl, kl, step=64).record()
    assert record["window_tokens"] == 4096 and record["tokens"] == 64
    assert record["kl_by_position"] == {"0-256": 0.0, "256-1024": 0.0, "1024-2048": 1.0, "2048-4096": 1.0}


def test_bytes_are_those_of_the_formats() -> None:
    from nibble.formats import SealedPageLayout

    for name, words in SCHEMES.items():
        assert scheme(name, *words).bytes_per_token(64) == SealedPageLayout(FORMATS[name], 64).bytes_per_token
