"""The index of a folder of reports: loss changes of every model in one picture, then a table, links and failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
from ln_probe.comparison import Comparison, labels, paired, run_of, setup_differences, step_of, summary
from ln_probe.exhibits import Exhibits
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.norm import EDITS, Variant
from ln_probe.page import own_script, policy, render
from ln_probe.page.figures import GRID, SIZE, SMALLEST, Figure, axis_text, svg, widened
from ln_probe.page.page import Shown, drawing
from ln_probe.page.tables import table
from ln_probe.page.verdict import in_one_line
from ln_probe.report import PAGE_FILE, REPORT_FILE, Report, load_report

INDEX_FILE = "index.html"
SENTENCES = 8  # models whose primary contrasts are written above the table
ROWS = 40  # models drawn; the table has all of them
_PLACES = {"all": ("at every norm", "o"), "attention": ("at attention alone", "s")}
_STEP = re.compile(r" step \d+$")  # behind a checkpoint's name
# The tables that an index reads; the others of a report are the larger part of it.
_READ = ("causal", "causal_prompts", "heads", "layernorms", "sink_heads")


@dataclass(frozen=True)
class IndexEntry:
    """A model in an index: its report and the relative address of its page, or why it failed."""

    name: str
    href: str = ""
    report: Report | None = None
    error: str = ""


def write_index(folder: Path, failures: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Write index.html in a folder of reports, about every report in its subfolders.

    Args:
        folder: each report is a folder in it, at any depth, that holds report.json.
        failures: why a model has no report, by the model's name. A report that cannot be read is added to them.

    Returns:
        The path of index.html.

    Raises:
        OSError: the folder cannot be written.
    """
    addresses, reports, failures = list[str](), list[Report](), dict(failures)
    for path in sorted(folder.rglob(REPORT_FILE)):
        name = path.parent.relative_to(folder).as_posix()
        try:
            reports.append(_abridged(load_report(path.parent)))
        except (OSError, ValueError) as error:
            failures[name] = str(error)
        else:
            addresses.append(f"{name}/{PAGE_FILE}")
    entries = [IndexEntry(*entry) for entry in zip(labels(reports), addresses, reports, strict=True)]
    entries.sort(key=lambda e: (run_of(e.report), step_of(e.report) or 0) if e.report else ("", 0))
    entries += [IndexEntry(name, error=message) for name, message in failures.items()]
    write_text(folder / INDEX_FILE, index_page(entries))
    return folder / INDEX_FILE


def _abridged(report: Report) -> Report:
    """Return what an index reads of a report, so that a thousand of them fit into memory."""
    tables = {n: t if n in _READ else t.iloc[:0] for n, t in report.tables.items()}
    return replace(report, tables=tables, exhibits=Exhibits())


def index_page(entries: Sequence[IndexEntry]) -> str:
    """Return the index of several reports as one HTML page that opens offline.

    A model with reports of several training steps (`ln_probe.comparison.step_of`) is also drawn over training.
    """
    entries = [replace(e, name=n) for e, n in zip(entries, short_names([e.name for e in entries]), strict=True)]
    done = [e for e in entries if e.report is not None]
    names, links, reports = [e.name for e in done], [quote(e.href) for e in done], [e.report for e in done if e.report]
    rows = summary(names, reports)
    sentences = [in_one_line(report) for report in reports[:SENTENCES]]
    script = own_script("unpack.js", "page.js")
    against = paired(names, reports) if len(reports) > 1 else PAIRED.empty()
    return render(
        "index.html",
        count=len(entries),
        table=table(SUMMARY, rows.dropna(axis=1, how="all"), links=links) if len(rows) else None,
        losses=_losses(names, reports),
        paired=table(PAIRED, groups) if len(groups := against[against["sites"].isin(GROUPS)]) else None,
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


def comparison_cell(comparison: Comparison) -> str:
    """Return a comparison as a notebook cell: the summary and the picture of losses, without scripts."""
    summarized = table(SUMMARY, comparison.summary.dropna(axis=1, how="all"), interactive=False)
    drawn = len(losses(comparison.names, comparison.reports))
    return render(
        "cell.html",
        name=" · ".join(comparison.names),
        findings=[],
        notes=comparison.notes,
        tables=[summarized],
        pictures=[Markup(svg(comparison.figure(), "losses", "Change of the loss"))] if drawn else [],
    )


def _losses(names: Sequence[str], reports: Sequence[Report]) -> list[Shown]:
    """Draw the rise of the loss, by model and over training."""
    rows = losses(names, reports)
    if not len(rows):
        return []
    caption = (
        f"Lines: 95 % CIs over prompts. Grey band: changes below {LEAST_CHANGE:g}, too small to report as effects. "
        "Models without that term have no marker."
    )
    if len(names) > ROWS:
        caption += f" The first {ROWS} of {len(names)} models are drawn."
    picture = drawing("losses", "Change of the loss", forest(names, reports), caption)
    shown = [Shown("losses", picture.name, picture, wide=True)]
    models, steps, trained = _training(reports)
    over_time = rows[[trained[p] and steps[p] is not None for p in rows["place"]]]
    if len(over_time):
        figure = over_steps(over_time, steps, models, _where(reports))
        picture = drawing("losses-training", "Over training", figure, "Bands: 95 % CIs over prompts.")
        shown.append(Shown("losses-training", picture.name, picture, wide=True))
    return shown


def _where(reports: Sequence[Report]) -> str:
    """Return the layers that the reports are about, as the end of a sentence."""
    places = {in_layers(r.provenance) for r in reports}
    return places.pop() if len(places) == 1 else " of the layers that each was asked for"


def _training(reports: Sequence[Report]) -> tuple[list[str], list[int | None], list[bool]]:
    """Return the reports' models, training steps, and whether the model has reports of several steps."""
    models, steps = short_names([run_of(r) for r in reports]), [step_of(r) for r in reports]
    runs = Counter(m for m, s in zip(models, steps, strict=True) if s is not None)
    return models, steps, [runs[m] > 1 for m in models]


def losses(names: Sequence[str], reports: Sequence[Report]) -> pd.DataFrame:
    """Return the rows of a forest plot: `model`, `place` (its number), `sites`, `variant`, `value`, `low`, `high`,
    `loss` (of the intact model). Edits that change nothing by construction have no row."""
    rows = []
    for place, (name, report) in enumerate(zip(names, reports, strict=True)):
        causal = report.causal
        wanted = (
            causal["variant"].isin([v.name for v in EDITS if v.primary])
            & causal["sites"].isin(_PLACES)
            & causal["delta_loss"].notna()
        )
        for row in causal[wanted & (causal["no_op"].fillna("") == "")].to_dict("records"):
            value, low, high = (float(row[f"delta_loss{end}"]) for end in ("", "_low", "_high"))
            rows.append((name, place, row["sites"], row["variant"], value, low, high, base_loss(row)))
    return pd.DataFrame(rows, columns=["model", "place", "sites", "variant", "value", "low", "high", "loss"])


def forest(names: Sequence[str], reports: Sequence[Report]) -> Figure:
    """Draw the loss changes of the first ROWS models: a panel per term, a line per model, the first on top.

    Filled markers are changes at every norm, hollow ones at the norms that attention reads.
    """
    shown = list(names)[:ROWS]
    rows = losses(shown, reports[:ROWS])
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
    figure.supxlabel("change of the loss, nats per token", fontsize=SMALLEST)
    _forest_legend(figure, _where(reports))
    return figure


def over_steps(rows: pd.DataFrame, steps: Sequence[int | None], models: Sequence[str], where: str) -> Figure:
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
            axes.plot(line["step"], line["value"], style, color=term.color, ms=4, markerfacecolor=face)
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
    terms = [v for v in EDITS if v.primary and (rows["variant"] == v.name).any()]
    figure = Figure(figsize=(SIZE[0], base + len(terms) * each), layout="constrained")
    panels = figure.subplots(max(1, len(terms)), 1, sharey=shared, squeeze=False)[:, 0]
    for axes, term in zip(panels, terms, strict=False):
        axes.set_title(term.label, fontsize=10)
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


def _small(axes: mpl.axes.Axes, grid: Literal["x", "y"] = "y") -> None:
    """Style one of several small panels."""
    axes.tick_params(labelsize=SMALLEST)
    axes.grid(axis=grid, color=GRID, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)
