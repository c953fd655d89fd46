"""Pictures of the cell traces: the counting dimension over the letters, and the n that each network reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.counting.cell_traces import PHASES

NETWORK = ("task", "model", "norm", "norm_site", "phase")
COLUMNS = 4  # panels side by side
TRAINED, BEYOND = "C0", "C1"


def draw(networks: pd.DataFrame, traces: pd.DataFrame, readings: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every picture by name, of what there is."""
    if len(networks):
        yield "traces", _traces(networks, traces)
        yield "readings", _readings(networks, readings)


def _panels(networks: pd.DataFrame, height: float) -> tuple[Figure, list[tuple[tuple[Any, ...], pd.DataFrame, Any]]]:
    """A panel per network and phase, with its title."""
    groups: list[tuple[Any, pd.DataFrame]] = list(networks.groupby(list(NETWORK), sort=False))
    columns = min(COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(3.3 * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    for ((task, model, norm, site, phase), _), ax in zip(groups, axes, strict=False):
        name = f"{task} ({phase}): {model}" + ("" if norm == "none" else f"\n{norm} on its {site}")
        ax.set_title(name, fontsize=8)
        ax.tick_params(labelsize=7)
    return figure, [(key, part, ax) for (key, part), ax in zip(groups, axes, strict=False)]


def _of(table: pd.DataFrame, key: tuple[Any, ...]) -> pd.DataFrame:
    return table[(table[list(NETWORK)] == list(key)).all(axis=1)]


def _traces(networks: pd.DataFrame, traces: pd.DataFrame) -> Figure:
    """The dimension that counts, or comes nearest, over the letters of the longest trained word and of one beyond."""
    figure, panels = _panels(networks, 2.3)
    for key, part, ax in panels:
        mine = _of(traces, key)
        for style, row in zip(("-", "--", ":", "-."), part.to_dict("records"), strict=False):
            one = mine[mine["seed"] == row["seed"]]
            for n, color in ((row["tested_n"], BEYOND), (row["trained_n"], TRAINED)):
                word = one[one["n"] == n]
                ax.plot(word["letter"], word["value"], color=color, linestyle=style, linewidth=1)
        word_phases = PHASES[: 2 if key[0] == "anbn" else 3]
        for number in range(1, len(word_phases)):
            for n, color in ((row["trained_n"], TRAINED), (row["tested_n"], BEYOND)):
                ax.axvline(number * n, color=color, linewidth=0.5, linestyle=":")
        counts = [f"{r['dimension']}{'' if r['counts'] else ' (no counter)'}" for r in part.to_dict("records")]
        ax.set_ylabel(f"dimension {', '.join(counts)}", fontsize=6)
    figure.supxlabel(
        "letters of the word; blue: the longest trained n, orange: three times as long; dotted: where the letter "
        "changes; a line style per seed",
        fontsize=8,
    )
    return figure


def _readings(networks: pd.DataFrame, readings: pd.DataFrame) -> Figure:
    """After how many letters of a phase each network takes the word to be complete, over n."""
    figure, panels = _panels(networks, 2.3)
    for key, part, ax in panels:
        mine = _of(readings, key)
        top = int(part["tested_n"].iloc[0])
        ax.plot([0, top], [0, top], "k", linewidth=0.6, linestyle=":")
        for style, (_, line) in zip(("-", "--", ":", "-."), mine.groupby("seed"), strict=False):
            ax.plot(line["n"], line["read"], "C0", linestyle=style, linewidth=1)
        ax.axvline(part["trained_n"].iloc[0], color="C0", linewidth=0.5, linestyle=":")
        ax.set_ylim(0, 1.15 * top)
    figure.supxlabel("n of the word", fontsize=8)
    figure.supylabel("letters after which the network lets it end", fontsize=8)
    return figure
