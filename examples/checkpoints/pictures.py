"""Draw the figures of docs/checkpoints.md from the committed tables.

python examples/checkpoints/pictures.py    # writes examples/{keys_at_length,without_scaling}.png
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

HERE = Path(__file__).parent
TABLES = HERE / "tables"
REGISTERED = HERE.parents[1] / "analyses" / "lab" / "published" / "registered"
PUBLISHED = 0.05  # 7.38 and 7.33, read off figure 4b of Brody, Alon & Yahav 2023
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


def without_scaling() -> Figure:
    """Draw held-out loss without scaling minus with it, of every registered seed of two language models."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    losses = pd.read_csv(REGISTERED / "curves.csv").pivot(index="step", columns=["cell", "seed"], values="value")
    change = losses["projection, divisor 1"] - losses["layernorm"]
    for seed, color in zip(change, COLORS.values(), strict=False):
        left.plot(change.index, change[seed], color=color, lw=1.6, label=f"seed {seed}")
    left.plot(change.index[-1], PUBLISHED, "kX", ms=8, ls="", label="published, one run")
    left.set(title="published shape", xlabel="step", ylabel="without minus with, nats")
    contrasts, values = (pd.read_csv(REGISTERED / f"{name}.csv").query("item == 3") for name in ("contrasts", "values"))
    seeds, row = (values["value"] - values["reference"]).sort_values(), contrasts.iloc[0]
    right.axvspan(-row["margin"], row["margin"], color=GRID, zorder=0, label="equivalence margin")
    right.plot(seeds, range(1, len(seeds) + 1), "o", color=BLUE, label="a seed")
    right.plot(
        [row["low"], row["estimate"], row["high"]], [0] * 3, "-", color=ORANGE, lw=3, label="95 % CI of the mean"
    )
    right.set(title=f"equal size, {len(seeds)} seeds", xlabel="loss without scaling minus with, nats", yticks=[])
    for axes, line in ((left, left.axhline), (right, right.axvline)):
        line(0, color="black", lw=0.8, zorder=1)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure


if __name__ == "__main__":
    for draw in (keys_at_length, without_scaling):
        draw().savefig(HERE.parent / f"{draw.__name__}.png", dpi=DPI, bbox_inches="tight")
