"""Inference on a mean over prompts: intervals and p with simulated coverage, and Holm's adjustment.

The mean change of a loss is a ratio, the sum of the prompts' changes over the sum of their tokens. The unit is the
prompt group. The interval is a bootstrap-t (Efron & Tibshirani 1993, chapter 12; the standard error of a ratio: Cochran
1977, section 2.11): resampled groups tell how (estimate - truth) / standard error is distributed, skewness included.
Below 16 groups there is none: a t interval over 8 to 24 groups covers lognormal effects to 0.83 to 0.88, a bootstrap-t
to 0.92 from 16 on (docs/statistics.md). Where prompts are drawn from strata, such as three books, groups are resampled
within each, and the standard error is that of a stratified sample: the interval is over prompts of these strata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int64

# Ends then err by under 1 % of the width, and p is fine enough for Holm's adjustment: the smallest is 1.25e-4, so that
# one of 399 can be significant; one of twelve is with up to 32 resamples on the other side of 0.
RESAMPLES = 20_000
# Of many prompts fewer are drawn, so that their counts take at most 40 MB; never fewer than LEAST_RESAMPLES.
MOST_COUNTS, LEAST_RESAMPLES = 5_000_000, 2000
CONFIDENCE = 0.95
# Share of resamples beyond both ends. Not 1 - CONFIDENCE: at 0.05 lognormal effects are covered to 0.925 at 32 and 40
# prompts, at 0.04 to 0.936 (8000 simulated sets each).
BEYOND = 0.04
LEAST_GROUPS = 16  # fewer: no interval
# No interval where an end lies farther from the mean than so many times the range of the groups' values: resamples
# without the one prompt that carries the mean do not tell how far it may lie. Leaves out none of 4000 simulated
# sets of normal effects, 1 in 1000 of lognormal ones at 32 prompts.
REACH = 0.5
SIGNIFICANCE = 0.05

Strata = Int64[np.ndarray, " group"]


@dataclass(frozen=True)
class MeanInference:
    """Inference on a mean over prompt groups; all NaN where it was not tested.

    Attributes:
        low, high: ends of its 95 % interval.
        p: two-sided, of the mean being 0: below SIGNIFICANCE where the interval excludes 0 and nowhere else.
        bound: the smallest b for which [-b, b] contains the 90 % interval: the mean is equivalent to 0
            within it (two one-sided tests at 5 %).
    """

    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    bound: float = math.nan


@lru_cache(maxsize=2)
def resamples(counts: tuple[int, ...], seed: int) -> Float[np.ndarray, "resample group"]:
    """Return how often each group occurs in each resample (not to be written to).

    Args:
        counts: groups of each stratum; the strata's columns stand side by side.
        seed: of the draws.
    """
    number = min(RESAMPLES, max(LEAST_RESAMPLES, MOST_COUNTS // sum(counts)))
    generator = np.random.default_rng(seed)
    drawn = [generator.multinomial(n, np.full(n, 1 / n), number) for n in counts]
    columns: np.ndarray = np.concatenate(drawn, axis=1).astype(float)
    columns.flags.writeable = False
    return columns


def infer_mean(
    change: Float[np.ndarray, " group"],
    weight: Float[np.ndarray, " group"],
    strata: Strata | None = None,
    *,
    seed: int = 0,
) -> MeanInference:
    """Return interval and p of sum(change) / sum(weight) over prompt groups.

    Each resample says how far, in standard errors, an estimate may lie from the truth, and so names a value that the
    truth may have. The interval leaves BEYOND of these values out; p is the share on the other side of 0, twice the
    smaller side, times (1 - CONFIDENCE) / BEYOND. (One is added to both counts: p is never 0.)

    Args:
        change: sum over each group (nats, for a loss).
        weight: what it is a sum over (tokens); groups of weight 0 count for nothing.
        strata: number of the stratum of each group; None, or one of them has a single group: all form one.
        seed: of resamples.

    Returns:
        NaNs if there are fewer than LEAST_GROUPS groups, a change is NaN, or an end lies too far (REACH).
    """
    counts = weight > 0
    groups = int(counts.sum())
    if groups < LEAST_GROUPS or not np.isfinite(change[counts]).all():
        return MeanInference()
    c, w = change[counts].astype(float), weight[counts].astype(float)
    order, sizes = _by_stratum(np.zeros(groups, np.int64) if strata is None else strata[counts])
    c, w = c[order], w[order]
    estimate, total = float(c.sum() / w.sum()), float(w.sum())
    residual = c - estimate * w
    columns = np.stack([w, residual, residual**2, residual * w, w**2], axis=1)
    error = float(_standard_errors(np.ones((1, groups)), columns, sizes, np.zeros(1))[0]) / total
    if error <= 1e-15 * max(abs(estimate), 1e-300):  # all groups agree but for rounding
        return MeanInference(estimate, estimate, _p(np.full(len(resamples(sizes, seed)), estimate)), abs(estimate))
    drawn = resamples(sizes, seed)
    totals, moved = np.moveaxis(drawn @ columns[:, :2], 1, 0)
    shift = moved / totals
    errors = _standard_errors(drawn, columns, sizes, shift) / totals
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(errors > 1e-6 * error, shift / errors, np.where(shift == 0, 0.0, np.copysign(np.inf, shift)))
    truths = estimate - t * error
    low, high = _ends(truths, BEYOND)  # as many lie beyond each end as p allows
    values = residual * groups / total
    if max(estimate - low, high - estimate) > REACH * np.ptp(values):
        return MeanInference()
    return MeanInference(low, high, _p(truths), max(map(abs, _ends(truths, 2 * BEYOND))))


def _by_stratum(strata: Strata) -> tuple[Int64[np.ndarray, " group"], tuple[int, ...]]:
    """Return the groups in the order of their strata, and how many each stratum has."""
    sizes = np.unique(strata, return_counts=True)[1]
    if sizes.min() < 2:
        return np.arange(len(strata)), (len(strata),)
    return np.argsort(strata, kind="stable"), tuple(map(int, sizes))


def _standard_errors(
    drawn: Float[np.ndarray, "resample group"],
    columns: Float[np.ndarray, "group 5"],
    sizes: Sequence[int],
    shift: Float[np.ndarray, " resample"],
) -> Float[np.ndarray, " resample"]:
    """Return the standard error of each resample's total, with residuals of the ratio that it has itself.

    Args:
        columns: of each group w, r, r², r w and w², with r its residual from the ratio of all groups.
        shift: the resample's ratio minus that of all groups.
    """
    variance, first = np.zeros(len(drawn)), 0
    for size in sizes:
        part = slice(first, first + size)
        weight, moved, square, mixed, weights = np.moveaxis(drawn[:, part] @ columns[part], 1, 0)
        mean = (moved - shift * weight) / size
        squares = square - 2 * shift * mixed + shift**2 * weights - size * mean**2
        variance += size / (size - 1) * np.maximum(squares, 0.0)
        first += size
    errors: np.ndarray = np.sqrt(variance)
    return errors


def _ends(truths: Float[np.ndarray, " resample"], beyond: float) -> tuple[float, float]:
    """Return both ends of the interval that leaves out this share of the truths."""
    last = max(1, math.ceil(beyond / 2 * (len(truths) + 1)) - 1) - 1
    low, high = np.partition(truths, [last, len(truths) - 1 - last])[[last, len(truths) - 1 - last]]
    return float(low), float(high)


def _p(truths: Float[np.ndarray, " resample"]) -> float:
    other = min(int((truths <= 0).sum()), int((truths >= 0).sum()))
    return min(1.0, (1 - CONFIDENCE) / BEYOND * 2 * (1 + other) / (len(truths) + 1))


def holm(
    p: Sequence[float] | Float[np.ndarray, " test"],
    tested: Sequence[bool] | Bool[np.ndarray, " test"] | None = None,
) -> Float[np.ndarray, " test"]:
    """Return p-values adjusted for their number (Holm 1979); NaN stay NaN.

    Args:
        tested: which of the NaN count as tests; None: none does.
    """
    values = np.asarray(p, float)
    adjusted = np.full(len(values), math.nan)
    known = np.flatnonzero(np.isfinite(values))
    more = 0 if tested is None else int((np.isnan(values) & np.asarray(tested, bool)).sum())
    order = known[np.argsort(values[known], kind="stable")]
    steps = values[order] * (len(order) + more - np.arange(len(order)))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0) if len(order) else []
    return adjusted


def by_group(values: Float[np.ndarray, " prompt"], groups: Int64[np.ndarray, " prompt"]) -> Float[np.ndarray, " group"]:
    """Return the sums over each group, in the order of the groups' numbers."""
    return np.bincount(np.unique(groups, return_inverse=True)[1], values).astype(float)
