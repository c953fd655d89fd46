"""The point of a convex hull that is nearest to a key, with offsets or without: one active-set search, compiled.

With scores `h_j + u·z_j`, |u| ≤ 1, the margin of key i is a concave maximum and, by duality, a convex minimum:

    max_u min_j [h_i - h_j + u·(z_i - z_j)]  =  min_w  |Σ w_j (z_j - z_i)| - Σ w_j (h_j - h_i),   w convex.

Without offsets h it is the distance of z_i to the hull of the others. The search keeps an active set of
affinely independent points `P_a = f_a (z_a - z_i)` (P. Wolfe, Math. Programming 11 (1976) 128-149):

1. x is their combination with the weights so far; it gives a query u = -x/|x| (a bound from below)
   and convex weights (a bound from above). Stop if they answer the question.
2. The key that scores highest under u enters the active set.
3. Go to the minimizer over the active set's affine hull as far as the weights stay convex;
   a point whose weight is used up leaves, and step 3 is repeated.

On the affine hull the offset is an affine function, of slope d within the hull's own directions.
With p the point nearest to the origin the minimizer is p + s·d, s = |p| / √(1 - |d|²).
If |d| ≥ 1 there is none: the way is along d until a weight is used up.

Only products of differences enter: from the matrix of all products of keys, or (`careful`) made from the keys.
The factors f_a bring differences to about one length, since a Gram matrix keeps nothing of much shorter ones.
The weights of the affine minimizer are `G⁻¹ e`, made to sum to one, where `G = c·eeᵀ + P Pᵀ`, and `e` says what
a point adds to the sum of the weights. The inverse is updated in O(m²) when a point comes or goes.
For keys with a bias, the last coordinate, the hull is extended downwards by a ray.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ln_probe.analyses.geometry.check import (
    TAU,
    UNDECIDED,
    UNSELECTABLE,
    Bools,
    Floats,
    Ints,
    Margins,
    Scratch,
    Space,
    Verdicts,
    into_ball,
    keep_bound,
    keep_query,
    prove_query,
    prove_weights,
    set_absent,
    space_of,
    squared_distance,
    verdicts_of,
)
from ln_probe.analyses.geometry.compiled import compiled_in_place, compiled_inline, compiled_part, compiled_slice, whole

# Verdicts are taken this far (relative) from tau, so that the check of the certificate agrees.
CLEAR = 1e-3
# A pivot below this share of a new point's squared length: as far as float64 can tell, the point
# is in the affine hull of the active set.
PIVOT = 1e-14
# A margin's bracket of this width, relative to the RMS norm of the keys, is narrow enough;
# and that of an unselectable key whose margin is known to be about 0.
ZERO, INSIDE = 0.01 * TAU, 1.01 * TAU
# Products x·p carry errors of about 1e-16·|x|·|p|; this leaves room for sums over thousands of terms.
NOISE = 1e-12
# A hull whose slope is this near to 1 has its minimizer too far out for float64 to tell it from none.
STEEP = 1.0 - 1e-12
# |x| below this share of the longest difference has no direction left; the slope alone makes the query then.
SHORT = 1e-11
# Weights that would become less than this are dropped; those above count as 0 and stay.
BLOCKED = -1e-13
# Points of the active set with less than this share in a dependent one cannot be exchanged for it.
DEPENDS = 1e-9
# Differences shorter than the unit by more than this keep some of their shortness.
LONGER = 1e3
# Squared distances read off products are noise below this share of the keys' own squares.
SQUARE_NOISE = 1e-13
# Keys that enter together in the first steps, one step for two dimensions, since most of them stay.
# In FEW dimensions a verdict takes too few steps for that. Keys must make x this much SHORTER.
MOST_ENTERING, FEW, SHORTER = 3, 8, 0.5
# Steps without a better bound after which the inverse has drifted, how often that is put right,
# and steps per dimension at most: for a margin, and for a verdict.
IDLE, REBUILT, STEPS, VERDICT_STEPS = 3, 5, 40, 10


# For each point of the active set, a row of `Room.vectors` each:
FACTOR = 0  # what the difference is multiplied by
E = 1  # what the weight counts in the sum of the weights
WEIGHT = 2
LEAD = 3  # the offset beyond the target's, times the factor
LAST = 4  # the last coordinate (keys with a bias)
SOLUTION = 5  # inverse @ e
BORDER = 6  # its products with a new point
WORK = 7
BASE = 8  # weights of the point of the affine hull that is nearest to the origin
ALONG = 9  # change of the weights that goes up the slope
VALUE = 10  # weights that are returned
COEFFICIENT = 11  # of the combination that makes the best query
# Rows of `Room.members`: the key of each point (-1: the ray), those of VALUE and of COEFFICIENT.
MEMBER, KEPT, SOURCE = 0, 1, 2
# Rows of `Room.keyed`, of each key: its squared distance from the target, its factor, its score.
SQUARE, SCALE, SCORE = 0, 1, 2
# Rows of `Room.points`: x in the coordinates of the search, and the query in those of verdicts, or u.
X, QUERY = 0, 1


class Room(NamedTuple):
    """What a search writes to: room for an active set of `capacity` points among `count` keys."""

    vectors: Floats  # "12 capacity"
    members: Ints  # "3 capacity"
    gram: Floats  # "capacity capacity": products of the points with each other
    inverse: Floats  # of G
    products: Floats  # "capacity count": products of the points with the difference of every key
    keyed: Floats  # "3 count"
    near: Floats  # "dim count": differences of all keys from the target
    points: Floats  # "2 dim"


def search_room(count: int, dim: int, judged: int) -> Room:
    """Return room for searches among `count` keys of `dim` dimensions, `judged` where verdicts are given."""
    capacity = dim + 3
    return Room(
        np.zeros((12, capacity)),
        np.zeros((3, capacity), np.int64),
        np.empty((capacity, capacity)),
        np.empty((capacity, capacity)),
        np.empty((capacity, count)),
        np.empty((3, count)),
        np.empty((dim, count)),
        np.zeros((2, max(judged, dim))),
    )


@compiled_part
def combine(table: Floats, weight: Floats, rows: int, count: int, out: Floats) -> None:
    """Compute `out[j] = Σ_t weight[t] table[t, j]` over the first `rows` rows and `count` columns."""
    for j in range(count):
        out[j] = 0.0
    t = 0
    while t + 4 <= rows:
        a, b, c, d = weight[t], weight[t + 1], weight[t + 2], weight[t + 3]
        for j in range(count):
            out[j] += a * table[t, j] + b * table[t + 1, j] + c * table[t + 2, j] + d * table[t + 3, j]
        t += 4
    while t < rows:
        a = weight[t]
        for j in range(count):
            out[j] += a * table[t, j]
        t += 1


@compiled_part
def append(room: Room, m: int, dim: int) -> bool:
    """Border the inverse by point `m`, whose column of G is BORDER; return False if it is dependent."""
    inverse, vectors = room.inverse, room.vectors
    solution, border, work, e = vectors[SOLUTION], vectors[BORDER], vectors[WORK], vectors[E]
    combine(inverse, border, m, m, work)
    pivot = border[m]
    known = 0.0
    for a in range(m):
        pivot -= work[a] * border[a]
        known += work[a] * e[a]
    if m > dim or not pivot > PIVOT * border[m]:
        return False
    for a in range(m):
        scaled = work[a] / pivot
        for b in range(m):
            inverse[a, b] += scaled * work[b]
        inverse[a, m] = -scaled
        inverse[m, a] = -scaled
    inverse[m, m] = 1.0 / pivot
    last = (e[m] - known) / pivot
    for a in range(m):
        solution[a] -= work[a] * last
    solution[m] = last
    return True


@compiled_part
def take_out(room: Room, k: int, m: int) -> None:
    """Take point `k` of `m` out: the last one moves to its place, the inverse loses one rank."""
    last, inverse, gram, vectors = m - 1, room.inverse, room.gram, room.vectors
    if k != last:
        room.members[MEMBER, k] = room.members[MEMBER, last]
        for row in range(LAST + 1):
            vectors[row, k] = vectors[row, last]
        vectors[SOLUTION, k], vectors[SOLUTION, last] = vectors[SOLUTION, last], vectors[SOLUTION, k]
        for j in range(room.products.shape[1]):
            room.products[k, j] = room.products[last, j]
        for b in range(m):
            inverse[k, b], inverse[last, b] = inverse[last, b], inverse[k, b]
        for b in range(m):
            inverse[b, k], inverse[b, last] = inverse[b, last], inverse[b, k]
        gram[k, k] = gram[last, last]
        for b in range(last):
            if b != k:
                gram[k, b] = gram[last, b]
                gram[b, k] = gram[last, b]
    pivot = inverse[last, last]
    for a in range(last):
        scaled = inverse[a, last] / pivot
        for b in range(last):
            inverse[a, b] -= scaled * inverse[last, b]
        vectors[SOLUTION, a] -= scaled * vectors[SOLUTION, last]


@compiled_part
def rebuild(room: Room, m: int, bordering: float) -> bool:
    """Invert from scratch, to get rid of accumulated rounding; False if the points have become dependent."""
    vectors = room.vectors
    for a in range(m):
        for b in range(a + 1):
            vectors[BORDER, b] = room.gram[a, b] + bordering * vectors[E, a] * vectors[E, b]
        if not append(room, a, room.near.shape[0]):
            return False
    return True


@compiled_part
def refine(room: Room, right: Floats, values: Floats, m: int, bordering: float) -> None:
    """Refine the solution `values` of `G values = right` by one step."""
    border, work, e = room.vectors[BORDER], room.vectors[WORK], room.vectors[E]
    combine(room.gram, values, m, m, border)
    total = 0.0
    for a in range(m):
        total += e[a] * values[a]
    for a in range(m):
        border[a] = right[a] - bordering * e[a] * total - border[a]
    combine(room.inverse, border, m, m, work)
    for a in range(m):
        values[a] += work[a]


@compiled_part
def squared_norm(room: Room, weight: Floats, m: int) -> float:
    """Return the squared length of the combination of the active points with some weights."""
    work, square = room.vectors[WORK], 0.0
    combine(room.gram, weight, m, m, work)
    for a in range(m):
        square += weight[a] * work[a]
    return max(square, 0.0)


@compiled_inline
def to_minimizer(room: Room, m: int, bordering: float, careful: bool, sloped: bool) -> tuple[int, bool]:
    """Go to the affine minimizer as far as the weights stay convex, without the points that block.

    Returns:
        how many points are left, and whether some left.
    """
    vectors, removed = room.vectors, False
    e, lead, solution, weight = vectors[E], vectors[LEAD], vectors[SOLUTION], vectors[WEIGHT]
    base, along = vectors[BASE], vectors[ALONG]
    while m > 0:
        # The minimizer's weights are `base + s·along`; s < 0: there is none.
        if careful:
            refine(room, e, solution, m, bordering)
        ones, slope = 0.0, 0.0
        for a in range(m):
            ones += e[a] * solution[a]
        for a in range(m):
            base[a] = solution[a] / ones
            along[a] = 0.0
        s = 0.0 if ones > 0.0 else -1.0
        if sloped:
            combine(room.inverse, lead, m, m, along)
            if careful:
                refine(room, lead, along, m, bordering)
            for a in range(m):
                slope += e[a] * along[a]
            for a in range(m):
                along[a] -= slope * base[a]
            steep = squared_norm(room, along, m)
            s = -1.0 if steep >= STEEP else np.sqrt(squared_norm(room, base, m) / (1.0 - steep))
        step, blocking = 1.0, whole(-1)
        if s < 0.0:
            step = np.inf
            for a in range(m):
                if along[a] < 0.0 and -weight[a] / along[a] < step:
                    step, blocking = -weight[a] / along[a], a
            if blocking < 0:
                return (m if sloped else 0), True
            for a in range(m):
                weight[a] = max(weight[a] + step * along[a], 0.0)
        else:
            for a in range(m):
                goal = base[a] + s * along[a]
                if goal < BLOCKED:
                    share = weight[a] / (weight[a] - goal)
                    if share < step:
                        step, blocking = share, a
            for a in range(m):
                weight[a] = max(weight[a] + step * (base[a] + s * along[a] - weight[a]), 0.0)
        if blocking < 0:
            break
        take_out(room, blocking, m)
        m -= 1
        removed = True
    total = 0.0
    for a in range(m):
        total += e[a] * weight[a]
    for a in range(m):
        weight[a] /= total
    return m, removed


class Keys(NamedTuple):
    """The keys among which a search is made."""

    rows: Floats  # "key dim"
    columns: Floats  # "dim key"
    products: Floats  # "key key": of all rows with each other; 0 × 0: not known
    offset: Floats  # added to the scores


keys_of, margins_of = compiled_slice(Keys), compiled_slice(Margins)


class Verdict(NamedTuple):
    """What a search for a verdict needs of the coordinates in which verdicts are given."""

    judged: Floats  # "key D": the keys there
    queries: Floats  # "dim D": what a query along each coordinate of the search is there
    close: Floats  # of each set: longer distances in the coordinates of the search are above tau
    biased: bool  # queries look up along the last coordinate there


class Search(NamedTuple):
    """How a search is made."""

    verdict: bool  # a verdict is sought, else a margin
    careful: bool  # products are made from the keys
    ray: bool
    gap: float  # a margin's bounds may differ by this share of the larger magnitude
    budget: float  # multiplications and additions, after which the search ends


@compiled_part
def measure_differences(keys: Keys, search: Search, i: int, room: Room) -> None:
    """Set squared distances of all keys from key i, and the factors of their differences."""
    count, dim = keys.rows.shape
    square, products = room.keyed[SQUARE], keys.products
    if search.careful:
        for j in range(count):
            square[j] = 0.0
        for t in range(dim):
            own = keys.rows[i, t]
            for j in range(count):
                room.near[t, j] = keys.columns[t, j] - own
                square[j] += room.near[t, j] * room.near[t, j]
    else:
        own = products[i, i]
        for j in range(count):
            square[j] = max(products[j, j] + own - 2.0 * products[i, j], SQUARE_NOISE * (products[j, j] + own))
    for j in range(count):
        room.keyed[SCALE, j] = 1.0 / np.sqrt(max(square[j], 1e-300)) if search.verdict else 1.0


@compiled_inline
def let_in(keys: Keys, search: Search, room: Room, i: int, key: int, m: int, bordering: float, unit: float) -> int:
    """Let a key (-1: the ray) in as a point without weight, or for a point that it depends on.

    Returns:
        the size of the active set, negative if the key is not in it.
    """
    count, dim = keys.rows.shape
    products, gram, vectors, members = room.products, room.gram, room.vectors, room.members
    work, weight, share = vectors[WORK], vectors[WEIGHT], 0.0
    for a in range(m):
        if members[MEMBER, a] == key:
            return -m
    for attempt in range(2):
        if key < 0:
            vectors[FACTOR, m], vectors[E, m], vectors[LEAD, m], vectors[LAST, m] = 1.0, 0.0, 0.0, -unit
            for j in range(count):
                products[m, j] = -unit * (keys.columns[dim - 1, j] - keys.rows[i, dim - 1])
            gram[m, m] = unit * unit
        else:
            square, factor = room.keyed[SQUARE, key], room.keyed[SCALE, key]
            if not search.verdict and square > 0.0:
                factor = min(unit / np.sqrt(square), LONGER)
            vectors[FACTOR, m], vectors[E, m] = factor, (1.0 if search.verdict else factor)
            vectors[LEAD, m] = factor * (keys.offset[key] - keys.offset[i])
            vectors[LAST, m] = factor * (keys.rows[key, dim - 1] - keys.rows[i, dim - 1])
            if search.careful:
                for t in range(dim):
                    room.points[X, t] = factor * room.near[t, key]
                combine(room.near, room.points[X], dim, count, products[m])
            else:
                matrix = keys.products
                constant = matrix[i, i] - matrix[key, i]
                for j in range(count):
                    products[m, j] = factor * (matrix[key, j] - matrix[i, j] + constant)
            gram[m, m] = factor * (factor * square)
        members[MEMBER, m] = key
        for b in range(m):
            if members[MEMBER, b] >= 0:
                gram[m, b] = vectors[FACTOR, b] * products[m, members[MEMBER, b]]
            else:
                gram[m, b] = vectors[LAST, b] * vectors[LAST, m]
            gram[b, m] = gram[m, b]
            vectors[BORDER, b] = gram[m, b] + bordering * vectors[E, m] * vectors[E, b]
        vectors[BORDER, m] = gram[m, m] + bordering * vectors[E, m] * vectors[E, m]
        if append(room, m, dim):
            weight[m] = share
            return m + 1
        if attempt == 0:
            share, leaving = np.inf, whole(-1)
            for a in range(m):
                if work[a] > DEPENDS and weight[a] / work[a] < share:
                    share, leaving = weight[a] / work[a], a
            if leaving < 0:
                return -m
            for a in range(m):
                weight[a] = max(weight[a] - share * work[a], 0.0)
            take_out(room, leaving, m)
            m -= 1
    return -m


@compiled_part
def is_inside(verdict: Verdict, room: Room, i: int, m: int, ray: bool) -> bool:
    """Whether the active weights reproduce key i within tau where verdicts are given."""
    judged, out, members = verdict.judged, room.points[QUERY], room.members
    dim, total = judged.shape[1], 0.0
    for t in range(dim):
        out[t] = 0.0
    for a in range(m):
        j = members[MEMBER, a]
        if j >= 0:
            share = room.vectors[WEIGHT, a] * room.vectors[FACTOR, a]
            total += share
            for t in range(dim):
                out[t] += share * (judged[j, t] - judged[i, t])
    if ray:
        out[dim - 1] = min(out[dim - 1], 0.0)
    square = 0.0
    for t in range(dim):
        square += out[t] * out[t]
    return total > 0.0 and np.sqrt(square) <= TAU * (1.0 - CLEAR) * total


@compiled_part
def make_query(keys: Keys, verdict: Verdict, room: Room, i: int, m: int, ray: bool) -> float:
    """Set the query against x where verdicts are given; return its length."""
    x, query, members = room.points[X], room.points[QUERY], room.members
    dim, wide = keys.rows.shape[1], verdict.queries.shape[1]
    for t in range(dim):
        x[t] = 0.0
    for a in range(m):
        j = members[MEMBER, a]
        if j >= 0:
            share = room.vectors[WEIGHT, a] * room.vectors[FACTOR, a]
            for t in range(dim):
                x[t] += share * (keys.rows[j, t] - keys.rows[i, t])
        else:
            x[dim - 1] += room.vectors[WEIGHT, a] * room.vectors[LAST, a]
    if ray:
        x[dim - 1] = min(x[dim - 1], 0.0)
    combine(verdict.queries, x, dim, wide, query)
    square = 0.0
    for s in range(wide):
        query[s] = -query[s]
        square += query[s] * query[s]
    return float(np.sqrt(square))


@compiled_part
def keep_weights(room: Room, m: int) -> int:
    """Copy the active weights as weights of keys, which sum to one; return how many there are."""
    vectors, kept, total = room.vectors, 0, 0.0
    for a in range(m):
        if room.members[MEMBER, a] >= 0 and vectors[WEIGHT, a] > 0.0:
            room.members[KEPT, kept] = room.members[MEMBER, a]
            vectors[VALUE, kept] = vectors[WEIGHT, a] * vectors[FACTOR, a]
            total += vectors[VALUE, kept]
            kept += 1
    for a in range(kept):
        vectors[VALUE, a] /= total
    return kept


@compiled_in_place
def find_verdicts(
    spaces: Space,
    key_sets: Keys,
    coordinates: Verdict,
    search: Search,
    room: Room,
    start: Ints,
    all_verdicts: Verdicts,
    scratch: Scratch,
) -> None:
    """Search for a query that selects, or weights that reproduce, each key without a verdict.

    Where neither is proved, the weights are those of the last point that was reached.

    Args:
        start: the first active key of each.
    """
    (sets, count, dim), wide = key_sets.rows.shape, coordinates.queries.shape[2]
    vectors, scores, absent, ray = room.vectors, room.keyed[SCORE], scratch.absent, search.ray
    for place in range(sets * count):
        b, i = place // count, place % count
        if all_verdicts.code[b, i] != UNDECIDED:
            continue
        space, keys, verdicts = space_of(spaces, b), keys_of(key_sets, b), verdicts_of(all_verdicts, b)
        here = Verdict(coordinates.judged[b], coordinates.queries[b], coordinates.close, coordinates.biased)
        set_absent(here.judged, i, verdicts.copies, absent)
        measure_differences(keys, search, i, room)
        new, own = start[b, i], keys.rows[i, dim - 1]
        factor, m, none, square = room.keyed[SCALE, new], whole(0), whole(-1), 0.0
        bordering = max(factor * (factor * room.keyed[SQUARE, new]), 1e-300)
        largest, shortest, idle, spent = 0.0, np.inf, 0, 0.0
        fresh, careful, separated = True, search.careful, False
        for step in range(VERDICT_STEPS * (dim + 10) + 1):
            size, entering = -m, 0
            while m < dim + 2 and idle < IDLE:
                last = let_in(keys, search, room, i, new, m, bordering, largest)
                size, m = max(size, last), abs(last)
                entering += 1
                if last < 0 or new < 0 or entering >= MOST_ENTERING or not 0 < step <= (dim - FEW) // 2:
                    break
                largest = max(largest, np.sqrt(room.gram[m - 1, m - 1]))
                scores[new], best, new = np.inf, SHORTER * square, none
                for j in range(count):
                    product = room.keyed[SCALE, j] * scores[j]
                    if product < best and not absent[j]:
                        best, new = product, j
                if new < 0:
                    break
            if size > 0:
                fresh, largest = step == 0, max(largest, np.sqrt(room.gram[m - 1, m - 1]))
            else:  # nothing new: rounding, put right once
                if fresh or m == 0 or not rebuild(room, m, bordering):
                    break
                fresh, careful, idle = True, True, 0
            m, removed = to_minimizer(room, m, bordering, careful, not search.verdict)
            fresh = fresh and not removed
            if m == 0:
                break
            combine(room.products, vectors[WEIGHT], m, count, scores)
            square, total, lowest = squared_norm(room, vectors[WEIGHT], m), 0.0, 0.0
            for a in range(m):
                lowest += vectors[WEIGHT, a] * vectors[LAST, a]
                if room.members[MEMBER, a] >= 0:
                    total += vectors[WEIGHT, a] * vectors[FACTOR, a]
            lift = ray and lowest > NOISE * largest  # some of the ray would shorten x: let it in first
            if ray and not lift and lowest > 0.0:
                square = max(square - lowest * lowest, 0.0)
                for j in range(count):
                    scores[j] -= lowest * (keys.columns[dim - 1, j] - own)
            length = np.sqrt(square)
            idle = 0 if length < shortest else idle + 1
            shortest = min(shortest, length)
            spent += 2.0 * m * (count + 3.0 * m)
            if (length <= here.close[b] * total and is_inside(here, room, i, m, ray)) or spent > search.budget:
                break
            new = whole(-1)
            if not lift:
                value, least = np.inf, np.inf
                for j in range(count):
                    product = room.keyed[SCALE, j] * scores[j]
                    if product < value and not absent[j]:
                        value, new = product, j
                if value > 0.0:
                    for j in range(count):
                        if scores[j] < least and not absent[j]:
                            least = scores[j]
                    if least > TAU * (1.0 + CLEAR) * make_query(keys, here, room, i, m, ray):
                        separated = True
                        break
                if value >= square * (1.0 - 1e-10) - NOISE * length * largest:
                    break
        used = keep_weights(room, m)
        prove_weights(space, i, room.members[KEPT], room.vectors[VALUE], used, here.biased, verdicts, scratch)
        if verdicts.code[i] == UNDECIDED and m > 0:
            if not separated:
                make_query(keys, here, room, i, m, ray)
            prove_query(space, i, room.points[QUERY, :wide], here.biased, verdicts, scratch)
        if verdicts.code[i] == UNDECIDED:
            verdicts.used[i] = used
            for a in range(used):
                verdicts.member[i, a], verdicts.value[i, a] = room.members[KEPT, a], vectors[VALUE, a]


@compiled_part
def is_narrow(lower: float, upper: float, gap: float, floor: float) -> bool:
    """Whether a bracket is as narrow as was asked for, but for rounding."""
    return upper < np.inf and upper - lower <= max(gap * max(abs(lower), abs(upper)) * 1.001, floor)


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


@compiled_in_place
def find_margins(
    spaces: Space,
    key_sets: Keys,
    search: Search,
    room: Room,
    level: Floats,
    levelled: Bools,
    sizes: Floats,
    all_verdicts: Verdicts,
    all_margins: Margins,
    scratch: Scratch,
) -> None:
    """Bracket the margins of some sets that are not known as narrowly as is asked for yet.

    Args:
        level: for each set, a u under which all keys score alike, if `levelled`: it proves that no
            margin is below 0. Then the weights that reproduce an unselectable key prove that its
            margin is about 0.
        sizes: the RMS norm of each set.
    """
    sets, count, dim = key_sets.rows.shape
    vectors, scores, absent, u = room.vectors, room.keyed[SCORE], scratch.absent, room.points[QUERY]
    for place in range(sets * count):
        b, i = place // count, place % count
        floor = ZERO * sizes[b]
        enough = 2.0 * floor
        if is_narrow(all_margins.lower[b, i], all_margins.upper[b, i], search.gap, enough):
            continue
        space, keys, verdicts = space_of(spaces, b), keys_of(key_sets, b), verdicts_of(all_verdicts, b)
        margins = margins_of(all_margins, b)
        offset, lower, upper = keys.offset, margins.lower, margins.upper
        copy = mark_equal(keys.rows, offset, i, absent)
        if levelled[b]:
            keep_query(space, i, level[b], margins, scratch.scores)
        used, member, value = 0, room.members[KEPT], vectors[VALUE]
        if copy >= 0:
            used, member[0], value[0] = 1, copy, 1.0
        elif levelled[b] and verdicts.code[i] == UNSELECTABLE and verdicts.used[i] <= dim + 2:
            used, member, value = verdicts.used[i], verdicts.member[i], verdicts.value[i]
            enough = max(enough, INSIDE * sizes[b])
        if used > 0:
            keep_bound(space, i, member, value, used, margins, scratch.scores)
        if is_narrow(lower[i], upper[i], search.gap, enough):
            continue
        measure_differences(keys, search, i, room)
        new, closest, largest, m = whole(-1), np.inf, 0.0, whole(0)
        for j in range(count):
            if not absent[j]:
                apart = np.sqrt(room.keyed[SQUARE, j])
                largest = max(largest, apart)
                if apart - offset[j] < closest:
                    closest, new = apart - offset[j], j
        nearest = room.keyed[SQUARE, new] if new >= 0 else 0.0
        bordering = max(nearest, 1e-24 * largest * largest, 1e-300)
        unit, none = np.sqrt(bordering), whole(-1)
        low, high, reached, sources, spent, used = -np.inf, np.inf, np.inf, 0, 0.0, 0
        fresh, careful, idle, rebuilt = True, search.careful, 0, 0
        for step in range(STEPS * (dim + 10) + 1):
            size, entering = -m, 0
            while m < dim + 2 and new >= 0 and idle < IDLE:
                last = let_in(keys, search, room, i, new, m, bordering, unit)
                size, m = max(size, last), abs(last)
                entering += 1
                if last < 0 or entering >= MOST_ENTERING or not 0 < step <= dim // 2:
                    break
                scores[new], best, new = np.inf, reached - offset[i] - search.gap * abs(reached), none
                for j in range(count):
                    if scores[j] < best and not absent[j]:
                        best, new = scores[j], j
            if size > 0:
                fresh = step == 0
            else:  # nothing new: rounding, put right once
                if fresh or m == 0 or rebuilt == REBUILT or not rebuild(room, m, bordering):
                    break
                fresh, careful, idle, rebuilt = True, True, 0, rebuilt + 1
            m, removed = to_minimizer(room, m, bordering, careful, not search.verdict)
            fresh = fresh and not removed
            if m == 0:
                break
            length, ahead = np.sqrt(squared_norm(room, vectors[WEIGHT], m)), 0.0
            for a in range(m):
                ahead += vectors[WEIGHT, a] * vectors[LEAD, a]
            reached = length - ahead
            idle += 1
            if reached < high:
                high, used, idle = reached, keep_weights(room, m), 0
            row, short = WEIGHT, length
            if m > dim or not length > SHORT * largest:  # the slope alone makes the query
                row, short = ALONG, max(np.sqrt(squared_norm(room, vectors[ALONG], m)), 1.0)
            combine(room.products, vectors[row], m, count, scores)
            least, new, scale = np.inf, none, 1.0 / short
            for j in range(count):
                scores[j] = scores[j] * scale - offset[j]
            for j in range(count):
                if scores[j] < least and not absent[j]:
                    least, new = scores[j], j
            least += offset[i]
            if least > low:
                low, sources = least, m
                for a in range(m):
                    vectors[COEFFICIENT, a] = vectors[row, a] * vectors[FACTOR, a] / short
                    room.members[SOURCE, a] = room.members[MEMBER, a]
            spent += 2.0 * m * (count + 4.0 * m)
            left = high - low
            if left <= floor or left <= search.gap * max(abs(high), abs(low)) or spent > search.budget:
                break
            if least >= reached - 0.1 * NOISE * (largest + abs(ahead)):
                break
        for t in range(dim):
            u[t] = 0.0
        for a in range(sources):
            for t in range(dim):
                u[t] -= vectors[COEFFICIENT, a] * (keys.rows[room.members[SOURCE, a], t] - keys.rows[i, t])
        into_ball(u, dim)
        keep_query(space, i, u[:dim], margins, scratch.scores)
        keep_bound(space, i, room.members[KEPT], vectors[VALUE], used, margins, scratch.scores)
