"""Give out only what is proved: the checker tests every proposal, and what fails is tried again or given up.

The solvers propose verdicts, queries and weights; `checker.Checker` computes what these prove of the keys as they were
given. A verdict that is not proved is sought again for that key alone, against every key that differs from it, by the
careful active-set method and by a linear program; if that fails too, it is `undecided`. Bounds are never taken from a
solver: the bound given out is what the query and the weights prove, and where it is wider than was asked for, it
stays so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64

from ln_probe.analyses.geometry.checker import SLACK, Checker, Rows
from ln_probe.analyses.geometry.coordinates import TAU, Floats, Ints, KeyCoordinates
from ln_probe.analyses.geometry.decide import (
    DUPLICATE,
    LARGE,
    SELECTABLE,
    UNDECIDED,
    UNSELECTABLE,
    Verdicts,
    alone,
)
from ln_probe.analyses.geometry.inputs import ScoreSpace
from ln_probe.analyses.geometry.margins import measured, propose, too_wide
from ln_probe.analyses.geometry.newton import Attainable
from ln_probe.analyses.geometry.wolfe import BUDGET


@dataclass(frozen=True)
class Proved:
    """Verdicts that were proved.

    Attributes:
        verdicts: with what proves them.
        clear: the relative score gap of selectable keys (and duplicates), minus the residual of unselectable ones; NaN
            for undecided keys. Near ±tau a verdict is near its tolerance.
        repaired: whose certificate failed at first, or was replaced.
    """

    verdicts: Verdicts
    clear: Float64[np.ndarray, " key"]
    repaired: Bool[np.ndarray, " key"]


@dataclass(frozen=True)
class Margins:
    """Bounds of every key's margin, in units of the set, and what proves them, in the order of the keys asked for."""

    lower: Float64[np.ndarray, " some"]
    upper: Float64[np.ndarray, " some"]
    point: Float64[np.ndarray, "some r"]  # u of the query that proves lower
    weights: Rows  # prove upper, a row per key asked for
    repaired: Bool[np.ndarray, " some"]


def prove_verdicts(
    checker: Checker, sets: KeyCoordinates, verdicts: Verdicts, seek: bool = True, budget: float = BUDGET
) -> Proved:
    """Check the verdict of every key; repair or drop what fails. With `seek`, the undecided are solved for as well."""
    number = len(verdicts.code)
    code, clear = verdicts.code.copy(), np.full(number, np.nan)
    failed = np.zeros(number, bool)
    done = verdicts.gap > TAU  # over all other keys: no copies either
    clear[done] = verdicts.gap[done]
    up = np.flatnonzero(((code == SELECTABLE) & ~done) | (code == DUPLICATE))
    if len(up):
        gap, near = checker.selects(up, verdicts.query[up])
        clear[up] = gap.lower
        code[up] = np.where(near, DUPLICATE, SELECTABLE)
        failed[up] = ~(gap.lower > TAU * (1 - SLACK))
    down = np.flatnonzero(code == UNSELECTABLE)
    if len(down):
        miss = checker.reproduces(down, verdicts.weights.some(verdicts.source[down]))
        clear[down] = -miss.upper
        failed[down] = ~(miss.upper <= TAU * (1 + SLACK))
    todo = np.flatnonzero(failed | (code == UNDECIDED) if seek and number <= LARGE else failed)
    repaired, known = np.zeros(number, bool), dict[bytes, int]()
    if len(todo) == 0:
        return Proved(replace(verdicts, code=code), clear, repaired)
    query, source = verdicts.query.copy(), np.arange(number)
    # A row for each key: one that keys share may not be replaced for one of them alone.
    rows = {int(i): verdicts.row(int(i)) for i in np.flatnonzero(code == UNSELECTABLE)}
    for i in map(int, todo):
        rows.pop(i, None)
        like = known.setdefault(sets.normalized[i].tobytes(), i)
        if like != i:  # an exact copy of one that was done
            for values in (code, query, clear, repaired):
                values[i] = values[like]
            source[i] = like
            continue
        code[i], clear[i], asked, row = _alone(checker, sets, i, budget)
        repaired[i] = code[i] != UNDECIDED
        if code[i] == UNSELECTABLE:
            rows[i] = row
        elif repaired[i]:
            query[i] = asked
    return Proved(Verdicts(code, query, Rows.of(rows, number), source, verdicts.gap), clear, repaired)


def _alone(
    checker: Checker, sets: KeyCoordinates, i: int, budget: float
) -> tuple[int, float, Floats, tuple[Ints, Floats]]:
    """Solve for key i among the keys that differ from it, by one solver after the other.

    Returns:
        the verdict that is proved, how clear it is, and the query or the row of weights that prove it.
    """
    one = np.array([i])
    nothing = np.empty(0), (np.empty(0, np.int64), np.empty(0))
    for query, index, value in alone(sets, i, budget):
        gap, near = checker.selects(one, query[None])
        if gap.lower[0] > TAU * (1 - SLACK):
            return (DUPLICATE if near[0] else SELECTABLE), gap.lower[0], query, nothing[1]
        if len(index):
            miss = checker.reproduces(one, Rows(np.array([0, len(index)]), index, value))
            if miss.upper[0] <= TAU * (1 + SLACK):
                return UNSELECTABLE, -miss.upper[0], nothing[0], (index, value)
    return UNDECIDED, np.nan, *nothing


def prove_margins(
    checker: Checker,
    sets: KeyCoordinates,
    where: ScoreSpace,
    verdicts: Verdicts,
    through_queries: bool,
    gap: float,
    only: Ints | None = None,
    budget: float = BUDGET,
) -> Margins:
    """Bracket the margin of every key (or of these only)."""
    number = len(verdicts.code)
    asked = np.arange(number) if only is None else only
    space = measured(sets, where, through_queries)
    if number == 1:
        nothing = np.full(1, np.nan)
        return Margins(nothing, nothing, np.zeros((1, space.rows.shape[1])), Rows.gathered(1, []), np.zeros(1, bool))
    point, weights = propose(space, verdicts, gap, asked, budget)
    if point.shape[1] < checker.measured.rows.shape[1]:  # a bias that is the same for all keys is measured nowhere
        point = np.column_stack([point, np.zeros(len(point))])
    if space.offset is None:  # the zero query gives no key less than 0
        lower, moved = np.zeros(len(asked)), np.flatnonzero(point.any(axis=1))
        lower[moved] = np.maximum(checker.gap_at_least(asked[moved], point[moved]).lower, 0.0)
    else:
        lower = checker.gap_at_least(asked, point).lower
    upper = checker.gap_at_most(asked, weights).upper
    repaired = np.zeros(len(asked), bool)
    inside = verdicts.code[asked] == UNSELECTABLE
    wide = np.flatnonzero(too_wide(lower, upper, gap, space.size, inside) & inside)
    if len(wide):  # what proved the verdict says too little: such keys are solved for as all others are
        u, other = propose(space, verdicts, gap, asked[wide], budget, every=True)
        u = np.pad(u, ((0, 0), (0, point.shape[1] - u.shape[1])))
        better, tighter = checker.gap_at_least(asked[wide], u).lower, checker.gap_at_most(asked[wide], other).upper
        rows = {}
        for k, i in enumerate(map(int, wide)):
            if better[k] > lower[i]:
                lower[i], point[i], repaired[i] = better[k], u[k], True
            if tighter[k] < upper[i]:
                upper[i], rows[i], repaired[i] = tighter[k], other.row(k), True
        weights = Rows.of({k: weights.row(k) for k in range(len(asked))} | rows, len(asked))
    return Margins(lower, upper, point, weights, repaired)


def reached(checker: Checker, margin_lower: Float64[np.ndarray, " some"]) -> Bool[np.ndarray, " some"]:
    """Whether a query of the set puts each key on top, by more than tau relative to what the set sees of the keys."""
    if checker.number == 1:
        return np.ones(len(margin_lower), bool)
    return np.asarray(margin_lower > checker.tau * checker.measured.size)


def prove_attention(checker: Checker, found: Attainable, only: Ints | None = None) -> Attainable:
    """The weights that the queries give, and what they prove that no query exceeds."""
    asked = np.arange(len(found.weight)) if only is None else only
    lower, upper = checker.attention(asked, found.point, found.proof)
    return replace(found, weight=lower.lower, upper=upper.upper)
