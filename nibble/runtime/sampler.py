"""Picks the next tokens from logits, a row for each sequence, on the device that holds the logits.

Chance comes from outside: one number a row, drawn from the request's own generator on the host. So a row's token does
not depend on its batch, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nibble.runtime.sequence import Sequence


class Sampled(NamedTuple):
    """A token, the natural logarithm of its probability under the model, and the likeliest alternatives."""

    token: int
    logprob: float
    top_logprobs: dict[int, float]

    @property
    def is_finite(self) -> bool:
        """False when the logits held NaN or Inf; the token is worth nothing then."""
        return math.isfinite(self.logprob)


class SampledRows(NamedTuple):
    """The same for every row: int64, float32 [rows]; alternatives int64 and float32 [rows, most asked for].

    A row whose logits held NaN or Inf has a logprob of NaN.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True)
class Draw:
    """Rows of a step that pick by chance, all with cuts or all without.

    rows, top_k: int64; temperature, top_p, chance (uniform in [0, 1)): float32. top_k 0 and top_p 1 are off.
    """

    rows: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    chance: torch.Tensor

    @classmethod
    def of(cls, sequences: list[tuple[int, Sequence]], device: torch.device) -> Draw:
        """Draws each sequence's chance."""
        params = [sequence.params for _, sequence in sequences]
        chance = [float(torch.rand((), generator=sequence.generator)) for _, sequence in sequences]
        whole = torch.tensor([[row for row, _ in sequences], [each.top_k for each in params]])
        numbers = torch.tensor([[p.temperature for p in params], [p.top_p for p in params], chance])
        return cls(*whole.to(device, non_blocking=True), *numbers.to(device, non_blocking=True))


@dataclass(frozen=True)
class Choices:
    """What is asked of a step beyond the likeliest tokens. alternatives: how many to report, of who asks for most.

    Rows without cuts need no sorting, and whether a row has cuts is its own affair: its batch can't change its token.
    """

    uncut: Draw | None
    cut: Draw | None
    alternatives: int

    @classmethod
    def of(cls, sequences: Rows[Sequence], device: torch.device) -> Choices | None:
        """None when all are greedy and want no alternatives."""
        by_chance = [(row, s) for row, s in enumerate(sequences) if s.params.temperature > 0]
        cut = [(row, s) for row, s in by_chance if s.params.top_k > 0 or s.params.top_p < 1]
        uncut = [pair for pair in by_chance if pair not in cut]
        alternatives = max((sequence.params.logprobs for sequence in sequences), default=0)
        if not by_chance and not alternatives:
            return None
        return cls(Draw.of(uncut, device) if uncut else None, Draw.of(cut, device) if cut else None, alternatives)


def pick_likeliest(logits: torch.Tensor) -> SampledRows:
    """The greedy choice. logits: [rows, vocabulary]."""
    nothing = logits[:, :0].float()
    if logits.is_cuda:
        from nibble.runtime.decoder_kernels import launch_pick_likeliest

        return SampledRows(*launch_pick_likeliest(logits), nothing.long(), nothing)
    log_total = logits.logsumexp(-1)
    best, tokens = logits.max(-1)
    is_finite = log_total.isfinite() & logits.amin(-1).isfinite()
    return SampledRows(tokens, (best - log_total).where(is_finite, torch.nan), nothing.long(), nothing)


def pick_as_asked(logits: torch.Tensor, greedy: SampledRows, choices: Choices) -> SampledRows:
    """Redo the greedy choice for rows that draw, add alternatives. Probabilities reported are before any cut."""
    logits, tokens = logits.float(), greedy.tokens.clone()
    if choices.uncut is not None:
        tokens[choices.uncut.rows] = _draw(logits, choices.uncut)
    if choices.cut is not None:
        tokens[choices.cut.rows] = _draw_from_likeliest(logits, choices.cut)
    log_total = logits.gather(-1, greedy.tokens[:, None])[:, 0] - greedy.logprobs
    values, alternatives = logits.topk(choices.alternatives)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - log_total
    return SampledRows(tokens, logprobs, alternatives, values - log_total[:, None])


def read_rows(rows: SampledRows, sequences: Rows[Sequence]) -> list[Sampled]:
    """Bring the rows to the host."""
    tokens, logprobs, top_tokens, top_logprobs = (part.tolist() for part in rows)
    return [
        Sampled(token, logprob, dict(zip(others[:asked], theirs[:asked], strict=True)) if asked else {})
        for token, logprob, others, theirs, asked in zip(
            tokens, logprobs, top_tokens, top_logprobs, (s.params.logprobs for s in sequences), strict=True
        )
    ]


def _draw(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """One token for each row of the draw, int64."""
    probability = (logits[draw.rows] / draw.temperature[:, None]).softmax(-1)
    return _place_of_chance(probability, draw.chance)


def _draw_from_likeliest(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The same among the top k tokens, and among the fewest whose probability reaches top p."""
    ordered, tokens = (logits[draw.rows] / draw.temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    is_beyond = torch.arange(logits.shape[-1], device=logits.device) >= draw.top_k[:, None]
    probability = ordered.masked_fill(is_beyond & (draw.top_k > 0)[:, None], -torch.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    probability = probability.masked_fill(before >= draw.top_p[:, None], 0)
    return tokens.gather(-1, _place_of_chance(probability, draw.chance)[:, None])[:, 0]


def _place_of_chance(probability: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The first place of each row at which the sum of what came so far passes the chance; sums need not reach 1."""
    reached = probability.cumsum(-1)
    place = (reached <= chance[:, None] * reached[:, -1:]).sum(-1)
    return place.clamp(max=probability.shape[-1] - 1)
