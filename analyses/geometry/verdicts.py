"""Which keys of one set can be selected? Three stages, each leaves less to the next.

1. *White queries*: key i under the query `Σ⁻¹ k_i`. One product of all keys with all keys; every positive gap
   is a witness.
2. *Nearest point* of the hull of the others, by an active-set method, first in white coordinates (few steps),
   then, if rounding or the tolerance stood in the way, in flat ones (exact distances).
3. *Linear program*.

What none of them decides is `undecided`. All certificates are computed again in normalized coordinates before
a verdict is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int64

from ln_probe.analyses.geometry import linear_program
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates, unit_rows
from ln_probe.analyses.geometry.min_norm import BUDGET, nearest_points
from ln_probe.analyses.geometry.pool import Pool, gaps_in_blocks
from ln_probe.analyses.geometry.scores import Floats, Ints, residuals, score_gaps

# From so many keys on, it pays to solve over columns that are fetched as they are needed (pool.py): at d = 64
# and lognormal norms 0.75 → 0.52 ms per key at 1024 and 1.97 → 0.71 at 2048, but 0.34 → 0.56 at 512.
POOL = 768
# From so many on, scores of all keys under all white queries cost more than what they decide.
LARGE = 4096

# Steps per dimension that the search in white coordinates may take: most runs take two, and where it takes more it is
# because one key decides what white is (norms × lognormal(4)) and flat coordinates are better.
_STEPS = 6
UNDECIDED, SELECTABLE, UNSELECTABLE, DUPLICATE = 0, 1, 2, 3
NAMES = np.array(["undecided", "selectable", "unselectable", "duplicate"])


@dataclass(frozen=True)
class SparseWeights:
    """Convex weights over keys, a row per certified key: `index[start[i]:start[i+1]]`, `value[…]`."""

    start: Int64[np.ndarray, " key+1"]
    index: Int64[np.ndarray, " entry"]
    value: Float64[np.ndarray, " entry"]

    def row(self, i: int) -> tuple[Int64[np.ndarray, " entry"], Float64[np.ndarray, " entry"]]:
        here = slice(int(self.start[i]), int(self.start[i + 1]))
        return self.index[here], self.value[here]

    @classmethod
    def of_rows(cls, rows: dict[int, tuple[Ints, Floats]], number: int) -> SparseWeights:
        """From rows by key; the other keys have none."""
        sizes = np.zeros(number + 1, np.int64)
        for i, (index, _) in rows.items():
            sizes[i + 1] = len(index)
        order = sorted(rows)
        return cls(
            start=np.cumsum(sizes),
            index=np.concatenate([rows[i][0] for i in order]) if rows else np.empty(0, np.int64),
            value=np.concatenate([rows[i][1] for i in order]) if rows else np.empty(0),
        )


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on one set of keys, with what proves them, in the order of the keys."""

    code: Int8[np.ndarray, " key"]  # index into NAMES
    query: Float64[np.ndarray, "key dim"]  # over normalized keys, unit length; NaN where there is none
    weights: SparseWeights  # over other keys, for the representative of an unselectable key


def decide(sets: KeyCoordinates, threads: int | None = 1, only: Ints | None = None) -> Verdicts:
    """Verdict and certificate for every key of a set; `threads` are used for large ones only.

    With `only`, white queries are tried for all keys, but no more than these keys (indices) are solved for: the others
    that white queries leave stay undecided.
    """
    number, dim = sets.normalized.shape
    leaders = sets.leaders
    code = np.zeros(number, np.int8)
    query = np.full((number, dim), np.nan)
    rows: dict[int, tuple[Ints, Floats]] = {}
    columns = np.ascontiguousarray(sets.normalized.T)
    starts = np.zeros(len(leaders), np.int64)
    place = np.zeros(number, np.int64)  # of every key's representative among the leaders
    place[leaders] = np.arange(len(leaders))
    place = place[sets.representative]

    def try_queries(todo: Ints, found: Floats) -> None:
        gaps, rivals = score_gaps(columns, leaders[todo], found, sets.representative)
        if sets.biased and (found[:, -1] <= 0.0).any():
            found = _count_bias(found, gaps, columns[-1])
            gaps, rivals = score_gaps(columns, leaders[todo], found, sets.representative)
        good = gaps > TAU
        code[leaders[todo[good]]] = SELECTABLE
        query[leaders[todo[good]]] = found[good]
        starts[todo] = place[rivals]

    def try_weights(todo: Ints, sizes: Ints, weights: Floats, indices: Ints, names: Ints = leaders) -> None:
        keep = indices >= 0  # the ray is not a key
        first = np.concatenate([[0], np.cumsum(sizes)])
        sizes = np.diff(np.concatenate([[0], np.cumsum(keep)])[first])
        weights, indices = weights[keep], names[indices[keep]]
        rest = residuals(sets.normalized, leaders[todo], sizes, weights, indices, sets.biased)
        first = np.concatenate([[0], np.cumsum(sizes)])
        for k in np.flatnonzero(rest <= TAU):
            i = int(leaders[todo[k]])
            if code[i] == UNDECIDED:
                code[i] = UNSELECTABLE
                rows[i] = indices[first[k] : first[k + 1]], weights[first[k] : first[k + 1]]

    def try_pool() -> None:
        pool = Pool(sets, threads)
        known = np.flatnonzero(code[leaders] == SELECTABLE)
        if len(known):
            pool.know(known)
        else:
            pool.solve()
        keys = np.flatnonzero(pool.inside)
        sizes = np.array([len(pool.rows[int(k)][0]) for k in keys], np.int64)
        if len(keys):
            index, weight = (np.concatenate([pool.rows[int(k)][part] for k in keys]) for part in (0, 1))
            try_weights(keys, sizes, weight, index)
        todo = np.flatnonzero(np.isfinite(pool.query[:, 0]) & (code[leaders] == UNDECIDED))
        found = sets.query(pool.query[todo])
        gaps = gaps_in_blocks(sets.normalized, leaders[todo], found, sets.representative)
        if sets.biased and (found[:, -1] <= 0.0).any():
            found = _count_bias(found, gaps, columns[-1])
            gaps = gaps_in_blocks(sets.normalized, leaders[todo], found, sets.representative)
        good = gaps > TAU
        code[leaders[todo[good]]] = SELECTABLE
        query[leaders[todo[good]]] = found[good]

    def try_everyone(k: int) -> None:
        """Representative k against all keys that differ: they may lie a little further out than theirs do."""
        i = leaders[k]
        others = np.flatnonzero(sets.representative != i)
        points = sets.flat_of(np.append(others, i))
        ended = nearest_points(
            points, np.ascontiguousarray(points.T), np.array([len(others)]), np.array([len(others)]),
            np.array([-1]), sets.lifted, *sets.unstretched, TAU, -1.0, True,
        )  # fmt: skip
        try_weights(np.array([k]), *ended[4:], others)
        try_queries(np.array([k]), sets.flat_query(ended[3]))

    allowed = np.ones(len(leaders), bool)
    if only is not None:
        allowed = np.isin(leaders, sets.representative[only])
        starts[:] = -1

    def left() -> Ints:
        return np.flatnonzero((code[leaders] == UNDECIDED) & allowed)

    def try_white() -> None:
        """White queries of a large set, by matrix products."""
        found = sets.query(sets.white)
        gaps = gaps_in_blocks(sets.normalized, leaders, found, sets.representative)
        if sets.biased and (found[:, -1] <= 0.0).any():
            found = _count_bias(found, gaps, columns[-1])
            gaps = gaps_in_blocks(sets.normalized, leaders, found, sets.representative)
        good = gaps > TAU
        code[leaders[good]] = SELECTABLE
        query[leaders[good]] = found[good]

    if len(leaders) == 1:  # nothing to compete with
        code[:] = SELECTABLE
        query[:] = 0.0
    else:
        if only is not None:
            try_white()
        elif len(leaders) <= LARGE:
            try_queries(left(), sets.query(sets.white))
        if only is None and len(leaders) > POOL and len(left()):
            try_pool()
        size, dim = sets.white.shape
        quick = float(_STEPS * dim * dim * (size + 6 * dim))
        for careful in (False, True):
            todo = left()
            if len(todo) == 0:
                break
            rows_of, to_query = (sets.flat, sets.flat_query) if careful else (sets.white, sets.query)
            stretch, slope = sets.unstretched if careful else (sets.stretch, sets.slope)
            _, _, _, queries, sizes, weights, indices = nearest_points(
                rows_of, np.ascontiguousarray(rows_of.T), todo, np.full(len(todo), len(leaders)),
                starts[todo], sets.lifted, stretch, slope, TAU, -1.0, careful, None,
                BUDGET if careful else min(BUDGET, quick),
            )  # fmt: skip
            try_weights(todo, sizes, weights, indices)
            try_queries(todo, to_query(queries))
        if len(leaders) <= LARGE and (sets.normalized != sets.normalized[sets.representative]).any():
            for k in left():
                try_everyone(int(k))
        # A program over a whole pool would take minutes: what is left of one stays undecided.
        for k in left() if len(leaders) <= LARGE else ():
            others = np.delete(np.arange(len(leaders)), k)
            found, dual = linear_program.separate(sets.white[others], sets.white[k], sets.lifted)
            one = np.array([k])
            used = np.flatnonzero(dual)
            try_weights(one, np.array([len(used)]), dual[used], others[used])
            try_queries(one, sets.query(found[None]))
    code[:] = code[sets.representative]
    query[:] = query[sets.representative]
    many = np.bincount(sets.representative, minlength=number)[sets.representative] > 1
    code[many & (code == SELECTABLE)] = DUPLICATE
    return Verdicts(code=code, query=query, weights=SparseWeights.of_rows(rows, number))


def _count_bias(queries: Floats, gaps: Floats, bias: Floats) -> Floats:
    """Queries that give the bias a positive weight, as a query that is added to biased scores must.

    A query without one (it wins at any bias, if it is long enough) gives up a ten-thousandth of its score gap
    for it: the solvers stay further from tau than that.
    """
    without: Bool[np.ndarray, " query"] = queries[:, -1] <= 0.0
    found = queries.copy()
    found[without, -1] = np.maximum(gaps[without], TAU) / (1e4 * max(float(np.ptp(bias)), 1.0))
    found[without] = unit_rows(found[without])
    return found
