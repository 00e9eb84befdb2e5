"""The calibration file: the range of every channel of K and V, after RoPE, and how it came about.

kv_scales.safetensors   layers.{i}.{k,v}.{min,max,absmax}            float32 [num_kv_heads, head_dim]
                        layers.{i}.{k,v}.tensor_{min,max,absmax}     float32 [1]
calibration.json        which model and prompts, token counts, versions, statistics; SHA-256 of the file above
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nibble.errors import NibbleError
from nibble.hashing import file_sha256

SCHEMA = 2
SCALES_FILE = "kv_scales.safetensors"
REPORT_FILE = "calibration.json"
TENSORS: tuple[Literal["k", "v"], ...] = ("k", "v")


@dataclass(frozen=True)
class Calibration:
    """A calibration read back. report: the content of calibration.json."""

    folder: Path
    report: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def sha256(self) -> str:
        """SHA-256 of kv_scales.safetensors."""
        return str(self.report["kv_scales_sha256"])

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt: K of later positions was never seen."""
        return int(self.report["prompts"]["longest"])

    def channel_range(self, layer: int, tensor: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Minimum and maximum of each channel, float32 [num_kv_heads, head_dim]. tensor: "k" or "v"."""
        try:
            return self.tensors[f"layers.{layer}.{tensor}.min"], self.tensors[f"layers.{layer}.{tensor}.max"]
        except KeyError as error:
            raise NibbleError(
                f"{self.folder / SCALES_FILE}: layer {layer}: no {error.args[0]} in it; run `make calibrate`"
            ) from error


def read_calibration(folder: Path) -> Calibration:
    """Read a calibration. Raises NibbleError: missing, damaged, or files of two different runs."""
    report = read_report(folder)
    scales = folder / SCALES_FILE
    try:
        if file_sha256(scales) != report["kv_scales_sha256"]:
            raise NibbleError(f"{scales}: does not belong to the {REPORT_FILE} beside it; run `make calibrate`")
        return Calibration(folder, report, load_file(scales))
    except (OSError, SafetensorError) as error:
        raise NibbleError(f"{scales}: can't be read ({error}); run `make calibrate`") from error


def read_report(folder: Path) -> dict[str, Any]:
    """calibration.json of a folder. Raises NibbleError when it is missing or damaged."""
    path = folder / REPORT_FILE
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NibbleError(f"{path}: not there; run `make calibrate`") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NibbleError(f"{path}: can't be read ({error}); run `make calibrate`") from error
    missing = {"schema", "identity", "kv_scales_sha256", "model", "prompts"} - set(
        report if isinstance(report, dict) else ()
    )
    if missing:
        raise NibbleError(f"{path}: missing keys {', '.join(sorted(missing))}; run `make calibrate`")
    assert isinstance(report, dict)
    if report["schema"] != SCHEMA:
        raise NibbleError(f"{path}: key schema: got {report['schema']}, allowed {SCHEMA}; run `make calibrate` again")
    return report
