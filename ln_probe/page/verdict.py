"""The verdict card: how freezing scaling and removing projection change the loss, in bars.

The card shows the primary contrasts of the report's `causal` table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from ln_probe.analyses.probes.base import in_layers
from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE, base_loss, is_effect, is_significant
from ln_probe.analyses.text import counted, number, signed_percent, with_interval
from ln_probe.hooks.norm import EDITS, Variant
from ln_probe.report import Report

_Rows = dict[tuple[Variant, str], dict[str, Any]]  # of the table `causal`, by variant and group of norms
# Groups of norms, largest first.
_PLACES = {"all": "at every norm", "attention": "at attention alone"}
# Intervals longer than this many times the largest bar are cut off, because they would make all bars invisible.
_REACH = 2.5
_TICKS = 5
_UNIT = "nats/token"
_NOT_APPLICABLE = "causal: the loss is not applicable: "  # beginning of the note that explains why there is no loss


@dataclass(frozen=True)
class Bar:
    """One line of the card; lengths are in % of the scale's width.

    Attributes:
        term: "scaling" or "projection"; what: the edit and its norms.
        value, share, interval: text; the last two can be empty.
        left, width: of the bar; left None: nothing to draw, and `value` explains why.
        low, span: of the interval; span None: no interval.
        effect: whether the change is reported as an effect; significant: whether it is significant.
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
    effect: bool = False
    significant: bool = False


@dataclass(frozen=True)
class Verdict:
    """The card: `band` is the range too small to report, `ticks` are positions and labels, `zero` the position of 0.

    `reason` says why there are no bars.
    """

    reason: str = ""
    bars: tuple[Bar, ...] = ()
    notes: tuple[str, ...] = ()
    unit: str = _UNIT
    zero: float = 0.0
    band: tuple[float, float] = (0.0, 0.0)
    ticks: tuple[tuple[float, str], ...] = ()
    drawn: bool = False
    least: float = LEAST_CHANGE


def verdict(report: Report) -> Verdict | None:
    """Return the card of a report, or None if the loss was not measured."""
    rows = _rows(report.causal)
    if not rows or not all(math.isfinite(base_loss(r)) for r in rows.values()):
        reason = next((n.removeprefix(_NOT_APPLICABLE) for n in report.notes if n.startswith(_NOT_APPLICABLE)), "")
        return Verdict(f"Not applicable: {reason}.") if reason else None
    known = [r for r in rows.values() if not _idle(r)]
    low, high = _scale(known)

    def place(value: float) -> float:
        return round(100 * (min(max(value, low), high) - low) / (high - low), 3)

    layers, unit = in_layers(report.provenance), str(report.provenance.get("loss", {}).get("unit", _UNIT))
    ticks = [t for t in MaxNLocator(_TICKS, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= t <= high]
    return Verdict(
        "",
        tuple(bar for (variant, sites), row in rows.items() for bar in _bars(variant, sites, row, layers, place)),
        tuple(_notes(report, rows, unit)),
        unit,
        place(0.0),
        (place(-LEAST_CHANGE), place(LEAST_CHANGE) - place(-LEAST_CHANGE)),
        tuple((place(t), f"{t:+.3g}" if abs(t) > 1e-12 else "0") for t in ticks),
        bool(known),
    )


def intact_loss(report: Report) -> str:
    """Return the loss of the intact model with its unit; empty if it is not known."""
    known = [loss for row in _rows(report.causal).values() if math.isfinite(loss := base_loss(row))]
    unit = report.provenance.get("loss", {}).get("unit", _UNIT)
    return f"{number(known[0])} {unit}, intact" if known else ""


def in_one_line(report: Report) -> str:
    """Return the contrasts at every norm as one line of the same form for every model, so that models compare."""
    rows = {variant: row for (variant, sites), row in _rows(report.causal).items() if sites == "all"}
    known = [r for r in rows.values() if math.isfinite(base_loss(r))]
    if not known:
        return "loss not measured"
    parts, unit = [f"intact loss {base_loss(known[0]):#.3g}"], report.provenance.get("loss", {}).get("unit", _UNIT)
    for variant, row in rows.items():
        if why := _idle(row):
            parts.append(f"{variant.label}: not applicable ({why})")
            continue
        size, ends = with_interval(*(float(row[f"delta_loss{end}"]) for end in ("", "_low", "_high")))
        sure = [f"95 % CI {ends}"] if ends else []
        sure += [] if is_effect(row) else [f"below {LEAST_CHANGE:g}" if is_significant(row) else "not significant"]
        parts.append(f"{variant.label} {size} {unit} ({', '.join(sure)})")
    return f"{'; '.join(parts)}{in_layers(report.provenance)}"


def _notes(report: Report, rows: _Rows, unit: str) -> Iterator[str]:
    """Yield notes on prompts, constants and intervals."""
    first, about = next(iter(rows.values())), report.provenance.get("calibration", {})
    prompts, source = counted(int(first["prompts"]), "prompt"), report.provenance.get("prompts", {}).get("source", "")
    groups = about.get("groups")
    many = (
        "" if groups is None else f" in {counted(groups, 'group')} (effective number {about['effective_groups']:.3g})"
    )
    yield f"Intact loss {number(base_loss(first))} {unit} on {prompts}{many}{f', {source}' if source else ''}."
    if about.get("constants"):
        yield (
            f"Frozen scaling divides by constants instead of sigma. Mean constants (primary): {about['constants']}; "
            "loss-optimal constants: those that minimize the loss on the other half of the prompts."
        )
    if any(math.isfinite(float(r["delta_loss_low"])) for r in rows.values()):
        tests = sum(not _idle(r) for r in rows.values())
        yield (
            "Bars: mean loss change with its unadjusted 95 % CI over prompt groups, which includes the choice of mean "
            "constants but not the seed of training; p-values are Holm-adjusted over "
            f"{counted(tests, 'primary contrast')}."
        )
    else:
        yield "There are no confidence intervals: too few prompt groups, or a few prompts that carry the mean."


def _rows(causal: pd.DataFrame) -> _Rows:
    """Return the rows of the card that have a loss."""
    rows = {}
    for variant, sites in product([v for v in EDITS if v.primary], _PLACES):
        mine = causal[(causal["variant"] == variant.name) & (causal["sites"] == sites)]
        if len(mine) and pd.notna(mine["delta_loss"].iloc[0]):
            rows[variant, sites] = {str(k): v for k, v in mine.iloc[0].items()}
    return rows


def _idle(row: dict[str, Any]) -> str:
    return str(row["no_op"] or "")


def _scale(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the ends of the scale, wide enough that changes too small to report look small."""
    changes = [float(r[f"delta_loss{kind}"]) for r in rows for kind in ("", "_optimal")]
    changes = [c for c in changes if math.isfinite(c)]
    reach = _REACH * max([3 * LEAST_CHANGE, *map(abs, changes)])
    columns = ("delta_loss_low", "delta_loss_high", "delta_loss_optimal_low", "delta_loss_optimal_high")
    ends = [float(r[c]) for r in rows for c in columns if math.isfinite(r[c])]
    low = min([-2 * LEAST_CHANGE, *changes, *ends])
    high = max([3 * LEAST_CHANGE, *changes, *ends])
    low, high = max(low, -reach), min(high, reach)
    room = 0.03 * (high - low)
    return low - room, high + room


def _bars(
    variant: Variant, sites: str, row: dict[str, Any], layers: str, place: Callable[[float], float]
) -> Iterator[Bar]:
    """Yield the bar of a contrast, and a second one for loss-optimal constants where they were fitted."""
    term, done = variant.label.rsplit(" ", 1)
    what = f"{term.capitalize()} {done} {_PLACES[sites]}{layers}"
    if why := _idle(row):
        yield Bar(term, what, f"not applicable ({why})")
        return
    both = variant.freezes_scaling and math.isfinite(float(row["delta_loss_optimal"]))
    kinds = {"": ", mean constants", "_optimal": ", loss-optimal constants"} if both else {"": ""}
    for kind, name in kinds.items():
        delta, low, high = (float(row[f"delta_loss{kind}{end}"]) for end in ("", "_low", "_high"))
        size, ends = with_interval(delta, low, high)
        bounded = bool(ends)
        sure = is_significant(row) if not kind else bounded and (low > 0 or high < 0)
        yield Bar(
            term,
            what + name,
            f"{size} nats",
            _share(delta, row),
            f"95 % CI {ends}" if bounded else "",
            min(place(0.0), place(delta)),
            abs(place(delta) - place(0.0)),
            place(low) if bounded else 0.0,
            place(high) - place(low) if bounded else None,
            sure and abs(delta) >= LEAST_CHANGE,
            sure,
        )


def _share(delta: float, row: dict[str, Any]) -> str:
    """Return a change as a share of the intact loss."""
    return signed_percent(delta / base_loss(row)) if base_loss(row) > 0 else ""
