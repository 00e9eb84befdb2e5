"""Command line of the calibration stage.

python -m calibrate.run --model smollm2-135m --n 64
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from calibrate.pipeline import CalibrationRequest, calibrate
from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT, calibration_dir
from nibble.recipes import ModelRecipe, load_model_recipe
from nibble.stage import run_stage

SHIPPED_PROMPTS = REPOSITORY_ROOT / "calibrate" / "prompts" / "prompts.jsonl"
DEFAULT_COUNT = 64
DEFAULT_MAX_TOKENS = 2048  # as long as the default context: RoPE turns slow channels of K for thousands of tokens


def default_request(recipe: ModelRecipe) -> CalibrationRequest:
    """The calibration that `make engine` runs when a format needs one and none is there."""
    out = calibration_dir(recipe.name)
    return CalibrationRequest(recipe, str(SHIPPED_PROMPTS), DEFAULT_COUNT, 0, DEFAULT_MAX_TOKENS, out)


def main() -> None:
    """Parse the command line and calibrate."""
    arguments = _parser().parse_args()
    if not 1 <= arguments.max_tokens <= 1 << 20:
        raise NibbleError(f"--max-tokens: got {arguments.max_tokens}, allowed 1 to {1 << 20}")
    recipe = load_model_recipe(arguments.model)
    request = CalibrationRequest(
        recipe=recipe,
        prompts=arguments.prompts,
        count=arguments.n,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        out=arguments.out or calibration_dir(recipe.name),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill saves its state too
    calibrate(request, force=arguments.force)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m calibrate.run", description="Find the ranges of K and V.")
    parser.add_argument("--model", required=True, help="a recipe's name, a folder, or a hub id")
    parser.add_argument("--prompts", default=str(SHIPPED_PROMPTS), help=".jsonl, .txt, or a hub dataset")
    parser.add_argument("--n", type=int, default=DEFAULT_COUNT, help="how many prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which prompts are drawn (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="of a prompt (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the result (default engines/<model>/calibration)")
    parser.add_argument("--force", action="store_true", help="calibrate again even when up to date")
    return parser


if __name__ == "__main__":
    run_stage(main)
