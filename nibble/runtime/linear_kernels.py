"""Products of few tokens: each multiprocessor streams one share of the weight, deep enough to keep memory busy.

    out[p, m, n] = sum over part p of k of x[m, k] weight[n, k]

A share is `rows` of the weight (up to three powers of two, so that shares come out even) times one part of k. Tokens
are the M dimension of the tensor cores, padded to 16.
"""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nibble.runtime.decoder_kernels import can_overlap
from nibble.runtime.decoder_products import Share


@triton.jit
def shares_kernel(
    x, weight, out, tokens, columns, width,
    BLOCK_M: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid: shares of rows, parts."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(0) * (R0 + R1 + R2)
    part = width // PARTS
    start = tl.program_id(1) * part
    inputs = x + m[:, None] * width + start + k[None, :]
    rows0 = weight + (first + tl.arange(0, R0)).to(tl.int64)[:, None] * width + start + k[None, :]
    total0 = tl.zeros((BLOCK_M, R0), tl.float32)
    if R1 > 0:
        rows1 = weight + (first + R0 + tl.arange(0, R1)).to(tl.int64)[:, None] * width + start + k[None, :]
        total1 = tl.zeros((BLOCK_M, R1), tl.float32)
    if R2 > 0:
        rows2 = weight + (first + R0 + R1 + tl.arange(0, R2)).to(tl.int64)[:, None] * width + start + k[None, :]
        total2 = tl.zeros((BLOCK_M, R2), tl.float32)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    for at in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        values = tl.load(inputs + at, mask=(m < tokens)[:, None], other=0.0)
        total0 = tl.dot(values, tl.load(rows0 + at).T, total0)
        if R1 > 0:
            total1 = tl.dot(values, tl.load(rows1 + at).T, total1)
        if R2 > 0:
            total2 = tl.dot(values, tl.load(rows2 + at).T, total2)
    target = out + tl.program_id(1).to(tl.int64) * tokens * columns + m[:, None] * columns + first
    inside = (m < tokens)[:, None]
    tl.store(target + tl.arange(0, R0)[None, :], total0.to(out.dtype.element_ty), mask=inside)
    if R1 > 0:
        tl.store(target + R0 + tl.arange(0, R1)[None, :], total1.to(out.dtype.element_ty), mask=inside)
    if R2 > 0:
        tl.store(target + R0 + R1 + tl.arange(0, R2)[None, :], total2.to(out.dtype.element_ty), mask=inside)


def multiply_shares(x: torch.Tensor, weight: torch.Tensor, share: Share) -> torch.Tensor:
    """[tokens, n] in x's type when k is in one part, else fp32 [parts, tokens, n] to be added up."""
    (tokens, width), columns = x.shape, weight.shape[0]
    if share.parts == 1:
        out = x.new_empty(tokens, columns)
    else:
        out = torch.empty(share.parts, tokens, columns, dtype=torch.float32, device=x.device)
    overlaps = can_overlap(x.device)
    rows = (*share.rows, 0, 0)[:3]
    shares_kernel[(columns // sum(share.rows), share.parts)](
        x, weight, out, tokens, columns, width, max(16, triton.next_power_of_2(tokens)), *rows, share.depth,
        share.parts, share.stages, overlaps, num_warps=share.warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out
