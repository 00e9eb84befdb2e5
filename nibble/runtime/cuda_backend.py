"""The CUDA backend: the kernels of `nibble.kernels` over pages on a GPU.

It takes `DecodeStep` and `PrefillStep` (nibble.runtime.device_step). New tokens come into their pages with the launch
that turns them (`decoder_ops.split_heads`), so there is no append here. Pages that a decode step makes far are sealed
before it, for all layers at once, since they were full before the step began; those of a prompt's chunk are sealed
layer by layer, as their tokens come with the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nibble.kernels.decode import DecodeWorkspace, decode_attention
from nibble.kernels.prefill import PrefillCache, prefill_attention
from nibble.kernels.seal import seal_pages_on_gpu
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.runtime.cache import CacheStorage
from nibble.runtime.device_step import DecodeStep, PrefillStep


@dataclass(frozen=True)
class AttentionKernels:
    """The kernels that read and write quantized pages; tests put the oracle in their place."""

    seal: Callable[..., None] = seal_pages_on_gpu
    decode: Callable[..., Any] = decode_attention
    prefill: Callable[..., Any] = prefill_attention


class CudaBackend:
    """Owns the pages and knows their formats. Queries: fp16 or bf16 [tokens, q_heads, head_dim]."""

    def __init__(self, storage: CacheStorage, workspace: DecodeWorkspace, kernels: AttentionKernels) -> None:
        self.storage = storage
        self.workspace = workspace
        self.kernels = kernels
        device = storage.open[0].device
        self.scales = [_scales_on(storage.scales(layer), device) for layer in range(len(storage.open))]

    def seal(self, layer: int, step: DecodeStep | PrefillStep) -> None:
        """Seal the pages that a prompt's chunk filled and made far; their tokens are in."""
        if isinstance(step, PrefillStep) and len(step.seal_open):
            self.seal_pages(layer, step.seal_open, step.seal_sealed)

    def seal_pages(self, layer: int, open_pages: torch.Tensor, sealed_pages: torch.Tensor) -> None:
        """Seal listed pages: int32, -1 for nothing to do."""
        storage = self.storage
        self.kernels.seal(
            storage.open[layer],
            storage.sealed[layer],
            open_pages,
            sealed_pages,
            fmt=storage.spec.formats[layer],
            scales=self.scales[layer],
        )

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        step: DecodeStep | PrefillStep,
        softmax_scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Attention of the step's queries over the cache, like q."""
        storage, fmt = self.storage, self.storage.spec.formats[layer]
        opened, sealed = storage.open[layer], storage.sealed[layer]
        if isinstance(step, PrefillStep):
            cache = PrefillCache(fmt, opened, sealed, step.open_table, step.sealed_table, self.scales[layer])
            out: torch.Tensor = self.kernels.prefill(
                q, cache, step.plan(sliding_window), softmax_scale=softmax_scale
            ).out
            return out
        out, _ = self.kernels.decode(
            q,
            opened,
            sealed,
            step.block_table,
            step.seq_lens,
            fmt=fmt,
            policy=storage.spec.policy,
            softmax_scale=softmax_scale,
            workspace=self.workspace,
            scales=self.scales[layer],
            sliding_window=sliding_window,
        )
        return out


def _scales_on(scales: LayerScales, device: torch.device) -> LayerScales:
    return LayerScales(*(_on(pair, device) for pair in (scales.k, scales.v)))


def _on(pair: ScaleZero | None, device: torch.device) -> ScaleZero | None:
    if pair is None:
        return None
    return ScaleZero(pair.scale.float().to(device).contiguous(), pair.zero.float().to(device).contiguous())
