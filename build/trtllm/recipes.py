"""What KV= means on HOST=trtllm: recipes/trtllm/*.yaml.

`runtime: tensorrt` is an engine of trtllm-build with one of its own caches; `runtime: pytorch` is its PyTorch runtime
with our cache. The environment holds switches that TensorRT-LLM reads, and no others.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.paths import RECIPES_DIR
from nibble.recipes import Name, Tokens, recipe_names
from nibble.strict_yaml import StrictModel, read_mapping, validate

Switch = Literal[
    "TRTLLM_FORCE_XQA",
    "TRTLLM_ENABLE_XQA_JIT",
    "TRTLLM_XQA_BLOCKS_PER_SEQUENCE",
    "TRTLLM_ENABLE_MMHA_MULTI_BLOCK_DEBUG",
    "TRTLLM_LOAD_KV_SCALES",
]
ENGINE_CACHES = ("fp16", "int8", "fp8")


class HostRecipe(StrictModel):
    """A cache on TensorRT-LLM.

    cache: fp16, int8 or fp8 of an engine, or the name of one of our formats. paged_context_fmha: what block reuse and
    chunked context need. max_num_tokens: tokens of a step. free_gpu_memory_fraction: of the memory left after weights.
    """

    name: Name
    runtime: Literal["tensorrt", "pytorch"]
    cache: Name
    tokens_per_block: Literal[16, 32, 64, 128]
    paged_context_fmha: bool
    max_num_tokens: Tokens
    free_gpu_memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)]
    environment: dict[Switch, str]


def load_host_recipe(kv: str) -> HostRecipe:
    """The recipe of KV=<kv> on HOST=trtllm. NibbleError lists what there is."""
    names = recipe_names("trtllm")
    if kv not in names:
        raise NibbleError(f"KV with HOST=trtllm: got {kv!r}, allowed {', '.join(names)}")
    path = RECIPES_DIR / "trtllm" / f"{kv}.yaml"
    recipe = validate(HostRecipe, read_mapping(path), str(path))
    if recipe.runtime == "tensorrt" and recipe.cache not in ENGINE_CACHES:
        raise NibbleError(f"{path}: key cache: got {recipe.cache!r}, allowed {', '.join(ENGINE_CACHES)} in an engine")
    if recipe.runtime == "pytorch" and recipe.tokens_per_block != PAGE_TOKENS:
        raise NibbleError(
            f"{path}: key tokens_per_block: got {recipe.tokens_per_block}, allowed {PAGE_TOKENS}: our page"
        )
    return recipe
