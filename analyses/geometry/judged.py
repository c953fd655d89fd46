"""In which space are keys judged? The keys themselves, or what a set of queries sees of them.

A head has no basis of its own (`W_Q M, W_K M⁻ᵀ` is the same model), so with a set of queries `c + A u` everything is
measured in `Aᵀk`: scores are `c·k + u·Aᵀk` with |u| ≤ 1, in nats, and equal for every equivalent model. The center acts
as a bias per key, `c·k`. Verdicts ask for a query of any length, `c + A u` with any u: there the part of the center
that lies in the range of A changes nothing, and only the rest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from ln_probe.analyses.geometry.products import seen_from
from ln_probe.analyses.geometry.query_sets import QuerySet

# A product that loses more than this share of the keys' spread to rounding is made again without cancellation: a
# hundredth of the tolerance of verdicts.
_LOST = 1e-9
# Directions of the axes below this share of the longest (times float64's rounding and the dimension) are not there.
_RANK = 16.0


@dataclass(frozen=True)
class Judged:
    """One set of keys where it is judged.

    Attributes:
        rows: centred keys, or Aᵀk of them, in nats.
        lift: bias that verdicts count; None: none.
        offset: what is added to `rows @ u` to make a score, in nats; None: nothing (or no query set).
        outside: the part of the center that no axis reaches; zeros mostly.
        offset_over_spread: length of the mean key over the RMS norm of the centred keys.
        largest_score: largest |score| of a centred key under a query of the set, before cancellation; NaN without one.
    """

    rows: Float64[np.ndarray, "key r"]
    lift: Float64[np.ndarray, " key"] | None
    offset: Float64[np.ndarray, " key"] | None
    outside: Float64[np.ndarray, " d"]
    offset_over_spread: float
    largest_score: float


def judged(
    keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None, queries: QuerySet | None
) -> Judged:
    """Keys, through a set of queries if there is one.

    Raises:
        ValueError: scores that overflow.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        mean = keys.mean(axis=0)
        if not np.isfinite(mean).all():
            mean = np.ldexp(np.ldexp(keys, -64).mean(axis=0), 64)
        centred = keys - mean
        spread = _length(centred) / len(keys) ** 0.5
        aside = _length(mean) / spread if spread > 0.0 else (np.inf if mean.any() else 0.0)
    if queries is None:
        return Judged(keys, bias, None, np.zeros(keys.shape[1]), aside, np.nan)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        moving = np.column_stack([queries.axes, queries.center])
        seen = centred @ moving
        reach = np.abs(queries.center) + np.linalg.norm(queries.axes, axis=1)
        sizes = np.abs(centred) @ reach
        extent = float(np.linalg.norm(seen[:, :-1])) / len(keys) ** 0.5
        terms = sum(moving.shape)
    if not (np.isfinite(seen).all() and np.isfinite(extent) and np.isfinite(sizes).all()):
        raise ValueError(
            f"the scores of the keys over the query set overflow float64 (keys up to {np.abs(keys).max():.3g}, queries "
            f"up to {reach.max():.3g} per coordinate): scale keys or queries down"
        )
    if terms * np.finfo(np.float64).eps * sizes.max(initial=0.0) > _LOST * extent:
        seen = np.where(np.isfinite(again := seen_from(keys, mean, moving)), again, seen)
    offset = seen[:, -1]
    if bias is not None:
        offset = offset + bias
    outside = _outside(queries)
    lift = bias
    if outside.any():
        lift = centred @ outside + (0.0 if bias is None else bias)
    return Judged(
        rows=np.ascontiguousarray(seen[:, :-1]),
        lift=lift,
        offset=offset if np.ptp(offset) > 0.0 else None,
        outside=outside,
        offset_over_spread=aside,
        largest_score=float(sizes.max()) + (0.0 if bias is None else float(np.ptp(bias))),
    )


def _length(values: Float64[np.ndarray, "*shape"]) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    return largest * float(np.linalg.norm(values / largest)) if largest > 0.0 else 0.0


def _outside(queries: QuerySet) -> Float64[np.ndarray, " d"]:
    """The part of the center that is orthogonal to all axes (rows brought to equal length, so that it does not depend
    on the scale of a coordinate); exactly zero where the axes span everything."""
    lengths = np.linalg.norm(queries.axes, axis=1)
    if not queries.center.any():
        return np.zeros_like(queries.center)
    scale = np.where(lengths > 0.0, lengths, 1.0)
    left, values, _ = np.linalg.svd(queries.axes / scale[:, None], full_matrices=False)
    tolerance = _RANK * max(queries.axes.shape) * np.finfo(np.float64).eps
    basis = left[:, values > tolerance * max(float(values.max(initial=0.0)), np.finfo(np.float64).tiny)]
    if basis.shape[1] == len(lengths):
        return np.zeros_like(queries.center)
    center = queries.center / scale
    rest = center - basis @ (basis.T @ center)
    rest -= basis @ (basis.T @ rest)
    rest[np.abs(rest) <= tolerance * np.linalg.norm(center)] = 0.0
    return np.asarray(rest * scale)
