"""The pictures of a report, each a matplotlib Figure that the user may restyle.

Colours are Okabe & Ito's (safe for the colour-blind); a variant has the same one everywhere.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.variants import VARIANTS
from ln_probe.render.text import disarmed

if TYPE_CHECKING:
    from ln_probe.report import Report

COLOURS = {"intact": "#0072B2", "no_scaling": "#D55E00", "no_projection": "#009E73", "neither": "#CC79A7"}
LABELS = {
    "intact": "intact",
    "no_scaling": "without scaling",
    "no_projection": "without projection",
    "neither": "without both",
}
SIZE = (6.4, 3.4)
LABEL = 24  # characters of a site's name on an axis


def norms_over_depth(report: Report) -> Figure:
    """Mean length of vectors before and after each norm, and their spread before it, over depth."""
    figure, axes = _figure("length", log=True)
    rows = report.layernorms[~report.layernorms["reads"].isin(["query", "key"])].reset_index(drop=True)
    place = np.arange(len(rows))
    mean, cv = (rows[f"norm_before_{m}_tail"].fillna(rows[f"norm_before_{m}"]) for m in ("mean", "cv"))
    low = np.maximum(mean * (1 - cv), mean * 0.05)  # the axis is logarithmic
    axes.fill_between(place, low, mean * (1 + cv), color=COLOURS["intact"], alpha=0.15, label="± one deviation")
    axes.plot(place, mean, "o-", color=COLOURS["intact"], label="before the norm")
    axes.plot(
        place,
        rows["norm_after_mean_tail"].fillna(rows["norm_after_mean"]),
        "s-",
        color=COLOURS["no_scaling"],
        label="after it",
    )
    _sites(axes, rows)
    return figure


def mean_share_over_depth(report: Report) -> Figure:
    """Share of squared length along the ones-vector at each norm: what projection removes."""
    figure, axes = _figure("share along the ones-vector", log=True)
    rows = report.layernorms[~report.layernorms["reads"].isin(["query", "key"])].reset_index(drop=True)
    place = np.arange(len(rows))
    shown = rows["mean_share_tail"].fillna(rows["mean_share"]).clip(lower=1e-12)
    axes.plot(place, shown, "o-", color=COLOURS["no_projection"], label="without position 0")
    axes.plot(place, rows["mean_share"].clip(lower=1e-12), ":", color="0.5", label="all positions")
    _sites(axes, rows)
    return figure


def margins_over_depth(report: Report) -> Figure:
    """Margins of keys per layer and variant: the median head's median key (lines) and hardest twentieth (dashes)."""
    figure, axes = _figure("margin, nats", log=True)
    drawn = False
    for variant, rows in _by_variant(report):
        grouped = rows.groupby("layer")[["margin_median", "margin_p05"]].median()
        if grouped["margin_median"].isna().all():
            continue
        axes.plot(grouped.index, grouped["margin_median"], "o-", color=COLOURS[variant], label=LABELS[variant])
        axes.plot(
            grouped.index,
            grouped["margin_p05"].where(grouped["margin_p05"] > 0),
            "v--",
            color=COLOURS[variant],
            alpha=0.6,
        )
        drawn = drawn or bool((grouped["margin_p05"] > 0).any())
    if drawn:
        axes.plot([], [], "v--", color="0.4", label="hardest twentieth")
    _layers(axes, report)
    return figure


def unselectable_by_head(report: Report) -> Figure:
    """Share of keys that no query can select, layer × head, intact and without scaling."""
    figure = Figure(figsize=SIZE, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
    found = dict(_by_variant(report))
    image = None
    for axes, variant in zip(panels, ("intact", "no_scaling"), strict=True):
        rows = found.get(variant, pd.DataFrame())
        axes.set_title(LABELS[variant], fontsize=10)
        axes.set_xlabel("head")
        if not len(rows):
            continue
        grid = rows.pivot(index="layer", columns="head", values="unselectable_fraction")
        image = axes.pcolormesh(
            grid.columns, grid.index, grid.to_numpy(float), vmin=0, vmax=max(1e-9, _largest(found)), cmap="cividis"
        )
        axes.set_yticks(grid.index[:: max(1, len(grid.index) // 24)])
        axes.set_xticks(grid.columns[:: max(1, len(grid.columns) // 8)])
    panels[0].set_ylabel("layer")
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="share of keys")
    return figure


def uniform_angle_by_layer(report: Report) -> Figure:
    """Angle of each head's queries to the uniform direction, beside that of a random direction."""
    figure, axes = _figure("angle to the ones-vector, degrees")
    rows = dict(_by_variant(report)).get("intact", pd.DataFrame(columns=["layer", "uniform_angle_deg"]))
    axes.plot(rows["layer"], rows["uniform_angle_deg"], "o", color=COLOURS["intact"], alpha=0.6, label="a head")
    axes.axhline(float(report.provenance.get("random_angle_deg", 90)), color="0.5", ls=":", label="random direction")
    axes.set_ylim(0, 92)
    _layers(axes, report)
    return figure


def entropy_by_layer(report: Report) -> Figure:
    """Attention entropy over its maximum, per head and layer, for each variant."""
    figure, axes = _figure("entropy / log(visible keys)")
    for place, (variant, rows) in enumerate(_by_variant(report)):
        axes.plot(
            rows["layer"] + 0.12 * (place - 1.5),
            rows["entropy_ratio"],
            "o",
            ms=4,
            alpha=0.6,
            color=COLOURS[variant],
            label=LABELS[variant],
        )
    axes.set_ylim(0, 1.02)
    _layers(axes, report)
    return figure


def svg(figure: Figure, name: str) -> str:
    """The figure as an inline SVG element whose ids are its own; the same figure gives the same text."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'\bid="(?=[a-z])|url\(#(?=[a-z])|href="#(?=[a-z])', lambda m: m.group(0) + f"{name}-", text)


def _figure(ylabel: str, *, log: bool = False) -> tuple[Figure, mpl.axes.Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_ylabel(ylabel)
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _sites(axes: mpl.axes.Axes, rows: pd.DataFrame) -> None:
    shown = [disarmed(str(s).replace("blocks.", "")[:LABEL]) for s in rows["site"]]
    names = [s.replace("$", r"\$") for s in shown]  # a dollar sign would begin a formula
    step = max(1, len(names) // 24)
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=60, ha="right", fontsize=7)
    axes.legend(frameon=False, fontsize=8)


def _layers(axes: mpl.axes.Axes, report: Report) -> None:
    axes.set_xlabel("layer")
    layers = sorted({int(v) for v in report.heads["layer"]})
    axes.set_xticks(layers[:: max(1, len(layers) // 24)])
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _by_variant(report: Report) -> list[tuple[str, pd.DataFrame]]:
    heads = report.heads[report.heads["space"] == "head"]
    return [(v, heads[heads["variant"] == v]) for v in VARIANTS if (heads["variant"] == v).any()]


def _largest(found: dict[str, pd.DataFrame]) -> float:
    return max((float(r["unselectable_fraction"].max()) for r in found.values() if len(r)), default=0.0)
