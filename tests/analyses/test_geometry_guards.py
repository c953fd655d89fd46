"""What stands between a certificate and a false one: tolerances, roundings that are allowed for, who counts as near."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry import large, wolfe
from ln_probe.analyses.geometry.active_set import INSIDE, SEPARATED, Search, active_set
from ln_probe.analyses.geometry.checker import CertificateError, Checker, Rows
from ln_probe.analyses.geometry.coordinates import TAU, coordinates, span
from ln_probe.analyses.geometry.decide import DUPLICATE, SELECTABLE, UNDECIDED, UNSELECTABLE, Pool, decide
from ln_probe.analyses.geometry.inputs import _LARGEST, QuerySet, score_space
from ln_probe.analyses.geometry.margins import Keys, _nearest
from ln_probe.analyses.geometry.positions import first_unselectable
from ln_probe.analyses.geometry.prove import Proved, conditioning, prove_positions, prove_verdicts
from ln_probe.analyses.geometry.witnesses import certify

SQUARE = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0], [0.2, 0.1, 0.0]])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def proved_of(keys: np.ndarray) -> tuple[Checker, Proved]:
    checker, sets = Checker(keys, None, None, TAU), coordinates(keys)
    return checker, prove_verdicts(checker, sets, decide(sets))


# Tolerances


@pytest.mark.parametrize("times", [0.5, 100.0])
def test_weights_may_miss_their_key_by_the_tolerance_and_no_more(times: float) -> None:
    _, proved = proved_of(SQUARE)
    assert proved.verdicts.code.tolist() == [SELECTABLE] * 4 + [UNSELECTABLE]
    moved = SQUARE.copy()
    moved[4, 2] = times * TAU * np.sqrt((SQUARE**2).sum() / len(SQUARE))
    checker, one = Checker(moved, None, None, TAU), np.arange(5)
    if times < 1.0:
        certify(checker, proved, None, None, None, one)
    else:
        with pytest.raises(CertificateError, match="key 4: its convex weights miss it by"):
            certify(checker, proved, None, None, None, one)


def test_how_clear_a_verdict_is_has_its_sign() -> None:
    _, proved = proved_of(SQUARE)
    assert (proved.clear[:4] > TAU).all()
    assert -TAU < proved.clear[4] < 0.0


def test_the_undecided_are_solved_for_where_proofs_are_made() -> None:
    sets, checker = coordinates(SQUARE), Checker(SQUARE, None, None, TAU)
    known = decide(sets)
    code, gap, query = known.code.copy(), known.gap.copy(), known.query.copy()
    code[0], gap[0], query[0] = UNDECIDED, -np.inf, np.nan
    left_open = replace(known, code=code, gap=gap, query=query)
    assert prove_verdicts(checker, sets, left_open).verdicts.code[0] == SELECTABLE
    assert prove_verdicts(checker, sets, left_open, seek=False).verdicts.code[0] == UNDECIDED


def test_where_all_can_be_selected_no_position_is_left_open() -> None:
    keys = SQUARE[:4]
    sets, checker = coordinates(keys), Checker(keys, None, None, TAU)
    verdicts = decide(sets)
    first, left = prove_positions(checker, verdicts, first_unselectable(sets, verdicts))
    assert (first.at.tolist(), left) == ([-1] * 4, 0)


def test_a_key_is_near_the_tolerance_only_if_no_query_clears_it() -> None:
    sets, where = coordinates(SQUARE[:4]), score_space(SQUARE[:4], None, None)
    barely = np.full(4, TAU)  # what some query showed; the best one shows far more
    assert conditioning(sets, where, decide(sets), barely).near_tau == 0
    close = np.append(SQUARE[:4], [[0.5, 1.0 + 2e-9, 0.0]], axis=0)  # beyond an edge by about the tolerance
    sets, where = coordinates(close), score_space(close, None, None)
    verdicts = decide(sets)
    assert conditioning(sets, where, verdicts, np.append(barely, TAU)).near_tau == 1
    one = SQUARE[:1]
    assert (
        conditioning(coordinates(one), score_space(one, None, None), decide(coordinates(one)), barely[:1]).near_tau == 1
    )


def test_a_pair_of_equal_keys_is_called_so() -> None:
    keys = np.append(SQUARE[:4], SQUARE[2:3], axis=0)
    assert decide(coordinates(keys)).code.tolist() == [SELECTABLE, SELECTABLE, DUPLICATE, SELECTABLE, DUPLICATE]


def test_radii_to_the_end_of_what_can_be_used() -> None:
    for radius in (1.0 / _LARGEST, _LARGEST):
        geometry = ln_probe.key_geometry(SQUARE, query_set=radius)
        assert geometry.verdict[4] == "unselectable"
    for radius in (0.99 / _LARGEST, 1.01 * _LARGEST):
        with pytest.raises(ValueError, match="scores would leave the range of float64"):
            ln_probe.key_geometry(SQUARE, query_set=radius)


def test_a_flat_cloud_spans_only_where_it_extends(rng: np.random.Generator) -> None:
    for number in (10, 3):
        rows = rng.standard_normal((number, 4))
        rows[:, 2:] = 0.0
        basis = span(rows - rows.mean(axis=0))
        assert basis.shape == (4, 2)
        np.testing.assert_allclose(basis.T @ basis, np.eye(2), atol=1e-12)
        np.testing.assert_allclose(basis[2:], 0.0, atol=1e-12)


# Rounding


def test_no_weight_is_bounded_by_more_than_all_of_it() -> None:
    keys = np.array([[3.0, 1.0], [3.0, 1.0]])
    for some in (keys[:1], keys):
        checker = Checker(some, None, QuerySet(np.zeros(2), np.eye(2)), TAU)
        zero = np.zeros((1, 2))
        weight, bound = checker.attention(np.array([0]), zero, zero)
        assert weight.lower[0] <= 1.0 / len(some) <= weight.upper[0] <= 1.0
        assert bound.lower[0] <= bound.upper[0] <= 1.0


def test_screening_doubts_what_single_precision_loses(rng: np.random.Generator) -> None:
    rows = 1e4 * rng.standard_normal((60, 8))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    scores = unit @ rows.T
    own = np.diag(scores)
    true = -np.logaddexp.reduce(scores - own[:, None], axis=1)
    found = large.pointed(rows, None)
    wrong = np.abs(found.log_weight - true)
    assert (wrong <= found.doubt).all()
    assert (found.doubt >= 8 * 2.0**-24 * np.abs(scores).max()).all()  # the bound on a product of 8 terms, at the least


# Searches


@pytest.mark.parametrize("dim", [2, 6])
def test_a_search_ends_with_what_proves_it(dim: int, rng: np.random.Generator) -> None:
    rows = np.array(
        [unit(row) * length for row, length in zip(rng.standard_normal((12, dim)), rng.random(12), strict=True)]
    )
    rows[0], rows[11] = rows[1:11].mean(axis=0), 1.4 * unit(rows[11])  # inside; and outside, but not by far
    columns, flat = np.ascontiguousarray(rows.T), np.ones(dim)
    for target, expected in ((0, INSIDE), (11, SEPARATED)):
        search = Search(rows, columns, target, 12, False, flat, 0.0 * flat, TAU, -1.0, np.ones(12))
        active, x, best = active_set(dim + 2, dim), np.zeros(dim), np.zeros(dim)
        ended, m, _, upper, _ = wolfe.nearest_point(search, 3, 1, active, x, best, np.zeros(12), 1e9)
        assert ended == expected
        weight = active.weight[:m] / active.weight[:m].sum()
        np.testing.assert_allclose(weight @ rows[active.members[:m]] - rows[target], x, atol=1e-12)
        if target == 0:
            assert upper <= TAU
        else:
            lead = (rows[11] - np.delete(rows, 11, axis=0)) @ -unit(best)
            assert TAU < lead.min() < 1.0


def unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x))


def test_where_a_search_begins_among_keys_close_together(rng: np.random.Generator) -> None:
    rows = 1e-3 * rng.standard_normal((5, 3))
    keys = Keys(rows, np.ascontiguousarray(rows.T), np.zeros(5), (rows**2).sum(axis=1))
    start, largest = _nearest(keys, 1, np.zeros(5))
    apart = np.linalg.norm(rows - rows[1], axis=1)
    assert largest == pytest.approx(apart.max())
    assert start == np.where(np.arange(5) == 1, np.inf, apart).argmin()
    alone = Keys(rows[:1], np.ascontiguousarray(rows[:1].T), np.zeros(1), (rows[:1] ** 2).sum(axis=1))
    assert _nearest(alone, 0, np.zeros(1)) == (-1, 0.0)


@pytest.mark.parametrize("biased", [False, True])
def test_a_pool_proposes_what_holds(biased: bool, rng: np.random.Generator) -> None:
    keys, bias = rng.standard_normal((40, 2)), 0.3 * rng.standard_normal(40) if biased else None
    sets = coordinates(keys, bias)
    code = decide(sets).code[sets.leaders]
    pool = Pool(sets)
    pool.solve(np.empty(0, np.int64))
    assert (pool.inside == (code == UNSELECTABLE)).all()
    assert np.isfinite(pool.query[code == SELECTABLE]).all()
    checker = Checker(keys, bias, None, TAU)
    assert pool.inside.sum() > 10
    for place, (index, weight) in pool.rows.items():
        used, one = sets.leaders[index], np.array([sets.leaders[place]])
        miss = checker.reproduces(one, Rows(np.array([0, len(used)]), used, weight / weight.sum()))
        assert miss.upper[0] <= TAU
    for place in np.flatnonzero(~pool.inside):
        height = sets.white @ pool.query[place]
        assert height[place] > np.delete(height, place).max()
