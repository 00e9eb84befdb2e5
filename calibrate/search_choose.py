"""From what each format costs in each layer to the mix: the fewest bytes under a KL budget.

Errors of different layers are small and independent, so their KL adds up (the search measures how well that holds).
Then the best mixes of all sizes come out of one exact knapsack over bytes, a layer at a time:

    best[b] = min over formats f of   best_before[b - bytes(f)] + kl(layer, f)

A page policy multiplies the KL of every layer by about the same factor, which is measured once for each policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout, open_page_bytes
from nibble.visibility import PagePolicy


@dataclass(frozen=True)
class Mix:
    """formats: the candidate's index for each layer. bytes_per_token: sealed, whole model. kl: predicted."""

    formats: tuple[int, ...]
    bytes_per_token: float
    kl: float


@dataclass(frozen=True)
class Choice:
    """A mix with its pages. bytes_at_context: bytes per token of a full context, fp16 pages included."""

    mix: Mix
    policy: PagePolicy
    kl: float
    bytes_at_context: float


@dataclass(frozen=True)
class CacheSize:
    """What a model's cache weighs. context: tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    context: int

    def sealed_page(self, fmt: KVFormat) -> int:
        """Bytes of a layer's sealed page, all heads."""
        return SealedPageLayout(fmt, self.head_dim).page_bytes * self.num_kv_heads

    def at_context(self, bytes_per_token: float, policy: PagePolicy) -> float:
        """Bytes per token of a full context: sinks, recent pages and the open one are fp16."""
        pages = max(1, self.context // PAGE_TOKENS)
        in_fp16 = min(pages, policy.sink_pages + policy.recent_pages + 1)
        fp16 = self.num_layers * open_page_bytes(self.num_kv_heads, self.head_dim)
        return (in_fp16 * fp16 + (pages - in_fp16) * bytes_per_token * PAGE_TOKENS) / (pages * PAGE_TOKENS)


def best_mixes(kl: np.ndarray, page_bytes: list[int]) -> list[Mix]:
    """The best mix of every size, from the smallest up, each with less KL than all smaller ones.

    kl: [layers, candidates], nats. page_bytes: of a layer's page in each candidate format.
    """
    unit = math.gcd(*page_bytes)
    smallest = min(page_bytes)
    extra = [(size - smallest) // unit for size in page_bytes]  # a layer's bytes above the smallest format
    best, picks = np.zeros(1), []
    for costs in kl:
        grown = np.full((len(extra), len(best) + max(extra)), np.inf)
        for candidate, more in enumerate(extra):
            grown[candidate, more : more + len(best)] = best + costs[candidate]
        picks.append(grown.argmin(0))
        best = grown.min(0)
    mixes, lowest = [], math.inf
    for size in range(len(best)):
        if best[size] < lowest:
            lowest = float(best[size])
            total = (len(kl) * smallest + size * unit) / PAGE_TOKENS
            mixes.append(Mix(_walk_back(picks, extra, size), total, lowest))
    return mixes


def cheapest(
    mixes: list[Mix], policies: dict[PagePolicy, float], budget: float, size: CacheSize, correction: float = 1.0
) -> Choice:
    """The choice with the fewest bytes at the full context whose KL stays within the budget.

    policies: the factor on KL of each. correction: measured KL over the predicted one, as far as known.
    """
    choices = []
    for policy, factor in policies.items():
        fitting = next((mix for mix in mixes if mix.kl * factor * correction <= budget), None)
        if fitting is not None:
            at_context = size.at_context(fitting.bytes_per_token, policy)
            choices.append(Choice(fitting, policy, fitting.kl * factor * correction, at_context))
    if not choices:
        lowest = min(policies.values()) * mixes[-1].kl * correction
        raise NibbleError(
            f"format search: no mix has a KL within the budget {budget:g}; the best has {lowest:g}. Raise kl_budget or "
            "add formats with more bits (fp16 always fits)"
        )
    return min(choices, key=lambda choice: (choice.bytes_at_context, choice.kl))


def _walk_back(picks: list[np.ndarray], extra: list[int], size: int) -> tuple[int, ...]:
    chosen = []
    for layer in reversed(picks):
        candidate = int(layer[size])
        chosen.append(candidate)
        size -= extra[candidate]
    return tuple(reversed(chosen))
