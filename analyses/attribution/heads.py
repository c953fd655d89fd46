"""The queries and keys of one attention head on one prompt, as sums over parts of what the head reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from ln_probe.analyses.attribution.features import Features
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks.attention import Heads, read_heads
from ln_probe.hooks.components import Part, Split, Wiring
from ln_probe.hooks.norm import Norm, bias_of, gain_of
from ln_probe.hooks.stream import AttentionInput, visible_keys

AT_ONCE = 64  # positions whose parts are held at once: of GPT-2's shape 5 MB


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
        made: queries and keys of all heads, once they are known; heads of one layer share them.
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
    made: dict[str, Float64[Tensor, "pos head d_head"]] = field(default_factory=dict)

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
        return self._made("queries")

    @cached_property
    def keys(self) -> Float64[Tensor, "pos d_head"]:
        return self._made("keys")

    def _made(self, name: str) -> Float64[Tensor, "pos d_head"]:
        if name not in self.made:
            self.made[name] = getattr(self.heads, name)(self.seen.y).cpu()
        return self.made[name][:, self.head]

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

    def map(self, name: str) -> tuple[Float64[Tensor, "d_model d_head"], Float64[Tensor, " d_head"], Norm | None]:
        """The weight and the bias that make queries (name Q) or keys (K), and the norm behind them."""
        of_layer = self.heads
        W, b = (of_layer.W_Q, of_layer.b_Q) if name == "Q" else (of_layer.W_K, of_layer.b_K)
        return W[self.head].cpu(), b[self.head].cpu(), of_layer.q_norm if name == "Q" else of_layer.k_norm

    def side(self, name: str, positions: Sequence[int], typical: float | None = None) -> Side:
        """The queries (name Q) or keys (K) at some positions; LN terms where a `typical` sigma is given."""
        W, b, norm = self.map(name)
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
        taken = read[..., -1:] * (gain @ W) if site.projects else torch.zeros_like(read[..., :-1])
        kept = (read[..., :-1] - taken) / sigma[:, None]
        plain = torch.cat([kept, torch.stack(list(fixed.values())).expand(len(at), -1, -1)], 1)
        terms: dict[str, Tensor] = {}
        if typical is not None:
            terms = {
                "projection": 0.0 - taken.sum(1) / sigma,
                "gain": kept.sum(1) - site.project(x) / sigma @ W,
                "bias": (lift @ W).expand(len(at), -1),
                "sigma": kept.sum(1) * (1.0 - sigma / typical),
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
            made = self.side("K", some, typical)
            for name, vectors in {"whole": made.whole, **made.terms}.items():
                added = vectors.sum(0, keepdim=True)
                sums[name] = sums[name] + added if name in sums else added
        means = {name: vectors * (1.0 / len(positions)) for name, vectors in sums.items()}
        return Side(made.parts, means.pop("whole"), means)


def projected(norm: Norm, made: Float[Tensor, "*row d_head"]) -> Float[Tensor, "*row d_head"]:
    """Px of a head's queries or keys; they are a piece of what OLMo 2's norms normalize, which do not project."""
    return norm.project(made) if norm.projects else made


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
    if site.is_identity:
        inputs = {**split.record.inputs, where: torch.cat([look.x for look in looks]).cpu()}
        split = split.of(replace(split.record, inputs=inputs))
    found = list[Head]()
    for look in looks:
        maps = read_heads(look, split.wiring.norms, bent=True)
        first = len(found) * len(look.x)
        own = split.rows(range(first, first + len(look.x)))
        found.append(Head(maps, 0, site, where, own, look, split.wiring.bound))
    return found
