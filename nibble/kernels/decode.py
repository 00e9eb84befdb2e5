"""Decode attention over the paged cache: checks, launch and the torch custom op.

    workspace = DecodeWorkspace.allocate(batch, q_heads, kv_heads, head_dim, max_pages, device)
    out, log_sum_exp = decode_attention(q, cache, block_table, seq_lens, fmt=..., policy=..., softmax_scale=..., ...)

Everything that depends on the batch's lengths is worked out on the GPU, so that a captured graph serves any lengths.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.kernels import driver
from nibble.kernels.instances import (
    COMBINE_ROWS,
    MAX_BATCH,
    SCALE_KINDS,
    SHARED_BYTES,
    DecodeInstance,
    combine_source,
    plan_decode,
)
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.visibility import PagePolicy

# The rule of cuda/schedule.cuh: short splits keep every multiprocessor busy with a lone sequence, long ones save work.
SPLITS_AIMED = 16
FEWEST_SPLIT_PAGES, MOST_SPLIT_PAGES = 32, 64


class DecodeParams(ctypes.Structure):
    """`struct DecodeParams` of cuda/config.cuh."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in (
                "q out log_sum_exp open_pool sealed_pool block_table seq_lens k_scale k_zero v_scale v_zero "
                "partial_out partial_lse"
            ).split()
        ],
        ("softmax_scale", ctypes.c_float),
        *[
            (name, ctypes.c_int)
            for name in (
                "batch kv_heads group max_pages max_splits sink_pages recent_pages sliding_window is_bfloat consumers "
                "stages stage_bytes split_pages"
            ).split()
        ],
    ]


def num_splits(pages: int, split_pages: int | None = None) -> int:
    """Splits of a sequence and KV head of which that many pages are seen."""
    aimed = min(max(-(-pages // SPLITS_AIMED), FEWEST_SPLIT_PAGES), MOST_SPLIT_PAGES)
    size = split_pages or (MOST_SPLIT_PAGES if pages <= MOST_SPLIT_PAGES else aimed)
    return max(1, -(-pages // size))


def max_splits(max_pages: int, split_pages: int | None = None) -> int:
    """`num_splits` at most, of any sequence up to that many pages."""
    turns = (MOST_SPLIT_PAGES * SPLITS_AIMED, FEWEST_SPLIT_PAGES * SPLITS_AIMED)
    return max(num_splits(min(pages, max_pages), split_pages) for pages in (max_pages, *turns))


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch memory of decode launches on one stream, for any batch up to what it was allocated for.

    partial_out: fp16 [units, group * head_dim]; partial_lse: fp32 [units, group]. split_pages: pages of a sequence that
    one block attends over, None to choose from its length; it shapes the order of sums, so keep one value for the life
    of an engine.
    """

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    split_pages: int | None

    @classmethod
    def allocate(
        cls,
        batch: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        max_pages: int,
        device: torch.device | str,
        *,
        split_pages: int | None = None,
    ) -> DecodeWorkspace:
        units, group = batch * kv_heads * max_splits(max_pages, split_pages), q_heads // kv_heads
        return cls(
            torch.empty(units, group * head_dim, dtype=torch.float16, device=device),
            torch.empty(units, group, dtype=torch.float32, device=device),
            split_pages,
        )


def decode_attention(
    q: torch.Tensor,
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    fmt: KVFormat,
    policy: PagePolicy,
    softmax_scale: float,
    workspace: DecodeWorkspace,
    scales: LayerScales | None = None,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's newest token over its cache.

    q: fp16 or bf16 [batch, q_heads, head_dim]. open_pool: fp16 [pages, 2, kv_heads, 64, head_dim]. sealed_pool: uint8
    [pages, kv_heads, page_bytes] in operand order. block_table: int32 [batch, max_pages]. seq_lens: int32 [batch],
    tokens in the cache with the newest; 0 gives zeros and a log-sum-exp of minus infinity. Returns out like q and
    log_sum_exp fp32 [batch, q_heads], natural logarithm. NibbleError names an unsupported shape.
    """
    return decode_attention_op(
        q,
        open_pool,
        sealed_pool,
        block_table,
        seq_lens,
        static_tensors(scales or LayerScales()),
        workspace.partial_out,
        workspace.partial_lse,
        [fmt.k.bits, SCALE_KINDS[fmt.k.scale], fmt.v.bits, SCALE_KINDS[fmt.v.scale]],
        [policy.sink_pages, policy.recent_pages, sliding_window or 0],
        softmax_scale,
        workspace.split_pages or 0,
    )


@torch.library.custom_op("nibble::decode_attention", mutates_args=("partial_out", "partial_lse"))
def decode_attention_op(
    q: torch.Tensor,
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    static_scales: list[torch.Tensor],
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    format_code: list[int],
    policy: list[int],
    softmax_scale: float,
    split_pages: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode_attention` with everything spelled out as a torch operator takes it."""
    fmt = format_of(format_code)
    batch, q_heads, head_dim = q.shape
    kv_heads = open_pool.shape[2]
    _check_inputs(q, open_pool, sealed_pool, block_table, seq_lens, fmt)
    check_static(static_scales, fmt, kv_heads, head_dim, q.device)
    out = torch.empty_like(q)
    log_sum_exp = torch.empty(batch, q_heads, dtype=torch.float32, device=q.device)
    if batch == 0:
        return out, log_sum_exp
    device = q.device.index or 0
    group = q_heads // kv_heads
    instance = DecodeInstance.for_shape(fmt, head_dim, group)
    architecture = driver.device_architecture(device)
    plan = plan_decode(instance, architecture)
    splits = max_splits(block_table.shape[1], split_pages)
    _check_workspace(partial_out, partial_lse, batch, kv_heads, group, head_dim, splits)
    pointers = [t.data_ptr() for t in (q, out, log_sum_exp, open_pool, sealed_pool, block_table, seq_lens)]
    pointers += [t.data_ptr() if t.numel() else 0 for t in static_scales]
    pointers += [t.data_ptr() for t in (partial_out, partial_lse)]
    params = DecodeParams(
        *pointers,
        softmax_scale,
        batch,
        kv_heads,
        group,
        block_table.shape[1],
        splits,
        *policy,
        int(q.dtype is torch.bfloat16),
        plan.consumers,
        plan.stages,
        plan.stage_bytes,
        split_pages,
    )
    attend = driver.load_function(instance.source, "decode_attention", device, SHARED_BYTES[architecture] - 1024)
    combine = driver.load_function(combine_source(head_dim), "combine_splits", device)
    with torch.cuda.device(device):
        driver.launch(attend, driver.multiprocessors(device), plan.threads, plan.shared_bytes, params, overlaps=True)
        if params.max_splits > 1:
            driver.launch(combine, batch * q_heads, COMBINE_ROWS * head_dim // 8, 0, params, overlaps=True)
    return out, log_sum_exp


@decode_attention_op.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


def format_of(code: list[int]) -> KVFormat:
    """The format that a custom op was given as [K bits, K scale kind, V bits, V scale kind]."""
    kinds = {value: kind for kind, value in SCALE_KINDS.items()}
    return KVFormat("kernel", TensorFormat(code[0], kinds[code[1]]), TensorFormat(code[2], kinds[code[3]]))


def static_tensors(scales: LayerScales) -> list[torch.Tensor]:
    """K's scale and zero point, then V's, for the custom ops; empty where the format has none."""
    return [tensor for part in (scales.k, scales.v) for tensor in _scale_and_zero(part)]


def check_static(
    static_scales: list[torch.Tensor], fmt: KVFormat, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """A static format has fp32 scales and zero points of every KV head and channel on the GPU."""
    for name, part, pair in (("K", fmt.k, static_scales[:2]), ("V", fmt.v, static_scales[2:])):
        if part.scale is not ScaleKind.STATIC_CHANNEL:
            continue
        if any(t.numel() != kv_heads * head_dim or t.dtype != torch.float32 or t.device != device for t in pair):
            raise NibbleError(
                f"static scales of {name}: got {[(t.dtype, tuple(t.shape), str(t.device)) for t in pair]}, allowed "
                f"fp32 [{kv_heads}, 1, {head_dim}] scale and zero point on {device}; run `make calibrate`, then "
                "`make engine`"
            )


def _scale_and_zero(scales: ScaleZero | None) -> tuple[torch.Tensor, torch.Tensor]:
    if scales is None:
        return torch.empty(0), torch.empty(0)
    return scales.scale.contiguous(), scales.zero.contiguous()


def _check_inputs(
    q: torch.Tensor,
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    fmt: KVFormat,
) -> None:
    batch, q_heads, head_dim = q.shape
    kv_heads = open_pool.shape[2]
    page_bytes = SealedPageLayout(fmt, head_dim).page_bytes
    check_tensor("q", q, (batch, q_heads, head_dim), (torch.float16, torch.bfloat16), q.device)
    check_tensor("open_pool", open_pool, (None, 2, kv_heads, PAGE_TOKENS, head_dim), (torch.float16,), q.device)
    check_tensor("sealed_pool", sealed_pool, (None, kv_heads, page_bytes), (torch.uint8,), q.device)
    check_tensor("block_table", block_table, (batch, None), (torch.int32,), q.device)
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32,), q.device)
    if q_heads % kv_heads:
        raise NibbleError(f"decode kernel: got {q_heads} query heads and {kv_heads} KV heads; allowed: a multiple")
    if batch > MAX_BATCH:
        raise NibbleError(f"decode kernel, batch: got {batch}, allowed up to {MAX_BATCH}; split the batch")
    if q.device.type != "cuda":
        raise NibbleError(f"decode kernel: got tensors on {q.device}, allowed cuda; the CPU has its own backend")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raises NibbleError unless the tensor is contiguous, of that shape (None: any), of a type and on the device."""
    fits = tensor.dim() == len(shape) and all(w is None or w == n for w, n in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype not in dtypes or tensor.device != device or not tensor.is_contiguous():
        raise NibbleError(
            f"decode kernel, {name}: got {tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()} on "
            f"{tensor.device}; allowed contiguous {' or '.join(map(str, dtypes))} {shape} on {device}"
        )


def _check_workspace(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    batch: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    splits: int,
) -> None:
    units = batch * kv_heads * splits
    if partial_out.numel() < units * group * head_dim or partial_lse.numel() < units * group:
        raise NibbleError(
            f"decode workspace: too small for {batch} sequences in {splits} splits, {kv_heads} KV heads, groups of "
            f"{group}; allocate it with DecodeWorkspace.allocate for the largest batch and block table"
        )
