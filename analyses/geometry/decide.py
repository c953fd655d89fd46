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
from jaxtyping import Float64
from scipy.optimize import linprog  # type: ignore[import-untyped]

from ln_probe.analyses.geometry.attention import attention_room, largest_weight
from ln_probe.analyses.geometry.check import (
    AMPLE,
    EPS,
    SLACK,
    TAU,
    Bools,
    Floats,
    Ints,
    Space,
    attention_bounds,
    gap_at_least,
    gap_at_most,
    into_ball,
    make_space,
    query_lead,
    weights_miss,
)
from ln_probe.analyses.geometry.compiled import (
    Compilation,
    compiled,
    compiled_in_place,
    compiled_part,
    in_threads,
    whole,
)
from ln_probe.analyses.geometry.keys import Judged, QuerySet, Seen, White, judge, level_query, see, whiten
from ln_probe.analyses.geometry.nearest import (
    KEPT,
    QUERY,
    VALUE,
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
# Above this number of keys, linear programs for undecided keys cost too much.
LARGE = 4096


class Verdicts(NamedTuple):
    """Verdicts of the keys of one set, a row each, and what proves them."""

    code: Ints  # index into NAMES
    first: Ints  # the first key that does not differ from each
    query: Floats  # "key D": proves selectable
    used: Ints  # how many weights prove unselectable: `member[i, :used[i]]` and `value[i, :used[i]]`
    member: Ints
    value: Floats
    repaired: Bools  # whether it took more than one search


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


class Answers(NamedTuple):
    """What is proved of the keys of one set; `inner`: attention over the queries with |u| no more than asked."""

    verdicts: Verdicts
    margins: Margins
    attention: Attention
    inner: Attention


def no_answers(count: int, wide: int, seen: int) -> Answers:
    """Return answers that say nothing, for keys of `wide` dimensions that queries see in `seen`."""

    def numbers() -> Floats:
        return np.full(count, np.nan)

    def weights(dim: int) -> tuple[Ints, Ints, Floats]:
        return np.zeros(count, np.int64), np.zeros((count, dim + 2), np.int64), np.zeros((count, dim + 2))

    def points() -> Floats:
        return np.zeros((count, seen))

    code, repaired = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    return Answers(
        Verdicts(code, np.arange(count), np.zeros((count, wide)), *weights(wide), repaired),
        Margins(numbers(), numbers(), points(), *weights(seen)),
        Attention(numbers(), numbers(), points(), points()),
        Attention(numbers(), numbers(), points(), points()),
    )


@compiled
def gram_matrix(rows: Floats, columns: Floats) -> Floats:
    """Return the products of all rows with each other."""
    count, dim = rows.shape
    products = np.empty((count, count))
    for i in range(count):
        combine(columns, rows[i], dim, count, products[i])
    return products


@compiled
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
    count, reach = rows.shape[0], TAU * (1.0 + SLACK)
    for j in range(count):
        first[j], copies[j] = j, 0
    for i in range(count):
        for j in range(i + 1, count):
            if abs(rows[i, 0] - rows[j, 0]) <= reach and squared_distance(rows, i, j) <= reach * reach:
                copies[i] += 1
                copies[j] += 1
                first[j] = min(first[j], i)


@compiled_part
def squared_distance(rows: Floats, i: int, j: int) -> float:
    """Return the squared distance of two keys."""
    square = 0.0
    for t in range(rows.shape[1]):
        step = rows[i, t] - rows[j, t]
        square += step * step
    return square


@compiled_in_place
def set_absent(rows: Floats, i: int, copies: Ints, absent: Bools) -> None:
    """Mark key i and the keys within tau of it."""
    for j in range(rows.shape[0]):
        absent[j] = j == i or (
            copies[i] > 0 and copies[j] > 0 and squared_distance(rows, i, j) <= (TAU * (1.0 + SLACK)) ** 2
        )


@compiled
def decide_set(rows: Floats, noise: Floats, biased: bool, own_queries: bool, budget: float, verdicts: Verdicts) -> None:
    """Set the verdicts of a set that are not known yet.

    Args:
        own_queries: whether every key is tried under itself first.
    """
    count, dim = rows.shape
    code, copies = verdicts.code, np.zeros(count, np.int64)
    find_copies(rows, verdicts.first, copies)
    space = make_space(rows, np.zeros(count), noise)
    absent, scores, trial = np.zeros(count, np.bool_), np.empty(count), np.zeros(dim)
    start = np.full(count, -1, np.int64)
    left = 0
    for i in range(count):
        if code[i] == UNDECIDED and copies[i] == count - 1:  # nothing to compete with
            code[i] = DUPLICATE if copies[i] > 0 else SELECTABLE
        elif code[i] == UNDECIDED and own_queries and not biased:
            set_absent(rows, i, copies, absent)
            prove_query(space, i, rows[i], absent, biased, copies, verdicts, scores)
        left += code[i] == UNDECIDED
    if left == 0:
        return
    white = whiten(rows, biased)
    rank = white.rows.shape[1]
    columns, queries = transposed(white.rows), transposed(white.to_query)
    products = gram_matrix(white.rows, columns) if count <= MOST_PRODUCTS else np.empty((0, 0))
    for i in range(count):
        if code[i] != UNDECIDED:
            continue
        set_absent(rows, i, copies, absent)
        lowered = white.lifted and white.rows[i, rank - 1] < 0.0
        lead = 1.0
        if products.shape[0] > 0 and not lowered:
            best = -np.inf
            for j in range(count):
                if not absent[j] and products[i, j] > best:
                    best, start[i] = products[i, j], j
            lead = products[i, i] - best
        if lead > 0.0:
            combine(queries, white.rows[i], rank - 1 if lowered else rank, dim, trial)
            prove_query(space, i, trial, absent, biased, copies, verdicts, scores)
        left -= code[i] != UNDECIDED
    if left > 0:
        search_set(space, white, columns, queries, products, biased, budget, copies, start, verdicts)


@compiled_in_place
def prove_query(
    space: Space, i: int, trial: Floats, absent: Bools, biased: bool, copies: Ints, verdicts: Verdicts, scores: Floats
) -> None:
    """Give key i a verdict if a query proves it."""
    count, last = space.rows.shape[0], trial.shape[0] - 1
    lead, _ = query_lead(space, i, trial, absent, biased and last < 0, scores)
    if biased and trial[last] <= 0.0:
        # One that is added to biased scores must count the bias: a little, which a ten-thousandth of its lead pays.
        length, low, high = 0.0, np.inf, -np.inf
        for t in range(last):
            length += trial[t] * trial[t]
        for j in range(count):
            low, high = min(low, space.rows[j, last]), max(high, space.rows[j, last])
        trial[last] = np.sqrt(length) * max(lead, TAU) / (1e4 * max(high - low, 1.0))
        lead, _ = query_lead(space, i, trial, absent, biased, scores)
    if lead > TAU * (1.0 - SLACK):
        verdicts.code[i] = DUPLICATE if copies[i] > 0 else SELECTABLE
        for t in range(last + 1):
            verdicts.query[i, t] = trial[t]


@compiled_in_place
def prove_weights(
    space: Space, i: int, member: Ints, value: Floats, used: int, biased: bool, verdicts: Verdicts, scores: Floats
) -> None:
    """Give key i a verdict if weights prove it."""
    miss, nearest = weights_miss(space, i, member, value, used, biased, scores)
    if miss <= TAU * (1.0 + SLACK) and nearest > TAU * (1.0 - SLACK):
        verdicts.code[i], verdicts.used[i] = UNSELECTABLE, used
        for a in range(used):
            verdicts.member[i, a], verdicts.value[i, a] = member[a], value[a]


@compiled
def search_set(
    space: Space,
    white: White,
    columns: Floats,
    queries: Floats,
    products: Floats,
    biased: bool,
    budget: float,
    copies: Ints,
    start: Ints,
    verdicts: Verdicts,
) -> None:
    """Search for the verdicts that are left: by products, carefully, then where verdicts are given."""
    rows, count, dim, rank = space.rows, space.rows.shape[0], space.rows.shape[1], white.rows.shape[1]
    absent, scores = np.zeros(count, np.bool_), np.empty(max(count, dim))
    zeros, identity, closest = np.zeros(count), np.eye(dim), whole(-1)
    room, plain_room = search_room(count, max(rank, 1), dim), search_room(count, dim, dim)
    in_white = Verdict(rows, queries, 100.0 * TAU / white.thinnest)
    in_plain = Verdict(rows, identity, 100.0 * TAU)
    for i in range(count):
        if verdicts.code[i] != UNDECIDED:
            continue
        set_absent(rows, i, copies, absent)
        for attempt in range(4):
            careful = attempt > 0 or products.shape[0] == 0
            if verdicts.code[i] != UNDECIDED or (attempt == 0 and careful):
                continue
            here, verdict, ray = room, in_white, white.lifted
            keys = Keys(white.rows, columns, products, zeros)
            if attempt > 1:
                here, verdict, ray = plain_room, in_plain, biased
                keys = Keys(rows, space.columns, products, zeros)
            search = Search(attempt >= 0, careful, attempt != 2, ray, 0.0, 0.0, budget)
            size = find_verdict(keys, verdict, search, here, i, absent, start[i] if attempt == 0 else closest)
            prove_weights(space, i, here.members[KEPT], here.vectors[VALUE], size, biased, verdicts, scores)
            if verdicts.code[i] == UNDECIDED:
                prove_query(space, i, here.points[QUERY, :dim], absent, biased, copies, verdicts, scores)
            verdicts.repaired[i] = attempt > 0 and products.shape[0] > 0


@compiled_part
def is_narrow(lower: float, upper: float, gap: float, floor: float) -> bool:
    """Whether a bracket is as narrow as was asked for, but for rounding."""
    return upper < np.inf and upper - lower <= max(gap * max(abs(lower), abs(upper)) * 1.001, floor)


@compiled
def bound_margins(
    seen: Seen, level: Floats, levelled: bool, gap: float, budget: float, verdicts: Verdicts, margins: Margins
) -> None:
    """Bracket the margins of a set that are not known as narrowly as is asked for yet.

    Args:
        level: a u under which all keys score alike, if `levelled`: it proves that no margin is below 0, and the weights
            that reproduce an unselectable key prove that its margin is about 0.
    """
    rows, offset, (count, dim) = seen.rows, seen.offset, seen.rows.shape
    space = make_space(rows, offset, seen.noise)
    lower, upper, middle, size = margins.lower, margins.upper, np.zeros(dim), 0.0
    for j in range(count):
        for t in range(dim):
            middle[t] += rows[j, t] / count
    for j in range(count):
        for t in range(dim):
            size += (rows[j, t] - middle[t]) ** 2
    size = np.sqrt(size / count)
    floor, products, left = ZERO * size, np.empty((0, 0)), 0
    for i in range(count):
        left += not is_narrow(lower[i], upper[i], gap, 2.0 * floor)
    if left > 0 and count <= MOST_PRODUCTS:
        products = gram_matrix(rows, space.columns)
    room = search_room(count, dim, dim)
    absent, scores, u = np.zeros(count, np.bool_), np.empty(max(count, dim)), np.empty(dim)
    keys = Keys(rows, space.columns, products, offset)
    for i in range(count):
        enough = 2.0 * floor
        if is_narrow(lower[i], upper[i], gap, enough):
            continue
        copy = mark_equal(rows, offset, i, absent)
        if levelled:
            keep_query(space, i, level, margins, scores)
        if copy >= 0:
            margins.used[i], margins.member[i, 0], margins.value[i, 0] = 1, copy, 1.0
            upper[i] = gap_at_most(space, i, margins.member[i], margins.value[i], margins.used[i], scores)
        elif levelled and verdicts.code[i] == UNSELECTABLE and verdicts.used[i] <= dim + 2:
            enough = max(enough, 1.01 * TAU * size)
            keep_bound(space, i, verdicts.member[i], verdicts.value[i], verdicts.used[i], margins, scores)
        for attempt in range(2):
            careful = attempt == 1 or products.shape[0] == 0
            if is_narrow(lower[i], upper[i], gap, enough) or (careful and attempt == 0):
                continue
            enough = 2.0 * floor
            search = Search(attempt < 0, careful, attempt < 0, attempt < 0, gap, floor, budget)
            used = find_margin(keys, search, room, i, absent)
            for t in range(dim):
                u[t] = room.points[QUERY, t]
            into_ball(u, dim)
            keep_query(space, i, u, margins, scores)
            keep_bound(space, i, room.members[KEPT], room.vectors[VALUE], used, margins, scores)


@compiled_part
def mark_equal(rows: Floats, offset: Floats, i: int, absent: Bools) -> int:
    """Mark key i and the keys that queries cannot tell from it; return one of these, -1 if there is none."""
    other: int = whole(-1)
    for j in range(rows.shape[0]):
        equal = offset[j] == offset[i] and rows[j, 0] == rows[i, 0] and squared_distance(rows, i, j) == 0.0
        absent[j] = equal or j == i
        if equal and j != i:
            other = j
    return other


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


@compiled
def bound_attention(seen: Seen, radius: float, starts: Floats, budget: float, attention: Attention) -> None:
    """Bracket the largest attention weights over the queries with |u| <= radius that are not known yet.

    Args:
        starts: directions of u in which good queries are expected, a row for each key.
    """
    rows, offset, (count, dim) = seen.rows, seen.offset, seen.rows.shape
    lower, upper, gap = attention.lower, attention.upper, WEIGHT_GAP * PROOF
    space = make_space(rows, offset, seen.noise)
    scaled, columns = rows * radius, space.columns * radius
    room = attention_room(count, dim)
    tries, middle = np.zeros((2, dim)), np.zeros((1, dim))
    u, proof, scores, mean = np.zeros(dim), np.zeros(dim), np.empty((2, count)), np.empty(dim)
    for i in range(count):
        if upper[i] - lower[i] <= WEIGHT_GAP:
            continue
        length, start = 0.0, 0.0
        for t in range(dim):
            length += rows[i, t] * rows[i, t]
            start += starts[i, t] * starts[i, t]
        for t in range(dim):
            tries[0, t] = rows[i, t] / np.sqrt(length) if length > 0.0 else 0.0
            tries[1, t] = starts[i, t] / np.sqrt(start) if start > 0.0 else 0.0
        low, high = largest_weight(scaled, columns, offset, i, tries, gap, budget, room, u, proof)
        if high - low > gap:  # once more, from the middle
            keep_attention(space, i, u, proof, radius, scores, mean, attention)
            largest_weight(scaled, columns, offset, i, middle, gap, budget, room, u, proof)
        keep_attention(space, i, u, proof, radius, scores, mean, attention)


@compiled_part
def keep_attention(
    space: Space, i: int, u: Floats, proof: Floats, radius: float, scores: Floats, mean: Floats, attention: Attention
) -> None:
    """Keep what two points of the unit ball, brought to a radius, prove, where it is better than what is known."""
    dim, alike = u.shape[0], True
    into_ball(u, dim)
    into_ball(proof, dim)
    for t in range(dim):
        u[t] *= radius
        proof[t] *= radius
        alike = alike and u[t] == proof[t]
    low, high = attention_bounds(space, i, u, radius, scores, mean)
    if not alike:
        _, high = attention_bounds(space, i, proof, radius, scores, mean)
    if not low <= attention.lower[i]:
        attention.lower[i] = low
        for t in range(dim):
            attention.at[i, t] = u[t]
    if not high >= attention.upper[i]:
        attention.upper[i] = high
        for t in range(dim):
            attention.bound_at[i, t] = proof[t]


@dataclass(frozen=True)
class Request:
    """What is asked of every set."""

    gap: float | None = RELATIVE_GAP  # width of a margin's bracket, as a share of the margin; None: no margins
    attention: bool = True  # whether attention is asked for, where there is a set of queries
    own_queries: bool = False  # try every key under itself first
    budget: float = BUDGET  # multiplications and additions per key


@dataclass(frozen=True)
class Solved:
    """One set of keys with the coordinates in which it was solved."""

    judged: Judged
    seen: Seen | None
    answers: Answers


def solve_set(
    keys: Floats,
    bias: Floats | None,
    queries: QuerySet | None,
    request: Request,
    inner: float | None = None,
) -> Solved:
    """Solve one set of valid float64 keys.

    Args:
        inner: also bracket attention over the queries with |u| no more than this.
    """
    if bias is not None and (bias == bias[0]).all():
        bias = None
    judged = judge(keys, bias, queries)
    seen = None if queries is None else see(keys, bias, queries)
    (count, wide), dim = judged.rows.shape, judged.rows.shape[1] if seen is None else seen.rows.shape[1]
    answers = no_answers(count, wide, dim)
    verdicts, margins = answers.verdicts, answers.margins
    own = request.own_queries or wide >= count
    decide_set(judged.rows, judged.noise, judged.biased, own, request.budget, verdicts)
    if count <= LARGE and (verdicts.code == UNDECIDED).any():
        solve_programs(judged, verdicts, request.budget)
    if request.gap is not None and count > 1 and (seen is not None or not judged.biased):
        level = np.zeros(dim) if queries is None or seen is None else level_query(seen, queries, bias)
        space = seen or Seen(judged.rows, np.zeros(count), judged.noise)
        levelled = level is not None
        start = np.zeros(dim) if level is None else level
        bound_margins(space, start, levelled, request.gap, request.budget, verdicts, margins)
        if seen is None:  # margins are relative to a size that is itself rounded
            doubt = AMPLE * EPS * (count + wide)
            margins.lower[:] *= 1.0 - doubt
            margins.upper[:] *= 1.0 + doubt
        if not space.offset.any():  # the zero query gives no key less than 0
            np.maximum(margins.lower, 0.0, out=margins.lower)
    if seen is not None and request.attention:
        for radius, attention, starts in (
            (1.0, answers.attention, margins.at),
            (inner, answers.inner, answers.attention.at),
        ):
            if radius is not None and radius > 0.0:
                bound_attention(seen, float(radius), starts, request.budget, attention)
        np.fmax(answers.attention.lower, answers.inner.lower, out=answers.attention.lower)
    return Solved(judged, seen, answers)


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


# Seconds, against cycling without end; the limit on iterations comes first on any machine that is not stuck.
TIME_LIMIT = 20.0
PASSES = 4  # over all numbers of the program, per iteration: pricing, two triangular solves, part of a factorization


def separate(
    others: Float64[np.ndarray, "other dim"], key: Float64[np.ndarray, " dim"], ray: bool, budget: float
) -> tuple[Float64[np.ndarray, " dim"], Float64[np.ndarray, " other"]]:
    """Return the query in the unit box with the largest score gap, and convex weights from its dual.

    Either may be all zero if the solver fails. With `ray` the query's last coordinate must not be negative.
    """
    number, dim = others.shape
    difference = others - key
    size = max(float(np.abs(difference).max()), 1e-300)
    exact = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    steps = int(min(max(budget / (PASSES * number * dim), 1.0), 1e9))
    solved = linprog(
        np.append(np.zeros(dim), -1.0),
        A_ub=np.column_stack([difference / size, np.ones(number)]),
        b_ub=np.zeros(number),
        bounds=[*[(-1.0, 1.0)] * (dim - ray), *[(0.0, 1.0)] * ray, (0.0, None)],
        method="highs",
        options={**exact, "time_limit": TIME_LIMIT, "maxiter": steps},
    )
    if solved.x is None:
        return np.zeros(dim), np.zeros(number)
    weights = np.maximum(-np.asarray(solved.ineqlin.marginals), 0.0)
    total = float(weights.sum())
    return np.asarray(solved.x[:dim]), weights / total if total > 0.0 else weights


def solve_programs(judged: Judged, verdicts: Verdicts, budget: float) -> None:
    """Decide what is undecided by linear programs, one key after the other; what these do not prove stays so."""
    rows = judged.rows
    space = make_space(rows, np.zeros(len(rows)), judged.noise)
    first, copies = np.empty(len(rows), np.int64), np.zeros(len(rows), np.int64)
    find_copies(rows, first, copies)
    absent, scores = np.zeros(len(rows), np.bool_), np.empty(max(rows.shape))
    for i in map(int, np.flatnonzero(verdicts.code == UNDECIDED)):
        set_absent(rows, i, copies, absent)
        others = np.flatnonzero(~absent)
        query, weights = separate(rows[others], rows[i], judged.biased, budget)
        prove_query(space, i, np.array(query), absent, judged.biased, copies, verdicts, scores)
        support = np.flatnonzero(weights)
        if verdicts.code[i] == UNDECIDED and 0 < len(support) <= verdicts.member.shape[1]:
            member, value = others[support], weights[support]
            prove_weights(space, i, member, value, len(support), judged.biased, verdicts, scores)
        verdicts.repaired[i] = verdicts.code[i] != UNDECIDED


def _compile_kernels() -> None:
    keys = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0], [1.0, 1.0]])
    queries = QuerySet(np.array([0.5, 0.0]), np.eye(2))
    solve_set(keys, np.array([0.0, 0.0, 0.0, 0.0, 1.0]), queries, Request(), 0.5)


compilation = Compilation(_compile_kernels)


def start_compilation() -> None:
    """Begin to compile the kernels in the background, so that the first set of keys need not wait for all of it."""
    compilation.start()
