"""The format search from end to end on a tiny model: its file, determinism, interrupts, and the engine made from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from build.calibration import find_calibration
from build.engine import BuildRequest, build_engine
from build.layer_plan import find_mix
from calibrate import run as calibrate_run
from calibrate import search as search_module
from calibrate.search_memory import PARTIAL_FILE, SearchMemory
from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.layer_mix import SEARCH_FILE, read_layer_mix
from nibble.manifest import read_manifest
from nibble.models import resolve_source
from nibble.paths import calibration_dir
from nibble.recipes import load_kv_recipe, load_model_recipe, load_serve_recipe
from nibble.runtime import Engine, EngineLimits
from nibble.stage import run_stage

BUDGET = 0.01


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("search-engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_ENGINES", str(folder))
        yield folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search-prompts") / "prompts.txt"
    lines = [
        f"{i} the quick brown fox jumps over {i * i} lazy dogs and greets {i * 7919 % 1000} cats" for i in range(40)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def command(model: Path, prompts: Path, *more: str) -> int:
    arguments = ["--model", str(model), "--prompts", str(prompts), "--n", "40", "--search", "--windows", "1"]
    arguments += ["--held-out", "1", "--window-tokens", "512", "--kl-budget", str(BUDGET), *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["calibrate.run", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_stage(calibrate_run.main)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def searched(tiny_llama_dir: Path, engines: Path, prompts: Path) -> Path:
    assert command(tiny_llama_dir, prompts) == 0
    return calibration_dir(load_model_recipe(str(tiny_llama_dir)).name)


def content_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / SEARCH_FILE).read_text(encoding="utf-8")))


def test_the_choice_holds_on_held_out_prompts_and_is_explained(searched: Path) -> None:
    content = content_of(searched)
    assert 0 < content["chosen"]["kl_held_out"] <= BUDGET
    assert content["kl_budget"] == BUDGET
    assert len(content["policies"]) == 9 and len(content["sensitivities"]) == 5
    for name, measured in content["sensitivities"].items():
        assert len(measured["kl"]) == len(measured["k_error"]) == len(measured["v_error"]) == 2
        assert (sum(measured["kl"]) == 0) == (name == "fp16")
    for layer in read_layer_mix(searched).layers:
        assert layer.format == FORMATS[layer.name]
        assert f"format search chose {layer.name}" in layer.why
    assert {u["format"] for u in content["frontier"]["uniform"]} == set(FORMATS) - {"fp16", "int8-static"}
    assert (searched / "search.svg").read_text().startswith("<?xml")
    assert not (searched / PARTIAL_FILE).exists()


def test_the_mix_is_smaller_than_the_uniform_format_that_fits(searched: Path) -> None:
    content = content_of(searched)
    fitting = [u["bytes_per_token"] for u in content["frontier"]["uniform"] if u["kl_held_out"] <= BUDGET]
    assert content["chosen"]["bytes_per_token"] <= min(fitting)


def test_no_uniform_format_is_better_than_what_was_found_of_its_size(searched: Path) -> None:
    content = content_of(searched)
    uniform = {u["format"]: u for u in content["frontier"]["uniform"]}
    assert {equal["format"] for equal in content["equal_sizes"]} == set(uniform)
    for equal in content["equal_sizes"]:
        assert equal["bytes_per_token_at_context"] <= equal["uniform_bytes_per_token_at_context"]
        assert equal["kl_held_out"] <= equal["kl_uniform"] == uniform[equal["format"]]["kl_held_out"]


def test_the_same_search_gives_the_same_file(
    searched: Path, tiny_llama_dir: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (searched / SEARCH_FILE).read_bytes()
    assert command(tiny_llama_dir, prompts) == 0
    assert "format search of tiny-llama is up to date" in " ".join(capsys.readouterr().out.split())
    assert command(tiny_llama_dir, prompts, "--force") == 0
    assert (searched / SEARCH_FILE).read_bytes() == before


def test_an_interrupted_search_measures_nothing_twice(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure(name: str) -> float:
        measured.append(name)
        return 0.5

    for names in ("ab", "abc"):
        with SearchMemory(tmp_path, "identity", 3, Console(quiet=True)) as memory:
            assert [memory.figure(name, 1, lambda n=name: measure(n)) for name in names] == [0.5] * len(names)  # type: ignore[misc]
    assert measured == ["a", "b", "c"]
    with SearchMemory(tmp_path, "another", 3, Console(quiet=True)) as memory:
        memory.figure("a", 1, lambda: measure("a"))
        memory.forget()
    assert measured[-1] == "a" and not (tmp_path / PARTIAL_FILE).exists()


def test_an_engine_is_built_from_the_mix_and_runs(
    searched: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kv = load_model_recipe(str(tiny_llama_dir)), load_kv_recipe("mixed")
    assert kv.search is not None
    kv = kv.model_copy(update={"search": kv.search.model_copy(update={"kl_budget": BUDGET})})
    source, quiet = resolve_source(model), Console(quiet=True)
    monkeypatch.setattr(search_module, "search_formats", None)  # nothing is searched again
    mix = find_mix(model, kv, source, quiet)
    assert mix is not None
    request = BuildRequest(model, kv, load_serve_recipe(), source, find_calibration(model, kv, source, quiet, mix), mix)
    build_engine(request, quiet)
    manifest, chosen = read_manifest(request.target), content_of(searched)
    assert manifest.kv.recipe.name == "mixed" and request.target.name == "mixed"
    assert manifest.layer_formats() == mix.formats
    assert manifest.bytes_per_token == chosen["chosen"]["bytes_per_token"]
    assert manifest.policy.sink_pages == chosen["recipe"]["sink_pages"]
    assert manifest.calibration.search_sha256 == mix.sha256
    assert all("format search chose" in layer.why for layer in manifest.layers)
    assert manifest.preflight is not None and manifest.preflight.verdict == "safe"
    engine = Engine.load(request.target, EngineLimits(max_context=512, max_running=2))
    assert engine.kv_name == "mixed" and engine.stats().bytes_per_token == manifest.bytes_per_token
    assert engine.stats().layers_by_format == manifest.layers_by_format
    logits = torch.cat(list(engine.logits([i % 256 for i in range(400)])))
    assert torch.isfinite(logits).all()
    fallback = Engine.load(request.target, EngineLimits(max_context=512, max_running=2), kv_fallback="fp16")
    assert fallback.kv_name == "fp16" and all(fmt.is_fp16 for fmt in fallback.spec.formats)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--kv", "int4"], "--kv: got int4, whose recipe has no key search; allowed mixed"),
        (["--window-tokens", "100000"], "gives 0 windows of 100000 tokens, 2 are needed"),
        (["--windows", "500"], "key windows: got 500"),
        (["--kl-budget", "5"], "key kl_budget: got 5.0"),
    ],
)
def test_errors_are_named(
    searched: Path,
    tiny_llama_dir: Path,
    prompts: Path,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(tiny_llama_dir, prompts, *more) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "not there"), ("{", "can't be read"), ("[]", "schema 1"), ('{"schema": 1}', "missing keys identity")],
)
def test_a_damaged_result_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / SEARCH_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(NibbleError, match=rf"search\.json: .*{message}"):
        read_layer_mix(tmp_path)
