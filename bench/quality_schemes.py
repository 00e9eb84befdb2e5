"""The caches that the quality bench compares: ours, stand-ins for what others ship, and research variants.

A scheme says for K and V how many bits, what shares a scale, and in which basis the values are stored. Ours go through
`nibble.quantizer`, the very code that seals pages; research variants have a few lines of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from bench.quality_attention import Layer, View
from bench.quality_statistics import LayerStatistics
from nibble.formats import PAGE_TOKENS, ScaleKind, TensorFormat
from nibble.quantizer import round_trip
from nibble.static_scales import DEAD_SCALE
from nibble.visibility import PagePolicy

SCALES = ("none", "page", "page32", "token", "static", "fp8")
PAGES = PagePolicy(1, 1)


@dataclass(frozen=True)
class TensorScheme:
    """bits: 4 to 8, 16. scale: of SCALES. basis: of `quality_statistics.BASES`. clip: half the range of a static
    format in standard deviations, None for minimum and maximum. feedback: rounding that makes up for the errors of the
    channels before (K per page only). wide: channels with a large bias are kept at 8 bits (K per page only)."""

    bits: int = 16
    scale: str = "none"
    basis: str = "none"
    clip: float | None = None
    feedback: bool = False
    wide: bool = False

    def bytes_per_token(self, size: int) -> float:
        parameters = {"page": size / 16, "page32": size / 8, "token": 4}.get(self.scale, 0)
        return size * self.bits / 8 + parameters


@dataclass(frozen=True)
class Scheme:
    """policy: None when even the newest token is read back quantized, as in engines without fp16 pages. subtract: K is
    stored less its projection's bias, which comes back when it is read; one_remedy: and in no other basis then, as
    `make engine` builds such a layer. exact: nothing is rounded, not even to fp16. instead: the schemes of layers that
    differ."""

    name: str
    k: TensorScheme = TensorScheme()
    v: TensorScheme = TensorScheme()
    policy: PagePolicy | None = PAGES
    subtract: bool = False
    one_remedy: bool = False
    exact: bool = False
    instead: dict[int, Scheme] = field(default_factory=dict)

    def bytes_per_token(self, size: int) -> float:
        """Bytes of a sealed token of one KV head, K and V."""
        return self.k.bytes_per_token(size) + self.v.bytes_per_token(size)

    def viewer(self, statistics: list[LayerStatistics]) -> Callable[[Layer], View]:
        """The function that turns what a layer computed into what its queries see."""
        others = {index: scheme.viewer(statistics) for index, scheme in self.instead.items()}

        def view(layer: Layer) -> View:
            if layer.index in others:
                return others[layer.index](layer)
            if self.exact:
                return View(layer.q, layer.k, layer.v, layer.k, layer.v)
            known = statistics[layer.index]
            k_basis, v_basis = known.basis("k", self.k.basis), known.basis("v", self.v.basis)
            q, k, v, undo, bias = layer.q, layer.k, layer.v, None, None
            if self.subtract and known.bias is not None:
                bias = known.bias[:, : k.shape[2]]
                k = k - bias
                k_basis = None if self.one_remedy else k_basis
            if k_basis is not None:
                q = _times(q, k_basis.reader.repeat_interleave(q.shape[1] // k.shape[1], 0))
                k = _times(k, k_basis.forward)
                bias = None if bias is None else bias @ k_basis.forward.mT
            if v_basis is not None:
                v, undo = _times(v, v_basis.forward), v_basis.reader.mT
            k, v = k.half().float(), v.half().float()
            k_far, v_far = read_back(k, self.k, "k", known), read_back(v, self.v, "v", known)
            if bias is not None:
                k, k_far = k + bias, k_far + bias
            return View(q, k, v, k_far, v_far, undo)

        return view


def read_back(x: torch.Tensor, scheme: TensorScheme, tensor: str, known: LayerStatistics) -> torch.Tensor:
    """What a far query sees of x [batch, heads, tokens, D]; tokens behind the last full page come back as they are."""
    if scheme.scale == "none":
        return x
    if scheme.scale == "fp8":
        step = known.stored(tensor, scheme.basis).abs().max() / 448
        return (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    if scheme.scale == "static":
        return _static(x, scheme, known.stored(tensor, scheme.basis))
    if scheme.scale == "token":
        return _affine(x, scheme.bits, -1)
    rows = 32 if scheme.scale == "page32" else PAGE_TOKENS
    full = x.shape[2] // rows * rows
    pages = x[:, :, :full].unflatten(2, (-1, rows))
    sealed = _with_feedback(pages, scheme, known) if scheme.feedback else _affine(pages, scheme.bits, -2)
    if scheme.wide and known.biased is not None:
        sealed = torch.where(known.biased[:, None, None], _affine(pages, 8, -2), sealed)
    return torch.cat((sealed.flatten(2, 3), x[:, :, full:]), 2)


def _affine(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    if bits in (4, 8):
        kind = ScaleKind.PAGE_CHANNEL if dim == -2 else ScaleKind.TOKEN
        return round_trip(x.half(), TensorFormat(bits, kind))
    low, high = x.aminmax(dim=dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-6)
    return ((x - low) / step).round() * step + low


def _static(x: torch.Tensor, scheme: TensorScheme, samples: torch.Tensor) -> torch.Tensor:
    if scheme.clip is None:
        low, high = samples.aminmax(dim=1, keepdim=True)
    else:
        mean, deviation = samples.mean(1, keepdim=True), samples.std(1, keepdim=True)
        low, high = mean - scheme.clip * deviation, mean + scheme.clip * deviation
    levels = 2**scheme.bits - 1
    step = ((high - low) / levels).clamp_min(DEAD_SCALE)
    return ((x - low) / step).round().clamp(0, levels) * step + low


def _with_feedback(pages: torch.Tensor, scheme: TensorScheme, known: LayerStatistics) -> torch.Tensor:
    """Channel by channel; what rounding one moves the scores by is taken back in the channels still to come (GPTQ)."""
    basis, moment = known.basis("k", scheme.basis), known.reader_moment("k")
    if basis is not None:
        moment = basis.reader.double() @ moment @ basis.reader.double().mT
    low, high = pages.aminmax(dim=-2, keepdim=True)
    step = ((high - low) / (2**scheme.bits - 1)).clamp_min(1e-6)
    size = pages.shape[-1]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    damped = moment + 1e-2 * mean * torch.eye(size, dtype=moment.dtype, device=moment.device)
    importance = damped.diagonal(dim1=-2, dim2=-1) * step.double().square().mean((0, 2, 3))
    out = torch.empty_like(pages)
    for head in range(pages.shape[1]):
        order = importance[head].argsort(descending=True)
        upper = torch.linalg.cholesky(torch.linalg.inv(damped[head][order][:, order])).mT.float()
        left = pages[:, head][..., order].clone()
        a, s = low[:, head][..., order], step[:, head][..., order]
        for c in range(size):
            code = ((left[..., c] - a[..., c]) / s[..., c]).round().clamp(0, 2**scheme.bits - 1)
            value = code * s[..., c] + a[..., c]
            error = (left[..., c] - value) / upper[c, c]
            left[..., c + 1 :] -= error[..., None] * upper[c, c + 1 :]
            out[:, head, ..., order[c]] = value
    return out


def _times(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhtd,hed->bhte", x, matrix)


def _tensor(text: str) -> TensorScheme:
    """For example "4 page balanced" or "4 static hadamard clip=3"."""
    bits, scale, *rest = text.split()
    scheme = TensorScheme(int(bits), scale)
    for word in rest:
        if word == "feedback":
            scheme = replace(scheme, feedback=True)
        elif word == "wide":
            scheme = replace(scheme, wide=True)
        elif word.startswith("clip="):
            scheme = replace(scheme, clip=float(word[5:]))
        else:
            scheme = replace(scheme, basis=word)
    return scheme


def scheme(name: str, k: str, v: str, policy: PagePolicy | None = PAGES) -> Scheme:
    """A scheme from words: bits, scale, then a basis and options in any order."""
    return Scheme(name, _tensor(k), _tensor(v), policy)


EXACT = replace(Scheme("fp32"), exact=True)
FP16 = scheme("fp16", "16 none", "16 none")
