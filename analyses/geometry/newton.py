"""The largest softmax weight over a set of queries: Newton's method with a certified gap, compiled.

The set is a solid ellipsoid `center + axes @ u`, `|u| <= 1`: what a head can produce from a normalized residual stream,
or the part of it that occurs. For scores `s_j = a_j + M_j·u` the function `f(u) = log Σ_j exp(s_j) - s_i = -log w_i(u)`
is convex, so at any point of the unit ball, with gradient `g`, no query of the ball has a weight above

    w_i(u) · exp(g·u + |g|)

(the Frank-Wolfe gap: g·(u - v) is largest at v = -g/|g|). A step goes towards the minimum of the second-order model of
f over the ball. On the sphere that is the v with `(H + c) v = H u - g` and `|v| = 1`; c, which is -g·v there, is taken
to be -g·u, and the system is solved by conjugate gradients from v = u, a dozen products with the keys that share the
attention (an inexact Newton method: Nocedal & Wright, Numerical Optimization, 2006, §7.1). A line search cuts the step
short if the model was too bold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.compiled import compiled, room, table
from ln_probe.analyses.geometry.coordinates import Floats, Ints, scores_of
from ln_probe.analyses.geometry.inputs import ScoreSpace
from ln_probe.analyses.geometry.wolfe import BUDGET

# Keys with less than this share of the largest competing weight are left out of the second-order model (never
# of the value, the gradient or the bound). Measured at d = 64, 512 heavy-tailed keys, scores up to 50: 1e-3,
# 1e-2 and 5e-2 take 6.4, 7.3 and 9.6 steps and 0.79, 0.54 and 0.49 ms per key.
_MODEL_SHARE = 2e-2
# A step of which the line search leaves less than _BOLD was blocked by keys that the model left out: it is
# made finer by _FINER, down to _FINEST.
_BOLD, _FINER, _FINEST = 0.2, 0.1, 1e-12
# Conjugate directions per step at most, and the share of the squared residual at which they end. Ended at 1e-2, steps
# are as many and a tenth cheaper, but the last query and its bound may be far from the best at other positions.
_CONJUGATE, _SOLVED = 30, 1e-4
# c is at least this share of |g|: far from the minimum, or if that lies inside the ball, -g·u can be zero or less.
_LEAST = 0.1
# A line search ends where the slope is down to this share of what it was.
_FLAT, _SEARCH_STEPS = 0.3, 40
# An exponential takes as long as so many multiply-adds of a product of keys.
_EXP = 16
# A model step that gains less than this share of what the linear model promises has met rounding.
_TRUST = 0.01


@compiled
def _curvature(spread: Floats, many: int, x: Floats, short: Floats, out: Floats) -> None:
    """`out = spreadᵀ spread x`, the second derivative of f along x; `short` receives `spread x`."""
    dim = x.shape[0]
    for t in range(dim):
        out[t] = 0.0
    for a in range(many):
        total = 0.0
        for t in range(dim):
            total += spread[a, t] * x[t]
        short[a] = total
    for a in range(many):
        for t in range(dim):
            out[t] += short[a] * spread[a, t]


@compiled
def _model_minimum(spread: Floats, many: int, u: Floats, gradient: Floats, v: Floats) -> int:
    """Nearly minimize `g·(v-u) + |spread (v-u)|²/2` over the unit ball; returns multiply-adds."""
    dim, spent = u.shape[0], 0
    rest, along, curved, short = room(dim), room(dim), room(dim), room(many)
    inner, length = 0.0, 0.0
    for t in range(dim):
        inner += gradient[t] * u[t]
        length += gradient[t] * gradient[t]
    shift = max(-inner, _LEAST * np.sqrt(length))
    first = 0.0
    for t in range(dim):
        v[t] = u[t]
        rest[t] = -gradient[t] - shift * u[t]
        along[t] = rest[t]
        first += rest[t] * rest[t]
    square = first
    for _ in range(min(_CONJUGATE, dim)):
        if square <= _SOLVED * first:
            break
        _curvature(spread, many, along, short, curved)
        spent += 2 * many * dim
        steep = 0.0
        for t in range(dim):
            curved[t] += shift * along[t]
            steep += along[t] * curved[t]
        step, before = square / steep, square
        square = 0.0
        for t in range(dim):
            v[t] += step * along[t]
            rest[t] -= step * curved[t]
            square += rest[t] * rest[t]
        for t in range(dim):
            along[t] = rest[t] + square / before * along[t]
    size = 0.0
    for t in range(dim):
        size += v[t] * v[t]
    size = np.sqrt(size)
    factor = 1.0 / size if size > 0.0 else 1.0
    if 0.0 < size < 1.0:  # (H + c) v = H u - g: along v the model still falls, by c |v|
        _curvature(spread, many, v, short, curved)
        spent += 2 * many * dim
        steep = 0.0
        for t in range(dim):
            steep += v[t] * curved[t]
        if steep > 0.0:
            factor = min(factor, 1.0 + shift * size * size / steep)
    for t in range(dim):
        v[t] *= factor
    return spent


@compiled
def _log_sum(base: Floats, change: Floats, t: float, out: Floats) -> float:
    """`log Σ exp(base + t·change)`; `out` receives the normalized weights."""
    count = base.shape[0]
    largest = -np.inf
    for j in range(count):
        out[j] = base[j] + t * change[j]
        largest = max(largest, out[j])
    total = 0.0
    for j in range(count):
        out[j] = np.exp(out[j] - largest)
        total += out[j]
    for j in range(count):
        out[j] /= total
    return float(largest + np.log(total))


@compiled
def _gradient(rows: Floats, i: int, weight: Floats, u: Floats, gradient: Floats, mean: Floats) -> tuple[float, float]:
    """Gradient of f at u, and the mean key; returns how much lower f can be in the ball, and |gradient|."""
    count, dim = rows.shape
    others = 0.0
    for t in range(dim):
        gradient[t] = 0.0
    for j in range(count):
        if j != i and weight[j] > 0.0:
            others += weight[j]
            for t in range(dim):
                gradient[t] += weight[j] * rows[j, t]
    length, inner = 0.0, 0.0
    for t in range(dim):
        mean[t] = gradient[t] + weight[i] * rows[i, t]
        gradient[t] -= others * rows[i, t]
        length += gradient[t] * gradient[t]
        inner += gradient[t] * u[t]
    length = np.sqrt(length)
    return max(inner + length, 0.0), length


@compiled
def _spread(rows: Floats, i: int, weight: Floats, mean: Floats, model: float, spread: Floats) -> int:
    """Rows whose products sum to the second derivative of f; returns how many."""
    count, dim = rows.shape
    rival = 0.0
    for j in range(count):
        if j != i:
            rival = max(rival, weight[j])
    many = 0
    for j in range(count):
        if weight[j] > model * rival:
            root = np.sqrt(weight[j])
            for t in range(dim):
                spread[many, t] = root * (rows[j, t] - mean[t])
            many += 1
    return many


@compiled
def _line_search(
    scores: Floats, change: Floats, i: int, value: float, slope: float, trial: Floats
) -> tuple[float, float, int]:
    """Share of a step (at most 1) at which f has nearly stopped falling, f there (weights in `trial`), trials made."""
    count = scores.shape[0]
    low, high, share, lower = 0.0, 1.0, 1.0, value
    searched = 0
    for _ in range(_SEARCH_STEPS):
        searched += 1
        lower = _log_sum(scores, change, share, trial) - scores[i] - share * change[i]
        first, second = 0.0, 0.0
        for j in range(count):
            first += trial[j] * change[j]
            second += trial[j] * change[j] * change[j]
        second -= first * first
        first -= change[i]
        if lower < value and (abs(first) <= -_FLAT * slope or (share == 1.0 and first <= 0.0)):
            break
        if first > 0.0:
            high = share
        else:
            low = share
        share = share - first / second if second > 0.0 else 0.5 * (low + high)
        if not low < share < high:
            share = 0.5 * (low + high)
    return share, lower, searched


@compiled
def largest_weights(
    rows: Floats,
    columns: Floats,
    offset: Floats,
    targets: Ints,
    counts: Ints,
    starts: Floats,
    tolerance: float,
    most: int,
    budget: float,
) -> tuple[Floats, Floats, Floats, Floats, Ints]:
    """Largest softmax weight of each target over the unit ball of `u`, for scores `offset + rows @ u`.

    Args:
        rows, columns: "key dim" and "dim key", in nats.
        counts: of each target, among how many keys, the first ones, its weight is taken.
        starts: points of the ball, "start target dim"; each target starts from its best one.
        tolerance: stop when the weight is known to this, or after `most` steps.
        budget: multiply-adds per target after which it stops with the bounds found so far.

    Returns:
        weights found, upper bounds, the points "target dim" that prove the one and the other, steps taken. Bounds
        further apart than the tolerance say that steps or budget ran out.
    """
    whole, dim = rows.shape
    number = targets.shape[0]
    found, bound = room(number), room(number)
    points, proofs = table(number, dim), table(number, dim)
    points[:], proofs[:] = 0.0, 0.0
    steps = np.zeros(number, np.int64)
    all_scores, all_change, all_weight, all_trial = room(whole), room(whole), room(whole), room(whole)
    gradient, v, work, mean = room(dim), room(dim), room(dim), room(dim)
    spread = table(whole, dim)
    nothing = np.zeros(whole)
    for k in range(number):
        i, count = targets[k], counts[k]
        seen, scores, change = rows[:count], all_scores[:count], all_change[:count]
        weight, trial = all_weight[:count], all_trial[:count]
        u = points[k]
        value = np.inf
        for choice in range(starts.shape[0]):
            scores_of(columns, starts[choice, k], count, change)
            for j in range(count):
                change[j] += offset[j]
            other = _log_sum(change, nothing[:count], 0.0, trial) - change[i]
            if other < value or choice == 0:
                value = other
                for t in range(dim):
                    u[t] = starts[choice, k, t]
                for j in range(count):
                    scores[j], weight[j] = change[j], trial[j]
        found[k], bound[k], model = 0.0, 1.0, _MODEL_SHARE
        spent = float(starts.shape[0] * count * (dim + _EXP))
        for step in range(most):
            steps[k] = step
            gap, length = _gradient(seen, i, weight, u, gradient, mean)
            found[k] = np.exp(-value)
            reach = min(1.0, np.exp(gap - value))
            if reach <= bound[k]:
                bound[k] = reach
                for t in range(dim):
                    proofs[k, t] = u[t]
            spent += count * dim
            if bound[k] - found[k] <= tolerance or dim == 0 or spent > budget:
                break
            many = _spread(seen, i, weight, mean, model, spread)
            spent += _model_minimum(spread, many, u, gradient, v)
            slope = 0.0
            for t in range(dim):
                work[t] = v[t] - u[t]
                slope += gradient[t] * work[t]
            if slope > -_TRUST * gap:  # rounding in the model: straight to where the gradient points
                slope = -gap
                for t in range(dim):
                    work[t] = -gradient[t] / length - u[t]
            scores_of(columns, work, count, change)
            share, lower, searched = _line_search(scores, change, i, value, slope, trial)
            spent += count * (dim + searched * _EXP)
            if not lower < value:
                if model < _FINEST:
                    break
                model *= _FINER
                continue
            if share < _BOLD:
                model *= _FINER
            value = lower
            for t in range(dim):
                u[t] += share * work[t]
            for j in range(count):
                scores[j] += share * change[j]
                weight[j] = trial[j]
    return found, bound, points, proofs, steps


# The largest weight is found to this (absolute): attention is read to two digits.
WEIGHT_GAP = 0.01

# Share of the gap that is left to the solver; the rest is for the rounding that a proof takes off.
_PROOF = 1 - 1e-4

# Newton steps per key. Heads with scores of tens of nats take 1 to 20. With hundreds of nats log w has kinks
# and takes a hundred; of 512 lognormal keys with scores of up to 800 nats one was left with a wider bound.
STEPS = 400


@dataclass(frozen=True)
class Attainable:
    """Largest weights of the keys of one set over one set of queries."""

    weight: Float64[np.ndarray, " key"]  # that some query gives
    upper: Float64[np.ndarray, " key"]  # that no query exceeds
    point: Float64[np.ndarray, "key r"]  # u of the query that gives `weight`
    proof: Float64[np.ndarray, "key r"]  # u at which the gradient proves `upper`


def attainable(
    where: ScoreSpace,
    starts: Float64[np.ndarray, "key r"] | None = None,
    gap: float = WEIGHT_GAP,
    only: Int64[np.ndarray, " some"] | None = None,
    budget: float = BUDGET,
) -> Attainable:
    """The largest softmax weight of every key over a set of queries, as the solver finds it: `prove` checks it.

    Args:
        where: the keys through the set of queries.
        starts: directions of u in which good queries are expected, of any length; NaN or 0 where there are
            none.
        gap: how far apart weight and upper bound may be.
        only: of these keys (among all of them): the result and `starts` have a row for each.
        budget: multiply-adds per key, after which its bracket stays as wide as it is.
    """
    rows, offset, gap = where.rows, where.offset, gap * _PROOF
    if offset is None:
        offset = np.zeros(len(rows))
    targets = np.arange(len(rows)) if only is None else only
    first = into_ball(rows[targets])
    both = np.stack([first] if starts is None else [first, into_ball(np.nan_to_num(starts))])
    columns, counts = np.ascontiguousarray(rows.T), np.full(len(targets), len(rows))
    weight, upper, point, proof, _ = largest_weights(
        rows, columns, offset, targets, counts, both, gap, STEPS, float(budget)
    )
    left = np.flatnonzero(upper - weight > gap)
    if len(left):  # once more, from the middle
        middle = np.zeros((1, len(left), rows.shape[1]))
        again = largest_weights(rows, columns, offset, targets[left], counts[left], middle, gap, STEPS, float(budget))
        better, tighter = again[0] > weight[left], again[1] < upper[left]
        weight[left[better]], point[left[better]] = again[0][better], again[2][better]
        upper[left[tighter]], proof[left[tighter]] = again[1][tighter], again[3][tighter]
    return Attainable(weight, upper, point, proof)


def into_ball(rows: Float64[np.ndarray, "key r"]) -> Float64[np.ndarray, "key r"]:
    """Each row over its length; zero stays zero."""
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return rows / np.where(length > 0.0, length, 1.0)
