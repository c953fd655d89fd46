"""What a `causal` table says, in sentences: which changes of the loss are effects, and how they are worded.

Two terms, scaling and projection, at every norm and at the norms that attention reads, are the primary contrasts: each
is always reported, significant or not. All other changes are exploratory: they are reported only where they are effects
within their family (single norms without a CI: by the sign test), and labelled. A change is called an effect where its
interval excludes 0, its Holm-adjusted p is below 0.05, and it is at least LEAST_CHANGE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.base import DESCRIBED, EFFECT, NO_EFFECT, Finding
from ln_probe.analyses.text import counted, number, percent, signed, with_interval
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.norm import EDITS, INTACT, SCALING_FROZEN, VARIANTS

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


def sentences(effects: pd.DataFrame, layers: str = "", unit: str = _NATS) -> list[Finding]:
    """Findings of a `causal` table, the primary contrasts first.

    Args:
        effects: the table.
        layers: where norms were edited, as `base.in_layers` puts it.
        unit: of the loss.
    """
    if not len(effects) or effects["delta_loss"].isna().all():
        return []
    places = {sites: place + ("" if sites == "final" else layers) for sites, place in _PLACES.items()}
    rows = [{str(k): v for k, v in row.items()} for row in effects.to_dict("records")]
    # (There is no number where logits overflow, or where nothing downstream heeds the edit.)
    primary = [r for r in rows if r["sites"] in ("all", "attention") and not math.isnan(r["delta_loss"])]
    findings = [
        _primary(variant.wording, mine, places, unit)
        for variant in VARIANTS.values()
        if variant.primary and (mine := {r["sites"]: r for r in primary if r["variant"] == variant.name})
    ]
    tested = effects[testable(effects) & (effects["family"] != PRIMARY)]
    estimates = effects.get("estimate", pd.Series(math.nan, effects.index))
    estimated = int((effects["delta_loss"].isna() & estimates.notna() & _frozen_alone(effects)).sum())
    return [*findings, *_exploratory_groups(tested, places, unit), *_single(tested, unit, estimated)]


def testable(effects: pd.DataFrame) -> pd.Series:
    """Which rows could show a change: of an edit that does something, with a loss."""
    return (effects["variant"] != "intact") & (effects["no_op"].fillna("") == "") & effects["delta_loss"].notna()


def is_effect(row: Any) -> bool:
    """Whether a row may be called an effect: significant, and large enough."""
    return is_significant(row) and abs(float(row["delta_loss"])) >= LEAST_CHANGE


def is_significant(row: Any) -> bool:
    """Whether the row's interval excludes 0 and its Holm-adjusted p is below 0.05."""
    low, high = float(row["delta_loss_low"]), float(row["delta_loss_high"])
    return (low > 0 or high < 0) and float(row["p_mean"]) < statistics.SIGNIFICANCE


def is_direction(row: Any) -> bool:
    """Whether there is no interval, and the loss moves one way on significantly more prompts than the other."""
    signs = math.isnan(float(row["delta_loss_low"])) and float(row["p_sign"]) < statistics.SIGNIFICANCE
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
        return f"changes the loss by {size} on {_no_interval(row)}"
    size, ends = with_interval(delta, low, high)
    interval = f"95 % CI {ends}"
    if is_significant(row):
        changed = f"{'raises' if delta > 0 else 'lowers'} the loss by {size[1:]} {unit}{whole}"
        small = f": significant, but too small to be called an effect (below {LEAST_CHANGE:g} {unit})"
        return f"{changed} ({interval}; {_p(row)}){'' if is_effect(row) else small}"
    if (bound := float(row["equivalence_bound"])) < LEAST_CHANGE:
        return (
            f"does not change the loss by more than {LEAST_CHANGE:g} {unit} ({size}; 90 % CI within "
            f"±{number(bound)}, the equivalence bound)"
        )
    return f"does not significantly change the loss ({size} {unit}, {interval}; {_p(row)})"


def _primary(wording: str, rows: Mapping[str, dict[str, Any]], places: Mapping[str, str], unit: str) -> Finding:
    """One sentence or two about a primary variant: at every norm, and at the norms that attention reads."""
    every, attention = rows.get("all"), rows.get("attention")
    first = every if every is not None else attention
    assert first is not None
    subject = f"{wording} {places[str(first['sites'])]}"
    if reason := str(first["no_op"] or ""):
        return Finding(f"{subject} is not applicable ({reason}).", "causal", NO_EFFECT, size=-1)
    text = f"{subject} {change(first, unit, of_the_whole=True)}{_optimal(first)}{_sink(first)}."
    if every is not None and attention is not None:
        what = f"it {change(attention, unit)}{_optimal(attention)}{_sink(attention)}"
        if reason := str(attention["no_op"] or ""):
            what = f"it is not applicable ({reason})"
        text += f" {places['attention'].capitalize()} alone {what}."
    known = [r for r in (every, attention) if r is not None and not r["no_op"]]
    rank = EFFECT if any(map(is_effect, known)) else DESCRIBED if any(map(is_direction, known)) else NO_EFFECT
    return Finding(text, "causal", rank, size=_share(first))


def _exploratory_groups(tested: pd.DataFrame, places: Mapping[str, str], unit: str) -> list[Finding]:
    """Return the significant changes of the other groups."""
    groups = [dict(r) for r in tested[tested["sites"].isin(GROUPS)].to_dict("records") if is_effect(r)]
    groups.sort(key=lambda r: -abs(r["delta_loss"]))
    words = {v.name: v.wording[0].lower() + v.wording[1:] for v in EDITS if not v.is_combined}
    rows = [r for r in groups if r["variant"] in words]
    if not rows:
        return []
    text = "; ".join(f"{words[r['variant']]} {places[r['sites']]} {change(r, unit)}{_sink(r)}" for r in rows)
    return [Finding(f"Exploratory: {text}.", "causal", EFFECT, size=_share(rows[0]) / 2)]


def _frozen_alone(effects: pd.DataFrame) -> pd.Series:
    """The rows of single norms whose scaling is frozen."""
    return ~effects["sites"].isin(GROUPS) & (effects["variant"] == SCALING_FROZEN.name)


def _single(tested: pd.DataFrame, unit: str, estimated: int) -> list[Finding]:
    """The norms whose frozen scaling changes the loss most, one by one; beside these so many are only estimated."""
    alone = tested[_frozen_alone(tested)]
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
            those = f"{len(alone)} norms frozen one at a time"
            if estimated:
                those += f" (those with the largest estimates; {estimated} more are only estimated)"
            text = (
                f"Exploratory: of {those}, {len(some)} "
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


def _no_interval(row: Any) -> str:
    """On how many prompts, why there is no interval, and what the prompts' signs say instead."""
    prompts = int(row["prompts"])
    groups = prompts if pd.isna(row["groups"]) else int(row["groups"])
    where, units = counted(prompts, "prompt"), "prompts"
    if groups != prompts:
        where, units = f"{where} in {counted(groups, 'group')}", "groups"
    why = "no CI, because a few prompts carry the mean"
    if groups < statistics.PROMPTS_NEEDED:
        why = f"no CI with fewer than {statistics.PROMPTS_NEEDED} {units}"
    if not is_direction(row):
        return f"{where}: {why}"
    worse = int(row["prompts_worse"])
    moves = f"rises on {worse}" if 2 * worse > prompts else f"falls on {prompts - worse}"
    return f"{where}: it {moves} of {prompts}, Holm-adjusted sign test p = {float(row['p_sign']):.2g} ({why})"


def _optimal(row: Any) -> str:
    """The change under loss-optimal constants, where they were fitted."""
    value, low, high = (float(row.get(f"delta_loss_optimal{end}", math.nan)) for end in ("", "_low", "_high"))
    if math.isnan(value):
        return ""
    size, ends = with_interval(value, low, high)
    return f"; with loss-optimal constants {size}{f' (95 % CI {ends})' if ends else ''}"


def _sink(row: Any) -> str:
    """The change with one constant for all positions, where it is much larger."""
    uniform, delta = float(row["delta_loss_uniform"]), float(row["delta_loss"])
    variant = VARIANTS.get(row["variant"], INTACT)
    known = variant.freezes_scaling and not math.isnan(uniform)
    if not known or uniform - delta < SINK_FACTOR * max(LEAST_CHANGE, abs(delta)):
        return ""
    return f"; with one constant for all positions {signed(uniform)}, because position 0 then becomes too long"
