"""A budget of arithmetic per key ends every search, with bounds that hold, whatever the clock says."""

from itertools import pairwise

import numpy as np
import pytest

from ln_probe.analyses.geometry.active_set import BRACKETED, EXHAUSTED, INSIDE, SEPARATED
from ln_probe.analyses.geometry.decide import separate
from ln_probe.analyses.geometry.newton import largest_weights
from ln_probe.analyses.geometry.wolfe import nearest_points

N, D = 300, 40


@pytest.fixture(scope="module")
def keys():
    return np.random.default_rng(0).standard_normal((N, D))


def search(keys, gap, budget, careful=False, scaled=None):
    every = np.arange(len(keys))
    return nearest_points(keys, every, tau=1e-7, gap=gap, careful=careful, scaled=scaled, budget=budget)


def certificates(keys, found):
    """Gap that each query proves per unit length, and distance that each set of weights proves."""
    lower, upper = np.zeros(len(keys)), np.zeros(len(keys))
    for i, query in enumerate(found.query):
        length = np.linalg.norm(query)
        lower[i] = np.delete((keys[i] - keys) @ query, i).min() / length if length > 0 else 0.0
        index, weight = found.weights.row(i)
        assert (weight >= 0).all()
        assert weight.sum() == pytest.approx(1)
        assert i not in index
        upper[i] = np.linalg.norm(weight @ keys[index] - keys[i])
    return np.maximum(lower, 0.0), upper


@pytest.mark.parametrize("scaled", [False, True])
def test_bounds_of_a_search_without_budget_hold(keys, scaled):
    found = search(keys, 1e-3, 2 * N * D, scaled=scaled)
    ended, lower, upper, *_ = found
    assert (ended == EXHAUSTED).mean() > 0.9
    proved_lower, proved_upper = certificates(keys, found)
    assert (lower <= proved_lower * (1 + 1e-9)).all()
    assert (upper >= proved_upper * (1 - 1e-9)).all()
    enough = search(keys, 1e-3, 1e9)
    assert (enough[0] == BRACKETED).all()
    assert (lower <= enough[2] * (1 + 1e-9)).all()
    assert (upper >= enough[1] * (1 - 1e-9)).all()


def test_bounds_tighten_with_the_budget(keys):
    widths = []
    for budget in (1e4, 1e5, 1e6):
        _, lower, upper, *_ = search(keys, 1e-6, budget)
        widths.append((upper - lower).sum())
    assert widths[0] > widths[1] > widths[2]


@pytest.mark.parametrize("careful", [False, True])
def test_verdicts_of_a_search_without_budget_are_none(keys, careful):
    # (Half of the keys inside, so that there is something to search for.)
    mixed = np.concatenate([keys[:150], np.random.default_rng(1).dirichlet(np.ones(150), 150) @ keys[:150]])
    ended, *_ = search(mixed, -1.0, N * D / 2, careful)
    assert (ended[150:] == EXHAUSTED).all()
    ended, *_ = search(mixed, -1.0, 1e9, careful)
    assert (ended[:150] == SEPARATED).all()
    assert (ended[150:] == INSIDE).all()


def test_a_thin_hull_ends_within_its_budget():
    thin = np.random.default_rng(0).standard_normal((N, D)) * np.append(np.ones(D - 1), 1e-6)
    found = search(thin, 1e-6, 3e5, careful=True)
    assert set(found[0]) == {BRACKETED, EXHAUSTED}
    proved_lower, proved_upper = certificates(thin, found)
    assert (found[1] <= proved_lower * (1 + 1e-9)).all()
    assert (found[2] >= proved_upper * (1 - 1e-9)).all()


def test_attention_is_bounded_within_its_budget(keys):
    rows, offset = 40.0 * keys, np.zeros(N)
    start = np.zeros((1, N, D))
    columns = np.ascontiguousarray(rows.T)
    bounds = [
        largest_weights(rows, columns, offset, np.arange(N), start, 1e-6, 400, budget)[:2]
        for budget in (N * D, 30.0 * N * D, 1e9)
    ]
    for (weight, upper), (better, tighter) in pairwise(bounds):
        assert (weight <= better + 1e-12).all()
        assert (upper >= tighter - 1e-12).all()
        assert (weight <= upper).all()
        assert (weight <= tighter + 1e-12).all()
    assert (bounds[0][1] - bounds[0][0]).mean() > 10 * (bounds[-1][1] - bounds[-1][0]).mean()


def test_a_program_without_budget_proves_nothing(keys):
    query, weights = separate(keys[1:], keys[0], False, 1.0)
    assert not query.any()
    assert not weights.any()
    query, _ = separate(keys[1:], keys[0], False)
    assert ((keys[0] - keys[1:]) @ query).min() > 0


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_a_budget_that_is_not_positive_is_refused(keys, budget):
    message = f"budget must be positive, got {budget}: it is the number of multiply-adds per key"
    with pytest.raises(ValueError, match=message):
        search(keys, 0.01, budget)
    with pytest.raises(ValueError, match=message):
        separate(keys[1:], keys[0], False, budget)
    with pytest.raises(ValueError, match=message):
        largest_weights(keys, keys.T.copy(), np.zeros(N), np.arange(N), np.zeros((1, N, D)), 0.01, 9, budget)


def test_lengths_of_differences_do_not_stand_in_the_way():
    # Norms over eight decades, every direction divided by its RMS: with the differences as they are, one key in three
    # is still open when all but a few are decided with differences of length one.
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((N, 60)) * 10.0 ** rng.uniform(-4, 4, (N, 1))
    wide -= wide.mean(axis=0)
    left, values, _ = np.linalg.svd(wide / np.sqrt((wide**2).sum(1).mean()), full_matrices=False)
    white, stretch = left * np.sqrt(N), values / np.sqrt(N)
    open_ = {}
    for scaled in (False, True):
        ended, *_ = nearest_points(
            white, np.arange(N), tau=1e-7, stretch=stretch, slope=np.ones(1), scaled=scaled, budget=3e6
        )
        open_[scaled] = int((ended == EXHAUSTED).sum())
    assert open_[True] <= 5
    assert open_[False] >= 60
