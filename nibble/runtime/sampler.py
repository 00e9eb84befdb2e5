"""Picks the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nibble.runtime.request import SamplingParams


@dataclass(frozen=True)
class Sampled:
    """A token, the natural logarithm of its probability under the model, and the likeliest alternatives."""

    token: int
    logprob: float
    top_logprobs: dict[int, float]


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> Sampled:
    """logits: [vocabulary] of one sequence. Reported probabilities are the model's, before temperature and cuts."""
    logprobs = logits.float().log_softmax(-1)
    token = int(logits.argmax()) if params.temperature == 0 else _draw(logits.float(), params, generator)
    values, tokens = logprobs.topk(params.logprobs)
    top = dict(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    probabilities = _keep_likeliest(logits / params.temperature, params).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _keep_likeliest(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """-inf outside the top k tokens, and outside the smallest set whose probability reaches top p."""
    if params.top_k:
        lowest_kept = logits.topk(min(params.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probability_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[probability_before >= params.top_p], -torch.inf)
    return logits
