"""Static scales and the self-check: every value that can't be a scale fails with its layer's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from build.real_pages import LayerPages
from build.self_check import check_layer, measure_bytes_per_token
from build.static_pack import pack_static_scales
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import FORMATS, SealedPageLayout
from nibble.quantizer import ScaleZero, round_trip
from nibble.reference import LayerScales
from nibble.static_scales import STATIC_FILE, read_static_scales

INT4 = FORMATS["int4-static"]
HEADS, CHANNELS = 2, 32


def calibration(**changes: torch.Tensor) -> Calibration:
    """Two layers whose channels range from -1 to 2, but for `changes` like l1_k_max."""
    tensors = {}
    for layer in range(2):
        for tensor in "kv":
            tensors[f"layers.{layer}.{tensor}.min"] = torch.full((HEADS, CHANNELS), -1.0)
            tensors[f"layers.{layer}.{tensor}.max"] = torch.full((HEADS, CHANNELS), 2.0)
    for name, value in changes.items():
        layer_name, tensor, part = name.split("_")
        tensors[f"layers.{layer_name[1:]}.{tensor}.{part}"] = value
    return Calibration(Path("calibration"), {}, tensors)


def one_channel(value: float, base: float) -> torch.Tensor:
    tensor = torch.full((HEADS, CHANNELS), base)
    tensor[1, 7] = value
    return tensor


def test_scale_and_zero_follow_the_range() -> None:
    tensors = pack_static_scales(calibration(), [INT4, INT4])
    assert len(tensors) == 8
    assert torch.allclose(tensors["layers.1.v.scale"], torch.tensor(3.0 / 15))
    assert (tensors["layers.1.v.zero"] == -1.0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l1_k_max": one_channel(float("nan"), 2.0)}, "layer 1 K, head 1, channel 7: got scale nan"),
        ({"l1_k_max": one_channel(float("inf"), 2.0)}, "layer 1 K, head 1, channel 7: got scale inf"),
        ({"l0_v_min": one_channel(float("nan"), -1.0)}, "layer 0 V, head 1, channel 7: got scale nan"),
        ({"l0_v_max": one_channel(-1.0, 2.0)}, "layer 0 V, head 1, channel 7: calibrated range -1 to -1 is empty"),
        ({"l0_k_max": one_channel(-3.0, 2.0)}, "layer 0 K, head 1, channel 7: calibrated range -1 to -3 is empty"),
        ({"l1_v_max": one_channel(14.0, 2.0)}, "layer 1 V, head 1, channel 7: got scale 1 .*not exactly 1.0"),
    ],
)
def test_unusable_ranges_name_the_layer(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        pack_static_scales(calibration(**changes), [INT4, INT4])


def test_a_channel_that_is_always_0_comes_back_as_0() -> None:
    dead = {f"l1_k_{end}": one_channel(0.0, base) for end, base in (("min", -1.0), ("max", 2.0))}
    tensors = pack_static_scales(calibration(**dead), [INT4, INT4])
    scales = ScaleZero(tensors["layers.1.k.scale"].unsqueeze(1), tensors["layers.1.k.zero"].unsqueeze(1))
    x = 0.5 * torch.ones(HEADS, 64, CHANNELS)
    x[1, :, 7] = 0.0
    back = round_trip(x.half(), INT4.k, scales)
    assert (back[1, :, 7] == 0).all() and (back - x).abs().max() <= 0.1 + 1e-3
    everything = {f"l1_k_{end}": torch.zeros(HEADS, CHANNELS) for end in ("min", "max")}
    with pytest.raises(NibbleError, match="layer 1 K, head 0, channel 0: calibrated range 0 to 0 is empty"):
        pack_static_scales(calibration(**everything), [INT4, INT4])


def test_a_missing_layer_is_named() -> None:
    with pytest.raises(NibbleError, match=r"layer 2: no layers\.2\.k\.min in it"):
        pack_static_scales(calibration(), [INT4, INT4, INT4])


@pytest.mark.parametrize("value", [1.0, 0.0, -0.5, float("nan"), float("inf")])
def test_bad_scales_in_an_engine_are_named_when_read(tmp_path: Path, value: float) -> None:
    tensors = pack_static_scales(calibration(), [INT4, INT4])
    tensors["layers.1.k.scale"] = one_channel(value, 0.2)
    save_file(tensors, tmp_path / STATIC_FILE)
    with pytest.raises(NibbleError, match="layer 1 K, head 1, channel 7: got scale"):
        read_static_scales(tmp_path, [INT4, INT4])


def test_missing_scales_in_an_engine_are_named_when_read(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=rf"{STATIC_FILE}: can't be read"):
        read_static_scales(tmp_path, [INT4])
    tensors = pack_static_scales(calibration(), [INT4, INT4])
    del tensors["layers.1.v.zero"]
    save_file(tensors, tmp_path / STATIC_FILE)
    with pytest.raises(NibbleError, match=r"layer 1 V: no layers\.1\.v\.zero"):
        read_static_scales(tmp_path, [INT4, INT4])


def test_formats_without_static_scales_read_no_file(tmp_path: Path) -> None:
    assert read_static_scales(tmp_path, [FORMATS["int4"]] * 2) == [LayerScales()] * 2


def random_pages(k_scale: float = 1.0) -> LayerPages:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, HEADS, 64, CHANNELS, generator=generator)
    return LayerPages((k * k_scale).half(), v.half())


def scales_for(pages: LayerPages, factor: float = 1.0) -> LayerScales:
    """Static int4 scales from the pages' own ranges, times a factor."""

    def of(values: torch.Tensor) -> ScaleZero:
        low, high = values.float().amin((0, 2)), values.float().amax((0, 2))
        return ScaleZero(((high - low) / 15 * factor)[:, None], (low * factor)[:, None])

    return LayerScales(of(pages.k), of(pages.v))


@pytest.mark.parametrize("name", ["fp16", "int8", "k8v4", "int4"])
def test_bytes_per_token_are_counted_on_the_packed_tensor(name: str) -> None:
    layout = SealedPageLayout(FORMATS[name], CHANNELS)
    assert measure_bytes_per_token(random_pages(), FORMATS[name], LayerScales()) == HEADS * layout.bytes_per_token


def test_good_scales_pass_and_wrong_ones_fail_with_the_layer() -> None:
    pages = random_pages()
    result = check_layer(3, pages, INT4, scales_for(pages))
    assert 0 < result.k_relative_error < 0.15 and result.k_clipped == 0
    with pytest.raises(NibbleError, match=r"self-check: layer 3 K: relative rounding error is .* calibrate with"):
        check_layer(3, pages, INT4, scales_for(pages, factor=6.0))
    with pytest.raises(NibbleError, match=r"self-check: layer 3 K: share of values outside the calibrated range is"):
        check_layer(3, pages, INT4, scales_for(pages, factor=0.5))


def test_ranges_of_k_far_from_v_pass() -> None:
    assert check_layer(0, random_pages(k_scale=50.0), FORMATS["int4"], LayerScales()).k_relative_error < 0.15
