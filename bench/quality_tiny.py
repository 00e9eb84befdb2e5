"""Tiny seeded models of every shape that the runtime claims: GQA groups, head sizes, QK-norm, biases, sliding window.

They are random: their figures say that a shape works and in which order the caches come, not what a real model loses.
What real models have and random ones lack is put in: K channels of very different size, undone in Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.quality_models import Subject, read_texts
from nibble.errors import NibbleError

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # biases of q, k and v
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # norms over q and k
    "mistral": (MistralConfig, MistralForCausalLM),
}
VOCABULARY = 256


@dataclass(frozen=True)
class TinyShape:
    """What a tiny model is made of."""

    family: str
    q_heads: int
    kv_heads: int
    head_dim: int


TINY = {
    "tiny-mha-64": TinyShape("llama", 4, 4, 64),
    "tiny-group3-64": TinyShape("llama", 6, 2, 64),
    "tiny-group4-80": TinyShape("llama", 4, 1, 80),
    "tiny-group7-128-bias": TinyShape("qwen2", 7, 1, 128),
    "tiny-group8-128-qknorm": TinyShape("qwen3", 8, 1, 128),
    "tiny-group9-96": TinyShape("llama", 9, 1, 96),
    "tiny-group16-64": TinyShape("llama", 16, 1, 64),
    "tiny-group4-256-window": TinyShape("mistral", 4, 1, 256),
}


def make_tiny(name: str, device: str) -> Subject:
    """The subject of a name. NibbleError lists the names."""
    if name not in TINY:
        raise NibbleError(f"tiny model: got {name!r}, allowed {', '.join(TINY)}")
    texts = {which: torch.tensor(list(text.encode()[:200_000])) for which, text in read_texts().items()}
    return Subject(name, make_model(TINY[name]).to(device), texts)


@torch.no_grad()
def make_model(shape: TinyShape) -> PreTrainedModel:
    """A seeded model of two layers."""
    config_class, model_class = FAMILIES[shape.family]
    options = {"sliding_window": 300} if shape.family == "mistral" else {}
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=48 * shape.q_heads,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval().requires_grad_(False)
        for layer in model.model.layers:
            _spread_channels(layer.self_attn, shape)
    return model


def _spread_channels(attention: Any, shape: TinyShape) -> None:
    """Scale rotary pairs of K up or down, and those of Q the other way; give biases a size."""
    sizes = (torch.randn(shape.head_dim // 2) * 0.7).exp().repeat(2)
    if hasattr(attention, "k_norm"):
        attention.k_norm.weight.mul_(sizes)
        attention.q_norm.weight.div_(sizes)
        return
    for projection, factor, heads in (
        (attention.k_proj, sizes, shape.kv_heads),
        (attention.q_proj, 1 / sizes, shape.q_heads),
    ):
        projection.weight.mul_(factor.repeat(heads)[:, None])
        if projection.bias is not None:
            projection.bias.copy_(torch.randn_like(projection.bias) * factor.repeat(heads))
