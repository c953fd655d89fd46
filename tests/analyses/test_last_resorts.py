"""What decides where the fast methods give up, the polish of thin hulls and the linear program, and the budget of
arithmetic per key that ends every search, with bounds that hold."""

from itertools import pairwise

import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry import decide
from ln_probe.analyses.geometry.active_set import BRACKETED, EXHAUSTED, STALLED
from ln_probe.analyses.geometry.checker import Rows
from ln_probe.analyses.geometry.wolfe import Nearest, nearest_points

SQUARE = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])


def stalled(rows, targets, **_):
    """A search that finds nothing."""
    none = np.zeros(len(targets))
    ended = np.full(len(targets), STALLED)
    return Nearest(ended, none, none, np.zeros((len(targets), rows.shape[1])), Rows.gathered(len(targets), []))


def test_the_program_alone_gives_the_same_verdicts(monkeypatch):
    rng = np.random.default_rng(0)
    for d, biased in ((2, True), (4, False), (4, True), (12, True)):
        keys = rng.standard_normal((100, d)) * rng.lognormal(0, 1, (100, 1))
        given = rng.standard_normal(100) if biased else None
        expected = ln_probe.key_geometry(keys, bias=given, margins=False).verdict
        assert (expected == "unselectable").sum() > 5
        with monkeypatch.context() as patch:
            patch.setattr(decide, "nearest_points", stalled)
            geometry = ln_probe.key_geometry(keys, bias=given, margins=False)
        assert (geometry.verdict == expected).all()
        geometry.certify()


def test_what_nothing_decides_is_undecided(monkeypatch):
    keys = np.concatenate([SQUARE, [[0.1, 0.2]]])

    monkeypatch.setattr(decide, "nearest_points", stalled)
    monkeypatch.setattr(decide, "separate", lambda others, key, *rest: (0 * key, 0 * others[:, 0]))
    geometry = ln_probe.key_geometry(keys, margins=False, causal=True)
    assert geometry.verdict.tolist() == ["selectable"] * 4 + ["undecided"]
    assert geometry.undecided == 1
    assert geometry.first_unselectable_at[4] == -1
    geometry.certify()
    with pytest.raises(ValueError, match="key 4 is undecided: it has no witness query"):
        geometry.witness(4)
    with pytest.raises(ValueError, match="key 4 is undecided: no convex weights of the other keys repro"):
        geometry.weights(4)


def test_thin_hulls_are_bracketed_by_the_polish():
    # A cloud 1e-8 thick in one direction: float64 leaves a Gram matrix nothing of it.
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((40, 6)) * np.array([1, 1, 1, 1, 1, 1e-8])
    here = np.arange(40)
    ended, lower, upper, queries, _ = nearest_points(wide, here, tau=1e-13, gap=0.01, careful=True)
    fast, *_ = nearest_points(wide, here, tau=1e-13, gap=0.01)
    assert (fast == STALLED).any()
    assert (ended == BRACKETED).all()
    assert (upper < 1e-13).sum() == 1  # one key is inside
    thin = (upper < 1e-6) & (upper > 1e-13)
    assert thin.sum() == 4
    assert (upper[thin] <= 1.0101 * lower[thin]).all()
    for i in np.flatnonzero(thin):
        query = queries[i] / np.linalg.norm(queries[i])
        assert np.delete((wide[i] - wide) @ query, i).min() >= lower[i] * (1 - 1e-6)


# The budget.

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
