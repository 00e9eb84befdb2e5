"""The knapsack of the format search: exact, and within the budget."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from calibrate.search_choose import CacheSize, best_mixes, cheapest
from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.visibility import PagePolicy

PAGES = [4096, 4608, 6656, 8704, 16384]  # of int4-static, int4, k8v4, int8, fp16 at 64 channels
SIZE = CacheSize(num_layers=5, num_kv_heads=2, head_dim=64, context=1024)


@pytest.fixture
def kl() -> np.ndarray:
    random = np.random.default_rng(0)
    costs = random.exponential(size=(5, 1)) * np.array([[10.0, 2.0, 0.5, 0.01, 0.0]])
    return costs * random.uniform(0.5, 1.5, size=costs.shape)


def test_the_mixes_are_the_best_of_all_combinations(kl: np.ndarray) -> None:
    every = [
        (sum(PAGES[c] for c in mix), sum(kl[layer, c] for layer, c in enumerate(mix)))
        for mix in product(range(5), repeat=5)
    ]
    mixes = best_mixes(kl, PAGES)
    for mix in mixes:
        size = round(mix.bytes_per_token * 64)
        assert size == sum(PAGES[c] for c in mix.formats)
        assert mix.kl == pytest.approx(sum(kl[layer, c] for layer, c in enumerate(mix.formats)))
        assert mix.kl == pytest.approx(min(cost for bytes_, cost in every if bytes_ <= size))
    assert mixes[0].formats == (0,) * 5 and mixes[-1].kl == 0
    sizes, costs = [mix.bytes_per_token for mix in mixes], [mix.kl for mix in mixes]
    assert sizes == sorted(sizes) and costs == sorted(costs, reverse=True)


def test_the_cheapest_choice_weighs_fp16_pages_against_formats(kl: np.ndarray) -> None:
    mixes = best_mixes(kl, PAGES)
    policies = {PagePolicy(0, 0): 4.0, PagePolicy(1, 1): 1.0, PagePolicy(2, 2): 0.5}
    for budget in (0.05, 1.0, 8.0):
        choice = cheapest(mixes, policies, budget, SIZE)
        assert choice.kl <= budget
        fitting = [
            SIZE.at_context(mix.bytes_per_token, policy)
            for mix in mixes
            for policy, factor in policies.items()
            if mix.kl * factor <= budget
        ]
        assert choice.bytes_at_context == min(fitting)


def test_a_correction_makes_the_choice_more_careful(kl: np.ndarray) -> None:
    mixes, policies = best_mixes(kl, PAGES), {PagePolicy(): 1.0}
    plain, careful = (cheapest(mixes, policies, 2.0, SIZE, correction) for correction in (1.0, 3.0))
    assert careful.mix.bytes_per_token > plain.mix.bytes_per_token
    assert careful.mix.kl * 3 <= 2.0


def test_a_budget_that_nothing_meets_is_an_error(kl: np.ndarray) -> None:
    with pytest.raises(NibbleError, match=r"no mix has a KL within the budget 1e-06; the best has .* Raise kl_budget"):
        cheapest(best_mixes(kl[:, :2], PAGES[:2]), {PagePolicy(): 1.0}, 1e-6, SIZE)


def test_bytes_at_a_context_count_the_fp16_pages() -> None:
    sealed = 5 * SIZE.sealed_page(FORMATS["int4"]) / 64
    fp16 = 5 * SIZE.sealed_page(FORMATS["fp16"]) / 64
    assert SIZE.at_context(sealed, PagePolicy(1, 1)) == pytest.approx((3 * fp16 + 13 * sealed) / 16)
    assert SIZE.at_context(sealed, PagePolicy(16, 16)) == pytest.approx(fp16)
