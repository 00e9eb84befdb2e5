"""The mix of formats that the format search chose for a model: what `KV=mixed` builds.

engines/<model>/calibration/search.json     the choice, and every measurement it rests on
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.errors import NibbleError
from nibble.formats import KVFormat
from nibble.hashing import file_sha256
from nibble.recipes import KVRecipe, TensorRecipe
from nibble.strict_yaml import StrictModel, validate

SEARCH_FILE = "search.json"
SCHEMA = 1
AGAIN = "run `make calibrate SEARCH=1`"


class LayerChoice(StrictModel):
    """One layer's format, and why it has it."""

    index: int
    name: str
    k: TensorRecipe
    v: TensorRecipe
    why: str

    @property
    def format(self) -> KVFormat:
        return KVFormat(self.name, self.k.format, self.v.format)


@dataclass(frozen=True)
class LayerMix:
    """A search read back. recipe: with the pages that were chosen; content: all of search.json."""

    recipe: KVRecipe
    layers: list[LayerChoice]
    sha256: str
    content: dict[str, Any]

    @property
    def formats(self) -> list[KVFormat]:
        return [layer.format for layer in self.layers]


def read_layer_mix(folder: Path) -> LayerMix:
    """The search result of a calibration folder. Raises NibbleError: missing, damaged, or of another version."""
    path = folder / SEARCH_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NibbleError(f"{path}: not there; {AGAIN}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NibbleError(f"{path}: can't be read ({error}); {AGAIN}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise NibbleError(f"{path}: allowed a mapping of schema {SCHEMA}; {AGAIN}")
    missing = {"model", "recipe", "layers", "identity"} - set(content)
    if missing:
        raise NibbleError(f"{path}: missing keys {', '.join(sorted(missing))}; {AGAIN}")
    recipe = validate(KVRecipe, content["recipe"], str(path))
    layers = [validate(LayerChoice, layer, f"{path}: layer {index}") for index, layer in enumerate(content["layers"])]
    return LayerMix(recipe, layers, file_sha256(path), content)
