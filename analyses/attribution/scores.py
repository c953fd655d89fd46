"""Why does this head attend here? One attention score as a sum over pairs of parts, through norms, biases and rotary.

    score = (W_Q LN(x_q) + b_Q)ᵀ R (W_K LN(x_k) + b_K) / divisor

is bilinear in the parts of both sides once both sigmas are held, a QK-norm's too (`docs/attribution.md`; Elhage et al.
2021 have it without norms). Scores are meant before a soft cap; a sink in the softmax is of no key, so of no score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from ln_probe.analyses.attribution.features import Features, dictionaries
from ln_probe.analyses.attribution.shared import MEAN, AttributionError, Prompts, Sums, one_of, part_columns, place
from ln_probe.hooks.attention import Heads, read_heads
from ln_probe.hooks.components import Part, Split, find_wiring, record
from ln_probe.hooks.model import attentions, check_model, evaluating
from ln_probe.hooks.norm import Norm, bias_of, gain_of
from ln_probe.hooks.norms import structure_of
from ln_probe.hooks.stream import AttentionInput, streaming, visible_keys

AT_ONCE = 64  # positions whose parts are held at once: of GPT-2's shape 5 MB


@dataclass(frozen=True, eq=False, repr=False)
class ScoreAttribution(Sums):
    """Attention scores (or differences of scores) of one head, each as a sum over components of the key.

    Attributes:
        components: of the key: what the rows of `values` are. The query's are summed.
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
    values: Float64[Tensor, "component batch *pos"]
    total: Any
    own: Any
    scale: Any
    weight: Any
    queries: Int[Tensor, " batch *pos"]
    keys: Int[Tensor, " batch *pos"]
    bound: float
    label: str
    soft_cap: float
    pairs: pd.DataFrame | None = None
    terms: pd.DataFrame | None = None
    query_components: tuple[Part, ...] = ()
    _entries = "scores"

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per component and score: `batch`, `query`, `key`, `side`, `part`, `kind`, `layer`, `index`,
        `contribution`; of one score without the first three, and by components of either `side`."""
        if self.pairs is None:
            values = self.values[:, self.total.isfinite()].T.reshape(-1).numpy()
            return self._rows(query=self.queries, key=self.keys).assign(contribution=values)
        sides = [part_columns(self.query_components, side="query"), self._components()]
        sums = [self.pairs.sum(axis=1), self.pairs.sum(axis=0)]
        return pd.concat(sides, ignore_index=True).assign(contribution=pd.concat(sums).to_numpy())

    def _components(self) -> pd.DataFrame:
        return part_columns(self.components, side="key")

    def _summands(self) -> pd.DataFrame:
        assert self.pairs is not None
        pairs = pd.Series(self.pairs.stack(), name="contribution")
        return pairs.rename_axis(["query_part", "key_part"]).reset_index()

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
    """Write a head's attention scores as exact sums over components of the key; one score by those of the query, too.

    Args:
        model, tokens_or_cache: as for `attribute_logits`.
        layer, head: which head; negative from the end.
        query, key: positions; negative from the end of each prompt; None: all. With both, for one prompt, the result
            has a sum over pairs of components of the query and of the key.
        against: another key's position, whose score is subtracted; "mean": the mean score of the keys that the query
            sees; None: the score itself (attention depends on differences of scores only).
        features: dictionaries whose features replace the components that they reconstruct, on both sides.
        pos, pos_slice: TransformerLens's names of `query`.

    Raises:
        TypeError, SplitError: as for `attribute_logits`.
        AttributionError: a layer, head or position out of range; a key that the query does not see; attention behind
            an unknown module; features that do not fit.
        UnsupportedAttentionError: scores that are not a scaled dot product.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> one = ln_probe.attribute_scores(model, "The ships came home.", 1, 0, -1, 0, against="mean").check()
        >>> every = ln_probe.attribute_scores(model, "The ships came home.", 1, 0, -1).check()
    """
    hooked = check_model(model)
    query = one_of(query=query, pos=pos, pos_slice=pos_slice)
    layer = place(layer, len(hooked.blocks), "layer", "the model")
    if isinstance(against, str) and against != MEAN:
        raise AttributionError(f"against must be a position, {MEAN!r} or None, got {against!r}")
    with evaluating(hooked):
        norms = structure_of(hooked).attention_inputs
        wiring = find_wiring(hooked, norms)
        site = next((norm for norm in norms if layer in norm.attention_layers), None)
        if site is None:
            raise AttributionError(f"attention of layer {layer} reads neither a norm nor the residual stream")
        where = f"blocks.{layer}" if site.is_identity else site.name
        wiring.at(where)  # raises before the prompt runs
        prompts = Prompts(hooked, tokens_or_cache)
        wanted, points = dictionaries(hooked, features, prompts.lengths)
        each: dict[int, Head] = {}
        for members in prompts.of_equal_length():
            if prompts.cache is None:
                tokens, by_prompt = prompts.tokens(members), dict[int, AttentionInput]()
                attn = {layer: attentions(hooked.blocks)[layer]}
                with streaming(attn, tokens, [site], on_attention=by_prompt.__setitem__):
                    seen = record(hooked, tokens, range(tokens.numel()), norms, points, logits=False)
                looks = list(by_prompt.values())
            else:
                seen = prompts.cache.record(range(sum(prompts.lengths)), wiring, where, points)
                looks = prompts.cache.attention(site, layer, where)
            if not looks:
                raise AttributionError(f"attention that reads {where} shows no pattern: its scores cannot be checked")
            for k, (number, look) in enumerate(zip(members, looks, strict=True)):
                heads, length = read_heads(look, wiring.norms, bent=True), len(look.x)
                split = Split(wiring, seen).rows(range(k * length, (k + 1) * length))
                first = number * max(prompts.lengths)
                head = place(head, heads.n_heads, "head", f"layer {layer}")
                each[number] = Head(heads, head, site, where, split, look, first, length).asked(query, key, against)
    ordered = [each[number] for number in range(len(each))]
    single = len(ordered) == 1 and query is not None and key is not None
    rows = [one.first + p for one in ordered for p in (one.needed if single else range(one.length))]
    ordered = [replace(one, chosen=[(given, given.chosen(rows)) for given in wanted]) for one in ordered]
    return _attribution(ordered, query, key, against, single=single)


@dataclass(frozen=True, eq=False)
class Head:
    """One head on one prompt, and which of its scores are asked for.

    Attributes:
        site, where: the norm that attention reads (or what replaces it), and the name of that place.
        first: the row of position 0 among the features' activations.
        against: the position, or "mean", whose score is subtracted.
        chosen: dictionaries, each with its features that get a row.
    """

    heads: Heads
    head: int
    site: Norm
    where: str
    split: Split
    seen: AttentionInput
    first: int
    length: int
    queries: Sequence[int] = ()
    keys: Sequence[int] = ()
    against: int | str | None = None
    chosen: Sequence[tuple[Features, Sequence[int]]] = ()

    def asked(self, query: int | None, key: int | None, against: int | str | None) -> Head:
        """Return the same for these positions (None: all); AttributionError for a key that is not seen."""
        every = list(range(self.length))
        queries = every if query is None else [place(query, self.length, "query")]
        keys = every if key is None else [place(key, self.length, "key")]
        if against is not None and not isinstance(against, str):
            against = place(against, self.length, "against")
        one = replace(self, queries=queries, keys=keys, against=against)
        others = [against] if isinstance(against, int) else []
        hidden = [k for k in others + (keys if key is not None else []) if not one.mask[0, k]]
        if query is not None and hidden:
            raise AttributionError(f"query {queries[0]} does not see key {hidden[0]}")
        return one

    @cached_property
    def mask(self) -> Bool[Tensor, "query key"]:
        """What each query sees, of all keys (attention of 0 may be a very small one)."""
        every = visible_keys(self.length, self.length, causal=self.heads.causal, window=self.heads.window)
        return every[list(self.queries)]

    @cached_property
    def share(self) -> Float64[Tensor, "query key"]:
        """The share of each key in what is subtracted."""
        if isinstance(self.against, str):
            return self.mask.double() / self.mask.sum(1, keepdim=True)
        share = torch.zeros(self.mask.shape, dtype=torch.float64)
        if self.against is not None:
            share[:, self.against] = 1.0
        return share

    @property
    def needed_keys(self) -> list[int]:
        return sorted({*self.keys, *torch.nonzero(self.share.sum(0))[:, 0].tolist()})

    @property
    def needed(self) -> list[int]:
        return sorted({*self.queries, *self.needed_keys})

    def minus_others(self, values: Float64[Tensor, "*part query key"]) -> Float64[Tensor, "*part query key"]:
        """Return values of the keys asked for minus those that are subtracted, from values of all keys."""
        return values[..., self.keys] - (torch.where(self.mask, values, 0.0) * self.share).sum(-1, keepdim=True)

    @cached_property
    def vectors(self) -> tuple[Float64[Tensor, "pos d_head"], Float64[Tensor, "pos d_head"]]:
        """Queries and keys from what the norm really put out, on the CPU."""
        y = self.seen.y
        return self.heads.queries(y)[:, self.head].cpu(), self.heads.keys(y)[:, self.head].cpu()

    @cached_property
    def position_bias(self) -> Float64[Tensor, "query key"] | None:
        """What ALiBi adds to the scores: −slope·distance, in nats (Press et al. 2022, section 3); None without."""
        if self.heads.slopes is None:
            return None
        distance = torch.arange(self.length, dtype=torch.float64) - torch.tensor(self.queries).double()[:, None]
        return self.heads.slopes[self.head].cpu() * distance

    def side(self, name: str, positions: Sequence[int]) -> tuple[list[Part], Float64[Tensor, "row part d_head"]]:
        """Return the parts of queries (name Q) or keys (K), and each one's vector after QK-norm and rotary; before them
        come vectors of the terms: the whole minus what it would be without each."""
        maps = self.heads
        W, b, norm = (maps.W_Q, maps.b_Q, maps.q_norm) if name == "Q" else (maps.W_K, maps.b_K, maps.k_norm)
        W, b = W[self.head].cpu(), b[self.head].cpu()
        site, at, split = self.site, torch.tensor(positions), self.split.rows(positions)
        gain, lift, x = gain_of(site), bias_of(site), split.input(self.where)
        sigma = site.sigma(x)  # [row 1]
        visible = self.seen.x[self.mask[0].to(self.seen.x.device)]
        typical = float(site.sigma(visible.double()).median())
        readings = torch.cat([(W * gain[:, None]).T, torch.full((1, site.d), 1.0 / site.d, dtype=torch.float64)])
        values = split.read(self.where, readings[None])
        for given, named in self.chosen:
            rows = (at + self.first).tolist()
            values = given.split(values, readings[None], split.record, rows, named, split.wiring.bound)
        read = torch.stack(list(values.values()), 1)  # [row part d_head+1]
        fixed = {Part(f"b_{name}", "bias", site.layer): b}
        if not site.is_identity:
            fixed = {Part("norm bias", "norm bias", site.layer): lift @ W, **fixed}
        parts = [*values, *fixed]
        of_mean = read[..., -1:] * (gain @ W) if site.projects else torch.zeros_like(read[..., :-1])
        of_stream = (read[..., :-1] - of_mean) / sigma[:, None]
        terms = [  # in the order of _TERMS
            0.0 - of_mean.sum(1) / sigma,
            of_stream.sum(1) - site.project(x) / sigma @ W,
            (lift @ W).expand(len(at), -1),
            of_stream.sum(1) * (1.0 - sigma / typical),
        ]
        same = torch.stack(list(fixed.values())).expand(len(at), -1, -1)
        plain = torch.cat([torch.stack(terms, 1), of_stream, same], 1)
        if norm is not None:
            own, inner = self.inner(norm, name, plain[:, len(_TERMS) :].sum(1), positions)
            # (Heads are a piece of what OLMo 2's norms normalize, which do not project.)
            plain = (norm.project(plain) if norm.projects else plain) / own[:, None] * inner
        # (Parts stand where heads do: all of a row at one position.)
        return parts, plain if maps.rotary is None else maps.rotary(plain, at)

    def inner(
        self, norm: Norm, name: str, whole: Float[Tensor, "row d_head"], positions: Sequence[int]
    ) -> tuple[Float64[Tensor, "row 1"], Float64[Tensor, " d_head"]]:
        """Sigma of a norm of queries or keys, and its gain for this head (TransformerLens knows none with a bias).

        OLMo 2 normalizes all heads together: they share one sigma, and each head has its piece of the gain.
        """
        d_head, gain = whole.shape[-1], gain_of(norm)
        if norm.d == d_head:
            return norm.sigma(whole), gain
        W, b = (self.heads.W_Q, self.heads.b_Q) if name == "Q" else (self.heads.W_K, self.heads.b_K)
        repeats = len(W) // (norm.d // d_head)  # of a grouped-query key
        y = self.seen.y[list(positions)].to(W)
        together = (torch.einsum("pd,hdk->phk", y, W) + b)[:, ::repeats].flatten(1).cpu()
        piece = slice(self.head // repeats * d_head, (self.head // repeats + 1) * d_head)
        return norm.sigma(together), gain[piece]

    def sums(self) -> tuple[list[Part], Float64[Tensor, "part query key"]]:
        """Return the scores by the parts of the keys, minus those that are subtracted."""
        queries, needed = self.vectors[0][list(self.queries)] / self.heads.divisor, self.needed_keys
        self.split.rows(needed).check(self.where)
        pieces, parts = list[Tensor](), list[Part]()
        for some in in_chunks(needed):
            parts, vectors = self.side("K", some)
            pieces.append(torch.einsum("kpd,qd->pqk", vectors[:, len(_TERMS) :], queries))
        every = torch.zeros(len(parts), len(queries), self.length, dtype=torch.float64)
        every[:, :, needed] = torch.cat(pieces, 2)
        values = self.minus_others(every)
        if self.position_bias is not None:
            parts = [*parts, Part("position bias", "bias", self.seen.layer)]
            values = torch.cat([values, self.minus_others(self.position_bias)[None]])
        return parts, values

    def pairs(self) -> dict[str, Any]:
        """Return `pairs`, `terms` and both sides' parts of one score, as `ScoreAttribution` holds them."""
        self.split.rows(self.needed).check(self.where)
        q_parts, queries = self.side("Q", self.queries)
        weights = -self.share[0]  # of each key in the difference
        weights[self.keys[0]] += 1.0
        k_parts, keys = list[Part](), torch.zeros(())
        for some in in_chunks(self.needed_keys):
            k_parts, vectors = self.side("K", some)
            keys = keys + torch.tensordot(weights[some], vectors, 1)
        (q_terms, q), (k_terms, k) = (v.tensor_split([len(_TERMS)]) for v in (queries[0] / self.heads.divisor, keys))
        matrix = q @ k.T
        if self.position_bias is not None:  # a separate pair: what ALiBi adds is of no other part
            matrix = torch.block_diag(matrix, self.minus_others(self.position_bias))
            alone = Part("position bias", "bias", self.seen.layer)
            q_parts, k_parts = [*q_parts, alone], [*k_parts, alone]
        rows, columns = ([part.name for part in parts] for parts in (q_parts, k_parts))
        terms = pd.MultiIndex.from_product([["query", "key"], _TERMS], names=["side", "term"]).to_frame(index=False)
        terms["contribution"] = torch.cat([q_terms @ k.sum(0), k_terms @ q.sum(0)]).numpy()
        return {
            "pairs": pd.DataFrame(matrix.numpy(), rows, columns),
            "terms": terms.assign(meaning=terms["term"].map(_TERMS)),
            "components": tuple(k_parts),
            "query_components": tuple(q_parts),
        }

    def numbers(self, values: Float64[Tensor, "part query key"]) -> dict[str, Tensor]:
        """Return the fields of `ScoreAttribution` that have an entry per score [… query key]."""
        seen = self.mask[:, self.keys]
        if isinstance(self.against, int):
            seen = seen & self.mask[:, [self.against]]
        pattern = self.seen.pattern[self.head][list(self.queries)][:, self.keys]
        q, k = self.vectors
        scores = q[list(self.queries)] @ k.T / self.heads.divisor
        scores = scores if self.position_bias is None else scores + self.position_bias
        scores = torch.where(self.mask, scores, 0.0)
        return {
            "values": values.masked_fill(~seen, math.nan),
            "own": self.minus_others(scores).masked_fill(~seen, math.nan),
            "scale": scores.abs().amax(1, keepdim=True).clamp_min(1e-300).expand(seen.shape),
            "weight": pattern.double().cpu(),
            "queries": torch.tensor(self.queries)[:, None].expand(seen.shape),
            "keys": torch.tensor(self.keys).expand(seen.shape),
        }


def in_chunks(positions: Sequence[int]) -> list[list[int]]:
    return [list(positions[i : i + AT_ONCE]) for i in range(0, len(positions), AT_ONCE)]


def _attribution(
    ordered: Sequence[Head], query: int | None, key: int | None, against: int | str | None, *, single: bool
) -> ScoreAttribution:
    """Return the attribution of each prompt's scores, filled up behind the end of a prompt."""
    first = ordered[0]
    if single:
        query, key, against = first.queries[0], first.keys[0], first.against
    label = f"score{'s' if query is None or key is None else ''} of L{first.seen.layer}H{first.head}"
    label += "" if query is None else f" from {query}"
    label += "" if key is None else f" to {key}"
    if against is not None:
        label += " minus the mean of those it sees" if isinstance(against, str) else f" minus to {against}"
    fields: dict[str, Any] = {"label": label}
    if single:
        fields |= first.pairs()
        values = torch.tensor(fields["pairs"].sum(axis=0).to_numpy())[:, None, None]
        by_prompt = [first.numbers(values)]
    else:
        sums = [one.sums() for one in ordered]
        fields["components"] = tuple(sums[0][0])
        by_prompt = [one.numbers(values) for one, (_, values) in zip(ordered, sums, strict=True)]
    most_queries, most_keys = (max(t["own"].shape[axis] for t in by_prompt) for axis in (0, 1))
    for name in by_prompt[0]:
        fill = -1 if name in ("queries", "keys") else math.nan
        each = [numbers[name] for numbers in by_prompt]  # [… query key]
        behind = [(0, most_keys - t.shape[-1], 0, most_queries - t.shape[-2]) for t in each]
        fields[name] = torch.stack([pad(t, size, value=fill) for t, size in zip(each, behind, strict=True)], -3)
        if query is not None or key is not None:
            fields[name] = fields[name].squeeze(-1 if query is None else -2)
    fields["total"] = fields["values"].sum(0)
    if single:
        fields |= {name: float(fields[name]) for name in ("total", "own", "scale", "weight")}
    return ScoreAttribution(**fields, bound=first.split.wiring.bound, soft_cap=first.heads.soft_cap)
