"""Verdicts, margins and attention on a set of keys that is too large to solve for as a whole: a vocabulary.

Every key is first screened by the query that points at it (`pointed`), in one pass in single precision. The scores are
one symmetric matrix, Z Zᵀ, over the lengths of its rows, so half of its blocks are enough; a block is used once,
from both sides, and discarded. A bound of what single precision may have lost is taken off (N. Higham, Accuracy and
Stability of Numerical Algorithms, 2002, §3.1).

White queries select most of the other keys. The rest are solved for among *some* keys: their rivals under these
queries, their neighbours, the longest. Weights over some are weights over all, so an unselectable key is found at once.
A query has to hold against all keys; those that it loses to join the rivals, and the key is solved for again (cutting
planes). Margins are found the same way. The checker proves all of it, on all keys.

A softmax weight depends on all keys, but smoothly: the direction in which the gradient points is tried for all targets
at once (Frank & Wolfe 1956, which on a ball is nearly Newton's method as long as one key holds most of the weight), and
the rest goes to Newton's method of `newton`, its second-order model made by matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Float64, Int8, Int64

from ln_probe.analyses.geometry.checker import SLACK, Checker, Heights, Rows, Space, through, with_center
from ln_probe.analyses.geometry.compiled import in_threads, room
from ln_probe.analyses.geometry.coordinates import TAU, Floats, Ints, KeyCoordinates, coordinates, unit_rows
from ln_probe.analyses.geometry.decide import DUPLICATE, SELECTABLE, UNDECIDED, UNSELECTABLE, Verdicts, decide
from ln_probe.analyses.geometry.inputs import AMPLE, EPS, Powers, QuerySet, ScoreSpace
from ln_probe.analyses.geometry.margins import RELATIVE_GAP, ZERO, measured, propose
from ln_probe.analyses.geometry.newton import (
    _BOLD,
    _FINER,
    _FINEST,
    _MODEL_SHARE,
    _PROOF,
    _TRUST,
    WEIGHT_GAP,
    Attainable,
    _line_search,
    _model_minimum,
    into_ball,
)
from ln_probe.analyses.geometry.wolfe import BUDGET

# Keys of one side of a block of scores: 4 MB, which stay in a core's cache. 512, 1024 and 2048 take as long.
_SIDE = 1024
_SINGLE = float(np.finfo(np.float32).eps) / 2
# The sum of exponentials: numpy adds pairwise within a block, and one block after the other.
_SUM = 1e-4
# Keys shorter than this share of the longest are not screened: what single precision leaves of them proves nothing.
_SHORT = 1e-6
# Numbers in a block of scores in double precision: 16 MB.
_BLOCK = 2_000_000


@dataclass(frozen=True)
class Pointed:
    """Keys under the queries of length 1 that point at them.

    Attributes:
        gap: no more than the score gap to the best of all other keys, without what is added to scores; nats.
        log_weight: of the key's softmax weight, with what is added to scores.
        doubt: `log_weight` is off by no more.
    """

    gap: Float64[np.ndarray, " key"]
    log_weight: Float64[np.ndarray, " key"]
    doubt: Float64[np.ndarray, " key"]


def pointed(rows: Float64[np.ndarray, "key r"], offset: Float64[np.ndarray, " key"] | None) -> Pointed:
    """Screen every key by the query that points at it.

    Args:
        rows: keys through a query set, in nats (`ScoreSpace.rows`); a query is a point of the unit ball.
        offset: added to the scores; None: nothing.

    Returns:
        bounds for every key; a set of one has an infinite gap.
    """
    number, dim = rows.shape
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    unit = float(length.max(initial=0.0)) or 1.0
    sides = [slice(first, min(first + _SIDE, number)) for first in range(0, number, _SIDE)]
    single = np.empty((number, dim), np.float32)
    for some in sides:
        single[some] = rows[some] / unit
    added = np.zeros(number) if offset is None else offset - offset.mean()
    own = length + added
    # From a product of two scaled keys to the score of one under the other's query, in nats.
    seen = length > _SHORT * unit
    factor = np.divide(unit * unit, length, out=np.zeros(number), where=seen)
    factors, lifts, owns = (values.astype(np.float32) for values in (factor, added, own))

    def shares(
        products: Float32[np.ndarray, "query key"], queries: slice, keys: slice
    ) -> Float32[np.ndarray, " query"]:
        """Sums of exp(score - own score)."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # 0 · -inf: a key that is not screened
            scores = products * factors[queries, None]
            scores += lifts[None, keys]
            scores -= owns[queries, None]
            return np.asarray(np.exp(scores, out=scores).sum(axis=1))

    def block(pair: tuple[slice, slice]) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """Largest products and sums of one block, for its rows and (off the diagonal) for its columns."""
        a, b = pair
        products = single[a] @ single[b].T
        if a == b:
            np.fill_diagonal(products, -np.inf)
        found = [(a.start, b.start, products.max(axis=1), shares(products, a, b))]
        if a != b:
            found.append((b.start, a.start, products.max(axis=0), shares(products.T, b, a)))
        return found

    blocks = in_threads(block, [(a, b) for k, a in enumerate(sides) for b in sides[k:]])
    most, total = np.full(number, -np.inf), np.zeros(number)
    # In an order that does not depend on which thread did what.
    for first, _, largest, part in sorted(one for found in blocks for one in found):
        side = slice(first, first + len(part))
        most[side] = np.maximum(most[side], largest)
        total[side] += part
    lost = AMPLE * (dim + 8) * _SINGLE * unit
    gap = np.full(number, np.inf)
    if number > 1:
        gap = np.where(seen, length - most * factor - lost, -np.inf)
    size = length + unit + np.abs(own) + np.abs(added).max(initial=0.0)
    doubt = np.where(seen & np.isfinite(total), lost + AMPLE * 8 * _SINGLE * size + _SUM, np.inf)
    return Pointed(gap, -np.log1p(total), doubt)


def pointed_at(
    rows: Float64[np.ndarray, "key r"], offset: Float64[np.ndarray, " key"] | None, which: Int64[np.ndarray, " some"]
) -> Float64[np.ndarray, " some"]:
    """`Pointed.log_weight` of some keys in double precision."""
    found = np.empty(len(which))
    step = max(1, _BLOCK // len(rows))
    for first in range(0, len(which), step):
        some = which[first : first + step]
        scores = into_ball(rows[some]) @ rows.T
        if offset is not None:
            scores += offset
        scores -= scores.max(axis=1, keepdims=True)
        here = scores[np.arange(len(some)), some]
        found[first : first + step] = here - np.log(np.exp(scores, out=scores).sum(axis=1))
    return found


# Keys read at once while they are brought into coordinates: 50 MB at d = 768.
_READ = 8192
# The screening's proof counts with this much to spare; the other keys are checked again.
_CLEAR = 2.0
# Directions in which keys spread less than this share of the widest (variances) are left out of white queries.
_THIN = 1e-12
# Rivals that a key is given under each query, and long keys that all are given, to begin with; then, a round.
_RIVALS, _LONG, _MORE = 32, 256, 32
# Rounds after which a key stays undecided: with 9,669 × 256 and 5,000 × 768 keys of lognormal lengths six were enough.
_ROUNDS = 20


class LargeChecker(Checker):
    """The checker of a set whose keys are not copied: one copy of the points in each of the two spaces, no more.

    Args:
        keys: of any floating-point type and layout.
        bias, queries: as for `Checker`.
    """

    def __init__(self, keys: Float[np.ndarray, "key d"], bias: Floats | None, queries: QuerySet | None) -> None:
        self.tau, self.name, self.number, self.plain = TAU, "", len(keys), keys.shape[1]
        self.powers = Powers()
        self.doubt = 0.0 if queries is not None else AMPLE * (sum(keys.shape) + 8) * EPS
        parts = [slice(first, first + _READ) for first in range(0, len(keys), _READ)]
        largest = np.max([np.abs(keys[p]).max(axis=0) for p in parts], axis=0).astype(np.float64)
        power = int(np.frexp(largest.max(initial=0.0))[1])
        self.unit = float(np.ldexp(1.0, power))  # of the judged points
        exponent = np.full(self.plain, power)

        def scaled(part: slice, exponent: np.ndarray) -> Float64[np.ndarray, "some d"]:
            found: np.ndarray = np.ldexp(np.asarray(keys[part], np.float64), -exponent)
            return found

        def middle(exponent: np.ndarray) -> Float64[np.ndarray, " d"]:
            mean = np.asarray(sum(scaled(p, exponent).sum(axis=0) for p in parts)) / len(keys)
            return mean + np.asarray(sum((scaled(p, exponent) - mean).sum(axis=0) for p in parts)) / len(keys)

        mean, points = middle(exponent), np.empty(keys.shape)
        for p in parts:
            points[p] = scaled(p, exponent) - mean
        left = points.mean(axis=0)
        points -= left
        noise = 2 * EPS * _lengths(points) + EPS * float(np.linalg.norm(left))
        high = level = None if bias is None else Heights.of(bias, 0)
        if queries is not None and queries.missing.shape[1]:
            level = with_center((scaled(p, exponent) for p in parts), mean, queries, power, high)
            noise += queries.projection_noise(points)
            for p in parts:
                points[p] = queries.in_span(points[p])
        size = float(np.linalg.norm(_lengths(points))) / len(keys) ** 0.5
        self.size = size if size > 0.0 else 1.0
        self.judged = self._judged(points, noise, level, self.size)
        self.measured, self._longest = self.judged, 1.0
        if queries is None:
            return
        self._longest = float(np.linalg.norm(queries.axes, 2))
        exponent = np.frexp(largest)[1]
        near = replace(
            queries, axes=np.ldexp(queries.axes, exponent[:, None]), center=np.ldexp(queries.center, exponent)
        )
        mean, points = middle(exponent), np.empty((len(keys), queries.axes.shape[1]))
        noise, slack, heights, own = (np.zeros(len(keys)) for _ in range(4))
        for p in parts:
            points[p], noise[p], slack[p], (heights[p], own[p]) = through(scaled(p, exponent), mean, near)
        self.measured = self._measured(points, noise + slack, Heights(heights, own, 0), high)

    def lead(self, gap: Floats) -> Floats:
        """Convert score gaps to relative ones: what they are, at least, for unit queries over the judged points.

        Args:
            gap: of queries u of the set, |u| = 1, in nats and without the bias; without a set of unit queries.
        """
        return gap / (self._longest * self.size * self.unit)

    def among(self, some: Ints) -> KeyCoordinates:
        """Some of the keys, ready to be judged."""
        rows = self.judged.rows[some]
        return coordinates(np.ascontiguousarray(rows[:, : self.plain]), rows[:, -1] if self.judged.upwards else None)


def _rivals(space: Space, queries: Float64[np.ndarray, "query dim"], count: int, own: Ints | None = None) -> list[Ints]:
    """The keys that score highest under each query; only those above `own`, if given."""
    found = []
    for k in range(len(queries)):
        scores = space.scores(queries[k : k + 1])[0]
        level = -np.inf if own is None else scores[own[k]]
        best = np.argpartition(-scores, min(count, len(scores) - 1))[: count + 1]
        found.append(best[scores[best] >= level])
    return found


def decide_large(
    checker: LargeChecker, lead: Float64[np.ndarray, " key"], order: Int64[np.ndarray, " key"], most: int
) -> Int8[np.ndarray, " key"]:
    """The verdict of every key (index into `decide.NAMES`), proved; undecided where it would cost too much.

    Args:
        checker: of the keys.
        lead: what a unit query over the judged points is known to give, at least, as a gap over all other keys.
        order: of the keys, those first that are to be solved for first.
        most: how many to solve for, among those that neither pointing nor white queries decide.
    """
    code = np.where(lead > _CLEAR * checker.tau, SELECTABLE, UNDECIDED).astype(np.int8)
    todo = order[code[order] == UNDECIDED]
    if checker.number == 1:
        code[:] = SELECTABLE
    elif len(todo):
        white = _white_queries(checker, todo)
        code[todo] = _selected(checker, todo, white)
        left = np.flatnonzero(code[todo] == UNDECIDED)[:most]
        if len(left):
            code[todo[left]] = _solved(checker, todo[left], white[left])
    return code


def _white_queries(checker: LargeChecker, todo: Ints) -> Float64[np.ndarray, "todo dim"]:
    """Unit queries that point at keys where keys are white; the bias is given no weight."""
    rows, r = checker.judged.rows, checker.plain
    gram = np.zeros((r, r))
    for first in range(0, len(rows), _READ):
        part = rows[first : first + _READ, :r]
        gram += part.T @ part
    values, vectors = np.linalg.eigh(gram)
    there = values > _THIN * values[-1]
    found = np.zeros((len(todo), rows.shape[1]))
    basis = vectors[:, there]
    found[:, :r] = ((rows[todo, :r] @ basis) / values[there]) @ basis.T
    return unit_rows(found)


def _selected(checker: LargeChecker, keys: Ints, queries: Float64[np.ndarray, "some dim"]) -> Int8[np.ndarray, " some"]:
    """Whether each unit query selects its key, as far as that is proved: over all keys, or all but its copies."""
    lead, rival = checker.leads(keys, queries)
    code = np.where(lead > checker.tau, SELECTABLE, UNDECIDED).astype(np.int8)
    close = np.flatnonzero((code == UNDECIDED) & (checker.equals(keys, rival) <= checker.tau * (1 + SLACK)))
    if len(close):
        among, near = checker.selects(keys[close], queries[close])
        good = among.lower > checker.tau * (1 - SLACK)
        code[close[good]] = np.where(near[good], DUPLICATE, SELECTABLE)
    return code


def _solved(checker: LargeChecker, keys: Ints, queries: Float64[np.ndarray, "some dim"]) -> Int8[np.ndarray, " some"]:
    """Verdicts on some keys by cutting planes; `queries` nearly select them."""
    code = np.full(len(keys), UNDECIDED, np.int8)
    some = _first_rivals(checker, keys, queries)
    todo = np.arange(len(keys))
    for _ in range(_ROUNDS):
        sets = checker.among(some)
        places = np.searchsorted(some, keys[todo])
        found = decide(sets, threads=None, only=places)
        inside = found.code[places] == UNSELECTABLE
        if inside.any():
            which = todo[inside]
            rows = found.weights.some(found.source[places[inside]])
            miss = checker.reproduces(keys[which], replace(rows, index=some[rows.index]))
            code[which[miss.upper <= checker.tau * (1 + SLACK)]] = UNSELECTABLE
        outside = np.isin(found.code[places], (SELECTABLE, DUPLICATE))
        todo, tried = todo[outside], over_all(checker, sets, found.query[places[outside]])
        code[todo] = _selected(checker, keys[todo], tried)
        still = code[todo] == UNDECIDED
        todo = todo[still]
        if len(todo) == 0:
            break
        more = np.unique(np.concatenate([some, *_rivals(checker.judged, tried[still], _MORE, keys[todo])]))
        if len(more) == len(some):
            break
        some = more
    return code


def _first_rivals(checker: LargeChecker, keys: Ints, queries: Float64[np.ndarray, "some dim"]) -> Ints:
    """Keys to begin with: those that score highest, the nearest, and the longest; in order."""
    space = checker.judged
    found = [keys, *_rivals(space, queries, _RIVALS), *_rivals(space, unit_rows(space.rows[keys]), _RIVALS)]
    half = space.length**2 / 2
    for i in keys:
        near = space.rows @ space.rows[i] - half
        found.append(np.argpartition(-near, min(_RIVALS, len(near) - 1))[: _RIVALS + 1])
    found.append(np.argsort(-space.length, kind="stable")[:_LONG])
    return np.unique(np.concatenate(found))


def over_all(
    checker: LargeChecker, sets: KeyCoordinates, queries: Float64[np.ndarray, "query dim"]
) -> Float64[np.ndarray, "query dim"]:
    """Queries over the normalized points of some keys as unit queries over the judged points of all."""
    found = queries / (sets.scale or 1.0)
    if checker.judged.upwards:
        found[:, -1] = queries[:, -1] / (sets.bias_scale or 1.0)
    return unit_rows(np.nan_to_num(found))


def _lengths(rows: Float64[np.ndarray, "key d"]) -> Floats:
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", rows, rows)))


# Rivals a key is given to begin with, and in each round.
_MARGIN_RIVALS, _MARGIN_MORE = 64, 32
# Shares of a key's budget that the rounds may spend on its margin: the first find rivals, the last is to be exact.
# After them a bracket stays as wide as it is.
_SHARES = (1 / 32, 1 / 32, 1 / 16, 1 / 16, 1 / 16, 1 / 8, 1 / 8, 1 / 2)
# Steps of all targets together, then of each alone.
_TOGETHER, _ALONE = 12, 40


def margins_large(
    checker: LargeChecker, keys: Int64[np.ndarray, " some"]
) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
    """Proved bounds of the margins of some keys among all, in nats; no farther apart than RELATIVE_GAP, unless the
    budget of the solver ends."""
    space = checker.measured
    lower, upper = np.full(len(keys), -np.inf), np.full(len(keys), np.inf)
    some = np.unique(np.concatenate([keys, *_rivals(space, into_ball(space.rows[keys]), _MARGIN_RIVALS)]))
    todo = np.arange(len(keys))
    for share in _SHARES:
        points, weights = _proposed(checker, some, keys[todo], share * BUDGET)
        found = checker.gap_at_least(keys[todo], points).lower
        lower[todo] = np.maximum(lower[todo], found)
        upper[todo] = np.minimum(upper[todo], checker.gap_at_most(keys[todo], weights).upper)
        size = np.maximum(np.abs(lower[todo]), np.abs(upper[todo]))
        # (What cannot be selected is judged to tau, and its margin of 0 is known no better.)
        floor = np.where(lower[todo] <= 0.0, 1.01 * TAU, 2 * ZERO) * space.size
        wide = ~(upper[todo] - lower[todo] <= np.maximum(RELATIVE_GAP * size * (1 + 1e-3), floor))
        todo, points = todo[wide], points[wide]
        if len(todo) == 0:
            break
        some = np.unique(np.concatenate([some, *_rivals(space, points, _MARGIN_MORE)]))
    return lower, upper


def _proposed(
    checker: LargeChecker, some: Ints, keys: Ints, budget: float
) -> tuple[Float64[np.ndarray, "some r"], Rows]:
    """Queries and weights (over all keys) for the margins of keys among some."""
    space = checker.measured
    rows = np.ascontiguousarray(space.rows[some])
    offset = None if space.offset is None or not np.ptp(space.offset[some]) else space.offset[some]
    where = ScoreSpace(rows, offset, np.nan, np.nan)
    sets = checker.among(some)
    places = np.searchsorted(some, keys)
    verdicts: Verdicts = decide(sets, threads=None, only=places)
    point, weights = propose(measured(sets, where, through_queries=True), verdicts, RELATIVE_GAP, places, budget)
    return point, replace(weights, index=some[weights.index])


def attainable_large(checker: LargeChecker, keys: Int64[np.ndarray, " some"]) -> Attainable:
    """The largest softmax weights of some keys among all; `prove.prove_attention` checks them."""
    work = _Weights(checker, keys, WEIGHT_GAP * _PROOF)
    for _ in range(_TOGETHER):
        if not len(work.todo):
            break
        work.step()
    for k in map(int, work.todo):
        work.alone(k)
    return Attainable(work.weight, work.upper, work.point, work.proof)


class _Weights:
    """Points of the ball, one for each target, and what they prove so far."""

    def __init__(self, checker: LargeChecker, keys: Ints, gap: float) -> None:
        self.rows, self.keys, self.gap = checker.measured.rows, keys, gap
        offset = checker.measured.offset
        self.point = into_ball(self.rows[keys])
        self.scores = self.point @ self.rows.T
        if offset is not None:
            self.scores += offset
        self.proof = self.point.copy()
        self.weight, self.upper = np.zeros(len(keys)), np.ones(len(keys))
        self.gradient = np.zeros_like(self.point)
        self.value, self.lower = np.full(len(keys), np.inf), np.zeros(len(keys))
        self.todo = np.arange(len(keys))
        self._look(self.todo)

    def _look(self, some: Ints) -> None:
        """Value (-log weight), gradient and bound at the points of some targets; what is near enough is done."""
        scores = self.scores[some]
        scores = scores - scores.max(axis=1, keepdims=True)
        own = scores[np.arange(len(some)), self.keys[some]].copy()
        shares = np.exp(scores, out=scores)
        total = shares.sum(axis=1)
        self.value[some] = np.log(total) - own
        shares /= total[:, None]
        gradient = shares @ self.rows - self.rows[self.keys[some]]
        self.gradient[some] = gradient
        inner = np.einsum("ij,ij->i", gradient, self.point[some])
        below = np.maximum(inner + np.linalg.norm(gradient, axis=1), 0.0)
        self.weight[some] = np.exp(-self.value[some])
        bound = np.exp(np.minimum(below - self.value[some], 0.0))
        better = bound <= self.upper[some]
        self.upper[some[better]], self.proof[some[better]] = bound[better], self.point[some[better]]
        self.todo = np.flatnonzero(self.upper - self.weight > self.gap)

    def _along(self, some: Ints, ways: Float64[np.ndarray, "some r"], slopes: Floats) -> Floats:
        """Go from each point as far along its way as the value falls; the shares of the ways that were gone."""
        changes = ways @ self.rows.T
        gone = np.zeros(len(some))
        trial = room(self.scores.shape[1])
        for place, k in enumerate(some):
            own = int(self.keys[k])
            share, lower, _ = _line_search(
                self.scores[k], changes[place], own, float(self.value[k]), float(slopes[place]), trial
            )
            if lower < self.value[k]:
                gone[place] = share
                self.point[k] += share * ways[place]
                self.scores[k] += share * changes[place]
        return gone

    def step(self) -> None:
        """All that are left, each to where its gradient points."""
        some = self.todo
        gradient = self.gradient[some]
        ways = -into_ball(gradient) - self.point[some]
        self._along(some, ways, np.einsum("ij,ij->i", gradient, ways))
        self._look(some)

    def alone(self, k: int) -> None:
        """Newton's method for one target."""
        dim = self.rows.shape[1]
        model, own = _MODEL_SHARE, np.array([k])
        for _ in range(_ALONE):
            if self.upper[k] - self.weight[k] <= self.gap:
                break
            spread = self._spread(k, model)
            goal, gradient = room(dim), self.gradient[k].copy()
            _model_minimum(spread, len(spread), self.point[k].copy(), gradient, goal)
            way = goal - self.point[k]
            slope = float(gradient @ way)
            below = float(gradient @ self.point[k]) + float(np.linalg.norm(gradient))
            if slope > -_TRUST * below:  # rounding in the model: straight to where the gradient points
                way, slope = -into_ball(gradient[None])[0] - self.point[k], -below
            gone = self._along(own, way[None], np.array([slope]))[0]
            if gone == 0.0 and model < _FINEST:
                break
            if gone < _BOLD:
                model *= _FINER
            self._look(own)

    def _spread(self, k: int, model: float) -> Float64[np.ndarray, "some r"]:
        """At most r rows whose products sum to the second derivative of the value."""
        scores = self.scores[k] - self.scores[k].max()
        shares = np.exp(scores)
        shares /= shares.sum()
        rival = np.delete(shares, self.keys[k]).max(initial=0.0)
        kept = np.flatnonzero(shares > model * rival)
        mean = self.gradient[k] + self.rows[self.keys[k]]
        dim = self.rows.shape[1]
        if len(kept) <= dim:
            return np.ascontiguousarray(np.sqrt(shares[kept])[:, None] * (self.rows[kept] - mean))
        gram = np.zeros((dim, dim))
        for first in range(0, len(kept), _READ):
            some = kept[first : first + _READ]
            part = np.sqrt(shares[some])[:, None] * (self.rows[some] - mean)
            gram += part.T @ part
        values, vectors = np.linalg.eigh(gram)
        return np.ascontiguousarray(np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T)
