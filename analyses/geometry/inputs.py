"""What a user may give (keys, a bias, a set of queries), checked, and the coordinates in which it is measured.

Arrays and tensors of any floating-point type become float64. docs/geometry.md says what is computed in which
coordinates, and why: verdicts in the keys' own (`GivenSet.own`), margins and attention in `Aᵀk`, in nats
(`score_space`). The center acts as a bias per key, `c·k`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray

Array = np.ndarray | torch.Tensor


def key_sets(
    keys: Any, bias: Any
) -> tuple[Float64[np.ndarray, "set key d"], Float64[np.ndarray, "set key"] | None, bool]:
    """Copies of keys and bias as a batch of sets in float64, and whether they were given as a batch.

    Raises:
        TypeError: not of a floating-point type.
        ValueError: no keys, no dimensions, NaN or infinite values, shapes that do not fit.
    """
    values = floats("keys", keys)
    if values.ndim not in (2, 3):
        raise ValueError(f'keys must have the shape "keys d" or "batch keys d", got {values.shape}')
    for size, what in zip(values.shape[-2:], ("keys", "dimensions"), strict=True):
        if size == 0:
            raise ValueError(f"there are no {what}: keys have the shape {values.shape}; give at least one")
    if len(values) == 0:
        raise ValueError(f"there are no sets of keys: keys have the shape {values.shape}; give at least one")
    _finite("key", values)
    lift = None
    if bias is not None:
        lift = floats("bias", bias)
        if lift.shape not in (values.shape[:-1], values.shape[-2:-1]):
            raise ValueError(f"bias must have the shape {values.shape[:-1]}, one value per key, got {lift.shape}")
        lift = np.broadcast_to(lift, values.shape[:-1])
        _finite("bias", lift[..., None])
    if values.ndim == 3:
        return values, lift, True
    return values[None], None if lift is None else lift[None], False


def floats(name: str, values: Any) -> NDArray[np.float64]:
    """A copy of an array or tensor of any floating-point type, in float64.

    Raises:
        TypeError: of another type, sparse, or without values (the "meta" device).
    """
    if isinstance(values, torch.Tensor):
        kind, floating = str(values.dtype), values.is_floating_point()
        if values.layout is not torch.strided:
            raise TypeError(f"{name} must be dense, got a tensor of layout {values.layout}: call .to_dense() first")
        if values.is_meta:
            raise TypeError(f"{name} must have values, got a tensor of shape {tuple(values.shape)} on the meta device")
        if floating:
            return np.array(values.detach().to(device="cpu").to(torch.float64).numpy(), order="C")
    else:
        if hasattr(values, "toarray"):  # scipy's sparse matrices
            raise TypeError(f"{name} must be dense, got {type(values).__name__}: call .toarray() first")
        given = values
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} must be a rectangular array, one row per key: {error}") from error
        kind, floating = str(values.dtype), values.dtype.kind == "f"
        if floating:
            return np.array(values, dtype=np.float64, order="C")
        if values.ndim == 0 and values.dtype.kind in "OUS":  # None, text, a dict: what NumPy makes no array of
            raise TypeError(f"{name} must be an array or tensor of floats, got {type(given).__name__}")
    raise TypeError(f"{name} must be of a floating-point type, got {kind}: convert them first, e.g. to float64")


def _finite(name: str, values: Float64[np.ndarray, "*batch key d"]) -> None:
    bad = ~np.isfinite(values).all(axis=-1)
    if bad.any():
        place = np.argwhere(bad)[0]
        value = values[tuple(place)]
        what = "NaN" if np.isnan(value).any() else "an infinite value"
        where = f"{name} {place[-1]}" + (f" of set {place[0]}" if len(place) > 1 else "")
        raise ValueError(f"{where} contains {what} ({bad.sum()} of {bad.size} do): remove or repair it first")
    check_size(name, values)


# Squares of numbers between these, and products of several of them, stay far within float64's range.
_SMALLEST, _LARGEST = 1e-60, 1e60


def check_size(name: str, values: Float64[np.ndarray, "*shape"]) -> None:
    """Check that the largest number of an array is 0 or of a size that float64's products can hold.

    Raises:
        ValueError: it is not.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if largest != 0.0 and not _SMALLEST <= largest <= _LARGEST:
        raise ValueError(
            f"the largest {name} is {largest:.3g}: scale it to between {_SMALLEST:g} and {_LARGEST:g} first"
        )


# A direction along which the axes are shorter than this share of the longest is not part of the set's span: queries do
# not differ along it, and neither do the keys that they see. In float64 the span is then known to about 1e-7, the
# tolerance of verdicts. Directions above it are kept as they are, however short the axes are along them.
SPAN_TOLERANCE = 1e-9


@dataclass(frozen=True)
class QuerySet:
    """All queries `center + axes @ u` with `|u| <= 1`; scores are plain products with keys, in nats.

    `slack`: how far, relative to the length of each row of the axes, a query of the set that was given may lie from one
    of this (not 0 only where axes were reduced in number).
    """

    center: Float64[np.ndarray, " d"]
    axes: Float64[np.ndarray, "d r"]
    slack: float = 0.0

    @cached_property
    def missing(self) -> Float64[np.ndarray, "d m"]:
        """Orthonormal directions that the span of the axes lacks (relative singular value below SPAN_TOLERANCE)."""
        d, axes = len(self.axes), self.axes
        values = np.linalg.svd(axes, compute_uv=False)
        rank = int(((values >= SPAN_TOLERANCE * values[0]) & (values > 0.0)).sum())
        if rank == d:
            return np.zeros((d, 0))
        return np.ascontiguousarray(np.linalg.svd(axes)[0][:, rank:])

    @cached_property
    def outside(self) -> Float64[np.ndarray, " d"]:
        """The part of the center along the missing directions: every query of the span has it."""
        along = self.missing.T @ self.center
        if np.linalg.norm(along) <= SPAN_TOLERANCE * np.linalg.norm(self.center):
            return np.zeros_like(self.center)
        return np.asarray(self.missing @ along)

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
        rounding = (len(self.axes) + 16) * EPS
        return points if np.linalg.norm(points) > rounding * np.linalg.norm(centred) else np.zeros_like(points)

    def projection_noise(self, centred: Float64[np.ndarray, "key d"]) -> Float64[np.ndarray, " key"]:
        """A bound of the error of `keys_in_span`."""
        return np.asarray(AMPLE * (centred.shape[1] + 8) * EPS * np.linalg.norm(centred, axis=1))

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
        return QuerySet(self.center, fewer, 4.0 * r * d * EPS)


def query_sets(given: Any, number: int, d: int) -> list[QuerySet]:
    """A query set for each of `number` sets of keys of dimension `d`, from what a user may give.

    Raises:
        TypeError: not a number or a pair of floating-point arrays.
        ValueError: a radius that is not positive and of usable size, shapes that do not fit, NaN, infinite or enormous
            values.
    """
    if isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool):
        radius = float(given)
        if not (radius > 0.0 and np.isfinite(radius)):
            raise ValueError(
                f"the radius of a query set must be positive and finite, got {radius}: give the length of the "
                "longest query"
            )
        check_size("radius of the query set", np.array(radius))
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
        check_size(f"entry of the {name} of the query set", values)
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


EPS = float(np.finfo(np.float64).eps)
# A bound of rounding errors times this covers its own rounding, and that of the few operations that follow.
AMPLE = 2.0
# More than underflow takes from scores and lengths of keys and queries that are about 1: squares below 2^-1022 lose
# digits, so that lengths below 2^-511 are not known.
UNDERFLOW = 1e-150

# Entries of one block of scores: 8 MB.
_BLOCK = 1_000_000


def blocks(count: int, width: int) -> list[slice]:
    """`count` rows of `width` scores each, some at a time."""
    step = max(1, _BLOCK // max(width, 1))
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def mean_key(keys: Float64[np.ndarray, "key d"]) -> Float64[np.ndarray, " d"]:
    """`keys.mean(axis=0)`, to the last bit, at half its cost where keys are few."""
    return np.asarray(np.add.reduce(keys, axis=0) / len(keys))


@dataclass(frozen=True)
class ScoreSpace:
    """One set of keys where it is measured.

    Attributes:
        rows: the keys, or Aᵀk of the centred keys, in nats.
        offset: what is added to `rows @ u` to make a score, in nats; None: nothing (or no query set).
    """

    rows: Float64[np.ndarray, "key r"]
    offset: Float64[np.ndarray, " key"] | None


def score_space(
    keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None, queries: QuerySet | None
) -> ScoreSpace:
    """Keys through a set of queries if there is one."""
    if queries is None:
        return ScoreSpace(keys, None)
    seen = (keys - mean_key(keys)) @ np.column_stack([queries.axes, queries.center])
    offset = np.ascontiguousarray(seen[:, -1])
    if bias is not None:
        offset = offset + (bias - bias.mean())
    return ScoreSpace(np.ascontiguousarray(seen[:, :-1]), offset if np.ptp(offset) > 0.0 else None)


class OwnKeys(NamedTuple):
    """One set of keys in their own coordinates, where verdicts are given."""

    points: Float64[np.ndarray, "key d"]  # if the set of queries lacks directions: centred, and less these directions
    lift: Float64[np.ndarray, " key"] | None  # the bias that verdicts count; None: none


class GivenSet:
    """One set of keys as it was given: in the coordinates of verdicts, and as its queries measure it.

    Args:
        keys, bias, queries: as given, in float64.
    """

    def __init__(
        self, keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None, queries: QuerySet | None
    ) -> None:
        if bias is not None and (bias == bias[0]).all():
            bias = np.zeros_like(bias)
        self.keys, self.bias, self.queries = keys, bias, queries

    @cached_property
    def measured(self) -> ScoreSpace:
        """The keys as the queries see them; without queries the keys themselves."""
        return score_space(self.keys, self.bias, self.queries)

    @cached_property
    def own(self) -> OwnKeys:
        """The points that verdicts are about, and the bias that they count."""
        lift, queries = self.bias, self.queries
        if queries is None or queries.missing.shape[1] == 0:
            return OwnKeys(self.keys, lift)
        centred = self.keys - mean_key(self.keys)
        if queries.outside.any():  # every query has this part of the center, so it acts as a bias
            level = centred @ queries.outside
            lift = level if lift is None else lift + level
        return OwnKeys(queries.keys_in_span(centred), lift)
