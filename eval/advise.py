"""Which KV format for a model, a GPU and a workload: `make advise MODEL=llama-8b GPU=h100 CONTEXT=32768 CONCURRENCY=9`.

Memory is arithmetic: weights, and for each format the pages of one request at full context, sealed and fp16. Quality is
measured: runs of this model under results/ where there are some, else the quality bench's records of the model that it
measured, which is said. A table for the terminal, a plot as SVG, the last line of stdout as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eval.plots import FP16, QUANTIZED, draw_svg
from eval.results import results_root
from eval.runs import latest_reports
from nibble import atomic
from nibble.errors import NibbleError
from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat, SealedPageLayout, open_page_bytes
from nibble.models import read_shape
from nibble.paths import REPOSITORY_ROOT
from nibble.recipes import load_kv_recipe, load_model_recipe
from nibble.stage import console, run_stage

GPUS_GB = {"a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141, "l4": 24, "l40s": 48, "rtx4090": 24}
USABLE = 0.9  # of the GPU's memory; the rest is for activations and the runtime
QUALITY_RECORDS = REPOSITORY_ROOT / "bench" / "results" / "quality.json"
# As `make engine` builds them.
BENCH_NAMES = {"int4": "int4-balanced", "int4-static": "int4-static as built"}


@dataclass(frozen=True)
class Shape:
    """What memory depends on. parameters: how many, of two bytes each."""

    layers: int
    kv_heads: int
    head_dim: int
    parameters: float


SHAPES = {  # of the shipped recipes whose weights may not be at hand
    "gemma3-270m": Shape(18, 1, 256, 0.268e9),
    "llama-8b": Shape(32, 8, 128, 8.03e9),
    "llama-70b": Shape(80, 8, 128, 70.6e9),
    "mistral-7b": Shape(32, 8, 128, 7.25e9),
    "qwen2.5-7b": Shape(28, 4, 128, 7.62e9),
    "qwen3-8b": Shape(36, 8, 128, 8.19e9),
    "smollm2-135m": Shape(30, 3, 64, 0.1345e9),
}


@dataclass(frozen=True)
class Advice:
    """One format for the workload. request_gb: cache of one request at full context. fit: requests that fit at once.

    kl_mean, top1_agreement, source: what was measured and on what; None where nothing was.
    """

    kv: str
    bytes_per_token: float
    request_gb: float
    fit: int
    is_enough: bool
    kl_mean: float | None
    top1_agreement: float | None
    source: str


def advise(shape: Shape, gpu_gb: float, context: int, concurrency: int, model: str) -> list[Advice]:
    """Every shipped format, the largest cache first."""
    free = gpu_gb * USABLE - shape.parameters * 2 / 1e9
    measured = quality_of(model)
    rows = []
    for name, fmt in FORMATS.items():
        per_token = SealedPageLayout(fmt, shape.head_dim).bytes_per_token * shape.kv_heads * shape.layers
        request = request_bytes(shape, fmt, context) / 1e9
        fit = max(0, int(free / request))
        kl, top1, source = measured.get(name, (None, None, "not measured"))
        rows.append(Advice(name, per_token, request, fit, fit >= concurrency, kl, top1, source))
    return sorted(rows, key=lambda row: -row.bytes_per_token)


def request_bytes(shape: Shape, fmt: KVFormat, context: int) -> float:
    """Bytes of one request's cache at full context: sinks, recent and open pages in fp16, the others sealed."""
    policy = load_kv_recipe("int4").policy
    pages = -(-context // PAGE_TOKENS)
    opened = min(pages, policy.sink_pages + policy.recent_pages + 1)
    sealed = SealedPageLayout(fmt, shape.head_dim).page_bytes * shape.kv_heads * (pages - opened)
    return shape.layers * (opened * open_page_bytes(shape.kv_heads, shape.head_dim) + sealed)


def quality_of(model: str) -> dict[str, tuple[float | None, float | None, str]]:
    """KL, top-1 agreement and where they are from, by format: this model's runs, else the quality bench's records
    of it, else those of SmolLM2."""
    found: dict[str, tuple[float | None, float | None, str]] = {"fp16": (0.0, 1.0, "the yardstick")}
    records = [r for r in json.loads(QUALITY_RECORDS.read_text(encoding="utf-8")) if r["text"] == "eval"]
    source = model if any(r["model"] == model for r in records) else "smollm2-135m"
    by_length = sorted((r for r in records if r["model"] == source), key=lambda r: r["window_tokens"])
    stored = {r["format"]: r for r in by_length}  # of each format the longest windows
    for name in FORMATS:
        record = stored.get(BENCH_NAMES.get(name, name))
        if record is not None:
            where = f"{source}, {record['windows']} × {record['window_tokens']:,} tokens"
            found.setdefault(name, (record["kl_mean"], record["top1_agreement"], where))
    for report in latest_reports(results_root(), model):
        s = report.summary
        where = f"{model}, {report.plan.windows} × {report.plan.window_tokens:,} tokens"
        found[s.kv] = (s.kl_mean, s.top1_agreement, where)
    return found


def find_shape(model: str) -> Shape:
    """The shape of a recipe's or a folder's model. NibbleError for a hub model that no table has."""
    recipe = load_model_recipe(model)
    if recipe.name in SHAPES:
        return SHAPES[recipe.name]
    folder = Path(recipe.source)
    if not folder.is_dir():
        raise NibbleError(f"advice: the shape of {model} is not known; allowed {', '.join(SHAPES)}, or a local folder")
    shape = read_shape(folder)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Shape(shape.num_layers, shape.num_kv_heads, shape.head_dim, stored / 2)


def plot(rows: list[Advice], concurrency: int) -> str:
    """Requests that fit over what the format costs, as SVG."""

    def draw(axes: Axes) -> None:
        names = [row.kv for row in rows]
        axes.barh(names, [row.fit for row in rows], color=[QUANTIZED if row.is_enough else FP16 for row in rows])
        for at, row in enumerate(rows):
            cost = "" if row.kl_mean is None else f"  KL {row.kl_mean:.2g}"
            axes.annotate(f" {row.fit}{cost}", (row.fit, at), va="center")
        axes.axvline(concurrency, linestyle=":", color=FP16)
        axes.margins(x=0.25)
        axes.set(xlabel="requests that fit at full context (dotted: asked for)")

    return draw_svg("advice", draw)


def main(arguments: Sequence[str] | None = None) -> None:
    """Advise from the command line. NibbleError for an unknown model or GPU."""
    options = _parser().parse_args(arguments)
    if options.gpu not in GPUS_GB:
        raise NibbleError(f"GPU: got {options.gpu!r}, allowed {', '.join(GPUS_GB)}")
    if options.context < 1 or options.concurrency < 1:
        raise NibbleError(
            f"workload: got {options.concurrency} requests of {options.context} tokens, allowed 1 or more of each"
        )
    name = load_model_recipe(options.model).name
    rows = advise(find_shape(options.model), GPUS_GB[options.gpu], options.context, options.concurrency, name)
    title = f"{name} on {options.gpu}: {options.concurrency} requests of {options.context:,} tokens"
    console.print(_table(rows, title))
    for line in _sources(rows):
        console.print(line, soft_wrap=True, markup=False)
    path = results_root() / f"advice-{name}-{options.gpu}-{options.context}-{options.concurrency}.svg"
    atomic.write_text(path, plot(rows, options.concurrency))
    console.print(f"plot: {path}", soft_wrap=True, markup=False)
    print(json.dumps([asdict(row) for row in rows]), flush=True)


def _table(rows: list[Advice], title: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    headings = ("KV", "bytes/\ntoken", "GB a\nrequest", "requests\nthat fit", "enough", "KL", "same top\ntoken")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        kl = "" if row.kl_mean is None else f"{row.kl_mean:.3g}"
        top1 = "" if row.top1_agreement is None else f"{row.top1_agreement:.1%}"
        enough = "[green]yes[/]" if row.is_enough else "[red]no[/]"
        fit = f"{row.fit:,}"
        table.add_row(row.kv, f"{row.bytes_per_token:,.0f}", f"{row.request_gb:.3f}", fit, enough, kl, top1)
    return table


def _sources(rows: list[Advice]) -> list[str]:
    """What the quality is from, a line for each source."""
    formats: dict[str, list[str]] = {}
    for row in rows:
        formats.setdefault(row.source, []).append(row.kv)
    return [f"quality of {', '.join(names)}: {source}" for source, names in formats.items()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.advise", description="Memory and quality of every format.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gpu", default="h100", help=", ".join(GPUS_GB))
    parser.add_argument("--context", type=int, default=8192, help="tokens of a request, prompt and answer")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once")
    return parser


if __name__ == "__main__":
    run_stage(main)
