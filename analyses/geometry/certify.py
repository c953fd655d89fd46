"""Does everything that was given out about a set of keys hold? It was proved once; here it is looked at again.

Proving gives the doubt of rounding to the other side; this gives it to the claim: it raises only where a claim is false
whatever the rounding was, so a true one never raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.attainable import Attainable
from ln_probe.analyses.geometry.certificates import SLACK, CertificateError, Checker, Rows
from ln_probe.analyses.geometry.exact import ExactVerdict, proves
from ln_probe.analyses.geometry.first_unselectable import FirstUnselectable
from ln_probe.analyses.geometry.proofs import Margins, Proved
from ln_probe.analyses.geometry.verdicts import DUPLICATE, NAMES, SELECTABLE, UNSELECTABLE
from ln_probe.analyses.geometry.witnesses import GivenSet

Ints = Int64[np.ndarray, " _"]
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


def certify_exactly(checker: Checker, given: GivenSet, proved: Proved, first: FirstUnselectable | None) -> None:
    """Check every verdict and position of exact arithmetic, by fractions.

    Raises:
        CertificateError: one does not hold; says of which key.
    """
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


def certify_witnesses(
    checker: Checker, given: GivenSet, witnesses: Mapping[int, tuple[Float64[np.ndarray, " d"] | None, Ints]]
) -> None:
    """Check that every witness, as it is given out, selects its key among the keys as they were given.

    Args:
        witnesses: by key, with the keys that it has to beat; None where none is given out.

    Raises:
        CertificateError: one does not; says of which key.
    """
    have = [(i, query, rivals) for i, (query, rivals) in witnesses.items() if query is not None]
    if not have:
        return
    sure = given.lead(np.array([i for i, *_ in have]), np.stack([query for _, query, _ in have]))
    for i, query, rivals in (one for one, known in zip(have, sure, strict=True) if not known):
        if not given.selects(i, query, rivals):
            _fail(checker, i, "its witness, as it is given out, does not score it above all others")


def certify_weights(
    checker: Checker,
    proved: Proved,
    first: FirstUnselectable | None,
    weights: Mapping[int, tuple[Ints, Float64[np.ndarray, " n"]]],
) -> None:
    """Check that weights, as they are given out, are convex weights of other keys that reproduce theirs.

    Raises:
        CertificateError: some do not; says of which key, and by how much.
    """
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
    miss = checker.reproduces(down, verdicts.weights.rows(verdicts.source[down]))
    for k in np.flatnonzero(~(miss.lower <= tau * (1 + SLACK)))[:1]:
        why = (
            f"its convex weights miss it by {miss.lower[k]:.3g} (tau {tau:.3g})"
            if np.isfinite(miss.lower[k])
            else "its weights are not convex weights of other keys"
        )
        _fail(checker, int(down[k]), why)


def _positions(checker: Checker, proved: Proved, first: FirstUnselectable) -> None:
    down = np.flatnonzero((first.at >= 0) & proved.by_tolerance)
    miss = checker.reproduces(down, first.weights.rows(first.source[down]), until=first.at[down])
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
