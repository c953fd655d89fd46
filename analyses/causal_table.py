"""The `causal` table from what was measured on each prompt, with intervals over prompts.

Prompts are weighted by the tokens they predict. Intervals: percentile bootstrap over prompts (Efron & Tibshirani 1993,
chapter 13), the same resamples for every row, so that rows can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from ln_probe.analyses.causal import MEASURES

COLUMNS = (
    "sites", "variant", "loss", "delta_loss", "delta_loss_low", "delta_loss_high", "kl", "top1_agreement",
    "entropy_change", "delta_loss_tail", "prompts", "divisor", "matched", "no_op",
)  # fmt: skip
RESAMPLES = 2000  # the ends of a percentile interval then err by 1.5 % of its width (one standard error, normal case)
CONFIDENCE = 0.95
FEW_PROMPTS = 10  # below it a bootstrap over prompts is known to be too narrow, and the report says so


def table(measured: Sequence[pd.DataFrame], *, seed: int = 0) -> pd.DataFrame:
    """The `causal` table from what `Causal.measure` gave for each prompt, in any order; columns COLUMNS.

    `delta_loss_low` and `_high` are NaN with fewer than two prompts that predict anything.
    """
    if not measured:
        return pd.DataFrame(columns=list(COLUMNS))
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    prompts = sums["prompt"].nunique()
    resamples = _resamples(prompts, seed)
    by_row = {key: rows.set_index("prompt") for key, rows in sums.groupby(["sites", "variant"], sort=False)}
    rows = []
    for (sites, variant), mine in by_row.items():
        intact = by_row[sites, "intact"]
        base, total = (rows[list(MEASURES)].sum(skipna=False) for rows in (intact, mine))
        low, high = _interval(mine["nll"] - intact["nll"], mine["predicted"], resamples)
        tail = _ratio(total["nll_tail"] - base["nll"], total["predicted"])
        rows.append({
            "sites": sites, "variant": variant, "loss": _ratio(total["nll"], total["predicted"]),
            "delta_loss": _ratio(total["nll"] - base["nll"], total["predicted"]),
            "delta_loss_low": low, "delta_loss_high": high, "kl": _ratio(total["kl"], total["positions"]),
            "top1_agreement": _ratio(total["agree"], total["positions"]),
            "entropy_change": _ratio(total["entropy"] - base["entropy"], total["queries"]),
            "delta_loss_tail": tail if variant == "no_scaling" else math.nan, "prompts": prompts,
            **mine.iloc[0][["divisor", "matched", "no_op"]],
        })  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def notes_on(measured: Sequence[pd.DataFrame]) -> list[str]:
    """What a reader has to know about these prompts' numbers."""
    if not measured:
        return []
    sums, said = pd.concat(measured), []
    intact = sums[sums["variant"] == "intact"]
    endless = sums[sums["kl"].isna() & sums["positions"].notna()]
    if len(endless) and intact["kl"].notna().all():  # otherwise there is no KL at all, and another note says why
        where = ", ".join(dict.fromkeys(f"{r.sites} {r.variant}" for r in endless.itertuples()))
        said.append(f"causal: the edited model's logits are not finite, so there are no numbers: {where}")
    prompts = intact.loc[intact["predicted"] > 0, "prompt"].nunique()
    if intact["nll"].isna().any():
        return said
    if prompts < 2:
        said.append("causal: fewer than two prompts predict anything, so there are no intervals")
    elif prompts < FEW_PROMPTS:
        said.append(f"causal: intervals come from {prompts} prompts, and a bootstrap of so few is too narrow")
    return said


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else math.nan


def _resamples(prompts: int, seed: int) -> Float[np.ndarray, "resample prompt"]:
    """How often each prompt occurs in each resample."""
    if prompts < 2:
        return np.zeros((0, prompts))
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES).astype(float)


def _interval(
    change: pd.Series[float], predicted: pd.Series[float], resamples: Float[np.ndarray, "resample prompt"]
) -> tuple[float, float]:
    """Percentile interval of the token-weighted mean change, prompts resampled."""
    if (predicted > 0).sum() < 2 or change.isna().any():
        return math.nan, math.nan
    weights = resamples @ predicted.to_numpy(float)
    means = (resamples @ change.to_numpy(float))[weights > 0] / weights[weights > 0]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
