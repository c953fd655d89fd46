"""What a user gets about a set of keys: witnesses, weights, and the check of everything given out.

Solvers work on normalized points. Brought back to the given keys a query is rounded, and where a key wins by little no
float64 query may be left that selects it. So every query is checked as it is given out (`_lead`), with a bound of the
error.

`SetGeometry.certify` checks everything again. Proving gives the doubt of rounding to the other side; `certify` gives it
to the claim: it raises only where a claim is false for any rounding, so a true one never raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ln_probe.analyses.geometry.checker import SLACK, CertificateError, Checker, Rows
from ln_probe.analyses.geometry.coordinates import TAU, Ints, KeyCoordinates, unit_rows
from ln_probe.analyses.geometry.decide import DUPLICATE, NAMES, SELECTABLE, UNSELECTABLE
from ln_probe.analyses.geometry.inputs import AMPLE, EPS, UNDERFLOW, GivenSet, blocks
from ln_probe.analyses.geometry.newton import Attainable
from ln_probe.analyses.geometry.prove import Margins, Proved

# Rounded weights sum to 1 within this many ulp for each of them.
_ULPS = 2.0 * EPS


@dataclass(frozen=True)
class SetGeometry:
    """The geometry of one set of keys, bounds for the keys asked for; `KeyGeometry` is the public view of it."""

    given: GivenSet
    sets: KeyCoordinates
    proved: Proved
    margins: Margins | None
    attainable: Attainable | None
    representative: Int64[np.ndarray, " key"]
    reachable: Bool[np.ndarray, " asked"] | None

    @property
    def bounds(self) -> tuple[Float64[np.ndarray, " asked"], Float64[np.ndarray, " asked"]]:
        """Of every margin."""
        if self.margins is None:
            nothing = np.full(len(self.representative), np.nan)
            return nothing, nothing
        return self.margins.lower, self.margins.upper

    def witness(self, i: int) -> Float64[np.ndarray, " d"] | None:
        """A float64 query that is proved to select key i; None if none is known."""
        query = over_given(self.given, self.sets, self.proved.verdicts.query[i : i + 1])
        return query[0] if self._selects(np.array([i]), query)[0] else None

    def weights(self, i: int) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        """Convex weights of other keys that reproduce key i; of a duplicate: a copy with all weight."""
        if self.proved.verdicts.code[i] == DUPLICATE:
            rows = self.sets.normalized
            apart = np.linalg.norm(rows - rows[i], axis=1)
            apart[i] = np.inf
            return np.array([apart.argmin()]), np.ones(1)
        where, value = self.proved.verdicts.row(i)
        return where, value / math.fsum(value)

    def rivals(self, i: int) -> Int64[np.ndarray, " rival"]:
        """The keys that a witness of key i has to beat: all but its copies."""
        rivals = np.arange(len(self.representative)) != i
        if self.proved.verdicts.code[i] == DUPLICATE:
            rows = self.sets.normalized
            rivals &= np.linalg.norm(rows - rows[i], axis=1) > TAU * (1 + SLACK)
        return np.flatnonzero(rivals)

    def _selects(
        self, targets: Int64[np.ndarray, " target"], queries: Float64[np.ndarray, "target d"]
    ) -> Bool[np.ndarray, " target"]:
        """Whether each query is proved to select its key above all that a witness has to beat."""
        selects = np.zeros(len(targets), bool)
        plain = self.proved.verdicts.code[targets] == SELECTABLE
        selects[plain] = _lead(self.given, targets[plain], queries[plain])
        for k in np.flatnonzero(~plain):
            i = int(targets[k])
            among = np.append(self.rivals(i), i)
            bias = None if self.given.bias is None else self.given.bias[among]
            apart = GivenSet(self.given.keys[among], bias, None)
            selects[k] = _lead(apart, np.array([len(among) - 1]), queries[k : k + 1])[0]
        return selects

    def certify(self, tau: float, name: str = "") -> None:
        """Check every claim about the set; then witnesses and weights as a user gets them, on the keys as they were
        given.

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
        if self.margins is not None and checker.number > 1:
            _margins(checker, self.margins)
        if self.attainable is not None:
            _attention(checker, self.attainable)
        _witnesses(checker, self)
        _weights(checker, self)


def _lead(
    given: GivenSet, targets: Int64[np.ndarray, " target"], queries: Float64[np.ndarray, "target d"]
) -> Bool[np.ndarray, " target"]:
    """Whether float64 proves that each query, bias added, scores its key above all others."""
    keys = given.keys - given.keys.mean(axis=0)
    bias = None if given.bias is None else given.bias - given.bias.mean()
    usable = np.isfinite(queries).all(axis=1)
    asked = np.where(usable[:, None], queries, 0.0)
    length, size = np.linalg.norm(asked, axis=1), np.linalg.norm(keys, axis=1)
    rounding = AMPLE * (keys.shape[1] + 8) * EPS
    leads = np.zeros(len(targets), bool)
    for block in blocks(len(targets), len(keys)):
        scores = asked[block] @ keys.T
        error = rounding * np.outer(length[block], size) + UNDERFLOW * float(size.max(initial=0.0))
        if bias is not None:
            scores += bias
            error += rounding * np.abs(bias)
        here, some = np.arange(len(scores)), targets[block]
        own = scores[here, some] - error[here, some]
        scores += error
        scores[here, some] = -np.inf
        leads[block] = own > scores.max(axis=1)
    return np.asarray(leads & usable)


def over_given(
    given: GivenSet, sets: KeyCoordinates, found: Float64[np.ndarray, "query dim"]
) -> Float64[np.ndarray, "query d"]:
    """Queries over normalized points as queries over the keys as they were given, rounded.

    Of unit length where no bias counts, else to be used with the bias as it was given.
    """
    queries = given.queries
    plain = found[:, :-1] if sets.biased else found
    if queries is not None:
        plain = queries.in_span(plain)
    if not sets.biased or (sets.bias_scale == 0.0 and (queries is None or not queries.outside.any())):
        return unit_rows(plain)
    lift, size = found[:, -1:], (sets.bias_scale or 1.0) / (sets.scale or 1.0)
    plain = plain * np.divide(size, lift, out=np.full_like(lift, size), where=lift > 0.0)
    return plain if queries is None else np.asarray(plain + queries.outside)


def _refuse(checker: Checker, keys: Ints, wrong: Bool[np.ndarray, " claim"], text: str, *values: Any) -> None:
    """Raise for the first claim that is wrong; `values` fill the text, one of each for all claims or for each."""
    for k in np.flatnonzero(wrong)[:1]:
        here = (np.broadcast_to(value, len(keys))[k] for value in values)
        raise CertificateError(f"key {keys[k]}{checker.name}: {text.format(*here)}")


def _verdicts(checker: Checker, proved: Proved) -> None:
    verdicts, tau = proved.verdicts, checker.tau
    up = np.flatnonzero(np.isin(verdicts.code, (SELECTABLE, DUPLICATE)))
    gap, near = checker.selects(up, verdicts.query[up])
    text = "its witness gives another key a score gap of {:.3g} (tau {:.3g})"
    _refuse(checker, up, ~(gap.upper > tau * (1 - SLACK)), text, gap.upper, tau)
    name, have = NAMES[verdicts.code[up]], np.where(near, "a key", "no key")
    text = "it is said to be {}, and {} does not differ from it"
    _refuse(checker, up, near != (verdicts.code[up] == DUPLICATE), text, name, have)
    down = np.flatnonzero(verdicts.code == UNSELECTABLE)
    miss = checker.reproduces(down, verdicts.weights.some(verdicts.source[down]))
    text = "its convex weights miss it by {:.3g} (tau {:.3g})"
    _refuse(checker, down, ~(miss.lower <= tau * (1 + SLACK)), text, miss.lower, tau)


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


def _witnesses(checker: Checker, geometry: SetGeometry) -> None:
    up = np.flatnonzero(np.isin(geometry.proved.verdicts.code, (SELECTABLE, DUPLICATE)))
    have = {i: query for i in map(int, up) if (query := geometry.witness(i)) is not None}
    if not have:
        return
    keys = np.array(list(have))
    wrong = ~geometry._selects(keys, np.stack(list(have.values())))
    _refuse(checker, keys, wrong, "its witness, as it is given out, does not score it above all others")


def _weights(checker: Checker, geometry: SetGeometry) -> None:
    code, tau = geometry.proved.verdicts.code, checker.tau
    keys = np.flatnonzero(np.isin(code, (UNSELECTABLE, DUPLICATE)))
    weights = {int(i): geometry.weights(int(i)) for i in keys}
    total = np.array([math.fsum(value) for _, value in weights.values()])
    wrong = [(value < 0.0).any() or (index == i).any() for i, (index, value) in weights.items()]
    room = _ULPS * np.array([len(value) for _, value in weights.values()])
    text = "its weights are not convex weights of other keys (they sum to {:.17g})"
    _refuse(checker, keys, np.array(wrong, bool) | ~(np.abs(total - 1.0) <= room), text, total)
    twins, down = keys[code[keys] == DUPLICATE], keys[code[keys] == UNSELECTABLE]
    apart = checker.equals(twins, np.array([weights[int(i)][0][0] for i in twins], np.int64))
    text = "its weights name a key that differs by {:.3g} (tau {:.3g})"
    _refuse(checker, twins, ~(apart <= tau * (1 + SLACK)), text, apart, tau)
    rows = Rows.of({int(i): weights[int(i)] for i in down}, len(code)).some(down)
    miss = checker.reproduces(down, rows)
    text = "its weights, as they are given out, miss it by {:.3g}"
    _refuse(checker, down, ~(miss.lower <= tau * (1 + SLACK)), text, miss.lower)
