"""From which position on is a key unselectable, if a query at position t sees only keys 0..t?

The hull of the visible keys only grows, so there is one such position per key. It is found by bisection in
which every answer is used in full: weights say which keys suffice (nothing later is needed), a query says
which key is the first to beat it (nothing earlier is enough).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.exact import ExactVerdict
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates
from ln_probe.analyses.geometry.min_norm import nearest_points
from ln_probe.analyses.geometry.scores import Floats, Ints, scores_of
from ln_probe.analyses.geometry.search import INSIDE, SEPARATED
from ln_probe.analyses.geometry.verdicts import UNSELECTABLE, SparseWeights, Verdicts
from ln_probe.analyses.machinery.compiled import room


@dataclass(frozen=True)
class FirstUnselectable:
    """Positions, and what proves them, in the order of the keys."""

    at: Int64[np.ndarray, " key"]  # -1: never
    query: Float64[np.ndarray, "key dim"]  # over normalized keys: selects the key at position at-1; NaN: not needed
    weights: SparseWeights  # over keys 0..at
    source: Int64[np.ndarray, " key"]  # whose row of weights a key has
    # Positions of exact arithmetic, by key: the verdict among keys 0..at and that among 0..at-1 (None if not needed).
    exact: Mapping[int, tuple[ExactVerdict, ExactVerdict | None]] = field(default_factory=dict)


def first_unselectable(sets: KeyCoordinates, verdicts: Verdicts) -> FirstUnselectable:
    """Smallest t >= i at which key i lies in the hull of the other keys 0..t (equal keys count as one)."""
    number = len(verdicts.code)
    leaders = sets.leaders
    todo = np.flatnonzero(verdicts.code[leaders] == UNSELECTABLE)
    rows = {int(leaders[k]): verdicts.row(int(leaders[k])) for k in todo}
    query = np.full(sets.normalized.shape, np.nan)
    ordered = np.ascontiguousarray(sets.normalized[leaders].T)
    # With the first `enough` representatives visible a key is inside, with the first `few` it is not.
    enough = np.array([_seen(leaders, int(k), rows[int(leaders[k])][0]) for k in todo], np.int64)
    few = np.maximum(todo, 1)
    proved = few.copy()
    scores = room(len(leaders))
    while True:
        open_ = np.flatnonzero(enough - few > 1)
        if len(open_) == 0:
            break
        targets = todo[open_]
        counts = (enough[open_] + few[open_]) // 2
        ended, units, used = _probe(sets, targets, counts)
        for a, k in enumerate(open_):
            key = int(leaders[todo[k]])
            if ended[a] == INSIDE:
                rows[key] = leaders[used[a][0]], used[a][1]
                enough[k] = _seen(leaders, int(todo[k]), rows[key][0])
                continue
            few[k] = counts[a]
            unit = units[a]
            scores_of(ordered, unit, len(leaders), scores)
            if sets.biased and unit[-1] <= 0.0:  # give up a little of the gap to count the bias, see verdicts.py
                rest = np.delete(scores[: counts[a]], todo[k]) if todo[k] < counts[a] else scores[: counts[a]]
                unit[-1] = max(scores[todo[k]] - rest.max(), TAU) / (1e4 * max(float(np.ptp(ordered[-1])), 1.0))
                unit /= np.linalg.norm(unit)
                scores_of(ordered, unit, len(leaders), scores)
            gaps = scores[todo[k]] - scores
            gaps[todo[k]] = np.inf
            beaten = np.flatnonzero(gaps <= TAU)
            reach = int(beaten[0]) if len(beaten) else len(leaders)
            if reach >= counts[a]:  # this query selects the key until key `reach` appears
                few[k] = min(reach, int(enough[k]) - 1)
                proved[k] = few[k]
                query[key] = unit
    query[leaders[todo[proved < few]]] = np.nan
    at = np.full(number, -1)
    at[leaders[todo]] = leaders[enough - 1]
    for key, (index, _) in rows.items():  # weights may be on a copy that comes after its representative
        at[key] = max(int(at[key]), int(index.max()))
        if np.isfinite(query[key]).all():
            scores = sets.normalized[: at[key]] @ query[key]
            rivals = sets.representative[: at[key]] != key
            own = float(sets.normalized[key] @ query[key])
            if (own - scores[rivals] <= TAU).any():
                query[key] = np.nan
    at = at[sets.representative]
    at = np.where(at >= 0, np.maximum(at, np.arange(number)), -1)
    return FirstUnselectable(at, query[sets.representative], SparseWeights.of_rows(rows, number), sets.representative)


def _seen(leaders: Ints, own: int, used: Ints) -> int:
    """How many representatives are visible when a key and all those with weights are."""
    return max(own + 1, int(np.searchsorted(leaders, used.max(), side="right")))


def _probe(sets: KeyCoordinates, targets: Ints, counts: Ints) -> tuple[Ints, Floats, list[tuple[Ints, Floats]]]:
    """Is each target inside the hull of the first `counts` representatives? First in white coordinates."""
    ended = np.zeros(len(targets), np.int64)
    units = np.zeros((len(targets), sets.normalized.shape[1]))
    used: list[tuple[Ints, Floats]] = [(np.empty(0, np.int64), np.empty(0))] * len(targets)
    for careful in (False, True):
        todo = np.flatnonzero((ended != INSIDE) & (ended != SEPARATED))
        if len(todo) == 0:
            break
        rows, to_query = (sets.flat, sets.flat_query) if careful else (sets.white, sets.query)
        stretch, slope = sets.unstretched if careful else (sets.stretch, sets.slope)
        ended[todo], _, _, queries, sizes, weights, indices = nearest_points(
            rows,
            np.ascontiguousarray(rows.T),
            targets[todo],
            counts[todo],
            np.full(len(todo), -1),
            sets.lifted,
            stretch,
            slope,
            TAU,
            -1.0,
            careful,
        )
        units[todo] = to_query(queries)
        first = np.concatenate([[0], np.cumsum(sizes)])
        for a, k in enumerate(todo):
            index, weight = indices[first[a] : first[a + 1]], weights[first[a] : first[a + 1]]
            used[k] = index[index >= 0], weight[index >= 0]
    return ended, units, used
