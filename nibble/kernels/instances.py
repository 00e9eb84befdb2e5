"""The instances of the kernels that exist, and how a launch of one is planned.

Group size, lengths, page policy and scale kinds are values at run time; head size, bits and whether a group has more
than 8 query heads are fixed when an instance is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from nibble.errors import NibbleError
from nibble.formats import FORMATS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.kernels.compiler import KernelSource
from nibble.kernels.layout import token_tiles

KERNEL_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BIT_PAIRS = ((4, 4), (8, 8), (8, 4), (16, 16))
MAX_GROUP = 16
MAX_BATCH = 1024
UNIT_TABLE = 128
MAX_STAGES = 32
MERGERS = 2  # warps that merge consumers' states
COMBINE_ROWS = 2  # rows of threads that combine the splits of a head, a thread for eight channels
SPILL_LIMIT = 112  # bytes; instances at their register limit spill a few values, see docs/kernels.md
SCALE_KINDS = {ScaleKind.NONE: 0, ScaleKind.PAGE_CHANNEL: 1, ScaleKind.TOKEN: 2, ScaleKind.STATIC_CHANNEL: 3}
# Shared memory of a multiprocessor; a block may have all of it but 1 KB.
SHARED_BYTES = {"sm_80": 167936, "sm_89": 102400, "sm_90a": 233472, "sm_100a": 233472, "sm_120a": 102400}


@dataclass(frozen=True)
class DecodeInstance:
    """One compiled decode kernel: head size, bits of K and V, and query heads of a group in units of 8."""

    head_dim: int
    k: TensorFormat
    v: TensorFormat
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
        return cls(head_dim, replace(fmt.k, rotated=False), replace(fmt.v, rotated=False), 1 if group <= 8 else 2)

    @property
    def fmt(self) -> KVFormat:
        return KVFormat("kernel", self.k, self.v)

    @property
    def max_warps(self) -> int:
        """Warps of a block that share the register file, in fours."""
        return 16 if self.head_dim <= 128 and self.head_tiles == 1 else 12

    @property
    def max_consumers(self) -> int:
        """The warps that the producer, the query warp and the mergers leave."""
        return self.max_warps - 2 - MERGERS

    def consumers_on(self, architecture: str) -> int:
        """Fewer where helpers cannot give them registers, as cuda/config.cuh has it."""
        can_shift = architecture in ("sm_90a", "sm_100a")
        return self.max_consumers if can_shift or self.head_tiles == 1 or self.head_dim <= 96 else 4

    @property
    def half_item_tokens(self) -> int:
        """Tokens of a work item of an fp16 page, as cuda/config.cuh has it: no larger than an item of a sealed page."""
        return 8 if self.head_dim > 192 and not self.fmt.is_fp16 else 16

    def registers_on(self, architecture: str) -> int:
        """What a thread may use at launch."""
        return min(255, 65536 // (32 * (self.consumers_on(architecture) + 2 + MERGERS)) // 8 * 8)

    @property
    def fixed_shared_bytes(self) -> int:
        """`struct Shared` of cuda/shared.cuh, checked there."""
        chunks = (self.head_dim // 16 + 1) // 2
        sets = 4 - self.head_tiles if self.k.scale is ScaleKind.STATIC_CHANNEL else 1
        query = sets * self.head_tiles * chunks * 512 + self.head_tiles * 128
        barriers = 8 * (2 * MAX_STAGES + 8)  # and the count of listed units
        states = (2 * self.max_consumers + 1) * self.head_tiles * 32 + 4 * MAX_STAGES
        return UNIT_TABLE * 32 + barriers + MAX_STAGES * 16 + 2 * query + states

    @property
    def merge_bytes(self) -> int:
        """What a consumer leaves to be merged: a head's numbers and 16 bytes, in fp32, for sixteen heads in fp16."""
        return 8 * (4 * self.head_dim + 16) if self.head_tiles == 1 else 16 * (2 * self.head_dim + 16)

    @property
    def source(self) -> KernelSource:
        defines = {
            "HEAD_DIM": self.head_dim,
            "K_BITS": self.k.bits,
            "V_BITS": self.v.bits,
            "K_SCALE": SCALE_KINDS[self.k.scale],
            "V_SCALE": SCALE_KINDS[self.v.scale],
            "HEAD_TILES": self.head_tiles,
            "TOKEN_TILES": token_tiles(self.fmt, self.head_dim),
            "MAX_CONSUMERS": self.max_consumers,
            "MERGERS": MERGERS,
            "SHARED_BYTES": self.fixed_shared_bytes,
        }
        return KernelSource("decode.cu", tuple(defines.items()))


@dataclass(frozen=True)
class DecodePlan:
    """Consumers, ring and shared memory of a block; one block runs on a multiprocessor."""

    consumers: int
    stages: int
    stage_bytes: int
    shared_bytes: int
    threads: int


@lru_cache
def plan_decode(instance: DecodeInstance, architecture: str) -> DecodePlan:
    """As many consumers as leave room for a ring of a third more stages than consumers.

    It does not depend on the batch, since which consumer takes which page decides the order of sums.
    """
    limit = SHARED_BYTES[architecture] - 1024
    stage_bytes = _stage_bytes(instance)
    for consumers in range(instance.consumers_on(architecture), 0, -1):
        before = _round_up(instance.fixed_shared_bytes) + consumers * instance.merge_bytes
        before = _round_up(before + 4 * (MAX_BATCH + 1))
        stages = min(MAX_STAGES, (limit - before) // stage_bytes)
        if 3 * stages >= 4 * consumers:
            threads = 32 * (consumers + 2 + MERGERS)
            return DecodePlan(consumers, stages, stage_bytes, before + stages * stage_bytes, threads)
    raise NibbleError(
        f"decode kernel at head size {instance.head_dim}: does not fit the shared memory of {architecture}"
    )


def combine_source(head_dim: int) -> KernelSource:
    """The kernel that combines splits; it knows nothing of the cache."""
    unused = ("K_BITS", 16), ("V_BITS", 16), ("K_SCALE", 0), ("V_SCALE", 0)
    ones = ("HEAD_TILES", 1), ("TOKEN_TILES", 1), ("MAX_CONSUMERS", 1), ("MERGERS", 1)
    return KernelSource("combine.cu", (("HEAD_DIM", head_dim), *unused, *ones))


def seal_source(fmt: KVFormat, head_dim: int) -> KernelSource:
    """The kernel that seals pages of a format."""
    DecodeInstance.for_shape(fmt, head_dim, group=1)  # says what is unsupported
    defines = {
        "HEAD_DIM": head_dim,
        "K_BITS": fmt.k.bits,
        "V_BITS": fmt.v.bits,
        "K_SCALE": SCALE_KINDS[fmt.k.scale],
        "V_SCALE": SCALE_KINDS[fmt.v.scale],
        "TOKEN_TILES": token_tiles(fmt, head_dim),
    }
    unused = ("HEAD_TILES", 1), ("MAX_CONSUMERS", 1), ("MERGERS", 1)
    return KernelSource("seal.cu", (*defines.items(), *unused))


def seal_shared_bytes(fmt: KVFormat, head_dim: int) -> int:
    """Rows of K and V of a page, and all parameters."""
    if fmt.is_fp16:
        return 0
    layout = SealedPageLayout(fmt, head_dim)
    return 2 * 64 * 2 * head_dim + layout.page_bytes - layout.v_codes.stop


def all_sources(architecture: str) -> list[tuple[KernelSource, int]]:
    """Every kernel of this package with the registers that its threads may use."""
    decode = [(instance.source, instance.registers_on(architecture)) for instance in all_decode_instances()]
    seal = [(seal_source(fmt, head_dim), 255) for fmt in FORMATS.values() for head_dim in KERNEL_HEAD_DIMS]
    combine = [(combine_source(head_dim), 255) for head_dim in KERNEL_HEAD_DIMS]
    return [*decode, *combine, *seal, (KernelSource("append.cu"), 255), (KernelSource("read.cu"), 255)]


def all_decode_instances() -> list[DecodeInstance]:
    """Every instance of a shipped format."""
    return [
        DecodeInstance.for_shape(fmt, head_dim, group)
        for head_dim in KERNEL_HEAD_DIMS
        for fmt in FORMATS.values()
        for group in (1, MAX_GROUP)
    ]


def _stage_bytes(instance: DecodeInstance) -> int:
    half_item = 4 * instance.head_dim * instance.half_item_tokens  # K and V
    if instance.fmt.is_fp16:
        return half_item
    layout = SealedPageLayout(instance.fmt, instance.head_dim)
    codes = layout.v_codes.stop * token_tiles(instance.fmt, instance.head_dim) // 4
    return _round_up(max(half_item, codes + layout.page_bytes - layout.v_codes.stop))


def _round_up(size: int) -> int:
    return (size + 127) // 128 * 128
