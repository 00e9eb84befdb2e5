"""What writing the cache costs: sealing a prompt, and append and seal as a part of a decode step."""

from __future__ import annotations

import torch

from bench.attention_cache import RandomCache, decode_launches, graph_median_us, graph_medians_in_turns_us
from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.kernels.seal import append_tokens, seal_pages_on_gpu

PROMPT_PAGES = 2048
STEPS = 8  # of a graph


def seal_prompt(fmt: KVFormat, kv_heads: int = 8, head_dim: int = 128) -> tuple[float, int]:
    """Microseconds to seal a prompt's pages of one layer, and the bytes that are read and written for it."""
    shape = (PROMPT_PAGES, 2, kv_heads, PAGE_TOKENS, head_dim)
    open_pool = torch.randn(shape, device="cuda", dtype=torch.float16)
    page_bytes = SealedPageLayout(fmt, head_dim).page_bytes
    sealed_pool = torch.empty(PROMPT_PAGES, kv_heads, page_bytes, dtype=torch.uint8, device="cuda")
    pages = [torch.randperm(PROMPT_PAGES, device="cuda").int() for _ in range(2)]
    us = graph_median_us(lambda: seal_pages_on_gpu(open_pool, sealed_pool, *pages, fmt=fmt))
    return us, open_pool.numel() * 2 + sealed_pool.numel()


def write_share(cache: RandomCache) -> dict[str, float]:
    """Microseconds of a decode step's attention alone, and with append and seal before it.

    Every sequence appends a token; one page of the whole batch is full, as happens on average with a batch of 64.
    """
    shape = cache.shape
    decode = decode_launches(cache, 1)
    kv = torch.randn(shape.batch, 2, shape.kv_heads, shape.head_dim, device="cuda", dtype=torch.float16)
    slots = cache.tables[0][:, -1].contiguous() * PAGE_TOKENS
    full = torch.full((shape.batch,), -1, dtype=torch.int32, device="cuda")
    full[0] = cache.tables[0][0, -1]

    def attend() -> None:
        for _ in range(STEPS):
            decode()

    def write_and_attend() -> None:
        for _ in range(STEPS):
            append_tokens(kv[:, 0], kv[:, 1], cache.open_pool, slots)
            seal_pages_on_gpu(cache.open_pool, cache.sealed_pool, full, full, fmt=cache.fmt, scales=cache.scales)
            decode()

    ways = {"attend": attend, "write_and_attend": write_and_attend}
    return {way: us / STEPS for way, us in graph_medians_in_turns_us(ways).items()}
