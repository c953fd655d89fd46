"""Which keys of one set can be selected? Each stage decides some keys and leaves fewer to the next.

1. *White queries*: key i under the query `Σ⁻¹ k_i`. Every positive gap is a witness.
2. *Nearest point* of the hull of the others, by an active-set method in white coordinates (few steps).
3. *Alone*: where rounding or the tolerance left a key open, first all such keys in normalized coordinates, then each
   against every key that differs from it, carefully, then by a linear program (HiGHS), which gives query and weights.

Certificates are computed again in normalized coordinates before they count, and proved once more before they are
returned (`prove`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int8, Int64
from scipy.optimize import linprog  # type: ignore[import-untyped]

from ln_probe.analyses.geometry.checker import SLACK, Rows
from ln_probe.analyses.geometry.coordinates import (
    TAU,
    Floats,
    Ints,
    KeyCoordinates,
    count_bias,
    residuals,
    score_gaps,
    unit_rows,
)
from ln_probe.analyses.geometry.wolfe import BUDGET, Nearest, nearest_points

# Seconds. HiGHS has been seen to cycle without end on 512 keys with lognormal norms. The limit on iterations comes
# first on any machine that is not stuck, so verdicts do not depend on how busy it is.
TIME_LIMIT = 20.0
_PASSES = 4  # over all numbers of the program, per iteration: pricing, two triangular solves, part of a factorization


def separate(
    others: Float64[np.ndarray, "other dim"], key: Float64[np.ndarray, " dim"], ray: bool, budget: float = BUDGET
) -> tuple[Float64[np.ndarray, " dim"], Float64[np.ndarray, " other"]]:
    """The query in the unit box with the largest score gap, and convex weights from its dual.

    Either may be all zero if the solver fails: the caller checks both.

    Args:
        others, key: in well-scaled coordinates.
        ray: whether the query's last coordinate must not be negative (keys with a bias).
        budget: multiply-adds, which limit the iterations.
    """
    number, dim = others.shape
    difference = others - key
    size = max(float(np.abs(difference).max()), 1e-300)
    box = [(-1.0, 1.0)] * dim
    if ray:
        box[-1] = (0.0, 1.0)
    solved = linprog(
        np.append(np.zeros(dim), -1.0),
        A_ub=np.column_stack([difference / size, np.ones(number)]),
        b_ub=np.zeros(number),
        bounds=[*box, (0.0, None)],
        method="highs",
        options={
            "primal_feasibility_tolerance": 1e-10,
            "dual_feasibility_tolerance": 1e-10,
            "time_limit": TIME_LIMIT,
            "maxiter": int(min(max(budget / (_PASSES * number * dim), 1.0), 1e9)),
        },
    )
    if solved.x is None:
        return np.zeros(dim), np.zeros(number)
    weights = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    total = float(weights.sum())
    return np.asarray(solved.x[:dim]), weights / total if total > 0.0 else weights


# Above this number of keys, linear programs for the undecided keys cost too much.
LARGE = 4096
# From so many keys on the query along each key is tried, too.
MANY = 768
# Multiply-adds (scores of all keys under all white queries) up to which white queries are tried on every key of a large
# set: about a second, and on a sphere they decide nearly all (20,000 LayerNorm'd keys, d = 8).
WHITE = 1e10

# White coordinates make much of a direction in which keys spread less than this than in another: mostly rounding.
THIN = 1e5

# Steps per dimension that the search in white coordinates may take: most runs take two, and where it takes more it is
# because one key decides what white is (norms × lognormal(4)) and normalized coordinates are better.
_STEPS = 6
UNDECIDED, SELECTABLE, UNSELECTABLE, DUPLICATE = 0, 1, 2, 3

# Of targets and a unit query for each: the proven score gaps, and the key that comes nearest.
Prover = Callable[[Ints, Floats], tuple[Floats, Ints]]
NAMES = np.array(["undecided", "selectable", "unselectable", "duplicate"])


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on one set of keys, with what is to prove them, in the order of the keys."""

    code: Int8[np.ndarray, " key"]  # index into NAMES
    query: Float64[np.ndarray, "key dim"]  # over normalized keys, unit length; NaN where there is none
    weights: Rows  # over other keys
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
) -> Verdicts:
    """Verdict and certificate for every key of a set; `threads` are used for large ones only.

    Keys within tau of each other are solved for once, as one: what is found counts for all of them if the checker finds
    that it proves it of each (`prove`).

    Args:
        only: indices of the keys to decide; the others stay undecided. None: all.
        budget: multiply-adds per key, after which it stays undecided.
        prove: asked instead of looking at queries here, if it is to be asked anyway: the proven gap of each.
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
            if thin or len(sets.leaders) > MANY:
                work.own_queries()
    else:
        work.allowed = np.isin(sets.leaders, sets.representative[only])
        work.white_queries()
        work.starts[:] = -1
    work.nearest_points()
    work.alone()
    return work.verdicts()


class _Deciding:
    """The state of the decision on one set; each method is a stage that decides some of its leaders."""

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
        return Verdicts(code, query, Rows.gathered(len(group), self.pieces), group, self.gap)

    def white_queries(self) -> None:
        """Every key under the query that points at it where keys are white."""
        todo = self.left()
        self._try_queries(todo, self.sets.query(self.sets.white[todo]))

    def own_queries(self) -> None:
        """Every key left under itself: on a sphere it wins, where white queries look along rounding noise."""
        todo = self.left()
        if len(todo) and not self.sets.biased:
            self._try_queries(todo, unit_rows(self.sets.normalized[self.sets.leaders[todo]]))

    def nearest_points(self) -> None:
        """The active-set method in white coordinates."""
        todo, (size, dim) = self.left(), self.sets.white.shape
        if len(todo):
            budget = min(self.budget, float(_STEPS * dim * dim * (size + 6 * dim)))
            nearest, queries = nearest_leaders(self.sets, todo, starts=self.starts[todo], budget=budget)
            self._try_weights(todo, nearest.weights)
            self._try_queries(todo, queries)

    def alone(self) -> None:
        """What rounding or the tolerance left open: together, in normalized coordinates, then alone (see `alone`)."""
        if not len(todo := self.left()):
            return
        sets, starts = self.sets, self.starts[todo]
        rows = np.ascontiguousarray(sets.normalized[sets.leaders])
        near = nearest_points(rows, todo, tau=TAU, starts=starts, ray=sets.biased, careful=True, budget=self.budget)
        self._try_weights(todo, near.weights)
        self._try_queries(todo, unit_rows(near.query))
        for k in self.left():
            for query, index, value in alone(self.sets, int(self.sets.leaders[k]), self.budget):
                self._try_weights(np.array([k]), Rows(np.array([0, len(index)]), index, value), leaders=False)
                self._try_queries(np.array([k]), query[None])
                if self.code[self.sets.leaders[k]] != UNDECIDED:
                    break

    def _try_queries(self, todo: Ints, found: Floats) -> None:
        """Queries with a gap above TAU select their keys; the rival that came nearest is where to start from else."""
        sets = self.sets
        targets = sets.leaders[todo]
        if self.prove is not None and len(sets.leaders) == len(sets.normalized) and not sets.biased:
            gaps, rivals = self.prove(targets, found)
            self.gap[targets] = gaps
        else:
            gaps, rivals = score_gaps(self.columns, targets, found, sets.representative)
            if sets.biased and (found[:, -1] <= 0.0).any():
                found = count_bias(found, gaps, sets.normalized[:, -1])
                gaps, rivals = score_gaps(self.columns, targets, found, sets.representative)
        good = gaps > TAU
        self.code[targets[good]] = SELECTABLE
        self.query[targets[good]] = found[good]
        self.starts[todo] = np.where(rivals >= 0, self.place[rivals], -1)

    def _try_weights(self, todo: Ints, weights: Rows, leaders: bool = True) -> None:
        """Weights (over the leaders, or over all keys) that reproduce keys within TAU decide them."""
        keys, sizes = self.sets.leaders[todo], np.diff(weights.start)
        index, value = self.sets.leaders[weights.index] if leaders else weights.index, weights.value
        rest = residuals(self.sets.normalized, keys, sizes, value, index, self.sets.biased)
        good = (rest <= TAU) & (self.code[keys] == UNDECIDED) & (sizes > 0)
        entries = np.repeat(good, sizes)
        self.code[keys[good]] = UNSELECTABLE
        self.pieces.append((keys[good], sizes[good], index[entries], value[entries]))


def nearest_leaders(
    sets: KeyCoordinates,
    targets: Ints,
    counts: Ints | None = None,
    starts: Ints | None = None,
    budget: float = BUDGET,
) -> tuple[Nearest, Floats]:
    """The nearest points of the hull of the other leaders in white coordinates, and their queries over normalized keys.

    Arguments as for `nearest_points`.
    """
    nearest = nearest_points(
        sets.white,
        targets,
        tau=TAU,
        counts=counts,
        starts=starts,
        ray=sets.lifted,
        stretch=sets.stretch,
        slope=sets.slope,
        budget=budget,
    )
    return nearest, sets.query(nearest.query)


def alone(sets: KeyCoordinates, i: int, budget: float) -> Iterator[tuple[Floats, Ints, Floats]]:
    """Queries and weights, of two solvers, for key i against every key that differs."""
    apart = np.linalg.norm(sets.normalized - sets.normalized[i], axis=1)
    others = np.flatnonzero(apart > TAU * (1 + SLACK))
    if len(others) == 0:
        yield np.zeros(sets.normalized.shape[1]), np.empty(0, np.int64), np.empty(0)
        return

    def asked(queries: Floats) -> Floats:
        queries = unit_rows(queries)
        if sets.biased:
            scores = sets.normalized @ queries[0]
            queries = count_bias(queries, scores[i] - scores[others].max(keepdims=True), sets.normalized[:, -1])
        return np.asarray(queries[0])

    # In normalized coordinates: the span that representatives share may lack a direction in which this key differs.
    points = np.ascontiguousarray(sets.normalized[np.append(others, i)] - sets.normalized[i])
    many = np.array([len(others)])
    nearest = nearest_points(points, many, tau=TAU, counts=many, ray=sets.biased, careful=True, budget=budget)
    yield asked(nearest.query), others[nearest.weights.index], nearest.weights.value
    if len(others) <= LARGE:  # a program over a whole pool would take minutes
        query, dual = separate(points[:-1], points[-1], sets.biased, budget)
        used = np.flatnonzero(dual)
        yield asked(query[None]), others[used], dual[used]
