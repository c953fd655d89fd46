"""The figures of pages, each a matplotlib Figure that the user may restyle, and how they become SVG.

Example:
    >>> from ln_probe.page import figures
    >>> for draw in (figures.loss_changes, figures.norms_over_depth, figures.keys_over_depth):
    ...     figure: figures.Figure = draw(report)
    >>> figure = figures.forest(["my model"], [report])
    >>> figure = figures.loss_over_training({"my run": [(0, report), (1000, report)]})
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.figure
import numpy as np
from markupsafe import escape
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ln_probe.analyses.probes.wording import base_loss, is_significant, strata_means, unit_of
from ln_probe.analyses.text import disarmed, percent, with_interval
from ln_probe.hooks.norm import EDITS, INTACT, SCALING_FROZEN, Variant

if TYPE_CHECKING:
    from ln_probe.report import Report

__all__ = ["Figure", "forest", "keys_over_depth", "loss_changes", "loss_over_training", "norms_over_depth"]

# Okabe and Ito's colours, which are safe for colour-blind readers; a variant has the same colour in every picture.
# On a page they are CSS variables, with lighter shades on a dark background.
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
GRID, SOFT = "#b0b0b0", "#56606b"
PALENESS = 0.45  # of what is not significant, here and in the map of heads
INK = "#000000"
COLORS = {"intact": BLUE, "no_scaling": ORANGE, "no_projection": GREEN, "both_removed": PINK}
MARKERS = {"intact": "o", "no_scaling": "s", "no_projection": "^", "both_removed": "D"}
_VARIABLES = {
    BLUE: "--c-blue",
    ORANGE: "--c-orange",
    GREEN: "--c-green",
    PINK: "--c-pink",
    GRID: "--c-grid",
    SOFT: "--soft",
}
POINTS, SMALLEST, LEGIBLE = 72, 9, 11  # SVG units per inch, smallest text in units, its least size in pixels
DPI = 192  # of a notebook's picture, shown at half that resolution: sharp on high-density screens
WIDTH = 4.0  # inches: with its smallest text 11 pixels high a figure fits a phone of 390 pixels
LABEL = 24  # characters of a name on an axis
TICKS = 24  # labels on an axis
ROWS = 40  # models drawn in a forest plot; the table has all of them
# The groups of norms of the primary contrasts, the largest first.
SITES = {"all": "every norm", "attention": "attention's norms"}


class Figure(matplotlib.figure.Figure):
    """A matplotlib figure that a notebook shows without `%matplotlib inline`.

    It is made without pyplot, which would keep every figure alive. `tips` are texts that a page shows on pointing
    at an artist, by the artist's gid.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tips: dict[str, str] = {}

    def point_out(self, artist: mpl.artist.Artist, text: str) -> None:
        """Let a page show this text when one points at the artist."""
        gid = f"tip{len(self.tips)}"
        artist.set_gid(gid)
        self.tips[gid] = text

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the picture and its size in a notebook, in pixels."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            self.savefig(buffer, format="png", dpi=DPI)
        width, height = (round(inches * DPI / 2) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}


# ---------------------------------------------------------- changes of the loss


@dataclass(frozen=True)
class Contrast:
    """The change of the loss by one edit of a group of norms, against the intact model.

    `optimal` is the change with loss-optimal constants; each change is (value, low, high), NaN where unknown. `loss` is
    the intact model's.
    """

    variant: Variant
    sites: str
    change: tuple[float, float, float]
    optimal: tuple[float, float, float]
    loss: float
    p: float
    significant: bool
    strata: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The edit and its norms."""
        return f"{self.variant.label.capitalize()}, {SITES[self.sites]}"

    @property
    def text(self) -> str:
        """The change, or that there is none by construction, or that it was not tested."""
        if self.change == (0.0, 0.0, 0.0):
            return "unchanged"
        return with_interval(*self.change)[0] + ("" if np.isfinite(self.p) else ", not tested")


def contrasts(report: Report) -> list[Contrast]:
    """Return the primary contrasts that have a loss: scaling frozen, projection removed; every norm, attention's."""
    rows = {(row["sites"], row["variant"]): row for row in report.tables["causal"].to_dict("records")}
    measured = []
    for variant, sites in product([v for v in EDITS if v.primary], SITES):
        row = rows.get((sites, variant.name))
        if row is None or not np.isfinite(row["delta_loss"]):
            continue
        change, optimal = (
            (float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"]))
            for name in ("delta_loss", "delta_loss_optimal")
        )
        strata = strata_means(report.tables["causal_prompts"], sites, variant)
        about = base_loss(row), float(row["p"]), is_significant(row)
        measured.append(Contrast(variant, sites, change, optimal, *about, strata))
    return measured


def interval(change: Sequence[float], unit: str = "") -> str:
    """Return a change with its 95 % CI, as text."""
    value, ends = with_interval(*change)
    return f"{value} {unit}".strip() + (f" (95 % CI {ends})" if ends else "")


def loss_changes(report: Report) -> Figure:
    """Change of the loss against the intact model, by the term that is removed and from which norms.

    Scaling frozen: constants replace sigma. Projection removed: the mean is not subtracted. Lines are 95 % confidence
    intervals, ticks the means of the single books (where there are several).
    """
    rows = contrasts(report)
    figure, axes = _rows([(row.label, row.text, row.significant) for row in rows])
    unit = unit_of(report.provenance)
    for place, row in enumerate(rows):
        _mark(figure, axes, place, row, f"{row.label}: {interval(row.change, unit)}")
        if np.isfinite(row.optimal[0]):
            about = f"{row.label}, loss-optimal constants: {interval(row.optimal, unit)}"
            _mark(figure, axes, place + 0.16, row, about, optimal=True)
        for name, value in row.strata.items():
            (tick,) = axes.plot(value, place + 0.3, "|", color=SOFT)
            figure.point_out(tick, f"{row.label}, {name} alone: {value:+.3g} {unit}")
    optimal = any(np.isfinite(row.optimal[0]) for row in rows)
    keys = [("o", SOFT, "mean constants" if optimal else "change, 95 % CI")]
    keys += [("o", "none", "loss-optimal constants")] * optimal
    keys += [("|", SOFT, "one book")] * any(row.strata for row in rows)
    _finish_rows(figure, axes, unit, keys, rows)
    return figure


def forest(names: Sequence[str], reports: Sequence[Report]) -> Figure:
    """Change of the loss at every norm against the intact model, by model, with 95 % confidence intervals.

    The number is the change with scaling frozen.
    """
    by_model = [[c for c in contrasts(report) if c.sites == "all"] for report in reports[:ROWS]]
    headlines = [next((c for c in rows if c.variant is SCALING_FROZEN), None) for rows in by_model]
    figure, axes = _rows(
        [
            (axis_text(name), c.text if c else "not measured", c is not None and c.significant)
            for name, c in zip(names, headlines, strict=False)
        ]
    )
    units = sorted({unit_of(report.provenance) for report in reports[:ROWS]})
    for place, (name, rows) in enumerate(zip(names, by_model, strict=False)):
        for row in rows:
            about = f"{name}, {row.variant.label}: {interval(row.change)}"
            _mark(figure, axes, place + (0.0 if row.variant is SCALING_FROZEN else 0.2), row, about)
    drawn = {row.variant: None for rows in by_model for row in rows}
    keys = [("o", COLORS[variant.name], variant.label) for variant in drawn]
    _finish_rows(figure, axes, " or ".join(units), keys, [row for rows in by_model for row in rows])
    return figure


def loss_over_training(runs: Mapping[str, Sequence[tuple[int, Report]]]) -> Figure:
    """Change of the loss at every norm over training, with 95 % confidence intervals."""
    edits = [v for v in EDITS if v.primary]
    figure = Figure(figsize=(WIDTH, 0.4 + 1.7 * len(edits)), layout="constrained")
    for axes, variant in zip(figure.subplots(len(edits), 1, sharex=True, squeeze=False)[:, 0], edits, strict=True):
        _dress(axes, variant.label)
        axes.axhline(0, color=GRID)
        for name, reports in runs.items():
            points = [
                (step, *c.change)
                for step, report in reports
                for c in contrasts(report)
                if c.sites == "all" and c.variant is variant
            ]
            if points:
                steps, value, low, high = np.array(points).T
                axes.fill_between(steps, low, high, color=COLORS[variant.name], alpha=0.15, lw=0)
                axes.plot(steps, value, "-", color=COLORS[variant.name])
                for point in points:
                    (dot,) = axes.plot(*point[:2], "o", color=COLORS[variant.name])
                    figure.point_out(dot, f"{name}, step {point[0]}: {interval(point[1:])}")
        later = [step for reports in runs.values() for step, _ in reports if step > 0]
        axes.set_xscale("symlog", linthresh=max(1.0, min(later, default=1.0)))
    axes.set_xlabel("training step", fontsize=SMALLEST)
    units = sorted({unit_of(report.provenance) for reports in runs.values() for _, report in reports})
    figure.supylabel(f"change of the loss, {' or '.join(units)}", fontsize=SMALLEST)
    return figure


def _rows(texts: Sequence[tuple[str, str, bool]]) -> tuple[Figure, mpl.axes.Axes]:
    """Return axes with a line of text over each row: a label, a value, and whether the value is significant."""
    figure = Figure(figsize=(WIDTH, 0.85 + 0.44 * max(1, len(texts))), layout="constrained")
    axes = figure.subplots()
    across = axes.get_yaxis_transform()
    for place, (label, value, significant) in enumerate(texts):
        axes.text(0, place - 0.2, label, transform=across, fontsize=SMALLEST, va="bottom")
        weight = "bold" if significant else "normal"
        axes.text(1, place - 0.2, value, transform=across, fontsize=SMALLEST, va="bottom", ha="right", weight=weight)
    axes.set_ylim(max(1, len(texts)) - 0.5, -0.75)
    axes.set_yticks([])
    rows = np.arange(max(1, len(texts)))
    axes.vlines(0 * rows, rows - 0.14, rows + 0.4, color=SOFT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


def _mark(
    figure: Figure, axes: mpl.axes.Axes, place: float, row: Contrast, about: str, *, optimal: bool = False
) -> None:
    value, low, high = row.optimal if optimal else row.change
    style: dict[str, Any] = {"color": COLORS[row.variant.name], "alpha": 1.0 if row.significant else PALENESS}
    if np.isfinite([low, high]).all():
        figure.point_out(axes.hlines(place, low, high, **style), about)
    face = "none" if optimal else COLORS[row.variant.name]
    (dot,) = axes.plot(value, place, "o", markerfacecolor=face, **style)
    figure.point_out(dot, about)


def _finish_rows(
    figure: Figure, axes: mpl.axes.Axes, unit: str, keys: Sequence[tuple[str, str, str]], rows: Sequence[Contrast]
) -> None:
    """Scale and label the axis of changes, and explain the marks, pale ones by the rows."""
    axes.set_xlabel(f"change of the loss, {unit}", fontsize=SMALLEST)
    axes.tick_params(labelsize=SMALLEST)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _place: "0" if abs(value) < 1e-12 else f"{value:+.3g}")
    pale = sorted({"not significant" if np.isfinite(row.p) else "not tested" for row in rows if not row.significant})
    handles = []
    for marker, face, label in [*keys, *[("o", SOFT, f"pale: {' or '.join(pale)}")] * bool(pale)]:
        color, alpha = SOFT if face == "none" else face, PALENESS if label.startswith("pale:") else 1.0
        style: dict[str, Any] = {"marker": marker, "color": color, "markerfacecolor": face, "alpha": alpha}
        handles.append(mpl.lines.Line2D([], [], ls="", label=label, **style))
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=SMALLEST, loc="outside lower left", ncols=2)


# --------------------------------------------------------------- over the depth


def norms_over_depth(report: Report) -> Figure:
    """What each norm removes and divides by, in the order of the forward pass.

    Above: the share of squared length along the all-ones direction, which projection removes. Below: sigma.
    """
    rows = report.tables["layernorms"]
    rows = rows[~rows["reads"].isin(["query", "key"])].reset_index(drop=True)
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    place = np.arange(len(rows))
    for axes, column, label, color in zip(
        figure.subplots(2, 1, sharex=True),
        ("projected_share", "sigma_mean"),
        ("Share of squared length that projection removes", "Sigma, mean over tokens"),
        (GREEN, ORANGE),
        strict=True,
    ):
        _dress(axes, label)
        axes.set_yscale("log")
        values = rows[column].clip(lower=1e-12)
        axes.plot(place, values, "-", color=color)
        for at, row in enumerate(rows.to_dict("records")):
            (dot,) = axes.plot(at, values.iloc[at], "o", color=color)
            angle, share = f"{row['angle_to_ones_deg']:.1f}° to all-ones", percent(float(row["projected_share"]))
            sigma = f"sigma {row['sigma_mean']:.3g} ± {percent(row['sigma_cv'])}, length {row['input_norm']:.3g}"
            figure.point_out(dot, f"{row['site']}, read by {row['reads']}: projects {share} ({angle}); {sigma}")
        _few_log_ticks(axes, share=column == "projected_share")
    names = [axis_text(str(site).removeprefix("blocks.")) for site in rows["site"]]
    step = -(-len(names) // TICKS) or 1
    axes.set_xticks(place[::step], names[::step], rotation=60, ha="right", rotation_mode="anchor", fontsize=SMALLEST)
    return figure


def keys_over_depth(report: Report) -> Figure:
    """Keys by layer: the median head, and a line from the lowest to the highest head.

    The share of keys that no query can select, and the most attention that a head's median key can receive at the last
    position, from queries of the size that occur. Single keys can receive more, from earlier queries above all.
    """
    heads, about = report.tables["heads"], dict(report.provenance.get("selectability", {}))
    if keys := about.get("keys_per_prompt"):
        about["uniform"] = 1 / keys
    rows = [
        ("unselectable", "Keys that no query can select", "random_unselectable", "random keys", ":"),
        ("attainable_median", "Most attention that the median key can receive", "uniform", "uniform attention", "--"),
    ]
    rows = [row for row in rows if heads[row[0]].notna().any()] or rows[:1]
    figure = Figure(figsize=(WIDTH, 0.7 + 1.6 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (column, title, source, name, dashes) in zip(panels, rows, strict=True):
        _dress(axes, title)
        for shift, variant in ((-0.1, INTACT), (0.1, SCALING_FROZEN)):
            values = heads[(heads["variant"] == variant.name) & heads[column].notna()].groupby("layer")[column]
            if not len(values):
                continue
            style: dict[str, Any] = {"color": COLORS[variant.name]}
            for layer, low, middle, high in values.agg(["min", "median", "max"]).itertuples():
                axes.vlines(layer + shift, low, high, **style)
                (dot,) = axes.plot(layer + shift, middle, MARKERS[variant.name], **style)
                ends = f"median head {percent(middle)}, heads {percent(low)} to {percent(high)}"
                figure.point_out(dot, f"layer {layer}, {variant.label}: {ends}")
            axes.plot([], [], MARKERS[variant.name], label=variant.label, **style)
        baseline = about.get(source)
        if baseline is not None:
            line = axes.axhline(baseline, color=INK, ls=dashes, label=name)
            figure.point_out(line, f"{name}: {percent(baseline)}")
        axes.set_ylim(0, max(0.01, 1.05 * axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(lambda value, _place: f"{100 * value:.3g} %")
    entries = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries, frameon=False, fontsize=SMALLEST, loc="outside lower left", ncols=2)
    layers = sorted({int(layer) for layer in heads["layer"]})
    panels[-1].set_xlim(min(layers, default=0) - 0.5, max(layers, default=0) + 0.5)
    panels[-1].set_xticks(layers[:: -(-len(layers) // TICKS) or 1])
    panels[-1].set_xlabel("layer", fontsize=SMALLEST, loc="right")
    return figure


def _few_log_ticks(axes: mpl.axes.Axes, *, share: bool) -> None:
    """Label a logarithmic axis with plain numbers, several of them even within one decade."""
    low, high = axes.get_ylim()
    narrow = high < 8 * low
    by_decade = LogLocator() if high > 1000 * low else LogLocator(subs=(1.0, 2.0, 5.0))  # subs over 4: no tick
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]) if narrow else by_decade)
    factor, unit = (100, " %") if share else (1, "")
    axes.yaxis.set_major_formatter(lambda value, _place: f"{factor * value:.3g}{unit}")
    axes.yaxis.set_minor_locator(NullLocator())


def _dress(axes: mpl.axes.Axes, title: str) -> None:
    axes.set_title(title, fontsize=SMALLEST, loc="left")
    axes.tick_params(labelsize=SMALLEST)
    axes.grid(axis="y", color=GRID, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)


def axis_text(text: str) -> str:
    """Shorten a name in the middle and escape dollar signs, which would begin a formula."""
    cut = text if len(text) <= LABEL else f"{text[: LABEL // 2 - 1]}…{text[-LABEL // 2 :]}"
    return disarmed(cut).replace("\n", " ").replace("$", r"\$")


# -------------------------------------------------------------------------- SVG


def described(draw: Callable[..., Any]) -> Iterator[str]:
    """Yield the first line of a drawing function's docstring, and the rest: a picture's title and its caption."""
    head, _, rest = textwrap.dedent(draw.__doc__ or "").strip().partition("\n")
    yield head.strip().removesuffix(".")
    yield " ".join(rest.split())


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
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d{2})\d+", r"\1", m.group()), text)
    tips = getattr(figure, "tips", {})
    text = re.sub(
        r'<g id="(tip\d+)">',
        lambda m: f'<g class="tip"><title>{escape(disarmed(tips.get(m[1], "")))}</title>',
        text,
    )
    text = re.sub(r'\bid="(?=[A-Za-z])|url\(#(?=[A-Za-z])|href="#(?=[A-Za-z])', lambda m: f"{m.group(0)}{name}-", text)
    text = re.sub(rf"(?<=: ){INK}", "currentColor", text)
    for colour, variable in _VARIABLES.items():
        text = re.sub(rf"(?<=: ){colour}", f"var({variable}, {colour})", text)
    # The width at which the smallest text is 11 pixels high.
    width = round(figure.get_figwidth() * POINTS * LEGIBLE / SMALLEST)
    start = f'<svg role="img" aria-labelledby="{name}-title" style="--legible:{width}px" '
    head, _, rest = text.partition(">")
    return head.replace("<svg ", start, 1) + f'><title id="{name}-title">{escape(disarmed(title))}</title>' + rest
