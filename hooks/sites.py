"""Where a model normalizes: every norm, what it computes, who reads it, in what state it is.

A *site* is a module with the hook points `hook_scale` and `hook_normalized`; its name is theirs without the last part
("blocks.0.ln1" in every TransformerLens world). What it computes is told by its answers (`norm_formula`), who reads it
by one short forward pass: whose input equals the site's output.

Not everything that stands there is a norm. `survey` also gives what stands in for one: a module whose formula is none
that ln_probe knows (DyT), or nothing at all, where attention reads the stream itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ln_probe.hooks.edits import edits_on
from ln_probe.hooks.exclusive import exclusive
from ln_probe.hooks.model import HookedModel, blocks, check_model, n_layers, run, vocabulary_size
from ln_probe.hooks.norm_formula import SAME_OUTPUT, SiteError, UnknownNormError, describe
from ln_probe.hooks.site import KINDS, READERS, Site, Terms
from ln_probe.hooks.state import state_of, writing_weights

__all__ = [
    "KINDS",
    "READERS",
    "SAME_OUTPUT",
    "Site",
    "SiteError",
    "Survey",
    "Terms",
    "UnknownNormError",
    "find_sites",
    "site_modules",
    "survey",
]

PROBE_TOKENS = 3
_LISTED = 6  # layers named one by one in a sentence


def site_modules(model: HookedModel | nn.Module) -> dict[str, nn.Module]:
    """Modules that normalize, by hook name, in the order of `named_modules`."""
    found: dict[str, nn.Module] = {}
    for _, module in model.named_modules():
        children = dict(module.named_children())
        if "hook_scale" in children and "hook_normalized" in children:
            name = getattr(children["hook_scale"], "name", None)
            if name:
                found.setdefault(str(name).rsplit(".", 1)[0], module)
    return found


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


@dataclass
class _Seen:
    """What one pass over a few tokens shows.

    Attributes:
        inputs: of every module watched, by name.
        outputs: likewise, in the order in which they ran; HookedTransformer calls `ln1` once each for q, k and v.
        readers: inputs of everything inside attention, MLPs and the unembedding.
        blocks: what each block was given.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    readers: dict[Reader, list[Tensor]] = field(default_factory=dict)
    blocks: dict[int, list[Tensor]] = field(default_factory=dict)


def _short_run(model: HookedModel, modules: dict[str, nn.Module], others: dict[str, nn.Module]) -> _Seen:
    """One pass over a few tokens, watching norms, the `others` that may stand where a norm would, and all readers."""
    seen = _Seen()
    with ExitStack() as stack:
        for name, module in (modules | others).items():

            def keep(_m: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                given = _first_tensor(args, kwargs)
                if given and isinstance(output, Tensor):
                    seen.inputs.setdefault(name, given[0].detach())
                    seen.outputs.setdefault(name, []).append(output.detach())

            stack.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
        for layer, block in enumerate(blocks(model)):

            def begin(_m: nn.Module, args: Any, kwargs: Any, layer: int = layer) -> None:
                seen.blocks[layer] = [t.detach() for t in _first_tensor(args, kwargs)]

            stack.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
        with _readers_watched(model, {id(m) for m in modules.values()}) as seen.readers:
            tokens = torch.linspace(1, vocabulary_size(model) - 1, PROBE_TOKENS).long()[None]
            run(model, tokens, return_type="logits")
    for name in others:  # one that leaves its input as it is (dropout, Identity) stands for nothing
        if name in seen.outputs and not _changes(seen.inputs[name], seen.outputs[name][0], int(model.cfg.d_model)):
            del seen.inputs[name], seen.outputs[name]
    return seen


def _changes(x: Tensor, y: Tensor, d_model: int) -> bool:
    """Whether a module makes another stream of a stream."""
    return x.shape == y.shape and x.shape[-1:] == (d_model,) and not torch.equal(x, y)


def _others(model: HookedModel, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules that may stand where a norm would, by name: outside attention, MLPs and known norms, and around none."""
    roots = [getattr(b, part, None) for b in blocks(model) for part in ("attn", "mlp")]
    roots += [getattr(model, name, None) for name in ("embed", "pos_embed", "unembed")]
    inside = {id(m) for r in (*roots, *modules.values()) if isinstance(r, nn.Module) for m in r.modules()}
    known = {id(r) for r in (*roots, *modules.values()) if isinstance(r, nn.Module)}
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():  # (gives each module once)
        if (
            id(module) in inside
            or type(module).__name__ == "HookPoint"
            or any(id(m) in known for m in module.modules())
        ):
            continue
        found[path.replace("_original_component.", "")] = module
    return found


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


@dataclass(frozen=True, eq=False)
class Survey:
    """What a model has where norms are, in the order of the forward pass.

    Attributes:
        sites: its norms.
        unknown: modules that stand between the stream and what reads it, and are no norm that ln_probe knows (kind
            "unknown"); one that nothing names is looked at where attention reads it.
        bare: for every block whose attention reads the stream itself, a site of kind "none".
    """

    sites: tuple[Site, ...]
    unknown: tuple[Site, ...] = ()
    bare: tuple[Site, ...] = ()

    @property
    def read(self) -> tuple[Site, ...]:
        """Everything that something reads: norms, and what stands in for norms."""
        return (*self.sites, *self.unknown, *self.bare)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of results has to know, in sentences."""
        said = []
        if self.unknown:
            named = ", ".join(f"{s.name} ({class_of(s.module)}, read by {s.reads})" for s in self.unknown)
            count = len(self.unknown)
            said.append(
                f"{count} {'module stands' if count == 1 else 'modules stand'} where a norm would and "
                f"{'is none' if count == 1 else 'are none'} that ln_probe knows: {named}. Keys and queries behind it "
                "are measured as they are; nothing is taken apart or taken away there, and groups of norms "
                "(attention, mlp, final, all) leave it out"
            )
        if self.bare and self.sites:
            said.append(
                "attention reads the stream itself, with no norm before it, in "
                f"{layers_in_words([s.layer for s in self.bare])}: keys and queries are measured as they are"
            )
        return tuple(said)


def class_of(module: nn.Module) -> str:
    """The class of a module, or of what it wraps."""
    return type(getattr(module, "original_component", None) or module).__name__


def layers_in_words(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0, 1`, `layers 0 … 11 (12 of them)`."""
    if len(layers) > _LISTED:
        return f"layers {layers[0]} … {layers[-1]} ({len(layers)} of them)"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def find_sites(model: object) -> list[Site]:
    """Every norm of `model`, in the order of the forward pass.

    Costs one forward pass over three tokens and one call of each norm. An empty list means that the model has none.

    Raises:
        TypeError: not a TransformerLens model.
        SiteError: a norm with NaN parameters, or one that is under an intervention.
        UnknownNormError: a module with a norm's hook points whose output is none of the known formulas.
    """
    return known(survey(model))


def known(found: Survey) -> list[Site]:
    """The norms of a survey.

    Raises:
        UnknownNormError: a module with a norm's hook points whose output is none of the known formulas.
    """
    for site in found.unknown:
        if "hook_scale" in dict(site.module.named_children()):
            raise UnknownNormError(site.evidence)
    return list(found.sites)


def survey(model: object) -> Survey:
    """Every norm of `model`, and what stands in for norms where there is none that ln_probe knows.

    Costs the same as `find_sites`.

    Raises:
        TypeError, SiteError: as `find_sites`, but for formulas that are not known.
    """
    with exclusive(check_model(model)):
        return _survey(check_model(model))


def _survey(hooked: HookedModel) -> Survey:
    modules = site_modules(hooked)
    for name, module in modules.items():
        if active := [e for e in edits_on(module) if not e.suspended]:
            raise SiteError(
                f"{name} is under an intervention ({active[0].label}), so the model cannot be looked at as it is: "
                "leave the `with` block first"
            )
    others = _others(hooked, modules)
    seen = _short_run(hooked, modules, others)
    order = {name: place for place, name in enumerate(seen.outputs)}
    readers = _readers(seen.outputs, seen.readers)
    writing = writing_weights(hooked) if modules else []
    sites, unknown = [], []
    for name, module in sorted(modules.items(), key=lambda item: order.get(item[0], len(order))):
        layer, taken = _layer(name, hooked, order), readers.get(name, [])
        try:
            facts = describe(name, module, hooked)
        except UnknownNormError as error:
            unknown.append(_unknown(name, module, layer, _reads(name, taken), taken, hooked, str(error)))
            continue
        layers_reading = sorted({place for what, place in taken if what != "unembed"})
        reads = _reads(name, taken)
        state, evidence = state_of(
            hooked,
            layer=layer,
            reads=reads,
            reading_layers=layers_reading,
            projects=facts["kind"] in ("layernorm", "projection_only"),
            gain=facts["gain"],
            bias=facts["bias"],
            x=seen.inputs.get(name),
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
                attention_layers=_attention(taken),
                **facts,
            )
        )
    for name in order:
        if name in others and readers[name]:
            what = f"{class_of(others[name])}: it has no hook points of a norm"
            layer, taken = _layer(name, hooked, order), readers[name]
            unknown.append(_unknown(name, others[name], layer, _reads(name, taken), taken, hooked, what))
    bare: list[Site] = []
    for layer, block in enumerate(blocks(hooked)):
        given = seen.readers.get(("attention", layer), [])
        if given and not any(("attention", layer) in taken for taken in readers.values()):
            site = _without_norm(layer, block, given, seen.blocks.get(layer, []), hooked)
            (bare if site.kind == "none" else unknown).append(site)
    return Survey(tuple(sites), tuple(unknown), tuple(bare))


def _attention(readers: Sequence[Reader]) -> tuple[int, ...]:
    return tuple(sorted(place for what, place in readers if what == "attention"))


def _unknown(
    name: str, module: nn.Module, layer: int, reads: str, readers: Sequence[Reader], model: HookedModel, why: str
) -> Site:
    """What stands in for a module that is no known norm; `why` begins with its class."""
    d = int(model.cfg.d_model)
    return Site(
        name, layer, "unknown", reads, "raw", why, module, d, None, None, 0.0, math.nan, 1.0, _attention(readers)
    )


def _without_norm(
    layer: int, block: nn.Module, read: Sequence[Tensor], stream: Sequence[Tensor], model: HookedModel
) -> Site:
    """What stands in where no module makes what attention reads: the stream, or something made in between."""
    attn = getattr(block, "attn", None)
    assert isinstance(attn, nn.Module)
    name, d = f"blocks.{layer}.attn", int(model.cfg.d_model)
    flat = [t.flatten() for t in stream]
    plain = any(torch.equal(t.flatten(), s) for t in read for s in flat if t.shape[-1:] == (d,))
    kind = "none" if plain else "unknown"
    why = (
        "no norm: attention reads what the block was given"
        if plain
        else f"what {class_of(attn)} reads: no module's output, and not what the block was given"
    )
    return Site(
        name, layer, kind, "attention", "raw", why, attn, d, None, None, 0.0, math.nan, 1.0, (layer,), bare=True
    )
