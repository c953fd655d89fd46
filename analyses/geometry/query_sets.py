"""The sets of queries over which attention is maximized: solid ellipsoids, of any dimension."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64

from ln_probe.analyses.geometry.key_sets import floats

# Radii and axes beyond this make scores whose squares leave float64's range, whatever the keys.
_LARGEST = 1e150

# A direction along which the axes are shorter than this share of the longest is not part of the set's span: queries do
# not differ along it, and neither do the keys that they see. In float64 the span is then known to about 1e-7, the
# tolerance of verdicts. Directions above it are kept as they are, however short the axes are along them.
SPAN_TOLERANCE = 1e-9


@dataclass(frozen=True)
class QuerySet:
    """All queries `center + axes @ u` with `|u| <= 1`; scores are plain products with keys, in nats.

    `slack`: how far, relative to the length of each row of the axes, a query of the set that was given may lie from one
    of this (not 0 only where axes were reduced in number, from those `given`).
    """

    center: Float64[np.ndarray, " d"]
    axes: Float64[np.ndarray, "d r"]
    slack: float = 0.0
    given: Float64[np.ndarray, "d more"] | None = None

    @cached_property
    def missing(self) -> Float64[np.ndarray, "d m"]:
        """Orthonormal directions that the span of the axes lacks (relative singular value below SPAN_TOLERANCE)."""
        d, axes = len(self.axes), _over_power(self.axes)[0]
        values = np.linalg.svd(axes, compute_uv=False)
        rank = int(((values >= SPAN_TOLERANCE * values[0]) & (values > 0.0)).sum())
        if rank == d:
            return np.zeros((d, 0))
        return np.ascontiguousarray(np.linalg.svd(axes)[0][:, rank:])

    @cached_property
    def outside(self) -> Float64[np.ndarray, " d"]:
        """The part of the center along the missing directions: every query of the span has it."""
        center, power = _over_power(self.center)
        along = self.missing.T @ center
        if np.linalg.norm(along) <= SPAN_TOLERANCE * np.linalg.norm(center):
            return np.zeros_like(center)
        return np.asarray(np.ldexp(self.missing @ along, power))

    def in_span(self, rows: Float64[np.ndarray, "row d"]) -> Float64[np.ndarray, "row d"]:
        """Each row without its part along the missing directions; the rows themselves if none is missing."""
        missing = self.missing
        if missing.shape[1] == 0:
            return rows
        left = rows - (rows @ missing) @ missing.T
        return np.asarray(left - (left @ missing) @ missing.T)

    def keys_in_span(self, centred: Float64[np.ndarray, "key d"]) -> Float64[np.ndarray, "key d"]:
        """`in_span` for centred keys of ordinary size; zeros where only rounding is left of them."""
        points = self.in_span(centred)
        rounding = (len(self.axes) + 16) * float(np.finfo(np.float64).eps)
        return points if np.linalg.norm(points) > rounding * np.linalg.norm(centred) else np.zeros_like(points)

    def compact(self) -> QuerySet:
        """The same set with at most d axes (only `axes @ axes.T` matters).

        Orthogonal triangularization by reflections changes each row of the axes by no more than a small multiple of
        r·d·eps of its length (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 19.4).
        """
        d, r = self.axes.shape
        if r == 0:
            return QuerySet(self.center, np.zeros((d, 1)))
        if r <= d:
            return self
        fewer = np.ascontiguousarray(np.asarray(np.linalg.qr(self.axes.T, mode="r")).T)
        return QuerySet(self.center, fewer, 4.0 * r * d * float(np.finfo(np.float64).eps), self.axes)


def _over_power(values: Float64[np.ndarray, "*shape"]) -> tuple[Float64[np.ndarray, "*shape"], int]:
    """Values over a power of two that makes them at most 1, so that no square overflows, and that power."""
    power = int(np.frexp(np.abs(values).max(initial=0.0))[1])
    return np.ldexp(values, -power), power


def query_sets(given: Any, number: int, d: int) -> list[QuerySet]:
    """A query set for each of `number` sets of keys of dimension `d`, from what a user may give.

    Raises:
        TypeError: not a number or a pair of floating-point arrays.
        ValueError: a radius that is not positive and of usable size, shapes that do not fit, NaN, infinite or enormous
            values.
    """
    if isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, (bool, np.bool_)):
        radius = float(given)
        if not (radius > 0.0 and np.isfinite(radius)):
            raise ValueError(
                f"the radius of a query set must be positive and finite, got {radius}: give the length of the "
                "longest query"
            )
        if not 1.0 / _LARGEST <= radius <= _LARGEST:
            raise ValueError(
                f"the radius of a query set is {radius:g}: scores would leave the range of float64 (between "
                f"{1.0 / _LARGEST:g} and {_LARGEST:g} can be used); scale keys and radius against each other"
            )
        return [QuerySet(np.zeros(d), radius * np.eye(d))] * number
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        what = f"{type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else type(given).__name__
        raise TypeError(f"query_set must be a radius or a pair (center, axes), got {what}")
    center, axes = (
        floats(f"the {name} of the query set", part) for name, part in zip(("center", "axes"), given, strict=True)
    )
    for name, values in (("center", center), ("axes", axes)):
        if not np.isfinite(values).all():
            raise ValueError(f"the {name} of the query set contains NaN or infinite values: repair it first")
        if np.abs(values).max(initial=0.0) > _LARGEST:
            raise ValueError(
                f"the {name} of the query set has an entry of {np.abs(values).max():g}: scores would overflow (up to "
                f"{_LARGEST:g} can be used); scale keys and queries against each other"
            )
    if center.shape not in ((d,), (number, d)):
        raise ValueError(
            f"the center of the query set must have the shape ({d},) or ({number}, {d}), got {center.shape}"
        )
    if axes.ndim not in (2, 3) or axes.shape[-2] != d or (axes.ndim == 3 and len(axes) != number):
        raise ValueError(
            f"the axes of the query set must have the shape ({d}, r) or ({number}, {d}, r), got {axes.shape}"
        )
    centers = np.broadcast_to(center, (number, d))
    half_axes = np.broadcast_to(axes, (number, *axes.shape[-2:]))
    return [
        QuerySet(np.ascontiguousarray(c), np.ascontiguousarray(a)).compact()
        for c, a in zip(centers, half_axes, strict=True)
    ]
