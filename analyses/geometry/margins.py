"""By how much can a key be selected? Its distance to the hull of the others, between two certified bounds.

The distance equals the best score gap that a query of unit length can give the key (minimax), so a query
proves the lower bound and convex weights of the other keys prove the upper one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates
from ln_probe.analyses.geometry.min_norm import nearest_points
from ln_probe.analyses.geometry.verdicts import SELECTABLE, UNDECIDED, SparseWeights, Verdicts

# Default width of a margin's bracket, (upper - lower) / lower: a margin is read to two digits.
RELATIVE_GAP = 0.01
# A margin below this (relative to the RMS norm of the measured keys) is not bracketed further: degenerate
# axes give selectable keys a margin of exactly zero.
_ZERO = 0.01 * TAU
# What "exact" asks for: float64 leaves about six digits of a distance of TAU.
EXACT_GAP = 1e-6


@dataclass(frozen=True)
class Margins:
    """Bounds of every key's margin, and what proves them, in the order of the keys."""

    lower: Float64[np.ndarray, " key"]
    upper: Float64[np.ndarray, " key"]
    query: Float64[np.ndarray, "key dim"]  # proves lower; over `measured` keys; NaN where the margin is 0 or undefined
    weights: SparseWeights  # prove upper


def measured(sets: KeyCoordinates, axes: Float64[np.ndarray, "d r"] | None) -> Float64[np.ndarray, "key dim"]:
    """The keys in the coordinates of their margins: normalized, or in nats after multiplication by the axes.

    A bias that is not the same for all keys is the last coordinate.
    """
    d = len(sets.basis)
    lift = sets.normalized[:, d:] if sets.bias_scale > 0.0 else sets.normalized[:, :0]
    if axes is None:
        return np.concatenate([sets.normalized[:, :d], lift], axis=1)
    return np.concatenate([sets.normalized[:, :d] @ (axes * sets.scale), lift * sets.bias_scale], axis=1)


def margins(
    sets: KeyCoordinates,
    verdicts: Verdicts,
    axes: Float64[np.ndarray, "d r"] | None,
    gap: float = RELATIVE_GAP,
    only: Int64[np.ndarray, " some"] | None = None,
) -> Margins:
    """Bracket the margin of every key.

    Args:
        sets, verdicts: of the same keys.
        axes: half axes of the ellipsoid of queries, as columns; without them margins are relative to the RMS
            norm of the centred keys.
        gap: asked for (upper - lower) / lower.
        only: of these keys (among all of them); the others' bounds mean nothing.
    """
    number = len(verdicts.code)
    rows = measured(sets, axes)
    lower, upper = np.zeros(number), np.zeros(number)
    query = np.full(rows.shape, np.nan)
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    if len(sets.leaders) == 1:
        if number == 1:
            lower[:], upper[:] = np.nan, np.nan
        return Margins(lower, upper, query, SparseWeights.of_rows(found, number))
    here = np.ascontiguousarray(rows[sets.leaders])
    wanted = (verdicts.code == SELECTABLE) | (verdicts.code == UNDECIDED)
    if only is not None:
        wanted &= np.isin(sets.representative, sets.representative[only])
    todo = np.flatnonzero(wanted[sets.leaders])
    size = float(np.sqrt(np.mean(np.sum((here - here.mean(axis=0)) ** 2, axis=1))))
    _, low, high, queries, sizes, weights, indices = nearest_points(
        here, np.ascontiguousarray(here.T), todo, np.full(len(todo), len(here)), np.full(len(todo), -1),
        sets.bias_scale > 0.0, np.ones(here.shape[1]), np.ones(1), _ZERO * size, gap, True,
    )  # fmt: skip
    keys = sets.leaders[todo]
    lower[keys], upper[keys], query[keys] = low, high, queries
    first = np.concatenate([[0], np.cumsum(sizes)])
    for k, i in enumerate(keys):
        index, value = indices[first[k] : first[k + 1]], weights[first[k] : first[k + 1]]
        found[int(i)] = sets.leaders[index[index >= 0]], value[index >= 0]
    lower, upper, query = lower[sets.representative], upper[sets.representative], query[sets.representative]
    return Margins(lower, upper, query, SparseWeights.of_rows(found, number))
