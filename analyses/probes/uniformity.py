"""The probe `uniformity`: how near each head comes to attending uniformly (`ln_probe.analyses.attention_spread`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses.attended import Attended
from ln_probe.analyses.key_rows import GEOMETRY_PROMPTS, HEAD, Collected, KeyRows, blocks, head_rows
from ln_probe.analyses.probes.protocol import (
    DESCRIBED,
    Context,
    Cost,
    Finding,
    Found,
    Needs,
    Observer,
    Piece,
    Probe,
    Shape,
    View,
)
from ln_probe.analyses.probes.sentences import NOT_SIZE_MATCHED, NOTEWORTHY, largest, of_variant
from ln_probe.analyses.schema import Part
from ln_probe.analyses.tables import HEADS
from ln_probe.analyses.wording import percent
from ln_probe.hooks.variants import VARIANTS

MEASURES = ("entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor")  # of one head on one prompt

# Seconds of one core per score (query × key, layer, head and variant): 3.3e-8 and 3.8e-8 measured on lm-layernorm with
# prompts of 128 and 256 tokens.
_QUERIES = "queries"  # kept with them: how many had a choice
_SECONDS_PER_SCORE = 3.5e-8


class UniformityProbe(Probe):
    name = "uniformity"
    summary = "how uniformly heads attend"
    tables = (Part(HEADS, (*HEADS.key, "query_radius", *MEASURES, "no_op")),)
    needs = Needs(attention=True, variants=True, calibration=True)
    interleaved = True
    prompts = GEOMETRY_PROMPTS

    def start(self, view: View) -> Observer:
        return _Watching()

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        rows = [
            {"layer": r.layer, "head": head, "space": r.space, "variant": r.variant}
            | {"query_radius": context.calibration.radius(r.layer, head)}
            | _summary(r, row)
            | {"no_op": r.no_op}
            for block in blocks(pieces)
            for r, row, head in head_rows(block)
        ]
        frames = {HEADS.name: pd.DataFrame(rows, columns=list(self.tables[0].columns))}
        return Found(frames, (NOT_SIZE_MATCHED,) * (bool(rows) and context.calibration.projection_matters))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        heads = tables[HEADS.name]
        random_angle = float(provenance.get("random_angle_deg", math.nan))
        return [*_spread(heads), *(Finding(text, "angle", DESCRIBED) for text in _uniform(heads, random_angle))]

    def cost(self, shape: Shape) -> Cost:
        scores = sum(n * n for n in shape.lengths) * shape.layers * shape.heads * len(VARIANTS)
        rows = len(shape.lengths) * shape.layers * shape.heads * len(VARIANTS)
        return Cost(scores * _SECONDS_PER_SCORE, disk_bytes=8.0 * len(MEASURES) * rows)


class _Watching(Observer):
    def __init__(self) -> None:
        self.collected = Collected()

    def attention(self, prompt: int, attended: Attended) -> None:
        if attended.heads is None:
            return
        found: dict[str, dict[str, np.ndarray]] = {}
        for variant in attended.outputs:
            nothing = attended.no_op(variant)
            same = "intact" if nothing else variant
            if same not in found:
                uniform, _ = attended.spread(same)
                found[same] = {m: getattr(uniform, m)[attended.chosen].numpy()[:, None] for m in MEASURES}
                found[same][_QUERIES] = np.full((len(attended.chosen), 1), float(_choosing(attended)))
            self.collected.add(
                (attended.layer, HEAD, variant),
                prompt,
                attended.length,
                found[same],
                heads=attended.chosen,
                dim=attended.heads.W_K.shape[-1],
                no_op=nothing,
            )

    def piece(self) -> Piece:
        return self.collected.piece()


def _choosing(attended: Attended) -> int:
    """How many queries see more than one key."""
    return attended.length - 1 if attended.seen.causal or attended.length == 1 else attended.length


def _summary(rows: KeyRows, row: int) -> dict[str, float]:
    """Means over prompts; a prompt counts with the queries that had a choice."""
    weights = rows.measures[_QUERIES][row]
    if not weights.sum():
        return dict.fromkeys(MEASURES, math.nan)
    counts = weights > 0
    return {m: float(np.average(rows.measures[m][row, counts], weights=weights[counts])) for m in MEASURES}


def _spread(heads: pd.DataFrame) -> list[Finding]:
    """Where taking scaling away changes how widely attention is spread, against the greatest entropy there can be."""
    if not len(heads):
        return []
    per_layer = {v: of_variant(heads, v).groupby("layer")["entropy_ratio"].median() for v in ("intact", "no_scaling")}
    change = (per_layer["no_scaling"] - per_layer["intact"]).dropna()
    if not len(change) or change.abs().max() < NOTEWORTHY:
        return []
    one, two = (float(per_layer[v][change.index].mean()) for v in ("intact", "no_scaling"))
    way = "wider" if two > one else "less"
    text = (
        f"With constants instead of scaling, queries as they are would spread their attention "
        f"{way if abs(two - one) >= NOTEWORTHY else 'as widely'} on these prompts: the median head's entropy goes from "
        f"{percent(one)} to {percent(two)} of that of an even spread"
    )
    if len(change) > 1:
        points = ", ".join(f"{100 * c:+.0f}" for c in (change.min(), change.max()))
        text += f", mean over {len(change)} layers (least and most of a layer: {points} percentage points)"
    return [Finding(f"{text}.", "entropy", DESCRIBED, size=abs(two - one))]


def _uniform(heads: pd.DataFrame, random_angle: float) -> list[str]:
    rows = of_variant(heads, "intact") if len(heads) else heads
    if not len(rows) or rows["entropy_ratio"].isna().all():
        return []
    top = largest(rows, rows["entropy_ratio"])
    text = (
        f"The most uniform head is L{int(top['layer'])}H{int(top['head'])}: its attention has "
        f"{percent(top['entropy_ratio'])} of the greatest possible entropy"
    )
    if not rows["uniform_angle_deg"].isna().all():
        near = largest(rows, -rows["uniform_angle_deg"])
        text += (
            f"; the queries nearest the uniform direction are those of L{int(near['layer'])}H{int(near['head'])}, at "
            f"{near['uniform_angle_deg']:.0f}° (a random direction: {random_angle:.0f}°)"
        )
    return [text + "."]
