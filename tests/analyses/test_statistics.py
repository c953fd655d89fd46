"""Intervals and p over prompt groups: their coverage, against scipy and plain numpy, and Holm's adjustment."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.statistics import LEAST_GROUPS, SIGNIFICANCE, infer_mean

ROOT = Path(__file__).parents[2]


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_coverage", ROOT / "bench" / "interval_coverage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kind", "groups", "least"), [("lognormal", 32, 0.92), ("three strata", LEAST_GROUPS, 0.93)])
def test_coverage(kind: str, groups: int, least: float) -> None:
    """400 sets here (standard error 0.011); the tables of the documentation are of 2000, and are checked below."""
    assert bench().worth(kind, groups, sets=400)["coverage"] >= least - 0.011


def test_the_table_of_the_documentation() -> None:
    table = pd.read_csv(bench().TABLE).set_index(["effects", "groups"])
    for kind in ("normal", "three strata"):
        assert (table.loc[kind, "coverage"] >= 0.94).all()
    assert (table.loc[["lognormal", "outliers"]].query("groups >= 32")["coverage"] >= 0.93).all()
    assert (table.loc["lognormal", "coverage"] >= 0.9).all()
    assert (table.query("groups >= 32")["given"] >= 0.99).all()


def test_below_that_there_is_none() -> None:
    assert all(map(math.isnan, vars(infer_mean(np.ones(LEAST_GROUPS - 1), np.ones(LEAST_GROUPS - 1))).values()))


def test_the_standard_error_of_a_stratified_sample() -> None:
    """Cochran 1977, section 5.4, here for a mean: Σ n_s² s_s² / n_s over n²."""
    generator, strata = np.random.default_rng(0), np.arange(22) % 3
    x = generator.normal(size=22) + np.array([0.0, 5.0, -3.0])[strata]
    variance = sum((strata == s).sum() * x[strata == s].var(ddof=1) for s in range(3)) / 22**2
    ones, residual = np.ones(22), (x - x.mean())[np.argsort(strata, kind="stable")]
    columns = np.stack([ones, residual, residual**2, residual, ones], axis=1)
    total = statistics._standard_errors(np.ones((1, 22)), columns, (8, 7, 7), np.zeros(1))
    assert total[0] / 22 == pytest.approx(math.sqrt(variance))
    inference = infer_mean(x, ones, strata)
    pooled = infer_mean(x, np.ones(22))
    assert inference.high - inference.low < 0.5 * (pooled.high - pooled.low)
    assert infer_mean(x, np.ones(22), np.arange(22)) == pooled  # every stratum has one group: there are no strata


def test_groups_are_resampled_within_strata() -> None:
    strata = np.arange(40) % 3
    drawn = statistics.resamples((14, 13, 13), 0)
    assert drawn.shape == (statistics.RESAMPLES, 40)
    assert [len(statistics.resamples((n,), 0)) for n in (500, 3000)] == [10_000, 2000]
    for first, last in ((0, 14), (14, 27), (27, 40)):
        assert (drawn[:, first:last].sum(1) == last - first).all()
    x = np.random.default_rng(1).normal(size=40) + 20.0 * strata
    narrow, wide = infer_mean(x, np.ones(40), strata), infer_mean(x, np.ones(40))
    assert narrow.high - narrow.low < 0.2 * (wide.high - wide.low)
    assert infer_mean(x, np.ones(40), np.zeros(40, int)) == wide


@pytest.mark.parametrize("kind", ["lognormal", "outliers"])
@pytest.mark.parametrize("groups", [LEAST_GROUPS, 32])
def test_p_is_below_005_exactly_where_the_interval_excludes_0(kind: str, groups: int) -> None:
    generator, both = np.random.default_rng(1), set()
    for shift in np.linspace(-1.5, 1.5, 120):
        x, truth = bench().effects(kind, groups, generator)
        inference = infer_mean(x - truth + shift, np.ones(groups))
        if not math.isnan(inference.low):
            assert (inference.p < SIGNIFICANCE) == (inference.low > 0 or inference.high < 0)
            both.add(inference.p < SIGNIFICANCE)
    assert both == {True, False}


def test_p_at_the_very_ends() -> None:
    """Moved to where an end is 0, and a little to either side."""
    x = np.random.default_rng(0).standard_normal(40)
    inference = infer_mean(x, np.ones(40))
    for end, inwards in ((inference.low, 1), (inference.high, -1)):
        assert infer_mean(x - end + inwards * 1e-9, np.ones(40)).p < SIGNIFICANCE
        assert infer_mean(x - end - inwards * 1e-9, np.ones(40)).p >= SIGNIFICANCE


def test_p_is_fine_enough_for_holm() -> None:
    ones = np.ones(64)
    least = infer_mean(np.random.default_rng(0).normal(5, 1, 64), ones).p
    assert least == pytest.approx(2.5 / (statistics.RESAMPLES + 1))
    assert infer_mean(ones, ones).p == least
    assert infer_mean(0 * ones, ones).p == 1.0
    assert len(statistics.resamples((2000,), 0)) == 2500


def test_no_interval_where_a_few_prompts_carry_everything() -> None:
    """A norm was printed as +0.582 [-0.092, 246.128]: one prompt of 32 rises by 18 nats, the others hardly change."""
    ones = np.ones(32)
    x = np.random.default_rng(0).normal(0.01, 0.01, 32)
    for outlier in (18.6, 0.8):
        x[5] = outlier
        assert all(map(math.isnan, vars(infer_mean(x, ones)).values()))
    x[5] = 0.5  # an outlier of 50 standard deviations still has one
    assert not math.isnan(infer_mean(x, ones).low)


def test_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    generator = np.random.default_rng(0)
    weight = generator.integers(5, 200, 40).astype(float)
    change = weight * (0.3 + generator.normal(0, 0.05, 40))
    inference, estimate = infer_mean(change, weight), change.sum() / weight.sum()
    error = math.sqrt(40 / 39 * ((change - estimate * weight) ** 2).sum()) / weight.sum()
    half = stats.t.ppf(0.98, 39) * error  # normal effects: near Student's, at the same share beyond the ends
    assert (inference.high - inference.low) / 2 == pytest.approx(half, rel=0.15)
    assert infer_mean(np.append(change, 0.0), np.append(weight, 0.0)) == inference  # a prompt that predicts nothing
    unknown = np.where(np.arange(40) == 3, math.nan, 1.0)
    assert math.isnan(infer_mean(unknown, np.ones(40)).low)


def test_the_equivalence_bound_is_the_farther_end_of_the_90_percent_interval() -> None:
    change = np.random.default_rng(0).normal(0.01, 0.05, 64)
    ends = change.mean() + change.std(ddof=1) / 8 * np.array([-1.67, 1.67])  # t with 63 degrees of freedom
    assert infer_mean(change, np.ones(64)).bound == pytest.approx(np.abs(ends).max(), rel=0.06)


def test_holm() -> None:
    tested = [True, True, True, False]
    adjusted = statistics.holm([0.01, math.nan, 0.03, math.nan], tested)
    assert adjusted.tolist() == pytest.approx([0.03, math.nan, 0.06, math.nan], nan_ok=True)
    assert statistics.holm([]).tolist() == []
    assert statistics.holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    adjusted = statistics.holm([0.01, math.nan, 0.04, 0.02])
    assert adjusted.tolist() == pytest.approx([0.03, math.nan, 0.04, 0.04], nan_ok=True)


def test_sums_over_groups() -> None:
    assert statistics.by_group(np.array([1.0, 2.0, 4.0]), np.array([7, 3, 7])).tolist() == [2.0, 5.0]
