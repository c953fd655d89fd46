"""HTML: a report as a page and as a notebook cell. Nothing is fetched, everything is escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup

from ln_probe.analyses.probes.columns import CAUSAL, TOKENS
from ln_probe.analyses.probes.registry import DEFAULT, chosen
from ln_probe.analyses.probes.text import disarmed, shortened, visible
from ln_probe.analyses.schema import Table as Declared
from ln_probe.render import attention_view
from ln_probe.render.explorer import HeadMap, linked
from ln_probe.render.payload import own_script, policy
from ln_probe.render.pictures import CELL, drawn, groups, has, others
from ln_probe.render.table_html import Table, figure_text, table
from ln_probe.render.verdict import verdict
from ln_probe.reporting.contents import Contents
from ln_probe.reporting.findings import findings
from ln_probe.reporting.token_places import by_token

CELL_FINDINGS = 5


@cache  # templates are compiled once
def environment() -> jinja2.Environment:
    """Templates: every value is escaped, and text shows its control characters."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("ln_probe.render", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else disarmed(value),
    )
    made.filters |= {"visible": visible, "shortened": shortened}
    made.globals["zip"] = zip
    return made


def report_page(report: Contents, index: str = "") -> str:
    """The whole report as one HTML page that opens offline.

    Args:
        report: what is shown.
        index: where the page that lists this report stands, relative to this one; empty: nowhere.
    """
    more, failed = others(report)
    found = [*groups(report), *more]
    by_head = next((g for g in found if g.id == "heads-pictures"), None) if report.exhibits.attention else None
    shown_groups = [
        g for g in found if g is not by_head
    ]  # where heads can be chosen, it is there for those without scripts
    tables = tuple(_tables(report))
    shown = {p.id: p.title for g in found for p in g.pictures} | {f"table-{t.name}": t.title for t in tables}
    script = own_script("unpack.js", "page.js")
    frame: Markup | str = ""
    scripts = [script]
    if report.exhibits.attention:
        frame = attention_view.frame(
            attention_view.attention_document(report.exhibits, HeadMap.of(report)), height=attention_view.FRAME_HEIGHT
        )
        scripts += attention_view.scripts()  # a frame's own policy is joined with the page's
    return (
        environment()
        .get_template("report.html")
        .render(
            name=title_of(report.name),
            index=quote(index),
            facts=list(_facts(report)),
            verdict=verdict(report),
            unmeasured=_unmeasured(report),
            findings=[
                {"text": linked(f.text, report.exhibits), "picture": f.picture, "title": shown.get(f.picture)}
                for f in findings(report)
            ],
            notes=(*report.notes, *report.exhibits.notes, *failed),
            groups=shown_groups,
            absent=[p for p in chosen(DEFAULT) if p.absent and p.name not in _run(report) and p.name != CAUSAL.name],
            attention=frame,
            by_head=by_head.pictures[0].drawings[0] if by_head else None,
            tables=tables,
            provenance=flat(_without_begin(report.provenance)),
            prompts=report.provenance.get("prompts", {}),
            begin=report.provenance.get("prompts", {}).get("begin", ()),
            policy=policy(*scripts),
            script=Markup(script),
        )
    )


def title_of(name: str) -> str:
    """What a model is called: of a path its last part, any other name as it is."""
    path = re.fullmatch(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\](?:.*[/\\])?([^/\\]+)[/\\]*", name)
    return path[1] if path and path[1].strip(". ") else name


def notebook_cell(report: Contents) -> str:
    """A small summary: no scripts, no pictures beyond one, some tens of kilobytes."""
    heads = report.heads[report.heads["space"] == "head"] if len(report.heads) else report.heads
    tables = []
    if len(heads):
        numbers = ["unselectable_fraction", "attainable_last_median", "margin_median", "entropy_ratio", "score_spread"]
        median = heads.groupby("variant", sort=False)[numbers].median().reset_index()
        tables.append(table(report.declared["heads"], median, interactive=False, about="Median head, by variant:"))
    elif len(report.layernorms):
        columns = ["site", "kind", "mean_share", "norm_before_mean", "sigma_mean"]
        norms = report.layernorms[columns].head(12)
        tables.append(table(report.declared["layernorms"], norms, interactive=False, about="Norms:"))
    return (
        environment()
        .get_template("cell.html")
        .render(
            name=report.name,
            findings=[f.text for f in findings(report)][:CELL_FINDINGS],
            notes=report.notes,
            tables=tables,
            pictures=[drawn(report, p, "cell-").svg for p in CELL if has(report, p)][:1],
        )
    )


def flat(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested provenance as rows of name and text."""
    if isinstance(values, dict) or hasattr(values, "items"):
        return [row for key, value in values.items() for row in flat(value, f"{prefix}{key} · ")]
    if isinstance(values, list | tuple):
        values = ", ".join(map(str, values))
    return [(prefix.removesuffix(" · "), figure_text(values))]


def hardest_first(keys: pd.DataFrame) -> pd.DataFrame:
    """The keys table as a reader wants it: head space and the intact norm first, the hardest on top."""
    if not len(keys):
        return keys
    rank = keys["verdict"].map({"unselectable": 0, "duplicate": 1, "undecided": 2}).fillna(3)
    order = keys.assign(rank=rank, first=keys["variant"] != "intact", other=keys["space"] != "head")
    return order.sort_values(["other", "first", "rank", "attainable_last", "margin_upper"], kind="stable").drop(
        columns=["rank", "first", "other"]
    )


# How a table stands on the page, where that is not as it is; and what is computed from others to stand behind one.
_ARRANGED: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {"keys": hardest_first}
_BEHIND: dict[str, tuple[tuple[Declared, Callable[[Contents], pd.DataFrame]], ...]] = {
    "heads": ((TOKENS, lambda report: by_token(report.exhibits, report.sinks)),),
}


# A row for every prompt and norm: what intervals come from, in the parquet file and too long to read.
_NOT_SHOWN = ("causal_prompts",)


def _run(report: Contents) -> Collection[str]:
    """Names of the probes that ran; of reports that do not say, those with a table of their name."""
    asked: Collection[str] | None = report.provenance.get("arguments", {}).get("probes")
    return [name for name, table in report.tables.items() if len(table)] if asked is None else asked


def _unmeasured(report: Contents) -> str:
    """Why there is no card about the loss."""
    if CAUSAL.name not in _run(report):
        return "Not run: what happens to the loss when a term is switched off in the running model (the causal probe)."
    if not len(report.causal):
        return (
            "No term was switched off in the running model: the causal probe failed, or the model has no norm that it "
            "could change (see the notes)."
        )
    return (
        "What the loss would be without a term is not known: this model, or these prompts, give no next-token loss. "
        "What its output distributions and its attention do is in the table of interventions."
    )


def _without_begin(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Without what stands in a section of its own."""
    prompts = {k: v for k, v in provenance.get("prompts", {}).items() if k not in ("begin", "commonest")}
    return {k: prompts if k == "prompts" else v for k, v in provenance.items()}


def _tables(report: Contents) -> Iterator[Table]:
    for name, frame in report.tables.items():
        if name in _NOT_SHOWN:
            continue
        arranged = _ARRANGED[name](frame) if name in _ARRANGED else frame
        computed = [(declared, make(report)) for declared, make in _BEHIND.get(name, ())]
        for declared, shown in [(report.declared[name], arranged), *computed]:
            if len(shown):  # without the columns that say nothing of this model
                yield table(declared, shown.loc[:, shown.notna().any()])


def _facts(report: Contents) -> Iterator[tuple[str, str]]:
    """What was analyzed, in a few words each; what is not known is left out."""
    of = report.provenance
    model, prompts = of.get("model", {}), of.get("prompts", {})
    norms, heads = report.layernorms, report.heads
    if title_of(report.name) != report.name:
        yield "From", report.name
    if len(norms):
        kinds = Counter(f"{kind} ({state})" for kind, state in zip(norms["kind"], norms["state"], strict=True))
        yield "Norms", ", ".join(f"{n} {what}" for what, n in kinds.items())
    inside = heads[heads["space"] == "head"] if len(heads) else heads
    if len(inside):
        yield "Attention", f"{inside['layer'].nunique()} layers × {inside['head'].nunique()} heads"
    if prompts:
        yield "Prompts", f"{prompts.get('count')} ({prompts.get('source')}), {prompts.get('tokens')} tokens"
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
