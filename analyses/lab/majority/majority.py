"""The majority experiment: figures at the published steps, how much of the gap is projection, and how much size.

Brody, Alon & Yahav 2023, section 4.1; the task and the published model are in `majority_task`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.majority.majority_task import (
    EPOCH,
    PARTS,
    STEPS,
    STEPS_SHOWN,
    MajoritySize,
    PartShrunk,
    majority_model,
    majority_runs,
    published_training,
    query_angles,
)
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.results import (
    Results,
    contrasted,
    differences,
    select,
    summarize_kinds,
)
from ln_probe.analyses.lab.train import ModelSpec, Run, carry_out, curves, shared_settings, train_all
from ln_probe.analyses.lab.transformer import LabTransformer

WITH, WITHOUT = ("layernorm", "sqrt(d)"), ("scaling_only", "1/sqrt(d)")  # the two published models
# Read off the published plots (Brody, Alon & Yahav 2023, figures 1-3), to about two digits.
PUBLISHED = pd.DataFrame(
    [
        (*cell, step, measure, value)
        for cell, step, measure, value in (
            (WITH, 1000, "train_loss", 0.75), (WITH, 2000, "train_loss", 0.4), (WITH, 5000, "train_loss", 0.21),
            (WITHOUT, 1000, "train_loss", 1.5), (WITHOUT, 2000, "train_loss", 0.86),
            (WITHOUT, 5000, "train_loss", 0.43),
            (WITH, 1000, "test_accuracy", 0.74), (WITH, 5000, "test_accuracy", 0.93),
            (WITHOUT, 1000, "test_accuracy", 0.52), (WITHOUT, 5000, "test_accuracy", 0.85),
            (WITH, 0, "angle_deg", 70.0), (WITH, 17000, "angle_deg", 11.0),
            (WITHOUT, 0, "angle_deg", 70.0), (WITHOUT, 17000, "angle_deg", 83.0),
            (WITHOUT, -1, "times_the_steps_to_0.4", 3.0),
        )
    ],
    columns=["norm", "radius", "step", "measure", "published"],
)  # fmt: skip
MEASURES = ("train_loss", "test_loss", "test_accuracy", "angle_deg", "score_sd")
LEVELS = (0.75, 0.4, 0.21)  # training losses of the published model with projection at 1K, 2K and 5K steps
WHENEVER = -1  # the `step` of measures that are not taken at a step
_SMALL_SCORES, _SMALL_VALUES = (f"1/sqrt(d) for {part}" for part in PARTS)
MATCHED = ("scaling_only", "sqrt(d)"), ("layernorm", "1/sqrt(d)")  # the cells that were not published
# Differences between cells, each paired by seed (same data, same order): the first minus the second.
CONTRASTS: dict[str, tuple[Hashable, Hashable]] = {
    "the published gap": (WITHOUT, WITH),
    "no projection, at radius sqrt(d)": (MATCHED[0], WITH),
    "no projection, at radius 1/sqrt(d)": (WITHOUT, MATCHED[1]),
    "size 1/sqrt(d), with projection": (MATCHED[1], WITH),
    "size 1/sqrt(d), without projection": (WITHOUT, MATCHED[0]),
    "size 1/sqrt(d) of queries and keys alone": (("scaling_only", _SMALL_SCORES), MATCHED[0]),
    "size 1/sqrt(d) of values alone": (("scaling_only", _SMALL_VALUES), MATCHED[0]),
    "size 1/sqrt(d) of queries and keys, beside such values": (WITHOUT, ("scaling_only", _SMALL_VALUES)),
}
TESTED = "train_loss"  # the tested measure: Holm's p is over it, at the steps shown
KEYS = ["norm", "radius", "step", "measure"]


def findings(
    table: pd.DataFrame,
    start: pd.DataFrame,
    settings: Mapping[str, Any] | None = None,
) -> Results:
    """Tables and plots from what the runs have reached; `start` is of before training (`start_angles`).

    Raises:
        ValueError: nothing has been measured.
    """
    if table.empty:
        raise ValueError("no run has been evaluated yet: leave out --collect to train")
    table = select(table, measure=[*MEASURES]).reset_index(drop=True)
    steps = [s for s in STEPS_SHOWN if s in set(table["step"])]
    at_steps, times = select(table, step=steps), _times(table)
    summary = summarized(pd.concat([start, at_steps, _all_reached(times)], ignore_index=True), PUBLISHED)
    contrasts = _contrasts(at_steps)
    return Results(
        summary=summary,
        tables={"contrasts": contrasts, "curves": table, "steps_to": times},
        figures={"curves": _plot(table)},
        settings={
            **(settings or {}),
            "published": "read off the plots of figures 1 to 3",
            "seeds": sorted({int(seed) for seed in table["seed"]}),
        },
    )


def summarized(values: pd.DataFrame, published: pd.DataFrame | None = None) -> pd.DataFrame:
    """`summarize` with the interval of a share for accuracies; those of angles end at 0° and 90°."""
    shares = values["measure"].eq("test_accuracy")
    found = summarize_kinds([(values[~shares], "mean"), (values[shares], "share")], KEYS, published)
    angles = found["measure"].eq("angle_deg")
    found.loc[angles, ["ci_low", "ci_high"]] = found.loc[angles, ["ci_low", "ci_high"]].clip(0.0, 90.0)
    return found


def start_angles(runs: Iterable[Run]) -> pd.DataFrame:
    """Angles before training, in long form (every class is as frequent as any other)."""
    rows = []
    for run in runs:
        torch.manual_seed(run.seed)
        model = cast(LabTransformer, run.spec.build())
        with calibrate(model):
            angle = float(query_angles(model).mean())
        rows.append({**run.keys, "seed": run.seed, "step": 0, "measure": "angle_deg", "value": angle})
    return pd.DataFrame(rows)


def _times(table: pd.DataFrame) -> pd.DataFrame:
    """Steps of every run to a training loss, and how many times those of `WITH` with the same seed.

    Columns: norm, radius, seed, level, `steps` (interpolated between evaluations), `reached`, `times` (NaN if `WITH`
    has not come there). Of a run that has not come there, `steps` is its last: both are lower bounds.
    """
    rows = []
    losses = select(table, measure=TESTED).sort_values("step", kind="stable")
    for (norm, radius, seed), run in losses.groupby(["norm", "radius", "seed"], sort=False):
        for level in LEVELS:
            steps = _first_below(run["step"], run["value"], level)
            reached = not math.isnan(steps)
            rows.append((norm, radius, seed, level, steps if reached else float(run["step"].iloc[-1]), reached))
    found = pd.DataFrame(rows, columns=["norm", "radius", "seed", "level", "steps", "reached"])
    first = select(found, norm=WITH[0], radius=WITH[1], reached=True)
    reference = first.rename(columns={"steps": "reference"})[["seed", "level", "reference"]]
    times = found.merge(reference, on=["seed", "level"], how="left")
    return times.assign(times=times["steps"] / times["reference"]).drop(columns="reference")


def _all_reached(times: pd.DataFrame) -> pd.DataFrame:
    """`_times` in long form, of the cells whose seeds have all come there: of the others a mean would be too small."""
    complete = times[times.groupby(["norm", "radius", "level"])["reached"].transform("all")]
    parts = []
    for column, name in (("steps", "steps_to"), ("times", "times_the_steps_to")):
        measure = [f"{name}_{level:g}" for level in complete["level"]]
        parts.append(complete.assign(value=complete[column], measure=measure, step=WHENEVER))
    return pd.concat(parts, ignore_index=True)[["norm", "radius", "seed", "step", "measure", "value"]]


def _first_below(step: pd.Series, loss: pd.Series, level: float) -> float:
    below = np.flatnonzero(loss.to_numpy() <= level)
    if not len(below):
        return np.nan
    i = int(below[0])
    if i == 0:
        return float(step.iloc[0])
    part = (loss.iloc[i - 1] - level) / (loss.iloc[i - 1] - loss.iloc[i])
    return float(step.iloc[i - 1] + part * (step.iloc[i] - step.iloc[i - 1]))


def _contrasts(table: pd.DataFrame) -> pd.DataFrame:
    """Paired differences of `CONTRASTS` with their intervals, over the seeds whose cells have all come that far.

    (All of those that any seed has taken that far: to the end only some are trained.)
    """
    wide = table.pivot(index=["seed", "step", "measure"], columns=["norm", "radius"], values="value")
    cells = [cell for cell in (WITH, WITHOUT, *MATCHED) if cell in wide]
    parts = [part.dropna(subset=[c for c in cells if part[c].notna().any()]) for _, part in wide.groupby(level="step")]
    pairs = differences(pd.concat(parts) if parts else wide, CONTRASTS)
    return contrasted(pairs, ["contrast", "step", "measure"], tested={"measure": TESTED})


def _plot(table: pd.DataFrame) -> Figure:
    """Loss, accuracy and angle over steps: mean and 95 % interval over seeds, published figures as crosses."""
    shown = {"train_loss": "training loss (nats)", "test_accuracy": "test accuracy", "angle_deg": "query to ones (°)"}
    figure = Figure(figsize=(15, 4.2))
    axes = figure.subplots(1, len(shown))
    cells = list(dict.fromkeys(zip(table["norm"], table["radius"], strict=True)))
    means = summarized(table[table["measure"].isin(shown)])
    for axis, (measure, label) in zip(axes, shown.items(), strict=True):
        for i, cell in enumerate(cells):
            rows = select(means[means["step"] % 100 == 0], norm=cell[0], radius=cell[1], measure=measure)
            rows = rows.sort_values("step")
            axis.plot(rows["step"], rows["mean"], color=f"C{i}", label=f"{cell[0]}, radius {cell[1]}")
            axis.fill_between(rows["step"], rows["ci_low"], rows["ci_high"], color=f"C{i}", alpha=0.2, lw=0)
            told = select(PUBLISHED, norm=cell[0], radius=cell[1], measure=measure)
            axis.plot(told["step"], told["published"], "x", color=f"C{i}")
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        bottom, top = means.loc[means["measure"] == measure, "mean"].agg(["min", "max"])
        axis.set_ylim(*((0, 90) if measure == "angle_deg" else (0.8 * bottom, 1.05 * top)))  # wide intervals are cut
    axes[0].set_yscale("log")
    axes[-1].legend(fontsize=7, title="x: published", title_fontsize=7)
    figure.tight_layout()
    return figure


MILESTONE = 5_000  # steps that every run gets to before any goes on
EPOCHS_OF_DECAY = 10_000  # the published schedule: linear to 0 over ten times the published 1000 epochs
QUICK = MajoritySize(examples=20_000)
RADII = {"sqrt(d)": None, "1/sqrt(d)": 1 / math.sqrt(8)}
CELLS = (
    *((norm, radius) for radius in RADII for norm in ("layernorm", "scaling_only")),
    *((norm, "sqrt(d)") for norm in ("projection_only", "none")),
    *(("scaling_only", f"1/sqrt(d) for {part}") for part in PARTS),
)


def model_of(norm: str, radius: str, size: MajoritySize) -> ModelSpec:
    for part in PARTS:
        if radius.endswith(part):
            return PartShrunk(majority_model(norm, None, size), part)
    return majority_model(norm, RADII[radius], size)


def make_runs(request: Request) -> list[Run]:
    size = QUICK if request.quick else MajoritySize()
    steps, every = (1000, 50) if request.quick else (STEPS, 100)
    return majority_runs(
        request,
        CELLS,
        size,
        lambda norm, radius: model_of(norm, radius, size),
        lambda seed: published_training(
            steps,
            seed,
            evaluate_every=every,
            evaluate_at=tuple(s - EPOCH for s in STEPS_SHOWN if s <= steps),
            save_at=tuple(s for s in (0, *STEPS_SHOWN) if s < steps),
            decay_steps=EPOCH * EPOCHS_OF_DECAY,
        ),
    )


def run(request: Request) -> Results:
    """Train all cells (to 5K steps first, then to the end) and compare them."""
    runs = make_runs(request)
    if not request.collect:
        train_all(runs, jobs=request.jobs, until=MILESTONE, progress=request.progress, device=request.device)
    lost = carry_out(runs, request)
    return replace(findings(curves(runs), start_angles(runs), shared_settings(runs[0], KEYS)), diverged=lost)
