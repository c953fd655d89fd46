"""Is a key a vertex of the hull of a set? Decided in exact rational arithmetic on the float64 numbers as they stand.

Key i is unselectable iff convex weights of the keys that are not exactly equal to it reproduce it (with a bias: and
their bias is at least its own): iff the equations

    Σ λ_j (z_j - z_i) = 0,   Σ λ_j (b_j - b_i) - s = 0,   Σ c_j λ_j + s = 1,   λ, s >= 0,   any c > 0

have a solution. If not, Farkas' lemma gives a query under which key i scores above all of them. What is returned is
always one of the two, exact: no tolerance, no "undecided".

Both come from one problem: nonnegative least squares for these equations (Lawson & Hanson 1974, ch. 23). If nothing is
left over, its solution is the weights; if something is, that is the query. The method is run in float64 first, and
then on whole numbers from where that ended, usually to find that nothing is left to do. In exact arithmetic it needs
no rule against cycling: the residual becomes strictly less with every support, and there are finitely many.

Products of all keys with a query are first computed in float64 with a bound of their error; only where that bound
leaves a sign open are they computed in whole numbers.
Equations are solved by python-flint where it is installed, else by elimination.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from time import perf_counter
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[import-untyped]

# A prime below 2^31: products of remainders fit int64.
_PRIME = 2**31 - 1
# Equations from which on python-flint (Dixon lifting) is faster than elimination with Python's own integers, its
# conversions included: 0.07 against 0.11 ms at 7 equations, 0.05 against 0.05 at 4.
_FLINT_FROM = 6


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


flint = _optional("flint")
gmpy2 = _optional("gmpy2")


def solve(rows: list[list[int]], right: list[int]) -> tuple[list[int], int]:
    """The solution of a square system of whole numbers, as numerators over one positive denominator.

    Raises:
        ZeroDivisionError: the system is singular.
    """
    size = len(rows)
    if size == 0:
        return [], 1
    if flint is not None and size >= _FLINT_FROM:
        matrix = flint.fmpz_mat(size, size, [value for row in rows for value in row])
        found, below = matrix.solve(flint.fmpz_mat(size, 1, right)).numer_denom()
        numerators, denominator = [int(found[k, 0]) for k in range(size)], int(below)
    else:
        numerators, denominator = eliminate(rows, right)
    return (numerators, denominator) if denominator > 0 else ([-value for value in numerators], -denominator)


def eliminate(rows: list[list[int]], right: list[int]) -> tuple[list[int], int]:
    """As `solve`, by fraction-free elimination (Bareiss 1968): every division leaves no remainder."""
    whole: Any = int if gmpy2 is None else gmpy2.mpz  # a third of the time at 65 equations
    table = [[whole(value) for value in row] + [whole(last)] for row, last in zip(rows, right, strict=True)]
    size, before = len(table), whole(1)
    for k in range(size):
        at = next((row for row in range(k, size) if table[row][k] != 0), None)
        if at is None:
            raise ZeroDivisionError(f"the system of {size} equations is singular")
        table[k], table[at] = table[at], table[k]
        head = table[k]
        pivot = head[k]
        for row in range(k + 1, size):
            this = table[row]
            first = this[k]
            table[row] = [0] * (k + 1) + [
                (pivot * a - first * b) // before for a, b in zip(this[k + 1 :], head[k + 1 :], strict=True)
            ]
        before = pivot
    found = [whole(0)] * size  # over the determinant, `before`
    for k in reversed(range(size)):
        this = table[k]
        rest = this[size] * before - sum((this[t] * found[t] for t in range(k + 1, size)), whole(0))
        found[k] = rest // this[k]
    return [int(value) for value in found], int(before)


def independent(columns: list[list[int]]) -> list[int]:
    """Places of linearly independent columns, first come first kept.

    Decided modulo a prime: what is independent there is independent. (What is not may be left out wrongly, once in
    some 10⁹ times.)
    """
    if not columns:
        return []
    table: NDArray[np.int64] = np.array([[value % _PRIME for value in column] for column in columns], np.int64).T
    kept: list[int] = []
    free = np.ones(len(table), bool)
    for k in range(table.shape[1]):
        left: Int64[np.ndarray, " row"] = np.flatnonzero(free & (table[:, k] != 0))
        if len(left) == 0:
            continue
        at = int(left[0])
        kept.append(k)
        free[at] = False
        table[at] = table[at] * pow(int(table[at, k]), -1, _PRIME) % _PRIME
        for row in left[1:]:
            table[row] = (table[row] - table[row, k] * table[at]) % _PRIME
        if not free.any():
            break
    return kept


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Half an ulp of 1: the relative error of one float64 operation that neither over- nor underflows.
_HALF_ULP = 2.0**-53
# More than all that underflow can take from a sum of products whose factors are at most 1: a product loses less than
# 2^-1074, and there are fewer than 10^10 of them.
UNDERFLOW = 1e-300


class WholeSet:
    """Keys, their bias, and what they are measured through, in whole numbers of powers of two.

    Args:
        points: float64, keys × d.
        bias: one number per key, or None.
        axes: d × r; keys are then measured as `axesᵀ k`, in exact products. None: as they are.
        center: of the queries; `center · k` is added to the bias. (Only its part outside the span of the axes
            matters.)

    Raises:
        ValueError: shapes that do not fit, NaN or infinite values.
    """

    def __init__(self, points: Any, bias: Any = None, *, axes: Any = None, center: Any = None) -> None:
        self.points = _array("points", points, 2)
        number, d = self.points.shape
        self.bias = None if bias is None else _array("bias", bias, 1)
        self.axes = None if axes is None else _array("axes", axes, 2)
        self.center = None if center is None else _array("center", center, 1)
        for name, given, size in (("bias", self.bias, number), ("axes", self.axes, d), ("center", self.center, d)):
            if given is not None and len(given) != size:
                raise ValueError(f"{name} must have the length {size}, got the shape {given.shape}")
        if self.center is not None and not self.center.any():
            self.center = None
        self.biased = self.bias is not None or self.center is not None
        # Key j is 2^low[t] * whole number along dimension t.
        self._mantissa, self._exponent, low = _dyadic(self.points, 0)
        self._low: list[int] = [int(value) for value in low]
        self._axes_scale = 0 if self.axes is None else exponent_of(self.axes)
        self._across = None if self.axes is None else np.ldexp(self.axes, -self._axes_scale)
        # The axes, in units that make their products with those whole numbers whole.
        self._axes: list[list[int]] | None = None
        self.lows = self._low  # measured keys are 2 to these, times whole numbers
        if self.axes is not None:
            mantissa, exponent, least = _dyadic(self.axes, 0, shift=low)
            self.lows = [int(value) for value in least]
            self._axes = [
                [int(m) << int(e - c) for m, e, c in zip(ms, es, self.lows, strict=True)]
                for ms, es in zip(mantissa, exponent, strict=True)
            ]
        lifts = np.zeros(number) if self.bias is None else self.bias
        slope = np.zeros(d) if self.center is None else self.center
        m_bias, e_bias, _ = _dyadic(lifts[:, None], 0)
        m_slope, e_slope, _ = _dyadic(slope[:, None], 0, shift=low)
        used = np.concatenate([e_bias[m_bias != 0], e_slope[m_slope != 0]])
        self.bias_low = int(used.min()) if len(used) else 0  # the bias is 2 to this, times whole numbers
        self._bias = [
            int(m) << int(e - self.bias_low) if m else 0 for m, e in zip(m_bias[:, 0], e_bias[:, 0], strict=True)
        ]
        self._slope = [
            int(m) << int(e - self.bias_low) if m else 0 for m, e in zip(m_slope[:, 0], e_slope[:, 0], strict=True)
        ]
        # Scaled by powers of two to at most 1/2, for products in floating point.
        self._scale = exponent_of(self.points)
        self._scaled = np.ldexp(self.points, -self._scale - 1)
        terms = ((lifts, 0), (slope, self._scale))
        self._bias_scale = max((exponent_of(v) + power for v, power in terms if v.any()), default=0)
        self._lifts = np.ldexp(lifts, -self._bias_scale - 1)
        self._whole: dict[int, tuple[list[int], int]] = {}

    def measured(self, j: int) -> tuple[list[int], int]:
        """Key j in whole numbers: as measured, and its bias."""
        if j not in self._whole:
            plain = [
                int(m) << int(e - low) if m else 0
                for m, e, low in zip(self._mantissa[j], self._exponent[j], self._low, strict=True)
            ]
            lift = self._bias[j] + sum(a * b for a, b in zip(self._slope, plain, strict=True))
            if self._axes is not None:
                plain = [sum(a[r] * k for a, k in zip(self._axes, plain, strict=True)) for r in range(len(self.lows))]
            self._whole[j] = plain, lift
        return self._whole[j]

    def steps(self, i: int) -> tuple[Floats, Floats]:
        """All keys and biases less those of key i, scaled by powers of two: what `products` is asked with."""
        return self._scaled - self._scaled[i], self._lifts - self._lifts[i]

    def steps_as_measured(self, steps: Floats, lifts: Floats) -> tuple[Floats, Floats, Ints]:
        """Rows of `steps` as measured, in float64 (a bias last), and what powers of two make whole numbers of them."""
        if self.center is not None:
            lifts = lifts + steps @ np.ldexp(self.center, self._scale - self._bias_scale)
        shift = self._scale + 1
        if self._across is not None:
            steps, shift = steps @ self._across, shift + self._axes_scale
        powers = [shift - low for low in self.lows]
        if not self.biased:
            return steps, np.zeros(len(steps)), np.array(powers)
        return steps, lifts, np.array([*powers, self._bias_scale + 1 - self.bias_low])

    def may_be_equal(self, steps: Floats) -> NDArray[np.bool_]:
        """Which rows of `steps` may be 0 as measured; float64 rules out most that are not."""
        if self._across is None:
            return np.asarray((steps == 0.0).all(axis=1))
        seen = np.abs(steps @ self._across) > 1e-9 * (np.abs(steps) @ np.abs(self._across)) + UNDERFLOW
        return np.asarray(~seen.any(axis=1))

    def products(
        self, steps: Floats, lifts: Floats, row: list[int], last: Floats, last_power: int
    ) -> tuple[Floats, Floats]:
        """Products of whole numbers with steps, their lifts (if biased), and `last * 2**last_power`.

        Args:
            steps, lifts: rows of what `steps` gave.
            row: a factor for each coordinate, the bias and `last`.
            last: at most 1 each.

        Returns:
            the products and what they may be off by, both up to one positive factor.
        """
        along = row[: len(self.lows)]
        lift = row[-2] if self.biased else 0
        if self._axes is not None:
            along = [sum(a * b for a, b in zip(axis, along, strict=True)) for axis in self._axes]
        along = [a + lift * b for a, b in zip(along, self._slope, strict=True)] if lift else along
        parts = [mantissa(value) for value in [*along, lift, row[-1]]]
        powers = [self._scale + 1 - low for low in self._low] + [self._bias_scale + 1 - self.bias_low, last_power]
        top = max((e + s for (m, e), s in zip(parts, powers, strict=True) if m), default=0)
        factor = np.array([np.ldexp(m, max(e + s - top, -2000)) for (m, e), s in zip(parts, powers, strict=True)])
        value = steps @ factor[:-2] + lifts * factor[-2] + last * factor[-1]
        size = np.abs(steps) @ np.abs(factor[:-2]) + np.abs(lifts * factor[-2]) + np.abs(last * factor[-1])
        # One error for each factor, difference, product and sum, in any order of summation; 8 to spare.
        return value, (len(factor) + 8) * 1.01 * _HALF_ULP * size + UNDERFLOW


def _array(name: str, values: Any, dims: int) -> Floats:
    found = np.asarray(values, np.float64)
    if found.ndim != dims or (dims == 2 and name == "points" and 0 in found.shape):
        raise ValueError(f"{name} must have {dims} axes and not be empty, got the shape {found.shape}")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} contains NaN or infinite values: remove or repair them first")
    return found


def _dyadic(values: Floats, axis: int, shift: Ints | None = None) -> tuple[Ints, Ints, Ints]:
    """Odd whole numbers (or 0), the powers of two (plus `shift`) that they multiply, and the least along `axis`."""
    fraction, exponent = np.frexp(values)
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    zeros = np.frexp((mantissa & -mantissa).astype(np.float64))[1].astype(np.int64) - 1
    zeros[mantissa == 0] = 0
    power = exponent.astype(np.int64) - 53 + zeros
    if shift is not None:
        power += shift[:, None]
    most = np.iinfo(np.int64).max
    low = np.where(mantissa != 0, power, most).min(axis=axis)
    low[low == most] = 0
    power = np.where(mantissa != 0, power, np.broadcast_to(low, power.shape))
    return mantissa >> zeros, power, low


def exponent_of(values: Floats) -> int:
    return int(np.frexp(np.abs(values).max(initial=0.0))[1])


def mantissa(value: int) -> tuple[float, int]:
    """A number of at most 1 that, times two to the second, is `value` up to a little more than half an ulp."""
    extra = max(value.bit_length() - 200, 0)
    fraction, exponent = np.frexp(float(value >> extra))
    return float(fraction), int(exponent) + extra


def power_of_two(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


@dataclass(frozen=True)
class ExactVerdict:
    """The verdict on one key, with its proof.

    Attributes:
        code: "selectable", "unselectable" or "duplicate" (a vertex that occurs more than once).
        index, weights: of an unselectable key: convex weights, which sum to exactly 1, of other keys that reproduce it
            exactly (with a bias: with at least its bias). Of a duplicate: a copy of it, with all weight. Else empty.
        query: of the others: a query `center + axes @ query` (without axes: the query itself), of any length, under
            which the key scores above every key that is not its exact copy. Else None.
        steps: supports that were solved for exactly; 0 if a hint or float64 gave the query.
    """

    code: str
    index: tuple[int, ...]
    weights: tuple[Fraction, ...]
    query: tuple[Fraction, ...] | None
    steps: int


@dataclass
class _Key:
    """What is computed once for a key that is asked about."""

    i: int
    others: Ints  # the keys it competes with
    steps: Floats  # k_j - k_i of the others, scaled
    lifts: Floats  # b_j - b_i, scaled
    unit: Floats  # the steps as measured, of about unit spread in every coordinate; the slack of the bias last
    length: Floats  # of these
    shifts: list[int]  # powers of two that give whole numbers the same spread
    last: Ints  # exponents of c_j
    columns: dict[int, list[int]] = field(default_factory=dict)  # by place among the others; the slack comes after


class ExactSet(WholeSet):
    """A set of keys, for exact verdicts on any of them; arguments and errors as for `WholeSet`."""

    def decide(
        self, i: int, *, among: Any = None, support: Any = None, query: Any = None, seconds: float | None = None
    ) -> ExactVerdict:
        """The verdict on key i.

        Args:
            i: its index.
            among: indices of the keys it competes with (those exactly equal to it do not count), by default all.
            support: indices of keys in whose hull a solver saw it, or which it saw as the nearest face: a hint.
            query: one that a solver found to select it, over the measured keys: as `ExactVerdict.query`; a hint.
            seconds: to give up after, checked between supports. By default there is no limit; deciding may take
                half a minute where hundreds of keys of 64 dimensions lie within an ulp of a common plane.

        Raises:
            IndexError: no such key.
            TimeoutError: it gave up.
        """
        number = len(self.points)
        if not -number <= i < number:
            raise IndexError(f"key {i} is out of range: there are {number}")
        i = int(i) % number
        end = np.inf if seconds is None else perf_counter() + seconds
        others, steps, lifts, copies = self._others(i, among)
        if len(others) == 0:
            return _vertex(copies, (Fraction(0),) * len(self.lows), 0)
        if (
            query is not None
            and (won := self._wins(i, others, steps, lifts, np.asarray(query, np.float64))) is not None
        ):
            return _vertex(copies, won, 0)
        key = self._key(i, others, steps, lifts)
        if support is not None:
            places = {int(j): k for k, j in enumerate(others)}
            kept = [places[int(j)] for j in dict.fromkeys(support) if int(j) in places]
            found = self._exactly(key, kept, None, copies, end)
            if found is not None:
                return found
        kept, weights, direction = self._guess(key)
        if direction is not None and (won := self._wins(i, others, steps, lifts, direction)) is not None:
            return _vertex(copies, won, 0)
        found = self._exactly(key, kept, weights, copies, end)
        assert found is not None  # with weights to start from it always ends
        return found

    def selects(self, i: int, query: Floats, among: Any = None) -> bool:
        """Whether key i scores above all others (or those `among`) that are not equal to it, under a finite query over
        the measured keys."""
        others, steps, lifts, _ = self._others(i, among)
        return self._wins(i, others, steps, lifts, query) is not None

    def copies(self, i: int) -> list[int]:
        """The other keys that are exactly equal to key i, as measured and in their bias."""
        return self._others(i, None)[3]

    def _others(self, i: int, among: Any) -> tuple[Ints, Floats, Floats, list[int]]:
        competes = np.full(len(self.points), among is None)
        if among is not None:
            competes[np.asarray(among, np.int64)] = True
        competes[i] = False
        others = np.flatnonzero(competes)
        steps, lifts = self.steps(i)
        maybe = others[self.may_be_equal(steps[others])]
        equal = [int(j) for j in maybe if self.measured(int(j)) == self.measured(i)]
        others = np.setdiff1d(others, np.array(equal, np.int64))
        return others, steps[others], lifts[others], equal

    def _key(self, i: int, others: Ints, steps: Floats, lifts: Floats) -> _Key:
        plain, extra, powers = self.steps_as_measured(steps, lifts)
        unit = np.column_stack([plain, extra]) if self.biased else plain
        largest = _exponents(np.abs(unit).max(axis=0))  # (squares of what is far below 1 underflow)
        unit = np.ldexp(unit, -largest)
        spread = _exponents(np.sqrt(np.mean(unit * unit, axis=0)))
        unit = np.ldexp(unit, -spread)
        spread += largest
        if self.biased:
            unit = np.vstack([unit, np.append(np.zeros(unit.shape[1] - 1), -1.0)])
        length = np.linalg.norm(unit, axis=1)
        sizes = powers + spread  # of whole numbers
        shifts = sizes.max() - sizes
        last = np.maximum(_exponents(length) + int(sizes.max()), 0)
        return _Key(i, others, steps, lifts, unit, length, [int(v) for v in shifts], last)

    def _column(self, key: _Key, k: int) -> list[int]:
        if k not in key.columns:
            if k == len(key.others):
                found = [0] * (len(key.shifts) - 1) + [-(1 << int(key.last[k])), 1 << int(key.last[k])]
            else:
                (here, low), (there, high) = self.measured(key.i), self.measured(int(key.others[k]))
                steps = [b - a for a, b in zip(here, there, strict=True)] + ([high - low] if self.biased else [])
                found = [v << s for v, s in zip(steps, key.shifts, strict=True)] + [1 << int(key.last[k])]
            key.columns[k] = found
        return key.columns[k]

    def _wins(self, i: int, others: Ints, steps: Floats, lifts: Floats, query: Floats) -> tuple[Fraction, ...] | None:
        """The query, if key i scores above all the others under it. Its own bias counts as it stands."""
        if query.shape != (len(self.lows),) or not np.isfinite(query).all():
            return None
        asked = tuple(Fraction(float(q)) for q in query)
        whole = [q * power_of_two(low - self.bias_low) for q, low in zip(asked, self.lows, strict=True)]
        below = max([1, *(q.denominator for q in whole)])  # powers of two
        row = [int(q * below) for q in whole] + ([below] if self.biased else [])
        product, error = self.products(steps, lifts, [*row, 0], np.zeros(len(others)), 0)
        if (product > error).any():
            return None
        own, own_lift = self.measured(i)
        top = _dot(row, [*own, own_lift])
        for j in others[product >= -error]:
            plain, lift = self.measured(int(j))
            if _dot(row, [*plain, lift]) >= top:
                return None
        return asked

    def _guess(self, key: _Key) -> tuple[list[int], list[Fraction], Floats | None]:
        """Support and weights by nonnegative least squares in float64, and the query that is left over."""
        columns = key.unit / np.where(key.length > 0.0, key.length, 1.0)[:, None]
        table = np.vstack([columns.T, np.ones(len(columns))])
        try:
            weights, _ = nnls(table, np.append(np.zeros(columns.shape[1]), 1.0))
        except RuntimeError:  # it gave up
            return [], [], None
        kept = np.argsort(-weights)[: np.count_nonzero(weights)]
        sizes = [Fraction(float(weights[k])) / power_of_two(int(key.last[k])) for k in kept]
        left = [float(v) for v in -(columns.T @ weights)]
        query = self._query(key, [Fraction(v) for v in left])
        direction = None if query is None else np.array([as_float(q) for q in query])
        return [int(k) for k in kept], sizes, direction

    def _exactly(
        self, key: _Key, kept: list[int], weights: list[Fraction] | None, copies: list[int], end: float
    ) -> ExactVerdict | None:
        """Nonnegative least squares on whole numbers from a support; None if it has no weights to start from."""
        chosen = independent([self._column(key, k) for k in kept])
        kept = [kept[t] for t in chosen]
        now = None if weights is None else {k: weights[t] for k, t in zip(kept, chosen, strict=True)}
        steps = 0
        while True:
            if perf_counter() > end:
                raise TimeoutError(f"key {key.i} was not decided in the time it was given, after {steps} supports")
            steps += 1
            value, below = self._least_squares(key, kept)
            if any(v <= 0 for v in value):
                if now is None:
                    return None
                goal = {k: Fraction(v, below) for k, v in zip(kept, value, strict=True)}
                part = min(now[k] / (now[k] - goal[k]) for k in kept if goal[k] <= 0)
                now = {k: now[k] + part * (goal[k] - now[k]) for k in kept}
                kept = [k for k in kept if now[k] > 0]
                continue
            columns = [self._column(key, k) for k in kept]
            left = [-sum(c[t] * v for c, v in zip(columns, value, strict=True)) for t in range(len(key.shifts) + 1)]
            left[-1] += below
            if not any(left):
                return self._inside(key, kept, value, steps)
            entering = self._entering(key, left)
            if entering is None:
                query = self._query(key, [Fraction(v) for v in left])
                assert query is not None
                return _vertex(copies, query, steps)
            now = {k: Fraction(v, below) for k, v in zip(kept, value, strict=True)}
            now[entering] = Fraction(0)
            kept = [*kept, entering]

    def _least_squares(self, key: _Key, kept: list[int]) -> tuple[list[int], int]:
        columns = [self._column(key, k) for k in kept]
        size = len(key.shifts) + 1
        if len(kept) == size:
            return solve([[c[t] for c in columns] for t in range(size)], [0] * (size - 1) + [1])
        gram = [[0] * len(kept) for _ in kept]
        for a, one in enumerate(columns):
            for b in range(a + 1):
                gram[a][b] = gram[b][a] = _dot(one, columns[b])
        return solve(gram, [c[-1] for c in columns])

    def _entering(self, key: _Key, left: list[int]) -> int | None:
        """The column with the largest positive product with `left`, over its length; None if there is none."""
        row = [v << s for v, s in zip(left[:-1], key.shifts, strict=True)] + [left[-1]]
        top = int(key.last.max())
        last = np.ldexp(1.0, key.last[: len(key.others)] - top)
        product, error = self.products(key.steps, key.lifts, row, last, top)
        length = key.length[: len(key.others)]
        share = np.where(product > error, product / np.where(length > 0.0, length, 1.0), 0.0)
        if share.max(initial=0.0) > 0.0:
            return int(np.argmax(share))
        if self.biased and left[-1] > left[-2]:
            return len(key.others)
        best, most = None, 0.0
        for k in np.flatnonzero(np.abs(product) <= error):
            column = self._column(key, int(k))
            value = _dot(left, column)
            if value > 0 and (size := float(Fraction(value, sum(map(abs, left))) / max(map(abs, column)))) >= most:
                best, most = int(k), size
        return best

    def _inside(self, key: _Key, kept: list[int], value: list[int], steps: int) -> ExactVerdict:
        pairs = sorted((int(key.others[k]), v) for k, v in zip(kept, value, strict=True) if k < len(key.others))
        total = sum(v for _, v in pairs)
        return ExactVerdict(
            "unselectable", tuple(j for j, _ in pairs), tuple(Fraction(v, total) for _, v in pairs), None, steps
        )

    def _query(self, key: _Key, left: list[Fraction]) -> tuple[Fraction, ...] | None:
        """The query over measured keys that the residual represents; None if the bias does not count."""
        unit, low = (left[len(key.shifts) - 1] * power_of_two(key.shifts[-1]), self.bias_low) if self.biased else (1, 0)
        if not unit > 0:
            return None
        return tuple(
            v * power_of_two(shift + low - own) / unit
            for v, shift, own in zip(left, key.shifts[: len(self.lows)], self.lows, strict=False)
        )


def _vertex(copies: list[int], query: tuple[Fraction, ...], steps: int) -> ExactVerdict:
    if copies:
        return ExactVerdict("duplicate", (copies[0],), (Fraction(1),), query, steps)
    return ExactVerdict("selectable", (), (), query, steps)


def proves(
    verdict: ExactVerdict, points: Any, bias: Any, i: int, *, axes: Any = None, center: Any = None, among: Any = None
) -> bool:
    """Whether a verdict's weights or query prove it, by arithmetic on fractions that shares nothing with its making."""
    keys = [[Fraction(float(v)) for v in row] for row in np.asarray(points)]
    lifts = [Fraction(0)] * len(keys) if bias is None else [Fraction(float(v)) for v in np.asarray(bias)]
    if center is not None:
        middle = [Fraction(float(v)) for v in np.asarray(center)]
        lifts = [b + _scalar(middle, key) for b, key in zip(lifts, keys, strict=True)]
    if axes is not None:
        across = [[Fraction(float(v)) for v in column] for column in np.asarray(axes).T]
        keys = [[_scalar(column, key) for column in across] for key in keys]
    biased = bias is not None or center is not None
    allowed = range(len(keys)) if among is None else [int(j) for j in among]
    others = [j for j in allowed if (keys[j], lifts[j]) != (keys[i], lifts[i])]
    if verdict.code == "unselectable":
        convex = (
            all(w >= 0 for w in verdict.weights) and sum(verdict.weights) == 1 and set(verdict.index) <= set(others)
        )
        pairs = list(zip(verdict.index, verdict.weights, strict=True))
        same = all(sum(w * keys[j][t] for j, w in pairs) == keys[i][t] for t in range(len(keys[i])))
        return convex and same and (not biased or sum(w * lifts[j] for j, w in pairs) >= lifts[i])
    query = list(verdict.query or ())
    gaps = [_scalar(query, keys[i]) - _scalar(query, keys[j]) + lifts[i] - lifts[j] for j in others]
    copies = [j for j in allowed if j != i and (keys[j], lifts[j]) == (keys[i], lifts[i])]
    named = set(verdict.index) <= set(copies) and sum(verdict.weights) == len(verdict.index) == bool(copies)
    return all(gap > 0 for gap in gaps) and named and verdict.code == ("duplicate" if copies else "selectable")


def _scalar(a: list[Fraction], b: list[Fraction]) -> Fraction:
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))


def _dot(a: list[int], b: list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=False))


def _exponents(values: Floats) -> NDArray[np.int64]:
    return np.frexp(values)[1].astype(np.int64)


def as_float(value: Fraction) -> float:
    """Rounded; infinite where it is too large."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
