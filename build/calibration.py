"""Finds the calibration that static scales are packed from, and runs the calibration stage when there is none."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from nibble.calibration import Calibration, read_calibration
from nibble.errors import NibbleError
from nibble.models import hash_source
from nibble.paths import calibration_dir
from nibble.recipes import KVRecipe, ModelRecipe


def find_calibration(model: ModelRecipe, kv: KVRecipe, source: Path, console: Console) -> Calibration | None:
    """The model's calibration, made now when it is missing, damaged or of another model; None when not needed."""
    if not kv.format.needs_calibration:
        return None
    found = _read(calibration_dir(model.name), source)
    if isinstance(found, Calibration):
        return found
    console.print(f"{kv.name} is made from calibrated ranges. {found}. Calibrating now with the default prompts.")
    from calibrate.pipeline import calibrate
    from calibrate.run import default_request

    return calibrate(default_request(model))


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
