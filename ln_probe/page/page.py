"""The page of one report and its notebook cell: facts, verdict card, findings, pictures, tables, provenance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pandas as pd
from markupsafe import Markup

from ln_probe.analyses.probes.base import Picture
from ln_probe.analyses.probes.columns import CAUSAL, TOKENS
from ln_probe.analyses.probes.registry import DEFAULT, chosen, find
from ln_probe.analyses.text import disarmed, percent, shortened
from ln_probe.hooks.norm import INTACT
from ln_probe.page import figures, own_script, policy, render
from ln_probe.page.attention import FRAME_HEIGHT, attention_document, frame, scripts
from ln_probe.page.figures import PICTURES, in_head_space, svg
from ln_probe.page.heads import MEASURES, HeadMap, by_head, draw_heads_map, known_measures, linked
from ln_probe.page.tables import Table, figure_text, table
from ln_probe.page.verdict import intact_loss, verdict
from ln_probe.report import Report, ranked_findings

CELL_FINDINGS = 5
_IN_PROMPTS = ("prompts · begin", "prompts · commonest")  # shown in the section on prompts, not in the provenance
MOST = 5  # questions that a page answers first
# By probe, in the order of the page.
QUESTIONS = {
    "causal": "Does the loss need scaling and projection?",
    "head_effects": "Which heads depend on scaling?",
    "sinks": "Is there an attention sink, and do the norms make it?",
    "selectability": "Which keys can no query select?",
}
_SENTENCE = re.compile(r"(?<=[a-z0-9)\]%])\. (?=[A-Z0-9])")


@dataclass(frozen=True)
class Drawing:
    """A figure as SVG, and its caption."""

    name: str
    svg: Markup
    caption: str


@dataclass(frozen=True)
class Shown:
    """A picture of the page, to whose `id` findings link."""

    id: str
    title: str
    drawing: Drawing
    wide: bool = False


@dataclass(frozen=True)
class Group:
    """Pictures under one heading; `short` is the heading in the bar of sections."""

    id: str
    title: str
    about: str
    pictures: tuple[Shown, ...]
    short: str


@dataclass(frozen=True)
class Answer:
    """A question (empty: none), a sentence, and the id and title of the part of the page that shows more."""

    question: str
    text: Markup
    picture: str
    title: str


def report_page(report: Report, index: str = "") -> str:
    """Return the report as one HTML page that opens offline; `index`: relative address of the page that lists it."""
    more, failed = others(report)
    drawn_groups = [*groups(report), *more]
    # Next to the interactive map, the still map of heads is only for readers without scripts.
    of_heads = next((g for g in drawn_groups if g.id == "heads-pictures" and report.exhibits.attention), None)
    tables, prompts = tuple(_tables(report)), report.provenance.get("prompts", {})
    titles = {p.id: p.title for g in drawn_groups for p in g.pictures} | {f"table-{t.name}": t.title for t in tables}
    script = own_script("unpack.js", "page.js")
    attention: Markup | str = ""
    allowed = [script]
    if report.exhibits.attention:
        attention = frame(attention_document(report.exhibits, HeadMap.of(report)), height=FRAME_HEIGHT)
        allowed += scripts()  # a frame's own policy is joined with the page's
    return render(
        "report.html",
        name=title_of(report.name),
        index=quote(index),
        facts=list(_facts(report)),
        details=list(_details(report)),
        verdict=verdict(report),
        unmeasured=_unmeasured(report),
        answers=answers(report, titles),
        findings=[
            {"text": linked(f.text, report.exhibits), "picture": f.picture, "title": titles.get(f.picture)}
            for f in ranked_findings(report)
        ],
        notes=(*report.notes, *report.exhibits.notes, *failed),
        groups=[g for g in drawn_groups if g is not of_heads],
        absent=[p for p in chosen(DEFAULT) if p.absent and p.name not in _run(report) and p.name != CAUSAL.name],
        attention=attention,
        by_head=of_heads.pictures[0].drawing if of_heads else None,
        tables=tables,
        provenance=[row for row in flat(report.provenance) if not row[0].startswith(_IN_PROMPTS)],
        prompts=prompts,
        begin=prompts.get("begin", ()),
        policy=policy(*allowed),
        script=Markup(script),
    )


def answers(report: Report, titles: Mapping[str, str]) -> list[Answer]:
    """Return at most MOST answers; the findings of highest rank where no probe with a question ran.

    `titles` are those of the parts of the page, by id.
    """
    found = []
    for name, question in QUESTIONS.items():
        if mine := find(name).findings(report.tables, report.provenance):
            best = min(mine, key=lambda f: (f.rank, -f.size))
            text = _SENTENCE.split(best.text)[0].removesuffix(".") + "."
            if name == "sinks":
                text = " ".join([text, *_change(report)])
            found.append((question, text, best.picture))
    found = found or [("", f.text, f.picture) for f in ranked_findings(report)]
    return [
        Answer(question, linked(text, report.exhibits), picture, titles.get(picture, ""))
        for question, text, picture in found[:MOST]
    ]


def _change(report: Report) -> Iterator[str]:
    """What freezing scaling for the keys does to the attention to position 0, and in which head most."""
    table = by_head(report).dropna(subset=["first_attention", "first_change"])
    if not len(table):
        return
    before, change = float(table["first_attention"].mean()), float(table["first_change"].mean())
    most = table.iloc[int(table["first_change"].abs().to_numpy().argmax())]
    yield (
        f"Freezing scaling for the keys changes the attention to position 0 from {percent(before)} by "
        f"{_points(change)} (mean over {len(table)} heads), most in L{most['layer']:.0f}H{most['head']:.0f} "
        f"({_points(float(most['first_change']))})."
    )


def _points(change: float) -> str:
    """Return a change of a share in percentage points, two digits."""
    if abs(change) < 5e-5:
        return "less than 0.01 percentage points"
    return f"{float(f'{100 * change:.2g}'):+g} percentage points"


def title_of(name: str) -> str:
    """Return the last part of a path; any other name is returned unchanged."""
    path = re.fullmatch(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\](?:.*[/\\])?([^/\\]+)[/\\]*", name)
    return path[1] if path and path[1].strip(". ") else name


def notebook_cell(report: Report) -> str:
    """Return a small summary without scripts and with at most one picture (some tens of kilobytes)."""
    heads, tables = in_head_space(report), []
    if len(heads):
        numbers = ["unselectable_fraction", "attainable_median", "margin_median", "entropy_ratio", "score_spread"]
        median = heads.groupby("variant", sort=False)[numbers].median().reset_index()
        tables.append(table(report.declared["heads"], median, interactive=False, about="Median head, by variant:"))
    elif len(report.layernorms):
        columns = ["site", "kind", "mean_share", "norm_before_mean", "sigma_mean"]
        norms = report.layernorms[columns].head(12)
        tables.append(table(report.declared["layernorms"], norms, interactive=False, about="Norms:"))
    return render(
        "cell.html",
        name=report.name,
        findings=[f.text for f in ranked_findings(report)][:CELL_FINDINGS],
        notes=report.notes,
        tables=tables,
        pictures=[drawn(report, PICTURES[p], "cell-").svg for p in CELL if has(report, PICTURES[p])][:1],
    )


def flat(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested provenance to rows of name and text."""
    if isinstance(values, dict) or hasattr(values, "items"):
        return [row for key, value in values.items() for row in flat(value, f"{prefix}{key} · ")]
    if isinstance(values, list | tuple):
        values = ", ".join(map(str, values))
    return [(prefix.removesuffix(" · "), figure_text(values))]


def hardest_first(keys: pd.DataFrame) -> pd.DataFrame:
    """Sort the keys table: head space and the intact norm first, the hardest keys on top."""
    if not len(keys):
        return keys
    rank = keys["verdict"].map({"unselectable": 0, "duplicate": 1, "undecided": 2}).fillna(3)
    order = keys.assign(rank=rank, first=keys["variant"] != "intact", other=keys["space"] != "head")
    return order.sort_values(["other", "first", "rank", "attainable", "margin_upper"], kind="stable").drop(
        columns=["rank", "first", "other"]
    )


def _run(report: Report) -> Collection[str]:
    """Return the names of the probes that ran, or of the non-empty tables if the report does not list its probes."""
    names: Collection[str] | None = report.provenance.get("arguments", {}).get("probes")
    return [name for name, table in report.tables.items() if len(table)] if names is None else names


def _unmeasured(report: Report) -> str:
    """Explain why there is no card about the loss."""
    if CAUSAL.name not in _run(report):
        return "Not run: how the loss changes when a term is removed from the running model (the causal probe)."
    return (
        "How the loss changes when a term is removed is unknown: the causal probe failed, or the model or its prompts "
        "give no next-token loss (see the notes)."
    )


def _tables(report: Report) -> Iterator[Table]:
    """Tables of the page, without empty tables and columns; `causal_prompts` is too long to read."""
    for name, rows in report.tables.items():
        shown = [(report.declared[name], hardest_first(rows) if name == "keys" else rows)]
        if name == "heads":
            shown.append((TOKENS, report.tokens()))
        for declared, table_rows in shown:
            if len(table_rows) and name != "causal_prompts":
                yield table(declared, table_rows.loc[:, table_rows.notna().any()])


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """List model, text and loss; unknown facts are left out."""
    prompts, norms, heads = report.provenance.get("prompts", {}), report.layernorms, in_head_space(report)
    if title_of(report.name) != report.name:
        yield "From", report.name
    of_model = []
    if len(heads):
        of_model.append(f"{heads['layer'].nunique()} layers × {heads['head'].nunique()} heads")
    if len(norms):
        kinds = Counter(norms["kind"])
        of_model.append(f"norms: {', '.join(f'{n} {what}' for what, n in kinds.items())}")
    if of_model:
        yield "Model", "; ".join(of_model)
    if prompts:
        yield "Text", f"{prompts.get('count')} prompts ({prompts.get('source')}), {prompts.get('tokens')} tokens"
    if loss := intact_loss(report):
        yield "Loss", loss


def _details(report: Report) -> Iterator[tuple[str, str]]:
    """List how the model was loaded and when it was analyzed."""
    of = report.provenance
    model = of.get("model", {})
    if kept := of.get("hooks", {}).get("measured_with"):
        yield "Measured with hooks", "; ".join(kept)
    loaded = [model.get(k) for k in ("architecture", "world", "dtype")]
    if any(loaded):
        yield "Loaded as", ", ".join(dict.fromkeys(str(v) for v in loaded if v))
    for key, name in (("revision", "Revision"), ("commit", "Commit"), ("weights_sha256", "Weights (SHA-256)")):
        if model.get(key):
            text = str(model[key])
            yield name, text if len(text) <= 20 else f"{text[:16]}…"
    if of.get("started"):
        yield "Analyzed", f"{str(of['started']).replace('T', ' ')[:16]} UTC"
    if of.get("ln_probe"):
        yield "ln_probe", str(of["ln_probe"])


# Of each group: id, title, what it shows, ids of its pictures (`figures`), title in the bar of sections.
GROUPS = (
    (
        "norms-pictures",
        "What each norm does",
        "Every norm along the depth of the model, term by term.",
        ("norms", "projection"),
        "Norms",
    ),
    (
        "keys-pictures",
        "Which keys a query can select",
        "Per head, as attention sees the keys, under each variant.",
        ("attainable", "margins"),
        "Keys",
    ),
    (
        "queries-pictures",
        "How attention spreads",
        "How the observed queries distribute attention over these keys.",
        ("entropy", "angle"),
        "Attention",
    ),
    (
        "causal-pictures",
        "How much the loss rises",
        "The loss of the running model with a term removed.",
        ("causal",),
        "Interventions",
    ),
    ("heads-pictures", "Head by head", "One measure of every head, layer × head.", (), "Heads"),
)

CELL = GROUPS[1][3]  # candidates for a notebook's cell, which shows the first that has data


def has(report: Report, picture: Picture) -> bool:
    """Whether the picture has data; pictures of heads need rows in head space."""
    frame = in_head_space(report) if picture.table == "heads" else report.tables.get(picture.table)
    if picture.id == "causal":
        frame = report.causal[(report.causal["variant"] != INTACT.name) & (report.causal["no_op"].fillna("") == "")]
    return frame is not None and picture.column in frame and not frame[picture.column].isna().all()


def drawing(name: str, title: str, figure: figures.Figure, text: str) -> Drawing:
    """Draw a figure as SVG with its caption; `name` is unique on the page."""
    return Drawing(title, Markup(svg(figure, name, f"{title}. {text}")), shortened(disarmed(text), 600))


def drawn(report: Report, picture: Picture, prefix: str = "") -> Drawing:
    """Draw a picture as SVG, with its caption."""
    text = (picture.draw.__doc__ or "").strip().partition("\n")[0]
    if picture.id == "projection" and not report.layernorms["kind"].isin(["layernorm", "projection_only"]).any():
        text = (
            "No norm of this model projects. Shown is what projection would remove: the share of squared length along "
            "the all-ones direction."
        )
    return drawing(f"{prefix}{picture.id}", picture.title, picture.draw(report), text)


def groups(report: Report) -> Iterator[Group]:
    """Yield the pictures of the built-in tables under their headings."""
    for name, title, about, plans, short in GROUPS:
        pictures = [PICTURES[p] for p in plans if has(report, PICTURES[p])]
        shown = [Shown(picture.id, picture.title, drawn(report, picture)) for picture in pictures]
        if name == "heads-pictures":
            shown += _by_head(report)
        if shown:
            yield Group(name, title, about, tuple(shown), short)


def others(report: Report) -> tuple[list[Group], list[str]]:
    """Return the pictures of the user's probes, and why some of them could not be drawn."""
    drawn_groups, failed = [], []
    for probe in report.probes:
        try:
            shown = [Shown(p.id, p.title, drawn(report, p)) for p in probe.pictures() if has(report, p)]
        except Exception as error:
            failed.append(f"the pictures of the probe {probe.name!r} failed: {type(error).__name__}: {error}")
            continue
        if shown:
            title = probe.summary[:1].upper() + probe.summary[1:]
            about = f"The probe {probe.name}."
            drawn_groups.append(Group(f"{probe.name}-pictures", title, about, tuple(shown), probe.name))
    return drawn_groups, failed


def _by_head(report: Report) -> list[Shown]:
    table = by_head(report)
    measure = next(iter(known_measures(table)), None)
    if measure is None:
        return []
    about = MEASURES[measure]
    text = f"{about.column.meaning[:1].upper()}{about.column.meaning[1:]}."
    return [Shown("by-head", "Every head", drawing("by-head", about.title, draw_heads_map(table, measure), text), True)]
