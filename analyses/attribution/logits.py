"""Where does a logit come from? Every part's share of it through the final norm, exactly, and through all later layers.

    logit = Σ_p w·gain·P x_p / sigma + w·bias + b_U            at the token's own sigma

(`docs/attribution.md`; in folded models direct logit attribution: Elhage et al. 2021, Wang et al. 2023.) Each part's
share is split into what it would give without projection, w·gain·x_p / sigma, and what projection takes off,
-w·gain·1·mean(x_p) / sigma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsIndex

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ln_probe.analyses.attribution.features import Features, dictionaries, points_of
from ln_probe.analyses.attribution.shared import (
    MEAN,
    TOP,
    AttributionError,
    Prompts,
    Sums,
    SumsAtPositions,
    Tokens,
    ids_of_rows,
    is_index,
    is_mean,
    mean_columns,
    next_ids,
    part_columns,
    places_of,
    token_ids,
    token_names,
)
from ln_probe.hooks.components import (
    END,
    CachedPrompts,
    Part,
    Record,
    Split,
    Wiring,
    find_wiring,
    is_cache,
    record,
)
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
from ln_probe.hooks.norm import Norm, bias_of, gain_of
from ln_probe.hooks.norms import norms_of

COLUMNS = ("part", "kind", "layer", "index", "contribution", "without_projection", "projection", "bias")
TERMS = COLUMNS[5:]
COMPONENTS = ("heads", "layers", "neurons")


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
    _remedy = ". Does something after the final norm change its logits?"

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


@dataclass(frozen=True, eq=False, repr=False)
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
    _remedy = LogitAttribution._remedy

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


def attribute_logits(
    model: object,
    tokens_or_cache: object,
    positions: SupportsIndex | slice | Sequence[SupportsIndex] | None = None,
    target: Tokens | None = None,
    against: Tokens | None = None,
    components: str = "heads",
    features: Sequence[Features] | Features | None = None,
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
            "neurons" (heads, and MLPs neuron by neuron; not from a cache).
        features: dictionaries whose features replace the components that they reconstruct.

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
    hooked = check_model(model)
    if reason := missing_head(hooked):
        raise AttributionError(f"logits of this model cannot be attributed: {reason}")
    if components not in COMPONENTS:
        raise AttributionError(f"components must be one of {', '.join(COMPONENTS)}, got {components!r}")
    wanted = dictionaries(features)
    with evaluating(hooked):
        sites = norms_of(hooked)
        wiring = find_wiring(hooked, sites)
        final = next((s for s in reversed(sites) if "unembed" in s.reads.split("+")), None)
        where = END if final is None else final.name
        wiring.at(where)  # raises before the prompt runs
        layers = range(n_layers(hooked)) if components == "neurons" else ()
        if layers and is_cache(tokens_or_cache):
            raise AttributionError("neurons are not read from a cache: pass tokens")
        prompts = Prompts(hooked, tokens_or_cache)
        points = points_of(hooked, wanted, prompts.lengths)
        places = [places_of(positions, n) for n in prompts.lengths]
        single = len(places) == 1 and is_index(positions)
        asked = [(i, k, p) for i, at in enumerate(places) for k, p in enumerate(at)]  # prompt, column, position

        def ids_of(given: Any, what: str) -> Int[Tensor, "row token"]:
            return torch.tensor([token_ids(hooked, given)]) if single else ids_of_rows(hooked, given, places, what)

        ids, valid = None, torch.ones(len(asked), dtype=torch.bool)
        if target is not None:
            ids = ids_of(target, "target")
        elif not single:
            ids, valid = next_ids(hooked, prompts.rows, places)
        others: Tensor | str | None = MEAN if is_mean(against) else None
        if against is not None and others is None:
            others = ids_of(against, "against")
        of_features = [i * max(prompts.lengths) + p for i, _, p in asked]
        named = [one.chosen(of_features) for one in wanted]
        reader = _Reader(hooked, wiring, final, where, wanted, named, prompts.cache)
        order: list[int] = []
        found: list[_Values] = []
        for members in prompts.of_equal_length():
            start = {number: k * prompts.lengths[number] for k, number in enumerate(members)}
            rows = [r for r, (i, *_) in enumerate(asked) if i in start]
            at = [start[i] + p for i, _, p in (asked[r] for r in rows)]
            if prompts.cache is None:
                seen = record(hooked, prompts.tokens(members), at, sites, neurons=layers, points=points)
            else:
                seen = prompts.cache.record(at, wiring, where, points)
                seen = replace(seen, logits=reader.logits_of_cache(seen, at))
            chosen, other = None if ids is None else ids[rows], others[rows] if isinstance(others, Tensor) else others
            order += rows
            found.append(reader.read(seen, chosen, other, [of_features[r] for r in rows]))
    merge = _in_layers if components == "layers" else dict
    terms = [merge(values.terms) for values in found]
    if single:
        return _one(terms[0], found[0], _label(hooked, found[0].ids[0].tolist(), against, single=True))
    parts = tuple(terms[0])
    every = torch.cat([torch.stack([values[part] for part in parts]) for values in terms], 1).permute(0, 2, 1)
    own, scale = torch.cat([values.own for values in found]), torch.cat([values.scale for values in found])
    shape, (b, k, p), real = (len(places), max(map(len, places))), torch.tensor(asked)[order].T, valid[order]

    def spread(values: Tensor, fill: float) -> Tensor:
        """[… row] as [… batch pos]."""
        padded = torch.full((*values.shape[:-1], *shape), fill, dtype=values.dtype)
        padded[..., b, k] = values
        return padded

    every = spread(torch.where(real, every, math.nan), math.nan)
    return LogitAttributions(
        parts, every, every.sum((0, 1)), spread(torch.where(real, own, math.nan), math.nan), spread(scale, math.nan),
        found[0].bound, spread(p, -1), _label(hooked, target, against), found[0].soft_cap,
    )  # fmt: skip


def _label(model: HookedModel, target: Any, against: Any, *, single: bool = False) -> str:
    """What is attributed, as text; `single`: several tokens are averaged, not one for each position."""

    def words(given: Any) -> str:
        one = single or isinstance(given, str) or is_index(given)
        return token_names(model, token_ids(model, given)) if one else "the tokens given"

    label = "logit of " + ("the next token" if target is None else words(target))
    if against is None:
        return label
    return f"{label} minus {'the mean logit' if is_mean(against) else words(against)}"


@dataclass(frozen=True, eq=False)
class _Values:
    """What was computed for some rows: terms by component, the model's own logits, the largest of each, sigma; and the
    tokens whose logits these are."""

    ids: Int[Tensor, "row token"]
    terms: dict[Part, Float64[Tensor, "row term"]]
    own: Float64[Tensor, " row"]
    scale: Float64[Tensor, " row"]
    sigma: Float64[Tensor, " row"]
    soft_cap: float
    bound: float


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads logits off what the final norm read, at the place `where`; `named`: features that get a row each."""

    model: HookedModel
    wiring: Wiring
    final: Norm | None
    where: str
    features: Sequence[Features]
    named: Sequence[Sequence[int]]
    cache: CachedPrompts | None

    def read(
        self,
        seen: Record,
        ids: Int[Tensor, "row token"] | None,
        other: Int[Tensor, "row other"] | str | None,
        of_features: Sequence[int],
    ) -> _Values:
        """Every component's share of the logits of `ids` minus those of `other`, row by row.

        Args:
            seen: of these rows, with their logits.
            ids: None: the most likely token of the only row.
            other: token ids, "mean" or None.
            of_features: the same rows in the features' activations.
        """
        assert seen.logits is not None
        split, size = Split(self.wiring, seen), outputs(self.model)
        split.check(self.where)
        own, cap, factor = seen.logits.double(), soft_cap(self.model), logit_factor(self.model)
        if self.cache is None:  # of a cache they were made here, before a cap and with the factor
            own, cap = _uncapped(self.model, own, seen)
            factor = factor_seen(self.model, own[:1], seen)
        if ids is None:
            ids = own[:, :size].argmax(1, keepdim=True)
        w, lift = mean_columns(self.model, ids)
        value = own.gather(1, ids).mean(1)
        if other is not None:
            of_other = other if isinstance(other, Tensor) else None
            column, bias = mean_columns(self.model, of_other)
            w, lift = w - column, lift - bias
            value = value - (own[:, :size] if of_other is None else own.gather(1, of_other)).mean(1)
        w, lift = factor * w, factor * lift
        bound = self.wiring.bound
        terms, sigma = self._terms(split, w, of_features, bound)
        zeros = torch.zeros(len(w), dtype=torch.float64)
        if self.final is not None and self.final.bias is not None:
            added = bias_of(self.final)
            part = Part(f"{self.final.name} bias", "norm bias", self.final.layer)
            terms[part] = torch.stack([zeros, zeros, torch.stack([row @ added for row in w])], 1)
        terms[Part("b_U", "unembedding bias")] = torch.stack([zeros, zeros, lift], 1)
        return _Values(ids, terms, value, own.abs().amax(1).clamp_min(1e-300), sigma, cap, bound)

    def _terms(
        self,
        split: Split,
        w: Float64[Tensor, "row d_model"],
        of_features: Sequence[int],
        bound: float,
    ) -> tuple[dict[Part, Float64[Tensor, "row term"]], Float64[Tensor, " row"]]:
        """What each component of the final norm's input gives along `w`, and the norm's sigma (NaN without a norm)."""
        final = self.final
        gain = w if final is None else w * gain_of(final)
        sigma = torch.ones(len(w), 1).double() if final is None else split.sigma(self.where)
        projects = final is not None and final.projects
        readings = [gain / sigma, *([torch.full_like(gain, 1.0 / gain.shape[1])] if projects else [])]
        f = torch.stack(readings, 1)
        values = split.read(self.where, f)
        for features, chosen in zip(self.features, self.named, strict=True):
            values = features.split(values, f, split.record, of_features, chosen, bound)
        taken = gain.sum(1) / sigma[:, 0]
        zeros = torch.zeros(len(w), dtype=torch.float64)
        terms = {
            part: torch.stack([v[:, 0], 0.0 - v[:, 1] * taken if projects else zeros, zeros], 1)
            for part, v in values.items()
        }
        return terms, torch.full_like(zeros, math.nan) if final is None else sigma[:, 0]

    def logits_of_cache(self, seen: Record, rows: Sequence[int]) -> Float64[Tensor, "row d_vocab"]:
        """Logits from the norm's output that the cache holds: another way than through its input's components."""
        out, final = seen.inputs[self.where].double(), self.final
        if final is not None and self.cache is not None:
            out = final.affine(self.cache.rows(f"{final.name}.hook_normalized")[rows].double().cpu())
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
        whole = part
        if written in ("head", "b_O"):
            whole = Part(f"L{part.layer} attn", "attention", part.layer)
        elif written in ("mlp", "neuron", "b_out"):
            whole = Part(f"L{part.layer} mlp", "mlp", part.layer)
        summed[whole] = summed[whole] + value if whole in summed else value
    return summed


def _one(terms: dict[Part, Float64[Tensor, "row term"]], values: _Values, label: str) -> LogitAttribution:
    """The attribution of the first row."""
    rows = []
    for part, each_row in terms.items():
        without, taken, bias = each = each_row[0].tolist()
        rows.append((*part_columns(part).values(), without + taken + bias, *each))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return LogitAttribution(
        table, math.fsum(table["contribution"]), float(values.own[0]), float(values.scale[0]), values.bound, label,
        float(values.sigma[0]), values.soft_cap,
    )  # fmt: skip


def soft_cap(model: HookedModel) -> float:
    """What the model squashes its logits to, cap·tanh(logit / cap); 0 if it does not."""
    cap = getattr(model.cfg, "output_logits_soft_cap", None)
    return float(cap) if isinstance(cap, int | float) and cap > 0 else 0.0


def _plain_logits(model: HookedModel, seen: Record) -> Float64[Tensor, " d_vocab"] | None:
    """W_U's logits of the first row, before anything that the model does to them; None where it does nothing known."""
    W_U, b_U = weight_of(model, "W_U"), weight_of(model, "b_U")
    if W_U is None or END not in seen.inputs:
        return None
    W_U = before_projection(model, W_U.T).T
    plain = (seen.inputs[END][0].to(W_U) @ W_U).double().cpu()
    return plain if b_U is None else plain + b_U.double().cpu()


def _uncapped(
    model: HookedModel, logits: Float64[Tensor, "row d_vocab"], seen: Record
) -> tuple[Float64[Tensor, "row d_vocab"], float]:
    """Logits before their soft cap, and the cap; as they are, and 0, if the model is seen not to have one."""
    cap = soft_cap(model)
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
