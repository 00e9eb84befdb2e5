"""Attention that is told where to look, while the needle model learns: a loss beside that of the answers.

Retrieval takes two heads that are of no use alone, one that finds the token before and one that finds where the token
before is the one asked for. Answers alone leave both on a plateau for thousands of steps (docs/log.md). So head 0 of
the first layer and head 0 of the second get a loss of their own, for a sample of the queries: how far their attention
is from equal shares for all right places (KL, nats). Only training sees it; the model is a plain Llama.

    guide = Guide(batch, neighbour=1.0, match=1.0)
    model(tokens, use_cache=False, guide=guide)        # attn_implementation GUIDED
    loss = answers + guide.loss()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bench.needle_batches import Batch
from eval.needle_words import ASK, NEEDLE

GUIDED = "nibble-needle-guided"
ROWS = 64  # queries of each sequence that are looked at
NEIGHBOUR_LAYER, MATCH_LAYER = 0, 1


class Guide:
    """The losses of one forward pass over `batch`. neighbour, match: their weights, 0 for none."""

    def __init__(self, batch: Batch, neighbour: float, match: float) -> None:
        self.tokens, self.is_answer = batch.tokens, batch.is_answer
        self.weights = {NEIGHBOUR_LAYER: neighbour, MATCH_LAYER: match}
        self.losses: dict[int, torch.Tensor] = {}

    def look(self, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        """Note the loss of a layer's head 0. query, key: [sequences, heads, tokens, D], turned by their positions."""
        if not self.weights.get(layer):
            return
        length = query.shape[2]
        rows, counts = self._before(length) if layer == NEIGHBOUR_LAYER else self._questions(length)
        picked = query[:, 0].float().gather(1, rows[..., None].expand(-1, -1, query.shape[-1]))
        scores = picked @ key[:, 0].float().transpose(1, 2) * scaling
        places = torch.arange(length, device=rows.device)
        scores = scores.masked_fill(places > rows[..., None], -torch.inf)
        if layer == NEIGHBOUR_LAYER:
            right = places == rows[..., None] - 1
        else:
            right = self._told(rows, length) & (places <= rows[..., None])
            counts = counts & right.any(-1)
        share = right / right.sum(-1, keepdim=True).clamp_min(1)  # what each right place should get
        wanted = torch.where(right, scores, 0.0).mul(share).sum(-1)
        loss = scores.logsumexp(-1) - wanted - right.sum(-1).clamp_min(1).log()
        self.losses[layer] = torch.where(counts, loss, 0.0).sum() / counts.sum().clamp_min(1)

    def loss(self) -> torch.Tensor | float:
        """The weighted sum of what the layers noted."""
        return sum(self.weights[layer] * loss for layer, loss in self.losses.items())

    def _before(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions at random, and that all of them count, [sequences, rows]."""
        rows = torch.randint(1, length, (len(self.tokens), min(ROWS, length - 1)), device=self.tokens.device)
        return rows, torch.ones_like(rows, dtype=torch.bool)

    def _questions(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of keys that are asked for, and whether they are, [sequences, rows]."""
        asks = self.is_answer[:, 1 : length + 1].float()
        order = (asks + torch.rand_like(asks)).topk(min(ROWS, length), dim=1)
        return order.indices, order.values >= 1.0

    def _told(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Where values of each row's key stand, told or answered before, [sequences, rows, length]."""
        tokens = self.tokens[:, :length]
        owner = torch.full_like(tokens, -1)
        owner[:, 2:] = torch.where((tokens[:, :-2] == NEEDLE) | (tokens[:, :-2] == ASK), tokens[:, 1:-1], -1)
        return owner[:, None] == tokens.gather(1, rows)[..., None]


def guided_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    guide: Guide | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: causal attention, with the guide looking on."""
    if guide is not None:
        guide.look(int(module.layer_idx), query, key, scaling)  # type: ignore[arg-type]
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GUIDED, guided_attention)
