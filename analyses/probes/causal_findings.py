"""What the `causal` table says, in sentences: an effect is spoken of only where its interval and its size allow it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ln_probe.analyses.probes.protocol import EFFECT, NO_EFFECT, Finding
from ln_probe.analyses.probes.sentences import largest
from ln_probe.analyses.prompt_intervals import SIGNIFICANCE
from ln_probe.analyses.wording import number, percent
from ln_probe.hooks.interventions import GROUPS

# The least change of the loss that is called an effect, nats per token: 1 % of perplexity.
LEAST_CHANGE = 0.01
# A constant at position 0 that is not its own is spoken of where it adds so many times what taking scaling away costs.
SINK_FACTOR = 2.0

_CONFIDENCE, _POWER = 1.960, 1.645  # standard errors: of a 95 % interval, of a power of 95 %

_TERMS = {"no_scaling": "scaling", "no_projection": "projection", "neither": "projection and scaling"}
_PLACES = {
    "attention": "at every norm that attention reads",
    "mlp": "at every norm that MLPs read",
    "final": "at the final norm",
    "all": "at every norm",
}


def said(effects: pd.DataFrame, source: str = "", layers: str = "") -> list[Finding]:
    """Findings of a `causal` table.

    Args:
        source: of the prompts. layers: where norms were edited, as `sentences.in_layers` puts it.
    """
    if not len(effects) or effects["delta_loss"].isna().all():
        return []
    places = {sites: place + ("" if sites == "final" else layers) for sites, place in _PLACES.items()}
    changed = effects[(effects["variant"] != "intact") & (effects["no_op"] == "") & effects["delta_loss"].notna()]
    groups = changed[changed["sites"].isin(GROUPS)]
    found = _largest(groups, source, places)
    if not found and len(groups):
        found = _not_seen(groups, places)
    found += _projection(groups, places)
    found += _attention(groups, places)
    return [*found, *_single(changed), *_by_construction(effects)]


def is_effect(row: Any) -> bool:
    """Whether a row may be called an effect: its interval excludes 0 and it is large enough."""
    low, high = float(row["delta_loss_low"]), float(row["delta_loss_high"])
    return (low > 0 or high < 0) and abs(float(row["delta_loss"])) >= LEAST_CHANGE


def detectable(row: Any) -> float:
    """The least true effect, nats per token, that 95 of 100 such sets of prompts would have shown.

    Of estimates that lie about the truth as this interval says (its longer half being 1.96 standard errors), 95 %
    are above it less 1.645 of them; one is shown if its interval excludes 0 and it is LEAST_CHANGE or more.
    """
    low, high, change = (float(row[c]) for c in ("delta_loss_low", "delta_loss_high", "delta_loss"))
    half = max(change - low, high - change)
    return max(half, LEAST_CHANGE) + _POWER / _CONFIDENCE * half


def _largest(groups: pd.DataFrame, source: str, places: Mapping[str, str]) -> list[Finding]:
    """The largest effect of a single term anywhere; both terms at once only if they are more than each."""
    known = groups[[is_effect(r) for r in groups.to_dict("records")]]
    if not len(known):
        return []
    row = largest(known, known["delta_loss"].abs())
    alone = known[(known["variant"] != "neither") & (known["sites"] == row["sites"])]
    if row["variant"] == "neither" and len(alone):
        best = largest(alone, alone["delta_loss"].abs())
        if abs(best["delta_loss"]) > 0.9 * abs(row["delta_loss"]):  # the other term adds next to nothing
            row = best
    text = f"Without {_TERMS[row['variant']]} {places[row['sites']]} the loss {_changes(row)}"
    text += f", from {number(base_loss(row))} nats ({percent(abs(row['delta_loss']) / base_loss(row))} of it)"
    text += _sink(row) + "."
    if source == "sampled":
        text += (
            " The prompts are the model's own sequences: on those a change of the loss estimates a KL divergence, "
            "which cannot be negative but for chance."
        )
    return [Finding(text, "causal", EFFECT, size=abs(float(row["delta_loss"])) / base_loss(row))]


def _attention(groups: pd.DataFrame, places: Mapping[str, str]) -> list[Finding]:
    """Scaling at the norms that attention reads, if the sentence about the largest effect is not about it."""
    row = _row(groups, "attention", "no_scaling")
    if row is None:
        return []
    top = _largest(groups, "", places)
    text = f"Without scaling {places['attention']}"
    if is_effect(row):
        whole = f"{text} the loss {_changes(row)}{_sink(row)}."
        size = abs(float(row["delta_loss"])) / base_loss(row)
        return [] if top and top[0].text.startswith(text) else [Finding(whole, "causal", EFFECT, size=size)]
    return [Finding(f"{text} {_nothing(row)}{_sink(row)}.", "causal", NO_EFFECT)] if top else []


def _projection(groups: pd.DataFrame, places: Mapping[str, str]) -> list[Finding]:
    """What projection is worth everywhere, whatever comes of it: the question of this project."""
    row = _row(groups, "all", "no_projection")
    if row is None:
        return []
    text = f"Without projection {places['all']}"
    if not is_effect(row):
        return [Finding(f"{text} {_nothing(row)}.", "causal", NO_EFFECT)]
    size = abs(float(row["delta_loss"])) / base_loss(row)
    return [Finding(f"{text} the loss {_changes(row)}.", "causal", EFFECT, size=size)]


def _not_seen(groups: pd.DataFrame, places: Mapping[str, str]) -> list[Finding]:
    row = _row(groups, "all", "no_scaling")
    if row is None:
        return []
    return [Finding(f"Without {_TERMS[row['variant']]} {places['all']} {_nothing(row)}.", "causal", NO_EFFECT)]


def _single(changed: pd.DataFrame) -> list[Finding]:
    """The norm whose scaling the loss needs most, if its prompts agree that it does."""
    alone = changed[~changed["sites"].isin(GROUPS) & (changed["variant"] == "no_scaling")]
    known = alone[(alone["p_adjusted"] < SIGNIFICANCE) & (alone["delta_loss"].abs() >= LEAST_CHANGE)]
    if len(alone) < 2 or not len(known):
        return []
    worse = known[(known["delta_loss"] > 0) & (known["prompts_worse"] > known["prompts"] / 2)]
    text = (
        f"Of {len(alone)} norms taken one by one, {len(known)} change the loss by {LEAST_CHANGE:g} nats or more on "
        "enough prompts to be told from chance"
    )
    better = known[(known["delta_loss"] < 0) & (known["prompts_worse"] < known["prompts"] / 2)]
    if len(worse):
        row, said = largest(worse, worse["delta_loss"]), "scaling is needed most at"
    elif len(better):
        row, said = largest(better, -better["delta_loss"]), "none is needed, and the loss falls most at"
    else:
        row, said = largest(known, known["delta_loss"].abs()), "in the mean, not for most prompts, it changes most at"
    text += (
        f"; {said} {row['sites']}: {row['delta_loss']:+.2g} nats per token without its scaling "
        f"({int(row['prompts_worse'])} of {int(row['prompts'])} prompts are worse)."
    )
    return [Finding(text, "causal", EFFECT, size=abs(float(row["delta_loss"])) / base_loss(row))]


def _by_construction(effects: pd.DataFrame) -> list[Finding]:
    """Terms that are not there to take away at any norm, said once."""
    rows = effects[(effects["sites"] == "all") & (effects["no_op"] != "")]
    reasons: dict[str, list[str]] = {}
    for variant in ("no_scaling", "no_projection"):
        for row in rows[rows["variant"] == variant].to_dict("records"):
            reasons.setdefault(str(row["no_op"]), []).append(_TERMS[variant])
    return [
        Finding(
            f"Taking away {' or '.join(terms)} changes nothing by construction ({why}).", "causal", NO_EFFECT, size=-1
        )
        for why, terms in reasons.items()
    ]


def _row(groups: pd.DataFrame, sites: str, variant: str) -> pd.Series | None:
    rows = groups[(groups["sites"] == sites) & (groups["variant"] == variant)]
    return rows.iloc[0] if len(rows) else None


def base_loss(row: Any) -> float:
    """The loss of the unedited model."""
    return float(row["loss"] - row["delta_loss"])


def _changes(row: Any) -> str:
    change = float(row["delta_loss"])
    text = f"{'rises' if change > 0 else 'falls'} by {number(abs(change))} nats per token"
    low, high = sorted((abs(float(row["delta_loss_low"])), abs(float(row["delta_loss_high"]))))
    return text if math.isnan(low) else f"{text} (95 % interval {number(low)} to {number(high)})"


def _nothing(row: Any) -> str:
    """What is said where no effect may be spoken of."""
    low, high, change = (float(row[c]) for c in ("delta_loss_low", "delta_loss_high", "delta_loss"))
    if math.isnan(low):
        return (
            f"the loss changes by {change:+.2g} nats per token on these {int(row['prompts'])} prompts, too few to say "
            "how far that holds beyond them"
        )
    if low > 0 or high < 0:
        return f"the loss changes by {change:+.2g} nats per token (95 % interval {low:+.2g} to {high:+.2g}): hardly"
    return f"no effect on the loss was seen; one of {number(detectable(row))} nats per token would have been"


def _sink(row: Any) -> str:
    """What one constant for all positions would have added."""
    uniform, change = float(row["delta_loss_uniform"]), float(row["delta_loss"])
    least = max(LEAST_CHANGE, abs(change))
    if row["variant"] == "no_projection" or math.isnan(uniform) or uniform - change < SINK_FACTOR * least:
        return ""
    return (
        f"; giving position 0 the others' constant as well makes it {uniform:+.2g}, which is what the length of "
        "position 0 does, not what scaling does for the others"
    )
