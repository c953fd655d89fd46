"""How much more the loss changes in one report than in another, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.columns import PAIRED
from ln_probe.hooks.interventions import GROUPS
from ln_probe.reporting.comparable import same_layers, same_tokens
from ln_probe.reporting.contents import Contents


def paired(names: Sequence[str], reports: Sequence[Contents], baseline: int = 0) -> pd.DataFrame:
    """Differences of `causal_prompts.delta_loss` to the baseline's, over the prompts that both have.

    Args:
        names, reports: one name per report.
        baseline: which of them the others are compared with.

    Returns:
        The table `ln_probe.analyses.probes.columns.PAIRED`, without reports on other tokens or layers than the
        baseline's.
    """
    first, key = reports[baseline], ["prompt", "sites", "variant"]
    rows: list[dict[str, object]] = []
    for number, (name, report) in enumerate(zip(names, reports, strict=True)):
        one, two = (r.tables["causal_prompts"] for r in (first, report))
        comparable = same_tokens(first, report) and same_layers(first, report)
        if number == baseline or not len(one) or not len(two) or not comparable:
            continue
        both = one.merge(two, on=key, suffixes=("", "_other"))
        both = both[both["predicted"] > 0]
        for (sites, variant), mine in both.groupby(["sites", "variant"], sort=False):
            weight = mine["predicted"].to_numpy(float)
            change = (mine["delta_loss_other"] - mine["delta_loss"]).to_numpy(float) * weight
            found = statistics.infer_mean(change, weight)
            rows.append(
                {
                    "model": name,
                    "against": names[baseline],
                    "sites": sites,
                    "variant": variant,
                    "difference": float(change.sum() / weight.sum()),
                    "low": found.low,
                    "high": found.high,
                    "p_mean": found.p,
                    "prompts": len(mine),
                    "prompts_more": int((change > 0).sum()) if np.isfinite(change).all() else np.nan,
                    "p_adjusted": statistics.sign_test(change),
                }
            )
    return _adjusted(PAIRED.frame(rows)) if rows else PAIRED.frame(rows)


def _adjusted(table: pd.DataFrame) -> pd.DataFrame:
    """With p adjusted (Holm): of signs for all rows, of means for all groups, or all single norms."""
    groups, means = table["sites"].isin(GROUPS), table["p_mean"].copy()
    for mine in (groups, ~groups):
        known = table.loc[mine, "difference"].notna()
        means[mine] = statistics.holm(means[mine].to_list(), known.to_list())
    return table.assign(p_mean=means, p_adjusted=statistics.holm(table["p_adjusted"].to_list()))
