"""The quantizer: real values to integer codes with a scale and a zero point, and back.

    x  ~=  code * scale + zero        code in 0 .. 2^bits - 1

The zero point is real-valued (the value of code 0), so that a range that does not contain 0 loses nothing. Page scales
are fp16: the zero point is the range's minimum, which is exact because pages are fp16, and the scale is rounded up, so
that every value stays within half a step. The arithmetic is fp32 in a fixed order, which lets a CUDA kernel give the
same codes bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nibble.errors import NibbleError
from nibble.formats import ScaleKind, TensorFormat

SMALLEST_SCALE = 2.0**-14  # the smallest normal fp16 number: a constant channel gets this and code 0


@dataclass(frozen=True)
class ScaleZero:
    """A scale and a zero point that broadcast against the values: x ~= code * scale + zero.

    fp16 when they came from a page, fp32 when they came from calibration.
    """

    scale: torch.Tensor
    zero: torch.Tensor


@dataclass(frozen=True)
class Quantized:
    """Codes (uint8, the shape of the values) with their scales."""

    codes: torch.Tensor
    parameters: ScaleZero


def quantize(page: torch.Tensor, fmt: TensorFormat, static: ScaleZero | None = None) -> Quantized:
    """Quantize full pages of K or V.

    page: fp16 [..., tokens, channels], finite; leading dimensions are pages and heads. static: scales of a
    `static_channel` format, broadcastable to `page`; other formats take their range from the page itself. Raises
    NibbleError for 16-bit formats and for missing static scales.
    """
    values = page.float()
    if fmt.scale is ScaleKind.STATIC_CHANNEL:
        if static is None:
            raise NibbleError("static KV format without calibrated scales: run `make calibrate`, then `make engine`")
        parameters = static
    else:
        parameters = _range_parameters(values, fmt)
    codes = (values - parameters.zero.float()) * (1.0 / parameters.scale.float())
    return Quantized(codes.round().clamp(0, fmt.levels).to(torch.uint8), parameters)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """The values that the codes stand for, fp32, in the codes' shape."""
    parameters = quantized.parameters
    return quantized.codes.float() * parameters.scale.float() + parameters.zero.float()


def round_trip(page: torch.Tensor, fmt: TensorFormat, static: ScaleZero | None = None) -> torch.Tensor:
    """What a reader of the sealed page sees, fp32; 16-bit formats give the values themselves."""
    if fmt.scale is ScaleKind.NONE:
        return page.float()
    return dequantize(quantize(page, fmt, static))


def static_parameters(minimum: torch.Tensor, maximum: torch.Tensor, fmt: TensorFormat) -> ScaleZero:
    """Scales of a static format from calibrated ranges, fp32, in the ranges' shape."""
    scale = ((maximum.float() - minimum.float()) / fmt.levels).clamp_min(SMALLEST_SCALE)
    return ScaleZero(scale, minimum.float())


def _range_parameters(values: torch.Tensor, fmt: TensorFormat) -> ScaleZero:
    if fmt.scale is ScaleKind.NONE:
        raise NibbleError("16-bit KV has no scales; quantize only formats of 4 and 8 bits")
    shared_dim = -2 if fmt.scale is ScaleKind.PAGE_CHANNEL else -1
    minimum, maximum = values.aminmax(dim=shared_dim, keepdim=True)
    scale = (maximum - minimum) * (1.0 / fmt.levels)
    return ScaleZero(_half_rounded_up(scale.clamp_min(SMALLEST_SCALE)), minimum.half())


def _half_rounded_up(positive: torch.Tensor) -> torch.Tensor:
    """fp16, rounded towards +infinity; positive normal numbers only (their bit patterns are ordered)."""
    nearest = positive.half()
    bits = nearest.view(torch.int16) + (nearest.float() < positive).to(torch.int16)
    return bits.view(torch.float16)
