"""What one position of text says about a quantized cache: KL, both losses, and whether the top token is the same.

Both engines read the same tokens, each through its own cache. At a position with fp16 distribution p and quantized
distribution q over the vocabulary:

    kl        = sum_v p(v) (log p(v) - log q(v))   in nats; 0 when the cache cost nothing, and never negative
    nll       = -log q(next token), nll_fp16 = -log p(next token)
    top1_same = argmax p == argmax q

The sums run in float64: an int8 cache is so close that float32 rounding would be most of the figure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nibble.errors import NibbleError

ROWS_PER_BLOCK = 32  # positions turned to float64 at once: bounds the memory for vocabularies of 150,000


@dataclass(frozen=True)
class PositionMeasures:
    """The measures of consecutive positions; each array is [positions] (float64, top1_same bool)."""

    kl: np.ndarray
    nll: np.ndarray
    nll_fp16: np.ndarray
    top1_same: np.ndarray

    def __len__(self) -> int:
        return len(self.kl)

    @classmethod
    def concatenate(cls, parts: list[PositionMeasures]) -> PositionMeasures:
        """The positions of all parts in order; no parts gives no positions."""
        if not parts:
            return cls(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool))
        return cls(
            kl=np.concatenate([part.kl for part in parts]),
            nll=np.concatenate([part.nll for part in parts]),
            nll_fp16=np.concatenate([part.nll_fp16 for part in parts]),
            top1_same=np.concatenate([part.top1_same for part in parts]),
        )


def measure_positions(fp16: torch.Tensor, quantized: torch.Tensor, next_tokens: torch.Tensor) -> PositionMeasures:
    """Measure positions from both engines' logits [positions, vocab] and the tokens that follow, int64 [positions]."""
    _require_same_shape(fp16, quantized, next_tokens)
    blocks = [
        _measure_block(fp16[rows], quantized[rows], next_tokens[rows])
        for rows in (slice(first, first + ROWS_PER_BLOCK) for first in range(0, len(next_tokens), ROWS_PER_BLOCK))
    ]
    return PositionMeasures.concatenate(blocks)


def require_finite(logits: torch.Tensor, *, engine: str, window: int, first_position: int) -> None:
    """Stop at the first NaN or infinite logit; NibbleError names the engine, the window and the position in it."""
    finite = torch.isfinite(logits).all(dim=-1)
    if bool(finite.all()):
        return
    row = int((~finite).nonzero()[0])
    raise NibbleError(
        f"logits of the {engine} engine: got NaN or infinity at window {window}, position {first_position + row}; "
        "allowed finite numbers only. The engine is broken: build it again, and check its scales (calibration.json)"
    )


def _measure_block(fp16: torch.Tensor, quantized: torch.Tensor, next_tokens: torch.Tensor) -> PositionMeasures:
    log_p = torch.log_softmax(fp16.double(), dim=-1)
    log_q = torch.log_softmax(quantized.double(), dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp_min(0.0)
    targets = next_tokens.to(log_p.device)[:, None]
    return PositionMeasures(
        kl=kl.cpu().numpy(),
        nll=-log_q.gather(1, targets)[:, 0].cpu().numpy(),
        nll_fp16=-log_p.gather(1, targets)[:, 0].cpu().numpy(),
        top1_same=(fp16.argmax(dim=-1) == quantized.argmax(dim=-1)).cpu().numpy(),
    )


def _require_same_shape(fp16: torch.Tensor, quantized: torch.Tensor, next_tokens: torch.Tensor) -> None:
    if fp16.shape != quantized.shape or len(fp16) != len(next_tokens):
        raise NibbleError(
            f"logits: got fp16 {tuple(fp16.shape)}, quantized {tuple(quantized.shape)} for {len(next_tokens)} tokens; "
            "allowed equal shapes [positions, vocab]. The two engines must come from the same model: build both again"
        )
