"""KV formats: how the K and V of one layer are stored in a sealed page, and where each byte of that page lies.

A page holds `PAGE_TOKENS` tokens of one layer. While it is open it is fp16 and has the shape of `OPEN_PAGE_LAYOUT`.
Sealed, it is one contiguous run of bytes for each KV head, so that a kernel fetches codes and scales in one copy:

    | K codes | V codes | K parameters | V parameters |
      64·D·k/8  64·D·v/8  scale, zero    scale, zero      (k, v: bits; parameters fp16)

    >>> int4 = KVFormat.named("int4")
    >>> SealedPageLayout(int4, head_dim=128).bytes_per_token
    140.0
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nibble.errors import NibbleError

PAGE_TOKENS = 64
PARAMETER_BYTES = 2  # scales and zero points are fp16
HEAD_DIMS = range(16, 257, 16)  # head sizes that the formats and kernels are made for
OPEN_PAGE_LAYOUT = "[page, K or V, kv_head, token in page, channel] fp16"


class ScaleKind(StrEnum):
    """What shares one scale and zero point."""

    NONE = "none"  # 16-bit values, nothing to scale
    PAGE_CHANNEL = "page_channel"  # a channel of a page: 64 tokens (K's outliers live in channels)
    TOKEN = "token"  # a token of a head: all its channels
    STATIC_CHANNEL = "static_channel"  # a channel of the layer for the whole run, from calibration


@dataclass(frozen=True)
class TensorFormat:
    """How K or V of a sealed page is stored.

    bits: 4, 8 or 16. scale: what shares a scale. rotated: the tensor reaches the cache times a Hadamard matrix over
    its channels (V only: the rotation is folded into W_v and W_o).
    """

    bits: int
    scale: ScaleKind
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16):
            raise NibbleError(f"KV bits: got {self.bits}, allowed 4, 8 or 16")
        if (self.bits == 16) != (self.scale is ScaleKind.NONE):
            raise NibbleError(
                f"KV scale: got {self.scale.value!r} with {self.bits} bits; 16 bits takes 'none', 4 and 8 bits take "
                "'page_channel', 'token' or 'static_channel'"
            )

    @property
    def levels(self) -> int:
        """The largest code, 2^bits - 1."""
        return (1 << self.bits) - 1

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of a page's codes for one KV head."""
        return PAGE_TOKENS * head_dim * self.bits // 8

    def parameter_count(self, head_dim: int) -> int:
        """How many scales (and as many zero points) one page of one KV head carries."""
        return {ScaleKind.PAGE_CHANNEL: head_dim, ScaleKind.TOKEN: PAGE_TOKENS}.get(self.scale, 0)


@dataclass(frozen=True)
class KVFormat:
    """The formats of K and V of one layer. Layers of one model may differ."""

    name: str
    k: TensorFormat
    v: TensorFormat

    def __post_init__(self) -> None:
        if self.k.rotated:
            raise NibbleError(f"KV format {self.name}: K can't be rotated; allowed: rotate V only")

    @classmethod
    def named(cls, name: str) -> KVFormat:
        """The shipped format of that name; NibbleError lists the valid names."""
        if name not in FORMATS:
            raise NibbleError(f"KV format: got {name!r}, allowed {', '.join(FORMATS)}")
        return FORMATS[name]

    @property
    def is_fp16(self) -> bool:
        return self.k.bits == 16 and self.v.bits == 16

    @property
    def needs_calibration(self) -> bool:
        """True when a scale comes from the calibration file and not from the page itself."""
        return ScaleKind.STATIC_CHANNEL in (self.k.scale, self.v.scale)


_FP16 = TensorFormat(16, ScaleKind.NONE)
FORMATS: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        KVFormat("fp16", _FP16, _FP16),
        KVFormat("int8", TensorFormat(8, ScaleKind.TOKEN), TensorFormat(8, ScaleKind.TOKEN)),
        KVFormat("k8v4", TensorFormat(8, ScaleKind.PAGE_CHANNEL), TensorFormat(4, ScaleKind.TOKEN, rotated=True)),
        KVFormat("int4", TensorFormat(4, ScaleKind.PAGE_CHANNEL), TensorFormat(4, ScaleKind.TOKEN, rotated=True)),
        KVFormat("int8-static", TensorFormat(8, ScaleKind.STATIC_CHANNEL), TensorFormat(8, ScaleKind.STATIC_CHANNEL)),
        KVFormat("int4-static", TensorFormat(4, ScaleKind.STATIC_CHANNEL), TensorFormat(4, ScaleKind.STATIC_CHANNEL)),
    )
}
# What the pre-flight gives a layer of int8 in which one channel of K would set the scale of all: no recipe asks for it.
INT8_PAGE = KVFormat("int8-page", TensorFormat(8, ScaleKind.PAGE_CHANNEL), TensorFormat(8, ScaleKind.TOKEN))


@dataclass(frozen=True)
class SealedPageLayout:
    """Byte offsets inside the sealed page of one KV head."""

    fmt: KVFormat
    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise NibbleError(
                f"head size: got {self.head_dim}, allowed multiples of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; "
                "serve this model with KV_FALLBACK=fp16 on another host"
            )

    @property
    def k_codes(self) -> slice:
        return slice(0, self.fmt.k.code_bytes(self.head_dim))

    @property
    def v_codes(self) -> slice:
        return _following(self.k_codes, self.fmt.v.code_bytes(self.head_dim))

    @property
    def k_parameters(self) -> slice:
        """fp16 scales, then as many fp16 zero points."""
        return _following(self.v_codes, 2 * PARAMETER_BYTES * self.fmt.k.parameter_count(self.head_dim))

    @property
    def v_parameters(self) -> slice:
        return _following(self.k_parameters, 2 * PARAMETER_BYTES * self.fmt.v.parameter_count(self.head_dim))

    @property
    def page_bytes(self) -> int:
        """Bytes of one sealed page of one KV head (K and V, codes and parameters)."""
        return self.v_parameters.stop

    @property
    def bytes_per_token(self) -> float:
        """Bytes per sealed token and KV head, K and V together."""
        return self.page_bytes / PAGE_TOKENS


def open_page_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one open (fp16) page of one layer."""
    return 2 * num_kv_heads * PAGE_TOKENS * head_dim * 2


def _following(before: slice, length: int) -> slice:
    return slice(before.stop, before.stop + length)
