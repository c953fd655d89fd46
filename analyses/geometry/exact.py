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
leaves a sign open are they computed in whole numbers. Equations are solved by python-flint where it is installed, else
by elimination.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
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
# Half an ulp of 1: the relative error of one float64 operation that neither over- nor underflows.
_HALF_ULP = 2.0**-53
# More than all that underflow can take from a sum of products whose factors are at most 1: a product loses less than
# 2^-1074, and there are fewer than 10^10 of them.
_UNDERFLOW = 1e-300

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Whole = NDArray[np.object_]  # of Python's whole numbers

try:
    flint: Any = import_module("flint")
except ImportError:
    flint = None


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
        solution, below = matrix.solve(flint.fmpz_mat(size, 1, right)).numer_denom()
        numerators, denominator = [int(solution[k, 0]) for k in range(size)], int(below)
    else:
        numerators, denominator = eliminate(rows, right)
    return (numerators, denominator) if denominator > 0 else ([-value for value in numerators], -denominator)


def eliminate(rows: list[list[int]], right: list[int]) -> tuple[list[int], int]:
    """As `solve`, by fraction-free elimination (Bareiss 1968): every division leaves no remainder."""
    table = [[*row, last] for row, last in zip(rows, right, strict=True)]
    size, before = len(table), 1
    for k in range(size):
        at = next((row for row in range(k, size) if table[row][k] != 0), None)
        if at is None:
            raise ZeroDivisionError(f"the system of {size} equations is singular")
        table[k], table[at] = table[at], table[k]
        head = table[k]
        pivot = head[k]
        for row in range(k + 1, size):
            first, rest = table[row][k], table[row][k + 1 :]
            shorter = [(pivot * a - first * b) // before for a, b in zip(rest, head[k + 1 :], strict=True)]
            table[row] = [0] * (k + 1) + shorter
        before = pivot
    solution = [0] * size  # over the determinant, `before`
    for k in reversed(range(size)):
        this = table[k]
        solution[k] = (this[size] * before - _dot(this[k + 1 : size], solution[k + 1 :])) // this[k]
    return solution, before


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
        table[left[1:]] = (table[left[1:]] - table[left[1:], k, None] * table[at]) % _PRIME
        if not free.any():
            break
    return kept


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
    unit: Floats  # their differences from it, of about unit spread in every coordinate; the slack of the bias last
    length: Floats  # of these
    most: int  # the exponent of the largest spread
    shifts: list[int]  # powers of two that give whole numbers the same spread
    last: Ints  # exponents of c_j
    columns: dict[int, list[int]] = field(default_factory=dict)  # by place among the others; the slack comes after


class ExactSet:
    """A set of keys, for exact verdicts on any of them.

    Args:
        points: float64, keys × d.
        bias: one number per key, or None.
        axes: d × r; keys are then measured as `axesᵀ k`, in exact products. None: as they are.
        center: of the queries; `center · k` is added to the bias. (Only its part outside the span of the axes
            matters.)
    """

    def __init__(self, points: Any, bias: Any = None, *, axes: Any = None, center: Any = None) -> None:
        number = len(points)
        center = None if center is None or not center.any() else center
        self.biased = bias is not None or center is not None
        # A column of whole numbers for each measured coordinate and the bias, and the unit that they multiply.
        plain = [_whole(column) for column in _fractions(points.T)]
        measured = plain if axes is None else [_combined(plain, column) for column in _fractions(axes.T)]
        if self.biased:
            lift = [(_fractions(bias[None])[0], Fraction(1))] if bias is not None else []
            slope = [_combined(plain, _fractions(center[None])[0])] if center is not None else []
            parts = [[unit * v for v in column] for column, unit in lift + slope]
            measured = [*measured, _whole([sum(values, Fraction(0)) for values in zip(*parts, strict=True)])]
        self.units = [unit for _, unit in measured]
        self.whole: Whole = np.array([column for column, _ in measured], object).reshape(len(measured), number).T
        # Less those of the first key, over powers of two that make them at most 1, for products in float64.
        self._near, self._bits = _scaled(self.whole - self.whole[0])

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
            TimeoutError: it gave up.
        """
        end = np.inf if seconds is None else perf_counter() + seconds
        others, copies = self._others(i, among)
        if len(others) == 0:
            return _vertex(copies, (Fraction(0),) * (len(self.units) - self.biased), 0)
        if query is not None and (won := self._wins(i, others, np.asarray(query, np.float64))) is not None:
            return _vertex(copies, won, 0)
        key = self._key(i, others)
        if support is not None:
            places = {int(j): k for k, j in enumerate(others)}
            kept = [places[int(j)] for j in dict.fromkeys(support) if int(j) in places]
            if (verdict := self._exactly(key, kept, None, copies, end)) is not None:
                return verdict
        kept, weights, direction = self._guess(key)
        if direction is not None and (won := self._wins(i, others, direction)) is not None:
            return _vertex(copies, won, 0)
        verdict = self._exactly(key, kept, weights, copies, end)
        assert verdict is not None  # with weights to start from it always ends
        return verdict

    def selects(self, i: int, query: Floats, among: Any = None) -> bool:
        """Whether key i scores above all others (or those `among`) that are not equal to it, under a finite query over
        the measured keys."""
        return self._wins(i, self._others(i, among)[0], query) is not None

    def copies(self, i: int) -> list[int]:
        """The other keys that are exactly equal to key i, as measured and in their bias."""
        return self._others(i, None)[1]

    def _others(self, i: int, among: Any) -> tuple[Ints, list[int]]:
        """The keys that key i competes with, and its copies among them."""
        competes = np.full(len(self.whole), among is None)
        if among is not None:
            competes[np.asarray(among, np.int64)] = True
        competes[i] = False
        maybe = np.flatnonzero(competes & (self._near == self._near[i]).all(axis=1))
        copies = [int(j) for j in maybe if (self.whole[j] == self.whole[i]).all()]
        competes[copies] = False
        return np.flatnonzero(competes), copies

    def _wins(self, i: int, others: Ints, query: Floats) -> tuple[Fraction, ...] | None:
        """The query, if key i scores above all the others under it. Its own bias counts as it stands."""
        if query.shape != (len(self.units) - self.biased,) or not np.isfinite(query).all():
            return None
        asked = tuple(Fraction(float(q)) for q in query)
        row, _ = _whole([q * unit for q, unit in zip((*asked, Fraction(1)), self.units, strict=False)])
        factor = _rounded([v << int(bits) for v, bits in zip(row, self._bits, strict=True)])
        score, size = self._near @ factor, np.abs(self._near) @ np.abs(factor)
        lead = score[i] - score[others]
        error = _error(len(factor), size[i] + size[others])
        if (lead < -error).any():
            return None
        top = _dot(row, self.whole[i])
        return asked if all(_dot(row, self.whole[j]) < top for j in others[lead <= error]) else None

    def _key(self, i: int, others: Ints) -> _Key:
        unit, bits = _scaled(self.whole[others] - self.whole[i])
        spread = _exponents(np.sqrt(np.mean(unit * unit, axis=0)))
        unit = np.ldexp(unit, -spread)
        spread += bits
        most = int(spread.max(initial=0))
        if self.biased:
            unit = np.vstack([unit, np.append(np.zeros(unit.shape[1] - 1), -1.0)])
        length = np.linalg.norm(unit, axis=1)
        last = np.maximum(_exponents(length) + most, 0)
        return _Key(i, others, unit, length, most, [most - int(v) for v in spread], last)

    def _column(self, key: _Key, k: int) -> list[int]:
        if k not in key.columns:
            last = 1 << int(key.last[k])
            if k == len(key.others):
                key.columns[k] = [0] * (len(key.shifts) - 1) + [-last, last]
            else:
                steps = self.whole[key.others[k]] - self.whole[key.i]
                key.columns[k] = [v << shift for v, shift in zip(steps, key.shifts, strict=True)] + [last]
        return key.columns[k]

    def _guess(self, key: _Key) -> tuple[list[int], list[Fraction], Floats | None]:
        """Support and weights by nonnegative least squares in float64, and the query that is left over."""
        columns = key.unit / np.where(key.length > 0.0, key.length, 1.0)[:, None]
        table = np.vstack([columns.T, np.ones(len(columns))])
        try:
            weights, _ = nnls(table, np.append(np.zeros(columns.shape[1]), 1.0))
        except RuntimeError:  # it gave up
            return [], [], None
        kept = np.argsort(-weights)[: np.count_nonzero(weights)]
        sizes = [Fraction(float(weights[k])) / (1 << int(key.last[k])) for k in kept]
        query = self._query(key, [Fraction(float(v)) for v in -(columns.T @ weights)])
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
                query = self._query(key, [Fraction(v) for v in left[:-1]])
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
        # A column is `unit` times 2^most, with 2^last below.
        most, scale, base = key.most, int(key.last.max()), max(-key.most, 0)
        factor = _rounded([v << (most + base) for v in left[:-1]] + [left[-1] << (scale + base)])
        table = np.column_stack([key.unit, np.ldexp(1.0, key.last - scale)])[: len(key.others)]
        product, size = table @ factor, np.abs(table) @ np.abs(factor)
        error = _error(len(factor), size)
        length = key.length[: len(key.others)]
        share = np.where(product > error, product / np.where(length > 0.0, length, 1.0), 0.0)
        if share.max(initial=0.0) > 0.0:
            return int(np.argmax(share))
        if self.biased and left[-1] > left[-2]:
            return len(key.others)
        best, largest = None, 0.0
        for k in np.flatnonzero(np.abs(product) <= error):
            column = self._column(key, int(k))
            value = _dot(left, column)
            if value > 0 and (part := value / (sum(map(abs, left)) * max(map(abs, column)))) >= largest:
                best, largest = int(k), part
        return best

    def _inside(self, key: _Key, kept: list[int], value: list[int], steps: int) -> ExactVerdict:
        pairs = sorted((int(key.others[k]), v) for k, v in zip(kept, value, strict=True) if k < len(key.others))
        total = sum(v for _, v in pairs)
        weights = tuple(Fraction(v, total) for _, v in pairs)
        return ExactVerdict("unselectable", tuple(j for j, _ in pairs), weights, None, steps)

    def _query(self, key: _Key, left: list[Fraction]) -> tuple[Fraction, ...] | None:
        """The query over measured keys that the residual represents; None if the bias does not count."""
        plain = [v * (1 << shift) / unit for v, shift, unit in zip(left, key.shifts, self.units, strict=True)]
        if not self.biased:
            return tuple(plain)
        return tuple(v / plain[-1] for v in plain[:-1]) if plain[-1] > 0 else None


def _vertex(copies: list[int], query: tuple[Fraction, ...], steps: int) -> ExactVerdict:
    if copies:
        return ExactVerdict("duplicate", (copies[0],), (Fraction(1),), query, steps)
    return ExactVerdict("selectable", (), (), query, steps)


def _fractions(rows: Floats) -> list[list[Fraction]]:
    return [[Fraction(v) for v in row] for row in rows.tolist()]


def _whole(values: list[Fraction]) -> tuple[list[int], Fraction]:
    """Whole numbers, and the unit that they multiply."""
    below = math.lcm(*(v.denominator for v in values))
    whole = [v.numerator * (below // v.denominator) for v in values]
    common = math.gcd(*whole) or 1
    return [v // common for v in whole], Fraction(common, below)


def _combined(columns: list[tuple[list[int], Fraction]], coefficients: list[Fraction]) -> tuple[list[int], Fraction]:
    """A linear combination of columns, as whole numbers and their unit."""
    factors, unit = _whole([c * own for c, (_, own) in zip(coefficients, columns, strict=True)])
    return [_dot(factors, row) for row in zip(*(column for column, _ in columns), strict=True)], unit


def _scaled(columns: Whole) -> tuple[Floats, Ints]:
    """Columns of whole numbers over powers of two that make them at most 1, and the exponents of these."""
    bits = [int(v).bit_length() for v in abs(columns).max(axis=0)]
    tops = np.array([1 << b for b in bits], object)
    return (columns / tops).astype(np.float64), np.array(bits, np.int64)


def _rounded(values: list[int]) -> Floats:
    """Whole numbers over a power of two that makes them at most 1."""
    return _scaled(np.array(values, object)[:, None])[0][:, 0]


def _error(terms: int, size: Floats) -> Floats:
    """What sums of products are off by at most, in any order, from the sum of their magnitudes.

    One error for each factor, difference, product and sum; 8 to spare.
    """
    return np.asarray((terms + 8) * 1.01 * _HALF_ULP * size + _UNDERFLOW)


def _dot(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(map(operator.mul, a, b))


def _exponents(values: Floats) -> Ints:
    return np.frexp(values)[1].astype(np.int64)


def as_float(value: Fraction) -> float:
    """Rounded; infinite where it is too large."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


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
