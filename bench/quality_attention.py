"""Attention over a fake-quantized cache, whole windows in one forward pass.

The runtime seals pages as a sequence grows; here every page is quantized and read back at once, and the visibility rule
picks for each query and key which of the two forms it sees. Same numbers as `nibble.reference` (a test compares them),
much faster, and any function may stand for the quantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from nibble.visibility import PagePolicy, may_attend

NAME = "nibble-quality"
SCORES_AT_ONCE = 1 << 29  # elements of a score matrix held at a time


@dataclass(frozen=True)
class Layer:
    """What a layer hands to attention, float32 [batch, heads, tokens, D]."""

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class View:
    """What queries see. near: fp16 pages, far: sealed ones. undo: per KV head [heads, D, D], applied to the output."""

    q: torch.Tensor
    k_near: torch.Tensor
    v_near: torch.Tensor
    k_far: torch.Tensor
    v_far: torch.Tensor
    undo: torch.Tensor | None = None


@dataclass
class Hook:
    """The view that the next forward pass uses. policy: None when every key is seen quantized."""

    view: Callable[[Layer], View] | None = None
    policy: PagePolicy | None = None
    seen: Callable[[Layer], None] | None = None
    masks: dict[Any, torch.Tensor] = field(default_factory=dict)


HOOK = Hook()


def quality_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [batch, heads, tokens, D] to [batch, tokens, heads, D]."""
    assert HOOK.view is not None  # run_windows sets it
    layer = Layer(int(module.layer_idx), query.float(), key.float(), value.float())  # type: ignore[arg-type]
    if HOOK.seen is not None:
        HOOK.seen(layer)
    out = attend(HOOK.view(layer), HOOK.policy, scaling, sliding_window)
    return out.transpose(1, 2).to(query.dtype), None


def attend(view: View, policy: PagePolicy | None, scaling: float, sliding_window: int | None = None) -> torch.Tensor:
    """Attention over a view, [batch, q_heads, tokens, D]."""
    batch, heads, tokens, _ = view.q.shape
    group = heads // view.k_near.shape[1]
    rows = max(1, min(tokens, SCORES_AT_ONCE // (batch * heads * tokens)))
    parts = [
        _attend_rows(view, slice(at, min(at + rows, tokens)), policy, scaling, sliding_window, group)
        for at in range(0, tokens, rows)
    ]
    out = torch.cat(parts, 2)
    if view.undo is not None:
        out = torch.einsum("bhtd,hed->bhte", out, view.undo.repeat_interleave(group, 0))
    return out


def _attend_rows(
    view: View, rows: slice, policy: PagePolicy | None, scaling: float, window: int | None, group: int
) -> torch.Tensor:
    last = rows.stop
    batch, heads, _, size = view.q.shape
    q = view.q[:, :, rows].unflatten(1, (-1, group)).flatten(2, 3)  # [batch, kv_heads, group * rows, D]
    visible, near = masks(rows, last, policy, window, q.device)
    far = ~near
    scores = q @ view.k_far[:, :, :last].mT
    scores = scores.unflatten(2, (group, -1))
    if policy is not None:
        scores = torch.where(near, (q @ view.k_near[:, :, :last].mT).unflatten(2, (group, -1)), scores)
    p = scores.mul_(scaling).masked_fill_(~visible, -torch.inf).softmax(-1)
    out = (p * far).flatten(2, 3) @ view.v_far[:, :, :last]
    if policy is not None:
        out += p.mul_(near).flatten(2, 3) @ view.v_near[:, :, :last]
    return out.view(batch, heads, -1, size)


def masks(
    rows: slice, last: int, policy: PagePolicy | None, window: int | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys [rows, keys] are visible, and which of them in fp16."""
    key = (rows.start, rows.stop, policy, window)
    if key not in HOOK.masks:
        if len(HOOK.masks) > 64:
            HOOK.masks.clear()
        queries, keys = torch.arange(rows.start, rows.stop, device=device), torch.arange(last, device=device)
        visible = may_attend(queries, keys, window)
        near = torch.zeros_like(visible) if policy is None else policy.sees_fp16(queries, keys)
        HOOK.masks[key] = torch.stack((visible, near))
    visible, near = HOOK.masks[key]
    return visible, near


AttentionInterface.register(NAME, quality_attention)
