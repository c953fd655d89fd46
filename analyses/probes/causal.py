"""The probe `causal`: what the model loses without projection, scaling or both, with intervals over prompts.

Prompts are measured one by one (`ln_probe.analyses.edited_runs`), and weighted by the tokens they predict. Intervals
are those of `ln_probe.analyses.prompt_intervals`, from the same resamples for all rows with as many prompts, so that
these can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses import prompt_intervals
from ln_probe.analyses.edited_runs import MEASURES, SINGLE_NORM_PROMPTS, EditedRuns
from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE, SINK_FACTOR, said, testable
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
from ln_probe.analyses.probes.sentences import in_layers
from ln_probe.analyses.tables import CAUSAL, CAUSAL_PROMPTS
from ln_probe.hooks.interventions import GROUPS, SCALES

# Forward passes a prompt: three groups that begin in the first block under three variants, two of these with three
# scales each, and the final norm, of which the blocks are not computed again; and each norm alone under three variants,
# on the first prompts, from its block on.
_PASSES_OF_GROUPS = 23.0
_PASSES_PER_NORM = 1.5


class Causal(Probe):
    """What groups of norms, and single ones, do for the loss.

    Args:
        single_norm_prompts: on how many of the first prompts norms are taken one by one; 0: groups alone.
        scales: what is tried in place of the sigmas of groups; "frozen" always is.
    """

    def __init__(self, single_norm_prompts: int = SINGLE_NORM_PROMPTS, scales: Collection[str] = SCALES) -> None:
        self.single_norm_prompts, self.scales = single_norm_prompts, scales

    name = "causal"
    summary = "what the loss is with a term switched off"
    tables = (CAUSAL, CAUSAL_PROMPTS)
    needs = Needs(output=True, calibration=True)
    interleaved = True
    thresholds = {  # noqa: RUF012 - a constant
        "causal_resamples": prompt_intervals.RESAMPLES,
        "causal_confidence": prompt_intervals.CONFIDENCE,
        "causal_interval_reach": prompt_intervals.REACH,
        "causal_interval_prompts": prompt_intervals.PROMPTS_NEEDED,
        "causal_single_norm_prompts": SINGLE_NORM_PROMPTS,
        "causal_least_change": LEAST_CHANGE,
        "causal_sink_factor": SINK_FACTOR,
    }
    absent = "what happens to the loss when a term is switched off in the running model"

    def start(self, view: View) -> Observer:
        return _Watching(view, self.single_norm_prompts, self.scales)

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        measured = [p.tables["effects"] for p in pieces if "effects" in p.tables]
        notes = dict.fromkeys(note for p in pieces for note in p.notes)
        frames = {
            CAUSAL.name: table(measured, seed=context.seed),
            CAUSAL_PROMPTS.name: by_prompt(measured),
        }
        return Found(frames, (*notes, *notes_on(measured)))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        source = str(provenance.get("prompts", {}).get("source", ""))
        return said(tables[CAUSAL.name], source, in_layers(provenance))

    def cost(self, shape: Shape) -> Cost:
        single = min(1.0, self.single_norm_prompts / max(1, len(shape.lengths)))
        return Cost(passes=_PASSES_OF_GROUPS + single * _PASSES_PER_NORM * (2 * shape.layers + 1))


class _Watching(Observer):
    """Runs every prompt under every edit."""

    def __init__(self, view: View, single_norm_prompts: int, scales: Collection[str]) -> None:
        self.view, self.found = view, list[pd.DataFrame]()
        found = view.calibration
        assert found is not None
        members = view.calibrated
        self.runs = None
        if members:
            self.runs = EditedRuns(
                view.model,
                members,
                found.constants,
                sigmas=found.sigmas,
                meaningless=view.meaningless,
                single_norm_prompts=single_norm_prompts,
                scales=scales,
            )

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

    There are intervals where `prompt_intervals.judged` gives one.
    """
    if not measured:
        return CAUSAL.empty()
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    by_row = {key: rows.set_index("prompt") for key, rows in sums.groupby(["sites", "variant"], sort=False)}
    rows = []
    for (sites, variant), mine in by_row.items():
        intact = by_row[sites, "intact"]
        base, total = (rows[list(MEASURES)].sum(skipna=False) for rows in (intact, mine))
        change, predicted = ((mine["nll"] - intact["nll"]).to_numpy(float), mine["predicted"].to_numpy(float))
        scaling = variant in ("no_scaling", "neither")
        worse = int((change > 0).sum()) if not np.isnan(change).any() else math.nan
        others = {
            f"delta_loss_{scale}": _ratio(total[f"nll_{scale}"] - base["nll"], total["predicted"])
            if scaling
            else math.nan
            for scale in ("uniform", "resampled")
        }
        idle = variant == "intact" or bool(mine["no_op"].iloc[0])
        taken = int((predicted > 0).sum())
        rows.append(
            {
                "sites": sites,
                "variant": variant,
                "loss": _ratio(total["nll"], total["predicted"]),
                "delta_loss": _ratio(total["nll"] - base["nll"], total["predicted"]),
                **over_prompts(change, predicted, seed),
                **others,
                "prompts_worse": worse,
                "p_adjusted": math.nan if idle else prompt_intervals.sign_test(change),
                "kl": _ratio(total["kl"], total["positions"]),
                "top1_agreement": _ratio(total["agree"], total["positions"]),
                "entropy_change": _ratio(total["entropy"] - base["entropy"], total["queries"]),
                "prompts": taken or len(mine),
                **mine.iloc[0][["divisor", "divisor_first", "matched", "no_op"]],
            }
        )
    frame = pd.DataFrame(rows, columns=CAUSAL.names)
    return frame.assign(p_adjusted=adjusted(frame), p_mean=adjusted_means(frame))


def over_prompts(
    change: Float[np.ndarray, " prompt"], predicted: Float[np.ndarray, " prompt"], seed: int
) -> dict[str, float]:
    """The columns of `causal` that say how far a change of the loss holds beyond its prompts; p is of this row alone.

    Args:
        change: sum over each prompt, nats. predicted: its tokens.
        seed: of resamples.
    """
    found = prompt_intervals.judged(change, predicted, seed=seed)
    return {
        "delta_loss_low": found.low,
        "delta_loss_high": found.high,
        "p_mean": found.p,
        "delta_loss_median": prompt_intervals.median(change, predicted),
    }


def adjusted(frame: pd.DataFrame) -> pd.Series:
    """The p-values in `p_adjusted`, adjusted (Holm) for the others that one would look through: the groups, or the
    single norms, under one variant."""
    family = [frame["sites"].isin(GROUPS), frame["variant"]]
    return frame.groupby(family)["p_adjusted"].transform(lambda p: prompt_intervals.holm(p.to_list()))


def adjusted_means(frame: pd.DataFrame) -> pd.Series:
    """The p-values in `p_mean`, adjusted (Holm) for what findings choose from: all groups under all variants, or the
    single norms under one. Rows without an interval have none, and count among the tests; what changes nothing by
    construction does not."""
    groups = frame["sites"].isin(GROUPS)
    looked_at, found = testable(frame), pd.Series(math.nan, index=frame.index)
    families = [("groups", "") if g else ("norms", v) for g, v in zip(groups, frame["variant"], strict=True)]
    for mine in frame.groupby(pd.Series(families, index=frame.index)).groups.values():
        some = frame.loc[mine, "p_mean"].where(looked_at[mine])
        found[mine] = prompt_intervals.holm(some.to_list(), looked_at[mine].to_list())
    return found


def judged_again(effects: pd.DataFrame, kept: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """A `causal` table with its intervals, `p_mean` and medians made again from what every prompt gave.

    Args:
        effects: the table, of this or an earlier version.
        kept: its `causal_prompts`; rows that it says nothing of stay as they are.
        seed: that the report was made with.
    """
    by_row = dict(list(kept.groupby(["sites", "variant"])))
    columns = ["delta_loss_low", "delta_loss_high", "p_mean", "delta_loss_median"]
    made = effects.reindex(columns=list(dict.fromkeys([*CAUSAL.names, *effects.columns])))
    made[columns] = made[columns].astype(float)
    for index, row in zip(made.index, made.to_dict("records"), strict=True):
        mine = by_row.get((row["sites"], row["variant"]))
        if mine is not None:
            predicted = mine["predicted"].to_numpy(float)
            counts = predicted > 0
            change = mine["delta_loss"].to_numpy(float) * predicted
            found = over_prompts(change[counts], predicted[counts], seed)
            made.loc[index, columns] = [found[c] for c in columns]
        elif row["variant"] == "intact":
            made.loc[index, "delta_loss_median"] = row["delta_loss"]
    return made.assign(p_mean=adjusted_means(made))


def by_prompt(measured: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The `causal_prompts` table from the same: means over each prompt."""
    if not measured:
        return CAUSAL_PROMPTS.empty()
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    intact = sums[sums["variant"] == "intact"].set_index(["prompt", "sites"])
    mine = sums[sums["variant"] != "intact"]
    base = intact.loc[pd.MultiIndex.from_frame(mine[["prompt", "sites"]])].reset_index(drop=True)
    mine = mine.reset_index(drop=True)
    tokens, places, queries = (mine[c].where(mine[c] > 0) for c in ("predicted", "positions", "queries"))
    scaling = mine["variant"].isin(["no_scaling", "neither"])
    return pd.DataFrame(
        {
            "prompt": mine["prompt"].astype(np.int64),
            "sites": mine["sites"],
            "variant": mine["variant"],
            "predicted": mine["predicted"].astype(np.int64),
            "loss": base["nll"] / tokens,
            "delta_loss": (mine["nll"] - base["nll"]) / tokens,
            "delta_loss_uniform": ((mine["nll_uniform"] - base["nll"]) / tokens).where(scaling),
            "delta_loss_resampled": ((mine["nll_resampled"] - base["nll"]) / tokens).where(scaling),
            "kl": mine["kl"] / places,
            "top1_agreement": mine["agree"] / places,
            "entropy_change": (mine["entropy"] - base["entropy"]) / queries,
        },
        columns=CAUSAL_PROMPTS.names,
    )


def notes_on(measured: Sequence[pd.DataFrame]) -> list[str]:
    """What a reader has to know about these prompts' numbers."""
    if not measured:
        return []
    sums, found = pd.concat(measured), []
    intact = sums[sums["variant"] == "intact"]
    endless = sums[sums["kl"].isna() & sums["positions"].notna()]
    if len(endless) and intact["kl"].notna().all():  # otherwise there is no KL at all, and another note says why
        where = ", ".join(dict.fromkeys(f"{r.sites} {r.variant}" for r in endless.itertuples()))
        found.append(f"causal: the edited model's logits are not finite, so there are no numbers: {where}")
    prompts = intact.loc[intact["predicted"] > 0, "prompt"].nunique()
    if intact["nll"].isna().any():
        return found
    needed = prompt_intervals.PROMPTS_NEEDED
    if prompts < needed:
        found.append(
            f"causal: {prompts} {'prompt predicts' if prompts == 1 else 'prompts predict'} something, and intervals "
            f"take {needed}: there are none, and changes of the loss are of these prompts alone"
        )
    single = intact.loc[~intact["sites"].isin(GROUPS) & (intact["predicted"] > 0), "prompt"].nunique()
    if single < prompts:
        first = f"from the first {single}" if single else "from none"
        found.append(f"causal: single norms were taken {first} of {prompts} prompts")
    return found


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else math.nan
