"""What a search for the nearest point of a hull looks for, and how it can end."""

from __future__ import annotations

from typing import NamedTuple

from ln_probe.analyses.geometry.scores import Floats

# How a search ended.
SEPARATED = 1  # the query -x has a relative score gap above tau
INSIDE = 2  # the weights reproduce the key within tau
BRACKETED = 3  # lower and upper bound of the distance agree within the asked gap
CONVERGED = 4  # nearest point found to rounding, and neither of the above
STALLED = 5  # rounding or the step limit stopped it: no verdict
EXHAUSTED = 6  # the budget ran out: bounds, query and weights hold as far as they go

# Verdicts are taken this far (relative) from tau, so that whoever computes the certificate again agrees.
CLEAR = 1e-3


class Search(NamedTuple):
    """The point of the hull of keys 0..number-1 without `target` that is nearest to key `target`."""

    rows: Floats  # the keys, "key dim"
    columns: Floats  # and "dim key"
    target: int
    number: int
    ray: bool  # whether the hull is extended downwards along the last coordinate (keys with a bias)
    stretch: Floats  # with `slope`: turns these coordinates into the keys' normalized ones
    slope: Floats
    tau: float  # with gap < 0: stop when a verdict holds with this tolerance in normalized coordinates
    # If >= 0: stop when lower and upper bound differ by at most this share of the lower (of scaled differences: their
    # bounds), or upper <= tau.
    gap: float
    # What the difference of each key from the target is multiplied by; the active set's weights are of these products
    # (`min_norm.unscale` makes them weights of the keys). `polish` takes all for 1.
    scale: Floats
