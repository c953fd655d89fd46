"""Affinely independent points and the inverse of their bordered Gram matrix, one in and one out at a time, compiled.

Wolfe's methods (`wolfe`, `margins`) walk over active sets: a few points `P` of a hull with convex weights. The weights
of the point of their affine hull nearest to the origin are `G⁻¹ e`, made to sum to one, where `G = c·eeᵀ + P Pᵀ` and
`e` is 1 for a point and 0 for a direction (the ray of keys with a bias). The inverse and that solution are updated in
O(m²) when a point comes or goes, and rebuilt when they have drifted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ln_probe.analyses.geometry.compiled import compiled, room, table
from ln_probe.analyses.geometry.coordinates import Floats, Ints

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
    # (`wolfe.unscale` makes them weights of the keys).
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
