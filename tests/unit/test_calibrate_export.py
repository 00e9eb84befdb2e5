"""Exports of scales: right names and values, and nothing that is missing or impossible gets through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from calibrate.export import ExportForm, check_export, export_scales, write_export
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.static_scales import DEAD_SCALE

HEADS, CHANNELS, LAYERS = 2, 32, 3


def calibration(**changes: float) -> Calibration:
    """K from -4 to 2 and V from -1 to 3, but for changes like l1_k_max in head 1, channel 7."""
    tensors = {}
    for layer in range(LAYERS):
        for tensor, low, high in (("k", -4.0, 2.0), ("v", -1.0, 3.0)):
            tensors[f"layers.{layer}.{tensor}.min"] = torch.full((HEADS, CHANNELS), low)
            tensors[f"layers.{layer}.{tensor}.max"] = torch.full((HEADS, CHANNELS), high)
    for name, value in changes.items():
        layer, tensor, part = name.split("_")
        tensors[f"layers.{layer[1:]}.{tensor}.{part}"][1, 7] = value
    return Calibration(Path("calibration"), {"kv_scales_sha256": "0"}, tensors)


@pytest.mark.parametrize(("code_type", "largest"), [("int8", 127.0), ("fp8", 448.0)])
def test_tensorrt_llm_gets_one_scale_for_k_and_v(tmp_path: Path, code_type: str, largest: float) -> None:
    form = ExportForm("trtllm", code_type, "tensor")
    tensors = load_file(write_export(tmp_path, calibration(l1_v_max=9.0), LAYERS, form))
    assert len(tensors) == 3 * LAYERS
    prefix = "transformer.layers.1.attention"
    assert tensors[f"{prefix}.k_cache_scaling_factor"].tolist() == pytest.approx([4 / largest])
    assert tensors[f"{prefix}.v_cache_scaling_factor"].tolist() == pytest.approx([9 / largest])
    assert tensors[f"{prefix}.kv_cache_scaling_factor"].tolist() == pytest.approx([9 / largest])


def test_hugging_face_names_and_channels(tmp_path: Path) -> None:
    form = ExportForm("hf", "fp8", "channel")
    tensors = load_file(write_export(tmp_path, calibration(l2_k_min=-44.8), LAYERS, form))
    assert len(tensors) == 2 * LAYERS
    scale = tensors["model.layers.2.self_attn.k_proj.k_scale"]
    assert scale.shape == (HEADS, CHANNELS)
    assert scale[1, 7].item() == pytest.approx(0.1)
    assert scale[0, 7].item() == pytest.approx(4 / 448)


@pytest.mark.parametrize(
    ("value", "message"),
    [(127.0, "layer 1 K: got scale 1,"), (float("nan"), "layer 1 K: got scale nan"), (float("inf"), "got scale inf")],
)
def test_a_range_that_gives_no_scale_names_its_layer(value: float, message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        export_scales(calibration(l1_k_max=value), LAYERS, ExportForm("trtllm", "int8", "tensor"))


def test_a_dead_tensor_names_its_layer() -> None:
    dead = calibration()
    for part in ("min", "max"):
        dead.tensors[f"layers.2.v.{part}"].zero_()
    with pytest.raises(NibbleError, match="layer 2 V: got scale 0"):
        export_scales(dead, LAYERS, ExportForm("hf", "int8", "tensor"))
    with pytest.raises(NibbleError, match="layer 2 V, head 0, channel 0: got scale 0"):
        export_scales(dead, LAYERS, ExportForm("hf", "int8", "channel"))


def test_a_dead_channel_has_the_least_scale(tmp_path: Path) -> None:
    form = ExportForm("hf", "int8", "channel")
    dead = calibration(l1_k_min=0.0, l1_k_max=0.0)
    tensors = load_file(write_export(tmp_path, dead, LAYERS, form))
    assert tensors["model.layers.1.self_attn.k_proj.k_scale"][1, 7].item() == DEAD_SCALE


def test_the_self_check_finds_what_differs() -> None:
    form = ExportForm("hf", "int8", "tensor")
    name = "model.layers.1.self_attn.v_proj.v_scale"
    good = export_scales(calibration(), LAYERS, form)
    check_export(good, calibration(), LAYERS, form)
    cases = [
        ({k: v for k, v in good.items() if k != name}, f"layer 1: no {name}"),
        ({**good, name: torch.ones(1)}, "layer 1 V: .* got scale 1,"),
        ({**good, name: good[name] * 2}, "layer 1: .* differs"),
        ({**good, "model.layers.9.self_attn.v_proj.v_scale": good[name]}, "layers.9.* no scale of this model"),
    ]
    for tensors, message in cases:
        with pytest.raises(NibbleError, match=message):
            check_export(tensors, calibration(), LAYERS, form)
