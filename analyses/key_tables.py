"""The `heads` and `keys` tables, from what was measured of every key.

Measurements of one (layer, space, variant) are arrays over the keys of all prompts, one prompt after another. Prompts
measured in several pieces are joined in their order before anything is summed or any quantile taken, so the tables do
not depend on how the prompts were divided. One layer at a time is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64, Shaped

from ln_probe.analyses.geometry.verdicts import DUPLICATE, NAMES, UNSELECTABLE
from ln_probe.analyses.variants import VARIANTS

HEAD_COLUMNS = (
    "layer", "head", "space", "variant", "keys", "unselectable", "duplicate", "undecided", "unselectable_fraction",
    "margin_median", "margin_p05", "attainable_median", "attainable_p05", "attainable_reachable_median",
    "pattern_max_median", "query_radius", "entropy_ratio", "uniform_angle_deg", "score_spread",
    "score_spread_floor", "by_theorem", "no_op",
)  # fmt: skip
KEY_COLUMNS = (
    "layer", "head", "space", "variant", "prompt", "position", "token", "verdict", "margin_lower", "margin_upper",
    "attainable", "attainable_reachable", "pattern_max", "first_unselectable_at",
)  # fmt: skip
# Of one key; `verdict` is an index into NAMES.
MEASURES = (
    "verdict", "margin_lower", "margin_upper", "attainable", "attainable_reachable", "pattern_max",
    "first_unselectable_at",
)  # fmt: skip
UNIFORM = ("entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor")  # of one head on one prompt
NORMALIZED, HEAD = "normalized", "head"

# Rows of the `keys` table per (layer, head, space): the union over variants of this many hardest keys of each, and
# this many drawn at random. Every key chosen is shown under all four variants, so that they can be compared.
HARDEST_PER_VARIANT = 3
SAMPLED = 5

Block = Mapping[str, "KeyRows"]  # of one (layer, space), by variant


@dataclass(frozen=True, eq=False)
class KeyRows:
    """What was measured at one (layer, space, variant).

    Attributes:
        heads: the heads measured, a row each in the arrays; (-1,) in normalized space.
        dim: dimension of the space the keys lie in.
        theorem: why none of them can be unselectable however many they are; empty if one can.
        no_op: why the variant changes nothing; empty if it does.
        prompts, lengths: number of every prompt, and how many keys it has.
        measures: MEASURES by name, [head key] each; empty if selectability was not measured.
        uniform: UNIFORM, [prompt head measure]; None if uniformity was not measured.
    """

    layer: int
    space: str
    variant: str
    heads: tuple[int, ...]
    dim: int
    theorem: str
    no_op: str
    prompts: Int64[np.ndarray, " prompt"]
    lengths: Int64[np.ndarray, " prompt"]
    measures: Mapping[str, Shaped[np.ndarray, "head key"]] = field(default_factory=dict)
    uniform: Float64[np.ndarray, "prompt head 4"] | None = None


def join(parts: Sequence[KeyRows]) -> KeyRows:
    """One after another: the same (layer, space, variant) measured on several pieces of the prompts."""
    first = parts[0]
    uniform = [p.uniform for p in parts if p.uniform is not None]
    return replace(
        first,
        prompts=np.concatenate([p.prompts for p in parts]),
        lengths=np.concatenate([p.lengths for p in parts]),
        measures={m: np.concatenate([p.measures[m] for p in parts], axis=1) for m in first.measures},
        uniform=np.concatenate(uniform) if uniform else None,
    )


def tables(
    blocks: Iterable[Block],
    radii: Mapping[int, Float64[np.ndarray, " head"]],
    token: Callable[[int, int], str],
    *,
    every: bool,
    seed: int,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The `heads` and the `keys` table.

    Args:
        blocks: a mapping from variant to its rows for every (layer, space), normalized space first.
        radii: rho per layer, by head.
        token: the token string at (prompt, position).
        every: keep every key instead of the hardest and a sample.
        seed: of the sample.
    """
    heads: list[dict[str, object]] = []
    keys: list[pd.DataFrame] = []
    for block in blocks:
        for rows in block.values():
            heads += _head_rows(rows, radii)
        keys += _key_frames(block, token, every=every, seed=seed)
    return (
        pd.DataFrame(heads, columns=list(HEAD_COLUMNS)),
        pd.concat(keys, ignore_index=True) if keys else pd.DataFrame(columns=list(KEY_COLUMNS)),
    )


def by_place(rows: Iterable[KeyRows]) -> list[Block]:
    """Rows as the blocks that `tables` takes, in its order."""
    found: dict[tuple[bool, int], dict[str, KeyRows]] = {}
    for r in sorted(rows, key=lambda r: (*order(r.layer, r.space), VARIANTS.index(r.variant))):
        found.setdefault(order(r.layer, r.space), {})[r.variant] = r
    return list(found.values())


def order(layer: int, space: str) -> tuple[bool, int]:
    """Where a (layer, space) stands in the tables."""
    return space != NORMALIZED, layer


def _head_rows(rows: KeyRows, radii: Mapping[int, Float64[np.ndarray, " head"]]) -> Iterable[dict[str, object]]:
    for row, head in enumerate(rows.heads):
        yield (
            {"layer": rows.layer, "head": head, "space": rows.space, "variant": rows.variant}
            | _summary({m: a[row] for m, a in rows.measures.items()})
            | _uniform_summary(rows, row)
            | {
                "query_radius": float(radii[rows.layer][head]) if head >= 0 and rows.layer in radii else math.nan,
                "by_theorem": _by_theorem(rows),
                "no_op": rows.no_op,
            }
        )


def _summary(found: Mapping[str, np.ndarray]) -> dict[str, float]:
    if not found:
        counted = dict.fromkeys(("keys", "unselectable", "duplicate", "undecided", "unselectable_fraction"), math.nan)
        middle = None
    else:
        names = NAMES[found["verdict"]]
        counts = {v: int((names == v).sum()) for v in ("unselectable", "duplicate", "undecided")}
        counted = {
            "keys": len(names), **counts, "unselectable_fraction": counts["unselectable"] / len(names),
        }  # fmt: skip
        middle = (found["margin_lower"] + found["margin_upper"]) / 2
    return counted | {
        "margin_median": _quantile(middle, 0.5),
        "margin_p05": _quantile(middle, 0.05),
        "attainable_median": _quantile(found.get("attainable"), 0.5),
        "attainable_p05": _quantile(found.get("attainable"), 0.05),
        "attainable_reachable_median": _quantile(found.get("attainable_reachable"), 0.5),
        "pattern_max_median": _quantile(found.get("pattern_max"), 0.5),
    }


def _quantile(values: np.ndarray | None, q: float) -> float:
    kept = np.empty(0) if values is None else values[~np.isnan(values)]
    return float(np.quantile(kept, q)) if len(kept) else math.nan


def _uniform_summary(rows: KeyRows, row: int) -> dict[str, float]:
    weights = np.maximum(rows.lengths - 1, 0).astype(float)  # a prompt counts with the queries that had a choice
    if rows.uniform is None or not weights.sum():
        return dict.fromkeys(UNIFORM, math.nan)
    counts = weights > 0
    return {
        name: float(np.average(rows.uniform[counts, row, i], weights=weights[counts])) for i, name in enumerate(UNIFORM)
    }


def _by_theorem(rows: KeyRows) -> str:
    """Why no key can be unselectable here whatever the model has learned; empty if it is a finding."""
    longest = int(rows.lengths.max(initial=0)) if rows.measures else 0
    if 0 < longest <= rows.dim + 1:
        return f"at most {longest} keys in {rows.dim} dimensions"
    return rows.theorem


def _key_frames(block: Block, token: Callable[[int, int], str], *, every: bool, seed: int) -> Iterable[pd.DataFrame]:
    first = next(iter(block.values()))
    if not first.measures:
        return
    prompt = np.repeat(first.prompts, first.lengths)
    position = np.concatenate([np.arange(n) for n in first.lengths])
    for row, head in enumerate(first.heads):
        here = {v: {m: a[row] for m, a in rows.measures.items()} for v, rows in block.items()}
        rng = np.random.default_rng([seed, first.layer, head + 1])
        picked = np.arange(len(prompt)) if every else _pick(here, rng)
        names = np.array([token(int(p), int(i)) for p, i in zip(prompt[picked], position[picked], strict=True)], object)
        for variant, found in here.items():
            frame = pd.DataFrame({m: a[picked] for m, a in found.items()})
            frame = frame.assign(
                layer=first.layer, head=head, space=first.space, variant=variant, prompt=prompt[picked],
                position=position[picked], token=names, verdict=NAMES[found["verdict"][picked]],
            )  # fmt: skip
            yield frame[list(KEY_COLUMNS)]


def _hardness(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Smaller is harder: attainable attention where it is known, else the margin; unselectable before the rest."""
    value = np.where(np.isnan(found["attainable"]), found["margin_upper"], found["attainable"])
    value = np.where(np.isnan(value), np.inf, value)
    return np.where(np.isin(found["verdict"], [UNSELECTABLE, DUPLICATE]), -1.0 + 1e-9 * value, value)


def _pick(here: Mapping[str, Mapping[str, np.ndarray]], rng: np.random.Generator) -> np.ndarray:
    chosen: set[int] = set()
    for found in here.values():
        chosen |= set(np.argsort(_hardness(found), kind="stable")[:HARDEST_PER_VARIANT].tolist())
    count = len(next(iter(here.values()))["verdict"])
    chosen |= set(rng.choice(count, size=min(SAMPLED, count), replace=False).tolist())
    return np.array(sorted(chosen))
