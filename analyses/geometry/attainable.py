"""How much attention can a key get? Its largest softmax weight over a set of queries, certified.

The set is a solid ellipsoid `center + axes @ u`, `|u| <= 1`: what a head can produce from a normalized
residual stream, or the part of it that occurs. The log of a softmax weight is concave in the query, so a
point and the gradient there bound the weight on the whole set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from ln_probe.analyses.geometry.ball_newton import largest_weights
from ln_probe.analyses.geometry.judged import Judged
from ln_probe.analyses.geometry.min_norm import BUDGET

# The largest weight is found to this (absolute): attention is read to two digits.
WEIGHT_GAP = 0.01

# Share of the gap that is left to the solver; the rest is for the rounding that a proof takes off.
_PROOF = 1 - 1e-4

# Newton steps per key. Heads with scores of tens of nats take 1 to 20. With hundreds of nats log w has kinks
# and takes a hundred; of 512 lognormal keys with scores of up to 800 nats one was left with a wider bound.
STEPS = 400


@dataclass(frozen=True)
class Attainable:
    """Largest weights of the keys of one set over one set of queries."""

    weight: Float64[np.ndarray, " key"]  # that some query gives
    upper: Float64[np.ndarray, " key"]  # that no query exceeds
    point: Float64[np.ndarray, "key r"]  # u of the query that gives `weight`
    proof: Float64[np.ndarray, "key r"]  # u at which the gradient proves `upper`


def attainable(
    where: Judged,
    starts: Float64[np.ndarray, "key r"] | None = None,
    gap: float = WEIGHT_GAP,
    only: Int64[np.ndarray, " some"] | None = None,
    budget: float = BUDGET,
) -> Attainable:
    """The largest softmax weight of every key over a set of queries, as the solver finds it: `proofs` checks it.

    Args:
        where: the keys through the set of queries.
        starts: directions of u in which good queries are expected, of any length; NaN or 0 where there are
            none.
        gap: how far apart weight and upper bound may be.
        only: of these keys (among all of them): the result and `starts` have a row for each.
        budget: multiply-adds per key, after which its bracket stays as wide as it is.
    """
    (rows, offset), gap = where.at(0), gap * _PROOF
    if offset is None:
        offset = np.zeros(len(rows))
    targets = np.arange(len(rows)) if only is None else only
    first = into_ball(rows[targets])
    both = np.stack([first] if starts is None else [first, into_ball(np.nan_to_num(starts))])
    columns = np.ascontiguousarray(rows.T)
    weight, upper, point, proof, _ = largest_weights(rows, columns, offset, targets, both, gap, STEPS, budget)
    left = np.flatnonzero(upper - weight > gap)
    if len(left):  # once more, from the middle
        middle = np.zeros((1, len(left), rows.shape[1]))
        again = largest_weights(rows, columns, offset, targets[left], middle, gap, STEPS, budget)
        better, tighter = again[0] > weight[left], again[1] < upper[left]
        weight[left[better]], point[left[better]] = again[0][better], again[2][better]
        upper[left[tighter]], proof[left[tighter]] = again[1][tighter], again[3][tighter]
    return Attainable(weight, upper, point, proof)


def into_ball(rows: Float64[np.ndarray, "key r"]) -> Float64[np.ndarray, "key r"]:
    """Each row over its length; zero stays zero."""
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return rows / np.where(length > 0.0, length, 1.0)
