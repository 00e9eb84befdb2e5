"""The manifest of a built engine: what it is, from what it was made, and what was decided for each layer and why.

    engines/<model>/<kv>/manifest.json

`engine_hash` covers everything that defines an engine's answers: the model's content, the KV recipe, each layer's
format, and the files beside the manifest. Dates, versions and the server's limits are recorded but do not enter it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from nibble import atomic
from nibble.errors import NibbleError
from nibble.formats import FORMATS, INT8_PAGE, KVFormat
from nibble.hashing import file_sha256, files_sha256, json_sha256
from nibble.recipes import KVRecipe, ModelRecipe, ServeRecipe, TensorRecipe
from nibble.strict_yaml import StrictModel, validate

MANIFEST_FILE = "manifest.json"
TOKENIZER_DIR = "tokenizer"
SCHEMA = 1


class LayerFormat(StrictModel):
    """How K and V of a layer are stored."""

    k: TensorRecipe
    v: TensorRecipe


class ModelEntry(StrictModel):
    """The model that an engine runs. source: its folder, relative to the engine where both lie under engines/."""

    name: str
    recipe: ModelRecipe
    source: str
    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


class KVEntry(StrictModel):
    """The KV recipe of an engine, and the format it stands for."""

    recipe: KVRecipe
    format: LayerFormat


class PolicyEntry(StrictModel):
    """Which pages stay in fp16, and tokens in a page."""

    sink_pages: int
    recent_pages: int
    page_tokens: int


class RoundTrip(StrictModel):
    """What quantizing real K and V cost: |x - x'| / |x| (Frobenius norms) over `tokens` sealed tokens.

    clipped: the share of values outside a static format's calibrated range.
    """

    tokens: int
    k_relative_error: float
    v_relative_error: float
    k_clipped: float
    v_clipped: float


class LayerEntry(StrictModel):
    """One layer: its format, why it has it, and what was measured. bytes_per_token: all KV heads, K and V, sealed."""

    index: int
    format: LayerFormat
    why: str
    bytes_per_token: float
    bytes_per_token_fp16: float
    roundtrip: RoundTrip


class FindingEntry(StrictModel):
    """One thing that the pre-flight looked at: what it found, what is done about it, which layers it hits."""

    check: str
    got: str
    verdict: Literal["safe", "mitigate", "refuse"]
    action: str
    layers: list[int]


class PreflightEntry(StrictModel):
    """What the pre-flight said before the build; its verdict is that of the worst finding."""

    verdict: Literal["safe", "mitigate", "refuse"]
    findings: list[FindingEntry]


class CalibrationEntry(StrictModel):
    """The calibration that static scales came from, and the format search that chose the layers' formats.

    sha256: of kv_scales.safetensors; search_sha256: of search.json; None when there was no need of it.
    """

    sha256: str | None
    search_sha256: str | None = None


class Manifest(StrictModel):
    """All of manifest.json. bytes_per_token: the whole model, sealed pages, measured from packed tensors.

    build_key: what the build was made from; the same key means that the engine is up to date.
    """

    schema_version: Literal[1] = Field(alias="schema")
    engine_hash: str
    build_key: str
    host: Literal["native"]
    model: ModelEntry
    kv: KVEntry
    policy: PolicyEntry
    layers: list[LayerEntry]
    bytes_per_token: float
    bytes_per_token_fp16: float
    limits: ServeRecipe
    calibration: CalibrationEntry
    preflight: PreflightEntry | None = None
    files: dict[str, str]
    versions: dict[str, str]
    created: str

    def layer_formats(self) -> list[KVFormat]:
        """The format of each layer, in order. A layer that differs from the recipe has the name of a shipped format."""
        return [self._named(layer.format) for layer in self.layers]

    @property
    def layers_by_format(self) -> dict[str, int]:
        """How many layers have each format, the most frequent first."""
        return dict(Counter(fmt.name for fmt in self.layer_formats()).most_common())

    def _named(self, layer: LayerFormat) -> KVFormat:
        k, v = layer.k.format, layer.v.format
        shipped = next((fmt for fmt in (*FORMATS.values(), INT8_PAGE) if (fmt.k, fmt.v) == (k, v)), None)
        own = self.kv.recipe.search is None and layer == self.kv.format
        return shipped if shipped is not None and not own else KVFormat(self.kv.recipe.name, k, v)

    def source_folder(self, engine_dir: Path) -> Path:
        """The Hugging Face folder of the model. Raises NibbleError when it is gone or its config changed."""
        folder = (engine_dir / self.model.source).resolve()
        config = folder / "config.json"
        if not config.is_file():
            raise NibbleError(f"engine {engine_dir}: its model is gone: no {config}; run `make engine` again")
        if file_sha256(config) != self.model.config_sha256:
            raise NibbleError(f"engine {engine_dir}: {config} changed since the build; run `make engine` again")
        return folder

    def verify_weights(self, engine_dir: Path) -> None:
        """NibbleError when the weights are not those of the build (hashed once, then remembered)."""
        folder = self.source_folder(engine_dir)
        if files_sha256(folder.glob("*.safetensors")) != self.model.weights_sha256:
            raise NibbleError(f"engine {engine_dir}: the weights in {folder} changed since the build; build it again")


def compute_engine_hash(content: dict[str, Any]) -> str:
    """The hash of a manifest's content (as in JSON) over what defines the engine's answers."""
    model = {key: content["model"][key] for key in ("config_sha256", "weights_sha256", "tokenizer_sha256")}
    behaviour = {key: content[key] for key in ("schema", "host", "kv", "policy", "files")}
    formats = [layer["format"] for layer in content["layers"]]
    dtype = content["model"]["recipe"]["dtype"]
    return json_sha256({"model": model, "dtype": dtype, "layers": formats, **behaviour})


def write_manifest(engine_dir: Path, manifest: Manifest) -> None:
    """Write manifest.json, atomically."""
    content = manifest.model_dump(by_alias=True)
    atomic.write_text(engine_dir / MANIFEST_FILE, json.dumps(content, indent=2) + "\n")


def read_manifest(engine_dir: Path) -> Manifest:
    """Read and verify an engine: every key, every file's hash, the engine's hash. NibbleError names what differs."""
    path = engine_dir / MANIFEST_FILE
    content = _read_json(path)
    manifest = validate(Manifest, content, str(path))
    for name, expected in manifest.files.items():
        _verify_file(engine_dir / name, expected, manifest)
    if compute_engine_hash(content) != manifest.engine_hash:
        raise NibbleError(f"{path}: engine_hash does not match its content: it was edited; run `make engine` again")
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NibbleError(f"{path}: no engine there; run `make engine` first") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NibbleError(f"{path}: can't be read ({error}); run `make engine` again") from error
    if not isinstance(content, dict):
        raise NibbleError(
            f"{path}: got {type(content).__name__} at the top, allowed a mapping; run `make engine` again"
        )
    return content


def _verify_file(path: Path, expected: str, manifest: Manifest) -> None:
    if not path.is_file():
        raise NibbleError(f"{path}: missing; run `make engine` again")
    if not os.access(path, os.R_OK):
        raise NibbleError(f"{path}: this user may not read it; as its owner: chmod -R a+rX {path.parent}")
    if file_sha256(path) != expected:
        _name_broken_layer(path, manifest)
        raise NibbleError(f"{path}: differs from what the build wrote; run `make engine` again")


def _name_broken_layer(path: Path, manifest: Manifest) -> None:
    """NibbleError naming the layer, when what differs is a scale or a basis that can't be one."""
    from nibble.key_transform import KEYS_FILE, read_key_transforms
    from nibble.static_scales import STATIC_FILE, read_static_scales

    if path.name == STATIC_FILE:
        read_static_scales(path.parent, manifest.layer_formats())
    elif path.name == KEYS_FILE:
        read_key_transforms(path.parent)
