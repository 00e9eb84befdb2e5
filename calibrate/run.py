"""Command line of the calibration stage.

python -m calibrate.run --model smollm2-135m --n 64
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.pipeline import CalibrationRequest, calibrate
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.models import resolve_source
from nibble.paths import REPOSITORY_ROOT, calibration_dir
from nibble.recipes import ModelRecipe, load_kv_recipe, load_model_recipe, override
from nibble.stage import run_stage

if TYPE_CHECKING:
    from calibrate.search_request import SearchRequest

SHIPPED_PROMPTS = REPOSITORY_ROOT / "calibrate" / "prompts" / "prompts.jsonl"
OWN_PROMPTS = "prompts.jsonl"  # in the folder of a model that can't read the shipped ones
DEFAULT_COUNT = 64
DEFAULT_MAX_TOKENS = 2048  # as long as the default context: RoPE turns slow channels of K for thousands of tokens


def default_prompts(source: Path) -> Path:
    """The prompts that a model's folder brings, for a model of no natural language; else those of the repository."""
    own = source / OWN_PROMPTS
    return own if own.is_file() else SHIPPED_PROMPTS


def default_request(recipe: ModelRecipe) -> CalibrationRequest:
    """The calibration that `make engine` runs when a format needs one and none is there."""
    out, prompts = calibration_dir(recipe.name), default_prompts(resolve_source(recipe))
    return CalibrationRequest(recipe, str(prompts), DEFAULT_COUNT, 0, DEFAULT_MAX_TOKENS, out)


def main() -> None:
    """Parse the command line and calibrate."""
    arguments = _parser().parse_args()
    if not 1 <= arguments.max_tokens <= 1 << 20:
        raise NibbleError(f"--max-tokens: got {arguments.max_tokens}, allowed 1 to {1 << 20}")
    recipe = load_model_recipe(arguments.model)
    request = CalibrationRequest(
        recipe=recipe,
        prompts=arguments.prompts or str(default_prompts(resolve_source(recipe))),
        count=arguments.n,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        out=arguments.out or calibration_dir(recipe.name),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill saves its state too
    calibration = calibrate(request, force=arguments.force)
    if arguments.search:
        from calibrate.search import search_formats

        search_formats(search_request(request, calibration, arguments), force=arguments.force)


def search_request(
    request: CalibrationRequest, calibration: Calibration, arguments: argparse.Namespace
) -> SearchRequest:
    """The format search that belongs to a calibration: same model, prompts, seed and folder."""
    from calibrate.search_request import SearchRequest

    kv = load_kv_recipe(arguments.kv)
    if kv.search is None:
        raise NibbleError(
            f"--kv: got {kv.name}, whose recipe has no key search; allowed mixed, or a recipe file with one"
        )
    changes = {name: getattr(arguments, name) for name in ("kl_budget", "windows", "held_out", "window_tokens")}
    search = override(kv.search, changes, f"search of KV recipe {kv.name}")
    kv = kv.model_copy(update={"search": search})
    return SearchRequest(request.recipe, kv, request.prompts, request.seed, calibration, request.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m calibrate.run", description="Find the ranges of K and V.")
    parser.add_argument("--model", required=True, help="a recipe's name, a folder, or a hub id")
    parser.add_argument("--prompts", help=".jsonl, .txt, or a hub dataset (default: calibrate/prompts/prompts.jsonl)")
    parser.add_argument("--n", type=int, default=DEFAULT_COUNT, help="how many prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which prompts are drawn (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="of a prompt (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the result (default engines/<model>/calibration)")
    parser.add_argument("--search", action="store_true", help="then search the cheapest mix of formats")
    parser.add_argument("--kv", default="mixed", help="search: the KV recipe with its settings (default %(default)s)")
    parser.add_argument("--kl-budget", type=float, help="search: nats a token, instead of the recipe's")
    parser.add_argument("--windows", type=int, help="search: windows to choose on, instead of the recipe's")
    parser.add_argument("--held-out", type=int, help="search: windows to verify on, instead of the recipe's")
    parser.add_argument("--window-tokens", type=int, help="search: tokens of a window, instead of the recipe's")
    parser.add_argument("--force", action="store_true", help="calibrate again even when up to date")
    return parser


if __name__ == "__main__":
    run_stage(main)
