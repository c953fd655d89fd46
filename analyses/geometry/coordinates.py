"""The coordinates in which a set of keys is solved: scaled, centred, equal keys merged, in their own span.

Also the products of queries and keys, score gaps and residuals that solvers use in these coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from ln_probe.analyses.geometry.compiled import compiled, compiled_in_order, room
from ln_probe.analyses.geometry.inputs import mean_key

# Queries in a block of scores: at least so many, and more while the block stays below 16 MB.
_QUERIES, _BLOCK = 64, 2_000_000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def scores_of(columns: Floats, query: Floats, count: int, out: Floats) -> None:
    """`out[j] = query · z_j` for the first `count` keys; `columns` holds the keys as columns, "dim key"."""
    dim = query.shape[0]
    for j in range(count):
        out[j] = 0.0
    t = 0
    while t + 4 <= dim:
        a, b, c, d = query[t], query[t + 1], query[t + 2], query[t + 3]
        for j in range(count):
            out[j] += a * columns[t, j] + b * columns[t + 1, j] + c * columns[t + 2, j] + d * columns[t + 3, j]
        t += 4
    while t < dim:
        a = query[t]
        for j in range(count):
            out[j] += a * columns[t, j]
        t += 1


@compiled
def query_norm(query: Floats, stretch: Floats, slope: Floats) -> float:
    """Length of a query in the keys' normalized coordinates; see `KeyCoordinates.stretch`."""
    flat = stretch.shape[0]
    total = 0.0
    if query.shape[0] == flat:
        for t in range(flat):
            total += float(query[t] / stretch[t]) ** 2
    else:
        lift = query[flat] / slope[flat]
        for t in range(flat):
            total += ((query[t] - lift * slope[t]) / stretch[t]) ** 2
        total += float(lift * lift)
    return float(np.sqrt(total))


@compiled
def residual_norm(x: Floats, stretch: Floats, slope: Floats) -> float:
    """Length of a difference of keys in the keys' normalized coordinates."""
    flat = stretch.shape[0]
    total = 0.0
    for t in range(flat):
        total += float(x[t] * stretch[t]) ** 2
    if x.shape[0] > flat:
        lift = x[flat] * slope[flat]
        for t in range(flat):
            lift += slope[t] * x[t]
        total += float(lift * lift)
    return float(np.sqrt(total))


def score_gaps(columns: Floats, targets: Ints, queries: Floats, group: Ints) -> tuple[Floats, Ints]:
    """Score of each target under its query minus the best score of a key of another group, and that key.

    Args:
        columns: all keys, "dim key".
        queries: a query per target, "target dim".
        group: representative of every key, " key".
    """
    members = np.bincount(group, minlength=len(group))
    gaps, rivals = np.empty(len(targets)), np.empty(len(targets), np.int64)
    step = max(_QUERIES, _BLOCK // len(group))
    for first in range(0, len(targets), step):
        block = slice(first, first + step)
        some = targets[block]
        scores = queries[block] @ columns
        here = np.arange(len(some))
        own = scores[here, some]
        scores[here, some] = -np.inf
        for k in np.flatnonzero(members[group[some]] > 1):
            scores[k, group == group[some[k]]] = -np.inf
        rivals[block] = scores.argmax(axis=1)
        gaps[block] = own - scores[here, rivals[block]]
    rivals[~np.isfinite(gaps)] = -1  # nothing to compete with
    return gaps, rivals


@compiled
def residuals(rows: Floats, targets: Ints, sizes: Ints, weights: Floats, indices: Ints, biased: bool) -> Floats:
    """How far each target is from its convex combination; if `biased`, a surplus of bias does not count."""
    number, dim = targets.shape[0], rows.shape[1]
    found = room(number)
    rest = room(dim)
    used = 0
    for k in range(number):
        for t in range(dim):
            rest[t] = -rows[targets[k], t]
        for a in range(used, used + sizes[k]):
            for t in range(dim):
                rest[t] += weights[a] * rows[indices[a], t]
        used += sizes[k]
        if biased:
            rest[dim - 1] = min(rest[dim - 1], 0.0)
        total = 0.0
        for t in range(dim):
            total += rest[t] * rest[t]
        found[k] = np.sqrt(total)
    return found


# The one tolerance of the geometry, relative to the RMS norm of the centred keys. It must be above what
# float32 rounding leaves of keys that lie in a plane: of 5,400 interior keys projected in float32 (d = 4 to
# 64), 1e-7 mistakes 6 for vertices, 1e-8 669 of them. And it must be small, since keys on a sphere that are
# closer than sqrt(8 TAU) to both neighbours count as inside: of 30,000 LayerNorm outputs at d = 3 (60 at
# a time, on a circle) 1e-7 loses 3, and none from d = 4 on. float64 arithmetic is 1e9 times finer.
TAU = 1e-7

# A direction in which no key lies further than this from the mean (relative to the RMS norm) is not part of
# the span: even 1000 such directions together stay below TAU / 3.
RANK_TOLERANCE = 1e-9

# Keys whose spread is below this share of their largest entry are centred twice: the first mean is off by its own
# rounding.
_FAR = 1e-6

# eigh of the Gram matrix resolves a direction only to the square root of float64; above this ratio of the
# smallest to the largest eigenvalue it has at least six digits, below it the singular values are computed
# from the keys themselves.
_GRAM_IS_ENOUGH = 1e-6

# A bias that is an affine function of the keys up to this share of its spread changes no verdict (science.md
# §2: the function's slope can be absorbed into the query).
_AFFINE_BIAS = 1e-12


@dataclass(frozen=True)
class KeyCoordinates:
    """One set of keys, ready to be judged.

    Two coordinate systems, each a linear map from the one before:

    * *normalized*: centred, divided by the RMS norm of the centred keys (a bias: centred, divided by its own
      RMS, and appended as a last coordinate). TAU is a length here.
    * *white*: an orthonormal basis of the span of the representatives, every direction divided by the keys' RMS along
      it (`stretch`); of a bias only what is not an affine function of the key (`slope`) is left.
    """

    normalized: Float64[np.ndarray, "key dim"]
    representative: Int64[np.ndarray, " key"]  # the first key of those equal to it within TAU
    first: Int64[np.ndarray, " key"]  # the first key within TAU of it, itself if there is none before
    leaders: Int64[np.ndarray, " group"]  # the representatives, in order
    white: Float64[np.ndarray, "group rank"]
    basis: Float64[np.ndarray, "d plain"]  # columns: the directions of white, without the bias
    stretch: Float64[np.ndarray, " plain"]
    slope: Float64[np.ndarray, " _"]  # of the bias on the white keys; last: the RMS of the residual
    lifted: bool  # whether white has a last coordinate for the bias
    biased: bool  # whether normalized has one
    scale: float  # the RMS norm of the centred keys: normalized = (key - mean) / scale
    bias_scale: float

    def query(self, white: Float64[np.ndarray, "query rank"]) -> Float64[np.ndarray, "query dim"]:
        """Queries over white keys as unit queries over normalized keys (zero stays zero)."""
        d, rank = len(self.basis), len(self.stretch)
        normalized = np.zeros((len(white), self.normalized.shape[1]))
        plain = white[:, :rank]
        if self.lifted:
            lift = np.maximum(white[:, rank:], 0.0) / self.slope[rank]
            plain = plain - lift * self.slope[:rank]
            normalized[:, d:] = lift
        normalized[:, :d] = (plain / self.stretch) @ self.basis.T
        return unit_rows(normalized)


def unit_rows(rows: Float64[np.ndarray, "row dim"]) -> Float64[np.ndarray, "row dim"]:
    """Each row divided by its length; zero rows stay zero."""
    return _unit_rows(np.ascontiguousarray(rows))


@compiled_in_order
def _unit_rows(rows: Floats) -> Floats:
    found = np.empty(rows.shape)
    for i in range(rows.shape[0]):
        largest, total = 0.0, 0.0
        for t in range(rows.shape[1]):
            largest = max(largest, abs(rows[i, t]))
        for t in range(rows.shape[1]):  # over the largest first, so that no square is out of range
            found[i, t] = rows[i, t] / largest if largest > 0.0 else rows[i, t]
            total += found[i, t] * found[i, t]
        if total > 0.0:
            length = math.sqrt(total)
            for t in range(rows.shape[1]):
                found[i, t] /= length
    return found


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


def normalize(
    keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None
) -> tuple[Float64[np.ndarray, "key dim"], float, float]:
    """Centred keys over their RMS norm, the bias likewise, and both scales (0 if there is no spread)."""

    def centred(values: Float64[np.ndarray, "key n"]) -> tuple[Float64[np.ndarray, "key n"], float]:
        largest = float(np.abs(values).max())
        if largest == 0.0:
            return np.zeros_like(values), 0.0
        exponent = int(np.frexp(largest)[1])  # powers of two are exact, and keep squares in range
        values = np.ldexp(values, -exponent)  # (a copy: what follows is done in place)
        values -= mean_key(values)
        rms = float(np.sqrt(np.einsum("ij,ij->", values, values) / len(values)))
        if rms <= _FAR:
            if (values == values[0]).all():
                return np.zeros_like(values), 0.0
            near, rms = centred(values)
            return near, float(np.ldexp(rms, exponent))
        values /= rms
        return values, float(np.ldexp(rms, exponent))

    plain, scale = centred(keys)
    if bias is None:
        return plain, scale, 0.0
    lift, bias_scale = centred(bias[:, None])
    return np.concatenate([plain, lift], axis=1), scale, bias_scale


@compiled
def _neighbours(
    rows: Float64[np.ndarray, "key dim"],
    order: Int64[np.ndarray, " key"],
    place: Float64[np.ndarray, " key"],
    tau: float,
) -> tuple[Int64[np.ndarray, " key"], Int64[np.ndarray, " key"]]:
    """For every key the first key that leads a group and lies within `tau` of it, and the first of all that do.

    `order` sorts the keys by `place`.
    """
    number, dim = rows.shape
    leader, first = np.full(number, -1), np.arange(number)
    rank = np.empty(number, np.int64)
    for k in range(number):
        rank[order[k]] = k
    for i in range(number):
        leads = leader[i] < 0
        if leads:
            leader[i] = i
        for side in (-1, 1):
            k = rank[i] + side
            while 0 <= k < number and abs(place[order[k]] - place[i]) <= tau:
                j = order[k]
                k += side
                if j < first[i] or (leads and leader[j] < 0):
                    square = 0.0
                    for t in range(dim):
                        square += (rows[i, t] - rows[j, t]) ** 2
                        if square > tau * tau:
                            break
                    if square <= tau * tau:
                        first[i] = min(first[i], j)
                        if leads and leader[j] < 0:
                            leader[j] = i
    return leader, first


def _generic(dim: int) -> Float64[np.ndarray, " dim"]:
    """A direction with nothing special (multiples of an irrational number modulo 1), of unit length: keys within tau
    are within tau along it, and few others are."""
    direction = np.modf(np.arange(1, dim + 1) * ((1 + 5**0.5) / 2))[0] - 0.5
    return np.asarray(direction / float(np.linalg.norm(direction)))


def merge(rows: Float64[np.ndarray, "key dim"]) -> tuple[Int64[np.ndarray, " key"], Int64[np.ndarray, " key"]]:
    """Index of a representative of every key, to be solved for in its place, and of the first key that equals it.

    A group is what lies within TAU of its first key and belongs to no earlier group, so chains of near-equal keys do
    not run together. Which keys lead depends on their order; what is found for a group counts for a key only if the
    checker proves it of that key.
    """
    place = rows @ _generic(rows.shape[1])
    return _neighbours(rows, np.argsort(place, kind="stable"), place, TAU)


def span(rows: Float64[np.ndarray, "key d"]) -> Float64[np.ndarray, "d rank"]:
    """Orthonormal basis of the directions in which centred keys extend beyond RANK_TOLERANCE."""
    number, dim = rows.shape
    if number > dim:
        values, vectors = np.linalg.eigh(rows.T @ rows)
        there = values > _GRAM_IS_ENOUGH * values[-1]
        # The other directions must be empty to within the tolerance, or the Gram matrix cannot tell.
        if there.all() or np.abs(rows @ vectors[:, ~there]).max(initial=0.0) <= RANK_TOLERANCE:
            return np.ascontiguousarray(vectors[:, there][:, ::-1])
        rows_or_triangle = np.asarray(np.linalg.qr(rows, mode="r"))
    else:
        rows_or_triangle = rows
    vectors = np.linalg.svd(rows_or_triangle, full_matrices=False)[2].T
    extent = np.abs(rows @ vectors).max(axis=0, initial=0.0)
    return np.ascontiguousarray(vectors[:, extent > RANK_TOLERANCE])


def coordinates(keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None = None) -> KeyCoordinates:
    """Merge equal keys and find the coordinates in which the rest are judged."""
    normalized, scale, bias_scale = normalize(keys, bias)
    biased = bias is not None
    representative, first = merge(normalized)
    leaders = np.flatnonzero(representative == np.arange(len(keys)))
    rows = normalized[leaders]
    plain = rows[:, : keys.shape[1]]
    plain = plain - mean_key(plain)
    basis = span(plain)
    flat = plain @ basis
    stretch = np.sqrt(np.einsum("ij,ij->j", flat, flat) / len(flat))
    white = flat
    white /= stretch
    rank = len(stretch)
    slope = np.zeros(rank + 1)
    lifted = False
    if biased:
        lift = rows[:, -1] - rows[:, -1].mean()
        slope[:rank] = white.T @ lift / len(white)
        rest = lift - white @ slope[:rank]
        rest -= rest.mean()
        slope[rank] = np.sqrt(np.mean(rest * rest))
        lifted = bool(slope[rank] > _AFFINE_BIAS)
        if lifted:
            white = np.concatenate([white, rest[:, None] / slope[rank]], axis=1)
    return KeyCoordinates(
        normalized=normalized,
        representative=representative,
        first=first,
        leaders=leaders,
        white=white,
        basis=basis,
        stretch=stretch,
        slope=slope,
        lifted=lifted,
        biased=biased,
        scale=scale,
        bias_scale=bias_scale,
    )
