"""Relative attention that is affine in its inputs: its squared error as a sum over lags, and what a sample is off by.

Without an FFN, the dot product and a norm, the output is a constant and a weight per lag. Inputs are independent +1s
and -1s, so the squared error is a sum over lags, and so is the variance of a squared error over inputs.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float

from ln_probe.analyses.lab.approximation.approximation_targets import design, lag_weights
from ln_probe.analyses.lab.approximation.relative_transformer import RelativeConfig, RelativeTransformer

TARGETS = ("4a", "4b")  # have a weight for every lag, however long the inputs are


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
    if target not in TARGETS:
        raise ValueError(f"target {target!r} has no longer inputs: known are {', '.join(TARGETS)}")
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
