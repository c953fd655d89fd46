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
from functools import cached_property, partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from ln_probe.analyses.attribution.features import Features, dictionaries, points_of
from ln_probe.analyses.attribution.shared import (
    MEAN,
    TOP,
    AttributionError,
    Prompts,
    Sums,
    one_of,
    part_columns,
    place,
)
from ln_probe.hooks.attention import Heads, read_heads
from ln_probe.hooks.components import Part, Split, Wiring, find_wiring, record
from ln_probe.hooks.model import check_model, evaluating, n_layers, whole_number
from ln_probe.hooks.norm import Norm, bias_of, gain_of
from ln_probe.hooks.norms import attention_inputs
from ln_probe.hooks.stream import AttentionInput, streaming, visible_keys

AT_ONCE = 64  # positions whose parts are held at once: of GPT-2's shape 5 MB


@dataclass(frozen=True, eq=False, repr=False)
class ScoreAttribution(Sums):
    """Attention scores (or differences of scores) of one head, each as a sum over one side's components.

    Attributes:
        components: what the rows of `values` are.
        side: whose components they are, "query" or "key"; the other side's are summed.
        values: in nats. [component batch pos], by position of the keys (`query` was given) or of the queries (`key`
            was); [component batch query key] where neither was. NaN where a query does not see the key.
        total: what they add up to; own: from the model's own norm outputs; scale: the largest |score| of that query,
            which errors are relative to; weight: attention paid to the key. Each of the shape of `values[0]`; floats
            for one query and key of one prompt.
        queries, keys: positions, counted from the beginning of each prompt, likewise.
        bound: relative error that rounding explains.
        label: what was asked for, as text.
        soft_cap: cap of the layer's scores: sums are of the scores before it; 0 if there is none.
        pairs: of one query and key: a row per component of the query, a column per component of the key; they add up to
            `total`. Else None, as are `terms`.
        terms: what each term of either norm does: `side`, `term`, `contribution` (the score minus what it would be
            without that term, everything else as it is), `meaning`.
        query_components: what the rows of `pairs` are.

    Example:
        >>> why = ln_probe.attribute_scores(model, tokens[0], layer=1, head=3, query=-1, key=0, against="mean").check()
        >>> why.top(3), why.terms
        >>> keys = ln_probe.attribute_scores(model, tokens[0], layer=1, head=3, query=-1).check()
        >>> keys.values.shape, keys.weight
    """

    components: tuple[Part, ...]
    side: str
    values: Float64[Tensor, "component batch *pos"]
    total: Any
    own: Any
    scale: Any
    weight: Any
    queries: Int[Tensor, " batch *pos"]
    keys: Int[Tensor, " batch *pos"]
    bound: float
    label: str
    soft_cap: float = 0.0
    pairs: pd.DataFrame | None = None
    terms: pd.DataFrame | None = None
    query_components: tuple[Part, ...] = ()
    _number = "score"

    @property
    def _entries(self) -> str:  # type: ignore[override]
        return f"scores, by components of the {self.side}"

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per component and score: `batch`, `query`, `key`, `side`, `part`, `kind`, `layer`, `index`,
        `contribution`; of one score without the first three, and by components of either side."""
        if self.pairs is None:
            values = self.values[:, self.total.isfinite()].T.reshape(-1).numpy()
            return self._rows(query=self.queries, key=self.keys).assign(contribution=values)
        sides = [("query", part) for part in self.query_components] + [("key", part) for part in self.components]
        table = pd.DataFrame([{"side": side, **part_columns(part)} for side, part in sides])
        sums = [self.pairs.sum(axis=1), self.pairs.sum(axis=0)]
        return table.assign(contribution=pd.concat(sums).to_numpy())

    def _components(self) -> pd.DataFrame:
        return pd.DataFrame([{"side": self.side, **part_columns(part)} for part in self.components])

    def top(self, k: int = TOP) -> pd.DataFrame:
        """Return the k largest pairs, either way: `query_part`, `key_part`, `contribution`; of several scores, the k
        components with the largest mean |contribution|."""
        if self.pairs is None:
            return super().top(k)
        k = whole_number(k, "k", 1, AttributionError)
        pairs = pd.Series(self.pairs.stack(), name="contribution").rename_axis(["query_part", "key_part"]).reset_index()
        return pairs.sort_values("contribution", key=abs, ascending=False, kind="stable", ignore_index=True).head(k)

    def _place(self, at: int) -> str:
        query, key = (int(t.flatten()[at]) for t in (self.queries, self.keys))
        return f" (query {query}, key {key} of prompt {at // max(1, self.queries[0].numel())})"


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
    *,
    pos: int | None = None,
    pos_slice: int | None = None,
) -> ScoreAttribution:
    """Write a head's attention scores as exact sums over components of the query and components of the key.

    Args:
        model: HookedTransformer, TransformerBridge or lab model.
        tokens_or_cache: prompts (text, ids [pos] or [batch pos], lists of unequal length), or an `ActivationCache` of
            this model.
        layer, head: which head; negative from the end.
        query, key: positions; negative from the end of each prompt. With both, for one prompt, the result has a sum
            over pairs of components, too. `key=None` gives all keys by components of the key; `query=None` with a key
            gives all queries by components of the query; the other side is summed.
        against: another key's position, whose score is subtracted; "mean": the mean score of the keys that the query
            sees; None: the score itself (attention depends on differences of scores only).
        features: dictionaries whose features replace the components that they reconstruct, on both sides.
        pos, pos_slice: TransformerLens's names of `query`.

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
    query = one_of(query=query, pos=pos, pos_slice=pos_slice)
    layer = place(layer, n_layers(hooked), "layer", "the model")
    wanted = dictionaries(features)
    if isinstance(against, str) and against != MEAN:
        raise AttributionError(f"against must be a position, {MEAN!r} or None, got {against!r}")
    with evaluating(hooked):
        norms = attention_inputs(hooked)
        wiring = find_wiring(hooked, norms)
        site, where = read_by(norms, wiring, layer)
        given = Prompts(hooked, tokens_or_cache)
        points = points_of(hooked, wanted, given.lengths)
        asked = {"query": query, "key": key, "against": None if isinstance(against, str) else against}
        for length in given.lengths:
            for what, position in asked.items():
                if position is not None:
                    place(position, length, what)
        each: dict[int, Head] = {}
        for members in given.of_equal_length():
            if given.cache is None:
                tokens, looks = given.tokens(members), list[AttentionInput]()
                watch = partial(_append, looks)
                with streaming(hooked, tokens, [site], on_attention=watch, layers=[layer]):
                    seen = record(hooked, tokens, range(tokens.numel()), norms, points=points, logits=False)
            else:
                seen = given.cache.record(range(sum(given.lengths)), wiring, where, points)
                looks = given.cache.attention(site, layer, where)
            ones = heads_of(Split(wiring, seen), looks, site, where)
            for number, one in zip(members, ones, strict=True):
                head = place(head, one.heads.n_heads, "head", f"layer {layer}")
                each[number] = replace(one, head=head, features=wanted, first=number * max(given.lengths))
    ordered = [each[number] for number in range(len(given.lengths))]
    return _attribution(ordered, query, key, against)


# ---------------------------------------------------------------------------------------- queries and keys


class Side(NamedTuple):
    """The queries, or the keys, of some positions as sums over parts; a mean over keys is one row.

    Attributes:
        parts: what the rows are.
        whole: each part's vector in head space [row part d_head], after QK-norm and rotary.
        terms: for each LN term, what it adds to the vector: the vector minus what it would be without it [row d_head].
    """

    parts: list[Part]
    whole: Float[Tensor, "row part d_head"]
    terms: dict[str, Float[Tensor, "row d_head"]]


@dataclass(frozen=True, eq=False)
class Head:
    """One head on one prompt.

    Attributes:
        heads: the layer's maps; head: which one.
        site, where: the norm that attention reads (or what replaces it), and the name of that place.
        split: of every position of the prompt.
        seen: what attention did.
        bound: relative error that rounding explains.
        features, named: dictionaries, and which of their features get a row each.
        first: the row of position 0 among the features' activations.
    """

    heads: Heads
    head: int
    site: Norm
    where: str
    split: Split
    seen: AttentionInput
    bound: float
    features: Sequence[Features] = ()
    named: Sequence[Sequence[int]] = ()
    first: int = 0

    @property
    def length(self) -> int:
        return len(self.seen.x)

    @cached_property
    def mask(self) -> Bool[Tensor, "query key"]:
        """What each query sees, [query key] (attention of 0 may be a very small one)."""
        return visible_keys(self.length, self.length, causal=self.heads.causal, window=self.heads.window)

    @cached_property
    def queries(self) -> Float64[Tensor, "pos d_head"]:
        """From what the norm really put out, on the CPU; likewise `keys`."""
        return self.heads.queries(self.seen.y)[:, self.head].cpu()

    @cached_property
    def keys(self) -> Float64[Tensor, "pos d_head"]:
        return self.heads.keys(self.seen.y)[:, self.head].cpu()

    def position_bias(self, queries: Sequence[int]) -> Float64[Tensor, "query key"] | None:
        """What ALiBi adds to the scores: −slope·distance, in nats (Press et al. 2022, section 3); None without."""
        if self.heads.slopes is None:
            return None
        distance = torch.arange(self.length, dtype=torch.float64) - torch.tensor(queries).double()[:, None]
        return self.heads.slopes[self.head].cpu() * distance

    def scores(self, queries: Sequence[int]) -> Float64[Tensor, "query key"]:
        """Of some queries, 0 where a query does not see the key."""
        scores = self.queries[list(queries)] @ self.keys.T / self.heads.divisor
        added = self.position_bias(queries)
        scores = scores if added is None else scores + added
        return torch.where(self.mask[list(queries)], scores, 0.0)

    def side(self, name: str, positions: Sequence[int], typical: float | None = None) -> Side:
        """The queries (name Q) or keys (K) at some positions; LN terms where a `typical` sigma is given."""
        maps = self.heads
        W, b, norm = (maps.W_Q, maps.b_Q, maps.q_norm) if name == "Q" else (maps.W_K, maps.b_K, maps.k_norm)
        W, b = W[self.head].cpu(), b[self.head].cpu()
        site, at, split = self.site, torch.tensor(positions), self.split.rows(positions)
        gain, lift = gain_of(site), bias_of(site)
        x = split.input(self.where)
        sigma = site.sigma(x)  # [row 1]
        readings = torch.cat([(W * gain[:, None]).T, torch.full((1, site.d), 1.0 / site.d, dtype=torch.float64)])
        f = readings.expand(len(at), -1, -1)
        values = split.read(self.where, f)
        for given, chosen in zip(self.features, self.named, strict=True):
            rows = (at + self.first).tolist()
            values = given.split(values, f, split.record, rows, chosen, self.bound)
        read = torch.stack(list(values.values()), 1)  # [row part d_head+1]
        fixed = {Part(f"b_{name}", "bias", site.layer): b}
        if not site.is_identity:
            fixed = {Part("norm bias", "norm bias", site.layer): lift @ W, **fixed}
        parts = [*values, *fixed]
        of_mean = read[..., -1:] * (gain @ W) if site.projects else torch.zeros_like(read[..., :-1])
        of_stream = (read[..., :-1] - of_mean) / sigma[:, None]
        plain = torch.cat([of_stream, torch.stack(list(fixed.values())).expand(len(at), -1, -1)], 1)
        terms: dict[str, Tensor] = {}
        if typical is not None:
            terms = {
                "projection": 0.0 - of_mean.sum(1) / sigma,
                "gain": of_stream.sum(1) - site.project(x) / sigma @ W,
                "bias": (lift @ W).expand(len(at), -1),
                "sigma": of_stream.sum(1) * (1.0 - sigma / typical),
            }
        if norm is not None:
            own, inner, shift = self.inner(norm, name, plain, positions)
            plain = projected(norm, plain) / own[:, None] * inner
            terms = {t: projected(norm, v) / own * inner for t, v in terms.items()}
            if shift is not None:
                parts.append(Part(f"{norm.name} bias", "norm bias", site.layer))
                plain = torch.cat([plain, shift.expand(len(plain), 1, -1)], 1)
        if self.heads.rotary is not None:
            plain = self.heads.rotary(plain, at)  # (parts stand where heads do: all of a row at one position)
            terms = {t: self.heads.rotary(v[:, None], at)[:, 0] for t, v in terms.items()}
        return Side(parts, plain, terms)

    def inner(
        self, norm: Norm, name: str, plain: Float[Tensor, "row part d_head"], positions: Sequence[int]
    ) -> tuple[Float64[Tensor, "row 1"], Float64[Tensor, " d_head"], Float64[Tensor, " d_head"] | None]:
        """Sigma of a norm of queries or keys, and its gain and bias for this head.

        OLMo 2 normalizes all heads together: its sigma is that of all of them, and each head has its piece of the gain.
        """
        d_head = plain.shape[-1]
        gain, bias = gain_of(norm), None if norm.bias is None else bias_of(norm)
        if norm.d == d_head:
            return norm.sigma(plain.sum(1)), gain, bias
        W, b = (self.heads.W_Q, self.heads.b_Q) if name == "Q" else (self.heads.W_K, self.heads.b_K)
        repeats = len(W) // (norm.d // d_head)  # of a grouped-query key
        y = self.seen.y[list(positions)].to(W)
        together = (torch.einsum("pd,hdk->phk", y, W) + b)[:, ::repeats].flatten(1).cpu()
        piece = slice(self.head // repeats * d_head, (self.head // repeats + 1) * d_head)
        return norm.sigma(together), gain[piece], None if bias is None else bias[piece]

    def mean_keys(self, positions: Sequence[int], typical: float) -> Side:
        """The mean of the keys at these positions, some at a time."""
        sums: dict[str, Tensor] = {}
        for some in in_chunks(positions):
            keys = self.side("K", some, typical)
            for name, vectors in {"whole": keys.whole, **keys.terms}.items():
                added = vectors.sum(0, keepdim=True)
                sums[name] = sums[name] + added if name in sums else added
        means = {name: vectors * (1.0 / len(positions)) for name, vectors in sums.items()}
        return Side(keys.parts, means.pop("whole"), means)


def projected(norm: Norm, vectors: Float[Tensor, "*row d_head"]) -> Float[Tensor, "*row d_head"]:
    """Px of a head's queries or keys; they are a piece of what OLMo 2's norms normalize, which do not project."""
    return norm.project(vectors) if norm.projects else vectors


def in_chunks(positions: Sequence[int]) -> list[list[int]]:
    return [list(positions[i : i + AT_ONCE]) for i in range(0, len(positions), AT_ONCE)]


def read_by(norms: Sequence[Norm], wiring: Wiring, layer: int) -> tuple[Norm, str]:
    """Return what attention of a layer reads, a norm or the identity, and the name of that place.

    Args:
        norms: of the model, identities included.

    Raises:
        AttributionError: it reads neither.
        SplitError: what is read there is not known to be a sum.
    """
    site = next((n for n in norms if layer in n.attention_layers), None)
    if site is None:
        raise AttributionError(f"attention of layer {layer} reads neither a norm nor the residual stream")
    where = f"blocks.{layer}" if site.is_identity else site.name
    wiring.at(where)  # raises before the prompt runs
    return site, where


def heads_of(split: Split, looks: Sequence[AttentionInput], site: Norm, where: str) -> list[Head]:
    """The first head of a layer on each prompt of a record; its maps are checked against the pattern.

    Args:
        split: with a row per position of one prompt after the other.
        looks: what the layer's attention did in each prompt.
        site, where: as `read_by` gives them.
    """
    if not looks:
        raise AttributionError(f"attention that reads {where} shows no pattern, so its scores cannot be checked")
    heads = list[Head]()
    for look in looks:
        maps = read_heads(look, split.wiring.norms, bent=True)
        first = len(heads) * len(look.x)
        own = split.rows(range(first, first + len(look.x)))
        heads.append(Head(maps, 0, site, where, own, look, split.wiring.bound))
    return heads


# ---------------------------------------------------------------------------------------- sums


def _append(looks: list[AttentionInput], _: int, look: AttentionInput) -> None:
    looks.append(look)


def _check_visible(one: Head, query: int, keys: Sequence[int]) -> None:
    """Raise AttributionError if a query does not see one of some keys."""
    for key in keys:
        if not bool(one.mask[query, key]):
            visible = torch.nonzero(one.mask[query])[:, 0].tolist()
            ends = dict.fromkeys(map(str, (visible[0], visible[-1])))
            raise AttributionError(f"query {query} does not see key {key}: it sees {' … '.join(ends)}")


def _label(one: Head, query: int | None, key: int | None, against: int | str | None) -> str:
    label = f"score{'s' if query is None or key is None else ''} of L{one.seen.layer}H{one.head}"
    label += "" if query is None else f" from {query}"
    label += "" if key is None else f" to {key}"
    if against is None:
        return label
    return f"{label} minus {'the mean of those it sees' if against == MEAN else f'to {against}'}"


def _pairs(one: Head, query: int, key: int, other: Sequence[int]) -> dict[str, Any]:
    """Return `pairs`, `terms` and both sides' parts of one score, minus the mean score of other keys."""
    one.split.rows(sorted({query, key, *other})).check(one.where)
    visible = torch.nonzero(one.mask[query])[:, 0]
    typical = float(one.site.sigma(one.seen.x[visible.to(one.seen.x.device)].double()).median())
    queries, asked = one.side("Q", [query], typical), one.side("K", [key], typical)
    two = one.mean_keys(other, typical) if other else None

    def difference(term: str) -> Float[Tensor, " d_head"]:
        return asked.terms[term][0] if two is None else asked.terms[term][0] - two.terms[term][0]

    keys = asked.whole[0] if two is None else asked.whole[0] - two.whole[0]
    matrix = queries.whole[0] @ keys.T / one.heads.divisor
    q_parts, k_parts = list(queries.parts), list(asked.parts)
    if (lifts := one.position_bias([query])) is not None:  # a separate pair: what ALiBi adds is of no other part
        lift = float(lifts[0, key]) - (float(lifts[0, other].mean()) if other else 0.0)
        matrix = torch.block_diag(matrix, torch.full((1, 1), lift, dtype=torch.float64))
        for parts in (q_parts, k_parts):
            parts.append(Part("position bias", "bias", one.seen.layer))
    q, k = queries.whole.sum(1)[0] / one.heads.divisor, keys.sum(0)
    terms = [
        *(("query", term, float(queries.terms[term][0] @ k) / one.heads.divisor) for term in _TERMS),
        *(("key", term, float(q @ difference(term))) for term in _TERMS),
    ]
    table = pd.DataFrame(terms, columns=["side", "term", "contribution"])
    rows, columns = ([part.name for part in parts] for parts in (q_parts, k_parts))
    return {
        "pairs": pd.DataFrame(matrix.numpy(), rows, columns),
        "terms": table.assign(meaning=table["term"].map(_TERMS)),
        "components": tuple(k_parts),
        "query_components": tuple(q_parts),
    }


def _scores(
    one: Head, queries: list[int], keys: list[int], against: int | str | None, side: str, pairs: pd.DataFrame | None
) -> tuple[list[Part], dict[str, Tensor]]:
    """Return one prompt's scores by the parts of one side, as `ScoreAttribution` holds them; `pairs`: of one score."""
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

    pieces: list[Tensor] = []
    parts: list[Part] = []
    if pairs is not None:
        values = torch.tensor(pairs.sum(axis=0).to_numpy())[:, None, None]
    elif side == "key":
        needed = sorted({*keys, *torch.nonzero(share.sum(0))[:, 0].tolist()})
        one.split.rows(needed).check(one.where)
        q = one.queries[queries] / heads.divisor
        for some in in_chunks(needed):
            parts, whole, _ = one.side("K", some)
            pieces.append(torch.einsum("kpd,qd->pqk", whole, q))
        every = torch.zeros(len(parts), len(queries), one.length, dtype=torch.float64)
        every[:, :, needed] = torch.cat(pieces, 2)
        values = less(every)
    else:
        one.split.rows(queries).check(one.where)
        difference = (one.keys[keys] - share @ one.keys) / heads.divisor  # [query d_head]: there is one key
        for some, of_keys in zip(in_chunks(queries), difference.split(AT_ONCE), strict=True):
            parts, whole, _ = one.side("Q", some)
            pieces.append(torch.einsum("qpd,qd->pq", whole, of_keys)[:, :, None])
        values = torch.cat(pieces, 1)
    if lifts is not None and pairs is None:
        parts = [*parts, Part("position bias", "bias", one.seen.layer)]
        values = torch.cat([values, less(lifts)[None]])
    return parts, {
        "values": values.masked_fill(~seen, math.nan),
        "own": less(scores).masked_fill(~seen, math.nan),
        "scale": scores.abs().amax(1, keepdim=True).clamp_min(1e-300).expand(seen.shape),
        "weight": one.seen.pattern[one.head][queries][:, keys].double().cpu(),
        "queries": torch.tensor(queries)[:, None].expand(seen.shape),
        "keys": torch.tensor(keys).expand(seen.shape),
    }


def _attribution(
    ordered: Sequence[Head], query: int | None, key: int | None, against: int | str | None
) -> ScoreAttribution:
    """Return the attribution of each prompt's scores, filled up behind the end of a prompt."""
    side = "query" if query is None and key is not None else "key"
    single, first = len(ordered) == 1 and query is not None and key is not None, ordered[0]
    parts, by_prompt, more = list[Part](), list[dict[str, Tensor]](), dict[str, Any]()
    rows = [one.first + p for one in ordered for p in range(one.length)]
    label = _label(first, query, key, against)
    for one in ordered:
        queries = list(range(one.length)) if query is None else [place(query, one.length, "query")]
        keys = list(range(one.length)) if key is None else [place(key, one.length, "key")]
        other = against if against is None or isinstance(against, str) else place(against, one.length, "against")
        if query is not None:
            _check_visible(
                one, queries[0], [*([] if key is None else keys), *([other] if isinstance(other, int) else [])]
            )
        subtracted = list[int]()
        if single and other is not None:
            subtracted = torch.nonzero(one.mask[queries[0]])[:, 0].tolist() if isinstance(other, str) else [other]
        if single:
            rows = [one.first + p for p in sorted({*queries, *keys, *subtracted})]
            label = _label(one, queries[0], keys[0], other)
        one = replace(one, named=[given.chosen(rows) for given in one.features])
        if single:
            more = _pairs(one, queries[0], keys[0], subtracted)
        parts, tensors = _scores(one, queries, keys, other, side, more.get("pairs"))
        by_prompt.append(tensors)
    most_queries, most_keys = (max(t["own"].shape[axis] for t in by_prompt) for axis in (0, 1))
    fields: dict[str, Any] = {}
    for name in by_prompt[0]:
        fill = -1 if name in ("queries", "keys") else math.nan
        each = [t[name] for t in by_prompt]  # [… query key]
        behind = [(0, most_keys - t.shape[-1], 0, most_queries - t.shape[-2]) for t in each]
        fields[name] = torch.stack([pad(t, size, value=fill) for t, size in zip(each, behind, strict=True)], -3)
        if query is not None or key is not None:
            fields[name] = fields[name].squeeze(-1 if query is None else -2)
    fields["total"] = fields["values"].sum(0)
    if single:
        fields |= {name: float(fields[name]) for name in ("total", "own", "scale", "weight")}
    return ScoreAttribution(
        **{"components": tuple(parts), **fields, **more},
        side=side,
        bound=first.bound,
        label=label,
        soft_cap=first.heads.soft_cap,
    )
