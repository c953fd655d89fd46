"""Why does this head attend here? One attention score as a sum over pairs of parts, through norms, biases and rotary.

    score = (W_Q LN(x_q) + b_Q)ᵀ R (W_K LN(x_k) + b_K) / divisor

is bilinear in the parts of both sides once both sigmas are held (Elhage et al. 2021, section on QK circuits, has it
without norms; `docs/attribution.md`). A QK-norm holds its own sigma too; what ALiBi adds is a pair of its own,
"position bias". Against another key, or the mean over the keys that the query sees, it is the difference of two such
sums: what softmax depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from ln_probe.analyses.attribution.features import Features
from ln_probe.analyses.attribution.shared import MEAN, AttributionError, Bar, draw, largest, part_columns, place, prompt
from ln_probe.hooks.attention import Heads, read_heads
from ln_probe.hooks.capture import AttentionInput, stream, visible_keys
from ln_probe.hooks.components import Part, Split, record
from ln_probe.hooks.model import HookedModel, check_model, evaluating, n_layers
from ln_probe.hooks.norm import Site
from ln_probe.hooks.sites import facts_of

COLUMNS = ("side", "part", "kind", "layer", "index", "contribution")
AT_ONCE = 16  # positions whose parts are held at once
SHOWN = 8  # pairs in the picture, above the eight LN terms


@dataclass(frozen=True, eq=False)
class ScoreAttribution:
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

    def to_torch(self) -> Float64[Tensor, "query_part key_part"]:
        """`pairs` as a tensor."""
        return torch.tensor(self.pairs.to_numpy(dtype=float))

    @property
    def error(self) -> float:
        """|total − own| relative to `scale`."""
        return abs(self.total - self.own) / self.scale

    def check(self) -> ScoreAttribution:
        """This, if the pairs add up to the model's own score.

        Raises:
            AttributionError: they do not; says by how much.
        """
        if not self.error <= self.bound:
            raise AttributionError(
                f"the parts add up to {self.total:.6g}, and the model's own {self.label} is {self.own:.6g}: "
                f"{self.error:.1e} of the largest score apart (rounding explains {self.bound:.0e})"
            )
        return self

    def top(self, k: int = 10) -> pd.DataFrame:
        """The k pairs that contribute most, either way: `query_part`, `key_part`, `contribution`."""
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
class _Side:
    """The queries, or the keys, of some positions as sums over parts.

    Attributes:
        parts: what the rows are.
        whole: each part's vector in head space [row part d_head], after QK-norm and rotary.
        terms: for each LN term, what it adds to the vector: the vector minus what it would be without it [row d_head].

    A mean over keys is one row.
    """

    parts: list[Part]
    whole: Float[Tensor, "row part d_head"]
    terms: dict[str, Float[Tensor, "row d_head"]]

    def times(self, factor: float) -> _Side:
        return _Side(self.parts, self.whole * factor, {t: v * factor for t, v in self.terms.items()})

    def plus(self, other: _Side) -> _Side:
        terms = {t: v + other.terms[t] for t, v in self.terms.items()}
        return _Side(self.parts, self.whole + other.whole, terms)


_TERMS = {
    "projection": "left out: the mean stays in",
    "gain": "set to 1",
    "bias": "set to 0",
    "sigma": "set to its median over the tokens that the query sees",
}


def _side(
    split: Split,
    site: Site,
    W: Float[Tensor, "d_model d_head"],
    b: Float[Tensor, " d_head"],
    norm: Site | None,
    heads: Heads,
    at: Int[Tensor, " row"],
    typical: float,
    name: str,
    features: Callable[[dict[Part, Tensor], Tensor, Split, Int[Tensor, " row"]], dict[Part, Tensor]],
) -> _Side:
    """The queries (name Q) or keys (K) of one head at the recorded positions `at`."""
    gain = torch.ones(site.d).double() if site.gain is None else site.gain.detach().cpu().double()
    lift = torch.zeros(site.d).double() if site.bias is None else site.bias.detach().cpu().double()
    sigma = split.sigma(site.name)  # [row 1]
    f = torch.cat([(W * gain[:, None]).T, torch.full((1, site.d), 1.0 / site.d, dtype=torch.float64)])
    f = f.expand(len(sigma), -1, -1)
    values = features(split.read(site.name, f), f, split, at)
    read = torch.stack(list(values.values()), 1)  # [row part d_head+1]
    parts = [*values, Part("norm bias", "norm bias", site.layer), Part(f"b_{name}", "bias", site.layer)]
    taken = read[..., -1:] * (gain @ W) if site.projects else torch.zeros_like(read[..., :-1])
    kept = (read[..., :-1] - taken) / sigma[:, None]
    fixed = torch.stack([lift @ W, b.expand(W.shape[1])]).expand(len(sigma), -1, -1)
    plain = torch.cat([kept, fixed], 1)  # [row part d_head]
    whole = plain.sum(1)
    x = split.input(site.name)
    terms = {
        "projection": 0.0 - taken.sum(1) / sigma,
        "gain": kept.sum(1) - site.project(x) / sigma @ W,
        "bias": (lift @ W).expand_as(whole),
        "sigma": kept.sum(1) * (1.0 - sigma / typical),
    }
    if norm is not None:
        if norm.d != W.shape[1]:
            raise AttributionError(f"{norm.name} normalizes all heads together, so no head's score divides into parts")
        own = norm.sigma(whole)
        inner = torch.ones(norm.d).double() if norm.gain is None else norm.gain.detach().cpu().double()
        plain = norm.project(plain) / own[:, None] * inner
        shift = torch.zeros(norm.d).double() if norm.bias is None else norm.bias.detach().cpu().double()
        terms = {t: norm.project(v) / own * inner for t, v in terms.items()}
        if norm.bias is not None:
            parts.append(Part(f"{norm.name} bias", "norm bias", site.layer))
            plain = torch.cat([plain, shift.expand(len(plain), 1, -1)], 1)
    if heads.rotary is not None:
        plain = heads.rotary(plain, at)  # (parts stand where heads do: all of a row at one position)
        terms = {t: heads.rotary(v[:, None], at)[:, 0] for t, v in terms.items()}
    return _Side(parts, plain, terms)


def attribute_scores(
    model: object,
    tokens: object,
    layer: int,
    head: int,
    query: int,
    key: int,
    against: int | str | None = None,
    features: Sequence[Features] | Features | None = None,
) -> ScoreAttribution:
    """Why a head attends where it does: one score, exactly, as a sum over parts of the query × parts of the key.

    Args:
        model: HookedTransformer, TransformerBridge or lab model whose attention reads a norm.
        tokens: one prompt (text, ids [pos] or [1 pos]).
        layer, head: which head; negative from the end.
        query, key: positions in the prompt; negative from the end.
        against: another key's position, whose score is subtracted; "mean": the mean score of the keys that the query
            sees; None: the score itself (which softmax does not see: it depends on differences).
        features: dictionaries whose features replace the components that they reconstruct, on both sides.

    Raises:
        TypeError: not a TransformerLens model.
        AttributionError: a layer, head or position out of range; a key that the query does not see; attention that
            reads no norm.
        UnsupportedAttentionError: scores that are not a scaled dot product (a soft cap).
        SplitError: the parts do not add up to what the norm reads: names the place and how much is missing.
    """
    hooked = check_model(model)
    ids = prompt(hooked, tokens)
    layer = place(layer, n_layers(hooked), "layer", "the model", "layers")
    dictionaries = [features] if isinstance(features, Features) else list(features or ())
    for given in dictionaries:
        given.check(int(hooked.cfg.d_model), 1, len(ids))
    points = {given.hook_name: given.point(hooked) for given in dictionaries}
    q_at, k_at = place(query, len(ids), "query"), place(key, len(ids), "key")
    with evaluating(hooked):
        facts = facts_of(hooked)
        sites = facts.norms()
        site = next((s for s in sites if layer in s.attention_layers), None)
        if site is None:
            raise AttributionError(
                f"attention of layer {layer} reads no norm, so there is no norm to attribute through"
            )
        wiring = facts.wiring
        wiring.at(site.name)  # raises before the prompt runs
        seen, heads = _heads(hooked, ids, sites, layer)
        head = place(head, heads.n_heads, "head", f"layer {layer}", "heads")
        mask = visible_keys(len(ids), len(ids), causal=heads.causal, window=heads.window)
        visible = [int(i) for i in torch.nonzero(mask[q_at])[:, 0]]  # (attention of 0 may be a very small one)
        if k_at not in visible:
            raise AttributionError(f"query {q_at} does not see key {k_at}: it sees {_ranges(visible)}")
        other = _against(against, len(ids), visible, q_at)
        rows = sorted({q_at, k_at, *(other or ())})
        split = Split(wiring, record(hooked, ids, rows, sites, points=points))
    split.check(site.name)
    named = [given.chosen(rows) for given in dictionaries]
    rounding = wiring.bound(site.name, seen.x.dtype)

    def with_features(values: dict[Part, Tensor], f: Tensor, few: Split, at: Int[Tensor, " row"]) -> dict[Part, Tensor]:
        for given, chosen in zip(dictionaries, named, strict=True):
            values = given.split(values, f, few.record, at.tolist(), chosen, rounding)
        return values

    typical = float(site.sigma(seen.x[visible].double()).median())

    def side(W: Tensor, b: Tensor, norm: Site | None, places: list[int], name: str) -> _Side:
        """The mean over these positions; 512 keys of GPT-2's shape at once would take 0.2 GB a layer."""
        made: _Side | None = None
        for some in (places[i : i + AT_ONCE] for i in range(0, len(places), AT_ONCE)):
            few, at = split.rows([rows.index(p) for p in some]), torch.tensor(some)
            found = _side(few, site, W[head].cpu(), b[head].cpu(), norm, heads, at, typical, name, with_features)
            summed = _Side(
                found.parts,
                found.whole.sum(0, keepdim=True),
                {t: v.sum(0, keepdim=True) for t, v in found.terms.items()},
            )
            made = summed if made is None else made.plus(summed)
        assert made is not None
        return made.times(1.0 / len(places))

    queries = side(heads.W_Q, heads.b_Q, heads.q_norm, [q_at], "Q")
    one = side(heads.W_K, heads.b_K, heads.k_norm, [k_at], "K")
    two = None if other is None else side(heads.W_K, heads.b_K, heads.k_norm, other, "K")

    def score(q: Tensor, k: Tensor) -> float:
        return float((q * k).sum()) / heads.divisor

    def difference(term: str | None = None) -> Float[Tensor, " d_head"]:
        mine = [s.whole.sum(1)[0] if term is None else s.terms[term][0] for s in (one, two) if s is not None]
        return mine[0] if two is None else mine[0] - mine[1]

    keys = one.whole[0] if two is None else one.whole[0] - two.whole[0]
    matrix = queries.whole[0] @ keys.T / heads.divisor
    q_parts, k_parts = list(queries.parts), list(one.parts)
    if heads.slopes is not None:  # a pair of its own: what ALiBi adds is of no other part
        lifts = _position_bias(heads, head, q_at, len(ids))
        lift = float(lifts[k_at]) - (0.0 if other is None else float(lifts[other].mean()))
        matrix = torch.block_diag(matrix, torch.full((1, 1), lift, dtype=torch.float64))
        for parts in (q_parts, k_parts):
            parts.append(Part("position bias", "bias", layer))
    q_whole = queries.whole.sum(1)[0]
    total = float(matrix.sum())
    terms = [
        {"side": which, "term": term, "contribution": value, "meaning": meaning}
        for which, values in (
            ("query", {t: score(queries.terms[t][0], difference()) for t in _TERMS}),
            ("key", {t: score(q_whole, difference(t)) for t in _TERMS}),
        )
        for (term, meaning), value in zip(_TERMS.items(), values.values(), strict=True)
    ]
    own = _own_scores(heads, seen, head, q_at)
    from_model = float(own[k_at]) - (0.0 if other is None else float(own[other].mean()))
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
        total,
        from_model,
        max(float(own[visible].abs().max()), 1e-300),
        rounding,
        float(seen.pattern[head, q_at, k_at]),
        label,
    )


def _row(side: str, part: Part, value: float) -> dict[str, object]:
    return {"side": side, **part_columns(part), "contribution": value}


def _ranges(visible: list[int]) -> str:
    return f"{visible[0]} … {visible[-1]}" if len(visible) > 1 else str(visible[0])


def _against(against: int | str | None, length: int, visible: list[int], query: int) -> list[int] | None:
    """The positions whose mean score is subtracted; None: nothing is."""
    if against is None:
        return None
    if isinstance(against, str):
        if against != MEAN:
            raise AttributionError(f"against must be a position, {MEAN!r} or None, got {against!r}")
        return visible
    at = place(against, length, "against")
    if at not in visible:
        raise AttributionError(f"query {query} does not see key {at}: it sees {_ranges(visible)}")
    return [at]


def _heads(
    model: HookedModel, ids: Int[Tensor, " pos"], sites: Sequence[Site], layer: int
) -> tuple[AttentionInput, Heads]:
    found: list[tuple[AttentionInput, Heads]] = []

    def look(seen: AttentionInput) -> None:
        norms: dict[str, Any] = {s.reads: s for s in sites if s.layer == layer and s.reads in ("query", "key")}
        found.append((seen, read_heads(layer, seen.attn, norms, seen.y, seen.pattern, seen.cos_sin)))

    stream(model, ids, sites, on_attention=look, layers=[layer])
    return found[0]


def _own_scores(heads: Heads, seen: AttentionInput, head: int, query: int) -> Float64[Tensor, " key"]:
    """Scores of one query from what the norm really put out, on the CPU."""
    q, k = heads.queries(seen.y)[query, head], heads.keys(seen.y)[:, head]
    scores = (k @ q / heads.divisor).cpu()
    return scores if heads.slopes is None else scores + _position_bias(heads, head, query, len(scores))


def _position_bias(heads: Heads, head: int, query: int, keys: int) -> Float64[Tensor, " key"]:
    """What ALiBi adds to the scores of one query: −slope·distance, in nats (Press et al. 2022, section 3)."""
    assert heads.slopes is not None
    return heads.slopes[head].cpu() * (torch.arange(keys, dtype=torch.float64) - query)
