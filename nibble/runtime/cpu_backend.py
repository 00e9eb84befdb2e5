"""The CPU backend: vectorised PyTorch over the same pages that the CUDA kernels read. All arithmetic is fp32.

Decoding sequences are attended together (nibble.runtime.cpu_decode). A chunk of a prompt has its pages unpacked and
handed to torch's attention with the visibility rule as its mask.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from nibble.formats import PAGE_TOKENS
from nibble.packing import seal_pages, unseal_into
from nibble.runtime.cache import CacheStorage
from nibble.runtime.cpu_decode import attend_decode
from nibble.runtime.step import Span, Step


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
        out = torch.empty_like(q)
        grouped, grouped_out = (x.unflatten(1, (self.storage.spec.num_kv_heads, -1)) for x in (q, out))
        decode = step.decode_batch
        if len(decode):
            queries = grouped[decode.rows]
            attended = attend_decode(self.storage, layer, queries, decode, softmax_scale, sliding_window)
            grouped_out[decode.rows] = attended.to(q.dtype)
        for span in step.prompt_spans:
            rows = slice(span.start, span.start + span.length)
            grouped_out[rows] = self._attend_prompt(layer, grouped[rows], span, softmax_scale, sliding_window)
        return out

    def _attend_prompt(
        self, layer: int, q: torch.Tensor, span: Span, softmax_scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        """q and the result: [tokens, kv_heads, group, head_dim]."""
        k, v = self._read(layer, span)
        # the query heads of a KV head stand one after the other: [kv_heads, group * tokens, head_dim]
        queries = q.float().permute(1, 2, 0, 3).flatten(1, 2)
        mask = span.mask(sliding_window, repeat=q.shape[2])
        out = scaled_dot_product_attention(queries[None], k[None], v[None], mask, scale=softmax_scale)[0]
        return out.unflatten(1, (-1, span.length)).permute(2, 0, 1, 3)

    def _read(self, layer: int, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that the span reads, fp32 [kv_heads, keys, head_dim]: sealed pages, then open ones."""
        storage, scales, spec = self.storage, self.storage.scales(layer), self.storage.spec
        num_sealed, num_open = len(span.sealed_ids), len(span.open_ids)
        both = torch.empty(2, spec.num_kv_heads, num_sealed + num_open, PAGE_TOKENS, spec.head_dim)
        if num_sealed:
            k, v = both[:, :, :num_sealed].transpose(1, 2)
            sealed = storage.sealed[layer].index_select(0, span.sealed_ids)
            unseal_into(k, v, sealed, storage.layouts[layer], scales.k, scales.v)
        both[:, :, num_sealed:] = storage.open[layer].index_select(0, span.open_ids).permute(1, 2, 0, 3, 4)
        k, v = both.flatten(2, 3)[:, :, : len(span.key_positions)]
        bias = storage.key_offset(layer, span.key_positions)
        return (k if bias is None else k + bias.transpose(0, 1)), v
