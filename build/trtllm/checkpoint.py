"""Writes a TensorRT-LLM checkpoint: config.json and one rank{r}.safetensors a GPU, from a Hugging Face folder.

Tensors are cut while they are read (a rank of a 70B model is all that is ever in memory) and carry the scale of the KV
cache, which comes from our calibration of K after RoPE and of V, never of Q. What was written is read back
by header and compared with the recorded schema before the folder is in place.

    write_checkpoint(folder, source, config, parallel, scales)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from build.trtllm.layout import Parallelism, RankSizes, padded_vocab
from build.trtllm.schema import TensorRule, check_config, tensor_rules
from build.trtllm.source import SourceTensors
from nibble.errors import NibbleError

SCALE = "attention.kv_cache_scaling_factor"
Scales = dict[int, torch.Tensor]  # of each layer: float32 [1]


def write_checkpoint(
    folder: Path, source: SourceTensors, config: dict[str, Any], parallel: Parallelism, scales: Scales
) -> None:
    """Write all ranks into `folder`. scales: {} for an fp16 cache. Raises NibbleError naming tensor or layer."""
    check_config(config)
    _check_scales(config, scales)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for rank in range(parallel.world_size):
        path = folder / f"rank{rank}.safetensors"
        save_file(rank_tensors(source, config, parallel, rank, scales), path, metadata={"format": "pt"})
        check_rank(path, config, parallel, rank, scales)


def rank_tensors(
    source: SourceTensors, config: dict[str, Any], parallel: Parallelism, rank: int, scales: Scales
) -> dict[str, torch.Tensor]:
    """The tensors of one rank by name. Layers are numbered from the first of the rank's stage."""
    cut = _Cut(source, config, RankSizes.of(config, parallel), parallel.place(rank))
    tensors = {
        rule.name: cut.read(rule, "") for rule in tensor_rules("outside_layers") if _on_stage(rule, parallel, rank)
    }
    for place, layer in enumerate(parallel.layers(rank, config["num_hidden_layers"])):
        for rule in _layer_rules(config):
            name = f"transformer.layers.{place}.{rule.name}"
            tensors[name] = scales[layer].clone() if rule.name == SCALE else cut.read(rule, f"model.layers.{layer}.")
    return tensors


def expected_tensors(
    config: dict[str, Any], parallel: Parallelism, rank: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to shape and type of what a rank's file must hold."""
    sizes, dtype = RankSizes.of(config, parallel), config["dtype"]
    found = {
        rule.name: (sizes.shape(rule.shape), dtype)
        for rule in tensor_rules("outside_layers")
        if _on_stage(rule, parallel, rank)
    }
    for place in range(len(parallel.layers(rank, config["num_hidden_layers"]))):
        for rule in _layer_rules(config):
            found[f"transformer.layers.{place}.{rule.name}"] = (sizes.shape(rule.shape), rule.dtype or dtype)
    return found


def check_rank(path: Path, config: dict[str, Any], parallel: Parallelism, rank: int, scales: Scales) -> None:
    """NibbleError when a rank's file differs from the schema or holds other scales than the calibration's."""
    expected = expected_tensors(config, parallel, rank)
    types = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
    with safe_open(path, framework="pt") as stream:
        found = {
            name: (tuple(stream.get_slice(name).get_shape()), types.get(stream.get_slice(name).get_dtype(), "?"))
            for name in stream.keys()  # noqa: SIM118  no mapping
        }
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise NibbleError(
                    f"{path.name}: {name}: got {found.get(name, 'nothing')}, TensorRT-LLM 1.2.1 expects "
                    f"{expected.get(name, 'no such tensor')}"
                )
        for place, layer in enumerate(parallel.layers(rank, config["num_hidden_layers"])):
            if scales and not torch.equal(stream.get_tensor(f"transformer.layers.{place}.{SCALE}"), scales[layer]):
                raise NibbleError(f"{path.name}: layer {layer}: its KV scale is not the calibration's")


class _Cut:
    """Reads what one rank holds of a tensor."""

    def __init__(self, source: SourceTensors, config: dict[str, Any], sizes: RankSizes, place: int) -> None:
        self._source, self._config, self._sizes, self._place = source, config, sizes, place
        self._dtype = getattr(torch, config["dtype"])

    def read(self, rule: TensorRule, prefix: str) -> torch.Tensor:
        names = [prefix + name for name in rule.hf]
        if rule.name == "lm_head.weight":
            return self._head(names[0])
        parts = [self._part(name, rule, index) for index, name in enumerate(names)]
        tensor = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self._dtype).contiguous()
        if tuple(tensor.shape) != self._sizes.shape(rule.shape):
            raise NibbleError(
                f"{names[0]}: gives {tuple(tensor.shape)} for a rank, config.json asks for "
                f"{self._sizes.shape(rule.shape)}; the weights and config.json do not belong together"
            )
        return tensor

    def _part(self, name: str, rule: TensorRule, index: int) -> torch.Tensor:
        if rule.split == "none":
            return self._source.read(name)
        if rule.split == "columns":
            return self._source.columns(name, *self._share(self._sizes.shape(rule.shape)[1]))
        if rule.split == "rows":
            return self._source.rows(name, *self._share(self._sizes.shape(rule.shape)[0]))
        return self._source.rows(name, *(self._share(self._sizes.q_rows) if index == 0 else self._kv_share()))

    def _share(self, length: int) -> tuple[int, int]:
        return self._place * length, (self._place + 1) * length

    def _kv_share(self) -> tuple[int, int]:
        """Whole heads; a head that several ranks hold is read by each of them."""
        ranks_per_head = max(self._sizes.tensor // self._config["num_key_value_heads"], 1)
        first = self._place // ranks_per_head * self._sizes.kv_rows
        return first, first + self._sizes.kv_rows

    def _head(self, name: str) -> torch.Tensor:
        """The rank's rows of lm_head, which is the embedding where both are tied; rows past the vocabulary are 0."""
        vocab = self._config["vocab_size"]
        length = padded_vocab(vocab, self._sizes.tensor) // self._sizes.tensor
        first, last = self._share(length)
        name = name if name in self._source else "model.embed_tokens.weight"
        rows = self._source.rows(name, min(first, vocab), min(last, vocab)).to(self._dtype)
        return torch.cat((rows, rows.new_zeros(length - len(rows), rows.shape[1]))).contiguous()


def _layer_rules(config: dict[str, Any]) -> list[TensorRule]:
    holds = {
        None: True,
        "attn_bias": config["attn_bias"],
        "qk_layernorm": config["qk_layernorm"],
        "quantized_kv": config["quantization"]["kv_cache_quant_algo"] is not None,
    }
    return [rule for rule in tensor_rules("layer") if holds[rule.when]]


def _on_stage(rule: TensorRule, parallel: Parallelism, rank: int) -> bool:
    return parallel.stage(rank) == (0 if rule.stage == "first" else parallel.pipeline - 1)


def _check_scales(config: dict[str, Any], scales: Scales) -> None:
    """Every layer has a scale that is finite, above 0 and not the placeholder 1.0, when the cache is quantized."""
    if config["quantization"]["kv_cache_quant_algo"] is None:
        return
    for layer in range(config["num_hidden_layers"]):
        scale = scales.get(layer)
        value = None if scale is None or tuple(scale.shape) != (1,) else float(scale)
        if value is None or not 0 < value < float("inf") or value == 1.0:
            raise NibbleError(
                f"KV scale of layer {layer}: got {'none' if scale is None else scale.tolist()}, allowed one finite "
                "number above 0 that is not exactly 1.0 (a placeholder); run `make calibrate` again"
            )
