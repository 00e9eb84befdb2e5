"""How many of an int8 cache's codes the values of a layer would use, when K and V share one scale.

TensorRT-LLM's int8 cache has one scale a layer, as large as the largest value of K or V asks for. A few channels of K
with biases of hundreds, as in Qwen2.5, or a V that is far smaller than K, leave the other channels a handful of codes.
So the median channel is asked: its largest magnitude, in codes of 127.

Few codes of K refuse the build: scores go through an exponential. Few codes of V are shown and left to the evaluation:
V of first layers is small beside K in many models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table

from build.trtllm.checkpoint import Scales
from nibble.calibration import TENSORS, Calibration
from nibble.errors import NibbleError

FEW_CODES = 16.0  # of 127: the median channel has under 5 bits with its sign
TOO_FEW_CODES = 4.0  # under 3 bits: what is left is mostly rounding


@dataclass(frozen=True)
class LayerLevels:
    """Codes that the largest value of the median channel reaches, of K and of V."""

    layer: int
    k: float
    v: float

    @property
    def least(self) -> float:
        return min(self.k, self.v)


def measure_levels(calibration: Calibration, scales: Scales) -> list[LayerLevels]:
    """Of each layer."""
    found = []
    for layer, scale in scales.items():
        codes = []
        for tensor in TENSORS:
            low, high = calibration.channel_range(layer, tensor)
            codes.append(float(torch.maximum(low.abs(), high.abs()).float().median() / scale))
        found.append(LayerLevels(layer, *codes))
    return found


def require_levels(levels: list[LayerLevels]) -> None:
    """NibbleError naming the layers whose usual channel of K would hardly be stored at all."""
    bad = [found for found in levels if found.k < TOO_FEW_CODES]
    if bad:
        worst, layers = min(bad, key=lambda found: found.k), ", ".join(str(found.layer) for found in bad)
        raise NibbleError(
            f"int8 cache of TensorRT-LLM: in layers {layers} the usual channel of K would reach {worst.k:.2g} of "
            f"127 codes (layer {worst.layer}), allowed {TOO_FEW_CODES:g} or more: K and V share one scale there, "
            "and few large channels of K set it. Take KV=k8v4 or int4 with HOST=trtllm (finer scales), or KV=fp16"
        )


def levels_table(levels: list[LayerLevels]) -> Table:
    """The layers with the fewest codes."""
    table = Table(title="Codes of 127 that the median channel reaches, fewest first", title_justify="left")
    for heading in ("layer", "K", "V"):
        table.add_column(heading)
    for found in sorted(levels, key=lambda level: level.least)[:5]:
        marked = [f"[yellow]{value:.0f}[/]" if value < FEW_CODES else f"{value:.0f}" for value in (found.k, found.v)]
        table.add_row(str(found.layer), *marked)
    return table
