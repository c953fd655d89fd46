"""What was measured of every key at one (layer, space, variant), and the `heads` and `keys` tables made of it.

Arrays hold prompt after prompt. Pieces of the prompts are joined in their order before anything is summed or any
quantile taken, so tables do not depend on how the prompts were divided. One (layer, space) is in memory at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from ln_probe.analyses.constants import Calibration
from ln_probe.analyses.geometry.decide import DUPLICATE, NAMES, UNSELECTABLE
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import Observer, Piece
from ln_probe.analyses.probes.columns import INTERVALS
from ln_probe.analyses.probes.statistics import fraction_interval, quantile_interval
from ln_probe.hooks.norm import Site
from ln_probe.hooks.variants import INTACT, VARIANTS, no_op

NORMALIZED, HEAD = "normalized", "head"
# Of the default prompts, what probes of keys take: each prompt has a key a token in every head, and the geometry of one
# prompt costs some hundred forward passes, so 4 of them say enough about keys.
GEOMETRY_PROMPTS = 4


@dataclass(frozen=True, eq=False)
class KeyRows:
    """What was measured at one (layer, space, variant).

    Attributes:
        heads: the heads measured, a row each in the arrays; (-1,) in normalized space.
        dim: dimension of the space the keys lie in.
        theorem: why none of them can be unselectable however many they are; empty if one can.
        no_op: why the variant changes nothing; empty if it does.
        prompts, lengths: number of every prompt, and how many keys it has.
        measured: how many of these were measured, where only a sample was.
        measures: by name; a column per key, or per prompt.
    """

    layer: int
    space: str
    variant: str
    heads: Sequence[int]
    dim: int
    theorem: str
    no_op: str
    prompts: Int64[np.ndarray, " prompt"]
    lengths: Int64[np.ndarray, " prompt"]
    measured: Int64[np.ndarray, " prompt"]
    measures: Mapping[str, Shaped[np.ndarray, "head column"]]

    @property
    def place(self) -> dict[str, object]:
        """The columns that say which keys these are; a row is of one of `heads`."""
        return {"layer": self.layer, "space": self.space, "variant": self.variant}

    @property
    def sampled(self) -> bool:
        """Whether columns are of some keys only: which, says the measure `position`."""
        return "position" in self.measures

    @property
    def columns(self) -> Int64[np.ndarray, " prompt"]:
        """How many keys of each prompt were measured."""
        return self.measured if self.sampled else self.lengths


Block = Mapping[str, KeyRows]  # of one (layer, space), by variant
Measures = dict[str, Shaped[np.ndarray, " ..."]]
_Place = tuple[int, str, str]  # layer, space, variant
_PER_PROMPT = ("prompts", "lengths", "measured")


class Collected(Observer):
    """Takes in measures layer by layer and prompt by prompt."""

    def __init__(self) -> None:
        self._held: dict[_Place, tuple[dict[str, Any], list[Measures]]] = {}  # what holds for all prompts, and arrays

    def add(
        self,
        attended: AttentionLayer,
        space: str,
        measure: Callable[[str], Measures],
    ) -> None:
        """Measure one layer on a prompt, under every variant; what changes nothing is measured once, intact.

        Args:
            space: normalized (at the norm's output) or head.
            measure: the measures of a variant, by name; a row per head.
        """
        site, heads, layer = attended.site, [-1], attended.layer
        dim = site.d - 1 if site.projects else site.d
        if space == HEAD:
            heads, dim = attended.chosen, int(attended.maps.W_K.shape[-1])
        known: dict[str, Measures] = {}
        for variant in attended.outputs:
            why = attended.no_op(variant) if space == HEAD else no_op(site, variant)
            same = INTACT.name if why else variant
            if same not in known:
                measures = measure(same)
                count = next((a.shape[1] for a in measures.values()), 0)
                numbers = zip(_PER_PROMPT, (attended.prompt, attended.length, count), strict=True)
                known[same] = {name: np.array([n], np.int64) for name, n in numbers} | measures
            names = [name for name in known[same] if name not in _PER_PROMPT]
            about = {"layer": layer, "space": space, "variant": variant, "heads": heads, "dim": dim}
            theorem = sphere_theorem(site, variant) if space == NORMALIZED else ""
            about |= {"theorem": theorem, "no_op": why, "measures": names}
            self._held.setdefault((layer, space, variant), (about, []))[1].append(known[same])

    def piece(self) -> Piece:
        """All of it, as `blocks` reads it."""
        arrays = {
            f"{space}/{layer}/{variant}/{name}": values
            for (layer, space, variant), (_, parts) in self._held.items()
            for name, values in joined(parts).items()
        }
        return Piece(arrays, info={"rows": [about for about, _ in self._held.values()]})


def sphere_theorem(site: Site, variant: str) -> str:
    """Why keys at a norm's output can never be unselectable; empty if they can."""
    if site.scales and (variant == INTACT.name or no_op(site, variant)):
        return "normalized keys lie on a sphere" + ("" if site.eps == 0 else " (up to eps)")
    return ""


def joined(parts: Sequence[Measures]) -> Measures:
    """One after another: the same measures of several prompts, or pieces of them."""
    return {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}


def blocks(pieces: Sequence[Piece]) -> Iterator[Block]:
    """What the pieces hold, a (layer, space) at a time, in the order of the tables."""
    held: dict[_Place, list[tuple[dict[str, Any], Piece]]] = defaultdict(list)
    for piece in pieces:
        for about in piece.info["rows"]:
            held[about["layer"], about["space"], about["variant"]].append((about, piece))
    places = {(layer, space) for layer, space, _ in held}
    for layer, space in sorted(places, key=lambda p: (p[1] != NORMALIZED, p[0])):
        yield {v: _read(held[layer, space, v]) for v in VARIANTS if (layer, space, v) in held}


def _read(parts: Sequence[tuple[dict[str, Any], Piece]]) -> KeyRows:
    fields = dict(parts[0][0])
    place, names = "{space}/{layer}/{variant}/".format(**fields), (*_PER_PROMPT, *fields.pop("measures"))
    arrays = joined([{name: piece.arrays[place + name] for name in names} for _, piece in parts])
    fields |= {name: arrays.pop(name) for name in _PER_PROMPT}
    return KeyRows(**fields, measures=arrays)


# --------------------------------------------------------------------------------------------------------------- tables

# Rows of the `keys` table per (layer, head, space): the union over variants of this many hardest keys of each, and
# this many drawn at random. Every key chosen is shown under all four variants, so that they can be compared.
HARDEST_PER_VARIANT = 3
SAMPLED = 5


def head_row(rows: KeyRows, row: int, calibration: Calibration) -> dict[str, object]:
    """A row of the `heads` table."""
    head = rows.heads[row]
    measured: dict[str, Any] = _summary({m: a[row] for m, a in rows.measures.items()}, sampled=rows.sampled)
    all_selectable = not measured["unselectable"] and not measured["undecided"]
    return {
        **rows.place,
        "head": head,
        **measured,
        "keys_all": int(rows.lengths.sum()),
        "prompts": len(rows.lengths),
        "query_radius": calibration.radius(rows.layer, head),
        "queries": calibration.queries(rows.layer, head) if rows.space == HEAD else "",
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


def _summary(found: Mapping[str, np.ndarray], *, sampled: bool) -> dict[str, float]:
    """A head's figures, and how far a sample's may be from those of all keys; NaN where all were measured."""
    names = NAMES[found["verdict"]]
    counts = {v: int((names == v).sum()) for v in ("unselectable", "duplicate", "undecided")}
    known = found["reachable"][found["reachable"] >= 0]
    values = {**found, "margin": (found["margin_lower"] + found["margin_upper"]) / 2}
    ends: dict[str, tuple[float, float]] = {}
    if sampled:
        ends = {name: quantile_interval(values[m], q) for name, (m, q) in _QUANTILES.items() if name in INTERVALS}
        ends["unselectable_fraction"] = fraction_interval(counts["unselectable"], len(names))
        if len(known):
            ends["unreachable_fraction"] = fraction_interval(int((known == 0).sum()), len(known))
    intervals = {name: ends.get(name, (math.nan, math.nan)) for name in INTERVALS}
    return {
        "keys": len(names),
        **counts,
        "unselectable_fraction": counts["unselectable"] / len(names),
        "unreachable_fraction": float((known == 0).mean()) if len(known) else math.nan,
        **{name: _quantile(values[m], q) for name, (m, q) in _QUANTILES.items()},
        **{f"{name}_low": low for name, (low, _) in intervals.items()},
        **{f"{name}_high": high for name, (_, high) in intervals.items()},
    }


def _quantile(values: np.ndarray, q: float) -> float:
    kept = values[~np.isnan(values)]
    return float(np.quantile(kept, q)) if len(kept) else math.nan


def _by_theorem(rows: KeyRows) -> str:
    """Why keys are selectable here unless they are degenerate (of low rank, shortened by eps); empty if a finding."""
    longest = int(rows.lengths.max(initial=0))
    if 0 < longest <= rows.dim + 1:
        return f"at most {longest} keys in {rows.dim} dimensions"
    return rows.theorem


def key_rows(
    block: Block, token: Callable[[int, int], str], *, every: bool, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Columns of the `keys` table for one head under one variant after another.

    Args:
        token: the token string at (prompt, position).
        every: keep every key instead of the hardest and a sample.
        seed: of the sample.
    """
    first = next(iter(block.values()))
    prompt = np.repeat(first.prompts, first.columns)
    for row, head in enumerate(first.heads):
        here = {v: {m: a[row] for m, a in rows.measures.items()} for v, rows in block.items()}
        position = here[first.variant].get("position", np.concatenate([np.arange(n) for n in first.columns]))
        rng = np.random.default_rng([seed, first.layer, head + 1])
        picked = np.arange(len(prompt)) if every else _pick(here, rng)
        names = np.array([token(int(p), int(i)) for p, i in zip(prompt[picked], position[picked], strict=True)], object)
        for variant, found in here.items():
            alike = {**block[variant].place, "head": head}
            yield {
                **{m: a[picked] for m, a in found.items()},
                **{n: np.full(len(picked), v, object if isinstance(v, str) else np.int64) for n, v in alike.items()},
                "prompt": prompt[picked],
                "position": position[picked],
                "token": names,
                "verdict": NAMES[found["verdict"][picked]],
            }


def _hardness(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Smaller is harder: unselectable before the rest, then by attainable attention at the last position, where all
    keys compete; by the margin where that is not known."""
    value = np.where(np.isnan(found["attainable"]), found["margin_upper"], found["attainable"])
    value = np.where(np.isnan(value), np.inf, value)
    return np.where(np.isin(found["verdict"], [UNSELECTABLE, DUPLICATE]), -1.0 + 1e-9 * value, value)


def _pick(here: Mapping[str, Mapping[str, np.ndarray]], rng: np.random.Generator) -> np.ndarray:
    hard = [np.argsort(_hardness(found), kind="stable")[:HARDEST_PER_VARIANT] for found in here.values()]
    count = len(next(iter(here.values()))["verdict"])
    return np.unique(np.concatenate([*hard, rng.choice(count, size=min(SAMPLED, count), replace=False)]))
