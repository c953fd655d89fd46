"""Two memories beside the source's targets: one whose place depends on the input, and inputs longer than the trained.

`adaptive_memory`. Wang & E (2024) call a memory adaptive if the places that an output looks at depend on the inputs.
They have no experiment on it alone. The smallest one on inputs of +1 and -1, stated exactly:

    y = x_99 if x_1000 = +1, x_48 if x_1000 = -1        (of 1000 inputs, wanted at position 1000)

With e = x_1000, a = x_99, b = x_48 that is (a + b) / 2 + e (a - b) / 2, and a head's places are a table of one bias per
lag, as in 1b and 2b. What can be said without training:

* neither the dot product nor an FFN: for any number of heads the output is affine in the inputs, and e (a - b) / 2 is
  uncorrelated with every affine function, so the squared error is at least its variance, 1/2; two heads have that.
* the dot product, no FFN, two heads: the score of a token is its lag's bias plus a number that depends on e and on the
  token. A head that looks at a, with a grain of weight everywhere else, reads a if that number is 0; if it is large
  for +1s it reads "+1" for either a. So each head is switched off by the input that the other one is for: error 0 in
  the limit (`by_hand` comes as near as float64 lets it).
* an FFN, no dot product: heads read a and b (or one head a + 2 b), and ReLUs of a, b and e do the rest: 0.

`longer_inputs`. Targets 4a and 4b, whose weights go on at any lag: dot-product-free attention without an FFN (as
published), trained on 1000 inputs, or solved by least squares for them, and put on up to 8000. Such a model is affine
in its inputs, so its squared error on any length is a sum over lags and nothing is sampled. A softmax over more inputs
gives weight to new lags, which all others lose. An encoding whose weights add up (linear; logarithmic with a slope
above 1) keeps its near lags; one whose weights do not (logarithmic with a slope of 1/2, which *is* 4a; T5) is scaled
down.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab.approximation import approximation
from ln_probe.analyses.lab.approximation.approximation import (
    EVALUATION_INPUTS,
    EVALUATION_SEED,
    FFN_FREE,
    RATES,
    WIDTH,
    ApproximationTask,
    dot_product_factors,
)
from ln_probe.analyses.lab.approximation.relative import (
    AFFINE_TARGETS,
    D_HEAD,
    LENGTH,
    SPARSE,
    SPARSE_ONE,
    RelativeConfig,
    RelativeTransformer,
    affine,
    design,
    error,
    linear_optimum,
)
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, panels, select, summarize
from ln_probe.analyses.lab.train import Run, TrainConfig, carry_out, planned, step_generator

IF_PLUS, IF_MINUS = SPARSE_ONE, SPARSE[0]  # positions, from 1, that are read by what the last input is
AFFINE = 0.5  # the least squared error without FFN and dot product
ADAPTIVE_KEYS = ["heads", "width", "dot_product"]


def adaptive(x: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
    """The adaptive target's value for each input of 1000 +1s and -1s."""
    return torch.where(x[..., -1] > 0, x[..., IF_PLUS - 1], x[..., IF_MINUS - 1])


class AdaptiveTask(ApproximationTask):
    """Squared error against the adaptive target, whose variance is 1."""

    def __init__(self) -> None:
        super().__init__("adaptive")

    @property
    def identity(self) -> dict[str, Any]:
        return super().identity | {"places": (IF_PLUS, IF_MINUS)}

    def loss(self, model: nn.Module, batch: Tensor) -> Float[Tensor, ""]:
        output: Tensor = model(batch)
        return (output - adaptive(batch)).pow(2).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"mse": float(self.loss(model, balanced()))}


def balanced() -> Float[Tensor, "batch pos"]:
    """Inputs to measure on: random, but each of the eight (e, a, b) equally often, so that the bound holds on them."""
    x = 2.0 * torch.randint(2, (EVALUATION_INPUTS, LENGTH), generator=step_generator(EVALUATION_SEED, 0)) - 1
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)))
    x[:, [LENGTH - 1, IF_PLUS - 1, IF_MINUS - 1]] = signs.repeat(EVALUATION_INPUTS // len(signs), 1)
    return x


def by_hand(grain: float = 1e-7) -> RelativeTransformer:
    """Two heads with the dot product and no FFN whose error is near 0, in float64.

    Args:
        grain: of a head's weight on all lags but its own together.
    """
    model = RelativeConfig(LENGTH, 2, FFN_FREE, "table", True).build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed[0, 0], model.embed[1, 0] = -1.0, 1.0  # the input itself, in one dimension of the stream
        model.embed[:, 1] = 1.0
        for head, (place, used_for) in enumerate(((IF_PLUS, 1.0), (IF_MINUS, -1.0))):
            model.bias[head] = np.log(grain / LENGTH)
            model.bias[head, LENGTH - place] = 0.0
            # The score of a token: 0 where the head is used, else large for +1s and as small for -1s.
            model.W_Q[head, 0, 0], model.W_Q[head, 1, 0] = -used_for, 1.0
            model.W_K[head, 0, 0] = -np.log(grain) * np.sqrt(D_HEAD)
            model.W_V[head, 0, 0] = model.W_O[head, 0, 2] = 1.0
        model.out.weight[0, 2] = 1.0  # the sum of both: one of them is 1
        model.out.bias[0] = -1.0
    return model


@dataclass(frozen=True)
class AdaptiveCell:
    """A model: heads, hidden units of its FFN (0: none), the dot product or not."""

    heads: int
    width: int
    dot_product: bool

    def spec(self) -> RelativeConfig:
        return RelativeConfig(LENGTH, self.heads, self.width, "table", self.dot_product)


def attainable(heads: int, width: int, dot_product: bool) -> float:
    """The least squared error; NaN for one head with the dot product alone, for which it is unknown."""
    if width:
        return 0.0
    if not dot_product:
        return AFFINE
    return 0.0 if heads > 1 else np.nan


def run_adaptive(request: Request) -> Results:
    """Train the missing runs of the grid and compare every error with the least possible one."""
    runs = planned(
        [
            AdaptiveCell(h, w, dot)
            for w in (FFN_FREE, WIDTH)
            for dot in (False, True)
            for h in ((2,) if request.quick else (1, 2, 4))
        ],
        request,
        name=lambda cell: f"heads{cell.heads}-ffn{cell.width}-{'dot' if cell.dot_product else 'free'}",
        task=lambda _, __: AdaptiveTask(),
        training=lambda _, seed: approximation.training(request.quick, seed, RATES[0]),
    )
    lost = carry_out(runs, request)
    rows, x = [], balanced()
    for one in (run for run in runs if run.finished):
        with torch.no_grad():
            squares = (one.model()(x) - adaptive(x)).double().pow(2)
        rows.append({**one.keys, "seed": one.seed, "measure": "mse", "value": float(squares.mean())})
    settings = {"training": vars(runs[0].training), "places": {"+1": IF_PLUS, "-1": IF_MINUS}}
    return Results(analyse_adaptive(pd.DataFrame(rows)), {}, settings, lost)


def analyse_adaptive(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Errors beside the attainable ones, and the factor of the dot product."""
    frame = frame.assign(dot_product=frame["dot_product"].astype(bool))
    summary = summarize(frame, [*ADAPTIVE_KEYS, "measure"], kind="log").drop(columns="published")
    summary["attainable"] = [attainable(*row) for row in summary[ADAPTIVE_KEYS].itertuples(index=False, name=None)]
    named = frame.assign(target="adaptive", kernel="table", norm="none", norm_order="pre", lr=RATES[0])
    return {"summary": summary, "errors": frame, "dot_product": dot_product_factors(named)}


# ----------------------------------------------------------------------------------------------------- longer inputs

LENGTHS = (1000, 1250, 1500, 2000, 4000, 8000)
STEPS, QUICK_STEPS = 600, 100  # published: 10,000
LONGER_KEYS = ["target", "kernel", "heads", "length", "measure"]


@dataclass(frozen=True)
class LongerCell:
    """A model: what it learns, its kernel and its heads."""

    target: str
    kernel: str
    heads: int

    def spec(self) -> RelativeConfig:
        return RelativeConfig(LENGTH, self.heads, FFN_FREE, self.kernel)


def longer_training(quick: bool, seed: int) -> TrainConfig:
    """The approximation experiment's schedule with fewer steps."""
    steps = QUICK_STEPS if quick else STEPS
    return replace(approximation.training(quick, seed, RATES[0]), steps=steps, evaluate_every=steps)


def solved_errors(cells: Sequence[LongerCell]) -> pd.DataFrame:
    """Errors of the least-squares solutions for 1000 inputs on every length: LONGER_KEYS, `value`."""
    rows = []
    for cell in cells:
        solution = linear_optimum(cell.target, cell.kernel, cell.heads)
        weights = [design(cell.kernel, solution.slopes, n) @ np.asarray(solution.coefficients) for n in LENGTHS]
        rows += _errors(vars(cell), [(0.0, some) for some in weights])
    return pd.DataFrame(rows, columns=[*LONGER_KEYS, "value"])


def trained_errors(runs: Sequence[Run]) -> pd.DataFrame:
    """Errors of the trained models on every length: LONGER_KEYS, `seed`, `value`; those that are finished."""
    rows = []
    for run in (run for run in runs if run.finished):
        model = cast("RelativeTransformer", run.model())
        rows += _errors({**run.keys, "seed": run.seed}, [affine(model, n) for n in LENGTHS])
    return pd.DataFrame(rows, columns=[*LONGER_KEYS, "seed", "value"])


def _errors(about: Mapping[str, Any], outputs: Sequence[tuple[float, np.ndarray]]) -> list[dict[str, Any]]:
    """Rows of affine outputs, a constant and the weight of each lag for each of LENGTHS."""
    rows = []
    for length, output in zip(LENGTHS, outputs, strict=True):
        for measure, value in zip(("mse", "relative_mse"), error(about["target"], *output), strict=True):
            rows.append({**about, "length": length, "measure": measure, "value": value})
    return rows


def run_longer(request: Request) -> Results:
    """Train what is not trained, and put every model and every solution on longer inputs."""
    heads = (1,) if request.quick else (1, 16)
    cells = [LongerCell(t, k, h) for t in AFFINE_TARGETS for k in ("log", "linear", "t5") for h in heads]
    runs = planned(
        cells,
        request,
        name=lambda cell: f"{cell.target}-{cell.kernel}-{cell.heads}",
        task=lambda cell, _: ApproximationTask(cell.target),
        training=lambda _, seed: longer_training(request.quick, seed),
    )
    lost = carry_out(runs, request)
    tables = analyse_longer(trained_errors(runs), solved_errors(cells))
    return Results(tables, plot_longer(tables), {"lengths": LENGTHS, "training": vars(runs[0].training)}, lost)


def analyse_longer(trained: pd.DataFrame, solved: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Errors over length, trained beside solved (`trained_errors`, `solved_errors`)."""
    summary = summarize(trained, LONGER_KEYS, kind="log").drop(columns="published")
    solutions = solved.rename(columns={"value": "solved"})
    return {
        "summary": solutions.merge(summary, on=LONGER_KEYS, how="left", validate="1:1"),
        "errors": trained,
        "solved": solved,
    }


def plot_longer(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Error relative to the best constant over length; dashed: least squares."""
    part = select(tables["summary"], measure="relative_mse")
    groups = list(part.groupby(["target", "kernel"], sort=False))
    figure, axes = panels(len(groups), 3, 2.5, columns=3, shared=True)
    for ((target, kernel), cell), ax in zip(groups, axes, strict=True):
        for number, (heads, line) in enumerate(cell.groupby("heads")):
            ax.plot(line["length"], line["mean"], f"C{number}o-", markersize=3, label=f"{heads} heads")
            ax.plot(line["length"], line["solved"].clip(lower=1e-16), f"C{number}--")
        ax.set(title=f"{target}, {kernel}", xscale="log", yscale="log", xlabel="inputs")
    axes[0].set_ylabel("error / best constant's")
    axes[0].legend(fontsize=7)
    return {"longer": figure}
