"""Which keys of one set can be selected? Three stages, each leaves less to the next.

1. *White queries*: key i under the query `Σ⁻¹ k_i`. One product of all keys with all keys; every positive gap
   is a witness.
2. *Nearest point* of the hull of the others, by an active-set method, first in white coordinates (few steps),
   then, if rounding or the tolerance stood in the way, in flat ones (exact distances).
3. *Linear program*.

What none of them decides is `undecided`. All certificates are computed again in normalized coordinates before they
count, and what counts here is proved once more, key by key, before it is given out (`proofs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int64

from ln_probe.analyses.geometry import linear_program
from ln_probe.analyses.geometry.certificates import Rows
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates, unit_rows
from ln_probe.analyses.geometry.min_norm import BUDGET, nearest_points
from ln_probe.analyses.geometry.pool import Pool
from ln_probe.analyses.geometry.scores import Floats, Ints, residuals, score_gaps

# From so many keys on, it pays to solve over columns that are fetched as they are needed (pool.py): at d = 64
# and lognormal norms 0.75 → 0.52 ms per key at 1024 and 1.97 → 0.71 at 2048, but 0.34 → 0.56 at 512.
POOL = 768
# From so many on, what is left costs too much to be sought by linear programs and one by one.
LARGE = 4096
# Multiply-adds (scores of all keys under all white queries) up to which white queries are tried on every key of a large
# set: about a second, and on a sphere they decide nearly all (20,000 LayerNorm'd keys, d = 8).
WHITE = 1e10

# White coordinates make much of a direction in which keys spread less than this than in another: mostly rounding.
THIN = 1e5

# Steps per dimension that the search in white coordinates may take: most runs take two, and where it takes more it is
# because one key decides what white is (norms × lognormal(4)) and flat coordinates are better.
_STEPS = 6
UNDECIDED, SELECTABLE, UNSELECTABLE, DUPLICATE = 0, 1, 2, 3

# Of targets and a unit query for each: the proven score gaps, and the key that comes nearest.
Prover = Callable[[Ints, Floats], tuple[Floats, Ints]]
NAMES = np.array(["undecided", "selectable", "unselectable", "duplicate"])


@dataclass(frozen=True)
class SparseWeights:
    """Convex weights over keys, a row per certified key: `index[start[i]:start[i+1]]`, `value[…]`."""

    start: Int64[np.ndarray, " _"]
    index: Int64[np.ndarray, " entry"]
    value: Float64[np.ndarray, " entry"]

    def row(self, i: int) -> tuple[Int64[np.ndarray, " entry"], Float64[np.ndarray, " entry"]]:
        here = slice(int(self.start[i]), int(self.start[i + 1]))
        return self.index[here], self.value[here]

    def rows(self, keys: Ints) -> Rows:
        """Rows of some keys, one after the other."""
        return Rows(self.start, self.index, self.value).some(keys)

    @classmethod
    def of(cls, rows: Rows) -> SparseWeights:
        """The same, a row for every key."""
        return cls(rows.start, rows.index, rows.value)

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
    """Verdicts on one set of keys, with what is to prove them, in the order of the keys."""

    code: Int8[np.ndarray, " key"]  # index into NAMES
    query: Float64[np.ndarray, "key dim"]  # over normalized keys, unit length; NaN where there is none
    weights: SparseWeights  # over other keys
    source: Int64[np.ndarray, " key"]  # whose row of weights a key has: its own, or its representative's
    gap: Float64[np.ndarray, " key"]  # proven of its query, where it was proved already; else NaN

    def row(self, i: int) -> tuple[Ints, Floats]:
        """Weights of the others that reproduce key i."""
        return self.weights.row(int(self.source[i]))


def decide(
    sets: KeyCoordinates,
    threads: int | None = 1,
    only: Ints | None = None,
    budget: float = BUDGET,
    prove: Prover | None = None,
    *,
    others: bool = True,
) -> Verdicts:
    """Verdict and certificate for every key of a set; `threads` are used for large ones only.

    Keys within tau of each other are solved for once, as one: what is found counts for all of them if the checker finds
    that it proves it of each (`proofs`).

    Args:
        only: white queries are tried for all keys, but no more than these keys (indices) are solved for: the others
        that
            white queries leave stay undecided.
        budget: multiply-adds per key, after which it stays undecided.
        prove: asked instead of looking at queries here, if it is to be asked anyway: the proven gap of each.
        others: with `only`, whether white queries are tried for the other keys too (else they stay undecided).
    """
    work = _Deciding(sets, threads, budget, prove)
    if len(sets.leaders) == 1:  # nothing to compete with
        work.code[:] = SELECTABLE
        work.query[:] = 0.0
        return work.verdicts()
    if only is None:
        if len(sets.leaders) <= LARGE or len(sets.leaders) ** 2 * sets.normalized.shape[1] <= WHITE:
            work.white_queries()
            thin = len(sets.stretch) > 0 and sets.stretch.max() > THIN * sets.stretch.min()
            if thin or len(sets.leaders) > POOL:
                work.own_queries()
        if len(sets.leaders) > POOL and len(work.left()):
            work.pool()
    else:
        allowed = np.isin(sets.leaders, sets.representative[only])
        if others:
            work.white_queries()
            work.allowed = allowed
        else:
            work.allowed = allowed
            work.white_queries()
        work.starts[:] = -1
    for careful in (False, True):
        work.nearest_points(careful)
    if (
        len(sets.leaders) <= LARGE
    ):  # a program over a whole pool would take minutes: what is left of one stays undecided
        work.programs()
    return work.verdicts()


class _Deciding:
    """What is known so far about the representatives of one set; each method is a stage that decides some of them."""

    def __init__(self, sets: KeyCoordinates, threads: int | None, budget: float, prove: Prover | None = None) -> None:
        self.sets, self.threads, self.budget, self.prove = sets, threads, budget, prove
        self.gap = np.full(len(sets.normalized), np.nan)
        number, dim = sets.normalized.shape
        self.columns = np.ascontiguousarray(sets.normalized.T)
        self.code = np.zeros(number, np.int8)
        self.query = np.full((number, dim), np.nan)
        self.pieces: list[tuple[Ints, Ints, Ints, Floats]] = []  # of rows of weights, see Rows.gathered
        self.allowed = np.ones(len(sets.leaders), bool)
        self.starts = np.full(len(sets.leaders), -1, np.int64)  # a good first point of each active set
        place = np.zeros(number, np.int64)
        place[sets.leaders] = np.arange(len(sets.leaders))
        self.place = place[sets.representative]  # of every key's representative among the leaders

    def left(self) -> Ints:
        """Places (among the leaders) of what is undecided."""
        return np.flatnonzero((self.code[self.sets.leaders] == UNDECIDED) & self.allowed)

    def verdicts(self) -> Verdicts:
        """What has been found, for all keys."""
        group = self.sets.representative
        code, query = self.code[group], self.query[group]
        many = np.bincount(group, minlength=len(group))[group] > 1
        code[many & (code == SELECTABLE)] = DUPLICATE
        return Verdicts(code, query, SparseWeights.of(Rows.gathered(len(group), self.pieces)), group, self.gap)

    def white_queries(self) -> None:
        """Every key under the query that points at it where keys are white."""
        todo = self.left()
        self._try_queries(todo, self.sets.query(self.sets.white[todo]))

    def own_queries(self) -> None:
        """Every key left under itself: on a sphere it wins, where white queries look along rounding noise."""
        todo = self.left()
        if len(todo) and not self.sets.biased:
            self._try_queries(todo, unit_rows(self.sets.normalized[self.sets.leaders[todo]]))

    def pool(self) -> None:
        """Columns that are fetched as they are needed."""
        pool = Pool(self.sets, self.threads, self.budget)
        known = np.flatnonzero(self.code[self.sets.leaders] == SELECTABLE)
        if len(known):
            pool.know(known)
        else:
            pool.solve()
        keys = np.flatnonzero(pool.inside)
        sizes = np.array([len(pool.rows[int(k)][0]) for k in keys], np.int64)
        if len(keys):
            index, weight = (np.concatenate([pool.rows[int(k)][part] for k in keys]) for part in (0, 1))
            self._try_weights(keys, sizes, weight, index)
        todo = np.flatnonzero(np.isfinite(pool.query[:, 0]) & (self.code[self.sets.leaders] == UNDECIDED))
        self._try_queries(todo, self.sets.query(pool.query[todo]))

    def nearest_points(self, careful: bool) -> None:
        """The active-set method, in white coordinates or carefully in flat ones."""
        sets, todo = self.sets, self.left()
        if len(todo) == 0:
            return
        points, to_query = (sets.flat, sets.flat_query) if careful else (sets.white, sets.query)
        stretch, slope = sets.unstretched if careful else (sets.stretch, sets.slope)
        size, dim = sets.white.shape
        _, _, _, queries, sizes, weights, indices = nearest_points(
            points,
            np.ascontiguousarray(points.T),
            todo,
            np.full(len(todo), len(sets.leaders)),
            self.starts[todo],
            sets.lifted,
            stretch,
            slope,
            TAU,
            -1.0,
            careful,
            None,
            self.budget if careful else min(self.budget, float(_STEPS * dim * dim * (size + 6 * dim))),
        )
        self._try_weights(todo, sizes, weights, indices)
        self._try_queries(todo, to_query(queries))

    def programs(self) -> None:
        """A linear program for each key."""
        sets = self.sets
        for k in self.left():
            others = np.delete(np.arange(len(sets.leaders)), k)
            found, dual = linear_program.separate(sets.white[others], sets.white[k], sets.lifted, self.budget)
            used = np.flatnonzero(dual)
            self._try_weights(np.array([k]), np.array([len(used)]), dual[used], others[used])
            self._try_queries(np.array([k]), sets.query(found[None]))

    def _try_queries(self, todo: Ints, found: Floats) -> None:
        sets = self.sets
        targets = sets.leaders[todo]
        if self.prove is not None and len(sets.leaders) == len(sets.normalized) and not sets.biased:
            gaps, rivals = self.prove(targets, found)
            self.gap[targets] = gaps
            self._take(todo, found, gaps, rivals)
            return
        gaps, rivals = score_gaps(self.columns, targets, found, sets.representative)
        if sets.biased and (found[:, -1] <= 0.0).any():
            found = count_bias(found, gaps, sets.normalized[:, -1])
            gaps, rivals = score_gaps(self.columns, targets, found, sets.representative)
        self._take(todo, found, gaps, rivals)

    def _take(self, todo: Ints, found: Floats, gaps: Floats, rivals: Ints) -> None:
        """Queries with a gap above TAU select their keys; the rival that came nearest is where to start from else."""
        targets = self.sets.leaders[todo]
        good = gaps > TAU
        self.code[targets[good]] = SELECTABLE
        self.query[targets[good]] = found[good]
        self.starts[todo] = np.where(rivals >= 0, self.place[rivals], -1)

    def _try_weights(self, todo: Ints, sizes: Ints, weights: Floats, indices: Ints) -> None:
        leaders = self.sets.leaders
        keep = indices >= 0  # the ray is not a key
        if not keep.all():
            sizes = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[keep], minlength=len(sizes))
            weights, indices = weights[keep], indices[keep]
        indices = leaders[indices]
        rest = residuals(self.sets.normalized, leaders[todo], sizes, weights, indices, self.sets.biased)
        good = (rest <= TAU) & (self.code[leaders[todo]] == UNDECIDED) & (sizes > 0)
        if good.any():
            keys, entries = leaders[todo[good]], np.repeat(good, sizes)
            self.code[keys] = UNSELECTABLE
            self.pieces.append((keys, sizes[good], indices[entries], weights[entries]))


def count_bias(queries: Floats, gaps: Floats, bias: Floats) -> Floats:
    """Queries that give the bias a positive weight, as a query that is added to biased scores must.

    A query without one (it wins at any bias, if it is long enough) gives up a ten-thousandth of its score gap
    for it: the solvers stay further from tau than that.
    """
    without: Bool[np.ndarray, " query"] = queries[:, -1] <= 0.0
    found = queries.copy()
    found[without, -1] = np.maximum(gaps[without], TAU) / (1e4 * max(float(np.ptp(bias)), 1.0))
    found[without] = unit_rows(found[without])
    return found
