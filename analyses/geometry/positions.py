"""What depends on the position of a query: when a key becomes unselectable, and how much attention it can get anywhere.

If a query at position t sees the keys 0..t, their hull only grows, so there is one position from which on a key is
unselectable. It is found by bisection in which every answer is used in full: weights say which keys suffice (nothing
later is needed), a query says which key is the first to beat it (nothing earlier is enough).

`attainable_anywhere` bounds the largest softmax weight of a key over all positions that see it and another one.
docs/geometry.md ("Attention") says at which position that is, and how the bound is proved where there may be several:
for any convex weights p of keys that position t sees, with or without its own key i,

    log w_i(t) ≤ -[H(p) + c_t·v + Σ p_j (b_j - b_i) - |A_tᵀ v|],    v = Σ p_j (k_j - k_i)

(Gibbs, as in `checker`; H the entropy, b a bias per key, `c_t + A_t u` the queries at t). p comes from the problem at
the last position, among the keys that all positions see, so it is one p per key; the bound is evaluated at every
position. With a window the positions are taken in two halves, so that all positions of a half see at least half of the
window's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.active_set import INSIDE
from ln_probe.analyses.geometry.checker import Rows
from ln_probe.analyses.geometry.coordinates import TAU, Floats, Ints, KeyCoordinates, count_bias
from ln_probe.analyses.geometry.decide import UNSELECTABLE, Verdicts, nearest_leaders
from ln_probe.analyses.geometry.exact import ExactVerdict
from ln_probe.analyses.geometry.inputs import AMPLE, EPS
from ln_probe.analyses.geometry.newton import STEPS, WEIGHT_GAP, into_ball, largest_weights
from ln_probe.analyses.geometry.wolfe import BUDGET


@dataclass(frozen=True)
class FirstUnselectable:
    """Positions, and what proves them, in the order of the keys."""

    at: Int64[np.ndarray, " key"]  # -1: never
    query: Float64[np.ndarray, "key dim"]  # over normalized keys: selects the key at position at-1; NaN: not needed
    weights: Rows  # over keys 0..at
    source: Int64[np.ndarray, " key"]  # whose row of weights a key has
    # Positions of exact arithmetic, by key: the verdict among keys 0..at and that among 0..at-1 (None if not needed).
    exact: Mapping[int, tuple[ExactVerdict, ExactVerdict | None]] = field(default_factory=dict)


def first_unselectable(sets: KeyCoordinates, verdicts: Verdicts) -> FirstUnselectable:
    """Smallest t >= i at which key i lies in the hull of the other keys 0..t (equal keys count as one)."""
    number = len(verdicts.code)
    leaders = sets.leaders
    todo = np.flatnonzero(verdicts.code[leaders] == UNSELECTABLE)
    rows = {int(leaders[k]): verdicts.row(int(leaders[k])) for k in todo}
    query = np.full(sets.normalized.shape, np.nan)
    ordered = sets.normalized[leaders]
    # With the first `enough` representatives visible a key is inside, with the first `few` it is not.
    enough = np.array([_seen(leaders, int(k), rows[int(leaders[k])][0]) for k in todo], np.int64)
    few = np.maximum(todo, 1)
    while len(open_ := np.flatnonzero(enough - few > 1)):
        counts = (enough[open_] + few[open_]) // 2
        nearest, units = nearest_leaders(sets, todo[open_], counts)
        for a, k in enumerate(open_):
            place, key = int(todo[k]), int(leaders[todo[k]])
            if nearest.ended[a] == INSIDE:
                index, value = nearest.weights.row(a)
                rows[key] = leaders[index], value
                enough[k] = _seen(leaders, place, rows[key][0])
                continue
            few[k] = counts[a]
            unit = units[a]
            gaps = _leads(ordered, unit, place)
            if sets.biased and unit[-1] <= 0.0:
                unit = count_bias(unit[None], gaps[: counts[a]].min(keepdims=True), ordered[:, -1])[0]
                gaps = _leads(ordered, unit, place)
            beaten = np.flatnonzero(gaps <= TAU)
            reach = int(beaten[0]) if len(beaten) else len(leaders)
            if reach >= counts[a]:  # this query selects the key until key `reach` appears
                few[k] = min(reach, int(enough[k]) - 1)
                query[key] = unit
    at = np.full(number, -1)
    at[leaders[todo]] = leaders[enough - 1]
    for key, (index, _) in rows.items():  # weights may be on a copy that comes after its representative
        at[key] = max(int(at[key]), int(index.max()))
    at = at[sets.representative]
    at = np.where(at >= 0, np.maximum(at, np.arange(number)), -1)
    return FirstUnselectable(at, query[sets.representative], Rows.of(rows, number), sets.representative)


def _leads(rows: Floats, query: Floats, own: int) -> Floats:
    """By how much each key scores below one of them; infinite for itself."""
    scores = rows @ query
    gaps = scores[own] - scores
    gaps[own] = np.inf
    return np.asarray(gaps)


def _seen(leaders: Ints, own: int, used: Ints) -> int:
    """How many representatives are visible when a key and all those with weights are."""
    return max(own + 1, int(np.searchsorted(leaders, used.max(), side="right")))


# Centers "set d" and axes "set d r" of the queries at some positions.
QuerySets = Callable[[Ints], tuple[Float64[np.ndarray, "set d"], Float64[np.ndarray, "set d r"]]]

# Numbers in one block of products: 2 MB, which stay in a core's cache.
_BLOCK = 250_000


def attainable_anywhere(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    queries: QuerySets,
    *,
    rotary: bool,
    causal: bool,
    window: int | None = None,
    only: Int64[np.ndarray, " some"] | None = None,
) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
    """Bound the largest softmax weight of each key over all positions that see it and another key.

    Args:
        keys: of the whole prompt, as attention sees them; one per position.
        bias: added to the scores of each key, nats.
        queries: the set of queries at each position.
        rotary: whether that set differs by position (else it is asked for one position only).
        causal: whether a position sees no later keys.
        window: how many keys a position sees at most, its own included; None: no limit.
        only: of these keys; None: of all.

    Returns:
        A weight that a query at some position gives, and what no query at any position exceeds; NaN where no position
        sees the key and another one. Both allow for rounding.
    """
    number = len(keys)
    targets = np.arange(number) if only is None else only
    if number < 2 or (window is not None and window < 2):
        nothing = np.full(len(targets), np.nan)
        return nothing, nothing
    level = np.zeros(number) if bias is None else bias - bias.mean()
    problem = _Problem(keys - keys.mean(axis=0), level, queries, rotary, causal, window, targets)
    first = np.maximum(targets, 1) if causal else np.zeros_like(targets)
    last = np.full(len(targets), number - 1)
    if window is None or window >= number:
        return problem.between(first, last)
    last = np.minimum(last, targets + window - 1)
    middle = (first + last) // 2
    weight, upper = problem.between(first, middle)
    later = np.flatnonzero(middle < last)
    if len(later):
        more = replace(problem, targets=targets[later]).between(middle[later] + 1, last[later])
        weight[later], upper[later] = np.maximum(weight[later], more[0]), np.maximum(upper[later], more[1])
    return weight, upper


@dataclass
class _Problem:
    """Some keys of a prompt, and bounds of their weights at the positions of an interval."""

    keys: Float64[np.ndarray, "key d"]  # centred, as the bias is
    bias: Floats
    queries: QuerySets
    rotary: bool
    causal: bool
    window: int | None
    targets: Ints

    @cached_property
    def length(self) -> Floats:
        return np.asarray(np.linalg.norm(self.keys, axis=1))

    @property
    def rounding(self) -> float:
        """Of a sum over the keys or the dimensions, and what follows it, relative to the sizes of its terms."""
        return (sum(self.keys.shape) + 16) * AMPLE * EPS

    def between(self, first: Ints, last: Ints) -> tuple[Floats, Floats]:
        """A weight at position `first` of each key, and a bound for all positions from there to `last`."""
        low, high = self._seen(last)[0], self._seen(first)[1]
        rows, offset, best, proof = self._solved(low, high)
        scores = proof @ rows.T + offset
        place = np.arange(len(self.keys))
        scores[(place < low[:, None]) | (place > high[:, None])] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=1, keepdims=True)
        # The bound holds for any such weights.
        entropy = -np.einsum("ij,ij->i", shares, np.log(np.where(shares > 0.0, shares, 1.0)))
        mean = shares @ self.keys - self.keys[self.targets]
        level = entropy + shares @ self.bias - self.bias[self.targets]
        far = shares @ self.length + self.length[self.targets]
        unsure = self.rounding * (
            entropy + 1.0 + np.log(len(self.keys)) + shares @ np.abs(self.bias) + np.abs(self.bias[self.targets])
        )
        log_bound = np.full(len(self.targets), -np.inf)
        # Queries that may give each target much weight at its first position, and how long queries there can be.
        tried, longest_there = np.empty((2, len(self.targets), self.keys.shape[1])), np.empty(len(self.targets))
        for positions, center, axes in self._sets(rows.shape[1], first, last):
            some = np.flatnonzero((first <= positions[-1]) & (last >= positions[0]))
            width, r = len(center), axes.shape[2]
            seen = (mean[some] @ axes.transpose(0, 2, 1).reshape(width * r, -1).T).reshape(-1, width, r)
            reach = np.sqrt(np.einsum("ntr,ntr->nt", seen, seen))
            longest = np.linalg.norm(center, axis=1) + np.sqrt(np.einsum("tdr,tdr->t", axes, axes))
            doubt = unsure[some, None] + self.rounding * far[some, None] * longest
            bound = reach - mean[some] @ center.T - level[some, None] + doubt
            if self.rotary:
                bound[(positions < first[some, None]) | (positions > last[some, None])] = -np.inf
            log_bound[some] = np.maximum(log_bound[some], bound.max(axis=1))
            here = np.flatnonzero((first[some] >= positions[0]) & (first[some] <= positions[-1]))
            at, points = np.zeros(len(here), np.int64), np.stack([best[some[here]]] * 2)
            if self.rotary:  # down the bound, or towards the key
                at = first[some[here]] - positions[0]
                towards = np.einsum("ndr,nd->nr", axes[at], self.keys[self.targets[some[here]]])
                points = np.stack([-into_ball(seen[here, at]), into_ball(towards)])
            points /= np.maximum(np.linalg.norm(points, axis=2) * (1.0 + (r + 8) * EPS), 1.0)[..., None]
            tried[:, some[here]] = center[at] + np.einsum("ndr,knr->knd", axes[at], points)
            longest_there[some[here]] = longest[at]
        weights = [self._weights(queries, first, longest_there) for queries in tried[: 2 if self.rotary else 1]]
        return np.max(weights, axis=0), np.exp(np.minimum(log_bound, 0.0)) * (1 + self.rounding)

    def _seen(self, position: Ints) -> tuple[Ints, Ints]:
        """The first and the last key that each position sees."""
        low = np.zeros_like(position) if self.window is None else np.maximum(position - self.window + 1, 0)
        return low, position if self.causal else np.full_like(position, len(self.keys) - 1)

    def _solved(
        self, low: Ints, high: Ints
    ) -> tuple[Float64[np.ndarray, "key r"], Floats, Float64[np.ndarray, "some r"], Float64[np.ndarray, "some r"]]:
        """The keys as the last position's queries see them, what is added to their scores, and for each target the u
        that gives it the largest weight among the keys from `low` to `high`, and the u that proves a bound of it."""
        center, axes = self.queries(np.array([len(self.keys) - 1]))
        rows = np.ascontiguousarray(self.keys @ axes[0])
        offset = self.keys @ center[0] + self.bias
        first = into_ball(rows[self.targets])
        best, proof = np.empty_like(first), np.empty_like(first)
        for start in np.unique(low):  # one, but for a window
            some = np.flatnonzero(low == start)
            part = np.ascontiguousarray(rows[start:])
            best[some], proof[some] = largest_weights(
                part,
                np.ascontiguousarray(part.T),
                np.ascontiguousarray(offset[start:]),
                self.targets[some] - start,
                high[some] - start + 1,
                first[some][None],
                WEIGHT_GAP,
                STEPS,
                BUDGET,
            )[2:4]
        return rows, offset, best, proof

    def _sets(
        self, r: int, first: Ints, last: Ints
    ) -> Iterator[tuple[Ints, Float64[np.ndarray, "set d"], Float64[np.ndarray, "set d r"]]]:
        """Positions, some at a time, with their sets of queries; one set for all without rotary positions."""
        if not self.rotary:
            center, axes = self.queries(np.array([len(self.keys) - 1]))
            yield np.array([first.min(), last.max()]), center, axes
            return
        step = max(1, _BLOCK // (r * max(len(self.targets), self.keys.shape[1])))
        for start in range(int(first.min()), int(last.max()) + 1, step):
            positions = np.arange(start, min(start + step, int(last.max()) + 1))
            yield positions, *self.queries(positions)

    def _weights(
        self, queries: Float64[np.ndarray, "some d"], position: Ints, longest: Floats
    ) -> Float64[np.ndarray, " some"]:
        """At least the weight that each target gets from its query at its position; `longest`: bounds their length."""
        scores = queries @ self.keys.T + self.bias
        low, high = self._seen(position)
        place = np.arange(len(self.keys))
        scores[(place < low[:, None]) | (place > high[:, None])] = -np.inf
        own = scores[np.arange(len(scores)), self.targets]
        most = scores.max(axis=1)
        total = np.log(np.exp(scores - most[:, None]).sum(axis=1)) + most
        far = self.length[self.targets] + self.length.max()
        doubt = self.rounding * (far * longest + 2 * np.abs(self.bias).max() + 1.0)
        return np.asarray(np.exp(own - total - doubt) * (1 - self.rounding))
