"""One norm of a model: its formula, the terms of it, and everything that it can put out.

    LN(x) = gain * (Px) / sigma + bias,     P = I - 11ᵀ/d,  sigma = sqrt(mean((Px)²) + eps)

(Brody, Alon & Yahav 2023, section 2; the geometry of the pieces: Gupta, Ozdemir & Anumanchipalli 2024.) An RMSNorm has
no P, a norm that does not scale has a constant for sigma. The formula is written here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, OneLine, at_least_float32, device_of, dtype_of, hooks_on

READERS = ("attention", "mlp", "attention+mlp", "unembed", "query", "key", "other")


@dataclass(frozen=True, eq=False, repr=False)
class Terms(OneLine):
    """What one norm makes of some vectors, piece by piece; float64.

    Attributes:
        x: the vectors.
        mean_component: mu·1, the part of x along the all-ones direction; a norm without projection leaves it in.
        projected: Px, x without it (x itself where the norm does not project).
        sigma: the divisor.
        normalized: projected / sigma.
        gain, bias: the affine part; None where the norm has none.

    Example:
        >>> terms = ln_probe.hooks.find_sites(model)[0].decompose(torch.randn(5, 128))
        >>> torch.allclose(terms.total(), sum(terms.summands().values()))
        True
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
        """The norm's output: gain * normalized + bias."""
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
        kind: "layernorm", "rmsnorm", "projection_only", "scaling_only" (the laboratory's RMSNorm), "none" or "unknown".
        reads: one of READERS (who takes its output).
        attention_layers: blocks whose attention takes its output; after a post-norm block, the next one.
        state: one of `ln_probe.hooks.sites.STATES`.
        evidence: why `state` and `reads` say so.
        module: the module to put torch hooks on.
        gain, bias: the affine part as it acts (Gemma's offset included); None where there is none.
        eps: as found in its answer to a zero vector.
        radius: length of the normalized vectors if eps were 0; NaN for norms that do not scale.
        constant_scale: the divisor of a norm that does not scale; NaN for the others.
        gain_offset: what the module adds to its weight to make its gain (Gemma's norms: 1).

    Example:
        >>> site = ln_probe.hooks.find_sites(model)[0]
        >>> site.name, site.kind, site.reads
        ('blocks.0.ln1', 'layernorm', 'attention')
        >>> site.decompose(torch.randn(5, site.d)).sigma.shape
        torch.Size([5, 1])
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
    gain_offset: float = 0.0

    @property
    def stands_in(self) -> bool:
        """Whether it replaces a norm: what attention reads where there is no norm that ln_probe knows."""
        return self.bare or self.kind == "unknown"

    @property
    def projects(self) -> bool:
        return self.kind in ("layernorm", "projection_only")

    @property
    def scales(self) -> bool:
        return self.kind in ("layernorm", "rmsnorm", "scaling_only")

    def _check(self, x: object, axis: int = -1) -> None:
        """Raise TypeError or ValueError unless x holds real vectors of the norm's length along an axis."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{self.name} normalizes vectors of real numbers [… {self.d}], got {got}")
        if x.ndim < -axis or x.shape[axis] != self.d:
            raise ValueError(f"{self.name} normalizes vectors of length {self.d}, got {list(x.shape)}")

    def project(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Px, or x itself where the norm does not project.

        This and the methods below raise TypeError or ValueError for what does not hold vectors of the norm's length.
        """
        self._check(x)
        return x - x.mean(-1, keepdim=True) if self.projects else x

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """The divisor this norm uses on x (in x's own precision)."""
        if not self.scales:
            self._check(x)
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

        Raises:
            ValueError: a number that is not positive and finite.
        """
        self._check(x)
        number = divisor.item() if isinstance(divisor, Tensor) and divisor.ndim == 0 else divisor
        if isinstance(number, Real) and not 0.0 < number < math.inf:
            raise ValueError(f"{self.name}: a divisor must be positive and finite, got {divisor!r}")
        return (x if keep_mean else self.project(x)) / (self.sigma(x) if divisor is None else divisor)

    def affine(self, normalized: Float[Tensor, "*batch d"], *, live: bool = False) -> Float[Tensor, "*batch d"]:
        """Gain and bias applied; `live`: the module's present ones, with gradients (`live_gain`)."""
        self._check(normalized)
        return _affine(normalized, *((self.live_gain(), self.live_bias()) if live else (self.gain, self.bias)))

    def live_gain(self) -> Float[Tensor, " d"] | None:
        """The gain, made of the parameter that the module has now: gradients reach it."""
        weight = None if self.gain is None else _parameter(self.module, _GAINS, self.d)
        return self.gain if weight is None else _plus(weight, self.gain_offset)

    def live_bias(self) -> Float[Tensor, " d"] | None:
        """The bias that the module has now."""
        bias = None if self.bias is None else _parameter(self.module, _BIASES, self.d)
        return self.bias if bias is None else bias

    def decompose(self, x: Float[Tensor, "*batch d"]) -> Terms:
        """The terms of this norm on its inputs x, in float64; `Terms.total()` is its output.

        Raises:
            TypeError: x is no tensor of floating-point numbers.
            ValueError: x does not have the norm's length.
        """
        self._check(x)
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
        gain, bias = gain_of(self), bias_of(self)
        if W is None:
            center, axes = bias, radius * torch.diag(gain)
        else:
            self._check(W, axis=-2)
            read = W.detach().double().cpu()
            center = torch.einsum("d,...dk->...k", bias, read)
            axes = radius * (read * gain[:, None]).transpose(-2, -1)
        return center, axes - axes.mean(-1, keepdim=True) if self.projects else axes


def gain_of(site: Site) -> Float64[Tensor, " d"]:
    """The gain on the CPU, ones where there is none."""
    return torch.ones(site.d).double() if site.gain is None else site.gain.detach().cpu().double()


def bias_of(site: Site) -> Float64[Tensor, " d"]:
    """The bias on the CPU, zeros where there is none."""
    return torch.zeros(site.d).double() if site.bias is None else site.bias.detach().cpu().double()


# Relative difference under which two outputs of a norm are the same. Rounding gives about 1e-6 in float32 (measured on
# GPT-2-shaped models) and 1e-2 in bf16; a norm that does not have the property differs by order 1.
SAME_OUTPUT = 5e-2
# RMS of the vectors that a norm is asked about, the next where its eps hides whether it scales (eps is annealed in
# studies of norms, up to 1 and beyond). At the last, half precision overflows.
SIZES = (1.0, 1e2, 1e4)


def is_heads_first(site: Site, x: Float[Tensor, "a b c d"], length: int) -> bool:
    """Whether a norm of queries or keys is given [batch head pos d_head], as inside a bridge's attention.

    Of as many heads as positions, the layout in memory tells: a position's heads lie side by side.
    """
    return (
        site.reads in ("query", "key") and x.shape[2] == length and (x.shape[1] != length or x.stride(1) < x.stride(2))
    )


class SiteError(ValueError):
    """A norm does not behave as a norm (NaN weights, or a formula that ln_probe does not know)."""


class UnknownNormError(SiteError):
    """A module with the hook points of a norm whose formula is none that ln_probe knows."""


def _length(module: nn.Module, model: HookedModel) -> int:
    for name in ("w", "weight"):
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            return value.shape[-1]
    return int(getattr(module, "length", None) or getattr(module, "d_model", None) or model.cfg.d_model)


_BASE, _SHIFTED, _TRIPLED, _ZERO = slice(0, 4), slice(4, 8), slice(8, 12), 12  # the rows of a trial


class _Trial:
    """A norm's answers to four vectors of a size, to the same shifted, and tripled, and to zero; in float64."""

    def __init__(self, module: nn.Module, d: int, device: torch.device, dtype: torch.dtype, size: float) -> None:
        x = size * torch.randn(4, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.rows = torch.cat([x, x + 2.0 * size, 3.0 * x, torch.zeros_like(x[:1])]).to(device, dtype)
        seen: dict[str, Tensor] = {}

        def keep(name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> None:
            seen.setdefault(name, output.detach().reshape(len(self.rows), -1).double())

        points = dict(module.named_children())
        with torch.no_grad(), hooks_on([(points[n], partial(keep, n)) for n in ("hook_scale", "hook_normalized")]):
            out = module(self.rows[None])
        self.scale, self.normalized = seen["hook_scale"], seen["hook_normalized"]
        self.out = out.detach().reshape(len(self.rows), -1).double()

    @property
    def scales(self) -> bool:
        return _close(self.normalized[_TRIPLED], self.normalized[_BASE])

    def kept(self, projects: bool) -> Tensor:
        """The four vectors, without their means where the norm projects."""
        x = self.rows[_BASE].double()
        return x - x.mean(-1, keepdim=True) if projects else x


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= SAME_OUTPUT * float(b.abs().max().clamp_min(1e-300))


# What modules call them; the `w` and `b` of a bridge go on naming a parameter that has been replaced.
_GAINS, _BIASES = ("weight", "w"), ("bias", "b")


def _parameter(module: nn.Module, names: tuple[str, str], d: int) -> Tensor | None:
    tensors = (getattr(module, name, None) for name in names)
    return next((t for t in tensors if isinstance(t, Tensor) and t.numel() == d), None)


_KIND = {  # by whether it projects and whether it scales
    (True, True): "layernorm",
    (False, True): "rmsnorm",
    (True, False): "projection_only",
    (False, False): "none",
}


def describe(name: str, module: nn.Module, model: HookedModel) -> dict[str, Any]:
    """Return d, kind, gain, bias, eps, radius and constant_scale of one norm, from its answers to a few vectors.

    Nothing is taken from its class, which a bridge hides: does adding a multiple of (1, …, 1) change the output
    (projection)? does the divisor grow with the input (scaling)? is the output gain·normalized + bias?

    Raises:
        SiteError: NaN or infinite parameters or answers.
        UnknownNormError: it is none of the norms that ln_probe knows.
    """
    d, called = _length(module, model), f"{name} ({type(module).__name__})"
    found = (_parameter(module, names, d) for names in (_GAINS, _BIASES))
    gain, bias = (None if t is None else t.detach() for t in found)
    offset = 0.0
    for label, tensor in (("gain", gain), ("bias", bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise SiteError(f"{name}: its {label} holds NaN or infinite values; the checkpoint is damaged")
    dtype = dtype_of(model) if gain is None else gain.dtype
    sizes = [size for size in SIZES if size == SIZES[0] or 100 * size < torch.finfo(dtype).max]
    first = _Trial(module, d, device_of(model), dtype, sizes[0])
    projects = d > 1 and _close(first.normalized[_SHIFTED], first.normalized[_BASE])
    larger = (_Trial(module, d, device_of(model), dtype, size) for size in sizes[1:])
    trial = first if first.scales else next((t for t in larger if t.scales), first)
    if not trial.scales and not _close(first.normalized[_TRIPLED], 3 * first.normalized[_BASE]):
        raise UnknownNormError(f"{called} neither keeps nor triples 3x: not a norm ln_probe knows")
    kind = _KIND[projects, trial.scales]
    if kind == "rmsnorm" and getattr(module, "kind", None) == "scaling_only":
        kind = "scaling_only"  # the laboratory's name for it
    radius, eps, constant = math.nan, 0.0, math.nan
    if trial.scales:
        # scale² = (mean(kept²) + eps)·d/radius² at x and at 0: two unknowns, two equations.
        at_zero = float(trial.scale[_ZERO, 0]) ** 2
        stretch = float(((trial.scale[_BASE, 0] ** 2 - at_zero) / trial.kept(projects).pow(2).mean(-1)).mean())
        declared = getattr(module, "radius", None)
        radius = float(declared) if declared is not None else math.sqrt(d)
        if abs(math.sqrt(d / stretch) / radius - 1) > SAME_OUTPUT:
            raise UnknownNormError(f"{called} normalizes to length {math.sqrt(d / stretch):.4g}, not {radius:.4g}")
        eps = float(at_zero / stretch)
        kept = first.kept(projects)
        expected = kept / (kept.pow(2).mean(-1, keepdim=True) + eps).sqrt() * radius / math.sqrt(d)
        if trial is not first and not _close(first.normalized[_BASE], expected):
            raise UnknownNormError(f"{called} does not divide short vectors by sqrt(mean + {eps:.3g}), but long ones")
        owners = (module, getattr(module, "original_component", None), model.cfg)
        said = [getattr(o, name, None) for o in owners for name in ("eps", "variance_epsilon", "layer_norm_epsilon")]
        eps = next((e for e in said if isinstance(e, float) and abs(e - eps) <= 1e-2 * abs(eps) + 1e-30), eps)
    else:
        constant = float(trial.scale[0, 0])
    if gain is not None:  # Gemma stores its gain as an offset from 1: the nearer one, for beside a gain of 80 both hold
        out = trial.out[_BASE]
        made = {more: _affine(trial.normalized[_BASE], _plus(gain, more), bias) for more in (0.0, 1.0)}
        offset = min(made, key=lambda more: float((made[more] - out).abs().mean()))
        gain = _plus(gain, offset)
        if not _close(made[offset], out):
            raise UnknownNormError(
                f"{called}: output is not gain·normalized + bias for its parameters; ln_probe does not know this norm"
            )
    if not all(torch.isfinite(t[at]).all() for t in (trial.out, trial.scale) for at in (_BASE, _ZERO)):
        raise SiteError(f"{name} returns NaN or infinite values on ordinary vectors; the checkpoint is damaged")
    return {
        "d": d, "kind": kind, "gain": gain, "bias": bias, "eps": eps, "radius": radius, "constant_scale": constant,
        "gain_offset": offset,
    }  # fmt: skip


def _plus(weight: Tensor, offset: float) -> Tensor:
    """The gain of a weight that is an offset from another; in 16-bit formats computed in float32, as norms do."""
    return at_least_float32(weight) + offset if offset else weight
