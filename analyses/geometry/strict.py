"""Verdicts of exact arithmetic where the tolerance would decide.

A key that was proved to win by more than tau against every other is a vertex in exact arithmetic too. All others
(unselectable, copies within tau, undecided) are decided again, on the given numbers as fractions; what was found in
float64 is the place to start from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from jaxtyping import Float64

from ln_probe.analyses.geometry.exact import ExactSet, ExactVerdict
from ln_probe.analyses.geometry.key_coordinates import KeyCoordinates
from ln_probe.analyses.geometry.proofs import Proved
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.scores import Floats, Ints
from ln_probe.analyses.geometry.verdicts import NAMES, SELECTABLE, UNDECIDED, UNSELECTABLE, SparseWeights

_CODES = {str(name): code for code, name in enumerate(NAMES)}


def exact_set(
    keys: Float64[np.ndarray, "key d"], bias: Float64[np.ndarray, " key"] | None, queries: QuerySet | None
) -> ExactSet:
    """The set as it was given, for exact arithmetic."""
    if queries is None:
        return ExactSet(keys, bias)
    return ExactSet(keys, bias, axes=queries.axes if queries.given is None else queries.given, center=queries.center)


def decide_strictly(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    queries: QuerySet | None,
    sets: KeyCoordinates,
    proved: Proved,
    seconds: float,
) -> Proved:
    """Decide in exact arithmetic what was not proved selectable by more than tau.

    Args:
        seconds: that one key may take; it is undecided then.
    """
    verdicts = proved.verdicts
    code, query, source = verdicts.code.copy(), verdicts.query.copy(), verdicts.source.copy()
    todo = np.flatnonzero(code != SELECTABLE)
    if len(todo) == 0:
        return proved
    whole = exact_set(keys, bias, queries)
    kept = np.setdiff1d(np.unique(source[code == UNSELECTABLE]), todo)
    rows: dict[int, tuple[Ints, Floats]] = {int(i): verdicts.weights.row(int(i)) for i in kept}
    exact: dict[int, ExactVerdict] = {}
    same_space = queries is None or queries.given is None
    for i in map(int, todo):
        support = verdicts.row(i)[0] if verdicts.code[i] == UNSELECTABLE else None
        hint = _over_points(sets, query[i]) if same_space and np.isfinite(query[i]).all() else None
        try:
            found = whole.decide(i, support=support, query=hint, seconds=seconds)
        except TimeoutError:
            code[i], source[i] = UNDECIDED, i
            continue
        exact[i] = found
        code[i], source[i] = _CODES[found.code], i
        if found.code == "unselectable":
            rows[i] = np.array(found.index, np.int64), np.array([float(w) for w in found.weights])
        elif same_space and found.query is not None:
            query[i] = _over_normalized(sets, found.query)
    weights = SparseWeights.of_rows(rows, len(code))
    return replace(
        proved, verdicts=replace(verdicts, code=code, query=query, weights=weights, source=source), exact=exact
    )


def _over_points(sets: KeyCoordinates, query: Floats) -> Floats | None:
    """A unit query over normalized points as one over the points themselves (with a bias: to be added to it)."""
    if not sets.biased:
        return query
    plain, lift = query[:-1], float(query[-1])
    if not lift > 0.0 or sets.scale == 0.0:
        return None
    return np.asarray(plain / lift * (sets.bias_scale / sets.scale if sets.bias_scale > 0.0 else 1.0 / sets.scale))


def _over_normalized(sets: KeyCoordinates, query: Sequence[Fraction]) -> Floats:
    """The other way, for an exact query, whose numbers may be beyond those of float64."""
    largest = max(map(abs, query), default=Fraction(0))
    if sets.biased:
        largest = max(largest, Fraction(1))
    if largest == 0:
        return np.zeros(len(query))
    found = np.array([float(q / largest) for q in query])
    if sets.biased:
        lift = float(1 / largest) * (sets.bias_scale / sets.scale if sets.bias_scale > 0.0 < sets.scale else 1.0)
        found = np.append(found, lift)
    length = float(np.linalg.norm(found))
    return np.asarray(found / length) if length > 0.0 else found
