"""Check the certificates of a `KeyGeometry` in exact arithmetic, on the keys as they were given.

Every float64 is a whole number times a power of two, so scores, score gaps and convex combinations are computed in
Python's whole numbers without any rounding. What is checked of key i, with R the RMS norm of the centred keys (a bias
is one more coordinate, over its own RMS):

* selectable: under `witness(i)` it scores above every other key, and no other key is within tau of it;
* duplicate: the same for all keys further than tau from it, of which there is not the whole rest;
* unselectable: `weights(i)` are convex, on keys further than tau from it, and their mean is within tau·R of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

SLACK = Fraction(1, 1000)  # the share of tau that float64 may add to a residual or take from a gap compared with it
NEAR = Fraction(1, 10**5)  # which keys are within tau of each other is left open this near to it


def whole(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Floats as whole numbers (an object array) times two to the power of the returned exponent."""
    mantissa, exponent = np.frexp(np.asarray(values, np.float64))
    numbers = np.ldexp(mantissa, 53).astype(np.int64).astype(object)
    used = exponent[mantissa != 0.0]
    least = int(used.min(initial=0)) if used.size else 0
    shift = np.where(mantissa != 0.0, exponent - least, 0).astype(object)
    return numbers * 2**shift, least - 53


@dataclass
class Report:
    """What was found wrong with the certificates of one set or of many."""

    keys: int = 0
    undecided: int = 0
    wrong: list[str] = field(default_factory=list)
    verdicts: dict[str, int] = field(default_factory=dict)

    def add(self, other: Report, name: str = "") -> None:
        """Add the counts and errors of another report."""
        self.keys += other.keys
        self.undecided += other.undecided
        self.wrong += [f"{name}: {text}" for text in other.wrong]
        for verdict, count in other.verdicts.items():
            self.verdicts[verdict] = self.verdicts.get(verdict, 0) + count

    def __str__(self) -> str:
        return f"{self.keys} keys {self.verdicts}, {len(self.wrong)} wrong: {self.wrong[:5]}"


class RationalChecker:
    """One set of keys in whole numbers.

    Args:
        keys: "key d", as given to `key_geometry`.
        bias: as given, if one was.
        coordinates: the coordinates that the set of queries spans; None: all of them. The center adds nothing in the
            others unless it is part of `bias`.
    """

    def __init__(self, keys: np.ndarray, bias: np.ndarray | None = None, coordinates: np.ndarray | None = None) -> None:
        self.coordinates = np.arange(keys.shape[1]) if coordinates is None else coordinates
        self.points, self.unit = whole(np.asarray(keys, np.float64)[:, self.coordinates])
        self.size2 = self._spread(self.points)
        self.bias, self.bias_unit = (None, 0) if bias is None else whole(bias)
        self.bias_size2 = Fraction(0) if self.bias is None else self._spread(self.bias[:, None])
        if not self.bias_size2:
            self.bias = None

    @staticmethod
    def _spread(rows: np.ndarray) -> Fraction:
        """The mean squared distance from the mean."""
        n = len(rows)
        return Fraction(int(n * (rows * rows).sum() - (rows.sum(axis=0) ** 2).sum()), n * n)

    def distances2(self, i: int) -> list[Fraction]:
        """Squared relative distances of all keys from key i."""
        steps = self.points - self.points[i]
        square = [Fraction(int(v)) / (self.size2 or 1) for v in (steps * steps).sum(axis=1)]
        if self.bias is not None:
            lifts = (self.bias - self.bias[i]) ** 2
            square = [s + Fraction(int(b)) / self.bias_size2 for s, b in zip(square, lifts, strict=True)]
        return square

    def check(self, geometry: Any, index: tuple[int, ...] = ()) -> Report:
        """Check every key of the set, which is set `index` of a batch."""
        report, tau = Report(), Fraction(float(geometry.tau))
        near = tau * (1 + NEAR)
        # Only keys that float64 finds close need their distance in whole numbers.
        rows = self.points.astype(float) / float(self.size2 or 1) ** 0.5
        if self.bias is not None:
            rows = np.column_stack([rows, self.bias.astype(float) / float(self.bias_size2) ** 0.5])
        rows = rows - rows.mean(axis=0)
        for i in range(len(self.points)):
            verdict = str(geometry.verdict[(*index, i)])
            report.keys += 1
            report.verdicts[verdict] = report.verdicts.get(verdict, 0) + 1
            close = np.linalg.norm(rows - rows[i], axis=1) <= 0.01
            exact = self.distances2(i) if close.sum() > 1 else [Fraction(int(j != i)) for j in range(len(rows))]
            surely = [j for j in range(len(rows)) if j != i and exact[j] <= (tau * (1 - NEAR)) ** 2]
            maybe = [j for j in range(len(rows)) if j != i and exact[j] <= near**2]
            if verdict == "undecided":
                report.undecided += 1
            elif verdict == "unselectable":
                if (text := self._inside(i, geometry.weights(*index, i), set(surely), tau)) is not None:
                    report.wrong.append(f"key {i} is unselectable, but {text}")
            else:
                if (verdict == "selectable" and surely) or (verdict == "duplicate" and not maybe):
                    report.wrong.append(f"key {i} is {verdict} with {len(surely)} to {len(maybe)} copies")
                if (text := self._outside(i, geometry.witness(*index, i), set(maybe))) is not None:
                    report.wrong.append(f"key {i} is {verdict}, but {text}")
        return report

    def _outside(self, i: int, witness: np.ndarray, copies: set[int]) -> str | None:
        """What is wrong with a query that should select key i."""
        query, unit = whole(witness[self.coordinates])
        scores = self.points @ query
        gaps = [int(gap) for gap in scores[i] - scores]
        if self.bias is not None:
            shift = self.bias_unit - self.unit - unit
            up, down = 2 ** max(shift, 0), 2 ** max(-shift, 0)
            gaps = [down * g + up * int(b) for g, b in zip(gaps, self.bias[i] - self.bias, strict=True)]
        beaten_by = [j for j in range(len(gaps)) if j != i and j not in copies and not gaps[j] > 0]
        return f"its witness does not put it above {beaten_by[:3]}" if beaten_by else None

    def _inside(self, i: int, weights: np.ndarray, copies: set[int], tau: Fraction) -> str | None:
        """What is wrong with convex weights that should reproduce key i."""
        used = np.flatnonzero(weights)
        share, _ = whole(weights[used])
        total = int(share.sum()) if len(used) else 0
        if total <= 0 or (share < 0).any() or i in used or copies & set(used.tolist()):
            return "its weights are not convex weights of other keys"
        if abs(float(weights.sum()) - 1.0) > 1e-9:
            return f"its weights sum to {weights.sum()}"
        miss = share @ (self.points[used] - self.points[i])
        square = Fraction(int((miss * miss).sum()), total * total) / (self.size2 or 1)
        if self.bias is not None:
            below = min(int(share @ (self.bias[used] - self.bias[i])), 0)
            square += Fraction(below * below, total * total) / self.bias_size2
        if square > (tau * (1 + SLACK)) ** 2:
            return f"its weights miss it by {float(square) ** 0.5:.3g}"
        return None
