"""Where does a logit come from? Every part's share of it through the final norm, exactly, and through all later layers.

    logit = Σ_p w·gain·P x_p / sigma + w·bias + b_U            at the token's own sigma

(`docs/attribution.md`; in folded models direct logit attribution: Elhage et al. 2021, Wang et al. 2023.) Each part's
share is split into what it would give without projection, w·gain·x_p / sigma, and what projection takes off,
-w·gain·1·mean(x_p) / sigma.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ln_probe.analyses.attribution.features import Features, dictionaries
from ln_probe.analyses.attribution.shared import (
    MEAN,
    TOP,
    AttributionError,
    Bar,
    Sums,
    SumsAtPositions,
    Tokens,
    draw,
    ids_of_rows,
    is_index,
    largest,
    mean_columns,
    of_equal_length,
    others_of_rows,
    part_columns,
    place,
    places_of,
    prompts,
    row_number,
    soft_cap,
    token_ids,
    token_names,
)
from ln_probe.hooks.capture import CachedPrompts, is_cache, record
from ln_probe.hooks.components import (
    END,
    Part,
    Record,
    Split,
    Wiring,
)
from ln_probe.hooks.default_tokens import tokenizer_of
from ln_probe.hooks.deprecation import deprecated
from ln_probe.hooks.model import (
    HookedModel,
    before_projection,
    check_model,
    evaluating,
    logit_factor,
    missing_head,
    n_layers,
    outputs,
    weight_of,
    whole_number,
)
from ln_probe.hooks.norm import Site, bias_of, gain_of
from ln_probe.hooks.sites import facts_of

COLUMNS = ("part", "kind", "layer", "index", "contribution", "without_projection", "projection", "bias")
TERMS = COLUMNS[5:]
COMPONENTS = ("heads", "layers", "neurons")
_REMEDY = ". Does something after the final norm change its logits?"


@dataclass(frozen=True, eq=False)
class LogitAttribution(Sums):
    """A logit (or a difference of logits) as a sum over components.

    Attributes:
        table: a row per component: `part`, `kind`, `layer`, `index` (head or neuron; -1), `contribution`, and the three
            terms that it is the sum of: `without_projection`, `projection` (the effect of projection), `bias`.
        total: the sum of the contributions, b_U included.
        own: the model's logit from its forward pass (from a cache: from the norm's output that it holds).
        scale: what the error is relative to: the largest |logit| at that position.
        bound: relative error that rounding explains in the model's format: 1e-5 in float32, 1e-11 in float64, four
            units of relative precision in half precision (0.03 in bfloat16, 0.004 in float16).
        label: what was asked for, as text.
        sigma: what the final norm divided by; NaN if the model has none.
        soft_cap: cap of the model's logits: the sum is of the logit before it; 0 if there is none.

    Example:
        >>> one = ln_probe.attribute_logits(model, tokens[0], positions=-1, target=7).check()
        >>> one.top(3)
        >>> abs(one.total - one.own) <= one.bound
        True
    """

    table: pd.DataFrame
    total: float
    own: float
    scale: float
    bound: float
    label: str
    sigma: float
    soft_cap: float = 0.0
    _remedy = _REMEDY

    def to_torch(self) -> Float64[Tensor, "part term"]:
        """`without_projection`, `projection` and `bias` of every row of the table."""
        return torch.tensor(self.table[list(TERMS)].to_numpy(dtype=float))

    @property
    def values(self) -> Float64[Tensor, "component 1 1"]:
        """The contribution of every row of the table."""
        return torch.tensor(self.table["contribution"].to_numpy(dtype=float))[:, None, None]

    def top(self, k: int = TOP) -> pd.DataFrame:
        """The k rows with the largest contributions, either way."""
        k = whole_number(k, "k", 1, AttributionError)
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


@dataclass(frozen=True, eq=False)
class LogitAttributions(SumsAtPositions):
    """Logits (or differences of logits) at several positions of one or several prompts, each as a sum over components.

    Attributes:
        components: what the rows of `terms` are.
        terms: `without_projection`, `projection` and `bias` of every component; NaN where a prompt has no such position
            or no token follows.
        total: what they add up to; own: the model's own logit; scale: what the error is relative to.
        bound: relative error that rounding explains, as in `LogitAttribution`.
        at: the position of every entry, counted from the beginning of its prompt; -1 where there is none.
        label: what was asked for, as text.
        soft_cap: cap of the model's logits: sums are of the logits before it; 0 if there is none.

    Example:
        >>> every = ln_probe.attribute_logits(model, tokens, components="layers").check()
        >>> every.values.shape, every.top(3)
    """

    components: tuple[Part, ...]
    terms: Float64[Tensor, "component term batch pos"]
    total: Float64[Tensor, "batch pos"]
    own: Float64[Tensor, "batch pos"]
    scale: Float64[Tensor, "batch pos"]
    bound: float
    at: Int[Tensor, "batch pos"]
    label: str
    soft_cap: float = 0.0
    _remedy = _REMEDY

    @property
    def values(self) -> Float64[Tensor, "component batch pos"]:
        """The contribution of every component."""
        return self.terms.sum(1)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per component, prompt and position: `batch`, `position`, and `LogitAttribution.table`'s columns."""
        present = torch.nonzero(self.total.isfinite())
        terms = self.terms[:, :, present[:, 0], present[:, 1]].permute(2, 0, 1).reshape(-1, len(TERMS)).numpy()
        return self._rows(position=self.at).assign(contribution=terms.sum(1), **dict(zip(TERMS, terms.T, strict=True)))

    def _place(self, at: int) -> str:
        prompt_number, position = divmod(at, self.at.shape[1])
        return f" at position {int(self.at[prompt_number, position])} of prompt {prompt_number}"

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.total.shape))
        return f"LogitAttributions({self.label}: {len(self.components)} components, {shape} positions)"

    def _repr_html_(self) -> str:
        count = int(self.total.isfinite().sum())
        terms = self.terms.flatten(2).nanmean(2)
        bars = [
            Bar(part.name, float(row.sum()), float(row[0] + row[2]))
            for part, row in zip(self.components, terms, strict=True)
        ]
        note = f"Means over {count} positions; the tick: without projection. Values: .values [component, batch, pos]."
        return str(draw(largest(bars), f"{self.label}: {float(self.total.nanmean()):.4f} on average", note))


def attribute_logits(
    model: object,
    tokens_or_cache: object,
    positions: SupportsIndex | slice | Sequence[SupportsIndex] | None = None,
    target: Tokens | None = None,
    against: Tokens | None = None,
    components: str = "heads",
    features: Sequence[Features] | Features | None = None,
    *,
    neurons: bool | Sequence[int] = False,
    position: SupportsIndex | None = None,
) -> LogitAttribution | LogitAttributions:
    """Write logits as exact sums over components of the residual stream and terms of the final norm.

    Args:
        model: HookedTransformer, TransformerBridge or lab model; raw, folded or centred; with or without a final norm.
        tokens_or_cache: prompts (text, ids [pos] or [batch pos], lists of unequal length), or an `ActivationCache` of
            this model.
        positions: positions whose logits are attributed: None (all), an index, a slice or a list; negative from the
            end of each prompt. One index of one prompt gives a `LogitAttribution`, anything else `LogitAttributions`.
        target: the token whose logit is attributed: an id or text, the same at every position; ids [batch pos], one for
            each position (for one prompt also [pos], for one position of several [batch]); None: the next token of the
            prompt, NaN at the last position. For one position of one prompt: a token, or several, whose logits are
            averaged; None: the model's most likely token.
        against: the logit to subtract: given like `target`, "mean" (the mean logit of the vocabulary), or None.
        components: "heads" (heads, MLPs, embeddings, biases), "layers" (attention layers and MLPs with their biases) or
            "neurons" (heads, and MLPs neuron by neuron).
        features: dictionaries whose features replace the components that they reconstruct.
        neurons: MLPs neuron by neuron: True for all layers, or a list of layers. (Not from a cache.)
        position: deprecated name of `positions`.

    Returns:
        The attribution; `.check()` raises an error if the sum is not the model's own logit.

    Raises:
        TypeError: not a TransformerLens model.
        AttributionError: an unknown token, a position out of range, a prompt that cannot be run, features that do not
            fit, a head that was not in the checkpoint.
        SplitError: the components do not add up to what the final norm reads (a writer that is not known, a cache of
            another, folded or centred model): names the place and how much is missing.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> every = ln_probe.attribute_logits(model, "The ships came home.").check()
        >>> last = ln_probe.attribute_logits(model, "The ships came home.", -1, target=" The").check()
    """
    if position is not None:
        deprecated("attribute_logits(position=…)", "positions=", "1.0", "2.0")
        if positions is not None:
            raise AttributionError(
                f"position={position!r} is the deprecated name of positions={positions!r}: give positions alone"
            )
        positions = position
    hooked = check_model(model)
    if reason := missing_head(hooked):
        raise AttributionError(f"logits of this model cannot be attributed: {reason}")
    if components not in COMPONENTS:
        raise AttributionError(f"components must be one of {', '.join(COMPONENTS)}, got {components!r}")
    wanted = dictionaries(features)
    with evaluating(hooked):
        facts = facts_of(hooked, checksums=False)
        sites, wiring = facts.norms(), facts.wiring
        final = next((s for s in reversed(sites) if "unembed" in s.reads.split("+")), None)
        reader = _Reader(hooked, wiring, final, wanted, components == "layers")
        wiring.at(reader.where)  # raises before the prompt runs
        layers, every = _layers(hooked, neurons), _layers(hooked, True)
        if layers and (components == "layers" or (components == "neurons" and set(layers) != set(every))):
            raise AttributionError(f"neurons={neurons!r} is for components='heads', got components={components!r}")
        layers = every if components == "neurons" else layers
        if layers and is_cache(tokens_or_cache):
            raise AttributionError("neurons are not read from a cache: pass tokens")
        cached = CachedPrompts(hooked, tokens_or_cache) if is_cache(tokens_or_cache) else None
        rows = [] if cached is not None else prompts(hooked, tokens_or_cache)
        if cached is not None:
            count, longest = cached.shape()
            lengths = [longest] * count
        else:
            lengths = list(map(len, rows))
        places = [places_of(positions, n) for n in lengths]
        single = len(lengths) == 1 and not isinstance(positions, slice | Sequence) and is_index(positions)
        for given in wanted:
            given.check(int(hooked.cfg.d_model), len(lengths), max(lengths))
        widest = max(lengths)
        named = [f.chosen([i * widest + p for i, at in enumerate(places) for p in at]) for f in wanted]
        points = {f.hook_name: f.point(hooked) for f in wanted}
        ids, valid = (None, None) if single else ids_of_rows(hooked, target, places, rows)
        others = None if single else others_of_rows(hooked, against, places)
        results: list[tuple[list[tuple[int, int]], _Values]] = []
        for members in of_equal_length(lengths):
            length = lengths[members[0]]
            flat_at = [k * length + p for k, i in enumerate(members) for p in places[i]]
            of_features = [i * widest + p for i in members for p in places[i]]
            if cached is not None:
                seen = cached.record(flat_at, wiring, reader.where, points)
                normalized = None if final is None else cached.rows([f"{final.name}.hook_normalized"])
                own = reader.logits_of_cache(seen, None if normalized is None else normalized[flat_at])
            else:
                seen = record(
                    hooked, torch.stack([rows[i] for i in members]), flat_at, sites, neurons=layers, points=points
                )
                assert seen.logits is not None
                own = seen.logits
            split = Split(wiring, seen)
            split.check(reader.where)
            known = [(i, k) for i in members for k in range(len(places[i]))]
            if single:
                uncapped = reader.uncapped(own, seen, cached is not None)[0]
                best = int(uncapped[0, : outputs(hooked)].argmax())
                ids = torch.tensor([[best] if target is None else token_ids(hooked, target)])
                kept = against is None or (isinstance(against, str) and against == MEAN)
                others = against if kept else torch.tensor([token_ids(hooked, cast(Tokens, against))])
            assert ids is not None
            at = [row_number(places, i, k) for i, k in known]
            other = others[at] if isinstance(others, Tensor) else others
            results.append((known, reader.read(split, own, ids[at], other, named, of_features, cached is not None)))
    names = _names(hooked)
    if single:
        assert ids is not None
        values = results[0][1]
        label = "logit of " + token_names(ids[0].tolist(), names)
        if others is not None:
            label += " minus " + (
                token_names(others[0].tolist(), names) if isinstance(others, Tensor) else "the mean logit"
            )
        return _one(values, label)
    return _several(results, places, valid, _label(hooked, target, against))


def _label(model: HookedModel, target: Any, against: Any) -> str:
    def words(given: Any) -> str:
        one = isinstance(given, str) or (is_index(given) and not isinstance(given, Sequence))
        return token_names(token_ids(model, given), _names(model)) if one else "the tokens given"

    label = "logit of " + ("the next token" if target is None else words(target))
    if against is None:
        return label
    return label + " minus " + ("the mean logit" if isinstance(against, str) and against == MEAN else words(against))


@dataclass(frozen=True, eq=False)
class _Values:
    """What was computed for some rows: terms by component, totals, the model's own logits and the largest of each."""

    terms: dict[Part, Float64[Tensor, "row term"]]
    own: Float64[Tensor, " row"]
    scale: Float64[Tensor, " row"]
    sigma: Float64[Tensor, " row"]
    soft_cap: float
    bound: float


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads logits off what the final norm read."""

    model: HookedModel
    wiring: Wiring
    final: Site | None
    features: Sequence[Features]
    by_layer: bool

    @property
    def where(self) -> str:
        return END if self.final is None else self.final.name

    def uncapped(self, logits: Float[Tensor, "row d_vocab"], seen: Record, cached: bool) -> tuple[Tensor, float]:
        """Logits before their soft cap in float64, and the cap; those of a cache were made before it."""
        if cached:
            return logits.double(), soft_cap(self.model)
        return _uncapped(self.model, logits, seen)

    def read(
        self,
        split: Split,
        logits: Float[Tensor, "row d_vocab"],
        ids: Int[Tensor, "row token"],
        other: Any,
        named: Sequence[Sequence[int]],
        of_features: Sequence[int],
        cached: bool,
    ) -> _Values:
        """Every component's share of the logits of `ids` minus those of `other`, row by row."""
        own, cap = self.uncapped(logits, split.record, cached)
        factor = logit_factor(self.model) if cached else factor_seen(self.model, own[:1], split.record)
        w, lift = mean_columns(self.model, ids)
        value = own.gather(1, ids).mean(1)
        if other is not None:
            of_other = None if isinstance(other, str) else other
            column, bias = mean_columns(self.model, of_other)
            w, lift = w - column, lift - bias
            size = outputs(self.model)
            value = value - (own[:, :size].mean(1) if of_other is None else own.gather(1, of_other).mean(1))
        w, lift = factor * w, factor * lift
        terms, sigma = self._terms(split, w, named, of_features)
        zeros = torch.zeros(len(w), dtype=torch.float64)
        if self.final is not None and self.final.bias is not None:
            added = bias_of(self.final)
            of_bias = torch.stack([row @ added for row in w])
            part = Part(f"{self.final.name} bias", "norm bias", self.final.layer)
            terms[part] = torch.stack([zeros, zeros, of_bias], 1)
        terms[Part("b_U", "unembedding bias")] = torch.stack([zeros, zeros, lift.expand(len(w))], 1)
        scale = own.abs().amax(1).clamp_min(1e-300)
        bound = self.wiring.bound(self.where, split.record.dtype)
        return _Values(_in_layers(terms) if self.by_layer else terms, value, scale, sigma, cap, bound)

    def _terms(
        self,
        split: Split,
        w: Float64[Tensor, "row d_model"],
        named: Sequence[Sequence[int]],
        of_features: Sequence[int],
    ) -> tuple[dict[Part, Float64[Tensor, "row term"]], Float64[Tensor, " row"]]:
        final = self.final
        gain = w if final is None else w * gain_of(final)
        sigma = torch.ones(len(w), 1).double() if final is None else split.sigma(self.where)
        projects = final is not None and final.projects
        readings = [gain / sigma, *([torch.full_like(gain, 1.0 / gain.shape[1])] if projects else [])]
        f = torch.stack(readings, 1)
        values = split.read(self.where, f)
        bound = self.wiring.bound(self.where, split.record.dtype)
        for features, chosen in zip(self.features, named, strict=True):
            values = features.split(values, f, split.record, of_features, chosen, bound)
        taken = gain.sum(1) / sigma[:, 0]
        zeros = torch.zeros(len(w), dtype=torch.float64)
        terms = {
            part: torch.stack([v[:, 0], 0.0 - v[:, 1] * taken if projects else zeros, zeros], 1)
            for part, v in values.items()
        }
        return terms, torch.full_like(zeros, math.nan) if final is None else sigma[:, 0]

    def logits_of_cache(
        self, seen: Record, normalized: Float[Tensor, "row d_model"] | None
    ) -> Float64[Tensor, "row d_vocab"]:
        """Logits from the norm's output that the cache holds: another way than through its input's components."""
        x, final = seen.inputs[self.where].double(), self.final
        y = None if normalized is None else normalized.double().cpu()
        out = x if final is None else final.affine(final.normalize(x) if y is None else y).cpu()
        W_U, b_U = weight_of(self.model, "W_U"), weight_of(self.model, "b_U")
        assert W_U is not None
        W_U = before_projection(self.model, W_U.T).T
        logits = out.to(W_U) @ W_U if W_U.dtype == torch.float64 else (out.float().to(W_U) @ W_U).double()
        return (logits if b_U is None else logits + b_U).double().cpu() * logit_factor(self.model)


def _in_layers(terms: dict[Part, Float64[Tensor, "row term"]]) -> dict[Part, Float64[Tensor, "row term"]]:
    """Heads, neurons and output biases summed into the attention layer or MLP that they belong to."""
    summed: dict[Part, Tensor] = {}
    for part, value in terms.items():
        written = part.name.rsplit(" ", 1)[-1] if part.kind == "bias" else part.kind  # (a feature can be called so)
        attention, mlp = written in ("head", "b_O"), written in ("mlp", "neuron", "b_out")
        whole = Part(f"L{part.layer} attn", "attention", part.layer) if attention else part
        whole = Part(f"L{part.layer} mlp", "mlp", part.layer) if mlp else whole
        summed[whole] = summed[whole] + value if whole in summed else value
    return summed


def _one(values: _Values, label: str) -> LogitAttribution:
    rows = []
    for part, terms in values.terms.items():
        without, taken, bias = each = terms[0].tolist()
        rows.append(
            {**part_columns(part), "contribution": without + taken + bias, **dict(zip(TERMS, each, strict=True))}
        )
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return LogitAttribution(
        table, math.fsum(table["contribution"]), float(values.own[0]), float(values.scale[0]), values.bound, label,
        float(values.sigma[0]), values.soft_cap,
    )  # fmt: skip


def _several(
    results: Sequence[tuple[list[tuple[int, int]], _Values]],
    places: Sequence[Sequence[int]],
    valid: Bool[Tensor, " row"] | None,
    label: str,
) -> LogitAttributions:
    assert valid is not None
    parts = tuple(results[0][1].terms)
    shape = (len(places), max(map(len, places)))
    nan = torch.full((len(parts), len(TERMS), *shape), math.nan, dtype=torch.float64)
    own, scale = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2))
    at = torch.full(shape, -1)
    for known, values in results:
        b, k = (torch.tensor(side) for side in zip(*known, strict=True))
        here = torch.stack([values.terms[part] for part in parts]).permute(0, 2, 1)
        real = valid[[row_number(places, i, j) for i, j in known]]
        nan[:, :, b, k] = torch.where(real, here, math.nan)
        own[b, k], scale[b, k] = torch.where(real, values.own, math.nan), values.scale
        at[b, k] = torch.tensor([places[i][j] for i, j in known])
    values = results[0][1]
    return LogitAttributions(parts, nan, nan.sum((0, 1)), own, scale, values.bound, at, label, values.soft_cap)


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
    if isinstance(neurons, bool | np.bool_):
        return list(range(n_layers(model))) if neurons else []
    try:
        layers = list(neurons)
    except TypeError:
        raise AttributionError(f"neurons must be True, False or a list of layers, got {neurons!r}") from None
    return [place(layer, n_layers(model), "layer", "the model", "layers") for layer in layers]


def _names(model: HookedModel) -> Callable[[int], str] | None:
    """The text of a token by its id; None without a tokenizer."""
    tokenizer: Any = tokenizer_of(model)
    if tokenizer is None or not hasattr(tokenizer, "decode"):
        return None
    return lambda i: str(tokenizer.decode([i]))


def _plain_logits(model: HookedModel, seen: Record) -> Float64[Tensor, " d_vocab"] | None:
    """W_U's logits of the first row, before anything that the model does to them; None where it does nothing known."""
    W_U, b_U = weight_of(model, "W_U"), weight_of(model, "b_U")
    if W_U is None or END not in seen.inputs:
        return None
    W_U = before_projection(model, W_U.T).T
    plain = (seen.inputs[END][0].to(W_U) @ W_U).double().cpu()
    return plain if b_U is None else plain + b_U.double().cpu()


def _uncapped(
    model: HookedModel, logits: Float[Tensor, "row d_vocab"], seen: Record
) -> tuple[Float64[Tensor, "row d_vocab"], float]:
    """Logits before their soft cap, and the cap; as they are, and 0, if the model is seen not to have one."""
    cap, logits = soft_cap(model), logits.double()
    plain = _plain_logits(model, seen) if cap else None
    if plain is None:
        return logits, 0.0
    squashed = cap * (plain / cap).tanh()
    if float((logits[0] - plain).abs().max()) <= float((logits[0] - squashed).abs().max()):
        return logits, 0.0
    return cap * (logits / cap).clamp(-1.0, 1.0).atanh(), cap


def factor_seen(model: HookedModel, logits: Float64[Tensor, "row d_vocab"], seen: Record) -> float:
    """What the model multiplies W_U's logits by: what its config says, where the logits are seen to have it."""
    factor = logit_factor(model)
    plain = _plain_logits(model, seen) if factor != 1.0 else None
    if plain is None:
        return factor
    return factor if float((logits - factor * plain).abs().max()) < float((logits - plain).abs().max()) else 1.0
