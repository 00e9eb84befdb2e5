"""What a decoder does between its matrix products: one operation each, a Triton kernel on a GPU, else plain PyTorch.

Each takes what it reads and writes what the next product reads, so that a layer is few launches and no copy. A product
may come in parts that are still to be added up: fp32 [parts, tokens, width] instead of [tokens, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from nibble.balance import BasisChange
from nibble.formats import PAGE_TOKENS

SILU, GELU = "silu", "gelu_pytorch_tanh"  # names of a config
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {SILU: silu, GELU: partial(gelu, approximate="tanh")}


@dataclass(frozen=True)
class Rope:
    """frequencies: fp32 [head_dim / 2], radians a token; scaling: of cos and sin."""

    frequencies: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class HeadLayout:
    """How the rows of a fused Q, K, V projection are to be read. query_type: what attention takes, 16 bits."""

    q_heads: int
    kv_heads: int
    head_dim: int
    query_type: torch.dtype
    norm_epsilon: float


@dataclass(frozen=True)
class HeadWeights:
    """A layer's RoPE; norms over Q and K [head_dim] and the basis of K, where it has them."""

    rope: Rope
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    basis: BasisChange | None = None


@dataclass(frozen=True)
class NewTokens:
    """Where a layer's new K and V go: fp16 [pages, 2, kv_heads, 64, head_dim]; int32 [tokens], page * 64 + place in
    the page, -1 for a padded token."""

    open_pool: torch.Tensor
    slots: torch.Tensor


def add_and_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    inner: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual, and that sum, which is the new residual stream; [tokens, hidden] in its type.

    inner: the weight of a norm of x itself, ahead of the sum.
    """
    if x.is_cuda:
        from nibble.runtime.decoder_kernels import launch_add_and_norm

        return launch_add_and_norm(x, residual, weight, epsilon, inner)
    total = x
    if residual is not None:
        added = _add_parts(x).to(residual.dtype)
        total = residual + (added if inner is None else _norm(added, inner, epsilon).to(residual.dtype))
    return _norm(total, weight, epsilon).to(total.dtype), total


def gate(gate_up: torch.Tensor, activation: str = SILU) -> torch.Tensor:
    """activation(gate) * up; [tokens, 2 n], no parts, to [tokens, n]. activation: a key of ACTIVATIONS."""
    if gate_up.is_cuda:
        from nibble.runtime.decoder_kernels import launch_gate

        return launch_gate(gate_up, activation)
    left, right = gate_up.float().chunk(2, -1)
    return (ACTIVATIONS[activation](left) * right).to(gate_up.dtype)


def split_heads(
    qkv: torch.Tensor, positions: torch.Tensor, layout: HeadLayout, weights: HeadWeights, new: NewTokens
) -> torch.Tensor:
    """Q for attention; K and V go into their pages. Normed where the model does, turned by RoPE, in K's basis if any.

    qkv: [tokens, (q + 2 kv heads) * head_dim]; positions: int32 [tokens]. Q is [tokens, q_heads, head_dim]. The
    arithmetic is fp32.
    """
    if qkv.is_cuda:
        from nibble.runtime.decoder_kernels import launch_split_heads

        return launch_split_heads(qkv, positions, layout, weights, new)
    heads = _add_parts(qkv).float().unflatten(-1, (-1, layout.head_dim))
    q, k, v = heads.split((layout.q_heads, layout.kv_heads, layout.kv_heads), dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = _norm(q, weights.q_norm, layout.norm_epsilon), _norm(k, weights.k_norm, layout.norm_epsilon)
    angles = positions.float()[:, None, None] * weights.rope.frequencies
    cos, sin = angles.cos() * weights.rope.scaling, angles.sin() * weights.rope.scaling
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    if weights.basis is not None:
        q = torch.einsum("thgd,hed->thge", q.unflatten(1, (layout.kv_heads, -1)), weights.basis.reader).flatten(1, 2)
        k = torch.einsum("thd,hed->the", k, weights.basis.forward)
    _store(k, v, new)
    return q.to(layout.query_type)


def _add_parts(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) if x.dim() == 3 else x


def _store(k: torch.Tensor, v: torch.Tensor, new: NewTokens) -> None:
    used = new.slots >= 0
    page, place = new.slots[used].long() // PAGE_TOKENS, new.slots[used].long() % PAGE_TOKENS
    new.open_pool[page, 0, :, place] = k[used].half()
    new.open_pool[page, 1, :, place] = v[used].half()


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
