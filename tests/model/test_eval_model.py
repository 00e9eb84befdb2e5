"""The quality that the design promises, measured by the evaluation's own code through the real engines of SmolLM2."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from eval.config import EvalPlan, load_plan
from eval.evaluate import compare_windows
from eval.layers import measure_layers
from eval.measures import PositionMeasures
from eval.memory import measure_memory
from eval.partial import open_partial
from eval.records import LayerFigures, Quality
from eval.speed import random_prompt
from eval.statistics import summarise
from eval.subjects import Subjects, load_subjects, require_engine
from eval.windows import choose_windows
from nibble.formats import PARAMETER_BYTES, SealedPageLayout
from nibble.paths import REPOSITORY_ROOT
from nibble.recipes import CertificateRecipe
from nibble.runtime.cpu_backend import CpuBackend
from nibble.runtime.step import Step
from tests.unit import eval_breakages as broken

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
LoadSubjects = Callable[[str], Subjects]


@pytest.fixture(scope="module")
def plan() -> EvalPlan:
    """The quick plan with two windows, half as long."""
    return load_plan("quick", windows=2, window_tokens=512)


@pytest.fixture(scope="module")
def subjects_of(plan: EvalPlan) -> LoadSubjects:
    """Engines by KV name, built when they are not there, loaded once; fp16 beside each."""

    def load(kv: str) -> Subjects:
        for name in (kv, "fp16"):
            command = [sys.executable, "-m", "build.run", "--model", MODEL, "--kv", name]
            built = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=False)
            assert built.returncode == 0, built.stdout + built.stderr
        return load_subjects(require_engine(MODEL, kv), require_engine(MODEL, "fp16"), plan)

    return functools.cache(load)


def measure(subjects: Subjects, plan: EvalPlan, folder: Path) -> tuple[Quality, list[PositionMeasures]]:
    text = choose_windows(
        subjects.quantized.tokenizer, count=plan.windows, window_tokens=plan.window_tokens, seed=plan.seed
    )
    with open_partial(folder, "model-test") as partial:
        measured = compare_windows(subjects, text, partial)
    for engine in (subjects.quantized, subjects.fp16):
        engine.check_integrity()
    return summarise(text.windows, measured, seed=plan.seed), measured


@pytest.mark.parametrize(
    ("kv", "kl_mean", "top1_agreement", "sealed_ratio"), [("int4", 0.003, 0.97, 3.5), ("int8", 0.0005, 0.985, 1.8)]
)
def test_a_quantized_cache_is_close_to_fp16(
    subjects_of: LoadSubjects,
    plan: EvalPlan,
    tmp_path: Path,
    kv: str,
    kl_mean: float,
    top1_agreement: float,
    sealed_ratio: float,
) -> None:
    subjects = subjects_of(kv)
    quality, _ = measure(subjects, plan, tmp_path)
    assert 0 < quality.kl.mean <= kl_mean
    assert quality.top1_agreement.value >= top1_agreement
    assert abs(quality.ppl_delta_pct.value) < 1.0
    assert quality.buckets[0].kl.mean < quality.buckets[-1].kl.mean
    memory = measure_memory(subjects.quantized, subjects.fp16, random_prompt(40_000, plan.memory_tokens, seed=0))
    assert memory.fp16.sealed_bytes_per_token / memory.quantized.sealed_bytes_per_token >= sealed_ratio
    assert memory.fp16.bytes_per_token > memory.quantized.bytes_per_token


def roll_k_scales(page: torch.Tensor, layout: SealedPageLayout) -> None:
    """Every channel of K gets its neighbour's scale."""
    where = layout.k_parameters
    scales = page[..., where.start : where.start + (where.stop - where.start) // 2]
    scales.copy_(scales.roll(PARAMETER_BYTES, dims=-1))


def shift_codes(page: torch.Tensor, layout: SealedPageLayout) -> None:
    """Every code of K is read one too high (in both nibbles; those at the top wrap round)."""
    page[..., layout.k_codes].add_(0x11)


@pytest.mark.parametrize("spoil", [roll_k_scales, shift_codes])
def test_a_broken_cache_shows_where_pages_are_sealed_and_nowhere_else(
    subjects_of: LoadSubjects,
    plan: EvalPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[torch.Tensor, SealedPageLayout], None],
) -> None:
    subjects, seal = subjects_of("int4"), CpuBackend.seal
    short = plan.model_copy(update={"windows": 1})

    def seal_and_spoil(backend: CpuBackend, layer: int, step: Step) -> None:
        seal(backend, layer, step)
        if backend is subjects.quantized.runner.backend and step.seal_pairs:
            pages = backend.storage.sealed[layer][step.seal_to]
            spoil(pages, backend.storage.layouts[layer])
            backend.storage.sealed[layer][step.seal_to] = pages

    monkeypatch.setattr(CpuBackend, "seal", seal_and_spoil)
    quality, (measured,) = measure(subjects, short, tmp_path)
    assert quality.kl.mean > 0.03
    assert measured.kl[:192].max() < 1e-4


def test_one_broken_layer_of_thirty_is_found_by_itself(subjects_of: LoadSubjects, plan: EvalPlan) -> None:
    """A sound engine has a ratio of about 1 in every layer; each breakage shows in its layer and in no other."""
    subjects, bounds, layer = subjects_of("int4"), CertificateRecipe(), 12
    text = choose_windows(subjects.fp16.tokenizer, count=1, window_tokens=320, seed=3).windows[0].inputs
    sound = measure_layers(subjects.fp16, subjects.quantized, text)
    assert max(figures.ratio for figures in sound) < 1.1
    assert max(figures.stored_error for figures in sound) < 1.01
    with ExitStack() as everywhere:  # layers are given the fp16 engine's inputs: none inherits a fault
        for each in range(len(sound)):
            everywhere.enter_context(broken.spoiled_seal(subjects.quantized, each, broken.shift_key_zero))
        shifted = measure_layers(subjects.fp16, subjects.quantized, text)
    assert min(figures.stored_error for figures in shifted) > 1.9 * bounds.stored_error
    for breakage in (broken.swap_key_scales, broken.shift_value_zero):
        with broken.spoiled_seal(subjects.quantized, layer, breakage):
            check_only_one_is_sick(measure_layers(subjects.fp16, subjects.quantized, text), layer, bounds)
    broken.leave_output_unrotated(subjects.quantized, layer)
    check_only_one_is_sick(measure_layers(subjects.fp16, subjects.quantized, text), layer, bounds)


def check_only_one_is_sick(figures: list[LayerFigures], sick: int, bounds: CertificateRecipe) -> None:
    assert [each.layer for each in figures if each.ratio > bounds.layer_error_ratio] == [sick]
    assert figures[sick].ratio > 2 * bounds.layer_error_ratio
