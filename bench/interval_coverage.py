"""What intervals and p over prompts are worth, on simulated effects: the tables of docs/statistics.md.

    python bench/interval_coverage.py                # a minute; writes bench/interval_coverage.csv
    python bench/interval_coverage.py --constants    # two minutes; writes bench/interval_coverage_constants.csv

With `--constants` the simulation estimates the constants too, as reports do: the effect of prompt i depends on the
constant c by a_i + b (c - s_i) + k (c - s_i)², s_i being its mean sigma, and c is the mean of the other prompts' s. The
truth is the mean effect at the true mean of s. Intervals are the published ones (bootstrap-t with the linearized shift)
and those over prompts alone.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from ln_probe.analyses.probes.statistics import PROMPTS_NEEDED, SIGNIFICANCE, infer_mean, resamples

TABLE = Path(__file__).with_suffix(".csv")
OF_CONSTANTS = TABLE.with_stem("interval_coverage_constants")

# Effects over prompts that are simulated: the share of prompts that are 10 standard deviations higher.
OUTLIERS = {"outliers 3 %": 0.03, "outliers 5 %": 0.05, "outliers": 0.1}
KINDS = ("normal", "lognormal", *reversed(OUTLIERS))
PROMPTS = (4, 8, 16, PROMPTS_NEEDED, 2 * PROMPTS_NEEDED)
SETS = 4000
# Of the resamples of reports: with all 20,000 of them no coverage differs by more than 0.002, at five times the cost.
RESAMPLED = 4000
CONTRASTS = 4  # primary ones, that Holm adjusts for together
# Of the simulation with constants: spread of s (.05 to .3 of the mean in lm-layernorm), its correlation with
# the effects at a fixed constant, and b and k: freezing changes the loss by as much as the effects' own spread.
SPREAD, CORRELATIONS, SLOPE, CURVATURE = 0.3, (-0.7, 0.0, 0.7), 2.0, 2.0


def effects(kind: str, prompts: int, generator: np.random.Generator) -> tuple[Float[np.ndarray, " prompt"], float]:
    """Simulated effects of one set of prompts, and their true mean.

    Args:
        kind: "normal" (mean 0.3, standard deviation 1), "lognormal" (of a standard normal), or of OUTLIERS (standard
            normal, and 10 standard deviations higher in that share of prompts).
        prompts: how many.
        generator: to draw from.
    """
    x = generator.standard_normal(prompts)
    if kind == "normal":
        return x + 0.3, 0.3
    if kind == "lognormal":
        return np.exp(x), math.exp(0.5)
    share = OUTLIERS[kind]
    return x + 10.0 * (generator.random(prompts) < share), 10.0 * share


def worth(kind: str, prompts: int, *, sets: int = SETS, seed: int = 0) -> dict[str, object]:
    """A row of the table, of sets of effects with their true mean taken off; below PROMPTS_NEEDED none is given."""
    generator = np.random.default_rng([seed, prompts, len(kind)])
    least = min(prompts, PROMPTS_NEEDED)
    ones, drawn = np.ones(prompts), resamples(prompts, seed, least=least)[:RESAMPLED]
    held = given = without = first = 0
    for _ in range(sets):
        x, truth = effects(kind, prompts, generator)
        found = every = infer_mean(x - truth, ones, drawn)
        if math.isnan(found.low):
            every = infer_mean(x - truth, ones, drawn, least=least, reach=math.inf)
        given += not math.isnan(found.low)
        held += found.low <= 0 <= found.high
        without += every.low <= 0 <= every.high
        first += found.p < SIGNIFICANCE / CONTRASTS
    return {
        "effects": kind,
        "prompts": prompts,
        "given": given / sets,
        "coverage": round(held / given, 5) if given else math.nan,
        "coverage_were_all_given": without / sets,
        "p_below_0.05_of_4": first / sets if given else math.nan,
    }


def with_constants(
    kind: str, prompts: int, correlation: float, *, sets: int = SETS, seed: int = 0
) -> dict[str, object]:
    """A row of the table of coverage with constants that are estimated from the same prompts."""
    generator = np.random.default_rng([seed, prompts, len(kind), round(10 * correlation) + 10])
    ones, drawn = np.ones(prompts), resamples(prompts, seed)[:RESAMPLED]
    held = alone = given = 0
    for _ in range(sets):
        x, truth = effects(kind, prompts, generator)
        score = np.argsort(np.argsort(x)) / (prompts - 1) - 0.5  # ranks: outliers do not become outliers of sigma
        noise = generator.standard_normal(prompts)
        s = 1.0 + SPREAD * (correlation * score * math.sqrt(12) + math.sqrt(1 - correlation**2) * noise)
        c = (s.sum() - s) / (prompts - 1)
        change = x - truth + SLOPE * (c - s) + CURVATURE * ((c - s) ** 2 - SPREAD**2)
        slope = (SLOPE + 2 * CURVATURE * (c - s)).mean()
        found = infer_mean(change + slope * (s - s.mean()), ones, drawn)
        only = infer_mean(change, ones, drawn)
        given += not math.isnan(found.low)
        held += found.low <= 0 <= found.high
        alone += only.low <= 0 <= only.high
    return {
        "effects": kind,
        "prompts": prompts,
        "correlation": correlation,
        "given": given / sets,
        "coverage": round(held / given, 5) if given else math.nan,
        "coverage_over_prompts_alone": alone / sets,
    }


if __name__ == "__main__":
    if "--constants" in sys.argv[1:]:
        kinds = ("normal", "lognormal", "outliers")
        rows = [with_constants(k, n, c) for k in kinds for n in PROMPTS[3:] for c in CORRELATIONS]
        pd.DataFrame(rows).to_csv(OF_CONSTANTS, index=False)
    else:
        pd.DataFrame([worth(k, n) for k in KINDS for n in PROMPTS]).to_csv(TABLE, index=False)
