"""Verdicts, margins and attention of sets of keys.

Each stage decides some keys and leaves fewer to the next:

1. *Own queries*: key i under itself. On a sphere it wins. (Where there are more dimensions than keys,
   or where some keys win.)
2. *White queries*: key i under the query `Σ⁻¹ k_i`.
3. *Search* for the nearest point of the hull of the others in white coordinates (`nearest`).
4. The search *goes on* where verdicts are given, on orthogonal factors; not compiled.

A step does several sets in one call: every call takes the interpreter's lock, and threads wait there.
Results do not depend on which sets are solved together.

Margins are searched with products from a Gram matrix, and carefully where these are too coarse;
attention by Newton's method. What is given out is what `check` proves of the queries and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from ln_probe.analyses.geometry.attention import attention_room, bound_attention
from ln_probe.analyses.geometry.check import (
    AMPLE,
    DUPLICATE,
    EPS,
    SELECTABLE,
    SLACK,
    TAU,
    UNDECIDED,
    Attention,
    Bools,
    Floats,
    Ints,
    Margins,
    Scratch,
    Space,
    Verdicts,
    find_copies,
    make_scratch,
    make_space,
    of_sets,
    try_scores,
    try_weights,
)
from ln_probe.analyses.geometry.compiled import Compilation, in_threads, processors
from ln_probe.analyses.geometry.keys import Judged, QuerySet, Seen, alike, centre, judge, level_queries, see, whiten
from ln_probe.analyses.geometry.nearest import CLEAR, Keys, Search, Verdict, find_margins, find_verdicts, search_room
from ln_probe.analyses.progress import one_blas_thread
from ln_probe.hooks.model import whole_number

# Width of a margin's bracket, as a share of the margin: read to two digits ("exact": six).
RELATIVE_GAP, EXACT_GAP = 0.01, 1e-6
# The largest weight is found to this (absolute): attention is read to two digits.
WEIGHT_GAP = 0.01
# Multiplications and additions per key, nominally one second, before it is given up.
BUDGET = 1e9
# Above this number of keys no matrix of all their products is made.
MOST_PRODUCTS = 2048
# Sets are solved together while the products of all their keys are no more than this.
PRODUCTS_TOGETHER = 2**17
# No more numbers are prepared in one thread, since small steps take the interpreter's lock.
PREPARED_TOGETHER = 2**15
# Own queries are tried if the first keys win under theirs.
PILOT = 32
# Queries whose scores are computed together.
TRIALS = 128
# At the nearest point no key scores less than it by more than this share of its square.
CONVERGED = 1e-10


class Answers(NamedTuple):
    """What is proved of the keys of some sets."""

    verdicts: Verdicts
    margins: Margins
    attention: Attention


def no_answers(sets: int, count: int, wide: int, seen: int) -> Answers:
    """Return answers that say nothing, for keys of `wide` dimensions that queries see in `seen`."""

    def numbers() -> Floats:
        return np.full((sets, count), np.nan)

    def whole_numbers(*shape: int) -> Ints:
        return np.zeros((sets, count, *shape), np.int64)

    def points(dim: int) -> Floats:
        return np.zeros((sets, count, dim))

    def weights(dim: int) -> tuple[Ints, Ints, Floats]:
        return whole_numbers(), whole_numbers(dim + 2), points(dim + 2)

    repaired = np.zeros((sets, count), np.bool_)
    return Answers(
        Verdicts(whole_numbers(), whole_numbers(), whole_numbers(), points(wide), *weights(wide), repaired),
        Margins(numbers(), numbers(), points(seen), *weights(seen)),
        Attention(numbers(), numbers(), points(seen), points(seen)),
    )


def try_queries(
    space: Space, trials: Floats, biased: bool, wanted: Bools, start: Ints, verdicts: Verdicts, scratch: Scratch
) -> None:
    """Give verdicts to keys without one that their queries prove.

    Args:
        trials: a query for each key, where verdicts are given.
        wanted: in which sets.
        start: is set to the rival that scores highest under each query.
    """
    for begin in range(0, trials.shape[1], TRIALS):
        some = np.ascontiguousarray(trials[:, begin : begin + TRIALS])
        try_scores(space, some, some @ space.columns, begin, biased, wanted, start, verdicts, scratch)


def search(judged: Judged, space: Space, budget: float, start: Ints, verdicts: Verdicts, scratch: Scratch) -> None:
    """Set verdicts by white queries and the search."""
    rows, biased, (sets, count, dim) = judged.rows, judged.biased, judged.rows.shape
    every = np.ones(sets, np.bool_)
    if verdicts.code.all():
        return
    if sets == 1 and count <= dim and not biased:  # in one factorization
        with suppress(np.linalg.LinAlgError):
            trials = np.linalg.solve(rows @ rows.mT + 1.0, rows)
            try_queries(space, np.asarray(trials, np.float64), biased, every, start, verdicts, scratch)
    white = None if verdicts.code.all() else whiten(rows, biased)
    if white is None:
        for b in range(sets if sets > 1 else 0):
            part = slice(b, b + 1)
            one, answers = of_sets(judged, part), of_sets(verdicts, part)
            search(one, of_sets(space, part), budget, start[part], answers, scratch)
        return
    queries, trials = np.ascontiguousarray(white.to_query.mT), white.rows.copy()
    if white.lifted:  # queries look upwards
        np.maximum(trials[..., -1], 0.0, out=trials[..., -1])
    try_queries(space, trials @ queries, biased, every, start, verdicts, scratch)
    if verdicts.code.all():
        return
    columns, products = np.ascontiguousarray(white.rows.mT), np.empty((sets, 0, 0))
    if count <= MOST_PRODUCTS:
        products = white.rows @ columns
    how = Search(True, count > MOST_PRODUCTS, white.lifted, 0.0, budget)
    in_white = Keys(white.rows, columns, products, space.offset)
    here = Verdict(rows, queries, 100.0 * TAU / white.thinnest, biased)
    room = search_room(count, max(white.rows.shape[2], 1), dim)
    find_verdicts(space, in_white, here, how, room, start, verdicts, scratch)
    if not verdicts.code.all():
        finish_search(judged, space, verdicts, budget, scratch)


@dataclass(frozen=True)
class Request:
    """What is asked of every set."""

    gap: float | None = RELATIVE_GAP  # width of a margin's bracket, as a share of the margin; None: no margins
    attention: bool = True  # whether attention is asked for, where there is a set of queries
    budget: float = BUDGET  # multiplications and additions per key


class Solved(NamedTuple):
    """Sets of keys, or one, with the coordinates in which they are solved."""

    judged: Judged
    seen: Seen | None
    answers: Answers


class Problem(NamedTuple):
    """Sets of keys with all that is needed to solve them."""

    solved: Solved
    space: Space  # where verdicts are given
    query_space: Space  # where margins and attention are
    own_queries: Bools  # whether every key is tried under itself first
    level: Floats  # a u under which all keys score alike, if `levelled`
    levelled: Bools


def prepare(keys: Floats, bias: Floats | None, queries: Sequence[QuerySet] | None, request: Request) -> Problem:
    """Return valid float64 keys before they are solved: one set, or several that are `alike`."""
    points, off = centre(keys)
    judged, seen = judge(points, off, bias, queries), None
    rows, (sets, count, wide) = judged.rows, judged.rows.shape
    space = query_space = make_space(rows, np.zeros((sets, count)), judged.noise)
    level, levelled = np.zeros((sets, wide)), np.ones(sets, np.bool_)
    if queries is not None and (request.gap is not None or request.attention):
        seen = see(points, bias, queries)
        query_space = make_space(*seen)
        if request.gap is not None:
            level, levelled = level_queries(seen, queries, bias)
    answers = no_answers(sets, count, wide, query_space.rows.shape[2])
    verdicts = answers.verdicts
    find_copies(rows, verdicts.first, verdicts.copies)
    verdicts.code[verdicts.copies == count - 1] = DUPLICATE if count > 1 else SELECTABLE
    own_queries = np.full(sets, wide >= count and not judged.biased)
    if count >= PILOT and not judged.biased:
        leaders = (rows[:, :PILOT] @ space.columns).argmax(axis=2)
        own_queries |= (leaders == np.arange(PILOT)).all(axis=1)
    return Problem(Solved(judged, seen, answers), space, query_space, own_queries, level, levelled)


def bound_margins(problem: Problem, gap: float, budget: float) -> None:
    """Bracket the margins of some sets."""
    space, (verdicts, margins, _) = problem.query_space, problem.solved.answers
    rows, (sets, count, dim) = space.rows, space.rows.shape
    scratch, room = make_scratch(count, dim), search_room(count, dim, dim)
    sizes = np.sqrt((space.length * space.length).mean(axis=1))
    for careful in (False, True):
        if careful or count <= MOST_PRODUCTS:
            products = np.empty((sets, 0, 0)) if careful else rows @ space.columns
            keys = Keys(rows, space.columns, products, space.offset)
            how = Search(False, careful, False, gap, budget)
            level, levelled = problem.level, problem.levelled
            find_margins(space, keys, how, room, level, levelled, sizes, verdicts, margins, scratch)


def solve(problem: Problem, radii: Floats, request: Request) -> None:
    """Set the answers of some sets."""
    (judged, seen, answers), space = problem.solved, problem.query_space
    (count, wide), dim = judged.rows.shape[1:], space.rows.shape[2]
    margins = answers.margins
    scratch, start = make_scratch(count, wide), np.full((len(judged.rows), count), -1)
    if problem.own_queries.any():
        trials = judged.rows, judged.biased, problem.own_queries, start
        try_queries(problem.space, *trials, answers.verdicts, scratch)
    search(judged, problem.space, request.budget, start, answers.verdicts, scratch)
    if request.gap is not None and count > 1 and (seen is not None or not judged.biased):
        bound_margins(problem, request.gap, request.budget)
        if seen is None:  # margins are relative to a size that is itself rounded
            doubt = AMPLE * EPS * (count + wide)
            margins.lower[:] *= 1.0 - doubt
            margins.upper[:] *= 1.0 + doubt
        gapless = ~space.offset.any(axis=1, keepdims=True)  # the zero query gives 0
        np.maximum(margins.lower, 0.0, out=margins.lower, where=gapless)
    if seen is not None and request.attention:
        rows = space.rows * radii[:, None, None]
        columns = space.columns * radii[:, None, None]
        room, scratch = attention_room(count, dim), make_scratch(count, dim)
        how = margins.at, WEIGHT_GAP, request.budget, room, np.zeros((4, dim)), answers.attention, scratch
        bound_attention(space, rows, columns, radii, *how)


def solve_sets(
    keys: Float64[np.ndarray, "set key d"],
    bias: Float64[np.ndarray, "set key"] | None = None,
    queries: Sequence[QuerySet] | None = None,
    radii: Float64[np.ndarray, " set"] | None = None,
    request: Request = Request(),
    threads: int | None = None,
) -> list[Solved]:
    """Solve sets of valid float64 keys in `threads` threads (default: one for each processor).

    Results do not depend on the number of threads.

    Args:
        bias: added to the scores of each key.
        queries: a set of queries for each set of keys.
        radii: attention is over the queries of each set with |u| no more than this; None: 1.
    """
    compilation.wait()
    threads = processors() if threads is None else whole_number(threads, "threads", 1)
    sets, count, dim = keys.shape
    radii, size, prepared = np.ones(sets) if radii is None else radii, 1, None
    with one_blas_thread():  # products round alike for any number of threads
        if alike(bias, queries):
            size = max(1, min(-(-sets // threads), PRODUCTS_TOGETHER // (count * max(count, dim))))
            if keys.size <= PREPARED_TOGETHER:
                prepared = prepare(np.ascontiguousarray(keys), None, queries, request)

        def solve_part(begin: int) -> list[Solved]:
            part = slice(begin, begin + size)
            lift = None if bias is None or (bias[part] == bias[begin, 0]).all() else bias[part]
            some = None if queries is None else queries[part]
            problem = prepared and of_sets(prepared, part)
            problem = problem or prepare(np.ascontiguousarray(keys[part]), lift, some, request)
            solve(problem, radii[part], request)
            return [of_sets(problem.solved, b) for b in range(len(problem.own_queries))]

        return [one for solved in in_threads(solve_part, range(0, sets, size), threads) for one in solved]


def finish_search(judged: Judged, space: Space, verdicts: Verdicts, budget: float, scratch: Scratch) -> None:
    """Decide what the compiled search left, one key after the other."""
    dim, left, trials = judged.rows.shape[2], verdicts.code == UNDECIDED, np.zeros_like(judged.rows)
    for b, i in np.argwhere(left).tolist():
        used = verdicts.used[b, i]
        active, weight = verdicts.member[b, i, :used].copy(), verdicts.value[b, i, :used].copy()
        trials[b, i], active, weight = nearest_point(of_sets(judged, b), i, active, weight, budget)
        used = min(len(active), dim + 2)
        verdicts.used[b, i] = used
        verdicts.member[b, i, :used], verdicts.value[b, i, :used] = active[:used], weight[:used]
    try_weights(space, judged.biased, verdicts, scratch)
    wanted, start = left.any(axis=1), np.zeros_like(verdicts.code)
    try_queries(space, trials, judged.biased, wanted, start, verdicts, scratch)
    verdicts.repaired[:] = left & (verdicts.code != UNDECIDED)


def nearest_point(judged: Judged, i: int, active: Ints, weight: Floats, budget: float) -> tuple[Floats, Ints, Floats]:
    """Search on from some active keys for the point of the hull that is nearest to key i.

    This is the search of `nearest`, but the active points are factorized instead of their Gram
    matrix, which keeps twice as many digits. It takes hundreds of times as long, and few steps.

    Returns:
        the query against that point, the active keys and their weights.
    """
    count, dim = judged.rows.shape
    points, counts = judged.rows - judged.rows[i], np.ones(count)
    if judged.biased:  # the ray is one more point
        points, counts = np.vstack([points, -np.eye(dim)[-1:]]), np.append(counts, 0.0)
    length = np.sqrt(np.einsum("kd,kd->k", points, points))
    length[length <= TAU * (1.0 + SLACK)] = np.inf
    if len(active) == 0:
        active, weight = length[:count].argmin(keepdims=True), np.ones(1)
    table = np.column_stack([points, counts * length[active].min()])
    query, shortest, spent = np.zeros(dim), np.inf, 0.0
    while spent <= budget:
        goal = affine_weights(table[active], counts[active])
        while (goal < 0.0).any():
            share = np.divide(weight, weight - goal, out=np.full(len(goal), np.inf), where=goal < 0.0)
            weight = np.maximum(weight + share.min() * (goal - weight), 0.0)
            active, weight = np.delete(active, share.argmin()), np.delete(weight, share.argmin())
            goal = affine_weights(table[active], counts[active])
        x = goal @ points[active]
        if active.max() == count:  # what the ray leaves of the last coordinate is rounding
            x[-1] = min(x[-1], 0.0)
        reach = float(np.sqrt(x @ x))
        if not reach < shortest:
            break
        query, weight, shortest = -x, goal, reach
        scores = points @ x
        scores[length == np.inf] = np.inf
        upwards = not judged.biased or x[-1] <= 0.0
        if reach <= TAU * (1.0 - CLEAR) or (upwards and scores[:count].min() > TAU * (1.0 + CLEAR) * reach):
            break
        scores[active] = np.inf
        if scores.min() >= reach * reach * (1.0 - CONVERGED):
            break
        active, weight = np.append(active, scores.argmin()), np.append(weight, 0.0)
        spent += 2.0 * dim * (count + len(active) ** 2)
    own = active < count
    return query, active[own], weight[own]


def affine_weights(table: Floats, counts: Floats) -> Floats:
    """Return the weights of the point of an affine hull that is nearest to the origin, if unique.

    Args:
        table: "point dim+1", each point and a multiple of what its weight counts.
        counts: what each weight counts in the sum of the weights, which is one.
    """
    factor = np.asarray(np.linalg.qr(table.T, mode="r"))
    if len(table) > len(factor) or not factor.diagonal().all():
        return np.full(len(table), np.nan)
    solution = np.linalg.solve(factor, np.linalg.solve(factor.T, counts))
    return np.asarray(solution / (counts @ solution))


def _compile_kernels() -> None:
    # The C library keeps twice as much freed memory as the largest array that was freed, at most 64 MiB.
    # To get the memory of every set anew took half of the time of verdicts.
    np.empty(31 * 2**17)
    keys = np.array([[[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0], [1.0, 1.0]]])
    queries = QuerySet(np.array([0.5, 0.0]), np.eye(2))
    solve_sets(keys, np.array([[0.0, 0.0, 0.0, 0.0, 1.0]]), [queries], np.array([0.5]), threads=1)


compilation = Compilation(_compile_kernels)
