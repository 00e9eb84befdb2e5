"""Draw bench/results/serving.json: decode steps beside their roofline, what fits at a long context, clients, prompts.

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
    for model, weights, gpus, kv in sorted({(r["model"], r["weights"], r["gpus"], r["kv"]) for r in records}):
        mine = [r for r in records if (r["model"], r["weights"], r["gpus"], r["kv"]) == (model, weights, gpus, kv)]
        mine.sort(key=lambda r: int(r["concurrency"]))
        label = f"{model} {weights.split()[0]}, {gpus} GPU, {kv}"
        axes.plot([r["tpot_p50_ms"] for r in mine], [r["tokens_per_s"] for r in mine], marker="o", label=label)
        for r in mine:
            axes.annotate(f" {r['concurrency']}", (r["tpot_p50_ms"], r["tokens_per_s"]), fontsize=8)
    axes.set_xlim(0, 1.2 * max(r["tpot_p50_ms"] for r in records))
    axes.set_yscale("log")
    axes.set_xlabel("ms a token, context 32k; numbers: running requests")
    axes.set_ylabel("tokens a second")
    axes.legend(fontsize=7)


def draw_bars(axes: Any, records: list[dict[str, Any]], value: str, name: Any) -> None:
    """A value of each load, a bar for each format."""
    formats = sorted({r["kv"] for r in records})
    loads = list(dict.fromkeys(name(r) for r in records))
    for i, kv in enumerate(formats):
        mine = {name(r): r[value] for r in records if r["kv"] == kv}
        places = [n + 0.8 * i / len(formats) for n, load in enumerate(loads) if load in mine]
        axes.bar(places, [mine[load] for load in loads if load in mine], 0.8 / len(formats), label=kv)
    axes.set_xticks([n + 0.4 - 0.4 / len(formats) for n in range(len(loads))], loads, fontsize=7)
    axes.legend(fontsize=7)


def load_name(r: dict[str, Any]) -> str:
    """A closed loop in words."""
    room = "\nequal memory" if r["section"] == "memory" else ""
    return f"{round(r['input'] / 1024)}k/{r['output']}\n{r['concurrency']} clients{room}"


def main() -> None:
    """Draw the records of the results file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = json.loads(RESULTS.read_text())
    figure, ((steps, capacity), (loads, prompts)) = pyplot.subplots(2, 2, figsize=(12, 8))
    draw_steps(steps, [r for r in records if r["section"] == "step" and r["model"] == "llama-8b"])
    draw_capacity(capacity, [r for r in records if r["section"] == "capacity"])
    draw_bars(loads, [r for r in records if r["section"] in ("sweep", "memory")], "tokens_per_s", load_name)
    loads.set_ylabel("tokens a second, llama-8b")
    long_prompts = [r for r in records if r["section"] == "interference"]
    draw_bars(prompts, long_prompts, "itl_p99_ms", lambda r: f"chunks of {r['chunk_tokens']} tokens")
    prompts.set_ylabel("slowest ms between tokens (p99) while a prompt of 16k is read", fontsize=8)
    figure.tight_layout()
    figure.savefig(TARGET, dpi=110)
    print(json.dumps({"plot": str(TARGET), "records": len(records)}))


if __name__ == "__main__":
    main()
