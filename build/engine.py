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

from rich.console import Console
from safetensors.torch import save_file

from nibble import atomic
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.hashing import file_sha256, files_sha256, json_sha256
from nibble.manifest import SCHEMA, TOKENIZER_DIR, Manifest, compute_engine_hash, read_manifest, write_manifest
from nibble.models import SourceHashes, hash_source, read_shape, tokenizer_files
from nibble.paths import REPOSITORY_ROOT, engine_dir, engines_root
from nibble.recipes import KVRecipe, ModelRecipe, ServeRecipe
from nibble.static_scales import STATIC_FILE, read_static_scales
from nibble.strict_yaml import validate
from nibble.versions import versions

CODE_OF_BYTES = ("build/*.py", "nibble/formats.py", "nibble/packing.py", "nibble/quantizer.py", "nibble/rotation.py")


@dataclass(frozen=True)
class BuildRequest:
    """What to build. source: the model's folder. calibration: None for formats that need none."""

    model: ModelRecipe
    kv: KVRecipe
    limits: ServeRecipe
    source: Path
    calibration: Calibration | None

    @property
    def target(self) -> Path:
        return engine_dir(self.model.name, self.kv.name)


def build_engine(request: BuildRequest, console: Console, force: bool = False) -> Manifest:
    """Make (or find) the engine of a request. Raises NibbleError; then nothing of it is left behind."""
    with atomic.exclusive(request.target, console.print):
        key = _build_key(request)
        found = None if force else _find_current(request.target, key)
        if found is not None:
            console.print(f"engine {request.model.name} {request.kv.name} is up to date: {request.target}")
            return found
        with atomic.new_directory(request.target) as workspace:
            _write_engine(request, key, workspace, console)
        return read_manifest(request.target)


def _find_current(folder: Path, key: str) -> Manifest | None:
    """The engine that is there, when it is whole and was made from the same things."""
    try:
        manifest = read_manifest(folder)
        manifest.source_folder(folder)
    except NibbleError:
        return None
    return manifest if manifest.build_key == key else None


def _build_key(request: BuildRequest) -> str:
    code = sorted(path for pattern in CODE_OF_BYTES for path in REPOSITORY_ROOT.glob(pattern))
    inputs = {
        "schema": SCHEMA,
        "recipes": [recipe.model_dump() for recipe in (request.model, request.kv, request.limits)],
        "source": asdict(hash_source(request.source)),
        "calibration": request.calibration.sha256 if request.calibration else None,
        "code": files_sha256(code),
        "versions": versions(),
    }
    return json_sha256(inputs)


def _write_engine(request: BuildRequest, key: str, folder: Path, console: Console) -> None:
    shape = read_shape(request.source)
    formats = [request.kv.format] * shape.num_layers
    SealedPageLayout(request.kv.format, shape.head_dim)  # refuses head sizes that pages can't hold
    _copy_tokenizer(request.source, folder / TOKENIZER_DIR)
    if request.kv.format.needs_calibration:
        _write_static_scales(request, formats, folder)
    layers = _check_layers(request, formats, folder, console)
    content = _content(request, key, layers, _hash_files(folder))
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


def _write_static_scales(request: BuildRequest, formats: list[KVFormat], folder: Path) -> None:
    from build.static_pack import pack_static_scales

    assert request.calibration is not None  # the command line calibrates first
    save_file(pack_static_scales(request.calibration, formats), folder / STATIC_FILE)


def _check_layers(
    request: BuildRequest, formats: list[KVFormat], folder: Path, console: Console
) -> list[dict[str, Any]]:
    """Read back what was written and round-trip real pages of every layer; the manifest's entries."""
    from build.real_pages import capture_pages
    from build.self_check import check_layer, measure_bytes_per_token, measure_fp16_bytes_per_token

    scales = read_static_scales(folder, formats)
    with console.status("self-check: real K and V through every layer"):
        pages = capture_pages(request.source, request.model, request.kv.policy)
        return [
            {
                "index": index,
                "format": _format_entry(request.kv),
                "why": explain(request),
                "bytes_per_token": measure_bytes_per_token(pages[index], fmt, scales[index]),
                "bytes_per_token_fp16": measure_fp16_bytes_per_token(pages[index]),
                "roundtrip": check_layer(index, pages[index], fmt, scales[index]).model_dump(),
            }
            for index, fmt in enumerate(formats)
        ]


def explain(request: BuildRequest) -> str:
    """Why a layer has its format, and what that asks of the runtime."""
    reasons = [f"recipe {request.kv.name} gives every layer this format"]
    if request.kv.v.rotated:
        reasons.append("V is rotated: the Hadamard matrix is folded into v_proj and o_proj when the weights are loaded")
    if request.calibration is not None:
        reasons.append(f"scale and zero point of each channel come from calibration ({STATIC_FILE})")
        reasons.append(f"calibrated on positions 0 to {request.calibration.longest_prompt - 1}")
    return "; ".join(reasons)


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


def _format_entry(kv: KVRecipe) -> dict[str, Any]:
    return {"k": kv.k.model_dump(), "v": kv.v.model_dump()}


def _content(request: BuildRequest, key: str, layers: list[dict[str, Any]], files: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "engine_hash": "",
        "build_key": key,
        "host": "native",
        "model": _model_entry(request, hash_source(request.source)),
        "kv": {"recipe": request.kv.model_dump(), "format": _format_entry(request.kv)},
        "policy": {
            "sink_pages": request.kv.sink_pages,
            "recent_pages": request.kv.recent_pages,
            "page_tokens": PAGE_TOKENS,
        },
        "layers": layers,
        "bytes_per_token": sum(layer["bytes_per_token"] for layer in layers),
        "bytes_per_token_fp16": sum(layer["bytes_per_token_fp16"] for layer in layers),
        "limits": request.limits.model_dump(),
        "calibration": {"sha256": request.calibration.sha256 if request.calibration else None},
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
