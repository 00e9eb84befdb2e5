"""The report's plots as SVG text that takes its colours from the page, so that light and dark both read well.

matplotlib draws with marker colours; each is replaced by a CSS variable of the template. Text stays text. Clouds of
points are rasters inside the SVG, or a run of 100,000 positions would be megabytes of paths.
"""

from __future__ import annotations

import io

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.measures import PositionMeasures
from eval.records import Report
from nibble.formats import PAGE_TOKENS

matplotlib.use("Agg")

INK, FAINT, QUANTIZED, FP16 = "#010101", "#020202", "#2f7de1", "#e0863a"
CSS_COLOURS = {INK: "var(--ink)", FAINT: "var(--faint)", QUANTIZED: "var(--quantized)", FP16: "var(--fp16)"}
SIZE_INCHES = (6.4, 3.6)
SMALLEST_KL = 1e-9  # a log axis has no zero
STYLE = {
    "font.size": 11,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "legend.frameon": False,
}


def kl_by_position(measured: list[PositionMeasures]) -> str:
    """Mean and p99 of KL for every page of positions, over all windows: where a cache loses its hold."""
    figure, axes = _figure("position in the window (tokens)", "KL to fp16 (nats)")
    kl = np.stack([part.kl for part in measured])
    starts = range(0, kl.shape[1], PAGE_TOKENS)
    pages = [kl[:, start : start + PAGE_TOKENS] for start in starts]
    axes.plot(starts, [_visible(page.mean()) for page in pages], color=QUANTIZED, label="mean")
    axes.plot(starts, [_visible(np.quantile(page, 0.99)) for page in pages], color=FP16, label="p99")
    axes.set_yscale("log")
    axes.legend()
    return _svg(figure, "kl-by-position")


def kl_distribution(measured: list[PositionMeasures]) -> str:
    """Share of positions whose KL is above a value, both axes logarithmic: the tail is the point."""
    figure, axes = _figure("KL to fp16 (nats)", "share of positions above")
    kl = np.sort(np.maximum(PositionMeasures.concatenate(measured).kl, SMALLEST_KL))
    above = 1.0 - np.arange(len(kl)) / len(kl)
    chosen = np.unique(np.geomspace(1, len(kl), 400).astype(int))
    axes.plot(kl[-chosen], above[-chosen], color=QUANTIZED)
    for share, label in ((0.01, "p99"), (0.001, "p99.9")):
        axes.axhline(share, color=FAINT, linestyle=":")
        axes.annotate(label, (kl[0], share), va="bottom")
    axes.set(xscale="log", yscale="log")
    return _svg(figure, "kl-distribution")


def losses(measured: list[PositionMeasures]) -> str:
    """Every position's loss with the quantized cache over its loss with fp16."""
    figure, axes = _figure("loss with fp16 (nats)", "loss with the quantized cache (nats)")
    every = PositionMeasures.concatenate(measured)
    axes.scatter(every.nll_fp16, every.nll, s=4, color=QUANTIZED, alpha=0.35, linewidths=0, rasterized=True)
    end = float(max(every.nll.max(), every.nll_fp16.max()))
    axes.plot([0, end], [0, end], color=FAINT, linewidth=1)
    return _svg(figure, "losses")


def memory_by_length(report: Report) -> str:
    """Cache memory of one sequence over its length, from the page rule; the dots are the allocator's own counts."""
    figure, axes = _figure("tokens in the sequence", "cache of one sequence (MiB)")
    for footprint, kv, colour in (
        (report.memory.quantized, report.summary.kv, QUANTIZED),
        (report.memory.fp16, "fp16 cache", FP16),
    ):
        lengths = np.arange(0, 4 * footprint.tokens + 1, PAGE_TOKENS)
        beyond = footprint.sealed_bytes_per_token * (lengths - footprint.tokens)
        total = footprint.sealed_bytes + footprint.open_bytes + beyond
        held = lengths >= min(footprint.tokens, 4 * PAGE_TOKENS)
        axes.plot(lengths[held], total[held] / 2**20, color=colour, label=kv)
        axes.plot([footprint.tokens], [(footprint.sealed_bytes + footprint.open_bytes) / 2**20], "o", color=colour)
    axes.set_ylim(bottom=0)
    axes.legend()
    return _svg(figure, "memory")


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=x_label, ylabel=y_label)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element, the same bytes for the same data; `name` keeps ids of several figures apart."""
    stream = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, dpi=144, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    for marker, variable in CSS_COLOURS.items():
        svg = svg.replace(marker, variable)
    return svg


def _visible(value: float) -> float:
    return max(float(value), SMALLEST_KL)
