"""The index of several reports: comparison table, figures over models, depth and training, links, failures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from urllib.parse import quote

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import Markup

from ln_probe.analyses.probes.base import in_layers
from ln_probe.analyses.probes.causal import LEAST_CHANGE, base_loss
from ln_probe.analyses.probes.columns import PAIRED, SUMMARY
from ln_probe.analyses.probes.text import disarmed, shortened
from ln_probe.comparison import apart, overview, paired, step_of
from ln_probe.hooks.interventions import GROUPS
from ln_probe.hooks.variants import VARIANTS, primary_variants
from ln_probe.page import environment, own_script, policy
from ln_probe.page.figures import (
    GRID,
    SIZE,
    Figure,
    axis_text,
    by_variant,
    is_wide,
    svg,
    threshold,
)
from ln_probe.page.page import Drawing, Shown
from ln_probe.page.tables import Table, table
from ln_probe.report import Report, ranked_findings

BASELINES = 12  # models that the others can be compared with: a picture each
_STEP = re.compile(r" · [^/\\]+$")  # behind a checkpoint's name, its training step
SENTENCES = 8  # models whose first finding stands above the table


@dataclass(frozen=True)
class IndexEntry:
    """A model in an index: its report and where its page is, relative to the index, or why it failed."""

    name: str
    href: str = ""
    report: Report | None = None
    error: str = ""


def index_page(entries: Sequence[IndexEntry]) -> str:
    """The index of several reports as one HTML page that opens offline: comparison, small multiples, failures.

    Reports that name their training step (see `overview.step_of`) are drawn over training where a model has several.
    """
    entries = [replace(e, name=n) for e, n in zip(entries, short_names([e.name for e in entries]), strict=True)]
    done = [(e, e.report) for e in entries if e.report is not None]
    rows = [{"model": entry.name, **overview(report)} for entry, report in done]
    summary = pd.DataFrame(rows, columns=SUMMARY.names).dropna(axis=1, how="all")
    links = [quote(entry.href) for entry, _ in done]
    script = own_script("unpack.js", "page.js")
    first = [(e.name, quote(e.href), next((f.text for f in ranked_findings(r)), "")) for e, r in done[:SENTENCES]]
    return (
        environment()
        .get_template("index.html")
        .render(
            count=len(entries),
            table=table(SUMMARY, summary, links=links) if rows else None,
            losses=_losses([r for _, r in done], [e.name for e, _ in done]),
            paired=_paired_table([r for _, r in done], [e.name for e, _ in done]),
            pictures=_pictures([r for _, r in done], [e.name for e, _ in done]),
            first=first,
            notes=apart([e.name for e, _ in done], [r for _, r in done]),
            failed=[e for e in entries if e.error],
            policy=policy(script),
            script=Markup(script),
        )
    )


def short_names(names: Sequence[str]) -> list[str]:
    """Names as a page shows them: of local folders no more of the path than tells them from one another."""
    ends = {n: step[0] if (step := _STEP.search(n)) else "" for n in names}
    paths = {n: PurePath(n.removesuffix(ends[n])).parts for n in names}
    local = {p for p in paths.values() if len(p) > 1 and PurePath(*p).is_absolute()}
    kept = next((k for k in range(1, 99) if len({p[-k:] for p in local}) == len(local)), 99)
    shown = [str(PurePath(*paths[n][-kept:])) + ends[n] if paths[n] in local else n for n in names]
    return shown if len(set(shown)) == len(set(names)) else list(names)


def comparison_cell(
    names: Sequence[str], reports: Sequence[Report], summary: pd.DataFrame, notes: Sequence[str]
) -> str:
    """A comparison as a notebook cell: the summary and one picture, no scripts."""
    pictures = _pictures(reports, names)[:1]
    return (
        environment()
        .get_template("cell.html")
        .render(
            name=" · ".join(names),
            findings=[],
            notes=notes,
            tables=[table(SUMMARY, summary.dropna(axis=1, how="all"), interactive=False)],
            pictures=[d.svg for p in pictures for d in p.drawings],
        )
    )


def _losses(reports: Sequence[Report], names: Sequence[str]) -> list[Shown]:
    """What the loss loses: model by model, against each of the first as a baseline, over training."""
    rows = losses(names, reports)
    if not len(rows):
        return []
    drawn = sorted(set(rows["place"]))
    note = f" The first {ROWS} of {len(names)} models are drawn." if len(names) > ROWS else ""
    about = "Lines: 95 % intervals over prompts. Grey: changes that are not called effects. "
    caption = f"{about}A term that is not there to take away has no mark.{note}"
    places = {in_layers(r.provenance) for r in reports}
    where = places.pop() if len(places) == 1 else " of the layers that each was asked for"
    found = [_drawing_of("losses", "Change of the loss", forest(names, rows, where=where), caption)]
    against: list[Drawing] = []
    for baseline in drawn[:BASELINES] if len(drawn) > 1 else []:
        some = differences(names, paired(names, reports, baseline))
        if len(some):
            told = f"Change of the loss minus its change in {names[baseline]}, prompt by prompt. {about.strip()}{note}"
            figure = forest(names, some, f"difference to {axis_text(names[baseline])}, nats per token", where)
            title = shortened(disarmed(names[baseline]))
            against.append(_svg(f"paired-{baseline}", title, figure, told, first=not against))
    if against:
        found.append(Shown("paired", "Difference to one of them", tuple(against), wide=True, choice="Baseline"))
    steps, models = [step_of(r) for r in reports], short_names([r.name for r in reports])
    several = Counter(m for m, s in zip(models, steps, strict=True) if s is not None)
    trained = rows[[steps[p] is not None and several[models[p]] > 1 for p in rows["place"]]]
    if len(trained):
        figure = over_steps(trained, steps, models, where)
        found.append(_drawing_of("losses-training", "Over training", figure, "Bands: 95 % intervals over prompts."))
    return found


def _paired_table(reports: Sequence[Report], names: Sequence[str]) -> Table | None:
    """Paired differences to the first model, of groups of norms."""
    rows = paired(names, reports) if len(reports) > 1 else PAIRED.empty()
    rows = rows[rows["sites"].isin(GROUPS)]
    return table(PAIRED, rows) if len(rows) else None


def _svg(name: str, title: str, figure: Figure, caption: str, *, first: bool = True) -> Drawing:
    drawn = Markup(svg(figure, name.replace("_", "-"), f"{title}. {caption}"))
    return Drawing(title, drawn, shortened(disarmed(caption), 600), first=first)


def _drawing_of(name: str, title: str, figure: Figure, caption: str) -> Shown:
    return Shown(name, title, (_svg(name, title, figure, caption),), wide=True)


def _pictures(reports: Sequence[Report], names: Sequence[str]) -> list[Shown]:
    steps = [step_of(r) for r in reports]
    models = short_names([r.name for r in reports])
    runs = Counter(m for m, s in zip(models, steps, strict=True) if s is not None)
    trained = [n > 1 for n in (runs[m] for m in models)]
    found = []
    for measure, (title, _) in MEASURES.items():
        known = [any(not rows[measure].isna().all() for _, rows in by_variant(r)) for r in reports]
        if any(known) and not any((rows[measure].fillna(0) != 0).any() for r in reports for _, rows in by_variant(r)):
            said = "0 in every model, layer and variant."
            found.append(Shown(f"depth-{measure}", title[:1].upper() + title[1:], (), said=said))
            continue
        if any(k and t for k, t in zip(known, trained, strict=True)):
            kept = [i for i, t in enumerate(trained) if t and known[i]]
            figure = over_training(
                [reports[i] for i in kept], [models[i] for i in kept], [steps[i] for i in kept], measure
            )
            found.append(
                _picture(f"training-{measure}", f"Over training: {title}", figure, len({models[i] for i in kept}))
            )
        rest = [i for i, t in enumerate(trained) if not t and known[i]]
        if rest:
            figure = over_depth([reports[i] for i in rest], [names[i] for i in rest], measure)
            found.append(_picture(f"depth-{measure}", f"Over depth: {title}", figure, len(rest)))
    return found


def _picture(name: str, title: str, figure: Figure, count: int) -> Shown:
    caption = "The median head of each layer." if name.startswith("depth") else "The median head of the model."
    if count > PANELS:
        caption += f" The first {PANELS} of {count} models are drawn."
    return replace(_drawing_of(name, title, figure, caption), wide=count > 2)


ROWS = 40  # models drawn: the table has all
_PLACES = {"all": ("at every norm", "o"), "attention": ("at attention alone", "s")}


def losses(names: Sequence[str], reports: Sequence[Report]) -> pd.DataFrame:
    """Changes of the loss as a forest plot shows them: `model`, `place` (its number), `sites`, `variant`, `value`,
    `low`, `high`, `loss` (the intact model's). Terms that are not there to take away have no row."""
    rows = []
    for place, (name, report) in enumerate(zip(names, reports, strict=True)):
        causal = report.causal
        wanted = causal["variant"].isin(_primary()) & causal["sites"].isin(_PLACES) & causal["delta_loss"].notna()
        for row in causal[wanted & (causal["no_op"].fillna("") == "")].to_dict("records"):
            value, low, high = (float(row[f"delta_loss{end}"]) for end in ("", "_low", "_high"))
            rows.append((name, place, row["sites"], row["variant"], value, low, high, base_loss(row)))
    return pd.DataFrame(rows, columns=["model", "place", "sites", "variant", "value", "low", "high", "loss"])


def differences(names: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """The same rows of a table of paired differences (`ln_probe.analyses.probes.columns.PAIRED`)."""
    rows = table[table["variant"].isin(_primary()) & table["sites"].isin(_PLACES)]
    made = rows.rename(columns={"difference": "value"}).assign(place=[names.index(n) for n in rows["model"]])
    return made[["model", "place", "sites", "variant", "value", "low", "high"]].reset_index(drop=True)


def _primary() -> list[str]:
    return [v.name for v in primary_variants()]


def forest(
    names: Sequence[str], rows: pd.DataFrame, label: str = "change of the loss, nats per token", where: str = ""
) -> Figure:
    """A line per model, a panel per term; filled marks every norm, hollow ones those that attention reads.

    Args:
        names: models, from the top; the first ROWS are drawn.
        rows: what `losses` or `differences` gave.
        label: of the axis.
        where: behind "at every norm", in the legend.
    """
    shown = list(names)[:ROWS]
    rows = rows[rows["place"] < len(shown)]
    terms = [t for t in _primary() if (rows["variant"] == t).any()]
    figure = Figure(figsize=(1.5 * SIZE[0], 1.3 + 0.36 * len(shown)), layout="constrained")
    panels = figure.subplots(1, max(1, len(terms)), sharey=True, squeeze=False)[0]
    for axes, term in zip(panels, terms, strict=False):
        mine = rows[rows["variant"] == term]
        for number, (sites, (_, mark)) in enumerate(_PLACES.items()):
            some = mine[mine["sites"] == sites]
            place = some["place"].to_numpy(float) + 0.3 * number - 0.15
            axes.hlines(place, some["low"], some["high"], color=VARIANTS[term].color, lw=1.4)
            face = "none" if number else VARIANTS[term].color
            axes.plot(some["value"], place, mark, ms=5, color=VARIANTS[term].color, markerfacecolor=face)
        axes.axvline(0, color=GRID, lw=1)
        axes.axvspan(-LEAST_CHANGE, LEAST_CHANGE, color=GRID, alpha=0.25, lw=0)
        axes.set_title(VARIANTS[term].state, fontsize=10)
        wide = mine.assign(delta_loss=mine["value"])
        if is_wide(wide):
            axes.set_xscale("symlog", linthresh=threshold(wide))
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", color=GRID, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(shown)), [axis_text(n) for n in shown], fontsize=9)
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    figure.supxlabel(label, fontsize=9)
    _forest_legend(figure, where)
    return figure


def over_steps(rows: pd.DataFrame, steps: Sequence[int | None], models: Sequence[str], where: str = "") -> Figure:
    """The same changes over training, a panel per term, with intervals.

    Args:
        rows: what `losses` gave.
        steps, models: training step and name of each report, in the order that `rows["place"]` counts.
        where: as for `forest`.
    """
    steps_of = np.array([np.nan if s is None else s for s in steps], float)
    rows = rows.assign(step=steps_of[rows["place"].to_numpy(int)], run=[models[p] for p in rows["place"]])
    rows = rows[rows["step"].notna()].sort_values("step", kind="stable")
    terms = [t for t in _primary() if (rows["variant"] == t).any()]
    figure = Figure(figsize=(1.5 * SIZE[0], 0.8 * SIZE[1] + 0.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(terms)), squeeze=False)[0]
    for axes, term in zip(panels, terms, strict=False):
        mine = rows[rows["variant"] == term]
        for (_, sites), line in mine.groupby(["run", "sites"], sort=False):
            hollow = sites == "attention"
            axes.fill_between(line["step"], line["low"], line["high"], color=VARIANTS[term].color, alpha=0.15, lw=0)
            face = "none" if hollow else VARIANTS[term].color
            style = "s--" if hollow else "o-"
            axes.plot(line["step"], line["value"], style, ms=4, color=VARIANTS[term].color, markerfacecolor=face)
        axes.axhline(0, color=GRID, lw=1)
        if mine["step"].max() > 0:
            axes.set_xscale("symlog", linthresh=max(1.0, float(mine.loc[mine["step"] > 0, "step"].min())))
        axes.set_title(VARIANTS[term].state, fontsize=10)
        axes.set_xlabel("training step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color=GRID, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("change of the loss, nats per token", fontsize=9)
    _forest_legend(figure, where)
    return figure


def _forest_legend(figure: Figure, where: str) -> None:
    line = mpl.lines.Line2D
    handles = [
        line(
            [],
            [],
            ls="",
            marker=mark,
            ms=5,
            color="black",
            markerfacecolor="none" if n else "black",
            label=said + where,
        )
        for n, (said, mark) in enumerate(_PLACES.values())
    ]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper left", ncols=2)


MEASURES = {  # column of the `heads` table: title, label of the axis
    "unselectable_fraction": ("keys no query can select", "share of keys"),
    "attainable_last_median": ("attention a median key can receive at the last position", "share of attention"),
    "margin_median": ("margin of a median key", "nats"),
    "entropy_ratio": ("how uniform attention is", "entropy / maximum"),
}
PANELS = 24  # models drawn: more would be too small to read; the table has all
ACROSS = 4


def over_depth(reports: Sequence[Report], names: Sequence[str], measure: str) -> Figure:
    """A measure over depth, a panel per model and a line per variant, all on the same scale.

    Args:
        reports, names: the models; the first PANELS are drawn.
        measure: a column of the `heads` table; the median over the heads of a layer is drawn.

    Raises:
        KeyError: no such column.
    """
    shown = list(zip(reports, names, strict=True))[:PANELS]
    figure, panels = _panels(len(shown), MEASURES.get(measure, ("", measure))[1])
    for axes, (report, name) in zip(panels, shown, strict=True):
        deepest = max([1, *(int(v) for v in report.heads["layer"])])
        for variant, rows in by_variant(report):
            middle = rows.groupby("layer")[measure].median()
            axes.plot(
                middle.index / deepest,
                middle,
                "-",
                color=VARIANTS[variant].color,
                marker=VARIANTS[variant].marker,
                ms=3,
                lw=1.2,
            )
        _title(axes, name)
        axes.set_xlabel("depth", fontsize=8)
    _variant_legend(figure, [v for v in VARIANTS if any(v == found for r, _ in shown for found, _ in by_variant(r))])
    return figure


def over_training(reports: Sequence[Report], names: Sequence[str], steps: Sequence[int | None], measure: str) -> Figure:
    """A measure over training steps, a panel per model and a line per variant; reports without a step are left out."""
    runs: dict[str, list[tuple[int, Report]]] = {}
    for report, name, step in zip(reports, names, steps, strict=True):
        if step is not None:
            runs.setdefault(name, []).append((step, report))
    figure, panels = _panels(min(PANELS, len(runs)), MEASURES.get(measure, ("", measure))[1])
    drawn: set[str] = set()
    for axes, (name, found) in zip(panels, runs.items(), strict=False):
        found.sort(key=lambda item: item[0])
        for variant in VARIANTS:
            points = [
                (step, float(rows[measure].median())) for step, r in found for v, rows in by_variant(r) if v == variant
            ]
            if points and not all(math.isnan(v) for _, v in points):
                axes.plot(
                    *np.array(points).T,
                    "-",
                    color=VARIANTS[variant].color,
                    marker=VARIANTS[variant].marker,
                    ms=3,
                    lw=1.2,
                )
                drawn.add(variant)
        if found[-1][0] > 0:
            axes.set_xscale("symlog", linthresh=max(1, min((s for s, _ in found if s > 0), default=1)))
        _title(axes, name)
        axes.set_xlabel("training step", fontsize=8)
    _variant_legend(figure, [v for v in VARIANTS if v in drawn])
    return figure


def _panels(count: int, label: str) -> tuple[Figure, list[mpl.axes.Axes]]:
    across = min(ACROSS, max(1, count))
    lines = -(-count // across) or 1
    figure = Figure(figsize=(max(SIZE[0], 2.4 * across), 1.0 + 2.0 * lines), layout="constrained")
    grid = figure.subplots(lines, across, sharey=True, squeeze=False)
    for axes in grid.flat:
        axes.grid(axis="y", color=GRID, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    figure.supylabel(label, fontsize=9)
    return figure, list(grid.flat[:count])


def _title(axes: mpl.axes.Axes, name: str) -> None:
    short = name if len(name) <= 30 else f"…{name[-29:]}"
    axes.set_title(disarmed(short).replace("\n", " ").replace("$", r"\$"), fontsize=9)


def _variant_legend(figure: Figure, variants: Sequence[str]) -> None:
    handles = [
        mpl.lines.Line2D(
            [], [], color=VARIANTS[v].color, marker=VARIANTS[v].marker, ms=4, lw=1.2, label=VARIANTS[v].label
        )
        for v in variants
    ]
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper left", ncols=2)
