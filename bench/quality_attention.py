"""Attention over a fake-quantized cache, whole windows in one forward pass.

As `nibble.fake_cache`, whose attention it is, but any function may stand for the quantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from nibble import fake_cache
from nibble.visibility import PagePolicy

NAME = "nibble-quality"
NO_PAGES = PagePolicy(0, 0)


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
    near = (view.k_far, view.v_far) if policy is None else (view.k_near, view.v_near)
    columns = (view.q, *near, view.k_far, view.v_far)
    out = torch.stack(
        [
            fake_cache.attend(q, fake_cache.TwoForms(*tensors), policy or NO_PAGES, scaling, sliding_window)
            for q, *tensors in zip(*columns, strict=True)
        ]
    )
    if view.undo is not None:
        group = out.shape[1] // view.k_far.shape[1]
        out = torch.einsum("bhtd,hed->bhte", out, view.undo.repeat_interleave(group, 0))
    return out


AttentionInterface.register(NAME, quality_attention)
