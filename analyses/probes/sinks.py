"""The probe `sinks`: attention to position 0, and which tokens are outliers, with scaling and without.

A head has a sink if its attention to position 0, averaged over queries, is above 0.3 (Gu et al. 2025, "When attention
sink emerges in language models"); another position is a sink if that holds of over 30 % of a layer's heads. A
token is an outlier if |Px| exceeds OUTLIER_RATIO times the median token of its prompt at some norm. Massive
activations: Sun, Chen, Kolter & Liu 2024, "Massive activations in large language models". With scaling frozen, queries
are the intact model's, and every key is made without scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.tables import SINK_HEADS, SINKS
from ln_probe.analyses.probes.uniformity import AttentionLayer
from ln_probe.analyses.text import counted
from ln_probe.hooks.model import at_least_float32
from ln_probe.hooks.norm import SCALING_FROZEN, Norm
from ln_probe.hooks.stream import visible_keys

MUCH = 0.3  # of a head's attention, averaged over queries: Gu et al.'s epsilon
SINK_SHARE = 0.3  # of a layer's heads: a layer of heads that look elsewhere has under a tenth
LEAST_QUERIES = 10  # that see a position: the few that see the last tokens often have nothing better
OUTLIER_RATIO = 10.0  # |Px| of ordinary tokens varies by a factor of 2 or 3; sinks of real models have 20 to 1000
MASSIVE_SIZE, MASSIVE_RATIO = 100.0, 1000.0  # Sun et al.'s definition
LEAST_TOKENS = 8  # fewer have no median worth the name: one outlier of four moves it
ROUNDING = 1e-6  # of |x|: a shorter Px is a vector of equal entries, projected in float32
_DIMENSIONS_NAMED = 4


@dataclass
class TokenSizes:
    """Sizes of one prompt's vectors; `add` its norms in the order of the pass.

    Attributes:
        ratios: |Px| over the median of the prompt's vectors that are not zero, by the norm's name.
        ratio: the largest of these.
        site: name of that norm, of each token; empty before the first norm.
        vectors: Px there.
        outlier, massive: whether a token is one at some norm.
    """

    ratios: dict[str, Tensor] = field(default_factory=dict)
    ratio: Tensor = field(default_factory=lambda: torch.zeros(0))
    site: list[str] = field(default_factory=list)
    vectors: Tensor = field(default_factory=lambda: torch.zeros(0))
    outlier: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    massive: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    def add(self, site: Norm, x: Float[Tensor, "pos d"], _y: object = None) -> None:
        """Take in a norm's input."""
        x = x if x.dtype == torch.float64 else x.float()
        vectors = site.project(x)
        if self.site and vectors.shape[-1] != self.vectors.shape[-1]:  # a norm inside an MLP: not of the stream
            return
        length = torch.linalg.vector_norm(vectors, dim=-1)
        present = length > ROUNDING * torch.linalg.vector_norm(x, dim=-1)  # (padding is often embedded as zeros)
        median = length[present].median() if bool(present.any()) else torch.ones_like(length[0])
        self.ratios[site.name] = ratio = length * present / median
        if not self.site:
            self.ratio, self.vectors, self.site = ratio, vectors, [site.name] * len(x)
            self.outlier = self.massive = torch.zeros_like(ratio, dtype=torch.bool)
        longer = ratio > self.ratio
        self.ratio = torch.where(longer, ratio.to(self.ratio), self.ratio)
        self.vectors = torch.where(longer[:, None], vectors.to(self.vectors), self.vectors)
        self.site = [site.name if at else name for name, at in zip(self.site, longer.tolist(), strict=True)]
        if int(present.sum()) >= LEAST_TOKENS:
            self.outlier = self.outlier | (ratio > OUTLIER_RATIO)
        size = x.abs()
        largest = size.amax(-1)
        if bool((largest > MASSIVE_SIZE).any()):  # rarely, and a median over all entries takes a while
            usual = size[largest > 0].median()
            self.massive = self.massive | ((largest > MASSIVE_SIZE) & (largest > MASSIVE_RATIO * usual))

    def dimensions(self, position: int) -> str:
        """Return the dimensions that make up half of a token's squared length, at most a few, and their shares."""
        share = self.vectors[position].double().square()
        share = share / share.sum().clamp_min(1e-300)
        named, total = [], 0.0
        for at in share.argsort(descending=True)[:_DIMENSIONS_NAMED].tolist():
            if total >= 0.5 and float(share[at]) < 0.05:
                break
            named.append(f"{at} ({100 * float(share[at]):.0f} %)")
            total += float(share[at])
        return ", ".join(named)


class LayerAttention:
    """Attention of the measured heads of one layer to every position.

    Args:
        attended: the layer on a prompt.

    Attributes:
        heads: the measured ones.
        queries: how many queries see each position; of a causal layer position 0's own, which has no choice, left out.
        total, frozen: the attention that these give it together, intact and with scaling frozen (None: not known).
        uniform: the same if each gave every key that it sees the same.
        mean: attention averaged over all queries that see it.
    """

    def __init__(self, attended: AttentionLayer) -> None:
        seen = attended.seen
        self.heads = attended.chosen
        first = 1 if seen.causal else 0
        pattern = seen.pattern[self.heads] if len(self.heads) < len(seen.pattern) else seen.pattern
        length = pattern.shape[-1]
        visible = visible_keys(length, length, causal=seen.causal, window=seen.window)[first:].double()
        self.queries = visible.sum(0)
        self.uniform = (visible / visible.sum(1, keepdim=True)).sum(0)
        self.total = at_least_float32(pattern[:, first:]).sum(1, dtype=torch.float32).double().cpu()
        self.mean = self.total.clone()
        every = self.queries.clone()
        if first:
            self.mean[:, 0] += 1.0  # position 0's query sees itself alone
            every[0] += 1
        self.mean /= every
        self.sink = ((self.mean > MUCH).double().mean(0) > SINK_SHARE) & (every >= LEAST_QUERIES)
        self.frozen: Float[Tensor, "head key"] | None = None
        if attended.heads is not None:
            frozen = attended.pattern(SCALING_FROZEN.name)
            self.frozen = self.total if frozen is None else frozen[self.heads][:, first:].sum(1).cpu()


class _Prompt:
    """One prompt under way."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sizes = TokenSizes()
        self.layers: dict[int, LayerAttention] = {}

    def token_rows(self, tokens: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield rows of the table `sinks`."""
        sizes, layers = self.sizes, list(self.layers.values())
        if not sizes.site:  # without a norm nothing says which tokens are long
            unknown = torch.full((len(tokens),), math.nan)
            none = unknown > 0
            sizes = TokenSizes(ratio=unknown, site=[""] * len(tokens), outlier=none, massive=none)
        longest = 1 + int(sizes.ratio[1:].argmax()) if len(tokens) > 1 and self.sizes.site else 0
        sink = torch.stack([layer.sink for layer in layers]).any(0) if layers else torch.zeros(len(tokens)).bool()
        kinds = {
            "first": {0},
            "longest": {longest} - {0},
            "outlier": set(sizes.outlier.nonzero().flatten().tolist()),
            "massive": set(sizes.massive.nonzero().flatten().tolist()),
            "sink": set(sink.nonzero().flatten().tolist()),
        }
        for at in sorted(set().union(*kinds.values())):
            pairs = sum(len(layer.heads) * float(layer.queries[at]) for layer in layers)
            sums = {
                "received": sum(float(layer.total[:, at].sum()) for layer in layers),
                "uniform": sum(len(layer.heads) * float(layer.uniform[at]) for layer in layers),
                "received_no_scaling": sum(
                    math.nan if layer.frozen is None else float(layer.frozen[:, at].sum()) for layer in layers
                ),
            }
            yield {
                "prompt": self.number,
                "position": at,
                "token": tokens[at],
                "kind": "+".join(kind for kind, positions in kinds.items() if at in positions),
                "site": sizes.site[at],
                "length_ratio": float(sizes.ratio[at]),
                **{name: total / pairs if pairs else math.nan for name, total in sums.items()},
                "dimensions": sizes.dimensions(at) if self.sizes.site else "",
                "n": max((int(layer.queries[at]) for layer in layers), default=0),
            }

    def head_rows(self) -> Iterator[dict[str, Any]]:
        """Yield each head's attention to position 0, summed over the queries behind it."""
        for number, layer in sorted(self.layers.items()):
            frozen = torch.full_like(layer.total, math.nan) if layer.frozen is None else layer.frozen
            for place, head in enumerate(layer.heads):
                yield {
                    "layer": number,
                    "head": head,
                    "queries": float(layer.queries[0]),
                    "sink_rate": float(layer.mean[place, 0] > MUCH),
                    "first_attention": float(layer.total[place, 0]),
                    "first_attention_no_scaling": float(frozen[place, 0]),
                }


class Sinks(Probe):
    name = "sinks"
    summary = "how much attention position 0 and outlier tokens receive"
    tables = (SINKS, SINK_HEADS)
    needs = Needs(norms=True, attention=True)

    def start(self, run: Run) -> Observer:
        return _SinkObserver(run)


class _SinkObserver(Observer):
    def __init__(self, run: Run) -> None:
        self.run = run
        self.under_way: dict[int, _Prompt] = {}
        self.tokens: list[dict[str, Any]] = []
        self.heads: list[dict[str, Any]] = []
        self.short = 0

    def norm(self, prompt: int, site: Norm, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        if site.reads not in ("query", "key"):  # norms inside attention see heads, not tokens
            self.under_way.setdefault(prompt, _Prompt(prompt)).sizes.add(site, x)

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        if attended.length > 1 and attended.chosen:
            self.under_way.setdefault(prompt, _Prompt(prompt)).layers[attended.layer] = LayerAttention(attended)

    def end(self, prompt: int) -> None:
        under_way, tokens = self.under_way.pop(prompt, None), self.run.strings[prompt]
        if under_way is not None:
            self.short += len(tokens) < LEAST_TOKENS
            self.tokens += under_way.token_rows(tokens)
            self.heads += under_way.head_rows()

    def finish(self) -> ProbeResults:
        results = {SINKS.name: SINKS.frame(sorted(self.tokens, key=lambda row: (row["prompt"], row["position"])))}
        if self.heads:
            results[SINK_HEADS.name] = _by_head(pd.DataFrame(self.heads))
        notes = []
        if self.short:
            prompts = counted(self.short, "prompt")
            notes.append(f"sinks: {prompts} of fewer than {LEAST_TOKENS} tokens were not searched for outlier tokens")
        return ProbeResults(results, notes)


def _by_head(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table `sink_heads` from the sums of each prompt and head."""
    of_heads = rows.groupby(["layer", "head"])
    table, queries = of_heads.sum(min_count=1).assign(n=of_heads.size()), of_heads["queries"].sum()
    table["sink_rate"] /= table["n"]
    for column in ("first_attention", "first_attention_no_scaling"):
        table[column] /= queries
    return table.reset_index()[SINK_HEADS.names]
