"""The probe `causal`: how the loss changes without projection, scaling or both, with intervals over prompts.

Prompts are measured one by one (`ln_probe.analyses.probes.edited_runs`), and weighted by the tokens they predict.
Intervals (`statistics`) resample groups of prompts, the same for all rows with as many groups. For the primary
contrasts that freeze scaling they include the choice of the constants, which are means over prompts too (`shifts`).

Two terms, scaling and projection, at every norm and at the norms that attention reads, are the primary contrasts: each
is always reported, significant or not. All other changes are exploratory: they are reported only where significant
within their family, and labelled. A change is called an effect where its interval excludes 0, its Holm-adjusted p is
below 0.05, and it is at least LEAST_CHANGE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.base import (
    DESCRIBED,
    EFFECT,
    NO_EFFECT,
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
from ln_probe.analyses.probes.columns import CAUSAL, CAUSAL_PROMPTS
from ln_probe.analyses.probes.edited_runs import (
    GRADIENT_COLUMNS,
    MEASURES,
    PRIMARY_SITES,
    SINGLE_NORM_PROMPTS,
    EditedRuns,
)
from ln_probe.analyses.probes.text import counted, number, percent, signed
from ln_probe.hooks.interventions import GROUPS
from ln_probe.hooks.variants import INTACT, SCALING_FROZEN, VARIANTS, edits_of_norms, frozen_scaling

# The smallest change of the loss that is called an effect, nats per token: 1 % of perplexity.
LEAST_CHANGE = 0.01
# One constant for all positions is mentioned where it adds this many times the change that two constants give.
SINK_FACTOR = 2.0
SHOWN = 3  # single norms that are named, the largest changes first

_PLACES = {
    "all": "at every norm",
    "attention": "at the norms that attention reads",
    "mlp": "at the norms that MLPs read",
    "final": "at the final norm",
}
PRIMARY = "primary"
_NATS = "nats/token"


def sentences(effects: pd.DataFrame, source: str = "", layers: str = "", unit: str = _NATS) -> list[Finding]:
    """Findings of a `causal` table, the primary contrasts first.

    Args:
        effects: the table.
        source: of the prompts.
        layers: where norms were edited, as `sentences.in_layers` puts it.
        unit: of the loss.
    """
    if not len(effects) or effects["delta_loss"].isna().all():
        return []
    places = {sites: place + ("" if sites == "final" else layers) for sites, place in _PLACES.items()}
    rows = [{str(k): v for k, v in row.items()} for row in effects.to_dict("records")]
    primary = [r for r in rows if r["sites"] in ("all", "attention") and _is_known(r)]
    findings = [
        _primary(variant.wording, mine, places, source, unit)
        for variant in VARIANTS.values()
        if variant.primary and (mine := {r["sites"]: r for r in primary if r["variant"] == variant.name})
    ]
    tested = effects[testable(effects) & (effects["family"] != PRIMARY)]
    return [*findings, *_exploratory_groups(tested, places, unit), *_single(tested, unit)]


def testable(effects: pd.DataFrame) -> pd.Series:
    """Which rows could show a change: of an edit that does something, with a loss."""
    return (effects["variant"] != "intact") & (effects["no_op"].fillna("") == "") & effects["delta_loss"].notna()


def _is_known(row: Any) -> bool:
    """Whether there is a number: not where logits overflow, or where nothing downstream heeds the edit."""
    return not math.isnan(float(row["delta_loss"]))


def is_effect(row: Any) -> bool:
    """Whether a row may be called an effect: significant, and large enough."""
    return is_significant(row) and abs(float(row["delta_loss"])) >= LEAST_CHANGE


def is_significant(row: Any) -> bool:
    """Whether the row's interval excludes 0 and its Holm-adjusted p is below 0.05."""
    low, high = float(row["delta_loss_low"]), float(row["delta_loss_high"])
    return (low > 0 or high < 0) and float(row["p_mean"]) < statistics.SIGNIFICANCE


def is_direction(row: Any) -> bool:
    """Whether there is no interval, and the loss moves one way on significantly more prompts than the other."""
    signs = math.isnan(float(row["delta_loss_low"])) and float(row["p_adjusted"]) < statistics.SIGNIFICANCE
    return signs and not pd.isna(row["prompts_worse"]) and abs(float(row["delta_loss"])) >= LEAST_CHANGE


def base_loss(row: Any) -> float:
    """The loss of the intact model."""
    return float(row["loss"] - row["delta_loss"])


def change(row: Any, unit: str = _NATS, *, of_the_whole: bool = False) -> str:
    """What a contrast did: "raises the loss by 0.16 nats/token (…)"; `of_the_whole`: as a share of the loss, too."""
    delta, low, high = (float(row[c]) for c in ("delta_loss", "delta_loss_low", "delta_loss_high"))
    intact, whole = base_loss(row) if of_the_whole else 0.0, ""
    if intact > 0:
        whole = f", {percent(abs(delta) / intact)} of the intact loss of {number(intact)}"
    if math.isnan(low):
        median = float(row["delta_loss_median"])
        middle = "" if math.isnan(median) else f" (median prompt {signed(median)})"
        size = f"{signed(delta)} {unit} on average{whole}{middle}"
        return f"changes the loss by {size} on {_prompts(row)}: {_no_interval(row)}"
    interval = f"95 % CI {signed(low)} to {signed(high)}"
    if is_significant(row):
        changed = f"{'raises' if delta > 0 else 'lowers'} the loss by {number(abs(delta))} {unit}{whole}"
        small = f": significant, but too small to be called an effect (below {LEAST_CHANGE:g} {unit})"
        return f"{changed} ({interval}; {_p(row)}){'' if is_effect(row) else small}"
    if (bound := float(row["equivalence_bound"])) < LEAST_CHANGE:
        return (
            f"does not change the loss by more than {LEAST_CHANGE:g} {unit} ({signed(delta)}; 90 % CI within "
            f"±{number(bound)}, the equivalence bound)"
        )
    return f"does not significantly change the loss ({signed(delta)} {unit}, {interval}; {_p(row)})"


def _primary(
    wording: str, rows: Mapping[str, dict[str, Any]], places: Mapping[str, str], source: str, unit: str
) -> Finding:
    """One sentence or two about a primary variant: at every norm, and at the norms that attention reads."""
    every, attention = rows.get("all"), rows.get("attention")
    first = every if every is not None else attention
    assert first is not None
    subject = f"{wording} {places[str(first['sites'])]}"
    if reason := str(first["no_op"] or ""):
        return Finding(f"{subject} is not applicable ({reason}).", "causal", NO_EFFECT, size=-1)
    text = f"{subject} {change(first, unit, of_the_whole=True)}{_optimal(first)}{_sink(first)}."
    if every is not None and attention is not None:
        where = f"{places['attention'].capitalize()} alone"
        reason = str(attention["no_op"] or "")
        text += f" {where} " + (f"it is not applicable ({reason})." if reason else f"it {change(attention, unit)}")
        text += "" if reason else f"{_optimal(attention)}{_sink(attention)}."
    known = [r for r in (every, attention) if r is not None and not r["no_op"]]
    if source == "sampled" and any(map(is_significant, known)):
        text += " The prompts are the model's own samples: a loss change on them estimates a KL divergence."
    rank = EFFECT if any(map(is_effect, known)) else DESCRIBED if any(map(is_direction, known)) else NO_EFFECT
    return Finding(text, "causal", rank, size=_share(first))


def _exploratory_groups(tested: pd.DataFrame, places: Mapping[str, str], unit: str) -> list[Finding]:
    """Significant changes of the other groups; every variant that was added has its own sentence, after the others."""
    groups = [dict(r) for r in tested[tested["sites"].isin(GROUPS)].to_dict("records") if is_effect(r)]
    groups.sort(key=lambda r: -abs(r["delta_loss"]))
    findings = []
    for some in (edits_of_norms(standard=True), *([v] for v in edits_of_norms(standard=False))):
        words = {v.name: v.wording[0].lower() + v.wording[1:] for v in some if not v.is_combined}
        if rows := [r for r in groups if r["variant"] in words]:
            told = "; ".join(f"{words[r['variant']]} {places[r['sites']]} {change(r, unit)}{_sink(r)}" for r in rows)
            size = _share(rows[0]) / 2 if some[0].standard else 0.0
            findings.append(Finding(f"Exploratory: {told}.", "causal", EFFECT, size=size))
    return findings


def _single(tested: pd.DataFrame, unit: str) -> list[Finding]:
    """The norms whose frozen scaling changes the loss most, one by one."""
    alone = tested[~tested["sites"].isin(GROUPS) & (tested["variant"] == SCALING_FROZEN.name)]
    if len(alone) < 2:
        return []
    rows = sorted(alone.to_dict("records"), key=lambda r: -abs(r["delta_loss"]))
    for wanted, rank, how in (
        (is_effect, EFFECT, "significantly"),
        (is_direction, DESCRIBED, "with a significant sign test over prompts"),
    ):
        if some := [r for r in rows if wanted(r)]:
            named = "; ".join(f"{r['sites']} {change(r, unit)}" for r in some[:SHOWN])
            which = f"; the {SHOWN} largest of them" if len(some) > SHOWN else ""
            text = (
                f"Exploratory: of {len(alone)} norms frozen one at a time, {len(some)} "
                f"{'changes' if len(some) == 1 else 'change'} the loss by {LEAST_CHANGE:g} or more, {how}{which}: "
                f"{named}."
            )
            return [Finding(text, "causal", rank, size=_share(some[0]) / 2)]
    return []


def _share(row: Any) -> float:
    """The change as a share of the intact loss."""
    return abs(float(row["delta_loss"])) / max(abs(base_loss(row)), 1e-12)


def _p(row: Any) -> str:
    p = float(row["p_mean"])
    if math.isnan(p):
        return "p not known"
    return "Holm-adjusted p < 0.001" if p < 0.001 else f"Holm-adjusted p = {p:.2g}"


def _prompts(row: Any) -> str:
    prompts, groups = int(row["prompts"]), row["groups"]
    same = "" if pd.isna(groups) or int(groups) == prompts else f" in {counted(int(groups), 'group')}"
    return f"{counted(prompts, 'prompt')}{same}"


def _no_interval(row: Any) -> str:
    """Why there is no interval, and what the prompts' signs say instead."""
    groups = row["prompts"] if pd.isna(row["groups"]) else row["groups"]
    why = (
        f"no CI with fewer than {statistics.PROMPTS_NEEDED} prompts"
        if groups < statistics.PROMPTS_NEEDED
        else "no CI, because a few prompts carry the mean"
    )
    if not is_direction(row):
        return why
    worse, prompts = int(row["prompts_worse"]), int(row["prompts"])
    up = 2 * worse > prompts
    return (
        f"it {'rises' if up else 'falls'} on {worse if up else prompts - worse} of {prompts}, Holm-adjusted sign test "
        f"p = {float(row['p_adjusted']):.2g} ({why})"
    )


def _optimal(row: Any) -> str:
    """The change under loss-optimal constants, where they were fitted."""
    value, low, high = (float(row.get(f"delta_loss_optimal{end}", math.nan)) for end in ("", "_low", "_high"))
    if math.isnan(value):
        return ""
    interval = "" if math.isnan(low) else f" (95 % CI {signed(low)} to {signed(high)})"
    return f"; with loss-optimal constants {signed(value)}{interval}"


def _sink(row: Any) -> str:
    """The change with one constant for all positions, where it is much larger."""
    uniform, delta = float(row["delta_loss_uniform"]), float(row["delta_loss"])
    variant = VARIANTS.get(row["variant"], INTACT)
    known = variant.standard and variant.freezes_scaling and not math.isnan(uniform)
    if not known or uniform - delta < SINK_FACTOR * max(LEAST_CHANGE, abs(delta)):
        return ""
    return f"; with one constant for all positions {signed(uniform)}, because position 0 then becomes too long"


# ------------------------------------------------------------------------------------------------------------ the probe

# Forward passes a prompt: a forward and backward pass (about three passes) for each of the two primary contrasts that
# freeze scaling; under each variant three groups that begin in the first block, with one constant too where it freezes
# scaling, and the final norm, of which the blocks are not computed again; and each norm alone under each variant, on
# the first prompts, from its block on.
_PASSES_OF_GRADIENTS, _PASSES_OF_GROUPS, _PASSES_OF_FINAL, _PASSES_PER_NORM = 6.0, 3.0, 2 / 3, 0.5


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
        "causal_resamples": statistics.RESAMPLES,
        "causal_confidence": statistics.CONFIDENCE,
        "causal_interval_reach": statistics.REACH,
        "causal_interval_groups": statistics.PROMPTS_NEEDED,
        "causal_single_norm_prompts": SINGLE_NORM_PROMPTS,
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
        frames = {
            CAUSAL.name: table(measured, constants, gradients, seed=context.seed),
            CAUSAL_PROMPTS.name: by_prompt(measured, constants, gradients),
        }
        return ProbeResults(frames, (*notes, *notes_on(measured, constants)))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        source = str(provenance.get("prompts", {}).get("source", ""))
        unit = str(provenance.get("loss", {}).get("unit", "nats/token"))
        return sentences(tables[CAUSAL.name], source, in_layers(provenance), unit)

    def cost(self, shape: Shape) -> Cost:
        single = min(1.0, self.single_norm_prompts / max(1, len(shape.lengths)))
        variants = edits_of_norms()
        groups = _PASSES_OF_GROUPS * (len(variants) + sum(v.freezes_scaling for v in variants))
        groups += _PASSES_OF_GRADIENTS + _PASSES_OF_FINAL * len(variants)
        return Cost(passes=groups + single * _PASSES_PER_NORM * len(variants) * (2 * shape.layers + 1))


class _Watching(Observer):
    """Runs every prompt under every edit."""

    def __init__(self, view: View, probe: Causal) -> None:
        self.view, self.effects = view, list[pd.DataFrame]()
        calibration = view.calibration
        assert calibration is not None
        self.runs = None
        if members := view.calibrated:
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
                "prompts_worse": int((change > 0).sum()) if not np.isnan(change).any() else math.nan,
                "p_adjusted": math.nan if idle else statistics.sign_test(statistics.by_group(change, groups)),
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
    family; what changes nothing by construction does not."""
    tested, found = testable(frame), pd.Series(math.nan, index=frame.index)
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
    sums, weights = (
        statistics.by_group(change[taken], groups[taken]),
        statistics.by_group(predicted[taken], groups[taken]),
    )
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
