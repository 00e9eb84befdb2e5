"""Packing codes into the bytes of a sealed page and back, in the row order of the CPU backend.

8-bit codes are stored as they are. Of 4-bit codes, byte j of a token holds channel j in its low half and channel
j + D/2 in its high half, so that both halves unpack to whole runs of channels:

    token t:  | d=0, D/2 | d=1, D/2+1 | ... | d=D/2-1, D-1 |      low nibble, high nibble
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.quantizer import ScaleZero, quantize


@dataclass(frozen=True)
class PageCodes:
    """K or V of pages before scaling. codes: fp32 [..., 64, head_dim]; parameters: None when codes are the values."""

    codes: torch.Tensor
    parameters: ScaleZero | None


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., channels] to bytes uint8 [..., channels * bits / 8]."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        raise NibbleError(f"4-bit packing: got {codes.shape[-1]} channels, allowed even numbers")
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    if bits == 8:
        return packed
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def seal_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    fmt: KVFormat,
    static_k: ScaleZero | None = None,
    static_v: ScaleZero | None = None,
) -> torch.Tensor:
    """Full pages to the bytes of sealed pages.

    k, v: fp16 [..., 64, head_dim] (V already rotated when the format says so). Returns uint8 [..., page_bytes], laid
    out as `SealedPageLayout` says.
    """
    if k.shape != v.shape or k.shape[-2] != PAGE_TOKENS:
        raise NibbleError(f"pages to seal: got K {tuple(k.shape)}, V {tuple(v.shape)}; allowed [..., {PAGE_TOKENS}, D]")
    k_codes, k_parameters = _encode(k, fmt.k, static_k)
    v_codes, v_parameters = _encode(v, fmt.v, static_v)
    return torch.cat((k_codes, v_codes, k_parameters, v_parameters), dim=-1)


def unseal_pages(
    sealed: torch.Tensor,
    layout: SealedPageLayout,
    static_k: ScaleZero | None = None,
    static_v: ScaleZero | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes uint8 [..., page_bytes] to what a reader sees: K and V, fp32 [..., 64, head_dim]."""
    shape = (2, *sealed.shape[:-1], PAGE_TOKENS, layout.head_dim)
    k, v = torch.empty(shape, dtype=torch.float32, device=sealed.device)
    unseal_into(k, v, sealed, layout, static_k, static_v)
    return k, v


def unseal_into(
    k: torch.Tensor,
    v: torch.Tensor,
    sealed: torch.Tensor,
    layout: SealedPageLayout,
    static_k: ScaleZero | None = None,
    static_v: ScaleZero | None = None,
) -> None:
    """`unseal_pages` into fp32 tensors [..., 64, head_dim] of any strides."""
    _decode_into(k, sealed, layout.k_codes, layout.k_parameters, layout.fmt.k, static_k)
    _decode_into(v, sealed, layout.v_codes, layout.v_parameters, layout.fmt.v, static_v)


def unpack_pages(
    sealed: torch.Tensor,
    layout: SealedPageLayout,
    static_k: ScaleZero | None = None,
    static_v: ScaleZero | None = None,
) -> tuple[PageCodes, PageCodes]:
    """Bytes uint8 [..., page_bytes] to the codes of K and V, whose scales are left to whoever multiplies by them."""
    k, v = torch.empty(2, *sealed.shape[:-1], PAGE_TOKENS, layout.head_dim, device=sealed.device)
    _codes_into(k, view_codes(sealed, layout.k_codes, layout.fmt.k, layout.head_dim), layout.fmt.k)
    _codes_into(v, view_codes(sealed, layout.v_codes, layout.fmt.v, layout.head_dim), layout.fmt.v)
    return (
        PageCodes(k, _scales(sealed, layout.k_parameters, layout.fmt.k, static_k)),
        PageCodes(v, _scales(sealed, layout.v_parameters, layout.fmt.v, static_v)),
    )


def view_codes(sealed: torch.Tensor, place: slice, fmt: TensorFormat, head_dim: int) -> torch.Tensor:
    """The packed codes of K or V as uint8 [..., 64, bytes per token]: a view, nothing is unpacked."""
    return sealed[..., place].unflatten(-1, (PAGE_TOKENS, head_dim * fmt.bits // 8))


def view_parameters(sealed: torch.Tensor, place: slice, fmt: TensorFormat) -> ScaleZero:
    """The page's scales and zero points, fp16: a view shaped to broadcast against [..., 64, head_dim]."""
    halves = sealed[..., place].view(torch.float16)
    scale, zero = halves.chunk(2, dim=-1)
    shared_dim = -2 if fmt.scale is ScaleKind.PAGE_CHANNEL else -1
    return ScaleZero(scale.unsqueeze(shared_dim), zero.unsqueeze(shared_dim))


def _encode(page: torch.Tensor, fmt: TensorFormat, static: ScaleZero | None) -> tuple[torch.Tensor, torch.Tensor]:
    if fmt.scale is ScaleKind.NONE:
        as_bytes = page.half().contiguous().view(torch.uint8).flatten(-2)
        return as_bytes, as_bytes[..., :0]
    quantized = quantize(page, fmt, static)
    codes = pack_codes(quantized.codes, fmt.bits).flatten(-2)
    if fmt.scale is ScaleKind.STATIC_CHANNEL:
        return codes, codes[..., :0]
    return codes, torch.cat([_parameter_bytes(p) for p in (quantized.parameters.scale, quantized.parameters.zero)], -1)


def _parameter_bytes(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.flatten(-2).contiguous().view(torch.uint8)


def _decode_into(
    out: torch.Tensor,
    sealed: torch.Tensor,
    codes: slice,
    parameters: slice,
    fmt: TensorFormat,
    static: ScaleZero | None,
) -> None:
    _codes_into(out, view_codes(sealed, codes, fmt, out.shape[-1]), fmt)
    scales = _scales(sealed, parameters, fmt, static)
    if scales is not None:
        out.mul_(scales.scale.float()).add_(scales.zero.float())


def _codes_into(out: torch.Tensor, packed: torch.Tensor, fmt: TensorFormat) -> None:
    """What the packed bytes [..., 64, bytes per token] hold, as fp32: codes, or the values of a 16-bit format."""
    if fmt.scale is ScaleKind.NONE:
        out.copy_(packed.view(torch.float16))
    elif fmt.bits == 4:
        half = out.shape[-1] // 2
        out[..., :half] = packed & 15
        out[..., half:] = packed >> 4
    else:
        out.copy_(packed)


def _scales(sealed: torch.Tensor, place: slice, fmt: TensorFormat, static: ScaleZero | None) -> ScaleZero | None:
    """The scales of the codes, None for a 16-bit format."""
    if fmt.scale is ScaleKind.NONE:
        return None
    if fmt.scale is not ScaleKind.STATIC_CHANNEL:
        return view_parameters(sealed, place, fmt)
    if static is None:
        raise NibbleError("static KV format without calibrated scales: run `make calibrate`, then `make engine`")
    return static
