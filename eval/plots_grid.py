"""Plots of the report beyond positions: needle heat maps side by side, each layer's ratio, cost against memory."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.plots import FAINT, FP16, INK, QUANTIZED, draw_svg
from eval.records import LayerCheck, NeedleCell, NeedleFigures, Report


def needle_maps(needle: NeedleFigures, kv: str) -> list[tuple[str, str]]:
    """For every variant an SVG with two heat maps, fp16 and quantized, and its name."""
    variants = dict.fromkeys(cell.variant for cell in needle.cells)
    return [(variant, _needle_map([c for c in needle.cells if c.variant == variant], kv)) for variant in variants]


def layer_ratios(check: LayerCheck) -> str:
    """Every layer's attention error over what its format explains: 1 for a cache that does what it says."""

    def draw(axes: Axes) -> None:
        numbers = [layer.layer for layer in check.layers]
        axes.bar(numbers, [layer.ratio for layer in check.layers], color=QUANTIZED)
        axes.axhline(1.0, color=FAINT, linestyle=":")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="layer", ylabel="error over what the format explains", ylim=(0, None))

    return draw_svg("layers", draw)


def latency_by_streams(report: Report) -> str:
    """Milliseconds that a stream waits for a token, over how many decode at once: the median, and p99 dotted."""

    def draw(axes: Axes) -> None:
        drawn = ((report.speed.quantized, report.summary.kv, QUANTIZED), (report.speed.fp16, "fp16", FP16))
        for speed, label, colour in drawn:
            streams = [point.streams for point in speed.latencies]
            axes.plot(streams, [point.ms_p50 for point in speed.latencies], "o-", color=colour, label=label)
            axes.plot(streams, [point.ms_p99 for point in speed.latencies], ":", color=colour, label=f"{label}, p99")
            axes.set_xscale("log", base=2)
            axes.set_xticks(streams, [str(count) for count in streams])
        axes.set(xlabel="streams at once", ylabel="ms to the next token", ylim=(0, None))
        axes.legend()

    return draw_svg("latency", draw)


def cost_against_memory(reports: list[Report]) -> str:
    """Mean KL over bytes per sealed token: each format's newest run. Down and to the left is better."""

    def draw(axes: Axes) -> None:
        quantized = [report for report in reports if report.summary.kl_mean > 0]
        for report in quantized:
            s = report.summary
            interval = report.quality.kl_mean.interval or [s.kl_mean, s.kl_mean]
            axes.plot([s.bytes_per_token] * 2, interval, color=QUANTIZED, linewidth=1)
            axes.plot([s.bytes_per_token], [s.kl_mean], "o", color=QUANTIZED)
            axes.annotate(s.kv, (s.bytes_per_token, s.kl_mean), xytext=(6, 4), textcoords="offset points", color=INK)
        if reports:
            axes.axvline(reports[0].summary.bytes_per_token_fp16, color=FP16, linestyle=":")
        axes.set(
            yscale="log", xlim=(0, None), xlabel="bytes of a sealed token, whole model", ylabel="KL to fp16 (nats)"
        )

    return draw_svg("cost-against-memory", draw)


def _needle_map(cells: list[NeedleCell], kv: str) -> str:
    lengths, depths = sorted({c.length for c in cells}), sorted({c.depth for c in cells})
    grids = {"fp16": np.zeros((len(depths), len(lengths))), kv: np.zeros((len(depths), len(lengths)))}
    for cell in cells:
        at = depths.index(cell.depth), lengths.index(cell.length)
        grids["fp16"][at], grids[kv][at] = cell.recall_fp16, cell.recall

    def draw(axes: Axes) -> None:
        axes.set_axis_off()
        for number, (name, grid) in enumerate(grids.items()):
            part = axes.inset_axes((0.53 * number + 0.02, 0.1, 0.45, 0.78))
            part.grid(False)
            part.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="RdYlGn", interpolation="nearest")
            part.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            part.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths] if number == 0 else [])
            part.set(title=name, xlabel="tokens")
            for (row, column), value in np.ndenumerate(grid):
                part.annotate(
                    f"{value:.2g}",
                    (column, row),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="black" if 0.2 < value < 0.8 else "white",
                )

    return draw_svg(f"needle-{cells[0].variant}", draw)
