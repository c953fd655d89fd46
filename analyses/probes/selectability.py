"""The probe `selectability`: which keys of a prompt a query can select, by what margin and with how much attention.

Two spaces. `normalized`: the norm's output before gain and bias (the paper's claim is about it; one row per layer,
head = -1). `head`: keys as attention sees them, after gain, bias, W_K, b_K, any QK-norm and rotary positions. Verdicts
there are those of `key_geometry` on the same keys: some query of any length, in any direction that W_Q does not remove.
What the head's own queries can do is measured over the reachable set; behind a norm that does not scale, or none, where
queries are unbounded, over the empirical set. The queries of all variants are the intact model's.

Keys are judged among those that one query sees: all of them, or those of its window (`AttentionLayer.key_sets`).
Attainable attention is the largest weight at the last position that sees them all.

Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the convex hull of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from ln_probe.analyses.constants import QUERY_RADIUS_QUANTILE, SAMPLE_ABOVE
from ln_probe.analyses.geometry.api import set_attention, set_geometry
from ln_probe.analyses.geometry.compiled import in_threads
from ln_probe.analyses.geometry.inputs import SPAN_TOLERANCE, GivenSet, QuerySet
from ln_probe.analyses.geometry.witnesses import SetGeometry
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import (
    DESCRIBED,
    LONGER_OUTPUT,
    NO_EFFECT,
    NOTEWORTHY,
    Context,
    Cost,
    Finding,
    Marks,
    Needs,
    Observer,
    Piece,
    Probe,
    ProbeResults,
    Shape,
    View,
    by_layer,
    even_share,
    medians,
    of_variant,
)
from ln_probe.analyses.probes.columns import HEADS, KEYS
from ln_probe.analyses.probes.keys import (
    GEOMETRY_PROMPTS,
    HARDEST_PER_VARIANT,
    HEAD,
    NORMALIZED,
    SAMPLED,
    Collected,
    Measures,
    blocks,
    head_row,
    joined,
    key_rows,
)
from ln_probe.analyses.probes.uniformity import spread
from ln_probe.analyses.schema import Part
from ln_probe.analyses.text import number, percent
from ln_probe.hooks.variants import BOTH_REMOVED, SCALING_FROZEN, VARIANTS

_UNIFORMITY = ("entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor")  # filled by that probe

# Seconds of one core per key (token, layer, head and variant): 2.2e-4 on lm-layernorm (128 tokens, d_head 8), 2.0e-4 on
# GPT-2 small's shape (128 tokens, d_head 64), 3.1e-4 on Pythia-160m's (64 tokens); beyond 128 tokens of d_head 64 they
# grow with powers of both.
_SECONDS_PER_KEY, _OF_TOKENS, _OF_D_HEAD = 2.2e-4, 0.8, 0.75
# The same where d_head is not known, at 128 tokens (d_head 8) and 512 (d_head 64). It decides which keys are measured
# (`SAMPLE_ABOVE`), so it stays as it is.
_OF_ANY_HEAD = {128: 6e-5, 512: 5e-4}
_BYTES_PER_KEY = 78  # of a piece: eight numbers, two positions and two codes


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
        "query_span_tolerance": SPAN_TOLERANCE,
        "keys_hardest_per_variant": HARDEST_PER_VARIANT,
        "keys_sampled": SAMPLED,
        "keys_sampled_above_seconds": SAMPLE_ABOVE,
    }

    def start(self, view: View) -> Observer:
        return _Watching()

    def finish(self, pieces: Sequence[Piece], context: Context) -> ProbeResults:
        calibration, every = context.calibration, context.keys == "all"
        heads: list[dict[str, object]] = []
        keys: list[dict[str, np.ndarray]] = []
        for block in blocks(pieces):
            heads += [head_row(rows, row, calibration) for rows in block.values() for row in range(len(rows.heads))]
            keys += key_rows(block, context.token, every=every, seed=context.seed)
        table = KEYS.empty()
        if keys:
            table = pd.DataFrame({name: np.concatenate([some[name] for some in keys]) for name in KEYS.names})
            known = table["reachable"].to_numpy()
            table = table.assign(reachable=pd.arrays.BooleanArray(known == 1, known < 0))
        frames = {HEADS.name: pd.DataFrame(heads, columns=list(self.tables[0].columns)), KEYS.name: table}
        return ProbeResults(frames, (LONGER_OUTPUT,) * (bool(heads) and calibration.projection_matters))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        heads = tables[HEADS.name]
        return [
            *_attainable(heads, even_share(heads)),
            *_selectable(heads, HEAD, "unselectable"),
            *_margins(heads),
            *_selectable(heads, NORMALIZED, "geometry"),
        ]

    def marks(self, pieces: Sequence[Piece]) -> Iterator[Marks]:
        for block in blocks(pieces):
            for rows in block.values():
                if rows.space == HEAD and not rows.sampled:  # a mark is of every key
                    yield Marks(rows.layer, rows.variant, rows.prompts, rows.lengths, rows.measures)

    def cost(self, shape: Shape) -> Cost:
        per_token = shape.layers * (shape.heads + 1) * len(VARIANTS)
        d_head = shape.width / shape.heads if shape.heads else math.nan
        seconds = sum(n * per_token * _per_key(n, d_head) for n in shape.lengths)
        return Cost(seconds, disk_bytes=sum(shape.lengths) * per_token * _BYTES_PER_KEY)


class _Watching(Collected):
    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        self.add(attended, NORMALIZED, partial(_at_the_norm, attended))
        if attended.heads is not None:
            self.add(attended, HEAD, partial(_in_heads, attended))


# ---------------------------------------------------------------------------------------- all keys, or a sample of them

Drawn = Int64[np.ndarray, " drawn"] | None  # the keys that are measured; None: all


def _at_the_norm(attended: AttentionLayer, variant: str) -> Measures:
    """Keys at the norm's output: no set of queries, so relative margins and no attention."""
    sets = _sets(attended, attended.outputs[variant].cpu().numpy(), attended.drawn(-1))
    found = [_measures(set_geometry(keys, threads=None, only=only), only, seen) for seen, keys, only in sets]
    return _stacked([joined(found)])


def _in_heads(attended: AttentionLayer, variant: str) -> Measures:
    """Keys as attention sees them, of the chosen heads."""
    every = np.ascontiguousarray(attended.keys(variant).permute(1, 0, 2)[attended.chosen].cpu().numpy())
    _, most = spread(attended, variant)
    biases = attended.key_bias  # made on the model's device, and once: not by the threads

    def one(place: int) -> Measures:
        head, keys = attended.chosen[place], every[place]
        bias, drawn = None if biases is None else biases[place], attended.drawn(head)
        found = joined(
            [
                _in_head(attended, place, here, None if bias is None else bias[seen], only, seen)
                for seen, here, only in _sets(attended, keys, drawn)
            ]
        )
        only = np.arange(attended.length) if drawn is None else drawn
        found["pattern_max"] = most[head, only]
        return found

    return _stacked(in_threads(one, range(len(every))))


def _sets(
    attended: AttentionLayer, keys: Float64[np.ndarray, "key d"], drawn: Drawn
) -> Iterator[tuple[slice, Float64[np.ndarray, "some d"], Drawn]]:
    """Every set of keys that one query sees, with those of them that are measured."""
    for seen in attended.key_sets:
        only = None if drawn is None else drawn[(drawn >= seen.start) & (drawn < seen.stop)] - seen.start
        if only is None or len(only):
            yield seen, np.ascontiguousarray(keys[seen]), only


def _in_head(
    attended: AttentionLayer,
    place: int,
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    only: Drawn,
    seen: slice,
) -> Measures:
    """Keys of one head over the queries that it can make at the last position, and over the observed ones there."""
    reachable = attended.reachable(seen.stop - 1)
    if reachable is None:
        return _over_any(attended, place, keys, bias, only, seen)
    queries = _query_set(reachable, place, in_order=only is None)
    geometry = set_geometry(keys, bias, queries, only=only)
    measures, radii = _measures(geometry, only, seen), attended.calibration.radii
    if attended.layer not in radii or geometry.attainable is None:
        return measures
    rho = float(radii[attended.layer][attended.chosen[place]])
    shrunk = _query_set((reachable[0], reachable[1] * rho), place, in_order=only is None)
    found = set_attention(keys, bias, shrunk, only, geometry.attainable.point)
    # The observed set lies in the reachable one: a weight found there counts here too.
    most = np.fmax(geometry.attainable.weight, found.weight)
    return measures | {
        "attainable": found.weight,
        "attainable_upper": found.upper,
        "attainable_reachable": most,
    }


def _query_set(queries: tuple[np.ndarray, np.ndarray], place: int, *, in_order: bool) -> QuerySet:
    """The queries of one of the chosen heads, from centers and axes of all; with `in_order`, axes row by row in memory
    (their order there decides how sums round)."""
    center, axes = queries[0][place], queries[1][place]
    return QuerySet(center, np.ascontiguousarray(axes) if in_order else axes).compact()


def _over_any(
    attended: AttentionLayer, place: int, keys: np.ndarray, bias: np.ndarray | None, only: Drawn, seen: slice
) -> Measures:
    """Keys of one head whose queries have no bound: verdicts over every direction that the head has, the rest over the
    queries that occurred (NaN if calibration saw none)."""
    own = GivenSet(keys, bias, _query_set(attended.directions(seen.stop - 1), place, in_order=False)).own
    found = _measures(set_geometry(own.points, own.lift, None, threads=None, only=only), only, seen)
    occurred = attended.empirical(seen.stop - 1)
    if occurred is None:
        return found
    geometry = set_geometry(keys, bias, _query_set(occurred, place, in_order=True), only=only)
    assert geometry.attainable is not None
    measures = _measures(geometry, only, seen)
    return found | {
        **{name: measures[name] for name in ("margin_lower", "margin_upper", "reachable")},
        "attainable": geometry.attainable.weight,
        "attainable_upper": geometry.attainable.upper,
    }


def _measures(geometry: SetGeometry, only: Drawn, seen: slice) -> Measures:
    """The record of every key: `verdict` as an index into NAMES, the others as in the `keys` table; and `position`,
    where only some were measured."""
    some = np.arange(len(geometry.representative)) if only is None else only
    nothing = np.full(len(some), np.nan)
    lower, upper = (nothing, nothing) if geometry.margins is None else geometry.bounds
    reachable = geometry.reachable  # -1 where there is no set of queries
    found = {
        "verdict": geometry.proved.verdicts.code[some],
        "margin_lower": lower,
        "margin_upper": upper,
        "reachable": np.full(len(some), -1, np.int8) if reachable is None else reachable.astype(np.int8),
        "attainable": nothing,
        "attainable_upper": nothing,
        "attainable_reachable": nothing if geometry.attainable is None else geometry.attainable.weight,
        "pattern_max": nothing,
        "judged_at": np.full(len(some), seen.stop - 1, np.int32),
    }
    return found if only is None else found | {"position": (only + seen.start).astype(np.int32)}


def _stacked(heads: Sequence[Measures]) -> Measures:
    """Of all heads, a row each."""
    return {m: np.stack([h[m] for h in heads]) for m in heads[0]}


def _per_key(tokens: float, d_head: float = math.nan) -> float:
    if not math.isnan(d_head):
        return _SECONDS_PER_KEY * max(1.0, float((tokens / 128) ** _OF_TOKENS * (d_head / 64) ** _OF_D_HEAD))
    (short, low), (long, high) = sorted(_OF_ANY_HEAD.items())
    power = math.log(high / low) / math.log(long / short)
    return float(low * (max(1.0, tokens) / short) ** power)


# --------------------------------------------------------------------------------------------------------- findings

# What a finding calls the variants that it compares with the intact model.
_VARIANTS = {v.name: f"with {v.label}" for v in (SCALING_FROZEN, BOTH_REMOVED)}


def _margins(heads: pd.DataFrame) -> list[Finding]:
    """By how much the best query scores a key above all others."""
    one, two = medians(heads, "margin_median")
    if math.isnan(one):
        return []
    text = f"For the median key, the best query {_produced(heads)} scores it {_lead(one)}"
    if not math.isnan(two):
        text += f"; with scaling frozen, {_lead(two)}"
    low_one, low_two = medians(heads, "margin_p05")
    if not math.isnan(low_two) and max(low_one, low_two) > 0:
        text += f". For the 5th-percentile key: {number(low_one)} nats ({number(low_two)} with scaling frozen)"
    return [Finding(text + ".", "margins", DESCRIBED)]


def _produced(heads: pd.DataFrame) -> str:
    """Which queries margins are about."""
    unbounded = set(of_variant(heads, "intact")["queries"]) == {"empirical"}
    return "of the size that occurs (nothing bounds this head's queries)" if unbounded else "the head can produce"


def _lead(margin: float) -> str:
    """A score gap as text; a margin below 0 is no lead."""
    return f"{number(abs(margin))} nats {'below the best other key' if margin < 0 else 'above all others'}"


def _attainable(heads: pd.DataFrame, even: float) -> list[Finding]:
    """How much of the last position's attention keys can receive, intact and with scaling frozen.

    All keys compete there, so uniform attention is a measure for it.
    """
    one, two = medians(heads, "attainable_median")
    if math.isnan(one):
        return []
    low_one, low_two = medians(heads, "attainable_p05")
    uniform = "" if math.isnan(even) else f" Uniform attention would give {percent(even)}."
    frozen, low_frozen = "", ""
    if not math.isnan(two):
        frozen, low_frozen = f" ({percent(two)} with scaling frozen)", f" ({percent(low_two)})"
    text = (
        f"With queries as large as those observed, the median key can receive up to {percent(one)} of the last "
        f"position's attention{frozen}, the 5th-percentile key {percent(low_one)}{low_frozen}.{uniform}"
    )
    if math.isnan(two):
        return [Finding(text, "attainable", DESCRIBED)]
    size, (intact, without) = abs(two - one), by_layer(heads, "attainable_p05")
    change = (without - intact).abs()
    if len(change) > 1 and change.max() >= NOTEWORTHY:
        layer = int(change.index[int(change.to_numpy().argmax())])
        text += (
            f" The change is largest in layer {layer}: {percent(float(intact[layer]))} for its 5th-percentile key, "
            f"{percent(float(without[layer]))} with scaling frozen."
        )
        size = max(size, float(change.max()))
    return [Finding(text, "attainable", DESCRIBED, size=size)]


def _selectable(heads: pd.DataFrame, space: str, picture: str) -> list[Finding]:
    """How many keys no query selects, and in head space how many no query of the head selects."""
    if not len(heads) or heads["keys"].isna().all():
        return []
    shares = _shares(heads, space, "unselectable_fraction")
    if not shares:
        return []
    rows = heads[heads["space"] == space]
    known = ""
    if (rows["by_theorem"] != "").all():
        known = f" This follows from theory ({rows['by_theorem'].iloc[-1]}), so it is not a finding."
    elif (rows[rows["variant"] == "intact"]["by_theorem"] != "").all():
        why = rows.loc[rows["variant"] == "intact", "by_theorem"].iloc[0]
        known = f" The intact figure follows from theory ({why})."
    frozen = shares.get(SCALING_FROZEN.name)
    size = abs(frozen - shares["intact"]) if frozen is not None and "intact" in shares and not known else 0.0
    count = int(rows.groupby("variant")["keys"].sum().max())
    place = "of every head, as the last token of each prompt sees them" if space == HEAD else "at the norms' output"
    text = f"{_compared(shares, f'{count:,} keys {place}', 'cannot be selected by any query')}.{known}"
    reach = _shares(heads, space, "unreachable_fraction")
    if reach:
        if all(abs(reach[v] - shares.get(v, math.nan)) < 5e-4 for v in reach):
            text += f" Fewer than 0.05 % of the keys are selectable, but not by a query {_produced(heads)}."
        else:
            unable = f"cannot be selected by any query {_produced(heads)}"
            text += f" {_compared(reach, '', unable)}."
    return [Finding(text, picture, NO_EFFECT if "not a finding" in known else DESCRIBED, size=size)]


def _shares(heads: pd.DataFrame, space: str, column: str) -> dict[str, float]:
    """The share over all keys, by variant, where it is known and the variant changes something."""
    found = {}
    for variant in ("intact", *_VARIANTS):
        rows = of_variant(heads, variant, space)
        rows = rows[rows["no_op"] == ""] if variant != "intact" else rows
        rows = rows[rows[column].notna() & (rows["keys"] > 0)]
        if len(rows):
            found[variant] = float((rows[column] * rows["keys"]).sum() / rows["keys"].sum())
    return found


def _compared(shares: Mapping[str, float], more: str, what: str) -> str:
    """A share of the keys, with those of the other variants in brackets."""
    first = next(iter(shares))
    name = "" if first == "intact" else f" {_VARIANTS[first]}"
    rest = ", ".join(f"{100 * share:.1f} % {_VARIANTS[v]}" for v, share in shares.items() if v != first)
    brackets = "; ".join(part for part in (rest, more) if part)
    return f"{100 * shares[first]:.1f} % of keys{name} {what}" + (f" ({brackets})" if brackets else "")
