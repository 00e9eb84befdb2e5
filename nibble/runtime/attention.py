"""The seam between the models and the cache: transformers' attention interface on one side, a backend on the other.

A model loaded with `attn_implementation=ATTENTION` calls `cached_attention` in each layer, with Q and K after RoPE. The
step travels in the model's keyword arguments. A backend is all that differs between a CPU and a GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from nibble.errors import NibbleError
from nibble.key_transform import KeyTransform
from nibble.runtime.step import Step

ATTENTION = "nibble"


class AttentionBackend(Protocol):
    """Reads and writes the cache. q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]."""

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        """Write the step's K and V into open pages."""

    def seal(self, layer: int, step: Step) -> None:
        """Quantize the step's pages to seal into sealed pages; their open copies stay until the step is over."""

    def attend(
        self, layer: int, q: torch.Tensor, step: Step, softmax_scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        """Attention of the step's queries over the cache, in q's shape and type."""


def cached_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    step: Step | None = None,
    backend: AttentionBackend | None = None,
    key_transforms: dict[int, KeyTransform] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query, key, value [1, heads, tokens, D] to [1, tokens, heads, D]."""
    name = type(module).__name__
    if step is None or backend is None:
        raise NibbleError(f"{name} does not hand its keyword arguments to attention; this model family can't be run")
    if softcap is not None or s_aux is not None:
        raise NibbleError(f"{name} uses soft-capped scores or attention sinks in its weights, which are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    transform = (key_transforms or {}).get(layer)
    if transform is not None:
        q, k = transform.read(q), transform.store(k)
    backend.append(layer, k, v, step)
    backend.seal(layer, step)
    return backend.attend(layer, q, step, scaling, sliding_window)[None], None


AttentionInterface.register(ATTENTION, cached_attention)
