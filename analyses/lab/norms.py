"""The four norms of the laboratory: LayerNorm with its projection, its scaling, both or neither.

    layernorm        r * Px / sqrt(|Px|²  + d·eps)      P = I - 11ᵀ/d, r = radius (√d by default)
    scaling_only     r *  x / sqrt(|x|²   + d·eps)      an RMSNorm: divides by the norm of x itself, not of Px
    projection_only      Px / c                          c = a constant divisor, the same for every token
    none                  x / c

With r = √d the first is torch's LayerNorm, `Px / sqrt(mean((Px)²) + eps)`. The divisor c of the norms that do not
scale is given, or measured once, at initialization (`calibrate`), so that their outputs start at the size of the
others' (radius²/d mean square). After Brody, Alon & Yahav 2023, section 3, whose norms differ in size, too: their
layer without projection has r = 1/√d, so its scores are d² times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.analyses.lab.points import HookPoint

NormKind = Literal["layernorm", "projection_only", "scaling_only", "none"]
NORM_KINDS: tuple[str, ...] = get_args(NormKind)

PROJECTS = frozenset({"layernorm", "projection_only"})
SCALES = frozenset({"layernorm", "scaling_only"})


class Norm(nn.Module):
    """One norm of the laboratory, with TransformerLens's hook points.

    `hook_in` is the input, `hook_scale` the divisor used, `hook_normalized` the vector before gain and bias, `hook_out`
    the output; what a hook returns is used from there on.

    Args:
        kind: one of NORM_KINDS.
        d_model: length of the vectors.
        eps: added to the mean square before the root (the norms that scale).
        radius: length of the normalized vectors; None means √d_model. The norms that do not scale aim at it
            when they are calibrated.
        divisor: the constant of a norm that does not scale; None: measured (`calibrate`).
        gain, bias: with a learned gain `w`, a learned bias `b`, [d_model] each.

    Raises:
        ValueError: unknown kind; radius or divisor not positive; a divisor for a norm that scales, or with a radius.
    """

    divisor: Float[Tensor, ""] | None

    def __init__(
        self,
        kind: str,
        d_model: int,
        *,
        eps: float = 1e-5,
        radius: float | None = None,
        divisor: float | None = None,
        gain: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if kind not in NORM_KINDS:
            raise ValueError(f"unknown norm {kind!r}: known norms are {', '.join(NORM_KINDS)}")
        if radius is not None and not radius > 0:
            raise ValueError(f"radius must be positive, got {radius}")
        if divisor is not None and kind in SCALES:
            raise ValueError(f"a {kind!r} norm divides by each vector's own size: leave out divisor={divisor}")
        if divisor is not None and radius is not None:
            raise ValueError(f"give a divisor ({divisor}) or a radius to aim at ({radius}), not both")
        if divisor is not None and not 0 < divisor < math.inf:
            raise ValueError(f"divisor must be a positive number, got {divisor}")
        self.kind: str = kind
        self.eps = eps
        self.d_model = d_model
        self.radius = math.sqrt(d_model) if radius is None else float(radius)
        self.w = nn.Parameter(torch.ones(d_model)) if gain else None
        self.b = nn.Parameter(torch.zeros(d_model)) if bias else None
        self.measured = not self.scales and divisor is None  # by `calibrate`
        # Zero until calibrated: a norm that does not scale must not run with an unstated constant.
        self.register_buffer("divisor", None if self.scales else torch.tensor(divisor or 0.0))
        self.calibrating = False
        self.hook_in, self.hook_scale, self.hook_normalized, self.hook_out = (HookPoint() for _ in range(4))

    @property
    def projects(self) -> bool:
        return self.kind in PROJECTS

    @property
    def scales(self) -> bool:
        return self.kind in SCALES

    @property
    def is_layer_norm(self) -> bool:
        """Whether it is torch's LayerNorm, of radius √d_model."""
        return self.kind == "layernorm" and self.radius == math.sqrt(self.d_model)

    @property
    def hooked(self) -> bool:
        """Whether a hook, forward or backward, is on a hook point that the fused form does not pass."""
        return any(p._forward_hooks or p._backward_hooks for p in (self.hook_scale, self.hook_normalized))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        out: Tensor = self.hook_out(self.inner(self.hook_in(x), self))
        return out

    def inner(self, x: Float[Tensor, "*batch d_model"], points: Any) -> Float[Tensor, "*batch d_model"]:
        """What is between `hook_in` and `hook_out`, with the `hook_scale` and `hook_normalized` of `points`."""
        shrink = self.radius / math.sqrt(self.d_model)
        if self.is_layer_norm and not self.hooked:
            return F.layer_norm(x, (self.d_model,), self.w, self.b, self.eps)  # the same, fused
        if self.projects:
            x = x - x.mean(-1, keepdim=True)
        if self.divisor is None:
            divisor = (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() / shrink
        else:
            if self.calibrating:
                self.divisor.copy_(x.detach().pow(2).mean(-1).sqrt().mean() / shrink)
            elif not self.divisor > 0:
                raise ValueError(f"a {self.kind!r} norm has no divisor yet: run `with calibrate(model): model(tokens)`")
            divisor = self.divisor.to(x.dtype).expand(*x.shape[:-1], 1)
        normalized: Tensor = points.hook_normalized(x / points.hook_scale(divisor))
        if self.w is not None:
            normalized = normalized * self.w
        return normalized if self.b is None else normalized + self.b


@contextmanager
def calibrate(model: nn.Module) -> Iterator[None]:
    """Within it, a forward pass sets every divisor that was not given to the mean sigma of the norm's inputs.

    Sites are set in the order in which they run, so each is measured behind calibrated ones.
    """
    norms = [m for m in model.modules() if isinstance(m, Norm) and m.measured]
    for norm in norms:
        norm.calibrating = True
    try:
        with torch.no_grad():
            yield
    finally:
        for norm in norms:
            norm.calibrating = False
