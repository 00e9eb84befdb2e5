"""How each layer's K is stored: in the balanced basis, or less a bias that is too large to keep.

The pre-flight names the layers whose bias may be too large. There real pages are sealed both ways, and the scores that
Q makes of them decide: a bias stays in K unless that costs clearly more, since GPU kernels can't add it back.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from build.attention_weights import read_attention_weights
from build.key_basis import KeyPlan, find_key_transforms, find_moments, stored_pages
from build.key_bias import COARSEST_STEP, score_error
from build.preflight import Preflight
from build.real_pages import LayerPages, capture_pages
from nibble.balance import BasisChange
from nibble.formats import KVFormat
from nibble.key_transform import KEYS_FILE, KeyBias, KeyTransform
from nibble.models import read_shape
from nibble.recipes import ModelRecipe
from nibble.visibility import PagePolicy

MOST_ERROR = COARSEST_STEP**2  # of scores, times what K less its bias has: steps COARSEST_STEP times as wide
BIAS_REASON = (
    f"the pre-flight found a large bias of k_proj: it is taken off K before it is stored and comes back, turned by "
    f"RoPE, when K is read ({KEYS_FILE})"
)


def plan_key_transforms(
    source: Path, recipe: ModelRecipe, formats: list[KVFormat], preflight: Preflight, console: Console
) -> KeyPlan:
    """The transform of each layer that has one, and why. A layer whose bias is taken off keeps its own basis."""
    plan = find_key_transforms(source, recipe, formats, console)
    biases = {i: b for i, b in read_key_biases(source, preflight.bias_layers).items() if not formats[i].is_fp16}
    moments = find_moments(source, recipe, console) if biases else None
    pages = capture_pages(source, recipe, PagePolicy()) if moments else []
    for layer, bias in biases.items():
        times = None
        if moments:
            k, basis = pages[layer].k, plan.transforms.get(layer, KeyTransform()).basis
            times = kept_bias_error(k, bias, formats[layer], moments[layer].q_mean, basis)
        if times is not None and times <= MOST_ERROR:
            kept = f"the bias of k_proj stays in K: the error of scores is {times:.2g} times that of K less its bias"
            plan.why[layer] = "; ".join([*([plan.why[layer]] if layer in plan.why else []), kept])
        else:
            plan.transforms[layer], plan.why[layer] = KeyTransform(bias=bias), BIAS_REASON
    return plan


def kept_bias_error(
    k: torch.Tensor, bias: KeyBias, fmt: KVFormat, reader: torch.Tensor, basis: BasisChange | None
) -> float:
    """Squared error of scores with the bias kept in K, in the basis if there is one, over that of K less its bias.

    k: [pages, heads, 64, D], pages of a sequence from its second on. reader: second moment of Q, [heads, D, D].
    """
    count, _, tokens, _ = k.shape
    wave = bias.at(tokens + torch.arange(count * tokens)).unflatten(0, (count, tokens)).permute(2, 0, 1, 3)
    whole = k.float().transpose(0, 1)
    return score_error(whole, fmt.k, reader, basis) / max(score_error(whole - wave, fmt.k, reader), 1e-30)


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
