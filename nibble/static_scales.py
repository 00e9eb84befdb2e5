"""The static scales of an engine: one scale and zero point per channel of each layer, from calibration.

    kv_static.safetensors   layers.{i}.{k,v}.{scale,zero}   float32 [num_kv_heads, head_dim]
    x ~= code * scale + zero                                code in 0 .. 2^bits - 1

A scale that is missing, NaN, infinite, not positive or exactly 1.0 (what exporters write when they have none) is an
error that names the layer, when the file is made and whenever it is read. A channel that is always 0, as under a norm
with a weight of 0, has `DEAD_SCALE`: its code is 0, and it comes back as 0.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nibble.calibration import TENSORS
from nibble.errors import NibbleError
from nibble.formats import KVFormat, ScaleKind
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales

STATIC_FILE = "kv_static.safetensors"
DEAD_SCALE = 2.0**-14  # the smallest scale of a page, too
LARGEST_DEAD_SHARE = 0.5  # of a head's channels: with more, the calibration is what is wrong


def read_static_scales(engine_dir: Path, formats: list[KVFormat]) -> list[LayerScales]:
    """The scales of each layer. formats: of each layer. Raises NibbleError naming file and layer."""
    if not any(fmt.needs_calibration for fmt in formats):
        return [LayerScales()] * len(formats)
    path = engine_dir / STATIC_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise NibbleError(f"{path}: can't be read ({error}); run `make engine` again") from error
    return [_layer_scales(path, tensors, index, fmt) for index, fmt in enumerate(formats)]


def dead_channels(minimum: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """Which channels were always 0 while most of their head's were not. Calibrated ranges and result [heads, D]."""
    dead = (minimum == 0) & (maximum == 0)
    return dead & (dead.float().mean(-1, keepdim=True) < LARGEST_DEAD_SHARE)


def check_scales(scale: torch.Tensor, zero: torch.Tensor, owner: str) -> None:
    """NibbleError naming `owner` (a layer's K or V), head and channel of the first scale that can't be one."""
    unusable = ~torch.isfinite(scale) | ~torch.isfinite(zero) | (scale <= 0) | (scale == 1.0)
    if unusable.any():
        head, channel = unusable.nonzero()[0].tolist()
        raise NibbleError(
            f"{owner}, head {head}, channel {channel}: got scale {scale[head, channel].item():g} and zero point "
            f"{zero[head, channel].item():g}; allowed finite values, a scale above 0 and not exactly 1.0 (a "
            "placeholder); run `make calibrate`, then `make engine`"
        )


def _layer_scales(path: Path, tensors: dict[str, torch.Tensor], index: int, fmt: KVFormat) -> LayerScales:
    found: dict[str, ScaleZero | None] = {"k": None, "v": None}
    for tensor in TENSORS:
        if getattr(fmt, tensor).scale is ScaleKind.STATIC_CHANNEL:
            names = [f"layers.{index}.{tensor}.{part}" for part in ("scale", "zero")]
            missing = [name for name in names if name not in tensors]
            if missing:
                raise NibbleError(f"{path}: layer {index} {tensor.upper()}: no {missing[0]}; run `make engine` again")
            scale, zero = (tensors[name] for name in names)
            check_scales(scale, zero, f"{path}: layer {index} {tensor.upper()}")
            found[tensor] = ScaleZero(scale.unsqueeze(1), zero.unsqueeze(1))
    return LayerScales(found["k"], found["v"])
