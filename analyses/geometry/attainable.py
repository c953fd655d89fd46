"""How much attention can a key get? Its largest softmax weight over a set of queries, certified.

The set is a solid ellipsoid `center + axes @ u`, `|u| <= 1`: what a head can produce from a normalized
residual stream, or the part of it that occurs. The log of a softmax weight is concave in the query, so a
point and the gradient there bound the weight on the whole set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from ln_probe.analyses.geometry.ball_newton import largest_weights
from ln_probe.analyses.geometry.key_sets import Array, key_sets
from ln_probe.analyses.geometry.parallel import in_threads
from ln_probe.analyses.geometry.query_sets import QuerySet, query_sets

# The largest weight is found to this (absolute): attention is read to two digits.
WEIGHT_GAP = 0.01

# Newton steps per key. Heads with scores of tens of nats take 1 to 20. With hundreds of nats log w has kinks
# and takes a hundred; of 512 lognormal keys with scores of up to 800 nats one was left with a wider bound.
_STEPS = 400


@dataclass(frozen=True)
class Attainable:
    """Largest weights of the keys of one set over one set of queries."""

    weight: Float64[np.ndarray, " key"]  # that some query gives
    upper: Float64[np.ndarray, " key"]  # that no query exceeds
    point: Float64[np.ndarray, "key r"]  # u of the query that gives `weight`
    proof: Float64[np.ndarray, "key r"]  # u at which the gradient proves `upper`
    axes: Float64[np.ndarray, "d r"]  # what u multiplies


def attainable(
    keys: Float64[np.ndarray, "key d"],
    queries: QuerySet,
    bias: Float64[np.ndarray, " key"] | None = None,
    starts: Float64[np.ndarray, "key r"] | None = None,
    gap: float = WEIGHT_GAP,
    only: Int64[np.ndarray, " some"] | None = None,
) -> Attainable:
    """The largest softmax weight of every key over a set of queries.

    Args:
        keys: their products with queries, plus `bias`, are scores in nats.
        queries: the set, compact.
        starts: directions of u in which good queries are expected, of any length; NaN or 0 where there are
            none.
        gap: how far apart weight and upper bound may be.
        only: of these keys (among all of them): the result and `starts` have a row for each.

    Raises:
        ValueError: scores that overflow.
    """
    rows, offset = scores_over(keys, queries, bias)
    targets = np.arange(len(keys)) if only is None else only
    first = into_ball(rows[targets])
    both = np.stack([first] if starts is None else [first, into_ball(np.nan_to_num(starts))])
    columns = np.ascontiguousarray(rows.T)
    weight, upper, point, proof, _ = largest_weights(rows, columns, offset, targets, both, gap, _STEPS)
    left = np.flatnonzero(upper - weight > gap)
    if len(left):  # once more, from the middle
        middle = np.zeros((1, len(left), rows.shape[1]))
        again = largest_weights(rows, columns, offset, targets[left], middle, gap, _STEPS)
        better, tighter = again[0] > weight[left], again[1] < upper[left]
        weight[left[better]], point[left[better]] = again[0][better], again[2][better]
        upper[left[tighter]], proof[left[tighter]] = again[1][tighter], again[3][tighter]
    return Attainable(weight, upper, point, proof, queries.axes)


def attainable_attention(
    keys: Float[Array, "*batch key d"],
    query_set: float | tuple[Float[Array, "*batch d"], Float[Array, "*batch d r"]],
    bias: Float[Array, "*batch key"] | None = None,
    *,
    starts: Float64[np.ndarray, "*batch key r"] | None = None,
    gap: float = WEIGHT_GAP,
    threads: int | None = None,
) -> tuple[Float64[np.ndarray, "*batch key"], Float64[np.ndarray, "*batch key"]]:
    """The largest softmax weight every key can get from a query of a set, without the rest of `key_geometry`.

    Args:
        keys, query_set, bias: as for `key_geometry`; scores are plain products in nats.
        starts: directions of u in which good queries are expected, as `KeyGeometry.attainable_at` of a larger set
            gives them; halves the time.
        gap: how far apart weight and upper bound may be.
        threads: how many sets to work on at a time, by default as many as there are processors.

    Returns:
        the weight that some query of the set gives, and an upper bound for all of them.

    Raises:
        TypeError, ValueError: as for `key_geometry`; scores that overflow.
    """
    values, lift, batched = key_sets(keys, bias)
    queries = query_sets(query_set, len(values), values.shape[2])
    first = starts if starts is None or batched else starts[None]

    def one(b: int) -> Attainable:
        return attainable(
            values[b], queries[b], None if lift is None else lift[b], None if first is None else first[b], gap
        )

    found = in_threads(one, range(len(values)), threads)
    weight, upper = np.stack([f.weight for f in found]), np.stack([f.upper for f in found])
    return (weight, upper) if batched else (weight[0], upper[0])


def scores_over(
    keys: Float64[np.ndarray, "key d"], queries: QuerySet, bias: Float64[np.ndarray, " key"] | None
) -> tuple[Float64[np.ndarray, "key r"], Float64[np.ndarray, " key"]]:
    """Rows and offset such that the scores of the query `u` are `offset + rows @ u`, up to one common number.

    Raises:
        ValueError: scores that overflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        centred = keys - keys.mean(axis=0)
        rows = np.ascontiguousarray(centred @ queries.axes)
        offset = centred @ queries.center + (0.0 if bias is None else bias)
        largest = np.sum(rows * rows)
    if not (np.isfinite(largest) and np.isfinite(offset).all()):
        raise ValueError("the scores of the keys over the query set overflow float64: scale keys or queries down")
    return rows, offset


def into_ball(rows: Float64[np.ndarray, "key r"]) -> Float64[np.ndarray, "key r"]:
    """Each row over its length; zero stays zero."""
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return rows / np.where(length > 0.0, length, 1.0)
