"""What intervals and p over prompt groups are worth, on simulated effects: the tables of docs/statistics.md.

    python bench/interval_coverage.py                # five minutes; writes bench/interval_coverage.csv
    python bench/interval_coverage.py --constants    # five minutes; writes bench/interval_coverage_constants.csv

The unit of every set is a prompt group. Of "three strata" the means of
three books differ by as much as lm-layernorm's, in standard deviations of prompts, and groups are resampled within
them. With `--constants` the simulation estimates the constants too, as reports do: the effect of prompt i depends on
the constant c by a_i + b (c - s_i) + k (c - s_i)², s_i being its mean sigma, and c is the mean of the other prompts' s.
The truth is the mean effect at the true mean of s. Intervals are the published ones (with the linearized shift) and
those over prompts alone.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from ln_probe.analyses.probes.statistics import LEAST_GROUPS, SIGNIFICANCE, infer_mean

TABLE = Path(__file__).with_suffix(".csv")
OF_CONSTANTS = TABLE.with_stem("interval_coverage_constants")

# Effects over prompts that are simulated: the share of prompts that are 10 standard deviations higher.
OUTLIERS = {"outliers 3 %": 0.03, "outliers 5 %": 0.05, "outliers": 0.1}
STRATA = "three strata"
MEANS = np.array([-0.2, 0.55, -0.35])  # of the strata: .382, .487 and .365, where prompts deviate by .15
KINDS = ("normal", "lognormal", *reversed(OUTLIERS), STRATA)
GROUPS = (LEAST_GROUPS, 24, 32, 64)
SETS = 2000
CONTRASTS = 4  # primary ones, that Holm adjusts for together
# Of the simulation with constants: spread of s (.05 to .3 of the mean in lm-layernorm), its correlation with
# the effects at a fixed constant, and b and k: freezing changes the loss by as much as the effects' own spread.
SPREAD, CORRELATIONS, SLOPE, CURVATURE = 0.3, (-0.7, 0.0, 0.7), 2.0, 2.0


def effects(kind: str, groups: int, generator: np.random.Generator) -> tuple[Float[np.ndarray, " group"], float]:
    """Return simulated effects of one set of groups, and their true mean.

    Args:
        kind: "normal" (mean 0.3, standard deviation 1), "lognormal" (of a standard normal), STRATA (normal, about the
            mean of each stratum), or of OUTLIERS (standard normal, and 10 standard deviations higher in that share).
        groups: how many.
        generator: to draw from.
    """
    x = generator.standard_normal(groups)
    if kind == "normal":
        return x + 0.3, 0.3
    if kind == "lognormal":
        return np.exp(x), math.exp(0.5)
    if kind == STRATA:
        means = MEANS[np.arange(groups) % len(MEANS)]
        return x + means, float(means.mean())
    share = OUTLIERS[kind]
    return x + 10.0 * (generator.random(groups) < share), 10.0 * share


def worth(kind: str, groups: int, *, sets: int = SETS, seed: int = 0) -> dict[str, object]:
    """Return a row of the table, of sets of effects with their true mean taken off."""
    generator = np.random.default_rng([seed, groups, len(kind)])
    strata = np.arange(groups) % len(MEANS) if kind == STRATA else None
    covered = given = first = 0
    for _ in range(sets):
        x, truth = effects(kind, groups, generator)
        inference = infer_mean(x - truth, np.ones(groups), strata, seed=seed)
        given += not math.isnan(inference.low)
        covered += inference.low <= 0 <= inference.high
        first += inference.p < SIGNIFICANCE / CONTRASTS
    return {
        "effects": kind,
        "groups": groups,
        "given": given / sets,
        "coverage": round(covered / given, 5) if given else math.nan,
        "p_below_0.05_of_4": first / sets if given else math.nan,
    }


def with_constants(
    kind: str, prompts: int, correlation: float, *, sets: int = SETS, seed: int = 0
) -> dict[str, object]:
    """A row of the table of coverage with constants that are estimated from the same prompts."""
    generator = np.random.default_rng([seed, prompts, len(kind), round(10 * correlation) + 10])
    ones = np.ones(prompts)
    covered = alone = given = 0
    for _ in range(sets):
        x, truth = effects(kind, prompts, generator)
        score = np.argsort(np.argsort(x)) / (prompts - 1) - 0.5  # ranks: outliers do not become outliers of sigma
        noise = generator.standard_normal(prompts)
        s = 1.0 + SPREAD * (correlation * score * math.sqrt(12) + math.sqrt(1 - correlation**2) * noise)
        c = (s.sum() - s) / (prompts - 1)
        change = x - truth + SLOPE * (c - s) + CURVATURE * ((c - s) ** 2 - SPREAD**2)
        slope = (SLOPE + 2 * CURVATURE * (c - s)).mean()
        published = infer_mean(change + slope * (s - s.mean()), ones, seed=seed)
        only = infer_mean(change, ones, seed=seed)
        given += not math.isnan(published.low)
        covered += published.low <= 0 <= published.high
        alone += only.low <= 0 <= only.high
    return {
        "effects": kind,
        "prompts": prompts,
        "correlation": correlation,
        "given": given / sets,
        "coverage": round(covered / given, 5) if given else math.nan,
        "coverage_over_prompts_alone": alone / sets,
    }


if __name__ == "__main__":
    if "--constants" in sys.argv[1:]:
        kinds = ("normal", "lognormal", "outliers")
        rows = [with_constants(k, n, c) for k in kinds for n in GROUPS[2:] for c in CORRELATIONS]
        pd.DataFrame(rows).to_csv(OF_CONSTANTS, index=False)
    else:
        pd.DataFrame([worth(k, n) for k in KINDS for n in GROUPS]).to_csv(TABLE, index=False)
