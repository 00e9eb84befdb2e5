"""The format search: the cheapest mix of formats, layer by layer, under a KL budget.

1. Each format in each layer alone, all others fp16: KL of the model's output on calibration text.
2. Each page policy, with every layer in the recipe's own format.
3. The best mix of every size (`search_choose`), and of those the cheapest within the budget.
4. That mix, really measured, on other prompts; when the sum of step 1 was wrong, the choice is corrected and measured
   again.
5. For each uniform format, the best cache of at most its size: it is beaten, or kept.

Writes search.json and search.svg beside the calibration. The same model, prompts, seed and recipe give the same choice.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from safetensors.torch import save_file

from calibrate.prompt_set import load_prompt_set
from calibrate.search_choose import CacheSize, Mix, best_mixes
from calibrate.search_memory import SearchMemory
from calibrate.search_report import draw_frontier, explain_layers, frontier_sizes, print_search
from calibrate.search_request import SearchRequest
from calibrate.search_text import SearchWindows, cut_search_windows
from calibrate.search_verify import Verifier, choose_at_equal_sizes, choose_mix, measure_frontier
from nibble import atomic
from nibble.errors import NibbleError
from nibble.formats import KVFormat
from nibble.hashing import json_sha256
from nibble.key_transform import KeyTransform
from nibble.layer_mix import SCHEMA, SEARCH_FILE, LayerMix, read_layer_mix
from nibble.models import device_options, hash_source, load_model, load_tokenizer, read_shape, resolve_source
from nibble.recipes import TensorRecipe
from nibble.reference import LayerScales
from nibble.static_scales import STATIC_FILE, read_static_scales
from nibble.versions import versions
from nibble.visibility import PagePolicy

if TYPE_CHECKING:
    from calibrate.search_measure import SearchModel, Trace

PLOT_FILE = "search.svg"


@dataclass(frozen=True)
class Figures:
    """What was measured: kl and errors [layers, candidates], factor of each policy, uniform KL by format name."""

    kl: np.ndarray
    k_error: np.ndarray
    v_error: np.ndarray
    policies: dict[PagePolicy, float]
    uniform: dict[str, float]


def search_formats(request: SearchRequest, force: bool = False) -> LayerMix:
    """Make (or find) the search result that a request describes. Raises NibbleError."""
    console = Console(file=sys.stdout)
    source = resolve_source(request.model)
    inputs = _inputs(request, source)
    with atomic.exclusive(request.out / SEARCH_FILE, console.print):
        if force or not _is_current(request.out, json_sha256(inputs)):
            content = _search(request, source, inputs, console)
            atomic.write_text(request.out / SEARCH_FILE, json.dumps(content, indent=1) + "\n")
            draw_frontier(content, request.out / PLOT_FILE)
        else:
            console.print(f"format search of {request.model.name} is up to date: {request.out / SEARCH_FILE}")
        mix = read_layer_mix(request.out)
    print_search(mix.content, console)
    return mix


def _inputs(request: SearchRequest, source: Path) -> dict[str, Any]:
    """What the result depends on."""
    from build.key_basis import STATIC_SPAN, WINDOWS
    from nibble.balance import RIDGE

    return {
        "schema": SCHEMA,
        "model": asdict(hash_source(source)),
        "dtype": request.model.dtype,
        "kv": request.kv.model_dump(exclude={"certificate"}),
        "prompts_sha256": load_prompt_set(request.prompts).sha256,
        "seed": request.seed,
        "calibration": request.calibration.sha256 if any(f.needs_calibration for f in request.candidates) else None,
        "key_basis": [RIDGE, WINDOWS, STATIC_SPAN],
        "versions": versions(),
    }


def _is_current(folder: Path, identity: str) -> bool:
    try:
        return bool(read_layer_mix(folder).content["identity"] == identity)
    except NibbleError:
        return False


def _search(request: SearchRequest, source: Path, inputs: dict[str, Any], console: Console) -> dict[str, Any]:
    shape, recipe = read_shape(source), request.search
    windows = cut_search_windows(load_prompt_set(request.prompts), load_tokenizer(source), recipe, request.seed)
    size = CacheSize(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        min(recipe.context_tokens, request.model.max_context, shape.max_positions),
    )
    page_bytes = [size.sealed_page(fmt) for fmt in request.candidates]
    subject = make_search_model(request, source, console)
    work = _work(request, shape.num_layers)
    with SearchMemory(request.out, json_sha256(inputs), work, console) as memory:
        figures = _measure(request, subject, windows, memory)
        mixes = best_mixes(figures.kl, page_bytes)
        traces = [subject.trace(window) for window in windows.verify]
        verifier = Verifier(request, subject, traces, memory)
        choice, kl, tried = choose_mix(request, mixes, figures.policies, size, verifier)
        frontier = measure_frontier(request, mixes, page_bytes, verifier)
        equal_sizes = choose_at_equal_sizes(request, figures.kl, figures.policies, size, verifier)
    memory.forget()
    return {
        "schema": SCHEMA,
        "identity": json_sha256(inputs),
        "model": {"name": request.model.name, **inputs["model"]},
        "kl_budget": recipe.kl_budget,
        "recipe": {
            **request.kv.model_dump(),
            "sink_pages": choice.policy.sink_pages,
            "recent_pages": choice.policy.recent_pages,
        },
        "layers": explain_layers(_layers(request, choice.mix), figures.kl, recipe.formats),
        "chosen": {
            "bytes_per_token": choice.mix.bytes_per_token,
            "bytes_per_token_at_context": choice.bytes_at_context,
            "context_tokens": size.context,
            "kl_predicted": choice.mix.kl * figures.policies[choice.policy],
            "kl_held_out": kl,
            "tried": tried,
        },
        "frontier": frontier,
        "equal_sizes": equal_sizes,
        "policies": [{**asdict(policy), "kl_factor": factor} for policy, factor in figures.policies.items()],
        "sensitivities": _sensitivities(request, figures, page_bytes),
        "inputs": inputs,
    }


def make_search_model(request: SearchRequest, source: Path, console: Console) -> SearchModel:
    """The model over fake caches of the request's candidates, as the build would store them."""
    from calibrate.search_measure import SearchModel

    remedies, transforms = _as_built(request, source, console)
    scales = _static_scales(request, source, transforms, console)
    with console.status("loading the model"):
        model = load_model(source, request.model.dtype, **device_options())
    return SearchModel(model, scales, transforms, read_shape(source), remedies)


def _work(request: SearchRequest, layers: int) -> int:
    """Layers that all measurements run, for the progress bar."""
    recipe = request.search
    quantized = sum(not fmt.is_fp16 for fmt in request.candidates)
    alone = quantized * layers * (layers + 1) // 2
    policies = len(recipe.sink_pages) * len(recipe.recent_pages) * layers
    frontier = len(frontier_sizes([0.0, 1.0], [0.0] * quantized)) + 3 * quantized  # with those of equal sizes
    return recipe.windows * (alone + policies + quantized * layers) + recipe.held_out * frontier * layers


def _static_scales(
    request: SearchRequest, source: Path, transforms: dict[str, dict[int, KeyTransform]], console: Console
) -> dict[str, list[LayerScales]]:
    """The scales that the build would pack for each static candidate."""
    from build.key_basis import static_scales_in_basis
    from build.static_pack import pack_static_scales

    scales = {}
    for fmt in request.candidates:
        if fmt.needs_calibration:
            formats = [fmt] * read_shape(source).num_layers
            in_basis = static_scales_in_basis(source, request.model, formats, transforms[fmt.name], console)
            packed = {**pack_static_scales(request.calibration, formats), **in_basis}
            with tempfile.TemporaryDirectory() as folder:
                save_file(packed, Path(folder) / STATIC_FILE)
                scales[fmt.name] = read_static_scales(Path(folder), formats)
    return scales


def _as_built(
    request: SearchRequest, source: Path, console: Console
) -> tuple[dict[str, dict[int, KVFormat]], dict[str, dict[int, KeyTransform]]]:
    """What the build would do in layers that a candidate does not suit: another format, and what is done to K."""
    from build.key_plan import plan_key_transforms
    from build.preflight import run_preflight

    count, context = read_shape(source).num_layers, request.search.context_tokens
    remedies: dict[str, dict[int, KVFormat]] = {}
    transforms: dict[str, dict[int, KeyTransform]] = {}
    for fmt in request.candidates:
        preflight = run_preflight(source, [fmt] * count, request.calibration, context)
        remedies[fmt.name] = {layer: found for layer, (found, _) in preflight.formats.items()}
        formats = [remedies[fmt.name].get(layer, fmt) for layer in range(count)]
        transforms[fmt.name] = plan_key_transforms(source, request.model, formats, preflight, console).transforms
    return remedies, transforms


def _measure(request: SearchRequest, subject: SearchModel, windows: SearchWindows, memory: SearchMemory) -> Figures:
    """Steps 1 and 2, means over the windows."""
    from calibrate.search_measure import FP16

    candidates, recipe, base = request.candidates, request.search, request.kv.policy
    num_layers, shape = len(subject.layers), (len(windows.choose), len(subject.layers), len(candidates))
    kl, k_error, v_error = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    policies = sorted({PagePolicy(s, r) for s in recipe.sink_pages for r in recipe.recent_pages} | {base}, key=str)
    by_policy = np.zeros((len(windows.choose), len(policies)))
    uniform = np.zeros((len(windows.choose), len(candidates)))
    for w, window in enumerate(windows.choose):
        trace = subject.trace(window)
        for layer, errors in enumerate(subject.errors(trace, candidates)):
            for c, fmt in enumerate(candidates):
                k_error[w, layer, c], v_error[w, layer, c] = errors[fmt.name].k, errors[fmt.name].v

        def figure(name: str, formats: list[KVFormat], policy: PagePolicy, work: int, trace: Trace = trace, w: int = w):  # type: ignore[no-untyped-def]
            return memory.figure(f"window {w}, {name}", work, lambda: subject.kl(trace, formats, policy))

        for p, policy in enumerate(policies):
            name = f"sinks {policy.sink_pages}, recent {policy.recent_pages}"
            by_policy[w, p] = figure(name, [request.base] * num_layers, policy, num_layers)
        for c, fmt in enumerate(candidates):
            if fmt.is_fp16:
                continue
            uniform[w, c] = figure(f"all layers {fmt.name}", [fmt] * num_layers, base, num_layers)
            for layer in range(num_layers):
                alone = [FP16] * layer + [fmt] + [FP16] * (num_layers - layer - 1)
                kl[w, layer, c] = figure(f"layer {layer} {fmt.name}", alone, base, num_layers - layer)
    means = by_policy.mean(0)
    factors = means / max(means[policies.index(base)], 1e-12)
    return Figures(
        kl.mean(0),
        k_error.mean(0),
        v_error.mean(0),
        {policy: float(factor) for policy, factor in zip(policies, factors, strict=True)},
        {fmt.name: float(value) for fmt, value in zip(candidates, uniform.mean(0), strict=True)},
    )


def _layers(request: SearchRequest, mix: Mix) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "name": fmt.name,
            "k": TensorRecipe.of(fmt.k).model_dump(),
            "v": TensorRecipe.of(fmt.v).model_dump(),
        }
        for index, fmt in enumerate(request.candidates[c] for c in mix.formats)
    ]


def _sensitivities(request: SearchRequest, figures: Figures, page_bytes: list[int]) -> dict[str, Any]:
    """For each format: bytes, KL of all layers at once and their sum, and each layer's KL and errors."""
    return {
        fmt.name: {
            "bytes_per_token_and_layer": page_bytes[c] / 64,
            "kl_all_layers": figures.uniform[fmt.name],
            "kl_sum_of_layers": float(figures.kl[:, c].sum()),
            "kl": figures.kl[:, c].tolist(),
            "k_error": figures.k_error[:, c].tolist(),
            "v_error": figures.v_error[:, c].tolist(),
        }
        for c, fmt in enumerate(request.candidates)
    }
