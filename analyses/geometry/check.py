"""Prove certificates: nothing leaves the geometry that this module did not prove first.
This is plain arithmetic on the keys as they were given. It shares only the compiler with the solvers.

A sum of m products, in any order, is off by at most m·eps times the sum of their magnitudes
(N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, §3.1). So every score carries a bound
of its error, which is taken off lower bounds and added to upper ones. The bound itself has the factor
`AMPLE`, which covers its own rounding. Centring is harmless: a difference rounds to within eps/2 of
*itself*, and any shift common to all keys cancels. What underflows is below `UNDERFLOW`.

The claims, for key i among points z (verdicts: the keys over their RMS norm; margins and attention:
`Aᵀk`; a bias over its own RMS is one more coordinate, in which a query looks upwards only):

* `query_lead`: a unit query q has q·z_i - q·z_j of at least this for every j that counts.
* `weights_miss`: convex weights of other keys have their mean within this of z_i (and at least its bias).
* `gap_at_least`, `gap_at_most`: the best gap over |u| ≤ 1, max_u min_j [(s_i - s_j)], is at least what one u
  gives, and at most Σ w_j (h_i - h_j) + |Σ w_j (z_i - z_j)| for convex weights w of other keys
  (h: scores of the center), since a minimum is no more than any mean.
* `attention_bounds`: the largest softmax weight is at least what one u gives, and by Gibbs' inequality
  at most exp(-[H(p) + Σ p_j (h_j - h_i) - |Σ p_j (z_j - z_i)|]) for any convex weights p, H the entropy.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ln_probe.analyses.geometry.compiled import compiled_in_place, compiled_part, compiled_slice

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The one tolerance of the geometry, relative to the RMS norm of the centred keys. It is above what
# float32 rounding leaves of keys in a plane (of 5,400 interior keys, 1e-7 mistakes 6 for vertices, 1e-8
# 669). It is small, since keys on a sphere closer than sqrt(8 TAU) to both neighbours count as inside.
TAU = 1e-7
# Both sides of tau are decided up to this share of it, since the RMS norm is itself rounded.
SLACK = 1e-6

EPS = float(np.finfo(np.float64).eps)
# A bound of rounding errors times this covers its own rounding, and a few more operations.
AMPLE = 2.0
UNDECIDED, SELECTABLE, UNSELECTABLE, DUPLICATE = 0, 1, 2, 3
NAMES = np.array(["undecided", "selectable", "unselectable", "duplicate"])

# More than underflow takes from scores and lengths of keys and queries that are about 1.
UNDERFLOW = 1e-150


class CertificateError(AssertionError):
    """A certificate does not prove its verdict; the message says which and by how much."""


class Space(NamedTuple):
    """Points, what is added to their products with a query, and the error of both.

    Of several sets, here and below, every array leads with the set.
    """

    rows: Floats  # "key dim"
    columns: Floats  # "dim key"
    offset: Floats  # zeros: nothing is added
    length: Floats  # of each row
    noise: Floats  # error of a score as it is stored, under any |u| <= 1; and of the length of a row
    error: Floats  # error of a score as it is computed


class Verdicts(NamedTuple):
    """Verdicts of the keys of one set, a row each, and what proves them."""

    code: Ints  # index into NAMES
    first: Ints  # the first key that does not differ from each
    copies: Ints  # how many other keys do not
    query: Floats  # "key D": proves selectable
    used: Ints  # how many weights prove unselectable: `member[i, :used[i]]` and `value[i, :used[i]]`
    member: Ints
    value: Floats
    repaired: Bools  # whether the search went on in more digits


class Margins(NamedTuple):
    """Bounds of the margins; NaN if they were not asked for."""

    lower: Floats
    upper: Floats
    at: Floats  # "key r": u of the query that proves the lower bound
    used: Ints  # of the weights that prove the upper bound
    member: Ints
    value: Floats


class Attention(NamedTuple):
    """Bounds of the largest attention weights; NaN without a set of queries."""

    lower: Floats
    upper: Floats
    at: Floats  # "key r": u of the query that gives the lower bound
    bound_at: Floats  # u whose weights prove the upper bound


class Scratch(NamedTuple):
    """What a check writes to."""

    absent: Bools  # " key"
    scores: Floats  # of the keys, or as many as there are dimensions
    odds: Floats  # " key"
    mean: Floats  # " dim"


_Table = TypeVar("_Table", bound=NamedTuple)


def of_sets(table: _Table, part: slice | int) -> _Table:
    """Return what a table of several sets says about some, or one, of them."""
    fields: list[Any] = list(table)
    for place, field in enumerate(fields):
        if isinstance(field, np.ndarray):
            fields[place] = field[part]
        elif isinstance(field, tuple):
            fields[place] = of_sets(cast("Any", field), part)
    return table._make(fields)


space_of, verdicts_of = compiled_slice(Space), compiled_slice(Verdicts)


def make_space(rows: Floats, offset: Floats, noise: Floats) -> Space:
    """Return the space of some points from the noise that they have by themselves."""
    length = np.sqrt(np.einsum("...kd,...kd->...k", rows, rows))
    stored = np.where(length > 0.0, noise + UNDERFLOW, noise)
    error = stored + AMPLE * (rows.shape[-1] + 4) * EPS * (length + np.abs(offset))
    return Space(rows, np.ascontiguousarray(rows.mT), offset, length, stored, error)


def make_scratch(count: int, dim: int) -> Scratch:
    """Return what a check of `count` keys of `dim` dimensions writes to."""
    return Scratch(np.zeros(count, np.bool_), np.empty(max(count, dim)), np.empty(count), np.empty(dim))


@compiled_part
def squared_distance(rows: Floats, i: int, j: int) -> float:
    """Return the squared distance of two keys."""
    square = 0.0
    for t in range(rows.shape[1]):
        step = rows[i, t] - rows[j, t]
        square += step * step
    return square


@compiled_in_place
def find_copies(rows: Floats, first: Ints, copies: Ints) -> None:
    """Set the first key of its set within tau of every key, and how many other keys are."""
    count, reach = rows.shape[1], TAU * (1.0 + SLACK)
    for b in range(rows.shape[0]):
        of_set = rows[b]
        for j in range(count):
            first[b, j], copies[b, j] = j, 0
        for i in range(count):
            for j in range(i + 1, count):
                if abs(of_set[i, 0] - of_set[j, 0]) <= reach and squared_distance(of_set, i, j) <= reach * reach:
                    copies[b, i] += 1
                    copies[b, j] += 1
                    first[b, j] = min(first[b, j], i)


@compiled_part
def set_absent(rows: Floats, i: int, copies: Ints, absent: Bools) -> None:
    """Mark key i and the keys within tau of it."""
    for j in range(rows.shape[0]):
        absent[j] = j == i or (
            copies[i] > 0 and copies[j] > 0 and squared_distance(rows, i, j) <= (TAU * (1.0 + SLACK)) ** 2
        )


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


@compiled_part
def lead_under(space: Space, i: int, query: Floats, scores: Floats, upwards: bool, absent: Bools) -> float:
    """Return how far a query of length one is proved to score key i above all that are not absent.

    Args:
        scores: of all points under `query`, sums of products in any order.

    Returns:
        the lead, minus infinity for a query that proves nothing.
    """
    dim, count = space.columns.shape
    square, best = 0.0, -np.inf
    for t in range(dim):
        square += query[t] * query[t]
    if not (square > 0.0 and square < np.inf) or (upwards and query[dim - 1] < 0.0):
        return -np.inf
    length = np.sqrt(square)
    for j in range(count):
        if not absent[j] and j != i:
            best = max(best, scores[j] + length * space.error[j])
    return float(((scores[i] - length * space.error[i]) - best) / (length * (1.0 + (dim + 8) * EPS)))


@compiled_part
def query_lead(space: Space, i: int, query: Floats, upwards: bool, scratch: Scratch) -> float:
    """Return the lead of key i under a query whose scores are not known yet."""
    scores_under(space, query, scratch.scores)
    return lead_under(space, i, query, scratch.scores, upwards, scratch.absent)


@compiled_part
def weights_miss(
    space: Space, i: int, member: Ints, value: Floats, used: int, upwards: bool, out: Floats
) -> tuple[float, float]:
    """Return how far the mean of weights is from key i at most, and the nearest key that has one.

    Returns:
        the upper bound of |Σ w_j (z_j - z_i)|, a surplus upwards not counted, infinite if the weights
        are not convex weights of other keys; and the smallest |z_j - z_i| of a positive weight.
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
def prove_query(space: Space, i: int, trial: Floats, biased: bool, verdicts: Verdicts, scratch: Scratch) -> None:
    """Give key i a verdict if a query proves it against the keys that are not absent."""
    count, last = space.rows.shape[0], trial.shape[0] - 1
    lead = -np.inf
    for attempt in range(2):
        if biased and attempt == 1 and trial[last] <= 0.0:
            # Added to biased scores, it must count the bias: a little, for a ten-thousandth of its lead.
            length, low, high = 0.0, np.inf, -np.inf
            for t in range(last):
                length += trial[t] * trial[t]
            for j in range(count):
                low, high = min(low, space.rows[j, last]), max(high, space.rows[j, last])
            trial[last] = np.sqrt(length) * max(lead, TAU) / (1e4 * max(high - low, 1.0))
        elif attempt == 1:
            break
        lead = query_lead(space, i, trial, biased and attempt == 1, scratch)
    keep_lead(i, lead, trial, verdicts)


@compiled_part
def keep_lead(i: int, lead: float, query: Floats, verdicts: Verdicts) -> None:
    """Give key i a verdict if its lead under a query is enough."""
    if lead > TAU * (1.0 - SLACK):
        verdicts.code[i] = DUPLICATE if verdicts.copies[i] > 0 else SELECTABLE
        for t in range(query.shape[0]):
            verdicts.query[i, t] = query[t]


@compiled_part
def prove_weights(
    space: Space, i: int, member: Ints, value: Floats, used: int, biased: bool, verdicts: Verdicts, scratch: Scratch
) -> None:
    """Give key i a verdict if weights prove it."""
    miss, nearest = weights_miss(space, i, member, value, used, biased, scratch.scores)
    if miss <= TAU * (1.0 + SLACK) and nearest > TAU * (1.0 - SLACK):
        verdicts.code[i], verdicts.used[i] = UNSELECTABLE, used
        for a in range(used):
            verdicts.member[i, a], verdicts.value[i, a] = member[a], value[a]


@compiled_in_place
def try_scores(
    spaces: Space,
    trials: Floats,
    scores: Floats,
    first: int,
    biased: bool,
    wanted: Bools,
    start: Ints,
    all_verdicts: Verdicts,
    scratch: Scratch,
) -> None:
    """Give verdicts to keys without one that queries prove, from the scores of all keys under these."""
    many = trials.shape[1]
    for place in range(trials.shape[0] * many):
        b, a, best = place // many, place % many, -np.inf
        i = first + a
        if not wanted[b] or all_verdicts.code[b, i] != UNDECIDED:
            continue
        space, verdicts, under = space_of(spaces, b), verdicts_of(all_verdicts, b), scores[b, a]
        set_absent(space.rows, i, verdicts.copies, scratch.absent)
        for j in range(under.shape[0]):
            if not scratch.absent[j] and under[j] > best:
                best, start[b, i] = under[j], j
        if under[i] > best:
            if biased:
                prove_query(space, i, trials[b, a], biased, verdicts, scratch)
            else:
                lead = lead_under(space, i, trials[b, a], under, biased, scratch.absent)
                keep_lead(i, lead, trials[b, a], verdicts)


@compiled_in_place
def try_weights(spaces: Space, biased: bool, all_verdicts: Verdicts, scratch: Scratch) -> None:
    """Give verdicts to keys without one that the weights at their place prove."""
    sets, count = all_verdicts.code.shape
    for place in range(sets * count):
        b, i = place // count, place % count
        if all_verdicts.code[b, i] == UNDECIDED:
            verdicts = verdicts_of(all_verdicts, b)
            used, verdicts.used[i] = verdicts.used[i], 0
            member, value = verdicts.member[i], verdicts.value[i]
            prove_weights(space_of(spaces, b), i, member, value, used, biased, verdicts, scratch)


@compiled_part
def into_ball(u: Floats, dim: int) -> None:
    """Shorten a point until its length is at most 1, rounding included."""
    square = 0.0
    for t in range(dim):
        if not np.isfinite(u[t]):
            u[t] = 0.0
        square += u[t] * u[t]
    length = np.sqrt(square) * (1.0 + (dim + 8) * EPS)
    if length > 1.0:
        for t in range(dim):
            u[t] /= length


@compiled_part
def gap_at_least(space: Space, i: int, u: Floats, out: Floats) -> float:
    """Return a lower bound of the smallest gap of key i to any other key under u."""
    count = space.rows.shape[0]
    scores_under(space, u, out)
    best = -np.inf
    for j in range(count):
        if j != i:
            best = max(best, out[j] + space.error[j])
    return float((out[i] - space.error[i]) - best)


@compiled_part
def gap_at_most(space: Space, i: int, member: Ints, value: Floats, used: int, out: Floats) -> float:
    """Return what convex weights of other keys allow the best gap to be, infinite for other weights."""
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


@compiled_part
def keep_query(space: Space, i: int, u: Floats, margins: Margins, scores: Floats) -> None:
    """Keep a query of the unit ball if it proves a better lower bound."""
    least = gap_at_least(space, i, u, scores)
    if not least <= margins.lower[i]:
        margins.lower[i] = least
        for t in range(u.shape[0]):
            margins.at[i, t] = u[t]


@compiled_part
def keep_bound(space: Space, i: int, member: Ints, value: Floats, used: int, margins: Margins, scores: Floats) -> None:
    """Keep weights if they prove a better upper bound."""
    most = gap_at_most(space, i, member, value, used, scores)
    if not most >= margins.upper[i]:
        margins.upper[i], margins.used[i] = most, used
        for a in range(used):
            margins.member[i, a], margins.value[i, a] = member[a], value[a]


@compiled_part
def attention_bounds(space: Space, i: int, u: Floats, radius: float, scratch: Scratch) -> tuple[float, float]:
    """Return the softmax weight that u gives key i, and what no query is proved to exceed.

    Args:
        u: a point no further than `radius` from the middle of the ball.
        radius: of the ball of queries, at most 1.
    """
    count, dim = space.rows.shape
    out, odds, mean = scratch.scores, scratch.odds, scratch.mean
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


@compiled_part
def keep_attention(
    space: Space, i: int, u: Floats, proof: Floats, radius: float, scratch: Scratch, attention: Attention
) -> None:
    """Keep the bounds that two points of the unit ball, brought to a radius, prove if they are tighter."""
    dim, alike = u.shape[0], True
    into_ball(u, dim)
    into_ball(proof, dim)
    for t in range(dim):
        u[t] *= radius
        proof[t] *= radius
        alike = alike and u[t] == proof[t]
    low, high = attention_bounds(space, i, u, radius, scratch)
    if not alike:
        _, high = attention_bounds(space, i, proof, radius, scratch)
    if not low <= attention.lower[i]:
        attention.lower[i] = low
        for t in range(dim):
            attention.at[i, t] = u[t]
    if not high >= attention.upper[i]:
        attention.upper[i] = high
        for t in range(dim):
            attention.bound_at[i, t] = proof[t]


class Proofs(NamedTuple):
    """What certificates prove, of each key."""

    lead: Floats  # of the query
    miss: Floats  # of the weights
    nearest: Floats
    least: Floats  # bounds of the margin
    most: Floats
    weight: Floats  # bounds of attention
    none_above: Floats


@compiled_in_place
def prove_again(
    space: Space,
    seen: Space,
    biased: bool,
    verdicts: Verdicts,
    margins: Margins,
    attention: Attention,
    scratch: Scratch,
    proofs: Proofs,
) -> None:
    """Set what the queries and weights of all keys prove."""
    scores = scratch.scores
    for i in range(space.rows.shape[0]):
        set_absent(space.rows, i, verdicts.copies, scratch.absent)
        proofs.lead[i] = query_lead(space, i, verdicts.query[i], biased, scratch)
        proofs.miss[i], proofs.nearest[i] = weights_miss(
            space, i, verdicts.member[i], verdicts.value[i], verdicts.used[i], biased, scores
        )
        proofs.least[i] = gap_at_least(seen, i, margins.at[i], scores)
        proofs.most[i] = gap_at_most(seen, i, margins.member[i], margins.value[i], margins.used[i], scores)
        proofs.weight[i], _ = attention_bounds(seen, i, attention.at[i], 1.0, scratch)
        _, proofs.none_above[i] = attention_bounds(seen, i, attention.bound_at[i], 1.0, scratch)
