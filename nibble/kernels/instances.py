"""The instances of the kernels that exist, and how a launch of one is planned.

Group size, lengths, page policy and scale kinds are values at run time; head size, bits and whether a group has more
than 8 query heads are fixed when an instance is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

from nibble.errors import NibbleError
from nibble.formats import FORMATS, KVFormat, ScaleKind, SealedPageLayout
from nibble.kernels.compiler import KernelSource
from nibble.kernels.layout import token_tiles

KERNEL_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BIT_PAIRS = ((4, 4), (8, 8), (8, 4), (16, 16))
MAX_GROUP = 16
UNIT_TABLE = 128
SPLIT_QUERIES = 1
MAX_STAGES = 32
SCALE_KINDS = {ScaleKind.NONE: 0, ScaleKind.PAGE_CHANNEL: 1, ScaleKind.TOKEN: 2, ScaleKind.STATIC_CHANNEL: 3}
SHARED_LIMIT = {"sm_80": 166912, "sm_89": 101376, "sm_90a": 232448, "sm_100a": 232448, "sm_120a": 101376}


@dataclass(frozen=True)
class DecodeInstance:
    """One compiled decode kernel: head size, bits of K and V, and query heads of a group in units of 8."""

    head_dim: int
    k_bits: int
    v_bits: int
    head_tiles: int

    @classmethod
    def for_shape(cls, fmt: KVFormat, head_dim: int, group: int) -> DecodeInstance:
        """The instance that serves a shape; NibbleError names what is unsupported."""
        if head_dim not in KERNEL_HEAD_DIMS:
            raise NibbleError(f"decode kernel, head size: got {head_dim}, allowed {KERNEL_HEAD_DIMS}")
        if not 1 <= group <= MAX_GROUP:
            raise NibbleError(f"decode kernel, query heads per KV head: got {group}, allowed 1 to {MAX_GROUP}")
        if (fmt.k.bits, fmt.v.bits) not in BIT_PAIRS:
            raise NibbleError(f"decode kernel, bits of K and V: got {fmt.k.bits}, {fmt.v.bits}, allowed {BIT_PAIRS}")
        if fmt.v.scale is ScaleKind.PAGE_CHANNEL:
            raise NibbleError("decode kernel, V scale: got 'page_channel', allowed 'token' or 'static_channel'")
        return cls(head_dim, fmt.k.bits, fmt.v.bits, 1 if group <= 8 else 2)

    @property
    def is_coded(self) -> bool:
        return self.k_bits < 16

    @property
    def token_tiles(self) -> int:
        fmt = next(f for f in FORMATS.values() if (f.k.bits, f.v.bits) == (self.k_bits, self.v_bits))
        return token_tiles(fmt, self.head_dim)

    @property
    def max_consumers(self) -> int:
        """Consumer warps at most: with the other two, 12 or 8 warps share the register file."""
        return 10 if self.head_tiles == 1 else 6

    @property
    def max_registers(self) -> int:
        return 168 if self.head_tiles == 1 else 255

    @property
    def fixed_shared_bytes(self) -> int:
        """`struct Shared` of cuda/shared.cuh, checked there."""
        chunks = (self.head_dim // 16 + 1) // 2
        query = (3 if self.is_coded else 1) * self.head_tiles * chunks * 512 + self.head_tiles * 128
        barriers = 8 * (2 * MAX_STAGES + 4)
        states = self.max_consumers * self.head_tiles * 128
        return UNIT_TABLE * 32 + barriers + MAX_STAGES * 16 + 2 * query + states

    @property
    def source(self) -> KernelSource:
        defines = {
            "HEAD_DIM": self.head_dim,
            "K_BITS": self.k_bits,
            "V_BITS": self.v_bits,
            "HEAD_TILES": self.head_tiles,
            "TOKEN_TILES": self.token_tiles,
            "MAX_CONSUMERS": self.max_consumers,
            "SHARED_BYTES": self.fixed_shared_bytes,
            "SPLIT_QUERIES": SPLIT_QUERIES,
        }
        return KernelSource("decode.cu", tuple(defines.items()))


@dataclass(frozen=True)
class DecodePlan:
    """Warps, ring and shared memory of a launch."""

    consumers: int
    stages: int
    stage_bytes: int
    shared_bytes: int


def plan_decode(instance: DecodeInstance, fmt: KVFormat, batch: int, shared_limit: int) -> DecodePlan:
    """As many consumer warps as get one and a quarter stages each out of the shared memory."""
    stage_bytes = _stage_bytes(instance, fmt)
    for consumers in range(instance.max_consumers, 0, -1):
        before = _round_up(instance.fixed_shared_bytes) + consumers * instance.head_tiles * 32 * (instance.head_dim + 4)
        before = _round_up(before + 4 * (batch + 1))
        stages = min(MAX_STAGES, (shared_limit - before) // stage_bytes)
        if stages >= 1.25 * consumers:
            return DecodePlan(consumers, stages, stage_bytes, before + stages * stage_bytes)
    raise NibbleError(
        f"decode kernel, batch of {batch} at head size {instance.head_dim}: does not fit {shared_limit} bytes of shared "
        "memory; use smaller batches"
    )


def combine_source(head_dim: int) -> KernelSource:
    """The kernel that combines splits; it knows nothing of the cache."""
    unused = ("K_BITS", 16), ("V_BITS", 16), ("HEAD_TILES", 1), ("TOKEN_TILES", 1), ("MAX_CONSUMERS", 1)
    return KernelSource("combine.cu", (("HEAD_DIM", head_dim), *unused))


def all_decode_instances() -> list[DecodeInstance]:
    return [DecodeInstance(d, k, v, tiles) for d in KERNEL_HEAD_DIMS for k, v in BIT_PAIRS for tiles in (1, 2)]


def _stage_bytes(instance: DecodeInstance, fmt: KVFormat) -> int:
    half_item = 64 * instance.head_dim  # 16 tokens of K and of V
    layout = SealedPageLayout(fmt, instance.head_dim)
    parameters = layout.page_bytes - layout.v_codes.stop
    item = layout.v_codes.stop * instance.token_tiles // 4 + parameters if instance.is_coded else 0
    return _round_up(max(half_item, item))


def _round_up(size: int) -> int:
    return (size + 127) // 128 * 128
