"""Affinely independent points and the inverse of their bordered Gram matrix, one in and one out at a time, compiled.

Wolfe's methods (`wolfe`, `margins`) walk over active sets: a few points `P` of a hull with convex weights. The weights
of the point of their affine hull nearest to the origin are `G⁻¹ e`, made to sum to one, where `G = c·eeᵀ + P Pᵀ` and
`e` is 1 for a point and 0 for a direction (the ray of keys with a bias). The inverse and that solution are updated in
O(m²) when a point comes or goes, and rebuilt when they have drifted.

`polish` continues where that stalls. Keys whose hull is 1e8 times thinner in one direction than in another (rounding
noise out of a plane, say) leave nothing of a Gram matrix in float64. A QR factorization of the active set itself loses
half as many digits, at O(m³) per step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ln_probe.analyses.geometry.compiled import compiled, room, table
from ln_probe.analyses.geometry.coordinates import Floats, Ints, query_norm, residual_norm, scores_of

# How a search ended.
SEPARATED = 1  # the query -x has a relative score gap above tau
INSIDE = 2  # the weights reproduce the key within tau
BRACKETED = 3  # lower and upper bound of the distance agree within the asked gap
CONVERGED = 4  # nearest point found to rounding, and neither of the above
STALLED = 5  # rounding or the step limit stopped it: no verdict
EXHAUSTED = 6  # the budget ran out: bounds, query and weights hold as far as they go

# Verdicts are taken this far (relative) from tau, so that the check of the certificate agrees.
CLEAR = 1e-3


class Search(NamedTuple):
    """The point of the hull of keys 0..number-1 without `target` that is nearest to key `target`."""

    rows: Floats  # the keys, "key dim"
    columns: Floats  # and "dim key"
    target: int
    number: int
    ray: bool  # whether the hull is extended downwards along the last coordinate (keys with a bias)
    stretch: Floats  # with `slope`: turns these coordinates into the keys' normalized ones
    slope: Floats
    tau: float  # with gap < 0: stop when a verdict holds with this tolerance in normalized coordinates
    # If >= 0: stop when lower and upper bound differ by at most this share of the lower (of scaled differences: their
    # bounds), or upper <= tau.
    gap: float
    # What the difference of each key from the target is multiplied by; the active set's weights are of these products
    # (`wolfe.unscale` makes them weights of the keys). `polish` takes all for 1.
    scale: Floats


# Pivots of the bordered Gram matrix below this share of the new point's own squared length mean that the
# point lies in the affine hull of the active set as far as float64 can tell (its square root, 1e-7, is the
# resolved sine).
PIVOT = 1e-14


class ActiveSet(NamedTuple):
    """Room for as many points as an active set can have; how many there are, `m`, is kept beside.

    Inner loops take its arrays one by one: read out of the tuple at every call they cost a fifth of the time of small
    sets (every reading counts a reference).

    Attributes:
        e: 1 for a point of the hull, 0 for a direction (the ray).
        weight: its convex weight; those of points sum to one.
        members: the key that it belongs to, -1 for the ray.
    """

    points: Floats  # "capacity dim"
    e: Floats
    weight: Floats
    members: Ints  # the key that the point belongs to, -1 for the ray
    inverse: Floats  # "capacity capacity", of G
    solution: Floats  # inverse @ e
    border: Floats  # the Gram column of the point that is let in
    work: Floats  # that point's affine coordinates among the others


@compiled
def active_set(capacity: int, dim: int) -> ActiveSet:
    """An empty one."""
    return ActiveSet(
        table(capacity, dim),
        room(capacity),
        room(capacity),
        np.empty(capacity, np.int64),
        table(capacity, capacity),
        room(capacity),
        room(capacity),
        room(capacity),
    )


@compiled
def gram_column(points: Floats, e: Floats, border: Floats, bordering: float, new: int) -> None:
    """The products of point `new` with those before it and with itself, into `border`."""
    for a in range(new + 1):
        total = bordering * e[a] * e[new]
        for t in range(points.shape[1]):
            total += points[a, t] * points[new, t]
        border[a] = total


@compiled
def append(inverse: Floats, solution: Floats, border: Floats, work: Floats, e: Floats, m: int) -> bool:
    """Border the inverse by point `m`, whose Gram column is `border`. False if it is affinely dependent."""
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
    if not pivot > PIVOT * border[m]:
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
def remove(
    points: Floats, e: Floats, weight: Floats, index: Ints, inverse: Floats, solution: Floats, k: int, m: int
) -> None:
    """Take point `k` of `m` out: the last one moves to its place, the inverse loses one rank."""
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
def rebuild(
    points: Floats,
    e: Floats,
    inverse: Floats,
    solution: Floats,
    border: Floats,
    work: Floats,
    m: int,
    bordering: float,
) -> bool:
    """The inverse from scratch, to get rid of accumulated rounding; False if the points have become dependent."""
    for a in range(m):
        gram_column(points, e, border, bordering, a)
        if not append(inverse, solution, border, work, e, a):
            return False
    return True


@compiled
def refine(
    points: Floats,
    e: Floats,
    inverse: Floats,
    right: Floats,
    found: Floats,
    m: int,
    bordering: float,
    x: Floats,
    border: Floats,
) -> None:
    """One step of iterative refinement of `G found = right`, with residuals from the points (in `x` and `border`)."""
    dim = points.shape[1]
    total = 0.0
    for t in range(dim):
        x[t] = 0.0
    for a in range(m):
        total += e[a] * found[a]
        for t in range(dim):
            x[t] += found[a] * points[a, t]
    for a in range(m):
        rest = right[a] - bordering * e[a] * total
        for t in range(dim):
            rest -= points[a, t] * x[t]
        border[a] = rest
    for a in range(m):
        total = 0.0
        for b in range(m):
            total += inverse[a, b] * border[b]
        found[a] += total


@compiled
def contains(index: Ints, key: int, m: int) -> bool:
    found = False
    for a in range(m):
        found = found or index[a] == key
    return found


@compiled
def weighted_mean(points: Floats, e: Floats, weight: Floats, m: int, x: Floats) -> None:
    """The points' mean into `x`, when their weights have been made to sum to one (directions add to it)."""
    total = 0.0
    for a in range(m):
        total += e[a] * weight[a]
    for t in range(points.shape[1]):
        x[t] = 0.0
    for a in range(m):
        weight[a] /= total
        for t in range(points.shape[1]):
            x[t] += weight[a] * points[a, t]


# A column whose part orthogonal to the others is below this share of its length depends on them.
_DEPENDENT = 1e-14
_STEPS_PER_DIMENSION = 10


@compiled
def _affine_step(active: ActiveSet, m: int, step: Floats, basis: Floats) -> tuple[bool, int]:
    """Change of the weights towards the affine minimizer of the active points; False if along a dependency.

    A point that depends on the others gives a direction in which the weights change and the point does not.
    `basis` receives an orthonormal basis of the active points' differences; its size is returned, too.
    """
    points, e, dim = active.points, active.e, active.points.shape[1]
    base = _heaviest(active, m)
    upper = table(m, m)
    upper[:] = 0.0
    column = np.zeros(m, np.int64)
    rest, x = room(dim), room(dim)
    rest[:], x[:] = 0.0, 0.0
    for a in range(m):
        for t in range(dim):
            x[t] += active.weight[a] * points[a, t]
    used = 0
    for a in range(m):
        step[a] = 0.0
    for a in range(m):
        if a == base:
            continue
        for t in range(dim):
            rest[t] = points[a, t] - e[a] * points[base, t]
        if not _extend(basis, upper, used, rest):
            step[a] = -1.0  # shrink this point's weight, the others make up for it
            _back_substitute(upper, column, upper[:, used].copy(), step, used)
            _balance(e, step, base, m)
            return False, used
        column[used] = a
        used += 1
    wanted = room(used)
    for b in range(used):
        share = 0.0
        for t in range(dim):
            share -= basis[b, t] * x[t]
        wanted[b] = share
    _back_substitute(upper, column, wanted, step, used)
    _balance(e, step, base, m)
    return True, used


@compiled
def _heaviest(active: ActiveSet, m: int) -> int:
    base, most = -1, -1.0
    for a in range(m):
        if active.e[a] > 0.0 and active.weight[a] > most:
            base, most = a, active.weight[a]
    return base


@compiled
def _extend(basis: Floats, upper: Floats, used: int, rest: Floats) -> bool:
    """Gram-Schmidt, done twice: one more row of `basis` and column of `upper`; False if `rest` depends on the rows."""
    dim = rest.shape[0]
    size = 0.0
    for t in range(dim):
        size += rest[t] * rest[t]
    for _ in range(2):
        for b in range(used):
            share = 0.0
            for t in range(dim):
                share += basis[b, t] * rest[t]
            upper[b, used] += share
            for t in range(dim):
                rest[t] -= share * basis[b, t]
    left = 0.0
    for t in range(dim):
        left += rest[t] * rest[t]
    if np.sqrt(left) <= _DEPENDENT * np.sqrt(size):
        return False
    upper[used, used] = np.sqrt(left)
    for t in range(dim):
        basis[used, t] = rest[t] / upper[used, used]
    return True


@compiled
def _back_substitute(upper: Floats, column: Ints, wanted: Floats, step: Floats, used: int) -> None:
    """Solve `upper s = wanted` and write s to the places that the columns belong to."""
    for b in range(used - 1, -1, -1):
        share = wanted[b]
        for c in range(b + 1, used):
            share -= upper[b, c] * step[column[c]]
        step[column[b]] = share / upper[b, b]


@compiled
def _balance(e: Floats, step: Floats, base: int, m: int) -> None:
    """Let the weights keep their sum."""
    total = 0.0
    for b in range(m):
        total += e[b] * step[b]
    step[base] -= total


@compiled
def _minor_cycle(active: ActiveSet, m: int, step: Floats, basis: Floats, budget: float) -> tuple[int, int, int, float]:
    """To the affine minimizer as far as the weights stay convex, without the points that block.

    Returns:
        0, or STALLED or EXHAUSTED; how many points are left, the size of the basis, and the multiply-adds spent.
    """
    points, weight, dim = active.points, active.weight, active.points.shape[1]
    spent = 0.0
    while True:
        exact, used = _affine_step(active, m, step, basis)
        spent += 2 * m * m * dim
        length, blocking = 1.0 if exact else np.inf, -1
        for a in range(m):
            if step[a] < 0.0 and weight[a] + length * step[a] <= 0.0:
                length, blocking = -weight[a] / step[a], a
        if length == np.inf:
            return STALLED, m, used, spent
        if spent > budget:
            return EXHAUSTED, m, used, spent
        for a in range(m):
            weight[a] = max(weight[a] + length * step[a], 0.0)
        if blocking < 0:
            return 0, m, used, spent
        m -= 1
        for t in range(dim):
            points[blocking, t] = points[m, t]
        weight[blocking], active.e[blocking], active.members[blocking] = weight[m], active.e[m], active.members[m]
        if m == 1:
            return 0, m, 0, spent


@compiled
def _off(basis: Floats, used: int, x: Floats) -> None:
    """Take out of `x` what rounding left along the differences of the active points.

    The exact x is orthogonal to them; the rest would drown the products with the other keys, which can be as small as
    |x|².
    """
    for b in range(used):
        share = 0.0
        for t in range(x.shape[0]):
            share += basis[b, t] * x[t]
        for t in range(x.shape[0]):
            x[t] -= share * basis[b, t]


@compiled
def _lowest(search: Search, x: Floats, scores: Floats) -> tuple[int, float, float]:
    """The key that scores lowest under `x`, that score above the target's, and the square of `x`."""
    square, own = 0.0, 0.0
    for t in range(x.shape[0]):
        square += x[t] * x[t]
        own += x[t] * search.rows[search.target, t]
    scores_of(search.columns, x, search.number, scores)
    if search.target < search.number:
        scores[search.target] = np.inf
    new, value = -1, np.inf
    for j in range(search.number):
        if scores[j] < value:
            value, new = scores[j], j
    return new, value - own, square


@compiled
def _longest(search: Search) -> float:
    """The longest difference from the target."""
    rows, largest = search.rows, 0.0
    for j in range(search.number):
        square = 0.0
        for t in range(rows.shape[1]):
            square += (rows[j, t] - rows[search.target, t]) ** 2
        largest = max(largest, np.sqrt(square))
    return largest


@compiled
def polish(
    search: Search, active: ActiveSet, m: int, x: Floats, best: Floats, scores: Floats, budget: float
) -> tuple[int, int, float, float, float]:
    """Continue from the active set of `nearest_point` (with weights of the keys), with its arguments and results."""
    rows, target, tau, gap, ray = search.rows, search.target, search.tau, search.gap, search.ray
    dim, capacity = rows.shape[1], active.members.shape[0]
    step = room(capacity)
    basis = table(capacity, dim)
    lower, upper, moved = 0.0, np.inf, True
    largest = _longest(search)
    spent = float(search.number * dim)
    for _ in range(_STEPS_PER_DIMENSION * (dim + 10)):
        ended, m, used, more = _minor_cycle(active, m, step, basis, budget - spent)
        spent += more
        if ended != 0:
            return ended, m, lower, upper, spent
        weighted_mean(active.points, active.e, active.weight, m, x)
        lift = ray and x[dim - 1] > 1e-15 * largest and not contains(active.members, -1, m)
        if ray and not lift and x[dim - 1] > 0.0:
            x[dim - 1] = 0.0
        shorter = np.sqrt(np.sum(x * x))
        if not shorter < upper and not moved:
            return STALLED, m, lower, shorter, spent
        moved = shorter < upper * (1.0 - 1e-9)
        upper = shorter
        if gap < 0.0:
            if residual_norm(x, search.stretch, search.slope) <= tau * (1.0 - CLEAR):
                return INSIDE, m, lower, upper, spent
        elif upper <= tau:
            return BRACKETED, m, lower, upper, spent
        new = -1
        if not lift:
            _off(basis, used, x)
            if ray and x[dim - 1] > 0.0:  # before the key's own score is summed: a bias can be 1e8 times the rest
                x[dim - 1] = 0.0
            new, value, square = _lowest(search, x, scores)
            spent += search.number * dim
            length = np.sqrt(square)
            if value > lower * length:
                lower = value / length
                best[:] = x
            if gap < 0.0:
                if value > tau * (1.0 + CLEAR) * query_norm(x, search.stretch, search.slope):
                    best[:] = x
                    return SEPARATED, m, lower, upper, spent
            elif upper - lower <= gap * lower:
                return BRACKETED, m, lower, upper, spent
            if value >= square * (1.0 - 1e-6):
                return CONVERGED, m, lower, upper, spent
        if m == capacity or contains(active.members, new, m):
            return STALLED, m, lower, upper, spent
        for t in range(dim):
            active.points[m, t] = rows[new, t] - rows[target, t] if new >= 0 else 0.0
        if new < 0:
            active.points[m, dim - 1] = -largest
        active.e[m] = 1.0 if new >= 0 else 0.0
        active.weight[m], active.members[m] = 0.0, new
        m += 1
    return STALLED, m, lower, upper, spent
