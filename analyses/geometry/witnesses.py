"""What a user gets about a set of keys: witnesses, weights, exact verdicts, and the check of everything given out.

Solvers work on normalized points in their own units. Brought back to the given keys a query is rounded, and where a key
wins by little, or units differ by hundreds of decades, no float64 query may be left that selects it. So every query is
checked as it is given out (`_selects`): in float64 with a bound of the error, and in whole numbers where that leaves a
sign open.

`SetGeometry.certify` checks everything again. Proving gives the doubt of rounding to the other side; `certify` gives it
to the claim: it raises only where a claim is false for any rounding, so a true one never raises.

`decide_strictly` decides where the tolerance would. A key that was proved to win by more than tau against every other
is a vertex in exact arithmetic too. All others (unselectable, copies within tau, undecided) are decided again, on the
given numbers as fractions, starting from what was found in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ln_probe.analyses.geometry.checker import SLACK, CertificateError, Checker, Rows
from ln_probe.analyses.geometry.coordinates import TAU, Floats, Ints, KeyCoordinates, unit_rows
from ln_probe.analyses.geometry.decide import DUPLICATE, NAMES, SELECTABLE, UNDECIDED, UNSELECTABLE
from ln_probe.analyses.geometry.exact import ExactVerdict, as_float, proves
from ln_probe.analyses.geometry.inputs import AMPLE, EPS, UNDERFLOW, GivenSet, blocks
from ln_probe.analyses.geometry.newton import Attainable
from ln_probe.analyses.geometry.positions import FirstUnselectable
from ln_probe.analyses.geometry.prove import Conditioning, Margins, Proved, conditioning

# Rounded weights sum to 1 within this many ulp for each of them.
_ULPS = 2.0 * EPS
# What exact arithmetic may take for one key, by the clock: it can't be counted in float64 operations, and where
# hundreds of keys of 64 dimensions lie within an ulp of a common plane it needs half a minute.
STRICT_SECONDS = 120.0


@dataclass(frozen=True)
class SetGeometry:
    """The geometry of one set of keys, bounds for the keys asked for; `KeyGeometry` is the public view of it."""

    given: GivenSet
    sets: KeyCoordinates
    proved: Proved
    margins: Margins | None
    first: FirstUnselectable | None
    open_positions: int
    attainable: Attainable | None
    representative: Int64[np.ndarray, " key"]
    reachable: Bool[np.ndarray, " asked"] | None

    @property
    def conditioning(self) -> Conditioning:
        return conditioning(self.sets, self.given.measured, self.proved.verdicts, self.proved.clear)

    @property
    def bounds(self) -> tuple[Float64[np.ndarray, " asked"], Float64[np.ndarray, " asked"]]:
        """Of every margin, in the unit that is given out."""
        if self.margins is None:
            nothing = np.full(len(self.representative), np.nan)
            return nothing, nothing
        return self.margins.bounds(0 if self.given.queries is None else self.given.measured.powers.score)

    def witness(self, i: int) -> Float64[np.ndarray, " d"] | None:
        """A float64 query that is proved to select key i; None if none is known."""
        rivals = self.rivals(i)
        return next((query for query in self._candidates(i) if _selects(self.given, i, query, rivals)), None)

    def exact_witness(self, i: int) -> tuple[Fraction, ...]:
        """The exact query over the keys themselves, `center + axes @ u`, of a key that is not unselectable."""
        if i in self.proved.exact:
            verdict = self.proved.exact[i]
        else:
            verdict = self.given.exact.decide(i, among=self.rivals(i), seconds=STRICT_SECONDS)
        found, (axes, center) = verdict.query or (), self.given.exact_span
        if axes is None or center is None:
            return found
        return tuple(
            Fraction(float(c)) + sum((Fraction(float(a)) * u for a, u in zip(row, found, strict=True)), Fraction(0))
            for c, row in zip(center, axes, strict=True)
        )

    def weights(self, i: int) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        """Convex weights of other keys that reproduce key i; of a duplicate: a copy with all weight."""
        code = self.proved.verdicts.code[i]
        if code == DUPLICATE and i not in self.proved.exact:
            rows = self.sets.normalized
            apart = np.linalg.norm(rows - rows[i], axis=1)
            apart[i] = np.inf
            return np.array([apart.argmin()]), np.ones(1)
        if (exact := self.exact_weights(i)) is not None:
            return np.array(exact.index, np.int64), np.array([float(w) for w in exact.weights])
        where, value = self.proved.verdicts.row(i)
        if self.first is not None:
            where, value = self.first.weights.row(int(self.first.source[i]))
        return where, value / math.fsum(value)

    def exact_weights(self, i: int) -> ExactVerdict | None:
        """The exact verdict whose weights are given out (with `causal`, among the keys up to its position)."""
        if self.first is not None and i in self.first.exact:
            return self.first.exact[i][0]
        return self.proved.exact.get(i)

    def _candidates(self, i: int) -> Iterator[Float64[np.ndarray, " d"]]:
        """Queries over the given keys that should select key i, rounded."""
        if i not in self.proved.exact:
            yield over_given(self.given, self.sets, self.proved.verdicts.query[i : i + 1])[0]
        try:  # (an exact query leads by more than the one that proved the verdict, where that is in doubt)
            found = self.exact_witness(i)
        except TimeoutError:
            return
        # Of unit length if any length will do, else as it stands; infinite where too large.
        largest = max(map(abs, found), default=Fraction(0))
        if self.sets.biased or largest == 0:
            yield np.array([as_float(q) for q in found])
        else:
            yield unit_rows(np.array([[as_float(q / largest) for q in found]]))[0]

    def rivals(self, i: int) -> Int64[np.ndarray, " rival"]:
        """The keys that a witness of key i has to beat: all but its copies."""
        rivals = np.arange(len(self.representative)) != i
        if i in self.proved.exact:
            rivals[self.given.exact.copies(i)] = False
        elif self.proved.verdicts.code[i] == DUPLICATE:
            rows = self.sets.normalized
            rivals &= np.linalg.norm(rows - rows[i], axis=1) > TAU * (1 + SLACK)
        return np.flatnonzero(rivals)

    def certify(self, tau: float, name: str = "") -> None:
        """Check every claim about the set; then exact verdicts, witnesses and weights as a user gets them, on the keys
        as they were given.

        Args:
            tau: the tolerance of verdicts.
            name: of the set, for messages.

        Raises:
            CertificateError: one is false; says of which key, and by how much.
        """
        checker = Checker(self.given.keys, self.given.bias, self.given.queries, tau, name)
        _verdicts(checker, self.proved)
        every = np.arange(checker.number)
        apart = checker.equals(every, self.representative)
        text = "differs from key {}, its copy, by {:.3g} (tau {:.3g})"
        _refuse(checker, every, apart > tau * (1 + SLACK), text, self.representative, apart, tau)
        if self.first is not None:
            _positions(checker, self.proved, self.first)
        if self.margins is not None and checker.number > 1:
            _margins(checker, self.margins)
        if self.attainable is not None:
            _attention(checker, self.attainable)
        _exact_proofs(checker, self)
        _witnesses(checker, self)
        _weights(checker, self)


def _selects(given: GivenSet, i: int, query: Float64[np.ndarray, " d"], among: Int64[np.ndarray, " rival"]) -> bool:
    """Whether a query, bias added, scores key i above the keys `among` that are not equal to it."""
    return bool(_lead(given, np.array([i]), query[None])[0]) or given.exact_keys.selects(i, query, among)


def _lead(
    given: GivenSet, targets: Int64[np.ndarray, " target"], queries: Float64[np.ndarray, "target d"]
) -> Bool[np.ndarray, " target"]:
    """Of which queries float64 proves that they select their key among all others; the rest is open."""
    keys, bias, key_power, bias_power = given.plain.keys, given.plain.bias, given.plain.key_power[0], 0
    keys = keys - keys.mean(axis=0)
    usable = np.isfinite(queries).all(axis=1)
    asked = np.where(usable[:, None], queries, 0.0)
    # Queries brought to at most 1 in the units of the keys, and both terms of a score to one unit.
    power = np.frexp(np.abs(asked).max(axis=1))[1] + key_power
    if bias is not None and bias.any():
        bias, bias_power = bias - bias.mean(), given.plain.powers.bias
        power = np.maximum(power, bias_power)
    else:
        bias = None
    unit = np.ldexp(asked, (key_power - power)[:, None])
    length, size = np.linalg.norm(unit, axis=1), np.linalg.norm(keys, axis=1)
    rounding = AMPLE * (keys.shape[1] + 8) * EPS
    found = np.zeros(len(targets), bool)
    for block in blocks(len(targets), len(keys)):
        scores = unit[block] @ keys.T
        error = rounding * np.outer(length[block], size) + UNDERFLOW
        if bias is not None:
            share = np.ldexp(1.0, np.maximum(bias_power - power[block], -2000))
            scores += np.outer(share, bias)
            error += rounding * np.outer(share, np.abs(bias))
        here, some = np.arange(len(scores)), targets[block]
        own = scores[here, some] - error[here, some]
        scores += error
        scores[here, some] = -np.inf
        found[block] = own > scores.max(axis=1)
    return np.asarray(found & usable)


def over_given(
    given: GivenSet, sets: KeyCoordinates, found: Float64[np.ndarray, "query dim"]
) -> Float64[np.ndarray, "query d"]:
    """Queries over normalized points as queries over the keys as they were given, rounded.

    Of unit length where no bias counts, else to be used with the bias as it was given; what float64 cannot express is
    infinite, or 0.
    """
    queries = given.queries
    plain = found[:, :-1] if sets.biased else found
    if queries is not None:
        plain = queries.in_span(plain)
    if not sets.biased or (sets.bias_scale == 0.0 and (queries is None or not queries.outside.any())):
        return unit_rows(plain)
    lift, size = found[:, -1:], (sets.bias_scale or 1.0) / (sets.scale or 1.0)
    plain = plain * np.divide(size, lift, out=np.full_like(lift, size), where=lift > 0.0)
    with np.errstate(over="ignore", under="ignore"):
        plain = np.ldexp(plain, given.own.exponent)
        return plain if queries is None else np.asarray(plain + queries.outside)


def _refuse(checker: Checker, keys: Ints, wrong: Bool[np.ndarray, " claim"], text: str, *values: Any) -> None:
    """Raise for the first claim that is wrong; `values` fill the text, one of each for all claims or for each."""
    for k in np.flatnonzero(wrong)[:1]:
        here = (np.broadcast_to(value, len(keys))[k] for value in values)
        raise CertificateError(f"key {keys[k]}{checker.name}: {text.format(*here)}")


def _verdicts(checker: Checker, proved: Proved) -> None:
    verdicts, tau = proved.verdicts, checker.tau
    up = np.flatnonzero(np.isin(verdicts.code, (SELECTABLE, DUPLICATE)) & proved.by_tolerance)
    gap, near = checker.selects(up, verdicts.query[up])
    text = "its witness gives another key a score gap of {:.3g} (tau {:.3g})"
    _refuse(checker, up, ~(gap.upper > tau * (1 - SLACK)), text, gap.upper, tau)
    name, have = NAMES[verdicts.code[up]], np.where(near, "a key", "no key")
    text = "it is said to be {}, and {} does not differ from it"
    _refuse(checker, up, near != (verdicts.code[up] == DUPLICATE), text, name, have)
    down = np.flatnonzero((verdicts.code == UNSELECTABLE) & proved.by_tolerance)
    miss = checker.reproduces(down, verdicts.weights.some(verdicts.source[down]))
    text = "its convex weights miss it by {:.3g} (tau {:.3g})"
    _refuse(checker, down, ~(miss.lower <= tau * (1 + SLACK)), text, miss.lower, tau)


def _positions(checker: Checker, proved: Proved, first: FirstUnselectable) -> None:
    down = np.flatnonzero((first.at >= 0) & proved.by_tolerance)
    miss = checker.reproduces(down, first.weights.some(first.source[down]), until=first.at[down])
    text = "it is said to be inside at {}, but its weights up to there do not reproduce it"
    _refuse(checker, down, ~(miss.lower <= checker.tau * (1 + SLACK)), text, first.at[down])
    late = down[(first.at[down] > down) & np.isfinite(first.query[down]).all(axis=1)]
    gap, _ = checker.selects(late, first.query[late], until=first.at[late] - 1)
    text = "its query does not select it among the keys before {}"
    _refuse(checker, late, ~(gap.upper > checker.tau * (1 - SLACK)), text, first.at[late])


def _margins(checker: Checker, margins: Margins) -> None:
    every = np.arange(len(margins.lower))
    low = checker.gap_at_least(every, margins.point).upper
    if checker.measured.offset is None:
        low = np.maximum(low, 0.0)
    text = "margin_lower is {:.6g}, its query proves {:.6g} only"
    _refuse(checker, every, ~(margins.lower <= low), text, margins.lower, low)
    high = checker.gap_at_most(every, margins.weights).lower
    text = "margin_upper is {:.6g}, its weights prove {:.6g} only"
    _refuse(checker, every, ~(margins.upper >= high), text, margins.upper, high)


def _attention(checker: Checker, reach: Attainable) -> None:
    every = np.arange(len(reach.weight))
    found, bound = checker.attention(every, reach.point, reach.proof)
    text = "attainable is {:.6g}, but its query gives {:.6g}"
    _refuse(checker, every, ~(reach.weight <= found.upper), text, reach.weight, found.upper)
    text = "attainable_upper is {:.6g}, but its query proves {:.6g}"
    _refuse(checker, every, ~(reach.upper >= bound.lower), text, reach.upper, bound.lower)


def _exact_proofs(checker: Checker, geometry: SetGeometry) -> None:
    given, first = geometry.given, geometry.first
    axes, center = given.exact_span

    def check(i: int, verdict: ExactVerdict, right: bool, text: str, among: Ints | None = None) -> None:
        holds = right and proves(verdict, given.keys, given.bias, i, axes=axes, center=center, among=among)
        _refuse(checker, np.array([i]), np.array([not holds]), text)

    for i, verdict in geometry.proved.exact.items():
        check(i, verdict, True, f"its exact proof does not prove that it is {verdict.code}")
    for i, (inside, before) in ({} if first is None else first.exact).items():
        at, hidden = int(first.at[i]) if first is not None else -1, inside.code == "unselectable"
        check(i, inside, hidden, f"its exact weights do not prove that it is inside at {at}", np.arange(at + 1))
        if before is not None:
            text = f"its exact query does not select it among the keys before {at}"
            check(i, before, before.code != "unselectable", text, np.arange(at))


def _witnesses(checker: Checker, geometry: SetGeometry) -> None:
    up = np.flatnonzero(np.isin(geometry.proved.verdicts.code, (SELECTABLE, DUPLICATE)))
    have = {i: query for i in map(int, up) if (query := geometry.witness(i)) is not None}
    if not have:
        return
    keys = np.array(list(have))
    wrong = ~_lead(geometry.given, keys, np.stack(list(have.values())))
    for k in np.flatnonzero(wrong):
        i = int(keys[k])
        wrong[k] = not _selects(geometry.given, i, have[i], geometry.rivals(i))
    _refuse(checker, keys, wrong, "its witness, as it is given out, does not score it above all others")


def _weights(checker: Checker, geometry: SetGeometry) -> None:
    code, tau, first = geometry.proved.verdicts.code, checker.tau, geometry.first
    keys = np.flatnonzero(np.isin(code, (UNSELECTABLE, DUPLICATE)))
    weights = {int(i): geometry.weights(int(i)) for i in keys}
    total = np.array([math.fsum(value) for _, value in weights.values()])
    wrong = [(value < 0.0).any() or (index == i).any() for i, (index, value) in weights.items()]
    room = _ULPS * np.array([len(value) for _, value in weights.values()])
    text = "its weights are not convex weights of other keys (they sum to {:.17g})"
    _refuse(checker, keys, np.array(wrong, bool) | ~(np.abs(total - 1.0) <= room), text, total)
    tolerant = keys[geometry.proved.by_tolerance[keys]]
    twins, down = tolerant[code[tolerant] == DUPLICATE], tolerant[code[tolerant] == UNSELECTABLE]
    apart = checker.equals(twins, np.array([weights[int(i)][0][0] for i in twins], np.int64))
    text = "its weights name a key that differs by {:.3g} (tau {:.3g})"
    _refuse(checker, twins, ~(apart <= tau * (1 + SLACK)), text, apart, tau)
    rows = Rows.of({int(i): weights[int(i)] for i in down}, len(code)).some(down)
    miss = checker.reproduces(down, rows, until=None if first is None else first.at[down])
    text = "its weights, as they are given out, miss it by {:.3g}"
    _refuse(checker, down, ~(miss.lower <= tau * (1 + SLACK)), text, miss.lower)


_CODES = {str(name): code for code, name in enumerate(NAMES)}


def decide_strictly(given: GivenSet, sets: KeyCoordinates, proved: Proved, seconds: float) -> Proved:
    """Decide in exact arithmetic what was not proved selectable by more than tau.

    Args:
        seconds: that one key may take; it is undecided then.
    """
    verdicts = proved.verdicts
    code, source = verdicts.code.copy(), verdicts.source.copy()
    todo = np.flatnonzero(code != SELECTABLE)
    if len(todo) == 0:
        return proved
    rows: dict[int, tuple[Ints, Floats]] = {}
    exact: dict[int, ExactVerdict] = {}
    for i in map(int, todo):
        support = verdicts.row(i)[0] if verdicts.code[i] == UNSELECTABLE else None
        hint = None  # (where directions are missing, exact queries are over the axes)
        if given.exact_span[0] is None and np.isfinite(verdicts.query[i]).all():
            hint = over_given(given, sets, verdicts.query[i : i + 1])[0]
        try:
            found = given.exact.decide(i, support=support, query=hint, seconds=seconds)
        except TimeoutError:
            code[i], source[i] = UNDECIDED, i
            continue
        exact[i] = found
        code[i], source[i] = _CODES[found.code], i
        if found.code == "unselectable":
            rows[i] = np.array(found.index, np.int64), np.array([float(w) for w in found.weights])
    weights = Rows.of(rows, len(code))
    return replace(proved, verdicts=replace(verdicts, code=code, weights=weights, source=source), exact=exact)


def decide_positions_strictly(
    given: GivenSet, proved: Proved, first: FirstUnselectable, seconds: float
) -> tuple[FirstUnselectable, int]:
    """From where on keys are unselectable, in exact arithmetic, and how many positions could be earlier as far as is
    proved.

    Args:
        proved: the exact verdicts.
        first: positions to try first.
        seconds: that one look at one key may take; its position is proved from above only then.
    """
    at, open_ = np.full_like(first.at, -1), 0
    exact: dict[int, tuple[ExactVerdict, ExactVerdict | None]] = {}
    for i, verdict in proved.exact.items():
        if verdict.code != "unselectable":
            continue
        inside, before = verdict, None
        # Among keys 0..high it is unselectable, among 0..low it is not (or there is no such position).
        low, high = i - 1, max(i, *verdict.index)
        guesses = [int(first.at[i]) - 1, int(first.at[i])]
        while high - low > 1:
            tried = next((t for t in guesses if low < t < high), (low + high) // 2)
            try:
                found = given.exact.decide(i, among=np.arange(tried + 1), support=inside.index, seconds=seconds)
            except TimeoutError:
                open_, before = open_ + 1, None
                break
            if found.code == "unselectable":
                inside, high = found, max(i, *found.index)
            else:
                before, low = found, tried
        at[i], exact[i] = high, (inside, before)
    return replace(first, at=at, exact=exact), open_
