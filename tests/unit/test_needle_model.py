"""The shipped needle model: its weights are those that were measured; it finds needles through the runtime's cache."""

from __future__ import annotations

import json

import pytest

from bench.needle import Needles
from eval.hosts import NativeHost
from eval.needle import make_trials, questions_of, recall
from eval.needle_words import Language
from eval.windows import choose_windows
from nibble.formats import FORMATS
from nibble.hashing import file_sha256
from nibble.models import load_model, load_tokenizer, resolve_source
from nibble.paths import REPOSITORY_ROOT
from nibble.recipes import load_model_recipe
from nibble.runtime import Engine, EngineLimits

FOLDER = resolve_source(load_model_recipe("needle"))
MEASURED = json.loads((REPOSITORY_ROOT / "bench" / "results" / "needle.json").read_text(encoding="utf-8"))
RECORDS = [record for record in MEASURED if record["model"] == "wired start, trained"]  # the shipped one's
LONGEST = 32768


def test_the_weights_are_those_of_the_recipe_and_of_its_records() -> None:
    weights = file_sha256(FOLDER / "model.safetensors")
    assert weights == json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))["weights_sha256"]
    assert {record["weights"] for record in RECORDS} == {weights[:16]}


@pytest.mark.parametrize(("kv", "may_lose"), [("int8", 0.0), ("int4", 0.01)])
def test_recall_as_recorded_is_what_was_promised(kv: str, may_lose: float) -> None:
    cells = {name: {} for name in ("fp16", kv)}  # type: dict[str, dict[tuple[str, int, int], float]]
    for record in RECORDS:
        if record["format"] in cells:
            cells[record["format"]][record["variant"], record["length"], record["depth"]] = record["recall"]
    assert len(cells["fp16"]) == 3 * 4 * 11 and LONGEST in {length for _, length, _ in cells["fp16"]}
    assert min(cells["fp16"].values()) >= 0.99
    assert all(cells["fp16"][cell] - recalled <= may_lose for cell, recalled in cells[kv].items())


@pytest.mark.parametrize(("kv", "tokens"), [("fp16", 4096), ("int4", 16384)])
def test_needles_are_found_through_the_runtimes_cache(kv: str, tokens: int) -> None:
    model, tokenizer = load_model(FOLDER, "float32"), load_tokenizer(FOLDER)
    language = Language.of(tokenizer)
    assert language is not None
    engine = Engine(model, tokenizer, Needles(model, language).spec(FORMATS[kv]), EngineLimits(tokens, device="cpu"))
    trials = [trial for trial in make_trials(tokenizer, [tokens], [0, 50, 100], seed=3) if trial.variant == "multikey"]
    assert recall(trials, NativeHost(engine).generate_until(questions_of(trials).prompts)) == [1.0] * 12
    assert engine.stats().prefix_hit_tokens > 10 * (tokens - 512)  # the haystack was read once
    engine.check_integrity()


def test_windows_are_of_the_language() -> None:
    tokenizer = load_tokenizer(FOLDER)
    chosen = choose_windows(tokenizer, count=2, window_tokens=1024, seed=5)
    assert all(len(window.inputs) == 1024 for window in chosen.windows)
    assert all(tokenizer.unk_token_id not in window.token_ids for window in chosen.windows)
    assert chosen.windows != choose_windows(tokenizer, count=2, window_tokens=1024, seed=6).windows
