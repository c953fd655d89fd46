"""What relative attention approximates: trained errors and the least-squares optimum of the same model.

After Wang & E (2024, "Understanding the Expressive Power and Mechanisms of Transformer for Sequence Modeling"), section
6: dot-product-free attention with logarithmic, linear or tabulated positions (`relative_transformer`) on the targets of
`approximation_targets`. Where a trained error lies far above the optimum, optimization failed and not expressivity; two
learning rates show how much that is worth. The published model has no norm: here one is put before or after its
sublayers. A norm before them leaves the residual as it is and can express all that the plain model can; a norm after
them that scales puts the output on a sphere, which a sum of many inputs does not lie on.

Hypotheses, written down before their runs: on 1b and 2b 64 heads with T5's positions leave most of the variance, as
with logarithmic and linear ones; on 1b 32 heads with an FFN of 256 and a learned bias per lag are no better than 8.

Attainable errors: `python -m ln_probe.analyses.lab.approximation.approximation` makes the kept table anew (minutes).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.lab.approximation import rates
from ln_probe.analyses.lab.approximation.approximation_targets import (
    AFFINE_TARGETS,
    DIGITS,
    LENGTH,
    SEARCHED,
    SLOPE_RANGE,
    RelativeConfig,
    RelativeTransformer,
    affine,
    error,
    evaluate,
    extended_solution,
    linear_optimum,
    plain,
    sampling_error,
    table_optimum,
    variance,
)
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import (
    Results,
    as_factors,
    effects,
    folder,
    heat_map,
    panels,
    summarize,
)
from ln_probe.analyses.lab.train import Run, Task, TrainConfig, carry_out, curves, planned, step_generator
from ln_probe.analyses.probes.statistics import holm

HEADS, HEADS_QUICK = (1, 4, 16, 64), (1, 16)
WIDTH = 32  # hidden units of the FFN where a target does not ask for a number of them
FFN_FREE = 0
RATES = (1e-2, 1e-3)
EVALUATION_SEED = 10_000  # apart from every training seed
EVALUATION_INPUTS = 4096
EXACT = 0  # inputs of an evaluation that is a sum over lags
OPTIMA = folder("approximation") / "optima.csv"  # kept: making it takes minutes
KEYS = ("target", "kernel", "heads", "width", "dot_product", "norm", "norm_order", "lr")

# Squared errors as reported; bounds ("< 1e-5") as their bound. 2a and 2b were reported over m and H, not which.
PUBLISHED = pd.DataFrame(
    [("4a", "log", 1, 1e-5), ("4a", "linear", 64, 0.19), ("4b", "linear", 1, 1e-7), ("4b", "log", 64, 5.3e-4)],
    columns=["target", "kernel", "heads", "published"],
).assign(norm="none", norm_order="pre", width=0)  # 4a and 4b were published without an FFN
PUBLISHED_BOUNDS = (("4a", "log", 1), ("4b", "linear", 1))  # the others are figures
PUBLISHED_RANGES = {
    "1b": "H = 32, m = 256 adequate",
    "2a": "m raised: 0.49 to 0.002; H no help",
    "2b": "H raised: 1.16 to 1e-6; m no help",
    "3a": "dot product marginal",
}


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

    def spec(self) -> RelativeConfig:
        return RelativeConfig(LENGTH, self.heads, self.width, self.kernel, self.dot_product, self.norm, self.norm_order)

    def optima(self) -> tuple[float, float]:
        """The least squared error known to be attainable with this parametrization, and the error of the same solution
        on the inputs that models are measured on (a table's: the same); NaN where they are unknown.

        With a slope per head they are read from the kept table of `optima`, in extended precision: the coefficients of
        many heads are larger than float64 can tell apart (`mse` there is of those it holds). It bounds the optimum from
        above, for the slopes were searched from several starts (up to four heads) or laid out evenly (more), and proves
        no limit of what can be expressed. An FFN, whose output may be 0, does not raise it.
        """
        if self.norm_order == "post" and self.norm != "none":
            return np.nan, np.nan
        if self.kernel == "table":
            return (table_optimum(self.target, self.heads, self.width),) * 2
        return kept_optima().get((self.target, self.kernel, self.heads), (np.nan, np.nan))


class ApproximationTask(Task):
    """Squared error against a target on fresh inputs of +1 and -1.

    Models are measured on one sample of EVALUATION_INPUTS, the same for all, or, where they are affine, exactly.
    """

    name = "approximation"

    def __init__(self, target: str) -> None:
        self.target = target

    @property
    def identity(self) -> dict[str, Any]:
        return {"target": self.target, "length": LENGTH, "evaluated_on": EVALUATION_INPUTS}

    def batch(self, step: int, size: int, seed: int) -> Float[Tensor, "batch pos"]:
        return 2.0 * torch.randint(2, (size, LENGTH), generator=step_generator(seed, step)) - 1

    def loss(self, model: nn.Module, batch: Tensor) -> Float[Tensor, ""]:
        output: Tensor = model(batch)
        return (output - evaluate(self.target, batch)).pow(2).mean()

    @cached_property
    def _evaluation(self) -> Float[Tensor, "batch pos"]:
        return self.batch(0, EVALUATION_INPUTS, EVALUATION_SEED)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if isinstance(model, RelativeTransformer) and plain(model.cfg) and self.target in AFFINE_TARGETS:
            mse, _ = error(self.target, *affine(model, LENGTH))
            return {"mse": mse, "relative_mse": mse / variance(self.target), "evaluated_on": EXACT}
        mse = float(self.loss(model, self._evaluation))
        return {"mse": mse, "relative_mse": mse / variance(self.target), "evaluated_on": EVALUATION_INPUTS}


def grid(quick: bool) -> tuple[Cell, ...]:
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
    affine = [Cell("2a", "table", h, m) for h in (1, 8) for m in (1, 4, 16, 64)]
    dot_product = [Cell("1b", "table", h, dot_product=True) for h in (1, 4)]
    slopes = [Cell(t, kernel, 64) for t in ("1b", "2b") for kernel in ("log", "linear", "t5")]
    t5 = [Cell(target, "t5", h, FFN_FREE) for target in ("4a", "4b") for h in HEADS]
    return (*long_memory, *t5, *sparse, *normed, *affine, *dot_product, *slopes)


def training(quick: bool, seed: int, lr: float) -> TrainConfig:
    """The published batch and number of steps; the rest is ours, for it was not published."""
    steps = 1000 if quick else 10_000
    return TrainConfig(
        steps=steps,
        batch=100,
        lr=lr,
        lr_end=1e-6,
        warmup=100,
        weight_decay=0.0,
        clip=0.0,
        seed=seed,
        evaluate_every=steps,
        state_every=1000,
    )


def make_runs(request: Request) -> list[Run]:
    return planned(
        grid(request.quick),
        request,
        name=lambda cell: "-".join(f"{key}_{getattr(cell, key)}" for key in KEYS),
        task=lambda cell, _: ApproximationTask(cell.target),
        training=lambda cell, seed: training(request.quick, seed, cell.lr),
    )


def run(request: Request) -> Results:
    """Train the missing runs of the grid and put every error beside its optimum."""
    runs = make_runs(request)
    lost = carry_out(runs, request)
    table = with_inputs(curves(runs))
    return replace(findings(table, request.quick), diverged=lost)


def with_inputs(table: pd.DataFrame) -> pd.DataFrame:
    """Errors of `curves` with the column `evaluated_on`: how many inputs each was measured on, EXACT if on none."""
    run = [*KEYS, "seed", "step"]
    inputs = table[table["measure"] == "evaluated_on"].set_index(run)["value"]
    errors = table[table["measure"].isin(["mse", "relative_mse"])]
    found = errors.join(inputs.rename("evaluated_on"), on=run)
    return found.fillna({"evaluated_on": EVALUATION_INPUTS}).astype({"evaluated_on": int})  # older runs do not say


def findings(table: pd.DataFrame, quick: bool = False) -> Results:
    """Tables and figures from the errors of every run: as `with_inputs` makes them.

    Errors lie many orders of magnitude apart: centers are geometric means, intervals those of their logarithms.
    """
    values = table.drop(columns=["step", "evaluated_on"])
    summary = summarize(values, [*KEYS, "measure"], PUBLISHED.assign(measure="mse"), kind="log")
    laws = rates.attainable_laws(pd.read_csv(OPTIMA))
    factors, exponents, products = adjusted_together(
        norm_factors(table), rates.trained_exponents(table), rates.dot_product_factors(table)
    )
    cells = [Cell(**{key: row[key] for key in KEYS}) for row in summary.to_dict("records")]
    scale = [1.0 if m == "mse" else variance(t) for m, t in zip(summary["measure"], summary["target"], strict=True)]
    optima = np.array([cell.optima() for cell in cells], dtype=float).reshape(-1, 2)
    for place, name in enumerate(("optimum", "optimum_sampled")):
        summary.insert(len(KEYS) + 1 + place, name, optima[:, place] / np.asarray(scale, dtype=float))
    most = table.groupby([*KEYS, "measure"], sort=False, as_index=False)["evaluated_on"].max()
    summary = summary.merge(most, on=[*KEYS, "measure"], validate="1:1")
    return Results(
        summary,
        tables={
            "errors": table,
            "norm_factors": factors,
            "optima": pd.read_csv(OPTIMA),
            "rates_trained": exponents,
            "rates_attainable": laws,
            "dot_product": products,
        },
        figures={} if table.empty else dict(draw(summary)),
        settings={
            "training": vars(training(quick, 0, RATES[0])),
            "seeds": sorted({int(seed) for seed in table["seed"]}),
            "published_ranges": PUBLISHED_RANGES,
            "published_bounds": PUBLISHED_BOUNDS,
            "variance": {t: variance(t) for t in ("1b", "2a", "2b", "4a", "4b")},
        },
    )


def adjusted_together(*tables: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The tables with Holm's p over the rows of all of them: they are one family."""
    p_holm = holm(np.concatenate([table["p"].to_numpy(float) for table in tables]))
    for table, part in zip(tables, np.split(p_holm, np.cumsum([len(table) for table in tables])[:-1]), strict=True):
        yield table.assign(p_holm=part)


@cache
def kept_optima() -> dict[tuple[str, str, int], tuple[float, float]]:
    """Of the kept table of `optima`: errors in extended precision and on the evaluation's inputs, by target … heads."""
    table = pd.read_csv(OPTIMA)
    return {
        (r["target"], r["kernel"], r["heads"]): (r["mse_extended"], r["mse_sampled"]) for r in table.to_dict("records")
    }


def _attainable(row: dict[Hashable, Any]) -> str:
    """The optimum, and on which inputs a trained error that was sampled is to be compared with what."""
    best = row["optimum"]
    if np.isnan(best):
        return "not computed"
    if best == 0:
        return f"below {np.finfo(float).tiny:.0e}"
    same = f" ({row['optimum_sampled']:.2g} on the inputs of the trained models' errors)"
    return f"{best:.2g}" + ("" if row["evaluated_on"] == EXACT else same)


def norm_factors(table: pd.DataFrame) -> pd.DataFrame:
    """By what factor a norm changes the squared error: a geometric mean over seeds of pairs with the same batches.

    Returns:
        KEYS of the runs with a norm, `factor`, `low`, `high` (95 %), `seeds`, `p`, `p_holm` (over all rows).
    """
    errors = table[table["measure"] == "mse"].assign(value=lambda t: np.log(t["value"].astype(float)))
    return as_factors(effects(errors, KEYS, ["norm", "norm_order"]), KEYS)


def draw(summary: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every picture by name, of what there is."""
    errors = summary[summary["measure"] == "mse"]
    plain = errors[(errors["norm"] == "none") & ~errors["dot_product"].astype(bool)]
    if len(memory := plain[plain["target"].isin(["4a", "4b"])]):
        free = memory[memory["width"] == 0]  # as published, as soon as there are any
        yield "heads", _against_heads(free if len(free) else memory)
    if len(table := plain[plain["target"].isin(["1b", "2b"]) & (plain["kernel"] == "table")]) > 2:
        yield "table", _heads_by_width(table)


def _against_heads(part: pd.DataFrame) -> Figure:
    """Trained error over heads, a line per learning rate, with the optimum and the published figure."""
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    squares = [(t, k) for t in ("4a", "4b") for k in ("log", "linear")]
    for (target, kernel), ax in zip(squares, figure.subplots(2, 2, sharex=True).flat, strict=True):
        cell = part[(part["target"] == target) & (part["kernel"] == kernel)]
        for number, lr in enumerate(sorted(set(part["lr"]), reverse=True)):
            line = cell[cell["lr"] == lr].sort_values("heads")
            ax.plot(line["heads"], line["mean"], f"C{number}o-", label=f"trained, lr {lr:g}")
        if cell.empty:
            ax.set_axis_off()
            continue
        best = cell.drop_duplicates("heads")
        ax.plot(best["heads"], best["optimum"].clip(1e-16), "k--", marker="_", label="least squares")
        ax.plot(best["heads"], best["published"], "r*", label="published")
        ax.set(
            title=f"{target}, {kernel} positions", xscale="log", yscale="log", xlabel="heads", ylabel="squared error"
        )
        ax.set_xticks(list(best["heads"]), labels=list(best["heads"]))
        ax.minorticks_off()
    figure.axes[0].legend(fontsize=7)
    return figure


def _heads_by_width(part: pd.DataFrame) -> Figure:
    """Trained error of 1b and 2b with a table of positions, heads against hidden units."""
    from matplotlib.colors import LogNorm

    figure, axes = panels(2, 3.8, 3.2)
    for target, ax in zip(("1b", "2b"), axes, strict=True):
        square = part[part["target"] == target].pivot(index="heads", columns="width", values="mean")
        if square.empty:
            ax.set_axis_off()
            continue
        image = heat_map(ax, square, "{:.0e}".format, 1e-3, norm=LogNorm(1e-10, 1))
        ax.set(title=f"{target}, table of positions", xlabel="m", ylabel="heads")
    figure.colorbar(image, ax=figure.axes, label="squared error")
    return figure


SOLVED_HEADS = (1, 2, 4, 8, 16, 32, 64)  # more than are trained, for their rate
COLUMNS = (
    "target", "kernel", "heads", "found", "mse", "largest_coefficient", "mse_extended", "largest_extended", "digits",
    "excess", "mse_sampled", "sampling_error",
)  # fmt: skip


def optimum_table(cells: Sequence[tuple[str, str, int]] | None = None) -> pd.DataFrame:
    """Errors that the linear targets can be approximated to, by least squares over the heads' coefficients.

    Args:
        cells: target, kernel and number of heads; None: all that are kept (64 heads take 15 seconds each).

    Columns: `target, kernel, heads`; `found`: how the slopes were, "searched" for from several starts or "laid out"
    evenly; `mse`, `largest_coefficient`: of float64's coefficients of least norm, their error summed in extended
    precision; `mse_extended`, `largest_extended`: of coefficients solved for with `digits` digits, for the same slopes.
    Where the two part, the columns are dependent to within float64's rounding. `excess`: of `mse_extended` over the
    limit of T5's positions (`constant_tail_floor`), of others over 0. `mse_sampled`: of the same solution on the inputs
    that trained models are measured on; `sampling_error`: the standard error of that, relative to it.
    """
    task = ApproximationTask("4a")
    by_lag = task.batch(0, EVALUATION_INPUTS, EVALUATION_SEED).flip(1).double().numpy()
    rows = []
    every = [(t, k, h) for t in ("2b", "4a", "4b") for k in SLOPE_RANGE for h in SOLVED_HEADS]
    for target, kernel, heads in cells or every:
        optimum = linear_optimum(target, kernel, heads)
        held = extended_solution(target, kernel, optimum.slopes, optimum.coefficients)
        solved = extended_solution(target, kernel, optimum.slopes)
        sampled = float(((by_lag @ solved.left) ** 2).mean())
        found = rates.SEARCHED_FOR if heads <= SEARCHED else rates.LAID_OUT
        excess = solved.mse - (rates.constant_tail_floor(target) if kernel == "t5" else 0.0)
        about = (solved.mse, solved.largest, DIGITS, excess, sampled, sampling_error(solved.left, EVALUATION_INPUTS))
        rows.append((target, kernel, heads, found, held.mse, held.largest, *about))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def main() -> None:
    """Write `published/approximation/optima.csv`."""
    write_atomically(OPTIMA, optimum_table().to_csv(index=False, float_format="%.6g").encode())


if __name__ == "__main__":
    main()
