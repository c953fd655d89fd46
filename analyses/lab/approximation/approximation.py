"""What relative attention approximates: trained errors and the least-squares optimum of the same model.

After Wang & E (2024, "Understanding the Expressive Power and Mechanisms of Transformer for Sequence Modeling"), section
6: dot-product-free attention with logarithmic, linear, T5 or tabulated positions on the targets of `relative`. Where a
trained error lies far above the optimum, optimization failed and not expressivity; two learning rates show how much
that is worth. The published model has no norm: here one is put before or after its sublayers. A norm before them leaves
the residual as it is and can express all that the plain model can; a norm after them that scales puts the output on a
sphere, which a sum of many inputs does not lie on.

Hypotheses, written down before their runs: on 1b and 2b 64 heads with T5's positions leave most of the variance, as
with logarithmic and linear ones; on 1b 32 heads with an FFN of 256 and a learned bias per lag are no better than 8.

Rates. The source's theorems bound the error by a power of the number of heads. `rates_trained` has a least-squares line
of log error against log H per seed; `rates_attainable` which of three laws the solutions in `optima.csv` follow (made
by `python -m ln_probe.analyses.lab.approximation.approximation`, in minutes). Up to four heads slopes are searched for,
from five on they are laid out: a law is laid through points of one kind. Solutions that are no better than one of fewer
heads add no information. T5's positions weigh all lags from 128 on alike, so their error has a known limit
(`constant_tail_floor`): what is fitted is the excess over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor, nn

from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.lab.approximation.relative import (
    AFFINE_TARGETS,
    DIGITS,
    LENGTH,
    SEARCHED,
    SLOPE_RANGE,
    T5_LARGEST,
    RelativeConfig,
    RelativeTransformer,
    affine,
    error,
    evaluate,
    extended_solution,
    linear_optimum,
    linear_weights,
    plain,
    sampling_error,
    table_optimum,
    variance,
)
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import (
    LEVEL,
    Results,
    as_factors,
    contrasted,
    effects,
    heat_map,
    minus_reference,
    panels,
    select,
    summarize,
)
from ln_probe.analyses.lab.train import Task, TrainConfig, carry_out, curves, planned, step_generator
from ln_probe.analyses.probes.statistics import holm

HEADS, HEADS_QUICK = (1, 4, 16, 64), (1, 16)
WIDTH = 32  # hidden units of the FFN where a target does not ask for a number of them
FFN_FREE = 0
RATES = (1e-2, 1e-3)
EVALUATION_SEED = 10_000  # apart from every training seed
EVALUATION_INPUTS = 4096
EXACT = 0  # inputs of an evaluation that is a sum over lags
OPTIMA = Path(__file__).with_name("optima.csv")
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

    def spec(self) -> RelativeConfig:
        return RelativeConfig(LENGTH, self.heads, self.width, self.kernel, self.dot_product, self.norm, self.norm_order)


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
        exact = isinstance(model, RelativeTransformer) and plain(model.cfg) and self.target in AFFINE_TARGETS
        mse = error(self.target, *affine(model, LENGTH))[0] if exact else float(self.loss(model, self._evaluation))
        inputs = EXACT if exact else EVALUATION_INPUTS
        return {"mse": mse, "relative_mse": mse / variance(self.target), "evaluated_on": inputs}


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


def run(request: Request) -> Results:
    """Train the missing runs of the grid and put every error beside its optimum."""
    runs = planned(
        grid(request.quick),
        request,
        name=lambda cell: "-".join(f"{key}_{getattr(cell, key)}" for key in KEYS),
        task=lambda cell, _: ApproximationTask(cell.target),
        training=lambda cell, seed: training(request.quick, seed, cell.lr),
    )
    lost = carry_out(runs, request)
    tables = analyse(with_inputs(curves(runs)))
    settings = {"training": vars(training(request.quick, 0, RATES[0])), "seeds": list(request.seeds)}
    return Results(tables, plot(tables), settings, lost)


def with_inputs(table: pd.DataFrame) -> pd.DataFrame:
    """Errors of `curves` with the column `evaluated_on`: how many inputs each was measured on, EXACT if on none."""
    run = [*KEYS, "seed", "step"]
    inputs = table[table["measure"] == "evaluated_on"].set_index(run)["value"]
    errors = select(table, measure=["mse", "relative_mse"])
    return errors.join(inputs.rename("evaluated_on"), on=run).astype({"evaluated_on": int})


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Make the tables of the errors of every run (as `with_inputs`).

    Errors lie many orders of magnitude apart: centers are geometric means, intervals those of their logarithms. Holm's
    p is over `norm_factors`, `rates_trained` and `dot_product` together.
    """
    summary = summarize(frame.drop(columns=["step", "evaluated_on"]), [*KEYS, "measure"], PUBLISHED, kind="log")
    optima = pd.read_csv(OPTIMA)
    known = {
        (r["target"], r["kernel"], r["heads"]): (r["mse_extended"], r["mse_sampled"]) for r in optima.to_dict("records")
    }
    best = np.array([_optima(row, known) for row in summary.to_dict("records")], dtype=float).reshape(-1, 2)
    relative = (summary["measure"] != "mse").to_numpy()
    scale = np.where(relative, summary["target"].map(variance), 1.0)
    for place, name in enumerate(("optimum", "optimum_sampled")):
        summary.insert(len(KEYS) + 1 + place, name, best[:, place] / scale)
    most = frame.groupby([*KEYS, "measure"], sort=False, as_index=False)["evaluated_on"].max()
    tested = [norm_factors(frame), trained_exponents(frame), dot_product_factors(frame)]
    p_holm = holm(np.concatenate([table["p"].to_numpy(float) for table in tested]))
    parts = np.split(p_holm, np.cumsum([len(table) for table in tested])[:-1])
    factors, exponents, products = (t.assign(p_holm=p) for t, p in zip(tested, parts, strict=True))
    return {
        "summary": summary.merge(most, on=[*KEYS, "measure"], validate="1:1"),
        "errors": frame,
        "norm_factors": factors,
        "rates_trained": exponents,
        "rates_attainable": attainable_laws(optima),
        "dot_product": products,
    }


def _optima(row: Mapping[Any, Any], known: Mapping[tuple[str, str, int], tuple[float, float]]) -> tuple[float, float]:
    """The least squared error known to be attainable, and that of the same solution on the inputs of the evaluation.

    With a slope per head they are read from OPTIMA. An FFN, whose output may be 0, does not raise them.
    """
    if row["norm_order"] == "post" and row["norm"] != "none":
        return np.nan, np.nan
    if row["kernel"] == "table":
        return (table_optimum(row["target"], row["heads"], row["width"]),) * 2
    return known.get((row["target"], row["kernel"], row["heads"]), (np.nan, np.nan))


def norm_factors(frame: pd.DataFrame) -> pd.DataFrame:
    """By what factor a norm changes the squared error: a geometric mean over seeds of pairs with the same batches."""
    errors = select(frame, measure="mse").assign(value=lambda t: np.log(t["value"].astype(float)))
    return as_factors(effects(errors, KEYS, ["norm", "norm_order"]), KEYS)


def dot_product_factors(frame: pd.DataFrame) -> pd.DataFrame:
    """By what factor the dot product changes the squared error (3a): geometric means over seeds.

    Returns:
        `target, kernel, heads, width, factor, low, high` (95 %), `seeds, p, p_holm`.
    """
    errors = select(frame, measure="mse", norm="none")
    logs = errors.assign(value=np.log(errors["value"].astype(float)))
    keys = ["target", "kernel", "heads", "width"]
    pairs = minus_reference(logs, ~logs["dot_product"].astype(bool), [*keys, "norm_order", "lr", "seed"])
    return as_factors(contrasted(pairs, keys), keys)


# ----------------------------------------------------------------------------------------------------------- rates

FEWEST = 3  # numbers of heads; a line through two points is no fit
# Errors relative to the best constant's. Searched slopes are float64: off by 1e-16 of themselves they leave 1e-32 times
# the squared coefficients (about 10 each, where errors are that small). What leaves less than this is exact.
ROUNDED = 1e-28
STALLED = 0.5  # a factor from the fewest to the most heads: an error that falls by less than half follows no rate here
TELLING = 4  # numbers of heads: with three, a law of two constants has one point to be wrong at
APART = 4.0  # times the residual of the law that is reported: what the next law must be off by, at least
FOLLOWS = 0.5  # decades, root mean square: points within a factor of about 3 of a line follow its law
SEARCHED_FOR, LAID_OUT = "searched", "laid out"  # how the slopes of a solution were found
LAWS: dict[str, Callable[[Float[np.ndarray, " point"]], Float[np.ndarray, " point"]]] = {
    "H^-c": np.log,
    "exp(-c sqrt H)": np.sqrt,
    "exp(-c H)": np.asarray,
}
NO_RATE = ("none", np.nan, np.nan, np.nan, np.nan, "none", np.nan, False)
LAW_COLUMNS = [
    "target", "kernel", "found", "points", "heads", "first", "last", "limit", "exact_from", "law", "c", "c_low",
    "c_high", "residual", "second", "residual_second", "told",
]  # fmt: skip


def trained_exponents(frame: pd.DataFrame) -> pd.DataFrame:
    """The exponents of error against heads: a line per seed, an interval over seeds.

    Returns:
        `target, kernel, width, lr, heads` ("1, 4, 16, 64"), what `contrasted` gives of a, where error ~ H^-a, and
        `residual` (root mean square of the log10 error about the lines, the mean over seeds); of models without a norm
        and without the dot product, with at least FEWEST numbers of heads.
    """
    keys = ["target", "kernel", "width", "lr"]
    errors = select(frame, measure="mse", norm="none", dot_product=False)
    rows = []
    for key, part in errors.groupby([*keys, "seed"], sort=False):
        if part["heads"].nunique() >= FEWEST:
            part = part.sort_values("heads")
            a, *_, residual = _line(np.log(part["heads"].to_numpy(float)), np.log(part["value"].to_numpy(float)))
            rows.append((*key, ", ".join(map(str, part["heads"])), a, residual))
    table = pd.DataFrame(rows, columns=[*keys, "seed", "heads", "value", "residual"])
    keys.append("heads")
    residuals = table.groupby(keys, sort=False, as_index=False)["residual"].mean()
    return contrasted(table, keys).merge(residuals, on=keys)


def attainable_laws(optima: pd.DataFrame) -> pd.DataFrame:
    """Which law the least-squares errors follow, for slopes that were searched for and for those laid out.

    Returns:
        LAW_COLUMNS: `points` (numbers of heads that improve on all fewer, before a searched solution is exact), `heads`
        (of these), `first, last` (errors relative to the best constant's, at the fewest and the most of these),
        `limit` (the same of T5's limit, else 0), `exact_from` (heads from which on a searched solution leaves less than
        ROUNDED), `law` of the excess that lies nearest ("none" where the error stalls or points are too few), its `c`
        with the interval of the fit alone, `residual` (root mean square of the log10 error), the same of the next law,
        and `told`: whether TELLING points or more lie near the law (FOLLOWS), fall for certain, and lie much nearer
        than to the next one (APART).
    """
    rows = []
    for (target, kernel), part in optima.groupby(["target", "kernel"], sort=False):
        part = part.sort_values("heads")
        whole = variance(str(target))
        limit = constant_tail_floor(str(target)) / whole if kernel == "t5" else 0.0
        relative, excess = (part[c].to_numpy(float) / whole for c in ("mse_extended", "excess"))
        searched, heads = (part["found"] == SEARCHED_FOR).to_numpy(), part["heads"].to_numpy(float)
        exact = heads[searched & (relative <= ROUNDED)].min(initial=np.inf)
        seen = (heads < exact) & (np.diff(np.minimum.accumulate(relative), prepend=np.inf) < 0) & (excess > 0)
        for way in dict.fromkeys(part["found"]):
            of_way = seen & (part["found"] == way).to_numpy()
            ends = tuple(relative[of_way][[0, -1]]) if of_way.any() else (np.nan, np.nan)
            shown = ", ".join(f"{h:.0f}" for h in heads[of_way]) or "none"
            about = (target, kernel, way, int(of_way.sum()), shown, *ends, limit, exact)
            rows.append((*about, *_law(heads[of_way], excess[of_way], ends)))
    return pd.DataFrame(rows, columns=LAW_COLUMNS).replace({"exact_from": np.inf}, np.nan)


def _law(
    heads: Float[np.ndarray, " point"], excess: Float[np.ndarray, " point"], ends: tuple[float, float]
) -> tuple[str, float, float, float, float, str, float, bool]:
    """The last columns of `attainable_laws`."""
    if len(heads) < FEWEST or ends[1] >= STALLED * ends[0]:
        return NO_RATE
    fits = {name: _line(of(heads), np.log(excess)) for name, of in LAWS.items()}
    law, second = sorted(fits, key=lambda name: fits[name][3])[:2]
    _, low, _, residual = fits[law]
    told = len(heads) >= TELLING and residual < FOLLOWS and fits[second][3] >= APART * residual and low > 0
    return law, *fits[law], second, fits[second][3], told


def _line(x: Float[np.ndarray, " point"], y: Float[np.ndarray, " point"]) -> tuple[float, float, float, float]:
    """Minus the slope of a least-squares line with its interval, and the residual in log10."""
    line = stats.linregress(x, y)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 2)) * float(line.stderr)
    residual = y - line.intercept - line.slope * x
    c = -float(line.slope)
    return c, c - half, c + half, float(np.sqrt((residual**2).mean()) / np.log(10))


def constant_tail_floor(target: str) -> float:
    """The least squared error of anything that weighs all lags from T5_LARGEST on alike, on LENGTH inputs: T5's limit.

    The best common weight is the mean of the target's, so the remaining error is their spread.
    """
    tail = linear_weights(target)[T5_LARGEST:LENGTH]
    return float(((tail - tail.mean()) ** 2).sum())


# --------------------------------------------------------------------------------------------------------- figures


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Errors of 4a and 4b over heads beside the optimum; of 1b and 2b with a table of positions, heads against FFN."""
    from matplotlib.colors import LogNorm

    errors = select(tables["summary"], measure="mse", norm="none", dot_product=False)
    memory = select(errors, target=["4a", "4b"], kernel=["log", "linear"], width=FFN_FREE)
    figure, axes = panels(4, 4, 2.8, columns=2)
    for ((target, kernel), cell), ax in zip(memory.groupby(["target", "kernel"], sort=False), axes, strict=False):
        for number, (lr, line) in enumerate(cell.groupby("lr", sort=False)):
            ax.plot(line["heads"], line["mean"], f"C{number}o-", label=f"trained, lr {lr:g}")
        ax.plot(cell["heads"], cell["optimum"].clip(1e-16), "k_", label="least squares")
        ax.plot(cell["heads"], cell["published"], "r*", label="published")
        ax.set(title=f"{target}, {kernel}", xscale="log", yscale="log", xlabel="heads", ylabel="squared error")
    axes[0].legend(fontsize=7)
    squares = select(errors, target=["1b", "2b"], kernel="table")
    table, axes = panels(2, 3.8, 3.2)
    for (target, part), ax in zip(squares.groupby("target"), axes, strict=False):
        square = part.pivot(index="heads", columns="width", values="mean")
        heat_map(ax, square, "{:.0e}".format, 1e-3, norm=LogNorm(1e-10, 1))
        ax.set(title=f"{target}, table of positions", xlabel="m", ylabel="heads")
    return {"heads": figure, "table": table}


SOLVED_HEADS = (1, 2, 4, 8, 16, 32, 64)  # more than are trained, for their rate


def optimum_table() -> pd.DataFrame:
    """Errors that the linear targets can be approximated to, by least squares over the heads' coefficients.

    Columns: `target, kernel, heads`; `found`: how the slopes were; `mse`, `largest_coefficient`: of float64's
    coefficients of least norm, their error summed in extended precision; `mse_extended`, `largest_extended`: of
    coefficients solved for with `digits` digits, for the same slopes. `excess`: of `mse_extended` over the limit of
    T5's positions, of others over 0. `mse_sampled`: of the same solution on the inputs that trained models are measured
    on; `sampling_error`: the standard error of that, relative to it.
    """
    by_lag = ApproximationTask("4a").batch(0, EVALUATION_INPUTS, EVALUATION_SEED).flip(1).double().numpy()
    rows = []
    for target, kernel, heads in itertools.product(("2b", "4a", "4b"), SLOPE_RANGE, SOLVED_HEADS):
        optimum = linear_optimum(target, kernel, heads)
        float64 = extended_solution(target, kernel, optimum.slopes, optimum.coefficients)
        solved = extended_solution(target, kernel, optimum.slopes)
        rows.append(
            {
                "target": target,
                "kernel": kernel,
                "heads": heads,
                "found": SEARCHED_FOR if heads <= SEARCHED else LAID_OUT,
                "mse": float64.mse,
                "largest_coefficient": float64.largest,
                "mse_extended": solved.mse,
                "largest_extended": solved.largest,
                "digits": DIGITS,
                "excess": solved.mse - (constant_tail_floor(target) if kernel == "t5" else 0.0),
                "mse_sampled": float(((by_lag @ solved.left) ** 2).mean()),
                "sampling_error": sampling_error(solved.left, EVALUATION_INPUTS),
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    write_atomically(OPTIMA, optimum_table().to_csv(index=False, float_format="%.6g").encode())
