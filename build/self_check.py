"""The engine's self-check: real pages of every layer are sealed to bytes and read back with the engine's own scales.

It measures what the manifest reports (bytes per token, relative error) and refuses an engine whose error is beyond what
its bits allow, which means a wrong scale, not a coarse one.
"""

from __future__ import annotations

import torch

from build.real_pages import LayerPages
from nibble.errors import NibbleError
from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat, SealedPageLayout, TensorFormat
from nibble.manifest import RoundTrip
from nibble.packing import seal_pages, unseal_pages
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.rotation import rotate

LARGEST_ROUNDING_ERROR = {4: 0.25, 8: 0.02, 16: 0.001}  # by bits, of values inside the range
LARGEST_RELATIVE_ERROR = 0.30  # with what static ranges cut off
LARGEST_CLIPPED_SHARE = 0.05


def measure_bytes_per_token(pages: LayerPages, fmt: KVFormat, scales: LayerScales) -> float:
    """Bytes of one layer's sealed page, all KV heads, K and V, by token: counted on the packed tensor."""
    sealed = seal_pages(pages.k[:1], pages.v[:1], fmt, scales.k, scales.v)
    return sealed.numel() * sealed.itemsize / PAGE_TOKENS


def measure_fp16_bytes_per_token(pages: LayerPages) -> float:
    """The same of an fp16 cache."""
    return measure_bytes_per_token(pages, FORMATS["fp16"], LayerScales())


def check_layer(index: int, pages: LayerPages, fmt: KVFormat, scales: LayerScales) -> RoundTrip:
    """Seal and read back one layer's pages. Raises NibbleError naming the layer when the error is out of bounds."""
    v = rotate(pages.v.float()).half() if fmt.v.rotated else pages.v
    sealed = seal_pages(pages.k, v, fmt, scales.k, scales.v)
    k_back, v_back = unseal_pages(sealed, SealedPageLayout(fmt, v.shape[-1]), scales.k, scales.v)
    k_error, k_clipped = _measure(f"layer {index} K", pages.k, k_back, fmt.k, scales.k)
    v_error, v_clipped = _measure(f"layer {index} V", v, v_back, fmt.v, scales.v)
    return RoundTrip(
        tokens=pages.k.shape[0] * PAGE_TOKENS,
        k_relative_error=k_error,
        v_relative_error=v_error,
        k_clipped=k_clipped,
        v_clipped=v_clipped,
    )


def _measure(
    owner: str, values: torch.Tensor, back: torch.Tensor, fmt: TensorFormat, scales: ScaleZero | None
) -> tuple[float, float]:
    """Relative error and clipped share of K or V, both within bounds."""
    inside = values.float()
    if scales is not None:
        inside = torch.clamp(inside, scales.zero, scales.zero + fmt.levels * scales.scale)
    rounding, total = _relative_error(inside, back), _relative_error(values, back)
    clipped = _round((inside != values.float()).float().mean().item())
    _check_bound(f"{owner}: relative rounding error", rounding, LARGEST_ROUNDING_ERROR[fmt.bits])
    _check_bound(f"{owner}: share of values outside the calibrated range", clipped, LARGEST_CLIPPED_SHARE)
    _check_bound(f"{owner}: relative round-trip error", total, LARGEST_RELATIVE_ERROR)
    return total, clipped


def _check_bound(what: str, got: float, largest: float) -> None:
    if not got <= largest:
        raise NibbleError(
            f"self-check: {what} is {got:g}, allowed up to {largest:g}; the scales do not fit this model: calibrate "
            "with more and more diverse prompts (N=, PROMPTS=), or use a format with more bits"
        )


def _relative_error(values: torch.Tensor, back: torch.Tensor) -> float:
    """|x - x'| / |x| by Frobenius norms."""
    exact = values.double()
    return _round(((exact - back).norm() / exact.norm().clamp_min(1e-30)).item())


def _round(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")
