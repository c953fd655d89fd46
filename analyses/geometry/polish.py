"""The nearest point where the fast method gives up: the same active-set steps by orthogonal factorization.

Keys whose hull is 1e8 times thinner in one direction than in another (rounding noise out of a plane, say)
leave nothing of a Gram matrix in float64. A QR factorization of the active set itself loses half as many
digits. It costs O(m³) per step, so it only goes on from where the fast method stopped.
"""

from __future__ import annotations

import numpy as np

from ln_probe.analyses.geometry.active_set import ActiveSet, contains, weighted_mean
from ln_probe.analyses.geometry.scores import Floats, Ints, query_norm, residual_norm, scores_of
from ln_probe.analyses.geometry.search import BRACKETED, CLEAR, CONVERGED, EXHAUSTED, INSIDE, SEPARATED, STALLED, Search
from ln_probe.analyses.machinery.compiled import compiled, room, table

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
    """Go on from the active set of `nearest_point` (with weights of the keys); arguments and results are the same."""
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
