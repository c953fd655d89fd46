"""Intervals over prompts: their coverage by simulation, and where there is none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from ln_probe.analyses.prompt_intervals import PROMPTS_NEEDED, coverage, holm, interval, sign_test

LEAST = 0.93
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["normal", "lognormal", "outliers"])
def test_coverage(kind: str) -> None:
    """400 sets here (standard error 0.011); the documentation's table is of 4000, and is checked below."""
    assert coverage(kind, PROMPTS_NEEDED, sets=400) >= LEAST - 0.011
    for few in (4, 8, 16):
        assert math.isnan(coverage(kind, few, sets=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "lognormal", "outliers"])
@pytest.mark.parametrize("prompts", [4, 8, 16, 32, 64])
def test_the_documented_coverage(kind: str, prompts: int) -> None:
    """Below PROMPTS_NEEDED no interval is given: what it would cover there is documented, too."""
    said = (ROOT / "docs" / "statistics.md").read_text()
    found = coverage(kind, prompts, sets=4000, least=prompts)
    assert prompts < PROMPTS_NEEDED or found >= LEAST
    row = next(line for line in said.splitlines() if line.startswith(f"| {kind} |"))
    assert f"{found:.3f}" == row.split("|")[2 + [4, 8, 16, 32, 64].index(prompts)].strip()


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
    low, high = interval((np.arange(40) == 3) * 1.0, ones)  # one prompt alone changes: no upper end can be told
    assert low <= 1 / 40 < high == math.inf


def test_signs_and_holm() -> None:
    assert sign_test(np.ones(12)) == pytest.approx(2**-11)
    assert sign_test(np.array([1.0, -1.0, 0.0])) == 1.0
    assert math.isnan(sign_test(np.array([math.nan])))
    assert math.isnan(sign_test(np.array([1.0] * 12 + [math.nan]))), "not of the prompts that happen to be finite"
    assert holm([0.01, math.nan, 0.04, 0.02]).tolist() == pytest.approx([0.03, math.nan, 0.04, 0.04], nan_ok=True)
