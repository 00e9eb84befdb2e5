"""The dequantize pass of prefill: sealed pages to fp16 pages of the scratch, in the layout of open pages.

Its traffic grows with the tokens and that of attention with their square, so it is kept simple: a program turns K or V
of one page of one KV head into 64 x D fp16 values.
"""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nibble.formats import KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.kernels.layout import token_tiles
from nibble.kernels.prefill_plan import PrefillPlan
from nibble.kernels.prefill_unpack import code_places, read_codes

if TYPE_CHECKING:
    from nibble.kernels.prefill import PrefillCache

PAGE = tl.constexpr(64)
SCALE_KINDS = {kind: index for index, kind in enumerate(ScaleKind)}
NO_PARAMETERS = (None,) * 4
PER_CHANNEL = tl.constexpr(SCALE_KINDS[ScaleKind.PAGE_CHANNEL])
PER_TOKEN = tl.constexpr(SCALE_KINDS[ScaleKind.TOKEN])


@triton.jit
def read_page(
    codes, places, parameters, static_scale, static_zero, head, tokens, channels, valid,
    D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """What a far query sees of one page: fp32 [64, D_PAD]."""
    halves = parameters.to(tl.pointer_type(tl.float16))
    inside = channels < D
    if BITS == 16:
        scale = tl.full((1, 1), 1.0, tl.float32)
        zero = tl.zeros((1, 1), tl.float32)
    elif SCALE == PER_CHANNEL:
        scale = tl.load(halves + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
        zero = tl.load(halves + D + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    elif SCALE == PER_TOKEN:
        scale = tl.load(halves + tokens).to(tl.float32)[:, None]
        zero = tl.load(halves + PAGE + tokens).to(tl.float32)[:, None]
    else:
        scale = tl.load(static_scale + head * D + channels, mask=inside, other=0.0)[None, :]
        zero = tl.load(static_zero + head * D + channels, mask=inside, other=0.0)[None, :]
    rows = tokens[:, None] * D + channels[None, :]
    return read_codes(codes, places, rows, valid, D, D_PAD, BITS) * scale + zero


@triton.jit(do_not_specialize=["max_pages"], do_not_specialize_on_alignment=["sealed_table"])
def dequantize_kernel(
    scratch, open_pool, sealed_pool, open_table, sealed_table, scratch_pages, max_pages,
    k_places, v_places, k_scale, k_zero, v_scale, v_zero,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_BYTES: tl.constexpr,
    K_BITS: tl.constexpr, K_SCALE: tl.constexpr, V_BITS: tl.constexpr, V_SCALE: tl.constexpr,
    V_CODES: tl.constexpr, K_PARAMETERS: tl.constexpr, V_PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Grid: KV heads, scratch pages, K and V."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    tensor = tl.program_id(2)
    sequence = tl.load(scratch_pages + slot * 4)
    page = tl.load(scratch_pages + slot * 4 + 1)
    tail_tokens = tl.load(scratch_pages + slot * 4 + 2)
    tokens = tl.arange(0, PAGE)
    channels = tl.arange(0, D_PAD)
    valid = (tokens < PAGE)[:, None] & (channels < D)[None, :]
    rows = tokens[:, None] * D + channels[None, :]

    if tail_tokens > 0:
        open_page = tl.load(open_table + sequence * max_pages + page).to(tl.int64)
        open_source = open_pool + ((open_page * 2 + tensor) * KV_HEADS + head) * (PAGE * D)
        written = valid & (tokens < tail_tokens)[:, None]
        values = tl.load(open_source + rows, mask=written, other=0.0).to(tl.float32)
    else:
        sealed_page = tl.load(sealed_table + sequence * max_pages + page).to(tl.int64)
        sealed_source = sealed_pool + (tl.maximum(sealed_page, 0) * KV_HEADS + head) * PAGE_BYTES
        if tensor == 0:
            values = read_page(
                sealed_source, k_places, sealed_source + K_PARAMETERS, k_scale, k_zero, head, tokens, channels,
                valid, D, D_PAD, K_BITS, K_SCALE,
            )  # fmt: skip
        else:
            values = read_page(
                sealed_source + V_CODES, v_places, sealed_source + V_PARAMETERS, v_scale, v_zero, head, tokens,
                channels, valid, D, D_PAD, V_BITS, V_SCALE,
            )  # fmt: skip
        values = tl.where(sealed_page >= 0, values, float("nan"))  # a page that was never sealed must not go unseen
    target = scratch + ((slot.to(tl.int64) * 2 + tensor) * KV_HEADS + head) * (PAGE * D)
    tl.store(target + rows, values.to(tl.float16), mask=valid)


def fill_scratch(cache: PrefillCache, plan: PrefillPlan, static: list[torch.Tensor]) -> torch.Tensor:
    """The scratch of a step, fp16 [pages (at least 1), 2, kv_heads, 64, head_dim].

    static: scale and zero of K, scale and zero of V, fp32 [kv_heads, head_dim], for static formats; else empty.
    """
    fmt, num_pages = cache.fmt, plan.scratch_pages.shape[0]
    num_kv_heads, head_dim = cache.open_pool.shape[2], cache.open_pool.shape[4]
    scratch = cache.open_pool.new_empty((max(num_pages, 1), *cache.open_pool.shape[1:]))
    if num_pages:
        layout = SealedPageLayout(fmt, head_dim)
        dequantize_kernel[(num_kv_heads, num_pages, 2)](
            scratch, cache.open_pool, cache.sealed_pool, cache.open_table, cache.sealed_table, plan.scratch_pages,
            cache.open_table.shape[1], *_places(fmt, head_dim, scratch.device), *(static or NO_PARAMETERS),
            KV_HEADS=num_kv_heads, D=head_dim, D_PAD=triton.next_power_of_2(head_dim), PAGE_BYTES=layout.page_bytes,
            K_BITS=fmt.k.bits, K_SCALE=_scale_kind(fmt.k), V_BITS=fmt.v.bits, V_SCALE=_scale_kind(fmt.v),
            V_CODES=layout.v_codes.start, K_PARAMETERS=layout.k_parameters.start,
            V_PARAMETERS=layout.v_parameters.start, num_warps=8,
        )  # fmt: skip
    return scratch


def _places(fmt: KVFormat, head_dim: int, device: torch.device) -> list[torch.Tensor | None]:
    """The tables of K and of V that say where each code lies."""
    tiles = token_tiles(fmt, head_dim)
    return [code_places(fmt.k, tiles, head_dim, True, device), code_places(fmt.v, tiles, head_dim, False, device)]


def _scale_kind(fmt: TensorFormat) -> int:
    return SCALE_KINDS[fmt.scale]
