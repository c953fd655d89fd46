"""The largest softmax weight over a set of queries: Newton's method with a bound from above, compiled.

The set is a solid ellipsoid `center + axes @ u`, `|u| <= 1`: what a head can produce from a normalized
residual stream, or the part of it that occurs. For scores `s_j = h_j + z_j·u` the function
`f(u) = log Σ_j exp(s_j) - s_i = -log w_i(u)` is convex. So at any point of the unit ball, with
gradient `g`, no query of the ball has a weight above

    w_i(u) · exp(g·u + |g|)

(the Frank-Wolfe gap: g·(u - v) is largest at v = -g/|g|). A step goes towards the minimum of the
second-order model of f over the ball. On the sphere that is the v with `(H + c) v = H u - g` and
`|v| = 1`; c, which is -g·v there, is taken to be -g·u. The system is solved by conjugate gradients
from v = u: a dozen products with the keys that share the attention (an inexact Newton method: Nocedal
& Wright, Numerical Optimization, 2006, §7.1). A line search cuts a step short.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ln_probe.analyses.geometry.check import Attention, Floats, Ints, Scratch, Space, keep_attention, space_of
from ln_probe.analyses.geometry.compiled import compiled_in_place, compiled_part, compiled_slice
from ln_probe.analyses.geometry.nearest import combine

# Keys with less than this share of the largest competing weight are left out of the second-order
# model. With 1e-3 steps are 12 % fewer and take half as long again.
MODEL_SHARE = 2e-2
# A step of which the line search leaves less than BOLD was blocked by keys that the model left out:
# it is made finer by FINER, down to FINEST.
BOLD, FINER, FINEST = 0.2, 0.1, 1e-12
# Conjugate directions per step at most, and the share of the squared residual at which they end.
CONJUGATE, SOLVED = 30, 1e-4
# c is at least this share of |g|: -g·u can be zero or less.
LEAST = 0.1
# A line search ends where the slope is down to this share of what it was.
FLAT, SEARCH_STEPS = 0.3, 40
# A model step that gains less than this share of what the linear model promises is rounding.
TRUST = 0.01
# The largest weight is found to this share of what was asked for; the proof rounds.
PROOF = 1 - 1e-4
# Newton steps per key. Heads with scores of tens of nats take 1 to 20; with hundreds of nats log w
# has kinks and takes a hundred.
NEWTON_STEPS = 400

# exp(x) = 2^k exp(r): log2(e), the two parts of log(2), what rounds to whole numbers when it is
# added (its lowest bits are then k), and exponents below which it is 0.
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
ROUNDER, LOWEST = 6755399441055744.0, -700.0


# Rows of `Room.keyed`, a number for each key, and of `Room.vectors`, one for each coordinate.
SCORES, CHANGE, WEIGHT, TRIAL, SHORT = range(5)
GRADIENT, MEAN, AIM, STEP, REST, ALONG, CURVED = range(7)


class Room(NamedTuple):
    """What the method writes to."""

    keyed: Floats  # "5 key"
    vectors: Floats  # "7 dim"
    power: Floats  # " key": of `exponentials`, and the same memory as whole numbers
    bits: Ints
    spread: Floats  # "key dim": rows whose products sum to the second derivative
    across: Floats  # "dim key": the same


def attention_room(count: int, dim: int) -> Room:
    """Return room for `count` keys of `dim` dimensions."""
    power, keyed, vectors = np.empty(count), np.empty((5, count)), np.empty((7, dim))
    return Room(keyed, vectors, power, power.view(np.int64), np.empty((count, dim)), np.empty((dim, count)))


@compiled_part
def exponentials(values: Floats, shift: float, power: Floats, bits: Ints, out: Floats) -> float:
    """Set `out = exp(values - shift)`, to about one ulp (0 below 1e-304); return the sum."""
    count = values.shape[0]
    for j in range(count):
        power[j] = (values[j] - shift) * LOG2_E + ROUNDER
    for j in range(count):
        k = power[j] - ROUNDER
        x = values[j] - shift
        r = (x - k * LN2_HIGH) - k * LN2_LOW
        p = 1.0 / 39916800.0 + r * (1.0 / 479001600.0)
        p = 1.0 / 3628800.0 + r * p
        p = 1.0 / 362880.0 + r * p
        p = 1.0 / 40320.0 + r * p
        p = 1.0 / 5040.0 + r * p
        p = 1.0 / 720.0 + r * p
        p = 1.0 / 120.0 + r * p
        p = 1.0 / 24.0 + r * p
        p = 1.0 / 6.0 + r * p
        p = 0.5 + r * p
        p = 1.0 + r * p
        out[j] = 1.0 + r * p
    for j in range(count):
        bits[j] = (bits[j] + 1023) << 52
    total = 0.0
    for j in range(count):
        out[j] = out[j] * power[j] if values[j] - shift > LOWEST else 0.0
    for j in range(count):
        total += out[j]
    return total


@compiled_part
def softmax(values: Floats, power: Floats, bits: Ints, out: Floats) -> float:
    """Set `out` to the softmax of the values; return the logarithm of the sum of their exponentials."""
    largest = -np.inf
    for j in range(values.shape[0]):
        largest = max(largest, values[j])
    total = exponentials(values, largest, power, bits, out)
    inverse = 1.0 / total
    for j in range(values.shape[0]):
        out[j] *= inverse
    return float(largest + np.log(total))


@compiled_part
def curvature(room: Room, many: int, x: Floats, out: Floats) -> None:
    """Set `out = spreadᵀ spread x`, the second derivative of f along x."""
    dim = x.shape[0]
    combine(room.across, x, dim, many, room.keyed[SHORT])
    combine(room.spread, room.keyed[SHORT], many, dim, out)


@compiled_part
def model_minimum(room: Room, many: int, u: Floats) -> None:
    """Set `v` nearly to the minimum of `g·(v-u) + |spread (v-u)|²/2` over the unit ball."""
    gradient, v, rest = room.vectors[GRADIENT], room.vectors[AIM], room.vectors[REST]
    along, curved = room.vectors[ALONG], room.vectors[CURVED]
    dim = u.shape[0]
    inner, length = 0.0, 0.0
    for t in range(dim):
        inner += gradient[t] * u[t]
        length += gradient[t] * gradient[t]
    shift = max(-inner, LEAST * np.sqrt(length))
    first = 0.0
    for t in range(dim):
        v[t] = u[t]
        rest[t] = -gradient[t] - shift * u[t]
        along[t] = rest[t]
        first += rest[t] * rest[t]
    square = first
    for _ in range(min(CONJUGATE, dim)):
        if square <= SOLVED * first:
            break
        curvature(room, many, along, curved)
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
        curvature(room, many, v, curved)
        steep = 0.0
        for t in range(dim):
            steep += v[t] * curved[t]
        if steep > 0.0:
            factor = min(factor, 1.0 + shift * size * size / steep)
    for t in range(dim):
        v[t] *= factor


@compiled_part
def set_gradient(rows: Floats, i: int, u: Floats, room: Room) -> tuple[float, float]:
    """Set the gradient of f at u and the mean key; return how much lower f can be, and |gradient|."""
    weight, gradient, mean = room.keyed[WEIGHT], room.vectors[GRADIENT], room.vectors[MEAN]
    count, dim = rows.shape
    combine(rows, weight, count, dim, mean)
    length, inner = 0.0, 0.0
    for t in range(dim):
        gradient[t] = mean[t] - rows[i, t]
        length += gradient[t] * gradient[t]
        inner += gradient[t] * u[t]
    length = np.sqrt(length)
    return max(inner + length, 0.0), length


@compiled_part
def set_spread(rows: Floats, i: int, model: float, room: Room) -> int:
    """Set the rows whose products sum to the second derivative of f; return their number."""
    weight, mean = room.keyed[WEIGHT], room.vectors[MEAN]
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
                room.spread[many, t] = root * (rows[j, t] - mean[t])
            for t in range(dim):
                room.across[t, many] = room.spread[many, t]
            many += 1
    return many


@compiled_part
def line_search(room: Room, i: int, value: float, slope: float) -> tuple[float, float]:
    """Return the share of a step at which f has nearly stopped falling, and f there."""
    scores, change, trial, sums = room.keyed[SCORES], room.keyed[CHANGE], room.keyed[TRIAL], room.keyed[SHORT]
    count = scores.shape[0]
    low, high, share, lower = 0.0, 1.0, 1.0, value
    for _ in range(SEARCH_STEPS):
        for j in range(count):
            sums[j] = scores[j] + share * change[j]
        lower = softmax(sums, room.power, room.bits, trial) - scores[i] - share * change[i]
        first, second = 0.0, 0.0
        for j in range(count):
            product = trial[j] * change[j]
            first += product
            second += product * change[j]
        second -= first * first
        first -= change[i]
        if lower < value and (abs(first) <= -FLAT * slope or (share == 1.0 and first <= 0.0)):
            break
        if first > 0.0:
            high = share
        else:
            low = share
        share = share - first / second if second > 0.0 else 0.5 * (low + high)
        if not low < share < high:
            share = 0.5 * (low + high)
    return share, lower


@compiled_part
def take_best_start(columns: Floats, offset: Floats, i: int, starts: Floats, room: Room, u: Floats) -> float:
    """Set u to the row of `starts` that gives key i the largest weight; return f there."""
    dim, count = columns.shape
    scores, change, weight, trial = room.keyed[SCORES], room.keyed[CHANGE], room.keyed[WEIGHT], room.keyed[TRIAL]
    value = np.inf
    for choice in range(starts.shape[0]):
        combine(columns, starts[choice], dim, count, change)
        for j in range(count):
            change[j] += offset[j]
        other = softmax(change, room.power, room.bits, trial) - change[i]
        if other < value or choice == 0:
            value = other
            for t in range(dim):
                u[t] = starts[choice, t]
            for j in range(count):
                scores[j], weight[j] = change[j], trial[j]
    return value


attention_of = compiled_slice(Attention)


@compiled_in_place
def bound_attention(
    spaces: Space,
    row_sets: Floats,
    column_sets: Floats,
    radii: Floats,
    starts: Floats,
    gap: float,
    budget: float,
    room: Room,
    points: Floats,
    all_attention: Attention,
    scratch: Scratch,
) -> None:
    """Bracket the largest softmax weights over the ball of queries of a radius, if that is positive.

    The steps stop when a weight is known to `gap`, or when they or the budget (multiply-adds) run
    out; the first way that fails is followed by a second one, from the middle of the ball.

    Args:
        row_sets, column_sets: "set key dim" and "set dim key", in nats, times the radius.
        radii: of each set.
        starts: directions of u in which good queries are expected, a row for each key.
        points: "4 dim", are written to.
    """
    sets, count, dim = row_sets.shape
    scores, change, weight, trial = room.keyed[SCORES], room.keyed[CHANGE], room.keyed[WEIGHT], room.keyed[TRIAL]
    u, proof, step = points[2], points[3], room.vectors[STEP]
    for place in range(sets * count):
        b, i = place // count, place % count
        radius, rows, columns, aim = radii[b], row_sets[b], column_sets[b], starts[b, i]
        if not radius > 0.0:
            continue
        space, attention = space_of(spaces, b), attention_of(all_attention, b)
        offset, length, start = space.offset, 0.0, 0.0
        for t in range(dim):
            length += rows[i, t] * rows[i, t]
            start += aim[t] * aim[t]
        for attempt in range(2):
            if attention.upper[i] - attention.lower[i] <= gap:
                break
            for t in range(dim):
                points[0, t] = rows[i, t] / np.sqrt(length) if length > 0.0 and attempt == 0 else 0.0
                points[1, t] = aim[t] / np.sqrt(start) if start > 0.0 and attempt == 0 else 0.0
            value, bound, model = take_best_start(columns, offset, i, points[: 2 - attempt], room, u), 1.0, MODEL_SHARE
            spent = 0.0
            for _ in range(NEWTON_STEPS):
                most, slope_length = set_gradient(rows, i, u, room)
                reach = min(1.0, np.exp(most - value))
                if reach <= bound:
                    bound = reach
                    for t in range(dim):
                        proof[t] = u[t]
                spent += 2.0 * count * (dim + 30.0)
                if bound - np.exp(-value) <= gap * PROOF or dim == 0 or spent > budget:
                    break
                many = set_spread(rows, i, model, room)
                model_minimum(room, many, u)
                spent += 20.0 * many * dim
                slope = 0.0
                for t in range(dim):
                    step[t] = room.vectors[AIM, t] - u[t]
                    slope += room.vectors[GRADIENT, t] * step[t]
                if slope > -TRUST * most:  # rounding: along the gradient
                    slope = -most
                    for t in range(dim):
                        step[t] = -room.vectors[GRADIENT, t] / slope_length - u[t]
                combine(columns, step, dim, count, change)
                share, lower = line_search(room, i, value, slope)
                if not lower < value:
                    if model < FINEST:
                        break
                    model *= FINER
                    continue
                if share < BOLD:
                    model *= FINER
                value = lower
                for t in range(dim):
                    u[t] += share * step[t]
                for j in range(count):
                    scores[j] += share * change[j]
                    weight[j] = trial[j]
            keep_attention(space, i, u, proof, radius, scratch, attention)
