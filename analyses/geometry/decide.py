"""Which keys of one set can be selected? Each stage decides some keys and leaves fewer to the next.

1. *White queries*: key i under the query `Σ⁻¹ k_i`. Every positive gap is a witness.
2. *Nearest point* of the hull of the others, by an active-set method in white coordinates (few steps).
3. *Alone*: where rounding or the tolerance left a key open, first all such keys in normalized coordinates, then each
   against every key that differs from it, carefully, then by a linear program (HiGHS), which gives query and weights.

Certificates are computed again in normalized coordinates before they count, and proved once more before they are
returned (`prove`). Large sets go through `Pool` instead of step 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int8, Int64
from scipy.optimize import linprog  # type: ignore[import-untyped]

from ln_probe.analyses.geometry.active_set import Search, active_set
from ln_probe.analyses.geometry.checker import SLACK, Rows
from ln_probe.analyses.geometry.compiled import compiled, in_threads, room, table
from ln_probe.analyses.geometry.coordinates import (
    TAU,
    Floats,
    Ints,
    KeyCoordinates,
    count_bias,
    query_norm,
    residuals,
    score_gaps,
    scores_of,
    unit_rows,
)
from ln_probe.analyses.geometry.wolfe import BUDGET, Nearest, lowest, nearest_point, nearest_points, scale_of, unscale

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


# The longest keys, which decide most of the others. 512 of them contain the most keys per second at d = 64.
_LONGEST = 512
# New columns per key and round of step 3, and how well a key is solved over its columns before more are
# fetched.
_COLUMNS, _COLUMN_GAP = 32, 0.3
# Columns to fetch at most, beyond what an active set can hold.
_MOST = 1024
_KEYS_PER_TASK = 256
_ROUNDS = 200


@compiled
def _by_columns(
    rows: Floats,
    columns: Floats,
    keys: Floats,
    own: Ints,
    ray: bool,
    stretch: Floats,
    slope: Floats,
    near: float,
    budget: float,
) -> tuple[Ints, Floats, Ints, Floats, Ints]:
    """`nearest_point` of each key among many generators, by fetching columns as they are needed.

    Args:
        rows, columns: the generators, "generator dim" and "dim generator".
        keys: the targets, "key dim"; `own` is the place of each among the generators, or -1.
        near: distance at which a key counts as inside.
        budget: multiply-adds per key.

    Returns:
        1 if inside (weights given) or 0 if separated from all generators (query given) or -1 if neither,
        queries, sizes of the active sets, their weights and indices.
    """
    number, dim = keys.shape
    generators = rows.shape[0]
    capacity = dim + 2
    places = min(capacity + _MOST, generators)
    state = np.full(number, -1)
    queries = np.zeros((number, dim))
    sizes = np.zeros(number, np.int64)
    weights, indices = room(number * capacity), np.empty(number * capacity, np.int64)
    active = active_set(capacity, dim)
    x, best = room(dim), room(dim)
    scores, few = room(generators), room(places + 1)
    fetched, chosen = np.empty(_COLUMNS, np.int64), np.empty(places + 1, np.int64)
    here, there = table(places + 1, dim), table(dim, places + 1)
    squares, scale, chosen_scale = room(generators), room(generators), room(places + 1)
    for j in range(generators):
        squares[j] = np.sum(rows[j] * rows[j])
    used = 0
    for k in range(number):
        many, spent = 0, 0.0
        for t in range(dim):
            x[t] = -keys[k, t]
        for attempt in range(_ROUNDS):
            scores_of(columns, x, generators, scores)
            spent += generators * dim
            if attempt == 0:
                square = np.sum(x * x)
                for j in range(generators):
                    scale[j] = scale_of(squares[j] + 2.0 * scores[j] + square, squares[j] + square)
            if own[k] >= 0:
                scores[own[k]] = np.inf
            level = np.sum(x * keys[k])
            if attempt > 0 and scores.min() - level > TAU * (1.0 + 1e-3) * query_norm(x, stretch, slope):
                state[k] = 0
                for t in range(dim):
                    queries[k, t] = -x[t]
                break
            if spent > budget:
                break
            for j in range(generators):
                scores[j] = (scores[j] - level) * scale[j]
            for a in range(many):
                scores[chosen[a]] = np.inf
            before = many
            for new in fetched[: lowest(scores, generators, fetched)]:
                if many >= places or scores[new] == np.inf:
                    break
                chosen[many], chosen_scale[many] = new, scale[new]
                for t in range(dim):
                    here[many, t] = rows[new, t]
                    there[t, many] = rows[new, t]
                many += 1
            if many == before:
                break
            for t in range(dim):
                here[many, t] = keys[k, t]
            best[:] = 0.0
            search = Search(here, there, many, many, ray, stretch, slope, near, _COLUMN_GAP, chosen_scale)
            start = int(np.argmax(chosen_scale[:many]))  # the closest
            _, m, lower, upper, used_up = nearest_point(search, start, -1, active, x, best, few, budget - spent)
            spent += used_up
            if upper <= near:
                state[k] = 1
                sizes[k] = m
                unscale(active, chosen_scale, m)
                for a in range(m):
                    weights[used + a] = active.weight[a]
                    indices[used + a] = chosen[active.members[a]] if active.members[a] >= 0 else -1
                used += m
                break
            if not lower > 0.0:
                break
            for t in range(dim):
                x[t] = best[t]
    return state, queries, sizes, weights[:used].copy(), indices[:used].copy()


class Pool:
    """Candidates for verdicts on a large set (10⁴ to 10⁵ keys, in bounded memory); `decide` checks them.

    Only vertices are needed to reproduce an interior key, and a few hundred of them at a time (Dulá & Helgason 1996,
    European Journal of Operational Research 92, 352-367):

    1. The white query of every key is tried on the longest keys, then those that win there on all.
    2. Every key left is looked for in the hull of the longest vertices, which holds most interior keys.
    3. The rest are solved against the generators known so far, column by column. A query that separates a key from them
       is tried on all undecided keys, and the winner is a new generator. Scores are computed in blocks.
    """

    def __init__(self, sets: KeyCoordinates, threads: int | None = None, budget: float = BUDGET) -> None:
        self.sets, self.threads, self.budget = sets, threads, budget
        self.white = sets.white
        number = len(self.white)
        self.inside = np.zeros(number, bool)
        self.query = np.full(self.white.shape, np.nan)  # over white keys, of those that may be selectable
        self.pieces: list[tuple[Ints, Ints, Ints, Floats]] = []  # of weights over the leaders, see Rows.gathered
        self.generator = np.zeros(number, bool)
        # Within this of a key in white coordinates is within TAU of it in normalized ones.
        largest = float(max(sets.stretch.max(), 1e-300))
        if sets.lifted:
            largest = float(np.sqrt(largest**2 + np.sum(sets.slope**2)))
        self.near = 0.5 * TAU / largest

    def solve(self, vertices: Ints) -> None:
        """Find a query or weights for every key.

        Args:
            vertices: keys that white queries were found to select; if there are none, white queries are tried here.
        """
        length = np.einsum("ij,ij->i", self.white, self.white)
        self.generator[vertices] = True
        self.query[vertices] = self.white[vertices]
        if len(vertices) == 0:
            self._try_white_queries(length)
        vertices = np.flatnonzero(self.generator)
        vertices = vertices[np.argsort(-length[vertices], kind="stable")[: 2 * _LONGEST]]
        if len(vertices) > self.white.shape[1]:
            self._in_hull_of(vertices)
        for _ in range(_ROUNDS):
            if not self._round():
                break

    def _try_white_queries(self, length: Floats) -> None:
        longest = np.argsort(-length, kind="stable")[:_LONGEST]
        own = self.white @ self.white[longest].T
        own[longest, np.arange(len(longest))] = -np.inf
        # (Below zero in the bias, a key's own query has another length: all of those are tried.)
        low = self.white[:, -1] < 0.0 if self.sets.lifted else np.zeros(len(length), bool)
        hopeful = np.flatnonzero((length > own.max(axis=1)) | low)
        queries = self.white[hopeful]
        if self.sets.lifted:  # a query must not count the bias negatively
            queries[:, -1] = np.maximum(queries[:, -1], 0.0)
        self._try(hopeful, queries, np.arange(len(self.white)))

    def _open(self) -> Ints:
        return np.flatnonzero(~self.inside & np.isnan(self.query[:, 0]))

    def _try(self, keys: Ints, queries: Floats, among: Ints) -> bool:
        """Try a query of each key on some keys, its own included: one that it wins is kept, any other winner is a new
        generator. Whether there is something new."""
        gaps, rivals = score_gaps(
            self.white[among].T, np.searchsorted(among, keys), queries, np.arange(len(among), dtype=np.int64)
        )
        won, before = gaps > 0.0, int(self.generator.sum())
        self.query[keys[won]] = queries[won]
        self.generator[keys[won]] = True
        self.generator[among[rivals[~won]]] = True
        return bool(won.any()) or int(self.generator.sum()) > before

    def _keep(self, keys: Ints, weights: Rows, generators: Ints) -> None:
        self.pieces.append((keys, np.diff(weights.start), generators[weights.index], weights.value))
        self.inside[keys] = True

    def _in_hull_of(self, generators: Ints) -> None:
        """Step 2: which open keys are in the hull of a few generators?"""
        todo = np.setdiff1d(self._open(), generators)
        points = self.white[generators]
        columns = np.ascontiguousarray(points.T)

        def work(some: Ints) -> tuple[Ints, Rows]:
            rows = np.concatenate([points, self.white[some]])
            targets = len(points) + np.arange(len(some))
            found = nearest_points(
                rows,
                targets,
                tau=self.near,
                gap=1.0,
                counts=np.full(len(some), len(points)),
                ray=self.sets.lifted,
                stretch=self.sets.stretch,
                slope=self.sets.slope,
                columns=columns,
                scaled=True,
            )
            hit = np.flatnonzero(found.upper <= self.near)
            return some[hit], found.weights.some(hit)

        for found in in_threads(work, _pieces(todo), self.threads):
            self._keep(*found, generators)

    def _round(self) -> bool:
        """Step 3 for every open key; whether anything is left that may still be decided."""
        todo = self._open()
        generators = np.flatnonzero(self.generator)
        if len(todo) == 0 or len(generators) == 0:
            return False
        place = np.full(len(self.white), -1)
        place[generators] = np.arange(len(generators))
        points = self.white[generators]
        columns = np.ascontiguousarray(points.T)

        def work(some: Ints) -> tuple[Ints, Rows, Ints, Floats]:
            state, queries, sizes, weights, indices = _by_columns(
                points,
                columns,
                self.white[some],
                place[some],
                self.sets.lifted,
                self.sets.stretch,
                self.sets.slope,
                self.near,
                self.budget,
            )
            inside, outside = state == 1, state == 0
            return some[inside], Rows.sized(sizes[inside], indices, weights), some[outside], queries[outside]

        found = in_threads(work, _pieces(todo), self.threads)
        for inside, weights, _, _ in found:
            self._keep(inside, weights, generators)
        keys, queries = (np.concatenate([parts[k] for parts in found]) for k in (2, 3))
        if len(keys) == 0:
            return False
        return self._try(keys, queries, self._open())


def _pieces(todo: Ints) -> list[Ints]:
    return [todo[k : k + _KEYS_PER_TASK] for k in range(0, len(todo), _KEYS_PER_TASK)]


# From so many keys on, it pays to solve over columns that are fetched as they are needed (`Pool`): at d = 64
# and lognormal norms 0.75 → 0.52 ms per key at 1024 and 1.97 → 0.71 at 2048, but 0.34 → 0.56 at 512.
POOL = 768
# Above this number of keys, linear programs for the undecided keys cost too much.
LARGE = 4096
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
            if thin or len(sets.leaders) > POOL:
                work.own_queries()
        if len(sets.leaders) > POOL and len(work.left()):
            work.pool()
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

    def pool(self) -> None:
        """Columns that are fetched as they are needed."""
        pool = Pool(self.sets, self.threads, self.budget)
        pool.solve(np.flatnonzero(self.code[self.sets.leaders] == SELECTABLE))
        keys = np.flatnonzero(pool.inside)
        self._try_weights(keys, Rows.gathered(len(self.sets.leaders), pool.pieces).some(keys))
        todo = np.flatnonzero(np.isfinite(pool.query[:, 0]) & (self.code[self.sets.leaders] == UNDECIDED))
        self._try_queries(todo, self.sets.query(pool.query[todo]))

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


def alone(
    sets: KeyCoordinates, i: int, budget: float, until: int | None = None
) -> Iterator[tuple[Floats, Ints, Floats]]:
    """Queries and weights, of two solvers, for key i against every key (up to position `until`) that differs."""
    seen = sets.normalized if until is None else sets.normalized[: until + 1]
    apart = np.linalg.norm(seen - sets.normalized[i], axis=1)
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
