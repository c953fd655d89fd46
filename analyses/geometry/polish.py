"""The nearest point where the fast method gives up: the same active-set steps by orthogonal factorization.

Keys whose hull is 1e8 times thinner in one direction than in another (rounding noise out of a plane, say)
leave nothing of a Gram matrix in float64. A QR factorization of the active set itself loses half as many
digits. It costs O(m³) per step, so it only goes on from where the fast method stopped.
"""

from __future__ import annotations

import numpy as np

from ln_probe.analyses.geometry.scores import Floats, Ints, query_norm, residual_norm, scores_of
from ln_probe.analyses.machinery.compiled import compiled, room, table

# How a search for the nearest point ended.
SEPARATED = 1  # the query -x has a relative score gap above tau
INSIDE = 2  # the weights reproduce the key within tau
BRACKETED = 3  # lower and upper bound of the distance agree within the asked gap
CONVERGED = 4  # nearest point found to rounding, and neither of the above
STALLED = 5  # rounding or the step limit stopped it: no verdict
EXHAUSTED = 6  # the budget ran out: bounds, query and weights hold as far as they go

# A column whose part orthogonal to the others is below this share of its length depends on them.
_DEPENDENT = 1e-14
# Verdicts are taken this far (relative) from tau, so that whoever computes the certificate again agrees.
CLEAR = 1e-3
_STEPS_PER_DIMENSION = 10


@compiled
def _affine_step(points: Floats, weight: Floats, e: Floats, m: int, step: Floats, basis: Floats) -> tuple[bool, int]:
    """Change of the weights towards the affine minimizer of the active points; False if along a dependency.

    A point that depends on the others gives a direction in which the weights change and the point does not.
    `basis` receives an orthonormal basis of the active points' differences; its size is returned, too.
    """
    dim = points.shape[1]
    base, most = -1, -1.0
    for a in range(m):
        if e[a] > 0.0 and weight[a] > most:
            base, most = a, weight[a]
    upper = table(m, m)
    upper[:] = 0.0
    column = np.zeros(m, np.int64)
    rest, x = room(dim), room(dim)
    rest[:], x[:] = 0.0, 0.0
    for a in range(m):
        for t in range(dim):
            x[t] += weight[a] * points[a, t]
    used = 0
    for a in range(m):
        step[a] = 0.0
    for a in range(m):
        if a == base:
            continue
        size = 0.0
        for t in range(dim):
            rest[t] = points[a, t] - e[a] * points[base, t]
            size += rest[t] * rest[t]
        size = np.sqrt(size)
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
        left = np.sqrt(left)
        if left <= _DEPENDENT * size:
            step[a] = -1.0  # shrink this point's weight, the others make up for it
            for b in range(used - 1, -1, -1):
                share = upper[b, used]
                for c in range(b + 1, used):
                    share -= upper[b, c] * step[column[c]]
                step[column[b]] = share / upper[b, b]
            total = 0.0
            for b in range(m):
                total += e[b] * step[b]
            step[base] -= total
            return False, used
        upper[used, used] = left
        column[used] = a
        for t in range(dim):
            basis[used, t] = rest[t] / left
        used += 1
    for b in range(used - 1, -1, -1):
        share = 0.0
        for t in range(dim):
            share -= basis[b, t] * x[t]
        for c in range(b + 1, used):
            share -= upper[b, c] * step[column[c]]
        step[column[b]] = share / upper[b, b]
    total = 0.0
    for b in range(m):
        total += e[b] * step[b]
    step[base] -= total
    return True, used


@compiled
def polish(
    rows: Floats, columns: Floats, target: int, count: int, ray: bool, stretch: Floats, slope: Floats,
    tau: float, gap: float, points: Floats, weight: Floats, e: Floats, index: Ints, m: int, x: Floats,
    best: Floats, scores: Floats, budget: float,
) -> tuple[int, int, float, float, float]:  # fmt: skip
    """Go on from the active set of `nearest_point`; arguments and results are the same."""
    dim = rows.shape[1]
    capacity = index.shape[0]
    step = room(capacity)
    basis = table(capacity, dim)  # orthonormal rows, by Gram-Schmidt done twice
    used = 0
    lower, upper = 0.0, np.inf
    largest = 0.0
    for j in range(count):
        square = 0.0
        for t in range(dim):
            square += (rows[j, t] - rows[target, t]) ** 2
        largest = max(largest, np.sqrt(square))
    moved = True
    spent = float(count * dim)
    for _ in range(_STEPS_PER_DIMENSION * (dim + 10)):
        while True:
            exact, used = _affine_step(points, weight, e, m, step, basis)
            spent += 2 * m * m * dim
            length, blocking = 1.0 if exact else np.inf, -1
            for a in range(m):
                if step[a] < 0.0 and weight[a] + length * step[a] <= 0.0:
                    length, blocking = -weight[a] / step[a], a
            if length == np.inf:
                return STALLED, m, lower, upper, spent
            if spent > budget:
                return EXHAUSTED, m, lower, upper, spent
            for a in range(m):
                weight[a] = max(weight[a] + length * step[a], 0.0)
            if blocking < 0:
                break
            m -= 1
            for t in range(dim):
                points[blocking, t] = points[m, t]
            weight[blocking], e[blocking], index[blocking] = weight[m], e[m], index[m]
            if m == 1:
                used = 0
                break
        total = 0.0
        for a in range(m):
            total += e[a] * weight[a]
        for t in range(dim):
            x[t] = 0.0
        for a in range(m):
            weight[a] /= total
            for t in range(dim):
                x[t] += weight[a] * points[a, t]
        lift = ray and x[dim - 1] > 1e-15 * largest
        for a in range(m):
            lift = lift and index[a] >= 0
        if ray and not lift and x[dim - 1] > 0.0:
            x[dim - 1] = 0.0
        square, own = 0.0, 0.0
        for t in range(dim):
            square += x[t] * x[t]
            own += x[t] * rows[target, t]
        shorter = np.sqrt(square)
        if not shorter < upper and not moved:
            return STALLED, m, lower, shorter, spent
        moved = shorter < upper * (1.0 - 1e-9)
        upper = shorter
        if gap < 0.0:
            if residual_norm(x, stretch, slope) <= tau * (1.0 - CLEAR):
                return INSIDE, m, lower, upper, spent
        elif upper <= tau:
            return BRACKETED, m, lower, upper, spent
        new = -1
        if not lift:
            # The exact x is orthogonal to the differences of the active points; what rounding left along them
            # would drown the products with the others, which can be as small as |x|².
            for b in range(used):
                share = 0.0
                for t in range(dim):
                    share += basis[b, t] * x[t]
                for t in range(dim):
                    x[t] -= share * basis[b, t]
            if ray and x[dim - 1] > 0.0:  # before the key's own score is summed: a bias can be 1e8 times the rest
                x[dim - 1] = 0.0
            square, own = 0.0, 0.0
            for t in range(dim):
                square += x[t] * x[t]
                own += x[t] * rows[target, t]
            scores_of(columns, x, count, scores)
            spent += count * dim
            if target < count:
                scores[target] = np.inf
            value = np.inf
            for j in range(count):
                if scores[j] < value:
                    value, new = scores[j], j
            value -= own
            length = np.sqrt(square)
            if value > lower * length:
                lower = value / length
                for t in range(dim):
                    best[t] = x[t]
            if gap < 0.0:
                if value > tau * (1.0 + CLEAR) * query_norm(x, stretch, slope):
                    for t in range(dim):
                        best[t] = x[t]
                    return SEPARATED, m, lower, upper, spent
            elif upper - lower <= gap * lower:
                return BRACKETED, m, lower, upper, spent
            if value >= square * (1.0 - 1e-6):
                return CONVERGED, m, lower, upper, spent
        if m == capacity:
            return STALLED, m, lower, upper, spent
        for a in range(m):
            if index[a] == new:
                return STALLED, m, lower, upper, spent
        for t in range(dim):
            points[m, t] = rows[new, t] - rows[target, t] if new >= 0 else 0.0
        if new < 0:
            points[m, dim - 1] = -largest
        e[m] = 1.0 if new >= 0 else 0.0
        weight[m], index[m] = 0.0, new
        m += 1
    return STALLED, m, lower, upper, spent
