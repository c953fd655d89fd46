"""Which keys of a large pool can be selected? 10⁴ to 10⁵ keys, in bounded memory.

Only vertices are needed to reproduce an interior key, and a few hundred of them at a time (Dulá & Helgason,
"A new procedure for identifying the frame of the convex hull of a finite collection of points", EJOR 92
(1996) 352-367). So:

1. The white query of every key is tried on the longest keys first; what it beats there is tried on all.
2. Every key left is looked for in the hull of the longest vertices, which holds most interior keys.
3. The rest are solved against all the generators known so far, column by column. One that is separated from
   them hands its query to all undecided keys: the winner is a new generator, often the key itself.

Step 3 is repeated until nothing is left. Scores are computed in blocks, never as a square matrix.
"""

from __future__ import annotations

import numpy as np

from ln_probe.analyses.geometry.active_set import active_set
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates
from ln_probe.analyses.geometry.min_norm import BUDGET, lowest, nearest_point, nearest_points, scale_of, unscale
from ln_probe.analyses.geometry.scores import Floats, Ints, scores_of
from ln_probe.analyses.geometry.search import Search
from ln_probe.analyses.machinery.compiled import compiled, room, table
from ln_probe.analyses.machinery.parallel import in_threads

# Entries of one block of scores (16 MB), but at least so many queries: fewer make a slow matrix product.
_BLOCK, _QUERIES = 2_000_000, 64
# The longest keys, which decide most of the others. 512 of them contain the most keys per second at d = 64.
_LONGEST = 512
# New columns per key and round of step 3, and how well a key is solved over its columns before more are
# fetched.
_COLUMNS, _COLUMN_GAP = 32, 0.3
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
    tau: float,
    most: int,
    budget: float,
) -> tuple[Ints, Floats, Ints, Floats, Ints]:
    """`nearest_point` of each key among many generators, by fetching columns as they are needed.

    Args:
        rows, columns: the generators, "generator dim" and "dim generator".
        keys: the targets, "key dim"; `own` is the place of each among the generators, or -1.
        near: distance at which a key counts as inside; `tau`: relative score gap at which it is separated.
        most: columns to fetch, beyond what an active set can hold.
        budget: multiply-adds per key.

    Returns:
        1 if inside (weights given) or 0 if separated from all generators (query given) or -1 if neither,
        queries, sizes of the active sets, their weights and indices.
    """
    number, dim = keys.shape
    generators = rows.shape[0]
    capacity = dim + 2
    places = min(capacity + most, generators)
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
            if attempt > 0 and scores.min() - level > tau * (1.0 + 1e-3) * _length(x, stretch, slope):
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


@compiled
def _length(x: Floats, stretch: Floats, slope: Floats) -> float:
    """An upper bound of the length of a query over normalized keys."""
    dim, flat = x.shape[0], stretch.shape[0]
    total = 0.0
    lift = x[flat] / slope[flat] if dim > flat else 0.0
    for t in range(flat):
        total += float(((x[t] - lift * slope[t]) / stretch[t]) ** 2)
    return float(np.sqrt(total + float(lift * lift)))


class Pool:
    """Candidates for verdicts on a large set; `decide` in verdicts.py checks them."""

    def __init__(self, sets: KeyCoordinates, threads: int | None = None, budget: float = BUDGET) -> None:
        self.sets, self.budget = sets, budget
        self.threads = threads
        self.white = sets.white
        number = len(self.white)
        self.inside = np.zeros(number, bool)
        self.query = np.full(self.white.shape, np.nan)  # over white keys, of those that may be selectable
        self.rows: dict[int, tuple[Ints, Floats]] = {}  # weights over the representatives
        self.generator = np.zeros(number, bool)
        # Within this of a key in white coordinates is within TAU of it in normalized ones.
        largest = float(max(sets.stretch.max(), 1e-300))
        if sets.lifted:
            largest = float(np.sqrt(largest**2 + np.sum(sets.slope**2)))
        self.near = 0.5 * TAU / largest

    def solve(self) -> None:
        """Find a query or weights for every key."""
        length = np.einsum("ij,ij->i", self.white, self.white)
        self._try_white_queries(length)
        self.go_on(length)

    def go_on(self, length: Floats) -> None:
        """Find a query or weights for the keys that are still open, given some vertices."""
        vertices = np.flatnonzero(self.generator)
        vertices = vertices[np.argsort(-length[vertices], kind="stable")[: 2 * _LONGEST]]
        if len(vertices) > self.white.shape[1]:
            self._in_hull_of(vertices)
        for _ in range(_ROUNDS):
            if not self._round():
                break

    def know(self, vertices: Ints) -> None:
        """Take keys for vertices that have been shown to be, and none of the others by their white query."""
        self.generator[vertices] = True
        self.query[vertices] = self.white[vertices]
        self.go_on(np.einsum("ij,ij->i", self.white, self.white))

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
        best, winner = self._best(queries, np.arange(len(self.white)), hopeful)
        won = np.einsum("ij,ij->i", queries, self.white[hopeful]) > best
        self.generator[hopeful[won]] = True
        self.query[hopeful[won]] = queries[won]
        self.generator[winner[~won]] = True

    def _open(self) -> Ints:
        return np.flatnonzero(~self.inside & np.isnan(self.query[:, 0]))

    def _best(self, queries: Floats, among: Ints, own: Ints) -> tuple[Floats, Ints]:
        """Best score and its key among some keys, for each query, leaving out the query's own key."""
        best, winner = np.full(len(queries), -np.inf), np.full(len(queries), -1)
        place = np.full(len(self.white), -1)
        place[among] = np.arange(len(among))
        keys = self.white[among].T
        step = max(_QUERIES, _BLOCK // max(len(among), 1))
        for first in range(0, len(queries), step):
            block = slice(first, first + step)
            scores = queries[block] @ keys
            mine = place[own[block]]
            scores[np.flatnonzero(mine >= 0), mine[mine >= 0]] = -np.inf
            at = scores.argmax(axis=1)
            best[block], winner[block] = scores[np.arange(len(at)), at], among[at]
        return best, winner

    def _keep(self, keys: Ints, sizes: Ints, weights: Floats, indices: Ints, generators: Ints) -> None:
        first = np.concatenate([[0], np.cumsum(sizes)])
        for k, i in enumerate(keys):
            index, weight = indices[first[k] : first[k + 1]], weights[first[k] : first[k + 1]]
            self.rows[int(i)] = generators[index[index >= 0]], weight[index >= 0]
            self.inside[i] = True

    def _in_hull_of(self, generators: Ints) -> None:
        """Step 2: which open keys are in the hull of a few generators?"""
        todo = np.setdiff1d(self._open(), generators)
        points = self.white[generators]
        columns = np.ascontiguousarray(points.T)

        def work(some: Ints) -> tuple[Ints, Ints, Floats, Ints]:
            rows = np.concatenate([points, self.white[some]])
            targets = len(points) + np.arange(len(some))
            _, _, upper, _, sizes, weights, indices = nearest_points(
                rows,
                columns,
                targets,
                np.full(len(some), len(points)),
                np.full(len(some), -1),
                self.sets.lifted,
                self.sets.stretch,
                self.sets.slope,
                self.near,
                1.0,
                False,
                True,
            )
            hit = upper <= self.near
            entries = np.repeat(hit, sizes)
            return some[hit], sizes[hit], weights[entries], indices[entries]

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

        def work(some: Ints) -> tuple[Ints, Ints, Floats, Ints, Floats, Ints]:
            state, queries, sizes, weights, indices = _by_columns(
                points,
                columns,
                self.white[some],
                place[some],
                self.sets.lifted,
                self.sets.stretch,
                self.sets.slope,
                self.near,
                TAU,
                1024,
                self.budget,
            )
            return some, state, queries, sizes, weights, indices

        asking: list[Ints] = []
        asked: list[Floats] = []
        for some, state, queries, sizes, weights, indices in in_threads(work, _pieces(todo), self.threads):
            self._keep(some[state == 1], sizes[state == 1], weights, indices, generators)
            asking.append(some[state == 0])
            asked.append(queries[state == 0])
        keys, queries = np.concatenate(asking), np.concatenate(asked)
        if len(keys) == 0:
            return False
        left = self._open()
        best, winner = self._best(queries, left, keys)
        mine = np.einsum("ij,ij->i", queries, self.white[keys]) > best
        self.query[keys[mine]] = queries[mine]
        before = int(self.generator.sum())
        self.generator[keys[mine]] = True
        self.generator[winner[~mine]] = True
        return bool(mine.any()) or int(self.generator.sum()) > before


def _pieces(todo: Ints) -> list[Ints]:
    return [todo[k : k + _KEYS_PER_TASK] for k in range(0, len(todo), _KEYS_PER_TASK)]
