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
from ln_probe.analyses.geometry.certificates import Rows
from ln_probe.analyses.geometry.judged import Judged
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates, unit_rows
from ln_probe.analyses.geometry.min_norm import nearest_points
from ln_probe.analyses.geometry.scores import Floats, Ints
from ln_probe.analyses.geometry.verdicts import UNSELECTABLE, Verdicts

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
        weights: convex weights of other keys, a row per key asked for.
    """

    point: Float64[np.ndarray, "some r"]
    weights: Rows


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
            than they reach): it proves that no margin is below 0. The zero query without offsets; None if there is
            none.
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
        (rows, offset), upwards = where.at(where.powers.score), False
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
    point = np.zeros((len(only), space.rows.shape[1]))
    pieces = []
    inside = np.zeros(len(only), bool)
    if space.level is not None:  # what cannot be selected has a margin of 0: the level query and its weights prove it
        inside = verdicts.code[only] == UNSELECTABLE
        if inside.any():
            rows = verdicts.weights.rows(verdicts.source[only[inside]])
            pieces.append((np.flatnonzero(inside), np.diff(rows.start), rows.index, rows.value))
            point[inside] = space.level
    copied = (space.copy[only] >= 0) & ~inside
    solve = _distances if space.offset is None else _gaps
    if space.offset is None and copied.any():  # its copy is as near as can be, and the zero query proves 0
        which = np.flatnonzero(copied)
        pieces.append((which, np.ones(len(which), np.int64), space.copy[only[which]], np.ones(len(which))))
        copied = np.zeros(len(only), bool)
        inside[which] = True
    for some, names in ((~copied & ~inside, space.distinct), (copied, np.arange(len(space.rows)))):
        which = np.flatnonzero(some)  # a copy is solved for among all keys: it ties with the key at best
        if len(which) == 0 or len(names) < 2:
            continue
        found, sizes, indices, values = solve(space, names, only[which], gap, budget)
        point[which] = found
        pieces.append((which, sizes, names[indices], values))
    return Proposed(point, Rows.gathered(len(only), pieces))


def _gaps(
    space: Measured, names: Int64[np.ndarray, " row"], keys: Int64[np.ndarray, " some"], gap: float, budget: float
) -> tuple[Floats, Ints, Ints, Floats]:
    """Queries, and sizes, places and values of the weights, for keys with offsets."""
    assert space.offset is not None
    here = np.ascontiguousarray(space.rows[names])
    _, _, found, sizes, values, indices = best_gaps(
        here,
        np.ascontiguousarray(here.T),
        space.offset[names],
        np.searchsorted(names, keys),
        gap,
        ZERO * space.size,
        budget,
    )
    return found, sizes, indices, values


def _distances(
    space: Measured, names: Int64[np.ndarray, " row"], keys: Int64[np.ndarray, " some"], gap: float, budget: float
) -> tuple[Floats, Ints, Ints, Floats]:
    """The same without offsets: the nearest point of the hull of the others."""
    here = np.ascontiguousarray(space.rows[names])
    targets = np.searchsorted(names, keys)
    _, _, _, queries, sizes, values, indices = nearest_points(
        here,
        np.ascontiguousarray(here.T),
        targets,
        np.full(len(targets), len(here)),
        np.full(len(targets), -1),
        space.upwards,
        np.ones(here.shape[1]),
        np.ones(1),
        ZERO * space.size,
        gap,
        True,
        None,
        budget,
    )
    keep = indices >= 0  # the ray is not a key
    if not keep.all():
        sizes = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[keep], minlength=len(sizes))
        indices, values = indices[keep], values[keep]
    return unit_rows(queries), sizes, indices, values


def again(
    space: Measured, i: int, gap: float, lower: float, upper: float, point: Float64[np.ndarray, " r"], budget: float
) -> tuple[Float64[np.ndarray, " r"], Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """Another query and other weights for one key, by a method that shares nothing with the first.

    The smallest gap is smoothed, `-T log Σ_j exp(-gap_j / T)`, which is off by at most T·log n, and maximized by
    Newton's method; T follows the bracket down.
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
            scaled,
            np.ascontiguousarray(scaled.T),
            own / heat,
            target,
            best[0][None, None],
            1e-3,
            _STEPS,
            _SHARE * budget,
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
    if not np.abs(u).max(initial=0.0) <= 1.0:  # (squares of more may overflow)
        return None
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
