"""Steps of the compiled solvers whose errors cost time before they cost a verdict, against their linear algebra."""

from __future__ import annotations

import numpy as np
import pytest

from ln_probe.analyses.geometry import active_set, newton, wolfe
from ln_probe.analyses.geometry.margins import Keys, _nearest

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


def test_where_a_search_begins_among_keys_close_together(rng: np.random.Generator) -> None:
    rows = 1e-3 * rng.standard_normal((5, 3))
    keys = Keys(rows, np.ascontiguousarray(rows.T), np.zeros(5), (rows**2).sum(axis=1))
    start, largest = _nearest(keys, 1, np.zeros(5))
    apart = np.linalg.norm(rows - rows[1], axis=1)
    assert largest == pytest.approx(apart.max())
    assert start == np.where(np.arange(5) == 1, np.inf, apart).argmin()
    alone = Keys(rows[:1], np.ascontiguousarray(rows[:1].T), np.zeros(1), (rows[:1] ** 2).sum(axis=1))
    assert _nearest(alone, 0, np.zeros(1)) == (-1, 0.0)
