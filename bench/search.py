"""Mixes that the format search chose on calibration prompts, measured on other text beside uniform formats.

For each uniform format the best mix of at most its bytes with the recipe's own pages; the cache that the search found
best among those that weigh no more at the full context, fp16 pages included (`equal_sizes`); and the mix that the
search settled on. The last two have the pages that were chosen with them.

    make calibrate MODEL=smollm2-135m SEARCH=1
    python -m bench.search --model smollm2-135m --windows 2
    python -m bench.search --model smollm2-135m --windows 1 --tokens 8192 --formats int4
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from bench.measured_commit import measured_commit
from build.calibration import calibration_at_hand
from calibrate.run import default_request
from calibrate.search import make_search_model
from calibrate.search_measure import SearchModel, Trace
from calibrate.search_report import draw_frontier
from calibrate.search_request import SearchRequest
from eval.windows import choose_windows
from nibble import atomic
from nibble.errors import NibbleError
from nibble.formats import KVFormat
from nibble.layer_mix import read_layer_mix
from nibble.models import load_tokenizer, resolve_source
from nibble.paths import REPOSITORY_ROOT, calibration_dir
from nibble.recipes import load_model_recipe
from nibble.stage import console, run_stage
from nibble.visibility import PagePolicy

RESULTS = REPOSITORY_ROOT / "bench" / "results" / "search.json"
PLOT = REPOSITORY_ROOT / "docs" / "search.svg"
WINDOW_TOKENS = 1024
KEY = ("model", "window_tokens", "seed", "search_tokens", "cache")
CLOSE = 0.02  # a mix is as large as a uniform format when it lacks at most this share of its bytes


def main() -> None:
    """Measure what the search of a model found, and write the records and the plot."""
    arguments = _parser().parse_args()
    recipe = load_model_recipe(arguments.model)
    source, mix = resolve_source(recipe), read_layer_mix(calibration_dir(recipe.name))
    calibration = calibration_at_hand(recipe, source)
    if calibration is None:
        raise NibbleError(f"no calibration of {recipe.name}; run `make calibrate MODEL={recipe.name} SEARCH=1`")
    prompts = default_request(recipe).prompts
    request = SearchRequest(recipe, mix.recipe, prompts, 0, calibration, calibration_dir(recipe.name))
    subject = make_search_model(request, source, console)
    if "equal_sizes" not in mix.content:
        raise NibbleError(f"the search of {recipe.name} is of an older version; run it again with --force")
    chosen = choose_windows(
        load_tokenizer(source), count=arguments.windows, window_tokens=arguments.tokens, seed=arguments.seed
    )
    traces = [subject.trace(window.inputs) for window in chosen.windows]
    context = {"windows": len(traces), "window_tokens": arguments.tokens, "text": "eval", "seed": arguments.seed}
    context["search_tokens"] = mix.content["inputs"]["kv"]["search"]["window_tokens"]
    formats = arguments.formats.split(",") if arguments.formats else None
    content = _measure(_only(mix.content, formats), subject, traces)
    _merge(arguments.out, [{**r, **context, "commit": measured_commit()} for r in _records(content)])
    if formats is None:
        draw_frontier(content, arguments.plot, "text that it was not chosen on")


def _only(content: dict[str, Any], formats: list[str] | None) -> dict[str, Any]:
    """A copy with the uniform formats, and the caches of their sizes, that are asked for; without the mixes then."""
    content = copy.deepcopy(content)
    if formats is not None:
        content["frontier"]["uniform"] = [u for u in content["frontier"]["uniform"] if u["format"] in formats]
        content["frontier"]["mixes"], content["chosen"] = [], None
        content["equal_sizes"] = [e for e in content["equal_sizes"] if e["format"] in formats]
    return content


def _merge(path: Path, records: list[dict[str, Any]]) -> None:
    """Records replace those of the same model, windows and cache."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    by_key = {tuple(r[name] for name in KEY): r for r in [*found, *records]}
    rows = sorted(by_key.values(), key=lambda r: (*(r[name] for name in KEY[:-1]), r["bytes_per_token"]))
    lines = ",\n".join(map(json.dumps, rows))
    atomic.write_text(path, f"[\n{lines}\n]\n")
    print(json.dumps({"records": len(records), "file": path.name}))


def _measure(content: dict[str, Any], subject: SearchModel, traces: list[Trace]) -> dict[str, Any]:
    """search.json's content with the KL of uniform formats, of caches as large, and of the choice, on the traces."""
    layers = len(subject.layers)
    uniform = content["frontier"]["uniform"]
    mixes = [m for m in content["frontier"]["mixes"] if _at_uniform_size(m, uniform)]
    content["frontier"]["mixes"] = list({json.dumps(m["formats"]): m for m in mixes}.values())
    inputs = content["inputs"]["kv"]
    base = PagePolicy(inputs["sink_pages"], inputs["recent_pages"])
    jobs = [(u, [u["format"]] * layers, base) for u in uniform]
    jobs += [(m, m["formats"], base) for m in content["frontier"]["mixes"]]
    jobs += [(e, e["formats"], PagePolicy(e["sink_pages"], e["recent_pages"])) for e in content["equal_sizes"]]
    if content["chosen"] is not None:
        pages = PagePolicy(content["recipe"]["sink_pages"], content["recipe"]["recent_pages"])
        jobs.append((content["chosen"], [layer["name"] for layer in content["layers"]], pages))
    known: dict[tuple[Any, ...], list[float]] = {}  # the choice may be one of the mixes, and those a uniform format
    for target, names, policy in track(jobs, description="measuring", console=console):
        cache = (*names, policy)
        if cache not in known:
            known[cache] = [subject.kl(trace, [KVFormat.named(name) for name in names], policy) for trace in traces]
        target["kl_held_out"], target["kl_by_window"] = float(np.mean(known[cache])), known[cache]
    return content


def _at_uniform_size(mix: dict[str, Any], uniform: list[dict[str, Any]]) -> bool:
    """True for the largest mixes that fit into a uniform format's bytes."""
    size = mix["bytes_per_token"]
    near = [u for u in uniform if 0 <= u["bytes_per_token"] - size < CLOSE * u["bytes_per_token"]]
    return len(set(mix["formats"])) > 1 and bool(near)


def _records(content: dict[str, Any]) -> list[dict[str, Any]]:
    model = content["model"]["name"]
    rows: list[tuple[str, dict[str, Any], Counter[str] | None]] = [
        (f"uniform {u['format']}", u, None) for u in content["frontier"]["uniform"]
    ]
    rows += [
        (f"best mix of {m['bytes_per_token']:g} bytes", m, Counter(m["formats"])) for m in content["frontier"]["mixes"]
    ]
    rows += [(f"no larger than {e['format']}", e, Counter(e["formats"])) for e in content["equal_sizes"]]
    if content["chosen"] is not None:
        rows.append(("chosen", content["chosen"], Counter(layer["name"] for layer in content["layers"])))
    return [
        {
            "model": model,
            "cache": cache,
            "mix": None if mix is None else dict(mix),
            "bytes_per_token": row["bytes_per_token"],
            "pages": [row.get("sink_pages"), row.get("recent_pages")],
            "bytes_per_token_at_context": row.get("bytes_per_token_at_context"),
            "kl_mean": float(f"{row['kl_held_out']:.4g}"),
            "kl_by_window": [float(f"{kl:.4g}") for kl in row["kl_by_window"]],
        }
        for cache, row, mix in sorted(rows, key=lambda row: row[1]["bytes_per_token"])
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.search", description="The search's mixes on other text.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=2, help="of eval/data")
    parser.add_argument("--tokens", type=int, default=WINDOW_TOKENS, help="of a window")
    parser.add_argument("--formats", help="these uniform formats and the caches of their sizes alone, no plot")
    parser.add_argument("--seed", type=int, default=0, help="which windows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=PLOT)
    return parser


if __name__ == "__main__":
    run_stage(main)
