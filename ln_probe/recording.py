"""Record what the pictures of a report show, in a separate pass over the first prompts.

The size is bounded for any corpus: the first prompts are kept as long as they fit; of each prompt, every layer and head
pooled, and a few heads weight by weight. The marks of the keys are filled in afterwards, from their measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses.attribution.pairs import PairScores, pair_scores
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.analyses.geometry.decide import NAMES
from ln_probe.analyses.probes.base import Marks
from ln_probe.exhibits import (
    CELLS,
    VERDICTS,
    Exhibits,
    PromptAttention,
    ScoreSums,
    SiteSample,
    bin_edges,
    pooled,
    to_bytes,
)
from ln_probe.hooks.attention import UnsupportedAttentionError
from ln_probe.hooks.capture import AttentionInput, stream
from ln_probe.hooks.components import SplitError
from ln_probe.hooks.model import HookedModel, evaluating
from ln_probe.hooks.norm import Site, UnknownNormError
from ln_probe.hooks.sites import ModelFacts
from ln_probe.hooks.variants import INTACT, SCALING_FROZEN

# Bytes before compression. The page is to stay under 6 MB for 12 × 12 heads and 512 tokens: of that, 2.9 MB may be
# attention, as base64 (4/3) of what compresses little, beside circuitsvis (0.5 MB compressed), tables and pictures.
BUDGET = 2_900_000
# The first prompt is kept whole as long as it takes no more than this: 1200 heads (GPT-2 XL) at 512 tokens. Beyond,
# evenly spaced layers are kept.
FIRST_PROMPT = 8_500_000
FULL_HEADS = 12  # patterns kept weight by weight, per prompt
PAIRS = 2  # of a head that are explained, beside its mean attention to position 0
COMPONENTS = 6  # of either side that are named
# Scores are explained on the beginning of the first prompt (exact in causal models, where later tokens change nothing),
# on fewer tokens where that would take more arithmetic than this (some ten seconds), but not on less than the least.
EXPLAINED, LEAST_EXPLAINED, EXPLAINED_WORK = 128, 24, 1e11
MARKS = 9  # bytes per key: verdicts 2, margin 2, attainable 4, received 1
SAMPLE = 120  # tokens drawn around a norm: more would hide one another
SAMPLED_PROMPTS = 8  # prompts they come from

_CODES = np.array([VERDICTS.index(name) for name in NAMES], np.uint8)  # verdicts as the geometry counts them


# The pattern of a layer on a prompt (its number) with scaling frozen for the keys.
Frozen = Callable[[int, AttentionInput], Float[Tensor, "head query key"] | None]


def record(
    model: HookedModel,
    facts: ModelFacts,
    prompts: Sequence[Int[Tensor, " _"]],
    tokens: Sequence[Sequence[str]],
    *,
    layers: Sequence[int],
    heads: Sequence[int],
    drawn: Collection[str],
    attention: bool,
    frozen: Frozen,
    count: int,
) -> Exhibits:
    """Record attention patterns and samples of norm inputs of the first prompts; `marked` adds the keys' marks.

    Args:
        prompts, tokens: ids and strings of the prompts, or of the first ones.
        drawn: names of the norms of which vectors may be kept.
        attention: whether patterns are wanted.
        frozen: a layer's pattern with keys made without scaling; None where there is none.
        count: how many prompts there are in all.
    """
    recorder = _Recorder(prompts, tokens, layers, heads, set(drawn), count, frozen)
    for number, row in enumerate(prompts[:SAMPLED_PROMPTS]):
        wanted = attention and number in recorder.plan
        stream(
            model,
            row,
            facts.read,
            layers=recorder.layers,
            on_norm=partial(recorder.norm, number),
            on_attention=partial(recorder.attention, number) if wanted else None,
        )
    found = recorder.exhibits()
    if not found.attention:
        return found
    scores, notes = explained(model, facts, prompts[0], found.attention[0])
    return replace(found, scores=scores, notes=(*found.notes, *notes))


def explained(
    model: HookedModel, facts: ModelFacts, tokens: Int[Tensor, " _"], shown: PromptAttention
) -> tuple[tuple[ScoreSums, ...], list[str]]:
    """Explain the strongest pairs of every head that is shown, on the beginning of a prompt.

    Returns:
        the sums (none if they cannot be had), and notes on omissions.
    """
    width, heads, layers = facts.read[0].d, shown.heads, shown.layers
    readings = 2 * len(heads) * (1 + PAIRS)
    work = 2.0 * readings * width * sum(layer * (len(heads) + 3) + 2 for layer in layers)
    room = int(EXPLAINED_WORK / work)
    length = min(len(tokens), EXPLAINED, room)
    if length < 2 or (length < len(tokens) and (length < LEAST_EXPLAINED or not shown.causal)):
        return (), [] if len(tokens) < 2 else ["scores are not explained: it would take too long; use attribute_scores"]
    made, notes = list[tuple[int, PairScores]](), list[str]()
    with evaluating(model):
        for layer in layers:
            try:
                made.append((layer, pair_scores(model, facts, tokens[:length], layer, heads, PAIRS)))
            except (AttributionError, SplitError, UnknownNormError, UnsupportedAttentionError) as error:
                notes.append(f"layer {layer}: scores are not explained ({error})")
    if not made:
        return (), notes[:1]
    names = list(dict.fromkeys(p.name for _, m in made for p in m.parts))
    number = {name: i for i, name in enumerate(names)}
    columns: dict[str, list[np.ndarray]] = {}
    for layer, m in made:
        top = np.argsort(-np.abs(m.sides), axis=2, kind="stable")[:, :, :COMPONENTS]
        top = np.pad(top, ((0, 0), (0, 0), (0, COMPONENTS - top.shape[2])))  # repeats are cut below
        part = np.array([number[p.name] for p in m.parts], np.int32)[top]
        value = np.take_along_axis(m.sides, top, 2)
        value[:, :, m.sides.shape[2] :] = 0.0
        for name, values in {
            "layer": np.full(len(m.head), layer, np.int32), "head": m.head, "query": m.query, "key": m.key,
            "weight": m.weight, "uniform": m.uniform, "score": m.score, "part": part, "contribution": value,
            "terms": m.terms,
        }.items():  # fmt: skip
            columns.setdefault(name, []).append(values.astype(np.int32 if values.dtype.kind == "i" else np.float32))
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    return (ScoreSums(prompt=shown.prompt, length=length, parts=tuple(names), **joined),), notes


def marked(exhibits: Exhibits, marks: Sequence[Marks]) -> Exhibits:
    """Return the exhibits with the marks of their keys, of the layers, variants and prompts that are shown."""
    return replace(exhibits, attention=tuple(_marked_prompt(shown, marks) for shown in exhibits.attention))


_ENDINGS = {INTACT.name: "", SCALING_FROZEN.name: "_frozen"}  # of the arrays, by variant


def _marked_prompt(shown: PromptAttention, marks: Sequence[Marks]) -> PromptAttention:
    names = ("verdict", "margin", "attainable", "verdict_frozen", "attainable_frozen")
    arrays: dict[str, Any] = {name: getattr(shown, name).copy() for name in names}
    for found in marks:
        numbers = found.prompts.tolist()
        if found.variant not in _ENDINGS or shown.prompt not in numbers or found.layer not in shown.layers:
            continue
        place, at = shown.layers.index(found.layer), numbers.index(shown.prompt)
        first = int(found.lengths[:at].sum())
        keys = slice(first, first + int(found.lengths[at]))
        measures = {name: values[: len(shown.heads), keys] for name, values in found.measures.items()}
        ending = _ENDINGS[found.variant]
        arrays[f"verdict{ending}"][place] = _CODES[measures["verdict"]]
        arrays[f"attainable{ending}"][place] = measures["attainable_last"]
        if not ending:
            middle = (measures["margin_lower"] + measures["margin_upper"]) / 2
            arrays["margin"][place] = np.clip(middle, None, np.finfo(np.float16).max)
    return replace(shown, **arrays)


class _Recorder:
    """Collects patterns and vectors during the pass; `exhibits` returns them at the end."""

    def __init__(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        tokens: Sequence[Sequence[str]],
        layers: Sequence[int],
        heads: Sequence[int],
        drawn: set[str],
        count: int,
        frozen: Frozen,
    ) -> None:
        self.tokens, self.heads, self.drawn, self.frozen_of = tokens, tuple(heads), drawn, frozen
        lengths = [len(row) for row in prompts]
        self.layers, self.plan, self.notes = plan(lengths, layers, len(self.heads), count)
        self.kept: dict[int, dict[int, dict[str, np.ndarray]]] = {}  # arrays by prompt, layer and name
        self.full: dict[int, dict[tuple[int, int], np.ndarray]] = {}
        self.causal: dict[int, bool] = {}
        self.vectors: dict[str, list[Tensor]] = {}
        self.sites: dict[str, Site] = {}
        sampled = lengths[:SAMPLED_PROMPTS]
        share = math.ceil(SAMPLE / max(1, len(sampled)))
        # Position 0 is among them: sinks live there.
        self.positions = [np.unique(np.linspace(0, n - 1, min(share, n)).astype(int)) for n in sampled]

    def norm(self, prompt: int, site: Site, x: Float[Tensor, "pos d"], _y: Tensor) -> None:
        """Keep some of a norm's inputs for one prompt, if it is read by attention or is the final norm."""
        read = {"attention", "unembed"} & set(site.reads.split("+"))
        if not read or site.name not in self.drawn or len(x) != len(self.tokens[prompt]):
            return
        self.sites[site.name] = site
        rows = x[torch.from_numpy(self.positions[prompt]).to(x.device)]
        self.vectors.setdefault(site.name, []).append(rows.float().cpu())

    def attention(self, prompt: int, seen: AttentionInput) -> None:
        """Keep one layer's pattern for one prompt."""
        every = seen.pattern.float().cpu().numpy()
        heads = [h for h in self.heads if h < len(every)]
        pattern = every[heads]
        self.causal[prompt] = self.causal.get(prompt, True) and not np.triu(pattern, 1).any()
        edges = bin_edges(pattern.shape[-1])
        received = _received(pattern, seen.window)
        kept = {"cells": to_bytes(pooled(pattern, edges)), "received": to_bytes(received)}
        kept |= {"cells_frozen": np.zeros_like(kept["cells"]), "first_change": np.full(len(heads), np.nan, np.float32)}
        without = self.frozen_of(prompt, seen)
        if without is not None:
            changed = without.float().cpu().numpy()[heads]
            kept["cells_frozen"] = to_bytes(pooled(changed, edges))
            kept["first_change"] = (_received(changed, seen.window)[:, 0] - received[:, 0]).astype(np.float32)
        self.kept.setdefault(prompt, {})[seen.layer] = kept
        if self.plan[prompt]:
            chosen = self._least_uniform(seen.layer, heads, pattern)
            self.full.setdefault(prompt, {}).update({(seen.layer, head): to_bytes(every[head]) for head in chosen})

    def _least_uniform(
        self, layer: int, heads: Sequence[int], pattern: Float[np.ndarray, "head query key"]
    ) -> list[int]:
        """Return the heads kept weight by weight: in evenly spaced layers, those of least entropy."""
        spaced = np.linspace(0, len(self.layers) - 1, min(FULL_HEADS, len(self.layers))).astype(int)
        if layer not in {self.layers[i] for i in spaced}:
            return []
        entropy = -(pattern * np.log(np.maximum(pattern, 1e-30))).sum(-1).mean(-1)
        return sorted(heads[i] for i in np.argsort(entropy, kind="stable")[: math.ceil(FULL_HEADS / len(spaced))])

    def exhibits(self) -> Exhibits:
        """Return everything that was kept."""
        attention = tuple(found for p in sorted(self.plan) if (found := self._prompt(p)) is not None)
        samples = tuple(self._sample(name) for name in self.vectors)
        return Exhibits(attention, samples, tuple(self.notes) if attention else ())

    def _prompt(self, prompt: int) -> PromptAttention | None:
        kept = self.kept.get(prompt, {})
        layers = tuple(layer for layer in self.layers if layer in kept)
        if not layers:
            return None
        tokens = tuple(self.tokens[prompt])
        stacked = {name: np.stack([kept[layer][name] for layer in layers]) for name in kept[layers[0]]}
        unknown = np.full(stacked["received"].shape, VERDICTS.index("not measured"), np.uint8)
        nothing = np.full(stacked["received"].shape, np.nan, np.float16)
        return PromptAttention(
            prompt=prompt,
            tokens=tokens,
            layers=layers,
            heads=self.heads[: stacked["cells"].shape[1]],
            edges=bin_edges(len(tokens)),
            verdict=unknown,
            margin=nothing,
            attainable=nothing,
            verdict_frozen=unknown,
            attainable_frozen=nothing,
            full=self.full.get(prompt, {}),
            causal=self.causal[prompt],
            **stacked,
        )

    def _sample(self, name: str) -> SiteSample:
        site, rows = self.sites[name], self.vectors[name]
        x = torch.cat(rows).double()
        counts = [len(r) for r in rows]
        positions = np.concatenate(self.positions[: len(counts)])
        prompts = np.repeat(np.arange(len(counts)), counts)
        mean = x.mean(-1, keepdim=True)
        kept = x - mean
        length = kept.norm(dim=-1)
        unit = kept / length[:, None].clamp_min(1e-300)
        typical = unit[torch.from_numpy(positions > 0)] if (positions > 0).any() else unit
        axes = torch.linalg.svd(typical, full_matrices=False).Vh[:2]
        axes = torch.cat([axes, torch.zeros(2 - len(axes), site.d, dtype=axes.dtype)])
        along = kept @ axes.T
        ones, axis1, axis2, size, sigma = (
            v.numpy().astype(np.float32)
            for v in (mean[:, 0] * math.sqrt(site.d), along[:, 0], along[:, 1], length, site.sigma(x)[:, 0])
        )
        return SiteSample(
            site=site.name,
            layer=site.layer,
            kind=site.kind,
            d=site.d,
            ones=ones,
            axis1=axis1,
            axis2=axis2,
            length=size,
            sigma=sigma,
            axes_share=float(((unit @ axes.T) ** 2).sum(-1).mean()),
            prompt=prompts.astype(np.int32),
            position=positions.astype(np.int32),
            tokens=tuple(self.tokens[int(p)][i] for p, i in zip(prompts, positions, strict=True)),
        )


def _received(pattern: Float[np.ndarray, "head query key"], window: int | None) -> Float[np.ndarray, "head key"]:
    """Return each key's mean weight from the queries after position 0 that see it (all of them if not causal)."""
    queries = pattern.shape[1]
    if np.triu(pattern, 1).any():
        seen: int | np.ndarray = queries - 1
    else:
        place = np.arange(queries)
        last = queries if window is None else np.minimum(queries, place + window)
        seen = last - np.maximum(place, 1)
    means: np.ndarray = pattern[:, 1:].sum(1) / np.maximum(seen, 1)
    return means


def plan(
    lengths: Sequence[int], layers: Sequence[int], heads: int, count: int
) -> tuple[tuple[int, ...], dict[int, bool], list[str]]:
    """Decide which attention patterns are kept.

    Args:
        lengths: of the first prompts, in tokens.
        layers, heads: layers that were asked for, and how many heads each has.
        count: prompts in all.

    Returns:
        the layers kept; the prompts kept, each with whether some heads are kept weight by weight; notes on what is not.
    """

    def size(length: int, layers_kept: int) -> int:
        cells = min(CELLS, length)
        return layers_kept * heads * (cells * (cells + 1) + MARKS * length)  # cells: intact, and without scaling

    def whole(length: int) -> int:
        return FULL_HEADS * length * (length + 1) // 2 if length > CELLS else 0

    first = lengths[0]
    room = max(1, (FIRST_PROMPT - whole(first)) // max(1, size(first, 1)))
    kept = tuple(layers)
    notes = []
    if len(kept) > room:
        kept = tuple(layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, room).astype(int)))
        notes.append(f"attention is shown for {len(kept)} of {len(layers)} layers: all would not fit on a page")
    chosen = {0: True}
    used = size(first, len(kept)) + whole(first)
    for prompt, length in list(enumerate(lengths))[1:SAMPLED_PROMPTS]:
        needed = size(length, len(kept))
        if used + needed > BUDGET:
            break
        chosen[prompt] = used + needed + whole(length) <= BUDGET
        used += needed + (whole(length) if chosen[prompt] else 0)
    if len(chosen) < count:
        notes.append(f"attention is shown for the first {len(chosen)} of {count} prompts; the tables hold all")
    return kept, chosen, notes
