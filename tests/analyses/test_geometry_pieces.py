"""Guards that verdicts alone do not show: accuracy of products, missing directions, conditioning of a set."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import brentq

import ln_probe
import ln_probe.analyses.geometry
from ln_probe.analyses.geometry import active_set, inputs, large, margins, newton, wolfe
from ln_probe.analyses.geometry import checker as checker_module
from ln_probe.analyses.geometry.checker import Checker, Rows
from ln_probe.analyses.geometry.coordinates import TAU, coordinates
from ln_probe.analyses.geometry.decide import SELECTABLE, UNDECIDED, UNSELECTABLE, Pool, decide
from ln_probe.analyses.geometry.inputs import LEFT_OUT, QuerySet, accurate_product, key_sets, score_space, seen_from
from ln_probe.analyses.geometry.margins import Keys, Measured, _nearest, again, too_wide
from ln_probe.analyses.geometry.positions import first_unselectable
from ln_probe.analyses.geometry.prove import Proved, conditioning, prove_positions, prove_verdicts
from ln_probe.analyses.probes import unembedding


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2)


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


def test_one_bias_may_serve_all_sets_of_a_batch(rng: np.random.Generator) -> None:
    keys, bias = rng.standard_normal((4, 5, 2)), rng.standard_normal(5)
    values, lift, batch = key_sets(keys, bias)
    assert batch
    assert lift is not None
    np.testing.assert_array_equal(lift, np.broadcast_to(bias, (4, 5)))
    np.testing.assert_array_equal(values, keys)
    one = key_sets(keys[0], bias)[1]
    assert one.shape == (1, 5)
    for wrong in (bias[:4], np.zeros(4), np.zeros((5, 4))):
        with pytest.raises(ValueError, match="bias must have the shape"):
            key_sets(keys, wrong)


def test_how_many_tokens_are_solved_for() -> None:
    assert unembedding._affordable(1000, 64) == int(3e11 / (2 * 64**2 * (1000 + 3 * 64)))
    assert unembedding._affordable(200_000, 4096) == unembedding.HARDEST


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


def test_the_part_that_no_axis_reaches_is_known_to_its_doubt() -> None:
    """It is the sum of the center's parts along the missing directions, in fractions, for keys of any unit."""
    rng = np.random.default_rng(0)
    for near, key_power in ((1.0, 0), (1e-6, 300), (2e-9, -300)):
        axes = rng.standard_normal((4, 2))
        across = np.linalg.svd(axes)[0][:, 2:]
        queries = QuerySet(axes @ rng.standard_normal(2) + near * across @ rng.standard_normal(2), axes)
        found = checker_module.outside(queries, key_power)
        direction, lost, power = found
        missing, center = (np.vectorize(Fraction, [object])(part) for part in (queries.missing, queries.center))
        exact = (missing @ (missing.T @ center)) * Fraction(2) ** (key_power - power)
        for value, known, doubt in zip(exact, direction, lost, strict=True):
            assert abs(value - Fraction(float(known))) <= doubt
        assert 0.5 <= np.abs(direction).max() <= 1.0
        assert lost.max() * near < 1e-12
    assert checker_module.outside(QuerySet(axes @ np.ones(2), axes), 0) is None


def test_the_spread_of_a_set_and_its_keys_near_the_tolerance() -> None:
    keys = np.array([[8.0, 0.0], [-8.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    found = ln_probe.key_geometry(keys[None], margins=False).conditioning[0]
    assert found.spread == pytest.approx(4.0)
    assert found.offset_over_spread == 0.0
    assert found.near_tau == 0
    assert found.warnings(4) == ()
    assert ln_probe.key_geometry(np.ones((1, 3, 2)), margins=False).conditioning[0].spread == 1.0
    beyond_an_edge = np.concatenate([keys, [[4.0, 1.0 + 1.001e-7 * 4]]])  # by about the tolerance
    assert ln_probe.key_geometry(beyond_an_edge[None], margins=False).conditioning[0].near_tau >= 1


def test_the_offset_of_a_set_is_in_units_of_its_spread(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((6, 3)) + np.array([3.0, 0.0, 4.0])
    found = inputs.score_space(keys, None, None)
    mean = keys.mean(axis=0)
    spread = np.sqrt(((keys - mean) ** 2).sum(axis=1).mean())
    assert found.offset_over_spread == pytest.approx(np.linalg.norm(mean) / spread)
    through = inputs.score_space(keys, np.arange(6.0), QuerySet(np.ones(3), 2.0 * np.eye(3)))
    np.testing.assert_allclose(through.rows, 2.0 * (keys - mean))
    np.testing.assert_allclose(through.offset - through.offset.mean(), (keys - mean).sum(axis=1) + np.arange(6.0) - 2.5)
    assert through.largest_score == pytest.approx(3.0 * np.abs(keys - mean).sum(axis=1).max() + 5.0)


SQUARE = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0], [0.2, 0.1, 0.0]])


@pytest.mark.parametrize(("keys", "near"), [
    (SQUARE[:4], 0),
    (np.append(SQUARE[:4], [[0.5, 1.0 + 2e-9, 0.0]], axis=0), 1),  # beyond an edge by about the tolerance
    (SQUARE[:1], 1),
])  # fmt: skip
def test_a_key_is_near_the_tolerance_only_if_no_query_clears_it(keys: np.ndarray, near: int) -> None:
    sets, where = coordinates(keys), score_space(keys, None, None)
    barely = np.full(len(keys), TAU)  # what some query showed; the best one shows far more
    assert conditioning(sets, where, decide(sets), barely).near_tau == near


def test_radii_to_the_end_of_what_can_be_used() -> None:
    for radius in (1.0 / inputs._LARGEST, inputs._LARGEST):
        geometry = ln_probe.key_geometry(SQUARE, query_set=radius)
        assert geometry.verdict[4] == "unselectable"
    for radius in (0.99 / inputs._LARGEST, 1.01 * inputs._LARGEST):
        with pytest.raises(ValueError, match="scores would leave the range of float64"):
            ln_probe.key_geometry(SQUARE, query_set=radius)


def proved_of(keys: np.ndarray) -> tuple[Checker, Proved]:
    checker, sets = Checker(keys, None, None, TAU), coordinates(keys)
    return checker, prove_verdicts(checker, sets, decide(sets))


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


def test_screening_doubts_what_single_precision_loses() -> None:
    rng = np.random.default_rng(3)
    rows = 1e4 * rng.standard_normal((60, 8))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    scores = unit @ rows.T
    own = np.diag(scores)
    true = -np.logaddexp.reduce(scores - own[:, None], axis=1)
    found = large.pointed(rows, None)
    wrong = np.abs(found.log_weight - true)
    assert (wrong <= found.doubt).all()
    assert (found.doubt >= 8 * 2.0**-24 * np.abs(scores).max()).all()  # the bound on a product of 8 terms, at the least


@pytest.mark.parametrize("biased", [False, True])
def test_a_pool_proposes_what_holds(biased: bool) -> None:
    rng = np.random.default_rng(3)
    keys, bias = rng.standard_normal((40, 2)), 0.3 * rng.standard_normal(40) if biased else None
    sets = coordinates(keys, bias)
    code = decide(sets).code[sets.leaders]
    pool = Pool(sets)
    pool.solve(np.empty(0, np.int64))
    assert (pool.inside == (code == UNSELECTABLE)).all()
    assert np.isfinite(pool.query[code == SELECTABLE]).all()
    checker = Checker(keys, bias, None, TAU)
    assert pool.inside.sum() > 10
    rows = Rows.gathered(len(sets.leaders), pool.pieces)
    for place in np.flatnonzero(pool.inside):
        index, weight = rows.row(place)
        used, one = sets.leaders[index], np.array([sets.leaders[place]])
        miss = checker.reproduces(one, Rows(np.array([0, len(used)]), used, weight / weight.sum()))
        assert miss.upper[0] <= TAU
    for place in np.flatnonzero(~pool.inside):
        height = sets.white @ pool.query[place]
        assert height[place] > np.delete(height, place).max()


def test_which_brackets_are_too_wide() -> None:
    lower, upper = np.array([1.0, 1.0, -1.0, 0.0, 0.0, np.nan]), np.array([1.005, 1.02, -1.005, 1e-7, 1.5e-5, 1.0])
    inside = np.zeros(6, bool)
    found = too_wide(lower, np.maximum(lower, upper), 0.01, 1.0, inside)
    assert found.tolist() == [False, True, False, True, True, True]
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
    assert not plain.any()


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


# Steps of the compiled solvers whose errors cost time before they cost a verdict, against their linear algebra.

MANY, DIM = 4, 6


def filled(rng: np.random.Generator, many: int = MANY, rays: int = 0) -> active_set.ActiveSet:
    """An active set of `many` random points, the last `rays` of them directions, with its inverse."""
    active = active_set.active_set(many + 3, DIM)
    active.points[:many] = rng.standard_normal((many, DIM))
    active.e[:many] = 1.0
    active.e[many - rays : many] = 0.0
    active.weight[:many], active.members[:many] = rng.random(many) + 0.1, np.arange(many)
    for a in range(many):
        active_set.gram_column(active.points, active.e, active.border, 2.0, a)
        assert active_set.append(active.inverse, active.solution, active.border, active.work, active.e, a)
    return active


def affine_minimizer(points: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Weights with `e @ w == 1` whose combination of the points is shortest."""
    many = len(points)
    system = np.block([[points @ points.T, e[:, None]], [e[None], np.zeros((1, 1))]])
    return np.asarray(np.linalg.solve(system, np.append(np.zeros(many), 1.0))[:many])


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("rays", [0, 1])
def test_a_minor_cycle_ends_at_the_minimizer_of_what_it_keeps(
    careful: bool, rays: int, rng: np.random.Generator
) -> None:
    for _ in range(8):
        active, x = filled(rng, rays=rays), np.zeros(DIM)
        active.weight[:MANY] /= active.weight[: MANY - rays].sum()
        points, e, weight, members, inverse, solution, border, _ = active
        there, m, spent = wolfe._to_affine_minimizer(
            points, e, weight, members, inverse, solution, border, MANY, x, 2.0, careful
        )
        assert there
        assert 0 < m <= MANY
        assert spent >= m * DIM
        expected = affine_minimizer(points[:m], e[:m])
        np.testing.assert_allclose(weight[:m], expected, atol=1e-9)
        assert (weight[:m] >= 0).all()


def minor_cycle(points: np.ndarray, e: np.ndarray, weight: np.ndarray) -> list[int]:
    """Which points are left when each is dropped that blocks the way to the affine minimizer first."""
    left = list(range(len(points)))
    while True:
        goal = affine_minimizer(points[left], e[left])
        if (goal > 0).all():
            return left
        shares = [w / (w - g) if g <= 0 else np.inf for w, g in zip(weight, goal, strict=True)]
        first = int(np.argmin(shares))
        weight = weight + shares[first] * (goal - weight)
        weight, left = np.delete(weight, first), left[:first] + left[first + 1 :]


@pytest.mark.parametrize("rays", [0, 1])
def test_what_blocks_first_is_dropped_first(rays: int, rng: np.random.Generator) -> None:
    blocked = 0
    for _ in range(12):
        active, x = filled(rng, 5, rays), np.zeros(DIM)
        active.points[:5] += 2.0 * rng.standard_normal(DIM)  # away from zero, so that several block
        for a in range(5):
            active_set.gram_column(active.points, active.e, active.border, 2.0, a)
            assert active_set.append(active.inverse, active.solution, active.border, active.work, active.e, a)
        active.weight[:5] /= active.weight[: 5 - rays].sum()
        points, e, weight, members, inverse, solution, border, _ = active
        expected = minor_cycle(points[:5].copy(), e[:5].copy(), weight[:5].copy())
        _, m, _ = wolfe._to_affine_minimizer(points, e, weight, members, inverse, solution, border, 5, x, 2.0, False)
        assert sorted(members[:m].tolist()) == expected
        blocked += len(expected) < 4
    assert blocked


def test_differences_are_scaled_and_unscaled(rng: np.random.Generator) -> None:
    rows, scale = rng.standard_normal((MANY + 1, DIM)), rng.random(MANY + 1) + 0.5
    active = active_set.active_set(MANY, DIM)
    for m, new in enumerate((3, 1, -1)):
        wolfe._put(rows, scale, 0, active.points, active.e, active.weight, active.members, m, new, 7.0)
    np.testing.assert_allclose(active.points[:2], scale[[3, 1], None] * (rows[[3, 1]] - rows[0]))
    assert active.points[2].tolist() == [0.0] * (DIM - 1) + [-7.0]
    assert active.e[:3].tolist() == [1.0, 1.0, 0.0]
    assert active.weight[:3].tolist() == [0.0] * 3
    assert active.members[:3].tolist() == [3, 1, -1]
    active.weight[:3] = [0.2, 0.3, 0.5]
    total = 0.2 * scale[3] + 0.3 * scale[1]
    wolfe.unscale(active, scale, 3)
    np.testing.assert_allclose(active.weight[:3], [0.2 * scale[3] / total, 0.3 * scale[1] / total, 0.5 / total])
    np.testing.assert_allclose(active.points[:2], rows[[3, 1]] - rows[0])
    assert active.points[2, -1] == -7.0
    assert wolfe.scale_of(4.0, 1.0) == 0.5
    assert wolfe.scale_of(0.0, 4.0) == pytest.approx(1 / np.sqrt(4 * wolfe._SCALE_NOISE))


def test_the_lowest_scores_in_order() -> None:
    scores, found = np.array([3.0, 1.0, 2.0, 0.5, 1.0, 9.0, -4.0]), np.full(3, -1)
    assert wolfe.lowest(scores, 6, found) == 3
    assert found.tolist() == [3, 1, 4]
    assert wolfe.lowest(scores, 2, found) == 2
    assert found[:2].tolist() == [1, 0]


@pytest.mark.parametrize("size", [0.3, 30.0])  # the gradient's: the minimum lies inside the ball, or on the sphere
@pytest.mark.parametrize("many", [3, DIM, 9])
def test_steps_of_a_model_end_at_its_minimum_in_the_ball(many: int, size: float, rng: np.random.Generator) -> None:
    spread, u = 3 * rng.standard_normal((many, DIM)), rng.standard_normal(DIM)
    u /= np.linalg.norm(u)
    H, right = spread.T @ spread, size * (spread.T @ rng.standard_normal(many))  # (bounded below, of any rank)

    def minimum(c: float) -> np.ndarray:
        return np.asarray(np.linalg.lstsq(H + c * np.eye(DIM), right, rcond=None)[0])

    best = minimum(0.0)
    assert (np.linalg.norm(best) < 1.0) == (size < 1.0)
    if size > 1.0:
        best = minimum(brentq(lambda c: np.linalg.norm(minimum(c)) - 1.0, 1e-9, 1e4, xtol=1e-14))

    def value(v: np.ndarray) -> float:
        return float(0.5 * v @ H @ v - right @ v)

    start, v = value(u), np.empty(DIM)
    for step in range(60):
        newton._model_minimum(spread, many, u.copy(), H @ u - right, v)
        assert np.linalg.norm(v) <= 1.0 + 1e-12
        u = v.copy()
        if step == 3:
            assert value(u) - value(best) <= 0.1 * (start - value(best))
    assert value(u) - value(best) <= 1e-6 * (start - value(best))


def test_where_a_search_begins_among_keys_close_together(rng: np.random.Generator) -> None:
    rows = 1e-3 * rng.standard_normal((5, 3))
    keys = Keys(rows, np.ascontiguousarray(rows.T), np.zeros(5), (rows**2).sum(axis=1))
    start, largest = _nearest(keys, 1, np.zeros(5))
    apart = np.linalg.norm(rows - rows[1], axis=1)
    assert largest == pytest.approx(apart.max())
    assert start == np.where(np.arange(5) == 1, np.inf, apart).argmin()
    alone = Keys(rows[:1], np.ascontiguousarray(rows[:1].T), np.zeros(1), (rows[:1] ** 2).sum(axis=1))
    assert _nearest(alone, 0, np.zeros(1)) == (-1, 0.0)
