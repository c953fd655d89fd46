"""Pieces of geometry that only propose, or that only guard: what they give is right, or is said not to be."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from fractions import Fraction

import numpy as np
import pytest

import ln_probe.analyses.geometry
from ln_probe.analyses.geometry import inputs, large, margins, newton, prove
from ln_probe.analyses.geometry.checker import Between, Checker, Rows
from ln_probe.analyses.geometry.coordinates import TAU, coordinates, merge
from ln_probe.analyses.geometry.decide import DUPLICATE, SELECTABLE, UNDECIDED, UNSELECTABLE, alone, decide, separate
from ln_probe.analyses.geometry.exact import ExactSet, ExactVerdict, proves
from ln_probe.analyses.geometry.inputs import (
    LEFT_OUT,
    QuerySet,
    ScoreSpace,
    accurate_product,
    key_sets,
    score_space,
    seen_from,
)
from ln_probe.analyses.geometry.margins import Measured, again, too_wide
from ln_probe.analyses.geometry.positions import first_unselectable
from ln_probe.analyses.probes import unembedding


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2)


# Whole numbers


def test_a_proof_is_of_other_keys_and_sums_to_one() -> None:
    points = np.array([[0.0], [2.0], [1.0], [4.0]])
    half = Fraction(1, 2)

    def holds(index: tuple[int, ...], weights: tuple[Fraction, ...], among: list[int] | None = None) -> bool:
        return proves(ExactVerdict("unselectable", index, weights, None, 0), points, None, 2, among=among)

    assert holds((0, 1), (half, half))
    assert not holds((2,), (Fraction(1),))
    assert not holds((0, 1), (half, half), among=[0, 2, 3])
    assert not holds((1,), (half,))
    assert not holds((0, 1, 3), (Fraction(1, 4), Fraction(1), Fraction(-1, 4)))
    assert not holds((0, 3), (half, half))
    lifted = ExactVerdict("unselectable", (0, 1), (half, half), None, 0)
    assert proves(lifted, points, np.array([1.0, 1.0, 1.0, 0.0]), 2)
    assert proves(lifted, points, np.array([1.0, 1.0, 0.5, 0.0]), 2)
    assert not proves(lifted, points, np.array([1.0, 1.0, 1.5, 0.0]), 2)
    query = ExactVerdict("selectable", (), (), (Fraction(1),), 0)
    assert proves(query, points, None, 3)
    assert not proves(query, points, None, 1)
    assert proves(query, points, None, 1, among=[0, 1, 2])
    assert not proves(query, np.append(points, [[4.0]], axis=0), None, 3)


# Products


def test_products_that_cancel_keep_their_digits(rng: np.random.Generator) -> None:
    left = rng.standard_normal((4, 7)) * np.ldexp(1.0, rng.integers(-8, 9, (4, 7)))
    right = rng.standard_normal((7, 3))
    left[:, -1] = -(left[:, :-1] @ right[:-1, 0]) / right[-1, 0]  # the first column of the product is rounding alone
    found = accurate_product(left, right)
    for i in range(4):
        for j in range(3):
            terms = zip(left[i], right[:, j], strict=True)
            exact = sum((Fraction(float(a)) * Fraction(float(b)) for a, b in terms), Fraction(0))
            error = abs(Fraction(float(found[i, j])) - exact)
            allowed = 7 * LEFT_OUT * np.abs(left[i]).max() * np.abs(right[:, j]).max()
            assert error <= 4 * Fraction(float(np.spacing(abs(found[i, j])))) + Fraction(float(allowed))
    assert LEFT_OUT == 2.0**-60
    far = left + 1e6
    shift, exact_shift = far.mean(axis=0), [Fraction(float(v)) for v in far.mean(axis=0)]
    seen = seen_from(far, shift, right)
    for i in range(4):
        row = [Fraction(float(v)) - s for v, s in zip(far[i], exact_shift, strict=True)]
        for j in range(3):
            exact = sum((k * Fraction(float(b)) for k, b in zip(row, right[:, j], strict=True)), Fraction(0))
            largest = float(np.abs(far - shift).max() * np.abs(right[:, j]).max())
            assert abs(float(Fraction(float(seen[i, j])) - exact)) <= 4 * np.spacing(abs(seen[i, j])) + 1e-16 * largest


def test_slices_add_up(rng: np.random.Generator) -> None:
    values = rng.standard_normal((3, 5)) * 100
    for axis in (0, 1):
        parts = inputs._slices(values, 20, axis)
        largest = np.abs(values).max(axis=axis, keepdims=True)
        assert (np.abs(values - sum(parts)) <= largest * 2.0**-58).all()
        for k, part in enumerate(parts):
            unit = np.ldexp(1.0, np.frexp(largest)[1] - 20 * (k + 1))
            assert (part / unit == np.round(part / unit)).all()
            assert (np.abs(part / unit) <= 2**20).all()


# Screening


@pytest.mark.parametrize("biased", [False, True])
def test_screening_is_the_softmax_in_single_precision(
    biased: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    rows, offset = 3.0 * rng.standard_normal((11, 4)), rng.standard_normal(11) + 5.0 if biased else None
    rows[6] *= 1e-8  # too short to be screened
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    plain = unit @ rows.T
    scores = plain if offset is None else plain + offset
    expected = np.diag(scores) - np.log(np.exp(scores).sum(axis=1))
    there = np.arange(11) != 6
    for side in (1024, 4):
        monkeypatch.setattr(large, "_SIDE", side)
        found = large.pointed(rows, offset)
        gap = np.diag(plain) - np.where(np.eye(11, dtype=bool), -np.inf, plain).max(axis=1)
        assert (found.gap[there] <= gap[there]).all()
        np.testing.assert_allclose(found.gap[there], gap[there], atol=1e-4)
        assert (np.abs(found.log_weight - expected)[there] <= found.doubt[there]).all()
        np.testing.assert_allclose(found.log_weight[there], expected[there], atol=1e-4)
        assert (found.doubt[there] < 2e-3).all()
        assert (found.doubt[there] > large._SUM).all()
        assert (found.gap[6], found.doubt[6]) == (-np.inf, np.inf)
    monkeypatch.setattr(large, "_BLOCK", 22)
    which = np.array([3, 0, 9, 10, 2])
    np.testing.assert_allclose(large.pointed_at(rows, offset, which), expected[which], atol=1e-12)
    assert large.pointed(rows[:1], None).gap.tolist() == [np.inf]


# Margins


def test_which_brackets_are_too_wide() -> None:
    lower, upper = np.array([1.0, 1.0, -1.0, 0.0, 0.0, np.nan]), np.array([1.005, 1.02, -1.005, 1e-7, 1.5e-5, 1.0])
    inside = np.zeros(6, bool)
    assert too_wide(lower, np.maximum(lower, upper), 0.01, 1.0, inside).tolist() == [
        False,
        True,
        False,
        True,
        True,
        True,
    ]
    assert too_wide(lower, upper, 0.01, 0.0201 / (0.02 * TAU), inside).tolist()[:2] == [False, False]
    inside[3:5] = True
    assert too_wide(lower, upper, 0.01, 1.0, inside).tolist()[3:] == [False, 1.01 * TAU < 1.5e-5, True]


def test_a_level_query_gives_all_keys_the_same_score(rng: np.random.Generator) -> None:
    centred = rng.standard_normal((8, 3))
    centred -= centred.mean(axis=0)
    u = np.array([0.3, -0.2, 0.4])
    found = margins._level(centred, 4.0 + centred @ u, 1.0)
    assert found is not None
    np.testing.assert_allclose(found, -u, atol=1e-12)
    assert margins._level(centred, centred @ (3 * u), 1.0) is None  # beyond the ball
    assert margins._level(centred, centred @ u + 1e-6 * rng.standard_normal(8), 1.0) is None
    plain = margins._level(centred, None, 1.0)
    assert plain is not None
    assert not plain.any()


def test_copies_are_left_out_of_what_is_measured(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((6, 3))
    keys[[3, 5]] = keys[[1, 1]]
    sets = coordinates(keys)
    where = score_space(keys, None, None)
    space = margins.measured(sets, where, through_queries=False)
    assert space.distinct.tolist() == [0, 1, 2, 4]
    assert (space.copy[[0, 2, 4]] == -1).all()
    assert space.copy[3] == space.copy[5] == 1
    assert space.copy[1] in (3, 5)
    assert space.size == pytest.approx(1.0)
    queries = QuerySet(rng.standard_normal(3), rng.standard_normal((3, 2)))
    where = score_space(keys, np.arange(6.0), queries)
    space = margins.measured(sets, where, through_queries=True)
    assert space.distinct.tolist() == list(range(6))  # their offsets differ
    assert space.size == pytest.approx(np.sqrt((where.rows**2).sum(axis=1).mean()))


@pytest.mark.parametrize("kind", ["plain", "offset", "upwards"])
def test_the_last_resort_brackets_a_margin_by_itself(kind: str, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((12, 3))
    rows -= rows.mean(axis=0)
    offset = 0.3 * rng.standard_normal(12) if kind == "offset" else None
    space = Measured(rows, offset, kind == "upwards", np.arange(12), np.full(12, -1), 1.0, None)
    for i in range(6):
        u, index, weight = again(space, i, 0.01, -np.inf, np.inf, np.zeros(3), 1e9)
        if kind == "upwards":
            u[-1] = max(u[-1], 0.0)
        assert np.linalg.norm(u) <= 1 + 1e-9
        height = rows @ u + (0.0 if offset is None else offset)
        lower = height[i] - np.delete(height, i).max()
        assert weight.sum() == pytest.approx(1.0)
        assert i not in index
        mean = weight @ rows[index] - rows[i]
        if kind == "upwards":
            mean[-1] = min(mean[-1], 0.0)
        upper = np.linalg.norm(mean) + (0.0 if offset is None else offset[i] - weight @ offset[index])
        lower = lower if offset is not None else max(lower, 0.0)
        assert lower <= upper + 1e-9
        if kind != "upwards":  # there it may look down as well, and only the weights are of use
            assert upper - lower <= 0.02 * max(abs(lower), abs(upper)) + 1e-3


# Positions and proposals


@pytest.mark.parametrize("biased", [False, True])
def test_every_position_of_an_ordinary_set_is_proved(biased: bool, rng: np.random.Generator) -> None:
    unselectable = 0
    for _ in range(4):
        keys, bias = rng.standard_normal((30, 2)), 0.3 * rng.standard_normal(30) if biased else None
        keys[7] = keys[3]
        sets, checker = coordinates(keys, bias), Checker(keys, bias, None, TAU)
        verdicts = decide(sets)
        first = first_unselectable(sets, verdicts)
        proved, left = prove.prove_positions(checker, verdicts, first)
        assert left == 0
        assert ((proved.at >= 0) == (verdicts.code == UNSELECTABLE)).all()
        for i in np.flatnonzero(verdicts.code == UNSELECTABLE):
            unselectable += 1
            until = int(proved.at[i]) + 1
            assert i < until
            some = [*range(until)]
            code = decide(coordinates(keys[some], None if bias is None else bias[some])).code
            assert code[i] == UNSELECTABLE
            if until - 1 > i:
                some = [*range(until - 1)]
                code = decide(coordinates(keys[some], None if bias is None else bias[some])).code
                assert code[i] != UNSELECTABLE
        late = np.flatnonzero(proved.at > np.arange(30))
        broken = first.query.copy()
        broken[late[0]] = np.nan
        assert prove.prove_positions(checker, verdicts, dataclasses.replace(first, query=broken))[1] == 1
        at = first.at.copy()
        at[late[0]] = late[0]  # earlier than its weights allow: the verdict's own weights say from where on
        again_ = prove.prove_positions(checker, verdicts, dataclasses.replace(first, at=at))[0]
        assert again_.at[late[0]] == max(late[0], verdicts.row(int(late[0]))[0].max())
    assert unselectable > 20


@pytest.mark.parametrize("biased", [False, True])
def test_both_proposals_for_one_key_prove_its_verdict(biased: bool, rng: np.random.Generator) -> None:
    keys, bias = rng.standard_normal((25, 2)), 0.3 * rng.standard_normal(25) if biased else None
    keys[4] = keys[9]
    sets, checker = coordinates(keys, bias), Checker(keys, bias, None, TAU)
    code = decide(sets).code
    for i in range(25):
        for query, index, value in list(alone(sets, i, 1e9)):
            one = np.array([i])
            if code[i] == UNSELECTABLE:
                miss = checker.reproduces(one, Rows(np.array([0, len(index)]), index, value))
                assert miss.upper[0] <= TAU
            else:
                assert checker.selects(one, query[None])[0].lower[0] > TAU
    assert len(list(alone(sets, 0, 1e9))) == 2
    assert {SELECTABLE, UNSELECTABLE} <= set(code.tolist())


def test_a_program_gives_weights_that_are_convex(rng: np.random.Generator) -> None:
    others = rng.standard_normal((20, 3)) * 50.0
    inside, outside = 0.2 * others[:5].mean(axis=0) + 0.8 * others.mean(axis=0), 3.0 * others[0] + 200.0
    _, weights = separate(others, inside, ray=False)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights @ others, inside, atol=1e-7)
    query, _ = separate(others, outside, ray=False)
    assert ((outside - others) @ query > 0).all()
    assert np.abs(query).max() == pytest.approx(1.0)


def test_groups_lie_within_the_tolerance_of_their_first_key(rng: np.random.Generator) -> None:
    for dim in (1, 3, 6):
        rows = rng.standard_normal((40, dim))
        near = rng.standard_normal((20, dim))
        rows[20:] = (
            rows[:20] + near * (rng.choice([0.3, 0.9, 1.2, 3.0], 20) / np.linalg.norm(near, axis=1))[:, None] * 1e-3
        )
        expected = np.arange(40)
        for i in range(40):
            for j in range(i):
                if expected[j] == j and np.linalg.norm(rows[i] - rows[j]) <= 1e-3:
                    expected[i] = j
                    break
        leaders, first = merge(rows, 1e-3)
        np.testing.assert_array_equal(leaders, expected)
        apart = np.linalg.norm(rows[:, None] - rows[None], axis=2)
        np.testing.assert_array_equal(first, (apart <= 1e-3).argmax(axis=1))
        assert len(set(expected.tolist())) < 40


def test_what_is_returned_cannot_be_altered() -> None:
    """Results are shared between tables, threads and certificates."""
    found = 0
    for package in (ln_probe.analyses.geometry, importlib.import_module("ln_probe.analyses.probes")):
        for module in pkgutil.iter_modules(package.__path__):
            for kind in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
                if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not kind.__name__.startswith("_"):
                    assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
                    found += 1
    assert found > 20


def test_positions_whose_query_leads_by_less_than_the_tolerance_are_open(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    keys = rng.standard_normal((30, 2))
    sets, checker = coordinates(keys), Checker(keys, None, None, TAU)
    verdicts = decide(sets)
    first = first_unselectable(sets, verdicts)
    late = np.flatnonzero(first.at > np.arange(30))

    def leading(lead: float) -> int:
        def selects(targets: np.ndarray, *_: object, **__: object) -> tuple[Between, np.ndarray]:
            return Between(np.full(len(targets), lead), np.full(len(targets), lead)), np.zeros(len(targets), bool)

        monkeypatch.setattr(checker, "selects", selects)
        return prove.prove_positions(checker, verdicts, first)[1]

    assert leading(TAU / 2) == len(late) > 3
    assert leading(TAU) == 0


def test_the_second_attempt_keeps_bound_and_proof_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first run of the solver leaves a bracket wide, each side is the better one, with what belongs to it."""
    rows, calls = np.eye(3), list[int]()

    def solver(rows: np.ndarray, columns: np.ndarray, offset: np.ndarray, targets: np.ndarray, *_: object) -> object:
        calls.append(len(targets))
        first, n = len(calls) == 1, len(targets)
        weight = np.array([0.5, 0.2, 0.3]) if first else np.array([0.3, 0.2])
        upper = np.array([0.5, 0.9, 0.9]) if first else np.array([0.4, 0.95])
        return weight, upper, np.full((n, 3), float(first)), np.full((n, 3), 10.0 + first), np.zeros(n, np.int64)

    monkeypatch.setattr(newton, "largest_weights", solver)
    found = newton.attainable(ScoreSpace(rows, None, 0.0, 1.0))
    assert calls == [3, 2]
    assert found.weight.tolist() == [0.5, 0.3, 0.3]
    assert found.upper.tolist() == [0.5, 0.4, 0.9]
    assert found.point[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert found.proof[:, 0].tolist() == [11.0, 10.0, 11.0]


def test_beside_a_copy_a_key_has_to_lead_the_others_by_the_tolerance() -> None:
    keys = np.array([[0.0, 1.0], [0.0, 1.0], [5.0, 1.0 - 1e-7], [0.0, -9.0]])
    checker = large.LargeChecker(keys, None, None)
    for query, code in (([0.0, 1.0], UNDECIDED), ([-0.6, 0.8], DUPLICATE)):
        assert large._selected(checker, np.array([0]), np.array([query])).tolist() == [code]
    assert large._selected(checker, np.array([2]), np.array([[1.0, 0.0]])).tolist() == [SELECTABLE]


def test_a_large_set_may_be_small(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((12, 2))
    checker = large.LargeChecker(keys, None, None)
    code = large.decide_large(checker, np.full(12, -np.inf), np.arange(12), 12)
    np.testing.assert_array_equal(code, decide(coordinates(keys)).code)
    some = large._first_rivals(checker, np.array([3]), np.array([[1.0, 0.0]]))
    np.testing.assert_array_equal(some, np.arange(12))


def test_one_bias_may_serve_all_sets_of_a_batch(rng: np.random.Generator) -> None:
    keys, bias = rng.standard_normal((4, 5, 2)), rng.standard_normal(5)
    values, lift, batch = key_sets(keys, bias)
    assert batch
    assert lift is not None
    np.testing.assert_array_equal(lift, np.broadcast_to(bias, (4, 5)))
    np.testing.assert_array_equal(values, keys)
    one = key_sets(keys[0], bias)[1]
    assert one is not None
    assert one.shape == (1, 5)
    for wrong in (bias[:4], np.zeros(4), np.zeros((5, 4))):
        with pytest.raises(ValueError, match="bias must have the shape"):
            key_sets(keys, wrong)


def test_only_queries_of_the_measured_space_are_kept(rng: np.random.Generator) -> None:
    """Of more axes than dimensions the measured set has fewer: an exact query over the given ones is no query there."""
    keys = np.concatenate([rng.standard_normal((12, 2)), [[3.0, 3.0], [3.0, 3.0]]])
    geometry = ln_probe.key_geometry(keys, query_set=(np.zeros(2), rng.standard_normal((2, 5))), strict=True)
    geometry.certify()
    assert geometry.verdict.tolist()[-2:] == ["duplicate", "duplicate"]
    for i in np.flatnonzero(geometry.verdict != "unselectable"):
        scores = keys @ geometry.witness(int(i))
        others = ~(keys == keys[i]).all(axis=1)
        assert scores[i] > scores[others].max()


def test_how_many_tokens_are_solved_for() -> None:
    assert unembedding._affordable(1000, 64) == int(3e11 / (2 * 64**2 * (1000 + 3 * 64)))
    assert unembedding._affordable(200_000, 4096) == unembedding.HARDEST


def test_a_right_hint_is_no_search() -> None:
    keys = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    found = ExactSet(keys).decide(0, query=np.array([1.0, 0.0]))
    assert (found.code, found.steps) == ("selectable", 0)
    assert found.query == (Fraction(1), Fraction(0))
