"""One attention layer with relative positions on sequences of +1 and -1, its targets, and their least-squares optimum.

Wang & E (2024, "Understanding the Expressive Power and Mechanisms of Transformer for Sequence Modeling"), equation 1:

    X <- X + Attn(X),  X <- X + FFN(X),  Attn_h(X)_t = W_O W_V softmax_s(<W_Q x_t, W_K x_s> + p_h phi(t - s)) x_s

with phi(z) = -log z (z >= 1) or -z (z >= 0), minus infinity elsewhere, and p_h > 0 trained. T5's encoding (their Table
1) is linear below a lag B, logarithmic from there to D, and constant beyond. A fourth choice here is a learned bias per
head and lag ("table"). Published without a norm. Only the output at the last position is wanted and a token has two
values, so attention needs the weight of the +1s and of the -1s alone. Targets on inputs x_1 … x_1000 (section 6):

    1b   sum over 64 units of ReLU(<w_k, (x_48, x_56, x_99)>)         2a   sum over 64 units of ReLU(w_k x_99)
    2b   x_48 + x_56 + x_99                                          4a   sum over s < 1000 of x_s (1000 - s)^-0.5
    4b   sum over s of x_s e^(-5 (1000 - s))                   adaptive   x_99 if x_1000 = +1, else x_48

4a begins at lag 1: as written it is infinite at s = 1000. 2a is affine in x_99. How the w_k were drawn is not
published: here from a normal distribution with variance 1/64. `adaptive` is no experiment of the source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import least_squares  # type: ignore[import-untyped]
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import Norm

T5_LINEAR, T5_LARGEST = 16, 128  # B and D: of T5's 32 buckets 16 hold a lag each, 16 reach to lag 128
D_MODEL, D_HEAD = 32, 8  # a head carries one number (a token has two values), so neither limits what can be expressed


@dataclass(frozen=True)
class RelativeConfig:
    """Shape of the model.

    Attributes:
        length: positions of the input. heads, width: attention heads, hidden units of the FFN (0: no FFN).
        kernel: "log", "linear", "t5" or "table". dot_product: False means W_Q = W_K = 0.
        norm, norm_order: kind of both norms ("none": as published, no norm), before or after their sublayers.
    """

    length: int
    heads: int
    width: int
    kernel: str
    dot_product: bool = False
    norm: str = "none"
    norm_order: str = "pre"
    eps: float = 1e-5

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def build(self) -> RelativeTransformer:
        """A random model of this shape (torch's global generator)."""
        return RelativeTransformer(self)


def lag_features(kernel: str, length: int) -> Float[Tensor, " lag"]:
    """phi(z) for lags z = 0 … length - 1 of a kernel with a slope ("log", "linear" or "t5")."""
    lag = torch.arange(length, dtype=torch.float64)
    if kernel == "t5":
        share = (lag.clamp(T5_LINEAR, T5_LARGEST) / T5_LINEAR).log() / math.log(T5_LARGEST / T5_LINEAR)
        return -torch.minimum(lag, torch.full_like(lag, T5_LINEAR)) - T5_LINEAR * share
    return -lag if kernel == "linear" else -lag.log().masked_fill(lag == 0, torch.inf)


class RelativeTransformer(nn.Module):
    """The model; its output is one number per sequence, read off the last position."""

    phi: Tensor

    def __init__(self, cfg: RelativeConfig) -> None:
        super().__init__()
        self.cfg = cfg
        heads, scale = cfg.heads, 1 / math.sqrt(D_MODEL)
        self.embed = nn.Parameter(torch.randn(2, D_MODEL))  # of -1 and +1
        if cfg.kernel == "table":
            self.bias = nn.Parameter(torch.zeros(heads, cfg.length))
        else:
            self.log_slope = nn.Parameter(torch.randn(heads))
            self.register_buffer("phi", lag_features(cfg.kernel, cfg.length).float())
        self.W_V = nn.Parameter(torch.randn(heads, D_MODEL, D_HEAD) * scale)
        self.W_O = nn.Parameter(torch.randn(heads, D_HEAD, D_MODEL) / math.sqrt(heads * D_HEAD))
        if cfg.dot_product:
            self.W_Q, self.W_K = (nn.Parameter(torch.randn(heads, D_MODEL, D_HEAD) * scale) for _ in range(2))
        self.ffn = (
            nn.Sequential(nn.Linear(D_MODEL, cfg.width), nn.ReLU(), nn.Linear(cfg.width, D_MODEL))
            if cfg.width
            else None
        )
        normed = cfg.norm != "none"
        self.norm_attention = Norm(cfg.norm, D_MODEL, eps=cfg.eps) if normed else nn.Identity()
        self.norm_ffn = Norm(cfg.norm, D_MODEL, eps=cfg.eps) if normed else nn.Identity()
        self.out = nn.Linear(D_MODEL, 1)

    def lag_bias(self) -> Float[Tensor, "head lag"]:
        """p_h phi(z), what is added to the scores."""
        if self.cfg.kernel == "table":
            return self.bias
        unseen = self.phi.isinf()  # filled in last: infinity times a slope has no gradient
        sloped = self.log_slope.exp()[:, None] * self.phi.masked_fill(unseen, 0.0)
        return sloped.masked_fill(unseen, -math.inf)

    def forward(self, x: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """The output for inputs of +1 and -1; the last position is lag 0."""
        pre = self.cfg.norm_order == "pre"
        tokens = self.norm_attention(self.embed) if pre else self.embed
        plus = x.flip(1) > 0  # by lag
        last = plus[:, 0].long()
        weight = self.lag_bias().softmax(-1)
        on_plus = plus.to(weight.dtype) @ weight.T  # [batch head]; the rest lies on -1
        if self.cfg.dot_product:
            query = torch.einsum("vd,hde->vhe", tokens, self.W_Q)[last]
            key = torch.einsum("vd,hde->vhe", tokens, self.W_K)
            score = torch.einsum("bhe,vhe->bhv", query, key) / math.sqrt(D_HEAD)
            odds = torch.stack([1 - on_plus, on_plus], dim=-1) * (score - score.amax(-1, keepdim=True)).exp()
            on_plus = odds[..., 1] / odds.sum(-1)
        values = torch.einsum("vd,hde,hef->vhf", tokens, self.W_V, self.W_O)
        written = values[0].sum(0) + on_plus @ (values[1] - values[0])
        stream = self.embed[last] + written
        stream = stream if pre else self.norm_attention(stream)
        if self.ffn is not None:
            stream = stream + self.ffn(self.norm_ffn(stream) if pre else stream)
        stream = stream if pre else self.norm_ffn(stream)
        output: Tensor = self.out(stream).squeeze(-1)
        return output


LENGTH = 1000
SPARSE = (48, 56, 99)  # positions, from 1, that 1b and 2b look at
SPARSE_ONE = 99  # that 2a looks at
UNITS = 64
ADAPTIVE = "adaptive"
IF_PLUS, IF_MINUS = SPARSE_ONE, SPARSE[0]  # positions that `adaptive` reads, by what the last input is
LINEAR = ("2b", "4a", "4b")  # targets with a weight for each lag
# Slopes from one that spreads over the whole sequence to one that sees the nearest lag alone, in the logarithm.
SLOPE_RANGE = {"log": (1e-3, 30.0), "linear": (1e-4, 30.0), "t5": (1e-4, 30.0)}
SEARCHED = 4  # heads up to which slopes are searched for; with more, evenly spread (a search: 2 % less for 4a, T5, 16)
STARTS = 8  # of the search over slopes, from 1, 2, … 8 parts of that range; more found nothing better


def _units(target: str) -> Float[Tensor, "unit input"]:
    """The w_k, the same for everybody."""
    generator = torch.Generator().manual_seed(0)
    inputs = 1 if target == "2a" else 3
    return torch.randn(UNITS, inputs, generator=generator, dtype=torch.float64) / math.sqrt(UNITS)


def lag_weights(target: str, length: int = LENGTH) -> Float[np.ndarray, " lag"] | None:
    """The weight of each lag 0 … length - 1 in a linear target; None for 1b and 2a.

    2b's places are counted from the beginning of 1000 inputs for every length: only 4a and 4b have another meaning
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
    """The target's value for each input."""
    if target == ADAPTIVE:
        return torch.where(x[..., -1] > 0, x[..., IF_PLUS - 1], x[..., IF_MINUS - 1])
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
    if target == ADAPTIVE:
        return 1.0
    units = _units(target).numpy()
    inputs = np.array(list(itertools.product((-1.0, 1.0), repeat=units.shape[1])))
    return float(np.maximum(inputs @ units.T, 0).sum(1).var())


@dataclass(frozen=True)
class Optimum:
    """The least squared error found for a parametrization, and the parameters that have it.

    Attributes:
        mse: its squared error; with several heads an upper bound of the least (the search is not convex).
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
    weights = linear_weights(target)
    columns = design(kernel, slopes)
    coefficients = np.linalg.lstsq(columns, weights, rcond=None)[0]
    error = weights - columns @ coefficients
    return Optimum(float(error @ error), tuple(map(float, slopes)), tuple(map(float, coefficients)))


@cache
def linear_optimum(target: str, kernel: str, heads: int) -> Optimum:
    """The least-squares optimum over coefficients and slopes (variable projection, several starts)."""
    low, high = np.log(SLOPE_RANGE[kernel])

    def residuals(log_slopes: Float[np.ndarray, " head"]) -> Float[np.ndarray, " lag"]:
        optimum = fit(target, kernel, np.exp(log_slopes))
        return np.asarray(linear_weights(target) - design(kernel, optimum.slopes) @ np.asarray(optimum.coefficients))

    optima = []
    for part in range(1, STARTS + 1):
        end = low + (high - low) * part / STARTS
        start = np.linspace(low, end, heads + 2)[1:-1]
        optima.append(fit(target, kernel, np.exp(start)))
        if heads <= SEARCHED:  # where slopes run together, forward differences end 1e-4 higher than these
            best = least_squares(residuals, start, "3-point", bounds=(low, high), xtol=1e-15, ftol=1e-15, gtol=1e-15).x
            optima.append(fit(target, kernel, np.exp(best)))
    return min(optima, key=lambda one: one.mse)


def linear_weights(target: str) -> Float[np.ndarray, " lag"]:
    """`lag_weights` of a linear target; ValueError if it is another."""
    weights = lag_weights(target)
    if weights is None:
        raise ValueError(f"target {target!r} is not linear: it has no weight per lag")
    return weights


AFFINE_TARGETS = ("4a", "4b")  # have a weight for every lag, however long the inputs are


def affine(model: RelativeTransformer, length: int) -> tuple[float, Float[np.ndarray, " lag"]]:
    """A model's output for x = -1 or +1 at each lag, as constant + sum of weight x: on inputs of any length.

    Args:
        model: without an FFN, the dot product and a norm, its positions by a slope.

    Returns:
        The constant and the weight of each lag 0 … length - 1, in float64.
    """
    cfg = model.cfg
    with torch.no_grad():
        attention = design(cfg.kernel, model.log_slope.double().exp().numpy(), length)[:, :-1]
        embed, out = model.embed.double(), model.out.weight[0].double()
        # what a head writes, seen by the readout, if all it reads is -1, or +1; [input head]
        written = torch.einsum("vd,hde,hef,f->vh", embed, model.W_V.double(), model.W_O.double(), out).numpy()
        alone = (embed @ out).numpy()
        bias = float(model.out.bias[0])
    weights = attention @ ((written[1] - written[0]) / 2)
    weights[0] += (alone[1] - alone[0]) / 2
    return bias + float(written.mean(0).sum() + alone.mean()), weights


def error(target: str, constant: float, weights: Float[np.ndarray, " lag"]) -> tuple[float, float]:
    """The squared error of an affine function on its length, and relative to that of the best constant."""
    wanted = lag_weights(target, len(weights))
    assert wanted is not None
    squared = constant**2 + float(((weights - wanted) ** 2).sum())
    return squared, squared / float((wanted**2).sum())
