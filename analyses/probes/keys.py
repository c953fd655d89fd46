"""Measures of every key at one (layer, space, variant), and the `heads` and `keys` tables made of them.

Arrays hold prompt after prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Shaped

from ln_probe.analyses.geometry.decide import DUPLICATE, NAMES, UNSELECTABLE
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import Marks, Observer
from ln_probe.hooks.edits import no_op
from ln_probe.hooks.norm import INTACT, VARIANTS, Norm

NORMALIZED, HEAD = "normalized", "head"
# Of the default prompts, what probes of keys take: each prompt has a key a token in every head, and the geometry of one
# prompt costs some hundred forward passes, so 4 of them say enough about keys.
GEOMETRY_PROMPTS = 4

Measures = dict[str, Shaped[np.ndarray, " ..."]]


@dataclass(eq=False)
class KeyRows:
    """Measures at one (layer, space, variant).

    Attributes:
        heads: the heads measured, a row each in the arrays; (-1,) in normalized space.
        radii: how far the observed queries of each head reach (`query_radius`).
        dim: dimension of the space the keys lie in.
        theorem: why none of them can be unselectable however many they are; empty if one can.
        no_op: why the variant changes nothing; empty if it does.
        prompts, lengths: number of every prompt, and how many keys it has.
        of_prompts: the measures of every prompt by name; a column per key, or per prompt.
    """

    layer: int
    space: str
    variant: str
    heads: Sequence[int]
    radii: Sequence[float]
    dim: int
    theorem: str
    no_op: str
    prompts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    of_prompts: list[Measures] = field(default_factory=list)

    @property
    def place(self) -> dict[str, object]:
        """The columns that say which keys these are; a row is of one of `heads`."""
        return {"layer": self.layer, "space": self.space, "variant": self.variant}

    @cached_property
    def measures(self) -> Measures:
        """The measures of all prompts by name, one prompt after the other."""
        return concatenated(self.of_prompts)

    def marks(self) -> Marks:
        return Marks(self.layer, self.variant, np.array(self.prompts), np.array(self.lengths), self.measures)


Block = Mapping[str, KeyRows]  # of one (layer, space), by variant


class KeyObserver(Observer):
    """Takes in measures layer by layer and prompt by prompt."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], dict[str, KeyRows]] = {}  # by layer and space, and variant

    def add(self, attended: AttentionLayer, space: str, measure: Callable[[str], Measures]) -> None:
        """Measure one layer on a prompt, under every variant; what changes nothing is measured once, intact.

        Args:
            space: normalized (at the norm's output) or head.
            measure: the measures of a variant, by name; a row per head.
        """
        site, heads, radii, layer = attended.site, [-1], [math.nan], attended.layer
        dim = site.d - 1 if site.projects else site.d
        if space == HEAD:
            heads, dim = attended.chosen, int(attended.maps.W_K.shape[-1])
            radii = [math.nan if attended.radii is None else float(attended.radii[head]) for head in heads]
        block = self._rows.setdefault((layer, space), {})
        known: dict[str, Measures] = {}
        for variant in VARIANTS:
            why = attended.no_op(variant) if space == HEAD else no_op(site, variant)
            same = INTACT.name if why else variant
            if same not in known:
                known[same] = measure(same)
            if variant not in block:
                theorem = sphere_theorem(site, variant) if space == NORMALIZED else ""
                block[variant] = KeyRows(layer, space, variant, heads, radii, dim, theorem, why)
            block[variant].prompts.append(attended.prompt)
            block[variant].lengths.append(attended.length)
            block[variant].of_prompts.append(known[same])

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of one (layer, space) after another, in the order of the tables."""
        for layer, space in sorted(self._rows, key=lambda place: (place[1] != NORMALIZED, place[0])):
            yield self._rows[layer, space]


def sphere_theorem(site: Norm, variant: str) -> str:
    """Why keys at a norm's output can never be unselectable; empty if they can."""
    if site.scales and (variant == INTACT.name or no_op(site, variant)):
        return "normalized keys lie on a sphere" + ("" if site.eps == 0 else " (up to eps)")
    return ""


def concatenated(parts: Sequence[Measures]) -> Measures:
    """Return the same measures of several sets of keys, one set after the other."""
    return {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}


# --------------------------------------------------------------------------------------------------------------- tables

# Rows of the `keys` table per (layer, head, space): the union over variants of this many hardest keys of each, and
# this many drawn at random. Every key chosen is shown under all four variants, so that they can be compared.
HARDEST_PER_VARIANT = 3
SAMPLED = 5


def head_rows(rows: KeyRows) -> Iterator[dict[str, object]]:
    """Yield rows of the `heads` table, one per head."""
    measures = rows.measures
    for row, head in enumerate(rows.heads):
        measured: dict[str, Any] = _summary({name: values[row] for name, values in measures.items()})
        all_selectable = not measured["unselectable"] and not measured["undecided"]
        yield {
            **rows.place,
            "head": head,
            **measured,
            "prompts": len(rows.lengths),
            "query_radius": rows.radii[row],
            "by_theorem": _by_theorem(rows) if all_selectable else "",
            "no_op": rows.no_op,
        }


# Columns of the `heads` table that are quantiles over keys: of which measure, and which one.
_QUANTILES = {
    "margin_median": ("margin", 0.5),
    "margin_p05": ("margin", 0.05),
    "attainable_median": ("attainable", 0.5),
    "attainable_p05": ("attainable", 0.05),
    "attainable_reachable_median": ("attainable_reachable", 0.5),
    "pattern_max_median": ("pattern_max", 0.5),
}


def _summary(measures: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the figures of one head."""
    names = NAMES[measures["verdict"]]
    known = measures["reachable"][measures["reachable"] >= 0]
    values = {**measures, "margin": (measures["margin_lower"] + measures["margin_upper"]) / 2}
    return {
        "keys": len(names),
        **{verdict: int((names == verdict).sum()) for verdict in ("unselectable", "duplicate", "undecided")},
        "unselectable_fraction": int((names == "unselectable").sum()) / len(names),
        "unreachable_fraction": float((known == 0).mean()) if len(known) else math.nan,
        **{name: _quantile(values[measure], q) for name, (measure, q) in _QUANTILES.items()},
    }


def _quantile(values: np.ndarray, q: float) -> float:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, q)) if len(known) else math.nan


def _by_theorem(rows: KeyRows) -> str:
    """Why keys are selectable here unless they are degenerate (of low rank, shortened by eps); empty if a finding."""
    longest = max(rows.lengths, default=0)
    if 0 < longest <= rows.dim + 1:
        return f"at most {longest} keys in {rows.dim} dimensions"
    return rows.theorem


def key_rows(
    block: Block, strings: Sequence[Sequence[str]], seed: int, *, every_key: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Yield columns of the `keys` table, for one head under one variant after another.

    Args:
        block: of one (layer, space).
        strings: token strings of each prompt.
        seed: of the sample.
        every_key: whether every key has a row, instead of the hardest and a sample.
    """
    first = next(iter(block.values()))
    prompt = np.repeat(first.prompts, first.lengths)
    position = np.concatenate([np.arange(length) for length in first.lengths])
    measures = {variant: rows.measures for variant, rows in block.items()}
    for row, head in enumerate(first.heads):
        of_head = {v: {name: values[row] for name, values in of_all.items()} for v, of_all in measures.items()}
        rng = np.random.default_rng([seed, first.layer, head + 1])
        picked = np.arange(len(prompt)) if every_key else _pick(of_head, rng)
        names = np.array(
            [strings[int(p)][int(i)] for p, i in zip(prompt[picked], position[picked], strict=True)], object
        )
        for variant, values in of_head.items():
            place = {**block[variant].place, "head": head}
            yield {
                **{name: each[picked] for name, each in values.items()},
                **{n: np.full(len(picked), v, object if isinstance(v, str) else np.int64) for n, v in place.items()},
                "prompt": prompt[picked],
                "position": position[picked],
                "token": names,
                "verdict": NAMES[values["verdict"][picked]],
            }


def _hardness(measures: Mapping[str, np.ndarray]) -> np.ndarray:
    """Smaller is harder: unselectable before the rest, then by attainable attention at the last position, where all
    keys compete; by the margin where that is not known."""
    value = np.where(np.isnan(measures["attainable"]), measures["margin_upper"], measures["attainable"])
    value = np.where(np.isnan(value), np.inf, value)
    return np.where(np.isin(measures["verdict"], [UNSELECTABLE, DUPLICATE]), -1.0 + np.fmin(1e-9 * value, 1.0), value)


def _pick(of_head: Mapping[str, Mapping[str, np.ndarray]], rng: np.random.Generator) -> np.ndarray:
    hard = []
    for measures in of_head.values():
        hardness = _hardness(measures)
        order = np.argsort(hardness, kind="stable")[:HARDEST_PER_VARIANT]
        hard.append(order[np.isfinite(hardness[order])])  # infinite: a selectable key of which no more was measured
    count = len(next(iter(of_head.values()))["verdict"])
    return np.unique(np.concatenate([*hard, rng.choice(count, size=min(SAMPLED, count), replace=False)]))
