"""The point of a convex hull that is nearest to a key: Wolfe's active-set method, compiled.

For a target `z_i` and generators `z_j` it finds the shortest vector `x` of `conv{z_j - z_i}` (plus a ray, for
keys with a bias). Every iterate is a certificate in both directions:

* its convex weights put the hull at most `|x|` away from the key (an upper bound on the distance);
* the query `-x` gives the key a score gap of at least `min_j x·(z_j - z_i)`, so the hull is at least that gap
  over `|x|` away (a lower bound).

At the optimum both agree (`x·(z_j - z_i) >= |x|²` for all j), so the run stops as soon as the bounds answer
the question.

Source: P. Wolfe, "Finding the nearest point in a polytope", Math. Programming 11 (1976) 128-149. The inverse
of the bordered Gram matrix `c·eeᵀ + P Pᵀ` of the active set is updated in O(m²) per step and rebuilt when it
has drifted.

Whether zero lies in `conv{z_j - z_i}` does not depend on the lengths of the differences. A verdict may therefore be
sought among differences of length one (`scaled`): eight decades of norms then cost hardly more steps than one, where
the differences themselves leave a Gram matrix nothing of the short ones. Bounds are of the true differences either way.
"""

from __future__ import annotations

import numpy as np

from ln_probe.analyses.geometry.polish import BRACKETED, CLEAR, CONVERGED, EXHAUSTED, INSIDE, SEPARATED, STALLED, polish
from ln_probe.analyses.geometry.scores import Floats, Ints, query_norm, residual_norm, scores_of
from ln_probe.analyses.machinery.compiled import compiled, room, table

# Pivots of the bordered Gram matrix below this share of the new point's own squared length mean that the
# point lies in the affine hull of the active set as far as float64 can tell (its square root, 1e-7, is the
# resolved sine).
_PIVOT = 1e-14
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
def _append(inverse: Floats, solution: Floats, border: Floats, work: Floats, e: Floats, m: int, floor: float) -> bool:
    """Border the inverse by one point, whose Gram column is `border`. False if it is affinely dependent."""
    for a in range(m):
        total = 0.0
        for b in range(m):
            total += inverse[a, b] * border[b]
        work[a] = total
    pivot = border[m]
    known = 0.0
    for a in range(m):
        pivot -= work[a] * border[a]
        known += work[a] * e[a]
    if not pivot > floor:
        return False
    for a in range(m):
        scaled = work[a] / pivot
        for b in range(m):
            inverse[a, b] += scaled * work[b]
        inverse[a, m] = -scaled
        inverse[m, a] = -scaled
    inverse[m, m] = 1.0 / pivot
    last = (e[m] - known) / pivot
    for a in range(m):
        solution[a] -= work[a] * last
    solution[m] = last
    return True


@compiled
def _remove(
    inverse: Floats, solution: Floats, points: Floats, weight: Floats, e: Floats, index: Ints, k: int, m: int
) -> None:
    """Take active point `k` of `m` out: the last one moves to its place, the inverse loses one rank."""
    last = m - 1
    if k != last:
        for t in range(points.shape[1]):
            points[k, t] = points[last, t]
        weight[k], e[k], index[k] = weight[last], e[last], index[last]
        solution[k], solution[last] = solution[last], solution[k]
        for b in range(m):
            inverse[k, b], inverse[last, b] = inverse[last, b], inverse[k, b]
        for b in range(m):
            inverse[b, k], inverse[b, last] = inverse[b, last], inverse[b, k]
    pivot = inverse[last, last]
    for a in range(last):
        scaled = inverse[a, last] / pivot
        for b in range(last):
            inverse[a, b] -= scaled * inverse[last, b]
        solution[a] -= scaled * solution[last]


@compiled
def _gram_column(points: Floats, e: Floats, border: Floats, bordering: float, new: int) -> None:
    for a in range(new + 1):
        total = bordering * e[a] * e[new]
        for t in range(points.shape[1]):
            total += points[a, t] * points[new, t]
        border[a] = total


@compiled
def _rebuild(
    inverse: Floats,
    solution: Floats,
    points: Floats,
    border: Floats,
    work: Floats,
    e: Floats,
    m: int,
    bordering: float,
) -> bool:
    """The inverse from scratch, to get rid of accumulated rounding."""
    for a in range(m):
        _gram_column(points, e, border, bordering, a)
        if not _append(inverse, solution, border, work, e, a, _PIVOT * border[a]):
            return False
    return True


@compiled
def _refine(
    inverse: Floats,
    solution: Floats,
    points: Floats,
    border: Floats,
    work: Floats,
    e: Floats,
    x: Floats,
    m: int,
    bordering: float,
) -> None:
    """One step of iterative refinement of `(c·eeᵀ + P Pᵀ) solution = e`; `x` is overwritten."""
    dim = points.shape[1]
    total = 0.0
    for t in range(dim):
        x[t] = 0.0
    for a in range(m):
        total += e[a] * solution[a]
        for t in range(dim):
            x[t] += solution[a] * points[a, t]
    for a in range(m):
        rest = e[a] * (1.0 - bordering * total)
        for t in range(dim):
            rest -= points[a, t] * x[t]
        border[a] = rest
    for a in range(m):
        total = 0.0
        for b in range(m):
            total += inverse[a, b] * border[b]
        solution[a] += total


@compiled
def nearest_point(
    rows: Floats,
    columns: Floats,
    target: int,
    count: int,
    start: int,
    ray: bool,
    stretch: Floats,
    slope: Floats,
    tau: float,
    gap: float,
    patience: int,
    points: Floats,
    inverse: Floats,
    weight: Floats,
    e: Floats,
    index: Ints,
    x: Floats,
    best: Floats,
    scores: Floats,
    work: Floats,
    scale: Floats,
    budget: float,
) -> tuple[int, int, float, float, float]:
    """Nearest point of the hull of keys 0..count-1 without `target` to key `target`.

    Args:
        rows, columns: the keys, "key dim" and "dim key".
        start: the first active key.
        ray: whether the hull is extended downwards along the last coordinate (keys with a bias).
        stretch, slope: what turns these coordinates into the keys' normalized ones.
        tau: with `gap` < 0, stop when a verdict holds with this tolerance in normalized coordinates.
        gap: if >= 0, stop when lower and upper bound differ by at most this share of the lower (of scaled differences:
            their bounds), or upper <= tau.
        patience: give up when the inverse has drifted more often; -1: never.
        points … work: workspace; on return `index`, `weight` hold the active set, `x` the last point, `best`
        minus the
            query with the highest lower bound (where it ends SEPARATED: that query).
        scale: what the difference of each key from the target is multiplied by; weights are of these products
            (`unscale` makes them weights of the keys).
        budget: multiply-adds to spend at most, but for the step in which they run out.

    Returns:
        how it ended, size of the active set, lower and upper bound of the distance in these coordinates, and the
        multiply-adds spent.
    """
    dim = rows.shape[1]
    capacity = index.shape[0]
    for t in range(dim):
        points[0, t] = scale[start] * (rows[start, t] - rows[target, t])
    e[0], weight[0], index[0] = 1.0, 1.0, start
    m = 1
    bordering = 0.0
    for t in range(dim):
        x[t] = points[0, t]
        bordering += x[t] * x[t]
    largest = np.sqrt(bordering)
    inverse[0, 0] = 0.5 / bordering
    solution = work[capacity : 2 * capacity]
    border = work[2 * capacity : 3 * capacity]
    solution[0] = inverse[0, 0]
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
            for c in range(kept):
                j = few[c]
                product = -own
                for t in range(dim):
                    product += rows[j, t] * x[t]
                product *= scale[j]
                if product < value:
                    value, new = product, j
            spent += kept * dim
            if square - value <= _WORN * violation or (gap < 0.0 and value > 0.0):
                new = -1
        if not lift and new < 0:
            scores_of(columns, x, count, scores)
            spent += count * dim
            if target < count:
                scores[target] = np.inf
            least, value = np.inf, np.inf
            for j in range(count):
                product = scores[j] - own
                least = min(least, product)
                product *= scale[j]
                scores[j] = product
                if product < value:
                    value, new = product, j
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
        drifted = idle >= _IDLE
        for a in range(m):
            drifted = drifted or index[a] == new
        if not drifted:
            if m == capacity:
                return STALLED, m, lower, upper, spent
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
            _gram_column(points, e, border, bordering, m)
            spent += m * (dim + 3 * m)
            own_square = border[m] - bordering * e[m]
            if own_square > largest * largest and new >= 0:
                largest = np.sqrt(own_square)
            drifted = not _append(inverse, solution, border, work, e, m, _PIVOT * border[m])
        if drifted:
            if fresh or rebuilt == patience or not _rebuild(inverse, solution, points, border, work, e, m, bordering):
                return STALLED, m, lower, upper, spent
            fresh, careful, idle = True, True, 0
            rebuilt += 1
            spent += m * m * (dim + m)
        else:
            m += 1
            fresh = False
        while True:  # Wolfe's minor cycle: to the affine minimizer, as far as the weights stay convex
            spent += m * dim
            if careful:
                _refine(inverse, solution, points, border, work, e, x, m, bordering)
                spent += m * (2 * dim + m)
            total = 0.0
            for a in range(m):
                total += e[a] * solution[a]
            if not total > 0.0:
                return STALLED, m, lower, upper, spent
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
            _remove(inverse, solution, points, weight, e, index, blocking, m)
            spent += 2 * m * m
            m -= 1
            fresh = False
            if m == 0:
                return STALLED, m, lower, upper, spent
        total = 0.0
        for a in range(m):
            weight[a] = max(weight[a], 0.0)
            total += e[a] * weight[a]
        for t in range(dim):
            x[t] = 0.0
        for a in range(m):
            weight[a] /= total
            for t in range(dim):
                x[t] += weight[a] * points[a, t]
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
def unscale(points: Floats, weight: Floats, index: Ints, scale: Floats, m: int) -> None:
    """Scaled differences and their weights as plain ones, in place; the weights sum to one without the ray."""
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
def _distance(rows: Floats, target: int, ray: bool, weight: Floats, index: Ints, m: int, x: Floats) -> float:
    """How far the key is from the mean of the active keys, whose weights are made to sum to one; infinite if none."""
    dim = rows.shape[1]
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
                x[t] += weight[a] * (rows[index[a], t] - rows[target, t])
    if ray:
        x[dim - 1] = min(x[dim - 1], 0.0)
    square = 0.0
    for t in range(dim):
        square += x[t] * x[t]
    return float(np.sqrt(square))


def nearest_points(
    rows: Floats, columns: Floats, targets: Ints, counts: Ints, starts: Ints, ray: bool, stretch: Floats,
    slope: Floats, tau: float, gap: float, careful: bool, scaled: bool | None = None, budget: float = BUDGET,
) -> tuple[Ints, Floats, Floats, Floats, Ints, Floats, Ints]:  # fmt: skip
    """`nearest_point` for many targets of one set of keys; a negative start means the closest key.

    Args:
        careful: polish runs that end without an answer.
        scaled: seek among differences of length one; by default where verdicts are asked for and not distances, that is
            without `gap`.
        budget: multiply-adds per target after which it ends EXHAUSTED with what was found so far.

    Returns:
        how each ended, lower and upper bounds, queries "target dim" (the best found, not normalized), the
        sizes of the active sets, and their weights and indices one after the other (the ray has index -1).

    Raises:
        ValueError: a budget that is not positive.
    """
    if not budget > 0.0:
        raise ValueError(f"budget must be positive, got {budget}: it is the number of multiply-adds per key")
    if scaled is None:
        scaled = gap < 0.0
    return _nearest_points(
        rows, columns, targets, counts, starts, ray, stretch, slope, tau, gap, careful, scaled, float(budget)
    )


@compiled
def _nearest_points(
    rows: Floats, columns: Floats, targets: Ints, counts: Ints, starts: Ints, ray: bool, stretch: Floats,
    slope: Floats, tau: float, gap: float, careful: bool, scaled: bool, budget: float,
) -> tuple[Ints, Floats, Floats, Floats, Ints, Floats, Ints]:  # fmt: skip
    number, dim = targets.shape[0], rows.shape[1]
    capacity = dim + 2
    ended = np.empty(number, np.int64)
    lower, upper = room(number), room(number)
    queries = table(number, dim)
    sizes = np.empty(number, np.int64)
    weights = room(number * capacity)
    indices = np.empty(number * capacity, np.int64)
    points, inverse = table(capacity, dim), table(capacity, capacity)
    weight, e, index = room(capacity), room(capacity), np.empty(capacity, np.int64)
    x, best, kept = room(dim), room(dim), room(dim)
    scores, work = room(rows.shape[0]), room(3 * capacity)
    used = 0
    squares = room(rows.shape[0])
    for j in range(rows.shape[0]):
        squares[j] = np.sum(rows[j] * rows[j])
    scale = room(rows.shape[0])
    for k in range(number):
        spent, m = 0.0, 0
        for attempt in range(_ATTEMPTS if careful and gap < 0.0 else 1):
            best[:] = 0.0
            start = starts[k] if attempt == 0 else -1
            shorten = scaled if attempt != 1 else not scaled
            if start < 0 or shorten:
                scores_of(columns, rows[targets[k]], counts[k], scores)
                spent += counts[k] * dim
                for j in range(counts[k]):
                    scores[j] = squares[j] - 2.0 * scores[j]
            if start < 0:
                closest = np.inf
                for j in range(counts[k]):
                    if scores[j] < closest and j != targets[k]:
                        closest, start = scores[j], j
            own = squares[targets[k]]
            for j in range(counts[k]):
                scale[j] = scale_of(scores[j] + own, squares[j] + own) if shorten else 1.0
            ended[k], m, lower[k], upper[k], used_up = nearest_point(
                rows, columns, targets[k], counts[k], start, ray, stretch, slope, tau, gap,
                1 if careful else -1, points, inverse, weight, e, index, x, best, scores, work, scale,
                budget - spent,
            )  # fmt: skip
            spent += used_up
            if shorten:
                unscale(points, weight, index, scale, m)
            if careful and (ended[k] == STALLED or ended[k] == CONVERGED) and m > 0:
                low = lower[k]
                for t in range(dim):
                    kept[t] = best[t]
                ended[k], m, lower[k], upper[k], used_up = polish(
                    rows, columns, targets[k], counts[k], ray, stretch, slope, tau, gap,
                    points, weight, e, index, m, x, best, scores, budget - spent,
                )  # fmt: skip
                spent += used_up
                if ended[k] != SEPARATED and low > lower[k]:
                    lower[k] = low
                    for t in range(dim):
                        best[t] = kept[t]
            if ended[k] == STALLED or ended[k] == EXHAUSTED:  # it may have stopped between two points
                upper[k] = _distance(rows, targets[k], ray, weight, index, m, x)
            if ended[k] == SEPARATED or ended[k] == INSIDE or ended[k] == EXHAUSTED:
                break
        for t in range(dim):
            queries[k, t] = -best[t]
        sizes[k] = m
        for a in range(m):
            weights[used + a], indices[used + a] = weight[a], index[a]
        used += m
    return ended, lower, upper, queries, sizes, weights[:used].copy(), indices[:used].copy()
