"""Some keys of a large set, each among all others, without measuring the rest.

What `hull.set_geometry` does for every key, for a few: the same solvers propose, the same checker proves. Keys of which
nothing is asked are still competitors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int64

from ln_probe.analyses.geometry.attainable import WEIGHT_GAP, Attainable, attainable
from ln_probe.analyses.geometry.certificates import Checker
from ln_probe.analyses.geometry.first_unselectable import first_unselectable
from ln_probe.analyses.geometry.key_coordinates import TAU, coordinates
from ln_probe.analyses.geometry.margins import RELATIVE_GAP
from ln_probe.analyses.geometry.proofs import (
    close_positions,
    prove_attention,
    prove_margins,
    prove_positions,
    prove_verdicts,
    reached,
)
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.verdicts import decide
from ln_probe.analyses.geometry.witnesses import GivenSet


@dataclass(frozen=True)
class SomeKeys:
    """What was found out about the keys asked for, in their order.

    Attributes:
        verdict: index into `verdicts.NAMES`.
        margin_lower, margin_upper, attainable, attainable_upper, first_unselectable_at: as in `KeyGeometry`; NaN where
            not asked for.
        attainable_at: u of the query that gives `attainable`; None without a set of queries.
        reachable: as in `KeyGeometry`; None without a set of queries, and where margins were not asked for.
    """

    verdict: Int8[np.ndarray, " some"]
    margin_lower: Float64[np.ndarray, " some"]
    margin_upper: Float64[np.ndarray, " some"]
    attainable: Float64[np.ndarray, " some"]
    attainable_upper: Float64[np.ndarray, " some"]
    first_unselectable_at: Float64[np.ndarray, " some"]
    attainable_at: Float64[np.ndarray, "some r"] | None
    reachable: Bool[np.ndarray, " some"] | None


def some_keys(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    queries: QuerySet | None,
    only: Int64[np.ndarray, " some"],
    *,
    causal: bool = False,
    margins: bool = True,
) -> SomeKeys:
    """The geometry of the keys `only` among all of one set.

    Args:
        keys, bias: of the set, finite.
        queries: the set of queries; None: margins relative to the RMS norm, no attention.
        only: which keys.
        causal: also from which position on each is unselectable.
        margins: whether margins are wanted.
    """
    given = GivenSet(keys, bias, queries)
    where, sets = given.measured, coordinates(given.own.points, given.own.lift)
    checker = Checker(keys, bias, queries, TAU, units=given.units)
    proved = prove_verdicts(checker, sets, decide(sets, only=only, others=False), seek=False)
    nothing = np.full(len(only), np.nan)
    lower, upper, starts, reachable = nothing, nothing, None, None
    if margins and queries is not None:
        reachable = np.ones(len(only), bool)  # of a single key
    if margins and len(keys) > 1:
        bracket = prove_margins(checker, sets, where, proved.verdicts, queries is not None, RELATIVE_GAP, only=only)
        (lower, upper), starts = bracket.bounds(where.powers.score if queries is not None else 0), bracket.point
        reachable = None if queries is None else reached(checker, bracket.lower)
    reach: Attainable | None = None
    if queries is not None:
        reach = prove_attention(checker, attainable(where, starts, WEIGHT_GAP, only), only)
    at = nothing
    if causal:
        first, _ = prove_positions(checker, proved.verdicts, first_unselectable(sets, proved.verdicts))
        first, _ = close_positions(checker, sets, proved.verdicts, first)
        at = first.at[only].astype(float)
    return SomeKeys(
        proved.verdicts.code[only],
        lower,
        upper,
        nothing if reach is None else reach.weight,
        nothing if reach is None else reach.upper,
        at,
        None if reach is None else reach.point,
        reachable,
    )


def some_attention(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    queries: QuerySet,
    only: Int64[np.ndarray, " some"],
    starts: Float64[np.ndarray, "some r"] | None = None,
) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
    """The largest softmax weight that each of the keys `only` can get among all, and what no query exceeds."""
    given = GivenSet(keys, bias, queries)
    found = attainable(given.measured, starts, WEIGHT_GAP, only)
    found = prove_attention(Checker(keys, bias, queries, TAU, units=given.units), found, only)
    return found.weight, found.upper
