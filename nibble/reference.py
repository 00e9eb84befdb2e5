"""The oracle: attention through a quantized cache in plain PyTorch, written to be read, not to be fast.

It takes the whole K and V of a sequence, works out what every query may see and in which precision, and attends. The
CPU backend, the CUDA kernels and the runtime are all tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nibble.formats import PAGE_TOKENS, KVFormat, TensorFormat
from nibble.quantizer import ScaleZero, round_trip
from nibble.visibility import PagePolicy, may_attend


@dataclass(frozen=True)
class LayerScales:
    """Static scales of a layer, fp32 [kv_heads, 1, head_dim]; None for formats that carry theirs in the page."""

    k: ScaleZero | None = None
    v: ScaleZero | None = None


@dataclass(frozen=True)
class AttentionOutput:
    """out: [queries, q_heads, head_dim]; log_sum_exp: [queries, q_heads], natural logarithm."""

    out: torch.Tensor
    log_sum_exp: torch.Tensor


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    fmt: KVFormat,
    policy: PagePolicy,
    softmax_scale: float,
    scales: LayerScales | None = None,
    sliding_window: int | None = None,
    key_offset: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionOutput:
    """Attention of the last queries of one sequence over its cache.

    q: [queries, q_heads, head_dim], the last `queries` positions of the sequence. k, v: fp16
    [tokens, kv_heads, head_dim], the whole sequence, K after RoPE, V rotated when the format says so. q_heads is a
    multiple of kv_heads. key_offset: what stored K lacks and every reader adds, [tokens, kv_heads, head_dim] (see
    `nibble.key_transform`). Computed in `dtype`.
    """
    num_tokens, num_kv_heads, _ = k.shape
    positions = torch.arange(num_tokens)
    query_positions = positions[num_tokens - q.shape[0] :]
    fp16_mask = policy.sees_fp16(query_positions, positions)
    visible = may_attend(query_positions, positions, sliding_window)
    k_sealed, v_sealed = sealed_view(k, v, fmt, scales or LayerScales())

    k_open = k.to(dtype)
    if key_offset is not None:
        k_open, k_sealed = k_open + key_offset.to(dtype), k_sealed.to(dtype) + key_offset.to(dtype)
    outs, log_sums = [], []
    group = q.shape[1] // num_kv_heads
    for head in range(q.shape[1]):
        kv_head = head // group
        query = q[:, head].to(dtype)
        scores = torch.where(fp16_mask, query @ k_open[:, kv_head].T, query @ k_sealed[:, kv_head].to(dtype).T)
        scores = (scores * softmax_scale).masked_fill(~visible, -torch.inf)
        p = scores.softmax(-1)
        out = (p * fp16_mask) @ v[:, kv_head].to(dtype) + (p * ~fp16_mask) @ v_sealed[:, kv_head].to(dtype)
        outs.append(out)
        log_sums.append(scores.logsumexp(-1))
    return AttentionOutput(torch.stack(outs, 1), torch.stack(log_sums, 1))


def sealed_view(
    k: torch.Tensor, v: torch.Tensor, fmt: KVFormat, scales: LayerScales
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a far query sees of K and V [tokens, kv_heads, head_dim], fp32.

    Full pages are quantized; the tokens of the last, partly filled page are no far query's to see and come back as
    they are.
    """
    full = k.shape[0] // PAGE_TOKENS * PAGE_TOKENS
    return (
        torch.cat((_seal_and_read(k[:full], fmt.k, scales.k), k[full:].float())),
        torch.cat((_seal_and_read(v[:full], fmt.v, scales.v), v[full:].float())),
    )


def _seal_and_read(tokens: torch.Tensor, fmt: TensorFormat, static: ScaleZero | None) -> torch.Tensor:
    pages = tokens.unflatten(0, (-1, PAGE_TOKENS)).transpose(1, 2)  # [pages, kv_heads, 64, head_dim]
    return round_trip(pages, fmt, static).transpose(1, 2).flatten(0, 1)
