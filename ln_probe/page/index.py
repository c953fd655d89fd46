"""The index of a folder of reports: the headline of every model, what the models are, their heads, a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from urllib.parse import quote

from ln_probe.analyses.probes.tables import SUMMARY
from ln_probe.analyses.text import write_text
from ln_probe.comparison import labels, run_of, setup_differences, step_of, summary
from ln_probe.exhibits import Exhibits
from ln_probe.models import BUNDLED
from ln_probe.page import figures, own_script, render
from ln_probe.page.attention import HeadMap, head_map
from ln_probe.page.figures import ROWS, contrasts
from ln_probe.page.page import Drawing, drawing, report_facts
from ln_probe.page.tables import table
from ln_probe.report import PAGE_FILE, REPORT_FILE, Report, load_report

INDEX_FILE = "index.html"
MAPS = 6  # models whose maps of heads are drawn
_STEP = re.compile(r" step \d+$")  # behind a checkpoint's name
# The tables that an index reads; the others of a report are the larger part of it.
_READ = ("causal", "causal_prompts", "heads", "layernorms", "sink_heads", "head_effects")


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
    return render(
        "index.html",
        own_script("page.js"),
        count=len(entries),
        losses=losses(names, reports),
        drawn=min(len(names), ROWS),
        models=[
            {"name": name, "href": link, "about": _about(report), "heads": head_map(report) if n < MAPS else HeadMap()}
            for n, (name, link, report) in enumerate(zip(names, links, reports, strict=True))
        ],
        table=table(SUMMARY, rows, links=links) if len(rows) else None,
        notes=setup_differences(names, reports),
        failed=[e for e in entries if e.error],
    )


def _about(report: Report) -> str:
    about = BUNDLED.get(report.name)
    return f"Bundled: {about}." if about else " · ".join(report_facts(report))


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten paths of local folders to the last parts that keep them distinct; other names are unchanged."""
    ends = {n: step[0] if (step := _STEP.search(n)) else "" for n in names}
    paths = {n: PurePath(n.removesuffix(ends[n])).parts for n in names}
    local = {p for p in paths.values() if len(p) > 1 and PurePath(*p).is_absolute()}
    parts = next((k for k in range(1, 99) if len({p[-k:] for p in local}) == len(local)), 99)
    shown = [str(PurePath(*paths[n][-parts:])) + ends[n] if paths[n] in local else n for n in names]
    return shown if len(set(shown)) == len(set(names)) else list(names)


def losses(names: Sequence[str], reports: Sequence[Report]) -> list[Drawing]:
    """Draw the headline by model, and over training where there are several steps of a model."""
    if not any(contrasts(report) for report in reports):
        return []
    drawings = [drawing("losses", figures.forest, names, reports)]
    runs: dict[str, list[tuple[int, Report]]] = {}
    for run, report in zip(short_names([run_of(r) for r in reports]), reports, strict=True):
        if (step := step_of(report)) is not None and contrasts(report):
            runs.setdefault(run, []).append((step, report))
    runs = {run: sorted(steps, key=lambda pair: pair[0]) for run, steps in runs.items() if len(steps) > 1}
    if runs:
        drawings.append(drawing("training", figures.loss_over_training, runs))
    return drawings
