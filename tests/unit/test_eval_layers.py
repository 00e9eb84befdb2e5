"""The check of every layer: formats that work have a ratio of 1; each breakage is pinned on its layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from eval.layers import measure_layers, replay
from eval.records import LayerFigures
from nibble.formats import FORMATS
from nibble.quantizer import static_parameters
from nibble.recipes import CertificateRecipe
from nibble.reference import LayerScales
from nibble.runtime import Engine, EngineLimits
from tests.unit import eval_breakages as broken
from tests.unit.runtime_cases import MADE_ENGINES, LetterTokenizer, make_model, make_spec, random_prompt

LIMITS = EngineLimits(max_context=512, max_running=1, chunk_tokens=128)
TEXT = random_prompt(320)
LAYER = 1
BOUNDS = CertificateRecipe()


@torch.no_grad()
def make(kv: str) -> Engine:
    """An engine over a model in which V has one large channel, as real ones do: there rotation matters."""
    model = make_model()
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.v_proj.weight.unflatten(0, (-1, 32))[:, 5] *= 20
        attention.o_proj.weight.unflatten(1, (-1, 32))[..., 5] /= 20
    spec = make_spec(model, kv)
    if FORMATS[kv].needs_calibration:
        spec.scales.update(calibrated(kv))
    engine = Engine(model, LetterTokenizer(), spec, LIMITS)  # type: ignore[arg-type]
    MADE_ENGINES.append(engine)
    return engine


def calibrated(kv: str) -> dict[int, LayerScales]:
    """Static scales from another text, a little wider than it."""
    fmt, fp16 = FORMATS[kv], make("fp16")
    records, _ = replay(fp16, make("fp16"), random_prompt(320, seed=1))
    scales = {}
    for layer, record in enumerate(records):
        k, v = (torch.cat(part).transpose(0, 1).aminmax(dim=1, keepdim=True) for part in (record.k, record.v))
        scales[layer] = LayerScales(
            static_parameters(1.2 * k.min, 1.2 * k.max, fmt.k), static_parameters(1.2 * v.min, 1.2 * v.max, fmt.v)
        )
    return scales


def measure(engine: Engine) -> list[LayerFigures]:
    return measure_layers(make("fp16"), engine, TEXT)


@pytest.mark.parametrize("kv", [kv for kv in FORMATS if kv != "fp16"])
def test_every_format_does_what_it_says(kv: str) -> None:
    figures = measure(make(kv))
    assert [layer.layer for layer in figures] == [0, 1]
    assert all(0.3 < layer.ratio < 1.1 for layer in figures), figures
    assert all(layer.clipped <= BOUNDS.clipped_share for layer in figures)
    assert all(len(layer.page_ratios) == 2 and layer.first_position == 192 for layer in figures)
    assert all(0.9 < error < 1.01 for layer in figures for error in layer.stored_errors)
    assert all(len(layer.stored_errors) == 2 for layer in figures)


BREAKAGES: list[tuple[str, Any, str]] = [
    ("int4", broken.swap_key_scales, "scales of one layer swapped"),
    ("int4", broken.shift_value_zero, "zero point of V off by one"),
    ("int4", broken.shift_key_zero, "zero point of K off by one"),
    ("int8", broken.shift_value_zero, "zero point off by one, 8 bits"),
    ("int4", broken.leave_output_unrotated, "V unrotated on reading"),
    ("int4", broken.leave_value_unrotated, "V unrotated at all"),
]


@pytest.mark.parametrize(("kv", "breakage", "name"), BREAKAGES, ids=[case[2] for case in BREAKAGES])
def test_a_breakage_is_pinned_on_its_layer(kv: str, breakage: Callable[..., None], name: str) -> None:
    engine = make(kv)
    is_engines = breakage.__name__.startswith("leave")
    if is_engines:
        breakage(engine, LAYER)
    with nullcontext() if is_engines else broken.spoiled_seal(engine, LAYER, breakage):
        healthy, sick = measure(engine)
    assert healthy.ratio < 1.1
    assert sick.ratio > 1.2 * BOUNDS.layer_error_ratio, sick
    assert min(sick.page_ratios) > BOUNDS.layer_error_ratio
    assert healthy.stored_error < 1.01
    assert is_engines or min(sick.stored_errors) > 1.9 * BOUNDS.stored_error


def test_static_scales_of_another_tensor_clip() -> None:
    engine = make("int4-static")
    broken.swap_static_scales(engine, LAYER)
    healthy, sick = measure(engine)
    assert healthy.clipped <= BOUNDS.clipped_share
    assert sick.clipped > 3 * BOUNDS.clipped_share
