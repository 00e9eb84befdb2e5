"""Packs calibrated ranges into the static scales of an engine: scale = (max - min) / levels, zero point = min."""

from __future__ import annotations

import torch

from nibble.calibration import TENSORS, Calibration
from nibble.errors import NibbleError
from nibble.formats import KVFormat, ScaleKind
from nibble.static_scales import DEAD_SCALE, check_scales, dead_channels


def pack_static_scales(calibration: Calibration, formats: list[KVFormat]) -> dict[str, torch.Tensor]:
    """The tensors of kv_static.safetensors, float32 [num_kv_heads, head_dim].

    formats: of each layer. Raises NibbleError naming the layer whose range is missing, NaN, infinite, empty, or gives a
    scale of exactly 1.0. A channel that was always 0 is dead, not badly calibrated, when most of its head's are not.
    """
    tensors = {}
    for index, fmt in enumerate(formats):
        for tensor in TENSORS:
            form = getattr(fmt, tensor)
            if form.scale is ScaleKind.STATIC_CHANNEL:
                minimum, maximum = calibration.channel_range(index, tensor)
                scale = _scale(minimum, maximum, form.levels, f"layer {index} {tensor.upper()}")
                tensors[f"layers.{index}.{tensor}.scale"] = scale
                tensors[f"layers.{index}.{tensor}.zero"] = minimum.float().contiguous()
    return tensors


def _scale(minimum: torch.Tensor, maximum: torch.Tensor, levels: int, owner: str) -> torch.Tensor:
    dead = dead_channels(minimum, maximum)
    empty = (maximum <= minimum) & ~dead
    if empty.any():
        head, channel = empty.nonzero()[0].tolist()
        raise NibbleError(
            f"{owner}, head {head}, channel {channel}: calibrated range {minimum[head, channel].item():g} to "
            f"{maximum[head, channel].item():g} is empty; calibrate again, or use a format without static scales"
        )
    scale = ((maximum.float() - minimum.float()) / levels).where(~dead, DEAD_SCALE).contiguous()
    check_scales(scale, minimum, owner)
    return scale
