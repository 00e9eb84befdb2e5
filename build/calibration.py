"""Finds the calibration that static scales are packed from, and runs the calibration stage when there is none."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from nibble.calibration import Calibration, read_calibration
from nibble.errors import NibbleError
from nibble.layer_mix import LayerMix
from nibble.models import hash_source
from nibble.paths import calibration_dir
from nibble.recipes import KVRecipe, ModelRecipe


def find_calibration(
    model: ModelRecipe, kv: KVRecipe, source: Path, console: Console, mix: LayerMix | None = None
) -> Calibration | None:
    """The model's calibration, made now when it is missing, damaged or of another model; None when not needed.

    mix: the formats that a search chose in place of the recipe's. NibbleError when it was searched with other ranges.
    """
    formats = mix.formats if mix else [kv.format]
    if not any(fmt.needs_calibration for fmt in formats):
        return None
    found = _read(calibration_dir(model.name), source)
    if mix is not None and (not isinstance(found, Calibration) or found.sha256 != mix.content["inputs"]["calibration"]):
        raise NibbleError(
            f"{calibration_dir(model.name)}: the format search was made with other calibrated ranges than are there "
            "now; run `make calibrate SEARCH=1` again"
        )
    if isinstance(found, Calibration):
        return found
    console.print(f"{kv.name} is made from calibrated ranges. {found}. Calibrating now with the default prompts.")
    from calibrate.pipeline import calibrate
    from calibrate.run import default_request

    return calibrate(default_request(model))


def calibration_at_hand(model: ModelRecipe, source: Path) -> Calibration | None:
    """The model's calibration when there is one that fits; nothing is made."""
    found = _read(calibration_dir(model.name), source)
    return found if isinstance(found, Calibration) else None


def _read(folder: Path, source: Path) -> Calibration | str:
    """The calibration of a folder, or why it can't be used."""
    try:
        calibration = read_calibration(folder)
    except NibbleError as error:
        return str(error)
    made_of, hashes = calibration.report["model"], asdict(hash_source(source))
    differing = [name for name in ("config_sha256", "weights_sha256") if made_of.get(name) != hashes[name]]
    if differing:
        return f"{folder} was made from another model ({', '.join(differing)})"
    return calibration
