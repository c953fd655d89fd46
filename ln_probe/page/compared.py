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
from ln_probe.page.figures import BLUE, GRID, ORANGE, SIZE, Figure, axis_text, dress
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
            measures.append(about.plain(name) | {"unit": about.label.replace(" per ", "/"), **numbers})
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
        said = " ".join([*_loss(row), *_scaling(mine[mine["sites"] == "all"]), *_sinks(rows[0], row)])
        if said := escape(said) + _head(reports[0], reports[number], number):
            found.append((shortened(disarmed(names[number]), 60), said))
    return found


def _interval(value: float, low: float, high: float) -> str:
    size, ends = with_interval(value, low, high)
    return f"{size} nats/token" + (
        f" (95 % CI {ends}{', which includes 0' if low <= 0 <= high else ''})" if ends else ""
    )


def _loss(row: Mapping[Any, Any]) -> Iterator[str]:
    if np.isfinite(row["loss_difference"]):
        ends = (row[f"loss_difference{end}"] for end in ("", "_low", "_high"))
        yield f"Its loss, {row['loss']:#.3g}, differs by {_interval(*ends)} on the same prompts."


def _scaling(rows: pd.DataFrame) -> Iterator[str]:
    for row in rows.head(1).to_dict("records"):
        ends = _interval(row["difference"], row["low"], row["high"])
        yield f"The loss increase with scaling frozen at every norm differs by {ends}."


def _sinks(first: Mapping[Any, Any], row: Mapping[Any, Any]) -> Iterator[str]:
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


def sinks_by_head(names: Sequence[str], reports: Sequence[Report]) -> Figure:
    """Attention to position 0 of every head (dots) and its mean (bar); dashes: uniform attention; line: 30 %."""
    rows = [
        (n, r.sink_heads) for n, r in zip(names, reports, strict=True) if r.sink_heads["first_attention"].notna().any()
    ][:MOST]
    figure = Figure(figsize=(1.5 * SIZE[0], 1.1 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    dress(axes, "", grid="x")
    for place, (_, heads) in enumerate(rows):
        values = heads["first_attention"].to_numpy(float)
        spread = 0.2 * np.sin(np.arange(len(values)) * 2.4)  # so that equal heads do not hide one another
        axes.plot(values, place + spread, "o", ms=3.5, alpha=0.55, color=BLUE, mec="none")
        axes.plot([heads["first_attention"].mean()] * 2, [place - 0.32, place + 0.32], color=ORANGE, lw=2.2)
        axes.plot([heads["first_uniform"].mean()] * 2, [place - 0.32, place + 0.32], "--", color="black", lw=1)
    axes.axvline(MUCH, color=GRID, lw=1)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of attention")
    axes.set_yticks(range(len(rows)), [axis_text(n) for n, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure
