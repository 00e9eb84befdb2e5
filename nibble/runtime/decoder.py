"""The forward pass of a Llama-like decoder over the cache: matrix products, and between them one operation each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from nibble.runtime.cache import CacheSpec
from nibble.runtime.cuda_backend import CudaBackend
from nibble.runtime.decoder_ops import HeadLayout, HeadWeights, NewTokens, add_and_norm, split_heads
from nibble.runtime.decoder_products import multiply_gated, multiply_in_parts
from nibble.runtime.decoder_weights import DecoderWeights, LayerWeights
from nibble.runtime.device_step import DecodeStep, PrefillStep


@dataclass(frozen=True)
class Decoder:
    """A decoder over a backend's cache. heads: of each layer."""

    weights: DecoderWeights
    backend: CudaBackend
    layout: HeadLayout
    heads: tuple[HeadWeights, ...]

    @classmethod
    def over(cls, weights: DecoderWeights, spec: CacheSpec, backend: CudaBackend) -> Decoder:
        """Folds the rotation of V into the weights where a layer's format wants it."""
        shape, device = weights.shape, weights.norm.device
        heads = []
        for index, layer in enumerate(weights.layers):
            transform = spec.key_transforms.get(index)
            if index in spec.rotated_layers:
                weights.rotate_values(index)
            basis = None if transform is None else transform.to(device).basis
            heads.append(HeadWeights(weights.ropes[index], layer.q_norm, layer.k_norm, basis))
        layout = HeadLayout(
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            torch.bfloat16 if weights.embedding.dtype is torch.bfloat16 else torch.float16,
            shape.norm_epsilon,
        )
        return cls(weights, backend, layout, tuple(heads))

    def hidden_states(self, step: DecodeStep | PrefillStep) -> torch.Tensor:
        """Write the step's K and V, attend, and give what the head reads: [tokens, hidden]."""
        weights, epsilon = self.weights, self.layout.norm_epsilon
        x = embedding(step.token_ids, weights.embedding)
        if weights.shape.embedding_scale != 1:
            x *= torch.tensor(weights.shape.embedding_scale, dtype=x.dtype)
        x, residual = add_and_norm(x, None, weights.layers[0].input_norm, epsilon)
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            x = self._attend(index, layer, x, step)
            x, residual = add_and_norm(x, residual, layer.inner_norm, epsilon, layer.attended_norm)
            x = multiply_gated(x, layer.gate_up, weights.shape.activation)
            x = weights.shards.add_up(multiply_in_parts(x, layer.down))
            x, residual = add_and_norm(x, residual, next_norm, epsilon, layer.mlp_norm)
        return x

    def logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, hidden] to [rows, vocabulary], in the weights' type; into `out` when it is given."""
        return torch.mm(hidden_states, self.weights.head.T, out=out)

    def _attend(self, index: int, layer: LayerWeights, x: torch.Tensor, step: DecodeStep | PrefillStep) -> torch.Tensor:
        qkv = multiply_in_parts(x, layer.qkv, layer.qkv_bias)
        new = NewTokens(self.backend.storage.open[index], step.append_slots)
        q = split_heads(qkv, step.positions, self.layout, self.heads[index], new)
        self.backend.seal(index, step)
        window = self.weights.shape.windows[index]
        attended = self.backend.attend(index, q, step, self.weights.shape.softmax_scale, window)
        return self.weights.shards.add_up(multiply_in_parts(attended.flatten(1).to(x.dtype), layer.out))
