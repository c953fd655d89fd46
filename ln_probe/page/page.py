"""The page of one report and its notebook cell: facts, verdict card, findings, pictures, tables, provenance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
from markupsafe import Markup

from ln_probe.analyses.probes.base import Failure, Picture
from ln_probe.analyses.probes.columns import CAUSAL, TOKENS
from ln_probe.analyses.probes.registry import DEFAULT, chosen, package_of
from ln_probe.analyses.probes.text import shortened, visible
from ln_probe.analyses.schema import Table as Declared
from ln_probe.exhibits import by_token
from ln_probe.page import environment, figures, own_script, policy
from ln_probe.page.attention import FRAME_HEIGHT, attention_document, frame, scripts
from ln_probe.page.figures import by_variant, causal_effects, svg
from ln_probe.page.heads import MEASURES, HeadMap, heads_map, linked, measures_of
from ln_probe.page.tables import Table, figure_text, table
from ln_probe.page.verdict import verdict
from ln_probe.report import Report, ranked_findings

CELL_FINDINGS = 5


def report_page(report: Report, index: str = "") -> str:
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
    attention: Markup | str = ""
    allowed = [script]
    if report.exhibits.attention:
        attention = frame(attention_document(report.exhibits, HeadMap.of(report)), height=FRAME_HEIGHT)
        allowed += scripts()  # a frame's own policy is joined with the page's
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
                for f in ranked_findings(report)
            ],
            notes=(*report.notes, *report.exhibits.notes, *failed),
            groups=shown_groups,
            absent=[p for p in chosen(DEFAULT) if p.absent and p.name not in _run(report) and p.name != CAUSAL.name],
            attention=attention,
            by_head=by_head.pictures[0].drawings[0] if by_head else None,
            tables=tables,
            provenance=flat(_without_begin(report.provenance)),
            prompts=report.provenance.get("prompts", {}),
            begin=report.provenance.get("prompts", {}).get("begin", ()),
            policy=policy(*allowed),
            script=Markup(script),
        )
    )


def title_of(name: str) -> str:
    """What a model is called: of a path its last part, any other name as it is."""
    path = re.fullmatch(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\](?:.*[/\\])?([^/\\]+)[/\\]*", name)
    return path[1] if path and path[1].strip(". ") else name


def notebook_cell(report: Report) -> str:
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
            findings=[f.text for f in ranked_findings(report)][:CELL_FINDINGS],
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
_BEHIND: dict[str, tuple[tuple[Declared, Callable[[Report], pd.DataFrame]], ...]] = {
    "heads": ((TOKENS, lambda report: by_token(report.exhibits, report.sinks)),),
}


# A row for every prompt and norm: what intervals come from, in the parquet file and too long to read.
_NOT_SHOWN = ("causal_prompts",)


def _run(report: Report) -> Collection[str]:
    """Names of the probes that ran; of reports that do not say, those with a table of their name."""
    asked: Collection[str] | None = report.provenance.get("arguments", {}).get("probes")
    return [name for name, table in report.tables.items() if len(table)] if asked is None else asked


def _unmeasured(report: Report) -> str:
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


def _tables(report: Report) -> Iterator[Table]:
    for name, rows in report.tables.items():
        if name in _NOT_SHOWN:
            continue
        arranged = _ARRANGED[name](rows) if name in _ARRANGED else rows
        computed = [(declared, make(report)) for declared, make in _BEHIND.get(name, ())]
        for declared, shown in [(report.declared[name], arranged), *computed]:
            if len(shown):  # without the columns that say nothing of this model
                yield table(declared, shown.loc[:, shown.notna().any()])


def _facts(report: Report) -> Iterator[tuple[str, str]]:
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


GEOMETRIES = 5  # norms whose geometry a page offers: about 95 kB each


@dataclass(frozen=True)
class Drawing:
    """One SVG with what is said under it; of several, the one called `first` is shown first."""

    name: str
    svg: Markup
    caption: str
    first: bool = True


@dataclass(frozen=True)
class Shown:
    """A picture of the page; `id` is what findings link to, `choice` what distinguishes its drawings.

    `said` stands in for a picture on which nothing would be seen.
    """

    id: str
    title: str
    drawings: tuple[Drawing, ...]
    wide: bool = False
    choice: str = "Norm"
    said: str = ""


@dataclass(frozen=True)
class Group:
    """Pictures that belong together, under a heading."""

    id: str
    title: str
    about: str
    pictures: tuple[Shown, ...]


GROUPS = (
    (
        "norms-pictures",
        "What each norm does",
        "Every norm along the depth of the model, term by term.",
        (
            Picture(
                "norms",
                "Lengths before and after each norm",
                figures.norms_over_depth,
                "layernorms",
                "norm_before_mean",
            ),
            Picture(
                "projection",
                "Projection: the part along the ones-vector",
                figures.projection_over_depth,
                "layernorms",
                "mean_share",
            ),
        ),
    ),
    (
        "keys-pictures",
        "Which keys a query can select",
        "Per head, as attention sees the keys, under each variant.",
        (
            Picture(
                "attainable",
                "Attention a key can get",
                figures.attainable_over_depth,
                "heads",
                "attainable_last_median",
            ),
            Picture("margins", "Margins over depth", figures.margins_over_depth, "heads", "margin_median"),
            Picture(
                "unselectable",
                "Keys no query can select",
                figures.unselectable_by_head,
                "heads",
                "unselectable_fraction",
            ),
            Picture("margin-map", "Margins by head", figures.margins_by_head, "heads", "margin_median"),
        ),
    ),
    (
        "queries-pictures",
        "How attention spreads",
        "What the queries do with these keys.",
        (
            Picture("entropy", "How uniform attention is", figures.entropy_by_layer, "heads", "entropy_ratio"),
            Picture(
                "angle",
                "Queries and the uniform direction",
                figures.uniform_angle_by_layer,
                "heads",
                "uniform_angle_deg",
            ),
        ),
    ),
    (
        "causal-pictures",
        "What the model loses without it",
        "A term switched off in the running model.",
        (Picture("causal", "Change of the loss", causal_effects, "causal", "delta_loss"),),
    ),
    ("heads-pictures", "Head by head", "What the tables say of each head, layer × head; choose the measure.", ()),
)

CELL = GROUPS[1][3]  # of a notebook's cell: the first of these that there is


def has(report: Report, picture: Picture) -> bool:
    """Whether there is anything to draw; of heads that is what attention sees, not the norm's output."""
    frame = report.tables.get(picture.table)
    if frame is not None and picture.table == "heads":
        frame = frame[frame["space"] == "head"]
    return frame is not None and picture.column in frame and not frame[picture.column].isna().all()


def drawn(report: Report, picture: Picture, prefix: str = "") -> Drawing:
    """The picture as SVG, with its caption."""
    caption = (picture.draw.__doc__ or "").strip().splitlines()[0]
    if picture.id == "projection" and not report.layernorms["kind"].isin(["layernorm", "projection_only"]).any():
        caption = "No norm here projects. What one would remove: the share of squared length along the ones-vector."
    name = f"{prefix}{picture.id}"
    return Drawing(picture.title, Markup(svg(picture.draw(report), name, f"{picture.title}. {caption}")), caption)


def groups(report: Report) -> Iterator[Group]:
    """All pictures of a report, under their headings."""
    for name, title, about, plans in GROUPS:
        shown = [_shown(report, p) for p in plans if has(report, p)]
        if name == "norms-pictures":
            shown += _geometry(report)
        if name == "heads-pictures":
            shown += _by_head(report)
        if shown:
            yield Group(name, title, about, tuple(shown))


def _shown(report: Report, picture: Picture) -> Shown:
    said = nothing_to_see(report, picture.id)
    return Shown(picture.id, picture.title, () if said else (drawn(report, picture),), said=said)


def others(report: Report) -> tuple[list[Group], list[str]]:
    """Pictures that other packages' probes bring, and why some of them could not be drawn."""
    found, failed = [], []
    for probe in report.probes:
        try:
            shown = [Shown(p.id, p.title, (drawn(report, p),)) for p in probe.pictures() if has(report, p)]
        except Exception as error:
            failed.append(str(Failure.of(probe.name, package_of(probe), error)))
            continue
        if shown:
            title = probe.summary[:1].upper() + probe.summary[1:]
            found.append(Group(f"{probe.name}-pictures", title, f"From {package_of(probe)}.", tuple(shown)))
    return found, failed


def _by_head(report: Report) -> list[Shown]:
    known = measures_of(report)
    drawings = []
    for measure in known:
        caption = f"{MEASURES[measure].meaning[:1].upper()}{MEASURES[measure].meaning[1:]}."
        drawn = Markup(svg(heads_map(report, measure), f"by-head-{measure}", caption))
        drawings.append(Drawing(MEASURES[measure].title, drawn, caption, first=measure == known[0]))
    return [Shown("by-head", "Every head", tuple(drawings), wide=True, choice="Measure")] if drawings else []


def _geometry(report: Report) -> list[Shown]:
    samples = report.exhibits.samples
    if not samples:
        return []
    first = figures.most_spread(report)
    spaced = {samples[i].site for i in np.linspace(0, len(samples) - 1, min(GEOMETRIES, len(samples))).astype(int)}
    drawings = []
    for number, sample in enumerate(samples):
        if sample is not first and sample.site not in spaced:
            continue
        text = figures.geometry_caption(sample)
        drawn = Markup(svg(figures.draw_geometry(sample), f"geometry-{number}", f"Geometry. {text}"))
        drawings.append(Drawing(shortened(visible(sample.site)), drawn, text, first=sample is first))
    return [Shown("geometry", "Tokens around a norm: projection and scaling", tuple(drawings), wide=True)]


# The share of squared length along the ones-vector that rounding leaves of none (float32: 1e-7 of the length, squared).
_NO_SHARE = 1e-12


def nothing_to_see(report: Report, picture: str) -> str:
    """What stands in for a picture; empty if it shows something."""
    return _SAID[picture](report) if picture in _SAID else ""


def _projection(report: Report) -> str:
    share = report.layernorms["mean_share"]
    if not (share.fillna(0) <= _NO_SHARE).all():
        return ""
    return (
        f"Nothing of what the {len(share)} norms read lies along the ones-vector (share of squared length 0, angle "
        "90°): projection has nothing to take away."
    )


def _unselectable(report: Report) -> str:
    rows = [r for _, r in by_variant(report)]
    if any((r["unselectable_fraction"].fillna(0) > 0).any() for r in rows):
        return ""
    return (
        f"Every key can be selected by some query: none of the {len(rows[0])} heads has one that cannot, under any "
        "variant."
    )


def _angle(report: Report) -> str:
    angles = dict(by_variant(report)).get("intact")
    if angles is None or not (angles["uniform_angle_deg"].dropna().round() == 90).all():
        return ""
    return (
        f"In all {len(angles)} heads queries are at 90° to the direction that attends uniformly: they have nothing "
        "to do with it."
    )


def _causal(report: Report) -> str:
    rows = report.causal[report.causal["variant"] != "intact"]
    if (rows["delta_loss"].notna() & (rows["no_op"].fillna("") == "")).any():
        return ""
    return "Nothing is left to take away: at every norm both terms change nothing by construction."


_SAID: dict[str, Callable[[Report], str]] = {
    "projection": _projection,
    "unselectable": _unselectable,
    "angle": _angle,
    "causal": _causal,
}
