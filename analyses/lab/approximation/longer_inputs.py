"""Do relative encodings go on beyond the length they were fitted to?

After Wang & E (2024), section 6, targets 4a and 4b, whose weights go on at any lag: dot-product-free attention without
an FFN (as published) with logarithmic, linear or T5 positions, trained on 1000 inputs, or solved by least squares for
them, and put on up to 8000. Such a model is affine in its inputs, so its squared error on any length is a sum over lags
and nothing is sampled. A table of positions has no entry beyond its length: it is left out.

Two things happen to a softmax over more inputs: a lag gets weight that it did not have, and all others lose what it
gets. An encoding whose weights add up (linear; logarithmic with a slope above 1) keeps its near lags and misses the far
ones; one whose weights do not (logarithmic with a slope of 1/2, which *is* 4a; T5, constant from lag 128 on) is scaled
down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.approximation.approximation import FFN_FREE, RATES, ApproximationTask
from ln_probe.analyses.lab.approximation.approximation import training as approximation_training
from ln_probe.analyses.lab.approximation.approximation_targets import (
    AFFINE_TARGETS,
    LENGTH,
    RelativeConfig,
    RelativeTransformer,
    affine,
    design,
    error,
    linear_optimum,
)
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.analyses.lab.train import Run, TrainConfig, carry_out, planned
from ln_probe.analyses.text import counted

LENGTHS = (1000, 1250, 1500, 2000, 4000, 8000)
KERNELS = ("log", "linear", "t5")
HEADS, HEADS_QUICK = (1, 16), (1,)
STEPS, QUICK_STEPS = 600, 100  # published: 10,000
KEYS = ("target", "kernel", "heads", "length")
FAR = 4000  # the length


@dataclass(frozen=True)
class Cell:
    """A model: what it learns, its kernel and its heads."""

    target: str
    kernel: str
    heads: int

    def spec(self) -> RelativeConfig:
        return RelativeConfig(LENGTH, self.heads, FFN_FREE, self.kernel)


def grid(quick: bool) -> tuple[Cell, ...]:
    heads = HEADS_QUICK if quick else HEADS
    return tuple(Cell(t, kernel, h) for t in AFFINE_TARGETS for kernel in KERNELS for h in heads)


def training(quick: bool, seed: int) -> TrainConfig:
    """The approximation experiment's schedule with fewer steps."""
    steps = QUICK_STEPS if quick else STEPS
    return replace(approximation_training(quick, seed, RATES[0]), steps=steps, evaluate_every=steps)


def solved_errors(cells: Sequence[Cell]) -> pd.DataFrame:
    """Errors of the least-squares solutions for 1000 inputs on every length: KEYS, `measure`, `value`."""
    rows = []
    for cell in cells:
        found = linear_optimum(cell.target, cell.kernel, cell.heads)
        weights = [design(cell.kernel, found.slopes, n) @ np.asarray(found.coefficients) for n in LENGTHS]
        rows += _errors(vars(cell), [(0.0, some) for some in weights])
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "value"])


def trained_errors(runs: Sequence[Run]) -> pd.DataFrame:
    """Errors of the trained models on every length: KEYS, `measure`, `seed`, `value`; those that are finished."""
    rows = []
    for run in runs:
        if run.finished:
            model = cast("RelativeTransformer", run.model())
            rows += _errors({**run.keys, "seed": run.seed}, [affine(model, n) for n in LENGTHS])
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "seed", "value"])


def _errors(about: Mapping[str, Any], outputs: Sequence[tuple[float, np.ndarray]]) -> list[dict[str, Any]]:
    """Rows of affine outputs, a constant and the weight of each lag for each of LENGTHS."""
    rows = []
    for length, output in zip(LENGTHS, outputs, strict=True):
        mse, relative = error(about["target"], *output)
        rows += [{**about, "length": length, "measure": "mse", "value": mse}]
        rows += [{**about, "length": length, "measure": "relative_mse", "value": relative}]
    return rows


def run(request: Request) -> Results:
    """Train what is not trained, and put every model and every solution on longer inputs."""
    runs = planned(
        grid(request.quick),
        request,
        name=lambda cell: f"{cell.target}-{cell.kernel}-{cell.heads}",
        task=lambda cell, _: ApproximationTask(cell.target),
        training=lambda _, seed: training(request.quick, seed),
    )
    lost = carry_out(runs, request)
    solved = solved_errors(grid(request.quick))
    return replace(findings(trained_errors(runs), solved, request.quick), diverged=lost)


def findings(trained: pd.DataFrame, solved: pd.DataFrame, quick: bool = False) -> Results:
    """Tables and figures from errors on every length (`trained_errors`, `solved_errors`)."""
    keys = [*KEYS, "measure"]
    summary = summarize(trained, keys, kind="log").drop(columns="published")
    summary = solved.rename(columns={"value": "solved"}).merge(summary, on=keys, how="left", validate="1:1")
    return Results(
        summary,
        tables={"errors": trained, "solved": solved},
        figures={"longer": _curves(summary)},
        settings={
            "lengths": LENGTHS,
            "training": vars(training(quick, 0)),
            "seeds": sorted({int(seed) for seed in trained["seed"]}),
            "published": "none that could be checked here",
        },
    )


def _curves(summary: pd.DataFrame) -> Figure:
    """Error relative to the best constant over length; a line per number of heads, dashed for least squares."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    panels = [(t, k) for t in AFFINE_TARGETS for k in KERNELS]
    part = summary[summary["measure"] == "relative_mse"]
    for (target, kernel), ax in zip(panels, figure.subplots(2, 3, sharex=True, sharey=True).flat, strict=True):
        cell = part[(part["target"] == target) & (part["kernel"] == kernel)]
        for number, heads in enumerate(dict.fromkeys(cell["heads"])):
            line = cell[cell["heads"] == heads].sort_values("length")
            ax.plot(line["length"], line["mean"], f"C{number}o-", markersize=3)
            ax.plot(line["length"], line["solved"].clip(lower=1e-16), f"C{number}--", label=counted(heads, "head"))
        ax.set(title=f"{target}, {kernel}", xscale="log", yscale="log", xlabel="inputs")
        ax.set_xticks(LENGTHS, labels=[str(n) if n != 1250 else "" for n in LENGTHS], fontsize=7)
        ax.minorticks_off()
        if len(cell):
            ax.legend(fontsize=7)
    figure.axes[0].set_ylabel("error / best constant's")
    return figure
