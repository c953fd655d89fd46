"""Give out only what is proved: the checker tests every proposal, and what fails is tried again or given up.

The solvers propose verdicts, queries and weights; `checker.Checker` computes what these prove of the keys as they were
given. A verdict that is not proved is sought again for that key alone, against every key that differs from it, by the
careful active-set method and by a linear program; if that fails too, it is `undecided`. Bounds are never taken from a
solver: the bound given out is what the query and the weights prove, and where it is wider than was asked for, another
solver has a try.

`conditioning` says how far the verdicts on a set can be trusted: figures, and warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float64, Int64

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
from ln_probe.analyses.geometry.exact import ExactVerdict
from ln_probe.analyses.geometry.inputs import EPS, ScoreSpace, outwards
from ln_probe.analyses.geometry.margins import again, measured, propose, too_wide
from ln_probe.analyses.geometry.newton import Attainable
from ln_probe.analyses.geometry.positions import FirstUnselectable
from ln_probe.analyses.geometry.wolfe import BUDGET


@dataclass(frozen=True)
class Proved:
    """Verdicts that were proved.

    Attributes:
        verdicts: with what proves them.
        clear: the relative score gap of selectable keys (and duplicates), minus the residual of unselectable ones; NaN
            for undecided keys. Near ±tau a verdict is near its tolerance.
        repaired: whose certificate failed at first, or was replaced.
        exact: verdicts of exact arithmetic, by key, with their proofs (`strict`).
    """

    verdicts: Verdicts
    clear: Float64[np.ndarray, " key"]
    repaired: Bool[np.ndarray, " key"]
    exact: Mapping[int, ExactVerdict] = field(default_factory=dict)

    @property
    def by_tolerance(self) -> Bool[np.ndarray, " key"]:
        """Whose verdict was not decided exactly."""
        found = np.ones(len(self.clear), bool)
        found[list(self.exact)] = False
        return found


@dataclass(frozen=True)
class Margins:
    """Bounds of every key's margin, in units of the set, and what proves them, in the order of the keys asked for."""

    lower: Float64[np.ndarray, " some"]
    upper: Float64[np.ndarray, " some"]
    point: Float64[np.ndarray, "some r"]  # u of the query that proves lower
    weights: Rows  # prove upper, a row per key asked for
    repaired: Bool[np.ndarray, " some"]

    def bounds(self, power: int) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
        """Both bounds as plain numbers, from the unit `2**power`."""
        return outwards(self.lower, power, up=False), outwards(self.upper, power, up=True)


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
    checker: Checker, sets: KeyCoordinates, i: int, budget: float, until: int | None = None
) -> tuple[int, float, Floats, tuple[Ints, Floats]]:
    """Solve for key i among the keys (up to position `until`) that differ from it, by one solver after the other.

    Returns:
        the verdict that is proved, how clear it is, and the query or the row of weights that prove it.
    """
    one, last = np.array([i]), None if until is None else np.array([until])
    nothing = np.empty(0), (np.empty(0, np.int64), np.empty(0))
    for query, index, value in alone(sets, i, budget, until):
        gap, near = checker.selects(one, query[None], until=last)
        if gap.lower[0] > TAU * (1 - SLACK):
            return (DUPLICATE if near[0] else SELECTABLE), gap.lower[0], query, nothing[1]
        if len(index):
            miss = checker.reproduces(one, Rows(np.array([0, len(index)]), index, value), until=last)
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
    wide = np.flatnonzero(too_wide(lower, upper, gap, space.size, inside))
    dim, rows = space.rows.shape[1], dict[int, tuple[Ints, Floats]]()
    if len(wide):
        point = point.copy()
    for k in map(int, wide):  # what proved the verdict, then another solver
        one, i = asked[k : k + 1], int(asked[k])
        for solve in (False, True) if inside[k] else (True,):
            if solve:
                u, index, value = again(space, i, gap, float(lower[k]), float(upper[k]), point[k, :dim], budget)
            else:
                u, (index, value) = np.zeros(dim) if space.level is None else space.level, verdicts.row(i)
            better = checker.gap_at_least(one, np.append(u, np.zeros(point.shape[1] - dim))[None]).lower[0]
            if better > lower[k]:
                lower[k], point[k, :dim], repaired[k] = better, u, True
            tighter = checker.gap_at_most(one, Rows(np.array([0, len(index)]), index, value)).upper[0]
            if tighter < upper[k]:
                upper[k], rows[k], repaired[k] = tighter, (index, value), True
            if not too_wide(lower[k : k + 1], upper[k : k + 1], gap, space.size, inside[k : k + 1])[0]:
                break
    if rows:
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


def prove_positions(checker: Checker, verdicts: Verdicts, first: FirstUnselectable) -> tuple[FirstUnselectable, int]:
    """Check from where on keys are unselectable; how many positions could be earlier as far as is proved.

    That a key is inside at its position is proved or it is -1 (as for a key that is not unselectable); that it is not
    before is proved by a query that selects it among the keys before, or it has no query and is counted.
    """
    number = len(first.at)
    at, query = first.at.copy(), first.query.copy()
    at[verdicts.code != UNSELECTABLE] = -1
    down = np.flatnonzero(verdicts.code == UNSELECTABLE)
    if len(down) == 0:
        return replace(first, at=at), 0
    miss = checker.reproduces(down, first.weights.some(first.source[down]), until=at[down])
    failed = down[~(miss.upper <= TAU * (1 + SLACK)) | (at[down] < 0)]  # (strictly, weights may be on near-copies)
    if len(failed):  # the verdict's own weights prove it where their last key is
        rows = _rows_of(first, down)
        for i in map(int, failed):
            rows[i] = verdicts.row(i)
            at[i] = max(i, int(rows[i][0].max()))
        first = replace(first, weights=Rows.of(rows, number), source=np.arange(number))
    late = down[at[down] > down]
    open_ = 0
    if len(late):
        gap, _ = checker.selects(late, query[late], until=at[late] - 1)
        left = late[~(gap.lower > TAU * (1 - SLACK))]
        query[left], open_ = np.nan, len(left)
    return replace(first, at=at, query=query), open_


def close_positions(
    checker: Checker, sets: KeyCoordinates, verdicts: Verdicts, first: FirstUnselectable, budget: float = BUDGET
) -> tuple[FirstUnselectable, int]:
    """Solve again for the positions that `prove_positions` left open, one key at a time, against every
    key before that differs from it; how many are still open."""
    late = np.flatnonzero((first.at > np.arange(len(first.at))) & np.isnan(first.query).any(axis=1))
    if len(late) == 0:
        return first, 0
    at, query, open_ = first.at.copy(), first.query.copy(), 0
    rows = _rows_of(first, np.flatnonzero(verdicts.code == UNSELECTABLE))
    for i in map(int, late):
        # Among keys 0..high it is unselectable, among 0..low it is not (or there is no such position).
        low, high, one = i - 1, int(at[i]), np.array([i])
        tried = high - 1
        while high - low > 1:
            code, _, asked, (index, value) = _alone(checker, sets, i, budget, tried)
            if code == UNDECIDED:
                break
            if code == UNSELECTABLE:
                rows[i] = index[value > 0.0], value[value > 0.0]
                high = max(i, int(rows[i][0].max()))
            else:
                query[i], low = asked, tried
            tried = (low + high) // 2
        at[i] = high
        if high > i:
            gap, _ = checker.selects(one, query[one], until=np.array([high - 1]))
            if not gap.lower[0] > TAU * (1 - SLACK):
                query[i], open_ = np.nan, open_ + 1
    weights = Rows.of(rows, len(at))
    return replace(first, at=at, query=query, weights=weights, source=np.arange(len(at))), open_


def _rows_of(first: FirstUnselectable, keys: Ints) -> dict[int, tuple[Ints, Floats]]:
    """Weights of some keys, a row for each: a row that copies share may not be replaced for one of them alone."""
    return {int(i): first.weights.row(int(first.source[i])) for i in keys}


# Beyond these a warning is given. Directions that differ more than this in spread are distinguished by tau alone: what
# is thinner than tau counts as flat. Keys that far from the origin have lost half of float32's digits to their offset.
_SPREAD, _OFFSET = 1e6, 1e4
# Scores that rounding moves by more than this (nats) have no attention worth stating.
SCORE_NOISE = 1e-3
# A share of keys this near to the tolerance makes the tolerance decide.
_NEAR_SHARE = 0.01
# How close to the best gap a query has to be to tell whether it is above 2 tau.
_ROUGHLY = 0.3


@dataclass(frozen=True)
class Conditioning:
    """Figures of one set of keys.

    Attributes:
        spread: largest over smallest RMS of the keys along the directions of their span.
        offset_over_spread: length of the mean key over the RMS norm of the centred keys.
        score_noise: eps times the largest score before cancellation, nats; NaN without a query set.
        near_tau: number of keys whose verdict lies within a factor 2 of the tolerance, and undecided ones.
    """

    spread: float
    offset_over_spread: float
    score_noise: float
    near_tau: int

    def warnings(self, number: int) -> tuple[str, ...]:
        """What endangers the verdicts, a sentence each; empty if nothing does."""
        figures = (
            (
                self.spread > _SPREAD,
                f"keys spread {self.spread:.1e} times further in one direction than in another: what is thinner than "
                f"tau ({TAU:g} of their RMS norm) counts as flat",
            ),
            (
                self.offset_over_spread > _OFFSET,
                f"the mean key is {self.offset_over_spread:.1e} times longer than keys are apart: if they were "
                "computed in float32, few digits of their differences are left; centre them before rounding",
            ),
            (
                self.score_noise > SCORE_NOISE,
                f"scores are so large that float64 rounds them by {self.score_noise:.1e} nats: bounds of attention and "
                "margins are wide; use a smaller query set",
            ),
            (
                self.near_tau > _NEAR_SHARE * number,
                f"{self.near_tau} of {number} keys are within a factor 2 of the tolerance {TAU:g}, or undecided: "
                "strict=True decides them exactly",
            ),
        )
        return tuple(text for critical, text in figures if critical)


def conditioning(
    sets: KeyCoordinates, where: ScoreSpace, verdicts: Verdicts, clear: Float64[np.ndarray, " key"]
) -> Conditioning:
    """Figures of one set, from its coordinates, its verdicts and how clear they are (`Proved.clear`)."""
    near = np.isnan(clear) | ((clear < 0) & (clear < -TAU / 2))
    weak = np.flatnonzero((clear > 0) & (clear < 2 * TAU))  # by the query that was found; is there a better one?
    if len(weak):
        near[weak[_best_gap(sets, where, verdicts, weak) < 2 * TAU]] = True
    return Conditioning(
        spread=float(sets.stretch.max() / sets.stretch.min()) if len(sets.stretch) else 1.0,
        offset_over_spread=where.offset_over_spread,
        score_noise=EPS * where.largest_score,
        near_tau=int(near.sum()),
    )


def _best_gap(
    sets: KeyCoordinates, where: ScoreSpace, verdicts: Verdicts, keys: Int64[np.ndarray, " some"]
) -> Float64[np.ndarray, " some"]:
    """The relative score gap that the query towards the nearest point of the hull of the others gives."""
    space = measured(sets, where, through_queries=False)
    if len(space.distinct) < 2:
        return np.zeros(len(keys))
    query, _ = propose(space, verdicts, _ROUGHLY, keys, np.inf)
    scores = query @ space.rows.T
    own = scores[np.arange(len(keys)), keys]
    for k, i in enumerate(keys):
        scores[k, np.linalg.norm(space.rows - space.rows[i], axis=1) <= TAU] = -np.inf
    return np.asarray(own - scores.max(axis=1))
