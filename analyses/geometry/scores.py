"""Products of queries and keys, and what certificates are made of: score gaps and residuals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ln_probe.analyses.machinery.compiled import compiled, room

# From so many multiply-adds on a matrix product is faster than a loop over queries (its overhead is that of some 1e5),
# at least so many queries at a time, and more while a block of scores stays below 16 MB.
_PRODUCT, _QUERIES, _BLOCK = 1_000_000, 64, 2_000_000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def scores_of(columns: Floats, query: Floats, count: int, out: Floats) -> None:
    """`out[j] = query · z_j` for the first `count` keys; `columns` holds the keys as columns, "dim key"."""
    dim = query.shape[0]
    for j in range(count):
        out[j] = 0.0
    t = 0
    while t + 4 <= dim:
        a, b, c, d = query[t], query[t + 1], query[t + 2], query[t + 3]
        for j in range(count):
            out[j] += a * columns[t, j] + b * columns[t + 1, j] + c * columns[t + 2, j] + d * columns[t + 3, j]
        t += 4
    while t < dim:
        a = query[t]
        for j in range(count):
            out[j] += a * columns[t, j]
        t += 1


@compiled
def query_norm(query: Floats, stretch: Floats, slope: Floats) -> float:
    """Length of a query in the keys' normalized coordinates; see `KeyCoordinates.stretch`."""
    flat = stretch.shape[0]
    total = 0.0
    if query.shape[0] == flat:
        for t in range(flat):
            total += float(query[t] / stretch[t]) ** 2
    else:
        lift = query[flat] / slope[flat]
        for t in range(flat):
            total += ((query[t] - lift * slope[t]) / stretch[t]) ** 2
        total += float(lift * lift)
    return float(np.sqrt(total))


@compiled
def residual_norm(x: Floats, stretch: Floats, slope: Floats) -> float:
    """Length of a difference of keys in the keys' normalized coordinates."""
    flat = stretch.shape[0]
    total = 0.0
    for t in range(flat):
        total += float(x[t] * stretch[t]) ** 2
    if x.shape[0] > flat:
        lift = x[flat] * slope[flat]
        for t in range(flat):
            lift += slope[t] * x[t]
        total += float(lift * lift)
    return float(np.sqrt(total))


def score_gaps(columns: Floats, targets: Ints, queries: Floats, group: Ints) -> tuple[Floats, Ints]:
    """Score of each target under its query minus the best score of a key of another group, and that key.

    Args:
        columns: all keys, "dim key".
        queries: a query per target, "target dim".
        group: representative of every key, " key".
    """
    if len(targets) * columns.size > _PRODUCT:
        return _gaps_by_product(columns, targets, queries, group)
    return _score_gaps(columns, targets, queries, group)


def _gaps_by_product(columns: Floats, targets: Ints, queries: Floats, group: Ints) -> tuple[Floats, Ints]:
    members = np.bincount(group, minlength=len(group))
    gaps, rivals = np.empty(len(targets)), np.empty(len(targets), np.int64)
    step = max(_QUERIES, _BLOCK // len(group))
    for first in range(0, len(targets), step):
        block = slice(first, first + step)
        some = targets[block]
        scores = queries[block] @ columns
        here = np.arange(len(some))
        own = scores[here, some]
        scores[here, some] = -np.inf
        for k in np.flatnonzero(members[group[some]] > 1):
            scores[k, group == group[some[k]]] = -np.inf
        rivals[block] = scores.argmax(axis=1)
        gaps[block] = own - scores[here, rivals[block]]
    rivals[~np.isfinite(gaps)] = -1  # nothing to compete with
    return gaps, rivals


@compiled
def _score_gaps(columns: Floats, targets: Ints, queries: Floats, group: Ints) -> tuple[Floats, Ints]:
    number, total = targets.shape[0], columns.shape[1]
    gaps = room(number)
    rivals = np.empty(number, np.int64)
    scores = room(total)
    for k in range(number):
        i = targets[k]
        scores_of(columns, queries[k], total, scores)
        own = scores[i]
        largest, rival = -np.inf, -1
        for j in range(total):
            if scores[j] > largest and group[j] != group[i]:
                largest, rival = scores[j], j
        gaps[k], rivals[k] = own - largest, rival
    return gaps, rivals


@compiled
def residuals(rows: Floats, targets: Ints, sizes: Ints, weights: Floats, indices: Ints, biased: bool) -> Floats:
    """How far each target is from its convex combination; if `biased`, a surplus of bias does not count."""
    number, dim = targets.shape[0], rows.shape[1]
    found = room(number)
    rest = room(dim)
    used = 0
    for k in range(number):
        for t in range(dim):
            rest[t] = -rows[targets[k], t]
        for a in range(used, used + sizes[k]):
            for t in range(dim):
                rest[t] += weights[a] * rows[indices[a], t]
        used += sizes[k]
        if biased:
            rest[dim - 1] = min(rest[dim - 1], 0.0)
        total = 0.0
        for t in range(dim):
            total += rest[t] * rest[t]
        found[k] = np.sqrt(total)
    return found
