"""Running ranges of K and V: what calibration knows after some prompts, and how it is saved and judged.

Minimum and maximum don't depend on the order of the prompts and may see the same prompt twice, so a run that was
interrupted anywhere and resumed ends with the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nibble.errors import NibbleError


@dataclass(frozen=True)
class ChannelRange:
    """Minimum and maximum of each channel of one layer's K or V, float32 [num_kv_heads, head_dim]."""

    minimum: torch.Tensor
    maximum: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> ChannelRange:
        """The range of values [batch, num_kv_heads, tokens, head_dim]."""
        values = values.detach().float()
        return cls(values.amin((0, 2)).cpu(), values.amax((0, 2)).cpu())

    def union(self, other: ChannelRange) -> ChannelRange:
        return ChannelRange(
            torch.minimum(self.minimum, other.minimum),
            torch.maximum(self.maximum, other.maximum),
        )

    @property
    def absmax(self) -> torch.Tensor:
        return torch.maximum(self.minimum.abs(), self.maximum.abs())


def check_finite(channels: ChannelRange, owner: str) -> None:
    """NibbleError that names `owner` (a layer's K or V), head and channel of the first NaN or Inf."""
    bad = ~(torch.isfinite(channels.minimum) & torch.isfinite(channels.maximum))
    if bad.any():
        head, channel = _first(bad)
        value = channels.maximum[head, channel].item()
        raise NibbleError(
            f"calibration: {owner}, head {head}, channel {channel}: got {value}, allowed finite numbers; "
            f"{int(bad.sum())} channels are hit. Check the weights, or load the model with dtype float32"
        )


def silenced_by_norm(attention: nn.Module) -> torch.Tensor | None:
    """Channels that an attention's norm of K makes 0, as some of Gemma 3's do; bool [head_dim], None without a norm."""
    norm = getattr(attention, "k_norm", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return None
    with torch.no_grad():
        return norm(torch.ones_like(weight)) == 0


def check_alive(channels: ChannelRange, owner: str, silenced: torch.Tensor | None = None) -> None:
    """NibbleError that names the first channel whose minimum equals its maximum: no scale can be made of it.

    silenced: bool [head_dim], channels that the model itself holds at 0.
    """
    dead = channels.minimum == channels.maximum
    if silenced is not None:
        dead &= ~(silenced.to(dead.device) & (channels.maximum == 0))
    if dead.any():
        head, channel = _first(dead)
        raise NibbleError(
            f"calibration: {owner}, head {head}, channel {channel}: dead channel, every token gives "
            f"{channels.minimum[head, channel].item():.6g}; {int(dead.sum())} channels are hit. Check the weights, or "
            "use a KV format without calibrated scales (int4, k8v4, int8)"
        )


def range_tensors(layer: int, tensor: str, channels: ChannelRange) -> dict[str, torch.Tensor]:
    """The entries of kv_scales.safetensors for one layer's K or V."""
    per_channel = {"min": channels.minimum, "max": channels.maximum, "absmax": channels.absmax}
    whole = {
        "tensor_min": channels.minimum.min().reshape(1),
        "tensor_max": channels.maximum.max().reshape(1),
        "tensor_absmax": channels.absmax.max().reshape(1),
    }
    return {f"layers.{layer}.{tensor}.{name}": value.contiguous() for name, value in {**per_channel, **whole}.items()}


def _first(flags: torch.Tensor) -> tuple[int, int]:
    head, channel = flags.nonzero()[0].tolist()
    return head, channel
