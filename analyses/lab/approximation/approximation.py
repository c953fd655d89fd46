"""What relative attention approximates: trained errors and the least-squares optimum of the same model.

After Wang & E (2024, "Understanding the Expressive Power and Mechanisms of Transformer for Sequence Modeling"), section
6. Where a trained error lies far above the optimum, optimization failed, not expressivity; two learning rates show
how much that is worth. The published model has no norm: here one is put before or after its sublayers. Optima are
upper bounds of the least error (`relative.linear_optimum`). `longer_inputs`: 4a and 4b, fitted to 1000 inputs without
an FFN, on up to 8000. Such a model is affine in its inputs, so its error on any length is a sum over lags.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab import results
from ln_probe.analyses.lab.approximation import relative
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.runs import carry_out, curves, planned
from ln_probe.analyses.lab.train import Task, TrainConfig, step_generator
from ln_probe.analyses.probes.statistics import holm

HEADS, HEADS_QUICK = (1, 4, 16, 64), (1, 16)
WIDTH = 32  # hidden units of the FFN where a target sets no number
FFN_FREE = 0
RATES = (1e-2, 1e-3)
EVALUATION_SEED = 10_000  # apart from every training seed
EVALUATION_INPUTS = 4096
KEYS = ("target", "kernel", "heads", "width", "dot_product", "norm", "norm_order", "lr")

# Squared errors as reported; bounds ("< 1e-5") as their bound. 2a and 2b were reported over m and H, not which.
PUBLISHED = pd.DataFrame(
    [("4a", "log", 1, 1e-5), ("4a", "linear", 64, 0.19), ("4b", "linear", 1, 1e-7), ("4b", "log", 64, 5.3e-4)],
    columns=["target", "kernel", "heads", "published"],
).assign(norm="none", norm_order="pre", width=0, measure="mse")  # 4a and 4b were published without an FFN


@dataclass(frozen=True)
class Cell:
    """One parametrization on one target; 3a is 1b with `dot_product`."""

    target: str
    kernel: str
    heads: int
    width: int = WIDTH
    dot_product: bool = False
    norm: str = "none"
    norm_order: str = "pre"
    lr: float = RATES[0]

    def spec(self) -> relative.RelativeConfig:
        return relative.RelativeConfig(
            relative.LENGTH, self.heads, self.width, self.kernel, self.dot_product, self.norm, self.norm_order
        )


class ApproximationTask(Task):
    """Squared error against a target on fresh inputs of +1 and -1.

    All models are measured on the same EVALUATION_INPUTS inputs, or exactly where they are affine.
    """

    name = "approximation"

    def __init__(self, target: str) -> None:
        self.target = target

    @property
    def identity(self) -> dict[str, Any]:
        return {"target": self.target, "length": relative.LENGTH, "evaluated_on": EVALUATION_INPUTS}

    def batch(self, step: int, size: int, seed: int) -> Float[Tensor, "batch pos"]:
        return 2.0 * torch.randint(2, (size, relative.LENGTH), generator=step_generator(seed, step)) - 1

    def loss(self, model: nn.Module, batch: Tensor) -> Float[Tensor, ""]:
        output: Tensor = model(batch)
        return (output - relative.evaluate(self.target, batch)).pow(2).mean()

    @cached_property
    def _evaluation(self) -> Float[Tensor, "batch pos"]:
        x = self.batch(0, EVALUATION_INPUTS, EVALUATION_SEED)
        if self.target == relative.ADAPTIVE:  # each of the eight combinations equally often: the bound holds on them
            signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3))).repeat(EVALUATION_INPUTS // 8, 1)
            x[:, [relative.LENGTH - 1, relative.IF_PLUS - 1, relative.IF_MINUS - 1]] = signs
        return x

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        trained = cast("relative.RelativeTransformer", model)
        cfg = trained.cfg
        if self.target in relative.AFFINE_TARGETS and not (cfg.width or cfg.dot_product or cfg.norm != "none"):
            mse = relative.error(self.target, *relative.affine(trained, relative.LENGTH))[0]
        else:
            mse = float(self.loss(model, self._evaluation))
        return {"mse": mse, "relative_mse": mse / relative.variance(self.target)}


def grid(quick: bool) -> tuple[Cell, ...]:
    """What is trained."""
    heads, lrs = (HEADS_QUICK, RATES[:1]) if quick else (HEADS, RATES)
    long_memory = [
        Cell(target, kernel, h, lr=lr)
        for target, kernel, h, lr in itertools.product(("4a", "4b"), ("log", "linear"), heads, lrs)
    ]
    long_memory += [replace(cell, width=FFN_FREE) for cell in long_memory]
    normed = [
        Cell(target, kernel, h, norm=norm, norm_order=order)
        for target, kernel, h in (("4a", "log", 1), ("2b", "table", 4), ("1b", "table", 4), ("4a", "linear", 16))
        for norm in ("layernorm", "scaling_only", "projection_only")
        for order in ("pre", "post")
    ]
    if quick:
        return (*long_memory, Cell("2b", "table", 4), Cell("1b", "table", 4), *normed[:6])
    sparse = [Cell(t, "table", h, m) for t in ("1b", "2b") for h in (1, 2, 4, 8) for m in (4, 32, 256)]
    sparse.append(Cell("1b", "table", 32, 256))  # published as adequate
    affine_target = [Cell("2a", "table", h, m) for h in (1, 8) for m in (1, 4, 16, 64)]
    dot_product = [Cell("1b", "table", h, dot_product=True) for h in (1, 4)]
    slopes = [Cell(t, kernel, 64) for t in ("1b", "2b") for kernel in ("log", "linear", "t5")]
    t5 = [Cell(target, "t5", h, FFN_FREE) for target in ("4a", "4b") for h in HEADS]
    return (*long_memory, *t5, *sparse, *normed, *affine_target, *dot_product, *slopes)


def training(quick: bool, seed: int, lr: float) -> TrainConfig:
    """The published batch and number of steps; the rest was not published."""
    steps = 1000 if quick else 10_000
    return TrainConfig(
        steps=steps, batch=100, lr=lr, lr_end=1e-6, warmup=100, weight_decay=0.0, clip=0.0, seed=seed,
        evaluate_every=steps, state_every=1000,
    )  # fmt: skip


def run(request: Request) -> results.Results:
    """Train the missing runs of the grid and put every error beside its optimum."""
    return _run(request, grid(request.quick))


def _run(request: Request, cells: Sequence[Cell]) -> results.Results:
    runs = planned(
        cells,
        request,
        task=lambda cell, _: ApproximationTask(cell.target),
        training=lambda cell, seed: training(request.quick, seed, cell.lr),
    )
    lost = carry_out(runs, request)
    tables = analyse(results.select(curves(runs), measure=["mse", "relative_mse"]))
    settings = {"training": vars(training(request.quick, 0, RATES[0])), "seeds": list(request.seeds)}
    return results.Results(tables, plot(tables), settings, lost)


def run_adaptive(request: Request) -> results.Results:
    """Models of the adaptive target: heads, with an FFN and without, with the dot product and without."""
    heads = (2,) if request.quick else (1, 2, 4)
    dots = (False, True)
    cells = [
        Cell(relative.ADAPTIVE, "table", h, width, dot) for width in (FFN_FREE, WIDTH) for dot in dots for h in heads
    ]
    return _run(request, cells)


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Make the tables of the errors of every run: KEYS, `seed`, `step`, `measure`, `value`.

    Errors lie many orders of magnitude apart: centers are geometric means, intervals those of their logarithms. Holm's
    p is over `norm_factors`, `rates_trained` and `dot_product` together.
    """
    summary = results.summarize(frame.drop(columns="step"), [*KEYS, "measure"], PUBLISHED, kind="log")
    scale = summary["target"].map(relative.variance).where(summary["measure"] != "mse", 1.0)
    summary.insert(len(KEYS) + 1, "optimum", np.array(list(map(attainable, summary.to_dict("records")))) / scale)
    tested = [norm_factors(frame), trained_exponents(frame), dot_product_factors(frame)]
    p_holm = holm(np.concatenate([table["p"].to_numpy(float) for table in tested]))
    parts = np.split(p_holm, np.cumsum([len(table) for table in tested])[:-1])
    factors, exponents, products = (t.assign(p_holm=p) for t, p in zip(tested, parts, strict=True))
    tables = {"norm_factors": factors, "rates_trained": exponents, "dot_product": products}
    return {"summary": summary, "errors": frame, **tables}


def attainable(row: Mapping[Any, Any]) -> float:
    """Return the least squared error known to be attainable with a parametrization; NaN where it is unknown.

    With a slope per head it is `linear_optimum`. An FFN, whose output may be 0, does not raise it. The adaptive target
    is (a + b) / 2 + e (a - b) / 2 with e = x_1000, a = x_99 and b = x_48: without an FFN and the dot product any output
    is affine in the inputs and leaves 1/2; with the dot product two heads can have 0.
    """
    if row["norm_order"] == "post" and row["norm"] != "none":
        return np.nan
    if row["target"] == relative.ADAPTIVE:
        affine_at_most = 0.5 if not row["dot_product"] else np.nan
        return 0.0 if row["width"] or (row["dot_product"] and row["heads"] > 1) else affine_at_most
    if row["kernel"] == "table" or row["target"] not in relative.LINEAR:
        return np.nan
    return relative.linear_optimum(row["target"], row["kernel"], int(row["heads"])).mse


def norm_factors(frame: pd.DataFrame) -> pd.DataFrame:
    """By what factor a norm changes the squared error: a geometric mean over seeds of pairs with the same batches."""
    same = [key for key in KEYS if key not in ("norm", "norm_order")]
    return _factors(frame, frame["norm"] == "none", same, KEYS)


def dot_product_factors(frame: pd.DataFrame) -> pd.DataFrame:
    """By what factor the dot product changes the squared error without a norm (3a)."""
    plain, keys = results.select(frame, norm="none"), ["target", "kernel", "heads", "width"]
    return _factors(plain, ~plain["dot_product"].astype(bool), [*keys, "norm_order", "lr"], keys)


def _factors(frame: pd.DataFrame, reference: pd.Series, same: Sequence[str], keys: Sequence[str]) -> pd.DataFrame:
    """Factors between squared errors and those of the reference rows with the same `same` and seed."""
    errors = results.select(frame, measure="mse").assign(value=lambda t: np.log(t["value"].astype(float)))
    pairs = results.minus_reference(errors, reference.loc[errors.index], [*same, "seed"])
    return results.as_factors(results.contrasted(pairs, keys), keys)


FEWEST = 3  # numbers of heads; a line through two points is no fit


def trained_exponents(frame: pd.DataFrame) -> pd.DataFrame:
    """The exponents of error against heads: a line per seed, an interval over seeds.

    Returns:
        `target, kernel, width, lr, heads` ("1, 4, 16, 64"), what `contrasted` gives of a, where error ~ H^-a, and
        `residual` (root mean square of the log10 error about the lines); of models without a norm and dot product.
    """
    keys = ["target", "kernel", "width", "lr"]
    errors = results.select(frame[frame["target"] != relative.ADAPTIVE], measure="mse", norm="none", dot_product=False)
    rows = []
    for key, part in errors.groupby([*keys, "seed"], sort=False):
        if part["heads"].nunique() >= FEWEST:
            part = part.sort_values("heads")
            heads, errors_of = (np.log(part[column].to_numpy(float)) for column in ("heads", "value"))
            slope, start = np.polyfit(heads, errors_of, 1)
            residual = float(np.sqrt(((errors_of - start - slope * heads) ** 2).mean()) / np.log(10))
            rows.append((*key, ", ".join(map(str, part["heads"])), -float(slope), residual))
    table = pd.DataFrame(rows, columns=[*keys, "seed", "heads", "value", "residual"])
    keys.append("heads")
    residuals = table.groupby(keys, sort=False, as_index=False)["residual"].mean()
    return results.contrasted(table, keys).merge(residuals, on=keys)


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Errors of 4a and 4b over heads beside the optimum."""
    errors = results.select(tables["summary"], measure="mse", norm="none", dot_product=False)
    memory = results.select(errors, target=["4a", "4b"], kernel=["log", "linear"], width=FFN_FREE)
    best = memory[memory["lr"] == RATES[0]].assign(
        mean=lambda t: t["optimum"].clip(1e-16), ci_low=np.nan, line="optimum"
    )
    trained = memory.assign(line=memory["lr"].map("trained, rate {:g}".format))
    axes: dict[str, Any] = {"xscale": "log", "yscale": "log", "ylabel": "squared error"}
    return {"heads": results.line_panels(pd.concat([trained, best]), ["target", "kernel"], "heads", "line", **axes)}


LENGTHS = (1000, 1250, 1500, 2000, 4000, 8000)
LONGER_STEPS, LONGER_STEPS_QUICK = 600, 100  # published: 10,000
LONGER_KEYS = ["target", "kernel", "heads", "length", "measure"]


def over_lengths(target: str, output: Callable[[int], tuple[float, np.ndarray]]) -> Iterator[dict[str, Any]]:
    """Yield `length`, `measure` and `value` of an affine function: a constant and the weight of each lag by length."""
    for length in LENGTHS:
        for measure, value in zip(("mse", "relative_mse"), relative.error(target, *output(length)), strict=True):
            yield {"length": length, "measure": measure, "value": value}


def solved_errors(cells: Sequence[Cell]) -> pd.DataFrame:
    """Errors of the least-squares solutions for 1000 inputs on every length: LONGER_KEYS, `value`."""
    rows = []
    for cell in cells:
        solution = relative.linear_optimum(cell.target, cell.kernel, cell.heads)
        coefficients, about = np.asarray(solution.coefficients), {k: getattr(cell, k) for k in LONGER_KEYS[:3]}

        def output(length: int) -> tuple[float, np.ndarray]:
            return 0.0, relative.design(cell.kernel, solution.slopes, length) @ coefficients  # noqa: B023

        rows += [about | row for row in over_lengths(cell.target, output)]
    return pd.DataFrame(rows)


def run_longer(request: Request) -> results.Results:
    """Train what is not trained, and put every model and every solution on longer inputs."""
    heads = (1,) if request.quick else (1, 16)
    kernels, steps = ("log", "linear", "t5"), LONGER_STEPS_QUICK if request.quick else LONGER_STEPS
    cells = [Cell(t, k, h, FFN_FREE) for t in relative.AFFINE_TARGETS for k in kernels for h in heads]
    schedule = replace(training(request.quick, 0, RATES[0]), steps=steps, evaluate_every=steps)
    runs = planned(
        cells,
        request,
        keys=lambda cell: {"target": cell.target, "kernel": cell.kernel, "heads": cell.heads},
        task=lambda cell, _: ApproximationTask(cell.target),
        training=lambda _, seed: replace(schedule, seed=seed),
    )
    lost = carry_out(runs, request)
    rows = []
    for run in (run for run in runs if run.finished):
        output = partial(relative.affine, cast("relative.RelativeTransformer", run.model()))
        rows += [{**run.keys, "seed": run.seed, **row} for row in over_lengths(str(run.keys["target"]), output)]
    tables = analyse_longer(pd.DataFrame(rows), solved_errors(cells))
    return results.Results(tables, plot_longer(tables), {"lengths": LENGTHS, "training": vars(schedule)}, lost)


def analyse_longer(trained: pd.DataFrame, solved: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Errors over length, trained (LONGER_KEYS, `seed`, `value`) beside solved (`solved_errors`)."""
    summary = results.summarize(trained, LONGER_KEYS, kind="log").drop(columns="published")
    both = solved.rename(columns={"value": "solved"}).merge(summary, on=LONGER_KEYS, how="left", validate="1:1")
    return {"summary": both, "errors": trained, "solved": solved}


def plot_longer(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Error relative to the best constant over length, trained and by least squares."""
    part = results.select(tables["summary"], measure="relative_mse")
    trained = part.assign(line=part["heads"].map("{} heads".format))
    solved = part.assign(line=trained["line"] + ", solved", mean=part["solved"].clip(lower=1e-16), ci_low=np.nan)
    axes: dict[str, Any] = {"xscale": "log", "yscale": "log", "ylabel": "error / best constant's", "columns": 3}
    both = pd.concat([trained, solved])
    return {"longer": results.line_panels(both, ["target", "kernel"], "length", "line", **axes)}
