"""Appending new keys and values to open pages, and sealing full pages: checks, launches and the torch custom ops.

Which pages are sealed is told by device tensors with -1 for "nothing to do", so both run inside a CUDA graph.
"""

from __future__ import annotations

import ctypes

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.kernels import driver
from nibble.kernels.compiler import KernelSource
from nibble.kernels.decode import check_static, check_tensor, format_of, static_tensors
from nibble.kernels.instances import SCALE_KINDS, seal_shared_bytes, seal_source
from nibble.reference import LayerScales

APPEND = KernelSource("append.cu")
THREADS = 256


class SealParams(ctypes.Structure):
    """`struct SealParams` of cuda/seal.cu."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in "open_pool sealed_pool open_pages sealed_pages k_scale k_zero v_scale v_zero".split()
        ],
        ("kv_heads", ctypes.c_int),
    ]


class AppendParams(ctypes.Structure):
    """`struct AppendParams` of cuda/append.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in "k v open_pool slots".split()],
        *[(name, ctypes.c_longlong) for name in "k_stride v_stride".split()],
        *[(name, ctypes.c_int) for name in "tokens kv_heads head_dim is_bfloat".split()],
    ]


def append_tokens(k: torch.Tensor, v: torch.Tensor, open_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new K and V into open pages.

    k, v: fp16 or bf16 [tokens, kv_heads, head_dim], K after RoPE, V rotated when the format says so; a token's heads
    are contiguous, tokens may be strided. open_pool: fp16 [pages, 2, kv_heads, 64, head_dim]. slots: int32 [tokens],
    page * 64 + place in the page, -1 for a padded token.
    """
    append_tokens_op(k, v, open_pool, slots)


def seal_pages_on_gpu(
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    open_pages: torch.Tensor,
    sealed_pages: torch.Tensor,
    *,
    fmt: KVFormat,
    scales: LayerScales | None = None,
) -> None:
    """Quantize full open pages into sealed pages: byte for byte what `layout.seal_pages_for_cuda` gives.

    open_pool: fp16 [pages, 2, kv_heads, 64, head_dim]. sealed_pool: uint8 [pages, kv_heads, page_bytes]. open_pages and
    sealed_pages: int32 [count], where each page comes from and goes to; -1 in either: nothing to do.
    """
    code = [fmt.k.bits, SCALE_KINDS[fmt.k.scale], fmt.v.bits, SCALE_KINDS[fmt.v.scale]]
    seal_pages_op(open_pool, sealed_pool, open_pages, sealed_pages, static_tensors(scales or LayerScales()), code)


@torch.library.custom_op("nibble::append_tokens", mutates_args=("open_pool",))
def append_tokens_op(k: torch.Tensor, v: torch.Tensor, open_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """`append_tokens` as a torch operator."""
    tokens, kv_heads, head_dim = k.shape
    check_tensor("open_pool", open_pool, (None, 2, kv_heads, PAGE_TOKENS, head_dim), (torch.float16,), k.device)
    check_tensor("slots", slots, (tokens,), (torch.int32,), k.device)
    for name, x in (("k", k), ("v", v)):
        row = (head_dim, 1)
        fits = x.shape == k.shape and x.dtype == k.dtype and x.stride()[1:] == row and x.stride(0) % 8 == 0
        if not fits or k.dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or x.data_ptr() % 16:
            raise NibbleError(
                f"append, {name}: got {x.dtype} {tuple(x.shape)} strides {x.stride()}; allowed fp16 or bf16 [tokens, "
                "kv_heads, head_dim] with contiguous, 16-byte aligned tokens, K and V alike"
            )
    if tokens == 0:
        return
    params = AppendParams(
        *(t.data_ptr() for t in (k, v, open_pool, slots)),
        k.stride(0),
        v.stride(0),
        tokens,
        kv_heads,
        head_dim,
        int(k.dtype is torch.bfloat16),
    )
    pieces = tokens * 2 * kv_heads * head_dim // 8
    function = driver.load_function(APPEND, "append_tokens", k.device.index or 0)
    with torch.cuda.device(k.device):
        driver.launch(function, -(-pieces // THREADS), THREADS, 0, params, overlaps=True)


@append_tokens_op.register_fake
def _(*_: object) -> None:
    return None


@torch.library.custom_op("nibble::seal_pages", mutates_args=("sealed_pool",))
def seal_pages_op(
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    open_pages: torch.Tensor,
    sealed_pages: torch.Tensor,
    static_scales: list[torch.Tensor],
    format_code: list[int],
) -> None:
    """`seal_pages_on_gpu` as a torch operator."""
    fmt = format_of(format_code)
    kv_heads, head_dim = open_pool.shape[2], open_pool.shape[4]
    device = open_pool.device
    page_bytes = SealedPageLayout(fmt, head_dim).page_bytes
    check_tensor("open_pool", open_pool, (None, 2, kv_heads, PAGE_TOKENS, head_dim), (torch.float16,), device)
    check_tensor("sealed_pool", sealed_pool, (None, kv_heads, page_bytes), (torch.uint8,), device)
    check_tensor("open_pages", open_pages, (None,), (torch.int32,), device)
    check_tensor("sealed_pages", sealed_pages, tuple(open_pages.shape), (torch.int32,), device)
    check_static(static_scales, fmt, kv_heads, head_dim, device)
    if open_pages.shape[0] == 0:
        return
    params = SealParams(
        *(t.data_ptr() for t in (open_pool, sealed_pool, open_pages, sealed_pages)),
        *(t.data_ptr() if t.numel() else 0 for t in static_scales),
        kv_heads,
    )
    shared_bytes = seal_shared_bytes(fmt, head_dim)
    function = driver.load_function(seal_source(fmt, head_dim), "seal_pages", device.index or 0, shared_bytes)
    with torch.cuda.device(device):
        blocks = open_pages.shape[0]
        driver.launch(function, blocks, THREADS, shared_bytes, params, overlaps=True, rows=kv_heads)


@seal_pages_op.register_fake
def _(*_: object) -> None:
    return None
