"""The probe `causal`: how the loss changes without projection, scaling or both, with intervals over prompts.

Prompts are measured one by one (`ln_probe.analyses.probes.edited_runs`), and weighted by the tokens they predict.
Intervals (`statistics`) resample groups of prompts, the same for all rows with as many groups. For the primary
contrasts that freeze scaling they include the choice of the constants, which are means over prompts too (`shifts`).
Groups of norms are run on every prompt. Norms one at a time are run on the first prompts; in a large model only those
that matter most by an estimate are, and the others have the estimate alone (`leading`, `norm_estimates`).

What the table says is worded by `causal_findings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ln_probe.analyses.constants import Calibration, Constants
from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.base import (
    Context,
    Cost,
    Finding,
    Needs,
    Observer,
    Piece,
    Probe,
    ProbeResults,
    Shape,
    View,
    in_layers,
)
from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE, PRIMARY, SINK_FACTOR, sentences, testable
from ln_probe.analyses.probes.columns import CAUSAL, CAUSAL_PROMPTS
from ln_probe.analyses.probes.edited_runs import (
    GRADIENT_COLUMNS,
    LEADING_NORMS,
    MEASURES,
    PRIMARY_SITES,
    SINGLE_NORM_PROMPTS,
    EditedRuns,
)
from ln_probe.analyses.probes.leading import EXACT_WORK, agreement, every_one_would_be_run
from ln_probe.analyses.probes.norm_estimates import PASSES
from ln_probe.hooks.interventions import GROUPS
from ln_probe.hooks.variants import SCALING_FROZEN, VARIANTS, edits_of_norms, frozen_scaling

# Forward passes a prompt: a forward and backward pass (about three passes) for each of the two primary contrasts that
# freeze scaling; under each variant three groups that begin in the first block, with one constant too where it freezes
# scaling, and the final norm, of which the blocks are not computed again; and on the first prompts estimates for every
# norm, and those that are run alone under each variant, from their block on.
_PASSES_OF_GRADIENTS, _PASSES_OF_GROUPS, _PASSES_OF_FINAL, _PASSES_PER_NORM = 6.0, 3.0, 2 / 3, 0.5
# Where d_model is not known, up to so many norms are run alone: those of twelve blocks.
_EXACT_NORMS = 25


class Causal(Probe):
    """How the loss changes when groups of norms, or single norms, lose a term.

    Args:
        single_norm_prompts: on how many of the first prompts norms are taken one by one; 0: groups alone.
        every_norm: whether each of them is run exactly however large the model is.
        uniform: whether groups are also run with one constant for all positions.
        primary_only: whether nothing but the primary contrasts is measured, and of them the loss alone.
    """

    def __init__(
        self,
        single_norm_prompts: int = SINGLE_NORM_PROMPTS,
        uniform: bool = True,
        primary_only: bool = False,
        every_norm: bool = False,
    ) -> None:
        self.single_norm_prompts, self.uniform, self.primary_only = single_norm_prompts, uniform, primary_only
        self.every_norm = every_norm

    name = "causal"
    summary = "how the loss changes when a term is removed"
    tables = (CAUSAL, CAUSAL_PROMPTS)
    needs = Needs(output=True, calibration=True)
    interleaved = True
    thresholds = {  # noqa: RUF012 - a constant
        "causal_resamples": statistics.RESAMPLES,
        "causal_confidence": statistics.CONFIDENCE,
        "causal_interval_reach": statistics.REACH,
        "causal_interval_groups": statistics.PROMPTS_NEEDED,
        "causal_single_norm_prompts": SINGLE_NORM_PROMPTS,
        "causal_exact_work": EXACT_WORK,
        "causal_leading_norms": LEADING_NORMS,
        "causal_least_change": LEAST_CHANGE,
        "causal_sink_factor": SINK_FACTOR,
    }
    absent = "how the loss changes when a term is removed in the running model"

    def start(self, view: View) -> Observer:
        return _Watching(view, self)

    def finish(self, pieces: Sequence[Piece], context: Context) -> ProbeResults:
        measured, gradients = (
            [p.tables[name] for p in pieces if name in p.tables] for name in ("effects", "gradients")
        )
        notes = dict.fromkeys(note for p in pieces for note in p.notes)
        constants = context.calibration.constants
        made = table(measured, constants, gradients, seed=context.seed)
        frames = {CAUSAL.name: made, CAUSAL_PROMPTS.name: by_prompt(measured, constants, gradients)}
        said = [f"causal: second-order estimates and exact effects of {t}" for t in agreement(made, "norms")]
        return ProbeResults(frames, (*notes, *notes_on(measured, constants), *said))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        source = str(provenance.get("prompts", {}).get("source", ""))
        unit = str(provenance.get("loss", {}).get("unit", "nats/token"))
        return sentences(tables[CAUSAL.name], source, in_layers(provenance), unit)

    def cost(self, shape: Shape) -> Cost:
        single = min(1.0, self.single_norm_prompts / max(1, len(shape.lengths)))
        variants = edits_of_norms()
        groups = _PASSES_OF_GROUPS * (len(variants) + sum(v.freezes_scaling for v in variants))
        groups += _PASSES_OF_GRADIENTS + _PASSES_OF_FINAL * len(variants)
        norms = 2 * shape.layers + 1
        known = every_one_would_be_run(shape.layers, shape.width, norms)
        every = self.every_norm or (norms <= _EXACT_NORMS if known is None else known) or norms <= LEADING_NORMS
        estimates = PASSES if every else 2 * PASSES  # once to choose
        alone = estimates + _PASSES_PER_NORM * len(variants) * (norms if every else LEADING_NORMS)
        return Cost(passes=groups + single * alone)


# The norms that are run alone, by calibration: chosen once, and not again for every part of the prompts.
_CHOSEN: WeakKeyDictionary[Calibration, frozenset[str]] = WeakKeyDictionary()


class _Watching(Observer):
    """Runs every prompt under every edit."""

    def __init__(self, view: View, probe: Causal) -> None:
        self.view, self.effects = view, list[pd.DataFrame]()
        calibration = view.calibration
        assert calibration is not None
        self.runs: EditedRuns | None = None
        if members := view.calibrated:
            chosen = {s.name for s in members} if probe.every_norm else _CHOSEN.get(calibration)
            self.runs = EditedRuns(
                view.model,
                members,
                calibration.constants.of,
                optimal=calibration.optimal_of,
                meaningless=view.meaningless,
                single_norm_prompts=probe.single_norm_prompts,
                first=calibration.first,
                exact=chosen,
                uniform=probe.uniform,
                primary_only=probe.primary_only,
                errors=calibration.constants.standard_errors if calibration.constants.given is None else None,
                objective=view.objective,
            )
            if not (probe.every_norm or probe.primary_only):
                _CHOSEN[calibration] = self.runs.exact

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        if self.runs is not None:
            self.effects.append(self.runs.measure(prompt, tokens))

    def piece(self) -> Piece:
        if self.runs is None:
            return Piece()
        notes = self.runs.notes()
        if len(self.view.calibrated) < len(self.view.sites):
            layers = ", ".join(map(str, self.view.layers))
            notes = [f"groups of the causal table hold the norms of layers {layers} alone", *notes]
        every = {"effects": pd.concat(self.effects, ignore_index=True)} if self.effects else {}
        if self.runs.gradients:
            every["gradients"] = pd.DataFrame(self.runs.gradients, columns=list(GRADIENT_COLUMNS))
        return Piece(tables=every, notes=tuple(notes))


def table(
    measured: Sequence[pd.DataFrame], constants: Constants, gradients: Sequence[pd.DataFrame] = (), *, seed: int = 0
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
        frozen = any(frozen_scaling([variant]))
        known = frozen and np.isfinite(optimal).all()
        uniform = total["nll_uniform"] if frozen else math.nan
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
                "delta_loss_median": statistics.median(change, predicted),
                "delta_loss_uniform": _ratio(uniform - base["nll"], total["predicted"]),
                "delta_loss_optimal": float(optimal.sum() / predicted.sum()) if known and predicted.sum() else math.nan,
                "delta_loss_optimal_low": of_optimal["delta_loss_low"],
                "delta_loss_optimal_high": of_optimal["delta_loss_high"],
                "estimate": _ratio(total["estimate"], total["predicted"]),
                "prompts_worse": int((change > 0).sum()) if not np.isnan(change).any() else math.nan,
                "p_sign": math.nan if idle else statistics.sign_test(statistics.by_group(change, groups)),
                "kl": _ratio(total["kl"], total["positions"]),
                "top1_agreement": _ratio(total["agree"], total["positions"]),
                "entropy_change": _ratio(total["entropy"] - base["entropy"], total["queries"]),
                "prompts": int(taken.sum()) or len(mine),
                "groups": len(np.unique(groups[taken] if taken.any() else groups)),
                "no_op": mine["no_op"].iloc[0],
            }
        )
    frame = pd.DataFrame(rows, columns=CAUSAL.names)
    return frame.assign(p_sign=holm_by_family(frame, "p_sign"), p_mean=holm_by_family(frame, "p_mean"))


def _of(
    moved: Mapping[str, Float[np.ndarray, " prompt"]], sites: str, variant: str, prompts: Sequence[int] | pd.Index
) -> Float[np.ndarray, " _"]:
    """The shifts of some prompts under one contrast; 0 where there are none."""
    if variant != SCALING_FROZEN.name or sites not in moved:
        return np.zeros(len(prompts))
    return np.asarray(moved[sites][np.asarray(prompts, int)])


def family(sites: str, variant: str) -> str:
    """The contrasts that a p-value is Holm-adjusted with: "primary", or an exploratory family by name."""
    if variant == "intact":
        return ""
    if sites not in GROUPS:
        return f"exploratory: single norms, {variant}"
    known = VARIANTS.get(variant)
    if known is not None and known.primary and sites in PRIMARY_SITES:
        return PRIMARY
    return "exploratory: groups" if known is not None and known.standard else f"exploratory: groups, {variant}"


def holm_by_family(frame: pd.DataFrame, column: str) -> pd.Series:
    """The p-values of a column, Holm-adjusted within the families. Rows without a p count among the tests of their
    family, and so do norms that were only estimated: which are run is chosen on the same prompts. What changes nothing
    by construction does not count."""
    estimated = frame["delta_loss"].isna() & frame.get("estimate", frame["delta_loss"]).notna()
    tested, found = testable(frame) | (estimated & (frame["no_op"].fillna("") == "")), pd.Series(math.nan, frame.index)
    for mine in frame.groupby("family").groups.values():
        some = frame.loc[mine, column].where(tested[mine])
        found[mine] = statistics.holm(some.to_list(), tested[mine].to_list())
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
    sums, weights = (statistics.by_group(values[taken], groups[taken]) for values in (change, predicted))
    found = statistics.infer_mean(sums, weights, seed=seed)
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
            found["delta_loss_median"] = statistics.median(change, predicted)
            made.loc[index, columns] = [found[c] for c in columns]
        elif row["variant"] == "intact":
            made.loc[index, "delta_loss_median"] = row["delta_loss"]
            made.loc[index, "equivalence_bound"] = abs(row["delta_loss_low"])
    return made.assign(p_mean=holm_by_family(made, "p_mean"))


def by_prompt(
    measured: Sequence[pd.DataFrame], constants: Constants, gradients: Sequence[pd.DataFrame] = ()
) -> pd.DataFrame:
    """The `causal_prompts` table from the same: means over each prompt, of what was run."""
    if not measured:
        return CAUSAL_PROMPTS.empty()
    moved = shifts(constants, pd.concat(gradients, ignore_index=True) if gradients else pd.DataFrame())
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    intact = sums[sums["variant"] == "intact"].set_index(["prompt", "sites"])
    mine = sums[(sums["variant"] != "intact") & sums["positions"].notna()]
    base = intact.loc[pd.MultiIndex.from_frame(mine[["prompt", "sites"]])].reset_index(drop=True)
    mine = mine.reset_index(drop=True)
    tokens, places, queries = (mine[c].where(mine[c] > 0) for c in ("predicted", "positions", "queries"))
    frozen = pd.Series(frozen_scaling(mine["variant"]), index=mine.index, dtype=bool)
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
    needed = statistics.PROMPTS_NEEDED
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
