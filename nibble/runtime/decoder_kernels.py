"""The Triton kernels of `nibble.runtime.decoder_ops`; the functions there say what each computes.

With `OVERLAPS` a kernel is launched while the one before it still runs, and waits for it by itself (griddepcontrol).
Products may come in `PARTS`, fp32, that are still to be added up (`nibble.runtime.linear_kernels`).
"""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def, attr-defined"
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nibble.runtime.decoder_ops import SILU, HeadLayout, HeadWeights, NewTokens

GATE_BLOCK = 1024
VOCABULARY_BLOCK = 16384
MOST_TOKENS_OF_BLOCK = 32  # every block reads the whole basis of its head
PAGE = tl.constexpr(64)


@triton.jit
def add_parts(source, part_stride, mask, PARTS: tl.constexpr):
    """The sum of the parts, fp32."""
    total = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(source + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def add_and_norm_kernel(
    x, residual, inner, weight, out, total, part_stride, hidden, epsilon,
    PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid: tokens."""
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    value = add_parts(x + row + at, part_stride, inside, PARTS)
    if HAS_RESIDUAL:
        value = value.to(total.dtype.element_ty).to(tl.float32)
        if inner is not None:
            value *= tl.rsqrt(tl.sum(value * value, 0) / hidden + epsilon)
            value *= tl.load(inner + at, mask=inside, other=0.0).to(tl.float32)
            value = value.to(total.dtype.element_ty).to(tl.float32)
        value += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / hidden + epsilon)
    tl.store(out + row + at, (value * inverse * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate(x, IS_SILU: tl.constexpr):
    """silu, or gelu by its tanh; fp32."""
    if IS_SILU:
        x = x / (1.0 + tl.exp(-x))
    else:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # (1 + tanh y) / 2 = 1 / (1 + e^-2y)
    return x


@triton.jit
def gate_kernel(gate_up, out, width, BLOCK: tl.constexpr, IS_SILU: tl.constexpr, OVERLAPS: tl.constexpr):
    """Grid: tokens, blocks of channels."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    left = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (activate(left, IS_SILU) * right).to(out.dtype.element_ty), mask=inside)


@triton.jit
def split_heads_kernel(
    qkv, positions, frequencies, q_norm, k_norm, reader, forward, q_out, pages, slots, part_stride, tokens,
    rope_scaling, epsilon,
    PARTS: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BASIS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid: heads of Q, K and V, blocks of tokens. A head is two halves that RoPE turns against each other."""
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0)
    is_query = head < Q_HEADS
    is_value = head >= Q_HEADS + KV_HEADS
    rows = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    at = tl.arange(0, HALF_PAD)
    is_channel = at < HALF
    inside = (rows < tokens)[:, None] & is_channel[None, :]
    if HAS_BASIS:
        basis = forward + (head - Q_HEADS) * D * D
        if is_query:
            basis = reader + head // (Q_HEADS // KV_HEADS) * D * D
        # transposed: entry [d, e] of a quarter is basis[e, d]
        quarter = basis + at[None, :] * D + at[:, None]
        whole = is_channel[:, None] & is_channel[None, :] & (head < Q_HEADS + KV_HEADS)
        low_low = tl.load(quarter, mask=whole, other=0.0)
        low_high = tl.load(quarter + HALF, mask=whole, other=0.0)
        high_low = tl.load(quarter + HALF * D, mask=whole, other=0.0)
        high_high = tl.load(quarter + HALF * D + HALF, mask=whole, other=0.0)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    source = qkv + rows[:, None] * ((Q_HEADS + 2 * KV_HEADS) * D) + head * D + at[None, :]
    low = add_parts(source, part_stride, inside, PARTS)
    high = add_parts(source + HALF, part_stride, inside, PARTS)
    slot = tl.load(slots + rows, mask=rows < tokens, other=-1).to(tl.int64)
    kv_head = tl.where(is_value, head - Q_HEADS - KV_HEADS, head - Q_HEADS)
    page = (slot // PAGE * 2 + is_value.to(tl.int64)) * KV_HEADS + kv_head
    stored = pages + ((page * PAGE + slot % PAGE) * D)[:, None] + at[None, :]
    is_stored = (slot >= 0)[:, None] & is_channel[None, :]
    if is_value:
        tl.store(stored, low.to(tl.float16), mask=is_stored)
        tl.store(stored + HALF, high.to(tl.float16), mask=is_stored)
    else:
        if HAS_NORM:
            norm = k_norm
            if is_query:
                norm = q_norm
            inverse = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + epsilon)[:, None]
            low *= inverse * tl.load(norm + at, mask=is_channel, other=0.0).to(tl.float32)[None, :]
            high *= inverse * tl.load(norm + HALF + at, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        position = tl.load(positions + rows, mask=rows < tokens, other=0).to(tl.float32)
        angle = position[:, None] * tl.load(frequencies + at, mask=is_channel, other=0.0)[None, :]
        cos = tl.cos(angle) * rope_scaling
        sin = tl.sin(angle) * rope_scaling
        turned_low = low * cos - high * sin
        turned_high = high * cos + low * sin
        if HAS_BASIS:
            low = tl.dot(turned_low, low_low, input_precision="tf32x3")
            low = tl.dot(turned_high, low_high, low, input_precision="tf32x3")
            high = tl.dot(turned_low, high_low, input_precision="tf32x3")
            high = tl.dot(turned_high, high_high, high, input_precision="tf32x3")
        else:
            low = turned_low
            high = turned_high
        if is_query:
            target = q_out + (rows[:, None] * Q_HEADS + head) * D + at[None, :]
            tl.store(target, low.to(q_out.dtype.element_ty), mask=inside)
            tl.store(target + HALF, high.to(q_out.dtype.element_ty), mask=inside)
        else:
            tl.store(stored, low.to(tl.float16), mask=is_stored)
            tl.store(stored + HALF, high.to(tl.float16), mask=is_stored)


@triton.jit
def pick_likeliest_kernel(logits, tokens_out, logprobs, vocabulary, BLOCK: tl.constexpr):
    """Grid: rows. One pass: the first of the largest, and its logarithm of probability, NaN unless all are finite."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = -float("inf")
    token = 0
    total = 0.0
    least = float("inf")
    for start in range(0, vocabulary, BLOCK):
        inside = start + at < vocabulary
        values = tl.load(logits + row * vocabulary + start + at, mask=inside, other=-float("inf")).to(tl.float32)
        largest = tl.max(values, 0)
        token = tl.where(largest > best, start + tl.argmax(values, 0), token)
        above = tl.maximum(best, largest)
        total = total * tl.exp(best - above) + tl.sum(tl.exp(values - above), 0)
        best = above
        least = tl.minimum(least, tl.min(tl.where(inside, values, float("inf")), 0))
    log_total = best + tl.log(total)
    tl.store(tokens_out + row, token.to(tl.int64))
    finite = (log_total == log_total) & (tl.abs(log_total) < float("inf")) & (least > -float("inf"))
    tl.store(logprobs + row, tl.where(finite, best - log_total, float("nan")))


def launch_add_and_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    inner: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `decoder_ops.add_and_norm`; the residual stream is updated in place."""
    parts, (tokens, hidden) = len(x) if x.dim() == 3 else 1, x.shape[-2:]
    total = x if residual is None else residual
    out = torch.empty_like(total)
    block, overlaps = triton.next_power_of_2(hidden), can_overlap(x.device)
    add_and_norm_kernel[(tokens,)](
        x, total, inner, weight, out, total, tokens * hidden, hidden, epsilon, parts, residual is not None, block,
        overlaps, num_warps=min(16, max(4, block // 512)), launch_pdl=overlaps,
    )  # fmt: skip
    return out, total


def launch_gate(gate_up: torch.Tensor, activation: str = SILU) -> torch.Tensor:
    """See `decoder_ops.gate`."""
    tokens, both = gate_up.shape
    out = gate_up.new_empty(tokens, both // 2)
    grid, overlaps = (tokens, triton.cdiv(both // 2, GATE_BLOCK)), can_overlap(gate_up.device)
    gate_kernel[grid](gate_up, out, both // 2, GATE_BLOCK, activation == SILU, overlaps, launch_pdl=overlaps)
    return out


def launch_split_heads(
    qkv: torch.Tensor, positions: torch.Tensor, layout: HeadLayout, weights: HeadWeights, new: NewTokens
) -> torch.Tensor:
    """See `decoder_ops.split_heads`."""
    parts, (tokens, width) = len(qkv) if qkv.dim() == 3 else 1, qkv.shape[-2:]
    q_heads, kv_heads, dim = layout.q_heads, layout.kv_heads, layout.head_dim
    q = torch.empty(tokens, q_heads, dim, dtype=layout.query_type, device=qkv.device)
    reader, forward = (None, None) if weights.basis is None else (weights.basis.reader, weights.basis.forward)
    block = min(MOST_TOKENS_OF_BLOCK, max(16, triton.next_power_of_2(tokens)))
    overlaps = can_overlap(qkv.device)
    split_heads_kernel[(q_heads + 2 * kv_heads, triton.cdiv(tokens, block))](
        qkv, positions, weights.rope.frequencies, weights.q_norm, weights.k_norm, reader, forward, q, new.open_pool,
        new.slots, tokens * width, tokens, weights.rope.scaling, layout.norm_epsilon, parts, q_heads, kv_heads, dim,
        max(16, triton.next_power_of_2(dim // 2)), block, weights.q_norm is not None, weights.basis is not None,
        overlaps, num_warps=4 if weights.basis is None else 8, launch_pdl=overlaps,
    )  # fmt: skip
    return q


def launch_pick_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `decoder_ops.pick_likeliest`."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    pick_likeliest_kernel[(rows,)](logits, tokens, logprobs, vocabulary, VOCABULARY_BLOCK, num_warps=16)
    return tokens, logprobs


@lru_cache
def can_overlap(device: torch.device) -> bool:
    """Can a launch overlap the kernel before it? From Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
