"""Pictures of the approximation experiment: errors over heads, over heads and hidden units, and of each norm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.norms import NORM_KINDS


def draw(summary: pd.DataFrame, values: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every picture by name, of what there is: from the summary and the errors of every seed."""
    errors = summary[summary["measure"] == "mse"]
    plain = errors[(errors["norm"] == "none") & ~errors["dot_product"].astype(bool)]
    if len(memory := plain[plain["target"].isin(["4a", "4b"])]):
        free = memory[memory["width"] == 0]  # as published, as soon as there are any
        yield "heads", _against_heads(free if len(free) else memory)
    if len(table := plain[plain["target"].isin(["1b", "2b"]) & (plain["kernel"] == "table")]) > 2:
        yield "table", _heads_by_width(table)
    seeds = values[values["measure"] == "mse"]
    if len(normed := seeds[seeds["norm"] != "none"]):
        same = ["target", "kernel", "heads", "width", "dot_product", "lr"]
        beside = seeds[seeds["norm"] == "none"].merge(normed[same].drop_duplicates(), on=same)
        yield "norms", _norm_dots(pd.concat([beside, normed]))


def _against_heads(part: pd.DataFrame) -> Figure:
    """Trained error over heads, a line per learning rate, with the optimum and the published figure."""
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    panels = [(t, k) for t in ("4a", "4b") for k in ("log", "linear")]
    for (target, kernel), ax in zip(panels, figure.subplots(2, 2, sharex=True).flat, strict=True):
        cell = part[(part["target"] == target) & (part["kernel"] == kernel)]
        for number, lr in enumerate(sorted(set(part["lr"]), reverse=True)):
            line = cell[cell["lr"] == lr].sort_values("heads")
            ax.plot(line["heads"], line["mean"], f"C{number}o-", label=f"trained, lr {lr:g}")
        if cell.empty:
            ax.set_axis_off()
            continue
        best = cell.drop_duplicates("heads")
        ax.plot(best["heads"], best["optimum"].clip(1e-16), "k--", marker="_", label="least squares")
        ax.plot(best["heads"], best["published"], "r*", label="published")
        ax.set(
            title=f"{target}, {kernel} positions", xscale="log", yscale="log", xlabel="heads", ylabel="squared error"
        )
        ax.set_xticks(list(best["heads"]), labels=list(best["heads"]))
        ax.minorticks_off()
    figure.axes[0].legend(fontsize=7)
    return figure


def _heads_by_width(part: pd.DataFrame) -> Figure:
    """Trained error of 1b and 2b with a table of positions, heads against hidden units."""
    from matplotlib.colors import LogNorm

    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    for target, ax in zip(("1b", "2b"), figure.subplots(1, 2), strict=True):
        square = part[part["target"] == target].pivot(index="heads", columns="width", values="mean")
        if square.empty:
            ax.set_axis_off()
            continue
        image = ax.imshow(square.to_numpy(float), norm=LogNorm(1e-10, 1), cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(square.to_numpy(float)):
            if np.isfinite(value):
                ax.text(column, row, f"{value:.0e}", ha="center", va="center", color="w" if value < 1e-3 else "k")
        ax.set(
            title=f"{target}, table of positions",
            xlabel="m",
            ylabel="heads",
            xticks=range(square.shape[1]),
            xticklabels=square.columns,
            yticks=range(square.shape[0]),
            yticklabels=square.index,
        )
    figure.colorbar(image, ax=figure.axes, label="squared error")
    return figure


def _norm_dots(part: pd.DataFrame) -> Figure:
    """Trained error of every seed with each norm and without, a panel per target; a bar at the geometric mean."""
    panels = list(part.groupby(["target", "kernel", "heads"], sort=False))
    figure = Figure(figsize=(2.4 * len(panels) + 1.6, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True).flat
    order = part.drop_duplicates(["norm", "norm_order"])
    rows = [(r["norm"], r["norm_order"]) for r in order.to_dict("records")]
    for ((target, kernel, heads), cell), ax in zip(panels, axes, strict=True):
        for place, (norm, norm_order) in enumerate(rows):
            dots = cell[(cell["norm"] == norm) & (cell["norm_order"] == norm_order)]["value"].astype(float)
            if len(dots):
                ax.plot(dots, [place] * len(dots), f"C{NORM_KINDS.index(norm)}o", markersize=4)
                ax.plot(np.exp(np.log(dots).mean()), place, "k|", markersize=12)
        ax.set(title=f"{target}, {kernel}, H = {heads}", xscale="log", xlabel="squared error")
        ax.minorticks_off()
    ax.set_yticks(range(len(rows)), labels=[n if n == "none" else f"{n}, {o}" for n, o in rows])
    ax.invert_yaxis()
    return figure
