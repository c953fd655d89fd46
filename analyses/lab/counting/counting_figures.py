"""Pictures of the counting experiment: accuracy over length, what each norm term changes, exact n, the gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.counting.counting_tasks import MAX_TESTED_N, TERMS, farthest, trained_to


def draw(
    summary: pd.DataFrame, values: pd.DataFrame, changed: pd.DataFrame, gate: pd.DataFrame, quick: bool = False
) -> Iterator[tuple[str, Figure]]:
    """Every picture by name, of what there is."""
    yield "gate", _gate_figure(gate)
    accuracy = summary[summary["measure"].str.startswith("accuracy_").astype(bool)]
    if len(plain := accuracy[accuracy["norm_site"] == "none"]):
        yield "lengths", _over_lengths(plain)
    if len(accuracy[accuracy["norm"] != "none"]):
        yield "norms_over_lengths", _terms_over_lengths(accuracy)
    if len(far := farthest(changed)):
        yield "effects", _effect_bars(far)
    if len(counted := values[values["measure"].isin(["exact_from", "exact_to"])]):
        yield "exact", _exact_ranges(counted, quick)


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


def _effect_bars(far: pd.DataFrame) -> Figure:
    """What each term changes against no norm, a panel per task; intervals over seeds."""
    tasks = list(dict.fromkeys(far["task"]))
    figure = Figure(figsize=(5 * len(tasks), 0.2 * far["task"].value_counts().max() + 1.4), layout="constrained")
    for task, ax in zip(tasks, figure.subplots(1, len(tasks), squeeze=False).flat, strict=True):
        cell = far[far["task"] == task]
        places = [f"{m}, {s}" for m, s in zip(cell["model"], cell["norm_site"], strict=True)]
        names = list(dict.fromkeys(places))
        height = 0.8 / len(TERMS)
        for number, norm in enumerate(TERMS):
            bars = cell[cell["norm"] == norm]
            at = [
                names.index(p) + (number - 1) * height for p, n in zip(places, cell["norm"], strict=True) if n == norm
            ]
            half = (bars["mean"] - bars["ci_low"]).fillna(0)
            ax.barh(at, bars["mean"], height, xerr=half, color=f"C{number + 1}", label=norm, error_kw={"lw": 0.8})
        ax.axvline(0, color="k", lw=0.6)
        ax.set_yticks(range(len(names)), labels=names, fontsize=8)
        ax.invert_yaxis()
        ax.set(title=task, xlabel=f"{cell['measure'].iloc[0]}, change against none")
    figure.axes[0].legend(fontsize=7)
    return figure


def _exact_ranges(values: pd.DataFrame, quick: bool) -> Figure:
    """The n's on which each network is exact, a line per seed, a panel per task; dotted: the largest trained n."""
    keys = ["task", "model", "norm", "norm_site"]
    ends = values.pivot(index=[*keys, "seed"], columns="measure", values="value")
    cells = values[keys].drop_duplicates()
    tasks = list(dict.fromkeys(cells["task"]))
    figure = Figure(figsize=(5.2 * len(tasks), 0.28 * cells["task"].value_counts().max() + 1.2), layout="constrained")
    for task, ax in zip(tasks, figure.subplots(1, len(tasks), squeeze=False).flat, strict=True):
        names, trained = [], trained_to(str(task), quick)
        for place, cell in enumerate(cells[cells["task"] == task].itertuples(index=False, name=None)):
            _, model, norm, site = cell
            names.append(model if norm == "none" else f"{model}, {norm} on {site}")
            seeds = ends.loc[cell]
            for number, (first, last) in enumerate(zip(seeds["exact_from"], seeds["exact_to"], strict=True)):
                at = place + (number - (len(seeds) - 1) / 2) * 0.7 / len(seeds)
                if last:
                    ax.plot([first, last], [at, at], "C0|-", linewidth=2, markersize=4)
                else:
                    ax.plot(0, at, "x", color="C3", markersize=4)  # on none
        ax.axvline(trained, color="k", linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(names)), labels=names, fontsize=8)
        ax.set(
            title=task,
            xlim=(-3, MAX_TESTED_N * trained),
            xlabel=f"n with exact answers (x: none; dotted: trained to {trained})",
        )
        ax.invert_yaxis()
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
