"""Builds an engine: decide each layer's format, pack, check, write the manifest, and only then put it in place.

Nothing is computed twice: `build_key` covers the recipes, the model's content, the calibration and the code that lays
out bytes; an engine with the same key, whole, is up to date. Weights are not copied: the engine refers to the model's
folder, and the V rotation is folded into v_proj and o_proj when the runtime loads them.
"""

from __future__ import annotations

import datetime
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from build.key_basis import static_scales_in_basis
from build.key_plan import as_stored, plan_key_transforms
from build.layer_plan import LayerPlan, asked_formats, plan_layers
from build.preflight import Preflight, preflight_table, require_flyable, run_preflight
from nibble import atomic
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat
from nibble.hashing import file_sha256, files_sha256, json_sha256
from nibble.key_transform import read_key_transforms, write_key_transforms
from nibble.layer_mix import LayerMix
from nibble.manifest import SCHEMA, TOKENIZER_DIR, Manifest, compute_engine_hash, read_manifest, write_manifest
from nibble.models import SourceHashes, hash_source, read_config, read_shape, tokenizer_files
from nibble.paths import REPOSITORY_ROOT, engine_dir, engines_root
from nibble.recipes import KVRecipe, ModelRecipe, ServeRecipe, TensorRecipe
from nibble.static_scales import STATIC_FILE, read_static_scales
from nibble.strict_yaml import validate
from nibble.versions import versions
from nibble.visibility import PagePolicy

CODE_OF_BYTES = (
    "build/*.py",
    *(f"nibble/{name}.py" for name in ("balance", "formats", "key_transform", "packing", "quantizer", "rotation")),
)


@dataclass(frozen=True)
class BuildRequest:
    """What to build. source: the model's folder. calibration: None for formats that need none.

    mix: the formats that a search chose, in place of the recipe's one.
    """

    model: ModelRecipe
    kv: KVRecipe
    limits: ServeRecipe
    source: Path
    calibration: Calibration | None
    mix: LayerMix | None = None

    @property
    def recipe(self) -> KVRecipe:
        """The KV recipe with the pages that the search chose, whatever its thresholds were then."""
        return self.mix.recipe.model_copy(update={"certificate": self.kv.certificate}) if self.mix else self.kv

    @property
    def policy(self) -> PagePolicy:
        return self.recipe.policy

    @property
    def target(self) -> Path:
        return engine_dir(self.model.name, self.kv.name)


def build_engine(request: BuildRequest, console: Console, force: bool = False) -> Manifest:
    """Make (or find) the engine of a request, after its pre-flight. Raises NibbleError; then nothing is left behind."""
    preflight = _fly(request, console)
    with atomic.exclusive(request.target, console.print):
        key = _build_key(request, preflight)
        found = None if force else _find_current(request.target, key)
        if found is not None:
            console.print(f"engine {request.model.name} {request.kv.name} is up to date: {request.target}")
            return found
        with atomic.new_directory(request.target) as workspace:
            _write_engine(request, key, preflight, workspace, console)
        return read_manifest(request.target)


def _fly(request: BuildRequest, console: Console) -> Preflight:
    """The pre-flight, printed. Raises NibbleError when it refuses the model."""
    from build.calibration import calibration_at_hand

    config = read_config(request.source)
    formats = asked_formats(request.kv, request.mix, int(config.get("num_hidden_layers", 0)))
    known = request.calibration or calibration_at_hand(request.model, request.source)
    preflight = run_preflight(request.source, formats, known, request.limits.max_context)
    console.print(preflight_table(preflight, request.model.name))
    require_flyable(preflight, request.model.name)
    return preflight


def _find_current(folder: Path, key: str) -> Manifest | None:
    """The engine that is there, when it is whole and was made from the same things."""
    try:
        manifest = read_manifest(folder)
        manifest.source_folder(folder)
    except NibbleError:
        return None
    return manifest if manifest.build_key == key else None


def _build_key(request: BuildRequest, preflight: Preflight) -> str:
    code = sorted(path for pattern in CODE_OF_BYTES for path in REPOSITORY_ROOT.glob(pattern))
    inputs = {
        "schema": SCHEMA,
        "recipes": [recipe.model_dump() for recipe in (request.model, request.kv, request.limits)],
        "source": asdict(hash_source(request.source)),
        "calibration": request.calibration.sha256 if request.calibration else None,
        "search": request.mix.sha256 if request.mix else None,
        "preflight": [preflight.bias_layers, {layer: fmt.name for layer, (fmt, _) in preflight.formats.items()}],
        "code": files_sha256(code),
        "versions": versions(),
    }
    return json_sha256(inputs)


def _write_engine(request: BuildRequest, key: str, preflight: Preflight, folder: Path, console: Console) -> None:
    shape = read_shape(request.source)
    plans = plan_layers(request.kv, request.mix, shape.num_layers, request.calibration, preflight)
    formats = [plan.fmt for plan in plans]
    _copy_tokenizer(request.source, folder / TOKENIZER_DIR)
    keys = plan_key_transforms(request.source, request.model, formats, preflight, console)
    write_key_transforms(folder, keys.transforms)
    if any(fmt.needs_calibration for fmt in formats):
        scales = static_scales_in_basis(request.source, request.model, formats, keys.transforms, console)
        _write_static_scales(request, formats, scales, folder)
    layers = _check_layers(request, plans, keys.why, folder, console)
    content = _content(request, key, layers, _hash_files(folder))
    content["preflight"] = preflight.entry.model_dump()
    content["engine_hash"] = compute_engine_hash(content)
    write_manifest(folder, validate(Manifest, content, str(folder)))
    read_manifest(folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    files = tokenizer_files(source)
    if not files:
        raise NibbleError(f"model {source}: no tokenizer files in it; save the tokenizer there too (tokenizer.json)")
    folder.mkdir()
    for path in [*files, source / "config.json"]:  # some tokenizers are only known by their model's config
        shutil.copyfile(path, folder / path.name)


def _write_static_scales(
    request: BuildRequest, formats: list[KVFormat], in_basis: dict[str, torch.Tensor], folder: Path
) -> None:
    """Scales from calibrated ranges, but for layers in another basis, which have their own."""
    from build.static_pack import pack_static_scales

    assert request.calibration is not None  # the command line calibrates first
    save_file({**pack_static_scales(request.calibration, formats), **in_basis}, folder / STATIC_FILE)


def _check_layers(
    request: BuildRequest, plans: list[LayerPlan], why_keys: dict[int, str], folder: Path, console: Console
) -> list[dict[str, Any]]:
    """Read back what was written and round-trip real pages of every layer; the manifest's entries.

    why_keys: why a layer's K is in a basis, or is not.
    """
    from build.real_pages import capture_pages
    from build.self_check import check_layer, measure_bytes_per_token, measure_fp16_bytes_per_token

    scales = read_static_scales(folder, [plan.fmt for plan in plans])
    transforms, first = read_key_transforms(folder), request.policy.sink_pages * PAGE_TOKENS
    with console.status("self-check: real K and V through every layer"):
        captured = capture_pages(request.source, request.model, request.policy)
        pages = [as_stored(layer, transforms.get(index), first) for index, layer in enumerate(captured)]
        return [
            {
                "index": index,
                "format": _format_entry(plan.fmt),
                "why": "; ".join([plan.why, *([why_keys[index]] if index in why_keys else [])]),
                "bytes_per_token": measure_bytes_per_token(pages[index], plan.fmt, scales[index]),
                "bytes_per_token_fp16": measure_fp16_bytes_per_token(pages[index]),
                "roundtrip": check_layer(index, pages[index], plan.fmt, scales[index]).model_dump(),
            }
            for index, plan in enumerate(plans)
        ]


def short_calibration(request: BuildRequest) -> str | None:
    """A warning when static scales were never shown the positions that the engine may serve.

    RoPE turns the slow channels of K over thousands of tokens, so their range grows with the context.
    """
    calibration, context = request.calibration, request.limits.max_context
    if calibration is None or calibration.longest_prompt >= context:
        return None
    return (
        f"calibrated on prompts of up to {calibration.longest_prompt} tokens, but the engine serves {context}: K of "
        "later positions may leave the calibrated ranges. Calibrate with longer prompts, or build for a smaller one"
    )


def _format_entry(fmt: KVFormat) -> dict[str, Any]:
    return {"k": TensorRecipe.of(fmt.k).model_dump(), "v": TensorRecipe.of(fmt.v).model_dump()}


def _content(request: BuildRequest, key: str, layers: list[dict[str, Any]], files: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "engine_hash": "",
        "build_key": key,
        "host": "native",
        "model": _model_entry(request, hash_source(request.source)),
        "kv": {"recipe": request.recipe.model_dump(), "format": _format_entry(request.kv.format)},
        "policy": {
            "sink_pages": request.policy.sink_pages,
            "recent_pages": request.policy.recent_pages,
            "page_tokens": PAGE_TOKENS,
        },
        "layers": layers,
        "bytes_per_token": sum(layer["bytes_per_token"] for layer in layers),
        "bytes_per_token_fp16": sum(layer["bytes_per_token_fp16"] for layer in layers),
        "limits": request.limits.model_dump(),
        "calibration": {
            "sha256": request.calibration.sha256 if request.calibration else None,
            "search_sha256": request.mix.sha256 if request.mix else None,
        },
        "files": files,
        "versions": versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _model_entry(request: BuildRequest, hashes: SourceHashes) -> dict[str, Any]:
    return {
        "name": request.model.name,
        "recipe": request.model.model_dump(),
        "source": _source_reference(request.source, request.target),
        **asdict(hashes),
        **asdict(read_shape(request.source)),
    }


def _source_reference(source: Path, target: Path) -> str:
    """Relative where both lie under engines/ (the tree may be moved or mounted elsewhere), absolute otherwise."""
    if source.resolve().is_relative_to(engines_root().resolve()):
        return os.path.relpath(source.resolve(), target.resolve())
    return str(source.resolve())


def _hash_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
