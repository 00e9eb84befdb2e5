"""A Hugging Face config as the config.json of a TensorRT-LLM checkpoint.

Every key of the recorded schema is written, defaults included, so that nothing depends on what the builder assumes.
Two things have bitten others: transformers 5 keeps RoPE's base inside `rope_parameters`, and TensorRT-LLM does not know
the RoPE type "default".
"""

from __future__ import annotations

from typing import Any

from build.trtllm.layout import Parallelism
from build.trtllm.schema import check_config, read_data
from nibble.errors import NibbleError

KV_ALGORITHM = {"fp16": None, "int8": "INT8", "fp8": "FP8"}
PLAIN_ROPE = ("default", None)


def checkpoint_config(hf: dict[str, Any], kv: str, dtype: str, parallel: Parallelism) -> dict[str, Any]:
    """config.json of a checkpoint. hf: the model's own config. kv: of KV_ALGORITHM. Raises NibbleError."""
    family = _family(hf)
    heads = hf["num_attention_heads"]
    config = {
        "architecture": family["architecture"],
        "dtype": engine_dtype(hf, dtype),
        "logits_dtype": "float32",
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_hidden_layers": hf["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": hf.get("head_dim") or hf["hidden_size"] // heads,
        "intermediate_size": hf["intermediate_size"],
        "hidden_act": hf.get("hidden_act", "silu"),
        "norm_epsilon": hf["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": hf["max_position_embeddings"],
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "qk_layernorm": hf["model_type"] == "qwen3",
        "mapping": {
            "world_size": parallel.world_size,
            "gpus_per_node": parallel.gpus_per_node,
            "tp_size": parallel.tensor,
            "pp_size": parallel.pipeline,
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": KV_ALGORITHM[kv], "exclude_modules": None},
        "rotary_base": rope_base(hf),
        "rotary_scaling": rope_scaling(hf),
        "attn_bias": hf["model_type"] == "qwen2",
        "mlp_bias": False,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "disable_weight_only_quant_plugin": False,
        **family["config"],
    }
    check_config(config)
    return config


def engine_dtype(hf: dict[str, Any], wanted: str) -> str:
    """The type of weights and activations. "auto" is the checkpoint's own; float32 becomes float16.

    TensorRT-LLM's fused attention computes in 16 bits only, so a float32 engine would have neither fused prefill
    attention nor XQA.
    """
    found = hf.get("torch_dtype") or hf.get("dtype") or "bfloat16" if wanted == "auto" else wanted
    return "float16" if found == "float32" else str(found)


def rope_base(hf: dict[str, Any]) -> float:
    """RoPE's base, from either place where transformers keeps it. NibbleError when it is in neither."""
    base = (hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta"))
    if base is None:
        raise NibbleError(
            "config.json: no rope_theta, neither at the top nor in rope_parameters; TensorRT-LLM would assume a base "
            "of its own. Add the model's base to its config.json"
        )
    return float(base)


def rope_scaling(hf: dict[str, Any]) -> dict[str, Any] | None:
    """RoPE's scaling without its base; None for plain RoPE."""
    found = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    found.pop("rope_theta", None)
    return None if found.get("rope_type", found.get("type")) in PLAIN_ROPE else found


def _family(hf: dict[str, Any]) -> dict[str, Any]:
    families = read_data("checkpoint")["families"]
    kind = str(hf.get("model_type"))
    if kind not in families:
        raise NibbleError(f"HOST=trtllm: got a model of type {kind!r}, allowed {', '.join(families)}")
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise NibbleError(
                f"HOST=trtllm: config.json has {key}, whose tensors this converter does not write; use HOST=native"
            )
    if hf.get("sliding_window") and hf.get("use_sliding_window", True) and kind != "qwen2":
        raise NibbleError(
            f"HOST=trtllm: config.json has a sliding window of {hf['sliding_window']} tokens; engines are built for "
            "full attention only. Use HOST=native, or a version of the model without it (Mistral 0.3)"
        )
    return dict(families[kind])
