"""The report's plots as SVG text that takes its colours from the page, so that light and dark both read well.

matplotlib draws with marker colours; each is replaced by a CSS variable of the template. Text stays text. Clouds of
points are rasters inside the SVG, or a run of 100,000 positions would be megabytes of paths.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.measures import PositionMeasures
from eval.records import Footprint, Report
from nibble.formats import PAGE_TOKENS

INK, FAINT, QUANTIZED, FP16 = "#010101", "#020202", "#2f7de1", "#e0863a"
CSS_COLOURS = {INK: "var(--ink)", FAINT: "var(--faint)", QUANTIZED: "var(--quantized)", FP16: "var(--fp16)"}
SIZE_INCHES = (6.4, 3.6)
SMALLEST_KL = 1e-9  # a log axis has no zero
CURVE_POINTS = 400
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
    kl = np.stack([part.kl for part in measured])
    starts = range(0, kl.shape[1], PAGE_TOKENS)
    pages = [kl[:, start : start + PAGE_TOKENS] for start in starts]

    def draw(axes: Axes) -> None:
        axes.plot(starts, [_visible(page.mean()) for page in pages], color=QUANTIZED, label="mean")
        axes.plot(starts, [_visible(np.quantile(page, 0.99)) for page in pages], color=FP16, label="p99")
        axes.set(yscale="log", xlabel="position in the window (tokens)", ylabel="KL to fp16 (nats)")
        axes.legend(loc="lower right")

    return draw_svg("kl-by-position", draw)


def kl_distribution(measured: list[PositionMeasures]) -> str:
    """Share of positions whose KL is above a value, both axes logarithmic: the tail is the point."""
    kl = np.sort(np.maximum(PositionMeasures.concatenate(measured).kl, SMALLEST_KL))[::-1]
    ranks = np.unique(np.geomspace(1, len(kl), CURVE_POINTS).astype(int))

    def draw(axes: Axes) -> None:
        axes.plot(kl[ranks - 1], ranks / len(kl), color=QUANTIZED)
        for share, label in ((0.01, "p99"), (0.001, "p99.9")):
            axes.axhline(share, color=FAINT, linestyle=":")
            axes.annotate(label, (kl[-1], share), va="bottom")
        axes.set(xscale="log", yscale="log", xlabel="KL to fp16 (nats)", ylabel="share of positions above")

    return draw_svg("kl-distribution", draw)


def loss_changes(measured: list[PositionMeasures]) -> str:
    """How much every position's loss changed, over its loss with fp16: a good cache is a thin line round zero."""
    every = PositionMeasures.concatenate(measured)

    def draw(axes: Axes) -> None:
        change = every.nll - every.nll_fp16
        axes.scatter(every.nll_fp16, change, s=6, color=QUANTIZED, alpha=0.4, linewidths=0, rasterized=True)
        axes.axhline(0.0, color=FAINT, linewidth=1)
        axes.set(xlabel="loss with fp16 (nats)", ylabel="change of the loss (nats)")

    return draw_svg("loss-changes", draw)


def memory_by_length(report: Report) -> str:
    """Cache memory of one sequence over its length, by the page rule; the dots are the allocator's own counts."""
    fp16_bytes = report.memory.fp16.sealed_bytes_per_token

    def draw(axes: Axes) -> None:
        drawn = ((report.memory.quantized, report.summary.kv, QUANTIZED), (report.memory.fp16, "fp16", FP16))
        for footprint, label, colour in drawn:
            lengths = np.arange(0, 4 * footprint.tokens + 1, PAGE_TOKENS)
            axes.plot(lengths, _cache_bytes(footprint, fp16_bytes, lengths) / 2**20, color=colour, label=label)
            counted = footprint.sealed_bytes + footprint.open_bytes
            axes.plot([footprint.tokens], [counted / 2**20], "o", color=colour)
        axes.set(ylim=(0, None), xlabel="tokens in the sequence", ylabel="cache of one sequence (MiB)")
        axes.legend()

    return draw_svg("memory", draw)


def _cache_bytes(footprint: Footprint, fp16_bytes: float, lengths: np.ndarray) -> np.ndarray:
    """All pages are fp16 until the sinks and the newest pages are full; every further page is sealed."""
    open_tokens = footprint.open_bytes / fp16_bytes
    return np.where(
        lengths <= open_tokens,
        lengths * fp16_bytes,
        footprint.open_bytes + (lengths - open_tokens) * footprint.sealed_bytes_per_token,
    )


def draw_svg(name: str, draw: Callable[[Axes], None]) -> str:
    """A drawing as an <svg> element, the same bytes for the same data; `name` keeps ids of several apart."""
    stream = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(stream, format="svg", transparent=True, dpi=144, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    for marker, variable in CSS_COLOURS.items():
        svg = svg.replace(marker, variable)
    return svg


def _visible(value: float) -> float:
    return max(float(value), SMALLEST_KL)
