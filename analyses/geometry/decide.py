"""Verdicts, margins and attention of sets of keys: every set in one compiled function, sets in threads.

Each stage decides some keys and leaves fewer to the next:

1. *Own queries*: key i under itself. On a sphere it wins. (Asked for, or where there are more dimensions than keys.)
2. *White queries*: key i under the query `Σ⁻¹ k_i`.
3. *Search* for the nearest point of the hull of the others (`nearest`): in white coordinates with products from their
   Gram matrix, then carefully, then where verdicts are given.
4. A *linear program* (HiGHS), which gives query and weights, for what rounding left open; not compiled.

Margins are searched with products from the Gram matrix of the keys as the queries see them, and carefully where these
are too coarse; attention by Newton's method. What is given out is what `check` proves of the queries and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from scipy.optimize import linprog  # type: ignore[import-untyped]

from ln_probe.analyses.geometry.attention import attention_room, largest_weight
from ln_probe.analyses.geometry.check import (
    SLACK,
    TAU,
    attention_bounds,
    gap_at_least,
    gap_at_most,
    into_ball,
    make_space,
    query_lead,
    weights_miss,
)
from ln_probe.analyses.geometry.compiled import Compilation, compiled, in_threads, inner
from ln_probe.analyses.geometry.keys import Judged, QuerySet, Seen, judge, see, whiten
from ln_probe.analyses.geometry.nearest import (
    KEPT,
    QUERY,
    VALUE,
    Bools,
    Floats,
    Ints,
    Keys,
    Search,
    Verdict,
    combine,
    find_margin,
    find_verdict,
    search_room,
)

UNDECIDED, SELECTABLE, UNSELECTABLE, DUPLICATE = 0, 1, 2, 3
NAMES = np.array(["undecided", "selectable", "unselectable", "duplicate"])

# Width of a margin's bracket, as a share of the margin: it is read to two digits. "exact": six digits.
RELATIVE_GAP, EXACT_GAP = 0.01, 1e-6
# A bracket narrower than this (relative to the RMS norm of the keys as queries see them) is not narrowed further.
ZERO = 0.01 * TAU
# The largest weight is found to this (absolute): attention is read to two digits. A part is left to the proof.
WEIGHT_GAP = 0.01
PROOF = 1 - 1e-4
# Multiplications and additions per key, nominally one second, before it is given up.
BUDGET = 1e9
# Above this number of keys no matrix of all their products is made.
MOST_PRODUCTS = 2048
# Pairs closer than this, relative to their squared lengths, have products that say too little of their difference.
CLOSE_PAIR = 1e-9
# Above this number of keys, linear programs for undecided keys cost too much.
LARGE = 4096


class Answers(NamedTuple):
    """What is proved of the keys of one set, a row each.

    Weights of a key are `member[i, :used[i]]` and `value[i, :used[i]]`. Attention is NaN without a set of queries,
    margins where they were not asked for.
    """

    code: Ints  # index into NAMES
    first: Ints  # the first key that does not differ from each
    query: Floats  # "key D": proves selectable
    used: Ints  # weights that prove unselectable
    member: Ints
    value: Floats
    margin_lower: Floats
    margin_upper: Floats
    margin_at: Floats  # "key r": u of the query that proves margin_lower
    margin_used: Ints
    margin_member: Ints
    margin_value: Floats
    weight: Floats  # attention that a query of the set gives
    weight_upper: Floats
    weight_at: Floats  # u of that query, and the u that proves the bound
    bound_at: Floats
    inner_weight: Floats  # the same of the queries with |u| <= inner
    inner_upper: Floats
    inner_at: Floats
    inner_bound_at: Floats
    repaired: Bools  # whose verdict took more than one search


def empty_answers(count: int, wide: int, seen: int) -> Answers:
    """Return answers that say nothing, for keys of `wide` dimensions that queries see in `seen`."""

    def numbers(*shape: int) -> Floats:
        return np.full(shape, np.nan)

    def whole(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return Answers(
        whole(count), np.arange(count), np.zeros((count, wide)), whole(count), whole(count, wide + 2),
        np.zeros((count, wide + 2)), numbers(count), numbers(count), np.zeros((count, seen)), whole(count),
        whole(count, seen + 2), np.zeros((count, seen + 2)), numbers(count), numbers(count), np.zeros((count, seen)),
        np.zeros((count, seen)), numbers(count), numbers(count), np.zeros((count, seen)), np.zeros((count, seen)),
        np.zeros(count, np.bool_),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ verdicts


@inner
def gram_matrix(rows: Floats, columns: Floats) -> Floats:
    """Return the products of all rows with each other."""
    count, dim = rows.shape
    products = np.empty((count, count))
    for i in range(count):
        combine(columns, rows[i], dim, count, products[i])
    return products


@inner
def transposed(rows: Floats) -> Floats:
    """Return a transposed copy."""
    columns = np.empty((rows.shape[1], rows.shape[0]))
    for j in range(rows.shape[0]):
        for t in range(rows.shape[1]):
            columns[t, j] = rows[j, t]
    return columns


@compiled
def find_copies(rows: Floats, first: Ints, copies: Ints) -> None:
    """Set the first key within tau of every key, and how many other keys are."""
    count, dim = rows.shape
    places = np.zeros(count)
    for j in range(count):
        for t in range(dim):  # a direction with nothing special: keys within tau are within tau along it
            places[j] += rows[j, t] * ((((t + 1) * 0.6180339887498949) % 1.0 - 0.5) / np.sqrt(dim / 12.0 + 1.0))
        first[j], copies[j] = j, 0
    reach = TAU * (1.0 + SLACK) * 2.0
    for i in range(count):
        for j in range(i + 1, count):
            if abs(places[i] - places[j]) <= reach and squared_distance(rows, i, j) <= (TAU * (1.0 + SLACK)) ** 2:
                copies[i] += 1
                copies[j] += 1
                first[j] = min(first[j], i)


@inner
def squared_distance(rows: Floats, i: int, j: int) -> float:
    """Return the squared distance of two keys."""
    square = 0.0
    for t in range(rows.shape[1]):
        step = rows[i, t] - rows[j, t]
        square += step * step
    return square


@compiled
def set_absent(rows: Floats, i: int, copies: Ints, absent: Bools) -> None:
    """Mark key i and the keys within tau of it."""
    for j in range(rows.shape[0]):
        absent[j] = j == i or (
            copies[i] > 0 and copies[j] > 0 and squared_distance(rows, i, j) <= (TAU * (1.0 + SLACK)) ** 2
        )


@inner
def equal_key(rows: Floats, first: Ints, copies: Ints, i: int) -> int:
    """Return the first key whose row is the same to the last bit, itself if there is none before it."""
    if copies[i] == 0:
        return i
    for j in range(first[i], i):
        if copies[j] > 0 and squared_distance(rows, i, j) == 0.0:
            return j
    return i


@inner
def count_bias(query: Floats, lead: float, spread: float) -> None:
    """Give a query that does not count the bias a small positive weight of it, as one added to biased scores must.

    It gives up a ten-thousandth of its lead for it: the solvers stay further from tau than that.
    """
    last = query.shape[0] - 1
    if query[last] <= 0.0:
        length = 0.0
        for t in range(last):
            length += query[t] * query[t]
        query[last] = np.sqrt(length) * max(lead, TAU) / (1e4 * max(spread, 1.0))


@compiled
def decide_set(
    rows: Floats,
    noise: Floats,
    biased: bool,
    own_queries: bool,
    budget: float,
    code: Ints,
    first: Ints,
    query: Floats,
    used: Ints,
    member: Ints,
    value: Floats,
    repaired: Bools,
) -> None:
    """Set the verdict of every key of a set, with what proves it."""
    count, dim = rows.shape
    copies = np.zeros(count, np.int64)
    find_copies(rows, first, copies)
    space = make_space(rows, np.zeros(count), noise)
    absent, scores, trial = np.zeros(count, np.bool_), np.empty(count), np.zeros(dim)
    spread, low, high = 0.0, np.inf, -np.inf
    if biased:
        for j in range(count):
            low, high = min(low, rows[j, dim - 1]), max(high, rows[j, dim - 1])
        spread = high - low
    start = np.full(count, -1, np.int64)
    left = 0
    for i in range(count):
        code[i] = UNDECIDED
        if copies[i] == count - 1:  # nothing to compete with
            code[i] = DUPLICATE if copies[i] > 0 else SELECTABLE
            for t in range(dim):
                query[i, t] = 0.0
        elif own_queries and not biased:
            set_absent(rows, i, copies, absent)
            lead, _ = query_lead(space, i, rows[i], absent, biased, scores)
            if lead > TAU * (1.0 + SLACK):
                code[i] = DUPLICATE if copies[i] > 0 else SELECTABLE
                for t in range(dim):
                    query[i, t] = rows[i, t]
        if code[i] == UNDECIDED:
            left += 1
    if left == 0:
        return
    white = whiten(rows, biased)
    rank = white.rows.shape[1]
    columns = transposed(white.rows)
    products = gram_matrix(white.rows, columns) if count <= MOST_PRODUCTS else np.empty((0, 0))
    for i in range(count):
        if code[i] != UNDECIDED:
            continue
        set_absent(rows, i, copies, absent)
        lowered = white.lifted and white.rows[i, rank - 1] < 0.0
        lead = 1.0
        if count <= MOST_PRODUCTS and not lowered:
            best = -np.inf
            for j in range(count):
                if not absent[j] and products[i, j] > best:
                    best, start[i] = products[i, j], j
            lead = products[i, i] - best
        if lead <= 0.0:
            continue
        for s in range(dim):
            trial[s] = 0.0
            for t in range(rank - 1 if lowered else rank):
                trial[s] += white.to_query[s, t] * white.rows[i, t]
        prove_query(space, i, trial, absent, biased, spread, scores, copies, code, query)
    left = 0
    for i in range(count):
        left += code[i] == UNDECIDED
    if left > 0:
        search_set(
            space, white, columns, products, biased, spread, budget, copies, start, code, first, query, used, member,
            value, repaired,
        )  # fmt: skip


@compiled
def prove_query(space, i, trial, absent, biased, spread, scores, copies, code, query):  # type: ignore[no-untyped-def]
    """Give key i a verdict if a query proves it."""
    if biased and trial[trial.shape[0] - 1] <= 0.0:
        trial[trial.shape[0] - 1] = 0.0
        lead, _ = query_lead(space, i, trial, absent, biased, scores)
        count_bias(trial, lead, spread)
    lead, _ = query_lead(space, i, trial, absent, biased, scores)
    if lead > TAU * (1.0 - SLACK):
        code[i] = DUPLICATE if copies[i] > 0 else SELECTABLE
        for t in range(trial.shape[0]):
            query[i, t] = trial[t]


@inner
def search_set(
    space, white, columns, products, biased, spread, budget, copies, start, code, first, query, used, member, value,
    repaired,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Search for the verdicts that are left."""
    rows, (count, dim), rank = space.rows, space.rows.shape, white.rows.shape[1]
    absent, scores, trial = np.zeros(count, np.bool_), np.empty(max(count, dim)), np.zeros(dim)
    zeros, identity, closest = np.zeros(count), np.zeros((dim, dim)), np.int64(-1)
    for t in range(dim):
        identity[t, t] = 1.0
    room = search_room(count, max(rank, 1), dim)
    plain_room = room
    if rank != dim:
        plain_room = search_room(count, dim, dim)
    found = Verdict(rows, white.to_query, 100.0 * TAU / white.thinnest, TAU)
    plain = Verdict(rows, identity, 100.0 * TAU, TAU)
    for i in range(count):
        if code[i] != UNDECIDED:
            continue
        same = equal_key(rows, first, copies, i)
        if same != i:
            code[i], used[i] = code[same], used[same]
            for t in range(dim):
                query[i, t] = query[same, t]
            for a in range(used[i]):
                member[i, a], value[i, a] = member[same, a], value[same, a]
            continue
        set_absent(rows, i, copies, absent)
        for attempt in range(4):
            careful = attempt > 0 or products.shape[0] == 0
            if attempt == 0 and careful:
                continue
            here = plain_room if attempt > 1 else room
            if attempt > 1:
                keys = Keys(rows, space.columns, products, zeros)
                search = Search(True, True, attempt == 3, biased, 0.0, 0.0, budget)
                _, size = find_verdict(keys, plain, search, here, i, absent, closest)
            else:
                keys = Keys(white.rows, columns, products, zeros)
                search = Search(True, careful, True, white.lifted, 0.0, 0.0, budget)
                _, size = find_verdict(keys, found, search, here, i, absent, start[i] if attempt == 0 else closest)
            miss, nearest = weights_miss(space, i, here.members[KEPT], here.vectors[VALUE], size, biased, scores)
            if miss <= TAU * (1.0 + SLACK) and nearest > TAU * (1.0 - SLACK):
                code[i], used[i] = UNSELECTABLE, size
                for a in range(size):
                    member[i, a], value[i, a] = here.members[KEPT, a], here.vectors[VALUE, a]
            else:
                for t in range(dim):
                    trial[t] = here.points[QUERY, t]
                prove_query(space, i, trial, absent, biased, spread, scores, copies, code, query)
            if code[i] != UNDECIDED:
                repaired[i] = attempt > 0 and products.shape[0] > 0
                break


# ------------------------------------------------------------------------------------------ margins and attention


@inner
def is_narrow(lower: float, upper: float, gap: float, floor: float) -> bool:
    """Whether a bracket is as narrow as was asked for, but for rounding."""
    return upper < np.inf and upper - lower <= max(gap * max(abs(lower), abs(upper)) * 1.001, floor)


@compiled
def bound_margins(
    rows: Floats,
    offset: Floats,
    noise: Floats,
    level: Floats,
    levelled: bool,
    doubt: float,
    gap: float,
    budget: float,
    code: Ints,
    first: Ints,
    used: Ints,
    member: Ints,
    value: Floats,
    lower: Floats,
    upper: Floats,
    at: Floats,
    margin_used: Ints,
    margin_member: Ints,
    margin_value: Floats,
) -> None:
    """Bracket the margin of every key.

    Args:
        level: a u under which all keys score alike, if `levelled`: it proves that no margin is below 0, and the weights
            that reproduce an unselectable key prove that its margin is about 0.
        doubt: how far the unit of the margins may be off, relative to them.
    """
    count, dim = rows.shape
    space = make_space(rows, offset, noise)
    columns = space.columns
    middle, size = np.zeros(dim), 0.0
    for j in range(count):
        for t in range(dim):
            middle[t] += rows[j, t] / count
    for j in range(count):
        for t in range(dim):
            size += (rows[j, t] - middle[t]) ** 2
    size = np.sqrt(size / count)
    floor = ZERO * size
    products = gram_matrix(rows, columns) if count <= MOST_PRODUCTS else np.empty((0, 0))
    room = search_room(count, dim, dim)
    absent, scores, u = np.zeros(count, np.bool_), np.empty(max(count, dim)), np.empty(dim)
    keys = Keys(rows, columns, products, offset)
    flat = levelled
    for j in range(count):
        flat = flat and offset[j] == 0.0
    for i in range(count):
        lower[i], upper[i], margin_used[i] = -np.inf, np.inf, 0
        copy, close = -1, 0
        for j in range(count):
            absent[j] = j == i
            if (first[j] == first[i] and j != i) or ((first[i] == j or first[j] == i) and j != i):
                if offset[j] == offset[i] and squared_distance(rows, i, j) == 0.0:
                    absent[j] = True
                    copy = j
                close += 1
        if levelled:
            lower[i] = gap_at_least(space, i, level, scores)
            for t in range(dim):
                at[i, t] = level[t]
        if copy >= 0:
            margin_used[i], margin_member[i, 0], margin_value[i, 0] = 1, copy, 1.0
            upper[i] = gap_at_most(space, i, margin_member[i], margin_value[i], margin_used[i], scores)
        elif levelled and code[i] == UNSELECTABLE and used[i] <= margin_member.shape[1]:
            margin_used[i] = used[i]
            for a in range(used[i]):
                margin_member[i, a], margin_value[i, a] = member[i, a], value[i, a]
            upper[i] = gap_at_most(space, i, member[i], value[i], used[i], scores)
        enough = 2.0 * floor if copy >= 0 or code[i] != UNSELECTABLE else max(2.0 * floor, 1.01 * TAU * size)
        for attempt in range(2):
            if is_narrow(lower[i], upper[i], gap, enough):
                break
            careful = attempt == 1 or products.shape[0] == 0 or close > 0
            if careful and attempt == 0:
                continue
            enough = 2.0 * floor
            search = Search(False, careful, False, False, gap, floor, budget)
            kept = find_margin(keys, search, room, i, absent)
            for t in range(dim):
                u[t] = room.points[QUERY, t]
            into_ball(u, dim)
            least = gap_at_least(space, i, u, scores)
            if least > lower[i]:
                lower[i] = least
                for t in range(dim):
                    at[i, t] = u[t]
            most = gap_at_most(space, i, room.members[KEPT], room.vectors[VALUE], kept, scores)
            if most < upper[i]:
                upper[i], margin_used[i] = most, kept
                for a in range(kept):
                    margin_member[i, a], margin_value[i, a] = room.members[KEPT, a], room.vectors[VALUE, a]
        if flat:
            lower[i] = max(lower[i], 0.0)
        lower[i] -= doubt * abs(lower[i])
        upper[i] += doubt * abs(upper[i])


@compiled
def bound_attention(
    rows: Floats,
    offset: Floats,
    noise: Floats,
    radius: float,
    starts: Floats,
    first: Ints,
    budget: float,
    weight: Floats,
    upper: Floats,
    at: Floats,
    bound_at: Floats,
) -> None:
    """Bracket the largest attention weight of every key over the queries with |u| <= radius.

    Args:
        starts: directions of u in which good queries are expected, a row for each key.
    """
    count, dim = rows.shape
    space = make_space(rows, offset, noise)
    scaled, columns = rows * radius, space.columns * radius
    room = attention_room(count, dim)
    tries, middle = np.zeros((2, dim)), np.zeros((1, dim))
    u, proof, scores, mean = np.zeros(dim), np.zeros(dim), np.empty(count), np.empty(dim)
    gap = WEIGHT_GAP * PROOF
    for i in range(count):
        same = i
        if first[i] != i:
            for j in range(first[i], i):
                if same == i and offset[j] == offset[i] and squared_distance(rows, i, j) == 0.0:
                    same = j
        weight[i], upper[i] = 0.0, 1.0
        if same != i:
            for t in range(dim):
                u[t], proof[t] = at[same, t] / radius, bound_at[same, t] / radius
        else:
            length, start = 0.0, 0.0
            for t in range(dim):
                length += rows[i, t] * rows[i, t]
                start += starts[i, t] * starts[i, t]
            for t in range(dim):
                tries[0, t] = rows[i, t] / np.sqrt(length) if length > 0.0 else 0.0
                tries[1, t] = starts[i, t] / np.sqrt(start) if start > 0.0 else 0.0
            low, high = largest_weight(scaled, columns, offset, i, tries, gap, budget, room, u, proof)
            if high - low > gap:  # once more, from the middle
                prove_attention(space, i, u, proof, radius, scores, mean, weight, upper, at, bound_at)
                largest_weight(scaled, columns, offset, i, middle, gap, budget, room, u, proof)
        prove_attention(space, i, u, proof, radius, scores, mean, weight, upper, at, bound_at)


@inner
def prove_attention(space, i, u, proof, radius, scores, mean, weight, upper, at, bound_at):  # type: ignore[no-untyped-def]
    """Keep what two points prove, where it is better than what is known; both are brought to the ball's radius."""
    dim = u.shape[0]
    alike = True
    into_ball(u, dim)
    for t in range(dim):
        alike = alike and u[t] == proof[t]
    into_ball(proof, dim)
    for t in range(dim):
        u[t] *= radius
        proof[t] *= radius
    low, high = attention_bounds(space, i, u, radius, scores, mean)
    if low >= weight[i]:
        weight[i] = low
        for t in range(dim):
            at[i, t] = u[t]
    if not alike:
        _, high = attention_bounds(space, i, proof, radius, scores, mean)
    if high <= upper[i]:
        upper[i] = high
        for t in range(dim):
            bound_at[i, t] = u[t] if alike else proof[t]


# ------------------------------------------------------------------------------------------------ sets of keys


@dataclass(frozen=True)
class Request:
    """What is asked of every set.

    Attributes:
        gap: width of a margin's bracket, as a share of the margin; None: no margins.
        attention: whether attention is asked for, where there is a set of queries.
        own_queries: try every key under itself first.
        budget: multiplications and additions per key.
    """

    gap: float | None = RELATIVE_GAP
    attention: bool = True
    own_queries: bool = False
    budget: float = BUDGET


@dataclass(frozen=True)
class Solved:
    """One set of keys with the coordinates in which it was solved."""

    judged: Judged
    seen: Seen | None
    answers: Answers


def solve_set(
    keys: Floats, bias: Floats | None, queries: QuerySet | None, request: Request, inner: float | None = None
) -> Solved:
    """Solve one set of valid float64 keys.

    Args:
        inner: also bracket attention over the queries with |u| no more than this.
    """
    if bias is not None and (bias == bias[0]).all():
        bias = None
    judged = judge(keys, bias, queries)
    seen = None if queries is None else see(keys, bias, queries)
    count, wide = judged.rows.shape
    dim = wide if seen is None else seen.rows.shape[1]
    answers = empty_answers(count, wide, dim)
    own = request.own_queries or wide >= count
    decide_set(
        judged.rows, judged.noise, judged.biased, own, request.budget, answers.code, answers.first, answers.query,
        answers.used, answers.member, answers.value, answers.repaired,
    )  # fmt: skip
    open_keys = np.flatnonzero(answers.code == UNDECIDED)
    if len(open_keys) > 0 and count <= LARGE:
        solve_programs(judged, answers, open_keys, request.budget)
    if count == 1:
        if seen is not None and request.attention:
            answers.weight[:], answers.weight_upper[:] = 1.0, 1.0
            if inner is not None:
                answers.inner_weight[:], answers.inner_upper[:] = 1.0, 1.0
        return Solved(judged, seen, answers)
    if request.gap is not None and (seen is not None or not judged.biased):
        level = np.zeros(dim) if queries is None else (None if bias is not None else queries.level)
        doubt = AMPLE_UNIT * sum(keys.shape) if seen is None else 0.0
        space = Seen(judged.rows, np.zeros(count), judged.noise) if seen is None else seen
        bound_margins(
            *space, np.zeros(dim) if level is None else level, level is not None, doubt, request.gap, request.budget,
            answers.code, answers.first, answers.used, answers.member, answers.value, answers.margin_lower,
            answers.margin_upper, answers.margin_at, answers.margin_used, answers.margin_member, answers.margin_value,
        )  # fmt: skip
    if seen is not None and request.attention:
        bound_attention(
            *seen, 1.0, answers.margin_at, answers.first, request.budget, answers.weight, answers.weight_upper,
            answers.weight_at, answers.bound_at,
        )  # fmt: skip
        if inner is not None and inner > 0.0:
            bound_attention(
                *seen, float(inner), answers.weight_at, answers.first, request.budget, answers.inner_weight,
                answers.inner_upper, answers.inner_at, answers.inner_bound_at,
            )  # fmt: skip
            np.fmax(answers.weight, answers.inner_weight, out=answers.weight)
    return Solved(judged, seen, answers)


# Without a query set margins are relative to the size, which is itself rounded: by this for each key and dimension.
AMPLE_UNIT = 2.0 * float(np.finfo(np.float64).eps)


def solve_sets(
    keys: Float64[np.ndarray, "set key d"],
    bias: Float64[np.ndarray, "set key"] | None = None,
    queries: Sequence[QuerySet] | None = None,
    inner: Float64[np.ndarray, " set"] | None = None,
    request: Request = Request(),
    threads: int | None = None,
) -> list[Solved]:
    """Solve sets of valid float64 keys, `threads` at a time (default: as many as there are processors).

    Results do not depend on the number of threads.

    Args:
        bias: added to the scores of each key.
        queries: a set of queries for each set of keys.
        inner: also bracket attention over this share of each set of queries (of `u`, about the center).
    """
    compilation.wait()

    def one(b: int) -> Solved:
        return solve_set(
            np.ascontiguousarray(keys[b]),
            None if bias is None else bias[b],
            None if queries is None else queries[b],
            request,
            None if inner is None else float(inner[b]),
        )

    return in_threads(one, range(len(keys)), threads)


# Seconds. HiGHS has been seen to cycle without end on 512 keys with lognormal norms. The limit on iterations comes
# first on any machine that is not stuck, so verdicts do not depend on how busy it is.
TIME_LIMIT = 20.0
PASSES = 4  # over all numbers of the program, per iteration: pricing, two triangular solves, part of a factorization


def separate(
    others: Float64[np.ndarray, "other dim"], key: Float64[np.ndarray, " dim"], ray: bool, budget: float = BUDGET
) -> tuple[Float64[np.ndarray, " dim"], Float64[np.ndarray, " other"]]:
    """Return the query in the unit box with the largest score gap, and convex weights from its dual.

    Either may be all zero if the solver fails: the caller checks both.

    Args:
        others, key: in well-scaled coordinates.
        ray: whether the query's last coordinate must not be negative (keys with a bias).
        budget: multiply-adds, which limit the iterations.
    """
    number, dim = others.shape
    difference = others - key
    size = max(float(np.abs(difference).max()), 1e-300)
    box = [(-1.0, 1.0)] * dim
    if ray:
        box[-1] = (0.0, 1.0)
    solved = linprog(
        np.append(np.zeros(dim), -1.0),
        A_ub=np.column_stack([difference / size, np.ones(number)]),
        b_ub=np.zeros(number),
        bounds=[*box, (0.0, None)],
        method="highs",
        options={
            "primal_feasibility_tolerance": 1e-10,
            "dual_feasibility_tolerance": 1e-10,
            "time_limit": TIME_LIMIT,
            "maxiter": int(min(max(budget / (PASSES * number * dim), 1.0), 1e9)),
        },
    )
    if solved.x is None:
        return np.zeros(dim), np.zeros(number)
    weights = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    total = float(weights.sum())
    return np.asarray(solved.x[:dim]), weights / total if total > 0.0 else weights


def solve_programs(judged: Judged, answers: Answers, keys: Int64[np.ndarray, " some"], budget: float) -> None:
    """Decide keys by linear programs, one after the other; what these do not prove stays undecided."""
    rows = judged.rows
    space = make_space(rows, np.zeros(len(rows)), judged.noise)
    scores, copies = np.empty(max(rows.shape)), np.zeros(len(rows), np.int64)
    find_copies(rows, np.empty(len(rows), np.int64), copies)
    spread = float(np.ptp(rows[:, -1])) if judged.biased else 0.0
    absent = np.zeros(len(rows), np.bool_)
    for i in map(int, keys):
        set_absent(rows, i, copies, absent)
        others = np.flatnonzero(~absent)
        query, weights = separate(rows[others], rows[i], judged.biased, budget)
        prove_query(
            space, i, query.copy(), absent, judged.biased, spread, scores[: len(rows)], copies, answers.code,
            answers.query,
        )  # fmt: skip
        support = np.flatnonzero(weights)
        if answers.code[i] == UNDECIDED and 0 < len(support) <= answers.member.shape[1]:
            used = len(support)
            answers.member[i, :used], answers.value[i, :used] = others[support], weights[support]
            miss, nearest = weights_miss(space, i, answers.member[i], answers.value[i], used, judged.biased, scores)
            if miss <= TAU * (1 + SLACK) and nearest > TAU * (1 - SLACK):
                answers.code[i], answers.used[i] = UNSELECTABLE, used
        answers.repaired[i] = answers.code[i] != UNDECIDED


def _compile_kernels() -> None:
    keys = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0], [1.0, 1.0]])
    queries = QuerySet(np.array([0.5, 0.0]), np.eye(2))
    solve_set(keys, np.array([0.0, 0.0, 0.0, 0.0, 1.0]), queries, Request(), 0.5)


compilation = Compilation(_compile_kernels)


def start_compilation() -> None:
    """Begin to compile the kernels in the background, so that the first set of keys need not wait for all of it."""
    compilation.start()
