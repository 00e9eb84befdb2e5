"""Prefill attention over a paged cache of open (fp16) and sealed (quantized) pages: checks, custom op, dispatch.

    open and sealed pages --dequantize pass--> scratch (fp16 far pages)
    queries, open pages, scratch --tile kernel--> output, log-sum-exp

    >>> plan = plan_prefill([100], [4196], PagePolicy())          # once a step
    >>> out = prefill_attention(q, cache, plan, softmax_scale=128**-0.5).out    # for every layer

Queries of a chunk of 64 or more new tokens a sequence are its best case; single tokens are decode's work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nibble.errors import NibbleError
from nibble.formats import HEAD_DIMS, PAGE_TOKENS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.kernels.prefill_plan import PrefillPlan
from nibble.reference import LayerScales
from nibble.visibility import PagePolicy

LARGEST_GROUP = 16  # query heads that share a KV head


@dataclass(frozen=True)
class PrefillCache:
    """The pages of one layer and where those of each sequence are.

    open_pool: fp16 [open_pages, 2, kv_heads, 64, head_dim]. sealed_pool: uint8 [sealed_pages, kv_heads, page_bytes].
    open_table, sealed_table: int32 [sequences, pages], an index into the pool or -1. A page may be in both: new full
    pages are sealed before attention and their open copies released after it.
    """

    fmt: KVFormat
    open_pool: torch.Tensor
    sealed_pool: torch.Tensor
    open_table: torch.Tensor
    sealed_table: torch.Tensor
    scales: LayerScales = field(default_factory=LayerScales)


@dataclass(frozen=True)
class PrefillOutput:
    """out: like the queries. log_sum_exp: fp32 [queries, q_heads], natural logarithm, or None."""

    out: torch.Tensor
    log_sum_exp: torch.Tensor | None


def prefill_attention(
    q: torch.Tensor, cache: PrefillCache, plan: PrefillPlan, *, softmax_scale: float, with_log_sum_exp: bool = False
) -> PrefillOutput:
    """Attention of the new queries of each sequence over its cache, the chunk's own keys included.

    q: fp16 or bf16 [queries, q_heads, head_dim], the chunks one after another. Raises NibbleError for a shape, type or
    group that the kernel is not made for.
    """
    check_prefill(q, cache, plan)
    fmt = cache.fmt
    out, log_sum_exp = prefill_attention_op(
        q.contiguous(), cache.open_pool, cache.sealed_pool, cache.open_table, cache.sealed_table,
        plan.tiles, plan.page_pairs, plan.sequences, plan.scratch_pages, static_parameters(cache),
        f"{fmt.k.bits} {fmt.k.scale} {fmt.v.bits} {fmt.v.scale}",
        plan.policy.sink_pages, plan.policy.recent_pages, plan.sliding_window or 0, softmax_scale, with_log_sum_exp,
    )  # fmt: skip
    return PrefillOutput(out, log_sum_exp if with_log_sum_exp else None)


@torch.library.custom_op("nibble::prefill_attention", mutates_args=())
def prefill_attention_op(
    q: torch.Tensor,
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    open_table: torch.Tensor,
    sealed_table: torch.Tensor,
    tiles: torch.Tensor,
    page_pairs: torch.Tensor,
    sequences: torch.Tensor,
    scratch_pages: torch.Tensor,
    static: list[torch.Tensor],
    fmt: str,
    sink_pages: int,
    recent_pages: int,
    sliding_window: int,
    softmax_scale: float,
    with_log_sum_exp: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator behind `prefill_attention`: the same arguments, taken apart into what an operator may take."""
    from nibble.kernels.prefill_launch import launch_prefill

    k_bits, k_scale, v_bits, v_scale = fmt.split()
    stored = KVFormat(fmt, TensorFormat(int(k_bits), ScaleKind(k_scale)), TensorFormat(int(v_bits), ScaleKind(v_scale)))
    policy = PagePolicy(sink_pages, recent_pages)
    plan = PrefillPlan(tiles, page_pairs, sequences, scratch_pages, policy, sliding_window or None, q.shape[0], 0)
    cache = PrefillCache(stored, open_pool, sealed_pool, open_table, sealed_table)
    return launch_prefill(q, cache, plan, static, softmax_scale, with_log_sum_exp)


@prefill_attention_op.register_fake
def _(q: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    *_, with_log_sum_exp = others
    return torch.empty_like(q), q.new_empty((q.shape[0] if with_log_sum_exp else 0, q.shape[1]), dtype=torch.float32)


def check_prefill(q: torch.Tensor, cache: PrefillCache, plan: PrefillPlan) -> None:
    """Raise NibbleError with the first thing that does not fit."""
    _check_queries(q, cache, plan)
    _check_pools(cache)
    for name, table in (("open table", cache.open_table), ("sealed table", cache.sealed_table)):
        if table.dtype != torch.int32 or table.dim() != 2 or not table.is_contiguous():
            raise NibbleError(f"{name}: got {_describe(table)}; allowed contiguous int32 [sequences, pages]")
        if table.shape[0] < plan.num_sequences or table.shape[1] < plan.max_pages:
            raise NibbleError(
                f"{name}: got {tuple(table.shape)}; the plan needs {plan.num_sequences} sequences and "
                f"{plan.max_pages} pages"
            )
    if cache.open_table.shape != cache.sealed_table.shape:
        raise NibbleError(
            f"block tables: got open {tuple(cache.open_table.shape)} and sealed {tuple(cache.sealed_table.shape)}; "
            "allowed one shape"
        )


def _check_queries(q: torch.Tensor, cache: PrefillCache, plan: PrefillPlan) -> None:
    if q.dim() != 3 or q.dtype not in (torch.float16, torch.bfloat16):
        raise NibbleError(f"queries: got {_describe(q)}; allowed fp16 or bf16 [queries, q_heads, head_dim]")
    if q.shape[2] != cache.open_pool.shape[-1]:
        raise NibbleError(
            f"head size: got queries of {q.shape[2]} and pages of {cache.open_pool.shape[-1]}; allowed one"
        )
    if q.shape[0] != plan.num_queries:
        raise NibbleError(f"queries: got {q.shape[0]} tokens; the plan was made for {plan.num_queries}")
    num_kv_heads = cache.open_pool.shape[2] if cache.open_pool.dim() == 5 else 0
    group, rest = divmod(q.shape[1], num_kv_heads) if num_kv_heads else (0, 1)
    if rest or not 1 <= group <= LARGEST_GROUP:
        raise NibbleError(
            f"GQA: got {q.shape[1]} query heads over {num_kv_heads} KV heads; allowed whole groups of 1 to "
            f"{LARGEST_GROUP}; serve this model with KV_FALLBACK=fp16 on another host"
        )


def _check_pools(cache: PrefillCache) -> None:
    pool = cache.open_pool
    if pool.dim() != 5 or pool.dtype != torch.float16 or pool.shape[1] != 2 or pool.shape[3] != PAGE_TOKENS:
        raise NibbleError(
            f"open pool: got {_describe(pool)}; allowed fp16 [pages, 2, kv_heads, {PAGE_TOKENS}, head_dim]"
        )
    head_dim = pool.shape[4]
    if head_dim not in HEAD_DIMS:
        raise NibbleError(f"head size: got {head_dim}; allowed multiples of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}")
    page_bytes = SealedPageLayout(cache.fmt, head_dim).page_bytes
    sealed = cache.sealed_pool
    if sealed.dtype != torch.uint8 or sealed.dim() != 3 or sealed.shape[1:] != (pool.shape[2], page_bytes):
        raise NibbleError(
            f"sealed pool: got {_describe(sealed)}; {cache.fmt.name} needs uint8 [pages, {pool.shape[2]}, {page_bytes}]"
        )
    if not (pool.is_contiguous() and sealed.is_contiguous()):
        raise NibbleError("page pools: got a strided view; allowed contiguous pools")
    if cache.fmt.needs_calibration and (cache.scales.k is None or cache.scales.v is None):
        raise NibbleError("static KV format without calibrated scales: run `make calibrate`, then `make engine`")


def static_parameters(cache: PrefillCache) -> list[torch.Tensor]:
    """Scale and zero of K, then of V, fp32 [kv_heads, head_dim]; nothing for formats that carry theirs in the page."""
    pairs = [pair for pair in (cache.scales.k, cache.scales.v) if pair is not None]
    return [x.float().flatten(1).contiguous() for pair in pairs for x in (pair.scale, pair.zero)]


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
