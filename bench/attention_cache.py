"""Random paged caches and graph timing for bench.attention.

Launches are captured in a CUDA graph, several to a graph, over caches that are many times the L2 cache; the figure is
the median of the graph's replays.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nibble.formats import PAGE_TOKENS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.kernels import driver
from nibble.kernels.compiler import KernelSource
from nibble.kernels.decode import DecodeWorkspace, decode_attention
from nibble.kernels.layout import seal_pages_for_cuda
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.visibility import PagePolicy

LAUNCHES_READ_BYTES = 1_000_000_000  # of one graph, at least
MOST_COPIES = 40


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    kv_heads: int = 8
    group: int = 8
    head_dim: int = 128


def copies_of(cache_bytes: int) -> int:
    """How many caches of that size make a graph read what it should."""
    return max(1, min(MOST_COPIES, LAUNCHES_READ_BYTES // 3 // cache_bytes))


class RandomCache:
    """Several batches of scattered pages; the sealed ones repeat a few dozen truly quantized pages."""

    def __init__(self, shape: Shape, fmt: KVFormat) -> None:
        self.shape, self.fmt, self.policy = shape, fmt, PagePolicy()
        self.scales = LayerScales(_even_scales(fmt.k, shape), _even_scales(fmt.v, shape))
        pages = -(-shape.context // PAGE_TOKENS)
        sealed = self.policy.first_recent_page(shape.context - 1) - self.policy.sink_pages
        page_bytes = SealedPageLayout(fmt, shape.head_dim).page_bytes
        open_tokens = shape.context - sealed * PAGE_TOKENS
        self.bytes = shape.batch * shape.kv_heads * (sealed * page_bytes + open_tokens * 4 * shape.head_dim)
        self.copies = copies_of(self.bytes)
        rows = self.copies * shape.batch
        self.sealed_pool = self._sealed_pages(rows * sealed)
        half = torch.float16
        pool_shape = (rows * (pages - sealed), 2, shape.kv_heads, PAGE_TOKENS, shape.head_dim)
        self.open_pool = torch.randn(pool_shape, device="cuda", dtype=half)
        places = _scattered(rows, sealed), _scattered(rows, pages - sealed)
        table = torch.cat((places[1][:, :1], places[0], places[1][:, 1:]), 1).contiguous()
        self.tables = table.view(self.copies, shape.batch, pages)
        heads = shape.kv_heads * shape.group
        self.q = torch.randn(self.copies, shape.batch, heads, shape.head_dim, device="cuda", dtype=half)
        self.seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda")

    def _sealed_pages(self, count: int) -> torch.Tensor:
        shape = (64, self.shape.kv_heads, PAGE_TOKENS, self.shape.head_dim)
        k, v = (torch.randn(shape, device="cuda").half() for _ in range(2))
        few = seal_pages_for_cuda(k, v, self.fmt, self.scales.k, self.scales.v)
        return few.repeat(-(-count // 64), 1, 1)[:count].contiguous()


def decode_launches(cache: RandomCache, count: int, split_pages: int | None = None) -> Callable[[], None]:
    """A function that attends `count` times, over one batch after another."""
    shape = cache.shape
    workspace = DecodeWorkspace.allocate(
        shape.batch,
        shape.kv_heads * shape.group,
        shape.kv_heads,
        shape.head_dim,
        cache.tables.shape[2],
        "cuda",
        split_pages=split_pages,
    )

    def launch_all() -> None:
        for i in range(count):
            decode_attention(
                cache.q[i % cache.copies],
                cache.open_pool,
                cache.sealed_pool,
                cache.tables[i % cache.copies],
                cache.seq_lens,
                fmt=cache.fmt,
                policy=cache.policy,
                softmax_scale=shape.head_dim**-0.5,
                workspace=workspace,
                scales=cache.scales,
            )

    return launch_all


def measure(cache: RandomCache, split_pages: int | None = None) -> float:
    """Microseconds a launch."""
    launches = max(5, cache.copies)
    return graph_median_us(decode_launches(cache, launches, split_pages)) / launches


def graph_median_us(launch: Callable[[], None], replays: int = 15) -> float:
    """Microseconds of one replay of what `launch` launches."""
    graph = _capture(launch)
    return statistics.median([_replay_us(graph) for _ in range(replays)][2:])


def graph_medians_in_turns_us(
    ways: dict[str, Callable[[], None]], replays: int = 30, pause_s: float = 0.02
) -> dict[str, float]:
    """The same of several launches to be compared, by name: replayed in turns, since a card that warms up slows down.

    Before each replay the card rests for `pause_s` seconds.
    """
    graphs = {name: _capture(launch) for name, launch in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            time.sleep(pause_s)
            times[name].append(_replay_us(graph))
    return {name: statistics.median(us[2:]) for name, us in times.items()}


def _capture(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def read_bandwidth() -> float:
    """TB/s of a kernel that only reads."""

    class ReadParams(ctypes.Structure):
        _fields_ = [("source", ctypes.c_void_p), ("out", ctypes.c_void_p), ("count", ctypes.c_uint64)]

    memory = torch.randint(0, 1 << 30, (3 << 28,), dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    function = driver.load_function(KernelSource("read.cu"), "read_memory", 0)
    params = ReadParams(memory.data_ptr(), out.data_ptr(), memory.numel() // 4)
    blocks = 16 * driver.multiprocessors(0)
    us = graph_median_us(lambda: driver.launch(function, blocks, 512, 0, params))
    return memory.numel() * 4 / us / 1e6


def _even_scales(fmt: TensorFormat, shape: Shape) -> ScaleZero | None:
    if fmt.scale is not ScaleKind.STATIC_CHANNEL:
        return None
    per_channel = (shape.kv_heads, 1, shape.head_dim)
    return ScaleZero(
        torch.full(per_channel, 8.0 / fmt.levels, device="cuda"), torch.full(per_channel, -4.0, device="cuda")
    )


def _scattered(rows: int, pages: int) -> torch.Tensor:
    return torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
