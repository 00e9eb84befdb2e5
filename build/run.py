"""Command line of the build stage.

python -m build.run --model smollm2-135m --kv int4
"""

from __future__ import annotations

import argparse

from rich.table import Table

from build.calibration import find_calibration
from build.engine import BuildRequest, build_engine, short_calibration
from build.layer_plan import find_mix
from nibble.errors import NibbleError
from nibble.manifest import Manifest
from nibble.models import read_shape, resolve_source
from nibble.paths import engine_dir
from nibble.recipes import ModelRecipe, ServeRecipe, load_kv_recipe, load_model_recipe, load_serve_recipe
from nibble.stage import console, run_stage


def main() -> None:
    """Parse the command line, calibrate when the format needs it, build, and say what came out."""
    arguments = _parser().parse_args()
    check_host(arguments.host)
    model, kv = load_model_recipe(arguments.model), load_kv_recipe(arguments.kv)
    source = resolve_source(model)
    limits = make_limits(model, read_shape(source).max_positions, arguments.context, arguments.batch)
    mix = find_mix(model, kv, source, console)
    request = BuildRequest(model, kv, limits, source, find_calibration(model, kv, source, console, mix), mix)
    if warning := short_calibration(request):
        console.print(f"[yellow]warning:[/] {warning}")
    _print_summary(build_engine(request, console, arguments.force))


def check_host(host: str) -> None:
    """NibbleError unless engines for that host can be built."""
    if host == "trtllm":
        raise NibbleError("host: trtllm is not in this version, it comes later; allowed now: native")
    if host != "native":
        raise NibbleError(f"host: got {host!r}, allowed native (trtllm comes later)")


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
    parser.add_argument("--host", default="native", help="what runs the engine: native")
    parser.add_argument("--context", type=int, help="longest sequence, tokens")
    parser.add_argument("--batch", type=int, help="sequences that run at once")
    parser.add_argument("--force", action="store_true", help="build again even when up to date")
    return parser


if __name__ == "__main__":
    run_stage(main)
