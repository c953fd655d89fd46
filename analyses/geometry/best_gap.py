"""The best score gap over a ball of queries when keys also have offsets: a conic active-set method, compiled.

With scores `h_j + u·z_j`, |u| ≤ 1, the margin of key i is a concave maximum and, by duality, a convex minimum:

    max_u min_j [h_i - h_j + u·(z_i - z_j)]  =  min_w  |Σ w_j (z_j - z_i)| - Σ w_j (h_j - h_i),   w convex.

Without offsets this is the distance of z_i to the hull of the others (`min_norm`). The method is Wolfe's: keep an
active set whose points are affinely independent, go to the minimizer over its affine hull as far as the weights stay
convex, drop the point that blocks, else add the point that scores highest under the query u = -x/|x|. Only the affine
minimizer differs. On the affine hull the offset is an affine function, of slope d within the hull's own directions;
with p the point nearest to the origin the minimizer is p + s·d, s = |p| / √(1 - |d|²), and if |d| ≥ 1 there is none:
the way is along d until a weight is used up. Every iterate brackets the margin: the query from below, the weights from
above.

Source of the scheme: P. Wolfe, "Finding the nearest point in a polytope", Math. Programming 11 (1976) 128-149.
"""

from __future__ import annotations

import numpy as np

from ln_probe.analyses.geometry.min_norm import _append, _gram_column, _rebuild, _remove
from ln_probe.analyses.geometry.scores import Floats, Ints, scores_of
from ln_probe.analyses.machinery.compiled import compiled, room, table

# As in min_norm: pivots below this share of a point's own square are rounding.
_PIVOT = 1e-14
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


@compiled
def _refine(
    points: Floats, e: Floats, inverse: Floats, right: Floats, found: Floats, m: int, bordering: float, x: Floats,
    rest: Floats,
) -> None:  # fmt: skip
    """One step of iterative refinement of `(c·eeᵀ + P Pᵀ) found = right`, with residuals from P itself."""
    total = 0.0
    for t in range(points.shape[1]):
        x[t] = 0.0
    for a in range(m):
        total += e[a] * found[a]
        for t in range(points.shape[1]):
            x[t] += found[a] * points[a, t]
    for a in range(m):
        left = right[a] - bordering * e[a] * total
        for t in range(points.shape[1]):
            left -= points[a, t] * x[t]
        rest[a] = left
    for a in range(m):
        total = 0.0
        for b in range(m):
            total += inverse[a, b] * rest[b]
        found[a] += total


@compiled
def _affine_minimizer(
    points: Floats, e: Floats, lead: Floats, inverse: Floats, solution: Floats, m: int, base: Floats, along: Floats,
    p: Floats, d: Floats, bordering: float, careful: bool, rest: Floats,
) -> float:  # fmt: skip
    """Weights `base + s·along` of the affine hull's minimizer; returns s, or -1 if there is none (go along `along`)."""
    dim = points.shape[1]
    ones, slope = 0.0, 0.0
    for a in range(m):
        total = 0.0
        for b in range(m):
            total += inverse[a, b] * lead[b]
        along[a] = total
    if careful:
        _refine(points, e, inverse, e, solution, m, bordering, p, rest)
        _refine(points, e, inverse, lead, along, m, bordering, p, rest)
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
def _put(point: Floats, key: Floats, target: Floats, lead: float, unit: float) -> tuple[float, float]:
    """The difference of two keys brought to length `unit` (far keys would drown near ones), its factor, and its
    lead."""
    square = 0.0
    for t in range(point.shape[0]):
        point[t] = key[t] - target[t]
        square += point[t] * point[t]
    factor = min(unit / np.sqrt(square), _LONGER) if square > 0.0 else 1.0
    for t in range(point.shape[0]):
        point[t] *= factor
    return factor, lead * factor


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
    lower, upper = room(number), room(number)
    queries = table(number, dim)
    sizes = np.zeros(number, np.int64)
    values, indices = room(number * capacity), np.empty(number * capacity, np.int64)
    points, inverse = table(capacity, dim), table(capacity, capacity)
    weight, e, index, lead = room(capacity), room(capacity), np.empty(capacity, np.int64), room(capacity)
    solution, border, work = room(capacity), room(capacity), room(3 * capacity)
    base, along, p, d = room(capacity), room(capacity), room(dim), room(dim)
    x, u, scores, squares = room(dim), room(dim), room(count), room(count)
    for j in range(count):
        squares[j] = np.sum(rows[j] * rows[j])
    used = 0
    for k in range(number):
        i = targets[k]
        scores_of(columns, rows[i], count, scores)
        start, closest, largest = -1, np.inf, 0.0
        for j in range(count):
            if j != i:
                apart = np.sqrt(max(squares[j] + squares[i] - 2.0 * scores[j], 0.0))
                largest = max(largest, apart)
                if apart - offset[j] < closest:
                    closest, start = apart - offset[j], j
        spent = 2.0 * count * dim
        lower[k], upper[k] = -np.inf, np.inf
        for t in range(dim):
            queries[k, t] = 0.0
            points[0, t] = rows[start, t] - rows[i, t]
        e[0], weight[0], index[0], lead[0] = 1.0, 1.0, start, offset[start] - offset[i]
        square = np.sum(points[0] * points[0])
        bordering = max(square, 1e-24 * largest * largest, 1e-300)
        unit = np.sqrt(bordering)
        inverse[0, 0] = 1.0 / (bordering + square)
        solution[0] = inverse[0, 0]
        m, fresh, careful = 1, True, False
        for t in range(dim):
            d[t] = 0.0
        for _ in range(_STEPS_PER_DIMENSION * (dim + 10)):
            total, square = 0.0, 0.0
            for a in range(m):
                total += e[a] * weight[a]
            for t in range(dim):
                x[t] = 0.0
            ahead = 0.0
            for a in range(m):
                weight[a] /= total
                ahead += weight[a] * lead[a]
                for t in range(dim):
                    x[t] += weight[a] * points[a, t]
            for t in range(dim):
                square += x[t] * x[t]
            length = np.sqrt(square)
            level = length - ahead
            if level < upper[k]:
                upper[k] = level
                sizes[k] = m
                for a in range(m):
                    values[used + a], indices[used + a] = e[a] * weight[a], index[a]
            short = 0.0
            if length > _POINT * largest:
                for t in range(dim):
                    u[t] = -x[t] / length
            else:
                for t in range(dim):
                    short += d[t] * d[t]
                short = max(np.sqrt(short), 1.0)
                for t in range(dim):
                    u[t] = -d[t] / short
            scores_of(columns, u, count, scores)
            own = scores[i] + offset[i]
            best, new = -np.inf, -1
            for j in range(count):
                if scores[j] + offset[j] > best and j != i:
                    best, new = scores[j] + offset[j], j
            value = own - best
            if value > lower[k]:
                lower[k] = value
                for t in range(dim):
                    queries[k, t] = u[t]
            spent += 2.0 * count * dim + 6.0 * m * (m + dim)
            room_left = upper[k] - lower[k]
            if room_left <= floor or room_left <= gap * max(abs(upper[k]), abs(lower[k])) or spent > budget:
                break
            if value >= level - _NOISE * (largest + abs(ahead)):
                break
            known = False
            for a in range(m):
                known = known or index[a] == new
            if not known:
                e[m], lead[m] = _put(points[m], rows[new], rows[i], offset[new] - offset[i], unit)
                weight[m], index[m] = 0.0, new
                _gram_column(points, e, border, bordering, m)
                if _append(inverse, solution, border, work, e, m, _PIVOT * border[m]):
                    m += 1
                    fresh = False
                else:  # in the affine hull already: exchange it for one that it can stand for
                    share, leaving = np.inf, -1
                    for a in range(m):
                        if work[a] > _DEPENDS and weight[a] / work[a] < share:
                            share, leaving = weight[a] / work[a], a
                    if leaving >= 0:
                        for a in range(m):
                            weight[a] = max(weight[a] - share * work[a], 0.0)
                        lead[leaving] = lead[m - 1]
                        _remove(inverse, solution, points, weight, e, index, leaving, m)
                        m -= 1
                        e[m], lead[m] = _put(points[m], rows[new], rows[i], offset[new] - offset[i], unit)
                        weight[m], index[m] = share, new
                        _gram_column(points, e, border, bordering, m)
                        if _append(inverse, solution, border, work, e, m, _PIVOT * border[m]):
                            m += 1
                            fresh = False
                        else:
                            known = True
                            if m == 0:
                                break
                    else:
                        known = True
            if known:  # nothing new: rounding, put right once
                if fresh or not _rebuild(inverse, solution, points, border, work, e, m, bordering):
                    break
                fresh, careful = True, True
            while True:
                s = _affine_minimizer(
                    points, e, lead, inverse, solution, m, base, along, p, d, bordering, careful, border
                )
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
                spent += 4.0 * m * (m + dim)
                if blocking < 0:
                    break
                lead[blocking] = lead[m - 1]
                _remove(inverse, solution, points, weight, e, index, blocking, m)
                m -= 1
                fresh = False
                if m == 0:
                    break
            if m == 0:
                break
        used += sizes[k]
    return lower, upper, queries, sizes, values[:used].copy(), indices[:used].copy()
