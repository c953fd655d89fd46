"""The first thing on a page: what freezing scaling and dropping projection does to the loss, in bars and sentences.

Everything comes from the report's `causal` table. A change is called an effect only where the findings would call it
one (`ln_probe.analyses.probes.causal_findings`), so that card and findings cannot disagree: lines show each change's
own interval, sentences speak of those that Holm's adjustment leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from ln_probe.analyses.probes.causal_findings import (
    LEAST_CHANGE,
    base_loss,
    detectable,
    is_direction,
    is_effect,
    tested,
)
from ln_probe.analyses.probes.sentences import in_layers
from ln_probe.analyses.prompt_intervals import PROMPTS_NEEDED
from ln_probe.analyses.wording import number, signed, signed_percent
from ln_probe.reporting.contents import Contents

# The terms, each with what is done to it and how the sentence begins; the places, the widest first.
_TERMS = {"no_scaling": ("scaling", "frozen", "Freezing"), "no_projection": ("projection", "dropped", "Dropping")}
_PLACES = {"all": "at every norm", "attention": "at attention alone"}
# An interval longer than so many times the largest bar is cut off at the edge: it would make all bars invisible.
_REACH = 2.5
_TICKS = 5


@dataclass(frozen=True)
class Bar:
    """One line of the card; places are per cent of the scale's width.

    Attributes:
        term: "scaling" or "projection"; what: what was done, and where.
        value, share, interval: as text; the last two can be empty.
        left, width: of the bar; None: nothing to draw, and `value` says why.
        low, span: of the interval; span None: there is none.
        told: whether it may be called an effect.
    """

    term: str
    what: str
    value: str
    share: str = ""
    interval: str = ""
    left: float | None = None
    width: float = 0.0
    low: float = 0.0
    span: float | None = None
    told: bool = False


@dataclass(frozen=True)
class Verdict:
    """The card. `band` is what is not called an effect, `ticks` places and labels in nats, `zero` the place of 0."""

    sentences: tuple[str, ...]
    bars: tuple[Bar, ...]
    loss: str
    least: str
    prompts: int
    zero: float
    band: tuple[float, float]
    ticks: tuple[tuple[float, str], ...]
    intervals: bool
    drawn: bool


def verdict(report: Contents) -> Verdict | None:
    """The card of a report; None if the loss was not measured."""
    rows = dict(_rows(report.causal))
    known = [r for r in rows.values() if not _idle(r)]
    if not rows or not all(math.isfinite(base_loss(r)) for r in rows.values()):
        return None
    low, high = _scale(known)

    def place(value: float) -> float:
        return round(100 * (min(max(value, low), high) - low) / (high - low), 3)

    first, layers = next(iter(rows.values())), in_layers(report.provenance)
    tests = tested(report.causal)
    ticks = [t for t in MaxNLocator(_TICKS, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= t <= high]
    return Verdict(
        tuple(_sentence(variant, rows, layers, tests) for variant in _TERMS if any(v == variant for v, _ in rows)),
        tuple(_bar(variant, sites, row, layers, place) for (variant, sites), row in rows.items()),
        number(base_loss(first)),
        f"{LEAST_CHANGE:g}",
        int(first["prompts"]),
        place(0.0),
        (place(-LEAST_CHANGE), place(LEAST_CHANGE) - place(-LEAST_CHANGE)),
        tuple((place(t), f"{t:+.3g}" if abs(t) > 1e-12 else "0") for t in ticks),
        any(math.isfinite(float(r["delta_loss_low"])) for r in known),
        bool(known),
    )


def _rows(causal: pd.DataFrame) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """The rows of the card that have a loss, by variant and place."""
    for variant in _TERMS:
        for sites in _PLACES:
            mine = causal[(causal["variant"] == variant) & (causal["sites"] == sites)]
            if len(mine) and pd.notna(mine["delta_loss"].iloc[0]):
                yield (variant, sites), {str(k): v for k, v in mine.iloc[0].items()}


def _idle(row: dict[str, Any]) -> str:
    return str(row["no_op"] or "")


def _scale(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Ends of the scale: 0 and all bars and intervals are on it, and what is no effect does not look like one."""
    changes = [float(r["delta_loss"]) for r in rows]
    reach = _REACH * max([3 * LEAST_CHANGE, *map(abs, changes)])
    ends = [float(r[c]) for r in rows for c in ("delta_loss_low", "delta_loss_high") if math.isfinite(r[c])]
    low = min([-2 * LEAST_CHANGE, *changes, *ends])
    high = max([3 * LEAST_CHANGE, *changes, *ends])
    low, high = max(low, -reach), min(high, reach)
    room = 0.03 * (high - low)
    return low - room, high + room


def _bar(variant: str, sites: str, row: dict[str, Any], layers: str, place: Any) -> Bar:
    term, done, _ = _TERMS[variant]
    what = f"{term.capitalize()} {done} {_PLACES[sites]}{layers}"
    if why := _idle(row):
        return Bar(term, what, f"nothing to take away ({why})")
    change, low, high = (float(row[c]) for c in ("delta_loss", "delta_loss_low", "delta_loss_high"))
    bounded = math.isfinite(low) and math.isfinite(high)
    return Bar(
        term,
        what,
        f"{signed(change)} nats",
        _of_loss(row),
        f"95 %: {signed(low)} to {signed(high)}" if bounded else "",
        min(place(0.0), place(change)),
        abs(place(change) - place(0.0)),
        place(low) if bounded else 0.0,
        place(high) - place(low) if bounded else None,
        is_effect(row),
    )


def _sentence(variant: str, rows: dict[tuple[str, str], dict[str, Any]], layers: str, tests: int) -> str:
    """One plain sentence about one term: everywhere, and at attention alone."""
    term, _, verb = _TERMS[variant]
    everywhere, attention = rows.get((variant, "all")), rows.get((variant, "attention"))
    if everywhere is None:
        assert attention is not None
        return f"{verb} the {term} of the norms that attention reads{layers}{_outcome(attention, tests)}."
    if why := _idle(everywhere):
        return f"There is no {term} to take away ({why})."
    whose = f"the {term} of every norm{layers}" if layers else f"every norm’s {term}"
    text = f"{verb} {whose}{_outcome(everywhere, tests)}"
    if attention is None:
        return f"{text}."
    if _idle(attention):
        return f"{text}; there is none at attention."
    there = _outcome(attention, tests)
    return f"{text}; at attention alone{there.removeprefix(':') if there.startswith(':') else f' it{there}'}."


def _outcome(row: dict[str, Any], tests: int) -> str:
    """What came of it, to stand behind what was done; of so many `tests` of groups."""
    change, low, high = (float(row[c]) for c in ("delta_loss", "delta_loss_low", "delta_loss_high"))
    size = f"{signed(change)} nats per token ({_of_loss(row)})"
    if is_effect(row):
        return f" costs {size}" if change > 0 else f" lowers the loss: {size}"
    if math.isnan(low):
        few, prompts = row["prompts"] < PROMPTS_NEEDED, int(row["prompts"])
        if is_direction(row):
            size += f" on average, the loss rises on {int(row['prompts_worse'])} of {prompts} prompts"
            return f": {size}, {'too few to say how far beyond them' if few else 'a few of which carry it'}"
        return f": {size} on these {prompts} prompts, {'too few to say more' if few else 'a few of which carry it'}"
    if (low > 0 or high < 0) and abs(change) >= LEAST_CHANGE:
        return f": {size}, not told from chance among the {tests} changes tested"
    if low > 0 or high < 0:
        return f": hardly anything, {size}"
    return f": no effect was seen (one of {detectable(row, tests):.2g} nats would have been)"


def _of_loss(row: dict[str, Any]) -> str:
    return signed_percent(float(row["delta_loss"]) / base_loss(row)) if base_loss(row) > 0 else ""
