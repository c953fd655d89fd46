"""The picture of `Report.by_head`: a square for every head, layer × head, of one measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

from ln_probe.analyses.probes.head_columns import BY_HEAD
from ln_probe.render.drawing import Figure
from ln_probe.render.figures import SIZE, VECTOR_CELLS
from ln_probe.reporting.by_head import by_head

if TYPE_CHECKING:
    from ln_probe.reporting.contents import Contents

_TICKS = 16


__all__ = [
    "heads_map",
    "measures_of",
]


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
        _measure("delta_loss", "Loss without scaling", True),
        _measure("delta_loss_no_projection", "Loss without projection", True),
        _measure("delta_loss_neither", "Loss without both", True),
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


def measures_of(report: Contents) -> list[str]:
    """Measures that this report has values of."""
    table = by_head(report)
    return [name for name in MEASURES if len(table) and table[name].notna().any() and (table[name] != 0).any()]


def heads_map(report: Contents, measure: str = "delta_loss") -> Figure:
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
