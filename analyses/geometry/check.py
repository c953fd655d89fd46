"""Prove certificates: nothing leaves the geometry that this module did not prove first.

This is plain arithmetic on the keys as they were given. It shares the compiler with the solvers, and nothing else: not
the merging of equal keys, nor their coordinates.

A sum of m products, in any order and with or without fused multiplication, is off by at most m·eps times the sum of
their magnitudes (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, §3.1). So every score carries a bound
of its error, which is taken off lower bounds and added to upper ones; this bound is itself computed with the factor
`AMPLE`, which covers its own rounding and that of the few operations that follow. Centring is harmless: a difference
rounds to within eps/2 of *itself*, and any shift common to all keys cancels. What underflows is below `UNDERFLOW`.

The claims, for key i among points z (verdicts: the keys over their RMS norm; margins and attention: `Aᵀk`; a bias over
its own RMS is one more coordinate, in which a query looks upwards only):

* `query_lead`: a unit query q has q·z_i - q·z_j of at least this for every j that counts.
* `weights_miss`: convex weights of other keys have their mean within this of z_i (and at least its bias).
* `gap_at_least`, `gap_at_most`: the best gap over |u| ≤ 1, max_u min_j [(s_i - s_j)], is at least what one u gives; and
  for convex weights w of other keys at most Σ w_j (h_i - h_j) + |Σ w_j (z_i - z_j)| (h: scores of the center), since a
  minimum is no more than any mean.
* `attention_bounds`: the largest softmax weight is at least what one u gives; and for any convex weights p of all keys
  at most exp(-[H(p) + Σ p_j (h_j - h_i) - |Σ p_j (z_j - z_i)|]), H the entropy, since log Σ exp s_j ≥ Σ p_j s_j + H(p)
  (Gibbs).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ln_probe.analyses.geometry.compiled import compiled, compiled_in_place, compiled_part

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The one tolerance of the geometry, relative to the RMS norm of the centred keys: above what float32 rounding leaves of
# keys in a plane (of 5,400 interior keys, 1e-7 mistakes 6 for vertices, 1e-8 669), and small, since keys on a sphere
# closer than sqrt(8 TAU) to both neighbours count as inside (of 30,000 LayerNorm outputs on a circle 3).
TAU = 1e-7
# Both sides of tau are decided up to this share of it: the RMS norm that tau is relative to is itself rounded.
SLACK = 1e-6

EPS = float(np.finfo(np.float64).eps)
# A bound of rounding errors times this covers its own rounding, and that of the few operations that follow.
AMPLE = 2.0
# More than underflow takes from scores and lengths of keys and queries that are about 1.
UNDERFLOW = 1e-150


class CertificateError(AssertionError):
    """A certificate does not prove its verdict; the message says which and by how much."""


class Space(NamedTuple):
    """Points, what is added to their products with a query, and the error of both."""

    rows: Floats  # "key dim"
    columns: Floats  # "dim key"
    offset: Floats  # zeros: nothing is added
    length: Floats  # of each row
    noise: Floats  # error of a score as it is stored, under any |u| <= 1; and of the length of a row
    error: Floats  # error of a score as it is computed


@compiled
def make_space(rows: Floats, offset: Floats, noise: Floats) -> Space:
    """Return the space of some points from the noise that they have by themselves."""
    count, dim = rows.shape
    columns, length, error, stored = np.empty((dim, count)), np.zeros(count), np.empty(count), np.empty(count)
    for j in range(count):
        for t in range(dim):
            columns[t, j] = rows[j, t]
    for t in range(dim):
        for j in range(count):
            length[j] += columns[t, j] * columns[t, j]
    for j in range(count):
        length[j] = np.sqrt(length[j])
        stored[j] = noise[j] + UNDERFLOW if length[j] > 0.0 else noise[j]
        error[j] = stored[j] + AMPLE * (dim + 4) * EPS * (length[j] + abs(offset[j]))
    return Space(rows, columns, offset, length, stored, error)


@compiled_part
def scores_under(space: Space, query: Floats, out: Floats) -> None:
    """Compute the score of every point under a query."""
    dim, count = space.columns.shape
    for j in range(count):
        out[j] = space.offset[j]
    t, columns = 0, space.columns
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


@compiled_in_place
def query_lead(space: Space, i: int, query: Floats, absent: Bools, upwards: bool, out: Floats) -> tuple[float, int]:
    """Return how far a query of length one, along `query`, is proved to score key i above all that are not absent.

    Returns:
        the lead, minus infinity for a query that proves nothing; and the key that comes nearest.
    """
    dim, count = space.columns.shape
    square, rival, best = 0.0, -1, -np.inf
    for t in range(dim):
        square += query[t] * query[t]
    if not (square > 0.0 and square < np.inf) or (upwards and query[dim - 1] < 0.0):
        return -np.inf, -1
    scores_under(space, query, out)
    length = np.sqrt(square)
    for j in range(count):
        if not absent[j] and j != i:
            score = out[j] + length * space.error[j]
            if score > best:
                best, rival = score, j
    return ((out[i] - length * space.error[i]) - best) / (length * (1.0 + (dim + 8) * EPS)), rival


@compiled_in_place
def weights_miss(
    space: Space, i: int, member: Ints, value: Floats, used: int, upwards: bool, out: Floats
) -> tuple[float, float]:
    """Return bounds of how far the mean of weights is from key i, and the distance of the nearest key that has one.

    Returns:
        the upper bound of the length of Σ w_j (z_j - z_i), a surplus upwards not counted, infinite if the weights are
        not convex weights of other keys; and the smallest |z_j - z_i| of a weight that is not zero.
    """
    count, dim = space.rows.shape
    total, size, noise, nearest = 0.0, 0.0, 0.0, np.inf
    for t in range(dim):
        out[t] = 0.0
    for a in range(used):
        j, share = member[a], value[a]
        if not share >= 0.0 or share == np.inf or j == i or j < 0 or j >= count:
            return np.inf, 0.0
        if share == 0.0:
            continue
        square = 0.0
        for t in range(dim):
            step = space.rows[j, t] - space.rows[i, t]
            out[t] += share * step
            square += step * step
        far = np.sqrt(square)
        total += share
        size += share * far
        noise += share * (space.noise[j] + space.noise[i])
        nearest = min(nearest, far)
    if not total > 0.0:
        return np.inf, 0.0
    if upwards:
        out[dim - 1] = min(out[dim - 1], 0.0)
    square = 0.0
    for t in range(dim):
        part = out[t] / total
        square += part * part
    return np.sqrt(square) + (noise + (used + dim + 8) * AMPLE * EPS * size) / total, nearest


@compiled_part
def into_ball(u: Floats, dim: int) -> None:
    """Shorten a point until its length is at most 1, rounding included; what is not finite becomes 0."""
    square = 0.0
    for t in range(dim):
        if not np.isfinite(u[t]):
            u[t] = 0.0
        square += u[t] * u[t]
    length = np.sqrt(square) * (1.0 + (dim + 8) * EPS)
    if length > 1.0:
        for t in range(dim):
            u[t] /= length


@compiled_in_place
def gap_at_least(space: Space, i: int, u: Floats, out: Floats) -> float:
    """Return a lower bound of the smallest gap of key i to any other key under u, in the unit ball."""
    count = space.rows.shape[0]
    scores_under(space, u, out)
    best = -np.inf
    for j in range(count):
        if j != i:
            best = max(best, out[j] + space.error[j])
    return float((out[i] - space.error[i]) - best)


@compiled_in_place
def gap_at_most(space: Space, i: int, member: Ints, value: Floats, used: int, out: Floats) -> float:
    """Return what convex weights of other keys allow the best gap to be; infinite if they are not such weights."""
    miss, _ = weights_miss(space, i, member, value, used, used < 0, out)
    if miss == np.inf:
        return np.inf
    total, mean, size = 0.0, 0.0, 0.0
    for a in range(used):
        lead = value[a] * (space.offset[i] - space.offset[member[a]])
        total += value[a]
        mean += lead
        size += abs(lead)
    return float(miss + (mean + size * (used + 8) * AMPLE * EPS) / total)


@compiled_in_place
def attention_bounds(
    space: Space, i: int, u: Floats, radius: float, scratch: Floats, mean: Floats
) -> tuple[float, float]:
    """Return the softmax weight that u gives key i, and what its weights prove that no query exceeds.

    Args:
        u: a point no further than `radius` from the middle of the ball.
        radius: of the ball of queries, at most 1.
        scratch, mean: "2 key" and "r", are written to.
    """
    count, dim = space.rows.shape
    out, odds = scratch[0], scratch[1]
    scores_under(space, u, out)
    largest, error = -np.inf, 0.0
    for j in range(count):
        largest = max(largest, out[j])
        error = max(error, space.error[j])
    total = 0.0
    for j in range(count):
        out[j] -= largest
        odds[j] = np.exp(out[j])
        total += odds[j]
    few = (count + 16) * AMPLE * EPS
    logarithm = np.log(total)
    weight = np.exp(out[i] - logarithm - (space.error[i] + error + few)) * (1.0 - few)
    # H(p) + Σ p_j (h_j - h_i) - |Σ p_j (z_j - z_i)|, for p as they are computed
    entropy, lead, far, high, doubt = 0.0, 0.0, space.length[i], abs(space.offset[i]), space.noise[i]
    for t in range(dim):
        mean[t] = -space.rows[i, t]
    for j in range(count):
        share = odds[j] / total
        if share > 0.0:
            entropy -= share * (out[j] - logarithm)
            lead += share * (space.offset[j] - space.offset[i])
            high += share * abs(space.offset[j])
            far += share * space.length[j]
            doubt += share * space.noise[j]
            if share * space.length[j] > 1e-30:  # less is far below what `doubt` allows for
                for t in range(dim):
                    mean[t] += share * space.rows[j, t]
    square = 0.0
    for t in range(dim):
        square += mean[t] * mean[t]
    doubt += few * (far + 1.0 + np.log(float(count)) + entropy + high)
    level = entropy + lead - radius * np.sqrt(square) - doubt
    return float(weight), min(float(np.exp(min(max(-level, -700.0), 0.0)) * (1.0 + few)), 1.0)
