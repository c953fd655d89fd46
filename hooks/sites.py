"""Where a model normalizes: every norm, what it computes, who reads it, in what state it is.

A *site* is a module with the hook points `hook_scale` and `hook_normalized`; its name is theirs without the last part
("blocks.0.ln1" in every TransformerLens world). What it computes is not taken from its class, which a bridge hides,
but from its answers to a few vectors: does adding a multiple of the ones-vector change the output (projection)? does
the divisor grow with the input (scaling)? What it reads into is found the same way: one short forward pass, and whose
input equals the site's output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ln_probe.hooks.edits import edits_on
from ln_probe.hooks.model import HookedModel, blocks, check_model, device_of, n_layers, run, vocabulary_size
from ln_probe.hooks.site import KINDS, READERS, Site, Terms
from ln_probe.hooks.state import state_of, writing_weights

__all__ = ["KINDS", "READERS", "Site", "SiteError", "Terms", "find_sites", "site_modules"]

# Relative difference under which two outputs of a norm are the same. Rounding gives about 1e-6 in float32 (measured on
# GPT-2-shaped models) and 1e-2 in bf16; a norm that does not have the property differs by order 1.
SAME_OUTPUT = 5e-2
PROBE_TOKENS = 3


class SiteError(ValueError):
    """A norm does not behave as a norm (NaN weights, or a formula that ln_probe does not know)."""


@dataclass(frozen=True)
class _Answers:
    normalized: Tensor
    scale: Tensor
    out: Tensor


def site_modules(model: HookedModel) -> dict[str, nn.Module]:
    """Modules that normalize, by hook name, in the order of `named_modules`."""
    found: dict[str, nn.Module] = {}
    for _, module in model.named_modules():
        children = dict(module.named_children())
        if "hook_scale" in children and "hook_normalized" in children:
            name = getattr(children["hook_scale"], "name", None)
            if name:
                found.setdefault(str(name).rsplit(".", 1)[0], module)
    return found


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


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= SAME_OUTPUT * float(b.abs().max().clamp_min(1e-300))


def _parameters(module: nn.Module, d: int) -> tuple[Tensor | None, Tensor | None]:
    values = []
    for names in (("w", "weight"), ("b", "bias")):
        tensors = (getattr(module, n, None) for n in names)
        values.append(next((t.detach() for t in tensors if isinstance(t, Tensor) and t.numel() == d), None))
    return values[0], values[1]


def _describe(name: str, module: nn.Module, model: HookedModel) -> dict[str, Any]:
    """kind, gain, bias, eps, radius, constant_scale of one norm, from its answers."""
    d = _length(module, model)
    gain, bias = _parameters(module, d)
    for label, tensor in (("gain", gain), ("bias", bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise SiteError(f"{name}: its {label} holds NaN or infinite values; the checkpoint is damaged")
    dtype = gain.dtype if gain is not None else next((p.dtype for _, p in model.named_parameters()), torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, d, generator=generator, dtype=torch.float64)
    zero = torch.zeros_like(x[:1])
    rows = torch.cat([x, x + 2.0, 3.0 * x, zero]).to(device_of(model), dtype)
    answers = _ask(module, rows)
    base, shifted, tripled = (
        _Answers(answers.normalized[i : i + 4], answers.scale[i : i + 4], answers.out[i : i + 4]) for i in (0, 4, 8)
    )
    projects = d > 1 and _close(shifted.normalized, base.normalized)
    scales = _close(tripled.normalized, base.normalized)
    if not scales and not _close(tripled.normalized, 3 * base.normalized):
        raise SiteError(f"{name} ({type(module).__name__}) neither keeps nor triples 3x: not a norm ln_probe knows")
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
        at_zero = float(answers.scale[-1, 0]) ** 2
        stretch = float(((base.scale[:, 0] ** 2 - at_zero) / kept.pow(2).mean(-1)).mean())
        declared = getattr(module, "radius", None)
        radius = float(declared) if declared is not None else math.sqrt(d)
        if abs(math.sqrt(d / stretch) / radius - 1) > SAME_OUTPUT:
            raise SiteError(
                f"{name} ({type(module).__name__}) normalizes to length {math.sqrt(d / stretch):.4g}, not {radius:.4g}"
            )
        eps = float(at_zero / stretch)
        declared_eps = next((e for e in _declared_eps(module, model) if abs(e - eps) <= 1e-2 * abs(eps) + 1e-30), None)
        eps = declared_eps if declared_eps is not None else eps
    else:
        constant = float(base.scale[0, 0])
    # Gemma stores its gain as an offset from 1: told by the output, not by the class.
    if gain is not None and not _affine_holds(base, gain, bias):
        if not _affine_holds(base, 1 + gain, bias):
            raise SiteError(
                f"{name} ({type(module).__name__}): output is not gain·normalized + bias for its parameters; "
                "ln_probe does not know this norm"
            )
        gain = 1 + gain
    if not all(torch.isfinite(t).all() for t in (answers.out, answers.scale)):
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


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]


Reader = tuple[str, int]  # "attention", "mlp" or "unembed", and the block


@contextmanager
def _readers_watched(model: HookedModel, skip: set[int]) -> Iterator[dict[Reader, list[Tensor]]]:
    """Inputs of everything inside attention, MLPs and the unembedding, by which of them it belongs to."""
    seen: dict[Reader, list[Tensor]] = {}
    with ExitStack() as stack:
        roots: list[tuple[Reader, Any]] = []
        for layer, block in enumerate(blocks(model)):
            roots += [
                (("attention", layer), getattr(block, "attn", None)),
                (("mlp", layer), getattr(block, "mlp", None)),
            ]
        roots.append((("unembed", n_layers(model)), getattr(model, "unembed", None)))
        taken = set(skip)  # a bridge's MLP may wrap the whole block (OPT): attention comes first and keeps its own
        for reader, root in sorted(roots, key=lambda item: item[0][0] != "attention"):
            for module in root.modules() if isinstance(root, nn.Module) else ():
                if id(module) in taken or type(module).__name__ == "HookPoint":
                    continue
                taken.add(id(module))

                def watch(_m: nn.Module, args: Any, kwargs: Any, reader: Reader = reader) -> None:
                    seen.setdefault(reader, []).extend(t.detach() for t in _first_tensor(args, kwargs))

                handle = module.register_forward_pre_hook(watch, with_kwargs=True)
                stack.callback(handle.remove)
        yield seen


def _layer(name: str, model: HookedModel, order: dict[str, int]) -> int:
    match = re.match(r"blocks\.(\d+)\.", name)
    if match:
        return int(match[1])
    first = min((place for other, place in order.items() if other.startswith("blocks.")), default=len(order))
    return 0 if order.get(name, len(order)) < first else n_layers(model)  # after the embedding, or at the end


def _short_run(
    model: HookedModel, modules: dict[str, nn.Module]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]], dict[Reader, list[Tensor]]]:
    """Inputs and outputs of every site, and inputs of every reader, in one pass over a few tokens."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, list[Tensor]] = {}  # HookedTransformer calls `ln1` once each for q, k and v
    with ExitStack() as stack:
        for name, module in modules.items():

            def keep(_m: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                inputs.setdefault(name, args[0].detach())
                outputs.setdefault(name, []).append(output.detach())

            stack.callback(module.register_forward_hook(keep).remove)
        skip = {id(m) for m in modules.values()}
        with _readers_watched(model, skip) as seen:
            tokens = torch.linspace(1, vocabulary_size(model) - 1, PROBE_TOKENS).long()[None]
            run(model, tokens, return_type="logits")
    return inputs, outputs, seen


def _readers(outputs: dict[str, list[Tensor]], seen: dict[Reader, list[Tensor]]) -> dict[str, list[Reader]]:
    """Who takes each site's output. Of several sites that a reader sees, the last one that ran: a block's input often
    comes along for the residual sum (BLOOM, BERT)."""
    found: dict[str, list[Reader]] = {name: [] for name in outputs}
    for reader, inputs in seen.items():
        # The same memory first: two parallel norms with equal parameters have equal outputs (a fresh Pythia).
        places = {t.data_ptr() for t in inputs}
        taken = [n for n, made in outputs.items() if ".attn." not in n and any(t.data_ptr() in places for t in made)]
        if not taken:
            flat = [t.flatten() for t in inputs]
            taken = [
                n
                for n, made in outputs.items()
                if ".attn." not in n and any(torch.equal(t, made[0].flatten()) for t in flat)
            ]
        if taken:
            found[taken[-1]].append(reader)
    return found


def _reads(name: str, readers: list[Reader]) -> str:
    leaf = name.rsplit(".", 1)[-1]
    if ".attn." in name:  # QK-norm: inside attention, so its output never enters it from outside
        return "query" if leaf.startswith("q") else "key" if leaf.startswith("k") else "other"
    joined = "+".join(what for what in ("attention", "mlp", "unembed") if any(r == what for r, _ in readers))
    return joined if joined in READERS else "other"


def find_sites(model: object) -> list[Site]:
    """Every norm of `model`, in the order of the forward pass.

    Costs one forward pass over three tokens and one call of each norm. An empty list means that the model has none.

    Raises:
        TypeError: not a TransformerLens model.
        SiteError: a norm with NaN parameters, one whose output is none of the known formulas, or one that is under an
            intervention.
    """
    hooked = check_model(model)
    modules = site_modules(hooked)
    for name, module in modules.items():
        if active := [e for e in edits_on(module) if not e.suspended]:
            raise SiteError(
                f"{name} is under an intervention ({active[0].label}), so the model cannot be looked at as it is: "
                "leave the `with` block first"
            )
    if not modules:
        return []
    inputs, outputs, seen = _short_run(hooked, modules)
    order = {name: place for place, name in enumerate(outputs)}
    readers = _readers(outputs, seen)
    writing = writing_weights(hooked)
    sites = []
    for name, module in sorted(modules.items(), key=lambda item: order.get(item[0], len(order))):
        facts = _describe(name, module, hooked)
        layer, reads = _layer(name, hooked, order), _reads(name, readers.get(name, []))
        taken = readers.get(name, [])
        layers_reading = sorted({place for what, place in taken if what != "unembed"})
        projects = facts["kind"] in ("layernorm", "projection_only")
        state, evidence = state_of(
            hooked,
            layer=layer,
            reads=reads,
            reading_layers=layers_reading,
            projects=projects,
            gain=facts["gain"],
            bias=facts["bias"],
            x=inputs.get(name),
            writing=writing,
        )
        sites.append(
            Site(
                name=name,
                layer=layer,
                reads=reads,
                state=state,
                evidence=evidence,
                module=module,
                attention_layers=tuple(sorted(place for what, place in taken if what == "attention")),
                **facts,
            )
        )
    return sites
