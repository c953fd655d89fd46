"""One norm of a model: its formula, the terms of it, and everything that it can put out.

    LN(x) = gain * (Px) / sigma + bias,     P = I - 11ᵀ/d,  sigma = sqrt(mean((Px)²) + eps)

(Brody, Alon & Yahav 2023, section 2; the geometry of the pieces: Gupta, Ozdemir & Anumanchipalli 2024.) An RMSNorm has
no P, a norm that does not scale has a constant for sigma. The formula is written here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ln_probe.hooks.one_line import OneLine

KINDS = ("layernorm", "rmsnorm", "projection_only", "scaling_only", "none", "unknown")
READERS = ("attention", "mlp", "attention+mlp", "unembed", "query", "key", "other")


@dataclass(frozen=True, eq=False, repr=False)
class Terms(OneLine):
    """What one norm makes of some vectors, piece by piece; float64.

    Attributes:
        x: the vectors.
        mean_component: mu·1, the part of x along the ones-vector; a norm without projection leaves it in.
        projected: what is left of x, Px (x itself where the norm does not project).
        sigma: the divisor.
        normalized: projected / sigma.
        gain, bias: the affine part; None where the norm has none.
    """

    x: Float64[Tensor, "*batch d"]
    mean_component: Float64[Tensor, "*batch d"]
    projected: Float64[Tensor, "*batch d"]
    sigma: Float64[Tensor, "*batch 1"]
    normalized: Float64[Tensor, "*batch d"]
    gain: Float64[Tensor, " d"] | None
    bias: Float64[Tensor, " d"] | None

    @property
    def scale(self) -> Float64[Tensor, "*batch 1"]:
        """1 / sigma, what the norm multiplies by."""
        return 1.0 / self.sigma

    def total(self) -> Float64[Tensor, "*batch d"]:
        """What the pieces stand for, the norm's output: gain * normalized + bias."""
        return _affine(self.normalized, self.gain, self.bias)

    def summands(self) -> dict[str, Float64[Tensor, "*batch d"]]:
        """The output as a sum of vectors: `input` (gain·x / sigma), `projection` (what taking the mean out adds,
        -gain·mu / sigma; zeros where the norm does not project) and `bias` (zeros where it has none).

        Each is linear in its part of x once sigma is given, so a direction can be followed through them. They add up
        to `total()` but for rounding in float64.
        """
        gain = torch.ones_like(self.sigma) if self.gain is None else self.gain
        zeros = torch.zeros_like(self.x)
        return {
            "input": self.x / self.sigma * gain,
            "projection": (self.projected - self.x) / self.sigma * gain,
            "bias": zeros if self.bias is None else zeros + self.bias,
        }


def _affine(normalized: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    out = normalized
    if gain is not None:
        out = out * gain.to(out)
    if bias is not None:
        out = out + bias.to(out)
    return out


@dataclass(frozen=True, eq=False, repr=False)
class Site(OneLine):
    """One norm of a model.

    Attributes:
        name: hook-point name without its last part.
        layer: block index; the final norm has the number of layers, one after the embedding 0.
        kind: one of KINDS (what it does to a vector; lab norms keep their own names).
        reads: one of READERS (who takes its output).
        attention_layers: blocks whose attention takes its output; after a post-norm block, the next one.
        state: one of `ln_probe.hooks.state.STATES`.
        evidence: why `state` and `reads` say so.
        module: the module to put torch hooks on.
        gain, bias: the affine part as it acts (Gemma's offset included); None where there is none.
        eps: as found in its answer to a zero vector.
        radius: length of the normalized vectors if eps were 0; NaN for norms that do not scale.
        constant_scale: the divisor of a norm that does not scale; NaN for the others.
    """

    name: str
    layer: int
    kind: str
    reads: str
    state: str
    evidence: str
    module: nn.Module
    d: int
    gain: Float[Tensor, " d"] | None
    bias: Float[Tensor, " d"] | None
    eps: float
    radius: float
    constant_scale: float
    attention_layers: tuple[int, ...] = ()
    bare: bool = False

    @property
    def stands_in(self) -> bool:
        """Whether it stands for what attention reads where there is no norm that ln_probe knows."""
        return self.bare or self.kind == "unknown"

    @property
    def projects(self) -> bool:
        return self.kind in ("layernorm", "projection_only")

    @property
    def scales(self) -> bool:
        return self.kind in ("layernorm", "rmsnorm", "scaling_only")

    def project(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Px, or x itself where the norm does not project."""
        return x - x.mean(-1, keepdim=True) if self.projects else x

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """The divisor this norm uses on x (in x's own precision)."""
        if not self.scales:
            return torch.full_like(x[..., :1], self.constant_scale)
        return (self.project(x).pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * (math.sqrt(self.d) / self.radius)

    def normalize(
        self,
        x: Float[Tensor, "*batch d"],
        *,
        keep_mean: bool = False,
        divisor: float | Float[Tensor, "*batch 1"] | None = None,
    ) -> Float[Tensor, "*batch d"]:
        """The norm before gain and bias, Px / sigma, in x's own precision.

        Args:
            x: vectors.
            keep_mean: leave the projection out, x / sigma (with the sigma of the intact norm).
            divisor: what is divided by instead of sigma.
        """
        return (x if keep_mean else self.project(x)) / (self.sigma(x) if divisor is None else divisor)

    def affine(self, normalized: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Gain and bias applied."""
        return _affine(normalized, self.gain, self.bias)

    def decompose(self, x: Float[Tensor, "*batch d"]) -> Terms:
        """The terms of this norm on its inputs x, in float64; `Terms.total()` is its output.

        Raises:
            TypeError: x is no tensor of floating-point numbers.
            ValueError: x does not have the norm's length.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{self.name} normalizes vectors of real numbers [… {self.d}], got {got}")
        if x.ndim == 0 or x.shape[-1] != self.d:
            raise ValueError(f"{self.name} normalizes vectors of length {self.d}, got {list(x.shape)}")
        x = x.detach().double()
        gain, bias = (None if t is None else t.detach().double().to(x.device) for t in (self.gain, self.bias))
        mean = x.mean(-1, keepdim=True).expand_as(x)
        return Terms(x, mean, self.project(x), self.sigma(x), self.normalize(x), gain, bias)

    def reachable(
        self, W: Float[Tensor, "*head d out"] | None = None
    ) -> tuple[Float64[Tensor, "*head out"], Float64[Tensor, "*head out d"]] | None:
        """All that this norm can put out, or that a map W reads from it: {c + A u, |u| ≤ 1}, on the CPU.

        LN(x) = gain·x̂ + bias with x̂ in a ball of radius `radius` (and orthogonal to 1 if the norm projects), so
        A = radius·Wᵀ diag(gain) P and c = Wᵀ bias. None if the norm does not scale: its outputs are unbounded.

        Args:
            W: what reads the output; None: the output itself.
        """
        return self._outputs(self.radius, W) if self.scales else None

    def directions(
        self, W: Float[Tensor, "*head d out"] | None = None
    ) -> tuple[Float64[Tensor, "*head out"], Float64[Tensor, "*head out d"]]:
        """The same set for inputs that are normalized to length 1: in which directions outputs can differ, bounded or
        not. A norm that does not scale can put out c + A u with u of any length."""
        return self._outputs(1.0, W)

    def _outputs(self, radius: float, W: Tensor | None) -> tuple[Tensor, Tensor]:
        ones, zeros = (make(self.d, dtype=torch.float64) for make in (torch.ones, torch.zeros))
        gain = ones if self.gain is None else self.gain.detach().double().cpu()
        bias = zeros if self.bias is None else self.bias.detach().double().cpu()
        if W is None:
            center, axes = bias, radius * torch.diag(gain)
        else:
            read = W.detach().double().cpu()
            center = torch.einsum("d,...dk->...k", bias, read)
            axes = radius * (read * gain[:, None]).transpose(-2, -1)
        return center, axes - axes.mean(-1, keepdim=True) if self.projects else axes
