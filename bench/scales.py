"""Is the geometry of keys right at every scale? `python bench/scales.py [--keys N] [--seed N] [--out FILE]`.

Writes one table, `bench/results/scales.csv`, and prints it.

Keys of scales from the smallest float64 to 1e300, with biases and query sets of other scales, an offset of the
bias up to 1e15 times its spread, in float64 and strictly. Every set passes `certify()`; then every verdict is checked
in whole numbers, from the witness or the weights as the user gets them:

* selectable, duplicate: the witness scores the key strictly above every key that is not its copy;
* unselectable: the weights are convex weights of keys that differ, and miss the key by at most tau (strictly: by
  nothing); with `causal`, exact arithmetic does not find the key inside the keys before its position;
* `strict`: the verdict is that of exact arithmetic.

Columns: the scale of the keys; keys; how many have each verdict; how many witnesses and weights were checked; how many
keys are wrong (a verdict, a certificate or a position that exact arithmetic contradicts, or a set that `certify()`
refuses); positions that are proved from above only; keys that can be selected but have no witness in float64, as its
numbers would be too large or too small.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analyses"))

from geometry_families import FAMILIES, Case, aligned
from harness import write_table

import ln_probe
from ln_probe.analyses.geometry.checker import CertificateError
from ln_probe.analyses.geometry.exact import ExactSet

TABLE = Path(__file__).parent / "results" / "scales.csv"
SHAPES = [name for name in FAMILIES if "bias" not in name and "quer" not in name]
DECADES = 50  # of one row
SMALLEST, LARGEST = -323.3, 300.0  # decades of scales
# What float64 may add to a residual that was compared with tau, and how exactly copies are compared (`certificates`).
SLACK, NEAR = Fraction(1, 1000), Fraction(1, 10**6)
NAMES = ("selectable", "unselectable", "duplicate", "undecided")
COLUMNS = ("scale of the keys", "keys", *NAMES, "certificates checked", "wrong", "open positions", "no float64 witness")

Whole = Any  # object arrays of Python's integers


@dataclass(frozen=True)
class Drawn:
    """A set to try: its arguments, the decade of its scale, and whether no axis reaches the last coordinate."""

    case: Case
    decade: float
    strict: bool
    causal: bool
    beyond: bool


def draw(rng: np.random.Generator) -> Drawn:
    """A set of keys at some scale, with a bias and a query set or not."""
    n, d = int(rng.integers(10, 41)), int(rng.integers(1, 6))
    keys = FAMILIES[SHAPES[rng.integers(len(SHAPES))]](rng, n, d).keys
    if rng.random() < 0.15:  # norms over 16 decades
        keys = keys * 10.0 ** rng.uniform(-8, 8, (len(keys), 1))
    n, d = keys.shape
    decade = rng.uniform(SMALLEST, LARGEST)
    keys = shifted(keys / np.abs(keys).max(), decade)
    bias = None
    if rng.random() < 0.4:
        bias = rng.standard_normal(n) if rng.random() < 0.7 else rng.integers(-2, 3, n).astype(float)
        if rng.random() < 0.5:
            bias = bias + 10.0 ** rng.uniform(0, 15)
        bias = shifted(bias / np.abs(bias).max(), rng.uniform(SMALLEST, LARGEST)) if bias.any() else bias
    queries, beyond = None, False
    if rng.random() < 0.3:
        # Scores between 1e-300 and 1e140 nats, by queries between 1e-290 (smaller ones lose their span) and 1e149.
        size = float(np.clip(rng.uniform(-300.0, 140.0) - decade, -290.0, 149.0))
        axes, center = rng.standard_normal((d, d + int(rng.integers(0, 3)))), rng.standard_normal(d)
        beyond = d > 1 and rng.random() < 0.3
        if beyond:
            axes[-1] = 0.0
        most = max(np.abs(axes).max(), np.abs(center).max())
        queries = shifted(center / most, size) * (rng.random() < 0.7), shifted(axes / most, size)
    strict = rng.random() < 0.1
    return Drawn(Case(keys, bias, queries), decade, strict, rng.random() < 0.3, beyond)


def shifted(values: np.ndarray, decade: float) -> np.ndarray:
    """Values of at most 1 times `10**decade`, in two steps where one factor is beyond float64."""
    half = decade / 2.0
    return values * 10.0**half * 10.0 ** (decade - half)


def whole(values: np.ndarray) -> tuple[Whole, int]:
    """Whole numbers, and the exponent of the power of two that they multiply."""
    fraction, exponent = np.frexp(values)
    lowest = int(exponent[values != 0.0].min(initial=0)) - 53
    small = np.ldexp(fraction, 53).astype(np.int64).astype(object)
    shift = np.where(values != 0.0, exponent - 53 - lowest, 0).astype(object)
    return small << shift, lowest


class Judge:
    """One set in whole numbers."""

    def __init__(self, drawn: Drawn) -> None:
        case = drawn.case
        self.drawn, self.number = drawn, len(case.keys)
        self.keys, self.keys_low = whole(case.keys)
        self.bias, self.bias_low = (None, 0) if case.bias is None else whole(case.bias)
        # Keys are judged in their own coordinates, less the one that no axis reaches; there the center is a bias.
        span, beyond = None, None
        if drawn.beyond and case.query_set is not None:
            span = np.eye(case.keys.shape[1])[:, :-1]
            beyond = np.append(np.zeros(span.shape[1]), case.query_set[0][-1])
        self.exact = ExactSet(case.keys, case.bias, axes=span, center=beyond)
        self.z, self.h, *_ = aligned(self.exact)
        self.z2, self.h2 = spread(self.z), spread(self.h[:, None])
        self.apart = self.distances()

    def distances(self) -> Whole:
        """Squared distances of all keys, times a positive number (`self.tau2` is tau² times the same)."""
        square = squares(self.z)
        tau2 = Fraction(1e-7) ** 2
        if self.h2 == 0:
            self.tau2 = tau2 * self.z2
            return square * (self.number**2 if self.z2 else 0)
        both = squares(self.h[:, None]) * (self.z2 or 1) + square * self.h2 * bool(self.z2)
        self.tau2 = tau2 * (self.z2 or 1) * self.h2
        return both * self.number**2

    def wrong(self, geometry: Any) -> list[str]:
        """What exact arithmetic contradicts."""
        code = geometry.verdict
        found = []
        up = [int(i) for i in np.flatnonzero(np.isin(code, ("selectable", "duplicate")))]
        queries = {i: geometry._found[0].witness(i) for i in up}
        self.silent = [i for i in up if queries[i] is None]
        self.checked = self.number - len(self.silent) - int((code == "undecided").sum())
        if have := [i for i in up if queries[i] is not None]:
            found += self.not_selected(geometry, have, np.stack([queries[i] for i in have]))
        for i in np.flatnonzero(code == "unselectable"):
            found += self.not_reproduced(geometry, int(i))
        for i in range(self.number):
            copies = int((self.apart[i] <= self.tau2 * (1 + NEAR) ** 2).sum()) - 1
            surely = int((self.apart[i] <= self.tau2 * (1 - NEAR) ** 2).sum()) - 1
            if geometry.strict:
                copies = surely = len(self.exact.copies(i))
            if (code[i] == "duplicate" and not copies) or (code[i] == "selectable" and surely):
                found.append(f"key {i} is {code[i]}, with {copies} copies")
        if geometry.strict:
            for i in range(self.number):
                truth = self.exact.decide(i).code
                if code[i] != truth:
                    found.append(f"key {i} is {code[i]}, in exact arithmetic {truth}")
        for i in self.silent:  # no query to look at: is there one?
            if self.exact.decide(i, among=self.rivals(geometry, i)).code == "unselectable":
                found.append(f"key {i} is {code[i]}, but inside")
        return found

    def rivals(self, geometry: Any, i: int) -> np.ndarray:
        """The keys that differ from key i."""
        if geometry.strict:
            return np.setdiff1d(np.arange(self.number), [i, *self.exact.copies(i)])
        return np.flatnonzero(self.apart[i] > self.tau2 * (1 + NEAR) ** 2)

    def not_selected(self, geometry: Any, keys: list[int], queries: np.ndarray) -> list[str]:
        """Keys that their witness does not score above all that differ."""
        asked, low = whole(queries)
        scores = self.keys @ asked.T
        if self.bias is not None:
            shift = self.bias_low - low - self.keys_low
            scores = scores * 2 ** max(-shift, 0) + self.bias[:, None] * 2 ** max(shift, 0)
        found = []
        for k, i in enumerate(keys):
            lead = scores[i, k] - scores[:, k]
            if (np.delete(lead, i) > 0).all():
                continue
            if not (lead[self.rivals(geometry, i)] > 0).all():
                found.append(f"the witness of key {i} ({geometry.verdict[i]}) does not select it")
        return found

    def not_reproduced(self, geometry: Any, i: int) -> list[str]:
        """What is wrong with the weights of key i, or with its position."""
        weights = geometry.weights(i)
        used = np.flatnonzero(weights)
        share, _ = whole(weights[used])
        total = int(share.sum())
        found = []
        if (weights < 0).any() or abs(weights.sum() - 1.0) > 1e-12 or i in used:
            found.append(f"the weights of key {i} are not convex weights of others")
        if not geometry.strict and not (self.apart[i][used] > self.tau2 * (1 - NEAR) ** 2).all():
            found.append(f"the weights of key {i} are on its copies")
        miss = share @ (self.z[used] - self.z[i])
        below = min(int(share @ (self.h[used] - self.h[i])), 0)
        square = sum(int(v) ** 2 for v in miss) * (self.h2 or 1) * bool(self.z2) + below**2 * (self.z2 or 1)
        most = self.tau2 * (1 + SLACK) ** 2 * total**2
        if square * self.number**2 > most:
            found.append(f"the weights of key {i} miss it")
        if geometry.strict:
            exact = geometry.weights(i, exact=True)
            if sum(exact) != 1 or min(exact) < 0 or exact[i] != 0:
                found.append(f"the exact weights of key {i} are not convex weights of others")
            mean = [sum(w * v for w, v in zip(exact, column, strict=True)) for column in self.z.T.tolist()]
            if mean != list(self.z[i]) or sum(w * v for w, v in zip(exact, self.h.tolist(), strict=True)) < self.h[i]:
                found.append(f"the exact weights of key {i} do not reproduce it")
        if geometry.first_unselectable_at is not None:
            at = int(geometry.first_unselectable_at[i])
            before = self.rivals(geometry, i)
            before = before[before < at]
            if at < max(i, int(used.max())):
                found.append(f"the weights of key {i} are on keys after {at}")
            if at > i and len(before) and self.exact.decide(i, among=before).code == "unselectable":
                found.append(f"key {i} is inside before {at}")
        return found


def spread(rows: Whole) -> int:
    """The mean squared distance from the mean, times the number of rows squared."""
    return int(len(rows) * (rows * rows).sum() - (rows.sum(axis=0) ** 2).sum())


def squares(rows: Whole) -> Whole:
    """Squared distances of all rows."""
    own = (rows * rows).sum(axis=1)
    return own[:, None] + own[None] - 2 * (rows @ rows.T)


def main(
    keys: Annotated[int, typer.Option(help="how many keys to try")] = 200_000,
    seed: Annotated[int, typer.Option(help="of the first set; each has its own")] = 0,
    out: Annotated[Path, typer.Option(help="the table to write")] = TABLE,
) -> None:
    counts: dict[int, Counter[str]] = {}
    said: list[str] = []
    tried, sets, start = 0, 0, time.process_time()
    while tried < keys:
        drawn = draw(np.random.default_rng([17, seed + sets]))
        row = counts.setdefault(int(np.floor(drawn.decade / DECADES)), Counter())
        judge = Judge(drawn)
        geometry = ln_probe.key_geometry(**drawn.case.arguments(), causal=drawn.causal, strict=drawn.strict, threads=1)
        wrong = judge.wrong(geometry)
        try:
            geometry.certify()
        except CertificateError as error:
            wrong.append(f"certify() refuses: {error}")
        row.update(geometry.verdict.tolist())
        row.update(keys=judge.number, checked=judge.checked, wrong=len(wrong), silent=len(judge.silent))
        row.update(open=geometry.open_positions)
        said += [f"seed {seed + sets}: {text}" for text in wrong]
        tried, sets = tried + judge.number, sets + 1
    table: list[tuple[str, ...]] = [COLUMNS]
    for band, row in [*sorted(counts.items()), (None, sum(counts.values(), Counter()))]:
        name = "all" if band is None else f"1e{max(band * DECADES, -324)} to 1e{(band + 1) * DECADES}"
        cells = [row[key] for key in ("keys", *NAMES, "checked", "wrong", "open", "silent")]
        table.append((name, *map(str, cells)))
    write_table(out, table)
    for cells in table:
        print(" ".join(cell.rjust(len(head)) for cell, head in zip(cells, COLUMNS, strict=True)))
    print(f"{sets} sets, {time.process_time() - start:.0f} s of a processor")
    for text in said[:20]:
        print(text)


if __name__ == "__main__":
    typer.run(main)
