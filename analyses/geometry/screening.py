"""Every key of a large set under the query that points at it: what that proves, in one pass in single precision.

Scores of all keys under all pointing queries are one symmetric matrix, Z Zᵀ, over the lengths of its rows, so half of
its blocks are enough. A block is looked at once, from both sides, and forgotten. What single precision may have lost is
bounded, and taken off (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, §3.1): a positive `gap` is a
proof that the key can be selected, and `log_weight` is known to `doubt`. Most keys of a vocabulary need nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from ln_probe.analyses.geometry.attainable import into_ball
from ln_probe.analyses.machinery.parallel import in_threads

# Keys of one side of a block of scores: 4 MB, which stay in a core's cache. 512, 1024 and 2048 take as long.
_SIDE = 1024
_SINGLE = float(np.finfo(np.float32).eps) / 2
# Covers the rounding of the bounds themselves, and of the few operations after the product.
_AMPLE = 2.0
# The sum of exponentials: numpy adds pairwise within a block, and one block after the other.
_SUM = 1e-4
# Keys shorter than this share of the longest are not screened: what single precision leaves of them proves nothing.
_SHORT = 1e-6
# Numbers in a block of scores in double precision: 16 MB.
_BLOCK = 2_000_000


@dataclass(frozen=True)
class Pointed:
    """Keys under the queries of length 1 that point at them.

    Attributes:
        gap: no more than the score gap to the best of all other keys, without what is added to scores; nats.
        log_weight: of the key's softmax weight, with what is added to scores.
        doubt: `log_weight` is off by no more.
    """

    gap: Float64[np.ndarray, " key"]
    log_weight: Float64[np.ndarray, " key"]
    doubt: Float64[np.ndarray, " key"]


def pointed(rows: Float64[np.ndarray, "key r"], offset: Float64[np.ndarray, " key"] | None) -> Pointed:
    """Screen every key by the query that points at it.

    Args:
        rows: keys through a query set, in nats (`judged.rows`); a query is a point of the unit ball.
        offset: added to the scores; None: nothing.

    Returns:
        bounds for every key; a set of one has an infinite gap.
    """
    number, dim = rows.shape
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    unit = float(length.max(initial=0.0)) or 1.0
    single = np.empty((number, dim), np.float32)
    for some in _sides(number):
        single[some] = rows[some] / unit
    added = np.zeros(number) if offset is None else offset - offset.mean()
    own = length + added
    # From a product of two scaled keys to the score of one under the other's query, in nats.
    seen = length > _SHORT * unit
    factor = np.divide(unit * unit, length, out=np.zeros(number), where=seen)
    sums = _Sums(single, factor.astype(np.float32), added.astype(np.float32), own.astype(np.float32))
    sides = list(_sides(number))
    in_threads(sums.add, [(a, b) for k, a in enumerate(sides) for b in sides[k:]])
    most, total = sums.result()
    lost = _AMPLE * (dim + 8) * _SINGLE * unit
    gap = np.full(number, np.inf)
    if number > 1:
        gap = np.where(seen, length - most * factor - lost, -np.inf)
    size = length + unit + np.abs(own) + np.abs(added).max(initial=0.0)
    doubt = np.where(seen & np.isfinite(total), lost + _AMPLE * 8 * _SINGLE * size + _SUM, np.inf)
    return Pointed(gap, -np.log1p(total), doubt)


def pointed_at(
    rows: Float64[np.ndarray, "key r"], offset: Float64[np.ndarray, " key"] | None, which: Int64[np.ndarray, " some"]
) -> Float64[np.ndarray, " some"]:
    """`Pointed.log_weight` of some keys in double precision."""
    found = np.empty(len(which))
    step = max(1, _BLOCK // len(rows))
    for first in range(0, len(which), step):
        some = which[first : first + step]
        scores = into_ball(rows[some]) @ rows.T
        if offset is not None:
            scores += offset
        scores -= scores.max(axis=1, keepdims=True)
        here = scores[np.arange(len(some)), some]
        found[first : first + step] = here - np.log(np.exp(scores, out=scores).sum(axis=1))
    return found


def _sides(number: int) -> list[slice]:
    return [slice(first, min(first + _SIDE, number)) for first in range(0, number, _SIDE)]


class _Sums:
    """Largest product with another key, and the sum of exp(score - own score) over the others, of every key."""

    def __init__(
        self,
        keys: Float32[np.ndarray, "key r"],
        factor: Float32[np.ndarray, " key"],
        added: Float32[np.ndarray, " key"],
        own: Float32[np.ndarray, " key"],
    ) -> None:
        self.keys, self.factor, self.added, self.own = keys, factor, added, own
        # (start of the queries, start of the keys): largest products and sums of the queries
        self.parts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def add(self, pair: tuple[slice, slice]) -> None:
        """One block, for its rows and (off the diagonal) for its columns."""
        a, b = pair
        products = self.keys[a] @ self.keys[b].T
        if a == b:
            np.fill_diagonal(products, -np.inf)
        self.parts[a.start, b.start] = products.max(axis=1), self._shares(products, a, b)
        if a != b:
            self.parts[b.start, a.start] = products.max(axis=0), self._shares(products.T, b, a)

    def _shares(
        self, products: Float32[np.ndarray, "query key"], queries: slice, keys: slice
    ) -> Float32[np.ndarray, " query"]:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # 0 · -inf: a key that is not screened
            scores = products * self.factor[queries, None]
            scores += self.added[None, keys]
            scores -= self.own[queries, None]
            return np.asarray(np.exp(scores, out=scores).sum(axis=1))

    def result(self) -> tuple[Float64[np.ndarray, " key"], Float64[np.ndarray, " key"]]:
        """Both, summed in an order that does not depend on which thread did what."""
        most, total = np.full(len(self.keys), -np.inf), np.zeros(len(self.keys))
        for (first, _), (largest, shares) in sorted(self.parts.items()):
            side = slice(first, first + len(shares))
            most[side] = np.maximum(most[side], largest)
            total[side] += shares
        return most, total
