"""A memory whose place depends on the input: what needs the dot product, and what an FFN does in its stead.

Wang & E (2024) call a memory adaptive if the places that an output looks at depend on the inputs: y_t = f(x_t, x_(t-g))
with g = g(x_t). They have no experiment on it alone, so there are no published figures to compare. The smallest one on
inputs of +1 and -1, stated exactly:

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
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.analyses.lab.approximation.approximation import (
    EVALUATION_INPUTS,
    EVALUATION_SEED,
    FFN_FREE,
    RATES,
    WIDTH,
    ApproximationTask,
)
from ln_probe.analyses.lab.approximation.approximation import training as approximation_training
from ln_probe.analyses.lab.approximation.approximation_targets import (
    D_HEAD,
    LENGTH,
    SPARSE,
    SPARSE_ONE,
    RelativeConfig,
    RelativeTransformer,
)
from ln_probe.analyses.lab.approximation.rates import dot_product_factors
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.analyses.lab.train import Run, TrainConfig, carry_out, planned, step_generator

NAME = "adaptive"
IF_PLUS, IF_MINUS = SPARSE_ONE, SPARSE[0]  # positions, from 1, that are read by what the last input is
HEADS, HEADS_QUICK = (1, 2, 4), (2,)
AFFINE = 0.5  # the least squared error without FFN and dot product
KEYS = ("heads", "width", "dot_product")


def adaptive(x: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
    """The target's value for each input of +1s and -1s.

    Raises:
        ValueError: inputs that are not 1000 long.
    """
    if x.shape[-1] != LENGTH:
        raise ValueError(f"inputs must have {LENGTH} positions, got {x.shape[-1]}")
    return torch.where(x[..., -1] > 0, x[..., IF_PLUS - 1], x[..., IF_MINUS - 1])


class AdaptiveTask(ApproximationTask):
    """Squared error against the adaptive target, whose variance is 1."""

    def __init__(self) -> None:
        super().__init__(NAME)

    @property
    def identity(self) -> dict[str, Any]:
        return {"target": NAME, "places": (IF_PLUS, IF_MINUS), "length": LENGTH, "evaluated_on": EVALUATION_INPUTS}

    def loss(self, model: nn.Module, batch: Tensor) -> Float[Tensor, ""]:
        output: Tensor = model(batch)
        return (output - adaptive(batch)).pow(2).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"mse": float(self.loss(model, self.batch(0, EVALUATION_INPUTS, EVALUATION_SEED)))}


@dataclass(frozen=True)
class Cell:
    """A model: heads, hidden units of its FFN (0: none), the dot product or not."""

    heads: int
    width: int
    dot_product: bool

    def spec(self) -> RelativeConfig:
        return RelativeConfig(LENGTH, self.heads, self.width, "table", self.dot_product)

    @property
    def attainable(self) -> float:
        """The least squared error (see above); NaN for one head with the dot product alone, for which it is unknown."""
        if self.width:
            return 0.0
        if not self.dot_product:
            return AFFINE
        return 0.0 if self.heads > 1 else np.nan


def balanced() -> Float[Tensor, "batch pos"]:
    """Inputs to measure on: random, but each of the eight (e, a, b) equally often, so that the bound holds on them."""
    x = 2.0 * torch.randint(2, (EVALUATION_INPUTS, LENGTH), generator=step_generator(EVALUATION_SEED, 0)) - 1
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)))
    x[:, [LENGTH - 1, IF_PLUS - 1, IF_MINUS - 1]] = signs.repeat(EVALUATION_INPUTS // len(signs), 1)
    return x


def measured(runs: Sequence[Run]) -> pd.DataFrame:
    """Squared errors of the finished models on `balanced`: KEYS, `seed`, `measure`, `value`."""
    rows, x = [], balanced()
    for run in runs:
        if not run.finished:
            continue
        model = run.model()
        with torch.no_grad():
            error = float((model(x) - adaptive(x)).double().pow(2).mean())
        rows.append((*(run.keys[key] for key in KEYS), run.seed, "mse", error))
    return pd.DataFrame(rows, columns=[*KEYS, "seed", "measure", "value"])


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


def grid(quick: bool) -> tuple[Cell, ...]:
    heads = HEADS_QUICK if quick else HEADS
    return tuple(Cell(h, width, product) for width in (FFN_FREE, WIDTH) for product in (False, True) for h in heads)


def training(quick: bool, seed: int) -> TrainConfig:
    """The approximation experiment's schedule."""
    return approximation_training(quick, seed, RATES[0])


def run(request: Request) -> Results:
    """Train the missing runs of the grid and compare every error with the least possible one."""
    runs = planned(
        grid(request.quick),
        request,
        name=lambda cell: f"heads{cell.heads}-ffn{cell.width}-{'dot' if cell.dot_product else 'free'}",
        task=lambda _, __: AdaptiveTask(),
        training=lambda _, seed: training(request.quick, seed),
    )
    lost = carry_out(runs, request)
    return replace(findings(measured(runs), request.quick), diverged=lost)


def findings(values: pd.DataFrame, quick: bool = False) -> Results:
    """Tables from the error of every run: KEYS, `seed`, `measure`, `value`."""
    values = values.assign(dot_product=values["dot_product"].astype(bool))
    summary = summarize(values, [*KEYS, "measure"], kind="log").drop(columns="published")
    cells = [Cell(int(r["heads"]), int(r["width"]), bool(r["dot_product"])) for r in summary.to_dict("records")]
    summary["attainable"] = [cell.attainable for cell in cells]
    told = values.assign(target=NAME, kernel="table", norm="none", norm_order="pre", lr=RATES[0])
    factors = dot_product_factors(told)
    return Results(
        summary,
        tables={"errors": values, "dot_product": factors},
        settings={
            "places": {"if x_1000 is +1": IF_PLUS, "if it is -1": IF_MINUS},
            "training": vars(training(quick, 0)),
            "seeds": sorted({int(seed) for seed in values["seed"]}),
            "published": "none: no experiment of the source is of adaptive memory alone",
        },
    )
