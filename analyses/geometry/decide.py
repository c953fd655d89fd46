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
    Floats,
    Ints,
    Margins,
    Scratch,
    Space,
    Verdicts,
    find_copies,
    keep_lead,
    lead_under,
    make_scratch,
    make_space,
    prove_query,
    prove_weights,
    set_absent,
)
from ln_probe.analyses.geometry.compiled import Compilation, compiled_in_place, in_threads
from ln_probe.analyses.geometry.keys import Judged, QuerySet, Seen, judge, level_query, see, whiten
from ln_probe.analyses.geometry.nearest import (
    Keys,
    Search,
    Verdict,
    find_margins,
    find_verdicts,
    search_room,
)
from ln_probe.analyses.progress import one_blas_thread

# Width of a margin's bracket, as a share of the margin: it is read to two digits. "exact": six digits.
RELATIVE_GAP, EXACT_GAP = 0.01, 1e-6
# A bracket narrower than this (relative to the RMS norm of the keys as queries see them) is not narrowed further.
ZERO = 0.01 * TAU
# The largest weight is found to this (absolute): attention is read to two digits.
WEIGHT_GAP = 0.01
# Multiplications and additions per key, nominally one second, before it is given up.
BUDGET = 1e9
# Above this number of keys no matrix of all their products is made.
MOST_PRODUCTS = 2048
# Queries whose scores are computed together.
TRIALS = 128
# Above this number of keys, linear programs for undecided keys cost too much.
LARGE = 4096


class Answers(NamedTuple):
    """What is proved of the keys of one set."""

    verdicts: Verdicts
    margins: Margins
    attention: Attention


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
        Verdicts(code, np.arange(count), np.zeros(count, np.int64), np.zeros((count, wide)), *weights(wide), repaired),
        Margins(numbers(), numbers(), points(), *weights(seen)),
        Attention(numbers(), numbers(), points(), points()),
    )


def try_queries(
    space: Space, trials: Floats, first: int, biased: bool, start: Ints, verdicts: Verdicts, scratch: Scratch
) -> None:
    """Give verdicts to keys without one that their queries prove.

    Args:
        trials: a query for each key from number `first` on, where verdicts are given.
        start: is set to the rival that scores highest under each query.
    """
    for begin in range(0, len(trials), TRIALS):
        some = np.ascontiguousarray(trials[begin : begin + TRIALS])
        try_scores(space, some, some @ space.columns, first + begin, biased, start, verdicts, scratch)


@compiled_in_place
def try_scores(
    space: Space,
    trials: Floats,
    scores: Floats,
    first: int,
    biased: bool,
    start: Ints,
    verdicts: Verdicts,
    scratch: Scratch,
) -> None:
    """Give verdicts to keys without one that their queries prove, from the scores of all keys under these."""
    for a in range(trials.shape[0]):
        i, best = first + a, -np.inf
        if verdicts.code[i] != UNDECIDED:
            continue
        set_absent(space.rows, i, verdicts.copies, scratch.absent)
        for j in range(scores.shape[1]):
            if not scratch.absent[j] and scores[a, j] > best:
                best, start[i] = scores[a, j], j
        if scores[a, i] > best:
            if biased:
                prove_query(space, i, trials[a], biased, verdicts, scratch)
            else:
                lead = lead_under(space, i, trials[a], scores[a], biased, scratch.absent)
                keep_lead(i, lead, trials[a], verdicts)


@compiled_in_place
def try_weights(space: Space, biased: bool, verdicts: Verdicts, scratch: Scratch) -> None:
    """Give verdicts to keys without one that the weights at their place prove."""
    for i in range(space.rows.shape[0]):
        if verdicts.code[i] == UNDECIDED:
            used, verdicts.used[i] = verdicts.used[i], 0
            prove_weights(space, i, verdicts.member[i], verdicts.value[i], used, biased, verdicts, scratch)


def decide_set(judged: Judged, own_queries: bool, budget: float, verdicts: Verdicts) -> None:
    """Set the verdicts of a set.

    Args:
        own_queries: whether every key is tried under itself first.
    """
    rows, biased, (count, dim) = judged.rows, judged.biased, judged.rows.shape
    code, copies = verdicts.code, verdicts.copies
    find_copies(rows, verdicts.first, copies)
    code[copies == count - 1] = DUPLICATE if count > 1 else SELECTABLE  # nothing to compete with
    if code.all():
        return
    space, scratch = make_space(rows, np.zeros(count), judged.noise), make_scratch(count, dim)
    start = np.full(count, -1)
    if own_queries and not biased:
        try_queries(space, rows, 0, biased, start, verdicts, scratch)
        if code.all():
            return
    white = whiten(rows, biased)
    queries, trials = np.ascontiguousarray(white.to_query.T), white.rows
    if white.lifted and (lowered := trials[:, -1] < 0.0).any():  # queries look upwards
        trials = trials.copy()
        trials[lowered, -1] = 0.0
    try_queries(space, trials @ queries, 0, biased, start, verdicts, scratch)
    if code.all():
        return
    columns = np.ascontiguousarray(white.rows.T)
    products = white.rows @ columns if count <= MOST_PRODUCTS else np.empty((0, 0))
    room, closest = search_room(count, max(white.rows.shape[1], 1), dim), np.full(count, -1)
    in_white = Keys(white.rows, columns, products, np.zeros(count))
    at_white = Verdict(rows, queries, 100.0 * TAU / white.thinnest, biased)
    in_plain = Keys(rows, space.columns, products, np.zeros(count))
    at_plain = Verdict(rows, np.eye(dim), 100.0 * TAU, biased)
    # By products; carefully; then where verdicts are given, among differences as they are, and of length one.
    for attempt in range(0 if len(products) else 1, 4):
        left = code == UNDECIDED
        keys, here, ray = (in_white, at_white, white.lifted) if attempt < 2 else (in_plain, at_plain, biased)
        if attempt == 2:
            room = search_room(count, dim, dim)
        search = Search(True, attempt > 0, attempt != 2, ray, 0.0, 0.0, budget)
        find_verdicts(space, keys, here, search, room, closest if attempt else start, verdicts, scratch)
        verdicts.repaired[left] = attempt > 0 and len(products) > 0
        if code.all():
            return
    if count <= LARGE:
        solve_programs(judged, space, verdicts, budget, scratch)


def bound_margins(
    space: Space, level: Floats | None, gap: float, budget: float, verdicts: Verdicts, margins: Margins
) -> None:
    """Bracket the margins of a set.

    Args:
        level: a u under which all keys score alike.
    """
    rows, (count, dim) = space.rows, space.rows.shape
    scratch = make_scratch(count, dim)
    centred = rows - rows.mean(axis=0)
    size = float(np.sqrt(np.einsum("kd,kd->", centred, centred) / count))
    known = np.zeros(dim) if level is None else level
    room = search_room(count, dim, dim)
    for careful in (False, True):
        if careful or count <= MOST_PRODUCTS:
            products = np.empty((0, 0)) if careful else rows @ space.columns
            keys = Keys(rows, space.columns, products, space.offset)
            search = Search(False, careful, False, False, gap, ZERO * size, budget)
            inside = 1.01 * TAU * size
            find_margins(space, keys, search, room, known, level is not None, inside, verdicts, margins, scratch)


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
    radius: float = 1.0,
) -> Solved:
    """Solve one set of valid float64 keys; attention is over the queries with |u| no more than `radius`."""
    if bias is not None and (bias == bias[0]).all():
        bias = None
    judged = judge(keys, bias, queries)
    seen = None
    if queries is not None and (request.gap is not None or request.attention):
        seen = see(keys, bias, queries)
    (count, wide), dim = judged.rows.shape, judged.rows.shape[1] if seen is None else seen.rows.shape[1]
    answers = no_answers(count, wide, dim)
    verdicts, margins = answers.verdicts, answers.margins
    decide_set(judged, request.own_queries or wide >= count, request.budget, verdicts)
    if request.gap is None and seen is None:
        return Solved(judged, seen, answers)
    space = make_space(*(seen or Seen(judged.rows, np.zeros(count), judged.noise)))
    if request.gap is not None and count > 1 and (seen is not None or not judged.biased):
        level = np.zeros(dim) if queries is None or seen is None else level_query(seen, queries, bias)
        bound_margins(space, level, request.gap, request.budget, verdicts, margins)
        if seen is None:  # margins are relative to a size that is itself rounded
            doubt = AMPLE * EPS * (count + wide)
            margins.lower[:] *= 1.0 - doubt
            margins.upper[:] *= 1.0 + doubt
        if not space.offset.any():  # the zero query gives no key less than 0
            np.maximum(margins.lower, 0.0, out=margins.lower)
    if seen is not None and request.attention and radius > 0.0:
        rows, columns, points = space.rows * radius, space.columns * radius, np.zeros((4, dim))
        room, scratch = attention_room(count, dim), make_scratch(count, dim)
        how = margins.at, WEIGHT_GAP, request.budget, room, points, answers.attention, scratch
        bound_attention(space, rows, columns, radius, *how)
    return Solved(judged, seen, answers)


def solve_sets(
    keys: Float64[np.ndarray, "set key d"],
    bias: Float64[np.ndarray, "set key"] | None = None,
    queries: Sequence[QuerySet] | None = None,
    radii: Float64[np.ndarray, " set"] | None = None,
    request: Request = Request(),
    threads: int | None = None,
) -> list[Solved]:
    """Solve sets of valid float64 keys, `threads` at a time (default: as many as there are processors).

    Results do not depend on the number of threads.

    Args:
        bias: added to the scores of each key.
        queries: a set of queries for each set of keys.
        radii: attention is over the queries of each set with |u| no more than this; None: 1.
    """
    compilation.wait()

    def one(b: int) -> Solved:
        return solve_set(
            np.ascontiguousarray(keys[b]),
            None if bias is None else bias[b],
            None if queries is None else queries[b],
            request,
            1.0 if radii is None else float(radii[b]),
        )

    with one_blas_thread():  # products round alike for any number of threads
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


def solve_programs(judged: Judged, space: Space, verdicts: Verdicts, budget: float, scratch: Scratch) -> None:
    """Decide what is undecided by linear programs, one key after the other; what these do not prove stays so."""
    rows, code = judged.rows, verdicts.code
    left, trials = np.flatnonzero(code == UNDECIDED), np.zeros_like(rows)
    for i in left:
        steps = rows - rows[i]
        others = np.flatnonzero(np.einsum("kd,kd->k", steps, steps) > (TAU * (1.0 + SLACK)) ** 2)
        trials[i], weights = separate(rows[others], rows[i], judged.biased, budget)
        support = np.flatnonzero(weights)
        if 0 < (used := len(support)) <= verdicts.member.shape[1]:
            verdicts.used[i] = used
            verdicts.member[i, :used], verdicts.value[i, :used] = others[support], weights[support]
    try_weights(space, judged.biased, verdicts, scratch)
    start = np.zeros(len(rows), np.int64)
    for row in map(int, left):
        try_queries(space, trials[row : row + 1], row, judged.biased, start, verdicts, scratch)
    verdicts.repaired[left] = code[left] != UNDECIDED


def _compile_kernels() -> None:
    keys = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0], [1.0, 1.0]])
    queries = QuerySet(np.array([0.5, 0.0]), np.eye(2))
    solve_set(keys, np.array([0.0, 0.0, 0.0, 0.0, 1.0]), queries, Request(), 0.5)


compilation = Compilation(_compile_kernels)


def start_compilation() -> None:
    """Begin to compile the kernels in the background, so that the first set of keys need not wait for all of it."""
    compilation.start()
