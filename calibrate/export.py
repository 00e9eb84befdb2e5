"""Writes calibrated K and V scales under the names that other engines read.

    trtllm   transformer.layers.{i}.attention.{k_cache,v_cache,kv_cache}_scaling_factor    (kv: the larger of the two)
    hf       model.layers.{i}.self_attn.{k_proj.k_scale,v_proj.v_scale}

A scale is the largest magnitude over the largest code: 127 for int8, 448 for fp8 e4m3 (no zero point). `tensor`
gives one scale a layer, float32 [1]; `channel` one for each channel, float32 [num_kv_heads, head_dim], the smallest
there is for a channel that is always 0. TensorRT-LLM and the fp8 loaders of Hugging Face checkpoints take `tensor`. The
file is read back and compared before it is in place: a scale that is missing, NaN, infinite, not positive or exactly
1.0 is an error that names the layer.

    python -m calibrate.export --model smollm2-135m --to trtllm --type int8
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save

from nibble import atomic
from nibble.calibration import TENSORS, Calibration, read_calibration
from nibble.errors import NibbleError
from nibble.models import read_shape, resolve_source
from nibble.paths import calibration_dir
from nibble.recipes import load_model_recipe
from nibble.stage import console, run_stage
from nibble.static_scales import DEAD_SCALE, dead_channels

LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
GRANULARITIES = ("tensor", "channel")
NAMES = {
    "trtllm": {
        "k": "transformer.layers.{layer}.attention.k_cache_scaling_factor",
        "v": "transformer.layers.{layer}.attention.v_cache_scaling_factor",
        "kv": "transformer.layers.{layer}.attention.kv_cache_scaling_factor",
    },
    "hf": {
        "k": "model.layers.{layer}.self_attn.k_proj.k_scale",
        "v": "model.layers.{layer}.self_attn.v_proj.v_scale",
    },
}


@dataclass(frozen=True)
class ExportForm:
    """to: of `NAMES`; code_type: of `LARGEST_CODE`; granularity: of `GRANULARITIES`."""

    to: str
    code_type: str
    granularity: str

    @property
    def file_name(self) -> str:
        return f"kv_scales.{self.to}.{self.code_type}.{self.granularity}.safetensors"


def export_scales(calibration: Calibration, num_layers: int, form: ExportForm) -> dict[str, torch.Tensor]:
    """The tensors of an export. Raises NibbleError naming the layer of a range that gives no scale."""
    tensors = {}
    for layer in range(num_layers):
        scales: dict[str, torch.Tensor] = {tensor: _scale(calibration, layer, tensor, form) for tensor in TENSORS}
        scales["kv"] = torch.maximum(scales["k"], scales["v"])
        for role, name in NAMES[form.to].items():
            tensors[name.format(layer=layer)] = scales[role].contiguous()
    return tensors


def write_export(folder: Path, calibration: Calibration, num_layers: int, form: ExportForm) -> Path:
    """Write an export, after reading back what will be written. Returns its path."""
    content = save(export_scales(calibration, num_layers, form), metadata={"calibration_sha256": calibration.sha256})
    check_export(load(content), calibration, num_layers, form)
    path = folder / form.file_name
    atomic.write_bytes(path, content)
    return path


def check_export(tensors: dict[str, torch.Tensor], calibration: Calibration, num_layers: int, form: ExportForm) -> None:
    """NibbleError naming the first layer whose scales are missing, impossible or not the calibration's."""
    expected = export_scales(calibration, num_layers, form)
    for layer in range(num_layers):
        for role, pattern in NAMES[form.to].items():
            name = pattern.format(layer=layer)
            if name not in tensors:
                raise NibbleError(f"export: layer {layer}: no {name}; export again")
            _check(tensors[name], f"export: layer {layer} {role.upper()}: {name}")
            if not torch.equal(tensors[name], expected[name]):
                raise NibbleError(f"export: layer {layer}: {name} differs from the calibration's range; export again")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise NibbleError(f"export: got {unknown[0]}, which is no scale of this model; export again")


def main() -> None:
    """Export what the command line asks for."""
    arguments = _parser().parse_args()
    recipe = load_model_recipe(arguments.model)
    folder = arguments.calibration or calibration_dir(recipe.name)
    form = ExportForm(arguments.to, arguments.type, arguments.granularity)
    layers = read_shape(resolve_source(recipe)).num_layers
    path = write_export(arguments.out or folder, read_calibration(folder), layers, form)
    console.print(f"{layers} layers of {form.code_type} scales for {form.to}, read back and compared: {path}")


def _scale(calibration: Calibration, layer: int, tensor: str, form: ExportForm) -> torch.Tensor:
    low, high = calibration.channel_range(layer, "k" if tensor == "k" else "v")
    absmax = torch.maximum(low.abs(), high.abs()).float()
    if form.granularity == "tensor":
        absmax = absmax.amax().reshape(1)
    scale = absmax / LARGEST_CODE[form.code_type]
    if form.granularity == "channel":
        scale = scale.masked_fill(dead_channels(low, high), DEAD_SCALE)
    _check(scale, f"export: layer {layer} {tensor.upper()}")
    return scale


def _check(scale: torch.Tensor, owner: str) -> None:
    bad = ~torch.isfinite(scale) | (scale <= 0) | (scale == 1.0)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        place = f", head {first[0]}, channel {first[1]}" if len(first) == 2 else ""
        raise NibbleError(
            f"{owner}{place}: got scale {scale[first].item():g}, allowed finite values above 0 and not exactly 1.0 "
            "(a placeholder); run `make calibrate` with other prompts"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m calibrate.export", description="Scales for other engines.")
    parser.add_argument("--model", required=True, help="a recipe's name, a folder, or a hub id")
    parser.add_argument("--to", choices=tuple(NAMES), default="trtllm")
    parser.add_argument("--type", choices=tuple(LARGEST_CODE), default="int8")
    parser.add_argument("--granularity", choices=GRANULARITIES, default="tensor")
    parser.add_argument("--calibration", type=Path, help="folder of the calibration (default: the model's)")
    parser.add_argument("--out", type=Path, help="folder of the export (default: beside the calibration)")
    return parser


if __name__ == "__main__":
    run_stage(main)
