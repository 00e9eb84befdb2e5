"""How fast decode attention is: microseconds a launch, TB/s of cache read, and the share of what plain reading reaches.

    python -m bench.attention                       # all shapes, into bench/results/attention.json
    python -m bench.attention --kv int4 --plot docs/attention.png

Launches are captured in a CUDA graph, several to a graph, over caches that are many times the L2 cache; the figure is
the median of its replays. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.kernels import driver
from nibble.kernels.compiler import KernelSource
from nibble.kernels.decode import SPLIT_PAGES, DecodeWorkspace, decode_attention
from nibble.kernels.layout import seal_pages_for_cuda
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.visibility import PagePolicy

RESULTS = Path(__file__).parent / "results" / "attention.json"
SHAPES = [(64, 32768), (16, 32768), (1, 32768), (64, 4096), (16, 4096), (1, 4096)]
LAUNCHES_READ_BYTES = 1_000_000_000  # of one graph, at least


@dataclass(frozen=True)
class Record:
    kernel: str
    kv: str
    batch: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    split_pages: int
    us: float
    tbps: float
    share_of_read_bandwidth: float
    card: str
    commit: str


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    kv_heads: int = 8
    group: int = 8
    head_dim: int = 128


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
        self.copies = max(1, min(40, LAUNCHES_READ_BYTES // 3 // self.bytes))
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


def measure(cache: RandomCache, split_pages: int) -> float:
    """Microseconds a launch."""
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
    launches = max(5, cache.copies)

    def launch_all() -> None:
        for i in range(launches):
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

    return graph_median_us(launch_all) / launches


def graph_median_us(launch: Callable[[], None], replays: int = 15) -> float:
    """Microseconds of one replay of what `launch` launches."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


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


def plot(records: list[Record], target: Path) -> None:
    """Cache read a second, by format and shape, under the ceiling of plain reading."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = sorted({(r.context, r.batch) for r in records})
    formats = sorted({r.kv for r in records})
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for i, kv in enumerate(formats):
        ordered = sorted((r for r in records if r.kv == kv), key=lambda r: r.split_pages)
        best = {(r.context, r.batch): r.tbps for r in ordered if r.split_pages <= SPLIT_PAGES}
        places = [n + 0.8 * i / len(formats) for n, shape in enumerate(shapes) if shape in best]
        axes.bar(places, [best[s] for s in shapes if s in best], 0.8 / len(formats), label=kv)
    ceiling = records[0].tbps / records[0].share_of_read_bandwidth
    axes.axhline(ceiling, color="black", linestyle="--", label="plain reading")
    axes.set_xticks([n + 0.3 for n in range(len(shapes))], [f"{batch} x {context}" for context, batch in shapes])
    axes.set_xlabel("batch x context")
    axes.set_ylabel("TB/s of cache read")
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    """Measure what the options name and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", nargs="*", default=["fp16", "int8", "k8v4", "int4"], choices=list(FORMATS))
    parser.add_argument("--split-pages", type=int, nargs="*", default=[SPLIT_PAGES])
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    ceiling = read_bandwidth()
    card = torch.cuda.get_device_name()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    records = []
    for kv in options.kv:
        for batch, context in SHAPES:
            shape = Shape(batch, context)
            cache = RandomCache(shape, FORMATS[kv])
            for split_pages in options.split_pages:
                us = measure(cache, split_pages)
                tbps = cache.bytes / us / 1e6
                heads = shape.kv_heads * shape.group
                place = ("decode_attention", kv, batch, context, heads, shape.kv_heads, shape.head_dim, split_pages)
                records.append(Record(*place, round(us, 1), round(tbps, 3), round(tbps / ceiling, 3), card, commit))
                print(
                    f"{kv:12} {batch:3} x {context:6}  split {split_pages:3}  {us:8.1f} us  {tbps:.2f} TB/s", flush=True
                )
            del cache
            torch.cuda.empty_cache()
    RESULTS.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
    if options.plot:
        plot(records, options.plot)
    print(json.dumps({"read_tbps": round(ceiling, 3), "records": len(records), "results": str(RESULTS)}))


def _even_scales(fmt: TensorFormat, shape: Shape) -> ScaleZero | None:
    if fmt.scale is not ScaleKind.STATIC_CHANNEL:
        return None
    per_channel = (shape.kv_heads, 1, shape.head_dim)
    return ScaleZero(
        torch.full(per_channel, 8.0 / fmt.levels, device="cuda"), torch.full(per_channel, -4.0, device="cuda")
    )


def _scattered(rows: int, pages: int) -> torch.Tensor:
    return torch.randperm(rows * pages, device="cuda").int().view(rows, pages)


if __name__ == "__main__":
    main()
