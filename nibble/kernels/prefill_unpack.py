"""Reading the codes of a sealed page in row order, for Triton kernels.

Where a code lies is `nibble.kernels.layout.operand_order` turned round: a table of 64 D places that is made once per
shape and stays in the cache of the chip, so that the order has one definition. The codes of a page are read as they lie
and put into row order through shared memory.
"""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
from functools import lru_cache

import torch
import triton
import triton.language as tl

from nibble.formats import TensorFormat
from nibble.kernels.layout import operand_order

PAGE = tl.constexpr(64)


@lru_cache
def code_places(
    fmt: TensorFormat, tiles_of_tokens: int, head_dim: int, is_key: bool, device: torch.device
) -> torch.Tensor | None:
    """Where the code of token t and channel c lies among its page's codes: int16 [64 * head_dim] at t * head_dim + c.

    None for 16-bit values, which keep row order.
    """
    if fmt.bits == 16:
        return None
    return operand_order(fmt.bits, tiles_of_tokens, head_dim, is_key).argsort().to(torch.int16).to(device)


@triton.jit
def read_codes(codes, places, rows, valid, D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr):
    """The codes of a page, or its values when they are 16-bit, as fp32 [64, D_PAD]. rows: token * D + channel."""
    if BITS == 16:
        values = tl.load(codes.to(tl.pointer_type(tl.float16)) + rows, mask=valid, other=0.0).to(tl.float32)
    else:
        offsets = tl.arange(0, PAGE * D_PAD * BITS // 8)
        packed = tl.load(codes + offsets, mask=offsets < PAGE * D * BITS // 8, other=0)
        stored = tl.reshape(tl.join(packed & 15, packed >> 4), [PAGE * D_PAD]) if BITS == 4 else packed
        place = tl.load(places + rows, mask=valid, other=0).to(tl.int32)
        in_rows = tl.gather(stored, tl.reshape(place, [PAGE * D_PAD]), 0)
        values = tl.reshape(in_rows, [PAGE, D_PAD]).to(tl.float32)
    return values
