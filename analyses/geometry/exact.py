"""Is a key a vertex of the hull of a set? Decided in exact rational arithmetic on the float64 numbers as they stand.

Key i is unselectable iff convex weights of the keys that are not exactly equal to it reproduce it (with a bias: and
their bias is at least its own): iff the equations

    Σ λ_j (z_j - z_i) = 0,   Σ λ_j (b_j - b_i) - s = 0,   Σ c_j λ_j + s = 1,   λ, s >= 0,   any c > 0

have a solution. If not, Farkas' lemma gives a query under which key i scores above all of them. What is returned is
always one of the two, exact: no tolerance, no "undecided".

Both come from one problem: nonnegative least squares for these equations (Lawson & Hanson 1974, ch. 23). If nothing is
left over, its solution is the weights; if something is, that is the query. The method is run in float64 first, and
then on whole numbers from where that ended, usually to find that nothing is left to do. In exact arithmetic it needs
no rule against cycling: what is left over becomes strictly less with every support, and there are finitely many.

Products of all keys with a query are first computed in float64 with a bound of their error; only where that bound
leaves a sign open are they computed in whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls  # type: ignore[import-untyped]

from ln_probe.analyses.geometry.rational import independent, solve
from ln_probe.analyses.geometry.whole_numbers import Floats, Ints, WholeSet, power_of_two


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
            seconds: to give up after, looked at between supports. By default it goes on to the end, which may take
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
        chosen, _ = independent([self._column(key, k) for k in kept])
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
        """The query over measured keys that what is left over stands for; None if the bias does not count."""
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


def decide_exactly(
    points: Any,
    bias: Any,
    i: int,
    *,
    axes: Any = None,
    center: Any = None,
    support: Any = None,
    query: Any = None,
    among: Any = None,
) -> ExactVerdict:
    """The exact verdict on key i of a set; to ask about several keys of a set, make an `ExactSet`.

    Args:
        points, bias, axes, center: as for `ExactSet`.
        i, support, query, among: as for `ExactSet.decide`.
    """
    return ExactSet(points, bias, axes=axes, center=center).decide(i, among=among, support=support, query=query)


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
