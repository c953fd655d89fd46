"""Intervals over seeds: by hand, by another formula, and their coverage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ln_probe.analyses.lab.results import binomial_interval, interval, paired_p, share_interval

SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(SHARES)
def test_shares_stay_between_0_and_1_and_hold_their_mean(shares: list[float]) -> None:
    center, low, high = share_interval(np.array(shares))
    assert 0 <= low <= center <= high <= 1


def test_seeds_that_differ_by_rounding_agree() -> None:
    """Three times 0.1 has a mean of 0.10000000000000002 and a standard deviation of 1.7e-17: no 10^32 trials."""
    assert share_interval(np.full(3, 0.1)) == pytest.approx((0.1, *binomial_interval(0.3, 3)))


def test_seeds_that_agree_count_as_one_trial_each() -> None:
    assert share_interval(np.ones(3))[1:] == pytest.approx((0.025 ** (1 / 3), 1))  # 0.2924, by hand
    assert share_interval(np.zeros(10))[1:] == pytest.approx((0, 1 - 0.025**0.1))


@pytest.mark.parametrize(("hits", "trials"), [(1, 2), (0, 9), (267, 300), (10, 10)])
def test_clopper_pearson_by_scipy(hits: int, trials: int) -> None:
    exact = stats.binomtest(hits, trials).proportion_ci(0.95)
    assert binomial_interval(hits, trials) == pytest.approx((exact.low, exact.high), abs=1e-12)


# Coverage of the 95 % intervals over 20,000 draws, Student's t beside: (20, 2): .949/.920 with 3 seeds, .948/.929 with
# 10; (2, 5): .953/.932 and .957/.940; (1, 0.3), most of it at 1: .913/.826 and .951/.912.
@pytest.mark.parametrize(
    ("a", "b", "seeds", "covers"),
    [(20, 2, 3, 0.949), (2, 5, 3, 0.953), (1, 0.3, 3, 0.913), (20, 2, 10, 0.948), (1, 0.3, 10, 0.951)],
)
def test_share_intervals_cover(a: float, b: float, seeds: int, covers: float) -> None:
    """Runs whose share is beta distributed over seeds, measured on 500 words: within 3 standard errors of 800 draws."""
    rng = np.random.default_rng(0)
    drawn = rng.binomial(500, rng.beta(a, b, (800, seeds))) / 500
    held = [low <= a / (a + b) <= high for _, low, high in map(share_interval, drawn)]
    assert np.mean(held) == pytest.approx(covers, abs=3 * np.sqrt(covers * (1 - covers) / 800))


def test_logarithms() -> None:
    center, low, high = interval(np.array([1e-9, 1e-7, 1e-5]), "log")
    assert center == pytest.approx(1e-7)
    half = 4.302652729911275 * 2 / np.sqrt(3)  # decades
    assert (low, high) == pytest.approx((10 ** (-7 - half), 10 ** (-7 + half)))
    assert np.isnan(interval(np.array([0.5]), "log")[1:]).all()


def test_paired_tests_of_what_does_not_vary() -> None:
    assert paired_p(np.zeros(3)) == 1
    assert paired_p(np.full(3, 0.5)) == 0.25  # the sign test's: t would say 0 of any two equal numbers
    assert paired_p(np.array([0.99, 0.99 + 1e-16, 0.99])) == 0.25
    assert np.isnan(paired_p(np.ones(1)))
    x = np.array([0.1, 0.5, -0.2, 0.9])
    assert paired_p(x) == pytest.approx(stats.ttest_rel(x, np.zeros(4)).pvalue)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: interval(np.array([])), "no values to take an interval over"),
    (lambda: interval(np.ones(2), "harmonic"), "unknown kind of interval 'harmonic': known are mean, share, log"),  # type: ignore[arg-type]
    (lambda: interval(np.array([1.0, 0.0]), "log"), "the logarithm needs positive values, the least is 0"),
    (lambda: share_interval(np.array([0.5, 1.2])), "shares lie between 0 and 1, got 0.5 to 1.2"),
    (lambda: binomial_interval(3, 2), "hits must lie between 0 and trials > 0, got 3 of 2"),
])  # fmt: skip
def test_bad_input(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call()


def test_next_to_no_hits_are_none() -> None:
    """0.025^(1/hits) is below the smallest double there is from 0.0049 hits on; solvers give anything, or overflow."""
    for hits in (0.0, 5e-324, 1e-300, 1e-9, 0.003):
        assert binomial_interval(hits, 5.0)[0] == 0.0
    low, high = binomial_interval(0.02, 5.0)
    assert 0 < low < 1e-70
    assert low < 0.004 < high
