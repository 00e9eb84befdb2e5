"""Shared by the runtime's tests: tiny random models of several families, engines over them, the oracle as a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
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
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nibble.formats import FORMATS
from nibble.quantizer import static_parameters
from nibble.reference import LayerScales, reference_attention
from nibble.rotation import fold_value_rotation
from nibble.runtime import Engine, EngineLimits
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy

VOCABULARY = 300
MADE_ENGINES: list[Engine] = []  # conftest.py checks their pages after every test
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),  # biases in q, k and v
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 48}),  # norms over q and k
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 100}),
    # norms over q and k, a window and a RoPE base that differ by layer
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


class LetterTokenizer:
    """Each token is a letter: enough of a tokenizer for the engine."""

    chat_template = None
    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


def make_model(
    family: str = "llama", *, q_heads: int = 6, kv_heads: int = 2, head_dim: int | None = None
) -> PreTrainedModel:
    """A seeded random model of two layers with weights large enough that attention matters."""
    config_class, model_class, options = FAMILIES[family]
    values = {"head_dim": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **options}
    values |= {"head_dim": head_dim} if head_dim else {}
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=96 * 2,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        initializer_range=0.15,
        **values,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def make_spec(model: PreTrainedModel, kv: str, policy: PagePolicy | None = None) -> CacheSpec:
    config = model.config
    fmt = FORMATS[kv]
    scales = {}
    if fmt.needs_calibration:
        bound = torch.full((config.num_key_value_heads, 1, config.head_dim), 4.0)
        both = LayerScales(static_parameters(-bound, bound, fmt.k), static_parameters(-bound, bound, fmt.v))
        scales = dict.fromkeys(range(config.num_hidden_layers), both)
    return CacheSpec(
        (fmt,) * config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        policy or PagePolicy(),
        scales,
    )


def make_engine(kv: str = "int4", family: str = "llama", policy: PagePolicy | None = None, **limits: Any) -> Engine:
    model = make_model(family)
    values = {"max_context": 1024, "max_running": 4, "chunk_tokens": 128, **limits}
    engine = Engine(model, LetterTokenizer(), make_spec(model, kv, policy), EngineLimits(**values))  # type: ignore[arg-type]
    MADE_ENGINES.append(engine)
    return engine


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(model: PreTrainedModel, spec: CacheSpec, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of the model when every layer attends as the oracle says. Changes the model."""
    for fmt, layer in zip(spec.formats, model.model.layers, strict=True):
        if fmt.v.rotated:
            fold_value_rotation(layer.self_attn, spec.head_dim)

    def attention(module, query, key, value, mask, scaling, sliding_window=None, **_):  # type: ignore[no-untyped-def]
        layer = module.layer_idx
        out = reference_attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1).half(),
            value[0].transpose(0, 1).half(),
            fmt=spec.formats[layer],
            policy=spec.policy,
            softmax_scale=scaling,
            scales=spec.scales.get(layer),
            sliding_window=sliding_window,
        ).out
        return out[None].to(query.dtype), None

    AttentionInterface.register("nibble-oracle", attention)
    model.set_attn_implementation("nibble-oracle")
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def attend_over_fp16_keys_and_values(model: PreTrainedModel) -> None:
    """transformers' own attention, but for K and V in the precision that an fp16 cache keeps."""

    def attention(module, query, key, value, *arguments, **options):  # type: ignore[no-untyped-def]
        return sdpa_attention_forward(module, query, key.half().float(), value.half().float(), *arguments, **options)

    AttentionInterface.register("fp16-keys-and-values", attention)
    AttentionMaskInterface.register("fp16-keys-and-values", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("fp16-keys-and-values")
