"""The unified Hugging Face form of a model with an fp8 KV cache: what ModelOpt's exporter writes, with our scales.

    config.json            + quantization_config (quant_method modelopt, kv_cache_scheme fp8)
    hf_quant_config.json   {"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}
    model-*.safetensors    the weights, linked and not copied, and one file of scales:
                           model.layers.{i}.self_attn.{k_proj.k_scale,v_proj.v_scale}, float32 scalars, absmax / 448

ModelOpt's own exporter needs the whole model loaded with its quantizers; this one needs the calibration alone.
TensorRT-LLM 1.2's PyTorch runtime reads the format but ignores fp8 scales (they stay 1.0); vLLM and SGLang read them.

    python -m build.trtllm.hf_export --model qwen3-8b --out exported
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from calibrate.export import ExportForm, export_scales
from nibble import __version__, atomic
from nibble.calibration import Calibration, read_calibration
from nibble.errors import NibbleError
from nibble.models import read_config, read_shape, resolve_source, tokenizer_files, weight_files
from nibble.paths import calibration_dir
from nibble.recipes import load_model_recipe
from nibble.stage import console, run_stage

INDEX = "model.safetensors.index.json"
KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


def export_hugging_face(target: Path, source: Path, calibration: Calibration) -> Path:
    """Write the folder, whole or not at all, and read its scales back. Raises NibbleError naming the layer."""
    layers = read_shape(source).num_layers
    scales = fp8_scales(calibration, layers)
    with atomic.exclusive(target), atomic.new_directory(target) as folder:
        producer = {"name": "nibblekv", "version": __version__}
        quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
        _write_json(folder / "hf_quant_config.json", {"producer": producer, "quantization": quantization})
        added = {"ignore": [], "kv_cache_scheme": KV_SCHEME, "producer": producer, "quant_method": "modelopt"}
        _write_json(folder / "config.json", {**read_config(source), "quantization_config": added})
        _link_weights(folder, source, scales)
        for path in [*tokenizer_files(source), *source.glob("generation_config.json")]:
            shutil.copyfile(path, folder / path.name)
        _check(folder, scales)
    return target


def fp8_scales(calibration: Calibration, num_layers: int) -> dict[str, torch.Tensor]:
    """k_scale and v_scale of each layer, float32 scalars. Raises NibbleError naming the layer of a bad range."""
    rows = export_scales(calibration, num_layers, ExportForm("hf", "fp8", "tensor"))
    return {name: scale.reshape(()) for name, scale in rows.items()}


def main() -> None:
    """Export the model that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m build.trtllm.hf_export", description="fp8 KV, Hugging Face form.")
    parser.add_argument("--model", required=True, help="a recipe's name, a folder, or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    recipe = load_model_recipe(arguments.model)
    folder = export_hugging_face(arguments.out, resolve_source(recipe), read_calibration(calibration_dir(recipe.name)))
    console.print(f"fp8 KV scales of {recipe.name}, read back: {folder}", soft_wrap=True)


def _link_weights(folder: Path, source: Path, scales: dict[str, torch.Tensor]) -> None:
    """Weights under new names beside the scales, and the index that names each tensor's file.

    A folder with a plain model.safetensors would be read without its index, so no file is called that.
    """
    files = weight_files(source)
    places: dict[str, str] = {}
    for number, path in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files) + 1:05}.safetensors"
        _link(path.resolve(), folder / name)
        with safe_open(path, framework="pt") as stream:
            places.update(dict.fromkeys(stream.keys(), name))
    last = f"model-{len(files) + 1:05}-of-{len(files) + 1:05}.safetensors"
    save_file(scales, folder / last, metadata={"format": "pt"})
    places.update(dict.fromkeys(scales, last))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _check(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    found = load_file(folder / places[next(iter(scales))])
    for name, scale in scales.items():
        if name not in found or not torch.equal(found[name], scale):
            raise NibbleError(f"{folder}: {name} was not written as calibrated; export again")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_stage(main)
