"""The figures of one report, each a matplotlib Figure that the user may restyle, and how they become SVG.

Example:
    >>> from ln_probe.page import figures
    >>> for draw in (
    ...     figures.causal_effects, figures.norms_over_depth, figures.projection_over_depth,
    ...     figures.margins_over_depth, figures.attainable_over_depth, figures.entropy_by_layer,
    ...     figures.uniform_angle_by_layer,
    ... ):
    ...     figure: figures.Figure = draw(report)
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import matplotlib as mpl
import matplotlib.figure
import numpy as np
import pandas as pd
from markupsafe import escape
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ln_probe.analyses.probes.base import Picture, even_share
from ln_probe.analyses.text import disarmed, percent
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.norm import INTACT, VARIANTS, Variant

if TYPE_CHECKING:
    from ln_probe.report import Report

__all__ = [
    "Figure",
    "attainable_over_depth",
    "causal_effects",
    "entropy_by_layer",
    "margins_over_depth",
    "norms_over_depth",
    "projection_over_depth",
    "uniform_angle_by_layer",
]

# Okabe and Ito's colours, which are safe for colour-blind readers; a variant has the same colour in every picture.
# On a page they are CSS variables, with lighter shades on a dark background. Heat maps keep their colours in both
# schemes, because an inverted scale would be misread.
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
GRID = "#b0b0b0"
DECIMALS = 2  # of coordinates; more decimals are invisible and made a page's pictures 10 % larger
POINTS, SMALLEST, LEGIBLE = 72, 9, 11  # SVG units per inch, smallest text in units, its least size in pixels
INK = "#000000"
_VARIABLES = {BLUE: "--c-blue", ORANGE: "--c-orange", GREEN: "--c-green", PINK: "--c-pink", GRID: "--c-grid"}
DPI = 192  # of a notebook's picture, which is shown at half that resolution: sharp on high-density screens
SIZE = (4.0, 2.9)  # inches: with its smallest text 11 pixels high it fits a phone of 390 pixels
LABEL = 24  # characters of a name on an axis
TICKS = 24  # labels on an axis
LETTERS, HANDLE = 13, 5  # letters of a legend per inch, and the width of a line's sample in letters
SAME = 2e-3  # relative difference below which two curves are drawn as one: half a pixel
VECTOR_CELLS = 700  # a heat map of more cells becomes an image; 200 layers × 32 heads would be 1 MB of rectangles


class Figure(matplotlib.figure.Figure):
    """A matplotlib figure that a notebook shows without `%matplotlib inline`.

    It is made without pyplot, which would keep every figure alive.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the picture and its size in a notebook, in pixels."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # tokens in scripts that the font lacks
            self.savefig(buffer, format="png", dpi=DPI)
        width, height = (round(inches * DPI / 2) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}


def norms_over_depth(report: Report) -> Figure:
    """Mean length of vectors before and after each norm (± one standard deviation before it), without position 0."""
    figure, axes = _figure("length (L2 norm)", log=True)
    rows = _sites_of(report)
    place = np.arange(len(rows))
    mean, cv = (_tail(rows, f"norm_before_{m}") for m in ("mean", "cv"))
    low = np.maximum(mean * (1 - cv), mean * 0.05)  # the axis is logarithmic
    axes.fill_between(place, low, mean * (1 + cv), color=BLUE, alpha=0.18, lw=0, label="± one SD")
    axes.plot(place, mean, "o-", color=BLUE, label="before the norm")
    axes.plot(place, _tail(rows, "norm_after_mean"), "s-", color=ORANGE, label="after it")
    _few_log_ticks(axes)
    name_sites(axes, rows["site"])
    legend(axes)
    return figure


def projection_over_depth(report: Report) -> Figure:
    """What projection removes: the share of squared length along the all-ones direction, and the angle to it."""
    figure = Figure(figsize=(SIZE[0], 1.35 * SIZE[1]), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    rows = _sites_of(report)
    place = np.arange(len(rows))
    for axes, column, label in (
        (above, "mean_share", "share of squared length"),
        (below, "angle_to_ones_deg", "angle to all-ones, degrees"),
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
    name_sites(below, rows["site"])
    legend(above)
    return figure


def margins_over_depth(report: Report) -> Figure:
    """Best score gap of a key over all others: the median head's median key, and its 5th-percentile key (dashes)."""
    heads = report.heads
    low = heads.loc[heads["space"] == "head", ["margin_median", "margin_p05"]].min().min()
    figure = _over_depth(report, "margin_median", "margin_p05", "margin, nats", log=bool(low > 0))
    if low < 0:  # no query scores such keys highest
        figure.axes[0].axhline(0, color=GRID, lw=1)
    return figure


def attainable_over_depth(report: Report) -> Figure:
    """Attention that a key can receive at the last position: median and 5th-percentile key of the median head."""
    figure = _over_depth(report, "attainable_median", "attainable_p05", "share of attention", log=False)
    axes, even = figure.axes[0], even_share(report.heads)
    if not math.isnan(even):
        axes.axhline(even, color="black", ls=":", lw=1.2, label=f"uniform attention, 1/n = {percent(even)}")
        legend(axes)
    axes.set_ylim(bottom=0)
    return figure


def uniform_angle_by_layer(report: Report) -> Figure:
    """Angle of each head's queries to the direction that attends uniformly; the dashed line is a random direction."""
    figure, axes = _figure("angle, degrees")
    rows = by_variant(report).get(INTACT, pd.DataFrame(columns=["layer", "uniform_angle_deg"]))
    axes.plot(rows["layer"], rows["uniform_angle_deg"], "o", color=BLUE, alpha=0.6, label="a head")
    random = float(report.provenance.get("random_angle_deg", 90))
    axes.axhline(random, color=ORANGE, ls="--", lw=1.2, label="random direction")
    axes.set_ylim(0, 94)
    axes.set_yticks([0, 30, 60, 90])
    _layers(axes, report)
    return figure


def entropy_by_layer(report: Report) -> Figure:
    """Attention entropy over its maximum, per head and layer, for each variant: 1 is uniform attention."""
    figure, axes = _figure("entropy / log(visible keys)")
    for place, (variant, rows) in enumerate(by_variant(report).items()):
        style: dict[str, Any] = {"color": variant.color, "label": variant.label, "alpha": 0.6}
        across = rows["layer"] + 0.16 * (place - 1.5)
        axes.plot(across, rows["entropy_ratio"], variant.marker, ms=4, **style)
    axes.set_ylim(0, 1.02)
    _layers(axes, report)
    return figure


def draw_grid(
    axes: mpl.axes.Axes, grid: pd.DataFrame, low: float, high: float, *, ticks: int, signed: bool = False
) -> mpl.collections.QuadMesh:
    """Draw a layer × head table as coloured cells, with at most `ticks` labels per axis; missing values are grey."""
    values = np.ma.masked_invalid(grid.to_numpy(float))
    for axis, names in ((axes.yaxis, grid.index), (axes.xaxis, grid.columns)):
        step = -(-len(names) // ticks) or 1
        axis.set_ticks(range(0, len(names), step), [str(n) for n in names[::step]], fontsize=SMALLEST)
    return axes.pcolormesh(
        np.arange(values.shape[1] + 1) - 0.5,
        np.arange(values.shape[0] + 1) - 0.5,
        values,
        vmin=low,
        vmax=high,
        cmap=mpl.colormaps["RdBu_r" if signed else "cividis"].with_extremes(bad="#8c8c8c"),
        rasterized=values.size > VECTOR_CELLS,
    )


def in_head_space(report: Report) -> pd.DataFrame:
    """Return the rows of the table `heads` in head space."""
    return report.heads[report.heads["space"] == "head"]


def by_variant(report: Report) -> dict[Variant, pd.DataFrame]:
    """Return the rows in head space of every measured variant, in the order of `VARIANTS`."""
    heads = in_head_space(report)
    return {v: heads[heads["variant"] == v.name] for v in VARIANTS.values() if (heads["variant"] == v.name).any()}


def _sites_of(report: Report) -> pd.DataFrame:
    return report.layernorms[~report.layernorms["reads"].isin(["query", "key"])].reset_index(drop=True)


def _tail(rows: pd.DataFrame, column: str) -> pd.Series:
    """The statistic without position 0, or with it where there is no other token."""
    return rows[f"{column}_tail"].fillna(rows[column])


def _over_depth(report: Report, middle: str, hard: str, label: str, *, log: bool) -> Figure:
    figure, axes = _figure(label, log=log)
    dashed = False
    lines: list[tuple[list[Variant], pd.DataFrame]] = []
    for variant, rows in by_variant(report).items():
        grouped = rows.groupby("layer")[[middle, hard]].median()
        if log:
            grouped = grouped.where(grouped > 0)  # a logarithmic axis has no 0
        if grouped[middle].isna().all():
            continue
        same = [v for v, g in lines if g.shape == grouped.shape and np.allclose(g, grouped, SAME, 0, equal_nan=True)]
        if same:  # the two are drawn as one line
            same[0].append(variant)
        else:
            lines.append(([variant], grouped))
    for variants, grouped in lines:
        style: dict[str, Any] = {"color": variants[0].color, "marker": variants[0].marker, "ms": 5}
        axes.plot(grouped.index, grouped[middle], "-", label=" = ".join(v.label for v in variants), **style)
        axes.plot(grouped.index, grouped[hard], "--", alpha=0.6, **style)
        dashed = dashed or bool(grouped[hard].notna().any())
    if dashed:
        axes.plot([], [], "--", color="black", alpha=0.6, label="5th percentile")
    if log:
        _few_log_ticks(axes)
    _layers(axes, report)
    return figure


def _figure(ylabel: str, *, log: bool = False) -> tuple[Figure, mpl.axes.Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    dress(axes, ylabel)
    if log:
        axes.set_yscale("log")
    return figure, axes


def _few_log_ticks(axes: mpl.axes.Axes) -> None:
    """Label a logarithmic axis with plain numbers, several of them even within one decade."""
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
    """Shorten a name in the middle and escape dollar signs, which would begin a formula."""
    cut = text if len(text) <= LABEL else f"{text[: LABEL // 2 - 1]}…{text[-LABEL // 2 :]}"
    return disarmed(cut).replace("\n", " ").replace("$", r"\$")


def name_sites(axes: mpl.axes.Axes, sites: Iterable[str]) -> None:
    names = [axis_text(str(s).replace("blocks.", "")) for s in sites]
    step = -(-len(names) // TICKS) or 1
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=60, ha="right", fontsize=SMALLEST)


def _layers(axes: mpl.axes.Axes, report: Report) -> None:
    axes.set_xlabel("layer")
    layers = sorted({int(v) for v in report.heads["layer"]})
    axes.set_xticks(layers[:: -(-len(layers) // TICKS) or 1])
    legend(axes)


def legend(axes: mpl.axes.Axes) -> None:
    """Put a legend above the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        room = LETTERS * cast(Figure, axes.figure).get_figwidth()
        axes.legend(
            handles,
            [textwrap.fill(label, int(room) - HANDLE) for label in labels],
            frameon=False,
            fontsize=SMALLEST,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=max(1, min(3, len(labels), int(room / (max(map(len, labels)) + HANDLE)))),
            borderaxespad=0.2,
            handlelength=1.6,
            columnspacing=1.2,
        )


# Where the largest change is this many times the median, the axis is linear near 0 and logarithmic beyond. Freezing the
# scale at one attention sink can cost tens of nats (SmolLM2, layer 16: 32), next to which all else would look like 0.
WIDE = 30.0


def causal_effects(report: Report) -> Figure:
    """Change of the loss when a term is removed (95 % CI), for groups of norms and each norm alone (open: estimated).

    Edits that change nothing by construction (`no_op`) are left out.
    """
    rows = report.causal[report.causal["variant"] != "intact"]
    rows = rows.assign(estimated=rows["delta_loss"].isna(), delta_loss=rows["delta_loss"].fillna(rows["estimate"]))
    rows = rows[rows["delta_loss"].notna() & (rows["no_op"].fillna("") == "")]
    groups = rows[rows["sites"].isin(GROUPS)]
    single = rows[~rows["sites"].isin(GROUPS)]
    parts = [found for found in (groups, single) if len(found)]
    shape = [0.35 + 0.22 * len(groups)] * bool(len(groups)) + [2.6] * bool(len(single))
    figure = Figure(figsize=(SIZE[0], 0.9 + sum(shape)), layout="constrained")
    panels = figure.subplots(max(1, len(parts)), 1, squeeze=False, height_ratios=shape or [1])[:, 0]
    for axes, found in zip(panels, parts, strict=False):
        (_bars if found is groups else _points)(axes, found)
    if parts:
        legend(panels[0])
    return figure


def _bars(axes: mpl.axes.Axes, rows: pd.DataFrame) -> None:
    dress(axes, "", grid="x")
    axes.set_xlabel("change of loss, nats per token")
    axes.axvline(0, color=GRID, lw=1)
    changes, names = list(_changes(rows)), list(rows["sites"].unique())
    width = 0.8 / len(changes)
    for number, (variant, site, _, value, low, high) in enumerate(changes):
        place = site + (number - (len(changes) - 1) / 2) * width
        axes.barh(place, value, 0.9 * width, color=variant.color, alpha=0.75, label=variant.label)
        axes.hlines(place, low, high, color="black", lw=1.3)
        for end in (low, high):
            axes.plot(end, place, "|", color="black", ms=5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    if widened(axes.set_xscale, rows["delta_loss"]):
        axes.set_xlabel("change of loss, nats per token (logarithmic away from 0)")


def _points(axes: mpl.axes.Axes, rows: pd.DataFrame) -> None:
    dress(axes, "each norm alone, nats")
    axes.axhline(0, color=GRID, lw=1)
    for number, (variant, site, open_, value, low, high) in enumerate(_changes(rows)):
        place = site + 0.16 * (number - 1)
        axes.vlines(place, low, high, color=variant.color, lw=1.3)
        axes.plot(place[~open_], value[~open_], variant.marker, ms=4, color=variant.color, label=variant.label)
        axes.plot(place[open_], value[open_], variant.marker, ms=4, color=variant.color, fillstyle="none")
    name_sites(axes, rows["sites"].unique())
    widened(axes.set_yscale, rows["delta_loss"])


def _changes(rows: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Yield each variant, the places of its norms, which values are estimates, the values and the ends of intervals.

    An unknown interval has length 0.
    """
    names = rows["sites"].unique().tolist()
    for variant in VARIANTS.values():
        mine = rows[rows["variant"] == variant.name].drop_duplicates("sites")
        if len(mine):
            value, low, high = (mine[f"delta_loss{end}"].to_numpy(float) for end in ("", "_low", "_high"))
            low, high = (np.where(np.isfinite(end), end, value) for end in (low, high))
            place, estimated = mine["sites"].map(names.index).to_numpy(float), mine["estimated"].to_numpy(bool)
            yield variant, place, estimated, value, low, high


def widened(set_scale: Callable[..., None], changes: pd.Series) -> bool:
    """Make an axis linear near 0 alone if the largest change would hide the others on a linear one; whether it did."""
    middle = float(changes.abs().median())
    wide = bool(changes.abs().max() > max(1.0, WIDE * middle))
    if wide:
        set_scale("symlog", linthresh=max(1e-3, float(f"{middle:.1g}")))
    return wide


# The pictures of a page by id; the first line of each function's docstring is the caption.
PICTURES = {
    picture.id: picture
    for picture in (
        Picture("norms", "Lengths before and after each norm", norms_over_depth, "layernorms", "norm_before_mean"),
        Picture(
            "projection",
            "Projection: the component along the all-ones direction",
            projection_over_depth,
            "layernorms",
            "mean_share",
        ),
        Picture("margins", "Margins over depth", margins_over_depth, "heads", "margin_median"),
        Picture("attainable", "Attainable attention", attainable_over_depth, "heads", "attainable_median"),
        Picture("angle", "Queries and the uniform direction", uniform_angle_by_layer, "heads", "uniform_angle_deg"),
        Picture("entropy", "How uniform attention is", entropy_by_layer, "heads", "entropy_ratio"),
        Picture("causal", "Change of the loss", causal_effects, "causal", "delta_loss"),
    )
}


def svg(figure: matplotlib.figure.Figure, name: str, title: str = "") -> str:
    """Return the figure as an inline SVG element whose ids begin with `name`; equal figures give equal text.

    Args:
        figure: any matplotlib figure; black and the palette above become the page's colours.
        name: unique on the page, letters and digits.
        title: text for screen readers.
    """
    with (
        mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}),
        warnings.catch_warnings(),
    ):
        # Text stays text and is drawn with the reader's fonts, so glyphs that matplotlib's font lacks do not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(rf"(\.\d{{{DECIMALS}}})\d+", r"\1", m.group()), text)
    text = re.sub(r'\bid="(?=[A-Za-z])|url\(#(?=[A-Za-z])|href="#(?=[A-Za-z])', lambda m: f"{m.group(0)}{name}-", text)
    text = re.sub(rf"(?<=: ){INK}", "currentColor", text)
    for colour, variable in _VARIABLES.items():
        text = re.sub(rf"(?<=: ){colour}", f"var({variable}, {colour})", text)
    # The width at which the smallest text is 11 pixels high.
    width = round(figure.get_figwidth() * POINTS * LEGIBLE / SMALLEST)
    described = f'<svg role="img" aria-labelledby="{name}-title" style="--legible:{width}px" '
    head, _, rest = text.partition(">")
    return head.replace("<svg ", described, 1) + f'><title id="{name}-title">{escape(disarmed(title))}</title>' + rest
