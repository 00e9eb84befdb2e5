"""The engine's self-check: real pages of every layer are sealed to bytes and read back with the engine's own scales.

It measures what the manifest reports (bytes per token, relative error) and refuses an engine whose error is beyond what
its bits allow, which means a wrong scale, not a coarse one.
"""

from __future__ import annotations

import torch

from build.real_pages import LayerPages
from nibble.errors import NibbleError
from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.manifest import RoundTrip
from nibble.packing import seal_pages, unseal_pages
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.rotation import rotate

LARGEST_RELATIVE_ERROR = {4: 0.30, 8: 0.03, 16: 0.001}
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
    result = RoundTrip(
        tokens=pages.k.shape[0] * PAGE_TOKENS,
        k_relative_error=_relative_error(pages.k, k_back),
        v_relative_error=_relative_error(v, v_back),
        k_clipped=_clipped_share(pages.k, scales.k, fmt.k.levels),
        v_clipped=_clipped_share(v, scales.v, fmt.v.levels),
    )
    _check_bounds(f"layer {index} K", result.k_relative_error, result.k_clipped, fmt.k.bits)
    _check_bounds(f"layer {index} V", result.v_relative_error, result.v_clipped, fmt.v.bits)
    return result


def _check_bounds(owner: str, error: float, clipped: float, bits: int) -> None:
    if not error <= LARGEST_RELATIVE_ERROR[bits]:
        raise NibbleError(
            f"self-check: {owner}: relative round-trip error {error:.4f}, allowed up to {LARGEST_RELATIVE_ERROR[bits]} "
            f"with {bits} bits; the scales do not fit this model: calibrate again, or use a format with more bits"
        )
    if clipped > LARGEST_CLIPPED_SHARE:
        raise NibbleError(
            f"self-check: {owner}: {clipped:.1%} of the values lie outside the calibrated ranges, allowed up to "
            f"{LARGEST_CLIPPED_SHARE:.0%}; calibrate with more and more diverse prompts (N=, PROMPTS=)"
        )


def _relative_error(values: torch.Tensor, back: torch.Tensor) -> float:
    """|x - x'| / |x|, six significant digits."""
    exact = values.double()
    return float(f"{((exact - back).norm() / exact.norm().clamp_min(1e-30)).item():.6g}")


def _clipped_share(values: torch.Tensor, scales: ScaleZero | None, levels: int) -> float:
    """The share of values outside a static range; half a step on either side is still rounding."""
    if scales is None:
        return 0.0
    codes = (values.float() - scales.zero) / scales.scale
    outside = (codes < -0.5) | (codes > levels + 0.5)
    return float(f"{outside.float().mean().item():.6g}")
