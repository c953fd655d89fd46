"""Where does a logit come from? Every component's share of it through the final norm, exactly; and the logit lens.

    logit = Σ_p w·gain·P x_p / sigma + w·bias + b_U            at the token's own sigma

(`docs/attribution.md`; in folded models direct logit attribution: Elhage et al. 2021, Wang et al. 2023.) Each
component's share is split into what it would give without projection, w·gain·x_p / sigma, and what projection takes
off, -w·gain·1·mean(x_p) / sigma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from itertools import product
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from ln_probe.analyses.attribution.features import Features, dictionaries, points_of
from ln_probe.analyses.attribution.shared import (
    MEAN,
    TOP,
    AttributionError,
    Positions,
    Prompts,
    Sums,
    Tokens,
    head_of,
    ids_of_rows,
    is_index,
    label_of,
    mean_columns,
    next_ids,
    one_of,
    token_name,
)
from ln_probe.hooks.components import (
    END,
    CachedPrompts,
    Part,
    Record,
    Split,
    Wiring,
    closes_below,
    find_wiring,
    is_cache,
    record,
)
from ln_probe.hooks.model import (
    Hook,
    HookedModel,
    at_least_float32,
    before_projection,
    blocks,
    check_model,
    child_of,
    edits_on,
    evaluating,
    flat,
    hooks_on,
    logit_factor,
    missing_head,
    n_layers,
    outputs,
    run,
    tensors_in,
    unembedding,
    whole_number,
)
from ln_probe.hooks.norm import INTACT, Norm, bias_of, gain_of
from ln_probe.hooks.norm_edits import NormEdit
from ln_probe.hooks.norms import norms_of

TERMS = ("without_projection", "projection", "bias")
COMPONENTS = ("heads", "layers", "neurons")
SCALES = ("own", "final")  # of the logit lens
SHOWN = 24  # positions in the picture of a lens


@dataclass(frozen=True, eq=False, repr=False)
class LogitAttribution(Sums):
    """Logits (or differences of logits), each as a sum over components.

    Attributes:
        components: what the rows of `terms` are.
        terms: `without_projection`, `projection` (the effect of projection) and `bias` of every component; NaN where a
            prompt has no such position or no token follows.
        total: what they add up to, b_U included; own: the model's logit from its forward pass (from a cache: from the
            norm's output that it holds); scale: the largest |logit| at that position, which errors are relative to;
            sigma: what the final norm divided by, NaN if there is none. Floats for one index of one prompt, else
            [batch pos].
        bound: relative error that rounding explains in the model's format: 1e-5 in float32, 1e-11 in float64, four
            units of relative precision in half precision (0.03 in bfloat16, 0.004 in float16).
        at: the position of every entry, counted from the beginning of its prompt; -1 where there is none.
        label: what was asked for, as text.
        soft_cap: cap of the model's logits: sums are of the logits before it; 0 if there is none.

    Example:
        >>> one = ln_probe.attribute_logits(model, tokens[0], positions=-1, target=7).check()
        >>> one.top(3)
        >>> abs(one.total - one.own) <= one.bound
        True
        >>> every = ln_probe.attribute_logits(model, tokens, components="layers").check()
        >>> every.values.shape, every.top(3)
    """

    components: tuple[Part, ...]
    terms: Float64[Tensor, "component term batch pos"]
    total: Any
    own: Any
    scale: Any
    sigma: Any
    bound: float
    at: Int[Tensor, "batch pos"]
    label: str
    soft_cap: float = 0.0
    _remedy = ". Does something after the final norm change its logits?"

    @property
    def values(self) -> Float64[Tensor, "component batch pos"]:
        """The contribution of every component."""
        return self.terms.sum(1)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per component, prompt and position: `batch`, `position` (unless there is one), `part`, `kind`, `layer`,
        `index` (head or neuron; -1), `contribution`, and the three terms that it is the sum of."""
        present = torch.nonzero(self.values.isfinite().all(0))
        terms = self.terms[:, :, present[:, 0], present[:, 1]].permute(2, 0, 1).reshape(-1, len(TERMS)).numpy()
        rows = self._components() if isinstance(self.total, float) else self._rows(position=self.at)
        return rows.assign(contribution=terms.sum(1), **dict(zip(TERMS, terms.T, strict=True)))

    def top(self, k: int = TOP) -> pd.DataFrame:
        """Return the k components with the largest contributions, either way; of several positions, by their mean."""
        if not isinstance(self.total, float):
            return super().top(k)
        k = whole_number(k, "k", 1, AttributionError)
        return self.table.sort_values("contribution", key=abs, ascending=False, kind="stable").head(k)

    def _place(self, at: int) -> str:
        prompt_number, position = divmod(at, self.at.shape[1])
        return f" at position {int(self.at[prompt_number, position])} of prompt {prompt_number}"


def attribute_logits(
    model: object,
    tokens_or_cache: object,
    positions: Positions | None = None,
    target: Tokens | None = None,
    against: Tokens | None = None,
    components: str = "heads",
    features: Sequence[Features] | Features | None = None,
    *,
    pos: Positions | None = None,
    pos_slice: Positions | None = None,
    answer_tokens: Tokens | None = None,
    incorrect_tokens: Tokens | None = None,
) -> LogitAttribution:
    """Write logits as exact sums over components of the residual stream and terms of the final norm.

    Args:
        model: HookedTransformer, TransformerBridge or lab model; raw, folded or centred; with or without a final norm.
        tokens_or_cache: prompts (text, ids [pos] or [batch pos], lists of unequal length), or an `ActivationCache` of
            this model.
        positions: positions whose logits are attributed: None (all), an index, a slice or a list; negative from the
            end of each prompt.
        target: the token whose logit is attributed: an id or text, the same at every position; ids [batch pos], one for
            each position (for one prompt also [pos], for one position of several [batch]); None: the next token of the
            prompt, NaN at the last position. For one position of one prompt: a token, or several, whose logits are
            averaged; None: the model's most likely token.
        against: the logit to subtract: given like `target`, "mean" (the mean logit of the vocabulary), or None.
        components: "heads" (heads, MLPs, embeddings, biases), "layers" (attention layers and MLPs with their biases) or
            "neurons" (heads, and MLPs neuron by neuron; not from a cache).
        features: dictionaries whose features replace the components that they reconstruct.
        pos, pos_slice, answer_tokens, incorrect_tokens: TransformerLens's names of `positions`, `target` and `against`.

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
    positions = one_of(positions=positions, pos=pos, pos_slice=pos_slice)
    target = one_of(target=target, answer_tokens=answer_tokens)
    against = one_of(against=against, incorrect_tokens=incorrect_tokens)
    hooked = _checked(model)
    if components not in COMPONENTS:
        raise AttributionError(f"components must be one of {', '.join(COMPONENTS)}, got {components!r}")
    wanted = dictionaries(features)
    with evaluating(hooked):
        sites = norms_of(hooked)
        wiring, final = find_wiring(hooked, sites), _final(sites)
        where = END if final is None else final.name
        wiring.at(where)  # raises before the prompt runs
        layers = range(n_layers(hooked)) if components == "neurons" else ()
        if layers and is_cache(tokens_or_cache):
            raise AttributionError("neurons are not read from a cache: pass tokens")
        prompts = Prompts(hooked, tokens_or_cache)
        points, places = points_of(hooked, wanted, prompts.lengths), prompts.places(positions)
        single = len(places) == 1 and is_index(positions)
        ids, valid = None, torch.ones(sum(map(len, places)), dtype=torch.bool)
        if target is not None:
            ids = ids_of_rows(hooked, target, places, "target", single=single)
        elif not single:
            ids, valid = next_ids(hooked, prompts.rows, places)
        others = _others(hooked, against, places, single=single)
        asked = [(i, p) for i, at in enumerate(places) for p in at]
        of_features = [i * max(prompts.lengths) + p for i, p in asked]
        named = [one.chosen(of_features) for one in wanted]
        reader = _Reader(hooked, wiring, final, where, wanted, named, prompts.cache)
        order, readings = list[int](), list[_Reading]()
        for members in prompts.of_equal_length():
            start = {number: k * prompts.lengths[number] for k, number in enumerate(members)}
            rows = [r for r, (i, _) in enumerate(asked) if i in start]
            at = [start[i] + p for i, p in (asked[r] for r in rows)]
            if prompts.cache is None:
                seen = record(hooked, prompts.tokens(members), at, sites, neurons=layers, points=points)
            else:
                seen = prompts.cache.record(at, wiring, where, points)
                seen = replace(seen, logits=reader.logits_of_cache(seen, at))
            chosen, other = None if ids is None else ids[rows], others[rows] if isinstance(others, Tensor) else others
            order += rows
            readings.append(reader.read(seen, chosen, other, [of_features[r] for r in rows]))
    terms = [_in_layers(one.terms) if components == "layers" else one.terms for one in readings]
    parts, inverse = tuple(terms[0]), torch.tensor(order).argsort()  # rows in the order of the prompts
    every = torch.cat([torch.stack([values[part] for part in parts]) for values in terms], 1)[:, inverse]
    every = every.permute(0, 2, 1).masked_fill(~valid, math.nan)
    numbers = {n: torch.cat([getattr(one, n) for one in readings])[inverse] for n in ("own", "scale", "sigma")}
    numbers = {"total": every.sum((0, 1)), **numbers, "own": numbers["own"].masked_fill(~valid, math.nan)}
    shaped = {name: float(v[0]) if single else _by_prompt(v, places) for name, v in numbers.items()}
    label = label_of(hooked, readings[0].ids if single else None if target is None else ids, others)
    positions_of_rows, one = _by_prompt(torch.tensor([p for _, p in asked]), places, -1), readings[0]
    return LogitAttribution(
        parts,
        _by_prompt(every, places),
        **shaped,
        bound=one.bound,
        at=positions_of_rows,
        label=label,
        soft_cap=one.soft_cap,
    )


def _checked(model: object) -> HookedModel:
    """Return a model whose logits mean something."""
    hooked = check_model(model)
    if reason := missing_head(hooked):
        raise AttributionError(f"logits of this model cannot be attributed: {reason}")
    return hooked


def _final(norms: Sequence[Norm]) -> Norm | None:
    """Return the norm that the unembedding reads."""
    return next((norm for norm in reversed(norms) if "unembed" in norm.reads.split("+")), None)


def _others(
    model: HookedModel, against: Any, places: Sequence[Sequence[int]], *, single: bool
) -> Int[Tensor, "row token"] | str | None:
    """Return the tokens whose logits are subtracted at every position, or the word for the mean."""
    if against is None or (isinstance(against, str) and against == MEAN):
        return against
    return ids_of_rows(model, against, places, "against", single=single)


def _by_prompt(values: Tensor, places: Sequence[Sequence[int]], fill: float = math.nan) -> Tensor:
    """Return [… row] as [… batch pos], filled up behind a prompt's last position."""
    at = torch.tensor([(i, k) for i, some in enumerate(places) for k in range(len(some))]).T
    padded = torch.full((*values.shape[:-1], len(places), max(map(len, places))), fill, dtype=values.dtype)
    padded[..., at[0], at[1]] = values
    return padded


@dataclass(frozen=True, eq=False)
class _Reading:
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
    ) -> _Reading:
        """Return every component's share of the logits of `ids` minus those of `other`, row by row.

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
        if self.cache is None and END in seen.inputs:  # of a cache they were made here, before a cap
            cap, factor = _form_of_head(self.model, own[:1], seen.inputs[END][:1])
            own = cap * (own / cap).clamp(-1.0, 1.0).atanh() if cap else own
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
        return _Reading(ids, terms, value, own.abs().amax(1).clamp_min(1e-300), sigma, cap, bound)

    def _terms(
        self,
        split: Split,
        w: Float64[Tensor, "row d_model"],
        of_features: Sequence[int],
        bound: float,
    ) -> tuple[dict[Part, Float64[Tensor, "row term"]], Float64[Tensor, " row"]]:
        """Return what each component gives along `w`, and the norm's sigma (NaN without a norm)."""
        final = self.final
        gain = w if final is None else w * gain_of(final)
        sigma = torch.ones(len(w), 1).double() if final is None else split.sigma(self.where)
        projects = final is not None and final.projects
        readings = [gain / sigma, *([torch.full_like(gain, 1.0 / gain.shape[1])] if projects else [])]
        f = torch.stack(readings, 1)
        values = split.read(self.where, f)
        for features, chosen in zip(self.features, self.named, strict=True):
            values = features.split(values, f, split.record, of_features, chosen, bound)
        of_mean = gain.sum(1) / sigma[:, 0]
        zeros = torch.zeros(len(w), dtype=torch.float64)
        terms = {
            part: torch.stack([v[:, 0], 0.0 - v[:, 1] * of_mean if projects else zeros, zeros], 1)
            for part, v in values.items()
        }
        return terms, torch.full_like(zeros, math.nan) if final is None else sigma[:, 0]

    def logits_of_cache(self, seen: Record, rows: Sequence[int]) -> Float64[Tensor, "row d_vocab"]:
        """Return logits from the norm's output that the cache holds: another way than through its components."""
        out, final = seen.inputs[self.where].double(), self.final
        if final is not None and self.cache is not None:
            out = final.affine(self.cache.rows(f"{final.name}.hook_normalized")[rows].double().cpu()).cpu()
        return _projected(self.model, out).double().cpu() * logit_factor(self.model)


def _in_layers(terms: dict[Part, Float64[Tensor, "row term"]]) -> dict[Part, Float64[Tensor, "row term"]]:
    """Return heads, neurons and output biases summed into the attention layer or MLP that they belong to."""
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


def soft_cap(model: HookedModel) -> float:
    """Return what the model squashes its logits to, cap·tanh(logit / cap); 0 if it does not."""
    cap = getattr(model.cfg, "output_logits_soft_cap", None)
    return float(cap) if isinstance(cap, int | float) and cap > 0 else 0.0


def _projected(model: HookedModel, read: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_vocab"]:
    """Return W_U's logits of what the unembedding reads, before anything that the model does to them."""
    W_U, b_U = head_of(model)
    W_U = at_least_float32(before_projection(model, W_U.T).T)
    logits = read.to(W_U) @ W_U
    return logits if b_U is None else logits + b_U


def _form_of_head(
    model: HookedModel, logits: Float64[Tensor, "row d_vocab"], read: Float[Tensor, "row d_model"]
) -> tuple[float, float]:
    """Return the cap of a model's logits (0: none) and their factor: of those that its config says, what is seen."""
    cap, factor = soft_cap(model), logit_factor(model)
    if not cap and factor == 1.0:
        return cap, factor
    plain = _projected(model, read).double().to(logits)

    def distance(form: tuple[float, float]) -> float:
        expected = form[1] * plain
        expected = form[0] * (expected / form[0]).tanh() if form[0] else expected
        return float((logits[:, : expected.shape[1]] - expected).abs().max())

    return min(product((0.0, cap), (factor, 1.0)), key=distance)


# ---------------------------------------------------------------------------------------- the logit lens


@dataclass(frozen=True, eq=False)
class LogitLens:
    """Logits of the residual stream before each layer, read through the final norm.

    Attributes:
        table: a row per `layer` (the last one is the end of the stream), prompt (`batch`) and `position`: the most
            likely token (`top`, its id, and `token`, its text), its `probability`, the distribution's `entropy` in
            nats, and `logit`, of the target.
        values: logits; NaN where a prompt has no such position.
        at: the position of every entry; -1 where there is none.
        error: of the last layer's logits from the model's own, relative to the largest (NaN of a cache).
        bound: what rounding explains of it.
        label: what `logit` is, as text.

    Example:
        >>> lens = ln_probe.logit_lens(model, "The ships came home.", positions=-1).check()
        >>> lens.table[["layer", "token", "probability"]]
    """

    table: pd.DataFrame
    values: Float[Tensor, "layer batch pos d_vocab"]
    at: Int[Tensor, "batch pos"]
    error: float
    bound: float
    label: str

    def check(self) -> LogitLens:
        """Return this lens if its last layer is the model's own output; an AttributionError if not."""
        if self.error > self.bound:
            raise AttributionError(
                f"the last layer's logits are {self.error:.1e} from the model's own (rounding explains {self.bound:.0e}"
                "): something comes after the final norm"
            )
        return self

    def __repr__(self) -> str:
        layers, batch, positions, _ = self.values.shape
        return f"LogitLens({layers} layers, {batch} x {positions} positions; {self.label})"

    def _repr_html_(self) -> str:
        """Return the most likely tokens of the first prompt's last positions, shaded by their probability."""
        first = self.table[self.table["batch"] == 0]
        shown = first["position"].drop_duplicates().tolist()[-SHOWN:]
        head = "".join(f"<th>{position}</th>" for position in shown)
        rows = [f"<tr><th>layer</th>{head}</tr>"]
        for layer in sorted(set(first["layer"]), reverse=True):
            cells = first[(first["layer"] == layer) & first["position"].isin(shown)].sort_values("position")
            tokens = "".join(
                f'<td style="background:rgba(0,114,178,{cell["probability"] / 2:.3f})" '
                f'title="{cell["probability"]:.1%}">{escape(cell["token"])}</td>'
                for cell in cells.to_dict("records")
            )
            rows.append(f"<tr><th>{layer}</th>{tokens}</tr>")
        return f"<p>{escape(repr(self))}</p><table>{''.join(rows)}</table>"


def logit_lens(
    model: object,
    tokens_or_cache: object,
    positions: Positions | None = None,
    target: Tokens | None = None,
    against: Tokens | None = None,
    scale: str = "own",
    *,
    pos: Positions | None = None,
    pos_slice: Positions | None = None,
    answer_tokens: Tokens | None = None,
    incorrect_tokens: Tokens | None = None,
) -> LogitLens:
    """Read logits off the residual stream before each layer, through the final norm as it is, raw or folded.

    Args:
        model, tokens_or_cache, positions, target, against: as for `attribute_logits`; `target` None: the token that is
            the most likely one at the end.
        scale: what the final norm divides by: "own", the sigma of each layer's stream, or "final", that of the last
            one, at the same token. Inside `without`, the norm is the edited one.
        pos, pos_slice, answer_tokens, incorrect_tokens: TransformerLens's names of `positions`, `target` and `against`.

    Raises:
        TypeError, AttributionError, SplitError: as `attribute_logits`; an unknown scale.

    Example:
        >>> lens = ln_probe.logit_lens(model, tokens, positions=-1, scale="final").check()
        >>> lens.values.shape  # layer, batch, position, token
    """
    positions = one_of(positions=positions, pos=pos, pos_slice=pos_slice)
    target = one_of(target=target, answer_tokens=answer_tokens)
    against = one_of(against=against, incorrect_tokens=incorrect_tokens)
    hooked = _checked(model)
    if scale not in SCALES:
        raise AttributionError(f"scale must be {' or '.join(map(repr, SCALES))}, got {scale!r}")
    with evaluating(hooked):
        norms = norms_of(hooked)
        prompts, last = Prompts(hooked, tokens_or_cache), _final(norms)
        find_wiring(hooked, norms).at(END if last is None else last.name)  # raises where it reads no stream
        # The stream between post-norm blocks is normalized: their last norm is none to read it through.
        final = None if last is None or last.name.startswith("blocks.") else last
        places = prompts.places(positions)
        single = len(places) == 1 and is_index(positions)
        logits, distances = dict[int, Tensor](), [math.nan]
        for members in prompts.of_equal_length():
            length = prompts.lengths[members[0]]
            stream, own = _streams(hooked, final, last, prompts, members)
            for k, number in enumerate(members):
                at = torch.tensor(places[number])
                rows, of_prompt = k * length + at, None if own is None else own[k, at].double()
                x = torch.stack([layer[rows] for layer in stream])
                read = _edited(final, x, at.to(x.device), scale)
                cap, factor = soft_cap(hooked), logit_factor(hooked)
                if of_prompt is not None:
                    cap, factor = _form_of_head(hooked, of_prompt, read[-1])
                every = factor * _projected(hooked, read)
                logits[number] = (cap * (every / cap).tanh() if cap else every).cpu()
                if of_prompt is not None:
                    off = logits[number][-1].double() - of_prompt[:, : every.shape[-1]].cpu()
                    distances.append(float(off.abs().max() / of_prompt.abs().max().clamp_min(1e-300)))
    each = torch.cat([logits[number] for number in range(len(places))], 1)  # [layer row d_vocab]
    given = each[-1].argmax(-1, keepdim=True) if target is None else None
    ids = ids_of_rows(hooked, target, places, "target", single=single) if given is None else given
    others = _others(hooked, against, places, single=single)
    label = label_of(hooked, ids, others) if given is None or single else "logit of the last layer's most likely token"
    asked = [(number, p) for number, some in enumerate(places) for p in some]
    values = _by_prompt(each.movedim(1, -1), places).movedim(1, -1)
    at = _by_prompt(torch.tensor([p for _, p in asked]), places, -1)
    bound = max(closes_below(stream[-1].dtype), closes_below(torch.float32))
    error = max(distances[1:], default=math.nan)
    return LogitLens(_lens_table(hooked, each, asked, ids, others), values, at, error, bound, label)


def _streams(
    model: HookedModel, final: Norm | None, last: Norm | None, prompts: Prompts, members: Sequence[int]
) -> tuple[list[Float[Tensor, "row d_model"]], Float[Tensor, "prompt pos d_vocab"] | None]:
    """Return the stream before each layer and at its end, of prompts of equal length, and the model's own logits.

    Args:
        final: the norm that streams are read through.
        last: the norm that the unembedding reads; another one than `final` where that is a post-norm block's.
    """
    count = n_layers(model)
    if prompts.cache is not None:
        names = [[f"blocks.{i}.hook_resid_pre", f"blocks.{i}.hook_in"] for i in range(count)]
        names.append([f"blocks.{count - 1}.hook_resid_post", f"blocks.{count - 1}.hook_out"])
        if last is not final and last is not None:
            names[-1] = [f"{last.name}.hook_normalized"]
        rows = [at_least_float32(prompts.cache.rows(*some)) for some in names]
        return rows if last is final or last is None else [*rows[:-1], last.affine(rows[-1])], None
    seen: dict[int, Tensor] = {}
    shape = len(members), prompts.lengths[members[0]]

    def note(layer: int, _m: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        seen.setdefault(layer, flat(output[0] if output else tensors_in(args, kwargs)[0], shape[1], shape[0]))

    after, before = list[Hook](), list[Hook]()
    for layer, block in enumerate(blocks(model)):
        point = child_of(block, "hook_resid_pre")
        (before if point is None else after).append((point or block, partial(note, layer)))
    if (reader := unembedding(model) if final is None else final.module) is not None:
        before.append((reader, partial(note, count)))
    with hooks_on(after, before):
        own = run(model, prompts.tokens(members), return_type="logits")
    return [at_least_float32(seen[layer]) for layer in range(count + 1)], own


def _edited(
    final: Norm | None, x: Float[Tensor, "layer pos d_model"], at: Int[Tensor, " pos"], scale: str
) -> Float[Tensor, "layer pos d_model"]:
    """Return the final norm's output on the stream at these positions, as the norm is now: intact or edited."""
    if final is None:
        return x
    edit = next((edit for edit in edits_on(final.module) if isinstance(edit, NormEdit)), None)
    variant, constant = INTACT.name, None
    if edit is not None:
        variant = edit.variants[0]
        if edit.constants is not None:
            first, rest = edit.constants[0].detach().to(x)
            constant = torch.where(at == 0, first, rest)[:, None]
    return final.affine(final.without(variant, x, constant, final.sigma(x[-1:]) if scale == "final" else None))


def _lens_table(
    model: HookedModel,
    logits: Float[Tensor, "layer row d_vocab"],
    asked: Sequence[tuple[int, int]],
    ids: Int[Tensor, "row token"],
    others: Int[Tensor, "row token"] | str | None,
) -> pd.DataFrame:
    """Return the columns of `LogitLens.table`."""
    logs = logits.log_softmax(-1)
    best, top = logs.max(-1)
    value = logits.gather(-1, ids.expand(len(logits), -1, -1)).mean(-1)
    if others is not None:
        other = logits if isinstance(others, str) else logits.gather(-1, others.expand(len(logits), -1, -1))
        value = value - other.mean(-1)
    names = {token: token_name(model, token) for token in top.unique().tolist()}
    ends = pd.DataFrame([(layer, *one) for layer in range(len(logits)) for one in asked])
    columns = {"top": top, "probability": best.exp(), "entropy": -(logs.exp() * logs).sum(-1), "logit": value}
    table = ends.set_axis(["layer", "batch", "position"], axis=1)
    table = table.assign(**{name: column.flatten().numpy() for name, column in columns.items()})
    table.insert(4, "token", table["top"].map(names))
    return table
