"""What the `causal` table says, in sentences.

An effect is spoken of only where its interval excludes 0, its p survives Holm's adjustment for what is shown together,
and it is large enough. Where there is no interval, the prompts' signs tell its direction and no more: such sentences
give the mean and the median of these prompts, and stand below the effects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from scipy import stats  # type: ignore[import-untyped]

from ln_probe.analyses.probes.protocol import DESCRIBED, EFFECT, NO_EFFECT, Finding
from ln_probe.analyses.prompt_intervals import PROMPTS_NEEDED, SIGNIFICANCE
from ln_probe.analyses.wording import number, percent, signed
from ln_probe.hooks.interventions import GROUPS

# The least change of the loss that is called an effect, nats per token: 1 % of perplexity.
LEAST_CHANGE = 0.01
# A constant at position 0 that is not its own is spoken of where it adds so many times what taking scaling away costs.
SINK_FACTOR = 2.0

SHOWN = 3  # single norms that are named, the largest changes first

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
    changed = effects[testable(effects)]
    groups = changed[changed["sites"].isin(GROUPS)]
    tests = tested(effects)
    found = [*_effects(groups, source, places), *_directions(groups, places)]
    found += _not_told(groups, places, tests, anything=bool(found))
    return [*found, *_single(changed), *_by_construction(effects)]


def testable(effects: pd.DataFrame) -> pd.Series:
    """Which rows could show a change: of an edit that does something, with a loss."""
    return (effects["variant"] != "intact") & (effects["no_op"].fillna("") == "") & effects["delta_loss"].notna()


def tested(effects: pd.DataFrame) -> int:
    """How many changes of groups are looked at together: the family of their `p_mean`."""
    return int((testable(effects) & effects["sites"].isin(GROUPS)).sum())


def is_effect(row: Any) -> bool:
    """Whether a row may be called an effect: its interval excludes 0, its p survives adjustment, and it is large
    enough."""
    low, high = float(row["delta_loss_low"]), float(row["delta_loss_high"])
    known = (low > 0 or high < 0) and float(row["p_mean"]) < SIGNIFICANCE
    return known and abs(float(row["delta_loss"])) >= LEAST_CHANGE


def is_direction(row: Any) -> bool:
    """Whether its prompts tell which way the loss goes, and nothing tells how far: there is no interval."""
    signs = math.isnan(float(row["delta_loss_low"])) and float(row["p_adjusted"]) < SIGNIFICANCE
    return signs and not pd.isna(row["prompts_worse"]) and abs(float(row["delta_loss"])) >= LEAST_CHANGE


def detectable(row: Any, tests: int = 1) -> float:
    """The least true effect, nats per token, that 95 of 100 such sets of prompts would have shown.

    Of estimates that lie about the truth as this interval says (its longer half being 1.96 standard errors), 95 %
    are above it less 1.645 of them. One alone among `tests` is shown if it is LEAST_CHANGE or more, and lies as many
    standard errors from 0 as Holm's first step asks for: 1.96 of one, 2.87 of twelve.
    """
    low, high, change = (float(row[c]) for c in ("delta_loss_low", "delta_loss_high", "delta_loss"))
    half = max(change - low, high - change)
    asked = float(stats.norm.isf(SIGNIFICANCE / 2 / max(1, tests))) / _CONFIDENCE * half
    return max(asked, LEAST_CHANGE) + _POWER / _CONFIDENCE * half


def _effects(groups: pd.DataFrame, source: str, places: Mapping[str, str]) -> list[Finding]:
    """Every effect of a term at a group of norms: the largest first, then a sentence a term for the others."""
    told = _by_size(groups, is_effect)
    if not told:
        return []
    top, *others = told
    text = f"Without {_TERMS[top['variant']]} {places[top['sites']]} the loss {_changes(top)}"
    text += f", from {number(base_loss(top))} nats ({percent(abs(top['delta_loss']) / base_loss(top))} of it)"
    text += _sink(top) + "."
    if source == "sampled":
        text += (
            " The prompts are the model's own sequences: on those a change of the loss estimates a KL divergence, "
            "which cannot be negative but for chance."
        )
    found = [Finding(text, "causal", EFFECT, size=_share(top))]
    for text, row in _together(others, places, _changes):
        found.append(Finding(f"{text}.", "causal", EFFECT, size=_share(row)))
    return found


def _directions(groups: pd.DataFrame, places: Mapping[str, str]) -> list[Finding]:
    """What has no interval, and goes one way on more prompts than chance allows."""
    return [
        Finding(
            f"{text} (from a loss of {number(base_loss(row))}; {_why(row)}).", "causal", DESCRIBED, size=_share(row)
        )
        for text, row in _together(_by_size(groups, is_direction), places, _goes)
    ]


def _together(
    rows: Sequence[dict[str, Any]], places: Mapping[str, str], say: Callable[[Any], str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A sentence a term, without its stop, and its largest row; rows of which more is to be said have their own."""
    for of_term in _by_term(rows):
        alone = [[r] for r in of_term if _sink(r)]
        joined = [r for r in of_term if not _sink(r)]
        for first, *more in [*alone, joined] if joined else alone:
            text = f"Without {_TERMS[first['variant']]} {places[first['sites']]} the loss {say(first)}{_sink(first)}"
            yield text + "".join(f"; {places[r['sites']]} it {say(r)}" for r in more), first


def _not_told(groups: pd.DataFrame, places: Mapping[str, str], tests: int, *, anything: bool) -> list[Finding]:
    """What was looked for and cannot be spoken of: projection everywhere, whatever comes of it (the question of this
    project); scaling everywhere, and at the norms that attention reads if there is anything else to say."""
    found = []
    looked_for = [("all", "no_projection"), ("all", "no_scaling"), *([("attention", "no_scaling")] if anything else [])]
    for sites, variant in looked_for:
        row = _row(groups, sites, variant)
        if row is not None and not is_effect(row) and not is_direction(row):
            text = f"Without {_TERMS[variant]} {places[sites]} {_nothing(row, tests)}"
            found.append(Finding(f"{text}{_sink(row) if sites == 'attention' else ''}.", "causal", NO_EFFECT))
    return found


def _single(changed: pd.DataFrame) -> list[Finding]:
    """The norms whose scaling the loss needs most, one by one, as far as intervals or signs tell."""
    alone = changed[~changed["sites"].isin(GROUPS) & (changed["variant"] == "no_scaling")]
    if len(alone) < 2:
        return []
    found, of = [], f"Of {len(alone)} norms taken one by one without scaling"
    if rows := _by_size(alone, is_effect):
        named = "; ".join(f"at {r['sites']} it {_changes(r)}" for r in rows[:SHOWN])
        text = f"{of}, {len(rows)} {_change(rows)} the loss by {LEAST_CHANGE:g} nats or more, told from chance"
        found.append(Finding(f"{text}{_most(rows)}: {named}.", "causal", EFFECT, size=_share(rows[0])))
    if rows := _by_size(alone, is_direction):
        named = "; ".join(f"at {r['sites']} it {_goes(r)}" for r in rows[:SHOWN])
        text = f"{of}, {len(rows)} {_change(rows)} the loss one way on more prompts than chance allows"
        found.append(
            Finding(f"{text}{_most(rows)}: {named} ({_why(rows[0])}).", "causal", DESCRIBED, size=_share(rows[0]))
        )
    return found


def _change(rows: list[dict[str, Any]]) -> str:
    return "changes" if len(rows) == 1 else "change"


def _most(rows: list[dict[str, Any]]) -> str:
    return f", the {SHOWN} largest" if len(rows) > SHOWN else ""


def _by_size(rows: pd.DataFrame, wanted: Callable[[Any], bool]) -> list[dict[str, Any]]:
    """The rows that may be told, the largest change first; both terms at once only where one alone is not nearly as
    much."""
    known = [{str(k): v for k, v in r.items()} for r in rows.to_dict("records") if wanted(r)]
    best: dict[str, float] = {}
    for row in known:
        if row["variant"] != "neither":
            best[row["sites"]] = max(best.get(row["sites"], 0.0), abs(row["delta_loss"]))
    told = [r for r in known if r["variant"] != "neither" or best.get(r["sites"], 0.0) <= 0.9 * abs(r["delta_loss"])]
    return sorted(told, key=lambda r: -abs(r["delta_loss"]))


def _by_term(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows by what was taken away, each in their order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["variant"], []).append(row)
    return list(found.values())


def _share(row: Any) -> float:
    """Of the unedited loss."""
    return abs(float(row["delta_loss"])) / base_loss(row)


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
    return f"{text} (95 % interval {number(low)} to {number(high)})"


def _goes(row: Any) -> str:
    """On how many prompts, and how far on these: "rises on 11 of 12 prompts, by 0.3 nats per token on average"."""
    prompts, worse, change = int(row["prompts"]), int(row["prompts_worse"]), float(row["delta_loss"])
    up = 2 * worse > prompts
    text = f"{'rises' if up else 'falls'} on {worse if up else prompts - worse} of {prompts} prompts, "
    size = f"{number(abs(change))} nats per token on average"
    if up != (change > 0):
        text += f"though it {'falls' if up else 'rises'} "
    return f"{text}by {size}{_median(row)}"


def _median(row: Any) -> str:
    value = float(row["delta_loss_median"])
    return "" if math.isnan(value) else f" (median prompt {signed(value)})"


def _why(row: Any) -> str:
    """Why there is no interval."""
    if row["prompts"] < PROMPTS_NEEDED:
        return f"a direction alone: how far it goes beyond these prompts takes {PROMPTS_NEEDED} to say"
    return "a direction alone: a few prompts carry the average, and no interval is given"


def _nothing(row: Any, tests: int = 1) -> str:
    """What is said where no effect may be spoken of; of so many `tests`."""
    low, high, change = (float(row[c]) for c in ("delta_loss_low", "delta_loss_high", "delta_loss"))
    text = f"the loss changes by {signed(change)} nats per token"
    if math.isnan(low):
        few = row["prompts"] < PROMPTS_NEEDED
        why = (
            "too few to say how far that holds beyond them" if few else "a few of which carry the average: no interval"
        )
        return f"{text} on average{_median(row)} on these {int(row['prompts'])} prompts, {why}"
    if (low > 0 or high < 0) and abs(change) >= LEAST_CHANGE:
        text += f" (95 % interval {signed(low)} to {signed(high)} taken alone)"
        p = float(row["p_mean"])
        if math.isnan(p):
            return f"{text}; whether it is told from chance among the others is not known"
        return f"{text}, not told from chance among the {tests} changes tested (p = {p:.2g})"
    if low > 0 or high < 0:
        return f"{text} (95 % interval {signed(low)} to {signed(high)}): hardly"
    return f"no effect on the loss was seen; one of {number(detectable(row, tests))} nats per token would have been"


def _sink(row: Any) -> str:
    """What one constant for all positions would have added."""
    uniform, change = float(row["delta_loss_uniform"]), float(row["delta_loss"])
    least = max(LEAST_CHANGE, abs(change))
    if row["variant"] == "no_projection" or math.isnan(uniform) or uniform - change < SINK_FACTOR * least:
        return ""
    return (
        f"; giving position 0 the others' constant as well makes it {signed(uniform)}, which is what the length of "
        "position 0 does, not what scaling does for the others"
    )
