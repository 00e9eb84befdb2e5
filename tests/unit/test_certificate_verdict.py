"""The verdict on real evaluations of tiny engines: a good one is certified, each broken one fails and is located."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import eval.certify
import eval.evaluate
from eval.compare import compare_window
from eval.config import EvalPlan, SpeedPlan
from eval.evaluate import EvalRequest, check_layers, evaluate
from eval.records import Estimate, Report
from eval.speed import random_prompt
from eval.statistics import summarise
from eval.subjects import Subjects
from eval.verdict import certificate_body
from eval.windows import Window, WindowSet
from nibble.certificate import CERTIFICATE_FILE, Certificate
from nibble.formats import PAGE_TOKENS, KVFormat
from nibble.models import load_model, load_tokenizer
from nibble.recipes import CertificateRecipe
from nibble.runtime import Engine, EngineLimits
from nibble.runtime.cache import CacheSpec
from nibble.runtime.engine import EngineOrigin
from nibble.visibility import PagePolicy
from tests.unit import eval_breakages as broken

PLAN = EvalPlan(
    name="test",
    windows=2,
    window_tokens=320,
    seed=0,
    speed=SpeedPlan(prompt_tokens=16, decode_tokens=4, streams=1, repeats=1),
    memory_tokens=64,
    layer_tokens=320,
)
WIDE = CertificateRecipe(kl_mean=0.5, kl_p999=20.0, top1_agreement=0.5, ppl_change_pct=50.0)  # a random model's


def engine(folder: Path, kv: str) -> Engine:
    spec = CacheSpec((KVFormat.named(kv),) * 2, num_kv_heads=2, head_dim=32, policy=PagePolicy())
    limits = EngineLimits(max_context=384, max_running=1, chunk_tokens=PAGE_TOKENS)
    recipe = SimpleNamespace(certificate=CertificateRecipe())
    manifest = SimpleNamespace(engine_hash=f"hash of {kv}", kv=SimpleNamespace(recipe=recipe))
    origin = EngineOrigin(kv, manifest)  # type: ignore[arg-type]
    return Engine(load_model(folder, "float32"), load_tokenizer(folder), spec, limits, origin=origin)


@pytest.fixture(scope="module")
def good(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """One whole evaluation of an int8 engine."""
    folder = tmp_path_factory.mktemp("results")
    subjects = Subjects(engine(tiny_llama_dir, "int8"), engine(tiny_llama_dir, "fp16"), tiny_llama_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_RESULTS", str(folder))
        patch.setattr(eval.evaluate, "require_engine", lambda model, kv: folder)
        patch.setattr(eval.evaluate, "require_baseline", lambda model, console: folder)
        patch.setattr(eval.evaluate, "load_subjects", lambda quantized, fp16, plan: subjects)
        return evaluate(EvalRequest("smollm2-135m", "int8", PLAN, served=False), Console(quiet=True))[0]


def test_a_good_engine_passes_with_counts_and_intervals(good: Report) -> None:
    body = certificate_body(good, CertificateRecipe())
    assert (body.verdict, body.reasons) == ("passed", [])
    figures = {figure.name: figure for figure in body.figures}
    kl, top1 = figures["mean KL"], figures["top-1 agreement"]
    assert kl.samples == 640
    assert kl.interval is not None and kl.judged == kl.interval[1]
    assert top1.interval is not None and top1.judged == top1.interval[0]
    assert {"windows", "code", "layer text", "text emma.txt"} <= set(body.inputs)


BREAKAGES = [
    (broken.swap_key_scales, "stored error, half steps"),
    (broken.shift_key_zero, "stored error, half steps"),
    (broken.shift_value_zero, "layer error ratio"),
    (broken.leave_output_unrotated, "layer error ratio"),
]


@pytest.mark.parametrize(
    ("breakage", "shown_by"), BREAKAGES, ids=["scales swapped", "K off by one", "V off by one", "V unrotated"]
)
def test_a_broken_engine_fails_and_the_reasons_name_the_layer(
    good: Report, tiny_llama_dir: Path, breakage: Callable[..., None], shown_by: str
) -> None:
    sick: Any = engine(tiny_llama_dir, "int4")
    at_seal = breakage is not broken.leave_output_unrotated
    if not at_seal:
        breakage(sick, 1)
    with broken.spoiled_seal(sick, 1, breakage) if at_seal else nullcontext():
        report = measured_again(good, Subjects(sick, engine(tiny_llama_dir, "fp16"), tiny_llama_dir))
    body = certificate_body(report, WIDE)
    assert body.verdict == "failed"
    assert any("it starts in layer 1 (int4), at position 192" in reason for reason in body.reasons), body.reasons
    (figure,) = [figure for figure in body.figures if figure.name == shown_by]
    assert figure.value > 1.5 * figure.threshold


def test_layers_of_a_gpu_engine_are_replayed_on_the_cpu(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = Subjects(engine(tiny_llama_dir, "int4"), engine(tiny_llama_dir, "fp16"), Path("engines/tiny/int4"))
    loaded: list[tuple[str, str]] = []

    def load(folder: Path, limits: EngineLimits) -> Engine:
        loaded.append((folder.name, limits.device))
        return engine(tiny_llama_dir, folder.name)

    monkeypatch.setattr(eval.evaluate, "can_be_replayed", lambda engine: False)
    monkeypatch.setattr(eval.evaluate.Engine, "load", load)
    text = WindowSet([Window("random", 0, tuple(random_prompt(256, 321, seed=0)))], [], None)
    check = check_layers(subjects, text, 320, Console(quiet=True))
    assert loaded == [("fp16", "cpu"), ("int4", "cpu")]
    assert check is not None and max(layer.ratio for layer in check.layers) < 1.1


def measured_again(report: Report, subjects: Subjects) -> Report:
    """The report with the quality and the layers of other engines, on random text."""
    token_ids = random_prompt(256, 321, seed=0)
    text = WindowSet([Window("random", 0, tuple(token_ids))], [], None)
    positions = compare_window(subjects.fp16, subjects.quantized, text.windows[0], 0)
    layers = check_layers(subjects, text, 320, Console(quiet=True))
    return report.model_copy(update={"quality": summarise(text.windows, [positions], seed=0), "layers": layers})


def test_a_better_perplexity_is_no_proof(good: Report) -> None:
    better = good.quality.model_copy(update={"ppl_delta_pct": Estimate(value=-0.51, interval=[-0.6, -0.4])})
    body = certificate_body(good.model_copy(update={"quality": better}), CertificateRecipe())
    assert body.reasons == ["perplexity change, %: got 0.51 (its interval reaches 0.6), allowed at most 0.5"]


def test_the_command_stores_signs_and_exits_by_the_verdict(
    good: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = CertificateRecipe(kl_mean=1e-9)
    manifest = SimpleNamespace(kv=SimpleNamespace(recipe=SimpleNamespace(certificate=strict)))
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(eval.certify, "build", lambda model, kv: None)
    monkeypatch.setattr(eval.certify, "require_engine", lambda model, kv: tmp_path)
    monkeypatch.setattr(eval.certify, "read_manifest", lambda folder: manifest)
    monkeypatch.setattr(eval.certify, "evaluate", lambda request, console: (good, tmp_path / "run"))
    with pytest.raises(SystemExit, match="1"):
        eval.certify.main(["--model", "smollm2-135m", "--kv", "int8", "--quick"])
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert (last["verdict"], last["kv"]) == ("failed", "int8")
    assert "certification failed" in out
    stored = [(folder / CERTIFICATE_FILE).read_text() for folder in (tmp_path, tmp_path / "run")]
    assert stored[0] == stored[1]
    assert Certificate.model_validate_json(stored[0]).body.verdict == "failed"
