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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.edits import edits_on
from ln_probe.hooks.model import HookedModel, blocks, check_model, exclusive, n_layers, run, vocabulary_size, world
from ln_probe.hooks.norm import KINDS, READERS, SAME_OUTPUT, Site, SiteError, Terms, UnknownNormError, describe

STATES = ("raw", "folded", "centred", "folded+centred")

# |mean| / RMS of a vector below which centring it is a no-op. Rounding of weights centred in float32 leaves 1e-8 to
# 1e-7, in float64 models too where they were centred before the cast; a trained stream that was not centred is above
# 1e-3 (MGM, SmolLM2, CAPP-GPT), rows of its weights above 1e-2.
CENTRED = 1e-5
CENTRED_HALF = 5e-3  # 16-bit formats: their own rounding, 2^-9 per entry at most
_ROWS = 1024  # vectors looked at at once: 6 MB in float64 at d 768

# What the bridge raises where an architecture has no such weight.
_ABSENT = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


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


def _read(owner: object, name: str) -> Tensor | None:
    try:
        value = getattr(owner, name, None)
    except _ABSENT:
        return None
    return value if isinstance(value, Tensor) else None


def _weight(owner: object, path: str, layer: int, part: str, *, dim: int = -1) -> Weight | None:
    value = _read(owner, path.rsplit(".", 1)[-1])
    if value is None:
        return None
    return Weight(path, layer, part, off_centre(value, dim), centred_bound(value.dtype))


def _embeddings(model: HookedModel) -> Iterable[Weight]:
    d_model = int(model.cfg.d_model)
    for child, name in (("embed", "W_E"), ("pos_embed", "W_pos"), ("token_type_embed", "token_type_embed")):
        module = getattr(model, child, None)
        for value in module.parameters() if isinstance(module, nn.Module) else ():
            if value.ndim == 2 and value.shape[-1] == d_model:
                # a position table can have rows before the first position (OPT: 2): they are centred with the others
                yield Weight(name, -1, "embed", off_centre(value), centred_bound(value.dtype))


def writing_weights(model: HookedModel) -> list[Weight]:
    """Every weight and bias that writes to the residual stream, in the order of the forward pass.

    A block part whose output weight the model does not show (a mixture of experts) is listed with `off_centre` NaN.
    """
    found = list(_embeddings(model))
    for layer, block in enumerate(blocks(model)):
        for part, child, names in (("attention", "attn", ("W_O", "b_O")), ("mlp", "mlp", ("W_out", "b_out"))):
            owner = getattr(block, child, None)
            if owner is None:
                continue
            shown = [_weight(owner, f"blocks.{layer}.{child}.{n}", layer, part) for n in names]
            if shown[0] is None:
                shown[0] = Weight(f"blocks.{layer}.{child}.{names[0]}", layer, part, math.nan, 0.0)
            found += [w for w in shown if w is not None]
    return found


def reading_weights(model: HookedModel, reads: str, layers: Sequence[int]) -> list[Weight]:
    """The weights that take a norm's output, measured along d_model.

    Args:
        model: any hooked model.
        reads: who takes the output (`Site.reads`).
        layers: the blocks that take it.
    """
    found: list[Weight | None] = []
    parts = reads.split("+")
    for layer in layers:
        block = blocks(model)[layer]
        if "attention" in parts:
            attn = getattr(block, "attn", None)
            found += [_weight(attn, f"blocks.{layer}.attn.{n}", layer, "attention", dim=-2) for n in _READ_BY_ATTENTION]
        if "mlp" in parts:
            mlp = getattr(block, "mlp", None)
            found += [_weight(mlp, f"blocks.{layer}.mlp.{n}", layer, "mlp", dim=0) for n in ("W_in", "W_gate")]
    if "unembed" in parts:
        found.append(_weight(model, "W_U", len(blocks(model)), "unembed", dim=0))
    return [w for w in found if w is not None]


_READ_BY_ATTENTION = ("W_Q", "W_K", "W_V")


def _before(layer: int, reads: str, writing: Sequence[Weight], parallel: bool) -> list[Weight]:
    """Those that write before a norm of block `layer`: its own attention too, unless that reads the norm or runs beside
    the MLP."""
    found = [w for w in writing if w.layer < layer]
    if not parallel and "attention" not in reads.split("+"):
        found += [w for w in writing if w.layer == layer and w.part == "attention"]
    return found


def _folded(
    model: HookedModel, projects: bool, gain: Tensor | None, bias: Tensor | None, readers: Sequence[Weight]
) -> tuple[bool, str]:
    if (gain is not None and not bool((gain == 1).all())) or (bias is not None and not bool((bias == 0).all())):
        return False, ""
    unit = "gain is exactly 1" + (" and bias 0" if bias is not None else "")
    if gain is None:
        found, reason = True, "no gain or bias of its own"
    elif getattr(model, "compatibility_mode", False) is True:
        found, reason = True, f"{unit}, in a {world(model)} in compatibility mode"
    elif projects and readers and all(w.centred for w in readers):
        found, reason = True, f"{unit}, and what reads it is centred as folding leaves it"
    else:
        return False, f"{unit}, but nothing shows that they were folded away: untrained or frozen?"
    if projects and (wrong := [w for w in readers if not w.centred]) and len(wrong) < len(readers):
        reason += f"; {wrong[0].name} is not centred as the others that read it are"
    return found, reason


def state_of(
    model: HookedModel,
    *,
    layer: int,
    reads: str,
    reading_layers: Sequence[int],
    projects: bool,
    gain: Float[Tensor, " d"] | None,
    bias: Float[Tensor, " d"] | None,
    x: Float[Tensor, "*batch d"] | None,
    writing: Sequence[Weight],
) -> tuple[str, str]:
    """One of STATES for a norm, and the evidence in words.

    Args:
        model: any hooked model.
        layer: the norm's block.
        reads: who takes its output.
        reading_layers: the blocks that do.
        projects: whether it centres.
        gain, bias: its affine part as it acts, or None.
        x: some of its inputs; None if it never ran.
        writing: `writing_weights(model)`.
    """
    plain = gain is None or bool((gain == 1).all())  # else the weights that read it are not worth looking at
    readers = reading_weights(model, reads, reading_layers) if projects and plain else []
    folded, reason = _folded(model, projects, gain, bias, readers)
    reasons = [reason] if reason else []
    centred = False
    inside = reads in ("query", "key") or (x is not None and x.shape[-1] != int(model.cfg.d_model))
    if x is not None:
        stream = x.double()
        share = float(stream.mean(-1).abs().max() / stream.pow(2).mean().sqrt().clamp_min(1e-300))
        centred = share <= centred_bound(x.dtype)
        reasons.append(f"|mean| of its input is at most {share:.1e} of its RMS")
    if not inside:
        before = _before(layer, reads, writing, bool(getattr(model.cfg, "parallel_attn_mlp", False)))
        hidden = [w for w in before if math.isnan(w.off_centre)]
        wrong = [w for w in before if w.off_centre > w.bound]
        if wrong:
            worst = max(wrong, key=lambda w: w.off_centre)
            reasons.append(f"{worst.name}, which writes to it, is not centred (|mean| {worst.off_centre:.1e} of RMS)")
            centred = False
        elif hidden:
            reasons.append(f"{hidden[0].name} is not shown by this model: told from the stream alone")
        elif before:
            largest = max(w.off_centre for w in before)
            reasons.append(f"every writing weight before it is centred (|mean| at most {largest:.1e} of RMS)")
    return STATES[folded + 2 * centred], "; ".join(reasons)


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
