"""Head by head: the table `Report.by_head`, its heat map, and the interactive map of heads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from jaxtyping import Float
from markupsafe import Markup, escape

from ln_probe.analyses.probes.columns import BY_HEAD
from ln_probe.analyses.probes.text import disarmed
from ln_probe.exhibits import Exhibits
from ln_probe.hooks.variants import BOTH_REMOVED, INTACT, PROJECTION_REMOVED, SCALING_FROZEN, edits_of_norms
from ln_probe.page.figures import SIZE, VECTOR_CELLS, Figure
from ln_probe.report import Report

__all__ = [
    "heads_map",
    "measures_of",
]

_KEY = ["layer", "head"]
# Column of the `heads` table, intact: its name here, and whether what keys without scaling do to it is given too.
_OF_HEADS = {
    "entropy_ratio": ("entropy_ratio", "entropy_change"),
    "attainable_last_median": ("attainable", "attainable_change"),
    "pattern_max_median": ("received", None),
    "margin_median": ("margin", "margin_change"),
}


def by_head(report: Report, sort: str | None = None) -> pd.DataFrame:
    """`Report.by_head`."""
    if sort is not None and sort not in BY_HEAD.names:
        raise ValueError(f"by_head has no column {sort!r}: there are {', '.join(BY_HEAD.names)}")
    heads = report.heads
    heads = heads[heads["space"] == "head"] if len(heads) else heads
    effects, sinks = report.tables["head_effects"], report.tables["sink_heads"]
    pairs = pd.concat([t[_KEY] for t in (heads, effects, sinks)]).drop_duplicates().astype(np.int64)
    made = pairs.sort_values(_KEY).set_index(_KEY)
    for name in BY_HEAD.names[len(_KEY) :]:
        made[name] = False if name == "exact" else math.nan
    _effects(made, effects)
    intact, frozen = (heads[heads["variant"] == v].set_index(_KEY) for v in (INTACT.name, SCALING_FROZEN.name))
    for column, (name, change) in _OF_HEADS.items():
        made[name] = intact[column].astype(float).reindex(made.index)
        if change is not None:
            made[change] = (frozen[column].astype(float).reindex(made.index) - made[name]).astype(float)
    for name in ("first_attention", "sink_rate", "first_uniform"):
        made[name] = sinks.set_index(_KEY)[name].astype(float).reindex(made.index)
    table = made.reset_index()[BY_HEAD.names]
    if sort is not None:
        table = table.sort_values(
            sort, key=lambda c: c.abs() if c.dtype == float else c, ascending=False, kind="stable"
        )
    return BY_HEAD.check(table.reset_index(drop=True))


def _effects(made: pd.DataFrame, effects: pd.DataFrame) -> None:
    """The columns about the loss: as run, or as estimated."""
    for variant in edits_of_norms(standard=True):
        name = "delta_loss" if variant is SCALING_FROZEN else f"delta_loss_{variant.name}"
        rows = effects[effects["variant"] == variant.name].set_index(_KEY)
        exact, estimate = (rows[c].astype(float).reindex(made.index) for c in ("delta_loss", "estimate"))
        made[name] = exact.fillna(estimate)
        if name == "delta_loss":
            made["exact"] = exact.notna()
            made["p_adjusted"] = rows["p_adjusted"].astype(float).reindex(made.index)
            made["loss"] = rows["loss"].astype(float).reindex(made.index)


_TICKS = 16


@dataclass(frozen=True)
class Measure:
    """What a map can show: its title, whether it has a sign (then 0 is white), and what the column means."""

    title: str
    signed: bool
    label: str
    meaning: str


def _measure(name: str, title: str, signed: bool) -> tuple[str, Measure]:
    column = BY_HEAD.column(name)
    assert column is not None
    return name, Measure(title, signed, column.unit or "share", column.meaning)


MEASURES = dict(
    (
        _measure("delta_loss", f"Loss {SCALING_FROZEN.label}", True),
        *(_measure(f"delta_loss_{v.name}", f"Loss {v.label}", True) for v in (PROJECTION_REMOVED, BOTH_REMOVED)),
        _measure("entropy_ratio", "Entropy", False),
        _measure("entropy_change", "Change of entropy", True),
        _measure("attainable", "Attention a key can get", False),
        _measure("attainable_change", "Change of attainable attention", True),
        _measure("received", "Attention keys got", False),
        _measure("margin", "Margins", False),
        _measure("margin_change", "Change of margins", True),
        _measure("first_attention", "Attention to position 0", False),
        _measure("sink_rate", "Sink rate", False),
    )
)


def measures_of(report: Report) -> list[str]:
    """Measures that this report has values of."""
    table = by_head(report)
    return [name for name in MEASURES if len(table) and table[name].notna().any() and (table[name] != 0).any()]


def heads_map(report: Report, measure: str = "delta_loss") -> Figure:
    """One measure of every head, layer × head; grey where it is not known.

    Raises:
        ValueError: an unknown measure.
    """
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}: there are {', '.join(MEASURES)}")
    about = MEASURES[measure]
    grid = by_head(report).pivot(index="layer", columns="head", values=measure)
    shown = np.ma.masked_invalid(grid.to_numpy(float))
    figure = Figure(figsize=(SIZE[0], max(1.8, min(6.0, 0.8 + 0.28 * max(1, len(grid))))), layout="constrained")
    axes = figure.subplots()
    top = float(np.abs(shown).max()) if shown.count() else 0.0
    top = top or 1e-3  # a map of zeros is one colour, and its scale has an end
    low = -top if about.signed or (shown.count() and float(shown.min()) < 0) else 0.0
    colours = mpl.colormaps["RdBu_r" if low < 0 else "cividis"].with_extremes(bad="#8c8c8c")
    image = axes.pcolormesh(
        np.arange(shown.shape[1] + 1) - 0.5,
        np.arange(shown.shape[0] + 1) - 0.5,
        shown,
        vmin=low,
        vmax=top,
        cmap=colours,
        rasterized=shown.size > VECTOR_CELLS,
    )
    for axis, names in ((axes.yaxis, grid.index), (axes.xaxis, grid.columns)):
        step = -(-len(names) // _TICKS) or 1
        axis.set_ticks(range(0, len(names), step), [str(n) for n in names[::step]], fontsize=8)
    axes.set(xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes, label=about.label)
    return figure


# What "most affected" means: the first of these that is known. The others of the map can be chosen.
_FIRST = ("delta_loss", "entropy_change", "attainable_change")
_HEAD = re.compile(r"\bL(\d{1,5})H(\d{1,5})\b")


@dataclass(frozen=True, eq=False)
class HeadMap:
    """Measures of every head, for the map.

    Attributes:
        layers, heads: of the axes below.
        values: by measure (`ln_probe.page.heads.MEASURES`), the one shown first at the front; NaN: not known.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    values: Mapping[str, Float[np.ndarray, "layer head"]] = field(default_factory=dict)

    @staticmethod
    def of(report: Report) -> HeadMap:
        """The map of a report; without measures where there is nothing to show."""
        known = measures_of(report)
        if not known:
            return HeadMap()
        first = next((m for m in _FIRST if m in known), known[0])
        table = by_head(report)
        grids = {
            m: table.pivot(index="layer", columns="head", values=m) for m in sorted(known, key=lambda m: m != first)
        }
        axes = grids[first]
        return HeadMap(
            tuple(int(v) for v in axes.index),
            tuple(int(v) for v in axes.columns),
            {m: g.to_numpy(np.float64) for m, g in grids.items()},
        )

    def most_affected(self, exhibits: Exhibits, layer: int | None = None, prompt: int = 0) -> tuple[int, int]:
        """The (layer, head) whose first measure is largest in size, of those whose attention is kept.

        Raises:
            ValueError: nothing was kept of that prompt.
        """
        shown = exhibits.of_prompt(prompt)
        kept = [(la, h) for la in shown.layers for h in shown.heads if layer in (None, la)]
        if not self.values:
            return kept[0]
        grid = next(iter(self.values.values()))
        places = [
            (self.layers.index(la), self.heads.index(h)) for la, h in kept if la in self.layers and h in self.heads
        ]
        sizes = [abs(float(grid[p])) for p in places]
        if not any(np.isfinite(sizes)):
            return kept[0]
        row, column = places[int(np.nanargmax(sizes))]
        return self.layers[row], self.heads[column]

    def plain(self) -> dict[str, Any]:
        """As the scripts get it."""
        told = [
            {
                "name": name,
                "title": MEASURES[name].title,
                "unit": MEASURES[name].label,
                "meaning": MEASURES[name].meaning,
                "signed": MEASURES[name].signed,
                "values": values.astype(np.float32).ravel(),
            }
            for name, values in self.values.items()
        ]
        return {"layers": self.layers, "heads": self.heads, "measures": told}


def address(layer: int, head: int, prompt: int = 0) -> str:
    """Where a head stands, as the end of the page's address."""
    return f"#L{layer}H{head}P{prompt}"


def linked(text: str, exhibits: Exhibits) -> Markup:
    """A sentence in which heads whose attention is kept (L2H3) are links to it; everything else is escaped."""
    shown = exhibits.attention[0] if exhibits.attention else None
    made, end = Markup(), 0
    for match in _HEAD.finditer(text):
        layer, head = int(match[1]), int(match[2])
        if shown is not None and layer in shown.layers and head in shown.heads:
            made += escape(disarmed(text[end : match.start()]))
            made += Markup('<a href="{}">{}</a>').format(address(layer, head, shown.prompt), match[0])
            end = match.end()
    return made + escape(disarmed(text[end:]))
