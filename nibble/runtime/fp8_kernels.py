"""The Triton kernel of `nibble.runtime.fp8_rows.quantize_rows`."""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nibble.runtime.decoder_kernels import can_overlap
from nibble.runtime.fp8_rows import LARGEST, SMALLEST_SCALE, Fp8Rows


@triton.jit
def quantize_rows_kernel(
    x, values, scales, width, largest_code, smallest_scale, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Grid: tokens. Divides as a CPU does, so that codes are the same there."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 0), largest_code), smallest_scale)
    code = tl.clamp(tl.div_rn(value, scale), -largest_code, largest_code)
    tl.store(values + row * width + at, code.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def launch_quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """See `fp8_rows.quantize_rows`."""
    (tokens, width), overlaps = x.shape, can_overlap(x.device)
    out = Fp8Rows.empty(tokens, width, x.device)
    block = triton.next_power_of_2(width)
    quantize_rows_kernel[(tokens,)](
        x, out.values, out.scales, width, LARGEST, SMALLEST_SCALE, block, overlaps,
        num_warps=min(16, max(4, block // 1024)), launch_pdl=overlaps,
    )  # fmt: skip
    return out
