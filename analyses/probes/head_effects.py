"""The probe `head_effects`: which heads need their norm, by what the loss loses (`ln_probe.analyses.head_runs`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ln_probe.analyses.head_runs import CHOOSING, EXACT_WORK, LEADING, HeadRuns
from ln_probe.analyses.head_tables import HEAD_EFFECTS
from ln_probe.analyses.probes.protocol import (
    EFFECT,
    NO_EFFECT,
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
from ln_probe.analyses.prompt_intervals import SIGNIFICANCE, holm, interval, resamples, sign_test
from ln_probe.analyses.wording import counted

# Of the default ones, for a head costs a pass for each of three terms: a sign test (p = 2^-11 if all twelve agree)
# survives Holm's correction over the 72 heads that are run at most, under one term.
PROMPTS = 12
MATTERS = 0.001  # nats per token: a smaller effect of one head is not spoken of
_EXACT_HEADS = 72  # about: `EXACT_WORK` asks for weights, which are not known before loading


class HeadEffects(Probe):
    name = "head_effects"
    summary = "what the loss loses when one head reads its norm without a term"
    tables = (HEAD_EFFECTS,)
    needs = Needs(output=True, calibration=True)
    interleaved = True
    prompts = PROMPTS
    thresholds = {  # noqa: RUF012 - constants
        "head_effects_exact_work": EXACT_WORK,
        "head_effects_leading": LEADING,
        "head_effects_choosing_prompts": CHOOSING,
    }
    absent = "which heads depend on their norm"

    def start(self, view: View) -> Observer:
        return _Watching(view)

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        measured = [p.tables["sums"] for p in pieces if len(p.tables.get("sums", ()))]
        notes = dict.fromkeys(note for p in pieces for note in p.notes)
        made = table(measured, seed=context.seed)
        said = [f"head_effects: {text}" for text in agreement(made)]
        return Found({HEAD_EFFECTS.name: made}, (*notes, *said))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        return _leading(tables.get(HEAD_EFFECTS.name))

    def cost(self, shape: Shape) -> Cost:
        heads = shape.layers * shape.heads
        run_exactly = heads if heads <= _EXACT_HEADS else LEADING
        return Cost(passes=5 + 3 * run_exactly / 2)


class _Watching(Observer):
    def __init__(self, view: View) -> None:
        assert view.calibration is not None
        self.sums = list[pd.DataFrame]()
        self.runs = HeadRuns(
            view.model,
            view.sites,
            view.calibration.constants.of,
            pooled=view.calibration.constants.pooled,
            layers=view.layers,
            heads=view.heads,
            objective=view.objective,
            meaningless=view.meaningless,
        )

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        self.sums.append(self.runs.measure(prompt, tokens))

    def piece(self) -> Piece:
        found = [s for s in self.sums if len(s)]
        return Piece(
            tables={"sums": pd.concat(found, ignore_index=True)} if found else {}, notes=tuple(self.runs.notes())
        )


def table(measured: Sequence[pd.DataFrame], *, seed: int = 0) -> pd.DataFrame:
    """The `head_effects` table from what `HeadRuns.measure` gave for each prompt, in any order."""
    if not measured:
        return HEAD_EFFECTS.empty()
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    prompts = sums["prompt"].nunique()
    drawn = resamples(prompts, seed)
    rows = []
    for (layer, head, variant), mine in sums.groupby(["layer", "head", "variant"], sort=False):
        predicted = mine["predicted"].to_numpy(float)
        changes = {"delta_loss": mine["nll"] - mine["intact"], "estimate": mine["estimate"]}
        row: dict[str, Any] = {"layer": layer, "head": head, "variant": variant}
        for name, change in changes.items():
            values = change.to_numpy(float)
            low, high = interval(values, predicted, drawn, seed=seed)
            row |= {name: values.sum() / predicted.sum(), f"{name}_low": low, f"{name}_high": high}
        exact, no_op = changes["delta_loss"].to_numpy(float), mine["no_op"].iloc[0]
        known = bool(np.isfinite(exact).all())
        row |= {
            "prompts_worse": int((exact > 0).sum()) if known else math.nan,
            "p_adjusted": sign_test(exact) if known and not no_op else math.nan,
            "loss": mine["intact"].sum() / predicted.sum(),
            "prompts": prompts,
            "no_op": no_op,
        }
        rows.append(row)
    made = pd.DataFrame(rows, columns=HEAD_EFFECTS.names)
    # (For the heads under one term: nobody looks for the one smallest of all terms.)
    return made.assign(p_adjusted=made.groupby("variant")["p_adjusted"].transform(lambda p: holm(p.to_list())))


def agreement(effects: pd.DataFrame) -> list[str]:
    """How well estimates order the heads that were run exactly: a sentence a variant, where there are enough."""
    said = []
    for variant, rows in effects.groupby("variant", sort=False):
        both = rows[(rows["no_op"] == "") & rows["delta_loss"].notna() & rows["estimate"].notna()]
        if len(both) >= 3 and both["delta_loss"].nunique() > 1 and both["estimate"].nunique() > 1:
            rho = float(stats.spearmanr(both["delta_loss"], both["estimate"]).statistic)
            said.append(f"estimates and exact effects of {variant} over {len(both)} heads: rank correlation {rho:.2f}")
    return said


def _worse_on_most(rows: pd.DataFrame) -> pd.Series:
    """Whether the sign test speaks of a cost: more prompts are worse than better."""
    return rows["prompts_worse"] > rows["prompts"] / 2


def _leading(effects: pd.DataFrame | None) -> list[Finding]:
    """The head that the loss needs the scaling of most, if one is seen to be needed."""
    if effects is None or not len(effects):
        return []
    rows = effects[(effects["variant"] == "no_scaling") & (effects["no_op"] == "") & effects["delta_loss"].notna()]
    if not len(rows):
        return []
    seen = rows[(rows["p_adjusted"] < SIGNIFICANCE) & (rows["delta_loss"] > MATTERS) & _worse_on_most(rows)]
    top = rows.iloc[int(rows["delta_loss"].argmax())]
    place = f"L{int(top['layer'])}H{int(top['head'])}"
    if not len(seen) and len(rows) * sign_test(np.ones(int(rows["prompts"].max()))) >= SIGNIFICANCE:
        few = f"{counted(int(top['prompts']), 'prompt')} {'is' if top['prompts'] == 1 else 'are'} too few"
        text = (
            f"Which single head needs its norm's scaling cannot be told: {few} for {counted(len(rows), 'head')}, "
            f"whatever they show (largest: {place}, {top['delta_loss']:+.2g} from a loss of {top['loss']:.3g})."
        )
        return [Finding(text, "by-head", NO_EFFECT)]
    if not len(seen):
        text = (
            f"No single head is seen to need its norm's scaling: of {len(rows)} heads run without it none costs "
            f"{MATTERS:g} nats per token or more and is worse on more prompts than chance allows (largest: {place}, "
            f"{top['delta_loss']:+.2g} from a loss of {top['loss']:.3g})."
        )
        return [Finding(text, "by-head", NO_EFFECT)]
    worst = seen.iloc[int(seen["delta_loss"].argmax())]
    within = (
        f"95 % interval {worst['delta_loss_low']:+.2g} to {worst['delta_loss_high']:+.2g}"
        if not math.isnan(worst["delta_loss_low"])
        else f"worse on {int(worst['prompts_worse'])} of {int(worst['prompts'])} prompts"
    )
    text = (
        f"The head that needs its norm's scaling most is L{int(worst['layer'])}H{int(worst['head'])}: "
        f"{worst['delta_loss']:+.2g} nats per token without it ({within}), from a loss of {worst['loss']:.3g}; "
        f"{len(seen)} of {len(rows)} heads run this way cost {MATTERS:g} or more and are worse on more prompts than "
        "chance allows."
    )
    return [Finding(text, "by-head", EFFECT, size=float(worst["delta_loss"] / worst["loss"]))]
