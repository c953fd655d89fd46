"""Pictures of the compiler experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def operations_map(operations: pd.DataFrame, means: Sequence[str]) -> Figure:
    """Share of right answers, operations against means; empty where a count has no place."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 0.36 * len(operations) + 1.2), layout="constrained")
    ax = figure.subplots()
    values = operations[list(means)].to_numpy(float)
    ax.imshow(values, vmin=0.5, vmax=1, cmap="viridis", aspect="auto")
    for row, column in zip(*(values == values).nonzero(), strict=True):
        value = values[row, column]
        shown = "exact" if value == 1 else f"{min(value, 0.999):.1%}"
        ax.text(column, row, shown, ha="center", va="center", fontsize=8, color="k" if value > 0.8 else "w")
    ax.set(
        xticks=range(len(means)),
        xticklabels=means,
        yticks=range(len(operations)),
        yticklabels=operations["operation"],
        title="Answers right on random words of 200 letters",
    )
    ax.tick_params(labelsize=8)
    return figure


def length_curves(lengths: pd.DataFrame) -> Figure:
    """Share of right answers over length, a line per means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    ax = figure.subplots()
    for number, (name, line) in enumerate(lengths.groupby("means", sort=False)):
        ax.plot(line["letters"], line["value"], marker="osv^Dx"[number % 6], markersize=4, alpha=0.8, label=str(name))
    ax.set(xscale="log", xlabel="letters", ylabel="answers right", title="A majority of majorities, compiled")
    ax.legend(fontsize=7)
    return figure
