"""What a user gets about a set of keys: witnesses, exact verdicts, and the check of everything that was given out.

Solvers work on normalized points in their own units. Brought back to the given keys a query is rounded, and where a key
wins by little, or units differ by hundreds of decades, no float64 query may be left that selects it. So every query is
checked as it is given out (`GivenSet.selects`): in float64 with a bound of the error, and in whole numbers where that
leaves a sign open.

`certify` checks everything again. Proving gives the doubt of rounding to the other side; `certify` gives it to the
claim: it raises only where a claim is false for any rounding, so a true one never raises.

`decide_strictly` decides where the tolerance would. A key that was proved to win by more than tau against every other
is a vertex in exact arithmetic too. All others (unselectable, copies within tau, undecided) are decided again, on the
given numbers as fractions, starting from what was found in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from ln_probe.analyses.geometry.checker import SLACK, CertificateError, Checker, Rows
from ln_probe.analyses.geometry.coordinates import Floats, Ints, KeyCoordinates, unit_rows
from ln_probe.analyses.geometry.decide import DUPLICATE, NAMES, SELECTABLE, UNDECIDED, UNSELECTABLE
from ln_probe.analyses.geometry.exact import ExactSet, ExactVerdict, as_float, proves
from ln_probe.analyses.geometry.inputs import (
    UNDERFLOW,
    OwnKeys,
    QuerySet,
    ScoreSpace,
    Units,
    by_spread,
    own_keys,
    score_space,
)
from ln_probe.analyses.geometry.newton import Attainable
from ln_probe.analyses.geometry.positions import FirstUnselectable
from ln_probe.analyses.geometry.prove import Margins, Proved

_EPS = float(np.finfo(np.float64).eps)
# Covers the rounding of a bound of an error, as in `checker`.
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
    def measured(self) -> ScoreSpace:
        """The keys as the queries see them; without queries the keys themselves."""
        own = self.units.measured
        return score_space(own.keys, own.bias, own.queries, own.powers)

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
        """Centred keys, each coordinate in a separate unit, and the bias, with the exponents of these units."""
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


# Rounded weights sum to 1 within this many ulp for each of them.
_ULPS = 2.0 * float(np.finfo(np.float64).eps)


def certify(
    checker: Checker,
    proved: Proved,
    margins: Margins | None,
    first: FirstUnselectable | None,
    reach: Attainable | None,
    representative: Ints,
) -> None:
    """Check every claim about a set.

    Raises:
        CertificateError: one is false; says of which key, and by how much.
    """
    _verdicts(checker, proved)
    apart = checker.equals(np.arange(len(representative)), representative)
    wrong = np.flatnonzero(apart > checker.tau * (1 + SLACK))
    if len(wrong):
        i = int(wrong[0])
        _fail(checker, i, f"differs from key {representative[i]}, its copy, by {apart[i]:.3g} (tau {checker.tau:.3g})")
    if first is not None:
        _positions(checker, proved, first)
    if margins is not None and len(representative) > 1:
        _margins(checker, margins)
    if reach is not None:
        _attention(checker, reach)


def certify_given_out(
    checker: Checker,
    given: GivenSet,
    proved: Proved,
    first: FirstUnselectable | None,
    witnesses: Mapping[int, tuple[Float64[np.ndarray, " d"] | None, Ints]],
    weights: Mapping[int, tuple[Ints, Float64[np.ndarray, " n"]]],
) -> None:
    """Check exact verdicts, witnesses and weights as a user gets them, on the keys as they were given.

    Args:
        witnesses: by key, a query (None where none is given out) and the keys that it has to beat.
        weights: by key, convex weights of other keys that reproduce it.

    Raises:
        CertificateError: one does not hold; says of which key.
    """
    _exact_proofs(checker, given, proved, first)
    _witnesses(checker, given, witnesses)
    _weights(checker, proved, first, weights)


def _exact_proofs(checker: Checker, given: GivenSet, proved: Proved, first: FirstUnselectable | None) -> None:
    axes, center = given.exact_span

    def holds(verdict: ExactVerdict, i: int, among: Ints | None = None) -> bool:
        return proves(verdict, given.keys, given.bias, i, axes=axes, center=center, among=among)

    for i, verdict in proved.exact.items():
        if not holds(verdict, i):
            _fail(checker, i, f"its exact proof does not prove that it is {verdict.code}")
    for i, (inside, before) in ({} if first is None else first.exact).items():
        at = int(first.at[i]) if first is not None else -1
        if inside.code != "unselectable" or not holds(inside, i, np.arange(at + 1)):
            _fail(checker, i, f"its exact weights do not prove that it is inside at {at}")
        if before is not None and (before.code == "unselectable" or not holds(before, i, np.arange(at))):
            _fail(checker, i, f"its exact query does not select it among the keys before {at}")


def _witnesses(
    checker: Checker, given: GivenSet, witnesses: Mapping[int, tuple[Float64[np.ndarray, " d"] | None, Ints]]
) -> None:
    have = [(i, query, rivals) for i, (query, rivals) in witnesses.items() if query is not None]
    if not have:
        return
    sure = given.lead(np.array([i for i, *_ in have]), np.stack([query for _, query, _ in have]))
    for i, query, rivals in (one for one, known in zip(have, sure, strict=True) if not known):
        if not given.selects(i, query, rivals):
            _fail(checker, i, "its witness, as it is given out, does not score it above all others")


def _weights(
    checker: Checker,
    proved: Proved,
    first: FirstUnselectable | None,
    weights: Mapping[int, tuple[Ints, Float64[np.ndarray, " n"]]],
) -> None:
    for i, (index, value) in weights.items():
        total = math.fsum(value)
        if not ((value >= 0.0).all() and abs(total - 1.0) <= _ULPS * len(value)) or (index == i).any():
            _fail(checker, i, f"its weights are not convex weights of other keys (they sum to {total:.17g})")
    tolerant = {i: pair for i, pair in weights.items() if i not in proved.exact}
    twins = np.array([i for i in tolerant if proved.verdicts.code[i] == DUPLICATE], np.int64)
    apart = checker.equals(twins, np.array([tolerant[int(i)][0][0] for i in twins], np.int64))
    for k in np.flatnonzero(~(apart <= checker.tau * (1 + SLACK)))[:1]:
        _fail(checker, int(twins[k]), f"its weights name a key that differs by {apart[k]:.3g} (tau {checker.tau:.3g})")
    down = np.array([i for i in tolerant if proved.verdicts.code[i] == UNSELECTABLE], np.int64)
    if len(down) == 0:
        return
    start = np.concatenate([[0], np.cumsum([len(tolerant[int(i)][0]) for i in down])])
    index, value = (np.concatenate([tolerant[int(i)][part] for i in down]) for part in (0, 1))
    miss = checker.reproduces(down, Rows(start, index, value), until=None if first is None else first.at[down])
    for k in np.flatnonzero(~(miss.lower <= checker.tau * (1 + SLACK)))[:1]:
        _fail(checker, int(down[k]), f"its weights, as they are given out, miss it by {miss.lower[k]:.3g}")


def _fail(checker: Checker, i: int, text: str) -> None:
    raise CertificateError(f"key {i}{checker.name}: {text}")


def _verdicts(checker: Checker, proved: Proved) -> None:
    verdicts, tau = proved.verdicts, checker.tau
    up = np.flatnonzero(np.isin(verdicts.code, (SELECTABLE, DUPLICATE)) & proved.by_tolerance)
    gap, near = checker.selects(up, verdicts.query[up])
    for k in np.flatnonzero(~(gap.upper > tau * (1 - SLACK)))[:1]:
        _fail(checker, int(up[k]), f"its witness gives another key a score gap of {gap.upper[k]:.3g} (tau {tau:.3g})")
    for k in np.flatnonzero(near != (verdicts.code[up] == DUPLICATE))[:1]:
        have = "a key" if near[k] else "no key"
        _fail(
            checker, int(up[k]), f"it is said to be {NAMES[verdicts.code[up[k]]]}, and {have} does not differ from it"
        )
    down = np.flatnonzero((verdicts.code == UNSELECTABLE) & proved.by_tolerance)
    miss = checker.reproduces(down, verdicts.weights.some(verdicts.source[down]))
    for k in np.flatnonzero(~(miss.lower <= tau * (1 + SLACK)))[:1]:
        why = (
            f"its convex weights miss it by {miss.lower[k]:.3g} (tau {tau:.3g})"
            if np.isfinite(miss.lower[k])
            else "its weights are not convex weights of other keys"
        )
        _fail(checker, int(down[k]), why)


def _positions(checker: Checker, proved: Proved, first: FirstUnselectable) -> None:
    down = np.flatnonzero((first.at >= 0) & proved.by_tolerance)
    miss = checker.reproduces(down, first.weights.some(first.source[down]), until=first.at[down])
    for k in np.flatnonzero(~(miss.lower <= checker.tau * (1 + SLACK)))[:1]:
        i = int(down[k])
        _fail(checker, i, f"it is said to be inside at {first.at[i]}, but its weights up to there do not reproduce it")
    late = down[(first.at[down] > down) & np.isfinite(first.query[down]).all(axis=1)]
    if len(late):
        gap, _ = checker.selects(late, first.query[late], until=first.at[late] - 1)
        for k in np.flatnonzero(~(gap.upper > checker.tau * (1 - SLACK)))[:1]:
            i = int(late[k])
            _fail(checker, i, f"its query does not select it among the keys before {first.at[i]}")


def _margins(checker: Checker, margins: Margins) -> None:
    every = np.arange(len(margins.lower))
    low = checker.gap_at_least(every, margins.point).upper
    space = checker.measured
    if space.offset is None:
        low = np.maximum(low, 0.0)
    for i in np.flatnonzero(~(margins.lower <= low))[:1]:
        _fail(checker, int(i), f"margin_lower is {margins.lower[i]:.6g}, its query proves {low[i]:.6g} only")
    high = checker.gap_at_most(every, margins.weights).lower
    for i in np.flatnonzero(~(margins.upper >= high))[:1]:
        _fail(checker, int(i), f"margin_upper is {margins.upper[i]:.6g}, its weights prove {high[i]:.6g} only")


def _attention(checker: Checker, reach: Attainable) -> None:
    every = np.arange(len(reach.weight))
    found, bound = checker.attention(every, reach.point, reach.proof)
    for i in np.flatnonzero(~(reach.weight <= found.upper))[:1]:
        _fail(checker, int(i), f"attainable is {reach.weight[i]:.6g}, but its query gives {found.upper[i]:.6g}")
    for i in np.flatnonzero(~(reach.upper >= bound.lower))[:1]:
        _fail(checker, int(i), f"attainable_upper is {reach.upper[i]:.6g}, but its query proves {bound.lower[i]:.6g}")


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
            hint = over_given(given.own, sets, verdicts.query[i : i + 1])[0]
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
