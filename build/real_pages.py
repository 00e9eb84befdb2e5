"""Real K and V to check an engine with: a short text through the model, K after RoPE, cut into full pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.models import device_options, load_model, load_tokenizer
from nibble.recipes import ModelRecipe
from nibble.visibility import PagePolicy

CHECKED_PAGES = 3
TEXT = """The lighthouse keeper wrote down the weather twice a day: wind from the north-west at 14 knots, pressure
1013 hPa, visibility good. In the evening he repaired the clock, which had lost four minutes since Tuesday, and read a
letter. "Dear Tom," it began, "the price of coal rose to 3.75 a sack, so we burn driftwood." Then he coded a little:
def mean(values): return sum(values) / len(values)  # fails when the list is empty
Am nächsten Morgen lag Nebel über der Bucht; il faisait froid, et la mer était calme. 海面平静, 没有风。
"""


@dataclass(frozen=True)
class LayerPages:
    """Full pages of one layer, fp16 [pages, num_kv_heads, 64, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


@torch.inference_mode()
def capture_pages(source: Path, recipe: ModelRecipe, policy: PagePolicy) -> list[LayerPages]:
    """The pages behind the sinks of `TEXT`, for each layer. Raises NibbleError: too short a context, NaN or Inf."""
    model = load_model(source, recipe.dtype, **device_options())
    ids = _token_ids(source, (policy.sink_pages + CHECKED_PAGES) * PAGE_TOKENS)
    if ids.shape[1] > model.config.max_position_embeddings:
        raise NibbleError(
            f"model {recipe.name}: max_position_embeddings {model.config.max_position_embeddings} is too short for "
            f"{policy.sink_pages} sink pages and {CHECKED_PAGES} more of {PAGE_TOKENS} tokens; use fewer sink_pages"
        )
    cache = DynamicCache()  # keeps every token, whatever window the model has
    model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    first = policy.sink_pages * PAGE_TOKENS
    layers = [(layer.keys[..., first:, :], layer.values[..., first:, :]) for layer in cache.layers]
    return [LayerPages(_pages(k, f"layer {i} K"), _pages(v, f"layer {i} V")) for i, (k, v) in enumerate(layers)]


def _token_ids(source: Path, count: int) -> torch.Tensor:
    """[1, count] token ids of `TEXT`, repeated as often as needed."""
    once = list(load_tokenizer(source)(TEXT)["input_ids"])
    return torch.tensor([(once * (count // len(once) + 1))[:count]])


def _pages(values: torch.Tensor, owner: str) -> torch.Tensor:
    """[1, heads, pages * 64, channels] to fp16 [pages, heads, 64, channels], as the cache would hold it."""
    pages = values[0].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1).half().cpu()
    if not torch.isfinite(pages).all():
        raise NibbleError(f"{owner}: NaN, or values that fp16 can't hold (largest {values.abs().max().item():g})")
    return pages
