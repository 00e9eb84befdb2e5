"""The CPU backend: vectorised PyTorch over the same pages that the CUDA kernels read.

Sealed pages are unpacked a span at a time, joined with the open pages the span reads, and handed to torch's attention
with the visibility rule as its mask.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from nibble.formats import PAGE_TOKENS
from nibble.packing import seal_pages, unseal_pages
from nibble.runtime.cache import CacheStorage
from nibble.runtime.step import Span, Step


class CpuBackend:
    def __init__(self, storage: CacheStorage) -> None:
        self.storage = storage

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        pages = self.storage.open[layer]
        page, offset = step.open_page_of_token, step.positions[0] % PAGE_TOKENS
        pages[page, 0, :, offset] = k.half()
        pages[page, 1, :, offset] = v.half()

    def seal(self, layer: int, step: Step) -> None:
        if not step.seal_pairs:
            return
        storage, scales = self.storage, self.storage.scales(layer)
        k, v = storage.open[layer][step.seal_from].unbind(1)
        storage.sealed[layer][step.seal_to] = seal_pages(k, v, storage.spec.formats[layer], scales.k, scales.v)

    def attend(
        self, layer: int, q: torch.Tensor, step: Step, softmax_scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        return torch.cat([self._attend(layer, q, span, softmax_scale, sliding_window) for span in step.spans])

    def _attend(
        self, layer: int, q: torch.Tensor, span: Span, softmax_scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        k, v = self._read(layer, span, q.dtype)
        queries = q[span.start : span.start + span.length].transpose(0, 1)
        out = scaled_dot_product_attention(
            queries[None], k[None], v[None], span.mask(sliding_window), scale=softmax_scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _read(self, layer: int, span: Span, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that the span reads, [kv_heads, keys, head_dim]: sealed pages, then open ones."""
        scales = self.storage.scales(layer)
        opened = self.storage.open[layer][span.open_ids].to(dtype).unbind(1)
        if not len(span.sealed_ids):
            k, v = opened
        else:
            sealed = self.storage.sealed[layer][span.sealed_ids]
            unsealed = unseal_pages(sealed, self.storage.layouts[layer], scales.k, scales.v)
            k, v = (torch.cat((far.to(dtype), near)) for far, near in zip(unsealed, opened, strict=True))
        keys = len(span.key_positions)
        return k.transpose(0, 1).flatten(1, 2)[:, :keys], v.transpose(0, 1).flatten(1, 2)[:, :keys]
