"""Draw the figures of docs/checkpoints.md from the committed tables.

python examples/checkpoints/pictures.py    # writes examples/{keys_at_length,patching}.png
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

HERE = Path(__file__).parent
TABLES = HERE / "tables"
DPI = 110
COLORS = {2: "#0072b2", 8: "#d55e00", 16: "#009e73", 32: "#cc79a7", 64: "#555555"}
BLUE, ORANGE, GRID = "#2e6fb7", "#d9822b", "#dddddd"


def keys_at_length() -> Figure:
    """Draw the share of unselectable keys over their number: models as points, normal keys as lines."""
    table = pd.read_csv(TABLES / "keys-at-length-summary.csv")
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for d, color in COLORS.items():
        normal = table[(table["model"] == "random") & (table["d_head"] == d)].sort_values("n")
        axes.plot(normal["n"], 100 * normal["share"], color=color, lw=1.5, label=f"normal keys, {d} dimensions")
    marks = dict(zip([m for m in table["model"].unique() if m != "random"], "os^DvP*X<>hd", strict=False))
    for model, mark in marks.items():
        rows = table[(table["model"] == model) & (table["variant"] == "intact")]
        colors = [COLORS[d] for d in rows["d_head"]]
        axes.scatter(rows["n"], 100 * rows["share"], marker=mark, c=colors, s=34, edgecolors="white", lw=0.5, zorder=3)
        d = rows["d_head"].iloc[0]
        axes.scatter([], [], marker=mark, color=COLORS[d], s=34, label=f"{model} (heads of {d})")
    axes.set_xscale("log", base=2)
    ticks = [16, 32, 64, 128, 256, 512, 1024]
    axes.set_xticks(ticks, labels=[str(n) for n in ticks])
    axes.set(xlabel="keys in the context", ylabel="keys that no query can select, %", ylim=(-3, 103))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def patching() -> Figure:
    """Draw the rank correlation with exact patching of every pair, standard gradients and linearized norms."""
    names = ("capp-gpt", "lm-layernorm", "mgm")
    tables = {name: pd.read_csv(TABLES / f"patching-{name}.csv") for name in names}
    kinds = ("heads", "positions")
    figure = Figure(figsize=(2.2 * len(tables) + 0.6, 2.8), layout="constrained")
    panels = figure.subplots(1, len(tables), sharey=True)
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        for place, kind in enumerate(kinds):
            rows = table[table["kind"] == kind]
            for shift, estimate, color in ((-0.18, "standard", BLUE), (0.18, "linearized", ORANGE)):
                values = rows[f"rank_{estimate}"].dropna()
                jitter = np.random.default_rng(0).uniform(-0.09, 0.09, len(values))
                axes.plot(place + shift + jitter, values, ".", ms=3, color=color, alpha=0.5)
                axes.hlines(values.mean(), place + shift - 0.16, place + shift + 0.16, color=color, lw=2.5)
        axes.axhline(0, color=GRID, lw=1, zorder=0)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(kinds)), labels=kinds)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("rank correlation with\nexact patching, per pair")
    for label, color in (("gradient through the norms", BLUE), ("norms linearized", ORANGE)):
        panels[0].plot([], [], color=color, lw=2.5, label=label)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    for draw in (keys_at_length, patching):
        draw().savefig(HERE.parent / f"{draw.__name__}.png", dpi=DPI)
