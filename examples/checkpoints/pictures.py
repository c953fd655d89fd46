"""Draw the figures of docs/checkpoints.md from the committed tables.

python examples/checkpoints/pictures.py    # writes examples/{uniform_direction,patching}.png
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from ln_probe.page.figures import BLUE, GRID, ORANGE, Figure

HERE = Path(__file__).parent
TABLES = HERE / "tables"
DPI = 110
CONTRASTS = {"removed": BLUE, "removed, against random": ORANGE}
LABELS = {"removed": "uniform direction removed", "removed, against random": "… minus a random direction removed"}


def uniform_direction() -> Figure:
    """Changes of loss and entropy without the uniform direction, with CIs and the equivalence margins."""
    table = pd.read_csv(TABLES / "uniform-summary.csv")
    table = table[table["contrast"].isin(CONTRASTS)]
    models = list(dict.fromkeys(table["model"]))
    figure = Figure(figsize=(8.4, 1.0 + 0.36 * len(models)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (outcome, title) in zip(
        panels, (("loss", "Δloss, nats/token"), ("entropy", "Δ normalized entropy")), strict=True
    ):
        rows = table[table["outcome"] == outcome]
        margin = rows["margin"].iloc[0]
        axes.axvspan(-margin, margin, color=GRID, alpha=0.5, zorder=0, label="equivalence margin")
        for shift, (contrast, colour) in zip((-0.13, 0.13), CONTRASTS.items(), strict=True):
            some = rows[rows["contrast"] == contrast].set_index("model").loc[models]
            places = np.arange(len(models)) + shift
            ends = np.abs(some[["low", "high"]].to_numpy().T - some["change"].to_numpy())
            axes.errorbar(some["change"], places, xerr=ends, fmt="o", ms=4, color=colour, label=LABELS[contrast])
        axes.axvline(0, color="black", lw=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel=title, yticks=range(len(models)), yticklabels=models)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    return figure


def patching() -> Figure:
    """Rank correlation with exact patching of every pair, standard gradients and linearized norms."""
    tables = {p.stem.removeprefix("patching-"): pd.read_csv(p) for p in sorted(TABLES.glob("patching-*.csv"))}
    tables.pop("summary", None)
    kinds = ("heads", "positions", "paths")
    figure = Figure(figsize=(2.6 * len(tables) + 0.6, 2.8), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        for place, kind in enumerate(kinds):
            rows = table[table["kind"] == kind]
            for shift, estimate, colour in ((-0.18, "standard", BLUE), (0.18, "linearized", ORANGE)):
                values = rows[f"rank_{estimate}"].dropna()
                jitter = np.random.default_rng(0).uniform(-0.09, 0.09, len(values))
                axes.plot(place + shift + jitter, values, ".", ms=3, color=colour, alpha=0.5)
                axes.hlines(values.mean(), place + shift - 0.16, place + shift + 0.16, color=colour, lw=2.5)
        axes.axhline(0, color=GRID, lw=1, zorder=0)
        axes.set(title=name, xticks=range(len(kinds)), xticklabels=kinds)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("rank correlation with\nexact patching, per pair")
    for label, colour in (("gradient through the norms", BLUE), ("norms linearized", ORANGE)):
        panels[0].plot([], [], color=colour, lw=2.5, label=label)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    return figure


if __name__ == "__main__":
    for draw in (uniform_direction, patching):
        draw().savefig(HERE.parent / f"{draw.__name__}.png", dpi=DPI)
