"""One norm of a model: its formula, its terms, the set of its outputs, and its variants without a term.

    LN(x) = gain * (Px) / sigma + bias,     P = I - 11ᵀ/d,  sigma = sqrt(mean((Px)²) + eps)

(Brody, Alon & Yahav 2023, section 2; the geometry of the pieces: Gupta, Ozdemir & Anumanchipalli 2024.) An RMSNorm has
no P, a norm that does not scale has a constant for sigma. `norm_edits` applies the variants at hook points.

    intact           Px / sigma
    no_scaling       Px / c           c = a constant: two numbers, one for position 0
    no_projection     x / sigma(Px)   longer than intact by what the mean adds
    both_removed      x / c

before gain and bias: the variants of a norm. Everything that measures, draws or describes them iterates over
`VARIANTS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ln_probe.hooks.model import OneLine, at_least_float32, hooks_on, with_float64

READERS = ("attention", "mlp", "attention+mlp", "unembed", "query", "key", "other")


@dataclass(frozen=True)
class Variant:
    """A norm with some of its terms removed.

    Attributes:
        name: in tables.
        removes: the terms of the norm that it removes: "scaling", "projection", both or none.
        label: in legends and sentences ("scaling frozen").
        wording: the beginning of a sentence about it ("Freezing scaling").
    """

    name: str
    removes: frozenset[str]
    label: str
    wording: str

    @property
    def primary(self) -> bool:
        """Whether its effect on the loss is a primary contrast, planned before the data; others are exploratory."""
        return len(self.removes) == 1

    def effect(self, norm: Norm) -> frozenset[str]:
        """Return the terms that it removes and the norm has. Variants with one effect are one computation."""
        has = {"scaling": norm.scales, "projection": norm.projects}
        return frozenset(term for term in self.removes if has[term])


INTACT, SCALING_FROZEN, PROJECTION_REMOVED, BOTH_REMOVED = _TABLE = (
    Variant("intact", frozenset(), "intact", ""),
    Variant("no_scaling", frozenset({"scaling"}), "scaling frozen", "Freezing scaling"),
    Variant("no_projection", frozenset({"projection"}), "projection removed", "Removing projection"),
    Variant(
        "both_removed",
        frozenset({"scaling", "projection"}),
        "both removed",
        "Freezing scaling and removing projection",
    ),
)
VARIANTS = {variant.name: variant for variant in _TABLE}  # in the order of tables and pictures
EDITS = list(_TABLE[1:])  # all but intact
# The name of a variant by what `without` calls it.
VARIANT_WITHOUT = {"scaling": "no_scaling", "projection": "no_projection", "both": "both_removed"}


@dataclass(frozen=True, eq=False, repr=False)
class Terms(OneLine):
    """The terms of one norm on some vectors; float64. Its output is `total()`.

    Attributes:
        x: the vectors.
        mean_component: mu·1, the part of x along the all-ones direction; a norm without projection leaves it in.
        projected: Px, x without it (x itself where the norm does not project).
        sigma: the divisor.
        normalized: projected / sigma.
        gain, bias: the affine part; None where the norm has none.

    Example:
        >>> terms = ln_probe.hooks.find_norms(model)[0].decompose(torch.randn(5, 128))
        >>> torch.allclose(terms.normalized, terms.projected / terms.sigma)
        True
    """

    x: Float64[Tensor, "*batch d"]
    mean_component: Float64[Tensor, "*batch d"]
    projected: Float64[Tensor, "*batch d"]
    sigma: Float64[Tensor, "*batch 1"]
    normalized: Float64[Tensor, "*batch d"]
    gain: Float64[Tensor, " d"] | None
    bias: Float64[Tensor, " d"] | None

    def total(self) -> Float64[Tensor, "*batch d"]:
        """Return the norm's output: gain * normalized + bias."""
        return affine(self.normalized, self.gain, self.bias)


def affine(normalized: Float[Tensor, "*batch d"], gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return gain * normalized + bias, of which either may be missing."""
    out = normalized
    if gain is not None:
        out = out * gain.to(out.device).to(out)
    if bias is not None:
        out = out + bias.to(out.device).to(out)
    return out


@dataclass(frozen=True, eq=False, repr=False)
class Norm(OneLine):
    """One norm of a model. Gain, bias and eps are read from its module each time.

    Attributes:
        name: hook-point name without its last part.
        layer: block index; the final norm has the number of layers, one after the embedding 0.
        kind: "layernorm", "rmsnorm", "projection_only", "scaling_only" (the laboratory's RMSNorm) or "none".
        reads: one of READERS (who reads its output).
        module: the module to put torch hooks on.
        d: length of its vectors.
        attention_layers: blocks whose attention reads its output; after a post-norm block, the next one.
        is_identity: whether it stands for the lack of a norm: attention reads the stream itself.
        has_gain, has_bias: whether its output is multiplied by its weight, and its bias added.
        gain_offset: what the module adds to its weight to make its gain (Gemma's norms: 1).
        eps_name: the module's attribute that holds eps; empty: `eps_value` is used.
        eps_value: eps as its answer to a zero vector shows it.
        constant_value: the divisor of a norm that does not scale, as its answers show it.

    Example:
        >>> norm = ln_probe.hooks.find_norms(model)[0]
        >>> norm.name, norm.kind, norm.reads
        ('blocks.0.ln1', 'layernorm', 'attention')
        >>> norm.decompose(torch.randn(5, norm.d)).sigma.shape
        torch.Size([5, 1])
    """

    name: str
    layer: int
    kind: str
    reads: str
    module: nn.Module
    d: int
    attention_layers: tuple[int, ...] = ()
    is_identity: bool = False
    has_gain: bool = False
    has_bias: bool = False
    gain_offset: float = 0.0
    eps_name: str = ""
    eps_value: float = 0.0
    constant_value: float = 1.0

    @property
    def projects(self) -> bool:
        return self.kind in ("layernorm", "projection_only")

    @property
    def scales(self) -> bool:
        return self.kind in ("layernorm", "rmsnorm", "scaling_only")

    @property
    def eps(self) -> float:
        """What is added to the mean square; of no use where the norm does not scale."""
        return float(getattr(self.module, self.eps_name)) if self.eps_name else self.eps_value

    @property
    def radius(self) -> float:
        """Length of the normalized vectors if eps were 0; NaN for norms that do not scale."""
        if not self.scales:
            return math.nan
        declared = getattr(self.module, "radius", None)  # of the laboratory's norms
        return math.sqrt(self.d) if declared is None else float(declared)

    @property
    def constant_scale(self) -> float:
        """The divisor of a norm that does not scale; NaN for the others."""
        if self.scales:
            return math.nan
        divisor = getattr(self.module, "divisor", None)  # of the laboratory's norms
        return float(divisor) if isinstance(divisor, Tensor) else self.constant_value

    @property
    def gain(self) -> Float[Tensor, " d"] | None:
        """The gain as it acts, made of the module's present parameter; None where there is none."""
        gain, _ = self.gain_and_bias()
        return None if gain is None else gain.detach()

    @property
    def bias(self) -> Float[Tensor, " d"] | None:
        """The module's present bias; None where there is none."""
        _, bias = self.gain_and_bias()
        return None if bias is None else bias.detach()

    def gain_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        """Return gain and bias with their gradients."""
        weight = _parameter(self.module, _GAINS, self.d) if self.has_gain else None
        bias = _parameter(self.module, _BIASES, self.d) if self.has_bias else None
        return None if weight is None else _plus(weight, self.gain_offset), bias

    def _check(self, x: Tensor, axis: int = -1) -> None:
        """Raise ValueError unless x holds real vectors of the norm's length along an axis."""
        if x.ndim < -axis or x.shape[axis] != self.d or not x.is_floating_point():
            shape = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            raise ValueError(f"{self.name} normalizes vectors of {self.d} real numbers, got {shape}")

    def project(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return Px, or x itself where the norm does not project.

        This and the methods below raise ValueError for what holds no real vectors of the norm's length.
        """
        self._check(x)
        return x - x.mean(-1, keepdim=True) if self.projects else x

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """Return the divisor this norm uses on x (in x's own precision)."""
        if not self.scales:
            self._check(x)
            return torch.full_like(x[..., :1], self.constant_scale)
        mean_square = self.project(x).pow(2).mean(-1, keepdim=True)
        return (mean_square + self.eps).sqrt() * (math.sqrt(self.d) / self.radius)

    def normalize(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the norm before gain and bias, Px / sigma, in x's own precision."""
        return self.project(x) / self.sigma(x)

    def without(
        self,
        variant: str,
        x: Float[Tensor, "*batch d"],
        constant: float | Float[Tensor, "*batch 1"] | None,
        sigma: Float[Tensor, "*batch 1"] | None = None,
    ) -> Float[Tensor, "*batch d"]:
        """Return the norm before gain and bias under one of VARIANTS, in x's own precision.

        Args:
            variant: its name.
            x: vectors.
            constant: what replaces sigma where the variant removes scaling.
            sigma: what is divided by where scaling stays; None: the sigma of x.
        """
        effect = VARIANTS[variant].effect(self)
        divisor = constant if "scaling" in effect else sigma
        if divisor is None:
            divisor = self.sigma(x)
        return (x if "projection" in effect else self.project(x)) / divisor

    def affine(self, normalized: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the vectors with gain and bias applied."""
        self._check(normalized)
        return affine(normalized, self.gain, self.bias)

    def decompose(self, x: Float[Tensor, "*batch d"]) -> Terms:
        """Return the terms of this norm on its inputs x, in float64; `Terms.total()` is its output."""
        self._check(x)
        x = with_float64(x.detach()).double()
        gain, bias = (None if t is None else t.to(x.device).double() for t in (self.gain, self.bias))
        mean = x.mean(-1, keepdim=True).expand_as(x)
        return Terms(x, mean, self.project(x), self.sigma(x), self.normalize(x), gain, bias)

    def reachable(
        self, W: Float[Tensor, "*head d out"] | None = None
    ) -> tuple[Float64[Tensor, "*head out"], Float64[Tensor, "*head out d"]] | None:
        """Return all that this norm can put out, or that a map W reads from it: {c + A u, |u| ≤ 1}, on the CPU.

        LN(x) = gain·x̂ + bias with x̂ in a ball of radius `radius` (and orthogonal to 1 if the norm projects), so
        A = radius·Wᵀ diag(gain) P and c = Wᵀ bias. None if the norm does not scale: its outputs are unbounded.

        Args:
            W: what reads the output; None: the output itself.
        """
        return self.directions(W, self.radius) if self.scales else None

    def directions(
        self, W: Float[Tensor, "*head d out"] | None = None, radius: float = 1.0
    ) -> tuple[Float64[Tensor, "*head out"], Float64[Tensor, "*head out d"]]:
        """Return center c and axes A of the outputs {c + A u, |u| ≤ 1} for normalized vectors of length `radius`; of a
        norm that does not scale, u can have any length."""
        gain, bias = gain_of(self), bias_of(self)
        if W is None:
            center, axes = bias, radius * torch.diag(gain)
        else:
            self._check(W, axis=-2)
            read = W.detach().double().cpu()
            center = torch.einsum("d,...dk->...k", bias, read)
            axes = radius * (read * gain[:, None]).transpose(-2, -1)
        return center, axes - axes.mean(-1, keepdim=True) if self.projects else axes


def gain_of(norm: Norm) -> Float64[Tensor, " d"]:
    """Return the gain on the CPU, ones where there is none."""
    return torch.ones(norm.d).double() if (gain := norm.gain) is None else gain.cpu().double()


def bias_of(norm: Norm) -> Float64[Tensor, " d"]:
    """Return the bias on the CPU, zeros where there is none."""
    return torch.zeros(norm.d).double() if (bias := norm.bias) is None else bias.cpu().double()


def is_heads_first(norm: Norm, x: Float[Tensor, "a b c d"], length: int) -> bool:
    """Return whether a norm of queries or keys is given [batch head pos d_head], as inside a bridge's attention.

    Of as many heads as positions, the layout in memory tells: a position's heads lie side by side.
    """
    if norm.reads not in ("query", "key") or x.shape[2] != length:
        return False
    return x.shape[1] != length or x.stride(1) < x.stride(2)


class NormError(ValueError):
    """A norm does not behave as a norm (NaN weights, or a formula that ln_probe does not know)."""


class UnknownNormError(NormError):
    """A module that stands where a norm would, and whose formula is none that ln_probe knows."""


# --------------------------------------------------------- identify the formula

# Relative difference under which two outputs of a norm are the same. Rounding gives about 1e-6 in float32 (measured on
# GPT-2-shaped models) and 1e-2 in bf16; an eps of 0.001 that is added to the root instead of under it, 1e-3.
SAME_OUTPUT = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
# RMS of the vectors that a norm is tried on. Sizes differ, so that a divisor that grows is seen, also with a large
# eps (norm-free checkpoints have one of 1e12, beside which none grows).
_SIZES = (1.0, 3.0, 100.0, 1e4)
# The simpler ones first: with such an eps a LayerNorm divides by a constant, so its kind is "projection_only".
_KINDS = ("none", "projection_only", "rmsnorm", "layernorm")
# What modules call them; the `w` and `b` of a bridge go on naming a parameter that has been replaced.
_GAINS, _BIASES, _EPS = ("weight", "w"), ("bias", "b"), ("eps", "variance_epsilon")


def _parameter(module: nn.Module, names: tuple[str, str], d: int) -> Tensor | None:
    tensors = (getattr(module, name, None) for name in names)
    return next((t for t in tensors if isinstance(t, Tensor) and t.numel() == d), None)


def _plus(weight: Tensor, offset: float) -> Tensor:
    """Return the gain of a weight that is an offset from another; in 16-bit formats in float32, as norms do."""
    return at_least_float32(weight) + offset if offset else weight


@torch.no_grad()
def formula_of(name: str, module: nn.Module, d: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of `Norm` that say what a module computes, from its answers to a few vectors of length d.

    It is the first kind that gives the same answers, or what a norm of the laboratory declares. Raises NormError.
    The vectors are on `device`, in the format of the gain, or in `dtype` where there is none.
    """
    gain, bias = (_parameter(module, names, d) for names in (_GAINS, _BIASES))
    fields: dict[str, Any] = {"d": d, "has_gain": gain is not None, "has_bias": bias is not None}
    if (declared := getattr(module, "kind", None)) in (*_KINDS, "scaling_only"):
        return {**fields, "kind": declared, "eps_name": "eps"}
    unknown = f"{name} ({type(module).__name__}) is no norm that ln_probe knows"
    noise = torch.randn(len(_SIZES), d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([torch.tensor(_SIZES)[:, None] * (noise + 1.0), torch.zeros(1, d)])
    rows = rows.to(device, dtype if gain is None else gain.dtype)
    version = rows._version
    try:
        answers = _answers(module, rows)
    except (AttributeError, TypeError) as error:  # (of a bridge's norm without weights)
        raise UnknownNormError(f"{unknown}: it does not run where hooks edit it ({error})") from error
    if rows._version != version or len(answers) < 4:
        raise NormError(f"{name} changes its input in place before hooks read it, or does not call its hook points")
    scale, normalized, out, edited = answers
    is_same = partial(_is_same, SAME_OUTPUT[rows.dtype])
    fields |= {"eps_value": float(scale[-1, 0]) ** 2, "constant_value": float(scale[0, 0])}
    for kind in _KINDS:
        norm = Norm(name, 0, kind, "other", module, **fields)
        if is_same(normalized[:-1], norm.normalize(with_float64(rows[:-1]).double())):
            break
    else:
        raise UnknownNormError(f"{unknown}: it divides by another number than sigma")
    fields["kind"] = kind
    declared_eps = {label: getattr(module, label, None) or 0.0 for label in _EPS if norm.scales}
    close = (label for label, eps in declared_eps.items() if math.isclose(eps, norm.eps, rel_tol=1e-2))
    fields["eps_name"] = next(close, "")
    if gain is not None:  # (Gemma stores its gain as an offset from 1; with a gain of 80, both are close)
        outputs = {more: affine(normalized, _plus(gain, more), bias) for more in (0.0, 1.0)}
        fields["gain_offset"] = min(outputs, key=lambda more: float((outputs[more] - out).abs().mean()))
        if not is_same(outputs[fields["gain_offset"]], out):
            raise UnknownNormError(f"{unknown}: its output is not gain·normalized + bias")
        gain = _plus(gain, fields["gain_offset"])
    if kind != "none" and not is_same(edited, affine(1.5 * normalized, gain, bias)):
        raise UnknownNormError(f"{unknown}: its output is not what hooks at its hook points make of it")
    return fields


def _answers(module: nn.Module, rows: Float[Tensor, "row d"]) -> list[Float64[Tensor, "row _"]]:
    """Return a norm's divisors, normalized vectors and outputs, and its outputs where hooks edit both."""
    answers: list[Tensor] = []
    scale, normalized = (module.get_submodule(name) for name in ("hook_scale", "hook_normalized"))
    with hooks_on([(point, lambda *seen: answers.append(seen[-1])) for point in (scale, normalized)]):
        answers.append(module(rows[None]))
    with hooks_on([(scale, lambda *seen: 2 * seen[-1]), (normalized, lambda *seen: 3 * seen[-1])]):
        answers.append(module(rows[None]))
    return [with_float64(answer).reshape(len(rows), -1).double() for answer in answers]


def _is_same(tolerance: float, a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max().clamp_min(1e-300))
