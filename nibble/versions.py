"""The versions that an artefact is stamped with."""

from __future__ import annotations

import importlib.metadata
import platform

from nibble import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "nvidia-modelopt")


def versions() -> dict[str, str]:
    """Python, NibbleKV and the packages that numbers depend on; "absent" for one that is not installed."""
    return {"python": platform.python_version(), "nibble": __version__, **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
