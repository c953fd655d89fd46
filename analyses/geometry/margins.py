"""By how much can a key be selected? Two ends of a bracket: a query from below, weights of the other keys from above.

This module only proposes; what its queries and weights prove is computed by `checker`. With scores `h_j + u·z_j`,
|u| ≤ 1 (h holds the center `c·k` and the bias), the margin of key i is a concave maximum and, by duality, a convex
minimum:

    max_u min_j [h_i - h_j + u·(z_i - z_j)]  =  min_w  |Σ w_j (z_j - z_i)| - Σ w_j (h_j - h_i),   w convex.

Without offsets this is the distance of z_i to the hull of the others (`wolfe`). With them `best_gaps` is a conic
active-set method, Wolfe's, compiled: keep an active set whose points are affinely independent, go to the minimizer over
its affine hull as far as the weights stay convex, drop the point that blocks, else add the point that scores highest
under the query u = -x/|x|. Only the affine minimizer differs. On the affine hull the offset is an affine function, of
slope d within the hull's own directions; with p the point nearest to the origin the minimizer is p + s·d, s = |p| / √(1
- |d|²), and if |d| ≥ 1 there is none: the way is along d until a weight is used up. Every iterate brackets the margin:
the query from below, the weights from above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ln_probe.analyses.geometry.active_set import (
    ActiveSet,
    active_set,
    append,
    contains,
    gram_column,
    rebuild,
    refine,
    remove,
    weighted_mean,
)
from ln_probe.analyses.geometry.checker import Rows
from ln_probe.analyses.geometry.compiled import compiled, room, table
from ln_probe.analyses.geometry.coordinates import TAU, Floats, Ints, KeyCoordinates, scores_of, unit_rows
from ln_probe.analyses.geometry.decide import UNSELECTABLE, Verdicts
from ln_probe.analyses.geometry.inputs import ScoreSpace
from ln_probe.analyses.geometry.wolfe import nearest_points

# A hull whose slope is this near to 1 has its minimizer too far out for float64 to tell it from none.
_STEEP = 1.0 - 1e-12
# |x| below this share of the longest difference has no direction left; the slope alone makes the query then.
_POINT = 1e-11
# Weights that would become less than this are dropped; those above count as 0 and stay.
_BLOCKED = -1e-13
# Points of the active set with less than this share in a dependent one cannot be exchanged for it.
_DEPENDS = 1e-9
# Differences shorter than the unit by more than this keep some of their shortness.
_LONGER = 1e3
_NOISE = 1e-13
_STEPS_PER_DIMENSION = 40


class Keys(NamedTuple):
    """All keys, in nats."""

    rows: Floats  # "key dim"
    columns: Floats  # "dim key"
    offset: Floats  # added to their scores
    squares: Floats  # of their lengths


class Cone(NamedTuple):
    """An active set whose points have offsets, and the affine function that these are on its hull."""

    active: ActiveSet
    lead: Floats  # each point's offset beyond the target's, scaled as the point is
    base: Floats  # weights of the point p of the affine hull that is nearest to the origin
    along: Floats  # change of the weights that goes up the slope
    p: Floats
    d: Floats  # the slope


@compiled
def _affine_minimizer(cone: Cone, m: int, bordering: float, careful: bool) -> float:
    """Weights `base + s·along` of the affine hull's minimizer; returns s, or -1 if there is none (go along `along`)."""
    active, lead, base, along, p, d = cone.active, cone.lead, cone.base, cone.along, cone.p, cone.d
    points, e, solution, dim = active.points, active.e, active.solution, p.shape[0]
    ones, slope = 0.0, 0.0
    for a in range(m):
        total = 0.0
        for b in range(m):
            total += active.inverse[a, b] * lead[b]
        along[a] = total
    if careful:
        refine(points, e, active.inverse, e, solution, m, bordering, p, active.border)
        refine(points, e, active.inverse, lead, along, m, bordering, p, active.border)
    for a in range(m):
        slope += e[a] * along[a]
        ones += e[a] * solution[a]
    for a in range(m):
        base[a] = solution[a] / ones
        along[a] -= slope * base[a]
    for t in range(dim):
        p[t], d[t] = 0.0, 0.0
    for a in range(m):
        for t in range(dim):
            p[t] += base[a] * points[a, t]
            d[t] += along[a] * points[a, t]
    square, steep = 0.0, 0.0
    for t in range(dim):
        square += p[t] * p[t]
        steep += d[t] * d[t]
    if steep >= _STEEP:
        return -1.0
    return float(np.sqrt(square / (1.0 - steep)))


@compiled
def _take_out(cone: Cone, k: int, m: int) -> None:
    cone.lead[k] = cone.lead[m - 1]
    active = cone.active
    remove(active.points, active.e, active.weight, active.members, active.inverse, active.solution, k, m)


@compiled
def _put(cone: Cone, m: int, key: int, weight: float, keys: Keys, i: int, unit: float, bordering: float) -> bool:
    """Let a key in at place `m`, its difference from the target brought to length `unit` (far keys would drown near
    ones); False if it is affinely dependent on the others."""
    active, square = cone.active, 0.0
    point = active.points[m]
    for t in range(point.shape[0]):
        point[t] = keys.rows[key, t] - keys.rows[i, t]
        square += point[t] * point[t]
    factor = min(unit / np.sqrt(square), _LONGER) if square > 0.0 else 1.0
    for t in range(point.shape[0]):
        point[t] *= factor
    active.e[m], cone.lead[m] = factor, factor * (keys.offset[key] - keys.offset[i])
    active.weight[m], active.members[m] = weight, key
    gram_column(active.points, active.e, active.border, bordering, m)
    return append(active.inverse, active.solution, active.border, active.work, active.e, m)


@compiled
def _exchangeable(active: ActiveSet, m: int) -> tuple[int, float]:
    """Which point to take out for one that has just been found dependent, and the weight the new one gets; -1: none."""
    share, leaving = np.inf, -1
    for a in range(m):
        if active.work[a] > _DEPENDS and active.weight[a] / active.work[a] < share:
            share, leaving = active.weight[a] / active.work[a], a
    if leaving >= 0:
        for a in range(m):
            active.weight[a] = max(active.weight[a] - share * active.work[a], 0.0)
    return leaving, share


@compiled
def _let_in(cone: Cone, m: int, key: int, keys: Keys, i: int, unit: float, bordering: float) -> tuple[bool, int]:
    """Let a key in, in exchange for another if it lies in the affine hull already; whether it is in, and the size."""
    if _put(cone, m, key, 0.0, keys, i, unit, bordering):
        return True, m + 1
    leaving, share = _exchangeable(cone.active, m)
    if leaving < 0:
        return False, m
    _take_out(cone, leaving, m)
    if _put(cone, m - 1, key, share, keys, i, unit, bordering):
        return True, m
    return False, m - 1


@compiled
def _to_minimizer(cone: Cone, m: int, bordering: float, careful: bool) -> tuple[int, bool, float]:
    """As far towards the affine minimizer as the weights stay convex, without the points that block.

    Returns:
        how many points are left, whether some were taken out, and the multiply-adds spent.
    """
    weight, base, along = cone.active.weight, cone.base, cone.along
    spent, removed = 0.0, False
    while m > 0:
        s = _affine_minimizer(cone, m, bordering, careful)
        step, blocking = 1.0, -1
        if s < 0.0:
            step = np.inf
            for a in range(m):
                if along[a] < 0.0 and -weight[a] / along[a] < step:
                    step, blocking = -weight[a] / along[a], a
            if blocking < 0:
                break
            for a in range(m):
                weight[a] = max(weight[a] + step * along[a], 0.0)
        else:
            for a in range(m):
                goal = base[a] + s * along[a]
                if goal < _BLOCKED:
                    share = weight[a] / (weight[a] - goal)
                    if share < step:
                        step, blocking = share, a
            for a in range(m):
                weight[a] = max(weight[a] + step * (base[a] + s * along[a] - weight[a]), 0.0)
        spent += 4.0 * m * (m + cone.p.shape[0])
        if blocking < 0:
            break
        _take_out(cone, blocking, m)
        m -= 1
        removed = True
    return m, removed, spent


@compiled
def _nearest(keys: Keys, i: int, scores: Floats) -> tuple[int, float]:
    """The key with the smallest distance beyond its offset, to start from, and the longest distance."""
    scores_of(keys.columns, keys.rows[i], len(scores), scores)
    start, closest, largest = -1, np.inf, 0.0
    for j in range(len(scores)):
        if j != i:
            apart = np.sqrt(max(keys.squares[j] + keys.squares[i] - 2.0 * scores[j], 0.0))
            largest = max(largest, apart)
            if apart - keys.offset[j] < closest:
                closest, start = apart - keys.offset[j], j
    return start, largest


@compiled
def _begin(cone: Cone, keys: Keys, i: int, start: int, largest: float) -> float:
    """Make one key the only active one; returns what borders the Gram matrix."""
    active = cone.active
    point = active.points[0]
    for t in range(point.shape[0]):
        point[t] = keys.rows[start, t] - keys.rows[i, t]
    active.e[0], active.weight[0], active.members[0] = 1.0, 1.0, start
    cone.lead[0] = keys.offset[start] - keys.offset[i]
    square = np.sum(point * point)
    bordering = float(max(square, 1e-24 * largest * largest, 1e-300))
    active.inverse[0, 0] = active.solution[0] = 1.0 / (bordering + square)
    cone.d[:] = 0.0
    return bordering


@compiled
def _query(x: Floats, length: float, largest: float, d: Floats, u: Floats) -> None:
    """The unit query of an iterate, into `u`: against x, or against the slope where x has no direction left."""
    if length > _POINT * largest:
        for t in range(x.shape[0]):
            u[t] = -x[t] / length
    else:
        short = max(np.sqrt(np.sum(d * d)), 1.0)
        for t in range(x.shape[0]):
            u[t] = -d[t] / short


@compiled
def _winner(keys: Keys, i: int, u: Floats, scores: Floats) -> tuple[int, float]:
    """The other key that scores highest under `u`, and the gap of key `i` above it."""
    scores_of(keys.columns, u, len(scores), scores)
    best, new = -np.inf, -1
    for j in range(len(scores)):
        if scores[j] + keys.offset[j] > best and j != i:
            best, new = scores[j] + keys.offset[j], j
    return new, scores[i] + keys.offset[i] - best


@compiled
def best_gaps(
    rows: Floats, columns: Floats, offset: Floats, targets: Ints, gap: float, floor: float, budget: float
) -> tuple[Floats, Floats, Floats, Ints, Floats, Ints]:
    """Bracket the margin of every target among all rows.

    Args:
        rows, columns: the keys, "key dim" and "dim key", in nats; offset: added to their scores.
        gap, floor: stop when upper - lower is at most `gap` times the larger of their magnitudes, or `floor`.
        budget: multiplications and additions per target, after which it returns what it has.

    Returns:
        lower and upper bounds, queries "target dim" that prove the lower ones, and sizes, values and indices of the
        weights that prove the upper ones.
    """
    number, count, dim = targets.shape[0], rows.shape[0], rows.shape[1]
    capacity = dim + 2
    lower, upper, queries = room(number), room(number), table(number, dim)
    sizes = np.zeros(number, np.int64)
    values, indices = room(number * capacity), np.empty(number * capacity, np.int64)
    cone = Cone(active_set(capacity, dim), room(capacity), room(capacity), room(capacity), room(dim), room(dim))
    active, lead = cone.active, cone.lead
    points, e, _, _, inverse, solution, border, work = active
    x, u, scores = room(dim), room(dim), room(count)
    keys = Keys(rows, columns, offset, room(count))
    for j in range(count):
        keys.squares[j] = np.sum(rows[j] * rows[j])
    used = 0
    for k in range(number):
        i = targets[k]
        start, largest = _nearest(keys, i, scores)
        bordering = _begin(cone, keys, i, start, largest)
        unit, spent = np.sqrt(bordering), 2.0 * count * dim
        lower[k], upper[k], queries[k] = -np.inf, np.inf, 0.0
        m, fresh, careful = 1, True, False
        for _ in range(_STEPS_PER_DIMENSION * (dim + 10)):
            weighted_mean(active.points, active.e, active.weight, m, x)
            ahead, square = 0.0, 0.0
            for a in range(m):
                ahead += active.weight[a] * lead[a]
            for t in range(dim):
                square += x[t] * x[t]
            length = np.sqrt(square)
            level = length - ahead
            if level < upper[k]:
                upper[k], sizes[k] = level, m
                for a in range(m):
                    values[used + a], indices[used + a] = active.e[a] * active.weight[a], active.members[a]
            _query(x, length, largest, cone.d, u)
            new, value = _winner(keys, i, u, scores)
            if value > lower[k]:
                lower[k], queries[k] = value, u
            spent += 2.0 * count * dim + 6.0 * m * (m + dim)
            left = upper[k] - lower[k]
            if left <= floor or left <= gap * max(abs(upper[k]), abs(lower[k])) or spent > budget:
                break
            if value >= level - _NOISE * (largest + abs(ahead)):
                break
            entered = False
            if not contains(active.members, new, m):
                entered, m = _let_in(cone, m, new, keys, i, unit, bordering)
                if m == 0:
                    break
            if entered:
                fresh = False
            else:  # nothing new: rounding, put right once
                if fresh or not rebuild(points, e, inverse, solution, border, work, m, bordering):
                    break
                fresh, careful = True, True
            m, removed, more = _to_minimizer(cone, m, bordering, careful)
            spent += more
            fresh = fresh and not removed
            if m == 0:
                break
        used += sizes[k]
    return lower, upper, queries, sizes, values[:used].copy(), indices[:used].copy()


# Default width of a margin's bracket, as a share of the margin: it is read to two digits.
RELATIVE_GAP = 0.01
# A bracket narrower than this (relative to the RMS norm of the measured keys) is not narrowed further: degenerate axes
# give selectable keys a margin of exactly zero.
ZERO = 0.01 * TAU
# What "exact" asks for: float64 leaves about six digits of a distance of TAU.
EXACT_GAP = 1e-6
# An offset is that of a center among the axes if no key is further off than this, relative to the RMS norm.
_AFFINE = 1e-12


@dataclass(frozen=True)
class Measured:
    """Points whose margins are measured, copies left out.

    Attributes:
        rows, offset: as in `ScoreSpace`, normalized if there is no set of queries.
        upwards: the last coordinate is a bias: weights may exceed the target there.
        distinct: a key for each different row.
        copy: another key with the same row; -1 if there is none.
        size: RMS norm of the centred rows.
        level: a u under which all keys score alike, if the set has one (the center lies among the axes, no further out
            than they reach): it proves that no margin is below 0. The zero query without offsets; None if there is
            none.
    """

    rows: Float64[np.ndarray, "key r"]
    offset: Float64[np.ndarray, " key"] | None
    upwards: bool
    distinct: Int64[np.ndarray, " row"]
    copy: Int64[np.ndarray, " key"]
    size: float
    level: Float64[np.ndarray, " r"] | None


def measured(sets: KeyCoordinates, where: ScoreSpace, through_queries: bool) -> Measured:
    """Where margins are measured."""
    d = len(sets.basis)
    if through_queries:
        rows, offset, upwards = where.rows, where.offset, False
    else:
        upwards = sets.bias_scale > 0.0
        rows, offset = np.ascontiguousarray(sets.normalized[:, : d + upwards]), None
    copy = np.full(len(rows), -1)
    distinct = np.arange(len(rows))
    if len(sets.leaders) < len(rows):  # only keys within tau of another can be copies
        both = rows if offset is None else np.column_stack([rows, offset])
        crowd = np.flatnonzero(np.bincount(sets.representative, minlength=len(rows))[sets.representative] > 1)
        _, first, inverse = np.unique(both[crowd], axis=0, return_index=True, return_inverse=True)
        leader = crowd[first][inverse.ravel()]
        copy[crowd] = np.where(leader != crowd, leader, -1)
        twice = crowd[leader != crowd]
        copy[copy[twice]] = twice
        distinct = np.setdiff1d(distinct, twice)
    centred = rows - rows.mean(axis=0)
    size = float(np.sqrt(np.einsum("ij,ij->", centred, centred) / len(centred)))
    return Measured(rows, offset, upwards, distinct, copy, size, _level(centred, offset, size))


def propose(
    space: Measured,
    verdicts: Verdicts,
    gap: float,
    only: Int64[np.ndarray, " some"],
    budget: float,
    *,
    every: bool = False,
) -> tuple[Float64[np.ndarray, "some r"], Rows]:
    """What may prove the margins of the keys `only` among all keys of the set; `every`: unselectable ones are solved
    for, too.

    Returns:
        a query u of each, |u| ≤ 1 (without a set of queries a unit query over normalized keys), and convex weights of
        other keys, a row for each.
    """
    point = np.zeros((len(only), space.rows.shape[1]))
    pieces = []
    inside = np.zeros(len(only), bool)
    if (
        space.level is not None and not every
    ):  # what cannot be selected has a margin of 0: the level query and its weights prove it
        inside = verdicts.code[only] == UNSELECTABLE
        if inside.any():
            rows = verdicts.weights.some(verdicts.source[only[inside]])
            pieces.append((np.flatnonzero(inside), np.diff(rows.start), rows.index, rows.value))
            point[inside] = space.level
    copied = (space.copy[only] >= 0) & ~inside
    if space.offset is None and copied.any():  # its copy is as near as can be, and the zero query proves 0
        which = np.flatnonzero(copied)
        pieces.append((which, np.ones(len(which), np.int64), space.copy[only[which]], np.ones(len(which))))
        copied = np.zeros(len(only), bool)
        inside[which] = True
    for some, names in ((~copied & ~inside, space.distinct), (copied, np.arange(len(space.rows)))):
        which = np.flatnonzero(some)  # a copy is solved for among all keys: it ties with the key at best
        if len(which) == 0 or len(names) < 2:
            continue
        point[which], weights = _solved(space, names, only[which], gap, budget)
        pieces.append((which, np.diff(weights.start), names[weights.index], weights.value))
    return point, Rows.gathered(len(only), pieces)


def _solved(
    space: Measured, names: Int64[np.ndarray, " row"], keys: Int64[np.ndarray, " some"], gap: float, budget: float
) -> tuple[Floats, Rows]:
    """Queries, and weights over `names`; without offsets those of the nearest point of the hull of the others."""
    here, places, floor = np.ascontiguousarray(space.rows[names]), np.searchsorted(names, keys), ZERO * space.size
    if space.offset is None:
        found = nearest_points(here, places, tau=floor, gap=gap, ray=space.upwards, careful=True, budget=budget)
        return unit_rows(found.query), found.weights
    columns, offset = np.ascontiguousarray(here.T), space.offset[names]
    _, _, query, sizes, values, indices = best_gaps(here, columns, offset, places, gap, floor, budget)
    return query, Rows.sized(sizes, indices, values)


def _level(
    centred: Float64[np.ndarray, "key r"], offset: Float64[np.ndarray, " key"] | None, size: float
) -> Float64[np.ndarray, " r"] | None:
    if offset is None:
        return np.zeros(centred.shape[1])
    high = offset - offset.mean()
    u = -np.linalg.lstsq(centred, high, rcond=None)[0]
    if not np.abs(u).max(initial=0.0) <= 1.0:  # (squares of more may overflow)
        return None
    return u if np.linalg.norm(u) <= 1.0 and np.abs(high + centred @ u).max() <= _AFFINE * size else None


def too_wide(
    lower: Float64[np.ndarray, " key"],
    upper: Float64[np.ndarray, " key"],
    gap: float,
    size: float,
    inside: Bool[np.ndarray, " key"],
) -> Bool[np.ndarray, " key"]:
    """Which brackets are wider than was asked for (by more than rounding); TAU is enough for keys that are `inside`."""
    asked = np.maximum(gap * np.maximum(np.abs(lower), np.abs(upper)) * (1 + 1e-3), 2 * ZERO * size)
    asked = np.where(inside, np.maximum(asked, 1.01 * TAU * size), asked)
    return np.asarray(~(upper - lower <= asked))
