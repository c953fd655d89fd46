"""The sets of queries over which attention is maximized: solid ellipsoids, of any dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray


@dataclass(frozen=True)
class QuerySet:
    """All queries `center + axes @ u` with `|u| <= 1`; scores are plain products with keys, in nats."""

    center: Float64[np.ndarray, " d"]
    axes: Float64[np.ndarray, "d r"]

    def compact(self) -> QuerySet:
        """The same set with at most d axes (only `axes @ axes.T` matters)."""
        if self.axes.shape[1] <= self.axes.shape[0]:
            return self
        return QuerySet(self.center, np.ascontiguousarray(np.asarray(np.linalg.qr(self.axes.T, mode="r")).T))


def query_sets(given: Any, number: int, d: int) -> list[QuerySet]:
    """A query set for each of `number` sets of keys of dimension `d`, from what a user may give.

    Raises:
        TypeError: not a number or a pair of floating-point arrays.
        ValueError: a radius that is not positive and finite, shapes that do not fit, NaN or infinite values.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        radius = float(given)
        if not (radius > 0.0 and np.isfinite(radius)):
            raise ValueError(f"the radius of a query set must be positive and finite, got {radius}")
        return [QuerySet(np.zeros(d), radius * np.eye(d))] * number
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        raise TypeError(f"query_set must be a radius or a pair (center, axes), got {type(given).__name__}")
    center, axes = _array("center", given[0]), _array("axes", given[1])
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


def _array(name: str, values: Any) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.double().numpy() if values.is_floating_point() else values.numpy()
    values = np.asarray(values)
    if values.dtype.kind != "f":
        raise TypeError(f"the {name} of the query set must be of a floating-point type, got {values.dtype}")
    if not np.isfinite(values).all():
        raise ValueError(f"the {name} of the query set contains NaN or infinite values: repair it first")
    return np.asarray(values, dtype=np.float64)
