"""The storage of the paged cache: for every layer an array of open pages and an array of sealed ones.

    open[layer]    fp16  [open pages, K or V, kv_head, token in page, head_dim]
    sealed[layer]  uint8 [sealed pages, kv_head, page_bytes]      laid out as SealedPageLayout says

A page number means the same page in every layer. Layers may have different formats, so their sealed pages may differ in
size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout, open_page_bytes
from nibble.key_transform import KeyTransform
from nibble.reference import LayerScales
from nibble.runtime.request import EngineLimits
from nibble.visibility import PagePolicy


@dataclass(frozen=True)
class CacheSpec:
    """What a cache must hold: one format for each layer, in one page rule.

    scales: for layers with static formats. key_transforms: for layers whose K is not stored as it is.
    """

    formats: tuple[KVFormat, ...]
    num_kv_heads: int
    head_dim: int
    policy: PagePolicy
    scales: dict[int, LayerScales] = field(default_factory=dict)
    key_transforms: dict[int, KeyTransform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer, fmt in enumerate(self.formats):
            scales = self.scales.get(layer, LayerScales())
            if fmt.needs_calibration and (scales.k is None or scales.v is None):
                raise NibbleError(
                    f"layer {layer}: {fmt.name} needs calibrated scales; run `make calibrate`, `make engine`"
                )

    @property
    def layouts(self) -> list[SealedPageLayout]:
        return [SealedPageLayout(fmt, self.head_dim) for fmt in self.formats]

    @property
    def rotated_layers(self) -> frozenset[int]:
        """Layers that take V rotated (nibble.rotation)."""
        asked = {layer for layer, fmt in enumerate(self.formats) if fmt.v.rotated}
        return frozenset(asked | {layer for layer, each in self.key_transforms.items() if each.rotate_value})

    @property
    def sealed_page_bytes(self) -> int:
        """Bytes of one sealed page, all layers and heads."""
        return sum(layout.page_bytes for layout in self.layouts) * self.num_kv_heads

    @property
    def open_page_bytes(self) -> int:
        """Bytes of one open page, all layers and heads."""
        return len(self.formats) * open_page_bytes(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class PoolSizes:
    """Pages of the two pools."""

    open_pages: int
    sealed_pages: int

    @classmethod
    def for_limits(cls, spec: CacheSpec, limits: EngineLimits, free_bytes: int | None = None) -> PoolSizes:
        """Pages for what `limits` lets run at once: open pages for its newest tokens, sealed pages for the rest.

        `pool_mb` says how much there is instead; without it, no more than fits into `free_bytes`. NibbleError when one
        sequence of `max_context` tokens does not fit.
        """
        pages_in_context = -(-limits.max_context // PAGE_TOKENS)
        kept_open = min(pages_in_context, spec.policy.sink_pages + spec.policy.recent_pages + 2)
        open_pages = limits.max_running * kept_open + limits.step_tokens // PAGE_TOKENS + 1
        roomy = cls(open_pages, limits.max_running * pages_in_context)
        given = free_bytes if limits.pool_mb is None else limits.pool_mb * 2**20
        if given is None or (limits.pool_mb is None and roomy.bytes(spec) <= given):
            return roomy
        least = cls(open_pages, pages_in_context).bytes(spec)
        if given < least or (free_bytes is not None and given > free_bytes):
            most = "or more" if free_bytes is None else f"or more, and {max(0, free_bytes) // 2**20} are free"
            raise NibbleError(
                f"pool_mb: got {given // 2**20}, allowed {-(-least // 2**20)} {most}, for max_context "
                f"{limits.max_context} and max_running {limits.max_running}; lower those or raise the pool"
            )
        return cls(open_pages, (given - open_pages * spec.open_page_bytes) // spec.sealed_page_bytes)

    def describe(self, spec: CacheSpec) -> str:
        """The sizes in words."""
        mib = self.bytes(spec) / 2**20
        return f"{self.open_pages} open and {self.sealed_pages} sealed pages of {PAGE_TOKENS} tokens, {mib:.0f} MiB"

    def bytes(self, spec: CacheSpec) -> int:
        return self.open_pages * spec.open_page_bytes + self.sealed_pages * spec.sealed_page_bytes


class CacheStorage:
    """The arrays themselves."""

    def __init__(self, spec: CacheSpec, sizes: PoolSizes, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.layouts = spec.layouts
        open_shape = (sizes.open_pages, 2, spec.num_kv_heads, PAGE_TOKENS, spec.head_dim)
        self.open = [torch.empty(open_shape, dtype=torch.float16, device=device) for _ in spec.formats]
        self.sealed = [
            torch.empty(sizes.sealed_pages, spec.num_kv_heads, layout.page_bytes, dtype=torch.uint8, device=device)
            for layout in self.layouts
        ]

    def scales(self, layer: int) -> LayerScales:
        return self.spec.scales.get(layer, LayerScales())

    def key_offset(self, layer: int, positions: torch.Tensor) -> torch.Tensor | None:
        """What stored K lacks at `positions`, float32 [tokens, kv_heads, head_dim]; None for layers stored whole."""
        transform = self.spec.key_transforms.get(layer)
        return None if transform is None else transform.offset(positions)
