"""Tokens and dimensions that are far larger than the others at a norm: which, where they emerge, what wrote them.

A token is an outlier if |Px| exceeds OUTLIER_RATIO times the median token of its prompt at some norm; the first such
norm is where it emerges. A dimension is one if for the median token |Px| in it exceeds OUTLIER_RATIO times the median
dimension. Massive activations: Sun, Chen, Kolter & Liu 2024, "Massive activations in large language models".

What wrote an outlier is read off the stream: between one norm and the next only what the first one feeds is added to
it, so the difference of the stream at the two norms (a norm's input; its output after a post-norm) is what was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ln_probe.hooks.model import OneLine, check_model, evaluating
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream
from ln_probe.hooks.task import check_ids, token_rows

OUTLIER_RATIO = 10.0  # |Px| of ordinary tokens varies by a factor of 2 or 3; sinks of real models have 20 to 1000
MASSIVE_SIZE, MASSIVE_RATIO = 100.0, 1000.0  # Sun et al.'s definition
LEAST_TOKENS = 8  # fewer have no median worth the name: one outlier of four moves it
_TOKENS_OF_DIMENSIONS = 64  # spread evenly: the median over more costs a tenth of a forward pass
_DIMENSIONS_NAMED = 4
_INSIDE = ("query", "key")  # norms inside attention see heads, not tokens


@dataclass(frozen=True)
class Outlier:
    """One outlier token of one prompt, or none.

    Attributes:
        emerges_at: the first norm at which it is one; emerges_in: its layer.
        writer: what wrote it, as text; empty where that is unknown.
        writer_share: <P written, P x> / |P x|² there; NaN likewise.
        dimensions: those that make most of it where it is longest.
    """

    emerges_at: str = ""
    emerges_in: float = math.nan
    writer: str = ""
    writer_share: float = math.nan
    dimensions: str = ""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one prompt's vectors, each at the norm `site`; `ratio` is |Px| over its median, `outlier` where over
    10."""

    site: list[str]
    ratio: Float[Tensor, " pos"]
    sigma: Float[Tensor, " pos"]
    before: Float[Tensor, " pos"]
    after: Float[Tensor, " pos"]
    outlier: Bool[Tensor, " pos"]


class PromptOutliers:
    """The outliers of one prompt; `add` its norms in the order of the pass.

    Attributes:
        found: outlier tokens by position; massive: which tokens have massive activations.
        dimensions: (site, dimension) of outlier dimensions, and their ratio.
        longest: the sizes of each token where it is longest relative to the median; None before the first norm.
    """

    def __init__(self, sites: Sequence[Norm]) -> None:
        # After a post-norm block the stream is the norm's output; otherwise the norm only looks at it.
        self.post = any(s.attention_layers and s.layer not in s.attention_layers for s in sites)
        self.found: dict[int, Outlier] = {}
        self.massive: Bool[Tensor, " pos"] | None = None
        self.dimensions: dict[tuple[str, int], float] = {}
        self.longest: Sizes | None = None
        self._stream: Tensor | None = None
        self._writers: list[str] = []

    def add(self, site: Norm, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> Sizes | None:
        """Take in a norm's input and output; None for a norm inside attention, which sees heads."""
        if site.reads in _INSIDE:
            return None
        x, y = (t if t.dtype == torch.float64 else t.float() for t in (x, y))
        kept = site.project(x)
        length = torch.linalg.vector_norm(kept, dim=-1)
        ratio = length / length.median().clamp_min(1e-30)
        enough = len(x) >= LEAST_TOKENS
        outlier = (ratio > OUTLIER_RATIO) & enough
        before, after = (torch.linalg.vector_norm(t, dim=-1) for t in (x, y))
        sizes = Sizes([site.name] * len(x), ratio, site.sigma(x)[:, 0], before, after, outlier)
        self.longest = sizes if self.longest is None else _longer(self.longest, sizes)
        self._keep_massive(x)
        for at in outlier.nonzero().flatten().tolist():
            if at not in self.found:
                self.found[at] = Outlier(site.name, float(site.layer), *self._written(site, x, at))
            if self.longest.site[at] == site.name:
                self.found[at] = replace(self.found[at], dimensions=_largest_dimensions(kept[at]))
        if enough:
            self._keep_dimensions(site, kept)
        self._follow(site, x, y)
        return sizes

    def _keep_massive(self, x: Float[Tensor, "pos d"]) -> None:
        size = x.abs()
        largest = size.amax(-1)
        if self.massive is None:
            self.massive = torch.zeros_like(largest, dtype=torch.bool)
        if bool((largest > MASSIVE_SIZE).any()):  # rarely, and a median over all entries takes a while
            self.massive |= (largest > MASSIVE_SIZE) & (largest > MASSIVE_RATIO * size.median())

    def _keep_dimensions(self, site: Norm, kept: Float[Tensor, "pos d"]) -> None:
        rows = torch.linspace(0, len(kept) - 1, min(len(kept), _TOKENS_OF_DIMENSIONS)).long()
        typical = kept[rows].abs().median(0).values
        ratio = typical / typical.median().clamp_min(1e-30)
        for at in (ratio > OUTLIER_RATIO).nonzero().flatten().tolist():
            self.dimensions[site.name, at] = float(ratio[at])

    def _written(self, site: Norm, x: Float[Tensor, "pos d"], at: int) -> tuple[str, float]:
        """What was added to the stream since the norm before, and its share of this token's vector."""
        if site.reads == "other":  # a norm of a sublayer's output: not of the stream
            return "", float("nan")
        before = torch.zeros_like(x[at]) if self._stream is None else self._stream[at].to(x)
        kept = site.project(x[at])
        share = float(kept @ site.project(x[at] - before) / (kept @ kept))
        return " and ".join(self._writers) if self._stream is not None else "the embedding", share

    def _follow(self, site: Norm, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        if site.reads == "other":
            return
        fed = [
            f"the {part} of block {site.layer + (self.post and part == 'attention')}"
            for part in ("attention", "mlp")
            if part in site.reads.split("+")
        ]
        now = y if self.post else x
        if self._stream is not None and not self.post and torch.equal(now, self._stream):  # parallel attention and MLP
            self._writers += fed
        else:
            self._stream, self._writers = now, fed


def _longer(one: Sizes, two: Sizes) -> Sizes:
    """Of each token, the sizes at the norm where its ratio is larger."""
    longer = two.ratio > one.ratio
    numbers = {
        name: torch.where(longer, getattr(two, name).to(getattr(one, name)), getattr(one, name))
        for name in ("ratio", "sigma", "before", "after", "outlier")
    }
    return Sizes([b if at else a for a, b, at in zip(one.site, two.site, longer.tolist(), strict=True)], **numbers)


def _largest_dimensions(kept: Float[Tensor, " d"]) -> str:
    """The dimensions that make up half of the squared length, at most a few, with their shares."""
    share = kept.double().square()
    share = share / share.sum()
    named, total = [], 0.0
    for at in share.argsort(descending=True)[:_DIMENSIONS_NAMED].tolist():
        if total >= 0.5 and float(share[at]) < 0.05:
            break
        named.append(f"{at} ({100 * float(share[at]):.0f} %)")
        total += float(share[at])
    return ", ".join(named)


@dataclass(frozen=True, eq=False, repr=False)
class OutlierTokens(OneLine):
    """Which tokens are outliers, and the sizes of all of them at every norm.

    Attributes:
        mask: True where a token is an outlier at some norm.
        massive: True where it has massive activations.
        sigma, before, after: the norm's divisor, |x| and the length of its output, by site.
        ratio: |Px| over the prompt's median, by site.
        dimensions: (site, dimension) of outlier dimensions, for each row.
    """

    mask: Bool[Tensor, "batch pos"]
    massive: Bool[Tensor, "batch pos"]
    sigma: Mapping[str, Float[Tensor, "batch pos"]] = field(default_factory=dict)
    before: Mapping[str, Float[Tensor, "batch pos"]] = field(default_factory=dict)
    after: Mapping[str, Float[Tensor, "batch pos"]] = field(default_factory=dict)
    ratio: Mapping[str, Float[Tensor, "batch pos"]] = field(default_factory=dict)
    dimensions: tuple[frozenset[tuple[str, int]], ...] = ()


def outlier_tokens(
    model: object, tokens: Int[Tensor, "batch pos"] | Sequence[Sequence[int] | Int[Tensor, " _"]]
) -> OutlierTokens:
    """Find the tokens that are outliers at some norm of the model: a mask for other tools, with sigmas and ratios.

    Args:
        model: HookedTransformer, TransformerBridge or lab model.
        tokens: [batch pos], or a list of rows of several lengths. Rows of fewer than LEAST_TOKENS tokens have no
            outliers. After the end of a shorter row masks are False and sizes NaN.

    Raises:
        TypeError: not a TransformerLens model, or tokens that are neither a tensor nor a list of rows.
        ValueError: tokens that are not [batch pos], empty, longer than the context or outside the vocabulary.
        ActivationError: a norm's input or output is not finite.

    Example:
        >>> ln_probe.outlier_tokens(model, tokens)
    """
    hooked = check_model(model)
    if isinstance(tokens, Tensor) and not tokens.numel():
        raise ValueError(f"tokens are empty: {list(tokens.shape)}")
    prompts = token_rows(tokens)
    for row in prompts:
        check_ids(hooked, row)
    sites = [s for s in find_norms(hooked) if s.reads not in _INSIDE]
    sizes: dict[str, list[Sizes]] = {s.name: [] for s in sites}
    masks, massive, dimensions = [], [], []
    with evaluating(hooked):
        for row in prompts:
            found = PromptOutliers(sites)

            def look(site: Norm, x: Tensor, y: Tensor, found: PromptOutliers = found) -> None:
                sizes[site.name].append(cast(Sizes, found.add(site, x, y)))

            stream(hooked, row, sites, on_norm=look)
            mask = torch.zeros(len(row), dtype=torch.bool)
            massive.append(mask if found.massive is None else found.massive.cpu())
            masks.append(mask.clone())
            masks[-1][list(found.found)] = True
            dimensions.append(frozenset(found.dimensions))
    joined = {
        name: {site: _padded([getattr(s, name).cpu() for s in rows], math.nan) for site, rows in sizes.items() if rows}
        for name in ("sigma", "before", "after", "ratio")
    }
    return OutlierTokens(_padded(masks), _padded(massive), **joined, dimensions=tuple(dimensions))


def _padded(rows: Sequence[Tensor], filled: float = False) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=filled)
