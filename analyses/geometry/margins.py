"""By how much can a key be selected? Two ends of a bracket: a query from below, weights of the other keys from above.

Without a set of queries the margin is the distance of a key to the hull of all others, relative to the RMS norm of the
centred keys. With one it is the best score gap that a query of the set gives, in nats, negative if none puts the key on
top: the center `c·k` and a bias count as they count in a score. This module only proposes; what its queries and weights
prove is computed by `certificates`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ln_probe.analyses.geometry.ball_newton import largest_weights
from ln_probe.analyses.geometry.best_gap import best_gaps
from ln_probe.analyses.geometry.judged import Judged
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates
from ln_probe.analyses.geometry.min_norm import nearest_points
from ln_probe.analyses.geometry.verdicts import UNSELECTABLE, SparseWeights, Verdicts

# Default width of a margin's bracket, as a share of the margin: it is read to two digits.
RELATIVE_GAP = 0.01
# A bracket narrower than this (relative to the RMS norm of the measured keys) is not narrowed further: degenerate axes
# give selectable keys a margin of exactly zero.
ZERO = 0.01 * TAU
# What "exact" asks for: float64 leaves about six digits of a distance of TAU.
EXACT_GAP = 1e-6
# An offset is that of a center among the axes if no key is further off than this, relative to the RMS norm.
_AFFINE = 1e-12
# What one key may cost here at most, of its budget: it is one of many, and its bracket holds as it is.
_SHARE = 0.05
# The last resort halves a bracket about once a round, and Newton's method takes a few dozen steps in each.
_ROUNDS, _STEPS = 12, 60


@dataclass(frozen=True)
class Proposed:
    """What may prove each key's margin, in the order of the keys asked for.

    Attributes:
        point: a query u, |u| ≤ 1; without a set of queries a unit query over normalized keys.
        weights: convex weights of other keys, a row per key of the set (empty for those not asked for).
    """

    point: Float64[np.ndarray, "some r"]
    weights: SparseWeights


@dataclass(frozen=True)
class Measured:
    """Points whose margins are measured, copies left out.

    Attributes:
        rows, offset: as in `Judged`, normalized if there is no set of queries.
        upwards: the last coordinate is a bias: weights may exceed the target there.
        distinct: a key for each different row.
        copy: another key with the same row; -1 if there is none.
        size: RMS norm of the centred rows.
        level: a u under which all keys score alike, if the set has one (the center lies among the axes, no further out
            than they reach): it proves that no margin is below 0. The zero query without offsets; None if there is none.
    """

    rows: Float64[np.ndarray, "key r"]
    offset: Float64[np.ndarray, " key"] | None
    upwards: bool
    distinct: Int64[np.ndarray, " row"]
    copy: Int64[np.ndarray, " key"]
    size: float
    level: Float64[np.ndarray, " r"] | None


def measured(sets: KeyCoordinates, where: Judged, through_queries: bool) -> Measured:
    """Where margins are measured."""
    d = len(sets.basis)
    if through_queries:
        rows, offset, upwards = where.rows, where.offset, False
    else:
        upwards = sets.bias_scale > 0.0
        rows, offset = np.ascontiguousarray(sets.normalized[:, : d + upwards]), None
    copy = np.full(len(rows), -1)
    distinct = np.arange(len(rows))
    if len(sets.leaders) < len(rows):  # only keys within tau of another can be copies
        both = rows if offset is None else np.column_stack([rows, offset])
        crowd = np.flatnonzero(np.bincount(sets.representative, minlength=len(rows))[sets.representative] > 1)
        _, first, inverse = np.unique(both[crowd], axis=0, return_index=True, return_inverse=True)
        leader = crowd[first][inverse.ravel()]
        copy[crowd] = np.where(leader != crowd, leader, -1)
        twice = crowd[leader != crowd]
        copy[copy[twice]] = twice
        distinct = np.setdiff1d(distinct, twice)
    centred = rows - rows.mean(axis=0)
    size = float(np.sqrt(np.einsum("ij,ij->", centred, centred) / len(centred)))
    return Measured(rows, offset, upwards, distinct, copy, size, _level(centred, offset, size))


def propose(
    space: Measured, verdicts: Verdicts, gap: float, only: Int64[np.ndarray, " some"], budget: float
) -> Proposed:
    """Queries and weights for the margins of keys `only` among all keys of the set."""
    if space.offset is None:
        return _distances(space, verdicts, gap, only, budget)
    here = np.ascontiguousarray(space.rows[space.distinct])
    offset = space.offset[space.distinct]
    point = np.zeros((len(only), here.shape[1]))
    rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    place = np.full(len(space.rows), -1)
    place[space.distinct] = np.arange(len(space.distinct))
    inside = np.zeros(len(only), bool)
    if space.level is not None:  # what cannot be selected has a margin of 0
        inside = verdicts.code[only] == UNSELECTABLE
        point[inside] = space.level
        rows = {int(i): verdicts.row(int(i)) for i in only[inside]}
    copied = (space.copy[only] >= 0) & ~inside
    for some, names in ((~copied & ~inside, space.distinct), (copied, np.arange(len(space.rows)))):
        keys = only[some]  # a copy is solved for among all keys: it ties with the key at best
        if len(keys) == 0 or len(names) < 2:
            continue
        among, lead = (here, offset) if len(names) == len(here) else (np.ascontiguousarray(space.rows), space.offset)
        targets = place[keys] if len(names) == len(here) else keys
        _, _, point[some], sizes, values, indices = best_gaps(
            among, np.ascontiguousarray(among.T), lead, targets, gap, ZERO * space.size, budget
        )
        first = np.concatenate([[0], np.cumsum(sizes)])
        for k, i in enumerate(keys):
            entries = slice(first[k], first[k + 1])
            rows[int(i)] = names[indices[entries]], values[entries]
    return Proposed(point, SparseWeights.of_rows(rows, len(space.rows)))


def _distances(
    space: Measured, verdicts: Verdicts, gap: float, only: Int64[np.ndarray, " some"], budget: float
) -> Proposed:
    """Without offsets: the nearest point of the hull of the others. The zero query proves that it is not negative."""
    here = np.ascontiguousarray(space.rows[space.distinct])
    place = np.full(len(space.rows), -1)
    place[space.distinct] = np.arange(len(space.distinct))
    rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    point = np.zeros((len(only), here.shape[1]))
    copied = space.copy[only] >= 0
    for i in only[copied]:
        rows[int(i)] = space.copy[i : i + 1], np.ones(1)
    inside = ~copied & (verdicts.code[only] == UNSELECTABLE)
    for i in only[inside]:
        rows[int(i)] = verdicts.row(int(i))
    left = ~copied & ~inside
    todo = place[only[left]]
    if len(todo) and len(here) > 1:
        _, _, _, queries, sizes, values, indices = nearest_points(
            here, np.ascontiguousarray(here.T), todo, np.full(len(todo), len(here)), np.full(len(todo), -1),
            space.upwards, np.ones(here.shape[1]), np.ones(1), ZERO * space.size, gap, True, None, budget,
        )  # fmt: skip
        point[left] = queries / np.maximum(np.linalg.norm(queries, axis=1), 1e-300)[:, None]
        first = np.concatenate([[0], np.cumsum(sizes)])
        for k, i in enumerate(only[left]):
            index, value = indices[first[k] : first[k + 1]], values[first[k] : first[k + 1]]
            rows[int(i)] = space.distinct[index[index >= 0]], value[index >= 0]
    return Proposed(point, SparseWeights.of_rows(rows, len(space.rows)))


def again(
    space: Measured, i: int, gap: float, lower: float, upper: float, point: Float64[np.ndarray, " r"], budget: float
) -> tuple[Float64[np.ndarray, " r"], Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """Another query and other weights for one key, by a method that shares nothing with the first.

    The smallest gap is smoothed, `-T log Σ_j exp(-gap_j / T)`, which is off by at most T·log n, and maximized by Newton's
    method; T follows the bracket down.
    """
    rows = space.rows
    offset = np.zeros(len(rows)) if space.offset is None else space.offset
    others = np.flatnonzero(np.arange(len(rows)) != i)
    steps = np.ascontiguousarray(np.concatenate([rows[others] - rows[i], np.zeros((1, rows.shape[1]))]))
    lead = np.append(offset[others] - offset[i], 0.0)
    best = point, np.empty(0, np.int64), np.empty(0)
    if not np.isfinite(lower):
        lower = -float(lead[:-1].max()) if space.offset is not None else 0.0
    if not np.isfinite(upper):
        apart = np.linalg.norm(steps[:-1], axis=1) - lead[:-1]
        upper, nearest = float(apart.min()), int(apart.argmin())
        best = point, others[nearest : nearest + 1], np.ones(1)
    target, most = np.array([len(others)]), np.log(len(others)) + 1.0
    floor, spent = ZERO * space.size, 0.0
    for _ in range(_ROUNDS):
        width = upper - lower
        if width <= max(gap * max(abs(lower), abs(upper)), floor) or spent > _SHARE * budget:
            break
        heat = width / (4.0 * most)
        own = lead.copy()
        own[-1] = -lower
        scaled = steps / heat
        weight, _, found, _, taken = largest_weights(
            scaled, np.ascontiguousarray(scaled.T), own / heat, target, best[0][None, None], 1e-3, _STEPS, _SHARE * budget
        )
        spent += float(taken.sum() + 1) * (4.0 + rows.shape[1]) * steps.size  # a step forms and solves a d × d system
        u = found[0]
        gaps = -(lead[:-1] + steps[:-1] @ u)
        share = np.exp(-(gaps - gaps.min()) / heat)
        share /= share.sum()
        mean = share @ steps[:-1]
        if space.upwards:
            mean[-1] = min(mean[-1], 0.0)
        top = float(np.linalg.norm(mean) - share @ lead[:-1])
        kept = share > 0.0
        better_low, better_up = gaps.min() > lower, top < upper
        best = (
            u if better_low else best[0],
            others[kept] if better_up else best[1],
            share[kept] if better_up else best[2],
        )
        lower, upper = max(lower, float(gaps.min())), min(upper, top)
        if not (better_low or better_up) or weight[0] == 0.0:
            break
    return best


def _level(
    centred: Float64[np.ndarray, "key r"], offset: Float64[np.ndarray, " key"] | None, size: float
) -> Float64[np.ndarray, " r"] | None:
    if offset is None:
        return np.zeros(centred.shape[1])
    high = offset - offset.mean()
    u = -np.linalg.lstsq(centred, high, rcond=None)[0]
    return u if np.linalg.norm(u) <= 1.0 and np.abs(high + centred @ u).max() <= _AFFINE * size else None


def too_wide(
    lower: Float64[np.ndarray, " key"],
    upper: Float64[np.ndarray, " key"],
    gap: float,
    size: float,
    inside: Bool[np.ndarray, " key"],
) -> Bool[np.ndarray, " key"]:
    """Which brackets are wider than was asked for (by more than rounding); TAU is enough for keys that are `inside`."""
    asked = np.maximum(gap * np.maximum(np.abs(lower), np.abs(upper)) * (1 + 1e-3), 2 * ZERO * size)
    asked = np.where(inside, np.maximum(asked, 1.01 * TAU * size), asked)
    return np.asarray(~(upper - lower <= asked))
