"""A renamed scale fails like a missing one: with its layer's name, in the calibration and in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from build.preflight import run_preflight
from build.static_pack import pack_static_scales
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.static_scales import STATIC_FILE, read_static_scales

STATIC = [FORMATS["int8-static"]] * 2


def ranges() -> dict[str, torch.Tensor]:
    """Two layers of two heads with 32 channels, -1 to 2."""
    ends = (("min", -1.0), ("max", 2.0))
    return {f"layers.{i}.{t}.{end}": torch.full((2, 32), value) for i in range(2) for t in "kv" for end, value in ends}


def renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["layers.1.k.min", "layers.0.v.max"])
def test_a_renamed_range_names_its_layer(name: str) -> None:
    calibration = Calibration(Path("calibration"), {}, renamed(ranges(), name, f"model.{name}"))
    layer = name.split(".")[1]
    with pytest.raises(NibbleError, match=rf"layer {layer}: no {name} in it; run `make calibrate`"):
        pack_static_scales(calibration, STATIC)


@pytest.mark.parametrize("part", ["scale", "zero"])
def test_a_renamed_scale_of_an_engine_names_its_layer(tmp_path: Path, part: str) -> None:
    tensors = pack_static_scales(Calibration(Path("calibration"), {}, ranges()), STATIC)
    save_file(renamed(tensors, f"layers.1.k.{part}", f"layers.1.key.{part}"), tmp_path / STATIC_FILE)
    with pytest.raises(NibbleError, match=rf"layer 1 K: no layers\.1\.k\.{part}; run `make engine` again"):
        read_static_scales(tmp_path, STATIC)


def test_a_zero_point_that_is_no_number_names_its_layer(tmp_path: Path) -> None:
    tensors = pack_static_scales(Calibration(Path("calibration"), {}, ranges()), STATIC)
    tensors["layers.0.v.zero"][1, 4] = torch.nan
    save_file(tensors, tmp_path / STATIC_FILE)
    with pytest.raises(NibbleError, match="layer 0 V, head 1, channel 4: got scale"):
        read_static_scales(tmp_path, STATIC)


def test_the_pre_flight_names_the_layer_of_a_renamed_range(tiny_llama_dir: Path) -> None:
    calibration = Calibration(Path("calibration"), {}, renamed(ranges(), "layers.1.k.min", "layers.1.k.minimum"))
    with pytest.raises(NibbleError, match=r"layer 1: no layers\.1\.k\.min in it"):
        run_preflight(tiny_llama_dir, STATIC, calibration, 2048)
