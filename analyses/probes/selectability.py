"""The probe `selectability`: which keys of a prompt a query can select, by what margin and with how much attention.

Two spaces. `normalized`: the norm's output before gain and bias (the paper's claim is about it; one row per layer,
head = -1). `head`: keys as attention sees them, after gain, bias, W_K, b_K, any QK-norm and rotary positions; margins
there are gaps in nats over the reachable queries, the same for every equivalent model. Behind a norm that does not
scale, or none, queries are unbounded: verdicts ask for a query in any direction that the head has, margins and
attention for one of the empirical set. The queries of all variants are the intact model's.

Keys are judged among those that one query sees: all of them, or those of its window (`Attended.key_sets`).

Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the convex hull of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses import key_tables
from ln_probe.analyses.attended import Attended
from ln_probe.analyses.calibration import QUERY_RADIUS_QUANTILE
from ln_probe.analyses.geometry.hull import KeyGeometry, attainable_attention, key_geometry
from ln_probe.analyses.geometry.judged import judged
from ln_probe.analyses.geometry.query_sets import QuerySet
from ln_probe.analyses.geometry.verdicts import NAMES
from ln_probe.analyses.key_rows import GEOMETRY_PROMPTS, HEAD, NORMALIZED, Collected, blocks
from ln_probe.analyses.key_sample import SAMPLE_ABOVE
from ln_probe.analyses.probes.protocol import (
    DESCRIBED,
    NO_EFFECT,
    Context,
    Cost,
    Finding,
    Found,
    Marks,
    Needs,
    Observer,
    Piece,
    Probe,
    Shape,
    View,
)
from ln_probe.analyses.probes.sampled_keys import over_nothing, sampled_heads, stacked
from ln_probe.analyses.probes.sentences import NOT_SIZE_MATCHED, NOTEWORTHY, even_share, medians, of_variant
from ln_probe.analyses.schema import Part
from ln_probe.analyses.tables import HEADS, KEYS
from ln_probe.analyses.variant_outputs import no_op
from ln_probe.analyses.wording import number, percent
from ln_probe.hooks.site import Site
from ln_probe.hooks.variants import VARIANTS

_UNIFORMITY = ("entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor")  # filled by that probe

# Seconds of one core per key (token, layer, head and variant) at 128 and 512 tokens a prompt: 5.6e-5 measured on
# lm-layernorm (d_head 8), 4.8e-4 on GPT-2 small's shape (d_head 64, bench/probe.py). In between, as a power.
_SECONDS_PER_KEY = {128: 6e-5, 512: 5e-4}
_BYTES_PER_KEY = 61  # of a piece: seven numbers and two codes


class Selectability(Probe):
    name = "selectability"
    summary = "which keys a query can select, by what margin"
    tables = (Part(HEADS, tuple(c for c in HEADS.names if c not in _UNIFORMITY)), KEYS)
    needs = Needs(attention=True, variants=True, calibration=True)
    prompts = GEOMETRY_PROMPTS
    samples_keys = True
    interleaved = True
    thresholds = {  # noqa: RUF012 - a constant of the class
        "query_radius_quantile": QUERY_RADIUS_QUANTILE,
        "keys_hardest_per_variant": key_tables.HARDEST_PER_VARIANT,
        "keys_sampled": key_tables.SAMPLED,
        "keys_sampled_above_seconds": SAMPLE_ABOVE,
    }

    def start(self, view: View) -> Observer:
        return _Watching()

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        heads, keys = key_tables.tables(
            pieces, context.calibration, context.token, every=context.keys == "all", seed=context.seed
        )
        frames = {HEADS.name: pd.DataFrame(heads, columns=list(self.tables[0].columns)), KEYS.name: keys}
        return Found(frames, (NOT_SIZE_MATCHED,) * (bool(heads) and context.calibration.projection_matters))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        heads = tables[HEADS.name]
        return [
            *_attainable(heads, even_share(heads)),
            *_selectable(heads, "head", "As attention sees them, per head", "unselectable"),
            *_margins(heads),
            *_selectable(heads, "normalized", "At the norm's output", "geometry"),
        ]

    def marks(self, pieces: Sequence[Piece]) -> Iterator[Marks]:
        for block in blocks(pieces):
            for rows in block.values():
                if rows.space == HEAD and not rows.sampled:  # a mark is of every key
                    yield Marks(rows.layer, rows.variant, rows.prompts, rows.lengths, rows.measures)

    def cost(self, shape: Shape) -> Cost:
        per_token = shape.layers * (shape.heads + 1) * len(VARIANTS)
        seconds = sum(n * per_token * _per_key(n) for n in shape.lengths)
        return Cost(seconds, disk_bytes=sum(shape.lengths) * per_token * _BYTES_PER_KEY)


class _Watching(Observer):
    def __init__(self) -> None:
        self.collected = Collected()

    def attention(self, prompt: int, attended: Attended) -> None:
        self._normalized(prompt, attended)
        if attended.heads is not None:
            self._heads(prompt, attended, attended.heads.W_K.shape[-1])

    def piece(self) -> Piece:
        return self.collected.piece()

    def _normalized(self, prompt: int, attended: Attended) -> None:
        site, drawn = attended.site, attended.drawn(prompt, -1)
        known: dict[str, dict[str, np.ndarray]] = {}
        for variant, keys in attended.outputs.items():
            nothing = no_op(site, variant)
            same = "intact" if nothing else variant
            if same not in known:
                rows = keys.cpu().numpy()
                if drawn is not None:
                    known[same] = stacked([over_nothing(attended, rows, drawn)])
                else:
                    parts = [key_geometry(rows[None, seen], causal=attended.grows) for seen in attended.key_sets]
                    known[same] = _joined(
                        [_measures(part, seen.stop - 1) for part, seen in zip(parts, attended.key_sets, strict=True)]
                    )
            self.collected.add(
                (attended.layer, NORMALIZED, variant),
                prompt,
                attended.length,
                known[same],
                heads=(-1,),
                dim=site.d - 1 if site.projects else site.d,
                no_op=nothing,
                theorem=_theorem(site, NORMALIZED, variant),
            )

    def _heads(self, prompt: int, attended: Attended, dim: int) -> None:
        known: dict[str, dict[str, np.ndarray]] = {}
        for variant in attended.outputs:
            nothing = attended.no_op(variant)
            same = "intact" if nothing else variant
            if same not in known:
                known[same] = _in_head_space(attended, same, prompt)
            self.collected.add(
                (attended.layer, HEAD, variant),
                prompt,
                attended.length,
                known[same],
                heads=attended.chosen,
                dim=dim,
                no_op=nothing,
                theorem=_theorem(attended.site, HEAD, variant),
            )


def _in_head_space(attended: Attended, variant: str, prompt: int) -> dict[str, np.ndarray]:
    """Measures of the chosen heads' keys."""
    if attended.calibration.sample is not None:
        return sampled_heads(attended, variant, prompt)
    keys = attended.keys(variant).permute(1, 0, 2)[attended.chosen].cpu().numpy()
    bias = attended.key_bias
    _, most = attended.spread(variant)
    found = []
    for seen in attended.key_sets:
        last, here = seen.stop - 1, np.ascontiguousarray(keys[:, seen])
        lift = None if bias is None else np.ascontiguousarray(bias[:, seen])
        reachable = attended.reachable(last)
        if reachable is None:
            part = _over_any(attended, here, lift, last)
        else:
            part = _over_reachable(attended, here, lift, last, reachable)
        found.append(part | {"pattern_max": most[attended.chosen, seen]})
    return _joined(found)


def _over_reachable(
    attended: Attended,
    keys: np.ndarray,
    bias: np.ndarray | None,
    last: int,
    reachable: tuple[np.ndarray, np.ndarray],
) -> dict[str, np.ndarray]:
    """Keys over the queries that the heads can make at position `last`, and over those of the size that occurs."""
    geometry = key_geometry(keys, bias, query_set=reachable, causal=attended.grows)
    found = _measures(geometry, last)
    radii = attended.calibration.radii
    if attended.layer in radii:
        rho = radii[attended.layer][attended.chosen][:, None, None]
        smaller = reachable[0], reachable[1] * rho
        weight, above = attainable_attention(keys, smaller, bias, starts=geometry.attainable_at)
        # The observed set lies in the reachable one: a weight found there counts here too.
        most = np.fmax(geometry.attainable, weight)
        found |= {"attainable": weight, "attainable_upper": above, "attainable_reachable": most}
    return found


def _over_any(attended: Attended, keys: np.ndarray, bias: np.ndarray | None, last: int) -> dict[str, np.ndarray]:
    """Keys over queries without a bound: verdicts over every direction that the heads have, the rest over the queries
    that occurred (NaN if calibration saw none)."""
    center, axes = attended.directions(last)
    lifts = [None] * len(keys) if bias is None else list(bias)
    verdicts = []
    for one, lift, c, directions in zip(keys, lifts, center, axes, strict=True):
        where = judged(one, lift, QuerySet(c, directions).compact())
        above = None if where.lift is None else where.lift[None]
        verdicts.append(_measures(key_geometry(where.rows[None], above, causal=attended.grows, margins=False), last))
    found = {m: np.concatenate([v[m] for v in verdicts]) for m in verdicts[0]}
    occurred = attended.empirical(last)
    if occurred is None:
        return found
    geometry = key_geometry(keys, bias, query_set=occurred)
    return found | {
        "margin_lower": geometry.margin_lower,
        "margin_upper": geometry.margin_upper,
        "attainable": geometry.attainable,
        "attainable_upper": geometry.attainable_upper,
    }


def _measures(geometry: KeyGeometry, last: int) -> dict[str, np.ndarray]:
    """What is kept of every key; `verdict` as an index into NAMES, the others as in the `keys` table."""
    nothing = np.full(geometry.verdict.shape, np.nan)
    return {
        "verdict": (geometry.verdict[..., None] == NAMES).argmax(-1).astype(np.int8),
        "margin_lower": geometry.margin_lower,
        "margin_upper": geometry.margin_upper,
        "attainable": nothing,
        "attainable_upper": nothing,
        "attainable_reachable": geometry.attainable,
        "pattern_max": nothing,
        "first_unselectable_at": nothing if (at := geometry.first_unselectable_at) is None else at,
        "judged_at": np.full(geometry.verdict.shape, last, np.int32),
    }


def _joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Of all sets of keys, key after key."""
    return parts[0] if len(parts) == 1 else {m: np.concatenate([p[m] for p in parts], axis=1) for m in parts[0]}


def _theorem(site: Site, space: str, variant: str) -> str:
    """Why keys of this kind can never be unselectable; empty if they can."""
    if space == NORMALIZED and site.scales and (variant == "intact" or no_op(site, variant)):
        return "normalized keys lie on a sphere" + ("" if site.eps == 0 else " (up to eps)")
    return ""


def _per_key(tokens: float) -> float:
    (short, low), (long, high) = sorted(_SECONDS_PER_KEY.items())
    power = math.log(high / low) / math.log(long / short)
    return float(low * (max(1.0, tokens) / short) ** power)


# --------------------------------------------------------------------------------------------------------- findings


def _margins(heads: pd.DataFrame) -> list[Finding]:
    """How far the strongest query can raise a key above the others."""
    one, two = medians(heads, "margin_median")
    if math.isnan(one):
        return []
    unbounded = set(of_variant(heads, "intact")["queries"]) == {"empirical"}
    who = "The best query of the set that occurs (nothing bounds what a head could make)" if unbounded else ""
    text = f"{who or 'The best query that its head can make'} {_raises(one)}"
    if not math.isnan(two):
        text += f"; with scaling replaced by a constant, it {_raises(two)}"
    low_one, low_two = medians(heads, "margin_p05")
    if not math.isnan(low_two) and max(low_one, low_two) > 0:
        text += f". For the hardest twentieth of keys: {number(low_one)} against {number(low_two)} nats"
    return [Finding(text + ".", "margins", DESCRIBED)]


def _raises(margin: float) -> str:
    """What a query does to a typical key; a margin below 0 is no lead."""
    if margin < 0:
        return f"leaves a typical key {number(-margin)} nats below another"
    return f"raises a typical key {number(margin)} nats above every other"


def _attainable(heads: pd.DataFrame, even: float) -> list[Finding]:
    """How much attention keys can get, how much less or more without scaling, and what an even share would be.

    Of queries at the last position: what keys really received is the largest weight over all queries that see them, and
    so is not set beside it.
    """
    one, two = medians(heads, "attainable_median")
    if math.isnan(one):
        return []
    low_one, low_two = medians(heads, "attainable_p05")
    share = "" if math.isnan(even) else f" (an even share of a prompt of average length: {percent(even)})"
    if math.isnan(two):
        text = (
            f"From queries of the size that occur, a typical key can get {percent(one)} of the attention of the last "
            f"position{share}, one of the hardest twentieth {percent(low_one)}."
        )
        return [Finding(text, "attainable", DESCRIBED)]
    text = (
        f"From queries of the size that occur, a typical key can get {percent(one)} of the attention of the last "
        f"position ({percent(two)} without scaling), one of the hardest twentieth {percent(low_one)} "
        f"({percent(low_two)}){share}"
    )
    size = abs(two - one)
    per_layer = {v: of_variant(heads, v).groupby("layer")["attainable_p05"].median() for v in ("intact", "no_scaling")}
    change = (per_layer["no_scaling"] - per_layer["intact"]).dropna()
    if len(change) > 1 and change.abs().max() >= NOTEWORTHY:
        layer = int(change.index[int(change.abs().to_numpy().argmax())])
        before, after = (float(per_layer[v][layer]) for v in ("intact", "no_scaling"))
        text += (
            f"; it matters most in layer {layer}, where without scaling its hardest keys can get {percent(after)} "
            f"instead of {percent(before)}"
        )
        size = max(size, abs(after - before))
    return [Finding(text + ".", "attainable", DESCRIBED, size=size)]


def _selectable(heads: pd.DataFrame, space: str, where: str, picture: str) -> list[Finding]:
    """Keys in the hull of the others, in one space."""
    if not len(heads) or heads["keys"].isna().all():
        return []
    parts, shares = [], []
    for variant, name in (("intact", "intact"), ("no_scaling", "without scaling"), ("neither", "without both")):
        rows = of_variant(heads, variant, space)
        rows = rows[rows["no_op"] == ""] if variant != "intact" else rows  # where there is something to take away
        if len(rows) and rows["keys"].sum():
            shares.append(float(rows["unselectable"].sum() / rows["keys"].sum()))
            parts.append(f"{100 * shares[-1]:.1f} % {name}")
    if not parts:
        return []
    rows = heads[heads["space"] == space]
    known = ""
    if (rows["by_theorem"] != "").all():
        known = f" All by theorem ({rows['by_theorem'].iloc[-1]}), not a finding."
    elif (rows[rows["variant"] == "intact"]["by_theorem"] != "").all():
        known = f" The intact figure is so by theorem ({rows.loc[rows['variant'] == 'intact', 'by_theorem'].iloc[0]})."
    size = abs(shares[1] - shares[0]) if len(shares) > 1 and not known else 0.0
    count = int(rows.groupby("variant")["keys"].sum().max())
    text = f"{where}, keys that no query at the last position can select: {', '.join(parts)} (of {count}).{known}"
    return [Finding(text, picture, NO_EFFECT if known.startswith(" All") else DESCRIBED, size=size)]
