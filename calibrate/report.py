"""What calibration.json says about each layer: ranges, and the channels that stand out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from calibrate.ranges import ChannelRange

OUTLIER_RATIO = 6.0  # a channel is an outlier when its absmax is so many times the median channel's
OUTLIER_ROWS = 64  # the table keeps the worst ones; the count is complete

RangeKey = tuple[int, str]


@dataclass(frozen=True)
class Outlier:
    """A channel far wider than its layer's median channel."""

    layer: int
    tensor: str
    head: int
    channel: int
    absmax: float
    times_median: float


def layer_statistics(ranges: dict[RangeKey, ChannelRange]) -> list[dict[str, Any]]:
    """One entry a layer: {"index": i, "k": {...}, "v": {...}}."""
    layers = sorted({layer for layer, _ in ranges})
    return [{"index": i, "k": _statistics(ranges[i, "k"]), "v": _statistics(ranges[i, "v"])} for i in layers]


def find_outliers(ranges: dict[RangeKey, ChannelRange]) -> list[Outlier]:
    """All outlier channels, the worst first."""
    found = [outlier for (layer, tensor), channels in ranges.items() for outlier in _outliers(layer, tensor, channels)]
    return sorted(found, key=lambda o: (-o.times_median, o.layer, o.tensor, o.head, o.channel))


def _statistics(channels: ChannelRange) -> dict[str, float]:
    """min, max, absmax of the tensor; median over channels of absmax and width; how far ranges lie off zero."""
    width = channels.maximum - channels.minimum
    midrange = (channels.maximum + channels.minimum) / 2
    return {
        "min": _round(channels.minimum.min()),
        "max": _round(channels.maximum.max()),
        "absmax": _round(channels.absmax.max()),
        "channel_absmax_median": _round(channels.absmax.median()),
        "channel_width_median": _round(width.median()),
        "channel_width_max": _round(width.max()),
        "midrange_over_width_max": _round((midrange.abs() / width.clamp_min(1e-12)).max()),
    }


def _outliers(layer: int, tensor: str, channels: ChannelRange) -> list[Outlier]:
    ratio = channels.absmax / channels.absmax.median().clamp_min(1e-12)
    places: list[list[int]] = (ratio > OUTLIER_RATIO).nonzero().tolist()
    return [
        Outlier(layer, tensor, head, channel, _round(channels.absmax[head, channel]), _round(ratio[head, channel]))
        for head, channel in places
    ]


def _round(value: torch.Tensor) -> float:
    """Six significant digits: readable, and enough to compare."""
    return float(f"{value.item():.6g}")
