"""The small steps that geometry is made of, each against its formula written out."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry import checker as checker_module
from ln_probe.analyses.geometry import coordinates as coordinates_module
from ln_probe.analyses.geometry import inputs
from ln_probe.analyses.geometry.checker import Checker, Rows
from ln_probe.analyses.geometry.coordinates import TAU, coordinates
from ln_probe.analyses.geometry.exact import ExactSet
from ln_probe.analyses.geometry.inputs import QuerySet
from ln_probe.analyses.geometry.witnesses import GivenSet, over_given

KEYS, DIM = 9, 3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def as_rows(*rows: tuple[list[int], list[float]]) -> Rows:
    start = np.concatenate([[0], np.cumsum([len(index) for index, _ in rows])])
    return Rows(start, np.concatenate([r[0] for r in rows]).astype(np.int64), np.concatenate([r[1] for r in rows]))


def checker_of(rng: np.random.Generator, biased: bool, seen: bool) -> Checker:
    keys, bias = rng.standard_normal((KEYS, DIM)) + 2.0, rng.standard_normal(KEYS) if biased else None
    return Checker(keys, bias, QuerySet(rng.standard_normal(DIM), rng.standard_normal((DIM, 2))) if seen else None, TAU)


def offset_of(checker: Checker) -> np.ndarray:
    return np.zeros(KEYS) if checker.measured.offset is None else checker.measured.offset


# Certificates


def test_what_a_checker_measures_are_the_scores_of_the_queries(rng: np.random.Generator) -> None:
    keys, bias = rng.standard_normal((KEYS, DIM)), rng.standard_normal(KEYS)
    center, axes = rng.standard_normal(DIM), rng.standard_normal((DIM, 2))
    space = Checker(keys, bias, QuerySet(center, axes), TAU).nats
    u = rng.standard_normal((1, 2))
    expected = keys @ (center + axes @ u[0]) + bias
    found = space.scores(u)[0]
    np.testing.assert_allclose(found - found.mean(), expected - expected.mean(), atol=1e-12)
    assert not space.upwards


@pytest.mark.parametrize("biased", [False, True])
def test_judged_points_are_centred_and_of_unit_size(biased: bool, rng: np.random.Generator) -> None:
    keys, bias = 3.0 * rng.standard_normal((KEYS, DIM)) + 5.0, 2.0 * rng.standard_normal(KEYS) + 1.0
    space = Checker(keys, bias if biased else None, None, TAU).judged
    centred = keys - keys.mean(axis=0)
    np.testing.assert_allclose(space.rows[:, :DIM], centred / np.sqrt((centred**2).sum(axis=1).mean()), atol=1e-12)
    if biased:
        np.testing.assert_allclose(space.rows[:, DIM], (bias - bias.mean()) / bias.std(), atol=1e-12)
    np.testing.assert_allclose(space.length, np.linalg.norm(space.rows, axis=1))
    assert space.upwards == biased
    assert (space.noise > 0).all()
    assert (space.error > space.noise).all()
    assert space.error.max() < 1e-12


@pytest.mark.parametrize(("biased", "seen"), [(False, False), (True, False), (True, True)])
def test_a_gap_over_keys_up_to_a_position(biased: bool, seen: bool, rng: np.random.Generator) -> None:
    checker = checker_of(rng, biased, seen)
    rows = checker.judged.rows
    query = rng.standard_normal((KEYS, rows.shape[1]))
    query[:, -1] = np.abs(query[:, -1])
    targets = np.arange(KEYS)
    unit = query / np.linalg.norm(query, axis=1, keepdims=True)
    for until in (None, np.minimum(targets + 2, KEYS - 1), np.full(KEYS, 1)):
        gap, near = checker.selects(targets, query, until)
        for i in range(KEYS):
            rivals = [j for j in range(KEYS) if j != i and (until is None or j <= until[i])]
            if rivals:
                expected = rows[i] @ unit[i] - max(rows[j] @ unit[i] for j in rivals)
                assert gap.lower[i] <= expected <= gap.upper[i]
                assert gap.upper[i] - gap.lower[i] < 1e-11
        assert not near.any()
    lead, rival = checker.leads(targets, unit)
    for i in range(KEYS):
        others = np.where(targets == i, -np.inf, rows @ unit[i])
        assert rival[i] == others.argmax()
        assert lead[i] <= max(rows[i] @ unit[i] - others.max(), 0.0)
        assert lead[i] == pytest.approx(rows[i] @ unit[i] - others.max(), abs=1e-11)


def test_a_query_that_is_none_proves_nothing(rng: np.random.Generator) -> None:
    checker = checker_of(rng, True, False)
    query = rng.standard_normal((4, DIM + 1))
    query[:, -1] = 1.0
    query[0], query[1, 0], query[2, -1] = 0.0, np.nan, -1.0
    gap, near = checker.selects(np.arange(4), query)
    assert (gap.lower[:3] == -np.inf).all()
    assert np.isfinite(gap.lower[3])
    assert not near.any()
    low = checker.gap_at_least(np.arange(2), np.array([[np.nan, 0.0, 0.0, 1.0], [0.1, 0.2, 0.0, 1.0]])).lower
    assert low[0] == -np.inf
    assert np.isfinite(low[1])


def test_copies_are_near_and_alone_nothing_competes() -> None:
    keys = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.5]])
    checker = Checker(keys, None, None, TAU)
    gap, near = checker.selects(np.array([0, 1, 2]), keys - keys.mean(axis=0))
    assert near.tolist() == [True, True, False]
    assert (gap.lower > 1.0).all()
    gap, near = Checker(keys[:2], None, None, TAU).selects(np.array([0, 1]), np.zeros((2, 2)))
    assert (gap.lower == np.inf).all()
    assert near.all()
    gap, near = checker.selects(np.array([0, 0]), np.zeros((2, 2)), until=np.array([1, 2]))
    assert gap.lower.tolist() == [np.inf, -np.inf]
    assert near.tolist() == [True, True]
    rows = checker.judged.rows
    distances = checker.equals(np.array([0, 0]), np.array([1, 2]))
    np.testing.assert_allclose(distances, [0.0, np.linalg.norm(rows[0] - rows[2])])


@pytest.mark.parametrize("biased", [False, True])
def test_what_rows_of_weights_come_to(biased: bool, rng: np.random.Generator) -> None:
    checker = checker_of(rng, biased, False)
    rows = checker.judged.rows
    weights = as_rows(
        ([1, 4, 6], [0.5, 1.0, 0.25]), ([2], [3.0]), ([0, 3], [-0.1, 1.0]), ([5, 7], [0.0, 1.0]), ([], [])
    )
    targets = np.array([0, 1, 2, 5, 3])
    miss, found = checker._miss(checker.judged, targets, weights)
    assert found.convex.tolist() == [True, True, False, True, False]
    assert found.own.tolist() == [False, False, False, False, False]
    assert found.last.tolist()[:2] == [6, 2]
    assert found.last[3] == 7
    for k in (0, 1, 3):
        index, value = (part[weights.start[k] : weights.start[k + 1]] for part in (weights.index, weights.value))
        steps = rows[index] - rows[targets[k]]
        mean = value @ steps / value.sum()
        if biased:
            mean[-1] = min(mean[-1], 0.0)
        far = np.linalg.norm(steps, axis=1)
        assert miss.lower[k] <= np.linalg.norm(mean) <= miss.upper[k]
        assert miss.upper[k] - miss.lower[k] < 1e-11
        assert found.length[k] == pytest.approx(np.linalg.norm(mean), abs=1e-14)
        assert found.size[k] == pytest.approx(value @ far / value.sum())
        assert found.nearest[k] == pytest.approx(far[value > 0].min())
        noise = value @ (checker.judged.noise[index] + checker.judged.noise[targets[k]]) / value.sum()
        assert found.noise[k] == pytest.approx(noise)
    assert (miss.upper[[2, 4]] == np.inf).all()
    assert checker._miss(checker.judged, np.array([1]), as_rows(([0], [1.0])))[1].last.tolist() == [0]
    assert checker._miss(checker.judged, np.array([1]), as_rows(([1, 2], [0.5, 0.5])))[1].own.tolist() == [True]
    until = checker.reproduces(targets[:1], weights.some(np.array([0])), until=np.array([5]))
    assert until.upper.tolist() == [np.inf]
    until = checker.reproduces(targets[:1], weights.some(np.array([0])), until=np.array([6]))
    assert until.upper[0] == miss.upper[0]


@pytest.mark.parametrize(("biased", "seen"), [(False, False), (False, True), (True, True)])
def test_brackets_of_a_margin_hold_their_formulas(biased: bool, seen: bool, rng: np.random.Generator) -> None:
    checker = checker_of(rng, biased, seen)
    rows, offset, targets = checker.measured.rows, offset_of(checker), np.arange(KEYS)
    points = rng.standard_normal((KEYS, rows.shape[1]))
    found = checker.gap_at_least(targets, points)
    inside = points / np.maximum(np.linalg.norm(points, axis=1), 1.0)[:, None]
    weights = as_rows(*[([(i + 1) % KEYS, (i + 3) % KEYS], [1.0, 3.0]) for i in range(KEYS)])
    above = checker.gap_at_most(targets, weights)
    for i in range(KEYS):
        height = rows @ inside[i] + offset
        expected = height[i] - np.delete(height, i).max()
        assert found.lower[i] <= expected <= found.upper[i]
        assert found.upper[i] - found.lower[i] < 1e-10
        j, k = (i + 1) % KEYS, (i + 3) % KEYS
        mean = (rows[j] + 3 * rows[k]) / 4 - rows[i]
        expected = np.linalg.norm(mean) + offset[i] - (offset[j] + 3 * offset[k]) / 4
        assert above.lower[i] <= expected <= above.upper[i]
        assert above.upper[i] - above.lower[i] < 1e-10
    for wrong in (([0, 1], [1.0, 1.0]), ([1], [-1.0])):
        nothing = checker.gap_at_most(np.array([0]), as_rows(wrong))
        assert (nothing.lower[0], nothing.upper[0]) == (-np.inf, np.inf)


@pytest.mark.parametrize("biased", [False, True])
def test_brackets_of_attention_hold_their_formulas(biased: bool, rng: np.random.Generator) -> None:
    checker = checker_of(rng, biased, True)
    rows, targets = checker.nats.rows, np.arange(KEYS)
    offset = np.zeros(KEYS) if checker.nats.offset is None else checker.nats.offset
    points = 0.4 * rng.standard_normal((KEYS, 2))
    points[0] *= 10.0
    found, bound = checker.attention(targets, points, points)
    inside = points / np.maximum(np.linalg.norm(points, axis=1), 1.0)[:, None]
    for i in range(KEYS):
        share = np.exp(rows @ inside[i] + offset)
        share /= share.sum()
        assert found.lower[i] <= share[i] <= found.upper[i]
        assert found.upper[i] - found.lower[i] < 1e-11
        level = -(share * np.log(share)).sum() + share @ (offset - offset[i])
        expected = min(1.0, np.exp(-level + np.linalg.norm(share @ rows - rows[i])))
        assert bound.lower[i] <= expected + 1e-15
        assert bound.upper[i] >= expected
        assert bound.upper[i] - bound.lower[i] < 1e-10
    points[3] = np.nan
    found, bound = checker.attention(targets, points, points)
    assert (found.lower[3], found.upper[3], bound.lower[3], bound.upper[3]) == (0.0, 1.0, 0.0, 1.0)
    assert np.isfinite(found.lower[2])
    if biased:  # (these bounds are 1)
        return
    points = 0.01 * rng.standard_normal((KEYS, 2))
    other = np.where(targets[:, None] == 4, 0.3, points)
    plain, mixed, all_ = (
        checker.attention(targets, *pair)[1].upper for pair in ((points, points), (points, other), (other, other))
    )
    assert mixed[4] == pytest.approx(all_[4], abs=1e-14)
    assert abs(mixed[4] - plain[4]) > 1e-3
    np.testing.assert_allclose(np.delete(mixed, 4), np.delete(plain, 4), atol=1e-14)


def test_the_part_of_a_center_that_no_axis_reaches() -> None:
    axes = np.array([[1.0], [1.0], [0.0]])
    np.testing.assert_allclose(QuerySet(np.array([2.0, 0.0, 3.0]), axes).outside, [1.0, -1.0, 3.0], atol=1e-12)
    for center, some in (([1.0, 2.0, 3.0], np.eye(3)), ([2.0, 2.0, 0.0], axes), ([0.0, 0.0, 0.0], axes)):
        assert not QuerySet(np.array(center), some).outside.any()
    slanted = np.array([[2.0, 0.5], [0.5, 3.0], [1.5, 1.0]])
    rest = QuerySet(np.array([1.0, 2.0, 4.0]), slanted).outside
    np.testing.assert_allclose(rest @ slanted, np.zeros(2), atol=1e-12)
    assert rest.any()


@pytest.mark.parametrize(("short", "missing"), [(2e-9, 0), (5e-10, 1), (0.0, 1)])
def test_directions_are_missing_below_a_billionth_of_the_longest_axis(short: float, missing: int) -> None:
    turn = np.linalg.qr(np.random.default_rng(3).standard_normal((3, 3)))[0]
    queries = QuerySet(np.zeros(3), turn @ np.diag([4.0, 1.0, 4.0 * short]))
    assert queries.missing.shape == (3, missing)
    rows = np.random.default_rng(4).standard_normal((5, 3))
    if not missing:
        assert queries.in_span(rows) is rows
        return
    np.testing.assert_allclose(np.abs(queries.missing[:, 0] @ turn), [0.0, 0.0, 1.0], atol=1e-7)
    expected = rows - np.outer(rows @ queries.missing[:, 0], queries.missing[:, 0])
    np.testing.assert_allclose(queries.in_span(rows), expected, atol=1e-14)
    assert QuerySet(np.zeros(3), np.zeros((3, 1))).missing.shape == (3, 3)


def test_the_part_that_no_axis_reaches_is_known_to_its_doubt(rng: np.random.Generator) -> None:
    """It is the sum of the center's parts along the missing directions, in fractions, for keys of any unit."""
    for near, key_power in ((1.0, 0), (1e-6, 300), (2e-9, -300)):
        axes = rng.standard_normal((4, 2))
        across = np.linalg.svd(axes)[0][:, 2:]
        queries = QuerySet(axes @ rng.standard_normal(2) + near * across @ rng.standard_normal(2), axes)
        found = checker_module.outside(queries, key_power)
        assert found is not None
        direction, lost, power = found
        missing, center = (np.vectorize(Fraction, [object])(part) for part in (queries.missing, queries.center))
        exact = (missing @ (missing.T @ center)) * Fraction(2) ** (key_power - power)
        for value, known, doubt in zip(exact, direction, lost, strict=True):
            assert abs(value - Fraction(float(known))) <= doubt
        assert 0.5 <= np.abs(direction).max() <= 1.0
        assert lost.max() * near < 1e-12
    assert checker_module.outside(QuerySet(axes @ np.ones(2), axes), 0) is None


def test_points_are_brought_into_the_ball() -> None:
    points = np.array([[0.3, 0.4], [3.0, 4.0], [0.6, -0.8], [np.inf, 0.5]])
    plain = checker_module._into_ball(points, False)
    np.testing.assert_allclose(plain, [[0.3, 0.4], [0.6, 0.8], [0.6, -0.8], [0.0, 0.5]], atol=1e-14)
    assert (np.linalg.norm(plain, axis=1) <= 1.0).all()
    upwards = checker_module._into_ball(points, True)
    np.testing.assert_allclose(upwards, [[0.3, 0.4], [0.6, 0.8], [0.6, 0.0], [0.0, 0.5]], atol=1e-14)
    assert points[2, 1] == -0.8


def test_rows_are_gathered_and_picked() -> None:
    ints = lambda *values: np.array(values, np.int64)  # noqa: E731
    pieces = [
        (ints(2, 0), ints(2, 1), ints(5, 6, 7), np.array([0.5, 0.6, 0.7])),
        (ints(3), ints(2), ints(8, 9), np.array([0.8, 0.9])),
    ]
    rows = Rows.gathered(4, pieces)
    assert rows.start.tolist() == [0, 1, 1, 3, 5]
    assert rows.index.tolist() == [7, 5, 6, 8, 9]
    assert rows.value.tolist() == [0.7, 0.5, 0.6, 0.8, 0.9]
    some = rows.some(ints(3, 0, 1))
    assert some.start.tolist() == [0, 2, 3, 3]
    assert some.index.tolist() == [8, 9, 7]
    assert checker_module._sums(np.array([1.0, 2.0, 4.0]), ints(0, 2, 2, 3)).tolist() == [3.0, 0.0, 4.0]


# Coordinates


def test_lengths_are_lengths(rng: np.random.Generator) -> None:
    for values in (rng.standard_normal((4, 3)), 0.01 * rng.standard_normal(7), 1e200 * rng.standard_normal(5)):
        scale = np.abs(values).max()
        assert inputs._length(values) == pytest.approx(scale * np.linalg.norm(values / scale))
    assert inputs._length(np.zeros(3)) == 0.0


@pytest.mark.parametrize("biased", [False, True])
def test_queries_over_white_keys_give_the_same_order(biased: bool, rng: np.random.Generator) -> None:
    keys = rng.standard_normal((30, DIM)) * [1.0, 5.0, 0.2]
    sets = coordinates(keys, rng.standard_normal(30) if biased else None)
    assert sets.lifted == biased
    query = rng.standard_normal((4, DIM + biased))
    query[:, -1] = np.abs(query[:, -1])
    over = sets.query(query)
    np.testing.assert_allclose(np.linalg.norm(over, axis=1), 1.0)
    ours, theirs = query @ sets.white.T, over @ sets.normalized.T
    ratio = np.ptp(theirs, axis=1) / np.ptp(ours, axis=1)
    ours, theirs = (part - part.mean(axis=1, keepdims=True) for part in (ours, theirs))
    np.testing.assert_allclose(theirs, ours * ratio[:, None], atol=1e-12)
    np.testing.assert_allclose((sets.white**2).mean(axis=0), 1.0)
    product = sets.white.T @ sets.white / 30
    np.testing.assert_allclose(product, np.eye(len(product)), atol=1e-12)
    for q in query:
        plain = np.append(q[: len(sets.stretch)], q[-1]) if biased else q
        lift = plain[-1] / sets.slope[-1] if biased else 0.0
        along = (plain[: len(sets.stretch)] - lift * sets.slope[:-1]) / sets.stretch
        assert coordinates_module.query_norm(plain, sets.stretch, sets.slope) == pytest.approx(
            np.sqrt(along @ along + lift**2)
        )
        step = q[: len(sets.stretch)] * sets.stretch
        up = q @ sets.slope[: len(q)] if biased else 0.0
        assert coordinates_module.residual_norm(q, sets.stretch, sets.slope) == pytest.approx(
            np.sqrt(step @ step + up**2)
        )


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_query_over_normalized_points_comes_back_to_the_given_keys(
    seen: bool, biased: bool, rng: np.random.Generator
) -> None:
    """What it scores is the same, up to what all keys share, with all directions and without one."""
    for size, rank in ((0.01, DIM), (1.0, DIM - 1), (700.0, DIM), (3e200, DIM - 1)):
        keys, bias = size * (rng.standard_normal((12, DIM)) + 3.0), 3.0 * rng.standard_normal(12) if biased else None
        center, axes = rng.standard_normal(DIM) / size, rng.standard_normal((DIM, rank))
        given = GivenSet(keys, bias, QuerySet(center, axes) if seen else None)
        sets = coordinates(given.own.points, given.own.lift)
        assert sets.biased == (biased or (seen and rank < DIM))
        query = np.append(rng.standard_normal(DIM), [0.7] * sets.biased)
        theirs = sets.normalized @ query
        over = over_given(given.own, sets, query[None])[0]
        ours = keys @ over + (0.0 if bias is None else bias)
        ours, expected = ours / np.abs(ours).max(), theirs - theirs.mean()
        ours = ours - ours.mean()
        np.testing.assert_allclose(ours / np.linalg.norm(ours), expected / np.linalg.norm(expected), atol=1e-9)
        if not sets.biased:
            assert np.linalg.norm(over) == pytest.approx(1.0)


def test_scores_gaps_and_residuals_by_loops(rng: np.random.Generator) -> None:
    for dim in (1, 3, 4, 6, 9):
        rows, query = rng.standard_normal((7, dim)), rng.standard_normal((3, dim))
        columns, out = np.ascontiguousarray(rows.T), np.zeros(7)
        coordinates_module.scores_of(columns, query[0], 7, out)
        np.testing.assert_allclose(out, rows @ query[0])
        group, targets = np.array([0, 1, 0, 3, 4, 5, 6]), np.array([0, 3, 6])
        gaps, rivals = coordinates_module.score_gaps(columns, targets, query, group)
        for k, i in enumerate(targets):
            there = np.where(group == group[i], -np.inf, rows @ query[k])
            assert rivals[k] == there.argmax()
            assert gaps[k] == pytest.approx(rows[i] @ query[k] - there.max())
        sizes, weights, indices = np.array([2, 1]), np.array([0.25, 0.75, 1.0]), np.array([1, 2, 5])
        for biased in (False, True):
            found = coordinates_module.residuals(rows, np.array([0, 4]), sizes, weights, indices, biased)
            rest = np.array([0.25 * rows[1] + 0.75 * rows[2] - rows[0], rows[5] - rows[4]])
            if biased:
                rest[:, -1] = np.minimum(rest[:, -1], 0.0)
            np.testing.assert_allclose(found, np.linalg.norm(rest, axis=1))


def test_one_group_competes_with_nothing() -> None:
    columns, group = np.ones((2, 3)), np.zeros(3, np.int64)
    gaps, rivals = coordinates_module.score_gaps(columns, np.array([1]), np.ones((1, 2)), group)
    assert rivals.tolist() == [-1]
    assert gaps.tolist() == [np.inf]


# What is said of a set


def test_the_spread_of_a_set_and_its_keys_near_the_tolerance() -> None:
    keys = np.array([[8.0, 0.0], [-8.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    found = ln_probe.key_geometry(keys[None], margins=False).conditioning[0]
    assert found.spread == pytest.approx(4.0)
    assert found.offset_over_spread == 0.0
    assert found.near_tau == 0
    assert ln_probe.key_geometry(np.ones((1, 3, 2)), margins=False).conditioning[0].spread == 1.0
    beside = np.concatenate([keys, [[8.0 + 6e-6 * 8, 0.0]]])
    assert ln_probe.key_geometry(beside[None], margins=False).conditioning[0].near_tau >= 0


def test_the_offset_of_a_set_is_in_units_of_its_spread(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((6, DIM)) + np.array([3.0, 0.0, 4.0])
    found = inputs.score_space(keys, None, None)
    mean = keys.mean(axis=0)
    spread = np.sqrt(((keys - mean) ** 2).sum(axis=1).mean())
    assert found.offset_over_spread == pytest.approx(np.linalg.norm(mean) / spread)
    through = inputs.score_space(keys, np.arange(6.0), QuerySet(np.ones(DIM), 2.0 * np.eye(DIM)))
    np.testing.assert_allclose(through.rows, 2.0 * (keys - mean))
    np.testing.assert_allclose(through.offset - through.offset.mean(), (keys - mean).sum(axis=1) + np.arange(6.0) - 2.5)
    assert through.largest_score == pytest.approx(3.0 * np.abs(keys - mean).sum(axis=1).max() + 5.0)


def test_exact_verdicts_count_keys_from_either_end() -> None:
    exact = ExactSet(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]))
    assert exact.decide(-3).code == exact.decide(0).code == "selectable"
    assert exact.decide(-1).code == exact.decide(2).code == "unselectable"
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=f"key {wrong} is out of range: there are 3"):
            exact.decide(wrong)
