"""The probe `selectability`: which keys of a prompt a query can select, by what margin and with how much attention.

Two spaces. `normalized`: the norm's output before gain and bias (the paper's claim is about it; one row per layer,
head = -1). `head`: keys as attention sees them, after gain, bias, W_K, b_K, any QK-norm and rotary positions. Verdicts
there are those of `key_geometry` on the same keys: some query of any length, in any direction that W_Q does not remove.
Margins and attention are over the queries that the head can make: behind a norm that does not scale, or none, nothing
bounds them, and there are none. The queries of all variants are the intact model's. Margins and attention are measured
in head space, intact and with scaling frozen, which is what findings and pictures compare (`every=True`: everywhere).

Keys are judged among those that one query sees: all of them, or those of its window (`AttentionLayer.key_sets`).
Attainable attention is the largest weight at the last position that sees them all.

Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the convex hull of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from ln_probe.analyses.constants import QUERY_RADIUS_QUANTILE
from ln_probe.analyses.geometry.decide import RELATIVE_GAP, Request, Solved, solve_sets
from ln_probe.analyses.geometry.key_geometry import reachable
from ln_probe.analyses.geometry.keys import SPAN_TOLERANCE, QuerySet
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import (
    DESCRIBED,
    NO_EFFECT,
    NOTEWORTHY,
    Finding,
    Needs,
    Observer,
    Probe,
    ProbeResults,
    Run,
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
    KeyObserver,
    Measures,
    concatenated,
    head_rows,
    key_rows,
    sphere_theorem,
)
from ln_probe.analyses.probes.uniformity import spread
from ln_probe.analyses.text import number, percent
from ln_probe.hooks.norm import BOTH_REMOVED, INTACT, SCALING_FROZEN


class Selectability(Probe):
    """Which keys of a prompt a query can select.

    Args:
        every_key: whether the table `keys` has a row for every key; otherwise the hardest keys of each head and a
            seeded sample.
        every: whether margins and attention are measured under every variant, and margins in normalized space;
            otherwise in head space, intact and with scaling frozen.
    """

    def __init__(self, every_key: bool = False, every: bool = False) -> None:
        self.every_key, self.every = every_key, every

    name = "selectability"
    summary = "which keys a query can select, by what margin"
    tables = (HEADS, KEYS)
    needs = Needs(attention=True)
    prompts = GEOMETRY_PROMPTS
    interleaved = True
    thresholds = {  # noqa: RUF012 - a constant of the class
        "query_radius_quantile": QUERY_RADIUS_QUANTILE,
        "query_span_tolerance": SPAN_TOLERANCE,
        "keys_hardest_per_variant": HARDEST_PER_VARIANT,
        "keys_sampled": SAMPLED,
    }

    def start(self, run: Run) -> Observer:
        return _Watching(run, self)

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        heads = tables[HEADS.name]
        return [
            *_attainable(heads, even_share(heads)),
            *_selectable(heads, HEAD, "table-keys"),
            *_margins(heads),
            *_selectable(heads, NORMALIZED, "norms"),
        ]


class _Watching(KeyObserver):
    def __init__(self, run: Run, probe: Selectability) -> None:
        super().__init__()
        self.run, self.every_key, self.every = run, probe.every_key, probe.every

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        self.add(attended, NORMALIZED, partial(_at_the_norm, attended, self.every))
        if attended.heads is not None:
            self.add(attended, HEAD, partial(_in_heads, attended, self.every))

    def finish(self) -> ProbeResults:
        heads: list[dict[str, object]] = []
        keys: list[dict[str, np.ndarray]] = []
        marks = []
        for block in self.blocks():
            for rows in block.values():
                heads += head_rows(rows)
                if rows.space == HEAD:
                    marks.append(rows.marks())
            keys += key_rows(block, self.run.strings, self.run.seed, every_key=self.every_key)
        tables = {HEADS.name: pd.DataFrame(heads)} if heads else {}
        if keys:
            table = pd.DataFrame({name: np.concatenate([some[name] for some in keys]) for name in KEYS.names})
            known = table["reachable"].to_numpy()
            tables[KEYS.name] = table.assign(reachable=pd.arrays.BooleanArray(known == 1, known < 0))
        return ProbeResults(tables, self.run.notes_on_projection if heads else (), marks)


# --------------------------------------------------------------------------------------------------------- measures


# Variants whose margins and attention findings and pictures compare.
_COMPARED = (INTACT.name, SCALING_FROZEN.name)


def _at_the_norm(attended: AttentionLayer, every: bool, variant: str) -> Measures:
    """Measure keys at the norm's output: no set of queries, so relative margins and no attention.

    Outputs of a norm that scales lie on a sphere, where every key is selected by the query along it.
    """
    keys = attended.outputs[variant].cpu().numpy()
    request = Request(gap=RELATIVE_GAP if every else None, own_queries=bool(sphere_theorem(attended.site, variant)))
    sets = [_measures(solve_sets(keys[None, seen], request=request, threads=1)[0], seen) for seen in attended.key_sets]
    return {name: values[None] for name, values in concatenated(sets).items()}


def _in_heads(attended: AttentionLayer, every: bool, variant: str) -> Measures:
    """Measure keys as attention sees them, of the chosen heads."""
    keys = np.ascontiguousarray(attended.keys(variant).permute(1, 0, 2)[attended.chosen].cpu().numpy())
    _, most = spread(attended, variant)
    biases = attended.key_bias
    asked = every or variant in _COMPARED
    sets = [
        _of_all_heads(attended, keys[:, seen], None if biases is None else biases[:, seen], seen, asked)
        for seen in attended.key_sets
    ]
    measures = [concatenated([of_heads[row] for of_heads in sets]) for row in range(len(keys))]
    return {name: np.stack([of_head[name] for of_head in measures]) for name in measures[0]} | {
        "pattern_max": np.stack([most[head] for head in attended.chosen])
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
    last = seen.stop - 1
    ellipsoids = attended.reachable(last)
    bounds = bounds and ellipsoids is not None
    queries = attended.once("query sets", last, lambda: _query_sets(ellipsoids or attended.directions(last)))
    inner = None
    if bounds and attended.radii is not None:
        inner = np.array([attended.radii[head] for head in attended.chosen])
    request = Request(gap=RELATIVE_GAP if bounds else None, attention=bounds)
    return [_measures(solved, seen) for solved in solve_sets(keys, bias, queries, inner, request)]


def _query_sets(ellipsoids: tuple[np.ndarray, np.ndarray]) -> list[QuerySet]:
    """Return the sets of queries of all chosen heads, from centers and axes."""
    return [
        QuerySet(np.ascontiguousarray(center), np.ascontiguousarray(axes)).compact()
        for center, axes in zip(*ellipsoids, strict=True)
    ]


def _measures(solved: Solved, seen: slice) -> Measures:
    """Return the record of every key: `verdict` as an index into NAMES, the others as in the `keys` table."""
    answers, count = solved.answers, len(solved.answers.verdicts.code)
    known = solved.seen is not None and not np.isnan(answers.margins.lower).all()
    nothing = np.full(count, np.nan)
    return {
        "verdict": answers.verdicts.code.astype(np.int8),
        "margin_lower": answers.margins.lower,
        "margin_upper": answers.margins.upper,
        # -1 where there is no set of queries, or margins were not measured
        "reachable": reachable(solved).astype(np.int8) if known else np.full(count, -1, np.int8),
        "attainable": answers.inner.lower,
        "attainable_upper": answers.inner.upper,
        "attainable_reachable": answers.attention.lower,
        "pattern_max": nothing,
        "judged_at": np.full(count, seen.stop - 1, np.int32),
    }


# --------------------------------------------------------------------------------------------------------- findings

# What a finding calls the variants that it compares with the intact model.
_VARIANTS = {v.name: f"with {v.label}" for v in (SCALING_FROZEN, BOTH_REMOVED)}


def _margins(heads: pd.DataFrame) -> list[Finding]:
    """By how much the best query scores a key above all others."""
    one, two = medians(heads, "margin_median")
    if math.isnan(one):
        return []
    text = f"For the median key, the best query the head can produce scores it {_lead(one)}"
    if not math.isnan(two):
        text += f"; with scaling frozen, {_lead(two)}"
    low_one, low_two = medians(heads, "margin_p05")
    if not math.isnan(low_two) and max(low_one, low_two) > 0:
        text += f". For the 5th-percentile key: {number(low_one)} nats ({number(low_two)} with scaling frozen)"
    return [Finding(text + ".", "margins", DESCRIBED)]


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
            text += " Fewer than 0.05 % of the keys are selectable, but not by a query the head can produce."
        else:
            text += f" {_compared(reach, '', 'cannot be selected by any query the head can produce')}."
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
