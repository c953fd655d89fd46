"""One attention layer with relative positions, with or without the dot product, on sequences of +1 and -1.

Wang & E (2024, "Understanding the Expressive Power and Mechanisms of Transformer for Sequence Modeling"), equation 1:

    X <- X + Attn(X),  X <- X + FFN(X),  Attn_h(X)_t = W_O W_V softmax_s(<W_Q x_t, W_K x_s> + p_h phi(t - s)) x_s

with phi(z) = -log z (z >= 1) or -z (z >= 0), minus infinity elsewhere, and p_h > 0 trained. T5's encoding (their Table
1) is linear below a lag B, logarithmic from there to D, and constant beyond: here minus its bucket, without rounding it
to a whole number, with T5's B = 16 and D = 128 (Raffel et al. 2020, section 2.1). A fourth choice here is a learned
bias per head and lag ("table"). Published without a norm; here one can stand before or after each sublayer.

Only the output at the last position is wanted and a token has two values, so attention needs the weight of the +1s and
of the -1s alone: exactly the same numbers as the whole matrix, 1000 times cheaper.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import NORM_KINDS, Norm

KERNELS = ("log", "linear", "t5", "table")
T5_LINEAR, T5_LARGEST = 16, 128  # B and D: of T5's 32 buckets 16 hold a lag each, 16 reach to lag 128
NORM_ORDERS = ("pre", "post")
D_MODEL, D_HEAD = 32, 8  # a head carries one number (a token has two values), so neither limits what can be expressed


@dataclass(frozen=True)
class RelativeConfig:
    """Shape of the model.

    Attributes:
        length: positions of the input. heads, width: attention heads, hidden units of the FFN (0: no FFN).
        kernel: "log", "linear", "t5" or "table". dot_product: False means W_Q = W_K = 0.
        norm, norm_order: kind of both norms ("none": as published, no norm), before or after their sublayers.

    Raises (on construction):
        ValueError: a size that is too small, an unknown kernel, norm or order.
    """

    length: int
    heads: int
    width: int
    kernel: str
    dot_product: bool = False
    norm: str = "none"
    norm_order: str = "pre"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("heads", 1), ("width", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name, known in (("kernel", KERNELS), ("norm", NORM_KINDS), ("norm_order", NORM_ORDERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: known are {', '.join(known)}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def build(self) -> RelativeTransformer:
        """A model of this shape, initialized from torch's global generator."""
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
        values = torch.einsum("vd,hde,hef->vhf", tokens, self.W_V, self.W_O)  # what a head writes if all is -1, all +1
        written = values[0].sum(0) + on_plus @ (values[1] - values[0])
        stream = self.embed[last] + written
        stream = stream if pre else self.norm_attention(stream)
        if self.ffn is not None:
            stream = stream + self.ffn(self.norm_ffn(stream) if pre else stream)
        stream = stream if pre else self.norm_ffn(stream)
        output: Tensor = self.out(stream).squeeze(-1)
        return output

    def forward_by_definition(self, x: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """The same through the whole attention row of the last position, for a check."""
        pre = self.cfg.norm_order == "pre"
        stream = self.embed[(x > 0).long()]
        read = self.norm_attention(stream) if pre else stream
        score = self.lag_bias().flip(1).expand(len(x), -1, -1)  # [batch head pos]
        if self.cfg.dot_product:
            query = torch.einsum("bd,hde->bhe", read[:, -1], self.W_Q)
            score = score + torch.einsum("bhe,bsd,hdf,ef->bhs", query, read, self.W_K, torch.eye(D_HEAD).to(read)) / (
                math.sqrt(D_HEAD)
            )
        z = torch.einsum("bhs,bsd,hde->bhe", score.softmax(-1), read, self.W_V)
        last = stream[:, -1] + torch.einsum("bhe,hed->bd", z, self.W_O)
        last = last if pre else self.norm_attention(last)
        if self.ffn is not None:
            last = last + self.ffn(self.norm_ffn(last) if pre else last)
        last = last if pre else self.norm_ffn(last)
        output: Tensor = self.out(last).squeeze(-1)
        return output
