"""What intervals and p over prompts are worth, on simulated effects: the second table of docs/statistics.md.

python bench/coverage.py          simulate (about half a minute), write bench/coverage.csv and the page's table
python bench/coverage.py --page   the page's table alone, from bench/coverage.csv
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from ln_probe.analyses.prompt_intervals import OUTLIERS, PROMPTS_NEEDED, SIGNIFICANCE, effects, judged, resamples

HERE = Path(__file__).parent
TABLE = HERE / "coverage.csv"
PAGE = HERE.parent / "docs" / "statistics.md"
BLOCK = re.compile(r"(<!-- simulated: coverage -->\n).*?(<!-- end -->)", re.DOTALL)

KINDS = ("normal", "lognormal", *reversed(OUTLIERS))
PROMPTS = (PROMPTS_NEEDED, 2 * PROMPTS_NEEDED)
SETS = 4000
# Of the resamples of reports: with all 20,000 of them no coverage differs by more than 0.002, at five times the cost.
RESAMPLED = 4000
GROUPS_AND_TERMS = 12  # tests that Holm's adjustment is for: four groups, three variants


def worth(kind: str, prompts: int, *, sets: int = SETS, seed: int = 0) -> dict[str, object]:
    """A row of the table, of sets of effects with their true mean taken off."""
    generator = np.random.default_rng([seed, prompts, len(kind)])
    ones, drawn = np.ones(prompts), resamples(prompts, seed)[:RESAMPLED]
    held = given = without = first = 0
    for _ in range(sets):
        x, truth = effects(kind, prompts, generator)
        found = every = judged(x - truth, ones, drawn)
        if math.isnan(found.low):
            every = judged(x - truth, ones, drawn, reach=math.inf)
        given += not math.isnan(found.low)
        held += found.low <= 0 <= found.high
        without += every.low <= 0 <= every.high
        first += found.p < SIGNIFICANCE / GROUPS_AND_TERMS
    return {
        "effects": kind,
        "prompts": prompts,
        "given": given / sets,
        "coverage": round(held / given, 5),
        "coverage_were_all_given": without / sets,
        "p_below_0.05_of_12": first / sets,
    }


def page_table(found: pd.DataFrame) -> str:
    """The table as the page shows it."""
    lines = [
        "| effects | prompts | coverage | given | coverage were all given | p < 0.05/12 |",
        "|---" * 6 + "|",
    ]
    for kind, prompts, given, *others in found.itertuples(index=False):
        coverage, without, first = others
        cells = f"{coverage:.3f} | {given:.4f} | {without:.3f} | {first:.4f}"
        name = "outliers 10 %" if kind == "outliers" else kind
        lines.append(f"| {name} | {prompts} | {cells} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its table made again."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{page_table(pd.read_csv(TABLE))}\n\n{m[2]}", text)


if __name__ == "__main__":
    if "--page" not in sys.argv[1:]:
        pd.DataFrame([worth(k, n) for k in KINDS for n in PROMPTS]).to_csv(TABLE, index=False)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
