"""What the first pass over the prompts finds out, which measuring builds on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ln_probe.analyses import empirical_queries
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.key_sample import KeySample
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.norm import Site
from ln_probe.hooks.optimal_constants import Halves
from ln_probe.hooks.scales import Constant

QUERY_RADIUS_QUANTILE = 0.95  # of |A⁺(q - c)| over the queries that occurred: rho of the observed set


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the first pass finds out.

    Attributes:
        norms: a row per norm that was looked at (columns of the `layernorms` table).
        constants: of every prompt: what replaces the sigma of each norm.
        radii: rho of each layer whose queries are bounded, by head.
        unsupported: why head space is left out, by layer.
        notes: what a reader has to know about this model, in sentences.
        calibrated_on: source, counts and hash of the calibration prompts, where constants come from some.
        empirical: the queries that occurred, by layer (`empirical_queries`): center and axes by head, before rotary
            positions, over the divisor.
        sample: which keys are measured; None: all.
        optimal: loss-optimal constants, by group of norms ("attention", "all"); empty: they were not fitted.
    """

    norms: pd.DataFrame
    constants: Constants
    radii: Mapping[int, Float64[np.ndarray, " head"]]
    unsupported: Mapping[int, str]
    notes: tuple[str, ...]
    calibrated_on: Mapping[str, Any] = field(default_factory=dict)
    empirical: Mapping[int, empirical_queries.Set] = field(default_factory=dict)
    sample: KeySample | None = None
    optimal: Mapping[str, Halves] = field(default_factory=dict)

    @property
    def optimal_of(self) -> Callable[[str, int], Mapping[str, Constant]] | None:
        """Loss-optimal constants of a group of norms for a prompt, fitted on other prompts; None: there are none."""
        if not self.optimal:
            return None
        return lambda group, prompt: self.optimal[group].of(prompt) if group in self.optimal else {}

    def queries(self, layer: int, head: int) -> str:
        """Which set of queries a head's margins are measured over: "reachable", where queries are bounded, else
        "empirical"; empty for head -1, the whole layer."""
        if head < 0:
            return ""
        return "reachable" if layer in self.radii else "empirical" if layer in self.empirical else ""

    def radius(self, layer: int, head: int) -> float:
        """rho of a head; NaN where there is no bound, and for head -1, the whole layer."""
        return float(self.radii[layer][head]) if head >= 0 and layer in self.radii else float("nan")

    @property
    def projection_matters(self) -> bool:
        """Whether any norm that projects has a mean to take away."""
        projects = self.norms["kind"].isin(["layernorm", "projection_only"])
        return bool((projects & (self.norms["mean_share"] > 0)).any())


def plain_queries(heads: Heads, y: Float[Tensor, "pos d_model"]) -> Float64[Tensor, "pos head d_head"]:
    """The queries of one prompt before rotary positions, over the divisor, on the CPU."""
    return heads.queries(y, rotate=False).cpu() / heads.divisor


def observed_radius(
    heads: Heads, site: Site, queries: Float64[Tensor, "pos head d_head"]
) -> Float64[Tensor, "pos head"] | None:
    """|A⁺(q - c)| of the queries of one prompt (`plain_queries`): 1 on the edge of the reachable ellipsoid.

    None if the norm does not scale (the reachable set is unbounded).
    """
    found = heads.reached(site)
    if found is None:
        return None
    offset = queries * heads.divisor - found.center
    distance: Tensor = torch.einsum("had,phd->pha", found.inverse, offset).norm(dim=-1)
    return distance
