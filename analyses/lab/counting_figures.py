"""Pictures of the counting experiment: accuracy over length, what each norm term does to it, exact n, the gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.counting import MAX_TRAINED_N, TERMS


def draw(summary: pd.DataFrame, gate: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every picture by name, of what there is."""
    yield "gate", _gate_figure(gate)
    accuracy = summary[summary["measure"].str.startswith("accuracy_").astype(bool)]
    if len(plain := accuracy[accuracy["norm_site"] == "none"]):
        yield "lengths", _over_lengths(plain)
    if len(accuracy[accuracy["norm"] != "none"]):
        yield "norms_over_lengths", _terms_over_lengths(accuracy)
    if len(exact := summary[summary["measure"] == "exact_to"]):
        yield "exact_to", _exact_bars(exact)


def _over_lengths(part: pd.DataFrame) -> Figure:
    """Accuracy of the plain models over length, a panel per task; published figures dotted."""
    tasks = list(dict.fromkeys(part["task"]))
    figure = Figure(figsize=(4.6 * len(tasks), 3.8), layout="constrained")
    for task, ax in zip(tasks, figure.subplots(1, len(tasks), squeeze=False, sharey=True).flat, strict=True):
        for number, (model, line) in enumerate(part[part["task"] == task].groupby("model", sort=False)):
            _draw_line(ax, line, f"C{number}", str(model))
            ax.plot(_lengths(line), line["published"], color=f"C{number}", linestyle=":")
        ax.set(title=task, ylabel="accuracy; dotted: published")
        ax.legend(fontsize=7)
    return figure


def _terms_over_lengths(accuracy: pd.DataFrame) -> Figure:
    """Accuracy over length with each term and without, a panel per model and place of the norm."""
    normed = accuracy[accuracy["norm"] != "none"]
    places = list(dict.fromkeys(zip(normed["task"], normed["model"], normed["norm_site"], strict=True)))
    columns = min(4, len(places))
    rows = -(-len(places) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for (task, model, site), ax in zip(places, axes, strict=False):
        cell = accuracy[(accuracy["task"] == task) & (accuracy["model"] == model)]
        for number, norm in enumerate(("none", *TERMS)):
            line = cell[(cell["norm"] == norm) & ((cell["norm_site"] == site) | (norm == "none"))]
            _draw_line(ax, line, f"C{number}", norm)
        ax.set_title(f"{task}: {model}, on its {site}", fontsize=9)
    axes[0].legend(fontsize=7)
    for unused in axes[len(places) :]:
        unused.set_axis_off()
    return figure


def _lengths(line: pd.DataFrame) -> list[int]:
    return [int(m.removeprefix("accuracy_")) for m in line["measure"]]


def _draw_line(ax: Any, line: pd.DataFrame, color: str, label: str) -> None:
    lengths = _lengths(line)
    ax.plot(lengths, line["mean"], color=color, marker="o", markersize=3, label=label)
    ax.fill_between(lengths, line["ci_low"].clip(0), line["ci_high"].clip(upper=1), color=color, alpha=0.12, lw=0)
    ax.set(xscale="log", xlabel="length (trained at 64)")
    if lengths:
        ax.set_xticks(lengths, labels=lengths)
    ax.minorticks_off()


def _exact_bars(part: pd.DataFrame) -> Figure:
    """To which n each network is exact, a panel per task."""
    tasks = list(dict.fromkeys(part["task"]))
    most = max((part["task"] == task).sum() for task in tasks)
    figure = Figure(figsize=(5.2 * len(tasks), 0.28 * most + 1.2), layout="constrained")
    for task, ax in zip(tasks, figure.subplots(1, len(tasks), squeeze=False).flat, strict=True):
        cell = part[part["task"] == task].iloc[::-1]
        names = [
            m if s == "none" else f"{m}, {n} on {s}"
            for m, n, s in zip(cell["model"], cell["norm"], cell["norm_site"], strict=True)
        ]
        ax.barh(names, cell["mean"], xerr=(cell["mean"] - cell["ci_low"]).fillna(0))
        ax.set(title=task, xlabel=f"largest n of the run of exact ones (trained to {MAX_TRAINED_N[task]})")
    return figure


def _gate_figure(gate: pd.DataFrame) -> Figure:
    """The gate's output for one a more than b's, over length."""
    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    ax = figure.subplots()
    for norm, line in gate.groupby("norm", sort=False):
        ax.plot(line["length"], line["output"], marker="o", markersize=3, label=norm)
    ax.set(xscale="log", yscale="log", xlabel="length of the prefix", ylabel="output, one a more than b's")
    ax.legend(fontsize=7)
    return figure
