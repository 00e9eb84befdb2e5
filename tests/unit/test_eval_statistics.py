"""Aggregates, buckets and intervals on positions whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from eval.measures import PositionMeasures
from eval.statistics import bucket_bounds, kl_distribution, summarise
from eval.windows import Window


def windows_of(measured: list[PositionMeasures]) -> list[Window]:
    return [Window("text", index * 9, (index,) * (len(part) + 1)) for index, part in enumerate(measured)]


def constant(kl: float, nll: float, nll_fp16: float, positions: int = 600) -> PositionMeasures:
    same = np.arange(positions) % 10 != 0
    return PositionMeasures(*(np.full(positions, value) for value in (kl, nll, nll_fp16)), same)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (100, [(0, 100)]),
        (256, [(0, 256)]),
        (1024, [(0, 256), (256, 512), (512, 1024)]),
        (5000, [(0, 256), (256, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 5000)]),
    ],
)
def test_buckets_double_and_cover_every_position(positions: int, expected: list[tuple[int, int]]) -> None:
    assert bucket_bounds(positions) == expected


def test_figures_of_constant_windows() -> None:
    measured = [constant(0.001, 3.0, 2.9), constant(0.003, 2.0, 2.1)]
    quality = summarise(windows_of(measured), measured, seed=0)
    assert quality.positions == 1200
    assert quality.kl.mean == pytest.approx(0.002)
    assert quality.kl_mean.value == pytest.approx(0.002)
    assert quality.ppl == pytest.approx(np.exp(2.5))
    assert quality.ppl_fp16 == pytest.approx(np.exp(2.5))
    assert quality.ppl_delta_pct.value == pytest.approx(0.0, abs=1e-9)
    assert quality.top1_agreement.value == pytest.approx(0.9)
    assert [bucket.positions for bucket in quality.buckets] == [512, 512, 176]
    assert [figures.kl_mean for figures in quality.per_window] == pytest.approx([0.001, 0.003])


def test_percentiles_of_a_tail() -> None:
    kl = np.zeros(10_001)
    kl[-11:] = 5.0
    figures = kl_distribution(kl)
    assert (figures.p50, figures.p99, figures.max) == (0.0, 0.0, 5.0)
    assert figures.p999 == pytest.approx(5.0)


def test_a_fault_late_in_the_window_shows_in_its_bucket_only() -> None:
    kl = np.zeros(1024)
    kl[700:] = 1.0
    part = PositionMeasures(kl, np.ones(1024), np.ones(1024), np.ones(1024, dtype=bool))
    buckets = summarise(windows_of([part]), [part], seed=0).buckets
    assert [bucket.kl.mean > 0 for bucket in buckets] == [False, False, True]


def test_pairing_keeps_the_texts_own_difficulty_out_of_the_interval() -> None:
    """Windows differ by whole nats, the engines by the same 0.01 in each: the paired interval has no width."""
    measured = [constant(0.01, base + 0.01, base) for base in np.linspace(1.0, 5.0, 12)]
    estimate = summarise(windows_of(measured), measured, seed=0).ppl_delta_pct
    assert estimate.interval is not None
    assert estimate.interval == pytest.approx([100 * np.expm1(0.01)] * 2)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(60):
        means = generator.exponential(1.0, size=30)
        measured = [constant(kl, 1.0, 1.0, positions=4) for kl in means]
        interval = summarise(windows_of(measured), measured, seed=seed).kl_mean.interval
        assert interval is not None
        hits += interval[0] <= 1.0 <= interval[1]
    assert hits >= 50


def test_the_seed_decides_the_interval() -> None:
    measured = [constant(kl, 1.0, 1.0) for kl in (0.1, 0.5, 0.2, 0.9)]
    first, again, other = (summarise(windows_of(measured), measured, seed=seed).kl_mean for seed in (1, 1, 2))
    assert first == again
    assert first.interval != other.interval


def test_one_window_has_no_interval() -> None:
    measured = [constant(0.1, 1.0, 1.0)]
    assert summarise(windows_of(measured), measured, seed=0).kl_mean.interval is None
