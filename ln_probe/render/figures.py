"""The pictures of a report, each a matplotlib Figure that the user may restyle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ln_probe.analyses.probes.base import even_share
from ln_probe.analyses.probes.text import disarmed, percent
from ln_probe.hooks.variants import VARIANTS
from ln_probe.render.drawing import Figure
from ln_probe.render.svg import BLUE, GREEN, GRID, ORANGE, PINK

if TYPE_CHECKING:
    from ln_probe.reporting.contents import Contents

__all__ = [
    "attainable_over_depth",
    "entropy_by_layer",
    "heat_maps",
    "margins_by_head",
    "margins_over_depth",
    "norms_over_depth",
    "projection_over_depth",
    "uniform_angle_by_layer",
    "unselectable_by_head",
]

COLOURS = {"intact": BLUE, "no_scaling": ORANGE, "no_projection": GREEN, "neither": PINK}
MARKERS = {"intact": "o", "no_scaling": "s", "no_projection": "^", "neither": "D"}  # told apart without colour as well
LABELS = {
    "intact": "intact",
    "no_scaling": "without scaling",
    "no_projection": "without projection",
    "neither": "without both",
}
SIZE = (5.2, 3.1)  # inches: at the width of a phone, text of 10 points is still legible
LABEL = 24  # characters of a name on an axis
TICKS = 24  # labels on an axis
LETTERS, HANDLE = 15, 5  # of a legend: an inch holds so many, and so many make room for a line's sample
SAME = 2e-3  # two curves closer than this, relatively, are one: 0.2 % of the axis is half a pixel
VECTOR_CELLS = 700  # a heat map of more cells is drawn as an image: 200 layers × 32 heads would be 1 MB of rectangles


def norms_over_depth(report: Contents) -> Figure:
    """Mean length of vectors before and after each norm (± one deviation before it), without position 0."""
    figure, axes = _figure("length (L2 norm)", log=True)
    rows = _sites_of(report)
    place = np.arange(len(rows))
    mean, cv = (_tail(rows, f"norm_before_{m}") for m in ("mean", "cv"))
    low = np.maximum(mean * (1 - cv), mean * 0.05)  # the axis is logarithmic
    axes.fill_between(place, low, mean * (1 + cv), color=BLUE, alpha=0.18, lw=0, label="± one deviation")
    axes.plot(place, mean, "o-", color=BLUE, label="before the norm")
    axes.plot(place, _tail(rows, "norm_after_mean"), "s-", color=ORANGE, label="after it")
    _few_log_ticks(axes)
    name_sites(axes, rows)
    legend(axes)
    return figure


def projection_over_depth(report: Contents) -> Figure:
    """What projection removes at each norm: the share of squared length along the ones-vector, and the angle to it."""
    figure = Figure(figsize=(SIZE[0], 1.35 * SIZE[1]), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    rows = _sites_of(report)
    place = np.arange(len(rows))
    for axes, column, label in (
        (above, "mean_share", "share of squared length"),
        (below, "angle_to_ones_deg", "angle to ones, degrees"),
    ):
        dress(axes, label)
        every, tail = rows[column].clip(lower=1e-12), _tail(rows, column).clip(lower=1e-12)
        axes.plot(place, tail, "o-", color=GREEN, label="without position 0")
        axes.plot(place, every, "v:", ms=4, color=PINK, label="all positions")
    above.set_yscale("log")
    _few_log_ticks(above)
    below.axhline(90, color=GRID, lw=1)
    below.set_ylim(0, 94)
    below.set_yticks([0, 30, 60, 90])
    name_sites(below, rows)
    legend(above)
    return figure


def margins_over_depth(report: Contents) -> Figure:
    """How far keys can be raised above all others: the median head's median key, and its hardest twentieth (dashes)."""
    heads = report.heads
    low = heads.loc[heads["space"] == "head", ["margin_median", "margin_p05"]].min().min()
    figure = _over_depth(report, "margin_median", "margin_p05", "margin, nats", log=bool(low > 0))
    if low < 0:  # no query puts such keys on top
        figure.axes[0].axhline(0, color=GRID, lw=1)
    return figure


def attainable_over_depth(report: Contents) -> Figure:
    """Attention that a key can receive at the last position: median and 5th-percentile key of the median head."""
    figure = _over_depth(report, "attainable_last_median", "attainable_last_p05", "share of attention", log=False)
    axes, even = figure.axes[0], even_share(report.heads)
    if not math.isnan(even):
        axes.axhline(even, color="black", ls=":", lw=1.2, label=f"an even share, 1/n = {percent(even)}")
        legend(axes)
    axes.set_ylim(bottom=0)
    return figure


def unselectable_by_head(report: Contents) -> Figure:
    """Share of keys that no query can select, layer × head, for each variant."""
    return heat_maps(report, "unselectable_fraction", "share of keys", least=0.1)


def margins_by_head(report: Contents) -> Figure:
    """Median margin of each head's keys, layer × head, for each variant."""
    return heat_maps(report, "margin_median", "margin, nats")


def heat_maps(report: Contents, column: str, label: str, *, least: float = 1e-3) -> Figure:
    """Any column of the `heads` table (head space), layer × head, a panel per variant; grey where it is not known.

    The scale ends at `least` or higher: a map of next to nothing does not shine.

    Raises:
        KeyError: no such column.
    """
    found = [(v, r) for v, r in by_variant(report) if not r[column].isna().all()]
    columns = min(2, len(found)) or 1
    lines = -(-len(found) // columns) or 1
    figure = Figure(figsize=(SIZE[0], 0.5 + 1.75 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    values = np.concatenate([[0.0], *(r[column].to_numpy(float) for _, r in found)])
    top = max(float(values[np.isfinite(values)].max()), least)
    image = None
    for axes, (variant, rows) in zip(panels.flat, found, strict=False):
        grid = rows.pivot(index="layer", columns="head", values=column)
        shown = np.ma.masked_invalid(grid.to_numpy(float))
        image = axes.pcolormesh(
            np.arange(shown.shape[1] + 1) - 0.5,
            np.arange(shown.shape[0] + 1) - 0.5,
            shown,
            vmin=0,
            vmax=top,
            cmap=mpl.colormaps["cividis"].with_extremes(bad="#8c8c8c"),
            rasterized=shown.size > VECTOR_CELLS,
        )
        axes.set_title(LABELS[variant], fontsize=10)
        for axis, names in ((axes.yaxis, grid.index), (axes.xaxis, grid.columns)):
            step = -(-len(names) // 8)
            axis.set_ticks(range(0, len(names), step), [str(n) for n in names[::step]], fontsize=8)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("layer")
    for axes in panels[-1]:
        axes.set_xlabel("head")
    if image is not None:
        figure.colorbar(image, ax=panels, label=label)
    return figure


def uniform_angle_by_layer(report: Contents) -> Figure:
    """Angle of each head's queries to the direction that attends uniformly, beside that of a random direction."""
    figure, axes = _figure("angle, degrees")
    rows = dict(by_variant(report)).get("intact", pd.DataFrame(columns=["layer", "uniform_angle_deg"]))
    axes.plot(rows["layer"], rows["uniform_angle_deg"], "o", color=BLUE, alpha=0.6, label="a head")
    random = float(report.provenance.get("random_angle_deg", 90))
    axes.axhline(random, color=ORANGE, ls="--", lw=1.2, label="random direction")
    axes.set_ylim(0, 94)
    axes.set_yticks([0, 30, 60, 90])
    _layers(axes, report)
    return figure


def entropy_by_layer(report: Contents) -> Figure:
    """Attention entropy over its maximum, per head and layer, for each variant: 1 is uniform attention."""
    figure, axes = _figure("entropy / log(visible keys)")
    for place, (variant, rows) in enumerate(by_variant(report)):
        axes.plot(
            rows["layer"] + 0.16 * (place - 1.5),
            rows["entropy_ratio"],
            MARKERS[variant],
            ms=4,
            alpha=0.6,
            color=COLOURS[variant],
            label=LABELS[variant],
        )
    axes.set_ylim(0, 1.02)
    _layers(axes, report)
    return figure


# ------------------------------------------------------------------------------------------------------------- parts


def by_variant(report: Contents) -> list[tuple[str, pd.DataFrame]]:
    """The rows of head space of each variant there is, in the vocabulary's order."""
    heads = report.heads[report.heads["space"] == "head"] if len(report.heads) else report.heads
    return [(v, heads[heads["variant"] == v]) for v in VARIANTS if len(heads) and (heads["variant"] == v).any()]


def _sites_of(report: Contents) -> pd.DataFrame:
    return report.layernorms[~report.layernorms["reads"].isin(["query", "key"])].reset_index(drop=True)


def _tail(rows: pd.DataFrame, column: str) -> pd.Series:
    """Without position 0; with it where there is no other token."""
    return rows[f"{column}_tail"].fillna(rows[column])


def _over_depth(report: Contents, middle: str, hard: str, label: str, *, log: bool) -> Figure:
    figure, axes = _figure(label, log=log)
    dashed = False
    lines: list[tuple[list[str], pd.DataFrame]] = []
    for variant, rows in by_variant(report):
        grouped = rows.groupby("layer")[[middle, hard]].median()
        if log:
            grouped = grouped.where(grouped > 0)  # 0 has no place on a logarithmic axis
        if grouped[middle].isna().all():
            continue
        same = next((v for v, g in lines if g.shape == grouped.shape and coincide(g, grouped)), None)
        if same is None:
            lines.append(([variant], grouped))
        else:
            same.append(variant)
    for variants, grouped in lines:
        variant = variants[0]
        style: dict[str, Any] = {"color": COLOURS[variant], "marker": MARKERS[variant], "ms": 5}
        axes.plot(grouped.index, grouped[middle], "-", label=" = ".join(LABELS[v] for v in variants), **style)
        axes.plot(grouped.index, grouped[hard], "--", alpha=0.6, **style)
        dashed = dashed or bool(grouped[hard].notna().any())
    if dashed:
        axes.plot([], [], "--", color="black", alpha=0.6, label="hardest twentieth")
    if log:
        _few_log_ticks(axes)
    _layers(axes, report)
    return figure


def coincide(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether lines would lie on each other: nowhere farther apart than SAME of the larger one's size."""
    return bool(np.allclose(one.to_numpy(float), other.to_numpy(float), rtol=SAME, atol=0, equal_nan=True))


def _figure(ylabel: str, *, log: bool = False) -> tuple[Figure, mpl.axes.Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    dress(axes, ylabel)
    if log:
        axes.set_yscale("log")
    return figure, axes


def _few_log_ticks(axes: mpl.axes.Axes) -> None:
    """Ticks for what has been drawn on a logarithmic axis: plain numbers, and several even within a decade."""
    low, high = axes.get_ylim()
    narrow = high < 8 * low
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:.3g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def dress(axes: mpl.axes.Axes, ylabel: str, grid: str = "y") -> None:
    axes.set_ylabel(ylabel)
    axes.grid(axis="x" if grid == "x" else "y", color=GRID, alpha=0.35)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def axis_text(text: str) -> str:
    """A name as it may stand on an axis: a dollar sign would begin a formula; long ones keep both ends."""
    cut = text if len(text) <= LABEL else f"{text[: LABEL // 2 - 1]}…{text[-LABEL // 2 :]}"
    return disarmed(cut).replace("\n", " ").replace("$", r"\$")


def name_sites(axes: mpl.axes.Axes, rows: pd.DataFrame) -> None:
    names = [axis_text(str(s).replace("blocks.", "")) for s in rows["site"]]
    step = -(-len(names) // TICKS) or 1
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=60, ha="right", fontsize=8)


def _layers(axes: mpl.axes.Axes, report: Contents) -> None:
    axes.set_xlabel("layer")
    layers = sorted({int(v) for v in report.heads["layer"]})
    axes.set_xticks(layers[:: -(-len(layers) // TICKS) or 1])
    legend(axes)


def legend(axes: mpl.axes.Axes) -> None:
    """Above the axes, where it hides no data."""
    found = axes.get_legend_handles_labels()[1]
    if found:
        room = LETTERS * cast(Figure, axes.figure).get_figwidth()
        axes.legend(
            frameon=False,
            fontsize=8,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=max(1, min(3, len(found), int(room / (max(map(len, found)) + HANDLE)))),
            borderaxespad=0.2,
            handlelength=1.6,
            columnspacing=1.2,
        )
