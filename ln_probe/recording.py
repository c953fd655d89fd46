"""Record what the pictures of a report show, during the second pass.

The size is bounded for any corpus: the first prompts are kept as long as they fit; of each prompt, every layer and head
pooled, and a few heads weight by weight. The marks of the keys are filled in afterwards, from their measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses.geometry.decide import NAMES
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import Marks
from ln_probe.exhibits import (
    CELLS,
    VERDICTS,
    Exhibits,
    PromptAttention,
    bin_edges,
    pooled,
    to_bytes,
)
from ln_probe.hooks.norm import INTACT, SCALING_FROZEN
from ln_probe.hooks.stream import AttentionInput, visible_keys

# Bytes before compression. The page is to stay under 6 MB for 12 × 12 heads and 512 tokens: of that, 2.9 MB may be
# attention, as base64 (4/3) of what compresses little, beside circuitsvis (0.5 MB compressed), tables and pictures.
BUDGET = 2_900_000
# The first prompt is kept whole as long as it takes no more than this: 1200 heads (GPT-2 XL) at 512 tokens. Beyond,
# evenly spaced layers are kept.
FIRST_PROMPT = 8_500_000
FULL_HEADS = 12  # patterns kept weight by weight, per prompt
MARKS = 9  # bytes per key: verdicts 2, margin 2, attainable 4, received 1
SHOWN_PROMPTS = 8  # prompts whose attention may be kept

_CODES = np.array([VERDICTS.index(name) for name in NAMES], np.uint8)  # verdicts as the geometry counts them


class Pictures:
    """Records the attention of the first prompts during the second pass; `marked` adds the keys' marks.

    Args:
        prompts: token ids of all prompts; strings: likewise their strings.
        layers, heads: the measured ones.
    """

    def __init__(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        strings: Sequence[Sequence[str]],
        layers: Sequence[int],
        heads: Sequence[int],
    ) -> None:
        self.strings = strings
        self.layers, whole, self.notes = plan([len(row) for row in prompts], layers, len(heads), len(prompts))
        self.prompts = {number: _Patterns(self.layers, tuple(heads), some) for number, some in whole.items()}

    def takes(self, prompt: int) -> bool:
        """Return whether a prompt is shown."""
        return prompt in self.prompts

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        """Record a layer of a prompt that is shown."""
        if prompt in self.prompts and attended.layer in self.layers:
            self.prompts[prompt].add(attended)

    def exhibits(self) -> Exhibits:
        """Return what was recorded; the keys are not marked yet."""
        shown = tuple(
            patterns.of_prompt(number, self.strings[number])
            for number, patterns in self.prompts.items()
            if patterns.arrays
        )
        return Exhibits(shown, tuple(self.notes) if shown else ())


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
        arrays[f"attainable{ending}"][place] = measures["attainable"]
        if not ending:
            middle = (measures["margin_lower"] + measures["margin_upper"]) / 2
            arrays["margin"][place] = np.clip(middle, None, np.finfo(np.float16).max)
    return replace(shown, **arrays)


@dataclass
class _Patterns:
    """One prompt's attention in some layers and heads; `whole`: some heads are recorded weight by weight."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    whole: bool
    arrays: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # by layer and name
    full: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    causal: bool = True

    def add(self, attended: AttentionLayer) -> None:
        """Record one layer."""
        seen = attended.seen
        every = seen.pattern.float().cpu().numpy()
        heads = [h for h in self.heads if h < len(every)]
        pattern = every[heads]
        self.causal &= seen.causal
        edges = bin_edges(pattern.shape[-1])
        received = _received(pattern, seen)
        arrays = {"cells": to_bytes(pooled(pattern, edges)), "received": to_bytes(received)}
        arrays["cells_frozen"] = np.zeros_like(arrays["cells"])
        arrays["first_change"] = np.full(len(heads), np.nan, np.float32)
        frozen = None if attended.heads is None else attended.pattern(SCALING_FROZEN.name)
        if frozen is not None:
            changed = frozen.float().cpu().numpy()[heads]
            arrays["cells_frozen"] = to_bytes(pooled(changed, edges))
            arrays["first_change"] = (_received(changed, seen)[:, 0] - received[:, 0]).astype(np.float32)
        self.arrays[seen.layer] = arrays
        if self.whole:
            chosen = self._least_uniform(seen.layer, heads, pattern)
            self.full |= {(seen.layer, head): to_bytes(every[head]) for head in chosen}

    def _least_uniform(
        self, layer: int, heads: Sequence[int], pattern: Float[np.ndarray, "head query key"]
    ) -> list[int]:
        """Return the heads kept weight by weight: in evenly spaced layers, those of least entropy."""
        spaced = np.linspace(0, len(self.layers) - 1, min(FULL_HEADS, len(self.layers))).astype(int)
        if layer not in {self.layers[i] for i in spaced}:
            return []
        entropy = -(pattern * np.log(np.maximum(pattern, 1e-30))).sum(-1).mean(-1)
        return sorted(heads[i] for i in np.argsort(entropy, kind="stable")[: math.ceil(FULL_HEADS / len(spaced))])

    def of_prompt(self, number: int, tokens: Sequence[str]) -> PromptAttention:
        """Return what was recorded; the keys are not marked yet."""
        layers = tuple(layer for layer in self.layers if layer in self.arrays)
        stacked = {name: np.stack([self.arrays[layer][name] for layer in layers]) for name in self.arrays[layers[0]]}
        unknown = np.full(stacked["received"].shape, VERDICTS.index("not measured"), np.uint8)
        nothing = np.full(stacked["received"].shape, np.nan, np.float16)
        return PromptAttention(
            prompt=number,
            tokens=tuple(tokens),
            layers=layers,
            heads=self.heads[: stacked["cells"].shape[1]],
            edges=bin_edges(len(tokens)),
            verdict=unknown,
            margin=nothing,
            attainable=nothing,
            verdict_frozen=unknown,
            attainable_frozen=nothing,
            full=self.full,
            causal=self.causal,
            **stacked,
        )


def _received(pattern: Float[np.ndarray, "head query key"], seen: AttentionInput) -> Float[np.ndarray, "head key"]:
    """Return each key's mean weight from the queries after position 0 that see it (all of them if not causal)."""
    length = pattern.shape[1]
    visible = visible_keys(length, length, causal=seen.causal, window=seen.window if seen.causal else None)
    means: np.ndarray = pattern[:, 1:].sum(1) / np.maximum(visible[1:].sum(0).numpy(), 1)
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
    for prompt, length in list(enumerate(lengths))[1:SHOWN_PROMPTS]:
        needed = size(length, len(kept))
        if used + needed > BUDGET:
            break
        chosen[prompt] = used + needed + whole(length) <= BUDGET
        used += needed + (whole(length) if chosen[prompt] else 0)
    if len(chosen) < count:
        notes.append(f"attention is shown for the first {len(chosen)} of {count} prompts; the tables hold all")
    return kept, chosen, notes
