"""Engines: what a build writes, that it is whole or absent, and that it is not made twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from build import engine as build_engine_module
from build import run as build_run
from build.calibration import find_calibration
from build.engine import BuildRequest, build_engine, short_calibration
from build.key_basis import MOMENTS_FILE, STATIC_SPAN, wants_basis
from calibrate.pipeline import CalibrationRequest, calibrate
from nibble.errors import NibbleError
from nibble.formats import FORMATS, SealedPageLayout
from nibble.key_transform import KEYS_FILE
from nibble.manifest import MANIFEST_FILE, read_manifest
from nibble.models import resolve_source
from nibble.paths import REPOSITORY_ROOT, calibration_dir, engine_dir
from nibble.quantizer import static_parameters
from nibble.recipes import load_kv_recipe, load_model_recipe, load_serve_recipe
from nibble.stage import run_stage
from nibble.static_scales import STATIC_FILE, read_static_scales

STATIC = [name for name, fmt in FORMATS.items() if fmt.needs_calibration]
KILL_SCRIPT = """
import os, signal
from build import engine, run
def kill(folder, manifest):
    os.kill(os.getpid(), signal.SIGKILL)
engine.write_manifest = kill
run.main()
"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module's own engines/ tree."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(autouse=True)
def use_engines(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(engines))


@pytest.fixture(scope="module")
def calibrated(tiny_llama_dir: Path, engines: Path) -> None:
    """A calibration of the tiny model where the build looks for it."""
    prompts = engines.parent / "calibration-prompts.txt"
    prompts.write_text("".join(f"{i} the quick brown fox jumps over {i * i} lazy dogs\n" * 3 for i in range(20)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_ENGINES", str(engines))
        recipe = load_model_recipe(str(tiny_llama_dir))
        calibrate(CalibrationRequest(recipe, str(prompts), 40, 0, 256, calibration_dir(recipe.name)))


def request_for(model_dir: Path, kv: str) -> BuildRequest:
    model, recipe = load_model_recipe(str(model_dir)), load_kv_recipe(kv)
    source = resolve_source(model)
    calibration = find_calibration(model, recipe, source, Console(quiet=True))
    return BuildRequest(model, recipe, load_serve_recipe(), source, calibration)


def build(model_dir: Path, kv: str, force: bool = False) -> Path:
    request = request_for(model_dir, kv)
    build_engine(request, Console(quiet=True), force)
    return request.target


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("kv", sorted(FORMATS))
def test_every_format_builds_and_reads_back(tiny_llama_dir: Path, kv: str) -> None:
    folder = build(tiny_llama_dir, kv)
    manifest = read_manifest(folder)
    layout = SealedPageLayout(FORMATS[kv], head_dim=32)
    assert manifest.layer_formats() == [FORMATS[kv]] * 2
    assert manifest.bytes_per_token == 2 * 2 * layout.bytes_per_token  # layers, KV heads
    assert manifest.bytes_per_token_fp16 == 2 * 2 * 2 * 2 * 32
    assert manifest.kv.recipe == load_kv_recipe(kv)
    assert manifest.source_folder(folder) == tiny_llama_dir.resolve()
    assert (manifest.calibration.sha256 is not None) == (kv in STATIC)
    assert ("folded into v_proj and o_proj" in manifest.layers[0].why) == FORMATS[kv].v.rotated
    made = {STATIC_FILE: kv in STATIC, KEYS_FILE: wants_basis(FORMATS[kv])}
    expected = {"tokenizer", MANIFEST_FILE, *(name for name, is_made in made.items() if is_made)}
    assert {path.name for path in folder.iterdir()} == expected
    for layer in manifest.layers:
        bound = {4: 0.2, 8: 0.1 if kv in STATIC else 0.02, 16: 1e-6}  # the text has bytes that calibration never saw
        assert layer.roundtrip.k_relative_error <= bound[FORMATS[kv].k.bits]
        assert layer.roundtrip.v_relative_error <= bound[FORMATS[kv].v.bits]
        assert layer.roundtrip.tokens == 192
    manifest.verify_weights(folder)


@pytest.mark.usefixtures("calibrated")
def test_static_scales_of_4_bits_belong_to_the_basis(tiny_llama_dir: Path) -> None:
    folder = build(tiny_llama_dir, "int4-static")
    moments = load_file(calibration_dir(tiny_llama_dir.name) / MOMENTS_FILE)
    tensors, scales = load_file(folder / KEYS_FILE), load_file(folder / STATIC_FILE)
    assert "layers.1.v.rotated" in tensors
    forward, count = tensors["layers.1.k.forward"].double(), moments["layers.1.tokens"].double()
    mean = moments["layers.1.k_sum"].double() / count
    covariance = moments["layers.1.k"].double() / count - mean[:, :, None] * mean[:, None]
    deviation = (forward @ covariance @ forward.mT).diagonal(dim1=-2, dim2=-1).sqrt()
    scale, zero = scales["layers.1.k.scale"].double(), scales["layers.1.k.zero"].double()
    torch.testing.assert_close(15 * scale, 2 * STATIC_SPAN * deviation, rtol=1e-4, atol=0)
    torch.testing.assert_close(zero + 7.5 * scale, (forward @ mean[:, :, None])[:, :, 0], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("calibrated")
def test_a_layer_without_its_basis_says_why(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter([None, "no balanced basis: too lossy"])
    monkeypatch.setattr("build.key_basis.refuse_basis", lambda *_: next(reasons))
    folder = build(tiny_llama_dir, "int4-static", force=True)
    first, second = read_manifest(folder).layers
    assert "stored in a balanced basis" in first.why and second.why.endswith("; no balanced basis: too lossy")
    assert {name.split(".")[1] for name in load_file(folder / KEYS_FILE)} == {"0"}


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("kv", ["int8-static"])
def test_static_scales_are_those_of_the_calibrated_ranges(tiny_llama_dir: Path, kv: str) -> None:
    folder = build(tiny_llama_dir, kv)
    ranges = load_file(calibration_dir(tiny_llama_dir.name) / "kv_scales.safetensors")
    scales = read_static_scales(folder, [FORMATS[kv]] * 2)
    for index, layer in enumerate(scales):
        for tensor, found in (("k", layer.k), ("v", layer.v)):
            low, high = ranges[f"layers.{index}.{tensor}.min"], ranges[f"layers.{index}.{tensor}.max"]
            expected = static_parameters(low, high, getattr(FORMATS[kv], tensor))
            assert found is not None
            assert found.scale.shape == (2, 1, 32)
            assert (found.scale[:, 0] - expected.scale).abs().max() < 1e-6
            assert (found.zero[:, 0] == expected.zero).all()
    tensors = load_file(folder / STATIC_FILE)
    tensors["layers.1.key.scale"] = tensors.pop("layers.1.k.scale")
    save_file(tensors, folder / STATIC_FILE)
    with pytest.raises(NibbleError, match=r"layer 1 K: no layers\.1\.k\.scale; run `make engine` again"):
        read_manifest(folder)


def test_a_second_build_is_up_to_date_and_loads_no_model(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_manifest(build(tiny_llama_dir, "int4"))
    monkeypatch.setattr(build_engine_module, "_write_engine", None)
    assert read_manifest(build(tiny_llama_dir, "int4")) == before


def test_force_builds_again_and_comes_to_the_same_hash(tiny_llama_dir: Path) -> None:
    folder = build(tiny_llama_dir, "int8")
    inode, before = folder.stat().st_ino, read_manifest(folder)
    after = read_manifest(build(tiny_llama_dir, "int8", force=True))
    assert folder.stat().st_ino != inode
    assert after.engine_hash == before.engine_hash


@pytest.mark.parametrize("name", [MANIFEST_FILE, "tokenizer/tokenizer.json"])
def test_a_damaged_engine_is_named_and_built_again(tiny_llama_dir: Path, name: str) -> None:
    folder = build(tiny_llama_dir, "int8")
    (folder / name).write_text("{}", encoding="utf-8")
    with pytest.raises(NibbleError, match=name):
        read_manifest(folder)
    assert read_manifest(build(tiny_llama_dir, "int8"))


def test_an_edited_manifest_is_noticed(tiny_llama_dir: Path) -> None:
    folder = build(tiny_llama_dir, "int8")
    content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    content["policy"]["recent_pages"] = 3
    (folder / MANIFEST_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(NibbleError, match="engine_hash does not match"):
        read_manifest(folder)
    content["colour"] = "red"
    (folder / MANIFEST_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(NibbleError, match=r"manifest\.json: unknown key colour"):
        read_manifest(folder)


def test_a_missing_engine_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="no engine there; run `make engine` first"):
        read_manifest(tmp_path)


def test_a_killed_build_leaves_nothing_and_the_next_one_works(tiny_llama_dir: Path) -> None:
    target = engine_dir(tiny_llama_dir.name, "k8v4")
    command = [sys.executable, "-c", KILL_SCRIPT, "--model", str(tiny_llama_dir), "--kv", "k8v4", "--force"]
    killed = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    leftover = target.with_name(".k8v4.new")
    assert leftover.is_dir()
    assert read_manifest(build(tiny_llama_dir, "k8v4", force=True))
    assert not leftover.exists()


def test_a_build_that_fails_keeps_the_engine_before_it(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_manifest(build(tiny_llama_dir, "fp16"))
    monkeypatch.setattr("build.self_check.LARGEST_RELATIVE_ERROR", -1.0)
    with pytest.raises(NibbleError, match="self-check: layer 0 K: relative round-trip error"):
        build(tiny_llama_dir, "fp16", force=True)
    assert read_manifest(engine_dir(tiny_llama_dir.name, "fp16")) == before


def test_changed_weights_or_config_are_noticed(tmp_path: Path, make_tiny_llama: Callable[..., None]) -> None:
    model_dir = tmp_path / "changing"
    make_tiny_llama(model_dir, seed=3)
    folder = build(model_dir, "int4")
    first = read_manifest(folder)
    make_tiny_llama(model_dir, seed=4)
    with pytest.raises(NibbleError, match=r"the weights in .* changed since the build"):
        first.verify_weights(folder)
    assert read_manifest(build(model_dir, "int4")).engine_hash != first.engine_hash
    (model_dir / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(NibbleError, match=r"config\.json changed since the build"):
        first.source_folder(folder)
    (model_dir / "config.json").unlink()
    with pytest.raises(NibbleError, match="its model is gone"):
        first.source_folder(folder)


def test_a_static_format_calibrates_when_nothing_fits(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    monkeypatch.setattr("calibrate.run.SHIPPED_PROMPTS", tmp_path / "shipped.txt")
    (tmp_path / "shipped.txt").write_text("".join(f"line {i} of the shipped prompts\n" for i in range(64)))
    console = Console(record=True, quiet=True)
    model, kv = load_model_recipe(str(tiny_llama_dir)), load_kv_recipe("int4-static")
    calibration = find_calibration(model, kv, tiny_llama_dir, console)
    assert calibration is not None and calibration.folder == calibration_dir(model.name)
    monkeypatch.setattr("calibrate.pipeline.calibrate", None)
    again = find_calibration(model, kv, tiny_llama_dir, console)
    assert again is not None and again.sha256 == calibration.sha256


@pytest.mark.usefixtures("calibrated")
def test_a_context_beyond_the_calibrated_positions_is_warned_of(tiny_llama_dir: Path) -> None:
    request = request_for(tiny_llama_dir, "int8-static")
    assert request.calibration is not None
    longest = request.calibration.longest_prompt
    assert f"up to {longest} tokens, but the engine serves 2048" in str(short_calibration(request))
    assert short_calibration(replace(request, limits=load_serve_recipe(max_context=64))) is None
    assert short_calibration(request_for(tiny_llama_dir, "int4")) is None
    manifest = read_manifest(build(tiny_llama_dir, "int8-static"))
    assert f"calibrated on positions 0 to {longest - 1}" in manifest.layers[0].why


def run_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["build.run", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_stage(build_run.main)
    return int(ended.value.code or 0)


def test_the_command_line_builds(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_llama_dir), "--kv", "int4", "--context", "1024", "--batch", "4"]
    assert run_command(arguments, monkeypatch) == 0
    limits = read_manifest(engine_dir(tiny_llama_dir.name, "int4")).limits
    assert (limits.max_context, limits.max_running) == (1024, 4)
    assert "bytes per sealed token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv", "int4", "--host", "vllm"], "host: got 'vllm', allowed native"),
        (["--kv", "int3"], "got 'int3', allowed fp16, int4"),
        (["--kv", "int4", "--context", "4096"], "context: got 4096, allowed up to 2048"),
        (["--kv", "int4", "--context", "2"], "key max_context: got 2, allowed an integer from 64"),
        (["--kv", "int4", "--batch", "0"], "key max_running: got 0, allowed an integer from 1 to 4096"),
    ],
)
def test_command_line_errors_are_named(
    tiny_llama_dir: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["--model", str(tiny_llama_dir), *arguments], monkeypatch) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("kind", ["models", "formats"])
def test_lists(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from build import list as build_list

    monkeypatch.setattr(sys, "argv", ["build.list", kind])
    build_list.main()
    out = capsys.readouterr().out
    assert ("3.66" in out) if kind == "formats" else ("smollm2-135m" in out)
