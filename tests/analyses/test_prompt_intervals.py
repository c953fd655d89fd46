"""Intervals over prompts: their coverage by simulation, and where there is none."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats  # type: ignore[import-untyped]

from ln_probe.analyses.probes.statistics import (
    PROMPTS_NEEDED,
    RESAMPLES,
    SIGNIFICANCE,
    coverage,
    effects,
    holm,
    infer_mean,
    interval,
    median,
    resamples,
    sign_test,
)

LEAST = 0.93
ROOT = Path(__file__).parents[2]


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_coverage", ROOT / "bench" / "interval_coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["normal", "lognormal", "outliers"])
def test_coverage(kind: str) -> None:
    """400 sets here (standard error 0.011); the documentation's tables are of 4000, and are checked below."""
    held, given = coverage(kind, PROMPTS_NEEDED, sets=400)
    assert held >= LEAST - 0.011
    assert given >= 0.99
    for few in (4, 8, 16):
        assert math.isnan(coverage(kind, few, sets=1)[0])


def test_the_page_shows_what_was_simulated() -> None:
    """And every kind that intervals are given for is covered, but for the rare outliers that the page names."""
    made = bench()
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    table = pd.read_csv(made.TABLE).dropna().set_index(["effects", "prompts"])
    for kind in ("normal", "lognormal", "outliers"):
        assert (table.loc[kind, "coverage"] >= LEAST).all()
        assert (table.loc[kind, "given"] >= 0.999).all()
    for cell in table.loc[["outliers 3 %", "outliers 5 %"], "coverage"]:
        assert f"{cell:.2f}" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "lognormal", "outliers", "outliers 5 %", "outliers 3 %"])
@pytest.mark.parametrize("prompts", [4, 8, 16, 32, 64])
def test_what_was_simulated(kind: str, prompts: int) -> None:
    made = bench()
    table = pd.read_csv(made.TABLE).set_index(["effects", "prompts"])
    found = made.worth(kind, prompts)
    assert [found[c] for c in table] == pytest.approx(table.loc[(kind, prompts)].tolist(), abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("kind", ["normal", "lognormal", "outliers"])
def test_p_is_below_005_exactly_where_the_interval_excludes_0(kind: str) -> None:
    generator, both = np.random.default_rng(1), set()
    for shift in np.linspace(-1.5, 1.5, 120):
        x, truth = effects(kind, PROMPTS_NEEDED, generator)
        found = infer_mean(x - truth + shift, np.ones(PROMPTS_NEEDED))
        if not math.isnan(found.low):
            assert (found.p < SIGNIFICANCE) == (found.low > 0 or found.high < 0)
            both.add(found.p < SIGNIFICANCE)
    assert both == {True, False}


def test_p_at_the_very_ends() -> None:
    """Moved to where an end is 0, and a little to either side."""
    x = np.random.default_rng(0).standard_normal(40)
    found = infer_mean(x, np.ones(40))
    for end, inwards in ((found.low, 1), (found.high, -1)):
        assert infer_mean(x - end + inwards * 1e-9, np.ones(40)).p < SIGNIFICANCE
        assert infer_mean(x - end - inwards * 1e-9, np.ones(40)).p >= SIGNIFICANCE


def test_p_is_fine_enough_for_holm() -> None:
    ones = np.ones(64)
    least = infer_mean(np.random.default_rng(0).normal(5, 1, 64), ones).p
    assert least == pytest.approx(2.5 / (RESAMPLES + 1))
    assert 12 * least < SIGNIFICANCE / 30
    assert infer_mean(ones, ones).p == least
    assert infer_mean(0 * ones, ones).p == 1.0
    assert math.isnan(infer_mean(ones[:20], ones[:20]).p)
    assert len(resamples(64, 0)) == RESAMPLES
    assert len(resamples(2000, 0)) == 2500
    assert len(resamples(100_000, 0, least=10**6)) == 0


def test_no_interval_where_a_few_prompts_carry_everything() -> None:
    """A norm was printed as +0.582 [-0.092, 246.128]: one prompt of 32 rises by 18 nats, the others hardly change."""
    ones = np.ones(32)
    x = np.random.default_rng(0).normal(0.01, 0.01, 32)
    x[5] = 18.6
    wide = infer_mean(x, ones, reach=math.inf)
    assert wide.high > 100
    assert all(map(math.isnan, (infer_mean(x, ones).low, infer_mean(x, ones).high, infer_mean(x, ones).p)))
    assert median(x, ones) < 0.02
    x[5] = 0.5  # an outlier of 50 standard deviations still has one
    assert not math.isnan(infer_mean(x, ones).low)
    assert math.isnan(median(np.array([1.0, math.nan]), np.ones(2)))
    assert math.isnan(median(np.ones(2), np.zeros(2)))
    assert median(np.array([2.0, 9.0, 3.0]), np.array([1.0, 3.0, 0.0])) == 2.5


def test_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    generator = np.random.default_rng(0)
    weight = generator.integers(5, 200, 40).astype(float)
    change = weight * (0.3 + generator.normal(0, 0.05, 40))
    low, high = interval(change, weight)
    estimate = change.sum() / weight.sum()
    assert low < estimate < high
    error = math.sqrt(40 / 39 * ((change - estimate * weight) ** 2).sum()) / weight.sum()
    half = stats.t.ppf(0.98, 39) * error  # normal effects: near Student's, at the same share beyond the ends
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    same = interval(np.append(change, 0.0), np.append(weight, 0.0))  # a prompt that predicts nothing
    assert same == (low, high)


def test_where_there_is_nothing_to_say() -> None:
    ones = np.ones(40)
    assert interval(0.5 * ones, ones) == (0.5, 0.5)
    assert all(map(math.isnan, interval(np.where(np.arange(40) == 3, math.nan, 1.0), ones)))
    one = (np.arange(40) == 3) * 1.0  # one prompt alone changes: no upper end can be told
    assert infer_mean(one, ones, reach=math.inf).high == math.inf
    assert all(map(math.isnan, interval(one, ones)))


def test_signs_and_holm() -> None:
    assert sign_test(np.ones(12)) == pytest.approx(2**-11)
    assert sign_test(np.array([1.0, -1.0, 0.0])) == 1.0
    assert math.isnan(sign_test(np.array([math.nan])))
    assert math.isnan(sign_test(np.array([1.0] * 12 + [math.nan]))), "not of the prompts that happen to be finite"
    looked_at = [True, True, True, False]
    assert holm([0.01, math.nan, 0.03, math.nan], looked_at).tolist() == pytest.approx(
        [0.03, math.nan, 0.06, math.nan], nan_ok=True
    )
    assert holm([]).tolist() == []
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert holm([0.01, math.nan, 0.04, 0.02]).tolist() == pytest.approx([0.03, math.nan, 0.04, 0.04], nan_ok=True)
