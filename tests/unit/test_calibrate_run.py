"""The stage from end to end on the tiny model: its files, determinism, and every way to be interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from calibrate import pipeline
from calibrate.checkpoint import PARTIAL_FILE
from calibrate.pipeline import CalibrationRequest, calibrate
from nibble.calibration import REPORT_FILE, SCALES_FILE, read_calibration
from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT
from nibble.recipes import load_model_recipe

COUNT = 10
KILL_SCRIPT = """
import os, signal, sys
from calibrate import collector, run
seen = []
original = collector.RangeCollector.run
def killing(self, token_ids):
    if len(seen) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    seen.append(token_ids)
    original(self, token_ids)
collector.RangeCollector.run = killing
run.main()
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"text": f"Prompt {i}: " + chr(65 + i) * (20 + 7 * i), "category": "ab"[i % 2]} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path / "engines"))
    return tmp_path / "engines"


def request_for(model: Path, prompts: str, out: Path) -> CalibrationRequest:
    return CalibrationRequest(load_model_recipe(str(model)), prompts, COUNT, seed=0, max_tokens=80, out=out)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (SCALES_FILE, REPORT_FILE)}


@pytest.fixture(scope="module")
def finished(tiny_llama_dir: Path, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration that ran without interruption."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_ENGINES", str(out / "engines"))
        calibrate(request_for(tiny_llama_dir, prompts, out))
    return out


def test_the_files_are_those_of_the_contract(finished: Path) -> None:
    tensors = load_file(finished / SCALES_FILE)
    parts = ["min", "max", "absmax", "tensor_min", "tensor_max", "tensor_absmax"]
    assert set(tensors) == {f"layers.{i}.{t}.{part}" for i in range(2) for t in "kv" for part in parts}
    assert tensors["layers.0.k.min"].shape == (2, 32)
    assert tensors["layers.0.k.tensor_absmax"].shape == (1,)
    assert (tensors["layers.1.v.min"] < tensors["layers.1.v.max"]).all()
    assert tensors["layers.1.v.absmax"].max() == tensors["layers.1.v.tensor_absmax"]
    report = json.loads((finished / REPORT_FILE).read_text(encoding="utf-8"))
    assert report["prompts"]["used"] == COUNT
    assert report["prompts"]["tokens"] > 256
    assert sum(report["prompts"]["categories"].values()) == COUNT
    assert [layer["index"] for layer in report["layers"]] == [0, 1]
    assert report["model"]["recipe"]["dtype"] == "auto"
    assert {"weights_sha256", "config_sha256"} <= set(report["model"])
    assert report["outliers"]["count"] >= len(report["outliers"]["worst"])
    assert not (finished / PARTIAL_FILE).exists()


def test_the_same_seed_gives_the_same_bytes(tiny_llama_dir: Path, prompts: str, finished: Path, tmp_path: Path) -> None:
    calibrate(request_for(tiny_llama_dir, prompts, tmp_path / "again"))
    assert files(tmp_path / "again") == files(finished)


def test_a_second_run_is_up_to_date_and_force_is_not(
    tiny_llama_dir: Path,
    prompts: str,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request, before = request_for(tiny_llama_dir, prompts, finished), files(finished)
    with monkeypatch.context() as patch:
        patch.delattr(pipeline, "load_model")
        calibrate(request)
    assert "up to date" in capsys.readouterr().out
    calibrate(request, force=True)
    assert files(finished) == before


def test_an_interrupted_run_goes_on_where_it_was(
    tiny_llama_dir: Path,
    prompts: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from calibrate.collector import RangeCollector

    request, run, ran = request_for(tiny_llama_dir, prompts, tmp_path / "out"), RangeCollector.run, []

    def interrupted(self: RangeCollector, token_ids: list[int]) -> None:
        run(self, token_ids)
        ran.append(token_ids)
        if len(ran) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(RangeCollector, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(request)
    assert not (request.out / SCALES_FILE).exists()
    calibrate(request)
    assert "resuming an interrupted run: 6 of 10 prompts" in capsys.readouterr().out
    assert len(ran) == 7 + 4
    assert files(request.out) == files(finished)
    assert not (request.out / PARTIAL_FILE).exists()


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    tiny_llama_dir: Path, prompts: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_for(tiny_llama_dir, prompts, tmp_path / "out")
    arguments = ["--model", str(tiny_llama_dir), "--prompts", prompts, "--n", str(COUNT), "--max-tokens", "80"]
    command = [sys.executable, "-c", KILL_SCRIPT, *arguments, "--out", str(request.out)]
    killed = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (request.out / PARTIAL_FILE).exists()
    calibrate(request)
    assert "resuming an interrupted run: 4 of 10 prompts" in capsys.readouterr().out
    assert files(request.out) == files(finished)


def test_the_state_of_another_run_is_not_used(
    tiny_llama_dir: Path,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from calibrate.collector import RangeCollector

    request, run, ran = request_for(tiny_llama_dir, prompts, tmp_path / "out"), RangeCollector.run, []

    def interrupted(self: RangeCollector, token_ids: list[int]) -> None:
        ran.append(token_ids)
        if len(ran) == 6:
            raise KeyboardInterrupt
        run(self, token_ids)

    monkeypatch.setattr(RangeCollector, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(request)
    calibrate(replace(request, seed=1))
    assert "resuming" not in capsys.readouterr().out


def test_reading_names_what_is_missing_or_does_not_fit(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=r"calibration\.json: not there; run `make calibrate`"):
        read_calibration(tmp_path)
    for name, content in files(finished).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / SCALES_FILE).write_bytes(b"other")
    with pytest.raises(NibbleError, match="does not belong to the calibration"):
        read_calibration(tmp_path)
    (tmp_path / REPORT_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(NibbleError, match="missing keys identity"):
        read_calibration(tmp_path)
    old = json.dumps({**json.loads((finished / REPORT_FILE).read_text(encoding="utf-8")), "schema": 1})
    (tmp_path / REPORT_FILE).write_text(old, encoding="utf-8")
    with pytest.raises(NibbleError, match="key schema: got 1, allowed 2"):
        read_calibration(tmp_path)
    with pytest.raises(NibbleError, match=r"layer 9: no layers\.9\.k"):
        read_calibration(finished).channel_range(9, "k")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nonsense"], "allowed gemma3-270m, llama-70b"),
        (["--model", "smollm2-135m", "--prompts", "missing.txt"], "can't be read"),
        (["--model", "smollm2-135m", "--max-tokens", "0"], "--max-tokens: got 0"),
    ],
)
def test_the_command_line_prints_errors_without_a_traceback(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from calibrate.run import main
    from nibble.stage import run_stage

    monkeypatch.setattr(sys, "argv", ["calibrate.run", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_stage(main)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
