"""What config.json says about a model's attention, and the architectures whose cache is not K and V per layer and head.

Read before anything is loaded, so that a model that can't be served is refused by the name of what is in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nibble.formats import HEAD_DIMS

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")  # angles depend on the longest position of the batch
LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim")  # multi-head latent attention: DeepSeek V2, V3, Kimi K2, MiniCPM3
SINK_FAMILIES = ("gpt_oss",)  # learned attention sinks in the weights


@dataclass(frozen=True)
class Architecture:
    """windows: of each layer, tokens, None for full attention. rope_theta: None when it is not given."""

    family: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope_kind: str
    rope_theta: float | None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads


def read_architecture(config: dict[str, Any]) -> Architecture:
    """The facts of a config that `find_refusal` let through (KeyError otherwise)."""
    heads = config["num_attention_heads"]
    rope = _ropes(config)[0]
    return Architecture(
        family=str(config.get("model_type")),
        num_layers=config["num_hidden_layers"],
        num_q_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        windows=_windows(config),
        rope_kind=_rope_kind(rope),
        rope_theta=rope.get("rope_theta", config.get("rope_theta")),
    )


def find_refusal(config: dict[str, Any]) -> str | None:
    """Why a model of this config can't have our cache, and what to use instead; None when nothing is in the way."""
    if latent := next((key for key in LATENT_KEYS if config.get(key)), None):
        return (
            f"multi-head latent attention (MLA): config.json has {latent} {config[latent]}. Its cache "
            "is one compressed latent a token for all heads, not K and V, and is small already. Serve it with an "
            "engine made for MLA (vLLM, SGLang, TensorRT-LLM) and a bf16 latent cache"
        )
    if shared := _shared_layers(config):
        return (
            f"KV-shared layers: {shared}. Layers that read another layer's K and V would be sealed twice or not at "
            "all. Serve it with transformers or vLLM and their own cache, or use a model without shared KV"
        )
    softcap = config.get("attn_logit_softcapping")
    if softcap:
        return (
            f"soft-capped attention scores: attn_logit_softcapping {softcap}. Our attention does not cap scores. Use a "
            "model without it (Gemma 3 instead of Gemma 2), or an engine with an fp16 cache"
        )
    if config.get("model_type") in SINK_FAMILIES:
        return "attention sinks in the weights (gpt-oss): not supported; serve it with vLLM and its own cache"
    for kind in map(_rope_kind, _ropes(config)):
        if kind in LENGTH_DEPENDENT_ROPE:
            return (
                f"RoPE of type {kind!r}: its angles depend on the longest sequence of a batch, so cached K would not "
                "be reusable; allowed: default, linear, llama3, yarn"
            )
    return _bad_shape(config)


def _bad_shape(config: dict[str, Any]) -> str | None:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not isinstance(heads, int) or (kv_heads and heads % kv_heads):
        return None if heads is None else f"{heads} query heads over {kv_heads} KV heads: allowed a whole multiple"
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if size and size not in HEAD_DIMS:
        return (
            f"head size {size}: allowed multiples of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; serve it with an fp16 "
            "cache on another host"
        )
    return None


def _shared_layers(config: dict[str, Any]) -> str | None:
    if config.get("num_kv_shared_layers"):
        return f"num_kv_shared_layers {config['num_kv_shared_layers']}"
    if config.get("use_cla") or (config.get("cla_share_factor") or 1) > 1:
        return f"cross-layer attention, cla_share_factor {config.get('cla_share_factor')}"
    return None


def _ropes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """One RoPE for all layers, or one for each kind of layer (Gemma 3): that of full attention first."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [rope for rope in found.values() if isinstance(rope, dict)] if isinstance(found, dict) else []
    if not kinds:
        return [found if isinstance(found, dict) else {}]
    return sorted(kinds, key=lambda rope: rope is not found.get("full_attention"))


def _rope_kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * count
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds[:count])
    return (window,) * count
