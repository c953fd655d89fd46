"""Find every norm of a model: what it computes, in which order they run, who reads them, and where an edit arrives.

A norm is a module with the hook points `hook_scale` and `hook_normalized`; its name is theirs without the last part
("blocks.0.ln1" in every model class). `norm.formula_of` identifies its formula. One short pass shows its readers, the
modules whose input equals its output, and by its gradients whether a change of the norm reaches the model's output.

What is found depends on the modules, the configuration and a few of their settings (eps, activations), never on the
weights. It is kept beside the model, as long as these are the same; nothing is kept on the model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

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
_LISTED = 6  # layers named one by one in a message
# Settings of modules that change what they compute and are neither parameters nor modules.
_SETTINGS = {"eps", "variance_epsilon", "act_fn", "act", "activation_fn", "scaling", "attn_scale", "kind", "radius"}
_SETTINGS |= {"forward"}  # (of an instance)

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


def norms_of(model: HookedModel, structure: Structure | None = None) -> list[Norm]:
    """Return `find_norms` of a model that `check_model` has returned; `structure`: as `structure_of` has just given."""
    return [norm for norm in attention_inputs(model, structure) if not norm.is_identity]


def attention_inputs(model: HookedModel, structure: Structure | None = None) -> list[Norm]:
    """Return the norms of a model, and for every block whose attention reads the stream itself an identity."""
    whole, norms = cast(nn.Module, model), list[Norm]()
    for path, fields in (structure_of(model) if structure is None else structure).norms:
        module, owner = whole.get_submodule(path), fields.get("eps_owner")
        place = None if owner is None else (eps_owners(module, model)[owner[0]], owner[1])
        norms.append(Norm(module=module, **(fields | {"eps_owner": place})))
    for norm in norms:
        check_finite(norm.name, norm.gain, norm.bias)
    return norms


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
    if len(layers) > _LISTED:
        return f"layers {layers[0]} … {layers[-1]} ({len(layers)} of them)"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


# ---------------------------------------------------------------------------------------- cached by structure


@dataclass(eq=False)
class Structure:
    """What is known of a model as long as its modules, configuration and settings are the same.

    Attributes:
        references: weak references to its modules, in order.
        settings: of its configuration and its modules.
        norms: fields of its norms, and of identities; a module stands there by its path in the model.
        lost: norms of which a change does not reach the output, and why.
        constants: mean sigmas of the default prompts, with what they depend on.
    """

    references: list[ref[nn.Module]]
    settings: tuple[object, ...]
    norms: list[tuple[str, dict[str, Any]]]
    lost: dict[str, str]
    constants: Any = None

    @property
    def modules(self) -> list[nn.Module | None]:
        """The model's modules, in the order of `modules_of`."""
        return [reference() for reference in self.references]


_STRUCTURES: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()


def structure_of(model: HookedModel) -> Structure:
    """Return the structure of a model; found by a short pass where it is not known or has changed."""
    module, modules = cast(nn.Module, model), modules_of(model)
    known = _STRUCTURES.get(module)
    is_current = known is not None and known.modules == modules and known.settings == _settings(model, modules)
    if known is not None and is_current and not known.lost:  # (what is lost may be so for weights that are zero now)
        return known
    norms, lost = _survey(model)
    modules = modules_of(model)  # (a bridge puts modules on itself in its first pass)
    _STRUCTURES[module] = Structure([ref(m) for m in modules], _settings(model, modules), norms, lost)
    return _STRUCTURES[module]


def _settings(model: HookedModel, modules: Sequence[nn.Module]) -> tuple[object, ...]:
    plain = bool | int | float | str
    values: list[object] = [(k, v) for k, v in vars(model.cfg).items() if isinstance(v, plain)]
    for module in modules:
        own = module.__dict__
        values += [own[name] if isinstance(own[name], plain) else id(own[name]) for name in _SETTINGS & own.keys()]
    return tuple(values)


# ---------------------------------------------------------------------------------------- the short pass


def _lost_leaves(logits: object, leaves: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Return the norms whose leaves have no gradient, and why.

    Args:
        logits: of the pass.
        leaves: tensors of zeros that were added at each norm.
    """
    each = [(name, leaf) for name, tensors in leaves.items() for leaf in tensors]
    reached: set[str] = set()
    try:
        if not isinstance(logits, Tensor):
            raise RuntimeError(f"it returns {type(logits).__name__}")
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
        # (Weights as grad_outputs make torch import sympy, which takes longer than all passes of a small model.)
        gradients = torch.autograd.grad((logits * weights).sum(), [leaf for _, leaf in each], allow_unused=True)
        reached = {n for (n, _), g in zip(each, gradients, strict=True) if g is not None and bool(g.any())}
        reason = "what comes after it does not read its output, or ignores it (weights that are zero)"
    except RuntimeError as error:
        reason = f"no gradient goes through the model ({error})"
    no_calls = "a pass does not run this norm, or not through its hook points"
    return {
        name: f"{name}: the edit was lost: {reason if leaves[name] else no_calls}"
        for name in leaves
        if name not in reached
    }


def _survey(model: HookedModel) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, str]]:
    """Return path and fields of every norm, and of an identity for every block whose attention reads the stream; and
    the norms of which a change does not reach the output, with the reason.

    Raises:
        NormError, UnknownNormError: as `find_norms`.
    """
    paths = {module: path for path, module in model.named_modules()}
    modules: dict[str, nn.Module] = {}
    for module in paths:
        name = getattr(module._modules.get("hook_scale"), "name", None)
        if name and "hook_normalized" in module._modules:
            modules.setdefault(str(name).rsplit(".", 1)[0], module)
    fields: list[tuple[str, dict[str, Any]]] = []
    formulas: dict[object, dict[str, Any]] = {}  # of norms that are alike
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        evaluating(model),
        unedited(model),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # a bridge warns that it computes the norm itself where hooks edit it
        tokens = probe_tokens(model, TOKENS)[None].to(device_of(model))
        seen = _ShortPass(model, modules, _other_modules(model, modules, paths), tokens)
        for name, module in sorted(modules.items(), key=lambda item: seen.order.get(item[0], len(seen.order))):
            d = int(seen.inputs[name].shape[-1]) if name in seen.inputs else int(model.cfg.d_model)
            readers = seen.readers.get(name, [])
            attention = tuple(sorted(layer for what, layer in readers if what == "attention"))
            place = {"name": name, "layer": seen.layer(name, model), "attention_layers": attention}
            alike = d, _likeness(module)
            if alike not in formulas:
                formulas[alike] = formula_of(name, module, model, d)
            fields.append((paths[module], {**place, "reads": _reads(name, readers), **formulas[alike]}))
        for attn in attentions(
            model
        ).values():  # a pass with gradients leaves tensors on a bridge: it would have no copy
            graph = {k: v for k, v in vars(attn).items() if isinstance(v, Tensor) and v.grad_fn is not None}
            vars(attn).update({name: value.detach() for name, value in graph.items()})
    for name in (n for n in seen.order if n not in modules and any(r != "unembed" for r, _ in seen.readers[n])):
        raise UnknownNormError(
            f"{name} stands where a norm would and has no hook points of a norm: ln_probe cannot measure this model"
        )
    for layer, attn in attentions(model).items():
        reading = seen.read.get(("attention", layer), [])
        if reading and not any(("attention", layer) in readers for readers in seen.readers.values()):
            d = int(model.cfg.d_model)
            stream = [t.flatten() for t in seen.blocks.get(layer, [])]
            if not any(torch.equal(t.flatten(), s) for t in reading for s in stream if t.shape[-1:] == (d,)):
                raise UnknownNormError(
                    f"blocks.{layer}.attn reads neither a norm nor the residual stream: this model is not supported"
                )
            place = {"name": f"blocks.{layer}.attn", "layer": layer, "attention_layers": (layer,)}
            rest = {"kind": "none", "reads": "attention", "d": d, "is_identity": True}
            fields.append((paths[attn], {**place, **rest}))
    return fields, seen.lost


def _likeness(module: nn.Module) -> tuple[object, ...]:
    """Return what tells norms with different formulas apart: their classes, parameters and settings."""
    inner = getattr(module, "original_component", None)
    owners = [module] if inner is None else [module, inner]
    parameters = [(k, p is None) for owner in owners for k, p in owner._parameters.items()]
    settings = [(k, v) for owner in owners for k, v in vars(owner).items() if isinstance(v, bool | int | float)]
    forwards = (id(vars(owner).get("forward")) for owner in owners)  # (of an instance whose forward is replaced)
    return getattr(module, "kind", None), *map(type, owners), *forwards, *parameters, *settings


class _ShortPass:
    """One pass over a few tokens, watching norms, other modules that may stand where a norm would, and all readers.

    Attributes:
        inputs: of every module watched, by name.
        outputs: likewise, in the order in which they ran; HookedTransformer calls `ln1` once each for q, k and v.
        read: inputs of everything inside attention, MLPs and the unembedding, by reader.
        blocks: the inputs of each block.
        order: the place of each module in the pass.
        readers: who reads each module's output.
        lost: norms of which a change does not reach the output, and why.
    """

    def __init__(
        self, model: HookedModel, norms: Mapping[str, nn.Module], others: Mapping[str, nn.Module], tokens: Tensor
    ) -> None:
        self.norms = norms
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.read: dict[Reader, list[Tensor]] = {}
        self.blocks: dict[int, list[Tensor]] = {}
        after = [(module, partial(self._record, name)) for name, module in {**norms, **others}.items()]
        before = [(block, partial(self._given, self.blocks, layer)) for layer, block in enumerate(blocks(model))]
        before += [(module, partial(self._given, self.read, reader)) for reader, module in _reading(model, norms)]
        leaves: dict[str, list[Tensor]] = {name: [] for name in norms}
        with hooks_on(after, before), ExitStack() as stack:
            for name, module in norms.items():
                point: Any = module.hook_normalized
                point.add_hook(partial(_add_leaf, leaves[name]))
                stack.callback(point.remove_hooks)
            try:
                logits = model(tokens, return_type="logits")
            except (
                AttributeError
            ) as error:  # (a bridge of a norm without weights, which computes it where hooks edit it)
                raise UnknownNormError(
                    f"TransformerLens cannot run this model with hooks at its norms: {error}"
                ) from error
        self.lost = _lost_leaves(logits, leaves)
        d_model = int(model.cfg.d_model)
        for name in [n for n in others if n in self.outputs]:
            x, y = self.inputs[name], self.outputs[name][0]
            if x.shape != y.shape or x.shape[-1:] != (d_model,) or torch.equal(x, y):
                del self.inputs[name], self.outputs[name]  # it leaves its input as it is (dropout, Identity)
        self.order = {name: place for place, name in enumerate(self.outputs)}
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

    def layer(self, name: str, model: HookedModel) -> int:
        """Return the block of a module; one after the embedding is in 0, one at the end has the number of layers."""
        if match := re.match(r"blocks\.(\d+)\.", name):
            return int(match[1])
        last = len(self.order)
        first = min((place for other, place in self.order.items() if other.startswith("blocks.")), default=last)
        return 0 if self.order.get(name, last) < first else n_layers(model)


def _add_leaf(leaves: list[Tensor], value: Tensor, hook: Any) -> Tensor:
    leaves.append(torch.zeros_like(value, requires_grad=True))
    return value + leaves[-1]


def _reading(model: HookedModel, norms: Mapping[str, nn.Module]) -> Iterator[tuple[Reader, nn.Module]]:
    """Yield attention, MLPs, the unembedding and what inside them has weights but norms, with the reader of each."""
    roots: list[tuple[Reader, Any]] = [(("attention", layer), attn) for layer, attn in attentions(model).items()]
    roots += [(("mlp", layer), getattr(block, "mlp", None)) for layer, block in enumerate(blocks(model))]
    roots.append((("unembed", n_layers(model)), getattr(model, "unembed", None)))
    done = {id(module) for module in norms.values()}
    for reader, root in roots:  # a bridge's MLP may wrap the whole block (OPT): attention comes first and keeps its own
        for module in modules_of(root) if isinstance(root, nn.Module) else ():
            if id(module) not in done and (module is root or module._parameters):
                done.add(id(module))
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
    return {plain_path(paths[m]): m for m in outside if known.isdisjoint(modules_of(m))}


def _reads(name: str, readers: Sequence[Reader]) -> str:
    """Return one of READERS."""
    leaf = name.rsplit(".", 1)[-1]
    if ".attn." in name:  # QK-norm: inside attention, so its output never enters it from outside
        return "query" if leaf.startswith("q") else "key" if leaf.startswith("k") else "other"
    together = "+".join(what for what in ("attention", "mlp", "unembed") if any(r == what for r, _ in readers))
    return together if together in READERS else "other"
