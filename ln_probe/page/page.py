"""The page of one report and its notebook cell: the answer, the map of heads, norms, keys, tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ln_probe.analyses.probes.wording import unit_of
from ln_probe.analyses.text import counted, number
from ln_probe.page import circuitsvis_script, figures, own_script, render
from ln_probe.page.attention import attention_data, head_map, linked, token_data
from ln_probe.page.figures import contrasts
from ln_probe.page.tables import Table, in_order, table
from ln_probe.report import Report, answers

# What a finding is about, as the answer names it; the section of the page that shows more, and the table behind it.
QUESTIONS = {
    "loss": ("Loss", "loss", ""),
    "heads": ("Heads", "heads", ""),
    "keys": ("Keys", "keys", "heads"),
    "sinks": ("Attention sinks", "table-sink_heads", "sink_heads"),
    "uniform": ("Uniform attention", "table-heads", "heads"),
}


@dataclass(frozen=True)
class Drawing:
    """A picture of the page as SVG, with its title and caption."""

    id: str
    title: str
    caption: str
    svg: Markup


def drawing(name: str, draw: Callable[..., Any], *of: Any) -> Drawing:
    """Draw a picture; the docstring of `draw` has its title and caption. `name` is unique on the page."""
    title, caption = figures.described(draw)
    return Drawing(name, title, caption, Markup(figures.svg(draw(*of), name, f"{title}. {caption}")))


def report_page(report: Report, index: str = "") -> str:
    """Return the report as one HTML page that opens offline; `index`: relative address of the page that lists it."""
    attention, tokens, (own_pictures, failures) = attention_data(report), token_data(report), _own_pictures(report)

    def picture(name: str, draw: Callable[[Report], Any]) -> Drawing | None:
        try:
            return drawing(name, draw, report)
        except Exception as error:  # the tables are shown all the same
            failures.append(f"the picture {name!r} failed: {type(error).__name__}: {error}")
            return None

    loss = picture("change", figures.loss_changes) if contrasts(report) else None
    norms = picture("depth", figures.norms_over_depth) if len(report.tables["layernorms"]) else None
    selection = picture("selection", figures.keys_over_depth) if len(report.tables["heads"]) else None
    tables, heads = list(_tables(report)), head_map(report)
    own = own_script("page.js", "heads.js")
    return render(
        "report.html",
        own,
        *([circuitsvis_script()] if attention["attention"] or tokens["colored"] else []),
        **{**attention, **tokens},
        name=title_of(report.name),
        index=quote(index),
        facts=list(report_facts(report)),
        answers=list(_answers(report)),
        loss=loss,
        notes=(*report.notes, *report.exhibits.notes, *failures),
        heads=heads,
        first=heads.first,
        norms=norms,
        selection=selection,
        selectable=" ".join(f.text for f in answers(report) if f.question == "keys"),
        own_pictures=own_pictures,
        tables=tables,
        limits=list(_limits(report)),
        provenance=flat(report.provenance),
        begin=report.provenance.get("prompts", {}).get("begin", ()),
    )


def notebook_cell(report: Report) -> str:
    """Return the answer and its picture, without scripts (some tens of kilobytes)."""
    drawings = [drawing("change", figures.loss_changes, report)] if contrasts(report) else []
    return render(
        "cell.html",
        name=report.name,
        findings=report.findings(),
        notes=report.notes,
        pictures=[d.svg for d in drawings],
    )


def title_of(name: str) -> str:
    """Return the last part of a path; any other name is returned unchanged."""
    path = re.fullmatch(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\](?:.*[/\\])?([^/\\]+)[/\\]*", name)
    return path[1] if path and path[1].strip(". ") else name


def flat(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested provenance to rows of name and text."""
    if isinstance(values, dict) or hasattr(values, "items"):
        return [row for key, value in values.items() for row in flat(value, f"{prefix}{key} · ")]
    if isinstance(values, list | tuple):
        values = ", ".join(map(str, values))
    return [(prefix.removesuffix(" · "), f"{values:.6g}" if isinstance(values, float) else str(values))]


def report_facts(report: Report) -> Iterator[str]:
    """Yield what was measured as phrases: model, text, loss; what is unknown is left out."""
    of = report.provenance
    if title_of(report.name) != report.name:
        yield report.name
    shape, prompts = of.get("shape", {}), of.get("prompts", {})
    if shape.get("heads"):
        yield f"{counted(shape['layers'], 'layer')} of {counted(shape['heads'], 'head')}"
    if norms := of.get("model", {}).get("norms", {}):
        yield "norms: " + ", ".join(f"{count} {kind}" for kind, count in Counter(norms.values()).items())
    if "count" in prompts:
        source = f" ({prompts['source']})" if prompts.get("source") else ""
        yield f"{counted(prompts['count'], 'prompt')}{source}, {prompts.get('tokens'):,} tokens"
    if measured := contrasts(report):
        yield f"intact loss {number(measured[0].loss)} {unit_of(report.provenance)}"


def _answers(report: Report) -> Iterator[tuple[str, str, Markup]]:
    """Yield each question's answer: its title, the section that shows more (may be empty), and its findings."""
    for question, findings in groupby(answers(report), key=lambda finding: finding.question):
        title, section, behind = QUESTIONS.get(question, ("", "", ""))
        is_there = not behind or len(report.tables[behind]) > 0
        yield title, section if is_there else "", linked(" ".join(f.text for f in findings), report)


def _tables(report: Report) -> Iterator[Table]:
    """Yield the tables that have rows, those of the user's probes last."""
    for name, rows in report.tables.items():
        if len(rows):
            yield table(
                report.declared[name], in_order(rows) if name == "keys" else rows, loss=unit_of(report.provenance)
            )


def _limits(report: Report) -> Iterator[str]:
    """Yield what the page does not show of this report's prompts."""
    prompts, attention = report.provenance.get("prompts", {}), report.exhibits.attention
    books = next((list(c.strata) for c in contrasts(report) if c.strata), [])
    of = f" of these {len(books)} books ({', '.join(books)})" if books else ""
    of_keys = report.provenance.get("selectability", {}).get("prompts", 0)
    first = f"; keys are of the first {of_keys} of them, without an interval" if of_keys else ""
    yield (
        f"Other text. Losses are of {counted(prompts.get('count', 0), 'prompt')}{of}{first}. Intervals do not say how "
        "other texts differ."
    )
    if attention is not None:
        rest = "" if len(attention.tokens) == attention.length else f", and tokens after {len(attention.tokens)}"
        yield f"The attention of prompts other than prompt {attention.prompt}{rest}."


def _own_pictures(report: Report) -> tuple[list[Drawing], list[str]]:
    """Return the pictures of the user's probes, and why some of them could not be drawn."""
    drawings, failures = [], []
    for probe in report.probes:
        try:
            for number_, picture in enumerate(probe.pictures()):
                drawn = drawing(f"{probe.name}{number_}", picture.draw, report)
                drawings.append(Drawing(picture.id, picture.title, f"{drawn.title}. {drawn.caption}", drawn.svg))
        except Exception as error:
            failures.append(f"the pictures of the probe {probe.name!r} failed: {type(error).__name__}: {error}")
    return drawings, failures
