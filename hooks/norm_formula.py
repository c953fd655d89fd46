"""What one module computes, from its answers to a few vectors: is it a norm, and which?

Nothing is taken from its class, which a bridge hides: does adding a multiple of the ones-vector change the output
(projection)? does the divisor grow with the input (scaling)? is the output gain·normalized + bias for its parameters?
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, device_of

# Relative difference under which two outputs of a norm are the same. Rounding gives about 1e-6 in float32 (measured on
# GPT-2-shaped models) and 1e-2 in bf16; a norm that does not have the property differs by order 1.
SAME_OUTPUT = 5e-2
# RMS of the vectors that a norm is asked about, the next where its eps hides whether it scales (eps is annealed in
# studies of norms, up to 1 and beyond). At the last, half precision overflows.
SIZES = (1.0, 1e2, 1e4)


class SiteError(ValueError):
    """A norm does not behave as a norm (NaN weights, or a formula that ln_probe does not know)."""


class UnknownNormError(SiteError):
    """A module with the hook points of a norm whose formula is none that ln_probe knows."""


@dataclass(frozen=True)
class _Answers:
    normalized: Tensor
    scale: Tensor
    out: Tensor


def _length(module: nn.Module, model: HookedModel) -> int:
    for name in ("w", "weight"):
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            return value.shape[-1]
    return int(getattr(module, "length", None) or getattr(module, "d_model", None) or model.cfg.d_model)


def _ask(module: nn.Module, x: Tensor) -> _Answers:
    """Run the norm alone on x [batch d], seeing what passes its hook points."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            seen.setdefault(name, output.detach().reshape(x.shape[0], -1).double())

        return hook

    children = dict(module.named_children())
    with ExitStack() as stack, torch.no_grad():
        for name in ("hook_scale", "hook_normalized"):
            handle = children[name].register_forward_hook(keep(name))
            stack.callback(handle.remove)
        out = module(x[None])
    return _Answers(seen["hook_normalized"], seen["hook_scale"], out.detach().reshape(x.shape[0], -1).double())


@dataclass(frozen=True)
class _Asked:
    """A norm's answers to four vectors of a size, to the same shifted, and tripled, and to zero."""

    rows: Tensor
    base: _Answers
    shifted: _Answers
    tripled: _Answers
    at_zero: _Answers

    @property
    def scales(self) -> bool:
        return _close(self.tripled.normalized, self.base.normalized)


def _answers(module: nn.Module, model: HookedModel, dtype: torch.dtype, size: float) -> _Asked:
    generator = torch.Generator().manual_seed(0)
    x = size * torch.randn(4, _length(module, model), generator=generator, dtype=torch.float64)
    rows = torch.cat([x, x + 2.0 * size, 3.0 * x, torch.zeros_like(x[:1])]).to(device_of(model), dtype)
    found = _ask(module, rows)
    parts = (_Answers(found.normalized[i : i + 4], found.scale[i : i + 4], found.out[i : i + 4]) for i in (0, 4, 8, 12))
    return _Asked(rows, *parts)


def _larger(first: _Asked, module: nn.Module, model: HookedModel, dtype: torch.dtype) -> Iterator[_Asked]:
    """The answers to vectors of growing size, as long as the format holds them."""
    yield first
    for size in SIZES[1:]:
        if 100 * size < torch.finfo(dtype).max:
            yield _answers(module, model, dtype, size)


def _normalized(asked: _Asked, projects: bool, eps: float, radius: float) -> Tensor:
    """What a norm with this eps makes of the vectors, before gain and bias."""
    kept = asked.rows[:4].double()
    kept = kept - kept.mean(-1, keepdim=True) if projects else kept
    return kept / (kept.pow(2).mean(-1, keepdim=True) + eps).sqrt() * radius / math.sqrt(kept.shape[-1])


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= SAME_OUTPUT * float(b.abs().max().clamp_min(1e-300))


def _parameters(module: nn.Module, d: int) -> tuple[Tensor | None, Tensor | None]:
    values = []
    for names in (("w", "weight"), ("b", "bias")):
        tensors = (getattr(module, n, None) for n in names)
        values.append(next((t.detach() for t in tensors if isinstance(t, Tensor) and t.numel() == d), None))
    return values[0], values[1]


def describe(name: str, module: nn.Module, model: HookedModel) -> dict[str, Any]:
    """kind, gain, bias, eps, radius, constant_scale of one norm, from its answers."""
    d = _length(module, model)
    gain, bias = _parameters(module, d)
    for label, tensor in (("gain", gain), ("bias", bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise SiteError(f"{name}: its {label} holds NaN or infinite values; the checkpoint is damaged")
    dtype = gain.dtype if gain is not None else next((p.dtype for _, p in model.named_parameters()), torch.float32)
    first = _answers(module, model, dtype, SIZES[0])
    projects = d > 1 and _close(first.shifted.normalized, first.base.normalized)
    answers = next((a for a in _larger(first, module, model, dtype) if a.scales), first)
    scales = answers.scales
    if not scales and not _close(first.tripled.normalized, 3 * first.base.normalized):
        raise UnknownNormError(
            f"{name} ({type(module).__name__}) neither keeps nor triples 3x: not a norm ln_probe knows"
        )
    rows, base = answers.rows, answers.base
    kept = rows[:4].double()
    kept = kept - kept.mean(-1, keepdim=True) if projects else kept
    kind = {
        (True, True): "layernorm",
        (False, True): "rmsnorm",
        (True, False): "projection_only",
        (False, False): "none",
    }[projects, scales]
    if kind == "rmsnorm" and getattr(module, "kind", None) == "scaling_only":
        kind = "scaling_only"  # the laboratory's name for it
    radius, eps, constant = math.nan, 0.0, math.nan
    if scales:
        # scale² = (mean(kept²) + eps)·d/radius² at x and at 0: two unknowns, two equations.
        at_zero = float(answers.at_zero.scale[0, 0]) ** 2
        stretch = float(((base.scale[:, 0] ** 2 - at_zero) / kept.pow(2).mean(-1)).mean())
        declared = getattr(module, "radius", None)
        radius = float(declared) if declared is not None else math.sqrt(d)
        if abs(math.sqrt(d / stretch) / radius - 1) > SAME_OUTPUT:
            raise UnknownNormError(
                f"{name} ({type(module).__name__}) normalizes to length {math.sqrt(d / stretch):.4g}, not {radius:.4g}"
            )
        eps = float(at_zero / stretch)
        if answers is not first and not _close(first.base.normalized, _normalized(first, projects, eps, radius)):
            raise UnknownNormError(
                f"{name} ({type(module).__name__}) keeps 3x of long vectors alone, and does not divide shorter ones by "
                f"sqrt(mean + eps) with eps {eps:.3g}: not a norm ln_probe knows"
            )
        declared_eps = next((e for e in _declared_eps(module, model) if abs(e - eps) <= 1e-2 * abs(eps) + 1e-30), None)
        eps = declared_eps if declared_eps is not None else eps
    else:
        constant = float(base.scale[0, 0])
    # Gemma stores its gain as an offset from 1: told by the output, not by the class.
    if gain is not None and not _affine_holds(base, gain, bias):
        if not _affine_holds(base, 1 + gain, bias):
            raise UnknownNormError(
                f"{name} ({type(module).__name__}): output is not gain·normalized + bias for its parameters; "
                "ln_probe does not know this norm"
            )
        gain = 1 + gain
    if not all(torch.isfinite(t).all() for a in (answers.base, answers.at_zero) for t in (a.out, a.scale)):
        raise SiteError(f"{name} returns NaN or infinite values on ordinary vectors; the checkpoint is damaged")
    return {
        "d": d,
        "kind": kind,
        "gain": gain,
        "bias": bias,
        "eps": eps,
        "radius": radius,
        "constant_scale": constant,
    }


def _affine_holds(answers: _Answers, gain: Tensor, bias: Tensor | None) -> bool:
    predicted = answers.normalized * gain.double()
    if bias is not None:
        predicted = predicted + bias.double()
    return _close(predicted, answers.out)


def _declared_eps(module: nn.Module, model: HookedModel) -> Iterator[float]:
    inner = getattr(module, "original_component", None)
    for owner in (module, inner, model.cfg):
        for name in ("eps", "variance_epsilon", "layer_norm_epsilon"):
            value = getattr(owner, name, None)
            if isinstance(value, float):
                yield value
