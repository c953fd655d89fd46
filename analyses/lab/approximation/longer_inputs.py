"""Do relative encodings go on beyond the length they were fitted to?

After Wang & E (2024), section 6, targets 4a and 4b, whose weights go on at any lag: dot-product-free attention without
an FFN (as published), trained on 1000 inputs, or solved by least squares for them, and put on up to 8000. Such a model
is affine in its inputs, so its squared error on any length is a sum over lags and nothing is sampled. A softmax over
more inputs gives weight to new lags, which all others lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.approximation import approximation, relative
from ln_probe.analyses.lab.approximation.approximation import FFN_FREE, RATES, ApproximationTask
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, line_panels, select, summarize
from ln_probe.analyses.lab.runs import Run, carry_out, planned
from ln_probe.analyses.lab.train import TrainConfig

LENGTHS = (1000, 1250, 1500, 2000, 4000, 8000)
STEPS, QUICK_STEPS = 600, 100  # published: 10,000
KEYS = ["target", "kernel", "heads", "length", "measure"]


@dataclass(frozen=True)
class Cell:
    """A model: what it learns, its kernel and its heads."""

    target: str
    kernel: str
    heads: int

    def spec(self) -> relative.RelativeConfig:
        return relative.RelativeConfig(relative.LENGTH, self.heads, FFN_FREE, self.kernel)


def training(quick: bool, seed: int) -> TrainConfig:
    """The approximation experiment's schedule with fewer steps."""
    steps = QUICK_STEPS if quick else STEPS
    return replace(approximation.training(quick, seed, RATES[0]), steps=steps, evaluate_every=steps)


def solved_errors(cells: Sequence[Cell]) -> pd.DataFrame:
    """Errors of the least-squares solutions for 1000 inputs on every length: KEYS, `value`."""
    rows = []
    for cell in cells:
        solution = relative.linear_optimum(cell.target, cell.kernel, cell.heads)
        weights = [
            relative.design(cell.kernel, solution.slopes, n) @ np.asarray(solution.coefficients) for n in LENGTHS
        ]
        rows += _errors(vars(cell), [(0.0, some) for some in weights])
    return pd.DataFrame(rows, columns=[*KEYS, "value"])


def trained_errors(runs: Sequence[Run]) -> pd.DataFrame:
    """Errors of the trained models on every length: KEYS, `seed`, `value`; those that are finished."""
    rows = []
    for run in (run for run in runs if run.finished):
        model = cast("relative.RelativeTransformer", run.model())
        rows += _errors({**run.keys, "seed": run.seed}, [relative.affine(model, n) for n in LENGTHS])
    return pd.DataFrame(rows, columns=[*KEYS, "seed", "value"])


def _errors(about: Mapping[str, Any], outputs: Sequence[tuple[float, np.ndarray]]) -> list[dict[str, Any]]:
    """Rows of affine outputs, a constant and the weight of each lag for each of LENGTHS."""
    rows = []
    for length, output in zip(LENGTHS, outputs, strict=True):
        for measure, value in zip(("mse", "relative_mse"), relative.error(about["target"], *output), strict=True):
            rows.append({**about, "length": length, "measure": measure, "value": value})
    return rows


def run(request: Request) -> Results:
    """Train what is not trained, and put every model and every solution on longer inputs."""
    heads = (1,) if request.quick else (1, 16)
    cells = [Cell(t, k, h) for t in relative.AFFINE_TARGETS for k in ("log", "linear", "t5") for h in heads]
    runs = planned(
        cells, request,
        task=lambda cell, _: ApproximationTask(cell.target), training=lambda _, seed: training(request.quick, seed),
    )  # fmt: skip
    lost = carry_out(runs, request)
    tables = analyse(trained_errors(runs), solved_errors(cells))
    return Results(tables, plot(tables), {"lengths": LENGTHS, "training": vars(runs[0].training)}, lost)


def analyse(trained: pd.DataFrame, solved: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Errors over length, trained beside solved (`trained_errors`, `solved_errors`)."""
    summary = summarize(trained, KEYS, kind="log").drop(columns="published")
    solutions = solved.rename(columns={"value": "solved"})
    return {
        "summary": solutions.merge(summary, on=KEYS, how="left", validate="1:1"),
        "errors": trained,
        "solved": solved,
    }


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Error relative to the best constant over length, trained and by least squares."""
    part = select(tables["summary"], measure="relative_mse")
    trained = part.assign(line=part["heads"].map("{} heads".format))
    solved = part.assign(line=trained["line"] + ", solved", mean=part["solved"].clip(lower=1e-16), ci_low=np.nan)
    axes: dict[str, Any] = {"xscale": "log", "yscale": "log", "ylabel": "error / best constant's", "columns": 3}
    return {"longer": line_panels(pd.concat([trained, solved]), ["target", "kernel"], "length", "line", **axes)}
