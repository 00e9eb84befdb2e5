"""Tables of what MODEL= and KV= may name.

python -m build.list models
python -m build.list formats [--model smollm2-135m]
"""

from __future__ import annotations

import argparse

from rich.table import Table

from nibble.formats import SealedPageLayout
from nibble.models import read_shape, resolve_source
from nibble.recipes import TensorRecipe, load_kv_recipe, load_model_recipe, recipe_names
from nibble.stage import console, run_stage

USUAL_HEAD_DIM = 128


def main() -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m build.list", description="List recipes.")
    parser.add_argument("kind", choices=("models", "formats"))
    parser.add_argument("--model", help="formats: sizes at this model's head size (default: 128 channels)")
    arguments = parser.parse_args()
    console.print(model_table() if arguments.kind == "models" else format_table(head_dim_of(arguments.model)))


def model_table() -> Table:
    """The shipped models."""
    table = Table(title="MODEL= (or a local folder, or owner/name of the hub)", title_justify="left")
    for heading in ("model", "source", "type", "tensor parallel", "max context"):
        table.add_column(heading, overflow="fold")
    for name in recipe_names("models"):
        recipe = load_model_recipe(name)
        table.add_row(name, recipe.source, recipe.dtype, str(recipe.tensor_parallel), f"{recipe.max_context:,}")
    return table


def format_table(head_dim: int) -> Table:
    """The shipped KV formats and their bytes per sealed token and KV head, K and V together."""
    table = Table(title=f"KV= and bytes per sealed token and KV head at head size {head_dim}", title_justify="left")
    for heading in ("format", "K", "V", "sink, recent", "bytes", "ratio"):
        table.add_column(heading)
    every = [load_kv_recipe(name) for name in recipe_names("kv")]
    recipes = [recipe for recipe in every if recipe.search is None]
    sizes = {recipe.name: SealedPageLayout(recipe.format, head_dim).bytes_per_token for recipe in recipes}
    for recipe in sorted(recipes, key=lambda recipe: -sizes[recipe.name]):
        pages = f"{recipe.sink_pages}, {recipe.recent_pages}"
        size, ratio = f"{sizes[recipe.name]:g}", f"{sizes['fp16'] / sizes[recipe.name]:.2f}"
        table.add_row(recipe.name, _in_words(recipe.k), _in_words(recipe.v), pages, size, ratio)
    for recipe in every:
        if recipe.search is not None:
            table.add_row(
                recipe.name, "searched", "searched", "searched", "by layer", f"KL ≤ {recipe.search.kl_budget:g}"
            )
    return table


def head_dim_of(model: str | None) -> int:
    """The head size of a model (fetched when needed); 128 when none is asked for. Raises NibbleError."""
    if model is None:
        return USUAL_HEAD_DIM
    return read_shape(resolve_source(load_model_recipe(model))).head_dim


def _in_words(tensor: TensorRecipe) -> str:
    """For example '4, page channel' or '4, token, rotated'."""
    scale = [] if tensor.scale == "none" else [tensor.scale.replace("_", " ")]
    return ", ".join([str(tensor.bits), *scale, *(["rotated"] if tensor.rotated else [])])


if __name__ == "__main__":
    run_stage(main)
