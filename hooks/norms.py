"""Find every norm of a model: what it computes, in which order they run, who reads them, and where an edit arrives.

A norm is a module with the hook points `hook_scale` and `hook_normalized`; its name is theirs without the last part
("blocks.0.ln1" in every model class). `norm.formula_of` identifies its formula. One short pass shows its readers, the
modules whose input equals its output, and by its gradients whether a change of the norm reaches the model's output.

The result depends on the modules, the configuration and a few of their settings (eps, activations), never on the
weights. It is cached beside the model, as long as these are the same; nothing is put on the model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ln_probe.hooks.model import (
    HookedModel,
    attentions,
    blocks,
    check_model,
    device_of,
    evaluating,
    hooks_on,
    modules_of,
    n_layers,
    plain_path,
    probe_tokens,
    tensors_in,
    unedited,
)
from ln_probe.hooks.norm import READERS, Norm, NormError, UnknownNormError, check_finite, eps_owners, formula_of

# Tokens of the short pass: two are enough for all inputs and outputs of norms to differ.
TOKENS = 2
# Settings of modules that change what they compute and are neither parameters nor modules.
_SETTINGS = {"eps", "variance_epsilon", "act_fn", "act", "activation_fn"}
_SETTINGS |= {"scaling", "attn_scale", "kind", "radius", "forward"}

Reader = tuple[str, int]  # "attention", "mlp" or "unembed", and the block


def find_norms(model: object) -> list[Norm]:
    """Return every norm of `model`, in the order of the forward pass.

    Costs a forward and a backward pass over two tokens and two calls of each norm, the first time. An empty list means
    that the model has none.

    Raises:
        TypeError: not a TransformerLens model.
        NormError: a norm with NaN parameters, or one that runs on different vectors in one pass.
        UnknownNormError: a module that stands where a norm would and whose formula is none of the known ones.

    Example:
        >>> [norm.name for norm in ln_probe.hooks.find_norms(model)][:2]
        ['blocks.0.ln1', 'blocks.0.ln2']
    """
    return norms_of(check_model(model))


def norms_of(model: HookedModel) -> list[Norm]:
    """Return `find_norms` of a model that `check_model` has returned."""
    return list(structure_of(model).norms)


def attention_inputs(model: HookedModel) -> list[Norm]:
    """Return the norms of a model, and for every block whose attention reads the stream itself an identity."""
    structure = structure_of(model)
    return [*structure.norms, *structure.identities]


def unhooked_norms(model: HookedModel, norms: Sequence[Norm]) -> list[str]:
    """Return the paths of modules that are norms by their class and that no hook points show: no edit reaches them."""
    known = {module for norm in norms for module in modules_of(norm.module)}
    paths = []
    for path, module in cast(nn.Module, model).named_modules():
        name = type(module).__name__
        if "Norm" in name and "Bridge" not in name and known.isdisjoint(modules_of(module)):
            known.update(modules_of(module))
            paths.append(plain_path(path).removesuffix("._original_component"))
    return paths


def layers_in_words(layers: Sequence[int]) -> str:
    """Return `layer 3`, `layers 0, 1`, `layers 0 … 11 (12 of them)`."""
    if len(layers) > 6:
        return f"layers {layers[0]} … {layers[-1]} ({len(layers)} of them)"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


# ---------------------------------------------------------------------------------------- cached by structure


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
    wiring: Any = None  # of what the norms' inputs are sums, likewise


_STRUCTURES: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()


def structure_of(model: HookedModel) -> Structure:
    """Return the structure of a model, by a short pass where it is not known or has changed; raises NormError."""
    module, modules = cast(nn.Module, model), modules_of(model)[1:]
    known = _STRUCTURES.get(module)
    is_current = known is not None and known.modules == modules and known.settings == _settings(model, modules)
    if known is None or not is_current or known.lost:  # (what is lost may be so for weights that are zero now)
        norms, identities, lost = _survey(model)
        modules = modules_of(model)[1:]  # (a bridge puts modules on itself in its first pass)
        unhooked = unhooked_norms(model, norms)
        known = _STRUCTURES[module] = Structure(modules, _settings(model, modules), norms, identities, lost, unhooked)
    for norm in known.norms:
        check_finite(norm.name, norm.gain, norm.bias)
    return known


def _settings(model: HookedModel, modules: Sequence[nn.Module]) -> tuple[object, ...]:
    plain = bool | int | float | str
    values: list[object] = [(k, v) for k, v in vars(model.cfg).items() if isinstance(v, plain)]
    for module in modules:
        own = module.__dict__
        values += [own[name] if isinstance(own[name], plain) else id(own[name]) for name in _SETTINGS & own.keys()]
    return tuple(values)


# ---------------------------------------------------------------------------------------- the short pass


def _survey(model: HookedModel) -> tuple[list[Norm], list[Norm], dict[str, str]]:
    """Return every norm; an identity for every block whose attention reads the stream; and the norms of which a change
    does not reach the output, with the reason."""
    paths = {module: path for path, module in model.named_modules()}
    modules: dict[str, nn.Module] = {}
    for module in paths:
        name = getattr(module._modules.get("hook_scale"), "name", None)
        if name and "hook_normalized" in module._modules:
            modules.setdefault(str(name).rsplit(".", 1)[0], module)
    norms: list[Norm] = []
    formulas: dict[object, dict[str, Any]] = {}  # of norms that are alike
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), unedited(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a bridge warns that it computes the norm itself where hooks edit it
            short = _ShortPass(model, modules, _other_modules(model, modules, paths))
            for name in dict.fromkeys([*(n for n in short.outputs if n in modules), *modules]):
                module, in_block = modules[name], re.match(r"blocks\.(\d+)\.", name)
                # One after the embedding is in block 0, one at the end has the number of blocks.
                is_first = not any(norm.name.startswith("blocks.") for norm in norms)
                layer = int(in_block[1]) if in_block else 0 if is_first else n_layers(model)
                d = int(short.inputs[name].shape[-1]) if name in short.inputs else int(model.cfg.d_model)
                alike = d, _likeness(module)
                if alike not in formulas:
                    formulas[alike] = formula_of(name, module, model, d)
                readers = short.readers.get(name, [])
                layers = tuple(sorted(layer for reader, layer in readers if reader == "attention"))
                fields: dict[str, Any] = {"reads": _reads(name, readers), "attention_layers": layers, "module": module}
                fields |= formulas[alike]
                owner, label = fields.pop("eps_owner", (None, ""))
                if owner is not None:
                    fields["eps_owner"] = eps_owners(module, model)[owner], label
                norms.append(Norm(name=name, layer=layer, **fields))
        for attn in attentions(model).values():  # a pass with gradients leaves tensors: a bridge would have no copy
            graph = {k: v for k, v in vars(attn).items() if isinstance(v, Tensor) and v.grad_fn is not None}
            vars(attn).update({name: value.detach() for name, value in graph.items()})
    for name in (n for n in short.outputs if n not in modules and any(r != "unembed" for r, _ in short.readers[n])):
        raise UnknownNormError(
            f"{name} stands where a norm would and has no hook points of a norm: ln_probe cannot measure this model"
        )
    return norms, list(_identities(model, short)), short.lost


def _identities(model: HookedModel, short: _ShortPass) -> Iterator[Norm]:
    """Yield an identity for every block whose attention reads the stream."""
    d = int(model.cfg.d_model)
    for layer, attn in attentions(model).items():
        reading = short.read.get(("attention", layer), [])
        if reading and not any(("attention", layer) in readers for readers in short.readers.values()):
            stream = [t.flatten() for t in short.blocks.get(layer, [])]
            if not any(torch.equal(t.flatten(), s) for t in reading for s in stream if t.shape[-1:] == (d,)):
                raise UnknownNormError(
                    f"blocks.{layer}.attn reads neither a norm nor the residual stream: this model is not supported"
                )
            yield Norm(f"blocks.{layer}.attn", layer, "none", "attention", attn, d, (layer,), is_identity=True)


def _likeness(module: nn.Module) -> tuple[object, ...]:
    """Return what tells norms with different formulas apart: their classes, parameters and settings."""
    inner = getattr(module, "original_component", None)
    owners = [module] if inner is None else [module, inner]
    parameters = [(k, p is None) for owner in owners for k, p in owner._parameters.items()]
    settings = [(k, v) for owner in owners for k, v in vars(owner).items() if isinstance(v, bool | int | float)]
    forwards = (id(vars(owner).get("forward")) for owner in owners)  # (of an instance whose forward is replaced)
    return getattr(module, "kind", None), *map(type, owners), *forwards, *parameters, *settings


class _ShortPass:
    """One pass over two tokens, watching norms, other modules that may stand where a norm would, and all readers."""

    def __init__(self, model: HookedModel, norms: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> None:
        self.norms = norms
        self.inputs: dict[str, Tensor] = {}  # of every module watched
        # Likewise, in the order in which they ran; HookedTransformer calls `ln1` once each for q, k and v.
        self.outputs: dict[str, list[Tensor]] = {}
        self.read: dict[Reader, list[Tensor]] = {}  # of everything inside attention, MLPs and the unembedding
        self.blocks: dict[int, list[Tensor]] = {}  # inputs of each block
        after = [(module, partial(self._record, name)) for name, module in {**norms, **others}.items()]
        before = [(block, partial(self._given, self.blocks, layer)) for layer, block in enumerate(blocks(model))]
        before += [(module, partial(self._given, self.read, reader)) for reader, module in _reading(model, norms)]
        leaves: dict[str, list[Tensor]] = {name: [] for name in norms}
        tokens = probe_tokens(model, TOKENS)[None].to(device_of(model))
        with hooks_on(after, before), ExitStack() as stack:
            for name, module in norms.items():
                point: Any = module.hook_normalized
                point.add_hook(partial(_add_leaf, leaves[name]))
                stack.callback(point.remove_hooks)
            try:
                logits = model(tokens, return_type="logits")
            except AttributeError as error:  # (a bridge's norm without weights, which it computes where hooks edit it)
                raise UnknownNormError(f"TransformerLens cannot run this model with hooks at norms: {error}") from error
        self.lost = _lost_leaves(logits, leaves)
        for name in [n for n in others if n in self.outputs]:
            x, y = self.inputs[name], self.outputs[name][0]
            if x.shape != y.shape or x.shape[-1:] != (int(model.cfg.d_model),) or torch.equal(x, y):
                del self.inputs[name], self.outputs[name]  # it leaves its input as it is (dropout, Identity)
        self.readers: dict[str, list[Reader]] = {name: [] for name in self.outputs}
        for reader, inputs in self.read.items():
            if makers := self._makers(inputs):
                self.readers[makers[-1]].append(reader)

    def _record(self, name: str, _m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = tensors_in(args, kwargs)
        if not given or not isinstance(output, Tensor):
            return
        first = self.inputs.setdefault(name, given[0].detach())
        if name in self.norms and first is not given[0] and not torch.equal(first.nan_to_num(), given[0].nan_to_num()):
            raise NormError(f"{name} runs more than once in a pass, on different vectors: ln_probe cannot measure it")
        self.outputs.setdefault(name, []).append(output.detach())

    def _given(self, into: dict[Any, list[Tensor]], key: Any, _m: nn.Module, args: Any, kwargs: Any) -> None:
        into.setdefault(key, []).extend(t.detach() for t in tensors_in(args, kwargs))

    def _makers(self, inputs: Sequence[Tensor]) -> list[str]:
        """Return the modules whose outputs are among a reader's inputs. The last one that ran counts: a block's input
        often comes along for the residual sum (BLOOM, BERT)."""
        outside = {name: outputs for name, outputs in self.outputs.items() if ".attn." not in name}
        # The same memory first: two parallel norms with equal parameters have equal outputs (a fresh Pythia).
        places = {t.data_ptr() for t in inputs}
        if same := [n for n, outputs in outside.items() if any(t.data_ptr() in places for t in outputs)]:
            return same
        flat = [t.flatten() for t in inputs]
        return [n for n, outputs in outside.items() if any(torch.equal(t, outputs[0].flatten()) for t in flat)]


def _add_leaf(leaves: list[Tensor], value: Tensor, hook: Any) -> Tensor:
    leaves.append(torch.zeros_like(value, requires_grad=True))
    return value + leaves[-1]


def _lost_leaves(logits: Any, leaves: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Return the norms whose leaves, zeros that were added there, have no gradient, and why."""
    reason = "what comes after it does not read its output, or ignores it (weights that are zero)"
    inputs = [leaf for tensors in leaves.values() for leaf in tensors]
    try:
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
        # (Weights as grad_outputs make torch import sympy, which takes longer than all passes of a small model.)
        gradients = torch.autograd.grad((logits * weights).sum(), inputs, allow_unused=True)
    except (RuntimeError, AttributeError) as error:
        gradients, reason = tuple(map(torch.zeros_like, inputs)), f"no gradient goes through the model ({error})"
    reached = {id(x) for x, g in zip(inputs, gradients, strict=True) if g is not None and bool(g.any())}
    lost = {name for name, tensors in leaves.items() if reached.isdisjoint(map(id, tensors))}
    no_calls = "a pass does not run this norm, or not through its hook points"
    return {name: f"{name}: the edit was lost: {reason if leaves[name] else no_calls}" for name in lost}


def _reading(model: HookedModel, norms: Mapping[str, nn.Module]) -> Iterator[tuple[Reader, nn.Module]]:
    """Yield attention, MLPs, the unembedding and what inside them has weights but norms, with the reader of each."""
    roots: list[tuple[Reader, Any]] = [(("attention", layer), attn) for layer, attn in attentions(model).items()]
    roots += [(("mlp", layer), getattr(block, "mlp", None)) for layer, block in enumerate(blocks(model))]
    roots.append((("unembed", n_layers(model)), getattr(model, "unembed", None)))
    done = set(norms.values())
    for reader, root in roots:  # a bridge's MLP may wrap the whole block (OPT): attention comes first and keeps its own
        for module in modules_of(root) if isinstance(root, nn.Module) else ():
            if module not in done and (module is root or module._parameters):
                done.add(module)
                yield reader, module


def _other_modules(
    model: HookedModel, norms: Mapping[str, nn.Module], paths: Mapping[nn.Module, str]
) -> dict[str, nn.Module]:
    """Return modules that may stand where a norm would: outside attention, MLPs and known norms, and around none."""
    roots = [getattr(b, part, None) for b in blocks(model) for part in ("attn", "mlp")]
    roots += [getattr(model, name, None) for name in ("embed", "pos_embed", "unembed")]
    parts = [r for r in (*roots, *norms.values()) if isinstance(r, nn.Module)]
    inside, known = {m for part in parts for m in modules_of(part)}, set(parts)
    outside = (m for m in paths if m not in inside and type(m).__name__ != "HookPoint")
    return {plain_path(paths[m]): m for m in outside if known.isdisjoint(m.modules())}


def _reads(name: str, readers: Sequence[Reader]) -> str:
    """Return one of READERS."""
    leaf = name.rsplit(".", 1)[-1]
    if ".attn." in name:  # QK-norm: inside attention, so its output never enters it from outside
        return "query" if leaf.startswith("q") else "key" if leaf.startswith("k") else "other"
    together = "+".join(what for what in ("attention", "mlp", "unembed") if any(r == what for r, _ in readers))
    return together if together in READERS else "other"
