"""A budget of arithmetic per key ends every search, with bounds that hold, whatever the clock says."""

from itertools import pairwise

import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry.active_set import EXHAUSTED
from ln_probe.analyses.geometry.wolfe import nearest_points

N, D = 120, 24


@pytest.fixture(scope="module")
def keys():
    return np.random.default_rng(0).standard_normal((N, D))


def test_bounds_hold_and_tighten_with_the_budget(keys):
    found = [ln_probe.key_geometry(keys, query_set=3.0, budget=budget) for budget in (1e-7, 1e-5, 1e-4, 1.0)]
    for lower, upper in (("margin_lower", "margin_upper"), ("attainable", "attainable_upper")):
        brackets = [(getattr(geometry, lower), getattr(geometry, upper)) for geometry in found]
        for (low, high), (better, tighter) in pairwise(brackets):
            assert (np.maximum(low, better) <= np.minimum(high, tighter) + 1e-9).all()
        widths = [(high - low).sum() for low, high in brackets]
        assert widths[0] > widths[1] > widths[2] >= widths[3]
        assert widths[0] > 10 * widths[3]
    for geometry in found:
        geometry.certify()


def test_verdicts_of_a_search_without_budget_are_none(keys):
    mixed = np.concatenate([keys, np.random.default_rng(1).dirichlet(np.ones(N), N) @ keys])
    short, enough = (ln_probe.key_geometry(mixed, budget=budget, margins=False) for budget in (1e-6, 1e-2))
    assert (short.verdict[N:] == "undecided").all()
    assert enough.verdict.tolist() == ["selectable"] * N + ["unselectable"] * N
    short.certify()


def test_lengths_of_differences_do_not_stand_in_the_way():
    # Norms over eight decades, every direction divided by its RMS: with the differences as they are, one key in three
    # is still open when all but a few are decided with differences of length one.
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((300, 60)) * 10.0 ** rng.uniform(-4, 4, (300, 1))
    wide -= wide.mean(axis=0)
    left, values, _ = np.linalg.svd(wide / np.sqrt((wide**2).sum(1).mean()), full_matrices=False)
    white, stretch = left * np.sqrt(300), values / np.sqrt(300)
    open_ = {}
    for scaled in (False, True):
        ended, *_ = nearest_points(
            white, np.arange(300), tau=1e-7, stretch=stretch, slope=np.ones(1), scaled=scaled, budget=3e6
        )
        open_[scaled] = int((ended == EXHAUSTED).sum())
    assert open_[True] <= 5
    assert open_[False] >= 60
