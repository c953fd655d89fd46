"""Head by head: the table `Report.by_head`, its heat map, and the interactive map of heads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from markupsafe import Markup, escape

from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE
from ln_probe.analyses.probes.columns import BY_HEAD
from ln_probe.analyses.probes.statistics import SIGNIFICANCE
from ln_probe.analyses.schema import Column
from ln_probe.analyses.text import disarmed
from ln_probe.exhibits import Exhibits
from ln_probe.hooks.norm import BOTH_REMOVED, INTACT, PROJECTION_REMOVED, SCALING_FROZEN
from ln_probe.page.figures import SIZE, Figure, draw_grid, in_head_space
from ln_probe.report import Report

__all__ = ["heads_map"]

_TICKS = 16  # labels on an axis of the map
_KEY = ["layer", "head"]
# Columns of the `heads` table: the name of the intact value here, and of its change with scaling frozen for the keys.
_OF_HEADS = {
    "entropy_ratio": ("entropy_ratio", "entropy_change"),
    "attainable_median": ("attainable", "attainable_change"),
    "pattern_max_median": ("received", None),
    "margin_median": ("margin", "margin_change"),
}


def by_head(report: Report, sort: str | None = None) -> pd.DataFrame:
    """Compute `Report.by_head`."""
    if sort is not None and sort not in BY_HEAD.names:
        raise ValueError(f"by_head has no column {sort!r}: there are {', '.join(BY_HEAD.names)}")
    heads, effects, sinks = in_head_space(report), report.tables["head_effects"], report.tables["sink_heads"]
    pairs = pd.concat([t[_KEY] for t in (heads, effects, sinks)]).drop_duplicates().astype(np.int64)
    made = pairs.sort_values(_KEY).set_index(_KEY)
    for name in BY_HEAD.names[len(_KEY) :]:
        made[name] = False if name == "exact" else math.nan
    _effects(made, effects)
    intact, frozen = (heads[heads["variant"] == v].set_index(_KEY) for v in (INTACT.name, SCALING_FROZEN.name))
    for column, (name, change) in _OF_HEADS.items():
        made[name] = intact[column].astype(float).reindex(made.index)
        if change is not None:
            made[change] = frozen[column].astype(float).reindex(made.index) - made[name]
    for name in ("first_attention", "sink_rate", "first_uniform"):
        made[name] = sinks.set_index(_KEY)[name].astype(float).reindex(made.index)
    made["first_change"] = _first_changes(report.exhibits).reindex(made.index)
    table = made.reset_index()[BY_HEAD.names]
    if sort is not None:
        table = table.sort_values(
            sort, key=lambda c: c.abs() if c.dtype == float else c, ascending=False, kind="stable"
        )
    return BY_HEAD.check(table.reset_index(drop=True))


def _first_changes(exhibits: Exhibits) -> pd.Series:
    """Return the change of the attention to position 0 by (layer, head), unknown where no frozen pattern is kept."""
    found = []
    for shown in exhibits.attention:
        if shown.first_change is not None:
            index = pd.MultiIndex.from_product([shown.layers, shown.heads], names=_KEY)
            found.append(pd.Series(shown.first_change.astype(float).ravel(), index))
    return pd.concat(found).groupby(level=_KEY).mean() if found else pd.Series(dtype=float)


def _effects(made: pd.DataFrame, effects: pd.DataFrame) -> None:
    """Fill the columns about the loss, as run or else as estimated."""
    for name, variant in _TESTED.items():
        rows = effects[effects["variant"] == variant.name].set_index(_KEY)
        exact, estimate = (rows[c].astype(float).reindex(made.index) for c in ("delta_loss", "estimate"))
        made[name] = exact.fillna(estimate)
        if name == "delta_loss":
            made["exact"] = exact.notna()
            made["p_sign"] = rows["p_sign"].astype(float).reindex(made.index)
            made["loss"] = rows["loss"].astype(float).reindex(made.index)


@dataclass(frozen=True)
class Measure:
    """A measure of the map: its title, whether values have a sign (then 0 is white), and its column of `by_head`."""

    title: str
    signed: bool
    column: Column

    @property
    def label(self) -> str:
        return self.column.unit or "share"

    @property
    def plain(self) -> dict[str, Any]:
        """As the scripts read it."""
        about = {"name": self.column.name, "title": self.title, "meaning": self.column.meaning}
        return {**about, "signed": self.signed}


# The variant of the table `head_effects` whose tests belong to a measure.
_TESTED = {
    "delta_loss": SCALING_FROZEN,
    "delta_loss_no_projection": PROJECTION_REMOVED,
    "delta_loss_both_removed": BOTH_REMOVED,
}
MEASURES = {
    name: Measure(title, signed, next(c for c in BY_HEAD.columns if c.name == name))
    for name, title, signed in (
        *((name, f"Loss increase, {variant.label}", True) for name, variant in _TESTED.items()),
        ("entropy_ratio", "Entropy", False),
        ("entropy_change", "Change of entropy", True),
        ("attainable", "Attainable attention", False),
        ("attainable_change", "Change of attainable attention", True),
        ("received", "Attention received", False),
        ("margin", "Margins", False),
        ("margin_change", "Change of margins", True),
        ("first_attention", "Attention to position 0", False),
        ("first_change", "Change of attention to position 0", True),
        ("sink_rate", "Sink rate", False),
    )
}


def known_measures(table: pd.DataFrame) -> list[str]:
    """Return the measures of which a table by head has values."""
    return [name for name in MEASURES if len(table) and table[name].notna().any() and (table[name] != 0).any()]


def heads_map(report: Report, measure: str = "delta_loss") -> Figure:
    """One measure of every head, layer × head; grey where data is missing.

    Raises:
        ValueError: an unknown measure.

    Example:
        >>> from ln_probe.page.heads import heads_map
        >>> heads_map(report, "entropy_change").savefig("heads.svg")
    """
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}: there are {', '.join(MEASURES)}")
    return draw_heads_map(by_head(report), measure)


def draw_heads_map(table: pd.DataFrame, measure: str) -> Figure:
    """Draw the map of a table by head without a title."""
    about = MEASURES[measure]
    grid = table.pivot(index="layer", columns="head", values=measure)
    values = grid.to_numpy(float)
    values = values[np.isfinite(values)]
    figure = Figure(figsize=(SIZE[0], max(1.8, min(6.0, 0.8 + 0.28 * max(1, len(grid))))), layout="constrained")
    axes = figure.subplots()
    top = float(np.abs(values).max(initial=0.0)) or 1e-3  # the scale of a map of zeros needs an end
    signed = about.signed or bool((values < 0).any())
    image = draw_grid(axes, grid, -top if signed else 0.0, top, ticks=_TICKS, signed=signed)
    axes.set(xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes, label=about.label)
    return figure


# "Most affected" is measured by the first of these that is known.
_FIRST = ("delta_loss", "entropy_change", "attainable_change")
_HEAD = re.compile(r"\bL(\d{1,5})H(\d{1,5})\b")


@dataclass(frozen=True, eq=False)
class HeadMap:
    """Measures of every head, as the interactive map shows them.

    Attributes:
        layers, heads: of the axes below.
        values: by measure (`ln_probe.page.heads.MEASURES`), the one shown first at the front; NaN: no data.
        significant: of the measures that are tested, where the Holm-adjusted p is below 0.05.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    values: Mapping[str, Float[np.ndarray, "layer head"]] = field(default_factory=dict)
    significant: Mapping[str, Bool[np.ndarray, "layer head"]] = field(default_factory=dict)

    @staticmethod
    def of(report: Report) -> HeadMap:
        """Return the map of a report; without measures if it has none."""
        table = by_head(report)
        known = known_measures(table)
        if not known:
            return HeadMap()
        first = next((m for m in _FIRST if m in known), known[0])
        count = report.provenance.get("shape", {})  # layers and heads that were not asked for have a place, too
        layers, heads = (sorted({*table[axis].tolist(), *range(count.get(f"{axis}s", 0))}) for axis in _KEY)
        places, shape = pd.MultiIndex.from_product([layers, heads], names=_KEY), (len(layers), len(heads))
        wide, tested = table.set_index(_KEY).reindex(places), report.head_effects.dropna(subset="delta_loss")
        p = {m: tested[tested["variant"] == v.name].set_index(_KEY)["p_sign"] for m, v in _TESTED.items() if m in known}
        return HeadMap(
            tuple(layers),
            tuple(heads),
            {m: wide[m].to_numpy(np.float64).reshape(shape) for m in sorted(known, key=lambda m: m != first)},
            {m: (of.reindex(places).to_numpy(float) < SIGNIFICANCE).reshape(shape) for m, of in p.items()},
        )

    def most_affected(self, exhibits: Exhibits, layer: int | None = None, prompt: int = 0) -> tuple[int, int]:
        """Return the (layer, head) with the largest absolute first measure, among those whose attention is kept.

        Raises:
            ValueError: no attention was kept for that prompt.
        """
        shown = exhibits.of_prompt(prompt)
        kept = dict.fromkeys((la, h) for la in shown.layers for h in shown.heads if layer in (None, la))
        if not self.values:
            return next(iter(kept))
        measured = zip(product(self.layers, self.heads), np.abs(next(iter(self.values.values()))).flat, strict=True)
        sizes = {place: size for place, size in measured if place in kept and not math.isnan(size)}
        return max(sizes or kept, key=lambda place: sizes.get(place, 0.0))

    def plain(self) -> dict[str, Any]:
        """Return the map as the scripts read it."""
        measures = [
            {
                **MEASURES[name].plain,
                "unit": MEASURES[name].label,
                "threshold": LEAST_CHANGE if name in self.significant else 0.0,
                "significant": self.significant[name].astype(np.uint8).ravel() if name in self.significant else None,
                "values": values.astype(np.float32).ravel(),
            }
            for name, values in self.values.items()
        ]
        return {"layers": self.layers, "heads": self.heads, "measures": measures}


def address(layer: int, head: int, prompt: int = 0) -> str:
    """Return the fragment of the page's address that opens a head: `#L2H3P0` is layer 2, head 3, prompt 0."""
    return f"#L{layer}H{head}P{prompt}"


def linked(text: str, exhibits: Exhibits) -> Markup:
    """Escape a sentence and link the heads in it (L2H3) whose attention is kept."""
    shown = exhibits.attention[0] if exhibits.attention else None
    made, end = Markup(), 0
    for match in _HEAD.finditer(text):
        layer, head = int(match[1]), int(match[2])
        if shown is not None and layer in shown.layers and head in shown.heads:
            made += escape(disarmed(text[end : match.start()]))
            made += Markup('<a href="{}">{}</a>').format(address(layer, head, shown.prompt), match[0])
            end = match.end()
    return made + escape(disarmed(text[end:]))
