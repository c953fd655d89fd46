"""The probe `selectability`: which keys of a prompt a query can select, by what margin and with how much attention.

Keys are those that attention sees, after gain, bias, W_K, b_K, any QK-norm and rotary positions. Verdicts are those of
`key_geometry` on the same keys: some query of any length, in any direction that W_Q does not remove. Margins and
attention are over the queries that the head can make: behind a norm that does not scale, or none, nothing bounds them,
and there are none. The queries of all variants are the intact model's. Margins and attention are measured intact and
with scaling frozen.

Keys are judged among those that one query sees: all of them, or those of its window (`AttentionLayer.key_sets`).
Attainable attention is the largest weight at the last position that sees them all, from queries as large as observed.

Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the convex hull of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Shaped

from ln_probe.analyses.geometry.check import DUPLICATE, NAMES, UNDECIDED, UNSELECTABLE
from ln_probe.analyses.geometry.decide import RELATIVE_GAP, Request, Solved, compilation, solve_sets
from ln_probe.analyses.geometry.key_geometry import random_unselectable, reachable
from ln_probe.analyses.geometry.keys import QuerySet
from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.tables import HEADS, KEYS
from ln_probe.analyses.probes.uniformity import GEOMETRY_PROMPTS, AttentionLayer, uniformity_of
from ln_probe.hooks.norm import INTACT, SCALING_FROZEN

# Layers that are kept until the kernels are compiled, so that passes and losses go on beside that: four prompts of
# GPT-2 small.
MOST_WAITING = 48
# Variants whose margins and attention are measured, and whose keys have a row each.
COMPARED = (INTACT.name, SCALING_FROZEN.name)
UNKNOWN = -1  # of `reachable`, where nothing bounds the queries

Measures = dict[str, Shaped[np.ndarray, " ..."]]


class Selectability(Probe):
    name = "selectability"
    summary = "which keys a query can select, by what margin"
    tables = (HEADS, KEYS)
    needs = Needs(attention=True)
    prompts = GEOMETRY_PROMPTS

    def start(self, run: Run) -> Observer:
        return _KeyObserver(run)


class _KeyObserver(Observer):
    """Takes in the measures of every key, layer by layer and prompt by prompt."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # By layer and variant: the number of each prompt, and its measures by name, a row per head.
        self.measured: dict[tuple[int, str], list[tuple[int, Measures]]] = defaultdict(list)
        self.waiting: list[tuple[int, AttentionLayer]] = []  # to be measured when the kernels are compiled
        self.heads: dict[int, list[int]] = {}
        self.d_head = 0

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        if attended.heads is None:
            return
        self.heads[attended.layer] = attended.chosen
        self.d_head = int(attended.maps.W_K.shape[-1])
        self.waiting.append((prompt, attended))
        if compilation.is_done or len(self.waiting) > MOST_WAITING:
            self._measure_waiting()

    def _measure_waiting(self) -> None:
        for prompt, attended in self.waiting:
            for variant in attended.variants:
                self.measured[attended.layer, variant].append((prompt, _measure(attended, variant)))
        self.waiting.clear()

    def finish(self) -> ProbeResults:
        self._measure_waiting()
        if not self.measured:
            return ProbeResults()
        rows: list[dict[str, object]] = []
        keys: list[pd.DataFrame] = []
        for (layer, variant), of_prompts in sorted(self.measured.items(), key=lambda item: item[0][0]):
            measures = concatenated([measured for _, measured in of_prompts])
            for place, head in enumerate(self.heads[layer]):
                about = {"layer": layer, "head": head, "variant": variant}
                rows.append(about | summary({name: values[place] for name, values in measures.items()}))
            if variant in COMPARED:
                keys += self._key_rows(layer, variant, of_prompts)
        table = pd.concat(keys, ignore_index=True)[KEYS.names]
        known = table["reachable"].to_numpy()
        table["reachable"] = pd.arrays.BooleanArray(known == 1, known == UNKNOWN)
        return ProbeResults({HEADS.name: HEADS.frame(rows), KEYS.name: table}, provenance=self._provenance())

    def _key_rows(self, layer: int, variant: str, of_prompts: Sequence[tuple[int, Measures]]) -> Iterator[pd.DataFrame]:
        """Yield rows of the table `keys`, for one head and prompt after another."""
        for prompt, measures in of_prompts:
            tokens = np.array(self.run.strings[prompt], object)
            for place, head in enumerate(self.heads[layer]):
                of_head = {name: values[place] for name, values in measures.items()}
                of_head |= {"token": tokens, "position": np.arange(len(tokens)), "verdict": NAMES[of_head["verdict"]]}
                yield pd.DataFrame(of_head).assign(layer=layer, head=head, variant=variant, prompt=prompt)

    def _provenance(self) -> dict[str, Any]:
        """Return how the keys were judged; `keys_per_prompt` (a mean over keys) compete."""
        first = next(iter(self.measured.values()))
        verdicts = np.concatenate([m["verdict"].ravel() for each in self.measured.values() for _, m in each])
        per_prompt = round(float(np.mean(np.concatenate([measures["n"][0] for _, measures in first]))))
        longest = max(int(measures["n"].max()) for _, measures in first)
        selectable = not np.isin(verdicts, (UNSELECTABLE, UNDECIDED)).any()
        return {
            "prompts": len(first),
            "keys_per_prompt": per_prompt,
            "d_head": self.d_head,
            "undecided": int((verdicts == UNDECIDED).sum()),
            "duplicates": int((verdicts == DUPLICATE).sum()),
            "by_theorem": selectable and longest <= self.d_head + 1,  # of affinely independent keys each is a corner
            "random_unselectable": random_unselectable(per_prompt, self.d_head),
        }


def _measure(attended: AttentionLayer, variant: str) -> Measures:
    """Measure keys as attention sees them, of the chosen heads; a row per head."""
    keys = np.ascontiguousarray(attended.keys(variant).permute(1, 0, 2)[attended.chosen].cpu().numpy())
    _, largest = uniformity_of(attended, variant)
    biases = attended.key_bias
    sets = [
        _of_all_heads(attended, keys[:, seen], None if biases is None else biases[:, seen], seen, variant in COMPARED)
        for seen in attended.key_sets
    ]
    measures = [concatenated([of_heads[place] for of_heads in sets]) for place in range(len(keys))]
    return {name: np.stack([of_head[name] for of_head in measures]) for name in measures[0]} | {
        "pattern_max": np.stack([largest[head] for head in attended.chosen])
    }


def _of_all_heads(
    attended: AttentionLayer,
    keys: Float64[np.ndarray, "head key d"],
    bias: Float64[np.ndarray, "head key"] | None,
    seen: slice,
    bounds: bool,
) -> list[Measures]:
    """Measure one set of keys of each head over the queries that it can make at the last position, and the observed
    ones there.

    Where queries have no bound there are verdicts alone, over every direction that the head has.
    """
    queries, bounded = attended.once("query sets", seen.stop, lambda: _query_sets(attended, seen.stop - 1))
    bounds, radii = bounds and bounded, None
    if bounds and attended.radii is not None:
        radii = np.array([attended.radii[head] for head in attended.chosen])
    request = Request(gap=RELATIVE_GAP if bounds else None, attention=bounds)
    return [_of_set(solved) for solved in solve_sets(keys, bias, queries, radii, request)]


def _query_sets(attended: AttentionLayer, position: int) -> tuple[list[QuerySet], bool]:
    """Return the sets of queries of all chosen heads at a position, and whether they are bounded."""
    reachable_queries = attended.reachable(position)
    ellipsoids = zip(*(reachable_queries or attended.directions(position)), strict=True)
    sets = [QuerySet(np.ascontiguousarray(center), np.ascontiguousarray(axes)) for center, axes in ellipsoids]
    return [queries.compact() for queries in sets], reachable_queries is not None


def _of_set(solved: Solved) -> Measures:
    """Return the measures of every key of a set; `verdict` is an index into NAMES."""
    answers, count = solved.answers, len(solved.answers.verdicts.code)
    known = solved.seen is not None and not np.isnan(answers.margins.lower).all()
    return {
        "verdict": answers.verdicts.code.astype(np.int8),
        "margin_lower": answers.margins.lower,
        "margin_upper": answers.margins.upper,
        "reachable": reachable(solved).astype(np.int8) if known else np.full(count, UNKNOWN, np.int8),
        "attainable": answers.attention.lower,
        "attainable_upper": answers.attention.upper,
        "n": np.full(count, count),
    }


def concatenated(parts: Sequence[Measures]) -> Measures:
    """Return the same measures of several sets of keys, one set after the other."""
    return {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}


def summary(measures: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the columns of the table `heads` of one head, from the measures of its keys."""
    verdicts, known = measures["verdict"], measures["reachable"][measures["reachable"] != UNKNOWN]
    margins = (measures["margin_lower"] + measures["margin_upper"]) / 2
    return {
        "unselectable": int((verdicts == UNSELECTABLE).sum()) / len(verdicts),
        "unreachable": float((known == 0).mean()) if len(known) else math.nan,
        "margin_median": _median(margins),
        "attainable_median": _median(measures["attainable"]),
        "pattern_max_median": _median(measures["pattern_max"]),
        "n": len(verdicts),
    }


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan
