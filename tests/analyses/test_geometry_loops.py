"""The steps of the compiled solvers, each against the linear algebra that it is."""

from __future__ import annotations

import numpy as np
import pytest

from ln_probe.analyses.geometry import active_set, margins, newton, wolfe
from ln_probe.analyses.geometry.margins import Cone, Keys

MANY, DIM = 4, 6


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


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


def gram_of(active: active_set.ActiveSet, many: int, bordering: float = 2.0) -> np.ndarray:
    points, e = active.points[:many], active.e[:many]
    return points @ points.T + bordering * np.outer(e, e)


def assert_inverse(active: active_set.ActiveSet, many: int) -> None:
    inverse = active.inverse[:many, :many]
    np.testing.assert_allclose(inverse @ gram_of(active, many), np.eye(many), atol=1e-10)
    np.testing.assert_allclose(active.solution[:many], inverse @ active.e[:many], atol=1e-10)


@pytest.mark.parametrize("rays", [0, 1])
def test_the_inverse_of_an_active_set_is_bordered_and_shrunk(rays: int, rng: np.random.Generator) -> None:
    active = filled(rng, rays=rays)
    assert_inverse(active, MANY)
    active.points[MANY] = active.points[:2].mean(axis=0)  # on the line through two of them
    active.e[MANY] = 1.0
    active_set.gram_column(active.points, active.e, active.border, 2.0, MANY)
    grown = (active.inverse, active.solution, active.border, active.work, active.e)
    assert not active_set.append(*grown, MANY)
    np.testing.assert_allclose(active.work[:MANY], [0.5, 0.5, 0.0, 0.0], atol=1e-10)
    for k, left in ((1, [0, 3, 2]), (2, [0, 3]), (0, [3])):
        points = active.points[left].copy() if k == 1 else None
        weight = active.weight[:MANY].copy()
        size = len(left) + 1
        active_set.remove(
            active.points, active.e, active.weight, active.members, active.inverse, active.solution, k, size
        )
        assert active.members[: len(left)].tolist() == left
        assert_inverse(active, len(left))
        if points is not None:
            np.testing.assert_array_equal(active.points[:3], points)
            np.testing.assert_array_equal(active.weight[:3], weight[left])


def test_an_inverse_is_made_anew_and_solutions_refined(rng: np.random.Generator) -> None:
    active = filled(rng)
    active.inverse[:MANY, :MANY] += 0.01 * rng.standard_normal((MANY, MANY))
    points, e, _, _, inverse, solution, border, work = active
    x, right = np.zeros(DIM), rng.standard_normal(MANY)
    exact = np.linalg.solve(gram_of(active, MANY), right)
    found = exact + 0.1 * rng.standard_normal(MANY)
    before = np.abs(found - exact).max()
    active_set.refine(points, e, inverse, right, found, MANY, 2.0, x, border)
    assert np.abs(found - exact).max() < 0.5 * before
    assert active_set.rebuild(points, e, inverse, solution, border, work, MANY, 2.0)
    assert_inverse(active, MANY)
    active_set.refine(points, e, inverse, right, found, MANY, 2.0, x, border)
    np.testing.assert_allclose(found, exact, atol=1e-10)
    points[3] = points[2]
    assert not active_set.rebuild(points, e, inverse, solution, border, work, MANY, 2.0)
    assert active_set.contains(active.members, 3, 4)
    assert not active_set.contains(active.members, 3, 3)


def test_the_mean_of_points_and_a_direction(rng: np.random.Generator) -> None:
    active, x = filled(rng, rays=1), np.zeros(DIM)
    weight = active.weight[:MANY] / active.weight[:3].sum()
    active_set.weighted_mean(active.points, active.e, active.weight, MANY, x)
    np.testing.assert_allclose(active.weight[:MANY], weight)
    np.testing.assert_allclose(x, weight @ active.points[:MANY])


# The nearest point


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


def test_the_lowest_score_among_few_and_all(rng: np.random.Generator) -> None:
    rows, scale, x = rng.standard_normal((9, DIM)), rng.random(9) + 0.5, rng.standard_normal(DIM)
    own, columns, scores = 0.3, np.ascontiguousarray(rows.T), np.zeros(9)
    true = rows @ x - own
    few = np.array([2, 5, 7, 1])
    new, value = wolfe._lowest_of_few(rows, scale, few, 3, x, own)
    assert new == few[:3][(true * scale)[few[:3]].argmin()]
    assert value == pytest.approx((true * scale)[few[:3]].min())
    for target, count in ((4, 9), (8, 6)):
        true = np.where(np.arange(9) == target, np.inf, rows @ x - own)[:count]
        new, value, least = wolfe._lowest_of_all(columns, scale, target, count, x, own, scores)
        assert new == (true * scale[:count]).argmin()
        assert value == pytest.approx((true * scale[:count]).min())
        assert least == pytest.approx(true.min())
        np.testing.assert_allclose(scores[:count], true * scale[:count])


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


# The polish


def test_rows_are_made_orthonormal_and_solved(rng: np.random.Generator) -> None:
    basis, upper, rows = np.zeros((MANY, DIM)), np.zeros((MANY, MANY)), rng.standard_normal((3, DIM))
    for used in range(3):
        assert active_set._extend(basis, upper, used, rows[used].copy())
    np.testing.assert_allclose(basis[:3] @ basis[:3].T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(upper[:3, :3].T @ basis[:3], rows, atol=1e-12)
    assert not active_set._extend(basis, upper.copy(), 3, rows[0] - 2 * rows[2])
    wanted, step, column = rng.standard_normal(3), np.zeros(MANY), np.array([2, 0, 3])
    active_set._back_substitute(upper, column, wanted, step, 3)
    np.testing.assert_allclose(upper[:3, :3] @ step[column], wanted, atol=1e-12)
    assert step[1] == 0.0
    e = np.array([1.0, 1.0, 0.0, 1.0])
    active_set._balance(e, step, 1, MANY)
    assert e @ step == pytest.approx(0.0, abs=1e-12)
    x = rng.standard_normal(DIM)
    rest = x - basis[:2].T @ (basis[:2] @ x)
    active_set._off(basis, 2, x)
    np.testing.assert_allclose(x, rest, atol=1e-12)


@pytest.mark.parametrize("rays", [0, 1])
def test_an_affine_step_ends_at_the_minimizer(rays: int, rng: np.random.Generator) -> None:
    active, step, basis = filled(rng, rays=rays), np.zeros(MANY + 2), np.zeros((MANY + 2, DIM))
    active.weight[:MANY] /= active.weight[: MANY - rays].sum()
    heaviest = active.weight[: MANY - rays].argmax()
    assert active_set._heaviest(active, MANY) == heaviest
    exact, used = active_set._affine_step(active, MANY, step, basis)
    assert (exact, used) == (True, MANY - 1)
    expected = affine_minimizer(active.points[:MANY], active.e[:MANY])
    np.testing.assert_allclose(active.weight[:MANY] + step[:MANY], expected, atol=1e-9)
    active.points[MANY], active.e[MANY], active.weight[MANY] = active.points[:2].mean(axis=0), 1.0, 0.0
    exact, used = active_set._affine_step(active, MANY + 1, step, basis)
    assert not exact
    np.testing.assert_allclose(step[: MANY + 1] @ active.points[: MANY + 1], np.zeros(DIM), atol=1e-12)
    assert step[: MANY + 1] @ active.e[: MANY + 1] == pytest.approx(0.0, abs=1e-12)
    assert (step[: MANY + 1] < 0).any()


# The best gap


def cone_of(rng: np.random.Generator, many: int) -> Cone:
    active = filled(rng, many)
    lead = np.zeros(many + 3)
    lead[:many] = 0.1 * rng.standard_normal(many)
    zeros = np.zeros
    return Cone(active, lead, zeros(many + 3), zeros(many + 3), zeros(DIM), zeros(DIM))


@pytest.mark.parametrize("careful", [False, True])
def test_the_affine_minimizer_of_length_plus_offset(careful: bool, rng: np.random.Generator) -> None:
    cone = cone_of(rng, MANY)
    points, lead = cone.active.points[:MANY].copy(), cone.lead[:MANY].copy()
    s = margins._affine_minimizer(cone, MANY, 2.0, careful)
    weight = cone.base[:MANY] + s * cone.along[:MANY]
    assert s > 0
    assert weight.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(cone.base[:MANY], affine_minimizer(points, np.ones(MANY)), atol=1e-9)
    # no direction in which the weights keep their sum changes |Σ w p| - w·lead to first order
    x = weight @ points
    slope = points @ x / np.linalg.norm(x) - lead
    np.testing.assert_allclose(slope - slope.mean(), np.zeros(MANY), atol=1e-9)
    np.testing.assert_allclose(cone.p, cone.base[:MANY] @ points, atol=1e-12)
    np.testing.assert_allclose(cone.d, cone.along[:MANY] @ points, atol=1e-12)
    cone.lead[:MANY] *= 1e4
    assert margins._affine_minimizer(cone, MANY, 2.0, careful) == -1.0


def keys_of(rng: np.random.Generator, number: int = 9) -> Keys:
    rows = rng.standard_normal((number, DIM))
    return Keys(rows, np.ascontiguousarray(rows.T), rng.standard_normal(number), (rows**2).sum(axis=1))


def test_a_key_is_exchanged_for_one_in_whose_hull_it_is(rng: np.random.Generator) -> None:
    active = filled(rng)
    active.work[:MANY], active.weight[:MANY] = [0.5, -0.2, 0.7, 0.0], [0.4, 0.1, 0.35, 0.15]
    leaving, share = margins._exchangeable(active, MANY)
    assert (leaving, share) == (2, pytest.approx(0.5))
    np.testing.assert_allclose(active.weight[:MANY], [0.15, 0.2, 0.0, 0.15], atol=1e-15)
    active.work[:MANY] = -1.0
    before = active.weight[:MANY].copy()
    assert margins._exchangeable(active, MANY)[0] == -1
    np.testing.assert_array_equal(active.weight[:MANY], before)


def test_where_the_best_gap_begins(rng: np.random.Generator) -> None:
    keys, scores = keys_of(rng), np.zeros(9)
    apart = np.linalg.norm(keys.rows - keys.rows[3], axis=1)
    start, largest = margins._nearest(keys, 3, scores)
    beyond = np.where(np.arange(9) == 3, np.inf, apart - keys.offset)
    assert start == beyond.argmin()
    assert largest == pytest.approx(apart.max())
    cone = cone_of(rng, MANY)
    cone.d[:] = 1.0
    bordering = margins._begin(cone, keys, 3, 5, 2.0)
    square = apart[5] ** 2
    assert bordering == pytest.approx(square)
    np.testing.assert_allclose(cone.active.points[0], keys.rows[5] - keys.rows[3])
    assert (cone.active.e[0], cone.active.weight[0], cone.active.members[0]) == (1.0, 1.0, 5)
    assert cone.lead[0] == pytest.approx(keys.offset[5] - keys.offset[3])
    assert cone.active.inverse[0, 0] == cone.active.solution[0] == pytest.approx(1 / (2 * square))
    assert not cone.d.any()


def test_the_query_of_an_iterate_and_who_wins_under_it(rng: np.random.Generator) -> None:
    keys, scores, u = keys_of(rng), np.zeros(9), np.zeros(DIM)
    x, d = rng.standard_normal(DIM), 0.1 * rng.standard_normal(DIM)
    margins._query(x, float(np.linalg.norm(x)), 1.0, d, u)
    np.testing.assert_allclose(u, -x / np.linalg.norm(x))
    margins._query(x, 0.0, 1.0, d, u)
    np.testing.assert_allclose(u, -d)
    margins._query(x, 0.0, 1.0, 100.0 * d, u)
    np.testing.assert_allclose(u, -d / np.linalg.norm(d))
    height = keys.rows @ u + keys.offset
    new, gap = margins._winner(keys, 3, u, scores)
    others = np.where(np.arange(9) == 3, -np.inf, height)
    assert new == others.argmax()
    assert gap == pytest.approx(height[3] - others.max())


def test_a_key_is_let_in_at_unit_length(rng: np.random.Generator) -> None:
    keys, cone = keys_of(rng), cone_of(rng, 2)
    step = keys.rows[6] - keys.rows[3]
    assert margins._put(cone, 2, 6, 0.25, keys, 3, 1.5, 2.0)
    factor = 1.5 / np.linalg.norm(step)
    np.testing.assert_allclose(cone.active.points[2], factor * step)
    assert cone.active.e[2] == pytest.approx(factor)
    assert cone.lead[2] == pytest.approx(factor * (keys.offset[6] - keys.offset[3]))
    assert (cone.active.weight[2], cone.active.members[2]) == (0.25, 6)
    assert_inverse(cone.active, 3)
    inside, m = margins._let_in(cone, 3, 7, keys, 3, 1.0, 2.0)
    assert (inside, m) == (True, 4)
    cone.active.members[:4] = [1, 2, 6, 7]
    inside, m = margins._let_in(cone, 4, 7, keys, 3, 1.0, 2.0)  # there already: it takes its own place
    assert (inside, m) == (True, 4)
    assert sorted(cone.active.members[:4].tolist()) == [1, 2, 6, 7]
    assert_inverse(cone.active, 4)


# Attention over a ball


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("many", [3, 4, 9])
def test_shifted_systems_are_solved_through_either_gram_matrix(
    small: bool, many: int, rng: np.random.Generator
) -> None:
    spread, right = rng.standard_normal((many, DIM)), rng.standard_normal(DIM)
    size = many if small else DIM
    gram, factor, short = np.zeros((size, size)), np.zeros((size, size)), np.zeros(many)
    newton._gram(spread, many, small, gram)
    np.testing.assert_allclose(gram, np.tril(spread @ spread.T if small else spread.T @ spread), atol=1e-12)
    expected = np.linalg.solve(spread.T @ spread + 0.7 * np.eye(DIM), right)
    for known in (False, True):
        found = right.copy()
        newton._shifted_solve(spread, many, gram, small, 0.7, factor, known, found, short)
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_softmax_its_gradient_and_its_curvature(rng: np.random.Generator) -> None:
    rows, base, change = rng.standard_normal((7, DIM)), rng.standard_normal(7), rng.standard_normal(7)
    weight, gradient, mean, u = np.zeros(7), np.zeros(DIM), np.zeros(DIM), 0.1 * rng.standard_normal(DIM)
    value = newton._log_sum(base, change, 0.5, weight)
    share = np.exp(base + 0.5 * change)
    assert value == pytest.approx(np.log(share.sum()))
    np.testing.assert_allclose(weight, share / share.sum())
    lower, length = newton._gradient(rows, 2, weight, u, gradient, mean)
    np.testing.assert_allclose(mean, weight @ rows)
    np.testing.assert_allclose(gradient, weight @ rows - rows[2], atol=1e-14)
    assert length == pytest.approx(np.linalg.norm(gradient))
    assert lower == pytest.approx(gradient @ u + length)
    spread = np.zeros((7, DIM))
    assert newton._spread(rows, 2, weight, mean, 0.0, spread) == 7
    expected = (rows - mean).T @ np.diag(weight) @ (rows - mean)
    np.testing.assert_allclose(spread.T @ spread, expected, atol=1e-12)
    rival = np.delete(weight, 2).max()
    few = int((weight > 0.5 * rival).sum())
    assert newton._spread(rows, 2, weight, mean, 0.5, spread) == few < 7
