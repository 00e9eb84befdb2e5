"""The weights of a Llama-like decoder as a GPU wants them: projections that read the same input lie in one matrix.

Tensors come one at a time from a source (nibble.runtime.weight_sources) and go straight into their place, so that a
model is never held twice. With `fp8` the projections of the layers are kept in e4m3 (nibble.runtime.fp8_rows); the rest
stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nibble.errors import NibbleError
from nibble.rotation import fold_value_rotation_into, rotate_input_columns, rotate_output_rows
from nibble.runtime.decoder_ops import Rope
from nibble.runtime.decoder_products import Matrix
from nibble.runtime.decoder_shape import DecoderShape
from nibble.runtime.fp8_rows import Fp8Rows
from nibble.runtime.shards import WHOLE, Shards, SplitSource


class WeightSource(Protocol):
    """Where tensors come from, by their names in a Hugging Face checkpoint."""

    def read(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, part of a weight on its device, with the tensor of that name; NibbleError if there is none."""


@dataclass(frozen=True)
class LayerWeights:
    """input_norm, inner_norm: [hidden]; qkv: [(q + 2 kv heads) * D, hidden], bias to it; q_norm, k_norm: [D];
    out: [hidden, q heads * D]; gate_up: [2 * intermediate, hidden]; down: [hidden, intermediate]. attended_norm,
    mlp_norm: [hidden], of what attention and MLP add to the stream."""

    input_norm: torch.Tensor
    inner_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Matrix
    gate_up: Matrix
    down: Matrix
    attended_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """embedding, head: [vocabulary, hidden] (one tensor when tied); ropes: of each layer.

    rotated: layers whose V comes out rotated (nibble.rotation), which changes no answer.
    """

    config: PretrainedConfig
    shape: DecoderShape
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    ropes: tuple[Rope, ...]
    generation_config: GenerationConfig | None = None
    shards: Shards = WHOLE
    rotated: frozenset[int] = frozenset()

    @classmethod
    def read(
        cls,
        config: PretrainedConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        shards: Shards = WHOLE,
        *,
        fp8: bool = False,
        rotated: Collection[int] = (),
    ) -> DecoderWeights:
        """This rank's weights from a source. NibbleError names what is missing or not supported.

        fp8: projections in e4m3; they can't be rotated later, so `rotated` has to name the layers that will be.
        """
        shape = DecoderShape.of(config).split(shards)
        source = RotatedSource(source, frozenset(rotated), shape.head_dim)
        reader = _Reader(source if shards.size == 1 else SplitSource(source, shards), dtype, device, fp8)
        embedding = reader.one("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        layers = tuple(_read_layer(reader, shape, index) for index in range(len(shape.windows)))
        head = embedding if shape.ties_embeddings else reader.one("lm_head.weight", shape.vocabulary, shape.hidden)
        ropes = _read_ropes(config, shape, device)
        norm = _read_norm(reader, shape, "model.norm.weight", shape.hidden)
        return cls(config, shape, embedding, layers, norm, head, ropes, None, shards, frozenset(rotated))

    @property
    def num_bytes(self) -> int:
        """Bytes that a decode step reads: all but the embedding, of which it reads a row a token."""
        each = [self.norm, self.head, *(t for layer in self.layers for t in vars(layer).values() if t is not None)]
        return sum(t.num_bytes if isinstance(t, Fp8Rows) else t.numel() * t.element_size() for t in each)

    def rotate_values(self, layer: int) -> None:
        """Rotate V of a layer, in its weights, in place, unless it is rotated already."""
        if layer in self.rotated:
            return
        weights, rows = self.layers[layer], self.shape.qkv_rows
        assert isinstance(weights.qkv, torch.Tensor) and isinstance(weights.out, torch.Tensor), "rotate fp8 when read"
        bias = None if weights.qkv_bias is None else weights.qkv_bias.split(rows)[2]
        fold_value_rotation_into(weights.qkv.split(rows)[2], bias, weights.out, self.shape.head_dim)


@dataclass(frozen=True)
class RotatedSource:
    """A source whose V is rotated in some layers, and their output projections with it."""

    source: WeightSource
    layers: frozenset[int]
    head_dim: int

    def read(self, name: str, target: torch.Tensor) -> None:
        """See `WeightSource.read`."""
        self.source.read(name, target)
        _, _, layer, *rest = (*name.split("."), "", "")
        if not (layer.isdigit() and int(layer) in self.layers):
            return
        if "v_proj" in rest:
            rotate_output_rows(target if target.dim() == 2 else target[:, None], self.head_dim)
        elif "o_proj" in rest:
            rotate_input_columns(target, self.head_dim)


@dataclass(frozen=True)
class _Reader:
    source: WeightSource
    dtype: torch.dtype
    device: torch.device
    fp8: bool

    def one(self, name: str, *size: int) -> torch.Tensor:
        return self.stacked([name], list(size[:1]), *size[1:])

    def stacked(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> torch.Tensor:
        """Tensors of so many rows each, one under the other."""
        whole = torch.empty(sum(rows), *columns, dtype=self.dtype, device=self.device)
        for name, part in zip(names, whole.split(list(rows)), strict=True):
            self.source.read(name, part)
        return whole

    def matrix(self, names: Sequence[str], rows: Sequence[int], width: int) -> Matrix:
        """Projections, one under the other. In e4m3 each is quantized before the next is read."""
        if not self.fp8:
            return self.stacked(names, rows, width)
        whole, start = Fp8Rows.empty(sum(rows), width, self.device), 0
        for name, count in zip(names, rows, strict=True):
            whole.part(start, count).fill(self.one(name, count, width))
            start += count
        return whole


def _read_layer(reader: _Reader, shape: DecoderShape, index: int) -> LayerWeights:
    at = f"model.layers.{index}."
    qkv = [f"{at}self_attn.{name}_proj" for name in "qkv"]
    gate_up = [f"{at}mlp.{name}_proj.weight" for name in ("gate", "up")]
    rows = shape.qkv_rows

    def norm(name: str, size: int = shape.hidden) -> torch.Tensor:
        return _read_norm(reader, shape, f"{at}{name}.weight", size)

    return LayerWeights(
        input_norm=norm("input_layernorm"),
        inner_norm=norm("pre_feedforward_layernorm" if shape.is_gemma else "post_attention_layernorm"),
        qkv=reader.matrix([f"{name}.weight" for name in qkv], rows, shape.hidden),
        qkv_bias=reader.stacked([f"{name}.bias" for name in qkv], rows) if shape.has_qkv_bias else None,
        q_norm=norm("self_attn.q_norm", shape.head_dim) if shape.has_qk_norm else None,
        k_norm=norm("self_attn.k_norm", shape.head_dim) if shape.has_qk_norm else None,
        out=reader.matrix([f"{at}self_attn.o_proj.weight"], [shape.hidden], rows[0]),
        gate_up=reader.matrix(gate_up, [shape.intermediate] * 2, shape.hidden),
        down=reader.matrix([f"{at}mlp.down_proj.weight"], [shape.hidden], shape.intermediate),
        attended_norm=norm("post_attention_layernorm") if shape.is_gemma else None,
        mlp_norm=norm("post_feedforward_layernorm") if shape.is_gemma else None,
    )


def _read_norm(reader: _Reader, shape: DecoderShape, name: str, size: int) -> torch.Tensor:
    """The factor of a norm: Gemma keeps what it adds to 1, and does the sum in fp32."""
    weight = reader.one(name, size)
    return weight.float() + 1 if shape.is_gemma else weight


def _read_ropes(config: PretrainedConfig, shape: DecoderShape, device: torch.device) -> tuple[Rope, ...]:
    """The RoPE of each layer; NibbleError unless it turns all channels."""
    kinds = [f"{kind}_" for kind in config.layer_types] if shape.is_gemma else [""] * config.num_hidden_layers
    rotary = (Gemma3RotaryEmbedding if shape.is_gemma else LlamaRotaryEmbedding)(config)
    ropes = {}
    for kind in set(kinds):
        frequencies = getattr(rotary, f"{kind}inv_freq").float().to(device)
        if len(frequencies) * 2 != shape.head_dim:
            raise NibbleError(
                f"{config.model_type}: RoPE turns {2 * len(frequencies)} of {shape.head_dim} channels; the GPU "
                "runtime allows all of them; serve it with DEVICE=cpu"
            )
        ropes[kind] = Rope(frequencies, float(getattr(rotary, f"{kind}attention_scaling")))
    return tuple(ropes[kind] for kind in kinds)
