"""The index of several reports: a table that compares them, small multiples, links; failures are named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from urllib.parse import quote

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from ln_probe.analyses.probes.base import in_layers
from ln_probe.analyses.probes.columns import PAIRED, SUMMARY
from ln_probe.analyses.probes.text import disarmed, shortened
from ln_probe.hooks.interventions import GROUPS
from ln_probe.render.figures import axis_text, by_variant
from ln_probe.render.forest import ROWS, differences, forest, losses, over_steps
from ln_probe.render.multiples import MEASURES, PANELS, over_depth, over_training
from ln_probe.render.page import environment
from ln_probe.render.payload import own_script, policy
from ln_probe.render.pictures import Drawing, Shown
from ln_probe.render.svg import svg
from ln_probe.render.table_html import Table, table
from ln_probe.reporting.comparable import apart
from ln_probe.reporting.contents import Contents
from ln_probe.reporting.findings import findings
from ln_probe.reporting.overview import overview, step_of
from ln_probe.reporting.paired import paired

BASELINES = 12  # models that the others can be compared with: a picture each
_STEP = re.compile(r" · [^/\\]+$")  # behind a checkpoint's name, its training step
SENTENCES = 8  # models whose first finding stands above the table


@dataclass(frozen=True)
class IndexEntry:
    """A model in an index: its report and where its page is, relative to the index, or why it failed."""

    name: str
    href: str = ""
    report: Contents | None = None
    error: str = ""


def index_page(entries: Sequence[IndexEntry]) -> str:
    """The index of several reports as one HTML page that opens offline: comparison, small multiples, failures.

    Reports that name their training step (see `overview.step_of`) are drawn over training where a model has several.
    """
    entries = [replace(e, name=n) for e, n in zip(entries, told_apart([e.name for e in entries]), strict=True)]
    done = [(e, e.report) for e in entries if e.report is not None]
    rows = [{"model": entry.name, **overview(report)} for entry, report in done]
    summary = pd.DataFrame(rows, columns=SUMMARY.names).dropna(axis=1, how="all")
    links = [quote(entry.href) for entry, _ in done]
    script = own_script("unpack.js", "page.js")
    first = [(e.name, quote(e.href), next((f.text for f in findings(r)), "")) for e, r in done[:SENTENCES]]
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


def told_apart(names: Sequence[str]) -> list[str]:
    """Names as a page shows them: of local folders no more of the path than tells them from one another."""
    ends = {n: step[0] if (step := _STEP.search(n)) else "" for n in names}
    paths = {n: PurePath(n.removesuffix(ends[n])).parts for n in names}
    local = {p for p in paths.values() if len(p) > 1 and PurePath(*p).is_absolute()}
    kept = next((k for k in range(1, 99) if len({p[-k:] for p in local}) == len(local)), 99)
    shown = [str(PurePath(*paths[n][-kept:])) + ends[n] if paths[n] in local else n for n in names]
    return shown if len(set(shown)) == len(set(names)) else list(names)


def comparison_cell(
    names: Sequence[str], reports: Sequence[Contents], summary: pd.DataFrame, notes: Sequence[str]
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


def _losses(reports: Sequence[Contents], names: Sequence[str]) -> list[Shown]:
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
    steps, models = [step_of(r) for r in reports], told_apart([r.name for r in reports])
    several = Counter(m for m, s in zip(models, steps, strict=True) if s is not None)
    trained = rows[[steps[p] is not None and several[models[p]] > 1 for p in rows["place"]]]
    if len(trained):
        figure = over_steps(trained, steps, models, where)
        found.append(_drawing_of("losses-training", "Over training", figure, "Bands: 95 % intervals over prompts."))
    return found


def _paired_table(reports: Sequence[Contents], names: Sequence[str]) -> Table | None:
    """Paired differences to the first model, of groups of norms."""
    rows = paired(names, reports) if len(reports) > 1 else PAIRED.empty()
    rows = rows[rows["sites"].isin(GROUPS)]
    return table(PAIRED, rows) if len(rows) else None


def _svg(name: str, title: str, figure: Figure, caption: str, *, first: bool = True) -> Drawing:
    drawn = Markup(svg(figure, name.replace("_", "-"), f"{title}. {caption}"))
    return Drawing(title, drawn, shortened(disarmed(caption), 600), first=first)


def _drawing_of(name: str, title: str, figure: Figure, caption: str) -> Shown:
    return Shown(name, title, (_svg(name, title, figure, caption),), wide=True)


def _pictures(reports: Sequence[Contents], names: Sequence[str]) -> list[Shown]:
    steps = [step_of(r) for r in reports]
    models = told_apart([r.name for r in reports])
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
