"""The index of several reports: comparison table, figures over models, depth and training, links, failures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import Markup

from ln_probe.analyses.files import write_text
from ln_probe.analyses.probes.base import in_layers
from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE, base_loss
from ln_probe.analyses.probes.columns import PAIRED, SUMMARY
from ln_probe.analyses.probes.sinks import MUCH
from ln_probe.analyses.text import disarmed, shortened
from ln_probe.comparison import labels, paired, run_of, setup_differences, step_of, summary
from ln_probe.exhibits import Exhibits
from ln_probe.hooks.interventions import GROUPS
from ln_probe.hooks.variants import VARIANTS, Variant, primary_variants
from ln_probe.page import own_script, policy, render
from ln_probe.page.compared import MOST, answers, compared
from ln_probe.page.figures import (
    BLUE,
    GRID,
    LABEL,
    ORANGE,
    SIZE,
    SMALLEST,
    Figure,
    axis_text,
    by_variant,
    dress,
    in_head_space,
    widened,
)
from ln_probe.page.page import Drawing, Shown, drawing
from ln_probe.page.tables import table
from ln_probe.page.verdict import in_one_line
from ln_probe.report import PAGE_FILE, REPORT_FILE, Report, load_report

INDEX_FILE = "index.html"
BASELINES = 12  # models offered as a baseline, one picture each
_STEP = re.compile(r" · [^/\\]+$")  # behind a checkpoint's name, its training step
SENTENCES = 8  # models whose primary contrasts are written above the table


@dataclass(frozen=True)
class IndexEntry:
    """A model in an index: its report and the relative address of its page, or why it failed."""

    name: str
    href: str = ""
    report: Report | None = None
    error: str = ""


# The tables that an index reads; the others of a report are the larger part of it.
_READ = ("causal", "causal_prompts", "heads", "head_effects", "layernorms", "sink_heads")


def for_index(report: Report, place: int) -> Report:
    """Return what an index reads of a report, so that a thousand of them fit into memory.

    `place` is its number among those of the index; of the first MOST the pictures of attention are kept.
    """
    tables = {n: t if n in _READ else t.iloc[:0] for n, t in report.tables.items()}
    return replace(report, tables=tables, exhibits=report.exhibits if place < MOST else Exhibits())


def write_index(folder: Path, failures: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Write index.html in a folder of reports, about every report in its subfolders, and return its path.

    Args:
        folder: each report is a folder in it that holds report.json.
        failures: why a model has no report, by the model's name. A report that cannot be read is added to them.

    Raises:
        OSError: the folder cannot be written.
    """
    addresses, reports, failures = list[str](), list[Report](), dict(failures)
    for path in sorted(folder.glob(f"*/{REPORT_FILE}")):
        try:
            reports.append(for_index(load_report(path.parent), len(reports)))
        except (OSError, ValueError) as error:
            failures[path.parent.name] = str(error)
        else:
            addresses.append(f"{path.parent.name}/{PAGE_FILE}")
    entries = [IndexEntry(*entry) for entry in zip(labels(reports), addresses, reports, strict=True)]
    entries.sort(key=lambda e: (run_of(e.report), step_of(e.report) or 0) if e.report else ("", 0))
    entries += [IndexEntry(name, error=message) for name, message in failures.items()]
    write_text(folder / INDEX_FILE, index_page(entries))
    return folder / INDEX_FILE


def index_page(entries: Sequence[IndexEntry]) -> str:
    """Return the index of several reports as one HTML page that opens offline.

    A model with reports of several training steps (`ln_probe.comparison.step_of`) is also drawn over training.
    """
    entries = [replace(e, name=n) for e, n in zip(entries, short_names([e.name for e in entries]), strict=True)]
    done = [e for e in entries if e.report is not None]
    names, links, reports = [e.name for e in done], [quote(e.href) for e in done], [e.report for e in done if e.report]
    rows = summary(names, reports)
    sentences = [in_one_line(report) for report in reports[:SENTENCES]]
    script = own_script("unpack.js", "shades.js", "panel.js", "page.js", "compared.js")
    runs, steps, _ = _training(reports)
    against = paired(names, reports) if len(reports) > 1 else PAIRED.empty()
    return render(
        "index.html",
        answers=answers(names, rows, against, reports) if len(reports) > 1 else [],
        sinks=_sinks(reports, names),
        compared=compared(reports, names, runs, steps),
        count=len(entries),
        table=table(SUMMARY, rows.dropna(axis=1, how="all"), links=links) if len(rows) else None,
        losses=_losses(reports, names),
        paired=table(PAIRED, groups) if len(groups := against[against["sites"].isin(GROUPS)]) else None,
        pictures=_pictures(reports, names),
        first=list(zip(names, links, sentences, strict=False)),
        notes=setup_differences(names, reports),
        failed=[e for e in entries if e.error],
        policy=policy(script),
        script=Markup(script),
    )


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten paths of local folders to the last parts that keep them distinct; other names are unchanged."""
    ends = {n: step[0] if (step := _STEP.search(n)) else "" for n in names}
    paths = {n: PurePath(n.removesuffix(ends[n])).parts for n in names}
    local = {p for p in paths.values() if len(p) > 1 and PurePath(*p).is_absolute()}
    kept = next((k for k in range(1, 99) if len({p[-k:] for p in local}) == len(local)), 99)
    shown = [str(PurePath(*paths[n][-kept:])) + ends[n] if paths[n] in local else n for n in names]
    return shown if len(set(shown)) == len(set(names)) else list(names)


def comparison_cell(
    names: Sequence[str], reports: Sequence[Report], summary: pd.DataFrame, notes: Sequence[str]
) -> str:
    """Return a comparison as a notebook cell: the summary and one picture, without scripts."""
    pictures = _pictures(reports, names)[:1]
    return render(
        "cell.html",
        name=" · ".join(names),
        findings=[],
        notes=notes,
        tables=[table(SUMMARY, summary.dropna(axis=1, how="all"), interactive=False)],
        pictures=[d.svg for p in pictures for d in p.drawings],
    )


def _losses(reports: Sequence[Report], names: Sequence[str]) -> list[Shown]:
    """Draw the rise of the loss: by model, as differences from a baseline, and over training."""
    rows = losses(names, reports)
    if not len(rows):
        return []
    drawn = sorted(set(rows["place"]))
    note = f" The first {ROWS} of {len(names)} models are drawn." if len(names) > ROWS else ""
    about = f"Lines: 95 % CIs over prompts. Grey band: changes below {LEAST_CHANGE:g}, too small to report as effects."
    caption = f"{about} Models without that term have no marker.{note}"
    places = {in_layers(r.provenance) for r in reports}
    where = places.pop() if len(places) == 1 else " of the layers that each was asked for"
    found = [_shown("losses", "Change of the loss", forest(names, rows, where=where), caption)]
    against: list[Drawing] = []
    # Only models that are drawn are paired: with a thousand, others take minutes.
    for baseline in [d for d in drawn[:BASELINES] if d < ROWS] if len(drawn) > 1 else []:
        some = differences(names, paired(names[:ROWS], reports[:ROWS], baseline))
        if len(some):
            text = f"Change of the loss minus its change in {names[baseline]}, paired by prompt. {about}{note}"
            figure = forest(names, some, f"difference from {axis_text(names[baseline])}, nats per token", where)
            title = shortened(disarmed(names[baseline]))
            against.append(drawing(f"paired-{baseline}", title, figure, text, first=not against))
    if against:
        found.append(Shown("paired", "Difference from a baseline", tuple(against), wide=True, choice="Baseline"))
    models, steps, trained = _training(reports)
    over_time = rows[[trained[p] and steps[p] is not None for p in rows["place"]]]
    if len(over_time):
        figure = over_steps(over_time, steps, models, where)
        found.append(_shown("losses-training", "Over training", figure, "Bands: 95 % CIs over prompts."))
    return found


def _sinks(reports: Sequence[Report], names: Sequence[str]) -> Shown | None:
    if not any(r.sink_heads["first_attention"].notna().any() for r in reports):
        return None
    caption = (sinks_by_head.__doc__ or "").splitlines()[0]
    return _shown("sinks-by-head", "Attention to position 0, by head", sinks_by_head(names, reports), caption)


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


def _shown(name: str, title: str, figure: Figure, caption: str, *, wide: bool = True) -> Shown:
    return Shown(name, title, (drawing(name.replace("_", "-"), title, figure, caption),), wide=wide)


def _training(reports: Sequence[Report]) -> tuple[list[str], list[int | None], list[bool]]:
    """Return the reports' models, training steps, and whether the model has reports of several steps."""
    models, steps = short_names([run_of(r) for r in reports]), [step_of(r) for r in reports]
    runs = Counter(m for m, s in zip(models, steps, strict=True) if s is not None)
    return models, steps, [runs[m] > 1 for m in models]


def _pictures(reports: Sequence[Report], names: Sequence[str]) -> list[Shown]:
    models, steps, trained = _training(reports)
    found = []
    for measure, (title, _) in MEASURES.items():
        known = [not in_head_space(r)[measure].isna().all() for r in reports]
        if any(known) and not any((in_head_space(r)[measure].fillna(0) != 0).any() for r in reports):
            said = "0 in every model, layer and variant."
            found.append(Shown(f"depth-{measure}", title[:1].upper() + title[1:], (), said=said))
            continue
        if kept := [i for i, t in enumerate(trained) if t and known[i]]:
            runs = [models[i] for i in kept]
            figure = over_training([reports[i] for i in kept], runs, [steps[i] for i in kept], measure)
            found.append(_picture(f"training-{measure}", f"Over training: {title}", figure, len(set(runs))))
        if rest := [i for i, t in enumerate(trained) if not t and known[i]]:
            figure = over_depth([reports[i] for i in rest], [names[i] for i in rest], measure)
            found.append(_picture(f"depth-{measure}", f"Over depth: {title}", figure, len(rest)))
    return found


def _picture(name: str, title: str, figure: Figure, count: int) -> Shown:
    caption = "The median head of each layer." if name.startswith("depth") else "The median head of the model."
    if count > PANELS:
        caption += f" The first {PANELS} of {count} models are drawn."
    return _shown(name, title, figure, caption, wide=count > 2)


ROWS = 40  # models drawn; the table has all of them
_PLACES = {"all": ("at every norm", "o"), "attention": ("at attention alone", "s")}


def losses(names: Sequence[str], reports: Sequence[Report]) -> pd.DataFrame:
    """Return the rows of a forest plot: `model`, `place` (its number), `sites`, `variant`, `value`, `low`, `high`,
    `loss` (of the intact model). Edits that change nothing by construction have no row."""
    rows = []
    for place, (name, report) in enumerate(zip(names, reports, strict=True)):
        causal = report.causal
        wanted = (
            causal["variant"].isin([v.name for v in primary_variants()])
            & causal["sites"].isin(_PLACES)
            & causal["delta_loss"].notna()
        )
        for row in causal[wanted & (causal["no_op"].fillna("") == "")].to_dict("records"):
            value, low, high = (float(row[f"delta_loss{end}"]) for end in ("", "_low", "_high"))
            rows.append((name, place, row["sites"], row["variant"], value, low, high, base_loss(row)))
    return pd.DataFrame(rows, columns=["model", "place", "sites", "variant", "value", "low", "high", "loss"])


def differences(names: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """Return the same rows from a table of paired differences (`ln_probe.analyses.probes.columns.PAIRED`)."""
    rows = table[table["variant"].isin([v.name for v in primary_variants()]) & table["sites"].isin(_PLACES)]
    made = rows.rename(columns={"difference": "value"}).assign(place=[names.index(n) for n in rows["model"]])
    return made[["model", "place", "sites", "variant", "value", "low", "high"]].reset_index(drop=True)


def forest(
    names: Sequence[str], rows: pd.DataFrame, label: str = "change of the loss, nats per token", where: str = ""
) -> Figure:
    """Draw a panel per term and a line per model; filled markers: every norm, hollow: norms that attention reads.

    The first ROWS models are drawn, from the top. `where` follows "at every norm" in the legend.
    """
    shown = list(names)[:ROWS]
    rows = rows[rows["place"] < len(shown)]
    figure, panels = _by_term(rows, 1.0, 0.5 + 0.36 * len(shown))
    for axes, term, mine in panels:
        for number, (sites, (_, mark)) in enumerate(_PLACES.items()):
            some = mine[mine["sites"] == sites]
            place = some["place"].to_numpy(float) + 0.3 * number - 0.15
            axes.hlines(place, some["low"], some["high"], color=term.color, lw=1.4)
            face = "none" if number else term.color
            axes.plot(some["value"], place, mark, ms=5, color=term.color, markerfacecolor=face)
        axes.axvline(0, color=GRID, lw=1)
        axes.axvspan(-LEAST_CHANGE, LEAST_CHANGE, color=GRID, alpha=0.25, lw=0)
        widened(axes.set_xscale, mine["value"])
        _small(axes, grid="x")
    figure.axes[0].set_yticks(range(len(shown)), [axis_text(n) for n in shown], fontsize=SMALLEST)
    figure.axes[0].set_ylim(len(shown) - 0.5, -0.5)
    figure.supxlabel(label, fontsize=SMALLEST)
    _forest_legend(figure, where)
    return figure


def over_steps(rows: pd.DataFrame, steps: Sequence[int | None], models: Sequence[str], where: str = "") -> Figure:
    """Draw the same changes with their intervals over training, a panel per term.

    `steps` and `models` are of each report, in the order that `rows["place"]` counts.
    """
    steps_of = np.array([np.nan if s is None else s for s in steps], float)
    rows = rows.assign(step=steps_of[rows["place"].to_numpy(int)], run=[models[p] for p in rows["place"]])
    rows = rows[rows["step"].notna()].sort_values("step", kind="stable")
    figure, panels = _by_term(rows, 0.6, 0.8 * SIZE[1], shared=False)
    for axes, term, mine in panels:
        for (_, sites), line in mine.groupby(["run", "sites"], sort=False):
            axes.fill_between(line["step"], line["low"], line["high"], color=term.color, alpha=0.15, lw=0)
            style, face = ("s--", "none") if sites == "attention" else ("o-", term.color)
            marks: dict[str, Any] = {"ms": 4, "markerfacecolor": face, "markevery": _every(len(line))}
            axes.plot(line["step"], line["value"], style, color=term.color, **marks)
        axes.axhline(0, color=GRID, lw=1)
        _scale_steps(axes, mine["step"].tolist())
        axes.set_xlabel("training step", fontsize=SMALLEST)
        _small(axes)
    figure.supylabel("change of the loss, nats per token", fontsize=SMALLEST)
    _forest_legend(figure, where)
    return figure


def _by_term(
    rows: pd.DataFrame, base: float, each: float, *, shared: bool = True
) -> tuple[Figure, list[tuple[mpl.axes.Axes, Variant, pd.DataFrame]]]:
    """Return a figure with a panel for each term, and with each panel the rows that it shows."""
    terms = [v for v in primary_variants() if (rows["variant"] == v.name).any()]
    figure = Figure(figsize=(SIZE[0], base + len(terms) * each), layout="constrained")
    panels = figure.subplots(max(1, len(terms)), 1, sharey=shared, squeeze=False)[:, 0]
    for axes, term in zip(panels, terms, strict=False):
        axes.set_title(term.state, fontsize=10)
    return figure, [(axes, t, rows[rows["variant"] == t.name]) for axes, t in zip(panels, terms, strict=False)]


def _scale_steps(axes: mpl.axes.Axes, steps: Sequence[float]) -> None:
    """Make the axis of training steps logarithmic from the first step after 0 on."""
    if later := [step for step in steps if step > 0]:
        axes.set_xscale("symlog", linthresh=max(1.0, min(later)))


def _forest_legend(figure: Figure, where: str) -> None:
    line = mpl.lines.Line2D
    style: dict[str, Any] = {"ls": "", "ms": 5, "color": "black"}
    handles = [
        line([], [], marker=mark, markerfacecolor=face, label=label + where, **style)
        for face, (label, mark) in zip(("black", "none"), _PLACES.values(), strict=True)
    ]
    figure.legend(handles=handles, frameon=False, fontsize=SMALLEST, loc="outside upper left", ncols=2)


MEASURES = {  # column of the `heads` table: title, label of the axis
    "unselectable_fraction": ("keys no query can select", "share of keys"),
    "attainable_last_median": ("attention a median key can receive at the last position", "share of attention"),
    "margin_median": ("margin of a median key", "nats"),
    "entropy_ratio": ("how uniform attention is", "entropy / maximum"),
}
# Markers on a line over training: a browser draws each one by itself, and 20,000 of them in seconds.
MARKERS = 20
PANELS = 24  # models drawn, since more would be too small to read; the table has all of them
ACROSS = 2


def over_depth(reports: Sequence[Report], names: Sequence[str], measure: str) -> Figure:
    """Draw a measure (the median over the heads of a layer) over depth, a panel per model and a line per variant.

    The scale is one for all; the first PANELS models are drawn.
    """
    shown = list(zip(reports, names, strict=True))[:PANELS]
    figure, panels = _panels([name for _, name in shown], measure, "depth")
    drawn = set[Variant]()
    for axes, (report, _) in zip(panels, shown, strict=True):
        deepest = max([1, *(int(v) for v in report.heads["layer"])])
        for variant, rows in by_variant(report).items():
            middle = rows.groupby("layer")[measure].median()
            axes.plot(middle.index / deepest, middle, **_line(variant), ms=3)
            drawn.add(variant)
    _variant_legend(figure, drawn)
    return figure


def over_training(reports: Sequence[Report], names: Sequence[str], steps: Sequence[int | None], measure: str) -> Figure:
    """Draw a measure over training steps, a panel per model and a line per variant, from reports that have a step."""
    runs: dict[str, list[tuple[int, dict[Variant, pd.DataFrame]]]] = {}
    for report, name, step in zip(reports, names, steps, strict=True):
        if step is not None:
            runs.setdefault(name, []).append((step, by_variant(report)))
    figure, panels = _panels(list(runs)[:PANELS], measure, "training step")
    drawn = set[Variant]()
    for axes, found in zip(panels, runs.values(), strict=False):
        found.sort(key=lambda item: item[0])
        for variant in VARIANTS.values():
            points = [(step, float(rows[variant][measure].median())) for step, rows in found if variant in rows]
            if not all(math.isnan(v) for _, v in points):
                axes.plot(*np.array(points).T, **_line(variant), ms=3, markevery=_every(len(points)))
                drawn.add(variant)
        _scale_steps(axes, [step for step, _ in found])
    _variant_legend(figure, drawn)
    return figure


def _panels(names: Sequence[str], measure: str, xlabel: str) -> tuple[Figure, list[mpl.axes.Axes]]:
    """Return a figure with a titled panel for each name."""
    count, across = len(names), min(ACROSS, max(1, len(names)))
    lines = -(-count // across) or 1
    figure = Figure(figsize=(SIZE[0], 1.0 + 2.0 * lines), layout="constrained")
    grid = figure.subplots(lines, across, sharey=True, squeeze=False)
    for axes in grid.flat:
        _small(axes)
    for axes, name in zip(grid.flat, names, strict=False):
        short = name if len(name) <= LABEL else f"…{name[1 - LABEL :]}"
        axes.set_title(disarmed(short).replace("\n", " ").replace("$", r"\$"), fontsize=SMALLEST)
        axes.set_xlabel(xlabel, fontsize=SMALLEST)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    figure.supylabel(MEASURES.get(measure, ("", measure))[1], fontsize=SMALLEST)
    return figure, list(grid.flat[:count])


def _small(axes: mpl.axes.Axes, grid: Literal["x", "y"] = "y") -> None:
    """Style one of several small panels."""
    axes.tick_params(labelsize=SMALLEST)
    axes.grid(axis=grid, color=GRID, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)


def _every(points: int) -> int:
    """How many points of a line share a marker."""
    return -(-points // MARKERS) or 1


def _line(variant: Variant) -> dict[str, Any]:
    return {"color": variant.color, "marker": variant.marker, "lw": 1.2}


def _variant_legend(figure: Figure, drawn: Collection[Variant]) -> None:
    variants = [v for v in VARIANTS.values() if v in drawn]
    handles = [mpl.lines.Line2D([], [], label=v.label, ms=4, **_line(v)) for v in variants]
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=SMALLEST, loc="outside upper left", ncols=2)
