"""At what rate does the error of relative attention fall with the number of heads, trained and attainable?

After Wang & E (2024), whose theorems bound the error by a power of the number of heads (which one, for which target,
could not be checked here; no exponents are reported). From the kept errors:

trained     log error against log H, a least-squares line per seed: its exponent a (error ~ H^-a) with Student's t over
            seeds. A negative exponent says that more heads end with a larger error.
attainable  of the least-squares solutions in extended precision (one number per H, no seeds) three laws with two
            constants each: a power of H, exp(-c sqrt H), exp(-c H). The interval of a constant is Student's t over the
            residuals, so it covers the fit alone.

Up to four heads slopes are searched for, from five on they are laid out: two kinds of points, and a law is laid through
points of one kind. It is reported only for TELLING points or more, if it lies near them (FOLLOWS), falls for certain,
and lies much nearer than the other laws do (APART). More heads can do all that fewer can (with coefficients of 0), so a
solution that is no better than one of fewer heads adds no information. T5's positions weigh all lags from 128 on
alike, so their error has a known limit (`constant_tail_floor`): what is fitted is the excess over it.

Is the dot product needed? Pairs of runs of one seed that differ in it alone.

Wang & E (2024), section 6: 3a, on the sum 1b ("marginal"), and 3b, on text, where the model with it is always better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats  # type: ignore[import-untyped]

from ln_probe.analyses.lab.approximation.approximation_targets import LENGTH, T5_LARGEST, linear_weights, variance
from ln_probe.analyses.lab.results import (
    LEVEL,
    as_factors,
    contrasted,
    minus_reference,
)

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
NO_RATE = "none"
LAW_COLUMNS = (
    "target", "kernel", "found", "points", "heads", "first", "last", "limit", "exact_from", "law", "c", "c_low",
    "c_high", "residual", "second", "residual_second", "told",
)  # fmt: skip
TRAINED_KEYS = ("target", "kernel", "width", "lr")


def trained_exponents(errors: pd.DataFrame) -> pd.DataFrame:
    """The exponents of error against heads: a line per seed, an interval over seeds.

    Args:
        errors: the kept values of the approximation experiment: its KEYS, `seed`, `measure`, `value`.

    Returns:
        TRAINED_KEYS, `heads` ("1, 4, 16, 64"), then `mean, ci_low, ci_high, median, sd, seeds, p, p_holm` of a, where
        error ~ H^-a, and `residual` (root mean square of the log10 error about the lines, the mean over seeds); models
        without a norm and without the dot product, with at least FEWEST numbers of heads.
    """
    plain = errors[(errors["measure"] == "mse") & (errors["norm"] == "none") & ~errors["dot_product"].astype(bool)]
    rows = []
    for key, part in plain.groupby([*TRAINED_KEYS, "seed"], sort=False):
        if part["heads"].nunique() >= FEWEST:
            part = part.sort_values("heads")
            a, *_, residual = _line(np.log(part["heads"].to_numpy(float)), np.log(part["value"].to_numpy(float)))
            rows.append((*key, ", ".join(map(str, part["heads"])), a, residual))
    keys = [*TRAINED_KEYS, "heads"]
    table = pd.DataFrame(rows, columns=[*TRAINED_KEYS, "seed", "heads", "value", "residual"])
    residuals = table.groupby(keys, sort=False, as_index=False)["residual"].mean()
    return contrasted(table, keys).merge(residuals, on=keys)


def attainable_laws(optima: pd.DataFrame) -> pd.DataFrame:
    """Which law the least-squares errors follow, for slopes that were searched for and for those laid out.

    Args:
        optima: `target, kernel, heads, found, mse_extended, excess` of the kept table of `optima`.

    Returns:
        LAW_COLUMNS: `points` (numbers of heads that improve on all fewer, before a searched solution is exact), `heads`
        (of these, "8, 16, 32"), `first, last` (errors relative to the best constant's, at the fewest and the most of
        these), `limit` (the same of T5's limit, else 0), `exact_from` (heads from which on a searched
        solution leaves less than ROUNDED; NaN if none does), `law` of the excess that lies nearest (of LAWS; NO_RATE
        where the error stalls or points are too few), `c, c_low, c_high`, `residual` (root mean square of the log10
        error), `second` and `residual_second`, the same of the next law, and `told` (see the module).
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
        for found in dict.fromkeys(part["found"]):
            mine = seen & (part["found"] == found).to_numpy()
            ends = tuple(relative[mine][[0, -1]]) if mine.any() else (np.nan, np.nan)
            shown = ", ".join(f"{h:.0f}" for h in heads[mine]) or "none"
            about = (target, kernel, found, int(mine.sum()), shown, *ends, limit, exact)
            rows.append((*about, *_law(heads[mine], excess[mine], ends)))
    return pd.DataFrame(rows, columns=list(LAW_COLUMNS)).replace({"exact_from": np.inf}, np.nan)


def _law(
    heads: Float[np.ndarray, " point"], excess: Float[np.ndarray, " point"], ends: tuple[float, float]
) -> tuple[str, float, float, float, float, str, float, bool]:
    """The last columns of `attainable_laws`."""
    if len(heads) < FEWEST or ends[1] >= STALLED * ends[0]:
        return NO_RATE, np.nan, np.nan, np.nan, np.nan, NO_RATE, np.nan, False
    fits = {name: _line(of(heads), np.log(excess)) for name, of in LAWS.items()}
    law, second = sorted(fits, key=lambda name: fits[name][3])[:2]
    _, low, _, residual = fits[law]
    told = len(heads) >= TELLING and residual < FOLLOWS and fits[second][3] >= APART * residual and low > 0
    return law, *fits[law], second, fits[second][3], told


def _line(x: Float[np.ndarray, " point"], y: Float[np.ndarray, " point"]) -> tuple[float, float, float, float]:
    """Minus the slope of a least-squares line with its interval, and the residual in log10."""
    found = stats.linregress(x, y)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 2)) * float(found.stderr)
    residual = y - found.intercept - found.slope * x
    c = -float(found.slope)
    return c, c - half, c + half, float(np.sqrt((residual**2).mean()) / np.log(10))


def constant_tail_floor(target: str) -> float:
    """The least squared error of anything that weighs all lags from T5_LARGEST on alike, on LENGTH inputs: T5's limit.

    The best common weight is the mean of the target's, so the remaining error is their spread.

    Raises:
        ValueError: a target that is not linear.
    """
    tail = linear_weights(target)[T5_LARGEST:LENGTH]
    return float(((tail - tail.mean()) ** 2).sum())


SWITCH = "dot_product"


def paired(values: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """With the dot product minus without, of the same seed and `keys`: `keys` and what `contrasted` gives."""
    return contrasted(minus_reference(values, ~values[SWITCH].astype(bool), [*keys, "seed"]), keys)


def dot_product_factors(errors: pd.DataFrame) -> pd.DataFrame:
    """By what factor the dot product changes the squared error (3a): geometric means over seeds.

    Returns:
        `target, kernel, heads, width, factor, low, high` (95 %), `seeds, p, p_holm`.
    """
    plain = errors[(errors["measure"] == "mse") & (errors["norm"] == "none")]
    logs = plain.assign(value=np.log(plain["value"].astype(float)))
    keys = ["target", "kernel", "heads", "width"]
    return as_factors(paired(logs, [*keys, "norm_order", "lr"]), keys)
