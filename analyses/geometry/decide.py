"""Verdicts, margins and attention of sets of keys: every set in one compiled function, sets in threads.

Each stage decides some keys and leaves fewer to the next:

1. *Own queries*: key i under itself. On a sphere it wins. (Asked for, where there are more dimensions than keys, or
   where some keys win.)
2. *White queries*: key i under the query `Σ⁻¹ k_i`.
3. *Search* for the nearest point of the hull of the others in white coordinates (`nearest`).
4. The search *goes on* where verdicts are given, from where that one ended, on orthogonal factors; not compiled.

Margins are searched with products from the Gram matrix of the keys as the queries see them, and carefully where these
are too coarse; attention by Newton's method. What is given out is what `check` proves of the queries and weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

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
    CLEAR,
    Keys,
    Search,
    Verdict,
    find_margins,
    find_verdicts,
    search_room,
)
from ln_probe.analyses.progress import one_blas_thread

_Room = TypeVar("_Room")

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
# Own queries are tried if the first keys win under theirs.
PILOT = 32
# Queries whose scores are computed together.
TRIALS = 64
# The nearest point is found where no key scores less than it by more than this share of its square.
CONVERGED = 1e-10


_rooms = threading.local()


def own_room(make: Callable[..., _Room], *sizes: int) -> _Room:
    """Return `make(*sizes)`, the same one for the next set of these sizes that the thread solves.

    To ask the system for memory anew for every set took a tenth of the time, and threads wait for each other there.
    """
    known = vars(_rooms).get(make.__name__)
    if known is None or known[0] != sizes:
        known = sizes, make(*sizes)
        setattr(_rooms, make.__name__, known)
    return cast("_Room", known[1])


def product_table(count: int) -> Floats:
    """Return room for the products of all keys with each other."""
    return np.empty((count, count))


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
    space, scratch = make_space(rows, np.zeros(count), judged.noise), own_room(make_scratch, count, dim)
    start = np.full(count, -1)
    leaders = [] if biased else (rows[:PILOT] @ space.columns).argmax(axis=1).tolist()
    if not biased and (own_queries or leaders == list(range(PILOT))):
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
    products = np.empty((0, 0))
    if count <= MOST_PRODUCTS:
        products = np.matmul(white.rows, columns, out=own_room(product_table, count))
    search = Search(True, len(products) == 0, white.lifted, 0.0, 0.0, budget)
    in_white = Keys(white.rows, columns, products, np.zeros(count))
    here = Verdict(rows, queries, 100.0 * TAU / white.thinnest, biased)
    room = own_room(search_room, count, max(white.rows.shape[1], 1), dim)
    find_verdicts(space, in_white, here, search, room, start, verdicts, scratch)
    if not code.all():
        finish_search(judged, space, verdicts, budget, scratch)


def bound_margins(
    space: Space, level: Floats | None, gap: float, budget: float, verdicts: Verdicts, margins: Margins
) -> None:
    """Bracket the margins of a set.

    Args:
        level: a u under which all keys score alike.
    """
    rows, (count, dim) = space.rows, space.rows.shape
    scratch = own_room(make_scratch, count, dim)
    centred = rows - rows.mean(axis=0)
    size = float(np.sqrt(np.einsum("kd,kd->", centred, centred) / count))
    known = np.zeros(dim) if level is None else level
    room = own_room(search_room, count, dim, dim)
    for careful in (False, True):
        if careful or count <= MOST_PRODUCTS:
            products = np.empty((0, 0))
            if not careful:
                products = np.matmul(rows, space.columns, out=own_room(product_table, count))
            keys = Keys(rows, space.columns, products, space.offset)
            search = Search(False, careful, False, gap, ZERO * size, budget)
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
        room, scratch = own_room(attention_room, count, dim), own_room(make_scratch, count, dim)
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


def finish_search(judged: Judged, space: Space, verdicts: Verdicts, budget: float, scratch: Scratch) -> None:
    """Decide what the compiled search left, one key after the other; what is not proved stays undecided."""
    code, (count, dim) = verdicts.code, judged.rows.shape
    trials, start, left = np.zeros((count, dim)), np.zeros(count, np.int64), np.flatnonzero(code == UNDECIDED)
    for i in map(int, left):
        used = verdicts.used[i]
        active, weight = verdicts.member[i, :used].copy(), verdicts.value[i, :used].copy()
        trials[i], active, weight = nearest_point(judged, i, active, weight, budget)
        used = min(len(active), dim + 2)
        verdicts.used[i], verdicts.member[i, :used], verdicts.value[i, :used] = used, active[:used], weight[:used]
    try_weights(space, judged.biased, verdicts, scratch)
    for i in map(int, left):
        try_queries(space, trials[i : i + 1], i, judged.biased, start, verdicts, scratch)
    verdicts.repaired[left] = code[left] != UNDECIDED


def nearest_point(judged: Judged, i: int, active: Ints, weight: Floats, budget: float) -> tuple[Floats, Ints, Floats]:
    """Search on from some active keys, where verdicts are given, for the point of the hull that is nearest to key i.

    This is the search of `nearest`, but the active points are factorized instead of their Gram matrix, which keeps
    twice as many digits. It takes hundreds of times as long, and few steps.

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
    """Return the weights of the point of an affine hull that is nearest to the origin; NaN where these are not unique.

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
    keys = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0], [1.0, 1.0]])
    queries = QuerySet(np.array([0.5, 0.0]), np.eye(2))
    solve_set(keys, np.array([0.0, 0.0, 0.0, 0.0, 1.0]), queries, Request(), 0.5)


compilation = Compilation(_compile_kernels)


def start_compilation() -> None:
    """Begin to compile the kernels in the background, so that the first set of keys need not wait for all of it."""
    compilation.start()
