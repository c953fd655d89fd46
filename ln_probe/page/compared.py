"""Models compared head by head: maps of two and of their difference, one head's attention in both, training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import UInt8
from markupsafe import Markup, escape

from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE
from ln_probe.analyses.probes.columns import BY_HEAD
from ln_probe.analyses.probes.sinks import MUCH
from ln_probe.analyses.text import disarmed, percent, shortened, visible, with_interval
from ln_probe.comparison import joined
from ln_probe.exhibits import CELLS, PromptAttention
from ln_probe.hooks.variants import SCALING_FROZEN
from ln_probe.page import packed
from ln_probe.page.heads import MEASURES, HeadMap, address
from ln_probe.report import Report

MOST = 64  # models that can be chosen, in the order of the index
BUDGET = 2_500_000  # bytes of patterns before compression: a page of many models has coarser ones
COARSEST = 8  # rows and columns of a pattern; where more would be too much, no patterns are kept
SENTENCES = 8  # models compared with the first one in words


def compared(
    reports: Sequence[Report], names: Sequence[str], runs: Sequence[str], steps: Sequence[int | None]
) -> dict[str, Any] | None:
    """Return what the template `compared.html` shows: packed data of at most MOST models; None: nothing to compare.

    `runs` and `steps` are the model and training step of each; a run is what has several steps.
    """
    shown = list(reports)[:MOST]
    columns = [str(i) for i in range(len(shown))]  # names may occur twice
    wide = joined(BY_HEAD, columns, [r.by_head() for r in shown])
    if len(shown) < 2 or not len(wide):
        return None
    measures, maps = [], [HeadMap.of(r) for r in shown]
    layers = sorted({i for m in maps for i in m.layers})
    heads = sorted({i for m in maps for i in m.heads})
    grid = pd.MultiIndex.from_product([layers, heads], names=["layer", "head"])
    for name, about in MEASURES.items():
        values = pd.DataFrame(wide.reindex(grid)[name]).reindex(columns=columns).to_numpy(np.float32)
        if np.isfinite(values).any(axis=0).sum() > 1 and np.nanmax(np.abs(values)) > 0:
            least = LEAST_CHANGE if about.label == "nats per token" else 0.0
            told = _significant(maps, name, layers, heads)
            numbers = {"least": least, "values": values.T.ravel(), "significant": told}
            measures.append(about.plain | {"unit": about.label.replace(" per ", "/"), **numbers})
    if not measures:
        return None
    known = [run for run, step in zip(runs, steps, strict=True) if step is not None]
    models = [
        {"name": shortened(disarmed(name)), "run": run if known.count(run) > 1 else "", "step": step, **kept}
        for name, run, step, kept in zip(names, runs, steps, _patterns(shown), strict=False)
    ]
    data = {"models": models, "layers": layers, "heads": heads, "measures": measures}
    return {"data": packed(data), "count": len(shown), "total": len(reports)}


def _significant(
    maps: Sequence[HeadMap], measure: str, layers: Sequence[int], heads: Sequence[int]
) -> UInt8[np.ndarray, " cell"] | None:
    """Whether each head of each model is significant; None: the measure is not tested."""
    if not any(measure in m.significant for m in maps):
        return None
    found = np.zeros((len(maps), len(layers), len(heads)), np.uint8)
    for told, m in zip(found, maps, strict=True):
        if measure in m.significant:
            told[np.ix_(np.searchsorted(layers, m.layers), np.searchsorted(heads, m.heads))] = m.significant[measure]
    return found.ravel()


def _patterns(reports: Sequence[Report]) -> Iterator[dict[str, Any]]:
    """Yield the attention of each report's first kept prompt, as coarse as all of them need to fit into BUDGET."""
    first = [r.exhibits.attention[0] if r.exhibits.attention else None for r in reports]
    cells = CELLS
    while cells >= COARSEST and sum(_size(f, cells) for f in first) > BUDGET:
        cells //= 2
    for found in first:
        yield {} if found is None or cells < COARSEST else {"attention": _plain(found.coarser(cells))}


def _size(found: PromptAttention | None, cells: int) -> int:
    return 0 if found is None else len(found.layers) * len(found.heads) * min(cells, len(found.tokens)) ** 2


def _plain(found: PromptAttention) -> dict[str, Any]:
    same = {name: getattr(found, name) for name in ("layers", "heads", "edges", "causal", "cells")}
    return {"tokens": [shortened(visible(t), 20) for t in found.tokens], **same}


def answers(
    names: Sequence[str], summary: pd.DataFrame, paired: pd.DataFrame, reports: Sequence[Report]
) -> list[tuple[str, Markup]]:
    """Compare each model with the first in words: loss, need for scaling, sinks, the head that differs most.

    `summary` and `paired` are the tables `SUMMARY` and, against the first, `PAIRED`.
    """
    rows, found = summary.to_dict("records"), []
    for number, row in list(enumerate(rows))[1 : SENTENCES + 1]:
        mine = paired[(paired["model"] == names[number]) & (paired["variant"] == SCALING_FROZEN.name)]
        sentences = _sentences(rows[0], row, mine[mine["sites"] == "all"].to_dict("records"))
        if said := escape(" ".join(sentences)) + _head(reports[0], reports[number], number):
            found.append((shortened(disarmed(names[number]), 60), said))
    return found


def _interval(value: float, low: float, high: float) -> str:
    size, ends = with_interval(value, low, high)
    return f"{size} nats/token" + (
        f" (95 % CI {ends}{', which includes 0' if low <= 0 <= high else ''})" if ends else ""
    )


def _sentences(first: Mapping[Any, Any], row: Mapping[Any, Any], paired: Sequence[Mapping[Any, Any]]) -> Iterator[str]:
    """Compare rows of the summary; `paired` has the difference in what freezing scaling at every norm changes."""
    if np.isfinite(row["loss_difference"]):
        ends = (row[f"loss_difference{end}"] for end in ("", "_low", "_high"))
        yield f"Its loss, {row['loss']:#.3g}, differs by {_interval(*ends)} on the same prompts."
    for pair in paired[:1]:
        change = _interval(pair["difference"], pair["low"], pair["high"])
        yield f"The loss increase with scaling frozen at every norm differs by {change}."
    if np.isfinite([first["sink_heads"], row["sink_heads"]]).all():
        heads, before, mean, earlier = (percent(r[c]) for c in ("sink_heads", "first_attention") for r in (row, first))
        yield (
            f"Sinks: {heads} of its heads give position 0 over {percent(MUCH)} of their attention, {before} in the "
            f"first model; the mean head gives it {mean} against {earlier}."
        )


def _head(first: Report, other: Report, number: int) -> Markup:
    """Name the head whose attention to position 0, or else whose entropy, differs most; the link shows it."""
    one, two = (r.by_head().set_index(["layer", "head"]) for r in (first, other))
    for measure, what in (("first_attention", "attention to position 0"), ("entropy_ratio", "entropy")):
        if len(change := (two[measure] - one[measure]).dropna().abs()):
            place: Any = change.idxmax()
            layer, head = map(int, place)
            link = Markup('<a href="{}" data-model="{}" data-measure="{}">L{}H{}</a>')
            link = link.format(address(layer, head), number, measure, layer, head)
            after, before = (percent(float(t[measure][layer, head])) for t in (two, one))
            return Markup(" {} differs most in {}: {} against {}.").format(link, what, after, before)
    return Markup()
