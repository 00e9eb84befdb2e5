"""A paged cache with a known content, as a prefill step finds it, and the oracle's answer to it.

Pages are scattered over the pools; a page is in a pool only if some query of the chunk needs that form of it; all else
is poisoned: NaN in open pages and behind the last token, bytes of 255 in sealed pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.kernels.layout import seal_pages_for_cuda
from nibble.kernels.prefill import PrefillCache
from nibble.kernels.prefill_plan import PrefillPlan, plan_prefill
from nibble.quantizer import ScaleZero, static_parameters
from nibble.reference import AttentionOutput, LayerScales, reference_attention
from nibble.visibility import PagePolicy

SPARE_PAGES = 3


@dataclass(frozen=True)
class Shape:
    """One case. query_lens, seq_lens: tokens, one entry a sequence."""

    kv: str = "int4"
    head_dim: int = 128
    group: int = 8
    kv_heads: int = 2
    query_lens: tuple[int, ...] = (200,)
    seq_lens: tuple[int, ...] = (500,)
    policy: PagePolicy = PagePolicy()
    sliding_window: int | None = None
    dtype: torch.dtype = torch.float16
    query_size: float = 1.0
    k_bias: float = 3.0

    @property
    def fmt(self) -> KVFormat:
        return KVFormat.named(self.kv)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 / self.query_size


@dataclass(frozen=True)
class Tokens:
    """The values of each sequence on the CPU: q [queries, q_heads, D], k and v fp16 [tokens, kv_heads, D]."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    scales: LayerScales


def make_tokens(shape: Shape, seed: int = 0) -> Tokens:
    """Random tokens whose K has large channels and, in one channel, a bias."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.arange(shape.head_dim)
    k_size = 1.0 + 4.0 * (channels % 7 == 0)
    k_bias = shape.k_bias * (channels == 3)
    q_shape = (shape.group * shape.kv_heads, shape.head_dim)
    kv_shape = (shape.kv_heads, shape.head_dim)
    q = [torch.randn(n, *q_shape, generator=generator) * shape.query_size for n in shape.query_lens]
    k = [(torch.randn(n, *kv_shape, generator=generator) * k_size + k_bias).half() for n in shape.seq_lens]
    v = [torch.randn(n, *kv_shape, generator=generator).half() for n in shape.seq_lens]
    return Tokens([x.to(shape.dtype) for x in q], k, v, _calibrate(shape.fmt, k, v))


def build_cache(shape: Shape, tokens: Tokens, device: str, seed: int = 0) -> tuple[PrefillCache, PrefillPlan]:
    """The pools, the block tables and the plan."""
    plan = plan_prefill(
        shape.query_lens, shape.seq_lens, shape.policy, sliding_window=shape.sliding_window, device=device
    )
    page_counts = [-(-n // PAGE_TOKENS) for n in shape.seq_lens]
    num_pages = sum(page_counts) + SPARE_PAGES
    places = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    open_pool = torch.full((num_pages, 2, shape.kv_heads, PAGE_TOKENS, shape.head_dim), torch.nan, dtype=torch.float16)
    page_bytes = SealedPageLayout(shape.fmt, shape.head_dim).page_bytes
    sealed_pool = torch.full((num_pages, shape.kv_heads, page_bytes), 255, dtype=torch.uint8)
    open_table = torch.full((len(page_counts), max(page_counts) + 1), -1, dtype=torch.int32)
    sealed_table = open_table.clone()
    for sequence, count in enumerate(page_counts):
        for page in range(count):
            place = places.pop()
            k, v = (_page(values[sequence], page) for values in (tokens.k, tokens.v))
            if _needed_open(shape, sequence, page):
                open_pool[place, 0, :, : k.shape[1]], open_pool[place, 1, :, : k.shape[1]] = k, v
                open_table[sequence, page] = place
            if k.shape[1] == PAGE_TOKENS and not page < shape.policy.sink_pages:
                sealed_pool[place] = seal_pages_for_cuda(k, v, shape.fmt, tokens.scales.k, tokens.scales.v)
                sealed_table[sequence, page] = place
    scales = LayerScales(*(_to(pair, device) for pair in (tokens.scales.k, tokens.scales.v)))
    pools = open_pool.to(device), sealed_pool.to(device)
    return PrefillCache(shape.fmt, *pools, open_table.to(device), sealed_table.to(device), scales), plan


def oracle(shape: Shape, tokens: Tokens) -> AttentionOutput:
    """The oracle's output of all chunks, one after another, float64."""
    outputs = [
        reference_attention(
            q, k, v, fmt=shape.fmt, policy=shape.policy, softmax_scale=shape.softmax_scale, scales=tokens.scales,
            sliding_window=shape.sliding_window,
        )
        for q, k, v in zip(tokens.q, tokens.k, tokens.v, strict=True)
        if q.shape[0]
    ]  # fmt: skip
    return AttentionOutput(torch.cat([x.out for x in outputs]), torch.cat([x.log_sum_exp for x in outputs]))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| in the Frobenius norm; infinite when anything is not finite."""
    got = got.cpu().double()
    return float((got - expected).norm() / expected.norm()) if got.isfinite().all() else float("inf")


def _page(values: torch.Tensor, page: int) -> torch.Tensor:
    """[kv_heads, up to 64 tokens, D]."""
    return values[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].transpose(0, 1)


def _needed_open(shape: Shape, sequence: int, page: int) -> bool:
    first_position = shape.seq_lens[sequence] - shape.query_lens[sequence]
    return page < shape.policy.sink_pages or page >= first_position // PAGE_TOKENS - shape.policy.recent_pages


def _calibrate(fmt: KVFormat, k: list[torch.Tensor], v: list[torch.Tensor]) -> LayerScales:
    if not fmt.needs_calibration:
        return LayerScales()
    pairs = []
    for tokens, tensor_format in ((torch.cat(k), fmt.k), (torch.cat(v), fmt.v)):
        low, high = (bound.unsqueeze(1) for bound in tokens.float().aminmax(dim=0))
        pairs.append(static_parameters(low, high, tensor_format))
    return LayerScales(*pairs)


def _to(pair: ScaleZero | None, device: str) -> ScaleZero | None:
    return None if pair is None else ScaleZero(pair.scale.to(device), pair.zero.to(device))
