"""Builds an engine for TensorRT-LLM: explain, check the rules, write the checkpoint, call the builder, check.

    engines/<model>/<kv>-trtllm/   engine/ (config.json, rank*.engine) or llm.yaml, tokenizer/, manifest.json

A dry run stops after the explanation; it needs neither GPU nor TensorRT-LLM, and for shipped recipes no weights.
"""

from __future__ import annotations

import datetime
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from build.calibration import calibration_at_hand
from build.trtllm.back_check import check_engine
from build.trtllm.checkpoint import Scales, write_checkpoint
from build.trtllm.command import build_command
from build.trtllm.constraints import check_plan
from build.trtllm.explain import engine_steps, print_steps, pytorch_steps, xqa_table
from build.trtllm.levels import levels_table, measure_levels, require_levels
from build.trtllm.llm_arguments import llm_arguments
from build.trtllm.plan import CHECKPOINT, ENGINE, TOKENIZER, EnginePlan
from build.trtllm.source import SourceTensors
from calibrate.export import ExportForm, export_scales
from nibble import atomic
from nibble.calibration import Calibration
from nibble.models import tokenizer_files
from nibble.recipes import ModelRecipe
from nibble.trtllm.container import Runner, read_pins
from nibble.trtllm.manifest import LLM_FILE, SCHEMA, TrtllmManifest, write_trtllm_manifest
from nibble.trtllm.refusals import ENGINE_VARIABLE, check_llm_arguments


def explain_plan(plan: EnginePlan, runner: Runner, console: Console) -> None:
    """Print the steps of a plan, after its rules were checked. Raises NibbleError when it breaks one."""
    check_plan(plan)
    if plan.recipe.runtime == "tensorrt":
        console.print(xqa_table(plan))
        print_steps(console, engine_steps(plan, runner))
    else:
        print_steps(console, pytorch_steps(plan))


def build_tensorrt_engine(plan: EnginePlan, source: Path, runner: Runner, console: Console) -> TrtllmManifest:
    """Make the engine, whole or not at all. The checkpoint is removed once the engine is checked."""
    calibration = None if plan.recipe.cache == "fp16" else find_or_calibrate(plan.model, source, console)
    scales: Scales = {}
    if calibration is not None:
        scales = layer_scales(calibration, plan)
        if plan.recipe.cache == "int8":
            levels = measure_levels(calibration, scales)
            console.print(levels_table(levels))
            require_levels(levels)
    log = plan.target.with_name(f"{plan.target.name}.build.log")
    with atomic.exclusive(plan.target, console.print), atomic.new_directory(plan.target) as folder:
        (folder / CHECKPOINT).mkdir()
        with SourceTensors(source) as tensors:
            write_checkpoint(folder / CHECKPOINT, tensors, plan.config, plan.parallel, scales)
        console.print(f"checkpoint written and read back; trtllm-build runs, its output is in {log}", soft_wrap=True)
        runner.run(build_command(plan, folder), {}, log)
        record = check_engine(folder / ENGINE, plan)
        shutil.rmtree(folder / CHECKPOINT)
        copy_tokenizer(source, folder / TOKENIZER)
        content = manifest_content(plan, source, calibration)
        return write_trtllm_manifest(folder, {**content, "engine": record.model_dump()})


def write_pytorch_engine(plan: EnginePlan, source: Path, native: Path, console: Console) -> TrtllmManifest:
    """llm.yaml and manifest of our cache in the PyTorch runtime. native: the native engine of the same format."""
    arguments = llm_arguments(plan, source)
    check_llm_arguments(arguments)
    with atomic.exclusive(plan.target, console.print), atomic.new_directory(plan.target) as folder:
        (folder / LLM_FILE).write_text(yaml.safe_dump(arguments, sort_keys=False), encoding="utf-8")
        copy_tokenizer(source, folder / TOKENIZER)
        environment: dict[str, str] = {str(name): value for name, value in plan.recipe.environment.items()}
        environment[ENGINE_VARIABLE] = str(native.resolve())
        content = manifest_content(plan, source, None)
        return write_trtllm_manifest(folder, {**content, "native": str(native.resolve()), "environment": environment})


def layer_scales(calibration: Calibration, plan: EnginePlan) -> Scales:
    """The KV scale of each layer, float32 [1]: the larger of K's and V's. Raises NibbleError naming a bad layer."""
    layers = plan.config["num_hidden_layers"]
    tensors = export_scales(calibration, layers, ExportForm("trtllm", plan.recipe.cache, "tensor"))
    names = (f"transformer.layers.{layer}.attention.kv_cache_scaling_factor" for layer in range(layers))
    return {layer: tensors[name].to(torch.float32) for layer, name in enumerate(names)}


def find_or_calibrate(model: ModelRecipe, source: Path, console: Console) -> Calibration:
    """The model's calibration, made now with the default prompts when there is none that fits."""
    if (found := calibration_at_hand(model, source)) is not None:
        return found
    console.print("The cache's scales come from calibrated ranges, and there are none yet: calibrating now.")
    from calibrate.pipeline import calibrate
    from calibrate.run import default_request

    return calibrate(default_request(model))


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files, for pre- and postprocessing; config.json too, since some are known by it alone."""
    folder.mkdir()
    for path in [*tokenizer_files(source), source / "config.json"]:
        shutil.copyfile(path, folder / path.name)


def manifest_content(plan: EnginePlan, source: Path, calibration: Calibration | None) -> dict[str, Any]:
    """What both kinds of engine record."""
    return {
        "schema": SCHEMA,
        "host": "trtllm",
        "runtime": plan.recipe.runtime,
        "model": plan.model.model_dump(),
        "cache": plan.recipe.cache,
        "source": str(source.resolve()),
        "parallel": asdict(plan.parallel),
        "limits": plan.limits.model_dump(),
        "reuses_blocks": plan.reuses_blocks,
        "max_num_tokens": plan.max_num_tokens,
        "tokens_per_block": plan.recipe.tokens_per_block,
        "free_gpu_memory_fraction": plan.recipe.free_gpu_memory_fraction,
        "environment": dict(plan.recipe.environment),
        "bytes_per_token": plan.bytes_per_token,
        "calibration_sha256": calibration.sha256 if calibration else None,
        "engine": None,
        "native": None,
        "tensorrt_llm": read_pins()["tensorrt_llm"],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
