"""A large set of keys is screened, decided by cutting planes and bracketed as the geometry of all keys at once says."""

from __future__ import annotations

import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry import large
from ln_probe.analyses.geometry.checker import Checker
from ln_probe.analyses.geometry.coordinates import TAU
from ln_probe.analyses.geometry.decide import NAMES, UNDECIDED
from ln_probe.analyses.geometry.inputs import query_sets
from ln_probe.analyses.geometry.large import (
    LargeChecker,
    attainable_large,
    decide_large,
    margins_large,
    pointed,
    pointed_at,
)
from ln_probe.analyses.geometry.newton import into_ball
from ln_probe.analyses.geometry.prove import prove_attention


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which a small set has several, the last one narrow."""
    monkeypatch.setattr(large, "_SIDE", 64)
    monkeypatch.setattr(large, "_READ", 100)


def planted(seed: int, count: int = 330, d: int = 5) -> np.ndarray:
    """Keys of lognormal lengths with interior ones, copies (of a vertex, of an interior key), zero and a tiny one."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, d)) * rng.lognormal(0.0, 0.7, size=(count, 1))
    for i in (3, 70, 200):
        rows[i] = rng.dirichlet(np.ones(12)) @ rows[rng.choice(np.arange(210, count), 12, replace=False)]
    rows[201], rows[202] = rows[200], rows[300]
    rows[64], rows[65] = 0.0, rows[65] * 1e-9
    return rows


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("offset", [False, True])
def test_what_screening_says_is_true(offset: bool) -> None:
    rows = planted(0)
    added = np.random.default_rng(1).normal(size=len(rows)) * 3 if offset else None
    found = pointed(rows, added)
    scores = into_ball(rows) @ rows.T
    own = scores.diagonal().copy()
    np.fill_diagonal(scores, -np.inf)
    gap = own - scores.max(axis=1)
    assert (found.gap <= gap).all()
    close = np.isfinite(found.gap)
    assert (gap[close] - found.gap[close]).max() < 1e-4 * np.linalg.norm(rows, axis=1).max()
    exact = pointed_at(rows, added, np.arange(len(rows)))
    shifted = np.where(np.isfinite(scores), scores, own[:, None]) + (0.0 if added is None else added)
    weight = shifted.diagonal() - np.logaddexp.reduce(shifted, axis=1)
    np.testing.assert_allclose(exact, weight, atol=1e-12)
    known = np.isfinite(found.doubt)
    assert known.sum() == len(rows) - 2, "the zero key and the tiny one are left to double precision"
    assert (np.abs(found.log_weight - exact)[known] <= found.doubt[known]).all()
    assert found.doubt[known].max() < 0.01


def test_one_key_has_no_rival() -> None:
    assert pointed(np.ones((1, 3)), None).gap[0] == np.inf


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("dtype", "biased"), [(np.float32, True), (np.float64, False)])
def test_the_checker_of_large_sets_is_the_checker(biased: bool, dtype: type) -> None:
    rng = np.random.default_rng(2)
    keys = np.asfortranarray(planted(2).astype(dtype))
    bias = rng.normal(size=len(keys)) if biased else None
    axes, center = rng.normal(size=(5, 4)), rng.normal(size=5)
    for queries in (None, query_sets((center, axes), 1, 5)[0], query_sets(2.0, 1, 5)[0]):
        one, two = Checker(keys.astype(float), bias, queries, TAU), LargeChecker(keys, bias, queries)
        centred = (keys - keys.mean(axis=0)).astype(float)
        points = centred if queries is None else queries.in_span(centred)
        assert np.sqrt((points**2).sum(axis=1).mean()) == pytest.approx(two.size * two.unit, rel=1e-6)
        for a, b in ((one.judged, two.judged), (one.nats if queries else one.measured, two.measured)):
            np.testing.assert_allclose(a.rows, b.rows, atol=1e-13)
            np.testing.assert_allclose(a.error, b.error, rtol=0.1)
            assert (a.offset is None) == (b.offset is None)
            assert a.upwards == b.upwards


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("seed", "biased"), [(0, False), (0, True), (1, True), (2, False)])
def test_verdicts_and_brackets_are_those_of_all_keys_at_once(
    seed: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cutting planes that begin with four rivals a key come to the same as solving over all."""
    for name, value in (("_RIVALS", 4), ("_LONG", 8), ("_MORE", 6)):
        monkeypatch.setattr(large, name, value)
    rng = np.random.default_rng(seed + 10)
    keys = planted(seed)
    bias = rng.normal(size=len(keys)) if biased else None
    center, axes = rng.normal(size=5), rng.normal(size=(5, 5))
    whole = ln_probe.key_geometry(keys, bias, query_set=(center, axes), margins="exact")
    checker = LargeChecker(keys, bias, query_sets((center, axes), 1, 5)[0])
    screened = pointed(checker.measured.rows, checker.measured.offset)
    code = decide_large(checker, checker.lead(screened.gap), np.arange(len(keys)), len(keys))
    assert (NAMES[code] == whole.verdict).all()
    some = np.concatenate([np.flatnonzero(whole.verdict != "selectable")[:8], np.arange(0, len(keys), 29)])
    lower, upper = margins_large(checker, some)
    slack = 1e-9 * checker.measured.size
    assert (lower <= whole.margin_upper[some] + slack).all()
    assert (upper >= whole.margin_lower[some] - slack).all()
    size = np.maximum(np.abs(lower), np.abs(upper))
    assert (upper - lower <= np.maximum(0.0101 * size, 1e-7 * checker.measured.size)).mean() > 0.9
    reach = prove_attention(checker, attainable_large(checker, some), only=some)
    assert (reach.weight <= whole.attainable_upper[some] + 1e-12).all()
    assert (reach.upper >= whole.attainable[some] - 1e-12).all()
    assert (reach.upper - reach.weight <= 0.01).all()


def test_what_may_not_be_solved_for_stays_undecided() -> None:
    keys = planted(4)
    checker = LargeChecker(keys, None, query_sets(1.0, 1, 5)[0])
    lead = checker.lead(pointed(checker.measured.rows, None).gap)
    everything = decide_large(checker, lead, np.arange(len(keys)), len(keys))
    some = decide_large(checker, lead, np.arange(len(keys)), 5)
    assert 0 < (some == UNDECIDED).sum() < len(keys)
    known = some != UNDECIDED
    assert (some[known] == everything[known]).all()
