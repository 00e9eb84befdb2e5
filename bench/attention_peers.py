"""FlashInfer's XQA decode kernels, fp16 and fp8, as the yardstick of bench.attention; measured when it is installed.

    pip install flashinfer-python==0.6.3 apache-tvm-ffi einops    # compiles with nvcc on first use

Its library is called as any user would call it; nothing of it is used elsewhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from bench.attention_cache import Shape, copies_of, graph_median_us
from nibble.formats import PAGE_TOKENS

WORKSPACE_BYTES = 256 << 20
SEMAPHORES = 1 << 20
DTYPES = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def is_installed() -> bool:
    """Whether FlashInfer can be imported here."""
    return importlib.util.find_spec("flashinfer") is not None


class XqaCache:
    """Paged K and V of XQA for several batches, one after another in a pool that is larger than the L2 cache."""

    def __init__(self, shape: Shape, kv: str) -> None:
        self.shape = shape
        pages = -(-shape.context // PAGE_TOKENS)
        self.bytes = 2 * shape.batch * pages * PAGE_TOKENS * shape.kv_heads * shape.head_dim * DTYPES[kv].itemsize
        self.copies = copies_of(self.bytes)
        pool = (self.copies * shape.batch * pages, shape.kv_heads, PAGE_TOKENS, shape.head_dim)
        self.k, self.v = (torch.empty(pool, device="cuda", dtype=DTYPES[kv]) for _ in range(2))
        for tensor in (self.k, self.v):
            for first in range(0, pool[0], 4096):
                part = tensor[first : first + 4096]
                part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.float16))
        places = torch.randperm(pool[0], device="cuda").int()
        self.tables = places.view(self.copies, shape.batch, pages)
        heads = shape.kv_heads * shape.group
        self.q = torch.randn(shape.batch, 1, heads, shape.head_dim, device="cuda", dtype=torch.float16)
        self.out = torch.empty_like(self.q)
        self.seq_lens = torch.full((shape.batch, 1), shape.context, dtype=torch.int32, device="cuda").view(torch.uint32)
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device="cuda").view(torch.uint32)

    def measure(self) -> float:
        """Microseconds a launch."""
        launches = max(5, self.copies)
        return graph_median_us(self._launches(launches)) / launches

    def _launches(self, count: int) -> Callable[[], None]:
        from flashinfer.xqa import xqa

        def launch_all() -> None:
            for i in range(count):
                xqa(
                    self.q, self.k, self.v, self.tables[i % self.copies], self.seq_lens, self.out, self.workspace,
                    self.semaphores, self.shape.kv_heads, PAGE_TOKENS, kv_layout="HND",
                )  # fmt: skip

        return launch_all
