"""Intervals over seeds for the three kinds of numbers the laboratory measures, and Holm's adjustment.

mean    anything without a natural bound: Student's t over seeds
share   a share of words, keys or draws, between 0 and 1: the beta (Clopper-Pearson) interval of a binomial with as many
        trials as the spread between seeds says they are worth (Korn & Graubard 1998, Survey Methodology 24, "Confidence
        intervals for proportions with small expected number of positive counts"); it cannot leave 0 to 1
log     errors over many orders of magnitude: Student's t of the logarithms; it cannot fall below 0

A single seed has no interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import stats  # type: ignore[import-untyped]

LEVEL = 0.95
SIGNIFICANT = 0.05  # of Holm's p over all contrasts that an experiment's sentences speak of: below it they do
AGREEMENT = 1e-6  # spread of shares over seeds below which they agree: one in a million words; 0.1 three times is 1e-17
# Fewer hits than this: the lower end, at most 0.025^(1/hits), is below 1e-400, and solvers of it overflow.
_NO_HITS = 0.004
Kind = Literal["mean", "share", "log"]


def doubt(p_holm: float, seeds: int) -> str:
    """What a sentence about a difference ends with: nothing where Holm's p lets it be told."""
    if p_holm < SIGNIFICANT:
        return ""
    return ": no difference that these seeds can tell" if seeds > 1 else ": one seed, which tells nothing by itself"


def interval(values: Float[np.ndarray, " seed"], kind: Kind = "mean") -> tuple[float, float, float]:
    """The center over seeds and its 95 % interval.

    Args:
        values: one per seed.
        kind: see above. The center is the mean, of "log" the geometric mean.

    Returns:
        center, low, high; low and high are NaN for a single seed.

    Raises:
        ValueError: no values, a share outside 0 to 1, a logarithm of what is not positive, an unknown kind.
    """
    if not len(values):
        raise ValueError("no values to take an interval over")
    if kind == "share":
        return share_interval(values)
    if kind == "log":
        if not (values > 0).all():
            raise ValueError(f"the logarithm needs positive values, the least is {values.min():g}")
        center, low, high = np.exp(interval(np.log(values)))
        return float(center), float(low), float(high)
    if kind != "mean":
        raise ValueError(f"unknown kind of interval {kind!r}: known are mean, share, log")
    center = float(values.mean())
    if len(values) == 1:
        return center, np.nan, np.nan
    half = _t(len(values)) * float(values.std(ddof=1)) / np.sqrt(len(values))
    return center, center - half, center + half


def share_interval(shares: Float[np.ndarray, " seed"]) -> tuple[float, float, float]:
    """The mean of one share per seed and its Korn-Graubard interval.

    The effective number of trials is p (1 - p) over the variance of the mean, times (z / t)² for estimating that
    variance from few seeds. Where all seeds agree, variance says nothing: then each seed counts as one trial, so three
    seeds of three at 1 give [0.29, 1].

    Raises:
        ValueError: a share outside 0 to 1.
    """
    if not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError(f"shares lie between 0 and 1, got {shares.min():g} to {shares.max():g}")
    p = float(shares.mean())
    return p, *share_interval_of(p, float(shares.std(ddof=1)) if len(shares) > 1 else np.nan, len(shares))


def share_interval_of(mean: float, sd: float, seeds: int) -> tuple[float, float]:
    """`share_interval` from the mean, the standard deviation over seeds and their number."""
    if seeds == 1:
        return np.nan, np.nan
    trials = float(seeds)
    if sd > AGREEMENT and 0 < mean < 1:
        trials = mean * (1 - mean) / (sd**2 / seeds) * float(stats.norm.ppf((1 + LEVEL) / 2) / _t(seeds)) ** 2
    low, high = binomial_interval(mean * trials, trials)
    return min(low, mean), high


def binomial_interval(hits: float, trials: float) -> tuple[float, float]:
    """The exact (Clopper-Pearson) 95 % interval of a share; hits and trials need not be whole numbers.

    Raises:
        ValueError: hits below 0 or above trials.
    """
    if not 0 <= hits <= trials or trials <= 0:
        raise ValueError(f"hits must lie between 0 and trials > 0, got {hits:g} of {trials:g}")
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits < _NO_HITS else float(stats.beta.ppf(tail, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(stats.beta.ppf(1 - tail, hits + 1, trials - hits))
    return low, high


def paired_p(differences: Float[np.ndarray, " seed"]) -> float:
    """Two-sided p of Student's paired t test; NaN with one seed.

    Where all differences are the same, t knows no end: 1 if they are 0, else that of the sign test, 2^(1 - n).
    """
    if len(differences) < 2:
        return np.nan
    if float(differences.std(ddof=1)) <= AGREEMENT * max(1e-300, float(np.abs(differences).max())):
        return 1.0 if not differences.any() else float(2.0 ** (1 - len(differences)))
    return float(stats.ttest_1samp(differences, 0).pvalue)


def holm(p: Sequence[float] | Float[np.ndarray, " contrast"]) -> Float[np.ndarray, " contrast"]:
    """Holm's adjusted p-values: below 0.05 with a chance of 5 % at most that any such contrast is none.

    NaNs (no test) stay NaN and do not count.
    """
    given = np.asarray(p, dtype=float)
    adjusted = np.full(len(given), np.nan)
    told = np.flatnonzero(~np.isnan(given))
    order = told[np.argsort(given[told], kind="stable")]
    steps = given[order] * (len(order) - np.arange(len(order)))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(order) else []
    return adjusted


def _t(seeds: int) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, seeds - 1))
