"""Where does a logit come from? Every part's share of it through the final norm, exactly, and through all later layers.

    logit = Σ_p w·gain·P x_p / sigma + w·bias + b_U            at the token's own sigma

(`docs/attribution.md`; in folded models direct logit attribution: Elhage et al. 2021, Wang et al. 2023.) Each part's
share is split into what it would give without projection, w·gain·x_p / sigma, and what projection takes off,
-w·gain·1·mean(x_p) / sigma.

Through later layers: with every norm linear (`linearized`) and every pattern held, only MLPs are nonlinear. The
gradient of a logit with respect to what a part wrote, times what it wrote, is its effect along every path to the logit,
exact in an attention-only model, first-order in MLPs (the linearization behind attribution patching and transcoder
circuits: Nanda 2023, Dunefsky et al. 2024). What MLPs and later biases leave over is stated at each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ln_probe.analyses.attribution.shared import (
    MEAN,
    TOP,
    AttributionError,
    Bar,
    Direction,
    Tokens,
    bias_part,
    direction,
    draw,
    head_part,
    largest,
    outputs,
    part_columns,
    place,
    prompt,
    soft_cap,
    token_ids,
    whole_part,
)
from ln_probe.hooks.capture import CachedPrompt, is_cache
from ln_probe.hooks.components import (
    END,
    Part,
    Record,
    Source,
    Split,
    Writers,
    attention_output,
    record,
    watched,
)
from ln_probe.hooks.default_tokens import tokenizer_of
from ln_probe.hooks.linearized import linearized
from ln_probe.hooks.model import (
    HookedModel,
    blocks,
    check_model,
    evaluating,
    logit_factor,
    missing_head,
    n_layers,
    weight_of,
)
from ln_probe.hooks.norm import Site
from ln_probe.hooks.sites import survey

COLUMNS = ("part", "kind", "layer", "index", "contribution", "without_projection", "projection", "bias")
TERMS = COLUMNS[5:]


@dataclass(frozen=True, eq=False)
class LogitAttribution:
    """A logit (or a difference of logits) as a sum over parts.

    Attributes:
        table: a row per part: `part`, `kind`, `layer`, `index` (head or neuron; -1), `contribution`, and the three it
            is the sum of: `without_projection`, `projection` (what projection takes off), `bias`.
        total: what they add up to, b_U included: the logit.
        own: the model's own, from its forward pass (from a cache: of the norm's output that it holds).
        scale: what the error is relative to: the largest |logit| at that position.
        bound: relative error that rounding explains in the model's format: 1e-5 in float32, 1e-11 in float64, four
            units of relative precision in half precision (0.03 in bfloat16, 0.004 in float16).
        label: what was asked for, in words.
        sigma: what the final norm divided by; NaN if the model has none.
        soft_cap: cap of the model's logits: the sum is of the logit before it; 0 if there is none.
    """

    table: pd.DataFrame
    total: float
    own: float
    scale: float
    bound: float
    label: str
    sigma: float
    soft_cap: float = 0.0

    def to_torch(self) -> Float64[Tensor, "part term"]:
        """`without_projection`, `projection` and `bias` of every row of the table."""
        return torch.tensor(self.table[list(TERMS)].to_numpy(dtype=float))

    @property
    def error(self) -> float:
        """|total − own| relative to `scale`."""
        return abs(self.total - self.own) / self.scale

    def check(self) -> LogitAttribution:
        """This, if the parts add up to the model's own logit.

        Raises:
            AttributionError: they do not; says by how much.
        """
        summed = float(self.table["contribution"].sum())
        if not (self.error <= self.bound and math.isclose(summed, self.total, abs_tol=self.bound * self.scale)):
            raise AttributionError(
                f"the parts add up to {summed:.6g}, and the model's own {self.label} is {self.own:.6g}: "
                f"{abs(summed - self.own) / self.scale:.1e} of the largest logit apart (rounding explains "
                f"{self.bound:.0e}). Does something after the final norm change its logits?"
            )
        return self

    def top(self, k: int = TOP) -> pd.DataFrame:
        """The k rows with the largest contributions, either way."""
        order = self.table["contribution"].abs().sort_values(ascending=False, kind="stable").index
        return self.table.loc[order[:k]]

    def __repr__(self) -> str:
        return f"LogitAttribution({self.label}: {self.total:.4f}, {len(self.table)} parts)"

    def _repr_html_(self) -> str:
        rows = self.table.itertuples()
        bars = largest([Bar(r.part, r.contribution, r.without_projection + r.bias) for r in rows])  # type: ignore
        note = "Bars add up to it, b_U included. The tick: what the part would give without projection."
        if self.soft_cap:
            note += f" The logit is meant before its soft cap of {self.soft_cap:g}."
        return str(draw(bars, f"{self.label}: {self.total:.4f}", note))


def attribute_logits(
    model: object,
    tokens: object,
    position: SupportsIndex = -1,
    target: Tokens | None = None,
    against: Tokens | None = None,
    *,
    neurons: bool | Sequence[int] = False,
) -> LogitAttribution:
    """Where a logit comes from: every part's share, exactly, through the final norm.

    Args:
        model: HookedTransformer, TransformerBridge or lab model; raw, folded or centred; with or without a final norm.
        tokens: one prompt (text, ids [pos] or [1 pos]), or an `ActivationCache` of this model on one prompt.
        position: whose prediction; negative from the end.
        target: a token (id or text), or several, whose mean logit is meant; None: the model's own first choice.
        against: what is subtracted: a token or several likewise, "mean" (the mean logit of the vocabulary), or None.
        neurons: MLPs neuron by neuron: True for all layers, or a list of layers. (Not from a cache.)

    Raises:
        TypeError: not a TransformerLens model.
        AttributionError: an unknown token, a position out of range, a prompt that cannot be run, a head that was not in
            the checkpoint.
        SplitError: the parts do not add up to what the final norm reads (a writer that is not known, a cache of
            another, folded or centred model): names the place and how much is missing.
    """
    hooked = check_model(model)
    if reason := missing_head(hooked):
        raise AttributionError(f"logits of this model cannot be attributed: {reason}")
    with evaluating(hooked):
        facts = survey(hooked)
        sites, wiring = facts.norms(), facts.wiring
        final = next((s for s in reversed(sites) if "unembed" in s.reads.split("+")), None)
        where = END if final is None else final.name
        wiring.at(where)  # raises before the prompt runs
        layers = _layers(hooked, neurons)
        seen: Record
        cap = 0.0
        if is_cache(tokens):
            if layers:
                raise AttributionError("neurons are not read from a cache: pass tokens")
            cached = CachedPrompt(hooked, tokens)
            at = place(position, cached.length())
            seen = cached.record([at], wiring, where)
            own = _logits_of_cache(hooked, cached, final, where, at, seen)
            own *= logit_factor(hooked)
            cap = soft_cap(hooked)  # these logits are made before it
        else:
            ids = prompt(hooked, tokens)
            at = place(position, len(ids))
            seen = record(hooked, ids, [at], sites, neurons=layers)
            assert seen.logits is not None
            own, cap = _uncapped(hooked, seen.logits[0].double(), seen)
        factor = _factor(hooked, own, seen)
    split = Split(wiring, seen)
    split.check(where)
    chosen = [int(own[: outputs(hooked)].argmax())] if target is None else token_ids(hooked, target)
    other: Any = against
    if against is not None and not (isinstance(against, str) and against == MEAN):
        other = token_ids(hooked, against)
    asked = direction(hooked, chosen, other, _names(hooked))
    asked = replace(asked, vector=factor * asked.vector, bias=factor * asked.bias)
    table, total, sigma = _table(split, final, where, asked)
    from_model = float(logit_asked(hooked, own, chosen, other))
    bound, scale = wiring.bound(where, seen.dtype), max(float(own.abs().max()), 1e-300)
    return LogitAttribution(table, total, from_model, scale, bound, asked.label, sigma, cap)


def logit_asked(
    model: HookedModel, logits: Float64[Tensor, " d_vocab"] | Tensor, target: Tokens | None, against: Tokens | None
) -> Tensor:
    """The logit, or the difference, that `target` and `against` mean, with its graph."""
    chosen = [int(logits[: outputs(model)].argmax())] if target is None else token_ids(model, target)
    found = logits[chosen].mean()
    if against is None:
        return found
    if isinstance(against, str) and against == MEAN:
        return found - logits[: outputs(model)].mean()
    return found - logits[token_ids(model, against)].mean()


def _layers(model: HookedModel, neurons: bool | Sequence[int]) -> list[int]:
    if isinstance(neurons, bool):
        return list(range(n_layers(model))) if neurons else []
    return [place(layer, n_layers(model), "layer", "the model", "layers") for layer in neurons]


def _names(model: HookedModel) -> Callable[[int], str] | None:
    """The text of a token by its id; None without a tokenizer."""
    tokenizer: Any = tokenizer_of(model)
    if tokenizer is None or not hasattr(tokenizer, "decode"):
        return None
    return lambda i: str(tokenizer.decode([i]))


def _uncapped(
    model: HookedModel, logits: Float64[Tensor, " d_vocab"], seen: Record
) -> tuple[Float64[Tensor, " d_vocab"], float]:
    """Logits before their soft cap, and the cap; as they are, and 0, if the model is seen not to have one."""
    cap, W_U, b_U = soft_cap(model), weight_of(model, "W_U"), weight_of(model, "b_U")
    if not cap or W_U is None:
        return logits, 0.0
    plain = (seen.inputs[END][0].to(W_U) @ W_U).double().cpu()
    plain = plain if b_U is None else plain + b_U.double().cpu()
    squashed = cap * (plain / cap).tanh()
    if float((logits - plain).abs().max()) <= float((logits - squashed).abs().max()):
        return logits, 0.0
    return cap * (logits / cap).clamp(-1.0, 1.0).atanh(), cap


def _factor(model: HookedModel, logits: Float64[Tensor, " d_vocab"], seen: Record) -> float:
    """What the model multiplies W_U's logits by: what its config says, where the logits are seen to have it."""
    factor, W_U, b_U = logit_factor(model), weight_of(model, "W_U"), weight_of(model, "b_U")
    if factor == 1.0 or W_U is None or END not in seen.inputs:
        return factor
    plain = (seen.inputs[END][0].to(W_U) @ W_U).double().cpu()
    plain = plain if b_U is None else plain + b_U.double().cpu()
    return factor if float((logits - factor * plain).abs().max()) < float((logits - plain).abs().max()) else 1.0


def _logits_of_cache(
    model: HookedModel, cached: CachedPrompt, final: Site | None, where: str, at: int, seen: Record
) -> Float64[Tensor, " d_vocab"]:
    """Logits from the norm's output that the cache holds: another way than through its input's parts."""
    y = None if final is None else cached.normalized(where, at)
    x = seen.inputs[where][0].double()
    out = x if final is None else final.affine(final.normalize(x) if y is None else y).cpu()
    W_U, b_U = weight_of(model, "W_U"), weight_of(model, "b_U")
    assert W_U is not None
    logits = out.to(W_U) @ W_U if W_U.dtype == torch.float64 else (out.float().to(W_U) @ W_U).double()
    return (logits if b_U is None else logits + b_U).double().cpu()


def _table(split: Split, final: Site | None, where: str, asked: Direction) -> tuple[pd.DataFrame, float, float]:
    w = asked.vector
    gain = w if final is None or final.gain is None else w * final.gain.detach().cpu().double()
    sigma = 1.0 if final is None else float(split.sigma(where)[0, 0])
    projects = final is not None and final.projects
    readings = torch.stack([gain / sigma, torch.full_like(gain, 1.0 / len(gain))])
    found = split.read(where, readings[None])
    taken = float(gain.sum()) / sigma if projects else 0.0
    rows = [_row(part, float(values[0, 0]), 0.0 - float(values[0, 1]) * taken, 0.0) for part, values in found.items()]
    if final is not None and final.bias is not None:
        bias = float(w @ final.bias.detach().cpu().double())
        rows.append(_row(Part(f"{final.name} bias", "norm bias", final.layer), 0.0, 0.0, bias))
    rows.append(_row(Part("b_U", "unembedding bias"), 0.0, 0.0, asked.bias))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table, math.fsum(table["contribution"]), math.nan if final is None else sigma


def _row(part: Part, without: float, taken: float, bias: float) -> Mapping[str, object]:
    return {
        **part_columns(part),
        "contribution": without + taken + bias,
        "without_projection": without,
        "projection": taken,
        "bias": bias,
    }


# ------------------------------------------------------------------------------------------------- through later layers

LAYER_COLUMNS = ("part", "kind", "layer", "index", "direct", "mediated", "effect")
# |gradient through queries| over the effects' own size that counts as "patterns are held"; where they are, it is 0.
_HELD = 1e-9


@dataclass(frozen=True, eq=False)
class LayersAttribution:
    """What every part does to a logit through all later layers, sigmas and patterns held.

    Attributes:
        table: a row per part: `direct` (through the final norm alone, as `attribute_logits` has it), `mediated`
            (through later heads and MLPs, summed over the positions where it was written), `effect` (both).
        remainders: a row per block: `layer`, `first_order` (the gradient at the stream before it times the stream) and
            `remainder` (logit − first_order: biases written later, and what later MLPs bend).
        total: the logit (or difference).
        label: what was asked for, in words.
    """

    table: pd.DataFrame
    remainders: pd.DataFrame
    total: float
    label: str

    def __repr__(self) -> str:
        return f"LayersAttribution({self.label}: {self.total:.4f}, {len(self.table)} parts)"

    def _repr_html_(self) -> str:
        bars = [Bar(str(r.part), float(r.effect), float(r.direct)) for r in self.table.itertuples()]  # type: ignore
        note = (
            "A bar: the part's effect along every path, sigmas and patterns held. The tick: its direct effect alone. "
            "Bars do not add up (a part acts through later ones). First-order in MLPs: "
            f"{self.remainders['remainder'].iloc[0]:+.3g} of the logit come from biases and bends after the embeddings."
        )
        return str(draw(largest(bars), f"{self.label}: {self.total:.4f}", note))


def attribute_through_layers(
    model: object,
    tokens: object,
    position: SupportsIndex = -1,
    target: Tokens | None = None,
    against: Tokens | None = None,
) -> LayersAttribution:
    """What every part does to a logit through all later layers, with sigmas and attention patterns held.

    Args:
        model: HookedTransformer, TransformerBridge or lab model.
        tokens: one prompt (text, ids [pos] or [1 pos]).
        position, target, against: as of `attribute_logits`.

    Raises:
        AttributionError, SplitError, LostEditError: as `attribute_logits` and `linearized`; and where this model's
            attention shows its pattern only after it was used, so that it cannot be held.
    """
    hooked = check_model(model)
    ids = prompt(hooked, tokens)
    at = place(position, len(ids))
    direct = attribute_logits(hooked, ids, at, target, against).check()
    with evaluating(hooked), linearized(hooked), _Watched(hooked, len(ids)) as seen, torch.enable_grad():
        logits = _without_cap(hooked(ids[None], return_type="logits")[0, at], direct.soft_cap)
        asked = logit_asked(hooked, logits, target, against)
        found = seen.effects(asked)
    total = float(asked.detach())
    rows = direct.table.set_index("part")["contribution"]
    table = [
        (p.name, p.kind, p.layer, p.index, float(rows.get(p.name, 0.0)), v - float(rows.get(p.name, 0.0)), v)
        for p, v in found.items()
    ]
    remainders = pd.DataFrame(
        [(layer, value, total - value) for layer, value in seen.first_order.items()],
        columns=["layer", "first_order", "remainder"],
    )
    return LayersAttribution(pd.DataFrame(table, columns=list(LAYER_COLUMNS)), remainders, total, direct.label)


def _without_cap(logits: Float[Tensor, " d_vocab"], cap: float) -> Float[Tensor, " d_vocab"]:
    """Logits before the model's soft cap, which is what parts add up to.

    Raises:
        AttributionError: one is so far beyond the cap that it cannot be told from it.
    """
    if not cap:
        return logits
    found: Tensor = cap * torch.atanh(logits / cap)
    if not bool(found.isfinite().all()):
        raise AttributionError(f"a logit has reached the soft cap of {cap:g}, and what it was before cannot be told")
    return found


class _Watched:
    """Hooks that hold patterns and keep what is written with its graph, while a `with` block lasts."""

    def __init__(self, model: HookedModel, length: int) -> None:
        self.model, self.length, self.writers = model, length, Writers(model)
        self.written: dict[Source, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}  # of attention layers, biases included
        self.streams: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.first_order: dict[int, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Watched:
        for source, module in watched(self.model):
            self._put(module.register_forward_hook(self._keep(self.written, source, leaf=source.layer < 0)))
        for layer, block in enumerate(blocks(self.model)):
            self._put(block.register_forward_pre_hook(self._stream(layer)))
            attn = getattr(block, "attn", None)
            if not isinstance(attn, nn.Module):
                continue
            self._put(attention_output(attn).register_forward_hook(self._keep(self.outputs, layer)))
            for name, hook in (("hook_pattern", _detached), ("hook_q", self._keep(self.queries, layer))):
                point = getattr(attn, name, None)
                if isinstance(point, nn.Module):
                    self._put(point.register_forward_hook(hook))
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def _put(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def _keep(self, into: dict[Any, Tensor], key: Any, *, leaf: bool = False) -> Any:
        def hook(_m: nn.Module, _args: Any, output: Any) -> Any:
            value = output[0] if isinstance(output, tuple) else output
            if key in into:
                return None
            if leaf:  # so that there is a gradient where parameters are frozen
                value = value.detach().requires_grad_()
            into[key] = value
            return value if leaf else None

        return hook

    def _stream(self, layer: int) -> Any:
        def hook(_m: nn.Module, args: Any) -> None:
            self.streams[layer] = args[0]

        return hook

    def effects(self, asked: Tensor) -> dict[Part, float]:
        """Of every part: its gradient times itself, summed over positions.

        Raises:
            AttributionError: patterns are not held.
        """
        places: list[tuple[dict[Any, Tensor], Any]] = [
            (kept, key) for kept in (self.written, self.outputs, self.streams, self.queries) for key in kept
        ]
        every = torch.autograd.grad(asked, [kept[key] for kept, key in places], allow_unused=True)
        gradients = [torch.zeros_like(k[n]) if g is None else g for g, (k, n) in zip(every, places, strict=True)]
        by = {(id(kept), key): g for g, (kept, key) in zip(gradients, places, strict=True)}

        def product(kept: dict[Any, Tensor], key: Any) -> float:
            return float((by[id(kept), key].double() * kept[key].detach().double()).sum())

        size = max(abs(float(asked.detach())), 1e-300)
        for layer in self.queries:
            if (
                float(by[id(self.queries), layer].abs().max()) * float(self.queries[layer].detach().abs().max())
                > _HELD * size
            ):
                raise AttributionError(
                    f"the attention pattern of layer {layer} cannot be held: this world shows it after it was used. "
                    "Load the model as a HookedTransformer (TransformerLens 3.9), or use attribute_logits"
                )
        self.first_order = {layer: product(self.streams, layer) for layer in self.streams}
        found: dict[Part, float] = {}
        for source, value in self.written.items():
            gradient, bias = by[id(self.written), source].double(), self.writers.bias(source, value.detach().double())
            flat_value, flat_gradient = (t.detach().double().reshape(self.length, -1) for t in (value, gradient))
            if source.kind == "attn":
                z, g = (self.writers.split(source.layer, t) for t in (flat_value, flat_gradient))
                each = einsum(z, g, "pos head k, pos head k -> head")
                found |= {head_part(source.layer, h): float(v) for h, v in enumerate(each)}
                if bias is not None:
                    lift = by[id(self.outputs), source.layer].double().reshape(self.length, -1)
                    found[bias_part(source)] = float((lift @ bias).sum())
                continue
            own = 0.0 if bias is None else float((flat_gradient @ bias).sum())
            found[whole_part(source)] = float((flat_value * flat_gradient).sum()) - own
            if bias is not None:
                found[bias_part(source)] = own
        return found


def _detached(_m: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.detach()
