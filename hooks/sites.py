"""Find every norm of a model: what it computes, who reads it, and whether its weights are raw, folded or centred.

A *site* is a module with the hook points `hook_scale` and `hook_normalized`; its name is theirs without the last part
("blocks.0.ln1" in every model class). `norm.describe` identifies its formula; one short forward pass shows its readers:
the modules whose input equals its output. `facts_of` also lists what attention reads where there is no known norm.

*Folded*: the norm's gain and bias were moved into the weights that read it (TransformerLens `fold_ln`), so it has none,
or a gain of exactly 1. *Centred*: every weight that writes to the residual stream before the norm has mean 0 over
d_model (`center_writing_weights`), so that its projection is a no-op by construction. A class or a config is no
evidence, because a bridge in compatibility mode keeps them: the weights and the stream itself must show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.components import Wiring, find_wiring
from ln_probe.hooks.edits import LinearEdit, edits_on, own_forward, quiet, sounding, suspended
from ln_probe.hooks.model import (
    HookedModel,
    attentions,
    blocks,
    check_model,
    child_of,
    evaluating,
    hooks_on,
    n_layers,
    plain_path,
    probe_tokens,
    run,
    tensors_in,
    weight_of,
    world,
)
from ln_probe.hooks.norm import READERS, Site, SiteError, UnknownNormError, describe
from ln_probe.hooks.sealing import checksum, version_of

STATES = ("raw", "folded", "centred", "folded+centred")

# |mean| / RMS of a vector below which centring it is a no-op. Rounding of weights centred in float32 leaves 1e-8 to
# 1e-7, in float64 models too where they were centred before the cast; a trained stream that was not centred is above
# 1e-3 (MGM, SmolLM2, CAPP-GPT), rows of its weights above 1e-2.
CENTRED = 1e-5
CENTRED_HALF = 5e-3  # 16-bit formats: their own rounding, 2^-9 per entry at most
_ROWS = 1024  # vectors per step: 6 MB in float64 at d 768


def centred_bound(dtype: torch.dtype) -> float:
    """CENTRED, or what the format itself rounds."""
    return CENTRED if dtype in (torch.float32, torch.float64) else CENTRED_HALF


@dataclass(frozen=True)
class Weight:
    """One weight that writes to the residual stream, or reads from a norm.

    Attributes:
        name: as in TransformerLens, "blocks.0.attn.W_O".
        layer: its block; -1 for the embeddings.
        part: "embed", "attention", "mlp" or "unembed".
        off_centre: the largest |mean over d_model| over the RMS of its entries; NaN where the model does not show it.
        bound: what rounding explains (`centred_bound`).
    """

    name: str
    layer: int
    part: str
    off_centre: float
    bound: float

    @property
    def centred(self) -> bool:
        return self.off_centre <= self.bound


def off_centre(weight: Float[Tensor, "*shape"], dim: int = -1) -> float:
    """The largest |mean along `dim`| over the RMS of all entries; 0 for a weight of zeros."""
    rows = weight.detach().movedim(dim, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    largest = square = 0.0
    for part in rows.split(_ROWS):  # (summed in float64 without a copy of the weights in it)
        largest = max(largest, float(part.mean(-1, dtype=torch.float64).abs().max()))
        square += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
    return largest / math.sqrt(square / rows.numel()) if square else 0.0


def _weight(owner: object, path: str, layer: int, part: str, *, dim: int = -1) -> Weight | None:
    value = weight_of(owner, path.rsplit(".", 1)[-1])
    return None if value is None else Weight(path, layer, part, off_centre(value, dim), centred_bound(value.dtype))


# Weights of the parts of a block: the part, its name in the block, those that write, those that read, along which axis.
_PARTS = (
    ("attention", "attn", ("W_O", "b_O"), ("W_Q", "W_K", "W_V"), -2),
    ("mlp", "mlp", ("W_out", "b_out"), ("W_in", "W_gate"), 0),
)


def writing_weights(model: HookedModel) -> list[Weight]:
    """Every weight and bias that writes to the residual stream, in the order of the forward pass.

    A block part whose output weight the model does not show (a mixture of experts) is listed with `off_centre` NaN.
    """
    weights: list[Weight] = []
    for child, name in (("embed", "W_E"), ("pos_embed", "W_pos"), ("token_type_embed", "token_type_embed")):
        module = child_of(model, child)
        for value in module.parameters() if module is not None else ():
            if value.ndim == 2 and value.shape[-1] == int(model.cfg.d_model):
                # A position table can have rows before the first position (OPT: 2): they are centred with the others.
                weights.append(Weight(name, -1, "embed", off_centre(value), centred_bound(value.dtype)))
    for layer, block in enumerate(blocks(model)):
        for part, child, names, _, _ in _PARTS:
            if (owner := getattr(block, child, None)) is None:
                continue
            paths = [f"blocks.{layer}.{child}.{name}" for name in names]
            weight, bias = (_weight(owner, path, layer, part) for path in paths)
            weights += [weight or Weight(paths[0], layer, part, math.nan, 0.0), *([bias] if bias else [])]
    return weights


def reading_weights(model: HookedModel, reads: str, layers: Sequence[int]) -> list[Weight]:
    """The weights that take a norm's output, measured along d_model; `layers`: the blocks that take it."""
    readers = reads.split("+")
    found = [
        _weight(getattr(blocks(model)[layer], child, None), f"blocks.{layer}.{child}.{name}", layer, part, dim=dim)
        for layer in layers
        for part, child, _, names, dim in _PARTS
        if part in readers
        for name in names
    ]
    if "unembed" in readers:
        found.append(_weight(model, "W_U", len(blocks(model)), "unembed", dim=0))
    return [w for w in found if w is not None]


def _folded(model: HookedModel, site: Site, readers: Sequence[Weight]) -> tuple[bool, str]:
    """Whether a norm's gain and bias were folded into the weights that read it, and the evidence.

    No gain is enough, with no bias or 0. A gain of exactly 1 is not, for it may be untrained: the model must be a
    bridge in compatibility mode, or the norm project and all weights that read it be centred, as folding leaves them.
    """
    gain, bias = site.gain, site.bias
    if (gain is not None and not bool((gain == 1).all())) or (bias is not None and not bool((bias == 0).all())):
        return False, ""
    unit = "gain is exactly 1" + (" and bias 0" if bias is not None else "")
    if gain is None:
        reason = "no gain and no bias"
    elif getattr(model, "compatibility_mode", False) is True:
        reason = f"{unit}, in a {world(model)} in compatibility mode"
    elif site.projects and readers and all(w.centred for w in readers):
        reason = f"{unit}, and what reads it is centred as folding leaves it"
    else:
        return False, f"{unit}, but nothing shows that they were folded away: untrained or frozen?"
    if site.projects and (wrong := [w for w in readers if not w.centred]) and len(wrong) < len(readers):
        reason += f"; {wrong[0].name} is not centred as the others that read it are"
    return True, reason


def state_of(
    model: HookedModel,
    site: Site,
    reading_layers: Sequence[int],
    x: Float[Tensor, "*batch d"] | None,
    writing: Sequence[Weight],
) -> tuple[str, str]:
    """Return one of STATES for a norm, and the evidence as text.

    Args:
        reading_layers: the blocks that take its output.
        x: some of its inputs; None if it never ran.
        writing: `writing_weights(model)`.
    """
    plain = site.gain is None or bool((site.gain == 1).all())  # else the weights that read it are not worth looking at
    readers = reading_weights(model, site.reads, reading_layers) if site.projects and plain else []
    folded, reason = _folded(model, site, readers)
    reasons = [reason] if reason else []
    centred = False
    if x is not None:
        stream = x.double()
        share = float(stream.mean(-1).abs().max() / stream.pow(2).mean().sqrt().clamp_min(1e-300))
        centred = share <= centred_bound(x.dtype)
        reasons.append(f"|mean| of its input is at most {share:.1e} of its RMS")
    if site.reads not in ("query", "key") and (x is None or x.shape[-1] == int(model.cfg.d_model)):
        before = [w for w in writing if w.layer < site.layer]
        # Its own block's attention writes before it too, unless that reads the norm or runs parallel to the MLP.
        if "attention" not in site.reads.split("+") and not getattr(model.cfg, "parallel_attn_mlp", False):
            before += [w for w in writing if w.layer == site.layer and w.part == "attention"]
        hidden = [w for w in before if math.isnan(w.off_centre)]
        if wrong := [w for w in before if w.off_centre > w.bound]:
            worst = max(wrong, key=lambda w: w.off_centre)
            reasons.append(f"{worst.name}, which writes to it, is not centred (|mean| {worst.off_centre:.1e} of RMS)")
            centred = False
        elif hidden:
            reasons.append(f"{hidden[0].name} is not shown by this model: identified by the stream alone")
        elif before:
            largest = max(w.off_centre for w in before)
            reasons.append(f"every writing weight before it is centred (|mean| at most {largest:.1e} of RMS)")
    return STATES[folded + 2 * centred], "; ".join(reasons)


PROBE_TOKENS = 3
_LISTED = 6  # layers named one by one in a message


def site_modules(model: HookedModel | nn.Module) -> dict[str, nn.Module]:
    """Modules that normalize, by hook name, in the order of `named_modules`."""
    modules: dict[str, nn.Module] = {}
    for _, module in model.named_modules():
        children = dict(module.named_children())
        name = getattr(children.get("hook_scale"), "name", None)
        if name and "hook_normalized" in children:
            modules.setdefault(str(name).rsplit(".", 1)[0], module)
    return modules


Reader = tuple[str, int]  # "attention", "mlp" or "unembed", and the block


class _ShortPass:
    """One pass over a few tokens, watching norms, other modules that may stand where a norm would, and all readers.

    Attributes:
        inputs: of every module watched, by name.
        outputs: likewise, in the order in which they ran; HookedTransformer calls `ln1` once each for q, k and v.
        read: inputs of everything inside attention, MLPs and the unembedding, by reader.
        blocks: what each block was given.
        readers: who takes each module's output.
    """

    def __init__(self, model: HookedModel, norms: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.read: dict[Reader, list[Tensor]] = {}
        self.blocks: dict[int, list[Tensor]] = {}
        after = [(module, partial(self._ran, name)) for name, module in {**norms, **others}.items()]
        before = [(block, partial(self._given, self.blocks, layer)) for layer, block in enumerate(blocks(model))]
        before += [(module, partial(self._given, self.read, reader)) for reader, module in _reading(model, norms)]
        with hooks_on(after, before):
            run(model, probe_tokens(model, PROBE_TOKENS)[None], return_type="logits")
        d_model = int(model.cfg.d_model)
        for name in [n for n in others if n in self.outputs]:
            x, y = self.inputs[name], self.outputs[name][0]
            if x.shape != y.shape or x.shape[-1:] != (d_model,) or torch.equal(x, y):
                del self.inputs[name], self.outputs[name]  # it leaves its input as it is (dropout, Identity)
        self.order = {name: place for place, name in enumerate(self.outputs)}
        self.readers: dict[str, list[Reader]] = {name: [] for name in self.outputs}
        for reader, inputs in self.read.items():
            if taken := self._taken(inputs):
                self.readers[taken[-1]].append(reader)

    def _ran(self, name: str, _m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = tensors_in(args, kwargs)
        if given and isinstance(output, Tensor):
            self.inputs.setdefault(name, given[0].detach())
            self.outputs.setdefault(name, []).append(output.detach())

    def _given(self, into: dict[Any, list[Tensor]], key: Any, _m: nn.Module, args: Any, kwargs: Any) -> None:
        into.setdefault(key, []).extend(t.detach() for t in tensors_in(args, kwargs))

    def _taken(self, inputs: Sequence[Tensor]) -> list[str]:
        """The modules whose outputs are among a reader's inputs. The last one that ran counts: a block's input often
        comes along for the residual sum (BLOOM, BERT)."""
        outside = {name: made for name, made in self.outputs.items() if ".attn." not in name}
        # The same memory first: two parallel norms with equal parameters have equal outputs (a fresh Pythia).
        places = {t.data_ptr() for t in inputs}
        if same := [n for n, made in outside.items() if any(t.data_ptr() in places for t in made)]:
            return same
        flat = [t.flatten() for t in inputs]
        return [n for n, made in outside.items() if any(torch.equal(t, made[0].flatten()) for t in flat)]

    def layer(self, name: str, model: HookedModel) -> int:
        """The block of a module; one after the embedding is in 0, one at the end has the number of layers."""
        if match := re.match(r"blocks\.(\d+)\.", name):
            return int(match[1])
        last = len(self.order)
        first = min((place for other, place in self.order.items() if other.startswith("blocks.")), default=last)
        return 0 if self.order.get(name, last) < first else n_layers(model)


def _reading(model: HookedModel, norms: Mapping[str, nn.Module]) -> Iterator[tuple[Reader, nn.Module]]:
    """Every module inside attention, MLPs and the unembedding but norms, with the reader it belongs to."""
    roots: list[tuple[Reader, Any]] = [(("attention", layer), attn) for layer, attn in attentions(model).items()]
    roots += [(("mlp", layer), getattr(block, "mlp", None)) for layer, block in enumerate(blocks(model))]
    roots.append((("unembed", n_layers(model)), getattr(model, "unembed", None)))
    taken = {id(module) for module in norms.values()}
    for reader, root in roots:  # a bridge's MLP may wrap the whole block (OPT): attention comes first and keeps its own
        for module in root.modules() if isinstance(root, nn.Module) else ():
            if id(module) not in taken and type(module).__name__ != "HookPoint":
                taken.add(id(module))
                yield reader, module


def _others(model: HookedModel, norms: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules that may stand where a norm would, by name: outside attention, MLPs and known norms, and around none."""
    roots = [getattr(b, part, None) for b in blocks(model) for part in ("attn", "mlp")]
    roots += [getattr(model, name, None) for name in ("embed", "pos_embed", "unembed")]
    parts = [r for r in (*roots, *norms.values()) if isinstance(r, nn.Module)]
    inside, known = {id(m) for r in parts for m in r.modules()}, {id(r) for r in parts}
    return {
        plain_path(path): module
        for path, module in model.named_modules()  # (gives each module once)
        if id(module) not in inside
        and type(module).__name__ != "HookPoint"
        and not any(id(m) in known for m in module.modules())
    }


def _reads(name: str, readers: Sequence[Reader]) -> str:
    """One of READERS."""
    leaf = name.rsplit(".", 1)[-1]
    if ".attn." in name:  # QK-norm: inside attention, so its output never enters it from outside
        return "query" if leaf.startswith("q") else "key" if leaf.startswith("k") else "other"
    joined = "+".join(what for what in ("attention", "mlp", "unembed") if any(r == what for r, _ in readers))
    return joined if joined in READERS else "other"


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """The norms of a model and their readers, gathered once; sites are in the order of the forward pass.

    Attributes:
        model: the model.
        sites: its norms.
        unknown: modules that stand between the stream and what reads it, and are no norm that ln_probe knows (kind
            "unknown"); one without a separate module is measured where attention reads it.
        bare: for every block whose attention reads the stream itself, a site of kind "none".
        tried: what was found out about its norms later and holds as long as these facts: which edits reach the output,
            where projection is a no-op, the constants of the default prompts.
    """

    model: HookedModel
    sites: tuple[Site, ...]
    unknown: tuple[Site, ...] = ()
    bare: tuple[Site, ...] = ()
    tried: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

    @cached_property
    def wiring(self) -> Wiring:
        """Of what every norm's input is a sum; costs one short pass in evaluation mode, the first time."""
        with evaluating(self.model), quiet(self.model), suspended(self.model):
            return find_wiring(self.model, self.sites, [site.layer for site in self.bare])

    def norms(self) -> list[Site]:
        """The norms of the model.

        Raises:
            UnknownNormError: a module with a norm's hook points whose output is none of the known formulas.
        """
        for site in self.unknown:
            if "hook_scale" in dict(site.module.named_children()):
                raise UnknownNormError(site.evidence)
        return list(self.sites)

    @property
    def read(self) -> tuple[Site, ...]:
        """Norms and their replacements: every site that something reads."""
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
    """Return every norm of `model`, in the order of the forward pass.

    Costs a forward pass over three tokens and a call of each norm the first time (`facts_of`). An empty list means that
    the model has none.

    Raises:
        TypeError: not a TransformerLens model.
        SiteError: a norm with NaN parameters, or one that is under an intervention.
        UnknownNormError: a module with a norm's hook points whose output is none of the known formulas.

    Example:
        >>> [site.name for site in ln_probe.hooks.find_sites(model)][:2]
        ['blocks.0.ln1', 'blocks.0.ln2']
    """
    return facts_of(model).norms()


_TOGETHER = 2**16  # entries of a tensor up to which it is summed together with others, which is faster
_KEPT = "_ln_probe_facts"  # the attribute of a model that keeps its facts: they live as long as it does


@dataclass(frozen=True, eq=False)
class _Kept:
    """The facts of a model, and what showed its weights, modules, configuration and torch hooks at that time."""

    layout: tuple[object, ...]
    versions: list[int]
    sums: list[int]
    facts: ModelFacts


def facts_of(model: object, *, checksums: bool = True) -> ModelFacts:
    """The norms of `model`, and what attention reads where there is no norm that ln_probe knows.

    They are kept until the model's weights, modules, configuration or torch hooks change.

    Args:
        checksums: compare every bit of the weights. False: of large ones only the counts that PyTorch keeps of in-place
            edits (edits through `.data` are missed), for callers that do not depend on what large weights hold.

    Raises:
        TypeError, SiteError: as `find_sites`, but for formulas that are not known.
    """
    return facts_of_checked(check_model(model), checksums=checksums)


def facts_of_checked(hooked: HookedModel, *, checksums: bool = True) -> ModelFacts:
    """`facts_of` a model that `check_model` has returned."""
    module, attributes = cast(nn.Module, hooked), vars(hooked)
    with _as_it_is(hooked):
        kept: _Kept | None = attributes.get(_KEPT)
        weights = _weights(module)
        if kept is not None and kept.layout == _layout(module, weights):
            if not checksums and kept.versions == _versions(weights):
                return kept.facts
            if kept.sums == _sums_of_large(weights):
                attributes[_KEPT] = replace(kept, versions=_versions(weights))
                return kept.facts
        facts = _survey(hooked)  # (a bridge puts torch hooks on itself in its first pass)
        weights = _weights(module)
        attributes[_KEPT] = _Kept(_layout(module, weights), _versions(weights), _sums_of_large(weights), facts)
        return facts


def _weights(model: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, in one walk over its modules."""
    every = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return list({id(tensor): tensor for tensor in every}.values())


def _layout(model: nn.Module, weights: list[Tensor]) -> tuple[object, ...]:
    """What shows that a model's modules, configuration, hooks, small weights or places of weights have changed."""
    places = [(t.data_ptr(), t.dtype, t.shape) for t in weights]
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in weights:
        if tensor.numel() <= _TOGETHER:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().reshape(-1))
    sums = [int(checksum(torch.cat(some))) for some in alike.values()]
    modules = [
        (id(m), id(own_forward(m)), *sounding(m._forward_hooks), *sounding(m._forward_pre_hooks))
        for m in model.modules()
    ]
    settings = {k: v for k, v in vars(cast(Any, model).cfg).items() if isinstance(v, bool | int | float | str)}
    return sums, places, modules, settings


def _versions(weights: list[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in weights]


def _sums_of_large(weights: list[Tensor]) -> list[int]:
    return [int(checksum(tensor)) for tensor in weights if tensor.numel() > _TOGETHER]


@contextmanager
def _as_it_is(model: HookedModel) -> Iterator[None]:
    """Without hooks of the user while it lasts, and without `linearized`.

    Raises:
        SiteError: a norm is under an edit that changes what it computes.
    """
    for name, module in site_modules(model).items():
        edits = [e for e in edits_on(module) if not e.suspended]
        # (`linearized` with each token's own sigma leaves the forward pass as it is)
        if active := [e for e in edits if not (isinstance(e, LinearEdit) and e.given is None)]:
            raise SiteError(
                f"{name} is under an intervention ({active[0].label}), so the model cannot be measured as it is: "
                "leave the `with` block first"
            )
    with quiet(model), suspended(model):
        yield


def _survey(model: HookedModel) -> ModelFacts:
    norms = site_modules(model)
    others = _others(model, norms)
    seen = _ShortPass(model, norms, others)
    writing = writing_weights(model) if norms else []
    sites, unknown, bare = list[Site](), list[Site](), list[Site]()

    def site_of(name: str, module: nn.Module, formula: dict[str, Any], why: str = "") -> Site:
        readers = seen.readers.get(name, [])
        reads, by = _reads(name, readers), tuple(sorted(place for what, place in readers if what == "attention"))
        layer = seen.layer(name, model)
        return Site(name, layer, reads=reads, state="raw", evidence=why, module=module, attention_layers=by, **formula)

    for name, module in sorted(norms.items(), key=lambda item: seen.order.get(item[0], len(seen.order))):
        readers = seen.readers.get(name, [])
        try:
            site = site_of(name, module, describe(name, module, model))
        except UnknownNormError as error:
            unknown.append(site_of(name, module, _no_formula(model, "unknown"), str(error)))
            continue
        reading = sorted({place for what, place in readers if what != "unembed"})
        state, evidence = state_of(model, site, reading, seen.inputs.get(name), writing)
        sites.append(replace(site, state=state, evidence=evidence))
    for name in seen.order:
        if name in others and seen.readers[name]:
            why = f"{class_of(others[name])}: it has no hook points of a norm"
            unknown.append(site_of(name, others[name], _no_formula(model, "unknown"), why))
    for layer, attn in attentions(model).items():
        read = seen.read.get(("attention", layer), [])
        if read and not any(("attention", layer) in readers for readers in seen.readers.values()):
            site = _without_norm(model, layer, attn, read, seen.blocks.get(layer, []))
            (bare if site.kind == "none" else unknown).append(site)
    return ModelFacts(model, tuple(sites), tuple(unknown), tuple(bare))


def _no_formula(model: HookedModel, kind: str) -> dict[str, Any]:
    """As `describe`, of what is no norm that ln_probe knows."""
    nothing = {"gain": None, "bias": None, "eps": 0.0, "radius": math.nan, "constant_scale": 1.0}
    return {"d": int(model.cfg.d_model), "kind": kind, **nothing}


def _without_norm(
    model: HookedModel, layer: int, attn: nn.Module, read: Sequence[Tensor], stream: Sequence[Tensor]
) -> Site:
    """What stands in where no module makes what attention reads: the stream, or something made in between."""
    flat = [t.flatten() for t in stream]
    d = int(model.cfg.d_model)
    if any(torch.equal(t.flatten(), s) for t in read for s in flat if t.shape[-1:] == (d,)):
        kind, why = "none", "no norm: attention reads what the block was given"
    else:
        kind = "unknown"
        why = f"what {class_of(attn)} reads: no module's output, and not what the block was given"
    return Site(
        f"blocks.{layer}.attn", layer, reads="attention", state="raw", evidence=why, module=attn,
        attention_layers=(layer,), bare=True, **_no_formula(model, kind),
    )  # fmt: skip
