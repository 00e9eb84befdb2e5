"""Draw bench/results/serving.json: decode steps beside their roofline, and what fits at a long context.

python -m bench.serving_plot      # into docs/serving.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.serving import RESULTS

TARGET = Path(__file__).parent.parent / "docs" / "serving.png"


def draw_steps(axes: Any, records: list[dict[str, Any]]) -> None:
    """A bar for each step, and on it the time that reading weights and cache takes."""
    formats = sorted({r["kv"] for r in records})
    shapes = sorted({(r["concurrency"], round(r["input"] / 1024)) for r in records})
    for i, kv in enumerate(formats):
        mine = {(r["concurrency"], round(r["input"] / 1024)): r for r in records if r["kv"] == kv}
        places = [n + 0.8 * i / len(formats) for n, shape in enumerate(shapes) if shape in mine]
        steps = [mine[shape]["tpot_p50_ms"] for shape in shapes if shape in mine]
        floors = [mine[shape]["tpot_p50_ms"] / mine[shape]["roofline_ratio"] for shape in shapes if shape in mine]
        axes.bar(places, steps, 0.8 / len(formats), label=kv)
        axes.scatter(places, floors, color="black", marker="_", s=200, label="roofline" if i == 0 else None)
    axes.set_xticks([n + 0.4 - 0.4 / len(formats) for n in range(len(shapes))], [f"{b} x {c}k" for b, c in shapes])
    axes.set_xlabel("batch x context")
    axes.set_ylabel("ms a decode step")
    axes.legend()


def draw_capacity(axes: Any, records: list[dict[str, Any]]) -> None:
    """Tokens a second over the time a token takes, for each number of running requests."""
    for kv in sorted({r["kv"] for r in records}):
        mine = sorted((r for r in records if r["kv"] == kv), key=lambda r: int(r["concurrency"]))
        axes.plot([r["tpot_p50_ms"] for r in mine], [r["tokens_per_s"] for r in mine], marker="o", label=kv)
        for r in mine:
            axes.annotate(f" {r['concurrency']} running", (r["tpot_p50_ms"], r["tokens_per_s"]), fontsize=8)
    axes.set_xlim(0, 1.3 * max(r["tpot_p50_ms"] for r in records))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms a token, context 32k")
    axes.set_ylabel("tokens a second")
    axes.legend(loc="lower right")


def main() -> None:
    """Draw the records of the results file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = json.loads(RESULTS.read_text())
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    draw_steps(left, [r for r in records if r["section"] == "step"])
    draw_capacity(right, [r for r in records if r["section"] == "capacity"])
    figure.tight_layout()
    figure.savefig(TARGET, dpi=110)
    print(json.dumps({"plot": str(TARGET), "records": len(records)}))


if __name__ == "__main__":
    main()
