"""The oracle in the place of the CUDA kernels, with their arguments: tests the runtime of GPUs without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.kernels.prefill import PrefillCache, check_prefill
from nibble.kernels.prefill_plan import PrefillPlan
from nibble.packing import seal_pages, unseal_into
from nibble.reference import LayerScales
from nibble.runtime.cuda_backend import AttentionKernels
from nibble.visibility import PagePolicy, may_attend


def seal(
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    open_pages: torch.Tensor,
    sealed_pages: torch.Tensor,
    *,
    fmt: KVFormat,
    scales: LayerScales,
) -> None:
    assert open_pages.dtype == sealed_pages.dtype == torch.int32
    for source, target in zip(open_pages.tolist(), sealed_pages.tolist(), strict=True):
        if source >= 0 and target >= 0:
            sealed_pool[target] = seal_pages(*open_pool[source], fmt, scales.k, scales.v)


def decode(
    q: torch.Tensor,
    open_pool: torch.Tensor,
    sealed_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    fmt: KVFormat,
    policy: PagePolicy,
    softmax_scale: float,
    workspace: Any,
    scales: LayerScales,
    sliding_window: int | None,
) -> tuple[torch.Tensor, None]:
    assert block_table.dtype == seq_lens.dtype == torch.int32 and block_table.shape[0] == len(q) == len(seq_lens)
    pools = _Pools(open_pool, sealed_pool, fmt, scales)
    out = torch.zeros_like(q)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        near = policy.first_recent_page(length - 1)
        pages = [
            pools.page(place, is_open=page < policy.sink_pages or page >= near)
            for page, place in enumerate(block_table[row, : -(-length // PAGE_TOKENS)].tolist())
        ]
        k, v = (torch.cat([page[part] for page in pages], 1)[:, :length] for part in (0, 1))
        visible = may_attend(torch.tensor([length - 1]), torch.arange(length), sliding_window)
        out[row] = _attend(q[row : row + 1], k, v, visible, softmax_scale)[0].to(q.dtype)
    return out, None


def prefill(q: torch.Tensor, cache: PrefillCache, plan: PrefillPlan, *, softmax_scale: float) -> Any:
    check_prefill(q, cache, plan)
    pools = _Pools(cache.open_pool, cache.sealed_pool, cache.fmt, cache.scales)
    out = torch.full_like(q, torch.nan)
    for row, (first, position, length) in enumerate(plan.sequences[:, :3].tolist()):
        for at in range(position, length):
            near = plan.policy.first_recent_page(at)
            tables = cache.open_table[row].tolist(), cache.sealed_table[row].tolist()
            pages = []
            for page in range(at // PAGE_TOKENS + 1):
                is_open = page < plan.policy.sink_pages or page >= near
                pages.append(pools.page(tables[0 if is_open else 1][page], is_open=is_open))
            k, v = (torch.cat([page[part] for page in pages], 1)[:, : at + 1] for part in (0, 1))
            visible = may_attend(torch.tensor([at]), torch.arange(at + 1), plan.sliding_window)
            mine = first + at - position
            out[mine] = _attend(q[mine : mine + 1], k, v, visible, softmax_scale)[0].to(q.dtype)
    return SimpleNamespace(out=out)


ORACLE_KERNELS = AttentionKernels(seal, decode, prefill)


class _Pools:
    """K and V of a page, fp32 [2, kv_heads, 64, head_dim]; each is unpacked once."""

    def __init__(self, opened: torch.Tensor, sealed: torch.Tensor, fmt: KVFormat, scales: LayerScales) -> None:
        self._opened, self._sealed, self._scales = opened, sealed, scales
        self._layout = SealedPageLayout(fmt, opened.shape[-1])
        self._read: dict[int, torch.Tensor] = {}

    def page(self, place: int, *, is_open: bool) -> torch.Tensor:
        assert place >= 0, "no table names the page in the form in which it is read"
        if is_open:
            return self._opened[place].float()
        if place not in self._read:
            both = torch.empty(2, 1, *self._opened.shape[2:])
            unseal_into(*both, self._sealed[place : place + 1], self._layout, self._scales.k, self._scales.v)
            self._read[place] = both[:, 0]
        return self._read[place]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[0]
    keys, values = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hkd->htk", q.float(), keys) * scale
    probability = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("htk,hkd->thd", probability, values.nan_to_num())
