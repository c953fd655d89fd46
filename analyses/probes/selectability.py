"""The probe `selectability`: which keys of a prompt a query can select, by what margin and with how much attention.

Two spaces. `normalized`: the norm's output before gain and bias (the paper's claim is about it; one row per layer,
head = -1). `head`: keys as attention sees them, after gain, bias, W_K, b_K, any QK-norm and rotary positions.

Verdicts in head space are those of `key_geometry` on the same keys: some query of any length, in any direction that W_Q
does not remove. What the head's own queries can do is measured over the reachable set: margins, gaps in nats that are
the same for every equivalent model, and `reachable`. Behind a norm that does not scale, or none, queries are unbounded,
and margins and attention are those of the empirical set. The queries of all variants are the intact model's.

Keys are judged among those that one query sees: all of them, or those of its window (`AttentionLayer.key_sets`).
Attainable attention is the largest weight at any position that sees a key (`geometry/positions.py`), and at the last
position.

Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the convex hull of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from ln_probe.analyses.constants import QUERY_RADIUS_QUANTILE, SAMPLE_ABOVE
from ln_probe.analyses.geometry.api import set_attention, set_geometry
from ln_probe.analyses.geometry.compiled import in_threads
from ln_probe.analyses.geometry.inputs import SPAN_TOLERANCE, GivenSet, QuerySet
from ln_probe.analyses.geometry.positions import attainable_anywhere
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
    key_tables,
)
from ln_probe.analyses.probes.uniformity import spread
from ln_probe.analyses.schema import Part
from ln_probe.analyses.text import number, percent
from ln_probe.hooks.norm import Site
from ln_probe.hooks.variants import BOTH_REMOVED, INTACT, SCALING_FROZEN, VARIANTS, no_op

_UNIFORMITY = ("entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor")  # filled by that probe

# Seconds of one core per key (token, layer, head and variant): 2.2e-4 on lm-layernorm (128 tokens, d_head 8), 2.0e-4 on
# GPT-2 small's shape (128 tokens, d_head 64), 3.1e-4 on Pythia-160m's (64 tokens); beyond 128 tokens of d_head 64 they
# grow with powers of both (bench/scale.py).
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
        heads, keys = key_tables(
            pieces, context.calibration, context.token, every=context.keys == "all", seed=context.seed
        )
        frames = {HEADS.name: pd.DataFrame(heads, columns=list(self.tables[0].columns)), KEYS.name: keys}
        return ProbeResults(frames, (LONGER_OUTPUT,) * (bool(heads) and context.calibration.projection_matters))

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


class _Watching(Observer):
    def __init__(self) -> None:
        self.collected = Collected()

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        self.collected.add(
            prompt, attended, NORMALIZED, partial(_at_the_norm, attended, prompt), partial(_theorem, attended.site)
        )
        if attended.heads is not None:
            self.collected.add(prompt, attended, HEAD, partial(_in_heads, attended, prompt))

    def piece(self) -> Piece:
        return self.collected.piece()


# ---------------------------------------------------------------------------------------- all keys, or a sample of them

Drawn = Int64[np.ndarray, " drawn"] | None  # the keys that are measured; None: all


def _at_the_norm(attended: AttentionLayer, prompt: int, variant: str) -> Measures:
    """Keys at the norm's output: no set of queries, so relative margins and no attention."""
    rows, drawn = attended.outputs[variant].cpu().numpy(), attended.drawn(prompt, -1)

    def measured(keys: np.ndarray, _start: int, only: Drawn, last: int) -> Measures:
        return _measures(set_geometry(keys, causal=attended.grows, threads=None, only=only), only, last)

    return _stacked([_over_sets(attended, rows, drawn, measured)])


def _in_heads(attended: AttentionLayer, prompt: int, variant: str) -> Measures:
    """Keys as attention sees them, of the chosen heads."""
    every = np.ascontiguousarray(attended.keys(variant).permute(1, 0, 2)[attended.chosen].cpu().numpy())
    _, most = spread(attended, variant)
    bias = attended.key_bias  # made on the model's device, and once: not by the threads

    def one(place: int) -> Measures:
        head, keys = attended.chosen[place], every[place]
        drawn = attended.drawn(prompt, head)

        def measured(keys: np.ndarray, start: int, only: Drawn, last: int) -> Measures:
            lift = None if bias is None else bias[place, start : start + len(keys)]
            return _in_head(attended, place, keys, lift, only, last)

        found = _over_sets(attended, keys, drawn, measured)
        only = np.arange(attended.length) if drawn is None else drawn
        received = most[head, only]
        least = np.fmax(received, found["attainable_last"])
        weight, upper = at_any_position(attended, place, keys, least, only)
        return found | {"pattern_max": received, "attainable": weight, "attainable_upper": upper}

    return _stacked(in_threads(one, range(len(every))))


def _over_sets(
    attended: AttentionLayer,
    keys: Float64[np.ndarray, "key d"],
    drawn: Drawn,
    measured: Callable[[np.ndarray, int, Drawn, int], Measures],
) -> Measures:
    """Measure every set of keys that one query sees, with its first key, the keys asked for in it and the position of
    its query; key after key."""
    parts = []
    for seen in attended.key_sets:
        here = np.ascontiguousarray(keys[seen])
        if drawn is None:
            parts.append(measured(here, seen.start, None, seen.stop - 1))
        elif len(only := drawn[(drawn >= seen.start) & (drawn < seen.stop)] - seen.start):
            position = {"position": (only + seen.start).astype(np.int32)}
            parts.append(measured(here, seen.start, only, seen.stop - 1) | position)
    return {m: np.concatenate([p[m] for p in parts]) for m in parts[0]}


def _in_head(
    attended: AttentionLayer,
    place: int,
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    only: Drawn,
    last: int,
) -> Measures:
    """Keys of one head over the queries that it can make at position `last`, and over the observed ones there."""
    reachable = attended.reachable(last)
    if reachable is None:
        return _over_any(attended, place, keys, bias, only, last)
    queries = _query_set(reachable, place, in_order=only is None)
    geometry = set_geometry(keys, bias, queries, attended.grows, only=only)
    measures, radii = _measures(geometry, only, last), attended.calibration.radii
    if attended.layer not in radii or geometry.attainable is None:
        return measures
    rho = float(radii[attended.layer][attended.chosen[place]])
    shrunk = _query_set((reachable[0], reachable[1] * rho), place, in_order=only is None)
    found = set_attention(keys, bias, shrunk, only, geometry.attainable.point)
    # The observed set lies in the reachable one: a weight found there counts here too.
    most = np.fmax(geometry.attainable.weight, found.weight)
    return measures | {
        "attainable_last": found.weight,
        "attainable_last_upper": found.upper,
        "attainable_reachable": most,
    }


def _query_set(queries: tuple[np.ndarray, np.ndarray], place: int, *, in_order: bool) -> QuerySet:
    """The queries of one of the chosen heads, from centers and axes of all; with `in_order`, axes row by row in memory
    (their order there decides how sums round)."""
    center, axes = queries[0][place], queries[1][place]
    return QuerySet(center, np.ascontiguousarray(axes) if in_order else axes).compact()


def _over_any(
    attended: AttentionLayer, place: int, keys: np.ndarray, bias: np.ndarray | None, only: Drawn, last: int
) -> Measures:
    """Keys of one head whose queries have no bound: verdicts over every direction that the head has, the rest over the
    queries that occurred (NaN if calibration saw none)."""
    own = GivenSet(keys, bias, _query_set(attended.directions(last), place, in_order=False)).own
    found = _measures(set_geometry(own.points, own.lift, None, attended.grows, None, only=only), only, last)
    occurred = attended.empirical(last)
    if occurred is None:
        return found
    geometry = set_geometry(keys, bias, _query_set(occurred, place, in_order=True), only=only)
    assert geometry.attainable is not None
    measures = _measures(geometry, only, last)
    return found | {
        **{name: measures[name] for name in ("margin_lower", "margin_upper", "reachable")},
        "attainable_last": geometry.attainable.weight,
        "attainable_last_upper": geometry.attainable.upper,
    }


def at_any_position(
    attended: AttentionLayer,
    row: int,
    keys: Float64[np.ndarray, "key d"],
    least: Float64[np.ndarray, " some"],
    only: Int64[np.ndarray, " some"],
) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
    """Bounds of the largest weight that keys of a head can receive at any position that sees them and another key.

    From queries of the observed set, and from those that occurred: one in twenty lies outside of it.

    Args:
        row: place of the head among the chosen ones.
        keys: all keys of the prompt.
        least: weights that each of the keys asked for really received, or that a query of the set is known to give.
        only: which keys are asked for.
    """
    queries = attended.observed(row)
    if queries is None:
        nothing = np.full(len(only), np.nan)
        return nothing, nothing
    assert attended.heads is not None
    bias = attended.key_bias
    weight, upper = attainable_anywhere(
        keys,
        None if bias is None else bias[row],
        queries,
        rotary=attended.heads.rotary is not None,
        causal=attended.heads.causal,
        window=attended.heads.window,
        only=only,
    )
    return np.fmax(weight, least), np.fmax(upper, least)


def _measures(geometry: SetGeometry, only: Drawn, last: int) -> Measures:
    """The record of every key: `verdict` as an index into NAMES, the others as in the `keys` table."""
    some = np.arange(len(geometry.representative)) if only is None else only
    nothing = np.full(len(some), np.nan)
    lower, upper = (nothing, nothing) if geometry.margins is None else geometry.bounds
    reachable = geometry.reachable  # -1 where there is no set of queries
    return {
        "verdict": geometry.proved.verdicts.code[some],
        "margin_lower": lower,
        "margin_upper": upper,
        "reachable": np.full(len(some), -1, np.int8) if reachable is None else reachable.astype(np.int8),
        "attainable": nothing,
        "attainable_upper": nothing,
        "attainable_last": nothing,
        "attainable_last_upper": nothing,
        "attainable_reachable": nothing if geometry.attainable is None else geometry.attainable.weight,
        "pattern_max": nothing,
        "first_unselectable_at": nothing if geometry.first is None else geometry.first.at[some],
        "judged_at": np.full(len(some), last, np.int32),
    }


def _stacked(heads: Sequence[Measures]) -> Measures:
    """Of all heads, a row each."""
    return {m: np.stack([h[m] for h in heads]) for m in heads[0]}


def _theorem(site: Site, variant: str) -> str:
    """Why keys at a norm's output can never be unselectable; empty if they can."""
    if site.scales and (variant == "intact" or no_op(site, variant)):
        return "normalized keys lie on a sphere" + ("" if site.eps == 0 else " (up to eps)")
    return ""


def _per_key(tokens: float, d_head: float = math.nan) -> float:
    if not math.isnan(d_head):
        return _SECONDS_PER_KEY * max(1.0, float((tokens / 128) ** _OF_TOKENS * (d_head / 64) ** _OF_D_HEAD))
    (short, low), (long, high) = sorted(_OF_ANY_HEAD.items())
    power = math.log(high / low) / math.log(long / short)
    return float(low * (max(1.0, tokens) / short) ** power)


# --------------------------------------------------------------------------------------------------------- findings

# What a finding calls the variants that it compares with the intact model.
_VARIANTS = {v.name: f"with {v.state}" for v in (SCALING_FROZEN, BOTH_REMOVED)}
_COMPARED = (INTACT.name, SCALING_FROZEN.name)


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
    one, two = medians(heads, "attainable_last_median")
    if math.isnan(one):
        return []
    low_one, low_two = medians(heads, "attainable_last_p05")
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
    size, column = abs(two - one), "attainable_last_p05"
    per_layer = {v: of_variant(heads, v).groupby("layer")[column].median() for v in _COMPARED}
    change = (per_layer[SCALING_FROZEN.name] - per_layer["intact"]).dropna()
    if len(change) > 1 and change.abs().max() >= NOTEWORTHY:
        layer = int(change.index[int(change.abs().to_numpy().argmax())])
        before, after = (float(per_layer[v][layer]) for v in _COMPARED)
        text += (
            f" The change is largest in layer {layer}: {percent(before)} for its 5th-percentile key, {percent(after)} "
            "with scaling frozen."
        )
        size = max(size, abs(after - before))
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
