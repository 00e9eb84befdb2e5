"""The kernels that the attention backend calls, behind one interface: ours on a GPU, the oracle in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nibble.formats import KVFormat
from nibble.reference import LayerScales
from nibble.visibility import PagePolicy


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer and how they are read.

    open_pool: fp16 [slots, 2, kv_heads, 64, head_dim]. sealed_pool: uint8 [pages, kv_heads, page_bytes], contiguous.
    """

    open_pool: torch.Tensor
    sealed_pool: torch.Tensor
    fmt: KVFormat
    policy: PagePolicy
    scales: LayerScales


class PageKernels(Protocol):
    """Everything runs on the current stream. q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]."""

    def append(self, k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slots: torch.Tensor) -> None:
        """Write new tokens into open pages. slots: int32 [tokens], slot * 64 + place, -1: nowhere."""

    def seal(self, pages: LayerPages, seal_from: torch.Tensor, seal_to: torch.Tensor) -> None:
        """Quantize open pages into sealed ones. Both int32 [count], -1: nothing to do."""

    def workspace(self, batch: int, q_heads: int, kv_heads: int, head_dim: int, max_pages: int) -> Any:
        """Scratch memory of `decode`, made once for the largest batch."""

    def decode(
        self, q: torch.Tensor, pages: LayerPages, table: torch.Tensor, lengths: torch.Tensor, scale: float, work: Any
    ) -> torch.Tensor:
        """One query a sequence. table: int32 [batch, max_pages], slot or sealed page by the visibility rule."""

    def plan_prefill(self, new: Sequence[int], lengths: Sequence[int], policy: PagePolicy) -> Any:
        """The plan of a step's chunks, shared by all layers. new, lengths: tokens of each sequence."""

    def prefill(
        self, q: torch.Tensor, pages: LayerPages, tables: tuple[torch.Tensor, torch.Tensor], plan: Any, scale: float
    ) -> torch.Tensor:
        """Chunks of several queries. tables: open and sealed, int32 [sequences, max_pages], -1: not there."""


class GpuKernels:
    """`nibble.kernels`, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def append(self, k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slots: torch.Tensor) -> None:
        from nibble.kernels.seal import append_tokens

        append_tokens(k, v, pages.open_pool, slots)

    def seal(self, pages: LayerPages, seal_from: torch.Tensor, seal_to: torch.Tensor) -> None:
        from nibble.kernels.seal import seal_pages_on_gpu

        seal_pages_on_gpu(pages.open_pool, pages.sealed_pool, seal_from, seal_to, fmt=pages.fmt, scales=pages.scales)

    def workspace(self, batch: int, q_heads: int, kv_heads: int, head_dim: int, max_pages: int) -> Any:
        from nibble.kernels.decode import DecodeWorkspace

        return DecodeWorkspace.allocate(batch, q_heads, kv_heads, head_dim, max_pages, self._device)

    def decode(
        self, q: torch.Tensor, pages: LayerPages, table: torch.Tensor, lengths: torch.Tensor, scale: float, work: Any
    ) -> torch.Tensor:
        from nibble.kernels.decode import decode_attention

        out, _ = decode_attention(
            q, pages.open_pool, pages.sealed_pool, table, lengths,
            fmt=pages.fmt, policy=pages.policy, softmax_scale=scale, workspace=work, scales=pages.scales,
        )  # fmt: skip
        return out

    def plan_prefill(self, new: Sequence[int], lengths: Sequence[int], policy: PagePolicy) -> Any:
        from nibble.kernels.prefill_plan import plan_prefill

        return plan_prefill(new, lengths, policy, device=self._device)

    def prefill(
        self, q: torch.Tensor, pages: LayerPages, tables: tuple[torch.Tensor, torch.Tensor], plan: Any, scale: float
    ) -> torch.Tensor:
        from nibble.kernels.prefill import PrefillCache, prefill_attention

        cache = PrefillCache(pages.fmt, pages.open_pool, pages.sealed_pool, *tables, pages.scales)
        return prefill_attention(q, cache, plan, softmax_scale=scale).out
