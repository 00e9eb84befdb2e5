"""How fast decode attention is: microseconds a launch, TB/s of cache read, and the share of what plain reading reaches.

    python -m bench.attention                              # everything, into bench/results/attention.json
    python -m bench.attention --plot docs/attention.png    # and a plot

Beside ours it measures FlashInfer's XQA kernels when FlashInfer is installed (bench/attention_peers.py), other head
sizes and groups, and what writing the cache costs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench import attention_peers
from bench.attention_cache import RandomCache, Shape, measure, read_bandwidth
from bench.attention_write import seal_prompt, write_share
from bench.measured_commit import measured_commit
from nibble.formats import FORMATS, SealedPageLayout

RESULTS = Path(__file__).parent / "results" / "attention.json"
YARDSTICK = [Shape(batch, context) for context in (32768, 4096) for batch in (64, 16, 1)]
OURS = {
    "int4": YARDSTICK,
    "k8v4": YARDSTICK[:1],
    "int8": YARDSTICK[:1],
    "int4-static": YARDSTICK[:1],
    "fp16": YARDSTICK,
}
HEAD_DIMS, GROUPS, OTHER_SHAPES_BYTES = (64, 128, 256), (1, 4, 7, 8, 16), 2_000_000_000
SPLIT_PAGES = (8, 16, 64)  # instead of the rule
VERSIONS = ("torch", "nvidia-cuda-nvrtc", "flashinfer-python")


@dataclass(frozen=True)
class Record:
    """us: microseconds a launch. tbps: TB/s of cache read; for "seal", read and written."""

    kernel: str
    kv: str
    batch: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    us: float
    tbps: float
    share_of_read_bandwidth: float


class Bench:
    """Measures one thing after another against the ceiling that it measured first."""

    def __init__(self) -> None:
        self.read_tbps = read_bandwidth()

    def record(self, kernel: str, kv: str, shape: Shape, us: float, moved_bytes: int) -> Record:
        tbps = moved_bytes / us / 1e6
        heads = shape.kv_heads * shape.group
        place = (kernel, kv, shape.batch, shape.context, heads, shape.kv_heads, shape.head_dim)
        return Record(*place, round(us, 1), round(tbps, 3), round(tbps / self.read_tbps, 3))

    def ours(self, kv: str, shape: Shape, split_pages: int | None = None) -> Record:
        cache = RandomCache(shape, FORMATS[kv])
        kernel = f"decode_attention_split_{split_pages}" if split_pages else "decode_attention"
        return self.record(kernel, kv, shape, measure(cache, split_pages), cache.bytes)

    def xqa(self, kv: str, shape: Shape) -> Record:
        cache = attention_peers.XqaCache(shape, kv)
        return self.record("flashinfer_xqa", kv, shape, cache.measure(), cache.bytes)

    def seal(self, kv: str) -> Record:
        us, moved_bytes = seal_prompt(FORMATS[kv])
        return self.record("seal", kv, Shape(1, 131072), us, moved_bytes)

    def writing(self, kv: str, shape: Shape) -> Iterator[Record]:
        cache = RandomCache(shape, FORMATS[kv])
        for kernel, us in write_share(cache).items():
            yield self.record(f"step_{kernel}", kv, shape, us, cache.bytes)

    def everything(self) -> Iterator[Record]:
        """Every record, ours and the peers' in turns by shape."""
        for shape in YARDSTICK:
            yield from (self.ours(kv, shape) for kv, shapes in OURS.items() if shape in shapes)
            if attention_peers.is_installed():
                yield from (self.xqa(kv, shape) for kv in attention_peers.DTYPES)
        yield from (self.ours("int4", shape, split_pages) for shape in YARDSTICK for split_pages in SPLIT_PAGES)
        yield from (self.ours("int4", other_shape(d, group)) for d in HEAD_DIMS for group in GROUPS)
        yield from (self.seal(kv) for kv in ("int4", "int8", "k8v4"))
        yield from self.writing("int4", YARDSTICK[0])


def other_shape(head_dim: int, group: int) -> Shape:
    """A batch of 32k tokens each that has about OTHER_SHAPES_BYTES of int4 cache."""
    one = Shape(1, 32768, group=group, head_dim=head_dim)
    sequence_bytes = SealedPageLayout(FORMATS["int4"], head_dim).bytes_per_token * one.kv_heads * one.context
    return Shape(round(OTHER_SHAPES_BYTES / sequence_bytes), one.context, group=group, head_dim=head_dim)


def plot(records: list[Record], read_tbps: float, target: Path) -> None:
    """Cache read a second, by kernel and shape, under the ceiling of plain reading."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"decode_attention": "", "flashinfer_xqa": "XQA "}
    shown = [
        r for r in records if r.kernel in names and r.head_dim == 128 and r.q_heads == 64 and r.batch in (1, 16, 64)
    ]
    shapes = sorted({(r.context, r.batch) for r in shown})
    bars = sorted({(names[r.kernel] + r.kv) for r in shown})
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for i, bar in enumerate(bars):
        values = {(r.context, r.batch): r.tbps for r in shown if names[r.kernel] + r.kv == bar}
        places = [n + 0.8 * i / len(bars) for n, shape in enumerate(shapes) if shape in values]
        axes.bar(places, [values[s] for s in shapes if s in values], 0.8 / len(bars), label=bar)
    axes.axhline(read_tbps, color="black", linestyle="--", label="plain reading")
    axes.set_xticks([n + 0.35 for n in range(len(shapes))], [f"{batch} x {context}" for context, batch in shapes])
    axes.set_xlabel("batch x context")
    axes.set_ylabel("TB/s of cache read")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    """Measure, print a line for each record and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    bench = Bench()
    stamp = {"card": torch.cuda.get_device_name(), "commit": measured_commit()}
    records = []
    for record in bench.everything():
        records.append(record)
        print(record, flush=True)
        torch.cuda.empty_cache()
    setting = {"read_tbps": round(bench.read_tbps, 3), "versions": _versions(), **stamp}
    lines = [json.dumps(asdict(record) | stamp) for record in records]
    options.out.write_text(
        '{"setting": ' + json.dumps(setting) + ',\n "records": [\n  ' + ",\n  ".join(lines) + "\n]}\n"
    )
    if options.plot:
        plot(records, bench.read_tbps, options.plot)
    print(json.dumps({**setting, "records": len(records), "results": str(options.out)}))


def _versions() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda)}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
