"""The probe `causal`: how the loss changes without projection, scaling or both, with intervals over prompts.

Prompts are measured one by one (`ln_probe.analyses.probes.edited_runs`), and weighted by the tokens they predict.
Intervals (`statistics`) resample groups of prompts, the same for all rows with as many groups. For the primary
contrasts that freeze scaling they include the choice of the constants, which are means over prompts too (`shifts`).
Groups of norms are run on every prompt. Norms one at a time are run on the first prompts; in a large model only those
that matter most by an estimate are, and the others have the estimate alone (`leading`).

Rows whose edit changes nothing by construction are left out; `provenance["causal"]["no_op"]` says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.edited_runs import (
    LEADING_NORMS,
    MEASURES,
    PRIMARY_SITES,
    SINGLE_NORM_PROMPTS,
    EditedRuns,
)
from ln_probe.analyses.probes.leading import EXACT_WORK, agreement
from ln_probe.analyses.probes.tables import CAUSAL, CAUSAL_PROMPTS
from ln_probe.analyses.probes.wording import LEAST_CHANGE, PRIMARY
from ln_probe.analyses.text import counted
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.model import missing_head
from ln_probe.hooks.norm import SCALING_FROZEN, VARIANTS


class Causal(Probe):
    """How the loss changes when groups of norms, or single norms, lose a term.

    Args:
        single_norm_prompts: on how many of the first prompts norms are taken one by one; 0: groups alone.
        every_norm: whether each of them is run exactly however large the model is.
        uniform: whether primary contrasts that freeze scaling are also run with one constant for all positions.
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
    needs = Needs(output=True)
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
    }

    def start(self, run: Run) -> Observer:
        constants, members = run.constants, run.measured_norms
        if not members:
            return Observer()
        layers = ", ".join(map(str, run.layers))
        runs = EditedRuns(
            run.model,
            members,
            constants.of,
            optimal=constants.optimal_of if constants.optimal else None,
            meaningless=missing_head(run.model),
            single_norm_prompts=self.single_norm_prompts,
            first=run.prompts[:SINGLE_NORM_PROMPTS],
            exact=[s.name for s in members] if self.every_norm else None,
            uniform=self.uniform,
            primary_only=self.primary_only,
            errors=constants.standard_errors if constants.given is None else None,
            objective=run.loss,
            note=f"groups of the causal table hold the norms of layers {layers} alone"
            if len(members) < len(run.norms)
            else "",
        )
        return _Watching(runs, constants, run.seed)


class _Watching(Observer):
    def __init__(self, runs: EditedRuns, constants: Constants, seed: int) -> None:
        self.runs, self.constants, self.seed = runs, constants, seed
        self.sums: list[pd.DataFrame] = []  # of each prompt

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        self.sums.append(self.runs.measure(prompt, tokens))

    def finish(self) -> ProbeResults:
        moved = shifts(self.constants, pd.DataFrame(self.runs.gradients))
        effects = table(self.sums, self.constants, moved, seed=self.seed)
        tables = {CAUSAL.name: effects, CAUSAL_PROMPTS.name: by_prompt(self.sums, self.constants, moved)}
        compared = [f"causal: second-order estimates and exact effects of {t}" for t in agreement(effects, "norms")]
        notes = [*self.runs.notes(), *notes_on(self.sums, self.constants), *compared]
        return ProbeResults(tables, notes, {"no_op": no_ops(self.sums)})


Shifts = Mapping[str, Float[np.ndarray, " prompt"]]  # by group of norms


def table(
    measured: Sequence[pd.DataFrame], constants: Constants, moved: Shifts | None = None, *, seed: int = 0
) -> pd.DataFrame:
    """Return the `causal` table.

    Args:
        measured: what `EditedRuns.measure` gave for each prompt.
        constants: of every prompt; its groups are what intervals resample.
        moved: `shifts`; with them the intervals of the primary contrasts include the choice of constants.
        seed: of resamples.
    """
    if not measured:
        return CAUSAL.empty()
    sums = _joined(measured, moved)
    by_row = {
        (str(sites), str(variant)): rows.set_index("prompt")
        for (sites, variant), rows in sums.groupby(["sites", "variant"], sort=False)
    }
    rows = []
    for (sites, variant), mine in by_row.items():
        if mine["no_op"].iloc[0]:
            continue
        intact = by_row[sites, "intact"]
        base, total = (rows[list(MEASURES)].sum(skipna=False) for rows in (intact, mine))
        predicted, groups = mine["predicted"].to_numpy(float), constants.groups[mine.index.to_numpy(int)]
        change, optimal = ((mine[m] - intact["nll"]).to_numpy(float) for m in ("nll", "nll_optimal"))
        frozen = VARIANTS[variant].freezes_scaling
        known = frozen and np.isfinite(optimal).all()
        uniform = total["nll_uniform"] if frozen else math.nan
        of_optimal = over_groups(optimal if known else np.full(len(mine), math.nan), predicted, groups, seed)
        taken = predicted > 0
        rows.append(
            {
                "sites": sites,
                "variant": variant,
                "family": family(sites, variant),
                "loss": _ratio(total["nll"], total["predicted"]),
                "delta_loss": _ratio(total["nll"] - base["nll"], total["predicted"]),
                **over_groups(change + mine["shift"].to_numpy(float), predicted, groups, seed),
                "delta_loss_uniform": _ratio(uniform - base["nll"], total["predicted"]),
                "delta_loss_optimal": float(optimal.sum() / predicted.sum()) if known and predicted.sum() else math.nan,
                "delta_loss_optimal_low": of_optimal["delta_loss_low"],
                "delta_loss_optimal_high": of_optimal["delta_loss_high"],
                "estimate": _ratio(total["estimate"], total["predicted"]),
                "prompts_worse": int((change > 0).sum()) if not np.isnan(change).any() else math.nan,
                "n": int(taken.sum()) or len(mine),
            }
        )
    frame = CAUSAL.frame(rows)
    return frame.assign(p=holm_by_family(frame))


def no_ops(measured: Sequence[pd.DataFrame]) -> dict[str, str]:
    """Return why variants change nothing by construction, of those that change nothing at any norm."""
    rows = measured[0][measured[0]["sites"] == "all"] if measured else pd.DataFrame(columns=["variant", "no_op"])
    return {str(row.variant): str(row.no_op) for row in rows.itertuples() if row.no_op}


def _joined(measured: Sequence[pd.DataFrame], moved: Shifts | None) -> pd.DataFrame:
    """The sums of all prompts in their order, and their shifts; 0 where there are none."""
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    shift = pd.Series(0.0, sums.index)
    for sites, values in (moved or {}).items():
        here = (sums["sites"] == sites) & (sums["variant"] == SCALING_FROZEN.name)
        shift[here] = values[sums.loc[here, "prompt"].to_numpy(int)]
    return sums.assign(shift=shift)


def family(sites: str, variant: str) -> str:
    """The contrasts that a p-value is Holm-adjusted with: "primary", or an exploratory family by name."""
    if variant == "intact":
        return ""
    if sites not in GROUPS:
        return f"exploratory: single norms, {variant}"
    return PRIMARY if VARIANTS[variant].primary and sites in PRIMARY_SITES else "exploratory: groups"


def holm_by_family(frame: pd.DataFrame) -> pd.Series:
    """Return the column `p`, Holm-adjusted within the families.

    Rows without a p count among the tests of their family, and so do norms that were only estimated: which are run is
    chosen on the same prompts.
    """
    tested = (frame["variant"] != "intact") & (frame["delta_loss"].notna() | frame["estimate"].notna())
    adjusted = pd.Series(math.nan, frame.index)
    for rows in frame.groupby("family").groups.values():
        p = frame.loc[rows, "p"].where(tested[rows])
        adjusted[rows] = statistics.holm(p.to_list(), tested[rows].to_list())
    return adjusted


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
        "p": found.p,
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


def by_prompt(measured: Sequence[pd.DataFrame], constants: Constants, moved: Shifts | None = None) -> pd.DataFrame:
    """The `causal_prompts` table from the same: means over each prompt, of what was run."""
    if not measured:
        return CAUSAL_PROMPTS.empty()
    sums = _joined(measured, moved)
    intact = sums[sums["variant"] == "intact"].set_index(["prompt", "sites"])
    mine = sums[(sums["variant"] != "intact") & sums["positions"].notna() & (sums["no_op"] == "")]
    base = intact.loc[pd.MultiIndex.from_frame(mine[["prompt", "sites"]])].reset_index(drop=True)
    mine = mine.reset_index(drop=True)
    tokens = mine["predicted"].where(mine["predicted"] > 0)
    return pd.DataFrame(
        {
            "prompt": mine["prompt"].astype(np.int64),
            "stratum": [str(constants.groups[prompt]) for prompt in mine["prompt"].astype(int)],
            "sites": mine["sites"],
            "variant": mine["variant"],
            "loss": base["nll"] / tokens,
            "delta_loss": (mine["nll"] - base["nll"]) / tokens,
            "shift": mine["shift"],
            "n": mine["predicted"].astype(np.int64),
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
    if intact["nll"].isna().any():
        return notes
    known = intact[intact["predicted"] > 0]
    prompts, needed = known["prompt"].nunique(), statistics.PROMPTS_NEEDED
    groups = len(np.unique(constants.groups[known["prompt"].unique().astype(int)]))
    if groups < needed:
        same = "" if groups == prompts else f", in {counted(groups, 'group')}"
        notes.append(
            f"causal: {counted(prompts, 'prompt')} {'predicts' if prompts == 1 else 'predict'} something{same}; "
            f"confidence intervals need {needed} groups, so there are none, and loss changes are of these prompts alone"
        )
    single = known.loc[~known["sites"].isin(GROUPS), "prompt"].nunique()
    if single < prompts:
        first = f"on the first {single}" if single else "on none"
        notes.append(f"causal: single norms were edited {first} of {prompts} prompts")
    return notes


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else math.nan
