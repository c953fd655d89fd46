"""Targets of the approximation experiment and the least-squares optimum of what is to learn them.

Inputs are independent +1s and -1s, x_1 … x_1000; the output is wanted at position 1000 (Wang & E 2024, section 6):

    1b   sum over 64 units of ReLU(<w_k, (x_48, x_56, x_99)>)         2a   sum over 64 units of ReLU(w_k x_99)
    2b   x_48 + x_56 + x_99                                          4a   sum over s < 1000 of x_s (1000 - s)^-0.5
    4b   sum over s of x_s e^(-5 (1000 - s))

4a begins at lag 1: as written it is infinite at s = 1000. 2a has one input of +1 or -1, so it is affine in x_99. How
the w_k were drawn is not published: here from a normal distribution with variance 1/64.

For a linear target and fixed slopes the best output is a least-squares problem in the coefficients of the heads and of
the residual. The inputs are uncorrelated with variance 1, so its squared error is a squared distance of coefficients.

Relative attention that is affine in its inputs: its squared error as a sum over lags, and what a sample is off by.

Without an FFN, the dot product and a norm, the output is a constant and a weight per lag. Inputs are independent +1s
and -1s, so the squared error is a sum over lags, and so is the variance of a squared error over inputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import least_squares  # type: ignore[import-untyped]
from torch import Tensor

from ln_probe.analyses.lab.approximation.relative_transformer import RelativeConfig, RelativeTransformer, lag_features

try:
    import mpmath
except ImportError as missing:
    raise ImportError("Solving exactly needs the package mpmath: pip install 'ln-probe[lab]'.") from missing


LENGTH = 1000
SPARSE = (48, 56, 99)  # positions, from 1, that 1b and 2b look at
SPARSE_ONE = 99  # that 2a looks at
UNITS = 64
TARGETS = ("1b", "2a", "2b", "4a", "4b")
# Slopes from one that spreads over the whole sequence to one that sees the nearest lag alone, in the logarithm.
SLOPE_RANGE = {"log": (1e-3, 30.0), "linear": (1e-4, 30.0), "t5": (1e-4, 30.0)}
DIGITS = 400  # of the extended precision; with 64 heads the normal equations' least pivots are below 1e-150
SEARCHED = 4  # heads up to which slopes are searched for; with more they are laid out evenly
STARTS = 8  # of the search over slopes, from 1, 2, … 8 parts of that range; more found nothing better


def _units(target: str) -> Float[Tensor, "unit input"]:
    """The w_k, the same for everybody."""
    generator = torch.Generator().manual_seed(0)
    inputs = 1 if target == "2a" else 3
    return torch.randn(UNITS, inputs, generator=generator, dtype=torch.float64) / math.sqrt(UNITS)


def lag_weights(target: str, length: int = LENGTH) -> Float[np.ndarray, " lag"] | None:
    """The weight of each lag 0 … length - 1 in a linear target; None for 1b and 2a.

    2b's places are counted from the beginning of 1000 inputs, whatever the length: only 4a and 4b have another meaning
    for longer ones.
    """
    lag = np.arange(length, dtype=float)
    if target == "4a":
        return np.concatenate([[0.0], lag[1:] ** -0.5])
    if target == "4b":
        return np.asarray(np.exp(-5 * lag))
    if target == "2b":
        return np.isin(LENGTH - lag, SPARSE).astype(float)
    return None


def evaluate(target: str, x: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
    """The target's value for each input.

    Raises:
        ValueError: an unknown target, or inputs that are not 1000 long.
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}: known ones are {', '.join(TARGETS)}")
    if x.shape[-1] != LENGTH:
        raise ValueError(f"inputs must have {LENGTH} positions, got {x.shape[-1]}")
    weights = lag_weights(target)
    if weights is not None:
        return x.flip(-1) @ torch.from_numpy(weights).to(x)
    seen = x[..., [s - 1 for s in ((SPARSE_ONE,) if target == "2a" else SPARSE)]]
    return (seen @ _units(target).T.to(x)).relu().sum(-1)


@cache
def variance(target: str) -> float:
    """The target's variance: the squared error of the best constant."""
    weights = lag_weights(target)
    if weights is not None:
        return float((weights**2).sum())
    values, _ = _truth_table(target)
    return float(values.var())


def _truth_table(target: str) -> tuple[Float[np.ndarray, " row"], Float[np.ndarray, "row input"]]:
    """The values of 1b or 2a on all inputs that matter, and those inputs."""
    units = _units(target).numpy()
    inputs = np.array(list(itertools.product((-1.0, 1.0), repeat=units.shape[1])))
    return np.maximum(inputs @ units.T, 0).sum(1), inputs


@dataclass(frozen=True)
class Optimum:
    """The least squared error found for a parametrization, and the parameters that have it.

    Attributes:
        mse: its squared error. For several heads an upper bound on the least possible one (the search is not convex).
        slopes: p_h of each head. coefficients: of the heads and, last, of the residual.
    """

    mse: float
    slopes: tuple[float, ...]
    coefficients: tuple[float, ...]


def design(
    kernel: str, slopes: Sequence[float] | Float[np.ndarray, " head"], length: int = LENGTH
) -> Float[np.ndarray, "lag feature"]:
    """What heads of these slopes and the residual can add up: a column of attention per head, then lag 0 alone."""
    phi = lag_features(kernel, length).numpy()
    scores = np.where(np.isinf(phi)[:, None], -np.inf, np.outer(np.where(np.isinf(phi), 0.0, phi), slopes))
    weights = np.exp(scores - scores.max(axis=0))
    residual = np.zeros((length, 1))
    residual[0] = 1.0
    return np.hstack([weights / weights.sum(axis=0), residual])


def fit(target: str, kernel: str, slopes: Sequence[float] | Float[np.ndarray, " head"]) -> Optimum:
    """The least-squares optimum of a linear target over the coefficients, for given slopes."""
    weights = _linear(target)
    columns = design(kernel, slopes)
    coefficients = np.linalg.lstsq(columns, weights, rcond=None)[0]
    error = weights - columns @ coefficients
    return Optimum(float(error @ error), tuple(map(float, slopes)), tuple(map(float, coefficients)))


@cache
def linear_optimum(target: str, kernel: str, heads: int) -> Optimum:
    """The least-squares optimum over coefficients and slopes (variable projection, several starts).

    Raises:
        ValueError: a target that is not linear, a kernel without slopes, no heads.
    """
    _linear(target)
    if kernel not in SLOPE_RANGE:
        raise ValueError(f"kernel {kernel!r} has no slopes to search over: known are {', '.join(SLOPE_RANGE)}")
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    low, high = np.log(SLOPE_RANGE[kernel])

    def residuals(log_slopes: Float[np.ndarray, " head"]) -> Float[np.ndarray, " lag"]:
        found = fit(target, kernel, np.exp(log_slopes))
        return np.asarray(_linear(target) - design(kernel, found.slopes) @ np.asarray(found.coefficients))

    best: Optimum | None = None
    for part in range(1, STARTS + 1):
        end = low + (high - low) * part / STARTS
        start = np.linspace(low, end, heads + 2)[1:-1]
        candidates = [start]
        if heads <= SEARCHED:  # with more, evenly spread slopes already fit to rounding or no search helps
            candidates.append(least_squares(residuals, start, bounds=(low, high), xtol=1e-15, ftol=1e-15, gtol=1e-15).x)
        for candidate in candidates:
            found = fit(target, kernel, np.exp(candidate))
            best = found if best is None or found.mse < best.mse else best
    assert best is not None
    return best


@dataclass(frozen=True)
class Extended:
    """An output in extended precision, told in float64.

    Attributes:
        mse: its squared error. largest: the largest of its coefficients.
        left: what it leaves of the target's weight of each lag.
    """

    mse: float
    largest: float
    left: Float[np.ndarray, " lag"]


def extended_error(
    target: str,
    kernel: str,
    slopes: Sequence[float],
    coefficients: Sequence[float] | None = None,
    digits: int = DIGITS,
) -> tuple[float, float]:
    """The squared error of some coefficients, or of the best, and the largest of them: of `extended_solution`."""
    found = extended_solution(target, kernel, slopes, coefficients, digits)
    return found.mse, found.largest


def extended_solution(
    target: str,
    kernel: str,
    slopes: Sequence[float],
    coefficients: Sequence[float] | None = None,
    digits: int = DIGITS,
) -> Extended:
    """What some coefficients, or the best, leave of a target, with `digits` digits.

    Columns of many heads are so nearly dependent that float64 solves another problem than the one asked: the best
    coefficients are then too large for it, and it finds smaller ones that leave more.

    Args:
        coefficients: of the heads and, last, of the residual; None: the best, by normal equations.

    Raises:
        ValueError: a target that is not linear, or heads that cannot be told apart even with so many digits.
    """
    with mpmath.workdps(digits):
        columns = [_extended_attention(kernel, slope) for slope in slopes]
        columns.append([mpmath.mpf(lag == 0) for lag in range(LENGTH)])
        wanted = _extended_weights(target)
        solved = [mpmath.mpf(x) for x in coefficients or ()]
        if coefficients is None:
            gram = mpmath.matrix([[mpmath.fdot(a, b) for b in columns] for a in columns])
            right = mpmath.matrix([mpmath.fdot(a, wanted) for a in columns])
            try:
                solved = list(mpmath.cholesky_solve(gram, right))
            except ValueError as error:
                raise ValueError(f"{len(slopes)} heads cannot be told apart with {digits} digits: give more") from error
        rows = zip(wanted, zip(*columns, strict=True), strict=True)
        left = [weight - mpmath.fdot(solved, row) for weight, row in rows]
        mse = float(mpmath.fsum(x**2 for x in left))
        return Extended(mse, float(max(map(abs, solved))), np.array([float(x) for x in left]))


def _extended_attention(kernel: str, slope: float) -> list[Any]:
    p = mpmath.mpf(slope)
    if kernel == "log":
        raw = [mpmath.mpf(0), *(mpmath.mpf(z) ** -p for z in range(1, LENGTH))]
    elif kernel == "linear":
        raw = [mpmath.exp(-p * z) for z in range(LENGTH)]
    else:
        raw = [mpmath.exp(p * mpmath.mpf(x)) for x in lag_features(kernel, LENGTH).tolist()]
    total = mpmath.fsum(raw)
    return [x / total for x in raw]


def _extended_weights(target: str) -> list[Any]:
    if target == "4a":
        return [mpmath.mpf(0), *(1 / mpmath.sqrt(z) for z in range(1, LENGTH))]
    if target == "4b":
        return [mpmath.exp(-5 * z) for z in range(LENGTH)]
    return [mpmath.mpf(x) for x in _linear(target).tolist()]


def _linear(target: str) -> Float[np.ndarray, " lag"]:
    weights = lag_weights(target)
    if weights is None:
        raise ValueError(f"target {target!r} is not linear: its optimum is `table_optimum`'s")
    return weights


@cache
def table_optimum(target: str, heads: int, width: int) -> float:
    """The least squared error found for a learned bias per lag, `heads` heads and `width` ReLUs.

    A table can put any positive weights on any lags (one alone in the limit): so a sum is one head, and three heads
    hand the FFN the three inputs. One or two heads pack several inputs into one number by weights 1 : 2 (: 4), which
    ReLUs between its values take apart; 1b needs 3 ReLUs behind three heads, 6 behind one.
    """
    if lag_weights(target) is not None:
        return 0.0  # positive weights: one head's attention, times a coefficient
    values, inputs = _truth_table(target)
    if inputs.shape[1] == 1:
        return _affine_error(values, inputs)
    best = np.inf
    for order in itertools.permutations(range(3)):
        a, b, c = inputs[:, order].T
        packed = {1: [(a + 2 * b + 4 * c) / 7], 2: [a, (b + 2 * c) / 3]}.get(heads, [a, b, c])
        best = min(best, _packed_error(values, np.stack(packed, axis=1), width))
    return best


def _affine_error(values: Float[np.ndarray, " row"], features: Float[np.ndarray, "row feature"]) -> float:
    columns = np.column_stack([np.ones(len(values)), features])
    error = values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]
    return float((error**2).mean())


def _packed_error(values: Float[np.ndarray, " row"], seen: Float[np.ndarray, "row head"], width: int) -> float:
    """The best affine function of what the heads see and of at most `width` ReLUs that bend between its values."""
    bends = []
    for column in seen.T:
        levels = np.unique(column)
        bends += [np.maximum(column - level, 0) for level in levels[1:-1]]
    if seen.shape[1] == 3:
        bends += [np.maximum(seen @ signs, 0) for signs in ((1, 1, 1), (1, 1, -1), (1, -1, 1), (-1, 1, 1))]
    if seen.shape[1] == 2:
        sums = seen @ np.array([1.0, 3.0])
        bends += [np.maximum(sums - level, 0) for level in np.unique(sums)[1:-1]]
    chosen = itertools.combinations(bends, min(width, len(bends)))
    return min(_affine_error(values, np.column_stack([seen, *some])) for some in chosen)


AFFINE_TARGETS = ("4a", "4b")  # have a weight for every lag, however long the inputs are


def plain(cfg: RelativeConfig) -> bool:
    """Whether a model has neither FFN nor dot product nor norm."""
    return not (cfg.width or cfg.dot_product or cfg.norm != "none")


def affine(model: RelativeTransformer, length: int) -> tuple[float, Float[np.ndarray, " lag"]]:
    """A model's output for x = -1 or +1 at each lag, as constant + sum of weight x: on inputs of any length.

    Args:
        model: without an FFN, the dot product and a norm, its positions by a slope.

    Returns:
        The constant and the weight of each lag 0 … length - 1, in float64.

    Raises:
        ValueError: a model that is not affine, or a table of positions.
    """
    cfg = model.cfg
    if not plain(cfg):
        raise ValueError("not affine in its inputs: the model has an FFN, the dot product or a norm")
    if cfg.kernel == "table":
        raise ValueError(f"a table of {cfg.length} positions says nothing of longer inputs")
    with torch.no_grad():
        attention = design(cfg.kernel, model.log_slope.double().exp().numpy(), length)[:, :-1]  # [lag head]
        embed, out = model.embed.double(), model.out.weight[0].double()
        # what a head writes, seen by the readout, if all it reads is -1, or +1; [input head]
        written = torch.einsum("vd,hde,hef,f->vh", embed, model.W_V.double(), model.W_O.double(), out).numpy()
        alone = (embed @ out).numpy()
        bias = float(model.out.bias[0])
    weights = attention @ ((written[1] - written[0]) / 2)
    weights[0] += (alone[1] - alone[0]) / 2
    return bias + float(written.mean(0).sum() + alone.mean()), weights


def error(target: str, constant: float, weights: Float[np.ndarray, " lag"]) -> tuple[float, float]:
    """The squared error of an affine function on its length, and relative to that of the best constant.

    Raises:
        ValueError: a target that is not 4a or 4b.
    """
    if target not in AFFINE_TARGETS:
        raise ValueError(f"target {target!r} has no longer inputs: known are {', '.join(AFFINE_TARGETS)}")
    wanted = lag_weights(target, len(weights))
    assert wanted is not None
    found = constant**2 + float(((weights - wanted) ** 2).sum())
    return found, found / float((wanted**2).sum())


def sampling_error(left: Float[np.ndarray, " lag"], inputs: int) -> float:
    """The standard error of a mean squared error over so many random inputs, relative to it; NaN where it is 0.

    Of an affine function off by `left` on +1s and -1s: (sum left x)² has the mean sum left² and the variance
    2 (sum left²)² - 2 sum left⁴. So it is sqrt(2 / inputs) at most, and less where few lags are off; a constant that is
    off beside them makes it less, too.
    """
    scale = float(np.abs(left).max())
    if scale == 0:
        return float("nan")
    squares = (left / scale) ** 2  # whose squares would be too small for float64
    return float(np.sqrt(2 * max(0.0, 1 - float((squares**2).sum() / squares.sum() ** 2)) / inputs))
