"""The calls of nibble.trtllm.kernels.PageKernels in plain PyTorch: what the GPU kernels must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nibble.formats import PAGE_TOKENS, SealedPageLayout
from nibble.packing import seal_pages, unseal_pages
from nibble.trtllm.kernels import LayerPages
from nibble.visibility import PagePolicy


class TorchKernels:
    """Pages in the row order of the CPU backend. Reads of pages that are not there give NaN.

    It takes what the GPU's kernels take: 16-bit values, contiguous int32 tables.
    """

    def append(self, k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slots: torch.Tensor) -> None:
        _check_values(k, v)
        _check_tables(slots)
        assert k.dtype == v.dtype and slots.shape == k.shape[:1]
        written = (slots >= 0).nonzero()[:, 0]
        places = slots[written].long()
        for part, values in enumerate((k, v)):
            pages.open_pool[places // PAGE_TOKENS, part, :, places % PAGE_TOKENS] = values[written].half()

    def seal(self, pages: LayerPages, seal_from: torch.Tensor, seal_to: torch.Tensor) -> None:
        _check_tables(seal_from, seal_to)
        for slot, page in zip(seal_from.tolist(), seal_to.tolist(), strict=True):
            if slot >= 0:
                k, v = pages.open_pool[slot]
                pages.sealed_pool[page] = seal_pages(k, v, pages.fmt, pages.scales.k, pages.scales.v)

    def workspace(self, batch: int, q_heads: int, kv_heads: int, head_dim: int, max_pages: int) -> Any:
        return None

    def decode(
        self, q: torch.Tensor, pages: LayerPages, table: torch.Tensor, lengths: torch.Tensor, scale: float, work: Any
    ) -> torch.Tensor:
        _check_values(q)
        _check_tables(table, lengths)
        rows = []
        for query, row, length in zip(q, table.tolist(), lengths.tolist(), strict=True):
            count = -(-length // PAGE_TOKENS)
            far = range(pages.policy.sink_pages, pages.policy.first_recent_page(length - 1))
            opened = [-1 if page in far else row[page] for page in range(count)]
            sealed = [row[page] if page in far else -1 for page in range(count)]
            rows.append(self._attend(query[None], pages, opened, sealed, length, scale))
        return torch.cat(rows)

    def plan_prefill(self, new: Sequence[int], lengths: Sequence[int], policy: PagePolicy) -> Any:
        return list(zip(new, lengths, strict=True))

    def prefill(
        self, q: torch.Tensor, pages: LayerPages, tables: tuple[torch.Tensor, torch.Tensor], plan: Any, scale: float
    ) -> torch.Tensor:
        _check_values(q)
        _check_tables(*tables)
        rows = []
        for queries, opened, sealed, (_, length) in zip(
            q.split([new for new, _ in plan]), tables[0].tolist(), tables[1].tolist(), plan, strict=True
        ):
            rows.append(self._attend(queries, pages, opened, sealed, length, scale))
        return torch.cat(rows)

    def _attend(
        self, q: torch.Tensor, pages: LayerPages, opened: list[int], sealed: list[int], length: int, scale: float
    ) -> torch.Tensor:
        """Queries [tokens, q_heads, D], the last positions before `length`."""
        count, heads = -(-length // PAGE_TOKENS), pages.open_pool.shape[2]
        layout = SealedPageLayout(pages.fmt, q.shape[-1])
        near = torch.full((2, count, heads, PAGE_TOKENS, q.shape[-1]), torch.nan)
        far = near.clone()
        for page in range(count):
            if opened[page] >= 0:
                near[:, page] = pages.open_pool[opened[page]].float()
            if sealed[page] >= 0:
                found = unseal_pages(pages.sealed_pool[sealed[page]], layout, pages.scales.k, pages.scales.v)
                far[:, page] = torch.stack(found)
        near, far = (x.transpose(1, 2).flatten(2, 3)[:, :, :length] for x in (near, far))
        positions = torch.arange(length)
        mine = positions[length - q.shape[0] :]
        sees_near = pages.policy.sees_fp16(mine, positions)
        visible = mine[:, None] >= positions[None, :]
        group = q.shape[1] // heads
        queries = q.float().transpose(0, 1).unflatten(0, (heads, group))  # [kv_heads, group, tokens, D]
        scores = torch.where(sees_near, queries @ near[0][:, None].mT, queries @ far[0][:, None].mT) * scale
        weights = torch.where(visible, scores, -torch.inf).softmax(-1)
        parts = [
            _weigh(torch.where(mask & visible, weights, 0.0), values[1][:, None])
            for mask, values in ((sees_near, near), (~sees_near, far))
        ]
        return sum(parts[1:], parts[0]).flatten(0, 1).transpose(0, 1).to(q.dtype)


def _check_values(*tensors: torch.Tensor) -> None:
    assert all(x.dtype in (torch.float16, torch.bfloat16) and x.is_contiguous() for x in tensors)


def _check_tables(*tensors: torch.Tensor) -> None:
    assert all(x.dtype is torch.int32 and x.is_contiguous() for x in tensors)


def _weigh(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights @ values; a value that is not there matters only where it has weight."""
    used = (weights != 0).any(dim=-2)[..., None]
    return weights @ torch.where(used, values, 0.0)
