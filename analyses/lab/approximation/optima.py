"""Attainable errors: `python -m ln_probe.analyses.lab.approximation.optima` makes the kept table anew (minutes)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.lab.approximation.approximation import (
    EVALUATION_INPUTS,
    EVALUATION_SEED,
    OPTIMA,
    ApproximationTask,
)
from ln_probe.analyses.lab.approximation.approximation_targets import (
    DIGITS,
    SEARCHED,
    SLOPE_RANGE,
    extended_error,
    extended_solution,
    linear_optimum,
    sampling_error,
)
from ln_probe.analyses.lab.approximation.rates import LAID_OUT, SEARCHED_FOR, constant_tail_floor

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
        held = extended_error(target, kernel, optimum.slopes, optimum.coefficients)
        solved = extended_solution(target, kernel, optimum.slopes)
        sampled = float(((by_lag @ solved.left) ** 2).mean())
        found = SEARCHED_FOR if heads <= SEARCHED else LAID_OUT
        excess = solved.mse - (constant_tail_floor(target) if kernel == "t5" else 0.0)
        about = (solved.mse, solved.largest, DIGITS, excess, sampled, sampling_error(solved.left, EVALUATION_INPUTS))
        rows.append((target, kernel, heads, found, *held, *about))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def main() -> None:
    """Write `published/approximation/optima.csv`."""
    write_atomically(OPTIMA, optimum_table().to_csv(index=False, float_format="%.6g").encode())


if __name__ == "__main__":
    main()
