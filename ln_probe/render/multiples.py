"""Small multiples: the same measure of several models over depth, or of one model over training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

from ln_probe.analyses.probes.text import disarmed
from ln_probe.hooks.variants import VARIANTS
from ln_probe.render.drawing import Figure
from ln_probe.render.figures import COLOURS, LABELS, MARKERS, SIZE, by_variant
from ln_probe.render.svg import GRID

if TYPE_CHECKING:
    from ln_probe.reporting.contents import Contents

MEASURES = {  # column of the `heads` table: title, label of the axis
    "unselectable_fraction": ("keys no query can select", "share of keys"),
    "attainable_last_median": ("attention a median key can receive at the last position", "share of attention"),
    "margin_median": ("margin of a median key", "nats"),
    "entropy_ratio": ("how uniform attention is", "entropy / maximum"),
}
PANELS = 24  # models drawn: more would be too small to read; the table has all
ACROSS = 4


def over_depth(reports: Sequence[Contents], names: Sequence[str], measure: str) -> Figure:
    """A measure over depth, a panel per model and a line per variant, all on the same scale.

    Args:
        reports, names: the models; the first PANELS are drawn.
        measure: a column of the `heads` table; the median over the heads of a layer is drawn.

    Raises:
        KeyError: no such column.
    """
    shown = list(zip(reports, names, strict=True))[:PANELS]
    figure, panels = _panels(len(shown), MEASURES.get(measure, ("", measure))[1])
    for axes, (report, name) in zip(panels, shown, strict=True):
        deepest = max([1, *(int(v) for v in report.heads["layer"])])
        for variant, rows in by_variant(report):
            middle = rows.groupby("layer")[measure].median()
            axes.plot(
                middle.index / deepest, middle, "-", color=COLOURS[variant], marker=MARKERS[variant], ms=3, lw=1.2
            )
        _title(axes, name)
        axes.set_xlabel("depth", fontsize=8)
    _legend(figure, [v for v in VARIANTS if any(v == found for r, _ in shown for found, _ in by_variant(r))])
    return figure


def over_training(
    reports: Sequence[Contents], names: Sequence[str], steps: Sequence[int | None], measure: str
) -> Figure:
    """A measure over training steps, a panel per model and a line per variant; reports without a step are left out."""
    runs: dict[str, list[tuple[int, Contents]]] = {}
    for report, name, step in zip(reports, names, steps, strict=True):
        if step is not None:
            runs.setdefault(name, []).append((step, report))
    figure, panels = _panels(min(PANELS, len(runs)), MEASURES.get(measure, ("", measure))[1])
    drawn: set[str] = set()
    for axes, (name, found) in zip(panels, runs.items(), strict=False):
        found.sort(key=lambda item: item[0])
        for variant in VARIANTS:
            points = [
                (step, float(rows[measure].median())) for step, r in found for v, rows in by_variant(r) if v == variant
            ]
            if points and not all(math.isnan(v) for _, v in points):
                axes.plot(*np.array(points).T, "-", color=COLOURS[variant], marker=MARKERS[variant], ms=3, lw=1.2)
                drawn.add(variant)
        if found[-1][0] > 0:
            axes.set_xscale("symlog", linthresh=max(1, min((s for s, _ in found if s > 0), default=1)))
        _title(axes, name)
        axes.set_xlabel("training step", fontsize=8)
    _legend(figure, [v for v in VARIANTS if v in drawn])
    return figure


def _panels(count: int, label: str) -> tuple[Figure, list[mpl.axes.Axes]]:
    across = min(ACROSS, max(1, count))
    lines = -(-count // across) or 1
    figure = Figure(figsize=(max(SIZE[0], 2.4 * across), 1.0 + 2.0 * lines), layout="constrained")
    grid = figure.subplots(lines, across, sharey=True, squeeze=False)
    for axes in grid.flat:
        axes.grid(axis="y", color=GRID, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    figure.supylabel(label, fontsize=9)
    return figure, list(grid.flat[:count])


def _title(axes: mpl.axes.Axes, name: str) -> None:
    short = name if len(name) <= 30 else f"…{name[-29:]}"
    axes.set_title(disarmed(short).replace("\n", " ").replace("$", r"\$"), fontsize=9)


def _legend(figure: Figure, variants: Sequence[str]) -> None:
    handles = [
        mpl.lines.Line2D([], [], color=COLOURS[v], marker=MARKERS[v], ms=4, lw=1.2, label=LABELS[v]) for v in variants
    ]
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper left", ncols=2)
