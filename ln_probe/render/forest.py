"""Several models' losses without a term: a forest plot, the same as differences to one of them, and over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.probes.causal import LEAST_CHANGE, base_loss
from ln_probe.render.effects import is_wide, threshold
from ln_probe.render.figures import COLOURS, SIZE, axis_text
from ln_probe.render.svg import GRID

if TYPE_CHECKING:
    from ln_probe.reporting.contents import Contents

ROWS = 40  # models drawn: the table has all
_TERMS = {"no_scaling": "scaling frozen", "no_projection": "projection dropped"}
_PLACES = {"all": ("at every norm", "o"), "attention": ("at attention alone", "s")}


def losses(names: Sequence[str], reports: Sequence[Contents]) -> pd.DataFrame:
    """Changes of the loss as a forest plot shows them: `model`, `place` (its number), `sites`, `variant`, `value`,
    `low`, `high`, `loss` (the intact model's). Terms that are not there to take away have no row."""
    rows = []
    for place, (name, report) in enumerate(zip(names, reports, strict=True)):
        causal = report.causal
        wanted = causal["variant"].isin(_TERMS) & causal["sites"].isin(_PLACES) & causal["delta_loss"].notna()
        for row in causal[wanted & (causal["no_op"].fillna("") == "")].to_dict("records"):
            value, low, high = (float(row[f"delta_loss{end}"]) for end in ("", "_low", "_high"))
            rows.append((name, place, row["sites"], row["variant"], value, low, high, base_loss(row)))
    return pd.DataFrame(rows, columns=["model", "place", "sites", "variant", "value", "low", "high", "loss"])


def differences(names: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """The same rows of a table of paired differences (`ln_probe.analyses.probes.columns.PAIRED`)."""
    rows = table[table["variant"].isin(_TERMS) & table["sites"].isin(_PLACES)]
    made = rows.rename(columns={"difference": "value"}).assign(place=[names.index(n) for n in rows["model"]])
    return made[["model", "place", "sites", "variant", "value", "low", "high"]].reset_index(drop=True)


def forest(
    names: Sequence[str], rows: pd.DataFrame, label: str = "change of the loss, nats per token", where: str = ""
) -> Figure:
    """A line per model, a panel per term; filled marks every norm, hollow ones those that attention reads.

    Args:
        names: models, from the top; the first ROWS are drawn.
        rows: what `losses` or `differences` gave.
        label: of the axis.
        where: behind "at every norm", in the legend.
    """
    shown = list(names)[:ROWS]
    rows = rows[rows["place"] < len(shown)]
    terms = [t for t in _TERMS if (rows["variant"] == t).any()]
    figure = Figure(figsize=(1.5 * SIZE[0], 1.3 + 0.36 * len(shown)), layout="constrained")
    panels = figure.subplots(1, max(1, len(terms)), sharey=True, squeeze=False)[0]
    for axes, term in zip(panels, terms, strict=False):
        mine = rows[rows["variant"] == term]
        for number, (sites, (_, mark)) in enumerate(_PLACES.items()):
            some = mine[mine["sites"] == sites]
            place = some["place"].to_numpy(float) + 0.3 * number - 0.15
            axes.hlines(place, some["low"], some["high"], color=COLOURS[term], lw=1.4)
            face = "none" if number else COLOURS[term]
            axes.plot(some["value"], place, mark, ms=5, color=COLOURS[term], markerfacecolor=face)
        axes.axvline(0, color=GRID, lw=1)
        axes.axvspan(-LEAST_CHANGE, LEAST_CHANGE, color=GRID, alpha=0.25, lw=0)
        axes.set_title(_TERMS[term], fontsize=10)
        wide = mine.assign(delta_loss=mine["value"])
        if is_wide(wide):
            axes.set_xscale("symlog", linthresh=threshold(wide))
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", color=GRID, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(shown)), [axis_text(n) for n in shown], fontsize=9)
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    figure.supxlabel(label, fontsize=9)
    _legend(figure, where)
    return figure


def over_steps(rows: pd.DataFrame, steps: Sequence[int | None], models: Sequence[str], where: str = "") -> Figure:
    """The same changes over training, a panel per term, with intervals.

    Args:
        rows: what `losses` gave.
        steps, models: training step and name of each report, in the order that `rows["place"]` counts.
        where: as for `forest`.
    """
    steps_of = np.array([np.nan if s is None else s for s in steps], float)
    rows = rows.assign(step=steps_of[rows["place"].to_numpy(int)], run=[models[p] for p in rows["place"]])
    rows = rows[rows["step"].notna()].sort_values("step", kind="stable")
    terms = [t for t in _TERMS if (rows["variant"] == t).any()]
    figure = Figure(figsize=(1.5 * SIZE[0], 0.8 * SIZE[1] + 0.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(terms)), squeeze=False)[0]
    for axes, term in zip(panels, terms, strict=False):
        mine = rows[rows["variant"] == term]
        for (_, sites), line in mine.groupby(["run", "sites"], sort=False):
            hollow = sites == "attention"
            axes.fill_between(line["step"], line["low"], line["high"], color=COLOURS[term], alpha=0.15, lw=0)
            face = "none" if hollow else COLOURS[term]
            style = "s--" if hollow else "o-"
            axes.plot(line["step"], line["value"], style, ms=4, color=COLOURS[term], markerfacecolor=face)
        axes.axhline(0, color=GRID, lw=1)
        if mine["step"].max() > 0:
            axes.set_xscale("symlog", linthresh=max(1.0, float(mine.loc[mine["step"] > 0, "step"].min())))
        axes.set_title(_TERMS[term], fontsize=10)
        axes.set_xlabel("training step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color=GRID, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("change of the loss, nats per token", fontsize=9)
    _legend(figure, where)
    return figure


def _legend(figure: Figure, where: str) -> None:
    line = mpl.lines.Line2D
    handles = [
        line(
            [],
            [],
            ls="",
            marker=mark,
            ms=5,
            color="black",
            markerfacecolor="none" if n else "black",
            label=said + where,
        )
        for n, (said, mark) in enumerate(_PLACES.values())
    ]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper left", ncols=2)
