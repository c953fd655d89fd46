"""The probe `selectability`: which keys of a prompt a query can select, by what margin and with how much attention.

Keys are those that attention sees, after gain, bias, W_K, b_K, any QK-norm and rotary positions.
Verdicts are those of `key_geometry`: some query of any length, in any direction that W_Q does not remove.
Margins and attention are over the queries that the head can make: behind a norm that does not scale,
nothing bounds them, and there are none. The queries of all variants are the intact model's. Margins and
attention are measured intact and with scaling frozen.

Keys are judged among those that one query sees: all, or its window (`AttentionLayer.key_sets`).
Attainable attention is the largest weight at the last position, from queries as large as observed.

Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the convex hull of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np
import pandas as pd
from jaxtyping import Float64, Shaped

from ln_probe.analyses.geometry.check import DUPLICATE, NAMES, UNDECIDED, UNSELECTABLE
from ln_probe.analyses.geometry.compiled import processors
from ln_probe.analyses.geometry.decide import RELATIVE_GAP, Request, Solved, compilation, solve_sets
from ln_probe.analyses.geometry.key_geometry import random_unselectable, reachable
from ln_probe.analyses.geometry.keys import QuerySet
from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.tables import HEADS, KEYS
from ln_probe.analyses.probes.uniformity import GEOMETRY_PROMPTS, AttentionLayer, uniformity_of
from ln_probe.hooks.norm import INTACT, SCALING_FROZEN

# At most so many layers of prompts wait: four prompts of GPT-2 small. Passes and losses go on meanwhile.
MOST_WAITING = 48
# Heads of a layer that a thread measures in one call at least: calls take the interpreter's lock.
HEADS_TOGETHER = 4
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
    """Measures the keys of every layer and prompt, some heads at a time, beside the passes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # By layer and variant: the number of each prompt, and the measures of its heads to come.
        self.pending: dict[tuple[int, str], list[tuple[int, list[Future[list[Measures]]]]]] = defaultdict(list)
        self.waiting: deque[Future[list[Measures]]] = deque()  # the last ones of each layer of a prompt
        self.heads: dict[int, list[int]] = {}
        self.d_head = 0
        self.pool = ThreadPoolExecutor(processors())
        finalize(self, self.pool.shutdown, wait=False, cancel_futures=True)  # where a report is interrupted

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        if attended.heads is None or not attended.chosen:
            return
        self.heads[attended.layer] = attended.chosen
        self.d_head = int(attended.maps.W_K.shape[-1])
        for variant in attended.variants:
            measures = [self.pool.submit(work) for work in _keys_of_heads(attended, variant)]
            self.pending[attended.layer, variant].append((prompt, measures))
        self.waiting.append(measures[-1])
        if len(self.waiting) > MOST_WAITING:
            compilation.wait()
            self.waiting.popleft().result()

    def finish(self) -> ProbeResults:
        if not self.pending:
            return ProbeResults()
        compilation.wait()
        rows: list[dict[str, object]] = []
        keys: list[dict[str, np.ndarray]] = []
        verdicts: list[np.ndarray] = []
        for (layer, variant), of_prompts in sorted(self.pending.items(), key=lambda item: item[0][0]):
            measured = [(prompt, _results(futures)) for prompt, futures in of_prompts]
            for place, head in enumerate(self.heads[layer]):
                measures = concatenated([of_heads[place] for _, of_heads in measured])
                verdicts.append(measures["verdict"])
                rows.append({"layer": layer, "head": head, "variant": variant} | summary(measures))
            if variant in COMPARED:
                keys += self._key_columns(layer, variant, measured)
        self.pool.shutdown()
        table = pd.DataFrame(concatenated(keys))[KEYS.names]
        known = table["reachable"].to_numpy()
        table["reachable"] = pd.arrays.BooleanArray(known == 1, known == UNKNOWN)
        frames = {HEADS.name: HEADS.frame(rows), KEYS.name: table}
        return ProbeResults(frames, provenance=self._provenance(np.concatenate(verdicts)))

    def _key_columns(
        self, layer: int, variant: str, measured: Sequence[tuple[int, Sequence[Measures]]]
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield columns of the table `keys`, for one prompt after another, heads one after the other."""
        for prompt, of_heads in measured:
            tokens, heads = np.array(self.run.strings[prompt], object), self.heads[layer]
            columns = concatenated(of_heads)
            size = len(columns["n"])
            yield columns | {
                "layer": np.full(size, layer),
                "head": np.repeat(heads, len(tokens)),
                "variant": np.full(size, variant, object),
                "prompt": np.full(size, prompt),
                "token": np.tile(tokens, len(heads)),
                "position": np.tile(np.arange(len(tokens)), len(heads)),
                "verdict": NAMES.astype(object)[columns["verdict"]],
            }

    def _provenance(self, verdicts: np.ndarray) -> dict[str, Any]:
        """Return how the keys were judged; `keys_per_prompt` (a mean over keys) compete."""
        competing = [_results(futures)[0]["n"] for _, futures in next(iter(self.pending.values()))]
        per_prompt, longest = round(float(np.concatenate(competing).mean())), max(int(n.max()) for n in competing)
        selectable = not np.isin(verdicts, (UNSELECTABLE, UNDECIDED)).any()
        return {
            "prompts": len(competing),
            "keys_per_prompt": per_prompt,
            "d_head": self.d_head,
            "undecided": int((verdicts == UNDECIDED).sum()),
            "duplicates": int((verdicts == DUPLICATE).sum()),
            "by_theorem": selectable and longest <= self.d_head + 1,  # of affinely independent keys each is a corner
            "random_unselectable": random_unselectable(per_prompt, self.d_head),
        }


def _results(futures: Sequence[Future[list[Measures]]]) -> list[Measures]:
    """Return the measures of each head of a layer."""
    return [measures for future in futures for measures in future.result()]


def _measure(
    keys: Float64[np.ndarray, "head key d"],
    bias: Float64[np.ndarray, "head key"] | None,
    sets: Sequence[tuple[slice, Sequence[QuerySet]]],
    radii: Float64[np.ndarray, " head"],
    bounds: bool,
    largest: Float64[np.ndarray, "head key"],
) -> list[Measures]:
    """Return the measures of every key of some heads on one prompt.

    Args:
        keys, bias: as attention sees them, and what is added to their scores.
        sets: which keys compete, and each head's queries at the last position that sees them.
        radii: how far each head's observed queries reach, as a share of what the norm allows.
        bounds: whether margins and attention are measured.
        largest: the largest weight that each key receives.
    """
    compilation.wait(quiet=True)
    request = Request(gap=RELATIVE_GAP if bounds else None, attention=bounds)
    solved = []
    for seen, queries in sets:
        lift = None if bias is None else bias[:, seen]
        solved.append(solve_sets(keys[:, seen], lift, queries, radii, request, threads=1))
    heads = [concatenated([_of_set(one) for one in of_head]) for of_head in zip(*solved, strict=True)]
    return [measures | {"pattern_max": most} for measures, most in zip(heads, largest, strict=True)]


def _keys_of_heads(attended: AttentionLayer, variant: str) -> Iterator[Callable[[], list[Measures]]]:
    """Yield what measures some of the chosen heads: only verdicts where nothing bounds their queries."""
    chosen, bias = attended.chosen, attended.key_bias
    keys = attended.keys(variant).permute(1, 0, 2)[chosen].contiguous().cpu().numpy()
    largest = uniformity_of(attended, variant)[1][chosen]
    radii = np.ones(len(chosen)) if attended.radii is None else attended.radii[chosen]
    sets, bounded = [], False
    for seen in attended.key_sets:
        queries, bounded = attended.once("query sets", seen.stop, partial(_query_sets, attended, seen.stop - 1))
        sets.append((seen, queries))
    size = max(HEADS_TOGETHER, -(-len(chosen) // processors()))
    for begin in range(0, len(chosen), size):
        part = slice(begin, begin + size)
        some = [(seen, queries[part]) for seen, queries in sets]
        lift = None if bias is None else bias[part]
        bounds = bounded and variant in COMPARED
        yield partial(_measure, keys[part], lift, some, radii[part], bounds, largest[part])


def _query_sets(attended: AttentionLayer, position: int) -> tuple[list[QuerySet], bool]:
    """Return the sets of queries of the chosen heads at a position, and whether they are bounded."""
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
