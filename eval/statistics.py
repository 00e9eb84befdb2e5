"""From positions to the figures of a report: means, tails, position buckets, paired confidence intervals.

Positions of one window are not independent, windows are. So an interval resamples whole windows (percentile bootstrap),
and takes the same windows from both engines each time: the text's own difficulty cancels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from eval.measures import PositionMeasures
from eval.records import Bucket, Distribution, Estimate, Quality, WindowFigures
from eval.windows import Window

RESAMPLES = 2000
TAIL_RESAMPLES = 500
CONFIDENCE = 0.95
FIRST_BUCKET_END = 256

Statistic = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def summarise(
    windows: list[Window], measured: list[PositionMeasures], *, seed: int, words: int | None = None
) -> Quality:
    """All quality figures. `measured[i]` belongs to `windows[i]`; every window has the same number of positions.

    words: how many the predicted tokens make, for word perplexity.
    """
    every = PositionMeasures.concatenate(measured)
    return Quality(
        positions=len(every),
        windows=len(measured),
        kl=kl_distribution(every.kl),
        kl_p999=_tail_estimate(measured, seed),
        kl_mean=_estimate(measured, seed, lambda kl, nll, nll_fp16: kl),
        ppl=float(np.exp(every.nll.mean())),
        ppl_fp16=float(np.exp(every.nll_fp16.mean())),
        word_ppl=float(np.exp(every.nll.sum() / words)) if words else None,
        word_ppl_fp16=float(np.exp(every.nll_fp16.sum() / words)) if words else None,
        words=words,
        ppl_delta_pct=_estimate(measured, seed, lambda kl, nll, nll_fp16: 100 * np.expm1(nll - nll_fp16)),
        top1_agreement=_mean_estimate([part.top1_same for part in measured], seed),
        buckets=[_bucket(measured, start, end, seed) for start, end in bucket_bounds(len(measured[0]))],
        per_window=[_window_figures(window, part) for window, part in zip(windows, measured, strict=True)],
    )


def kl_distribution(kl: np.ndarray) -> Distribution:
    """Mean, percentiles and maximum of KL in nats over all positions."""
    p50, p99, p999 = np.quantile(kl, [0.5, 0.99, 0.999])
    return Distribution(
        mean=float(kl.mean()),
        p50=float(p50),
        p99=float(p99),
        p999=float(p999),
        max=float(kl.max()),
    )


def bucket_bounds(positions: int) -> list[tuple[int, int]]:
    """[0, 256), [256, 512), [512, 1024), ... doubling; the last one is cut at `positions`."""
    bounds, start, end = [], 0, FIRST_BUCKET_END
    while start < positions:
        bounds.append((start, min(end, positions)))
        start, end = end, 2 * end
    return bounds


def bootstrap_interval(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int) -> list[float]:
    """[low, high] of a statistic of window means.

    values: [figures, windows]. statistic: maps [figures, resamples] (means over resampled windows) to [resamples].
    """
    windows = values.shape[1]
    chosen = np.random.default_rng(seed).integers(0, windows, size=(RESAMPLES, windows))
    resampled = statistic(values[:, chosen].mean(axis=2))
    tail = (1 - CONFIDENCE) / 2
    return [float(bound) for bound in np.quantile(resampled, [tail, 1 - tail])]


def _estimate(measured: list[PositionMeasures], seed: int, statistic: Statistic) -> Estimate:
    means = np.array([[part.kl.mean(), part.nll.mean(), part.nll_fp16.mean()] for part in measured]).T
    value = float(statistic(*means.mean(axis=1)))
    if len(measured) < 2:
        return Estimate(value=value, interval=None)
    return Estimate(
        value=value,
        interval=bootstrap_interval(means, lambda rows: statistic(*rows), seed),
    )


def _mean_estimate(values: list[np.ndarray], seed: int) -> Estimate:
    """The mean of values [positions] that each window has, and its interval."""
    means = np.array([[part.mean() for part in values]])
    interval = bootstrap_interval(means, lambda rows: rows[0], seed) if len(values) > 1 else None
    return Estimate(value=float(means.mean()), interval=interval)


def _tail_estimate(measured: list[PositionMeasures], seed: int) -> Estimate:
    """p99.9 of KL with its interval; every resample pools the positions of the windows that were drawn."""
    kl = np.stack([part.kl for part in measured])
    value = float(np.quantile(kl, 0.999))
    if len(measured) < 2:
        return Estimate(value=value, interval=None)
    chosen = np.random.default_rng(seed).integers(0, len(kl), size=(TAIL_RESAMPLES, len(kl)))
    tails = [np.quantile(kl[windows], 0.999) for windows in chosen]
    tail = (1 - CONFIDENCE) / 2
    return Estimate(value=value, interval=[float(bound) for bound in np.quantile(tails, [tail, 1 - tail])])


def _bucket(measured: list[PositionMeasures], start: int, end: int, seed: int) -> Bucket:
    part = PositionMeasures.concatenate(
        [
            PositionMeasures(
                m.kl[start:end],
                m.nll[start:end],
                m.nll_fp16[start:end],
                m.top1_same[start:end],
            )
            for m in measured
        ]
    )
    return Bucket(
        start=start,
        end=end,
        positions=len(part),
        kl=kl_distribution(part.kl),
        kl_mean=_mean_estimate([m.kl[start:end] for m in measured], seed),
        ppl_delta_pct=float(100 * np.expm1(part.nll.mean() - part.nll_fp16.mean())),
        top1_agreement=float(part.top1_same.mean()),
        flips=int((~part.top1_same).sum()),
    )


def _window_figures(window: Window, part: PositionMeasures) -> WindowFigures:
    return WindowFigures(
        text=window.text,
        start=window.start,
        sha256=window.sha256,
        kl_mean=float(part.kl.mean()),
        nll=float(part.nll.mean()),
        nll_fp16=float(part.nll_fp16.mean()),
        top1_agreement=float(part.top1_same.mean()),
    )
