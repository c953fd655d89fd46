"""Margins and attainable weights of a few keys of a large set, without solving over all of it.

A margin is decided by few rivals: it is solved for among some keys, what is found is checked against all, and those
keys join that break the bound (cutting planes). A softmax weight depends on all keys, but smoothly: the direction in
which the gradient points is tried for all targets at once (Frank & Wolfe 1956, which on a ball is nearly Newton's
method as long as one key holds most of the weight), and what that leaves goes to Newton's method of `ball_newton`, its
second-order model made by matrix products.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.attainable import WEIGHT_GAP, Attainable, into_ball
from ln_probe.analyses.geometry.ball_newton import _MODEL_SHARE, _line_search, _model_minimum
from ln_probe.analyses.geometry.certificates import Rows
from ln_probe.analyses.geometry.judged import Judged
from ln_probe.analyses.geometry.key_coordinates import TAU
from ln_probe.analyses.geometry.large_sets import LargeChecker
from ln_probe.analyses.geometry.margins import RELATIVE_GAP, ZERO, measured, propose
from ln_probe.analyses.geometry.min_norm import BUDGET
from ln_probe.analyses.geometry.scores import Floats, Ints
from ln_probe.analyses.geometry.verdicts import Verdicts, decide

# Rivals a key is given to begin with, and in each round.
_RIVALS, _MORE = 64, 32
# Shares of a key's budget that the rounds may spend on its margin: the first find rivals, the last is to be exact.
# After them a bracket stays as wide as it is.
_SHARES = (1 / 32, 1 / 32, 1 / 16, 1 / 16, 1 / 16, 1 / 8, 1 / 8, 1 / 2)
# Steps of all targets together, then of each alone.
_TOGETHER, _ALONE = 12, 40
# Share of the gap that is left to the solver; the rest is for the rounding that a proof takes off.
_PROOF = 1 - 1e-4
# The second-order model is refined by this where the line search cuts its steps short.
_FINER, _FINEST, _BOLD, _TRUST = 0.1, 1e-12, 0.2, 0.01
_READ = 8192


def margins_large(
    checker: LargeChecker, keys: Int64[np.ndarray, " some"], gap: float = RELATIVE_GAP
) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
    """Proved bounds of the margins of some keys among all, in nats; as far apart as `gap` asks for, or as the budget of
    the solver leaves them."""
    space = checker.measured
    lower, upper = np.full(len(keys), -np.inf), np.full(len(keys), np.inf)
    some = np.unique(np.concatenate([keys, *_best(checker, into_ball(space.rows[keys]), _RIVALS)]))
    todo = np.arange(len(keys))
    for share in _SHARES:
        points, weights = _proposed(checker, some, keys[todo], gap, share * BUDGET)
        found = checker.gap_at_least(keys[todo], points).lower
        lower[todo] = np.maximum(lower[todo], found)
        upper[todo] = np.minimum(upper[todo], checker.gap_at_most(keys[todo], weights).upper)
        size = np.maximum(np.abs(lower[todo]), np.abs(upper[todo]))
        # (What cannot be selected is judged to tau, and its margin of 0 is known no better.)
        floor = np.where(lower[todo] <= 0.0, 1.01 * TAU, 2 * ZERO) * space.size
        wide = ~(upper[todo] - lower[todo] <= np.maximum(gap * size * (1 + 1e-3), floor))
        todo, points = todo[wide], points[wide]
        if len(todo) == 0:
            break
        some = np.unique(np.concatenate([some, *_best(checker, points, _MORE)]))
    return lower, upper


def _best(checker: LargeChecker, points: Float64[np.ndarray, "some r"], count: int) -> list[Ints]:
    """The keys that score highest at each point of the ball, its own included."""
    found = []
    for u in points:
        scores = checker.measured.scores(u[None])[0]
        found.append(np.argpartition(-scores, min(count, len(scores) - 1))[: count + 1])
    return found


def _proposed(
    checker: LargeChecker, some: Ints, keys: Ints, gap: float, budget: float
) -> tuple[Float64[np.ndarray, "some r"], Rows]:
    """Queries and weights (over all keys) for the margins of keys among some."""
    space = checker.measured
    rows = np.ascontiguousarray(space.rows[some])
    offset = None if space.offset is None or not np.ptp(space.offset[some]) else space.offset[some]
    where = Judged(rows, offset, np.nan, np.nan)
    sets = checker.among(some)
    places = np.searchsorted(some, keys)
    verdicts: Verdicts = decide(sets, threads=None, only=places)
    found = propose(measured(sets, where, through_queries=True), verdicts, gap, places, budget)
    index = some[found.weights.index]
    return found.point, Rows(found.weights.start, index, found.weights.value)


def attainable_large(checker: LargeChecker, keys: Int64[np.ndarray, " some"], gap: float = WEIGHT_GAP) -> Attainable:
    """The largest softmax weights of some keys among all; `proofs.prove_attention` checks them."""
    work = _Weights(checker, keys, gap * _PROOF)
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
        trial = np.empty(self.scores.shape[1])
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
        gram, factor, work = np.empty((dim, dim)), np.empty((dim, dim)), np.empty(dim)
        for _ in range(_ALONE):
            if self.upper[k] - self.weight[k] <= self.gap:
                break
            spread = self._spread(k, model)
            goal, gradient = np.empty(dim), self.gradient[k].copy()
            short = np.empty(max(len(spread), dim))
            _model_minimum(spread, len(spread), gram, factor, short, self.point[k].copy(), gradient, goal, work)
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
