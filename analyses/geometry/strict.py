"""Verdicts and positions of exact arithmetic where the tolerance would decide.

A key that was proved to win by more than tau against every other is a vertex in exact arithmetic too. All others
(unselectable, copies within tau, undecided) are decided again, on the given numbers as fractions; what was found in
float64 is the place to start from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ln_probe.analyses.geometry.exact import ExactVerdict
from ln_probe.analyses.geometry.first_unselectable import FirstUnselectable
from ln_probe.analyses.geometry.key_coordinates import KeyCoordinates
from ln_probe.analyses.geometry.proofs import Proved
from ln_probe.analyses.geometry.scores import Floats, Ints
from ln_probe.analyses.geometry.verdicts import NAMES, SELECTABLE, UNDECIDED, UNSELECTABLE, SparseWeights
from ln_probe.analyses.geometry.witnesses import GivenSet, over_given

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
    weights = SparseWeights.of_rows(rows, len(code))
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
