"""The two engines of an evaluation: the quantized one and its fp16 twin, found under engines/ and loaded alike.

A missing quantized engine is an error that names the command. A missing fp16 twin is built at once, and said: the
comparison means nothing without it, and building it needs no calibration.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eval.answers import SIDE_BY_SIDE
from eval.config import EvalPlan
from eval.records import EngineRecord
from nibble.errors import NibbleError
from nibble.manifest import read_manifest
from nibble.paths import REPOSITORY_ROOT, engine_dir
from nibble.recipes import load_kv_recipe, load_model_recipe
from nibble.runtime import Engine, EngineLimits

BASELINE_KV = "fp16"


@dataclass(frozen=True)
class Subjects:
    """Both engines, loaded with the same limits."""

    quantized: Engine
    fp16: Engine
    quantized_dir: Path

    @property
    def records(self) -> dict[str, EngineRecord]:
        return {"quantized": _record(self.quantized), "fp16": _record(self.fp16)}


def check_request(model: str, kv: str, plan: EvalPlan) -> None:
    """NibbleError for an unknown model or KV, for dummy weights and for windows longer than the model's context."""
    recipe = load_model_recipe(model)
    load_kv_recipe(kv)
    if recipe.has_dummy_weights:
        raise NibbleError(
            f"evaluation of {recipe.name}: its weights are random (WEIGHTS=dummy), so there is no quality to measure "
            "and none to certify; evaluate the real model"
        )
    if plan.max_context > recipe.max_context:
        raise NibbleError(
            f"evaluation of {recipe.name}: got sequences of {plan.max_context} tokens, allowed at most "
            f"{recipe.max_context} (max_context of its recipe); ask for shorter windows"
        )


def require_engine(model: str, kv: str) -> Path:
    """The folder of a built engine; NibbleError says which `make engine` is missing."""
    folder = engine_dir(load_model_recipe(model).name, load_kv_recipe(kv).name)
    if not (folder / "manifest.json").is_file():
        raise NibbleError(f"engine: got none at {folder}, allowed a built one; run: make engine MODEL={model} KV={kv}")
    return folder


def require_baseline(model: str, console: Console) -> Path:
    """The folder of the fp16 twin, built when it is not there."""
    folder = engine_dir(load_model_recipe(model).name, BASELINE_KV)
    if not (folder / "manifest.json").is_file():
        console.print(
            f"no fp16 engine of {model} to compare with: building it (make engine MODEL={model} KV={BASELINE_KV})"
        )
        command = [sys.executable, "-m", "build.run", "--model", model, "--kv", BASELINE_KV]
        if subprocess.run(command, cwd=REPOSITORY_ROOT, stdout=sys.stderr, check=False).returncode:
            raise NibbleError(f"fp16 engine of {model}: its build failed, see above; run: {' '.join(command[1:])}")
    return require_engine(model, BASELINE_KV)


def load_subjects(quantized: Path, fp16: Path, plan: EvalPlan) -> Subjects:
    """Load both engines with room for the plan's longest sequence and its number of streams.

    NibbleError when they were built from different weights: their difference would say nothing about the cache.
    """
    models = [read_manifest(folder).model for folder in (quantized, fp16)]
    if len({(model.config_sha256, model.weights_sha256, model.tokenizer_sha256) for model in models}) > 1:
        raise NibbleError(
            f"engines: got {quantized.name} and {fp16.name} of different weights, configurations or tokenizers, "
            f"allowed two of one model; build both again: make engine KV={quantized.name}, make engine KV={fp16.name}"
        )
    limits = EngineLimits(max_context=plan.max_context, max_running=max(SIDE_BY_SIDE, plan.speed.streams))
    return Subjects(quantized=Engine.load(quantized, limits), fp16=Engine.load(fp16, limits), quantized_dir=quantized)


def _record(engine: Engine) -> EngineRecord:
    assert engine.manifest is not None  # every loaded engine has one
    engine_hash = engine.manifest.engine_hash
    return EngineRecord(kv=engine.kv_name, engine_hash=engine_hash, fallback_reason=engine.fallback_reason)
