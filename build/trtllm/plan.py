"""What is to be built for TensorRT-LLM: the recipe, the model's shape, the GPUs, and everything that follows from them.

A plan is made without a GPU, without TensorRT-LLM and, for the shipped recipes, without the model's weights; so a dry
run costs nothing and the rules of the builder are checked before a GPU is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build.trtllm.layout import Parallelism
from build.trtllm.model_config import checkpoint_config
from build.trtllm.recipes import HostRecipe
from build.trtllm.schema import read_data
from build.trtllm.xqa import AttentionShape
from nibble.errors import NibbleError
from nibble.formats import FORMATS, SealedPageLayout
from nibble.models import read_config
from nibble.paths import engine_dir
from nibble.recipes import ModelRecipe, ServeRecipe

CHECKPOINT, ENGINE, TOKENIZER = "checkpoint", "engine", "tokenizer"


@dataclass(frozen=True)
class EnginePlan:
    """config: the checkpoint's config.json. limits: context and batch. target: the folder of the engine."""

    model: ModelRecipe
    recipe: HostRecipe
    config: dict[str, Any]
    parallel: Parallelism
    limits: ServeRecipe
    target: Path

    @property
    def reuses_blocks(self) -> bool:
        """Block reuse and chunked context both read the paged cache in prefill."""
        return self.recipe.paged_context_fmha

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one step; a prompt must fit whole where it can't be cut into chunks."""
        return (
            self.recipe.max_num_tokens
            if self.reuses_blocks
            else max(self.recipe.max_num_tokens, self.limits.max_context)
        )

    @property
    def attention(self) -> AttentionShape:
        """What one rank attends with."""
        return AttentionShape(
            cache=self.recipe.cache,
            dtype=self.config["dtype"],
            head_size=self.config["head_size"],
            group=self.config["num_attention_heads"] // self.config["num_key_value_heads"],
            tokens_per_block=self.recipe.tokens_per_block,
        )

    @property
    def bytes_per_token(self) -> float:
        """Of the cache on all ranks together, K and V, sealed, without what heads repeated over ranks add."""
        width = self.config["head_size"]
        if self.recipe.runtime == "pytorch":
            of_a_head = SealedPageLayout(FORMATS[self.recipe.cache], width).bytes_per_token
        else:
            of_a_head = 2.0 * width * {"fp16": 2, "int8": 1, "fp8": 1}[self.recipe.cache]
        return of_a_head * self.config["num_hidden_layers"] * self.config["num_key_value_heads"]


def make_plan(
    model: ModelRecipe, recipe: HostRecipe, hf_config: dict[str, Any], parallel: Parallelism, limits: ServeRecipe
) -> EnginePlan:
    """A plan; the cache of the PyTorch runtime is planned as fp16, since the checkpoint knows nothing of ours."""
    kv = recipe.cache if recipe.runtime == "tensorrt" else "fp16"
    config = checkpoint_config(hf_config, kv, model.dtype, parallel)
    return EnginePlan(model, recipe, config, parallel, limits, engine_dir(model.name, f"{recipe.name}-trtllm"))


def known_config(model: ModelRecipe, source: Path | None) -> dict[str, Any]:
    """config.json of the model's folder; for a shipped recipe whose model is not at hand, what was recorded of it."""
    if source is not None:
        return read_config(source)
    recorded = read_data("model_configs")
    if model.name not in recorded or model.name == "source":
        shipped = ", ".join(name for name in recorded if name != "source")
        raise NibbleError(
            f"model {model.name}: it is not at hand, and a dry run without it knows {shipped} only; fetch it first, "
            "for example with `hf download`"
        )
    return dict(recorded[model.name])
