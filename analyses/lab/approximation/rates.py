"""At what rate does the error of relative attention fall with the number of heads, trained and attainable?

After Wang & E (2024), whose theorems bound the error by a power of the number of heads (which one, for which target,
could not be checked here; no exponents are reported). From the kept errors:

trained     log error against log H, a least-squares line per seed: its exponent a (error ~ H^-a) with Student's t over
            seeds. A negative exponent says that more heads end with a larger error.
attainable  of the least-squares solutions (one number per H, no seeds) three laws with two constants each: a power of
            H, exp(-c sqrt H), exp(-c H). The one that leaves the smallest residual is named; the interval of its
            constant is Student's t over the residuals, so it speaks of the fit alone.

More heads can do whatever fewer can (with coefficients of 0), so a solution that is no better than one of fewer heads
says nothing of its own: from five heads on slopes are laid out and not searched for. T5's positions weigh all lags from
128 on alike, so their error has a known limit (`constant_tail_floor`): what is fitted is the excess over it. A law is
fitted where errors lie above what float64 rounds away (ROUNDED), and spoken of where points lie near it (FOLLOWS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats  # type: ignore[import-untyped]

from ln_probe.analyses.lab.approximation.approximation_targets import LENGTH, lag_weights, variance
from ln_probe.analyses.lab.approximation.relative_transformer import T5_LARGEST
from ln_probe.analyses.lab.intervals import LEVEL, SIGNIFICANT
from ln_probe.analyses.lab.results import contrasted

FEWEST = 3  # numbers of heads; a line through two points is no fit
# Errors relative to the best constant's: least squares cuts directions off at 1000 eps = 2e-13, which leaves (2e-13)²
# times the squared coefficients (about 10 each, where errors are that small).
ROUNDED = 1e-23
STALLED = 0.5  # a factor from the fewest to the most heads: an error that falls by less than half follows no rate here
FOLLOWS = 0.5  # decades, root mean square: points within a factor of about 3 of a line follow its law
LAWS: dict[str, Callable[[Float[np.ndarray, " point"]], Float[np.ndarray, " point"]]] = {
    "H^-c": np.log,
    "exp(-c sqrt H)": np.sqrt,
    "exp(-c H)": np.asarray,
}
NO_RATE = "none"
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
    """Which law the least-squares errors follow.

    Args:
        optima: `target, kernel, heads, mse`.

    Returns:
        `target, kernel, points` (numbers of heads that improve on all fewer and leave more than ROUNDED), `first, last`
        (errors relative to the best constant's, at the fewest and the most heads of these), `limit` (the same of T5's
        limit, else 0), `law` of the excess over it (of LAWS; NO_RATE where the error stalls or points are too few),
        `c, c_low, c_high`, `residual` (root mean square of the log10 error) and `residual_power`, the same of H^-c.
    """
    rows = []
    for (target, kernel), part in optima.groupby(["target", "kernel"], sort=False):
        part = part.sort_values("heads")
        whole = variance(str(target))
        limit = constant_tail_floor(str(target)) / whole if kernel == "t5" else 0.0
        relative = part["mse"].to_numpy(float) / whole
        seen = (relative - limit > ROUNDED) & (np.diff(np.minimum.accumulate(relative), prepend=np.inf) < 0)
        heads, shown = part["heads"].to_numpy(float)[seen], relative[seen]
        ends = (float(shown[0]), float(shown[-1])) if len(shown) else (np.nan, np.nan)
        law, fitted, power = NO_RATE, (np.nan,) * 4, np.nan
        if len(shown) >= FEWEST and ends[1] < STALLED * ends[0]:
            fits = {name: _line(of(heads), np.log(shown - limit)) for name, of in LAWS.items()}
            law = min(fits, key=lambda name: fits[name][3])
            fitted, power = fits[law], fits["H^-c"][3]
        rows.append((target, kernel, len(shown), *ends, limit, law, *fitted, power))
    columns = ["target", "kernel", "points", "first", "last", "limit", "law", "c", "c_low", "c_high", "residual"]
    return pd.DataFrame(rows, columns=[*columns, "residual_power"])


def _line(x: Float[np.ndarray, " point"], y: Float[np.ndarray, " point"]) -> tuple[float, float, float, float]:
    """Minus the slope of a least-squares line with its interval, and the residual in log10."""
    found = stats.linregress(x, y)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 2)) * float(found.stderr)
    residual = y - found.intercept - found.slope * x
    c = -float(found.slope)
    return c, c - half, c + half, float(np.sqrt((residual**2).mean()) / np.log(10))


def constant_tail_floor(target: str) -> float:
    """The least squared error of anything that weighs all lags from T5_LARGEST on alike, on LENGTH inputs: T5's limit.

    The best common weight is the mean of the target's, so what is left is their spread.

    Raises:
        ValueError: a target that is not linear.
    """
    weights = lag_weights(target)
    if weights is None:
        raise ValueError(f"target {target!r} is not linear: it has no weight per lag")
    tail = weights[T5_LARGEST:LENGTH]
    return float(((tail - tail.mean()) ** 2).sum())


def sentences(trained: pd.DataFrame, laws: pd.DataFrame) -> Iterator[str]:
    """What the rates say, in words."""
    for row in laws.to_dict("records"):
        where = f"Attainable rate, {row['target']}, {row['kernel']} positions"
        of = f", the excess over the limit of {row['limit']:.3g} of the best constant's error" if row["limit"] else ""
        if row["law"] != NO_RATE:
            near = row["residual"] < FOLLOWS and row["c_low"] > 0
            said = "follows" if near else "these points tell no law; nearest is"
            yield (
                f"{where}{of}: {said} {row['law']} with c = {row['c']:.2g} [{row['c_low']:.2g}, {row['c_high']:.2g}] "
                f"({row['points']} numbers of heads; off by {row['residual']:.2g} decades, a power of H by "
                f"{row['residual_power']:.2g})."
            )
        elif row["points"] < FEWEST:
            held = "one head is exact to rounding" if not row["points"] else f"exact to rounding beyond {row['points']}"
            yield f"{where}: {held}: no rate to fit."
        else:
            beside = f", T5's limit is {row['limit']:.4g}" if row["limit"] else ""
            yield (
                f"{where}: no rate, for the error stalls ({row['first']:.4g} to {row['last']:.4g} of the best "
                f"constant's from the fewest to the most heads{beside})."
            )
    told = trained[trained["p_holm"] < SIGNIFICANT]
    yield (
        f"Trained rates: exponents that differ from 0 after Holm's adjustment: {len(told)} of {len(trained)}"
        + (", " if len(told) else "")
        + "; ".join(_trained_rate(row) for _, row in told.iterrows())
        + "."
    )


def _trained_rate(row: pd.Series) -> str:
    ffn = f"FFN of {row['width']}" if row["width"] else "no FFN"
    near = "" if row["residual"] < FOLLOWS else f", though off a power by {row['residual']:.2g} decades"
    return (
        f"{row['target']} {row['kernel']}, {ffn}, lr {row['lr']:g}, H = {row['heads']}: exponent {-row['mean']:.2g} "
        f"[{-row['ci_high']:.2g}, {-row['ci_low']:.2g}]{near}"
    )
