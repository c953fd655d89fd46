"""Find every norm of a model: its formula, its place in the pass, its readers, and whether an edit arrives.

A norm is a module with the hook points `hook_scale` and `hook_normalized`; its name is theirs without the last part
("blocks.0.ln1" in every model class). `norm.formula_of` identifies its formula. One short pass shows its readers, the
modules whose input equals its output, and by its gradients whether a change of the norm reaches the model's output.

The result is cached, not on the model, as long as modules, configuration and a few settings (eps, activations) are the
same. Weights matter only where a change does not arrive (they may be zero): then the pass is run again.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ln_probe.hooks.model import (
    HookedModel,
    attentions,
    check_model,
    device_of,
    dtype_of,
    evaluating,
    hooks_on,
    plain_path,
    probe_tokens,
    tensors_in,
    unedited,
)
from ln_probe.hooks.norm import READERS, Norm, NormError, UnknownNormError, formula_of

# Tokens of the short pass: two are enough for all inputs and outputs of norms to differ.
TOKENS = 2
# Settings of modules that change what they compute and are neither parameters nor modules.
_SETTINGS = {"eps", "variance_epsilon", "act_fn", "act", "activation_fn"}
_SETTINGS |= {"scaling", "attn_scale", "kind", "radius", "forward"}

Reader = tuple[str, int]  # "attention", "mlp", "unembed" or "block", and the block's number
Root = tuple[Reader, nn.Module]


def find_norms(model: object) -> list[Norm]:
    """Return every norm of `model`, in the order of the forward pass.

    The first call costs a forward and a backward pass over two tokens. An empty list means that the model has none.

    Raises:
        TypeError: not a TransformerLens model.
        NormError: a norm with NaN parameters, or one that runs on different vectors in one pass.
        UnknownNormError: attention reads something that is neither a norm of a known formula nor the stream.

    Example:
        >>> [norm.name for norm in ln_probe.hooks.find_norms(model)][:2]
        ['blocks.0.ln1', 'blocks.0.ln2']
    """
    return list(structure_of(check_model(model)).norms)


def unhooked_norms(modules: Mapping[str, nn.Module], norms: Sequence[Norm]) -> list[str]:
    """Return the paths of norms without hook points, by the names of their classes."""
    known = {module for norm in norms for module in norm.module.modules()}
    paths = []
    for path, module in modules.items():
        name = type(module).__name__
        if "Norm" in name and "Bridge" not in name and known.isdisjoint(module.modules()):
            known.update(module.modules())
            paths.append(plain_path(path).removesuffix("._original_component"))
    return paths


def layers_in_words(layers: Sequence[int]) -> str:
    """Return `layer 3`, `layers 0, 1`, `layers 0 … 11 (12 of them)`."""
    if len(layers) > 6:
        return f"layers {layers[0]} … {layers[-1]} ({len(layers)} of them)"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


# ---------------------------------------------------------- cached by structure


@dataclass(eq=False)
class Structure:
    """What is known of a model as long as its modules, configuration and settings are the same."""

    modules: list[nn.Module]  # below the model itself
    settings: tuple[object, ...]  # of its configuration and its modules
    norms: list[Norm]
    identities: list[Norm]  # of blocks whose attention reads the stream
    lost: dict[str, str]  # norms of which a change does not reach the output, and why
    unhooked: list[str]  # paths of norms without hook points
    constants: Any = None  # mean sigmas of the default prompts, with what they depend on
    wiring: Any = None  # which components each norm's input is the sum of (`components`), likewise

    @property
    def attention_inputs(self) -> list[Norm]:
        """The norms, and an identity for every block whose attention reads the stream itself."""
        return [*self.norms, *self.identities]

    def lost_at(self, norms: Sequence[Norm]) -> dict[str, str]:
        """Return the reason for each of these norms at which an edit does not reach the output."""
        return {norm.name: self.lost[norm.name] for norm in norms if norm.name in self.lost}


_STRUCTURES: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()


def structure_of(model: HookedModel) -> Structure:
    """Return the structure of a model, by a short pass where it is not known or has changed.

    Edits that were lost are tried again: weights that were zero may have been trained.
    """
    module, modules = cast(nn.Module, model), list(model.modules())[1:]
    known = _STRUCTURES.get(module)
    if known is None or known.lost or (known.modules, known.settings) != (modules, _settings(model.cfg, modules)):
        known = _STRUCTURES[module] = _survey(model, modules)
    return known


def _settings(cfg: Any, modules: Iterable[nn.Module]) -> tuple[object, ...]:
    plain = bool | int | float | str
    values: list[object] = [(k, v) for k, v in vars(cfg).items() if isinstance(v, plain)]
    for module in modules:
        own = module.__dict__
        values += [own[name] if isinstance(own[name], plain) else id(own[name]) for name in _SETTINGS & own.keys()]
    return tuple(values)


# --------------------------------------------------------------- the short pass


def _survey(model: HookedModel, modules: Sequence[nn.Module]) -> Structure:
    """Run the short pass and return the structure that it shows; `modules`: those below the model."""
    device, dtype = device_of(model.parameters()), dtype_of(model.parameters())
    by_name: dict[str, nn.Module] = {}
    for module in modules:
        name = getattr(module._modules.get("hook_scale"), "name", None)
        if name and "hook_normalized" in module._modules:
            by_name.setdefault(str(name).rsplit(".", 1)[0], module)
    layers, width = attentions(model.blocks), int(model.cfg.d_model)
    roots = _roots(model.blocks, layers, getattr(model, "unembed", None))
    tokens = probe_tokens(int(model.cfg.d_vocab), TOKENS)[None].to(device)
    norms: list[Norm] = []
    formulas: dict[object, dict[str, Any]] = {}  # of norms that are alike
    # The pass needs gradients, which inference mode would not have. A bridge warns of hooks at its norms.
    with torch.inference_mode(False), evaluating(model), unedited(modules), warnings.catch_warnings(action="ignore"):
        # In some architectures, what a norm puts out is given to a module inside attention or MLP alone.
        for inside in ((), _inside(roots, by_name.values())):
            short = _ShortPass(by_name)
            with short.recording([*roots, *inside, *((("block", i), b) for i, b in enumerate(model.blocks))]):
                logits = model(tokens, return_type="logits")
            read_by = short.readers()
            if {reader for readers in read_by.values() for reader in readers} == {reader for reader, _ in roots}:
                break
        lost = short.lost(logits)
        for name in dict.fromkeys([*short.outputs, *by_name]):
            module = by_name[name]
            if not all(math.isfinite(parameter.abs().max()) for parameter in module.parameters()):
                raise NormError(f"{name}: its weights hold NaN or infinite values")
            d = int(short.inputs[name].shape[-1]) if name in short.inputs else width
            alike = d, _likeness(module)
            if alike not in formulas:
                formulas[alike] = formula_of(name, module, d, device, dtype)
            about: dict[str, Any] = {"layer": _layer_of(name, norms, len(model.blocks)), "module": module}
            about["reads"] = _reads(name, read_by[name])
            about["attention_layers"] = tuple(layer for reader, layer in read_by[name] if reader == "attention")
            norms.append(Norm(name, **about, **formulas[alike]))
    for attn in layers.values():
        # A bridge keeps tensors of a pass; with their graph they could not be copied with the model.
        tensors = {name: value for name, value in vars(attn).items() if isinstance(value, Tensor) and value.grad_fn}
        vars(attn).update({name: value.detach() for name, value in tensors.items()})
    # (A bridge puts modules on itself in its first pass.)
    below = {path: module for path, module in model.named_modules() if path}
    identities, unhooked = list(_identities(layers, width, short, norms)), unhooked_norms(below, norms)
    return Structure([*below.values()], _settings(model.cfg, below.values()), norms, identities, lost, unhooked)


def _layer_of(name: str, before: Sequence[Norm], layers: int) -> int:
    """Return the block of a norm: 0 for one after the embedding, the number of blocks for one at the end."""
    if in_block := re.match(r"blocks\.(\d+)\.", name):
        return int(in_block[1])
    return layers if any(norm.name.startswith("blocks.") for norm in before) else 0


def _identities(layers: Mapping[int, nn.Module], d: int, short: _ShortPass, norms: Sequence[Norm]) -> Iterator[Norm]:
    """Yield an identity for every block whose attention reads the stream."""
    normalized = {layer for norm in norms for layer in norm.attention_layers}
    for layer, attn in layers.items():
        inputs = short.read.get(("attention", layer), [])
        stream = [t.flatten() for t in short.read.get(("block", layer), [])]
        if not inputs or layer in normalized:
            continue
        if not any(torch.equal(t.flatten(), s) for t in inputs for s in stream):
            raise UnknownNormError(f"blocks.{layer}.attn reads neither a known norm nor the residual stream")
        yield Norm(f"blocks.{layer}.attn", layer, "none", "attention", attn, d, (layer,), is_identity=True)


def _likeness(module: nn.Module) -> tuple[object, ...]:
    """Return what tells norms with different formulas apart: their classes, parameters and settings."""
    known: list[object] = [getattr(module, "kind", None)]
    for owner in (module, getattr(module, "original_component", None)):
        if owner is not None:
            own = vars(owner)
            known += [type(owner), id(own.get("forward"))]  # (of an instance whose forward is replaced)
            known += [(name, parameter is None) for name, parameter in owner._parameters.items()]
            known += [(name, value) for name, value in own.items() if isinstance(value, int | float)]
    return tuple(known)


class _ShortPass:
    """A pass over two tokens: what norms and their readers are given, and zeros added to the norms."""

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        self.norms = norms
        self.inputs: dict[str, Tensor] = {}
        # In the order in which they ran; HookedTransformer calls `ln1` once each for q, k and v.
        self.outputs: dict[str, list[Tensor]] = {}
        self.read: dict[Reader, list[Tensor]] = {}
        self.leaves: dict[str, list[Tensor]] = {name: [] for name in norms}

    @contextmanager
    def recording(self, readers: Iterable[Root]) -> Iterator[None]:
        """Record the pass that runs inside the `with` block."""
        after = [(module, partial(self._on_norm, name)) for name, module in self.norms.items()]
        before = [(module, partial(self._on_reader, reader)) for reader, module in readers]
        with hooks_on(after, before):
            yield

    def readers(self) -> dict[str, list[Reader]]:
        """Return the readers of each norm."""
        by_norm: dict[str, list[Reader]] = {name: [] for name in self.norms}
        for reader, inputs in self.read.items():
            # The last maker counts: a block's input often comes along for the residual sum (BLOOM, BERT).
            if reader[0] != "block" and (makers := self._makers(inputs)):
                by_norm[makers[-1]].append(reader)
        return by_norm

    def lost(self, logits: Any) -> dict[str, str]:
        """Return why a change does not reach the logits, of each norm whose zeros have no gradient."""
        leaves = [leaf for tensors in self.leaves.values() for leaf in tensors]
        unread = "what comes after it does not read its output, or ignores it (weights that are zero)"
        reached: set[int] = set()
        try:
            # (Weights as grad_outputs make torch import sympy, which takes long.)
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            gradients = torch.autograd.grad((logits * weights).sum(), leaves, allow_unused=True)
            reached = {id(x) for x, g in zip(leaves, gradients, strict=True) if g is not None and bool(g.any())}
        except (RuntimeError, AttributeError) as error:
            unread = f"no gradient goes through the model ({error})"
        reasons = {}
        for name, tensors in self.leaves.items():
            if not tensors:
                reasons[name] = "a pass does not run this norm, or not through its hook points"
            elif reached.isdisjoint(map(id, tensors)):
                reasons[name] = unread
        return {name: f"{name}: the edit was lost: {reason}" for name, reason in reasons.items()}

    def _on_norm(self, name: str, _m: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        x = tensors_in(args, kwargs)[0].detach()
        first = self.inputs.setdefault(name, x)
        if first is not x and not torch.equal(first.nan_to_num(), x.nan_to_num()):
            raise NormError(f"{name} runs more than once in a pass, on different vectors")
        self.leaves[name].append(torch.zeros_like(output, requires_grad=True))
        changed = output + self.leaves[name][-1]
        self.outputs.setdefault(name, []).append(changed.detach())
        return changed

    def _on_reader(self, reader: Reader, _m: nn.Module, args: Any, kwargs: Any) -> None:
        self.read.setdefault(reader, []).extend(t.detach() for t in tensors_in(args, kwargs))

    def _makers(self, inputs: Sequence[Tensor]) -> list[str]:
        """Return the norms whose outputs are among a reader's inputs, in the order in which they ran."""
        outside = {name: outputs for name, outputs in self.outputs.items() if ".attn." not in name}
        # The same memory first: parallel norms with equal parameters have equal outputs (a fresh Pythia).
        places = {t.data_ptr() for t in inputs}
        if same := [n for n, outputs in outside.items() if any(t.data_ptr() in places for t in outputs)]:
            return same
        flat = [t.flatten() for t in inputs]
        flat_outputs = {name: outputs[0].flatten() for name, outputs in outside.items()}
        return [name for name, output in flat_outputs.items() if any(torch.equal(t, output) for t in flat)]


def _roots(blocks: nn.ModuleList, layers: Mapping[int, nn.Module], unembed: Any) -> list[Root]:
    """Return attention, MLPs and the unembedding."""
    roots: list[tuple[Reader, Any]] = [(("attention", layer), attn) for layer, attn in layers.items()]
    roots += [(("mlp", layer), getattr(block, "mlp", None)) for layer, block in enumerate(blocks)]
    roots.append((("unembed", len(blocks)), unembed))
    return [(reader, module) for reader, module in roots if isinstance(module, nn.Module)]


def _inside(roots: Sequence[Root], norms: Iterable[nn.Module]) -> Iterator[Root]:
    """Yield the modules with weights inside attention and MLPs, except norms."""
    done = {*norms, *(root for _, root in roots)}
    for reader, root in roots:  # (attention comes first: a bridge's MLP may wrap the whole block, as in OPT)
        for module in root.modules():
            if module not in done and module._parameters:
                done.add(module)
                yield reader, module


def _reads(name: str, readers: Sequence[Reader]) -> str:
    """Return one of READERS."""
    leaf = name.rsplit(".", 1)[-1]
    if ".attn." in name:  # QK-norm: inside attention, so its output never enters it from outside
        return "query" if leaf.startswith("q") else "key" if leaf.startswith("k") else "other"
    together = "+".join(what for what in ("attention", "mlp", "unembed") if any(r == what for r, _ in readers))
    return together if together in READERS else "other"
