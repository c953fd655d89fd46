"""Intervals over seeds: by hand, by another formula, and their coverage; tables of experiments; maps of random keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.majority.majority import MajorityTask
from ln_probe.analyses.lab.results import binomial_interval, paired_p, share_interval, summarize
from ln_probe.analyses.lab.runs import planned
from ln_probe.analyses.lab.train import TrainConfig
from ln_probe.analyses.lab.transformer import LabConfig

SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(SHARES)
def test_shares_stay_between_0_and_1_and_hold_their_mean(shares: list[float]) -> None:
    center, low, high = share_interval(np.array(shares))
    assert 0 <= low <= center <= high <= 1


def test_seeds_that_agree_count_as_one_trial_each() -> None:
    """Three times 0.1 has a mean of 0.10000000000000002 and a standard deviation of 1.7e-17: no 10^32 trials."""
    assert share_interval(np.full(3, 0.1)) == pytest.approx((0.1, *binomial_interval(0.3, 3)))
    assert share_interval(np.ones(3))[1:] == pytest.approx((0.025 ** (1 / 3), 1))  # 0.2924, by hand
    assert share_interval(np.zeros(10))[1:] == pytest.approx((0, 1 - 0.025**0.1))


def test_paired_tests_of_what_does_not_vary() -> None:
    assert paired_p(np.zeros(3)) == 1
    assert paired_p(np.full(3, 0.5)) == 0.25  # the sign test's: t would say 0 of any two equal numbers
    assert paired_p(np.array([0.99, 0.99 + 1e-16, 0.99])) == 0.25
    assert np.isnan(paired_p(np.ones(1)))
    x = np.array([0.1, 0.5, -0.2, 0.9])
    assert paired_p(x) == pytest.approx(stats.ttest_rel(x, np.zeros(4)).pvalue)


def test_a_seed_counts_once_and_missing_values_do_not() -> None:
    values = pd.DataFrame({"norm": ["a", "a", "b"], "seed": [0, 1, 0], "value": [1.0, np.nan, np.nan]})
    assert summarize(values, ["norm"])[["norm", "mean", "seeds"]].to_numpy().tolist() == [["a", 1.0, 1]]
    values = pd.DataFrame({"norm": ["a", "a"], "seed": [3, 3], "value": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"two values for \{'norm': 'a', 'seed': 3\}"):
        summarize(values, ["norm"])


def test_runs_are_planned_seed_by_seed(tmp_path: Path) -> None:
    """All cells with the first seed come first, each in a folder of its own; two cells may not share one."""
    settings = {
        "keys": lambda d: {"d": d // 10},
        "task": lambda *_: MajorityTask(0),
        "spec": lambda d: LabConfig(1, d, 1, 6, 12),
        "training": lambda d, seed: TrainConfig(steps=d, batch=1, seed=seed),
    }
    runs = planned([10, 20], Request(out=tmp_path, seeds=(0, 3)), **settings)
    assert [(r.training.steps, r.seed, r.folder.name) for r in runs] == [
        (10, 0, "1-seed0"), (20, 0, "2-seed0"), (10, 3, "1-seed3"), (20, 3, "2-seed3"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="two cells"):
        planned([10, 11], Request(out=tmp_path, seeds=(0, 3)), **settings)
