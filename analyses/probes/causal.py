"""The probe `causal`: how the loss changes without projection, scaling or both, with intervals over prompts.

Prompts are measured one by one (`ln_probe.analyses.edited_runs`), and weighted by the tokens they predict. Intervals
(`ln_probe.analyses.prompt_intervals`) resample groups of prompts, the same resamples for all rows with as many groups,
so that rows can be compared. For the primary contrasts that freeze scaling they include the choice of the constants,
which are means over prompts too (`shifts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ln_probe.analyses import prompt_intervals
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.edited_runs import (
    GRADIENT_COLUMNS,
    MEASURES,
    PRIMARY_SITES,
    PRIMARY_VARIANTS,
    SINGLE_NORM_PROMPTS,
    EditedRuns,
)
from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE, SINK_FACTOR, sentences, testable
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
from ln_probe.hooks.interventions import GROUPS

# Forward passes a prompt: three groups that begin in the first block under three variants, two of these with one
# constant too, the final norm, of which the blocks are not computed again, and a forward and backward pass (about three
# passes) for each of the two primary contrasts that freeze scaling; and each norm alone under three variants, on the
# first prompts, from its block on.
_PASSES_OF_GROUPS = 23.0
_PASSES_PER_NORM = 1.5


class Causal(Probe):
    """How the loss changes when groups of norms, or single norms, lose a term.

    Args:
        single_norm_prompts: on how many of the first prompts norms are taken one by one; 0: groups alone.
        uniform: whether groups are also run with one constant for all positions.
        primary_only: whether nothing but the primary contrasts is measured, and of them the loss alone.
    """

    def __init__(
        self, single_norm_prompts: int = SINGLE_NORM_PROMPTS, uniform: bool = True, primary_only: bool = False
    ) -> None:
        self.single_norm_prompts, self.uniform, self.primary_only = single_norm_prompts, uniform, primary_only

    name = "causal"
    summary = "how the loss changes when a term is removed"
    tables = (CAUSAL, CAUSAL_PROMPTS)
    needs = Needs(output=True, calibration=True)
    interleaved = True
    thresholds = {  # noqa: RUF012 - a constant
        "causal_resamples": prompt_intervals.RESAMPLES,
        "causal_confidence": prompt_intervals.CONFIDENCE,
        "causal_interval_reach": prompt_intervals.REACH,
        "causal_interval_groups": prompt_intervals.PROMPTS_NEEDED,
        "causal_single_norm_prompts": SINGLE_NORM_PROMPTS,
        "causal_least_change": LEAST_CHANGE,
        "causal_sink_factor": SINK_FACTOR,
    }
    absent = "how the loss changes when a term is removed in the running model"

    def start(self, view: View) -> Observer:
        return _Watching(view, self)

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        measured, gradients = (
            [p.tables[name] for p in pieces if name in p.tables] for name in ("effects", "gradients")
        )
        notes = dict.fromkeys(note for p in pieces for note in p.notes)
        constants = context.calibration.constants
        frames = {
            CAUSAL.name: table(measured, constants, gradients, seed=context.seed),
            CAUSAL_PROMPTS.name: by_prompt(measured, constants, gradients),
        }
        return Found(frames, (*notes, *notes_on(measured, constants)))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        source = str(provenance.get("prompts", {}).get("source", ""))
        unit = str(provenance.get("loss", {}).get("unit", "nats/token"))
        return sentences(tables[CAUSAL.name], source, in_layers(provenance), unit)

    def cost(self, shape: Shape) -> Cost:
        single = min(1.0, self.single_norm_prompts / max(1, len(shape.lengths)))
        return Cost(passes=_PASSES_OF_GROUPS + single * _PASSES_PER_NORM * (2 * shape.layers + 1))


class _Watching(Observer):
    """Runs every prompt under every edit."""

    def __init__(self, view: View, probe: Causal) -> None:
        self.view, self.effects = view, list[pd.DataFrame]()
        calibration = view.calibration
        assert calibration is not None
        members = view.calibrated
        self.runs = None
        if members:
            self.runs = EditedRuns(
                view.model,
                members,
                calibration.constants.of,
                optimal=calibration.optimal_of,
                meaningless=view.meaningless,
                single_norm_prompts=probe.single_norm_prompts,
                uniform=probe.uniform,
                primary_only=probe.primary_only,
                errors=calibration.constants.standard_errors if calibration.constants.given is None else None,
                objective=view.objective,
            )

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        if self.runs is not None:
            self.effects.append(self.runs.measure(prompt, tokens))

    def piece(self) -> Piece:
        if self.runs is None:
            return Piece()
        every = {"effects": pd.concat(self.effects, ignore_index=True)} if self.effects else {}
        if self.runs.gradients:
            every["gradients"] = pd.DataFrame(self.runs.gradients, columns=list(GRADIENT_COLUMNS))
        return Piece(tables=every, notes=(*self._on_groups(), *self.runs.notes()))

    def _on_groups(self) -> list[str]:
        if len(self.view.calibrated) == len(self.view.sites):
            return []
        layers = ", ".join(map(str, self.view.layers))
        return [f"groups of the causal table hold the norms of layers {layers} alone"]


def table(
    measured: Sequence[pd.DataFrame],
    constants: Constants,
    gradients: Sequence[pd.DataFrame] = (),
    *,
    seed: int = 0,
) -> pd.DataFrame:
    """The `causal` table from what `EditedRuns.measure` gave for each prompt, in any order.

    Args:
        measured: a frame per part of the prompts.
        constants: of every prompt; its groups are what intervals resample.
        gradients: derivatives of the primary contrasts by the constants (GRADIENT_COLUMNS); with them the intervals of
            these rows include the choice of constants.
        seed: of resamples.
    """
    if not measured:
        return CAUSAL.empty()
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    by_row = {
        (str(sites), str(variant)): rows.set_index("prompt")
        for (sites, variant), rows in sums.groupby(["sites", "variant"], sort=False)
    }
    moved = shifts(constants, pd.concat(gradients, ignore_index=True) if gradients else pd.DataFrame())
    rows = []
    for (sites, variant), mine in by_row.items():
        intact = by_row[sites, "intact"]
        base, total = (rows[list(MEASURES)].sum(skipna=False) for rows in (intact, mine))
        predicted, groups = mine["predicted"].to_numpy(float), constants.groups[mine.index.to_numpy(int)]
        change, optimal = ((mine[m] - intact["nll"]).to_numpy(float) for m in ("nll", "nll_optimal"))
        frozen = variant in ("no_scaling", "neither")
        known = frozen and np.isfinite(optimal).all()
        of_optimal = over_groups(optimal if known else np.full(len(mine), math.nan), predicted, groups, seed)
        idle = variant == "intact" or bool(mine["no_op"].iloc[0])
        taken = predicted > 0
        rows.append(
            {
                "sites": sites,
                "variant": variant,
                "family": family(sites, variant),
                "loss": _ratio(total["nll"], total["predicted"]),
                "delta_loss": _ratio(total["nll"] - base["nll"], total["predicted"]),
                **over_groups(change + _of(moved, sites, variant, mine.index), predicted, groups, seed),
                "delta_loss_median": prompt_intervals.median(change, predicted),
                "delta_loss_uniform": _ratio(total["nll_uniform"] - base["nll"], total["predicted"])
                if frozen
                else math.nan,
                "delta_loss_optimal": float(optimal.sum() / predicted.sum()) if known and predicted.sum() else math.nan,
                "delta_loss_optimal_low": of_optimal["delta_loss_low"],
                "delta_loss_optimal_high": of_optimal["delta_loss_high"],
                "prompts_worse": int((change > 0).sum()) if not np.isnan(change).any() else math.nan,
                "p_adjusted": math.nan if idle else prompt_intervals.sign_test(by_group(change, groups)),
                "kl": _ratio(total["kl"], total["positions"]),
                "top1_agreement": _ratio(total["agree"], total["positions"]),
                "entropy_change": _ratio(total["entropy"] - base["entropy"], total["queries"]),
                "prompts": int(taken.sum()) or len(mine),
                "groups": len(np.unique(groups[taken] if taken.any() else groups)),
                "no_op": mine["no_op"].iloc[0],
            }
        )
    frame = pd.DataFrame(rows, columns=CAUSAL.names)
    return frame.assign(p_adjusted=holm_by_family(frame, "p_adjusted"), p_mean=holm_by_family(frame, "p_mean"))


def _of(
    moved: Mapping[str, Float[np.ndarray, " prompt"]], sites: str, variant: str, prompts: Sequence[int] | pd.Index
) -> Float[np.ndarray, " _"]:
    """The shifts of some prompts under one contrast; 0 where there are none."""
    numbers = np.asarray(prompts, int)
    if variant != "no_scaling" or sites not in moved:
        return np.zeros(len(numbers))
    shift: np.ndarray = moved[sites][numbers]
    return shift


PRIMARY = "primary"


def family(sites: str, variant: str) -> str:
    """The contrasts that a p-value is Holm-adjusted with: "primary", or an exploratory family by name."""
    if variant == "intact":
        return ""
    if sites not in GROUPS:
        return f"exploratory: single norms, {variant}"
    primary = sites in PRIMARY_SITES and variant in PRIMARY_VARIANTS
    return PRIMARY if primary else "exploratory: groups"


def holm_by_family(frame: pd.DataFrame, column: str) -> pd.Series:
    """The p-values of a column, Holm-adjusted within the families. Rows without a p count among the tests of their
    family; what changes nothing by construction does not."""
    tested, found = testable(frame), pd.Series(math.nan, index=frame.index)
    for mine in frame.groupby("family").groups.values():
        some = frame.loc[mine, column].where(tested[mine])
        found[mine] = prompt_intervals.holm(some.to_list(), tested[mine].to_list())
    return found


def by_group(values: Float[np.ndarray, " prompt"], groups: Int64[np.ndarray, " prompt"]) -> Float[np.ndarray, " group"]:
    """The sums over each group that there is, in the order of their numbers."""
    places = np.unique(groups, return_inverse=True)[1]
    found = np.zeros(int(places.max()) + 1 if len(places) else 0)
    np.add.at(found, places, values)
    return found


def over_groups(
    change: Float[np.ndarray, " prompt"],
    predicted: Float[np.ndarray, " prompt"],
    groups: Int64[np.ndarray, " prompt"],
    seed: int,
) -> dict[str, float]:
    """The columns of `causal` that say how far a change of the loss holds beyond its prompts; p is of this row alone.

    Args:
        change: sum over each prompt, nats, with its shift (`shifts`). predicted: its tokens.
        groups: of each prompt.
        seed: of resamples.
    """
    taken = predicted > 0
    sums, weights = by_group(change[taken], groups[taken]), by_group(predicted[taken], groups[taken])
    found = prompt_intervals.judged(sums, weights, seed=seed)
    return {
        "delta_loss_low": found.low,
        "delta_loss_high": found.high,
        "p_mean": found.p,
        "equivalence_bound": found.bound,
    }


def shifts(constants: Constants, gradients: pd.DataFrame) -> dict[str, Float[np.ndarray, " prompt"]]:
    """Of each primary contrast that freezes scaling, what every prompt adds to the summed loss change through the
    constants of all other prompts, to first order: Σ_s g_s (S_s − c_s m_s), summed over norms s and both kinds of
    position, with S and m the prompt's sum and count of sigma, c the pooled constant, and g_s the derivative of the
    summed change by c_s over the total count. It sums to 0 over the prompts."""
    found: dict[str, np.ndarray] = {}
    if constants.given is not None or not len(gradients):
        return found
    for sites, rows in gradients.groupby("sites", sort=False):
        total = np.zeros(len(constants.groups))
        for site, mine in rows.groupby("site", sort=False):
            centered, counts = constants.centered(str(site))
            slopes = mine[["first", "rest"]].sum().to_numpy(float) / np.maximum(counts, 1.0)
            total += centered @ slopes
        found[str(sites)] = total
    return found


def with_today_statistics(effects: pd.DataFrame, kept: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """A `causal` table of an earlier version with intervals, p and families as this version computes them.

    Args:
        effects: the table.
        kept: its `causal_prompts`; rows that it says nothing of stay as they are. Every prompt counts as a group, and
            the intervals do not include the choice of constants, which earlier versions did not keep.
        seed: that the report was made with.
    """
    by_row = dict(list(kept.groupby(["sites", "variant"])))
    columns = ["delta_loss_low", "delta_loss_high", "p_mean", "equivalence_bound", "delta_loss_median"]
    made = effects.reindex(columns=list(dict.fromkeys([*CAUSAL.names, *effects.columns])))
    made[columns] = made[columns].astype(float)
    made["family"] = [family(*pair) for pair in zip(made["sites"], made["variant"], strict=True)]
    made["groups"] = made["prompts"]
    for index, row in zip(made.index, made.to_dict("records"), strict=True):
        mine = by_row.get((row["sites"], row["variant"]))
        if mine is not None:
            predicted = mine["predicted"].to_numpy(float)
            change = np.where(predicted > 0, mine["delta_loss"].to_numpy(float) * predicted, 0.0)
            found = over_groups(change, predicted, np.arange(len(mine)), seed)
            found["delta_loss_median"] = prompt_intervals.median(change, predicted)
            made.loc[index, columns] = [found[c] for c in columns]
        elif row["variant"] == "intact":
            made.loc[index, "delta_loss_median"] = row["delta_loss"]
            made.loc[index, "equivalence_bound"] = abs(row["delta_loss_low"])
    return made.assign(p_mean=holm_by_family(made, "p_mean"))


def by_prompt(
    measured: Sequence[pd.DataFrame], constants: Constants, gradients: Sequence[pd.DataFrame] = ()
) -> pd.DataFrame:
    """The `causal_prompts` table from the same: means over each prompt."""
    if not measured:
        return CAUSAL_PROMPTS.empty()
    moved = shifts(constants, pd.concat(gradients, ignore_index=True) if gradients else pd.DataFrame())
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    intact = sums[sums["variant"] == "intact"].set_index(["prompt", "sites"])
    mine = sums[sums["variant"] != "intact"]
    base = intact.loc[pd.MultiIndex.from_frame(mine[["prompt", "sites"]])].reset_index(drop=True)
    mine = mine.reset_index(drop=True)
    tokens, places, queries = (mine[c].where(mine[c] > 0) for c in ("predicted", "positions", "queries"))
    frozen = mine["variant"].isin(["no_scaling", "neither"])
    return pd.DataFrame(
        {
            "prompt": mine["prompt"].astype(np.int64),
            "group": constants.groups[mine["prompt"].to_numpy(int)],
            "sites": mine["sites"],
            "variant": mine["variant"],
            "predicted": mine["predicted"].astype(np.int64),
            "loss": base["nll"] / tokens,
            "delta_loss": (mine["nll"] - base["nll"]) / tokens,
            "shift": [
                float(_of(moved, str(sites), str(variant), [prompt])[0])
                for prompt, sites, variant in mine[["prompt", "sites", "variant"]].itertuples(index=False)
            ],
            "delta_loss_uniform": ((mine["nll_uniform"] - base["nll"]) / tokens).where(frozen),
            "delta_loss_optimal": ((mine["nll_optimal"] - base["nll"]) / tokens).where(frozen),
            "kl": mine["kl"] / places,
            "top1_agreement": mine["agree"] / places,
            "entropy_change": (mine["entropy"] - base["entropy"]) / queries,
        },
        columns=CAUSAL_PROMPTS.names,
    )


def notes_on(measured: Sequence[pd.DataFrame], constants: Constants) -> list[str]:
    """What a reader has to know about these prompts' numbers."""
    if not measured:
        return []
    sums, notes = pd.concat(measured), []
    intact = sums[sums["variant"] == "intact"]
    endless = sums[sums["kl"].isna() & sums["nll"].isna() & sums["positions"].notna()]
    compared = sums.loc[sums["variant"] != "intact", "kl"].notna().any()
    if len(endless) and (intact["nll"].notna().all() or compared):  # otherwise another note says why there is nothing
        where = ", ".join(dict.fromkeys(f"{r.sites} {r.variant}" for r in endless.itertuples()))
        notes.append(f"causal: the edited model's logits are not finite, so there are no numbers: {where}")
    predict = intact.loc[intact["predicted"] > 0, "prompt"]
    prompts, groups = predict.nunique(), len(np.unique(constants.groups[predict.unique().astype(int)]))
    if intact["nll"].isna().any():
        return notes
    needed = prompt_intervals.PROMPTS_NEEDED
    if groups < needed:
        same = "" if groups == prompts else f", in {groups} {'group' if groups == 1 else 'groups'}"
        notes.append(
            f"causal: {prompts} {'prompt predicts' if prompts == 1 else 'prompts predict'} something{same}; confidence "
            f"intervals need {needed} groups, so there are none, and loss changes are of these prompts alone"
        )
    single = intact.loc[~intact["sites"].isin(GROUPS) & (intact["predicted"] > 0), "prompt"].nunique()
    if single < prompts:
        first = f"on the first {single}" if single else "on none"
        notes.append(f"causal: single norms were edited {first} of {prompts} prompts")
    return notes


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else math.nan
