"""The CPU backend: vectorised PyTorch over the same pages that the CUDA kernels read.

The sealed pages of a step are unpacked together, joined with the open pages that each span reads, and handed to torch's
attention with the visibility rule as its mask. The arithmetic is fp32, whatever the model's type.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from nibble.formats import PAGE_TOKENS
from nibble.packing import seal_pages, unseal_into
from nibble.runtime.cache import CacheStorage
from nibble.runtime.step import Step


class CpuBackend:
    def __init__(self, storage: CacheStorage) -> None:
        self.storage = storage

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        pages = self.storage.open[layer]
        page, offset = step.open_page_of_token, step.positions[0] % PAGE_TOKENS
        bias = self.storage.key_offset(layer, step.positions[0])
        pages[page, 0, :, offset] = (k if bias is None else k.float() - bias).half()
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
        num_kv_heads = self.storage.spec.num_kv_heads
        spans = []
        for span, (k, v) in zip(step.spans, self._read(layer, step), strict=True):
            # the query heads of a KV head stand one after the other: [kv_heads, group * tokens, head_dim]
            tokens = q[span.start : span.start + span.length].float().unflatten(1, (num_kv_heads, -1))
            queries = tokens.permute(1, 2, 0, 3).flatten(1, 2)
            mask = span.mask(sliding_window, repeat=tokens.shape[2])
            out = scaled_dot_product_attention(queries[None], k[None], v[None], mask, scale=softmax_scale)[0]
            spans.append(out.unflatten(1, (-1, span.length)).permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(spans).to(q.dtype)

    def _read(self, layer: int, step: Step) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V that each span reads, fp32 [kv_heads, keys, head_dim]: sealed pages, then open ones.

        The pages of all spans are unpacked together: a few large operations instead of many small ones.
        """
        sealed, opened = self._read_pages(layer, step).split((len(step.sealed_ids), len(step.open_ids)), dim=2)
        sealed_of_span = sealed.split([len(span.sealed_ids) for span in step.spans], dim=2)
        open_of_span = opened.split([len(span.open_ids) for span in step.spans], dim=2)
        for span, far, near in zip(step.spans, sealed_of_span, open_of_span, strict=True):
            k, v = torch.cat((far, near), 2).flatten(2, 3)[:, :, : len(span.key_positions)]
            bias = self.storage.key_offset(layer, span.key_positions)
            yield (k if bias is None else k + bias.transpose(0, 1)), v

    def _read_pages(self, layer: int, step: Step) -> torch.Tensor:
        """The step's sealed pages, then its open ones, fp32 [K or V, kv_heads, pages, 64, head_dim]."""
        storage, scales, spec = self.storage, self.storage.scales(layer), self.storage.spec
        num_sealed, num_open = len(step.sealed_ids), len(step.open_ids)
        both = torch.empty(2, spec.num_kv_heads, num_sealed + num_open, PAGE_TOKENS, spec.head_dim)
        if num_sealed:
            k, v = both[:, :, :num_sealed].transpose(1, 2)
            sealed = storage.sealed[layer].index_select(0, step.sealed_ids)
            unseal_into(k, v, sealed, storage.layouts[layer], scales.k, scales.v)
        both[:, :, num_sealed:] = storage.open[layer].index_select(0, step.open_ids).permute(1, 2, 0, 3, 4)
        return both
