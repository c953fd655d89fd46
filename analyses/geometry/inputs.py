"""What a user may give (keys, a bias, a set of queries), checked, and brought to the units in which it is computed.

Arrays and tensors of any floating-point type become float64. Keys, bias and queries are multiplied by powers of two
until their largest entries are about 1, which rounds nothing (entries 300 decades below the largest of their kind may
underflow; the checker allows for that), so no result depends on the scale of the keys. docs/geometry.md says what is
computed in which coordinates, and why: verdicts in the keys' own (`GivenSet.own`), margins and attention in `Aᵀk`, in
nats (`score_space`). The center acts as a bias per key, `c·k`.

Seen through the axes, keys of an ill-conditioned basis are small differences of large terms, and a plain product leaves
nothing of them. `accurate_product` cuts both factors into slices of so few bits that the product of any two slices is
exact in float64 in any order of its sums (K. Ozaki, T. Ogita, S. Oishi, S. M. Rump, "Error-free transformations
of matrix multiplication by using fast routines of matrix multiplication and its applications", Numerical Algorithms 59
(2012) 95-118).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int32
from numpy.typing import NDArray

from ln_probe.analyses.geometry.exact import ExactSet

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


# Radii and axes beyond this make scores whose squares leave float64's range for any keys.
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
        d, axes = len(self.axes), of_unit_size(self.axes)[0]
        values = np.linalg.svd(axes, compute_uv=False)
        rank = int(((values >= SPAN_TOLERANCE * values[0]) & (values > 0.0)).sum())
        if rank == d:
            return np.zeros((d, 0))
        return np.ascontiguousarray(np.linalg.svd(axes)[0][:, rank:])

    @cached_property
    def outside(self) -> Float64[np.ndarray, " d"]:
        """The part of the center along the missing directions: every query of the span has it."""
        center, power = of_unit_size(self.center)
        along = self.missing.T @ center
        if np.linalg.norm(along) <= SPAN_TOLERANCE * np.linalg.norm(center):
            return np.zeros_like(center)
        return np.asarray(np.ldexp(self.missing @ along, power or 0))

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
        return QuerySet(self.center, fewer, 4.0 * r * d * EPS, self.axes)


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


EPS = float(np.finfo(np.float64).eps)
# A bound of rounding errors times this covers its own rounding, and that of the few operations that follow.
AMPLE = 2.0
# More than underflow takes from scores and lengths of keys and queries that are about 1: squares below 2^-1022 lose
# digits, so that lengths below 2^-511 are not known.
UNDERFLOW = 1e-150


@dataclass(frozen=True)
class Powers:
    """The units of a set as exponents of two.

    The score of a key under the query `center + axes @ u` is, in nats,
    `2**axes * (u @ axes.T @ key) + 2**center * (center @ key) + 2**bias * bias`.
    """

    axes: int = 0
    center: int = 0
    bias: int = 0

    @property
    def offset(self) -> int:
        """The unit of what is added to the scores of the axes: of center and bias together."""
        return max(self.center, self.bias)

    @property
    def score(self) -> int:
        """The unit of all terms of a score together."""
        return max(self.axes, self.offset)


@dataclass(frozen=True)
class ScaledSet:
    """One set of keys in its own units.

    Attributes:
        keys: as given, times `2**-key_power` (one for each coordinate).
        bias: as given, times `2**-powers.bias`; 0 if it is the same for all keys.
        queries: center and axes as given, times `2**key_power`, over `2**powers.center` and `2**powers.axes`.
        key_power, powers: the units.
    """

    keys: Float64[np.ndarray, "key d"]
    bias: Float64[np.ndarray, " key"] | None
    queries: QuerySet | None
    key_power: Int32[np.ndarray, " d"]
    powers: Powers


def _scaled(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    bias_power: int | None,
    queries: QuerySet | None,
) -> ScaledSet:
    """Keys and queries in their own units, and a bias that is (None: it has no spread, and no unit)."""
    if queries is None:
        unit, power = math.frexp(float(np.abs(keys).max(initial=0.0)))[1], bias_power or 0
        return ScaledSet(
            np.ldexp(keys, -unit), bias, None, np.full(keys.shape[1], unit, np.int32), Powers(power, power, power)
        )
    key_power = np.frexp(np.abs(keys).max(axis=0, initial=0.0))[1].astype(np.int32)
    center, center_power = of_unit_size(queries.center, key_power)
    axes, axes_power = of_unit_size(queries.axes, key_power[:, None])
    queries = replace(queries, center=center, axes=axes)
    # An array of zeros has no unit.
    found = axes_power, center_power, bias_power
    least = min((power for power in found if power is not None), default=0)
    powers = Powers(*(least if power is None else power for power in found))
    return ScaledSet(np.ldexp(keys, -key_power), bias, queries, key_power, powers)


# Entries of one block of scores: 8 MB.
_BLOCK = 1_000_000


def blocks(count: int, width: int) -> list[slice]:
    """`count` rows of `width` scores each, some at a time."""
    step = max(1, _BLOCK // max(width, 1))
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def mean_key(keys: Float64[np.ndarray, "key d"]) -> Float64[np.ndarray, " d"]:
    """`keys.mean(axis=0)`, to the last bit, at half its cost where keys are few."""
    return np.asarray(np.add.reduce(keys, axis=0) / len(keys))


def at_unit(values: Float64[np.ndarray, "*shape"], power: int, to: int) -> Float64[np.ndarray, "*shape"]:
    """Values in the unit `2**power` as values in the unit `2**to`; the same array where the units are."""
    return values if power == to else np.asarray(np.ldexp(values, power - to))


def outwards(values: Float64[np.ndarray, " _"], power: int, up: bool) -> Float64[np.ndarray, " _"]:
    """Bounds in the unit `2**power` as plain numbers that are still bounds where float64 ends."""
    if power == 0:
        return values
    with np.errstate(over="ignore", under="ignore"):
        found = np.ldexp(values, power)
        back = np.ldexp(found, -power)
    off = back < values if up else back > values
    return np.asarray(np.where(off, np.nextafter(found, np.inf if up else -np.inf), found))


def by_spread(bias: Float64[np.ndarray, " key"]) -> tuple[Float64[np.ndarray, " key"], int | None]:
    """A bias over a power of two that makes its spread about 1, and that power; None if there is no spread."""
    if (bias == bias[0]).all():
        return np.zeros_like(bias), None
    small, power = of_unit_size(bias)
    _, own = of_unit_size(small - small.mean())
    assert power is not None
    assert own is not None
    return np.ldexp(bias, -(power + own)), power + own


def of_unit_size(
    values: Float64[np.ndarray, "*shape"], power: Int32[np.ndarray, "*power"] | int = 0
) -> tuple[Float64[np.ndarray, "*shape"], int | None]:
    """Return `values * 2**power` over a power of two, at most 1, and that power; None if all are 0."""
    if not values.any():
        return values, None
    exponent = np.where(values != 0.0, np.frexp(values)[1] + power, np.iinfo(np.int32).min)
    own = int(exponent.max())
    return np.ldexp(values, power - own), own


_BITS = 53
# Slices of each factor. Three hold at least 63 bits of inner products of up to 2048 terms (21 bits each): ten more than
# float64 has.
_SLICES = 3
# What the product of the slices leaves out, relative to the largest entry of the row times that of the column.
LEFT_OUT = 2.0**-60


def accurate_product(left: Float64[np.ndarray, "n k"], right: Float64[np.ndarray, "k m"]) -> Float64[np.ndarray, "n m"]:
    """`left @ right` with an error of at most 4 ulp of the result plus `k · LEFT_OUT · max|row| · max|column|`.

    Args:
        left, right: finite, of moderate size (no product may overflow).
    """
    terms = max(left.shape[1], 2)
    bits = int((_BITS - np.ceil(np.log2(terms))) // 2)
    ours, theirs = _slices(left, bits, axis=1), _slices(right, bits, axis=0)
    pairs = [(p, q) for p in range(_SLICES) for q in range(_SLICES) if p + q < _SLICES + 1]
    total = np.zeros((left.shape[0], right.shape[1]))
    carried = np.zeros_like(total)
    for p, q in sorted(pairs, key=sum, reverse=True):  # small ones first; each sum's own rounding is carried along
        part = ours[p] @ theirs[q]
        grown = total + part
        back = grown - total
        carried += (total - (grown - back)) + (part - back)
        total = grown
    return np.asarray(total + carried)


def seen_from(
    keys: Float64[np.ndarray, "key d"], shift: Float64[np.ndarray, " d"], moving: Float64[np.ndarray, "d r"]
) -> Float64[np.ndarray, "key r"]:
    """`(keys - shift) @ moving`, as accurately: what a difference loses to rounding is multiplied too.

    Each coordinate of the keys is first brought to about 1 by a power of two, which is exact.
    """
    near = keys - shift
    back = near - keys
    lost = (keys - (near - back)) - (shift + back)
    exponent = np.frexp(np.abs(near).max(axis=0))[1]
    near, lost, moving = np.ldexp(near, -exponent), np.ldexp(lost, -exponent), np.ldexp(moving, exponent[:, None])
    return np.asarray(accurate_product(near, moving) + lost @ moving)


def _slices(values: Float64[np.ndarray, "a b"], bits: int, axis: int) -> list[Float64[np.ndarray, "a b"]]:
    """Values as a sum of slices: multiples of a unit that `bits` bits reach from the largest entry along the axis."""
    largest = np.abs(values).max(axis=axis, keepdims=True, initial=0.0)
    exponent = np.frexp(largest)[1]
    found, rest = [], values.copy()
    for number in range(_SLICES):
        # Adding and taking off this much rounds to multiples of 2^(exponent - bits·(number+1)).
        anchor = np.ldexp(0.75, exponent - bits * (number + 1) + _BITS)
        part = (rest + anchor) - anchor
        found.append(part)
        rest -= part
    return found


# A product that loses more than this share of the keys' spread to rounding is recomputed without cancellation: a
# hundredth of the tolerance of verdicts.
_LOST = 1e-9
# Scores beyond this have squares that leave float64's range.
_LARGEST_SCORE = 1e153


@dataclass(frozen=True)
class ScoreSpace:
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
    powers: Powers = Powers()

    def at(self, power: int) -> tuple[Float64[np.ndarray, "key r"], Float64[np.ndarray, " key"] | None]:
        """Rows and offset, both in nats over `2**power`."""
        offset = None if self.offset is None else at_unit(self.offset, self.powers.offset, power)
        return at_unit(self.rows, self.powers.axes, power), offset


def score_space(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    queries: QuerySet | None,
    powers: Powers = Powers(),
) -> ScoreSpace:
    """Keys, through a set of queries if there is one; `powers` are the units they are in.

    Raises:
        ValueError: scores that overflow.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        mean = mean_key(keys)
        centred = keys - mean
        spread = float(np.linalg.norm(centred)) / len(keys) ** 0.5
        aside = float(np.linalg.norm(mean)) / spread if spread > 0.0 else (np.inf if mean.any() else 0.0)
    if queries is None:
        return ScoreSpace(keys, None, aside, np.nan, powers)
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
    if terms * EPS * sizes.max(initial=0.0) > _LOST * extent:
        seen = np.where(np.isfinite(again := seen_from(keys, mean, moving)), again, seen)
    offset = at_unit(np.ascontiguousarray(seen[:, -1]), powers.center, powers.offset)
    if level is not None:
        offset = offset + at_unit(level, powers.bias, powers.offset)
    return ScoreSpace(
        rows=np.ascontiguousarray(seen[:, :-1]),
        offset=offset if np.ptp(offset) > 0.0 else None,
        offset_over_spread=aside,
        largest_score=largest,
        powers=powers,
    )


class OwnKeys(NamedTuple):
    """One set of keys in their own coordinates, where verdicts are given."""

    # The keys over a power of two; if the set of queries lacks directions: centred, and less these directions.
    points: Float64[np.ndarray, "key d"]
    lift: Float64[np.ndarray, " key"] | None  # bias that verdicts count, in nats over a power of two; None: none
    exponent: int  # of the power of two of the bias over that of the keys


class GivenSet:
    """One set of keys as it was given: in its own units, in the coordinates of verdicts, as its queries measure it.

    Args:
        keys, bias, queries: as given, in float64.
    """

    def __init__(
        self, keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None, queries: QuerySet | None
    ) -> None:
        self.keys, self.bias, self.queries = keys, bias, queries

    @cached_property
    def _level(self) -> tuple[Float64[np.ndarray, " key"] | None, int | None]:
        return (None, None) if self.bias is None else by_spread(self.bias)

    @cached_property
    def plain(self) -> ScaledSet:
        """Without the queries: all coordinates have the same unit."""
        return _scaled(self.keys, *self._level, None)

    @cached_property
    def scaled(self) -> ScaledSet:
        """With the queries, if there are any: each coordinate has its own unit."""
        return self.plain if self.queries is None else _scaled(self.keys, *self._level, self.queries)

    @cached_property
    def measured(self) -> ScoreSpace:
        """The keys as the queries see them; without queries the keys themselves."""
        own = self.scaled
        return score_space(own.keys, own.bias, own.queries, own.powers)

    @cached_property
    def own(self) -> OwnKeys:
        """The points that verdicts are about, and the bias that they count."""
        plain, queries = self.plain, self.queries
        power, lift, lift_power = int(plain.key_power[0]), plain.bias, plain.powers.bias
        if queries is None or queries.missing.shape[1] == 0:
            return OwnKeys(plain.keys, lift, lift_power - power)
        mean = plain.keys.mean(axis=0)
        outside, unit = of_unit_size(queries.outside, power)
        if unit is not None:  # every query has this part of the center, so it acts as a bias
            level = seen_from(plain.keys, mean, outside[:, None])[:, 0]
            if lift is None or not lift.any():
                lift, lift_power = level, unit
            else:
                both = max(unit, lift_power)
                lift, lift_power = at_unit(lift, lift_power, both) + at_unit(level, unit, both), both
        return OwnKeys(queries.keys_in_span(plain.keys - mean), lift, lift_power - power)

    @cached_property
    def exact_span(self) -> tuple[Float64[np.ndarray, "d r"] | None, Float64[np.ndarray, " d"] | None]:
        """Axes and center of the queries that exact verdicts ask for; None where they are all queries.

        Axes that span everything change no exact verdict.
        """
        queries = self.queries
        if queries is None or queries.missing.shape[1] == 0:
            return None, None
        return (queries.axes if queries.given is None else queries.given), queries.center

    @cached_property
    def exact(self) -> ExactSet:
        """The set for exact verdicts."""
        axes, center = self.exact_span
        return ExactSet(self.keys, self.bias, axes=axes, center=center)

    @cached_property
    def exact_keys(self) -> ExactSet:
        """The set for queries over the keys themselves."""
        return self.exact if self.exact_span[0] is None else ExactSet(self.keys, self.bias)
