"""The end of a format search: mixes really measured on held-out prompts, and the choice that holds there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.search_choose import CacheSize, Choice, Mix, best_mixes, cheapest
from calibrate.search_memory import SearchMemory
from calibrate.search_report import frontier_sizes
from calibrate.search_request import SearchRequest
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.visibility import PagePolicy

if TYPE_CHECKING:
    from calibrate.search_measure import SearchModel, Trace

MOST_CORRECTIONS = 6  # measured mixes at most before the search gives up
CLOSE_ENOUGH = 0.9  # a verified mix that uses so much of the budget is not corrected towards a cheaper one


class Verifier:
    """Measures mixes on the held-out windows."""

    def __init__(self, request: SearchRequest, subject: SearchModel, traces: list[Trace], memory: SearchMemory) -> None:
        self.candidates, self.subject, self.traces, self.memory = request.candidates, subject, traces, memory

    def kl(self, formats: tuple[int, ...], policy: PagePolicy) -> float:
        mix = [self.candidates[c] for c in formats]
        name = f"held out, {''.join(map(str, formats))} {policy.sink_pages} {policy.recent_pages}"
        work = len(self.subject.layers)
        figures = [
            self.memory.figure(f"{name}, {w}", work, lambda t=trace: self.subject.kl(t, mix, policy))  # type: ignore[misc]
            for w, trace in enumerate(self.traces)
        ]
        return float(np.mean(figures))


def choose_mix(
    request: SearchRequest,
    mixes: list[Mix],
    policies: dict[PagePolicy, float],
    size: CacheSize,
    verifier: Verifier,
) -> tuple[Choice, float, list[dict[str, float]]]:
    """Steps 3 and 4: the cheapest choice that holds on the held-out prompts, its KL there, and what was tried."""
    budget, correction = request.search.kl_budget, 1.0
    tried: list[tuple[Choice, float]] = []
    for _ in range(MOST_CORRECTIONS):
        choice = cheapest(mixes, policies, budget, size, correction)
        if any(choice.mix == before.mix and choice.policy == before.policy for before, _ in tried):
            break
        kl = verifier.kl(choice.mix.formats, choice.policy)
        tried.append((choice, kl))
        if CLOSE_ENOUGH * budget <= kl <= budget:
            break
        if kl > 0:
            correction = 1.02 * kl / (choice.kl / correction) if choice.kl > 0 else 1.0
    held = [(choice, kl) for choice, kl in tried if kl <= budget]
    record = [
        {"bytes_per_token": c.mix.bytes_per_token, "kl_predicted": c.mix.kl * policies[c.policy], "kl_held_out": kl}
        for c, kl in tried
    ]
    if not held:
        raise NibbleError(
            f"format search: {len(tried)} mixes were measured, the best with KL {min(kl for _, kl in tried):g} on held-"
            f"out prompts; allowed {budget:g}. Raise kl_budget, or choose on more windows"
        )
    choice, kl = min(held, key=lambda pair: (pair[0].bytes_at_context, pair[1]))
    return choice, kl, record


def choose_at_equal_sizes(
    request: SearchRequest, kl: np.ndarray, policies: dict[PagePolicy, float], size: CacheSize, verifier: Verifier
) -> list[dict[str, Any]]:
    """For each uniform format the best cache that weighs no more at the full context, fp16 pages included.

    Measured are the format itself, the mix that the sum of the layers ranks first with the recipe's pages, and the one
    that it ranks first with any pages. The best of them on the held-out prompts is taken, be it the uniform one. Static
    scales hold on text like the calibration's, which prompts can't tell: they are used where nothing else is as small.
    kl: [layers, candidates], nats.
    """
    page_bytes = [size.sealed_page(fmt) for fmt in request.candidates]
    static = [fmt.needs_calibration for fmt in request.candidates]
    steady, mixes = best_mixes(np.where(static, np.inf, kl), page_bytes), best_mixes(kl, page_bytes)
    found, base, layers = [], request.kv.policy, len(kl)
    for c, fmt in enumerate(request.candidates):
        if fmt.is_fp16:
            continue
        limit = size.at_context(size.sealed_page(fmt) * layers / PAGE_TOKENS, base)
        uniform = (c,) * layers
        for pool in (steady, mixes):
            fitting = {policy: _largest(pool, policy, limit, size) for policy in policies}
            ranked = [(policy, mix) for policy, mix in fitting.items() if mix is not None]
            best = min(ranked, key=lambda pair: pair[1].kl * policies[pair[0]], default=None)
            if best is not None and (best[1].formats, best[0]) != (uniform, base):
                break
        contenders = [(uniform, base)]
        contenders += [(mix.formats, policy) for policy, mix in ranked if policy == base or (policy, mix) == best]
        measured = {contender: verifier.kl(*contender) for contender in contenders}
        (formats, policy), lowest = min(measured.items(), key=lambda pair: pair[1])
        sealed = sum(size.sealed_page(request.candidates[f]) for f in formats) / PAGE_TOKENS
        found.append(
            {
                "format": fmt.name,
                "formats": [request.search.formats[f] for f in formats],
                "sink_pages": policy.sink_pages,
                "recent_pages": policy.recent_pages,
                "bytes_per_token": sealed,
                "bytes_per_token_at_context": size.at_context(sealed, policy),
                "uniform_bytes_per_token_at_context": limit,
                "kl_held_out": lowest,
                "kl_uniform": measured[uniform, base],
            }
        )
    return found


def _largest(mixes: list[Mix], policy: PagePolicy, limit: float, size: CacheSize) -> Mix | None:
    """The best mix that fits with these pages; mixes come with rising size and falling KL."""
    fitting = [mix for mix in mixes if size.at_context(mix.bytes_per_token, policy) <= limit]
    return fitting[-1] if fitting else None


def measure_frontier(
    request: SearchRequest, mixes: list[Mix], page_bytes: list[int], verifier: Verifier
) -> dict[str, list[dict[str, Any]]]:
    """Bytes against KL at the recipe's pages: all best mixes as predicted, some and the uniform formats measured."""
    layers, policy = len(mixes[0].formats), request.kv.policy
    sizes = [page * layers / 64 for page in page_bytes]
    uniform: list[dict[str, Any]] = [
        {"format": fmt.name, "bytes_per_token": size, "kl_held_out": verifier.kl((c,) * layers, policy)}
        for c, (fmt, size) in enumerate(zip(request.candidates, sizes, strict=True))
        if not fmt.is_fp16
    ]
    measured = []
    for limit in frontier_sizes([mixes[0].bytes_per_token, max(sizes)], [u["bytes_per_token"] for u in uniform]):
        mix = [mix for mix in mixes if mix.bytes_per_token <= limit][-1]
        kl = verifier.kl(mix.formats, policy)
        names = [request.search.formats[c] for c in mix.formats]
        measured.append({"bytes_per_token": mix.bytes_per_token, "kl_predicted": mix.kl, "kl_held_out": kl,
                         "formats": names})  # fmt: skip
    predicted = [{"bytes_per_token": mix.bytes_per_token, "kl_predicted": mix.kl} for mix in mixes]
    return {"uniform": uniform, "mixes": measured, "predicted": predicted}
