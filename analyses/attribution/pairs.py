"""Why the heads of a layer attend where they do, for a few pairs of query and key each, all in one pass.

`attribute_scores` answers for one pair or for one head at every position, and with every pair of components. A page
asks about every head: the score of a key minus the mean score of the keys that the query sees is linear in the queries
and in the keys, so each side needs one reading of the stream per position, and a layer's readings share its components.
Of a key and many queries (`query` −1) the mean over those queries is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from ln_probe.analyses.attribution.heads import Head, heads_of, projected, read_by
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks.attention import UnsupportedAttentionError
from ln_probe.hooks.capture import record_attention
from ln_probe.hooks.components import Part, Source, Split, SplitError
from ln_probe.hooks.model import HookedModel
from ln_probe.hooks.norm import Site, UnknownNormError, bias_of, gain_of
from ln_probe.hooks.sites import ModelFacts

TERMS = ("projection", "gain", "bias", "sigma")
POSITION = "position bias"
AVERAGE = -1  # in the place of a query: the mean over all queries that see the key and another one
FIRST_QUERY = 8  # of the strongest pairs: earlier queries have little choice
UNEXPLAINED = (AttributionError, SplitError, UnknownNormError, UnsupportedAttentionError)
ROOM = 2**23  # numbers of components held at once: 64 MB


@dataclass(frozen=True, eq=False)
class PairScores:
    """Scores of pairs of one layer, each minus the mean score of the keys that the query sees, in nats.

    Attributes:
        parts: the components.
        head, query, key: of each pair; query AVERAGE: the mean over queries.
        weight, uniform: attention paid to the key, and what it would be if it were uniform.
        score: what is explained.
        sides: contribution of every component of the query and of the key; each side adds up to `score`.
        terms: what each of TERMS of the norm does to the score, on either side (as in `ScoreAttribution.terms`).
    """

    parts: tuple[Part, ...]
    head: Int[np.ndarray, " pair"]
    query: Int[np.ndarray, " pair"]
    key: Int[np.ndarray, " pair"]
    weight: Float[np.ndarray, " pair"]
    uniform: Float[np.ndarray, " pair"]
    score: Float[np.ndarray, " pair"]
    sides: Float[np.ndarray, "pair side part"]
    terms: Float[np.ndarray, "pair side term"]


def strongest(pattern: Float[Tensor, "query key"], count: int) -> list[tuple[int, int]]:
    """The pairs whose attention is farthest above uniform attention, no query or key twice, position 0 apart."""
    length = len(pattern)
    seen = (pattern > 0).sum(1, keepdim=True).clamp_min(1)
    excess = (pattern.double() - 1.0 / seen).clone()
    excess[: min(FIRST_QUERY, length - 1)] = -1.0
    excess[:, 0] = -1.0
    found: list[tuple[int, int]] = []
    while len(found) < count:
        query, key = divmod(int(excess.argmax()), length)
        if excess[query, key] <= 0:
            break
        found.append((query, key))
        excess[query], excess[:, key] = -1.0, -1.0
    return found


def pair_scores(
    model: HookedModel,
    facts: ModelFacts,
    tokens: Int[Tensor, " pos"],
    layers: Sequence[int],
    heads: Sequence[int],
    count: int,
) -> dict[int, PairScores | Exception]:
    """Explain attention to position 0, and each head's strongest pairs, in some layers.

    Args:
        model: any hooked model, in evaluation mode; facts: of it.
        tokens: one prompt of at least two tokens.
        layers, heads: which.
        count: pairs per head beside the mean attention to position 0.

    Returns:
        of every layer its pairs, or the error of a layer that cannot be explained (one of `UNEXPLAINED`).
    """
    found: dict[int, PairScores | Exception] = {}
    made: dict[int, list[_HeadPairs]] = {}
    read: dict[int, tuple[Site, str]] = {}
    for layer in layers:
        try:
            read[layer] = read_by(facts, layer)
        except UNEXPLAINED as error:
            found[layer] = error
    if not read:
        return found
    sites = {layer: site for layer, (site, _) in read.items()}
    kept, looks = record_attention(model, tokens[None], facts.norms(), sites, {})
    split, written = Split(facts.wiring, kept), dict[Source, Tensor]()
    for layer, (site, where) in read.items():
        try:
            (one,) = heads_of(facts, split, looks[layer], site, where)
            one.split.check(where, written)
            pattern = one.seen.pattern.double().cpu()
            made[layer] = [_HeadPairs(replace(one, head=h), pattern[h], count) for h in heads]
        except UNEXPLAINED as error:
            found[layer] = error
    sums: dict[int, Tensor] = {}
    parts: dict[int, tuple[Part, ...]] = {}
    most = max((len(facts.wiring.at(read[layer][1])) * made[layer][0].one.heads.n_heads for layer in made), default=1)
    for rows in torch.arange(len(tokens)).split(max(1, ROOM // (most * facts.read[0].d))):
        some = split.rows(rows.tolist())  # what each component wrote there is made once, for all layers
        for layer, pairs in made.items():
            vectors = some.vectors(read[layer][1])
            parts[layer] = tuple(vectors)
            wide = torch.cat([one.readings(rows.tolist()) for one in pairs]).flatten(1)  # [reading row·d]
            added = torch.stack(list(vectors.values())).flatten(1) @ wide.T
            sums[layer] = sums[layer] + added if layer in sums else added
    for layer, pairs in made.items():
        try:
            found[layer] = _put_together(parts[layer], pairs, sums[layer])
        except AttributionError as error:
            found[layer] = error
    return {layer: found[layer] for layer in layers}


class _HeadPairs:
    """The pairs of one head: the readings of the stream that their scores are, side by side."""

    def __init__(self, one: Head, pattern: Float64[Tensor, "query key"], count: int) -> None:
        self.one, mask, length = one, one.mask.double(), one.length
        share = mask / mask.sum(1, keepdim=True)
        average = torch.nonzero(one.mask[:, 0] & (one.mask.sum(1) > 1))[:, 0].tolist()
        asked = [(average, 0)] * bool(average) + [([q], k) for q, k in strongest(pattern, count)]
        self.pairs = [(q[0] if i or len(average) == 1 else AVERAGE, k) for i, (q, k) in enumerate(asked)]
        self.weight = [float(pattern[q, k].mean()) for q, k in asked]
        self.uniform = [float(share[q, k].mean()) for q, k in asked]
        queries, keys, divisor = one.queries, one.keys, one.heads.divisor
        on_queries, on_keys = (torch.zeros(length, len(asked), keys.shape[-1], dtype=torch.float64) for _ in range(2))
        self.scores, self.lifts = [], []
        for i, (q, k) in enumerate(asked):
            difference = (keys[k] - share[q] @ keys) / divisor
            on_queries[q, i] = difference / len(q)
            on_keys[:, i] = -(share[q].T @ queries[q]) / (divisor * len(q))
            on_keys[k, i] += queries[q].mean(0) / divisor
            lifts = one.position_bias(q)
            self.lifts.append(0.0 if lifts is None else float((lifts[:, k] - (lifts * share[q]).sum(1)).mean()))
            self.scores.append(float((queries[q] * difference).sum(1).mean()) + self.lifts[-1])
        self.scale = max(float(one.scores(range(length)).abs().max()), 1e-300)
        x = one.split.input(one.where)
        sigma = one.site.sigma(x)[:, 0]
        # As `attribute_scores` has it: the median over what the query sees; of many queries, over the prompt.
        typical = torch.stack([sigma[one.mask[q[0]]].median() if len(q) == 1 else sigma.median() for q, _ in asked])
        self.sides = [self._side("Q", on_queries, x, sigma, typical), self._side("K", on_keys, x, sigma, typical)]

    def _side(
        self, name: str, coefficients: Float64[Tensor, "pos pair d_head"], x: Tensor, sigma: Tensor, typical: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Float64[Tensor, "term pair"]]:
        """Readings of one side pulled back through rotary positions and QK-norm: weights, coefficients, what constants
        contribute by name, and the norm's terms."""
        one, site, maps = self.one, self.one.site, self.one.heads
        W, b, norm = one.map(name)
        gain, lift = gain_of(site), bias_of(site)
        at = torch.arange(one.length)
        fixed: dict[str, Tensor] = {}
        with torch.enable_grad():
            made = plain = torch.zeros_like(coefficients, requires_grad=True)
            if norm is not None:
                before = (one.seen.y.double().cpu() @ W + b)[:, None]
                own, inner, shift = one.inner(norm, name, before, range(one.length))
                made = projected(norm, made) / own[:, None] * inner
                if shift is not None:
                    turned = shift.expand(one.length, 1, -1)
                    turned = turned if maps.rotary is None else maps.rotary(turned, at)
                    fixed[f"{norm.name} bias"] = (turned * coefficients).sum((0, 2))
            made = made if maps.rotary is None else maps.rotary(made, at)
            (pulled,) = torch.autograd.grad((made * coefficients).sum(), plain)
        if not site.bare:
            fixed["norm bias"] = (pulled @ (lift @ W)).sum(0)
        fixed[f"b_{name}"] = (pulled @ b).sum(0)
        weights = gain[:, None] * W
        mean = x.mean(-1) if site.projects else torch.zeros(len(x)).double()
        kept = (x - mean[:, None]) / sigma[:, None]
        of_rows = torch.einsum("rpk,rk->rp", pulled, kept @ weights)
        terms = [
            -((mean / sigma)[:, None] * (pulled @ weights.sum(0))).sum(0),
            (of_rows - torch.einsum("rpk,rk->rp", pulled, (site.project(x) / sigma[:, None]) @ W)).sum(0),
            (pulled @ (lift @ W)).sum(0),
            (of_rows * (1.0 - sigma[:, None] / typical)).sum(0),
        ]
        return weights, pulled / sigma[:, None, None], fixed, torch.stack(terms)

    def readings(self, rows: Sequence[int]) -> Float64[Tensor, "reading row d_model"]:
        """What is read of the stream at some positions: of each pair the query side, then of each the key side."""
        read = torch.cat([torch.einsum("rpk,dk->prd", pulled[rows], W) for W, pulled, *_ in self.sides])
        return read - read.mean(-1, keepdim=True) if self.one.site.projects else read


def _put_together(
    parts: tuple[Part, ...], found: Sequence[_HeadPairs], sums: Float64[Tensor, "part reading"]
) -> PairScores:
    layer = found[0].one.seen.layer
    names = [*dict.fromkeys(n for one in found for side in one.sides for n in side[2]), POSITION]
    every = (*parts, *(Part(n, "norm bias" if n not in ("b_Q", "b_K", POSITION) else "bias", layer) for n in names))
    sides, terms, start = [], [], 0
    for one in found:
        n = len(one.pairs)
        both = sums[:, start : start + 2 * n].reshape(len(parts), 2, n).permute(2, 1, 0)
        start += 2 * n
        fixed = torch.zeros(n, 2, len(names), dtype=torch.float64)
        fixed[..., -1] = torch.tensor(one.lifts, dtype=torch.float64)[:, None]
        for s, (_, _, values, _) in enumerate(one.sides):
            for name, value in values.items():
                fixed[:, s, names.index(name)] = value
        sides.append(torch.cat([both, fixed], 2))
        terms.append(torch.stack([side[3].T for side in one.sides], 1))
        differences = (sides[-1].sum(2) - torch.tensor(one.scores).double()[:, None]).abs()
        off = float(differences.max()) / one.scale if n else 0.0
        if not off <= one.one.bound:
            raise AttributionError(
                f"the components add up to other scores than the model's in L{layer}H{one.one.head}: {off:.1e} of the "
                f"largest is left over (rounding explains {one.one.bound:.0e})"
            )
    listed = [(one.one.head, q, k) for one in found for q, k in one.pairs]
    head, query, key = np.array(listed, np.int32).reshape(-1, 3).T
    lists = {n: [v for one in found for v in getattr(one, n)] for n in ("weight", "uniform", "scores")}
    weight, uniform, score = (np.array(values, np.float64) for values in lists.values())
    return PairScores(
        every, head, query, key, weight, uniform, score, torch.cat(sides).numpy(), torch.cat(terms).numpy()
    )
