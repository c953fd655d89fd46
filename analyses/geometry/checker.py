"""Prove certificates: nothing leaves the geometry that this module did not prove first.

This is plain array arithmetic on the given float64 numbers. It shares the compiler with the solvers, and nothing else:
not the merging of equal keys, nor their coordinates, nor representatives in place of keys.

A sum of m products, in any order and with or without fused multiplication, is off by at most m·eps times the sum of
their magnitudes (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, §3.1). So every score carries a bound
of its error (`noise`), which is taken off lower bounds and added to upper ones; this bound is itself computed with the
factor `AMPLE`, which covers its own rounding and that of the few operations that follow. Centring is harmless: a
difference rounds to within eps/2 of *itself*, and any shift common to all keys cancels. What underflows is below
`UNDERFLOW`.

The claims, for key i among points z (verdicts: the keys over their RMS norm; margins and attention: `Aᵀk`; a bias over
its own RMS is one more coordinate, in which a query looks upwards only):

* `selects`: a unit query q has q·z_i - q·z_j > tau for every j further than tau from z_i.
* `reproduces`: convex weights of such keys have their mean within tau of z_i (and at least its bias).
* `gap_at_least`, `gap_at_most`: the best gap over |u| ≤ 1, max_u min_j [(s_i - s_j)], is at least what one u gives; and
  for convex weights w of other keys at most Σ w_j (h_i - h_j) + |Σ w_j (z_i - z_j)| (h: scores of the center), since a
  minimum is no more than any mean.
* `attention`: the largest softmax weight is at least what one u gives; and for any convex weights p of all keys at most
  exp(-[H(p) + Σ p_j (h_j - h_i) - |Σ p_j (z_j - z_i)|]), H the entropy, since log Σ exp s_j ≥ Σ p_j s_j + H(p) (Gibbs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ln_probe.analyses.geometry.compiled import compiled
from ln_probe.analyses.geometry.inputs import AMPLE, EPS, UNDERFLOW, QuerySet, blocks, mean_key

# Both sides of tau are decided up to this share of it: the RMS norm that tau is relative to is itself rounded.
SLACK = 1e-6
# What is made to have length 1 may be longer by its rounding.
_LONGEST_UNIT = 1.0 + 1e-12
# Heights that differ by less than this much of what they may be off are taken for equal.
_UNSEEN = 2.0

Floats = Float64[np.ndarray, " _"]
Ints = Int64[np.ndarray, " _"]


class CertificateError(AssertionError):
    """A certificate does not prove its verdict; the message says which and by how much."""


@dataclass(frozen=True)
class Between:
    """Bounds of what each certificate proves; rounding is included."""

    lower: Floats
    upper: Floats


@dataclass(frozen=True)
class Rows:
    """Weights of several targets, one row after the other: `index[start[k]:start[k+1]]`, `value[…]`."""

    start: Ints
    index: Ints
    value: Floats

    def row(self, k: int) -> tuple[Ints, Floats]:
        """Indices and weights of one row."""
        here = slice(int(self.start[k]), int(self.start[k + 1]))
        return self.index[here], self.value[here]

    def some(self, which: Ints) -> Rows:
        """Some of the rows, one after the other."""
        sizes = self.start[which + 1] - self.start[which]
        start = np.concatenate([[0], np.cumsum(sizes)])
        entry = np.arange(start[-1]) + np.repeat(self.start[which] - start[:-1], sizes)
        return Rows(start, self.index[entry], self.value[entry])

    @classmethod
    def sized(cls, sizes: Ints, index: Ints, value: Floats) -> Rows:
        """From the size of every row, without the entries that name no key (-1)."""
        start, kept = np.concatenate([[0], np.cumsum(sizes)]), index >= 0
        if kept.all():
            return cls(start, index, value)
        return cls(np.concatenate([[0], np.cumsum(kept)])[start], index[kept], value[kept])

    @classmethod
    def gathered(cls, count: int, pieces: list[tuple[Ints, Ints, Ints, Floats]]) -> Rows:
        """From pieces (rows, their sizes, all their indices, all their values); a row is in one piece or empty."""
        sizes = np.zeros(count, np.int64)
        for rows, some, _, _ in pieces:
            sizes[rows] = some
        start = np.concatenate([[0], np.cumsum(sizes)])
        index, value = np.empty(start[-1], np.int64), np.empty(start[-1])
        for rows, some, indices, values in pieces:
            place = np.arange(len(indices)) + np.repeat(start[rows] - (np.cumsum(some) - some), some)
            index[place], value[place] = indices, values
        return cls(start, index, value)

    @classmethod
    def of(cls, rows: dict[int, tuple[Ints, Floats]], count: int) -> Rows:
        """`count` rows, those that are not given empty."""
        order, sizes = sorted(rows), np.zeros(count, np.int64)
        sizes[order] = [len(rows[k][0]) for k in order]
        index = np.concatenate([np.empty(0, np.int64), *(rows[k][0] for k in order)])
        value = np.concatenate([np.empty(0), *(rows[k][1] for k in order)])
        return cls(np.concatenate([[0], np.cumsum(sizes)]), index, value)


@dataclass(frozen=True)
class Heights:
    """One number for each key, and how far it may be off."""

    value: Floats
    noise: Floats

    @classmethod
    def of(cls, bias: Floats) -> Heights:
        """A bias less its mean: any shift is harmless, and each difference is off by half an ulp of itself."""
        high = bias - bias.mean()
        return cls(high, EPS * np.abs(high))

    def plus(self, other: Heights | None) -> Heights:
        """The sum of both."""
        if other is None:
            return self
        value = self.value + other.value
        return Heights(value, self.noise + other.noise + EPS * np.abs(value))

    def over_rms(self) -> Heights:
        """The heights less their mean, over their RMS; 0 if they are the same for all keys, as far as is known."""
        alike = (self.value == self.value[0]).all()
        high = self.value - self.value.mean()
        rms = float(np.linalg.norm(high)) / len(high) ** 0.5
        if alike or rms <= _UNSEEN * float(self.noise.max()):
            return Heights(np.zeros(len(high)), np.zeros(len(high)))
        return Heights(high / rms, 4 * EPS * np.abs(high / rms) + AMPLE * self.noise / rms)


@dataclass(frozen=True)
class Space:
    """Points, what is added to their products with a query, and the error of both."""

    rows: Float64[np.ndarray, "key dim"]
    offset: Floats | None
    upwards: bool  # queries look up along the last coordinate, weights may exceed the target there
    length: Floats  # of each row
    noise: Floats  # error of a score as it is stored, under any |u| <= 1; and of the length of a row
    error: Floats  # error of a score as it is computed

    @classmethod
    def of(
        cls, rows: Float64[np.ndarray, "key dim"], offset: Floats | None, noise: Floats, upwards: bool = False
    ) -> Space:
        length = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        if rows.any():
            noise = noise + UNDERFLOW
        error = noise + AMPLE * (rows.shape[1] + 4) * EPS * (length + (0.0 if offset is None else np.abs(offset)))
        return cls(rows, offset, upwards, length, noise, error)

    @property
    def size(self) -> float:
        """The RMS norm of the rows."""
        return float(np.sqrt(np.mean(self.length**2)))

    def scores(self, queries: Float64[np.ndarray, "query dim"]) -> Float64[np.ndarray, "query key"]:
        found = queries @ self.rows.T
        if self.offset is not None:
            found += self.offset
        return np.asarray(found)


class Checker:
    """The keys of one set, and what certificates prove of them.

    Args:
        keys, bias: in float64, as the user gave them.
        queries: the set of queries, if there is one.
        tau: tolerance of verdicts.
        name: of the set, for messages.
    """

    def __init__(
        self,
        keys: Float64[np.ndarray, "key d"],
        bias: Floats | None,
        queries: QuerySet | None,
        tau: float,
        name: str = "",
    ) -> None:
        self.tau, self.name, self.number = tau, name, len(keys)
        self._keys, self._queries = keys, queries
        self._bias = None if bias is None else Heights.of(bias)
        # Without a query set margins are relative to the size, which is itself rounded.
        self.doubt = 0.0 if queries is not None else AMPLE * (sum(keys.shape) + 8) * EPS

    @cached_property
    def judged(self) -> Space:
        """The keys in their own coordinates over their RMS norm, less the directions that the set of queries lacks."""
        mean = _middle(self._keys)
        centred = self._keys - mean
        # Far from zero the mean is off by its own rounding, and R (the size, below) with it: once more, near zero.
        left = mean_key(centred)
        points = centred - left
        noise = 2 * EPS * np.linalg.norm(points, axis=1) + EPS * float(np.linalg.norm(left))
        if (self._keys == self._keys[0]).all():
            points, noise = points * 0.0, noise * 0.0
        high = self._bias
        if self._queries is not None and self._queries.missing.shape[1]:
            high = with_center(self._keys, mean, self._queries, high)
            noise = noise + self._queries.projection_noise(points)
            points = self._queries.keys_in_span(points)
        size = float(np.linalg.norm(points)) / self.number**0.5  # R
        return self._judged(points, noise, high, size if size > 0.0 else 1.0)

    @cached_property
    def measured(self) -> Space:
        """The keys as the queries of the set see them, in nats; without a set what is judged."""
        if self._queries is None:
            return self.judged
        points, noise, slack, seen = through(self._keys, _middle(self._keys), self._queries)
        heights = Heights(*seen).plus(self._bias)
        level = np.ptp(heights.value) > 0.0
        return Space.of(points, heights.value if level else None, noise + slack + heights.noise)

    def _judged(
        self, points: Float64[np.ndarray, "key dim"], noise: Floats, lift: Heights | None, size: float
    ) -> Space:
        rows, error = points / size, (noise + 2 * EPS * np.linalg.norm(points, axis=1)) / size
        if lift is None:
            return Space.of(rows, None, error)
        found = lift.over_rms()
        return Space.of(np.column_stack([rows, found.value]), None, error + found.noise, upwards=True)

    # Verdicts

    def selects(
        self, targets: Ints, queries: Float64[np.ndarray, "target dim"]
    ) -> tuple[Between, Bool[np.ndarray, " target"]]:
        """The smallest gap of each unit query over keys that differ (up to position `until`), and whether some do not.

        Queries are over the judged points; of zero length or with NaN they prove nothing.
        """
        space = self.judged
        length = np.linalg.norm(queries, axis=1)
        usable = np.isfinite(length) & (length > 0.0)
        if space.upwards:
            usable &= queries[:, -1] >= 0.0
        unit = np.where(usable[:, None], queries, 0.0) / np.where(usable, length, 1.0)[:, None]
        lower = np.full(len(targets), -np.inf)
        near = np.zeros(len(targets), bool)
        error = space.error
        for block, own, scores in self._against_others(space, targets, unit):
            some = targets[block]
            gap = own - scores.max(axis=1)
            for k in np.flatnonzero(gap <= self.tau):  # who is so close? What is within tau does not count.
                rivals = np.flatnonzero(scores[k] >= own[k] - self.tau)
                apart = np.linalg.norm(space.rows[rivals] - space.rows[some[k]], axis=1)
                copies = rivals[apart <= self.tau * (1 + SLACK)]
                near[block.start + k] = len(copies) > 0
                scores[k, copies] = -np.inf
                gap[k] = own[k] - scores[k].max()
            lower[block] = gap
        lower[~usable] = -np.inf
        for k in np.flatnonzero(length == 0.0):  # nothing to compete with?
            apart = np.linalg.norm(space.rows - space.rows[targets[k]], axis=1)
            if (apart <= self.tau * (1 + SLACK)).all():
                lower[k], near[k] = np.inf, len(apart) > 1
        return Between(lower, lower + 2 * (error[targets] + error.max())), near

    def leads(self, targets: Ints, queries: Float64[np.ndarray, "target dim"]) -> tuple[Floats, Ints]:
        """The proven gap of each unit query over *all* other keys, and the key that comes nearest."""
        space, gaps, rivals = self.judged, np.empty(len(targets)), np.empty(len(targets), np.int64)
        for block, own, scores in self._against_others(space, targets, queries):
            rivals[block] = scores.argmax(axis=1)
            gaps[block] = own - scores[np.arange(len(own)), rivals[block]]
        return gaps / _LONGEST_UNIT, rivals

    def reproduces(self, targets: Ints, weights: Rows) -> Between:
        """How far the mean of each row of weights is from its target; infinite if the weights are not allowed.

        They must be convex, and on keys further than tau from the target.
        """
        miss, found = self._miss(self.judged, targets, weights)
        wrong = ~(found.nearest > self.tau * (1 - SLACK))
        miss.lower[wrong], miss.upper[wrong] = np.inf, np.inf
        return miss

    def equals(self, i: Ints, j: Ints) -> Floats:
        """Distance of key i to key j, relative."""
        return np.asarray(np.linalg.norm(self.judged.rows[i] - self.judged.rows[j], axis=1))

    # Margins

    def gap_at_least(self, targets: Ints, points: Float64[np.ndarray, "target r"]) -> Between:
        """The smallest gap to any other key under the query u (shortened to the unit ball)."""
        space = self.measured
        inside = _into_ball(points, space.upwards)
        lower, error = np.empty(len(targets)), space.error
        for block, own, scores in self._against_others(space, targets, inside):
            lower[block] = own - scores.max(axis=1)
        upper = lower + 2 * (error[targets] + error.max())
        lower, upper = lower - self.doubt * np.abs(lower), upper + self.doubt * np.abs(upper)
        nothing = ~np.isfinite(points).all(axis=1)
        lower[nothing], upper[nothing] = -np.inf, -np.inf
        return Between(lower, upper)

    def gap_at_most(self, targets: Ints, weights: Rows) -> Between:
        """What the mean over convex weights of other keys allows the best gap to be; infinite without weights."""
        space = self.measured
        miss, found = self._miss(space, targets, weights)
        lower, upper = miss.lower, miss.upper
        if space.offset is not None:
            sizes = np.diff(weights.start)
            total = _sums(weights.value, weights.start)
            share = weights.value / np.repeat(np.where(total > 0.0, total, 1.0), sizes)
            lead = space.offset[np.repeat(targets, sizes)] - space.offset[weights.index]
            mean = _sums(share * lead, weights.start)
            rounding = _sums(np.abs(share * lead), weights.start) * ((sizes + 8) * AMPLE * EPS)
            lower, upper = lower + mean - rounding, upper + mean + rounding
        wrong = ~found.convex | found.own
        lower[wrong], upper[wrong] = 0.0, 0.0
        lower, upper = lower - self.doubt * np.abs(lower), upper + self.doubt * np.abs(upper)
        lower[wrong], upper[wrong] = -np.inf, np.inf
        return Between(lower, upper)

    # Attention

    def attention(
        self, targets: Ints, points: Float64[np.ndarray, "target r"], proofs: Float64[np.ndarray, "target r"]
    ) -> tuple[Between, Between]:
        """The softmax weight that the query at `points` gives, and what no query exceeds by the weights at `proofs`."""
        found, bound = self._attention(targets, points)
        other = np.flatnonzero((points != proofs).any(axis=1))
        if len(other):
            better = self._attention(targets[other], proofs[other])[1]
            bound.lower[other], bound.upper[other] = better.lower, better.upper
        return found, bound

    def _attention(self, targets: Ints, points: Float64[np.ndarray, "target r"]) -> tuple[Between, Between]:
        space = self.measured
        usable = np.isfinite(points).all(axis=1)
        inside = _into_ball(np.where(usable[:, None], points, 0.0), False)
        error, most = space.error, float(space.error.max())
        few = (self.number + 16) * AMPLE * EPS
        found, bound = (Between(np.empty(len(targets)), np.empty(len(targets))) for _ in range(2))
        for block in blocks(len(targets), self.number):
            some, here = targets[block], np.arange(len(targets[block]))
            scores = space.scores(inside[block])
            scores -= scores.max(axis=1, keepdims=True)
            own, logs = scores[here, some], scores.copy()
            shares = np.exp(scores, out=scores)
            total = shares.sum(axis=1)
            log_weight = own - np.log(total)
            doubt = error[some] + most + few
            found.lower[block] = np.exp(log_weight - doubt) * (1 - few)
            found.upper[block] = np.exp(np.minimum(log_weight + doubt, 0.0))
            shares /= total[:, None]
            logs -= np.log(total)[:, None]
            # H(p) + Σ p_j (h_j - h_i) - |Σ p_j (z_j - z_i)|, for p as they are computed
            entropy = -np.einsum("ij,ij->i", shares, np.where(shares > 0, logs, 0.0))
            mean = shares @ space.rows - space.rows[some]
            far = shares @ space.length + space.length[some]
            doubt = shares @ space.noise + space.noise[some] + few * (far + 1.0 + np.log(self.number) + entropy)
            level = entropy - np.linalg.norm(mean, axis=1)
            if space.offset is not None:
                level += shares @ space.offset - space.offset[some]
                doubt += few * (shares @ np.abs(space.offset) + np.abs(space.offset[some]))
            bound.upper[block] = np.minimum(np.exp(np.clip(-(level - doubt), -700.0, 0.0)) * (1 + few), 1.0)
            bound.lower[block] = np.exp(np.clip(-(level + doubt), -700.0, 0.0))
        found.lower[~usable], found.upper[~usable] = 0.0, 1.0
        bound.lower[~usable], bound.upper[~usable] = 0.0, 1.0
        return found, bound

    def _against_others(
        self, space: Space, targets: Ints, queries: Float64[np.ndarray, "target dim"]
    ) -> Iterator[tuple[slice, Floats, Float64[np.ndarray, "some key"]]]:
        """For blocks of targets: what each scores at least, and the others at most, under its query."""
        for block in blocks(len(targets), self.number):
            some, here = targets[block], np.arange(len(targets[block]))
            scores = space.scores(queries[block])
            own = scores[here, some] - space.error[some]
            scores += space.error
            scores[here, some] = -np.inf
            yield block, own, scores

    def _miss(self, space: Space, targets: Ints, weights: Rows) -> tuple[Between, Means]:
        """Length of Σ w_j (z_j - z_i), a surplus upwards not counted; infinite for weights that are not convex."""
        start, index, value = weights.start, weights.index, weights.value
        found = _means(space.rows, space.noise, targets, start, index, value, space.upwards)
        terms = (np.diff(weights.start) + space.rows.shape[1] + 8) * AMPLE * EPS
        error = found.noise + terms * found.size
        bad = ~found.convex
        lower, upper = np.maximum(found.length - error, 0.0), found.length + error
        lower[bad], upper[bad] = np.inf, np.inf
        return Between(lower, upper), found


class Means(NamedTuple):
    """What rows of weights come to, a value each."""

    convex: Bool[np.ndarray, " row"]  # no negative weight, some positive one
    length: Floats  # of Σ w_j (z_j - z_i), weights over their sum
    size: Floats  # Σ w_j |z_j - z_i|
    noise: Floats  # Σ w_j (noise_j + noise_i)
    nearest: Floats  # the smallest |z_j - z_i| of a positive weight
    own: Bool[np.ndarray, " row"]  # whether a key has a weight in its own row


@compiled
def _means(
    rows: Float64[np.ndarray, "key dim"],
    noise: Floats,
    targets: Ints,
    start: Ints,
    index: Ints,
    value: Floats,
    upwards: bool,
) -> Means:
    number, dim = targets.shape[0], rows.shape[1]
    convex, own = np.ones(number, np.bool_), np.zeros(number, np.bool_)
    length, size, doubt, nearest = np.zeros(number), np.zeros(number), np.zeros(number), np.full(number, np.inf)
    mean = np.empty(dim)
    for k in range(number):
        i, total = targets[k], 0.0
        mean[:] = 0.0
        for a in range(start[k], start[k + 1]):
            j, share = index[a], value[a]
            if not share >= 0.0 or share == np.inf:
                convex[k] = False
                continue
            if share == 0.0:
                continue
            total += share
            square = 0.0
            for t in range(dim):
                step = rows[j, t] - rows[i, t]
                mean[t] += share * step
                square += step * step
            far = np.sqrt(square)
            size[k] += share * far
            doubt[k] += share * (noise[j] + noise[i])
            nearest[k] = min(nearest[k], far)
            own[k] = own[k] or j == i
        if not total > 0.0:
            convex[k] = False
            continue
        square = 0.0
        for t in range(dim):
            part = mean[t] / total
            if upwards and t == dim - 1:
                part = min(part, 0.0)
            square += part * part
        length[k], size[k], doubt[k] = np.sqrt(square), size[k] / total, doubt[k] / total
    return Means(convex, length, size, doubt, nearest, own)


def through(
    keys: Float64[np.ndarray, "key d"], mean: Float64[np.ndarray, " d"], queries: QuerySet
) -> tuple[Float64[np.ndarray, "key r"], Floats, Floats, tuple[Floats, Floats]]:
    """Keys as the queries see them.

    Returns:
        `Aᵀ(k - mean)`, its error, and what the query set's own slack adds to it; `c·(k - mean)` and its error.
    """
    moving = np.column_stack([queries.axes, queries.center])
    centred = keys - mean
    far = np.abs(centred)
    sizes, beside = far @ np.sqrt(np.einsum("ij,ij->i", queries.axes, queries.axes)), far @ np.abs(queries.center)
    share = AMPLE * (sum(moving.shape) + 4) * EPS
    seen = centred @ moving
    return np.ascontiguousarray(seen[:, :-1]), share * sizes, queries.slack * sizes, (seen[:, -1], share * beside)


def _middle(keys: Float64[np.ndarray, "key d"]) -> Float64[np.ndarray, " d"]:
    """The mean key; far from zero the first one is off by its own rounding."""
    mean = mean_key(keys)
    return np.asarray(mean + mean_key(keys - mean))


def with_center(
    keys: Float64[np.ndarray, "key d"], mean: Float64[np.ndarray, " d"], queries: QuerySet, bias: Heights | None
) -> Heights | None:
    """A bias, and what the center's part outside the axes' span adds to the scores of keys."""
    if not queries.outside.any():
        return bias
    # Two products of length d with orthonormal columns: each coordinate is off by rounding of |center|, per column.
    d, columns = queries.missing.shape
    lost = AMPLE * (3 * d + 8) * EPS * columns**0.5 * float(np.linalg.norm(queries.center))
    value, _, _, (_, noise) = through(keys, mean, QuerySet(queries.outside, queries.outside[:, None]))
    return Heights(value[:, 0], noise + AMPLE * lost * np.abs(keys - mean).sum(axis=1)).plus(bias)


def _into_ball(points: Float64[np.ndarray, "target r"], upwards: bool) -> Float64[np.ndarray, "target r"]:
    """Points shortened until their length is at most 1, rounding included; upwards, if that is asked for."""
    points = np.nan_to_num(points, posinf=0.0, neginf=0.0)
    if upwards:
        points = points.copy()
        points[:, -1] = np.maximum(points[:, -1], 0.0)
    length = np.linalg.norm(points, axis=1) * (1 + (points.shape[1] + 8) * EPS)
    return np.asarray(points / np.maximum(length, 1.0)[:, None])


def _sums(values: Floats, start: Ints) -> Floats:
    """Sum of every row; 0 for an empty one."""
    found = np.zeros(len(start) - 1)
    full = np.flatnonzero(start[1:] > start[:-1])
    if len(full):
        found[full] = np.add.reduceat(values, start[full])
    return found
