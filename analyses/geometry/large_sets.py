"""Verdicts on a set of keys that is too large to solve for as a whole: a vocabulary.

Most keys are selected by the query that points at them (`screening`), most of the others by the white query. What is
left is solved for among *some* keys: its rivals under these queries, its neighbours, the longest. Weights over some are
weights over all, so an unselectable key is found at once. A query has to hold against all keys; those that it loses to
join the rivals, and the key is solved for again (cutting planes). All of it is proved by the checker, on all keys.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Float64, Int8, Int64

from ln_probe.analyses.geometry.certificates import SLACK, Checker, Heights, Rows, outside, projection_noise, through
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates, coordinates, unit_rows
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.scaling import GIVEN
from ln_probe.analyses.geometry.scores import Floats, Ints
from ln_probe.analyses.geometry.verdicts import DUPLICATE, SELECTABLE, UNDECIDED, UNSELECTABLE, Verdicts, decide

_EPS = float(np.finfo(np.float64).eps)
# Keys read at once while they are brought into coordinates: 50 MB at d = 768.
_READ = 8192
# The screening's proof counts with this much to spare; what it leaves is looked at again.
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
        bias, queries, tau: as for `Checker`.
    """

    def __init__(
        self, keys: Float[np.ndarray, "key d"], bias: Floats | None, queries: QuerySet | None, tau: float = TAU
    ) -> None:
        self.tau, self.name, self.number, self.plain = tau, "", len(keys), keys.shape[1]
        self.powers = GIVEN
        self.doubt = 0.0 if queries is not None else 2.0 * (sum(keys.shape) + 8) * _EPS
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
        noise = 2 * _EPS * _lengths(points) + _EPS * float(np.linalg.norm(left))
        high = level = None if bias is None else Heights.of(bias, 0)
        if queries is not None and queries.missing.shape[1]:
            direction = outside(queries, power)
            if direction is not None:
                found = [Heights.along(scaled(p, exponent), mean, *direction) for p in parts]
                value, lost = (np.concatenate([getattr(part, name) for part in found]) for name in ("value", "noise"))
                beyond = Heights(value, lost, direction[2])
                level = beyond if high is None or not high.value.any() else beyond.plus(high, max(direction[2], 0))
            noise += projection_noise(points)
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

    @property
    def lift(self) -> Floats | None:
        """What verdicts count as a bias, over its RMS."""
        return self.judged.rows[:, -1] if self.judged.upwards else None

    def among(self, some: Ints) -> KeyCoordinates:
        """Some of the keys, ready to be judged."""
        plain = np.ascontiguousarray(self.judged.rows[some, : self.plain])
        return coordinates(plain, None if self.lift is None else self.lift[some])

    def rivals(self, queries: Float64[np.ndarray, "query dim"], count: int, own: Ints | None = None) -> list[Ints]:
        """The keys that score highest under each query over the judged points; only those above `own`, if given."""
        found = []
        for k in range(len(queries)):
            scores = self.judged.scores(queries[k : k + 1])[0]
            level = -np.inf if own is None else scores[own[k]]
            best = np.argpartition(-scores, min(count, len(scores) - 1))[: count + 1]
            found.append(best[scores[best] >= level])
        return found


def decide_large(
    checker: LargeChecker, lead: Float64[np.ndarray, " key"], order: Int64[np.ndarray, " key"], most: int
) -> Int8[np.ndarray, " key"]:
    """The verdict of every key (index into `verdicts.NAMES`), proved; undecided where it would cost too much.

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
            miss = checker.reproduces(keys[which], weights_of(found, places[inside], some))
            code[which[miss.upper <= checker.tau * (1 + SLACK)]] = UNSELECTABLE
        outside = np.isin(found.code[places], (SELECTABLE, DUPLICATE))
        todo, tried = todo[outside], over_all(checker, sets, found.query[places[outside]])
        code[todo] = _selected(checker, keys[todo], tried)
        still = code[todo] == UNDECIDED
        todo = todo[still]
        if len(todo) == 0:
            break
        more = np.unique(np.concatenate([some, *checker.rivals(tried[still], _MORE, keys[todo])]))
        if len(more) == len(some):
            break
        some = more
    return code


def _first_rivals(checker: LargeChecker, keys: Ints, queries: Float64[np.ndarray, "some dim"]) -> Ints:
    """Keys to begin with: those that score highest, the nearest, and the longest; in order."""
    space = checker.judged
    found = [keys, *checker.rivals(queries, _RIVALS), *checker.rivals(unit_rows(space.rows[keys]), _RIVALS)]
    half = space.length**2 / 2
    for i in keys:
        near = space.rows @ space.rows[i] - half
        found.append(np.argpartition(-near, min(_RIVALS, len(near) - 1))[: _RIVALS + 1])
    found.append(np.argsort(-space.length, kind="stable")[:_LONG])
    return np.unique(np.concatenate(found))


def weights_of(found: Verdicts, places: Ints, some: Ints) -> Rows:
    """Weights of some keys (by their places in `some`), over all keys."""
    rows = found.weights.rows(found.source[places])
    return replace(rows, index=some[rows.index])


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
