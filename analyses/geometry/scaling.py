"""What is the scale of a set of keys? It is taken out once, here, so that no result depends on it.

Keys, bias and queries are multiplied by powers of two until their largest entries are about 1, which rounds nothing
(entries 300 decades below the largest of their kind may underflow; the checker allows for that). Squares then stay
within the range of float64 whatever the units of the keys are. Where keys are measured by a set of queries every
coordinate has a unit of its own, since only products of keys and queries count. The unit of a bias is that of its
spread: whatever is the same for all keys changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int32

from ln_probe.analyses.geometry.query_sets import QuerySet

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


# Of a set as it was given.
GIVEN = Powers()


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


class Units:
    """One set of valid float64 keys, to be taken in its own units: as it is judged, and as its queries measure it."""

    def __init__(
        self, keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None, queries: QuerySet | None
    ) -> None:
        self._keys, self._bias, self._queries = keys, bias, queries

    @cached_property
    def plain(self) -> ScaledSet:
        """Without the queries: all coordinates have the same unit."""
        return _scaled(self._keys, self._level, None)

    @cached_property
    def measured(self) -> ScaledSet:
        """With the queries, if there are any: each coordinate has its own unit."""
        return self.plain if self._queries is None else _scaled(self._keys, self._level, self._queries)

    @cached_property
    def _level(self) -> tuple[Float64[np.ndarray, " key"] | None, int | None]:
        return (None, None) if self._bias is None else by_spread(self._bias)


def _scaled(
    keys: Float64[np.ndarray, "key d"],
    bias: tuple[Float64[np.ndarray, " key"] | None, int | None],
    queries: QuerySet | None,
) -> ScaledSet:
    """Keys and queries in their own units, and a bias that is."""
    together = None if queries is None else 0
    largest = np.abs(keys).max(axis=together, initial=0.0)
    key_power = np.broadcast_to(np.frexp(largest)[1].astype(np.int32), keys.shape[1])
    level, bias_power = bias
    center_power, axes_power = None, None
    if queries is not None:
        center, center_power = of_unit_size(queries.center, key_power)
        axes, axes_power = of_unit_size(queries.axes, key_power[:, None])
        queries = replace(queries, center=center, axes=axes)
    # What has no entries but zeros has no unit of its own.
    known = [power for power in (axes_power, center_power, bias_power) if power is not None]
    axes_power, center_power, bias_power = (
        min(known, default=0) if power is None else power for power in (axes_power, center_power, bias_power)
    )
    powers = Powers(axes_power, center_power, bias_power)
    return ScaledSet(np.ldexp(keys, -key_power), level, queries, key_power, powers)


def at_unit(values: Float64[np.ndarray, "*shape"], power: int, to: int) -> Float64[np.ndarray, "*shape"]:
    """Values in the unit `2**power` as values in the unit `2**to`; the same array where the units are."""
    return values if power == to else np.asarray(np.ldexp(values, power - to))


def outwards(values: Float64[np.ndarray, " _"], power: int, up: bool) -> Float64[np.ndarray, " _"]:
    """Bounds in the unit `2**power` as plain numbers that are still bounds where float64 ends."""
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
