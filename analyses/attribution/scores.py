"""Why does this head attend here? One attention score as a sum over pairs of parts, through norms, biases and rotary.

    score = (W_Q LN(x_q) + b_Q)ᵀ R (W_K LN(x_k) + b_K) / divisor

is bilinear in the parts of both sides once both sigmas are held (Elhage et al. 2021, section on QK circuits, has it
without norms; `docs/attribution.md`). A QK-norm holds its own sigma too; what ALiBi adds is a separate pair,
"position bias". Against another key, or the mean over the keys that the query sees, it is the difference of two such
sums: what softmax depends on. Scores are meant before a soft cap; a sink in the softmax is of no key, so it is no part
of a score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from ln_probe.analyses.attribution.features import Features, dictionaries
from ln_probe.analyses.attribution.heads import AT_ONCE, Head, in_chunks
from ln_probe.analyses.attribution.shared import (
    MEAN,
    AttributionError,
    Bar,
    Sums,
    SumsAtPositions,
    draw,
    largest,
    of_equal_length,
    part_columns,
    place,
    prompts,
)
from ln_probe.hooks.attention import Heads, read_heads
from ln_probe.hooks.capture import AttentionInput, CachedPrompts, is_cache, record_attention
from ln_probe.hooks.components import Part, Record, Split
from ln_probe.hooks.model import check_model, evaluating, n_layers, whole_number
from ln_probe.hooks.norm import Site
from ln_probe.hooks.sites import ModelFacts, facts_of

COLUMNS = ("side", "part", "kind", "layer", "index", "contribution")
SHOWN = 8  # pairs in the picture, above the eight LN terms


@dataclass(frozen=True, eq=False)
class ScoreAttribution(Sums):
    """An attention score (or a difference of scores) as a sum over pairs of parts.

    Attributes:
        pairs: a row per part of the query, a column per part of the key, in nats; they add up to `total`.
        table: a row per part of either side: `side` ("query" or "key"), `part`, `kind`, `layer`, `index`,
            `contribution` (the sum of its row or column of `pairs`); each side adds up to `total`.
        terms: what each term of either norm does: `side`, `term`, `contribution` (the score minus what it would be
            without that term, everything else as it is), `meaning`.
        total: the score; own: from the model's own norm outputs, another way.
        scale: what the error is relative to: the largest |score| of that query; bound: what rounding explains of it.
        weight: attention paid to the key.
        label: what was asked for, as text.
        soft_cap: cap of the layer's scores: the sum is of the score before it; 0 if there is none.

    Example:
        >>> why = ln_probe.attribute_scores(model, tokens[0], layer=1, head=3, query=-1, key=0, against="mean").check()
        >>> why.top(3)
        >>> why.terms
    """

    pairs: pd.DataFrame
    table: pd.DataFrame
    terms: pd.DataFrame
    total: float
    own: float
    scale: float
    bound: float
    weight: float
    label: str
    soft_cap: float = 0.0
    _number = "score"

    def to_torch(self) -> Float64[Tensor, "query_part key_part"]:
        """`pairs` as a tensor."""
        return torch.tensor(self.pairs.to_numpy(dtype=float))

    def top(self, k: int = 10) -> pd.DataFrame:
        """The k pairs that contribute most, either way: `query_part`, `key_part`, `contribution`."""
        k = whole_number(k, "k", 1, AttributionError)
        values = self.pairs.to_numpy(dtype=float)
        order = np.argsort(-np.abs(values), axis=None, kind="stable")[:k]
        rows, columns = np.unravel_index(order, values.shape)
        return pd.DataFrame(
            {
                "query_part": self.pairs.index[rows],
                "key_part": self.pairs.columns[columns],
                "contribution": values[rows, columns],
            }
        )

    def __repr__(self) -> str:
        rows, columns = self.pairs.shape
        return f"ScoreAttribution({self.label}: {self.total:.4f} nats, {rows} × {columns} parts)"

    def _repr_html_(self) -> str:
        every = [
            Bar(f"{q} · {k}", float(v))
            for q, row in zip(self.pairs.index, self.pairs.to_numpy(dtype=float), strict=True)
            for k, v in zip(self.pairs.columns, row, strict=True)
        ]
        title = f"{self.label}: {self.total:.4f} nats (attention {self.weight:.1%})"
        pairs = draw(largest(every, SHOWN), title, "A bar per pair: part of the query · part of the key.")
        bars = [Bar(f"{r.term} of the {r.side}", float(r.contribution)) for r in self.terms.itertuples()]  # type: ignore
        note = "What the score would lose without each term alone (a sigma: if it were the median of the tokens seen)."
        return str(pairs + draw(bars, "What each term of the norm does to it", note))


@dataclass(frozen=True, eq=False)
class ScoreAttributions(SumsAtPositions):
    """Attention scores (or differences of scores) of one head at many positions, each as a sum over one side's parts.

    Attributes:
        components: what the rows of `values` are.
        side: whose components they are, "query" or "key"; the other side's are summed.
        values: in nats. [component batch pos], by position of the keys (`query` was given) or of the queries (`key`
            was); [component batch query key] where neither was. NaN where a query does not see the key.
        total: what they add up to; own: from the model's own norm outputs; scale: the largest |score| of that query,
            which errors are relative to; weight: attention paid to the key. Each of the shape of `values[0]`.
        queries, keys: positions, counted from the beginning of each prompt, likewise.
        bound: relative error that rounding explains.
        label: what was asked for, as text.
        soft_cap: cap of the layer's scores: sums are of the scores before it; 0 if there is none.

    Example:
        >>> keys = ln_probe.attribute_scores(model, tokens[0], layer=1, head=3, query=-1).check()
        >>> keys.values.shape, keys.weight
    """

    components: tuple[Part, ...]
    side: str
    values: Float64[Tensor, "component batch *pos"]
    total: Float64[Tensor, " batch *pos"]
    own: Float64[Tensor, " batch *pos"]
    scale: Float64[Tensor, " batch *pos"]
    weight: Float64[Tensor, " batch *pos"]
    queries: Int[Tensor, " batch *pos"]
    keys: Int[Tensor, " batch *pos"]
    bound: float
    label: str
    soft_cap: float = 0.0
    _number = "score"

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per component and score: `batch`, `query`, `key`, `side`, `part`, `kind`, `layer`, `index`,
        `contribution`."""
        values = self.values[:, self.total.isfinite()].T.reshape(-1).numpy()
        return self._rows(query=self.queries, key=self.keys).assign(contribution=values)

    def _components(self) -> pd.DataFrame:
        return pd.DataFrame([{"side": self.side, **part_columns(part)} for part in self.components])

    def _place(self, at: int) -> str:
        query, key = (int(t.flatten()[at]) for t in (self.queries, self.keys))
        return f" (query {query}, key {key} of prompt {at // max(1, self.total[0].numel())})"

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.total.shape))
        return f"ScoreAttributions({self.label}: {len(self.components)} components of the {self.side}, {shape} scores)"

    def _repr_html_(self) -> str:
        means = self.values.flatten(1).nanmean(1)
        bars = [Bar(part.name, float(v)) for part, v in zip(self.components, means, strict=True)]
        count = int(self.total.isfinite().sum())
        note = f"Components of the {self.side}, means over {count} scores. Values: .values [component, batch, …]."
        return str(draw(largest(bars), f"{self.label}: {float(self.total.nanmean()):.4f} nats on average", note))


_TERMS = {
    "projection": "left out: the mean stays in",
    "gain": "set to 1",
    "bias": "set to 0",
    "sigma": "set to its median over the tokens that the query sees",
}


def attribute_scores(
    model: object,
    tokens_or_cache: object,
    layer: int,
    head: int,
    query: int | None = None,
    key: int | None = None,
    against: int | str | None = None,
    features: Sequence[Features] | Features | None = None,
) -> ScoreAttribution | ScoreAttributions:
    """Write a head's attention scores as exact sums over components of the query and components of the key.

    Args:
        model: HookedTransformer, TransformerBridge or lab model.
        tokens_or_cache: prompts (text, ids [pos] or [batch pos], lists of unequal length), or an `ActivationCache` of
            this model.
        layer, head: which head; negative from the end.
        query, key: positions; negative from the end of each prompt. With both, for one prompt: a `ScoreAttribution`, a
            sum over pairs of components. Otherwise `ScoreAttributions`: `key=None` gives all keys by components of the
            key; `query=None` with a key gives all queries by components of the query; the other side is summed.
        against: another key's position, whose score is subtracted; "mean": the mean score of the keys that the query
            sees; None: the score itself (attention depends on differences of scores only).
        features: dictionaries whose features replace the components that they reconstruct, on both sides.

    Raises:
        TypeError: not a TransformerLens model.
        AttributionError: a layer, head or position out of range; a key that the query does not see; attention behind a
            module that is no norm that ln_probe knows; features that do not fit.
        UnsupportedAttentionError: scores that are not a scaled dot product.
        SplitError: the parts do not add up to what the norm reads (a cache of another, folded or centred model): names
            the place and how much is missing.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> one = ln_probe.attribute_scores(model, "The ships came home.", 1, 0, -1, 0, against="mean").check()
        >>> every = ln_probe.attribute_scores(model, "The ships came home.", 1, 0, -1).check()
    """
    hooked = check_model(model)
    layer = place(layer, n_layers(hooked), "layer", "the model", "layers")
    wanted = dictionaries(features)
    if isinstance(against, str) and against != MEAN:
        raise AttributionError(f"against must be a position, {MEAN!r} or None, got {against!r}")
    with evaluating(hooked):
        facts = facts_of(hooked, checksums=False)
        site, where = read_by(facts, layer)
        cached = CachedPrompts(hooked, tokens_or_cache) if is_cache(tokens_or_cache) else None
        rows = [] if cached is not None else prompts(hooked, tokens_or_cache)
        lengths = [cached.shape()[1]] * cached.shape()[0] if cached is not None else list(map(len, rows))
        for given in wanted:
            given.check(int(hooked.cfg.d_model), len(lengths), max(lengths))
        points = {given.hook_name: given.point(hooked) for given in wanted}
        for n in lengths:
            for position, what in (
                (query, "query"),
                (key, "key"),
                (None if isinstance(against, str) else against, "against"),
            ):
                if position is not None:
                    place(position, n, what)
        each: dict[int, Head] = {}
        for members in of_equal_length(lengths):
            length = lengths[members[0]]
            if cached is not None:
                kept = cached.record(range(length * len(members)), facts.wiring, where, points)
                looks = cached.attention(site, layer, where)
            else:
                together = torch.stack([rows[i] for i in members])
                kept, looks = record_attention(hooked, together, facts.norms(), site, layer, points)
            split = split_of(facts, kept, looks, site, where)
            for k, (number, look) in enumerate(zip(members, looks, strict=True)):
                heads = maps_of(facts, look)
                head = place(head, heads.n_heads, "head", f"layer {layer}", "heads")
                own = split.rows(range(k * length, (k + 1) * length))
                first, bound = number * max(lengths), facts.wiring.bound(where, look.x.dtype)
                each[number] = Head(heads, head, site, where, own, look, wanted, [], first, bound)
    ordered = [each[number] for number in range(len(lengths))]
    if len(ordered) == 1 and query is not None and key is not None:
        return _one(ordered[0], place(query, lengths[0]), place(key, lengths[0]), against)
    return _several(ordered, query, key, against)


def read_by(facts: ModelFacts, layer: int) -> tuple[Site, str]:
    """The norm that attention of a layer reads, or what replaces it; and the name of that place.

    Raises:
        AttributionError: it is a module that is no norm that ln_probe knows.
        SplitError: what is read there is not known to be a sum.
    """
    facts.norms()
    site = next((s for s in facts.read if layer in s.attention_layers), None)
    if site is None or site.kind == "unknown":
        what = "nothing that ln_probe knows" if site is None else f"{site.name}, which is no norm that ln_probe knows"
        raise AttributionError(
            f"attention of layer {layer} reads {what}: its scores are no sum over parts of the stream. Choose a layer "
            "that reads a norm or the stream itself (`find_sites`)"
        )
    where = f"blocks.{layer}" if site.bare else site.name
    facts.wiring.at(where)  # raises before the prompt runs
    return site, where


def split_of(facts: ModelFacts, kept: Record, looks: Sequence[AttentionInput], site: Site, where: str) -> Split:
    """The parts of what one layer's attention reads, a row per position of one prompt after the other."""
    if not looks:
        raise AttributionError(f"attention that reads {where} shows no pattern, so its scores cannot be checked")
    if site.bare:
        read = torch.cat([look.x for look in looks]).cpu()
        kept = replace(kept, inputs={**kept.inputs, where: read})
    return Split(facts.wiring, kept)


def maps_of(facts: ModelFacts, look: AttentionInput) -> Heads:
    """One layer's attention as linear maps, checked against its pattern."""
    return read_heads(look, facts.sites, bent=True)


def _visible(one: Head, query: int, key: int) -> None:
    if not bool(one.mask[query, key]):
        visible = torch.nonzero(one.mask[query])[:, 0].tolist()
        ends = dict.fromkeys(map(str, (visible[0], visible[-1])))
        raise AttributionError(f"query {query} does not see key {key}: it sees {' … '.join(ends)}")


def _with_features(heads: Sequence[Head], positions: Sequence[Sequence[int]]) -> list[Head]:
    """The head on each prompt, with the features named that are largest at these positions of all prompts."""
    rows = [one.first + p for one, some in zip(heads, positions, strict=True) for p in some]
    named = [given.chosen(rows) for given in heads[0].features]
    return [replace(one, named=named) for one in heads]


def _one(one: Head, q_at: int, k_at: int, against: int | str | None) -> ScoreAttribution:
    """One score as a sum over pairs."""
    _visible(one, q_at, k_at)
    visible = [int(i) for i in torch.nonzero(one.mask[q_at])[:, 0]]
    other: list[int] | None = None
    if against is not None:
        other = visible if isinstance(against, str) else [place(against, one.length, "against")]
        _visible(one, q_at, other[0])
    rows = sorted({q_at, k_at, *(other or ())})
    (one,) = _with_features([one], [rows])
    one.split.rows(rows).check(one.where)
    heads, layer, head = one.heads, one.seen.layer, one.head
    typical = float(one.site.sigma(one.seen.x[visible].double()).median())
    queries = one.side("Q", [q_at], typical)
    mine = one.side("K", [k_at], typical)
    two = None if other is None else one.mean_keys(other, typical)

    def score(q: Tensor, k: Tensor) -> float:
        return float((q * k).sum()) / heads.divisor

    def difference(term: str | None = None) -> Float[Tensor, " d_head"]:
        wholes = [s.whole.sum(1)[0] if term is None else s.terms[term][0] for s in (mine, two) if s is not None]
        return wholes[0] if two is None else wholes[0] - wholes[1]

    keys = mine.whole[0] if two is None else mine.whole[0] - two.whole[0]
    matrix = queries.whole[0] @ keys.T / heads.divisor
    q_parts, k_parts = list(queries.parts), list(mine.parts)
    if (lifts := one.position_bias([q_at])) is not None:  # a separate pair: what ALiBi adds is of no other part
        lift = float(lifts[0, k_at]) - (0.0 if other is None else float(lifts[0, other].mean()))
        matrix = torch.block_diag(matrix, torch.full((1, 1), lift, dtype=torch.float64))
        for parts in (q_parts, k_parts):
            parts.append(Part("position bias", "bias", layer))
    q_whole = queries.whole.sum(1)[0]
    terms = [
        {"side": which, "term": term, "contribution": value, "meaning": meaning}
        for which, values in (
            ("query", {t: score(queries.terms[t][0], difference()) for t in _TERMS}),
            ("key", {t: score(q_whole, difference(t)) for t in _TERMS}),
        )
        for (term, meaning), value in zip(_TERMS.items(), values.values(), strict=True)
    ]
    own = one.scores([q_at])[0]
    label = f"score of L{layer}H{head} from {q_at} to {k_at}" + (
        "" if other is None else " minus the mean of those it sees" if against == MEAN else f" minus to {other[0]}"
    )
    return ScoreAttribution(
        pd.DataFrame(matrix.numpy(), index=[p.name for p in q_parts], columns=[p.name for p in k_parts]),
        pd.DataFrame(
            [_row("query", p, v) for p, v in zip(q_parts, matrix.sum(1).tolist(), strict=True)]
            + [_row("key", p, v) for p, v in zip(k_parts, matrix.sum(0).tolist(), strict=True)],
            columns=list(COLUMNS),
        ),
        pd.DataFrame(terms, columns=["side", "term", "contribution", "meaning"]),
        float(matrix.sum()),
        float(own[k_at]) - (0.0 if other is None else float(own[other].mean())),
        max(float(own.abs().max()), 1e-300),
        one.bound,
        float(one.seen.pattern[head, q_at, k_at]),
        label,
        heads.soft_cap,
    )


@dataclass(frozen=True, eq=False)
class _Scores:
    """Scores of one prompt: parts, and by query and key their contributions, what the model has, and attention."""

    parts: list[Part]
    values: Float64[Tensor, "part query key"]
    own: Float64[Tensor, "query key"]
    scale: Float64[Tensor, "query 1"]
    weight: Float64[Tensor, "query key"]
    queries: list[int]
    keys: list[int]


def _many(one: Head, queries: list[int], keys: list[int], against: int | str | None, side: str) -> _Scores:
    """Scores of these queries to these keys, by the parts of one side."""
    heads, mask = one.heads, one.mask[queries]
    scores, lifts = one.scores(queries), one.position_bias(queries)
    share = torch.zeros(len(queries), one.length, dtype=torch.float64)  # of each key in what is subtracted
    seen = mask[:, keys]
    if isinstance(against, str):
        share = mask.double() / mask.sum(1, keepdim=True)
    elif against is not None:
        share[:, against] = 1.0
        seen = seen & mask[:, [against]]

    def less(values: Tensor) -> Tensor:
        """[… query key] of all keys: those asked for, minus what is subtracted."""
        return values[..., keys] - (torch.where(mask, values, 0.0) * share).sum(-1, keepdim=True)

    found: list[Tensor] = []
    parts: list[Part] = []
    if side == "key":
        needed = sorted({*keys, *torch.nonzero(share.sum(0))[:, 0].tolist()})
        one.split.rows(needed).check(one.where)
        q = one.queries[queries] / heads.divisor
        for some in in_chunks(needed):
            made = one.side("K", some)
            parts = made.parts
            found.append(torch.einsum("kpd,qd->pqk", made.whole, q))
        every = torch.zeros(len(parts), len(queries), one.length, dtype=torch.float64)
        every[:, :, needed] = torch.cat(found, 2)
        values = less(every)
    else:
        one.split.rows(queries).check(one.where)
        difference = (one.keys[keys] - share @ one.keys) / heads.divisor  # [query d_head]: there is one key
        for some, of_keys in zip(in_chunks(queries), difference.split(AT_ONCE), strict=True):
            made = one.side("Q", some)
            parts = made.parts
            found.append(torch.einsum("qpd,qd->pq", made.whole, of_keys)[:, :, None])
        values = torch.cat(found, 1)
    if lifts is not None:
        parts = [*parts, Part("position bias", "bias", one.seen.layer)]
        values = torch.cat([values, less(lifts)[None]])
    scale = scores.abs().amax(1, keepdim=True).clamp_min(1e-300)
    weight = one.seen.pattern[one.head][queries][:, keys].double().cpu()
    return _Scores(
        parts, values.masked_fill(~seen, math.nan), less(scores).masked_fill(~seen, math.nan), scale, weight, queries,
        keys,
    )  # fmt: skip


def _several(
    ordered: Sequence[Head], query: int | None, key: int | None, against: int | str | None
) -> ScoreAttributions:
    side = "query" if query is None and key is not None else "key"
    results = []
    for one in _with_features(ordered, [range(one.length) for one in ordered]):
        queries = list(range(one.length)) if query is None else [place(query, one.length)]
        keys = list(range(one.length)) if key is None else [place(key, one.length)]
        other = against if against is None or isinstance(against, str) else place(against, one.length)
        if query is not None:
            for wanted in (*([] if key is None else keys), *([other] if isinstance(other, int) else [])):
                _visible(one, queries[0], wanted)
        results.append(_many(one, queries, keys, other, side))
    parts = results[0].parts
    shape = (len(results), max(len(r.queries) for r in results), max(len(r.keys) for r in results))
    values = torch.full((len(parts), *shape), math.nan, dtype=torch.float64)
    own, scale, weight = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(3))
    at = torch.full((2, *shape), -1)
    for b, r in enumerate(results):
        q, k = len(r.queries), len(r.keys)
        values[:, b, :q, :k] = r.values
        own[b, :q, :k], scale[b, :q, :k], weight[b, :q, :k] = r.own, r.scale, r.weight
        at[0, b, :q, :k], at[1, b, :q, :k] = torch.tensor(r.queries)[:, None], torch.tensor(r.keys)
    drop = None if query is None and key is None else -1 if query is None else -2
    total = values.sum(0)
    if drop is not None:
        values, total, own, scale, weight, at = (t.squeeze(drop) for t in (values, total, own, scale, weight, at))
    one = ordered[0]
    label = f"scores of L{one.seen.layer}H{one.head}"
    label += "" if query is None else f" from {query}"
    label += "" if key is None else f" to {key}"
    if against is not None:
        label += " minus the mean of those it sees" if isinstance(against, str) else f" minus to {against}"
    return ScoreAttributions(
        tuple(parts), side, values, total, own, scale, weight, at[0], at[1], one.bound, label, one.heads.soft_cap
    )


def _row(side: str, part: Part, value: float) -> dict[str, object]:
    return {"side": side, **part_columns(part), "contribution": value}
