"""What a user gets as the witness of a key: a query over the keys as they were given, proved to select it as it stands.

Solvers work on normalized points in units of their own. Brought back to the given keys a query is rounded, and where a
key wins by little, or units differ by hundreds of decades, no float64 query may be left that selects it. So every query
is looked at again as it is given out: in float64 with a bound of the error, and in whole numbers where that leaves a
sign open.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from ln_probe.analyses.geometry.exact import ExactSet, ExactVerdict, as_float
from ln_probe.analyses.geometry.judged import Judged, OwnKeys, judged, own_keys
from ln_probe.analyses.geometry.key_coordinates import KeyCoordinates, unit_rows
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.scaling import UNDERFLOW, Units, by_spread

_EPS = float(np.finfo(np.float64).eps)
# Covers the rounding of a bound of an error, as in `certificates`.
_AMPLE = 2.0
# Entries of one block of scores: 8 MB.
_BLOCK = 1_000_000


class GivenSet:
    """One set of keys as it was given, and what is proved of queries over it.

    Args:
        keys, bias, queries: as given, in float64.
    """

    def __init__(
        self, keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None, queries: QuerySet | None
    ) -> None:
        self.keys, self.bias, self.queries = keys, bias, queries
        self.units = Units(keys, bias, queries)

    @cached_property
    def measured(self) -> Judged:
        """The keys as the queries see them; without queries the keys themselves."""
        own = self.units.measured
        return judged(own.keys, own.bias, own.queries, own.powers)

    @cached_property
    def own(self) -> OwnKeys:
        """The keys in their own coordinates, to be judged."""
        return own_keys(self.units.plain, self.queries)

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
    def _alone(self) -> ExactSet:
        """The keys for queries over themselves."""
        return self.exact if self.exact_span[0] is None else ExactSet(self.keys, self.bias)

    def query(self, verdict: ExactVerdict) -> tuple[Fraction, ...]:
        """The exact query of a verdict over the keys themselves: `center + axes @ u`."""
        found, (axes, center) = verdict.query or (), self.exact_span
        if axes is None or center is None:
            return found
        return tuple(
            Fraction(float(c)) + sum((Fraction(float(a)) * u for a, u in zip(row, found, strict=True)), Fraction(0))
            for c, row in zip(center, axes, strict=True)
        )

    def selects(self, i: int, query: Float64[np.ndarray, " d"], among: Int64[np.ndarray, " rival"]) -> bool:
        """Whether a query, bias added, scores key i above the keys `among` that are not equal to it."""
        if not np.isfinite(query).all():
            return False
        return bool(self.lead(np.array([i]), query[None])[0]) or self._alone.selects(i, query, among)

    def lead(
        self, targets: Int64[np.ndarray, " target"], queries: Float64[np.ndarray, "target d"]
    ) -> Bool[np.ndarray, " target"]:
        """Of which queries float64 proves that they select their key among all others; the rest is open."""
        keys, bias, key_power, bias_power = self._in_own_units
        usable = np.isfinite(queries).all(axis=1)
        asked = np.where(usable[:, None], queries, 0.0)
        # Queries brought to at most 1 in the units of the keys, and both terms of a score to one unit.
        exponent = np.where(asked != 0.0, np.frexp(asked)[1] + key_power, np.iinfo(np.int32).min // 2)
        power = exponent.max(axis=1)
        unit = np.ldexp(asked, key_power - power[:, None])
        both = power if bias is None else np.maximum(power, bias_power)
        unit = np.ldexp(unit, (power - both)[:, None])
        share = None if bias is None else np.ldexp(1.0, np.maximum(bias_power - both, -2000))
        length, size = np.linalg.norm(unit, axis=1), np.linalg.norm(keys, axis=1)
        rounding = _AMPLE * (keys.shape[1] + 8) * _EPS
        found = np.zeros(len(targets), bool)
        step = max(1, _BLOCK // len(keys))
        for first in range(0, len(targets), step):
            block = slice(first, first + step)
            scores = unit[block] @ keys.T
            error = rounding * np.outer(length[block], size) + UNDERFLOW
            if bias is not None and share is not None:
                scores += np.outer(share[block], bias)
                error += rounding * np.outer(share[block], np.abs(bias))
            here, some = np.arange(len(scores)), targets[block]
            own = scores[here, some] - error[here, some]
            scores += error
            scores[here, some] = -np.inf
            found[block] = own > scores.max(axis=1)
        return np.asarray(found & usable)

    @cached_property
    def _in_own_units(
        self,
    ) -> tuple[Float64[np.ndarray, "key d"], Float64[np.ndarray, " key"] | None, Int32[np.ndarray, " d"], int]:
        """Centred keys, each coordinate in a unit of its own, and the bias, with the exponents of these units."""
        key_power = np.frexp(np.abs(self.keys).max(axis=0))[1].astype(np.int32)
        keys = np.ldexp(self.keys, -key_power)
        keys -= keys.mean(axis=0)
        if self.bias is None:
            return keys, None, key_power, 0
        bias, power = by_spread(self.bias)
        return (keys, None, key_power, 0) if power is None else (keys, bias - bias.mean(), key_power, power)


def over_given(
    own: OwnKeys, sets: KeyCoordinates, found: Float64[np.ndarray, "query dim"]
) -> Float64[np.ndarray, "query d"]:
    """Queries over normalized points as queries over the keys as they were given, rounded.

    Of unit length where no bias counts, else to be used with the bias as it was given; what float64 cannot express is
    infinite, or 0.
    """
    queries = own.queries
    plain = found[:, :-1] if sets.biased else found
    if queries is not None:
        plain = queries.in_span(plain)
    if not sets.biased or (sets.bias_scale == 0.0 and (queries is None or not queries.outside.any())):
        return unit_rows(plain)
    lift, size = found[:, -1:], (sets.bias_scale or 1.0) / (sets.scale or 1.0)
    plain = plain * np.divide(size, lift, out=np.full_like(lift, size), where=lift > 0.0)
    with np.errstate(over="ignore", under="ignore"):
        plain = np.ldexp(plain, own.lift_power - own.power)
        return plain if queries is None else np.asarray(plain + queries.outside)


def rounded(query: tuple[Fraction, ...], free: bool) -> Float64[np.ndarray, " d"]:
    """An exact query in float64: of unit length if any length will do, else as it stands, infinite where too large."""
    largest = max(map(abs, query), default=Fraction(0))
    if not free or largest == 0:
        return np.array([as_float(q) for q in query])
    return np.asarray(unit_rows(np.array([[as_float(q / largest) for q in query]]))[0])
