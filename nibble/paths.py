"""Where the stages keep their files: they talk to each other through `engines/`.

    engines/<model>/source/        a converted checkpoint (only models that come as GGUF)
    engines/<model>/calibration/   ranges of K and V
    engines/<model>/<kv>/          a built engine

`NIBBLE_ENGINES` moves the whole tree, for example onto a larger disk.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parent.parent
RECIPES_DIR = REPOSITORY_ROOT / "recipes"


def engines_root() -> Path:
    """The folder of all engines: `NIBBLE_ENGINES`, or engines/ of the repository."""
    return Path(os.environ.get("NIBBLE_ENGINES") or REPOSITORY_ROOT / "engines")


def source_dir(model: str) -> Path:
    """Where the converted checkpoint of a model lies."""
    return engines_root() / model / "source"


def calibration_dir(model: str) -> Path:
    """Where the calibration stage writes for a model."""
    return engines_root() / model / "calibration"


def engine_dir(model: str, kv: str) -> Path:
    """Where the build stage writes a model's engine of one KV recipe."""
    return engines_root() / model / kv
