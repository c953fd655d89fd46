"""The residual stream as a sum: embeddings, positions, heads, MLPs and biases.

A *source* is what one module writes, or the output of a norm in the stream (post-norm blocks). A *part* is the finest
piece of a source: a head (z_h W_O_h, with `z` the heads' outputs before the output map), an MLP, a bias.

`find_wiring` finds the sources of every norm's input from one short pass, without the config: `embed + pos_embed +
blocks.0.attn` (pre-norm), `blocks.0.ln1 + blocks.0.mlp` (post-norm). A sum that does not close is rejected.

`Split` divides any linear reading f · x of the stream among its parts. f is pulled back through what they passed (a
norm at its own sigma, W_O), which costs d_head numbers per head, not d_model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.hooks.model import (
    HookedModel,
    attentions,
    child_of,
    dtype_of,
    evaluating,
    facts_of,
    flat,
    hooks_on,
    probe_tokens,
    run,
    tensors_in,
    unedited,
    weight_of,
    with_float64,
)
from ln_probe.hooks.norm import Norm, bias_of, gain_of
from ln_probe.hooks.norms import structure_of
from ln_probe.hooks.stream import TABLES, AttentionInput, rotary_tables

EMBEDDINGS = ("embed", "pos_embed", "token_type_embed")
_BIASES = {"attn": "b_O", "mlp": "b_out"}
END = "the end of the stream"
TOKENS = 8  # of the short pass
# Left over of a sum, relative to its largest summand: at most 3e-7 in float32 on tiny models of nine architectures; a
# missing summand left 1e-2 to 3e-1. 16-bit formats round at every write; the errors of deep models partly cancel.
CLOSES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_STARTS = 8  # earlier states that a stream can be continued from


class SplitError(ValueError):
    """What a norm reads is not the sum of the parts that are known (names the place and how much is missing)."""


@dataclass(frozen=True)
class Source:
    """What is written at one place.

    Attributes:
        kind: one of EMBEDDINGS, "attn", "mlp", or "norm" (what a norm in the stream puts in its place).
        layer: its block; -1 for embeddings.
        norm: the norm, for "norm".
    """

    kind: str
    layer: int = -1
    norm: Norm | None = None


@dataclass(frozen=True)
class Part:
    """A piece of the residual stream that has one writer.

    Attributes:
        name: "embed", "L3H5", "L3 mlp", "L3 b_O", "blocks.3.ln1_post bias", …
        kind: "embedding", "position", "head", "mlp", "bias", "norm bias" or "unembedding bias".
        layer: its block; -1 for embeddings.
        index: of a head; -1 for others.
    """

    name: str
    kind: str
    layer: int = -1
    index: int = -1


def watched(model: HookedModel) -> Iterator[tuple[Source, nn.Module]]:
    """Yield every source but norms, with the module whose output shows it (an attention layer's is `z`)."""
    for name in EMBEDDINGS:
        # `embed.hook_out` stands before a norm of the embeddings (BLOOM), `hook_embed` behind it. Where embeddings are
        # scaled (Granite), 4.3 calls both for hooks of TransformerLens only.
        own = (child_of(model, "project_in") if name == "embed" else None) or child_of(model, name)
        scaled = getattr(own, "_output_contribution_scale", 1.0) != 1.0
        module = own if scaled else child_of(own, "hook_out") or child_of(model, f"hook_{name}")
        # The laboratory's sinusoidal positions are a table without a module.
        table = name == "pos_embed" and isinstance(getattr(model, "positions", None), Tensor)
        if module is not None and (name == "embed" or own is not None or table):
            yield Source(name), module
    for layer, block in enumerate(model.blocks):
        if (z := child_of(block, "attn", "hook_z")) is not None:
            yield Source("attn", layer), z
        mlp = child_of(block, "mlp")
        # A bridge's MLP can hold the whole block (OPT) or add the stream itself (BLOOM): its output map does not.
        if (out := child_of(mlp, "out", "hook_out") or mlp) is not None:
            yield Source("mlp", layer), out


def _output_maps(model: HookedModel, layer: int, z: Tensor) -> Float[Tensor, "head d_head d_model"] | None:
    """Return W_O of a layer in the format of its z; None where it shows none, so that heads cannot be separated."""
    W_O = weight_of(child_of(model.blocks[layer], "attn"), "W_O")
    return None if W_O is None or W_O.ndim != 3 or z.shape[-1] != W_O[:, :, 0].numel() else with_float64(W_O).to(z)


def _output_bias(model: HookedModel, source: Source, like: Tensor) -> Float[Tensor, " d_model"] | None:
    """Return b_O of an attention layer, b_out of an MLP; None where there is none (or zeros)."""
    name = _BIASES.get(source.kind)
    bias = None if name is None else weight_of(child_of(model.blocks[source.layer], source.kind), name)
    if bias is None or bias.numel() != int(model.cfg.d_model) or not bool(bias.any()):
        return None
    return with_float64(bias).to(like).reshape(-1)


def _written(model: HookedModel, source: Source, shown: Tensor) -> Float[Tensor, "row d_model"] | None:
    """Return what a source wrote, from what its module showed; None where that cannot be known."""
    if source.kind != "attn":
        return shown
    if (W_O := _output_maps(model, source.layer, shown)) is None:
        return None
    out = torch.einsum("rhk,hkd->rd", shown.unflatten(-1, (len(W_O), -1)), W_O)
    bias = _output_bias(model, source, shown)
    return out if bias is None else out + bias


# -------------------------------------------------- of what the stream is a sum

Expression = Mapping[Source, float]


@dataclass(frozen=True, eq=False)
class Wiring:
    """Of what every norm's input is a sum.

    Attributes:
        norms: the model's norms.
        reads: of each norm outside attention, of each block ("blocks.L") and of END, the sources of its input with
            their factors.
        open: places where the sum does not close, with the message that says how much is missing and since where.
        bound: relative error that rounding explains of what is read, and of a norm of it.
    """

    model: HookedModel
    norms: Sequence[Norm]
    reads: Mapping[str, Expression]
    open: Mapping[str, str]
    bound: float

    def at(self, place: str) -> Expression:
        """Return the sources of what is read at a place.

        Raises:
            SplitError: they are not known.
        """
        if place in self.open:
            raise SplitError(self.open[place])
        if place not in self.reads:
            raise SplitError(f"{place} is no norm of the residual stream: there are {', '.join(self.reads)}")
        return self.reads[place]

    def norms_within(self, place: str) -> list[str]:
        """Return the norms in the stream (post-norms) that what is read there has passed, in the order of the pass."""
        names = [source.norm.name for source in self.at(place) if source.norm is not None]
        return list(dict.fromkeys(n for name in names for n in (*self.norms_within(name), name)))


class _State(NamedTuple):
    """The stream at one place of the pass, or where a norm's output takes its place, after so many outputs."""

    expression: Expression
    value: Tensor
    outputs: int


def _nearest_sum(
    value: Tensor, states: Sequence[_State], outputs: Sequence[tuple[Source, Tensor]], *, scaled: bool
) -> tuple[float, Expression]:
    """Return the sum that is nearest to the stream at a place, after its remainder relative to the largest summand.

    Args:
        states: of the stream earlier in the pass; before anything is written first.
        outputs: what was written to it so far, by norms too.
        scaled: whether what was written since an earlier state may have a factor other than 1.
    """
    nearest, expression = math.inf, dict[Source, float]()
    for start in (*states[:-_STARTS:-1], states[0]):
        difference, since = value - start.value, outputs[start.outputs :]
        writes = [output for output in since if output[0].norm is None]
        norms = [output for output in since if output[0].norm is not None]
        # What writes zeros counts as written: its weights may be others at the next call.
        for added in (writes, norms, writes[-1:], norms[-1:], []):
            total = sum((v for _, v in added), torch.zeros_like(value))
            factor = float((difference * total).sum() / total.square().sum().clamp_min(1e-300)) if scaled else 1.0
            largest = max(float(t.abs().max()) for t in (start.value, value, *(factor * v for _, v in added)))
            left = float((difference - factor * total).abs().max()) / max(largest, 1e-300)
            if left < nearest:
                nearest = left
                expression = {**start.expression, **{source: factor for source, _ in added}}
    return nearest, expression


def find_wiring(model: HookedModel, norms: Sequence[Norm]) -> Wiring:
    """Return of what the input of every norm and block is a sum; the first call runs eight tokens.

    The result is cached, for these weights. Only a factor depends on them: where one is changed through `.data`, which
    leaves no trace, `Split.check` raises an error.

    Args:
        model: any hooked model.
        norms: its norms; identities among them do not count.
    """
    structure, modules = structure_of(model), list(model.modules())
    weights = [(p.data_ptr(), p._version) for m in modules for p in m._parameters.values() if p is not None]
    origin = weights, [(*m._forward_hooks, *m._forward_pre_hooks) for m in modules]
    if structure.wiring is not None and structure.wiring[0] == origin:
        return Wiring(model, norms, *structure.wiring[1:])
    width, dtype = int(model.cfg.d_model), dtype_of(model.parameters())
    facts = facts_of(model)
    tokens = probe_tokens(facts.vocabulary, min(TOKENS, facts.context))
    with evaluating(model), unedited(modules):
        shown = record(model, tokens, range(len(tokens)), norms)
    # Hugging Face's RMSNorms compute in float32 in a float64 model, too.
    single = dtype == torch.float64 and any(norm.kind == "rmsnorm" for norm in norms)
    bound = CLOSES[torch.float32 if single else dtype]
    by_name = {norm.name: norm for norm in outside_attention(norms)}
    states = [_State({}, torch.zeros(len(tokens), width, dtype=torch.float64), 0)]
    outputs, last = list[tuple[Source, Tensor]](), "the embeddings"
    reads, open_places = dict[str, Expression](), dict[str, str]()
    for what, activation in shown.values.items():
        value = activation.double()
        if isinstance(what, Source):
            written = _written(model, what, value)
            if written is not None and written.shape[-1] == width:
                outputs.append((what, written))
            continue
        if value.shape[-1] != width:
            open_places[what] = f"{what} reads vectors of length {value.shape[-1]}, and the residual stream has {width}"
            continue
        left, expression = _nearest_sum(value, states, outputs, scaled=False)
        if not left <= bound:
            left, expression = _nearest_sum(value, states, outputs, scaled=True)
        if left <= bound:
            last, reads[what] = what, expression
            states.append(_State(expression, value, len(outputs)))
        else:
            open_places[what] = (
                f"what is read at {what} is not the sum of what known modules wrote: {left:.1e} of its size is left "
                f"over (rounding explains {bound:.0e}), written after {last}, the last place where the sum closes"
            )
        if (norm := by_name.get(what)) is not None:
            source, output = Source("norm", norm.layer, norm), norm.affine(norm.normalize(value))
            outputs.append((source, output))
            states.append(_State({source: 1.0}, output, len(outputs)))
    structure.wiring = origin, reads, open_places, bound
    return Wiring(model, norms, reads, open_places, bound)


def outside_attention(norms: Sequence[Norm]) -> list[Norm]:
    """Return the norms of the residual stream: no identities, no norms of queries and keys."""
    return [n for n in norms if n.reads not in ("query", "key") and not n.is_identity]


# ------------------------------------------------------- readings of the stream


@dataclass(frozen=True, eq=False)
class Record:
    """Activations at some positions of prompts of equal length.

    Attributes:
        values: a row per position, in the order of the pass. By source what its module showed (z of attention layers);
            by name the input of every norm outside attention, of every block ("blocks.L") and of the unembedding
            (END), and what other hook points showed.
        logits: of those positions; None if they are not known (a cache).
    """

    values: Mapping[Source | str, Float[Tensor, "row _"]]
    logits: Float[Tensor, "row d_vocab"] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The format that the model computes in."""
        return next(iter(self.values.values())).dtype


def record(
    model: HookedModel,
    tokens: Int[Tensor, "*batch pos"],
    positions: Sequence[int],
    norms: Sequence[Norm],
    points: Mapping[str, nn.Module] | None = None,
    *,
    logits: bool = True,
) -> Record:
    """Return what one forward pass shows at some positions.

    Args:
        model: any hooked model.
        tokens: one prompt, or several of equal length.
        positions: the rows of the record, counted through all prompts: prompt · length + position.
        norms: the model's norms.
        points: other modules whose output is recorded, by name.
        logits: whether those of the positions are recorded.
    """
    prompts = tokens if tokens.ndim == 2 else tokens[None]
    rows, (batch, length) = torch.tensor(positions), prompts.shape
    shown = dict[Source | str, Tensor]()

    def store(key: Source | str, _m: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if key not in shown:
            value = output[0] if output else tensors_in(args, kwargs)[0]
            width = None if output else value.shape[-1]  # (of the first head)
            shown[key] = flat(value, length, batch)[rows, :width].cpu()

    inputs = {norm.name: norm.module for norm in outside_attention(norms)}
    inputs |= {f"blocks.{layer}": block for layer, block in enumerate(model.blocks)}
    if (reader := child_of(model, "project_out") or child_of(model, "unembed")) is not None:
        inputs[END] = reader
    outputs: list[tuple[Source | str, nn.Module]] = [*watched(model), *(points or {}).items()]
    after = [(module, partial(store, key)) for key, module in outputs]
    with hooks_on(after, [(module, partial(store, name)) for name, module in inputs.items()]):
        output = run(model, prompts, return_type="logits" if logits else None)
    return Record(shown, output.flatten(0, 1)[rows].cpu() if logits else None)


class CachedPrompts:
    """The prompts of an activation cache that was taken without a `names_filter`.

    Raises:
        SplitError: it is of another model. The methods raise one if the cache lacks something, by name.
    """

    def __init__(self, model: HookedModel, cache: Any) -> None:
        if getattr(cache, "model", model) is not model:
            raise SplitError("the cache is of another model: run this model, or pass tokens")
        values = ((name, value.detach()) for name, value in cache.items() if isinstance(value, Tensor))
        batched = bool(getattr(cache, "has_batch_dim", True))
        self.model, self._values = model, {name: value if batched else value[None] for name, value in values}
        self.batch, self.length = map(int, self._value("embed.hook_out", "hook_embed").shape[:2])

    def _value(self, *names: str) -> Float[Tensor, "batch pos *wide"]:
        """Return the first of these activations that the cache holds."""
        if (name := next((n for n in names if n in self._values), None)) is None:
            raise SplitError(f"the cache lacks {names[0]!r}: take the cache without a names_filter, or pass tokens")
        return with_float64(self._values[name])

    def rows(self, *names: str) -> Float[Tensor, "row wide"]:
        """Return the first of these activations that there is, a row per position, prompt by prompt."""
        return flat(self._value(*names), self.length, self.batch)

    def record(self, positions: Sequence[int], wiring: Wiring, place: str, points: Collection[str] = ()) -> Record:
        """Return what is needed to divide what is read at `place` among its parts, as the function `record` does."""
        values = dict[Source | str, Tensor]()
        for source, module in watched(self.model):
            # An MLP without an output map is no hook point itself.
            mlp = f"blocks.{source.layer}."
            names = [module.name] if hasattr(module, "fwd_hooks") else [f"{mlp}mlp.hook_out", f"{mlp}hook_mlp_out"]
            values[source] = self.rows(*map(str, names))
        layers = range(len(self.model.blocks))
        inputs = (*wiring.norms_within(place), place, *(f"blocks.{layer}" for layer in layers))
        values.update((name, self._input(name)) for name in inputs)
        values.update((name, self.rows(name)) for name in points)
        return Record({key: value[list(positions)].cpu() for key, value in values.items()})

    def attention(self, norm: Norm, layer: int, place: str) -> list[AttentionInput]:
        """Return what the attention of a layer did in each prompt; `place`: what `norm` reads."""
        batch, length, attn = self.batch, self.length, f"blocks.{layer}.attn"
        x, patterns = self._input(place), self._value(f"{attn}.hook_pattern")
        y = x if norm.is_identity else norm.affine(self.rows(f"{norm.name}.hook_normalized"))
        names = [(point, f"{owner}.{point}") for point in TABLES for owner in ("rotary_emb", attn)]
        tables = {point: self._values[name] for point, name in names if name in self._values}
        cos_sin = [rotary_tables(tables, prompt, length) for prompt in range(batch)]
        each = zip(x.view(batch, length, -1), y.view(batch, length, -1), patterns, cos_sin, strict=True)
        return [AttentionInput(layer, *of_prompt, attentions(self.model.blocks)[layer], norm) for of_prompt in each]

    def _input(self, place: str) -> Float[Tensor, "row wide"]:
        """Return what is read at a place."""
        last, (block, _, leaf) = f"blocks.{len(self.model.blocks) - 1}.hook_resid_post", place.rpartition(".")
        if place == END:
            reader = "unembed" if child_of(self.model, "project_out") is None else "project_out"
            return self.rows(f"{reader}.hook_in", last)
        residual = {"ln1": f"{block}.hook_resid_pre", "ln2": f"{block}.hook_resid_mid", "ln_final": last}
        return self.rows(f"{place}.hook_in", residual.get(leaf, f"{place}.hook_resid_pre"))


def dot(x: Float[Tensor, "row d"], f: Float[Tensor, "row reading d"]) -> Float[Tensor, "row reading"]:
    """Return x · f at every row; either has one row where it is the same at all."""
    return torch.einsum("rd,rnd->rn", x, f)


@dataclass(frozen=True, eq=False)
class Split:
    """The parts of what one prompt's norms read, in float64 on the CPU."""

    wiring: Wiring
    record: Record
    _weights: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, chosen: Sequence[int]) -> Split:
        """Return the same at some of the recorded positions, without logits."""
        values = {key: value[list(chosen)] for key, value in self.record.values.items()}
        return Split(self.wiring, Record(values), self._weights)

    def input(self, place: str) -> Float[Tensor, "row d_model"]:
        """Return the vectors that are read at a place."""
        return self.record.values[place].double()

    def check(self, place: str) -> float:
        """Return how much of what is read at a place no part explains, relative to the largest summand.

        Raises:
            SplitError: more than rounding explains; names the place, and the norm in the stream before it if the sum
                is wrong there already.
        """
        worst, written = 0.0, dict[Source, Tensor]()
        for at in (*self.wiring.norms_within(place), place):
            whole, size = torch.zeros(2, *self.input(at).shape, dtype=torch.float64)
            for source, factor in self.wiring.at(at).items():
                if source not in written:
                    written[source] = self._written(source)
                whole.add_(written[source], alpha=factor)
                size.add_(written[source].abs(), alpha=abs(factor))
            left = float((whole - self.input(at)).abs().max()) / max(float(size.max()), 1e-300)
            if not left <= self.wiring.bound:
                raise SplitError(
                    f"the parts of what is read at {at} do not add up to it: {left:.1e} of the largest is left over. "
                    "Something else wrote to the stream: a hook or an edit that was active, or another model's cache"
                )
            worst = max(worst, left)
        return worst

    def _written(self, source: Source) -> Float[Tensor, "row d_model"]:
        if (norm := source.norm) is not None:
            return norm.affine(norm.normalize(self.input(norm.name)))
        written = _written(self.wiring.model, source, self.record.values[source].double())
        assert written is not None  # (its place would be open)
        return written

    def read(self, place: str, f: Float[Tensor, "row reading d_model"]) -> dict[Part, Float[Tensor, "row reading"]]:
        """Return f · x_p for every part p of what is read at `place`; they add up to f · x.

        Args:
            place: a norm's name, or END.
            f: what is read, at every recorded position; one row where it is the same at all of them.
        """
        values, rows = dict[Part, Tensor](), len(self.input(place))
        for source, factor in self.wiring.at(place).items():
            for part, value in self._read(source, factor * f).items():
                values[part] = values.get(part, 0.0) + value.expand(rows, -1)
        return values

    def _read(self, source: Source, f: Tensor) -> dict[Part, Tensor]:
        if (norm := source.norm) is not None:
            sigma = norm.sigma(self.input(norm.name))[:, None]
            values = self.read(norm.name, norm.project(f * gain_of(norm)) / sigma)
            if norm.bias is not None:
                values[Part(f"{norm.name} bias", "norm bias", norm.layer)] = f @ bias_of(norm)
            return values
        shown, layer = self.record.values[source].double(), source.layer
        bias = _output_bias(self.wiring.model, source, shown)
        values = {} if bias is None else {Part(f"L{layer} {_BIASES[source.kind]}", "bias", layer): f @ bias}
        if source.kind == "attn":
            return self._heads(layer, shown, f) | values
        if source.kind == "mlp":
            return {Part(f"L{layer} mlp", "mlp", layer): dot(shown if bias is None else shown - bias, f)} | values
        kind = "position" if source.kind == "pos_embed" else "embedding"
        return {Part(source.kind, kind): dot(shown, f)}

    def _heads(self, layer: int, z: Tensor, f: Tensor) -> dict[Part, Tensor]:
        if layer not in self._weights:
            W_O = _output_maps(self.wiring.model, layer, z)
            assert W_O is not None  # (its place would be open)
            self._weights[layer] = W_O
        pulled = torch.einsum("rnd,hkd->hrnk", f, self._weights[layer])
        by_head = z.unflatten(-1, (len(pulled), -1))
        values = torch.einsum("rhk,hrnk->hrn", by_head, pulled)
        return {Part(f"L{layer}H{h}", "head", layer, h): v for h, v in enumerate(values)}
