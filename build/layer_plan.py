"""Which format each layer gets, and why: what the recipe or the search says, then what the pre-flight asks for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from build.preflight import Preflight
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import KVFormat
from nibble.layer_mix import LayerMix, read_layer_mix
from nibble.models import hash_source
from nibble.paths import calibration_dir
from nibble.recipes import KVRecipe, ModelRecipe
from nibble.static_scales import STATIC_FILE


@dataclass(frozen=True)
class LayerPlan:
    """A layer's format, and why it has it."""

    fmt: KVFormat
    why: str


def find_mix(model: ModelRecipe, kv: KVRecipe, source: Path, console: Console) -> LayerMix | None:
    """The format search that a recipe asks for, made now when there is none that fits; None when it asks for none."""
    if kv.search is None:
        return None
    found = _read(calibration_dir(model.name), kv, source)
    if isinstance(found, LayerMix):
        return found
    console.print(f"{kv.name} is chosen by measurement. {found}. Searching now; this takes a while.")
    from calibrate.pipeline import calibrate
    from calibrate.run import default_request
    from calibrate.search import search_formats
    from calibrate.search_request import SearchRequest

    request = default_request(model)
    return search_formats(SearchRequest(model, kv, request.prompts, request.seed, calibrate(request), request.out))


def plan_layers(
    kv: KVRecipe, mix: LayerMix | None, num_layers: int, calibration: Calibration | None, preflight: Preflight
) -> list[LayerPlan]:
    """The format of each layer. Raises NibbleError when the mix is of a model with other layers."""
    chosen = asked_formats(kv, mix, num_layers)
    plans = []
    for index, fmt in enumerate(chosen):
        first = mix.layers[index].why if mix else f"recipe {kv.name} gives every layer this format"
        remedy = preflight.formats.get(index)
        if remedy is not None:
            first, fmt = f"pre-flight: {remedy[1]}; {remedy[0].name} instead of {fmt.name}", remedy[0]
        plans.append(LayerPlan(fmt, "; ".join([first, *_consequences(fmt, calibration)])))
    return plans


def asked_formats(kv: KVRecipe, mix: LayerMix | None, num_layers: int) -> list[KVFormat]:
    """What the recipe or the search asks for, before the pre-flight has its say."""
    if mix is None:
        return [kv.format] * num_layers
    if len(mix.layers) != num_layers:
        raise NibbleError(
            f"format search: search.json has {len(mix.layers)} layers, the model {num_layers}; run `make calibrate "
            "SEARCH=1` again"
        )
    return mix.formats


def _consequences(fmt: KVFormat, calibration: Calibration | None) -> list[str]:
    """What a format asks of the runtime."""
    reasons = []
    if fmt.v.rotated:
        reasons.append("V is rotated: the Hadamard matrix is folded into v_proj and o_proj when the weights are loaded")
    if fmt.needs_calibration and calibration is not None:
        reasons.append(f"scale and zero point of each channel come from calibration ({STATIC_FILE})")
        reasons.append(f"calibrated on positions 0 to {calibration.longest_prompt - 1}")
    return reasons


def _read(folder: Path, kv: KVRecipe, source: Path) -> LayerMix | str:
    """The search of a folder, or why it can't be used."""
    try:
        mix = read_layer_mix(folder)
    except NibbleError as error:
        return str(error)
    hashes = asdict(hash_source(source))
    differing = [name for name in ("config_sha256", "weights_sha256") if mix.content["model"].get(name) != hashes[name]]
    if differing:
        return f"{folder} was searched with another model ({', '.join(differing)})"
    searched, asked = mix.recipe.search, kv.search
    assert asked is not None  # `find_mix` looked
    if searched is None or mix.recipe.name != kv.name or searched.formats != asked.formats:
        return f"{folder} was searched for another recipe ({mix.recipe.name})"
    if mix.content["kl_budget"] > asked.kl_budget:
        return f"{folder} was searched with kl_budget {mix.content['kl_budget']:g}, the recipe has {asked.kl_budget:g}"
    return mix
