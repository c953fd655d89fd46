"""The probe `causal`: what the model loses without projection, scaling or both, with intervals over prompts.

Prompts are measured one by one (`ln_probe.analyses.edited_runs`), and weighted by the tokens they predict. Intervals:
percentile bootstrap over prompts (Efron & Tibshirani 1993, chapter 13), the same resamples for every row, so that rows
can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses.edited_runs import MEASURES, EditedRuns
from ln_probe.analyses.probes.protocol import (
    Context,
    Cost,
    Finding,
    Found,
    Needs,
    Observer,
    Piece,
    Probe,
    Shape,
    View,
)
from ln_probe.analyses.probes.sentences import largest
from ln_probe.analyses.tables import CAUSAL
from ln_probe.analyses.wording import number

RESAMPLES = 2000  # the ends of a percentile interval then err by 1.5 % of its width (one standard error, normal case)
CONFIDENCE = 0.95
FEW_PROMPTS = 10  # below it a bootstrap over prompts is known to be too narrow, and the report says so
# Forward passes for each norm: it alone and in groups, under three variants and once more without scaling, of which the
# blocks before the edit are not computed again.
_PASSES_PER_NORM = 2.5


class Causal(Probe):
    name = "causal"
    summary = "what the loss is with a term switched off"
    tables = (CAUSAL,)
    needs = Needs(output=True, calibration=True)
    thresholds = {"causal_resamples": RESAMPLES, "causal_confidence": CONFIDENCE}  # noqa: RUF012 - a constant
    absent = "what happens to the loss when a term is switched off in the running model"

    def start(self, view: View) -> Observer:
        return _Watching(view)

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        measured = [p.tables["effects"] for p in pieces if "effects" in p.tables]
        notes = dict.fromkeys(note for p in pieces for note in p.notes)
        return Found({CAUSAL.name: table(measured, seed=context.seed)}, (*notes, *notes_on(measured)))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        return [Finding(text, "causal", 10) for text in _changes(tables[CAUSAL.name])]

    def cost(self, shape: Shape) -> Cost:
        return Cost(passes=_PASSES_PER_NORM * (2 * shape.layers + 1))


class _Watching(Observer):
    """Runs every prompt under every edit."""

    def __init__(self, view: View) -> None:
        self.view, self.found = view, list[pd.DataFrame]()
        assert view.calibration is not None
        members = view.calibrated
        self.runs = None
        if members:
            self.runs = EditedRuns(view.model, members, view.calibration.constants, meaningless=view.meaningless)

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        if self.runs is not None:
            self.found.append(self.runs.measure(prompt, tokens))

    def piece(self) -> Piece:
        if self.runs is None:
            return Piece()
        every = {"effects": pd.concat(self.found, ignore_index=True)} if self.found else {}
        return Piece(tables=every, notes=(*self._on_groups(), *self.runs.notes()))

    def _on_groups(self) -> list[str]:
        if len(self.view.calibrated) == len(self.view.sites):
            return []
        layers = ", ".join(map(str, self.view.layers))
        return [f"groups of the causal table hold the norms of layers {layers} alone"]


def table(measured: Sequence[pd.DataFrame], *, seed: int = 0) -> pd.DataFrame:
    """The `causal` table from what `EditedRuns.measure` gave for each prompt, in any order.

    `delta_loss_low` and `_high` are NaN with fewer than two prompts that predict anything.
    """
    if not measured:
        return CAUSAL.empty()
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
    return pd.DataFrame(rows, columns=CAUSAL.names)


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


# --------------------------------------------------------------------------------------------------------- findings


def _changes(effects: pd.DataFrame) -> list[str]:
    """What the loss is without scaling, projection and both at every attention norm, and where it matters most."""
    if not len(effects) or effects["delta_loss"].isna().all():
        return []
    rows: dict[tuple[str, str], dict[Any, Any]] = {(r["sites"], r["variant"]): r for r in effects.to_dict("records")}
    said = []
    if ("attention", "intact") in rows:
        parts = []
        for variant, name in (("no_scaling", "scaling"), ("no_projection", "projection"), ("neither", "both")):
            row = rows.get(("attention", variant))
            if row is None:
                continue
            if row["no_op"]:
                parts.append(f"without {name} not at all, by construction")
                continue
            if math.isnan(row["delta_loss"]):  # the notes say why
                continue
            change = float(row["delta_loss"])
            text = f"without {name} by {f'{change:+.2g}' if abs(change) >= 1e-3 else 'less than 0.001'} nats per token"
            if not math.isnan(row["delta_loss_low"]):
                text += f" (95 % interval {row['delta_loss_low']:+.2g} to {row['delta_loss_high']:+.2g})"
            parts.append(text + _kept(row))
        if parts:
            said.append(f"Taken away at every attention norm, the loss changes: {'; '.join(parts)}.")
    alone = effects[effects["divisor"].notna() & (effects["variant"] == "no_scaling") & (effects["sites"] != "final")]
    if len(alone) > 1 and alone["delta_loss"].notna().any():
        worst = largest(alone, alone["delta_loss"])
        said.append(
            f"The one norm whose scaling the loss needs most is {worst['sites']}: {worst['delta_loss']:+.2g} nats per "
            f"token without it, from {number(worst['loss'] - worst['delta_loss'])}{_kept(worst)}."
        )
    return said


def _kept(row: Any) -> str:
    tail = float(row["delta_loss_tail"])
    return "" if math.isnan(tail) else f", {tail:+.2g} if position 0 keeps its scaling"
