"""Products of few tokens: each multiprocessor streams one share of the weight, deep enough to keep memory busy.

    out[p, m, n] = sum over part p of k of x[m, k] weight[n, k]

A share is `rows` of the weight (up to three powers of two, so that shares come out even) times one part of k. Tokens
are the M dimension of the tensor cores, padded to at least `least_tokens`: Hopper's own instruction wants 64, older
ones 16. They are the N dimension, at least 16, where `weight_first`. e4m3 comes with a scale for each row of the weight
and each token.

A gated product is activation(gate) * up of a weight that holds the rows of gate, then those of up: each share takes as
many of one as of the other, in turn.
"""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nibble.runtime.decoder_kernels import activate, can_overlap
from nibble.runtime.decoder_ops import SILU
from nibble.runtime.decoder_products import Share
from nibble.runtime.fp8_rows import Fp8Rows


@triton.jit
def rows_of(first, half, R: tl.constexpr, GATED: tl.constexpr):
    """R rows of the weight from `first` on; gated: half as many from there, each followed by its row of up."""
    at = tl.arange(0, R)
    if GATED:
        at = first // 2 + at // 2 + at % 2 * half
    else:
        at = first + at
    return at


@triton.jit
def add_tile(values, pointers, total, WEIGHT_FIRST: tl.constexpr):
    """total + values times a tile of the weight."""
    tile = tl.load(pointers)
    if WEIGHT_FIRST:
        total = tl.dot(tile, values.T, total)
    else:
        total = tl.dot(values, tile.T, total)
    return total


@triton.jit
def store_tile(
    target, total, first, half, m, tokens, columns, token_scale, row_scales,
    R: tl.constexpr, BLOCK_M: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Write a tile of the product, scaled and gated."""
    if WEIGHT_FIRST:
        total = total.T
    if SCALED:
        total *= token_scale[:, None] * tl.load(row_scales + rows_of(first, half, R, GATED))[None, :]
    if GATED:
        left, right = tl.split(total.reshape(BLOCK_M, R // 2, 2))
        total = activate(left, IS_SILU) * right
        at = first // 2 + tl.arange(0, R // 2)
    else:
        at = first + tl.arange(0, R)
    tl.store(target + m[:, None] * columns + at[None, :], total.to(target.dtype.element_ty), (m < tokens)[:, None])


@triton.jit
def shares_kernel(
    x, weight, token_scales, row_scales, out, tokens, rows, width, part,
    BLOCK_M: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    SCALED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid: shares of rows, parts. part: of k; an argument, so that it is known to be a multiple of 16."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(0) * (R0 + R1 + R2)
    half = rows // 2
    start = tl.program_id(1) * part
    inputs = x + m[:, None] * width + start + k[None, :]
    tile0 = weight + rows_of(first, half, R0, GATED).to(tl.int64)[:, None] * width + start + k[None, :]
    total0 = tl.zeros((R0, BLOCK_M) if WEIGHT_FIRST else (BLOCK_M, R0), tl.float32)
    if R1 > 0:
        tile1 = weight + rows_of(first + R0, half, R1, GATED).to(tl.int64)[:, None] * width + start + k[None, :]
        total1 = tl.zeros((R1, BLOCK_M) if WEIGHT_FIRST else (BLOCK_M, R1), tl.float32)
    if R2 > 0:
        tile2 = weight + rows_of(first + R0 + R1, half, R2, GATED).to(tl.int64)[:, None] * width + start + k[None, :]
        total2 = tl.zeros((R2, BLOCK_M) if WEIGHT_FIRST else (BLOCK_M, R2), tl.float32)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    for at in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        values = tl.load(inputs + at, mask=(m < tokens)[:, None], other=0.0)
        total0 = add_tile(values, tile0 + at, total0, WEIGHT_FIRST)
        if R1 > 0:
            total1 = add_tile(values, tile1 + at, total1, WEIGHT_FIRST)
        if R2 > 0:
            total2 = add_tile(values, tile2 + at, total2, WEIGHT_FIRST)
    token_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    if SCALED:
        token_scale = tl.load(token_scales + m, mask=m < tokens, other=0.0)
    columns = half if GATED else rows
    target = out + tl.program_id(1).to(tl.int64) * tokens * columns
    store_tile(
        target, total0, first, half, m, tokens, columns, token_scale, row_scales, R0, BLOCK_M, GATED, IS_SILU,
        WEIGHT_FIRST, SCALED,
    )  # fmt: skip
    if R1 > 0:
        store_tile(
            target, total1, first + R0, half, m, tokens, columns, token_scale, row_scales, R1, BLOCK_M, GATED,
            IS_SILU, WEIGHT_FIRST, SCALED,
        )  # fmt: skip
    if R2 > 0:
        store_tile(
            target, total2, first + R0 + R1, half, m, tokens, columns, token_scale, row_scales, R2, BLOCK_M, GATED,
            IS_SILU, WEIGHT_FIRST, SCALED,
        )  # fmt: skip


def multiply_shares(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor | Fp8Rows,
    share: Share,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    activation: str = SILU,
) -> torch.Tensor:
    """[tokens, n] in `dtype` when k is in one part, else fp32 [parts, tokens, n] to be added up.

    gated: [tokens, n / 2], the activation of the weight's first half of rows times the second; k in one part.
    """
    values, token_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    matrix, row_scales = (weight.values, weight.scales) if isinstance(weight, Fp8Rows) else (weight, None)
    (tokens, width), rows = values.shape, matrix.shape[0]
    block_m = max(share.least_tokens, triton.next_power_of_2(tokens))
    columns = rows // 2 if gated else rows
    if share.parts == 1:
        out = torch.empty(tokens, columns, dtype=dtype, device=values.device)
    else:
        out = torch.empty(share.parts, tokens, columns, dtype=torch.float32, device=values.device)
    overlaps = can_overlap(values.device)
    shares_kernel[(rows // sum(share.rows), share.parts)](
        values, matrix, token_scales, row_scales, out, tokens, rows, width, width // share.parts,
        block_m, *(*share.rows, 0, 0)[:3], share.depth, share.stages, gated, activation == SILU, share.weight_first,
        row_scales is not None, overlaps, num_warps=share.warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out
