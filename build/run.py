"""Command line of the build stage.

python -m build.run --model smollm2-135m --kv int4
python -m build.run --model llama-70b --kv int8 --host trtllm --dry-run
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from build.calibration import find_calibration
from build.engine import BuildRequest, build_engine, short_calibration
from build.layer_plan import find_mix
from build.trtllm.stage import TrtllmRequest, build_for_trtllm
from nibble.errors import NibbleError
from nibble.manifest import Manifest
from nibble.models import read_shape, resolve_source
from nibble.paths import engine_dir
from nibble.recipes import (
    DUMMY,
    FP8,
    ModelRecipe,
    ServeRecipe,
    load_kv_recipe,
    load_model_recipe,
    load_serve_recipe,
    recipe_names,
)
from nibble.stage import console, run_stage

HOSTS = ("native", "trtllm")


def main() -> None:
    """Parse the command line and build on the host that it names."""
    arguments = _parser().parse_args()
    check_host(arguments)
    if arguments.host == "trtllm":
        build_for_trtllm(_trtllm_request(arguments), make_limits, _build_for_trtllm_runtime, console)
    else:
        _print_summary(build_native(arguments.model, arguments.kv, arguments.context, arguments.batch, arguments.force))


def build_native(model: str, kv: str, context: int | None, batch: int | None, force: bool = False) -> Manifest:
    """Calibrate when the format needs it, and build a native engine."""
    model_recipe, kv_recipe = load_model_recipe(model), load_kv_recipe(kv)
    source = resolve_source(model_recipe)
    limits = make_limits(model_recipe, read_shape(source).max_positions, context, batch)
    mix = find_mix(model_recipe, kv_recipe, source, console)
    calibration = find_calibration(model_recipe, kv_recipe, source, console, mix)
    request = BuildRequest(model_recipe, kv_recipe, limits, source, calibration, mix)
    if warning := short_calibration(request):
        console.print(f"[yellow]warning:[/] {warning}")
    return build_engine(request, console, force)


def check_host(arguments: argparse.Namespace) -> None:
    """NibbleError unless the host exists and can have what is asked for."""
    if arguments.host not in HOSTS:
        raise NibbleError(f"host: got {arguments.host!r}, allowed {', '.join(HOSTS)}")
    if arguments.host == "trtllm":
        if arguments.model.startswith((DUMMY, f"{FP8}:")):
            raise NibbleError(
                "WEIGHTS=dummy or fp8 with HOST=trtllm: trtllm-build takes a checkpoint's own weights; allowed: "
                "HOST=native"
            )
        return
    if arguments.kv in recipe_names("trtllm") and arguments.kv not in recipe_names("kv"):
        raise NibbleError(
            f"KV={arguments.kv} runs with HOST=trtllm only; with HOST=native allowed: {', '.join(recipe_names('kv'))} "
            "(k8v4 is smaller than fp8 and measured closer to fp16)"
        )
    if arguments.dry_run:
        raise NibbleError("DRY_RUN=1 explains a build with HOST=trtllm; with HOST=native just build, it needs no GPU")


def make_limits(model: ModelRecipe, max_positions: int, context: int | None, batch: int | None) -> ServeRecipe:
    """The limits stored with the engine: the defaults, as far as the model goes, under the given values."""
    longest = min(max_positions, model.max_context)
    if context is not None and context > longest:
        raise NibbleError(
            f"context: got {context}, allowed up to {longest} for {model.name} (the smaller of its recipe's "
            "max_context and the positions it was trained for)"
        )
    default = load_serve_recipe()
    return load_serve_recipe(max_context=context or min(default.max_context, longest), max_running=batch)


def _build_for_trtllm_runtime(model: str, kv: str, context: int | None, batch: int | None) -> Path:
    """The native engine that the PyTorch runtime runs with: its folder."""
    return engine_dir(build_native(model, kv, context, batch).model.name, kv)


def _trtllm_request(arguments: argparse.Namespace) -> TrtllmRequest:
    return TrtllmRequest(
        arguments.model,
        arguments.kv,
        arguments.context,
        arguments.batch,
        arguments.tp,
        arguments.pp,
        arguments.gpus_per_node,
        arguments.image_tag,
        arguments.dry_run,
    )


def _print_summary(manifest: Manifest) -> None:
    ratio = manifest.bytes_per_token_fp16 / manifest.bytes_per_token
    worst = max(manifest.layers, key=lambda layer: layer.roundtrip.k_relative_error)
    table = Table(show_header=False, box=None)
    table.add_row("engine", str(engine_dir(manifest.model.name, manifest.kv.recipe.name)))
    table.add_row("cache", f"{manifest.bytes_per_token:g} bytes per sealed token, {ratio:.2f} times smaller than fp16")
    mix = ", ".join(f"{count} × {name}" for name, count in manifest.layers_by_format.items())
    table.add_row("layers", f"{mix}; {manifest.policy.sink_pages} sink and {manifest.policy.recent_pages} recent pages")
    table.add_row("round trip", f"worst K layer {worst.index}: {worst.roundtrip.k_relative_error:.2%} off")
    table.add_row("hash", manifest.engine_hash[:16])
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m build.run", description="Build an engine.")
    parser.add_argument("--model", required=True, help="a recipe's name, a folder, or a hub id")
    parser.add_argument("--kv", required=True, help="a KV recipe's name or file")
    parser.add_argument("--host", default="native", help="what runs the engine: native or trtllm")
    parser.add_argument("--context", type=int, help="longest sequence, tokens")
    parser.add_argument("--batch", type=int, help="sequences that run at once")
    trtllm = parser.add_argument_group("with --host trtllm")
    trtllm.add_argument("--tp", type=int, help="GPUs that share each layer (default: of the model's recipe)")
    trtllm.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    trtllm.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of one machine (default: 8)")
    trtllm.add_argument("--image-tag", help="tritonserver's release, such as 26.07")
    trtllm.add_argument("--dry-run", action="store_true", help="explain each step; write and run nothing")
    parser.add_argument("--force", action="store_true", help="build again even when up to date")
    return parser


if __name__ == "__main__":
    run_stage(main)
