"""The point of a convex hull that is nearest to a key: Wolfe's active-set method, compiled.

For a target `z_i` and generators `z_j` it finds the shortest vector `x` of `conv{z_j - z_i}` (plus a ray, for
keys with a bias). Every iterate is a certificate in both directions:

* its convex weights put the hull at most `|x|` away from the key (an upper bound on the distance);
* the query `-x` gives the key a score gap of at least `min_j x·(z_j - z_i)`, so the hull is at least that gap
  over `|x|` away (a lower bound).

At the optimum both agree (`x·(z_j - z_i) >= |x|²` for all j), so the run stops as soon as the bounds answer
the question.

Source: P. Wolfe, "Finding the nearest point in a polytope", Math. Programming 11 (1976) 128-149.

Whether zero lies in `conv{z_j - z_i}` does not depend on the lengths of the differences. A verdict may therefore be
sought among differences of length one (`scaled`): eight decades of norms then cost hardly more steps than one, where
the differences themselves leave a Gram matrix nothing of the short ones. Bounds are of the true differences either way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ln_probe.analyses.geometry.active_set import (
    BRACKETED,
    CLEAR,
    CONVERGED,
    EXHAUSTED,
    INSIDE,
    SEPARATED,
    STALLED,
    ActiveSet,
    Search,
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
from ln_probe.analyses.geometry.coordinates import Floats, Ints, query_norm, residual_norm, scores_of

# Wolfe's optimality test to float64 accuracy: products x·p carry errors of about 1e-16·|x|·|p|; 1e-12 leaves
# room for sums over thousands of terms.
_NOISE = 1e-12
# A run needs about two steps per active point; planted hard cases at d = 64 took up to 5 per dimension.
_STEPS_PER_DIMENSION = 60
# After so many steps that did not shorten x, the inverse has drifted: every exact step shortens it.
_IDLE = 3
# Where asking all keys costs more than _MANY multiply-adds, the _FEW that scored lowest are asked alone until what is
# left of the violation that all of them showed is down to a share of _WORN. 512 keys of 64 dimensions: a verdict takes
# 0.6 of the time, margins of 4096 × 128 0.3. (At 512 × 32 nothing changes, below that finding the lowest costs more.)
_MANY, _FEW, _WORN = 30_000, 32, 0.15
# How often a verdict is sought carefully: as asked, then from the closest key, without and with differences scaled. Of
# 3600 keys in clusters 1e7 apart with a bias 3 end without one the first time and with one the second.
_ATTEMPTS = 3
# Squared distances are read off products of keys and are noise below this share of the keys' own squares; as a scale
# any positive number is right, if only it is the same wherever it is used.
_SCALE_NOISE = 1e-13
# Multiply-adds per key before the search returns what it has: nominally one second. Counted, not timed, so that results
# do not depend on how busy the machine is.
BUDGET = 1e9
_TINY = 1e-300


@compiled
def _lowest_of_few(rows: Floats, scale: Floats, few: Ints, kept: int, x: Floats, own: float) -> tuple[int, float]:
    """Of some keys the one whose scaled difference scores lowest under `x`, and that score."""
    new, value = -1, np.inf
    for c in range(kept):
        j = few[c]
        product = -own
        for t in range(x.shape[0]):
            product += rows[j, t] * x[t]
        product *= scale[j]
        if product < value:
            value, new = product, j
    return new, value


@compiled
def _lowest_of_all(
    columns: Floats, scale: Floats, target: int, count: int, x: Floats, own: float, scores: Floats
) -> tuple[int, float, float]:
    """The same of all keys, and the lowest score of a true difference; `scores` keeps the scaled ones."""
    scores_of(columns, x, count, scores)
    if target < count:
        scores[target] = np.inf
    new, value, least = -1, np.inf, np.inf
    for j in range(count):
        product = scores[j] - own
        least = min(least, product)
        product *= scale[j]
        scores[j] = product
        if product < value:
            value, new = product, j
    return new, value, least


@compiled
def _put(
    rows: Floats,
    scale: Floats,
    target: int,
    points: Floats,
    e: Floats,
    weight: Floats,
    index: Ints,
    m: int,
    new: int,
    largest: float,
) -> None:
    """Write the scaled difference of key `new` from the target to place `m`, without weight; -1: the ray."""
    dim = points.shape[1]
    if new < 0:
        for t in range(dim):
            points[m, t] = 0.0
        points[m, dim - 1] = -largest
        e[m] = 0.0
    else:
        for t in range(dim):
            points[m, t] = scale[new] * (rows[new, t] - rows[target, t])
        e[m] = 1.0
    weight[m], index[m] = 0.0, new


@compiled
def _to_affine_minimizer(
    points: Floats,
    e: Floats,
    weight: Floats,
    index: Ints,
    inverse: Floats,
    solution: Floats,
    border: Floats,
    m: int,
    x: Floats,
    bordering: float,
    careful: bool,
) -> tuple[bool, int, float]:
    """Wolfe's minor cycle: to the affine minimizer, as far as the weights stay convex, without the points that block.

    Returns:
        whether there was one, how many points are left, and the multiply-adds spent.
    """
    dim, spent = points.shape[1], 0.0
    while m > 0:
        spent += m * dim
        if careful:
            refine(points, e, inverse, e, solution, m, bordering, x, border)
            spent += m * (2 * dim + m)
        total = 0.0
        for a in range(m):
            total += e[a] * solution[a]
        if not total > 0.0:
            return False, m, spent
        step, blocking = 1.0, -1
        for a in range(m):
            goal = solution[a] / total
            if goal <= 0.0:
                share = weight[a] / (weight[a] - goal) if weight[a] > goal else 0.0
                if share < step:
                    step, blocking = share, a
        for a in range(m):
            weight[a] += step * (solution[a] / total - weight[a])
        if blocking < 0:
            break
        remove(points, e, weight, index, inverse, solution, blocking, m)
        spent += 2 * m * m
        m -= 1
    for a in range(m):
        weight[a] = max(weight[a], 0.0)
    return m > 0, m, spent


@compiled
def nearest_point(
    search: Search, start: int, patience: int, active: ActiveSet, x: Floats, best: Floats, scores: Floats, budget: float
) -> tuple[int, int, float, float, float]:
    """Nearest point of the hull of the keys without the target to the target.

    Args:
        start: the first active key.
        patience: give up when the inverse has drifted more often; -1: never.
        active, x, best, scores: workspace; on return `active` holds the active set, `x` the last point, `best` minus
            the query with the highest lower bound (where it ends SEPARATED: that query).
        budget: multiply-adds to spend at most, but for the step in which they run out.

    Returns:
        how it ended, size of the active set, lower and upper bound of the distance in these coordinates, and the
        multiply-adds spent.
    """
    rows, columns, target, count, ray, stretch, slope, tau, gap, scale = search
    points, e, weight, index, inverse, solution, border, work = active
    dim, capacity = rows.shape[1], index.shape[0]
    _put(rows, scale, target, points, e, weight, index, 0, start, 0.0)
    weight[0], bordering = 1.0, 0.0
    for t in range(dim):
        x[t] = points[0, t]
        bordering += x[t] * x[t]
    inverse[0, 0] = solution[0] = 0.5 / bordering
    m, largest = 1, np.sqrt(bordering)
    lower, upper = 0.0, largest
    fresh, careful, rebuilt = True, False, 0
    shortest, idle, spent, shown = np.inf, 0, 0.0, 0.0
    few, kept, violation = np.empty(_FEW, np.int64), 0, np.inf
    for _ in range(_STEPS_PER_DIMENSION * (dim + 10)):
        lift = ray and x[dim - 1] > _NOISE * largest  # some of the ray would shorten x: let it in first
        if ray and not lift and x[dim - 1] > 0.0:
            x[dim - 1] = 0.0
        square, own = 0.0, 0.0
        for t in range(dim):
            square += x[t] * x[t]
            own += x[t] * rows[target, t]
        length = np.sqrt(square)
        if length < shortest:
            shortest, idle = length, 0
        else:
            idle += 1
        total = 0.0  # what turns the active weights into weights of the keys
        for a in range(m):
            if index[a] >= 0:
                total += weight[a] * scale[index[a]]
        upper = length / total
        if gap < 0.0:
            if residual_norm(x, stretch, slope) <= tau * (1.0 - CLEAR) * total:
                return INSIDE, m, lower, upper, spent
        elif length <= tau * total:
            return BRACKETED, m, lower, upper, spent
        if spent > budget:
            return EXHAUSTED, m, lower, upper, spent
        new, value = -1, np.inf
        if not lift and kept > 0:  # among the keys that scored lowest when all were asked
            new, value = _lowest_of_few(rows, scale, few, kept, x, own)
            spent += kept * dim
            if square - value <= _WORN * violation or (gap < 0.0 and value > 0.0):
                new = -1
        if not lift and new < 0:
            new, value, least = _lowest_of_all(columns, scale, target, count, x, own, scores)
            spent += count * dim
            if value > shown * length:
                shown, lower = value / length, max(least / length, 0.0)
                for t in range(dim):
                    best[t] = x[t]
            if gap < 0.0:
                if least > tau * (1.0 + CLEAR) * query_norm(x, stretch, slope):
                    for t in range(dim):
                        best[t] = x[t]
                    return SEPARATED, m, lower, upper, spent
            elif upper - lower <= gap * lower or square - value <= gap * value:
                return BRACKETED, m, lower, upper, spent
            if value >= square * (1.0 - 1e-10) - _NOISE * length * largest:
                return CONVERGED, m, lower, upper, spent
            if count * dim > _MANY:
                kept, violation = lowest(scores, count, few), square - value
        drifted = idle >= _IDLE or contains(index, new, m)
        if not drifted:
            if m == capacity:
                return STALLED, m, lower, upper, spent
            _put(rows, scale, target, points, e, weight, index, m, new, largest)
            gram_column(points, e, border, bordering, m)
            spent += m * (dim + 3 * m)
            if new >= 0:
                largest = max(largest, np.sqrt(max(border[m] - bordering, 0.0)))
            drifted = not append(inverse, solution, border, work, e, m)
        if drifted:
            if fresh or rebuilt == patience or not rebuild(points, e, inverse, solution, border, work, m, bordering):
                return STALLED, m, lower, upper, spent
            fresh, careful, idle = True, True, 0
            rebuilt += 1
            spent += m * m * (dim + m)
        else:
            m += 1
            fresh = False
        before = m
        found, m, used = _to_affine_minimizer(
            points, e, weight, index, inverse, solution, border, m, x, bordering, careful
        )
        spent += used
        if not found:
            return STALLED, m, lower, upper, spent
        fresh = fresh and m == before
        weighted_mean(points, e, weight, m, x)
    return STALLED, m, lower, upper, spent


@compiled
def lowest(scores: Floats, count: int, found: Ints) -> int:
    """Places of the lowest of the first `count` scores, lowest first, as many as there is room for; how many."""
    many = 0
    for j in range(count):
        if many == len(found) and scores[j] >= scores[found[many - 1]]:
            continue
        if many < len(found):
            many += 1
        a = many - 1
        while a > 0 and scores[found[a - 1]] > scores[j]:
            found[a] = found[a - 1]
            a -= 1
        found[a] = j
    return many


@compiled
def scale_of(square: float, size: float) -> float:
    """What a difference is multiplied by to have about length one, from its square, noisy where far below `size`."""
    return float(1.0 / np.sqrt(max(square, _SCALE_NOISE * size + _TINY)))


@compiled
def unscale(active: ActiveSet, scale: Floats, m: int) -> None:
    """Scaled differences and their weights as plain ones, in place; the weights sum to one without the ray."""
    points, weight, index = active.points, active.weight, active.members
    total = 0.0
    for a in range(m):
        if index[a] >= 0:
            weight[a] *= scale[index[a]]
            total += weight[a]
            for t in range(points.shape[1]):
                points[a, t] /= scale[index[a]]
    for a in range(m):
        weight[a] /= total


@compiled
def _distance(search: Search, active: ActiveSet, m: int, x: Floats) -> float:
    """How far the key is from the mean of the active keys, whose weights are made to sum to one; infinite if none."""
    rows, weight, index, dim = search.rows, active.weight, active.members, x.shape[0]
    total = 0.0
    for a in range(m):
        weight[a] = max(weight[a], 0.0)
        if index[a] >= 0:
            total += weight[a]
    if not total > 0.0:
        return np.inf
    for t in range(dim):
        x[t] = 0.0
    for a in range(m):
        weight[a] /= total
        if index[a] >= 0:
            for t in range(dim):
                x[t] += weight[a] * (rows[index[a], t] - rows[search.target, t])
    if search.ray:
        x[dim - 1] = min(x[dim - 1], 0.0)
    square = 0.0
    for t in range(dim):
        square += x[t] * x[t]
    return float(np.sqrt(square))


class Nearest(NamedTuple):
    """What searches for nearest points found, a row per target."""

    ended: Ints  # how: SEPARATED, INSIDE, …
    lower: Floats  # bounds of the distance
    upper: Floats
    query: Floats  # "target dim": the best found, not normalized
    weights: Rows  # of the nearest point, over the keys; the ray is left out


def nearest_points(
    rows: Floats,
    targets: Ints,
    *,
    tau: float,
    gap: float = -1.0,
    counts: Ints | None = None,
    starts: Ints | None = None,
    ray: bool = False,
    stretch: Floats | None = None,
    slope: Floats | None = None,
    columns: Floats | None = None,
    careful: bool = False,
    scaled: bool | None = None,
    budget: float = BUDGET,
) -> Nearest:
    """`nearest_point` for many targets of one set of keys.

    Args:
        rows, targets: the keys, "key dim", and the indices of those to find the nearest point for.
        tau, gap, ray: as in `Search`.
        counts: of each target, the number of keys whose hull is searched, the first ones; None: all.
        starts: of each target, the first active key; None or negative: the closest key.
        stretch, slope: as in `Search`; None: the coordinates are the normalized ones.
        columns: of the first keys, "dim key", if they are known.
        careful: start again, with differences scaled otherwise, where a run ends without an answer.
        scaled: seek among differences of length one; by default where verdicts are asked for and not distances, that is
            without `gap`.
        budget: multiply-adds per target after which it ends EXHAUSTED with what was found so far.
    """
    ended, lower, upper, query, sizes, weights, indices = _nearest_points(
        rows,
        np.ascontiguousarray(rows.T) if columns is None else columns,
        targets,
        np.full(len(targets), len(rows)) if counts is None else counts,
        np.full(len(targets), -1) if starts is None else starts,
        ray,
        np.ones(rows.shape[1] - ray) if stretch is None else stretch,
        np.append(np.zeros(rows.shape[1] - ray), 1.0) if slope is None else slope,
        tau,
        gap,
        careful,
        gap < 0.0 if scaled is None else scaled,
        float(budget),
    )
    return Nearest(ended, lower, upper, query, Rows.sized(sizes, indices, weights))


@compiled
def _nearest_points(
    rows: Floats,
    columns: Floats,
    targets: Ints,
    counts: Ints,
    starts: Ints,
    ray: bool,
    stretch: Floats,
    slope: Floats,
    tau: float,
    gap: float,
    careful: bool,
    scaled: bool,
    budget: float,
) -> tuple[Ints, Floats, Floats, Floats, Ints, Floats, Ints]:
    number, dim = targets.shape[0], rows.shape[1]
    capacity = dim + 2
    ended, sizes = np.empty(number, np.int64), np.empty(number, np.int64)
    lower, upper, queries = room(number), room(number), table(number, dim)
    weights, indices = room(number * capacity), np.empty(number * capacity, np.int64)
    active = active_set(capacity, dim)
    x, best = room(dim), room(dim)
    scores, scale, squares = room(rows.shape[0]), room(rows.shape[0]), room(rows.shape[0])
    for j in range(rows.shape[0]):
        squares[j] = np.sum(rows[j] * rows[j])
    used = 0
    for k in range(number):
        search = Search(rows, columns, targets[k], counts[k], ray, stretch, slope, tau, gap, scale)
        spent, m = 0.0, 0
        for attempt in range(_ATTEMPTS if careful and gap < 0.0 else 1):
            shorten = scaled if attempt != 1 else not scaled
            start = _start(search, starts[k] if attempt == 0 else -1, shorten, squares, scores)
            if shorten or attempt > 0 or starts[k] < 0:
                spent += counts[k] * dim
            best[:] = 0.0
            ended[k], m, lower[k], upper[k], used_up = nearest_point(
                search, start, 1 if careful else -1, active, x, best, scores, budget - spent
            )
            spent += used_up
            if shorten:
                unscale(active, scale, m)
            if ended[k] in (STALLED, EXHAUSTED):  # it may have stopped between two points
                upper[k] = _distance(search, active, m, x)
            if ended[k] == SEPARATED or ended[k] == INSIDE or ended[k] == EXHAUSTED:
                break
        for t in range(dim):
            queries[k, t] = -best[t]
        sizes[k] = m
        for a in range(m):
            weights[used + a], indices[used + a] = active.weight[a], active.members[a]
        used += m
    return ended, lower, upper, queries, sizes, weights[:used].copy(), indices[:used].copy()


@compiled
def _start(search: Search, start: int, shorten: bool, squares: Floats, scores: Floats) -> int:
    """The first active key (the closest one if `start` is negative), when every key's scale has been set."""
    if start >= 0 and not shorten:
        search.scale[:] = 1.0
        return start
    scores_of(search.columns, search.rows[search.target], search.number, scores)
    for j in range(search.number):
        scores[j] = squares[j] - 2.0 * scores[j]
    own, closest, nearest = squares[search.target], np.inf, start
    if start < 0:
        for j in range(search.number):
            if scores[j] < closest and j != search.target:
                closest, nearest = scores[j], j
    scale = search.scale
    for j in range(search.number):  # (a separate loop: roots and quotients on vector registers)
        scale[j] = scale_of(scores[j] + own, squares[j] + own) if shorten else 1.0
    return nearest
