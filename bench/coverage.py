"""What intervals and p over prompts are worth, on simulated effects: both tables of docs/statistics.md.

python bench/coverage.py    # a minute; writes bench/coverage.csv, of which `python docs/made.py` makes the tables
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from ln_probe.analyses.prompt_intervals import OUTLIERS, PROMPTS_NEEDED, SIGNIFICANCE, effects, judged, resamples

TABLE = Path(__file__).parent / "coverage.csv"

KINDS = ("normal", "lognormal", *reversed(OUTLIERS))
PROMPTS = (4, 8, 16, PROMPTS_NEEDED, 2 * PROMPTS_NEEDED)
SETS = 4000
# Of the resamples of reports: with all 20,000 of them no coverage differs by more than 0.002, at five times the cost.
RESAMPLED = 4000
GROUPS_AND_TERMS = 12  # tests that Holm's adjustment is for: four groups, three variants


def worth(kind: str, prompts: int, *, sets: int = SETS, seed: int = 0) -> dict[str, object]:
    """A row of the table, of sets of effects with their true mean taken off; below PROMPTS_NEEDED none is given."""
    generator = np.random.default_rng([seed, prompts, len(kind)])
    least = min(prompts, PROMPTS_NEEDED)
    ones, drawn = np.ones(prompts), resamples(prompts, seed, least=least)[:RESAMPLED]
    held = given = without = first = 0
    for _ in range(sets):
        x, truth = effects(kind, prompts, generator)
        found = every = judged(x - truth, ones, drawn)
        if math.isnan(found.low):
            every = judged(x - truth, ones, drawn, least=least, reach=math.inf)
        given += not math.isnan(found.low)
        held += found.low <= 0 <= found.high
        without += every.low <= 0 <= every.high
        first += found.p < SIGNIFICANCE / GROUPS_AND_TERMS
    return {
        "effects": kind,
        "prompts": prompts,
        "given": given / sets,
        "coverage": round(held / given, 5) if given else math.nan,
        "coverage_were_all_given": without / sets,
        "p_below_0.05_of_12": first / sets if given else math.nan,
    }


if __name__ == "__main__":
    pd.DataFrame([worth(k, n) for k in KINDS for n in PROMPTS]).to_csv(TABLE, index=False)
