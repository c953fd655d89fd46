"""Where does a logit come from? Every component's share of it through the final norm, exactly; and the logit lens.

    logit = Σ_p w·gain·P x_p / sigma + w·bias + b_U            at the token's own sigma

See `docs/attribution.md`. In folded models this is direct logit attribution (Elhage et al. 2021, Wang et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import product
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from ln_probe.analyses.attribution.features import Features, dictionaries
from ln_probe.analyses.attribution.shared import (
    AttributionError,
    Ids,
    Positions,
    Prompts,
    Sums,
    Tokens,
    contrast_of,
    one_of,
    token_name,
)
from ln_probe.hooks.components import CLOSES, END, Part, Record, Split, Wiring, find_wiring
from ln_probe.hooks.model import (
    HookedModel,
    at_least_float32,
    before_projection,
    check_model,
    edits_on,
    evaluating,
    facts_of,
    logit_factor,
    outputs,
    weight_of,
    with_float64,
)
from ln_probe.hooks.norm import INTACT, Norm, bias_of, gain_of
from ln_probe.hooks.norm_edits import NormEdit
from ln_probe.hooks.norms import structure_of

TERMS = ("without_projection", "projection", "bias")
COMPONENTS = ("heads", "layers")
Terms = dict[Part, Float64[Tensor, "row term"]]
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
        bound: relative error that rounding explains in the model's format: 1e-5 in float32, 0.03 in bfloat16.
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
    soft_cap: float

    @property
    def values(self) -> Float64[Tensor, "component batch pos"]:
        """The contribution of every component."""
        return self.terms.sum(1)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per component, prompt and position: `batch`, `position` (unless there is one), `part`, `kind`, `layer`,
        `index` (of a head; -1), `contribution`, and the three terms that it is the sum of."""
        present = self.values.isfinite().all(0)
        terms = self.terms.movedim(1, -1)[:, present].transpose(0, 1).reshape(-1, len(TERMS)).numpy()
        rows = self._components() if isinstance(self.total, float) else self._rows(position=self.at)
        return rows.assign(contribution=terms.sum(1), **dict(zip(TERMS, terms.T, strict=True)))

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
        target: the token whose logit is attributed: an id or text; ids [batch pos], one for each position (also [pos]
            or [batch]); None: the next token of the prompt, NaN at the last position. For one position of one prompt:
            a token, or several, whose logits are averaged; None: the model's most likely token.
        against: the logit to subtract: given like `target`, "mean" (the mean logit of the vocabulary), or None.
        components: "heads" (heads, MLPs, embeddings, biases) or "layers" (attention layers and MLPs with their biases).
        features: dictionaries whose features replace the components that they reconstruct.
        pos, pos_slice, answer_tokens, incorrect_tokens: TransformerLens's names of `positions`, `target` and `against`.
            `answer_tokens` [batch 2], for one position of each prompt, are a correct and an incorrect token.

    Returns:
        The attribution; `.check()` raises an error if the sum is not the model's own logit.

    Raises:
        TypeError: not a TransformerLens model.
        AttributionError: a token, position, prompt or features that do not fit; a head that was not in the checkpoint.
        SplitError: the components do not add up to what the final norm reads (an unknown writer, a cache of another,
            folded or centred model): names the place and how much is missing.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> every = ln_probe.attribute_logits(model, "The ships came home.").check()
        >>> last = ln_probe.attribute_logits(model, "The ships came home.", -1, target=" The").check()
    """
    positions = one_of(positions=positions, pos=pos, pos_slice=pos_slice)
    target, against = contrast_of(positions, target, against, answer_tokens, incorrect_tokens)
    if components not in COMPONENTS:
        raise AttributionError(f"components must be one of {', '.join(COMPONENTS)}, got {components!r}")
    hooked = check_model(model)
    with evaluating(hooked):
        end = _end_of(hooked)
        prompts = Prompts(hooked, tokens_or_cache, positions)
        wanted, points = dictionaries(hooked, features, prompts.lengths)
        if prompts.cache is not None and end.norm is not None:
            points[f"{end.norm.name}.hook_normalized"] = end.norm.module
        ids, valid = None, torch.ones(len(prompts.asked), dtype=torch.bool)
        if target is not None:
            ids = prompts.ids(target, "target")
        elif not prompts.single:
            ids, valid = prompts.next_ids()
        others = prompts.others(against)
        of_features = [number * max(prompts.lengths) + position for number, position in prompts.asked]
        chosen = [(one, one.chosen(of_features)) for one in wanted]
        terms, numbers = dict[Part, Tensor](), torch.empty(3, len(prompts.asked), dtype=torch.float64)
        for rows, seen in prompts.records(end.wiring, end.place, points):
            tokens = None if ids is None else ids[rows]
            other = others[rows] if isinstance(others, Tensor) else others
            logits, cap, factor = end.logits(seen)
            tokens = logits.argmax(1, keepdim=True) if tokens is None else tokens
            w, lift, own = (_contrast(v, tokens, other) for v in (end.W_U[:, None], end.b_U[None], logits))
            split = Split(end.wiring, seen)
            split.check(end.place)
            of_rows, sigma = _terms(end, split, factor * w.T, chosen, [of_features[row] for row in rows])
            of_rows[Part("b_U", "unembedding bias")] = F.pad(factor * lift[:, None], (2, 0))
            numbers[:, rows] = torch.stack([own, logits.abs().amax(1).clamp_min(1e-300), sigma])
            for part, value in of_rows.items():
                terms.setdefault(part, value.new_empty(len(prompts.asked), len(TERMS)))[rows] = value
    terms = _in_layers(terms) if components == "layers" else terms
    every = torch.stack(list(terms.values())).permute(0, 2, 1).masked_fill(~valid, math.nan)
    numbers[0, ~valid] = math.nan
    numbers = torch.cat([every.sum((0, 1))[None], numbers])
    total, own, scale, sigma = numbers[:, 0].tolist() if prompts.single else prompts.by_prompt(numbers)
    at = prompts.by_prompt(torch.tensor([position for _, position in prompts.asked]), -1)
    label = prompts.label(tokens if prompts.single else None if target is None else ids, others)
    every, bound = prompts.by_prompt(every), end.wiring.bound
    return LogitAttribution(tuple(terms), every, total, own, scale, sigma, bound, at, label, cap)


class _End(NamedTuple):
    """What the unembedding reads, a norm or the stream itself, and W_U and b_U of the tokens that have a logit.

    The config says what is done to logits: `factor`, then cap·tanh(logit / cap) (0: nothing).
    """

    wiring: Wiring
    norm: Norm | None
    place: str
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"]
    cap: float
    factor: float

    def project(self, read: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_vocab"]:
        """Return logits before anything that the model does to them."""
        W_U = at_least_float32(self.W_U)
        return read.to(W_U) @ W_U + self.b_U

    def form(self, logits: Float64[Tensor, "row _"] | None, read: Float[Tensor, "row _"]) -> tuple[float, float]:
        """Return the cap and the factor of logits: of those in the config, the ones that the logits show."""
        if logits is None or (not self.cap and self.factor == 1.0):
            return self.cap, self.factor
        plain = self.project(read).to(logits)

        def distance(form: tuple[float, float]) -> float:
            return float((logits - _capped(form[1] * plain, form[0])).abs().max())

        return min(product((0.0, self.cap), (self.factor, 1.0)), key=distance)

    def logits(self, seen: Record) -> tuple[Float64[Tensor, "row d_vocab"], float, float]:
        """Return the model's logits before their soft cap, the cap and the factor of W_U's logits."""
        if seen.logits is None:  # of a cache: from the norm's output, not through its components
            read = seen.values[self.place].double()
            if self.norm is not None:
                read = self.norm.affine(seen.values[f"{self.norm.name}.hook_normalized"].double())
            return self.project(read).double().cpu() * self.factor, self.cap, self.factor
        logits = seen.logits[:, : len(self.b_U)].double()
        cap, factor = self.form(logits[:1], seen.values[END][:1])
        return cap * (logits / cap).clamp(-1.0, 1.0).atanh() if cap else logits, cap, factor


def _end_of(model: HookedModel) -> _End:
    """Return what the unembedding reads; raises SplitError where it is not known to be a sum."""
    if reason := facts_of(model).missing_head:
        raise AttributionError(f"logits of this model cannot be attributed: {reason}")
    size = outputs(model)
    W_U, b_U = weight_of(model, "W_U"), weight_of(model, "b_U")
    if W_U is None or W_U.ndim != 2:
        raise AttributionError(f"{type(model).__name__} shows no unembedding W_U [d_model d_vocab]")
    W_U = with_float64(before_projection(model, W_U[:, :size].T).T)
    b_U = W_U.new_zeros(size) if b_U is None else with_float64(b_U[:size])
    norms = structure_of(model).norms
    cap = getattr(model.cfg, "output_logits_soft_cap", None)
    wiring = find_wiring(model, norms)
    norm = next((norm for norm in reversed(norms) if "unembed" in norm.reads.split("+")), None)
    place = END if norm is None else norm.name
    wiring.at(place)
    cap = float(cap) if isinstance(cap, int | float) and cap > 0 else 0.0
    return _End(wiring, norm, place, W_U, b_U, cap, logit_factor(model))


def _capped(logits: Float[Tensor, "*row d_vocab"], cap: float) -> Float[Tensor, "*row d_vocab"]:
    return cap * (logits / cap).tanh() if cap else logits


def _contrast(
    values: Float[Tensor, "*layer row d_vocab"],
    ids: Ids,
    other: Ids | str | None,
) -> Float64[Tensor, "*layer row"]:
    """Return the mean of values over each row's tokens minus that over the others ("mean": all tokens)."""

    def mean(tokens: Tensor | str) -> Tensor:
        if isinstance(tokens, str):
            return values.mean(-1, dtype=torch.float64).cpu()
        every = values.expand(*values.shape[:-2], len(tokens), -1)
        at = tokens.to(values.device).expand(*every.shape[:-1], -1)
        return every.gather(-1, at).double().mean(-1).cpu()

    return mean(ids) if other is None else mean(ids) - mean(other)


def _terms(
    end: _End,
    split: Split,
    w: Float64[Tensor, "row d_model"],
    chosen: Sequence[tuple[Features, Sequence[int]]],
    of_features: Sequence[int],
) -> tuple[Terms, Float64[Tensor, " row"]]:
    """Return what each component gives along `w`, and the norm's sigma (NaN without a norm)."""
    norm, nothing = end.norm, torch.zeros(len(w), dtype=torch.float64)
    gain = w if norm is None else w * gain_of(norm)
    sigma = torch.ones(len(w), 1).double() if norm is None else norm.sigma(split.input(end.place))
    readings = [gain / sigma]
    if projects := norm is not None and norm.projects:
        readings.append(torch.full_like(gain, 1.0 / gain.shape[1]))
    f = torch.stack(readings, 1)
    values = split.read(end.place, f)
    for features, named in chosen:
        values = features.split(values, f, split.record, of_features, named, end.wiring.bound)
    of_mean = gain.sum(1) / sigma[:, 0]
    terms = {
        part: torch.stack([v[:, 0], 0.0 - v[:, 1] * of_mean if projects else nothing, nothing], 1)
        for part, v in values.items()
    }
    if norm is None:
        return terms, nothing * math.nan
    if norm.bias is not None:
        added = torch.stack([row @ bias_of(norm) for row in w])
        terms[Part(f"{norm.name} bias", "norm bias", norm.layer)] = F.pad(added[:, None], (2, 0))
    return terms, sigma[:, 0]


def _in_layers(terms: Terms) -> Terms:
    """Return heads and output biases summed by attention layer or MLP."""
    summed: dict[Part, Tensor] = {}
    for part, value in terms.items():
        layer, whole = part.layer, part
        if part.kind == "head" or part.name == f"L{layer} b_O":
            whole = Part(f"L{layer} attn", "attention", layer)
        elif part.kind == "mlp" or part.name == f"L{layer} b_out":
            whole = Part(f"L{layer} mlp", "mlp", layer)
        summed[whole] = summed[whole] + value if whole in summed else value
    return summed


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
            largest = f"{self.error:.1e} of the largest, and rounding explains {self.bound:.0e}"
            raise AttributionError(f"the last layer's logits are not the model's own: {largest}")
        return self

    def __repr__(self) -> str:
        layers, batch, positions, _ = self.values.shape
        return f"LogitLens({layers} layers, {batch} x {positions} positions; {self.label})"

    def _repr_html_(self) -> str:
        """Return the first prompt's most likely tokens, shaded by their probability."""
        first = self.table[self.table["batch"] == 0]
        shown = first[first["position"].isin(first["position"].unique()[-SHOWN:])]
        cells = [
            f'<div style="background:rgba(0,114,178,{p / 2:.3f})" title="{p:.1%}">{escape(token)}</div>'
            for p, token in zip(shown["probability"], shown["token"], strict=True)
        ]
        grid = shown.assign(cell=cells).pivot_table("cell", "layer", "position", "first")[::-1]
        with pd.option_context("display.max_colwidth", None):
            return f"<p>{escape(repr(self))}</p>{grid.to_html(escape=False)}"


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
    """Read logits off the residual stream before each layer, through the final norm, raw or folded.

    Args:
        model, tokens_or_cache, positions, target, against: as for `attribute_logits`, under either name; `target` None:
            the token that is the most likely one at the end.
        scale: what the final norm divides by: "own", the sigma of each layer's stream, or "final", that of the last
            one, at the same token. Inside `without`, the norm is the edited one.

    Raises:
        TypeError, AttributionError, SplitError: as `attribute_logits`; an unknown scale.

    Example:
        >>> lens = ln_probe.logit_lens(model, tokens, positions=-1, scale="final").check()
        >>> lens.values.shape  # layer, batch, position, token
    """
    positions = one_of(positions=positions, pos=pos, pos_slice=pos_slice)
    target, against = contrast_of(positions, target, against, answer_tokens, incorrect_tokens)
    if scale not in ("own", "final"):
        raise AttributionError(f"scale must be 'own' or 'final', got {scale!r}")
    hooked = check_model(model)
    with evaluating(hooked):
        end = _end_of(hooked)
        layers = range(len(hooked.blocks))
        prompts = Prompts(hooked, tokens_or_cache, positions)
        by_row, errors = dict[int, Tensor](), list[float]()
        for rows, seen in prompts.records(end.wiring, end.place):
            stream = [seen.values[place] for place in (*(f"blocks.{i}" for i in layers), end.place)]
            at = torch.tensor([prompts.asked[row][1] for row in rows])
            read = _through(end.norm, at_least_float32(torch.stack(stream)), at, scale)
            own = None if seen.logits is None else seen.logits[:, : len(end.b_U)].double()
            cap, factor = end.form(own, read[-1])
            logits = _capped(factor * end.project(read), cap).cpu()
            if own is not None:
                errors.append(float((logits[-1] - own).abs().max() / own.abs().max().clamp_min(1e-300)))
            by_row |= dict(zip(rows, logits.unbind(1), strict=True))
    every = torch.stack([by_row[row] for row in range(len(by_row))], 1)  # [layer row d_vocab]
    ids = every[-1].argmax(-1, keepdim=True) if target is None else prompts.ids(target, "target")
    others = prompts.others(against)
    label = "logit of the last layer's most likely token"
    if target is not None or prompts.single:
        label = prompts.label(ids, others)
    values = prompts.by_prompt(every.movedim(1, -1)).movedim(1, -1)
    at = prompts.by_prompt(torch.tensor([position for _, position in prompts.asked]), -1)
    bound = max(CLOSES[seen.dtype], CLOSES[torch.float32])
    table = _lens_table(prompts, every, ids, others)
    return LogitLens(table, values, at, max(errors, default=math.nan), bound, label)


def _through(
    norm: Norm | None, x: Float[Tensor, "layer row d_model"], at: Int[Tensor, " row"], scale: str
) -> Float[Tensor, "layer row d_model"]:
    """Return the output of the final norm, intact or edited, on the stream at these positions."""
    if norm is None:
        return x
    edit = next((edit for edit in edits_on(norm.module) if isinstance(edit, NormEdit)), None)
    constant = None
    if edit is not None and edit.constants is not None:
        first, rest = edit.constants[0].detach().to(x)
        constant = torch.where(at == 0, first, rest)[:, None]
    variant = INTACT.name if edit is None else edit.variants[0]
    out = norm.affine(norm.without(variant, x, constant, norm.sigma(x[-1:]) if scale == "final" else None))
    # The stream between post-norm blocks is normalized: their last norm is none to read it through.
    return torch.cat([x[:-1], out[-1:]]) if norm.name.startswith("blocks.") else out


def _lens_table(
    prompts: Prompts,
    logits: Float[Tensor, "layer row d_vocab"],
    ids: Ids,
    others: Ids | str | None,
) -> pd.DataFrame:
    """Return `LogitLens.table`."""
    logs = logits.log_softmax(-1)
    best, top = logs.max(-1)
    rows = [(layer, *one) for layer in range(len(logits)) for one in prompts.asked]
    table = pd.DataFrame(rows, columns=["layer", "batch", "position"])
    table["top"] = top.flatten().numpy()
    table["token"] = table["top"].map({token: token_name(prompts.model, token) for token in table["top"].unique()})
    columns = {
        "probability": best.exp(),
        "entropy": -(logs.exp() * logs).sum(-1),
        "logit": _contrast(logits, ids, others),
    }
    return table.assign(**{name: column.flatten().numpy() for name, column in columns.items()})
