"""What is true of a set of keys, in exact arithmetic, and what a `KeyGeometry` gets wrong about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import clarabel
import numpy as np
from geometry_families import Case, aligned
from scipy import sparse

from ln_probe.analyses.geometry.exact import ExactSet

# What float64 may add to a residual or take from a gap that was compared with tau: the share of tau that
# certificates.py allows for it. Which keys are within tau of each other is left open within NEAR of it.
SLACK = Fraction(1, 1000)
NEAR = Fraction(1, 10**6)


def fractions(values: Any) -> np.ndarray:
    """An object array of the exact values."""
    given = np.asarray(values, np.float64)
    return np.array([Fraction(float(v)) for v in given.ravel()], object).reshape(given.shape)


def root(value: Fraction, up: bool) -> Fraction:
    """The square root rounded to 100 binary digits, up or down."""
    shift = max(200 - value.numerator.bit_length() + value.denominator.bit_length(), 0)
    shift += shift % 2
    whole = (value.numerator << shift) // value.denominator
    found = math.isqrt(whole)
    return Fraction(found + 1 if up else found, 1 << shift // 2)


@dataclass
class Report:
    """What was found wrong with the geometry of one set or of many."""

    keys: int = 0
    undecided: int = 0
    wrong: list[str] = field(default_factory=list)  # verdicts
    unproved: list[str] = field(default_factory=list)  # verdicts with a witness or weights that do not prove them
    bounds: list[str] = field(default_factory=list)  # margins outside their bracket

    def add(self, other: Report, name: str = "") -> None:
        self.keys += other.keys
        self.undecided += other.undecided
        for mine, theirs in ((self.wrong, other.wrong), (self.unproved, other.unproved), (self.bounds, other.bounds)):
            mine += [f"{name}: {text}" for text in theirs]

    def __str__(self) -> str:
        said = [f"{self.keys} keys, {self.undecided} undecided"]
        for name in ("wrong", "unproved", "bounds"):
            found = getattr(self, name)
            said.append(f"{len(found)} {name}: {found[:5]}" if found else f"0 {name}")
        return "; ".join(said)


class Truth:
    """A set of keys in whole numbers.

    Margins: `z` as the queries see the keys, in units of `scale`, and `h` (bias and center) in `h_scale`. Verdicts:
    `points`, the keys themselves, in units of `point_scale`, and their bias `b` in `b_scale`.
    """

    def __init__(self, case: Case) -> None:
        center, axes = case.query_set or (None, None)
        self.case = case
        self.exact = ExactSet(case.keys, case.bias, axes=axes, center=center)
        self.z, self.h, self.scale, self.h_scale = aligned(self.exact)
        # Verdicts are about the keys. Axes of full rank change none. Where some lack directions, verdicts are known for
        # axes along coordinates: the keys are judged without the others, in which the center gives a bias per key.
        self.kept, bias, self.knows_verdicts = np.ones(case.keys.shape[1], bool), case.bias, True
        if axes is not None and np.linalg.matrix_rank(axes) < len(axes):
            self.kept, self.knows_verdicts = axes.any(axis=1), bool((np.count_nonzero(axes, axis=0) == 1).all())
            bias = case.keys[:, ~self.kept] @ center[~self.kept] + (0.0 if bias is None else bias)
        self.verdicts = ExactSet(case.keys[:, self.kept], bias)
        self.points, self.b, self.point_scale, self.b_scale = aligned(self.verdicts)
        self.z2 = self._square(self.z)  # R², in units of scale²
        self.p2 = self._square(self.points)
        self.b2 = self._square(self.b[:, None])

    @staticmethod
    def _square(rows: np.ndarray) -> Fraction:
        n = len(rows)
        return Fraction(int(n * (rows * rows).sum() - (rows.sum(axis=0) ** 2).sum()), n * n)

    def distances(self, i: int) -> np.ndarray:
        """Squared distances of all keys from key i over R² (and of the bias over its RMS²)."""
        steps = self.points - self.points[i]
        found = np.array([Fraction(int(v)) for v in (steps * steps).sum(axis=1)], object)
        found = found / self.p2 if self.p2 else found
        if self.b2:
            found = found + np.array([Fraction(int(v)) for v in (self.b - self.b[i]) ** 2], object) / self.b2
        return found

    def judge(self, geometry: Any, only: Any = None) -> Report:
        """Every verdict (or those of some keys), witness, weights and representative against exact arithmetic."""
        assert self.knows_verdicts, "verdicts of axes that lack directions are known along coordinates only"
        report, tau = Report(), Fraction(float(geometry.tau))
        for i in range(len(self.z)) if only is None else only:
            code, near = str(geometry.verdict[i]), self.distances(i)
            rivals = np.flatnonzero(near > (tau * (1 + NEAR)) ** 2)
            maybe = np.flatnonzero(near > (tau * (1 - NEAR)) ** 2)
            report.keys += 1
            self._representative(report, geometry, i, near, tau)
            if code == "undecided":
                report.undecided += 1
            elif code == "unselectable":
                self._inside(report, geometry, i, set(maybe.tolist()), tau)
            else:
                alone = len(maybe) == len(near) - 1
                surely = len(rivals) == len(near) - 1
                if (code == "duplicate" and surely) or (code == "selectable" and not alone):
                    report.wrong.append(f"key {i} is {code}, with {len(near) - 1 - len(rivals)} keys within tau of it")
                self._outside(report, geometry, i, code, rivals, tau)
        return report

    def _representative(self, report: Report, geometry: Any, i: int, near: np.ndarray, tau: Fraction) -> None:
        j = int(geometry.representative[i])
        sooner = np.flatnonzero(near[:j] < (tau * (1 - NEAR)) ** 2)
        if near[j] > (tau * (1 + NEAR)) ** 2 or len(sooner):
            report.wrong.append(f"representative of key {i} is {j}")

    def _outside(self, report: Report, geometry: Any, i: int, code: str, rivals: np.ndarray, tau: Fraction) -> None:
        query = None
        if len(rivals):
            query = geometry.witness(i)[self.kept]
            least, length2 = self._least_gap(i, rivals, fractions(query))
            if not (least > 0 and least**2 > (tau * (1 - SLACK)) ** 2 * length2):
                report.unproved.append(f"the witness of key {i} ({code})")
        if len(rivals) and self.verdicts.decide(i, among=rivals, query=query).code == "unselectable":
            report.wrong.append(f"key {i} is {code}, but in the hull of its rivals")

    def _inside(self, report: Report, geometry: Any, i: int, rivals: set[int], tau: Fraction) -> None:
        weights = fractions(geometry.weights(i))
        used = np.flatnonzero(weights != 0)
        total = sum(weights[used])
        convex = len(used) and (weights >= 0).all() and abs(total - 1) < Fraction(1, 10**9) and set(used) <= rivals
        if convex:
            weights = weights[used] / total
            miss = (weights[:, None] * (self.points[used] - self.points[i])).sum(axis=0)
            miss2 = (miss * miss).sum() / (self.p2 or 1)
            below = min((weights * (self.b[used] - self.b[i])).sum(), 0)
            miss2 += below**2 / (self.b2 or 1)
            if miss2 <= (tau * (1 + SLACK)) ** 2:
                return
        report.unproved.append(f"the weights of key {i}")
        verdict = self.verdicts.decide(i, among=sorted(rivals))
        if verdict.query is None:
            return
        query = np.array(verdict.query, object) * Fraction(1)
        # The query is over coordinates as measured; of the exact gap and its length, a lower bound of the distance.
        least, length2 = self._least_gap(i, sorted(rivals), query)
        if least**2 > tau**2 * length2:
            report.wrong.append(f"key {i} is unselectable, but further than tau from the hull of its rivals")

    def _least_gap(self, i: int, rivals: Any, query: np.ndarray) -> tuple[Fraction, Fraction]:
        """By how much key i scores above its rivals at a query, and the squared length that this is relative to."""
        gaps = ((self.points[i] - self.points[rivals]) * query).sum(axis=1) * self.point_scale
        length2 = (query * query).sum() * self.p2 * self.point_scale**2
        if self.verdicts.biased:
            gaps = gaps + (self.b[i] - self.b[rivals]) * self.b_scale
            length2 += self.b2 * self.b_scale**2
        return min(gaps), length2

    # Margins.

    def margin(self, i: int) -> tuple[Fraction, Fraction]:
        """A certified bracket of the margin of key i, by an independent cone program (Clarabel).

        Its primal query proves the lower bound, its dual weights the upper one, both evaluated exactly.
        """
        others = np.delete(np.arange(len(self.z)), i)
        steps = [[v * self.scale for v in row] for row in (self.z[i] - self.z[others])]
        lifts = [v * self.h_scale for v in (self.h[i] - self.h[others])]
        if self.case.query_set is None and self.case.bias is not None:
            raise ValueError("margins with a bias and without a query set have no unit here")
        best, weights = cone_program(np.array(steps, float), np.array(lifts, float))
        query = fractions(best)
        length2 = (query * query).sum()
        if length2 > 1:
            query = query / root(length2, up=True)
        steps_exact = np.array(steps, object)
        lower = min((steps_exact * query).sum(axis=1) + np.array(lifts, object))
        mixed = fractions(np.maximum(weights, 0.0))
        mixed = mixed / mixed.sum()
        mean = (mixed[:, None] * steps_exact).sum(axis=0)
        upper = (mixed * np.array(lifts, object)).sum() + root(Fraction((mean * mean).sum()), up=True)
        if self.case.query_set is None:
            # The zero query gives a gap of 0, and so may the best one.
            lower, size = max(lower, Fraction(0)), self.z2 * self.scale**2
            return lower / root(size, up=True), upper / root(size, up=False)
        return lower, upper

    def judge_margins(self, geometry: Any, keys: Any) -> tuple[Report, float]:
        """The margins of some keys, and the widest bracket of the reference, over the diameter of what is measured."""
        report, widest = Report(), 0.0
        size = max(float(abs(v) * self.scale) for v in (self.z - self.z[0]).ravel())
        size = max(size, max(float(abs(v) * self.h_scale) for v in self.h - self.h[0]))
        size = size if self.case.query_set is not None else size / float(root(self.z2 * self.scale**2, up=True))
        for i in keys:
            lower, upper = self.margin(int(i))
            assert lower <= upper
            widest = max(widest, float(upper - lower) / size)
            report.keys += 1
            low, high = float(geometry.margin_lower[i]), float(geometry.margin_upper[i])
            below = low == -math.inf or Fraction(low) <= upper
            if not (low <= high and below and (high == math.inf or Fraction(high) >= lower)):
                report.bounds.append(
                    f"key {i}: [{low:.9g}, {high:.9g}], truth [{float(lower):.9g}, {float(upper):.9g}]"
                )
        return report, widest


def cone_program(steps: np.ndarray, lifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The query u, |u| <= 1, with the largest min_j (lifts_j + u · steps_j), and the weights of its dual.

    maximize t subject to lifts_j + u · steps_j - t >= 0 and (1, u) in the second-order cone.
    """
    # What no query of the set brings down to the others is left out: it would set the scale.
    length = np.linalg.norm(steps, axis=1)
    low = np.flatnonzero(lifts - length <= (lifts + length).min() + 1e-9 * np.abs(lifts).max())
    every, steps, lifts = len(lifts), steps[low], lifts[low] - lifts[low].mean()
    size = max(float(np.abs(steps).max(initial=0.0)), float(np.abs(lifts).max(initial=0.0)), 1e-300)
    steps, lifts = steps / size, lifts / size
    number, r = steps.shape
    rows = np.zeros((number + 1 + r, r + 1))
    rows[:number, :r], rows[:number, r] = -steps, 1.0
    rows[number + 1 :, :r] = -np.eye(r)
    right = np.concatenate([lifts, [1.0], np.zeros(r)])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    cones = [clarabel.NonnegativeConeT(number), clarabel.SecondOrderConeT(1 + r)]
    objective = np.append(np.zeros(r), -1.0)
    solver = clarabel.DefaultSolver(
        sparse.csc_matrix((r + 1, r + 1)), objective, sparse.csc_matrix(rows), right, cones, settings
    )
    solved = solver.solve()
    weights = np.zeros(every)
    weights[low] = np.array(solved.z)[:number]
    return np.array(solved.x)[:r], weights
