"""How each layer's K is stored: in the balanced basis, or less the bias that the pre-flight found too large to keep."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from build.attention_weights import read_attention_weights
from build.key_basis import KeyPlan, find_key_transforms, stored_pages
from build.preflight import Preflight
from build.real_pages import LayerPages
from nibble.formats import KVFormat
from nibble.key_transform import KEYS_FILE, KeyBias, KeyTransform
from nibble.models import read_shape
from nibble.recipes import ModelRecipe

BIAS_REASON = (
    f"the pre-flight found a large bias of k_proj: it is taken off K before it is stored and comes back, turned by "
    f"RoPE, when K is read ({KEYS_FILE})"
)


def plan_key_transforms(
    source: Path, recipe: ModelRecipe, formats: list[KVFormat], preflight: Preflight, console: Console
) -> KeyPlan:
    """The transform of each layer that has one, and why. A layer whose bias is taken off keeps its own basis."""
    plan = find_key_transforms(source, recipe, formats, console)
    for layer, bias in read_key_biases(source, preflight.bias_layers).items():
        if not formats[layer].is_fp16:
            plan.transforms[layer], plan.why[layer] = KeyTransform(bias=bias), BIAS_REASON
    return plan


def as_stored(pages: LayerPages, transform: KeyTransform | None, first_position: int) -> LayerPages:
    """Pages as the cache holds them. first_position: of the first page's first token."""
    if transform is None or transform.bias is None:
        return stored_pages(pages, transform)
    count, _, tokens, _ = pages.k.shape
    offset = transform.offset(first_position + torch.arange(count * tokens))
    assert offset is not None  # it has a bias
    k = transform.store(pages.k.transpose(1, 2).flatten(0, 1)).float() - offset
    return LayerPages(k.unflatten(0, (count, tokens)).transpose(1, 2).half(), pages.v)


def read_key_biases(source: Path, layers: list[int]) -> dict[int, KeyBias]:
    """The bias of k_proj of these layers, with the speeds at which RoPE turns it."""
    if not layers:
        return {}
    shape = read_shape(source)
    rotary = LlamaRotaryEmbedding(config=AutoConfig.from_pretrained(source, local_files_only=True))
    frequencies, scaling = rotary.inv_freq, float(rotary.attention_scaling)
    weights = read_attention_weights(source, shape.num_layers)
    biases = {layer: weights[layer].k_bias for layer in layers}
    return {
        layer: KeyBias(bias.view(shape.num_kv_heads, shape.head_dim), frequencies.to(torch.float32), scaling)
        for layer, bias in biases.items()
        if bias is not None
    }
