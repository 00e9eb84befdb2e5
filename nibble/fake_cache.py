"""A quantized cache without pages: whole windows of text in one forward pass, to measure what a format costs.

The runtime seals pages as a sequence grows. Here a layer quantizes and reads back all full pages of its K and V at
once, and the visibility rule picks which form each query sees. The numbers are the oracle's (a test compares them), and
every layer may have a format of its own:

    model.set_attn_implementation(FAKE_CACHE)
    model(ids, use_cache=False, fake_cache=spec)        # a CacheSpec
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from nibble.formats import PAGE_TOKENS, KVFormat, TensorFormat
from nibble.key_transform import KeyTransform
from nibble.quantizer import ScaleZero, round_trip
from nibble.reference import LayerScales
from nibble.rotation import hadamard_matrix
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy, may_attend

FAKE_CACHE = "nibble-fake-cache"
ROWS_AT_ONCE = 256  # queries of one attention call: bounds its mask, and skips keys that none of them sees

Observer = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class TwoForms:
    """K and V of a sequence's beginning, [kv_heads, tokens, D] each: as near queries see them, and as far ones do."""

    k_near: torch.Tensor
    v_near: torch.Tensor
    k_far: torch.Tensor
    v_far: torch.Tensor


def fake_cache_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    fake_cache: CacheSpec | None = None,
    observe: Observer | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query, key, value [1, heads, tokens, D] to [1, tokens, heads, D].

    observe: called with layer, K and V [kv_heads, tokens, D] before anything is quantized.
    """
    assert fake_cache is not None  # whoever sets the implementation passes it
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    k, v = key[0], value[0]
    if observe is not None:
        observe(layer, k, v)
    fmt, scales, transform = (
        fake_cache.formats[layer],
        fake_cache.scales.get(layer),
        fake_cache.key_transforms.get(layer),
    )
    k_far, v_far = (x.to(query.dtype) for x in sealed_view(k, v, fmt, scales, transform))
    view = TwoForms(k.half().to(query.dtype), v.half().to(query.dtype), k_far, v_far)
    return attend(query[0], view, fake_cache.policy, scaling, sliding_window).transpose(0, 1)[None], None


def sealed_view(
    k: torch.Tensor,
    v: torch.Tensor,
    fmt: KVFormat,
    scales: LayerScales | None = None,
    transform: KeyTransform | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a far query sees of K and V of a sequence's beginning, [kv_heads, tokens, D] to fp32.

    Both come and go as the model made them, whatever rotation or transform they are stored in. The tokens of the last,
    partly filled page are no far query's to see and come back as they are.
    """
    scales = scales or LayerScales()
    rotate_value = fmt.v.rotated or (transform is not None and transform.rotate_value)
    v_far = _seal_and_read(v, replace(fmt.v, rotated=rotate_value), scales.v)
    if transform is None:
        return _seal_and_read(k, fmt.k, scales.k), v_far
    transform = transform.to(k.device)
    offset = transform.offset(torch.arange(k.shape[1], device=k.device))
    stored = transform.store(k.float().transpose(0, 1))
    stored = stored if offset is None else stored - offset
    back = _seal_and_read(stored.transpose(0, 1), fmt.k, scales.k)
    back = back if offset is None else back + offset.transpose(0, 1)
    return back if transform.basis is None else torch.einsum("hte,hed->htd", back, transform.basis.reader), v_far


def _seal_and_read(tokens: torch.Tensor, fmt: TensorFormat, static: ScaleZero | None) -> torch.Tensor:
    full = tokens.shape[1] // PAGE_TOKENS * PAGE_TOKENS
    pages = tokens[:, :full].float().unflatten(1, (-1, PAGE_TOKENS))
    if static is not None:  # [kv_heads, 1, D] to [kv_heads, page, token, D]
        static = ScaleZero(static.scale.to(tokens.device).unsqueeze(1), static.zero.to(tokens.device).unsqueeze(1))
    matrix = _rotation(tokens.shape[-1]).to(tokens.device) if fmt.rotated else None
    back = round_trip((pages if matrix is None else pages @ matrix.T).half(), fmt, static)
    back = back if matrix is None else back @ matrix
    return torch.cat((back.flatten(1, 2), tokens[:, full:].half().float()), 1)


@lru_cache
def _rotation(head_dim: int) -> torch.Tensor:
    return hadamard_matrix(head_dim).float()


def attend(
    q: torch.Tensor,
    view: TwoForms,
    policy: PagePolicy,
    scaling: float,
    sliding_window: int | None = None,
    *,
    first: int = 0,
) -> torch.Tensor:
    """Attention over both forms by the visibility rule: a sequence's queries [q_heads, tokens, D] from `first` on."""
    starts = range(first, q.shape[1], ROWS_AT_ONCE)
    return torch.cat([_attend_rows(q, view, start, policy, scaling, sliding_window) for start in starts], 1)


def _attend_rows(
    q: torch.Tensor, view: TwoForms, first: int, policy: PagePolicy, scaling: float, sliding_window: int | None
) -> torch.Tensor:
    """Attention of up to ROWS_AT_ONCE queries [q_heads, tokens, D] from `first` on, in q's type.

    Keys in fp16: the sinks, and from the first query's recent pages on. Quantized: up to the last query's recent pages.
    Keys that no query's sliding window reaches are not looked at.
    """
    stop = min(first + ROWS_AT_ONCE, q.shape[1])
    positions = torch.arange(stop, device=q.device)
    oldest = 0 if sliding_window is None else max(0, first - sliding_window + 1)
    sinks = min(policy.sink_pages * PAGE_TOKENS, stop)
    recent = max(sinks, oldest, (first // PAGE_TOKENS - policy.recent_pages) * PAGE_TOKENS)
    far = slice(max(sinks, oldest), max(sinks, oldest, ((stop - 1) // PAGE_TOKENS - policy.recent_pages) * PAGE_TOKENS))
    near = torch.cat((positions[oldest:sinks], positions[recent:]))
    keys = torch.cat((near, positions[far]))
    mask = may_attend(positions[first:], keys, sliding_window)
    fp16 = policy.sees_fp16(positions[first:], keys)
    mask &= torch.cat((fp16[:, : len(near)], ~fp16[:, len(near) :]), 1)
    k = torch.cat((view.k_near[:, near], view.k_far[:, far]), 1)
    v = torch.cat((view.v_near[:, near], view.v_far[:, far]), 1)
    group = q.shape[0] // k.shape[0]
    queries = q[:, first:stop].unflatten(0, (-1, group)).flatten(1, 2)
    out = scaled_dot_product_attention(queries[None], k[None], v[None], mask.repeat(group, 1), scale=scaling)[0]
    return out.unflatten(1, (group, -1)).flatten(0, 1)


AttentionInterface.register(FAKE_CACHE, fake_cache_attention)
