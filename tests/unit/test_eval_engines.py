"""Engines as the build leaves them: found, built when fp16 is missing, refused when they do not belong together."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from build import run as build_run
from eval.config import EvalPlan, SpeedPlan
from eval.evaluate import EvalRequest, evaluate
from eval.subjects import load_subjects, require_baseline, require_engine
from nibble.errors import NibbleError

PLAN = EvalPlan(
    name="test",
    windows=1,
    window_tokens=256,
    seed=0,
    speed=SpeedPlan(prompt_tokens=16, decode_tokens=4, streams=1, repeats=1),
    memory_tokens=64,
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(autouse=True)
def elsewhere(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(engines))
    monkeypatch.setenv("NIBBLE_RESULTS", str(tmp_path / "results"))


def build(model: Path, kv: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["build.run", "--model", str(model), "--kv", kv])
        build_run.main()
    return require_engine(str(model), kv)


def test_an_evaluation_builds_the_fp16_twin_and_says_so(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tiny_llama_dir, "int8", monkeypatch)
    said = io.StringIO()
    request = EvalRequest(str(tiny_llama_dir), "int8", PLAN, served=False)
    report, folder = evaluate(request, Console(file=said, width=1000))
    assert f"building it (make engine MODEL={tiny_llama_dir} KV=fp16)" in said.getvalue()
    assert folder.parts[-3:-1] == ("tiny-llama", "int8")
    assert report.engines["quantized"].engine_hash != report.engines["fp16"].engine_hash
    assert report.summary.bytes_per_token < report.summary.bytes_per_token_fp16


def test_fp16_against_itself_costs_nothing(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tiny_llama_dir, "fp16", monkeypatch)
    report, _ = evaluate(EvalRequest(str(tiny_llama_dir), "fp16", PLAN, served=False), Console(quiet=True))
    assert report.quality.kl.max == 0.0
    assert report.summary.top1_agreement == 1.0


def test_engines_of_different_weights_are_refused(
    tiny_llama_dir: Path, make_tiny_llama: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_llama(tmp_path / "other-llama", seed=1)
    ours = build(tiny_llama_dir, "int8", monkeypatch)
    others = build(tmp_path / "other-llama", "fp16", monkeypatch)
    with pytest.raises(NibbleError, match="different weights"):
        load_subjects(ours, others, PLAN)


def test_a_failed_build_of_the_twin_is_an_error(
    make_tiny_llama: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_tiny_llama(tmp_path / "no-weights")
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    with pytest.raises(NibbleError, match="its build failed"):
        require_baseline(str(tmp_path / "no-weights"), Console(quiet=True))
    assert "error:" in capfd.readouterr().err


def test_a_window_longer_than_the_model_is_an_error(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tiny_llama_dir, "int8", monkeypatch)
    build(tiny_llama_dir, "fp16", monkeypatch)
    long = PLAN.model_copy(update={"window_tokens": 4096})
    with pytest.raises(NibbleError, match="got 4096, allowed up to 2048"):
        evaluate(EvalRequest(str(tiny_llama_dir), "int8", long, served=False), Console(quiet=True))


def test_a_server_that_cannot_start_fails_the_check_and_not_the_report(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: object) -> None:
        raise NibbleError("no tritonserver here")

    build(tiny_llama_dir, "int8", monkeypatch)
    build(tiny_llama_dir, "fp16", monkeypatch)
    monkeypatch.setattr("eval.served.preflight.check", refuse)
    report, _ = evaluate(EvalRequest(str(tiny_llama_dir), "int8", PLAN), Console(quiet=True))
    assert (report.served.outcome, report.served.detail) == ("failed", "no tritonserver here")
