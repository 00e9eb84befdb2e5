"""What a format search shows: the table in the terminal, each layer's reason, and the frontier as a plot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nibble.stage import console as default_console

EXTRA_SIZES = 4  # measured mixes between the smallest and the largest format, besides those at the uniform sizes


def frontier_sizes(span: list[float], uniform: list[float]) -> list[float]:
    """The bytes per token at which the best mix is measured: the uniform formats' own, and a few between."""
    low, high = span[0], max([*uniform, span[0]])
    between = [low + (high - low) * step / (EXTRA_SIZES + 1) for step in range(1, EXTRA_SIZES + 1)]
    return sorted([*uniform, *between])


def explain_layers(layers: list[dict[str, Any]], kl: np.ndarray, formats: list[str]) -> list[dict[str, Any]]:
    """Each layer with its reason: what its format and the others cost in it."""
    explained = []
    for layer, costs in zip(layers, kl, strict=True):
        chosen = formats.index(layer["name"])
        others = ", ".join(f"{name} {cost:.1e}" for name, cost in zip(formats, costs, strict=True) if name != "fp16")
        share = costs[chosen] / max(float(np.sum(kl, 0)[chosen]), 1e-30)
        why = f"format search chose {layer['name']}: KL with this layer alone quantized: {others}"
        explained.append({**layer, "why": f"{why}; {share:.1%} of what {layer['name']} costs in all layers"})
    return explained


def print_search(content: dict[str, Any], console: Console = default_console) -> None:
    """The layers with what each format costs in them, and what came out."""
    sensitivities, chosen, recipe = content["sensitivities"], content["chosen"], content["recipe"]
    names = [name for name in sensitivities if name != "fp16"]
    table = Table(title="KL with one layer quantized, in millionths of a nat (the chosen format is marked)")
    table.add_column("layer", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("error of K, V (int4)" if "int4" in names else f"error of K, V ({names[0]})", justify="right")
    table.add_column("chosen")
    shown = sensitivities["int4" if "int4" in names else names[0]]
    for i, layer in enumerate(content["layers"]):
        costs = [_marked(1e6 * sensitivities[name]["kl"][i], name == layer["name"]) for name in names]
        table.add_row(
            str(i), *costs, f"{shown['k_error'][i]:.3f}, {shown['v_error'][i]:.3f}", f"[bold]{layer['name']}[/]"
        )
    console.print(table)
    counts = Counter(layer["name"] for layer in content["layers"])
    summary = Table(show_header=False, box=None)
    summary.add_row("mix", ", ".join(f"{count} × {name}" for name, count in counts.most_common()))
    summary.add_row("fp16 pages", f"{recipe['sink_pages']} sink, {recipe['recent_pages']} recent")
    at_context = f"{chosen['bytes_per_token_at_context']:.0f} at {chosen['context_tokens']:,} tokens with fp16 pages"
    summary.add_row("bytes per token", f"{chosen['bytes_per_token']:g} sealed, {at_context}")
    summary.add_row(
        "KL", f"{chosen['kl_held_out']:.3g} on held-out prompts (budget {content['kl_budget']:g}, "
        f"sum of the layers {chosen['kl_predicted']:.3g})"
    )  # fmt: skip
    console.print(summary)
    console.print(_frontier_table(content))
    for equal in content.get("equal_sizes", []):
        found = " + ".join(f"{count} {fmt}" for fmt, count in Counter(equal["formats"]).items())
        console.print(
            f"no larger than all {equal['format']} at {chosen['context_tokens']:,} tokens: {found}, "
            f"{equal['sink_pages']} sink, {equal['recent_pages']} recent; KL {equal['kl_held_out']:.3g} instead of "
            f"{equal['kl_uniform']:.3g}"
        )


def _frontier_table(content: dict[str, Any]) -> Table:
    table = Table(title="Bytes against KL on held-out prompts, at the recipe's own fp16 pages")
    for heading in ("cache", "bytes per token", "KL", "predicted"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    rows = [
        (f"all {u['format']}", u["bytes_per_token"], u["kl_held_out"], None) for u in content["frontier"]["uniform"]
    ]
    for mix in content["frontier"]["mixes"]:
        name = " + ".join(f"{count} {fmt}" for fmt, count in sorted(Counter(mix["formats"]).items()))
        rows.append((name, mix["bytes_per_token"], mix["kl_held_out"], mix["kl_predicted"]))
    for name, size, kl, predicted in sorted(rows, key=lambda row: (row[1], row[0])):
        table.add_row(name, f"{size:g}", f"{kl:.3g}", "" if predicted is None else f"{predicted:.3g}")
    return table


def draw_frontier(content: dict[str, Any], path: Path, measured_on: str = "held-out prompts") -> None:
    """Bytes per token against KL (logarithmic) as SVG; the same content gives the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "nibble"
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    frontier = content["frontier"]
    lowest = min(
        [u["kl_held_out"] for u in frontier["uniform"]] + [m["kl_held_out"] for m in frontier["mixes"]] + [1e-6]
    )
    predicted = [point for point in frontier["predicted"] if point["kl_predicted"] >= lowest / 3]
    axes.plot(
        [p["bytes_per_token"] for p in predicted], [p["kl_predicted"] for p in predicted],
        color="0.6", linewidth=1, label="best mixes, sum of the layers",
    )  # fmt: skip
    axes.plot(
        [m["bytes_per_token"] for m in frontier["mixes"]], [m["kl_held_out"] for m in frontier["mixes"]],
        "o-", markersize=4, label=f"best mixes, measured on {measured_on}",
    )  # fmt: skip
    axes.plot(
        [u["bytes_per_token"] for u in frontier["uniform"]], [u["kl_held_out"] for u in frontier["uniform"]],
        "s", color="C1", label="one format for all layers, measured",
    )  # fmt: skip
    for uniform in frontier["uniform"]:
        place = (uniform["bytes_per_token"], uniform["kl_held_out"])
        axes.annotate(uniform["format"], place, textcoords="offset points", xytext=(6, 5))
    axes.axhline(content["kl_budget"], color="C3", linestyle=":", label="budget")
    axes.set(yscale="log", xlabel="bytes per sealed token (whole model)", ylabel="KL to the fp16 cache (nats a token)",
             title=f"Format search: {content['model']['name']}")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _marked(value: float, chosen: bool) -> str:
    text = f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return f"[bold green]{text}[/]" if chosen else text
