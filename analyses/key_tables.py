"""What the `heads` and `keys` tables say of selectability, from what was measured of every key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses.calibration import Calibration
from ln_probe.analyses.geometry.verdicts import DUPLICATE, NAMES, UNSELECTABLE
from ln_probe.analyses.key_rows import HEAD, Block, KeyRows, blocks, head_rows
from ln_probe.analyses.key_sample import fraction_interval, quantile_interval
from ln_probe.analyses.probes.protocol import Piece
from ln_probe.analyses.tables import INTERVALS, KEYS

# Rows of the `keys` table per (layer, head, space): the union over variants of this many hardest keys of each, and
# this many drawn at random. Every key chosen is shown under all four variants, so that they can be compared.
HARDEST_PER_VARIANT = 3
SAMPLED = 5


def tables(
    pieces: Sequence[Piece], calibration: Calibration, token: Callable[[int, int], str], *, every: bool, seed: int
) -> tuple[list[dict[str, object]], pd.DataFrame]:
    """Rows of the `heads` table, and the `keys` table.

    Args:
        pieces: measures of all keys, in the order of the prompts.
        calibration: of the model.
        token: the token string at (prompt, position).
        every: keep every key instead of the hardest and a sample.
        seed: of the sample.
    """
    heads: list[dict[str, object]] = []
    keys: list[dict[str, np.ndarray]] = []
    for block in blocks(pieces):
        heads += [_head_row(rows, row, head, calibration) for rows, row, head in head_rows(block)]
        keys += _key_rows(block, token, every=every, seed=seed)
    if not keys:
        return heads, KEYS.empty()
    table = pd.DataFrame({name: np.concatenate([some[name] for some in keys]) for name in KEYS.names})
    known = table["reachable"].to_numpy()
    return heads, table.assign(reachable=pd.arrays.BooleanArray(known == 1, known < 0))


def _head_row(rows: KeyRows, row: int, head: int, calibration: Calibration) -> dict[str, object]:
    measured: dict[str, Any] = {**_summary({m: a[row] for m, a in rows.measures.items()}, sampled=rows.sampled)}
    all_selectable = not measured["unselectable"] and not measured["undecided"]
    return (
        {"layer": rows.layer, "head": head, "space": rows.space, "variant": rows.variant}
        | measured
        | {"keys_all": int(rows.lengths.sum()), "prompts": len(rows.lengths)}
        | {
            "query_radius": calibration.radius(rows.layer, head),
            "queries": calibration.queries(rows.layer, head) if rows.space == HEAD else "",
            "by_theorem": _by_theorem(rows) if all_selectable else "",
            "no_op": rows.no_op,
        }
    )


def _summary(found: Mapping[str, np.ndarray], *, sampled: bool) -> dict[str, float]:
    names = NAMES[found["verdict"]]
    counts = {v: int((names == v).sum()) for v in ("unselectable", "duplicate", "undecided")}
    middle = (found["margin_lower"] + found["margin_upper"]) / 2
    known = found["reachable"][found["reachable"] >= 0]
    return {
        "keys": len(names),
        **counts,
        "unselectable_fraction": counts["unselectable"] / len(names),
        "unreachable_fraction": float((known == 0).mean()) if len(known) else math.nan,
        "margin_median": _quantile(middle, 0.5),
        "margin_p05": _quantile(middle, 0.05),
        "attainable_median": _quantile(found["attainable"], 0.5),
        "attainable_p05": _quantile(found["attainable"], 0.05),
        "attainable_last_median": _quantile(found["attainable_last"], 0.5),
        "attainable_last_p05": _quantile(found["attainable_last"], 0.05),
        "attainable_reachable_median": _quantile(found["attainable_reachable"], 0.5),
        "pattern_max_median": _quantile(found["pattern_max"], 0.5),
    } | _intervals(found, middle, counts["unselectable"], known, sampled=sampled)


def _intervals(
    found: Mapping[str, np.ndarray], margin: np.ndarray, unselectable: int, reachable: np.ndarray, *, sampled: bool
) -> dict[str, float]:
    """How far a sample's figures may be from those of all keys; NaN where all were measured."""
    ends = {"unselectable_fraction": fraction_interval(unselectable, len(margin))} if sampled else {}
    if sampled and len(reachable):
        ends["unreachable_fraction"] = fraction_interval(int((reachable == 0).sum()), len(reachable))
    for name, values, q in (
        ("margin_median", margin, 0.5),
        ("margin_p05", margin, 0.05),
        ("attainable_median", found["attainable"], 0.5),
        ("attainable_p05", found["attainable"], 0.05),
        ("attainable_last_median", found["attainable_last"], 0.5),
        ("attainable_last_p05", found["attainable_last"], 0.05),
    ):
        if sampled:
            ends[name] = quantile_interval(values, q)
    return {
        f"{name}_{end}": ends[name][i] if name in ends else math.nan
        for name in INTERVALS
        for i, end in enumerate(("low", "high"))
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


def _key_rows(
    block: Block, token: Callable[[int, int], str], *, every: bool, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Columns of the `keys` table for one head under one variant after another."""
    first = next(iter(block.values()))
    prompt = np.repeat(first.prompts, first.columns)
    every_position = np.concatenate([np.arange(n) for n in first.columns])
    for row, head in enumerate(first.heads):
        here = {v: {m: a[row] for m, a in rows.measures.items()} for v, rows in block.items()}
        position = here[first.variant].get("position", every_position)
        rng = np.random.default_rng([seed, first.layer, head + 1])
        picked = np.arange(len(prompt)) if every else _pick(here, rng)
        names = np.array([token(int(p), int(i)) for p, i in zip(prompt[picked], position[picked], strict=True)], object)
        for variant, found in here.items():
            alike = {"layer": first.layer, "head": head, "space": first.space, "variant": variant}
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
    value = np.where(np.isnan(found["attainable_last"]), found["margin_upper"], found["attainable_last"])
    value = np.where(np.isnan(value), np.inf, value)
    return np.where(np.isin(found["verdict"], [UNSELECTABLE, DUPLICATE]), -1.0 + 1e-9 * value, value)


def _pick(here: Mapping[str, Mapping[str, np.ndarray]], rng: np.random.Generator) -> np.ndarray:
    chosen: set[int] = set()
    for found in here.values():
        chosen |= set(np.argsort(_hardness(found), kind="stable")[:HARDEST_PER_VARIANT].tolist())
    count = len(next(iter(here.values()))["verdict"])
    chosen |= set(rng.choice(count, size=min(SAMPLED, count), replace=False).tolist())
    return np.array(sorted(chosen))
