"""In which coordinates are keys judged, and in which are they measured?

Verdicts are about the keys in their own coordinates: the tolerance means the same with a set of queries as without
one. A set `c + A u` can only remove directions, those that its axes do not span (`QuerySet.missing`); it never rescales
them. There the part of the center that the axes span changes nothing, and the rest counts as a bias per key.

Margins and attention are about the queries of the set, so they are measured in `Aᵀk`: scores are `c·k + u·Aᵀk` with
|u| ≤ 1, in nats, and equal for every basis of a head (`W_Q M, W_K M⁻ᵀ` is the same model). The center acts as a bias
per key, `c·k`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from ln_probe.analyses.geometry.products import seen_from
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.scaling import GIVEN, Powers, ScaledSet, at_unit, of_unit_size

# A product that loses more than this share of the keys' spread to rounding is made again without cancellation: a
# hundredth of the tolerance of verdicts.
_LOST = 1e-9
# Scores beyond this have squares that leave float64's range.
_LARGEST_SCORE = 1e153


@dataclass(frozen=True)
class OwnKeys:
    """One set of keys in their own coordinates, where verdicts are given.

    Attributes:
        points: the keys over `2**power`, centred and less the directions that the set of queries lacks, if it lacks
            some.
        lift: bias that verdicts count, in nats over `2**lift_power`; None: none.
        queries: the set of queries, as given.
    """

    points: Float64[np.ndarray, "key d"]
    lift: Float64[np.ndarray, " key"] | None
    queries: QuerySet | None
    power: int
    lift_power: int


def own_keys(plain: ScaledSet, queries: QuerySet | None) -> OwnKeys:
    """The points that verdicts are about, and the bias that they count.

    Args:
        plain: keys and bias, scaled without queries.
        queries: as given.
    """
    power, lift, lift_power = int(plain.key_power[0]), plain.bias, plain.powers.bias
    if queries is None or queries.missing.shape[1] == 0:
        return OwnKeys(plain.keys, lift, queries, power, lift_power)
    mean = plain.keys.mean(axis=0)
    outside, unit = of_unit_size(queries.outside, power)
    if unit is not None:  # every query has this part of the center, so it acts as a bias
        level = seen_from(plain.keys, mean, outside[:, None])[:, 0]
        if lift is None or not lift.any():
            lift, lift_power = level, unit
        else:
            lift = at_unit(lift, lift_power, max(unit, lift_power)) + at_unit(level, unit, max(unit, lift_power))
            lift_power = max(unit, lift_power)
    return OwnKeys(queries.keys_in_span(plain.keys - mean), lift, queries, power, lift_power)


@dataclass(frozen=True)
class Judged:
    """One set of keys where it is measured.

    Attributes:
        rows: the keys, or Aᵀk of the centred keys, in nats over `2**powers.axes`.
        offset: what is added to `rows @ u` to make a score, in nats over `2**powers.offset`; None: nothing (or no query
            set).
        offset_over_spread: length of the mean key over the RMS norm of the centred keys.
        largest_score: largest |score| of a centred key under a query of the set, before cancellation, in nats; NaN
            without one.
        powers: the units of the set.
    """

    rows: Float64[np.ndarray, "key r"]
    offset: Float64[np.ndarray, " key"] | None
    offset_over_spread: float
    largest_score: float
    powers: Powers = GIVEN

    def at(self, power: int) -> tuple[Float64[np.ndarray, "key r"], Float64[np.ndarray, " key"] | None]:
        """Rows and offset, both in nats over `2**power`."""
        offset = None if self.offset is None else at_unit(self.offset, self.powers.offset, power)
        return at_unit(self.rows, self.powers.axes, power), offset


def judged(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    queries: QuerySet | None,
    powers: Powers = GIVEN,
) -> Judged:
    """Keys, through a set of queries if there is one; `powers` are the units they are in.

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
        return Judged(keys, None, aside, np.nan, powers)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        moving = np.column_stack([queries.axes, queries.center])
        seen = centred @ moving
        far = np.abs(centred)
        sizes = far @ np.linalg.norm(queries.axes, axis=1)
        sizes = sizes + at_unit(far @ np.abs(queries.center), powers.center, powers.axes)
        extent = float(np.linalg.norm(seen[:, :-1])) / len(keys) ** 0.5
        terms = sum(moving.shape)
        level = bias if bias is None else bias - bias.mean()
        added = 0.0 if level is None else float(np.ldexp(np.ptp(level), powers.bias))
        largest = float(np.ldexp(sizes.max(initial=0.0), powers.axes)) + added
        reached = float(np.ldexp(extent, powers.axes))
    if not (np.isfinite(seen).all() and reached <= _LARGEST_SCORE and np.isfinite(largest)):
        raise ValueError(
            f"the scores of the keys over the query set overflow float64 (they reach {largest:.3g} nats, and up to "
            f"{_LARGEST_SCORE:g} can be used): scale keys or queries down"
        )
    if terms * np.finfo(np.float64).eps * sizes.max(initial=0.0) > _LOST * extent:
        seen = np.where(np.isfinite(again := seen_from(keys, mean, moving)), again, seen)
    offset = at_unit(seen[:, -1], powers.center, powers.offset)
    if level is not None:
        offset = offset + at_unit(level, powers.bias, powers.offset)
    return Judged(
        rows=np.ascontiguousarray(seen[:, :-1]),
        offset=offset if np.ptp(offset) > 0.0 else None,
        offset_over_spread=aside,
        largest_score=largest,
        powers=powers,
    )


def _length(values: Float64[np.ndarray, "*shape"]) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    return largest * float(np.linalg.norm(values / largest)) if largest > 0.0 else 0.0
