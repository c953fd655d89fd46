"""HTML: a report as a page and as a notebook cell. Nothing is fetched, everything is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from ln_probe.render import attention, figures, geometry
from ln_probe.render.effects import causal_effects
from ln_probe.render.payload import own_script, policy
from ln_probe.render.svg import svg
from ln_probe.render.tables import Table, figure_text, table
from ln_probe.render.text import disarmed, shortened, visible

if TYPE_CHECKING:
    from ln_probe.report import Report

CELL_FINDINGS = 5
GEOMETRIES = 6  # norms whose geometry a page offers: about 40 kB each


@dataclass(frozen=True)
class Drawing:
    """One SVG with what is said under it; of several, the one called `first` is shown first."""

    name: str
    svg: Markup
    caption: str
    first: bool = True


@dataclass(frozen=True)
class Picture:
    """A numbered picture of the page; `id` is what findings link to."""

    id: str
    title: str
    drawings: tuple[Drawing, ...]
    wide: bool = False


@dataclass(frozen=True)
class Group:
    """Pictures that belong together, under a heading."""

    id: str
    title: str
    about: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class _Plan:
    """How a picture is made: drawn if `column` of `table` has a value."""

    id: str
    title: str
    draw: Callable[[Report], Figure]
    table: str
    column: str


_GROUPS = (
    ("norms-pictures", "What each norm does", "Every norm along the depth of the model, term by term.", (
        _Plan("norms", "Lengths before and after each norm", figures.norms_over_depth, "layernorms",
              "norm_before_mean"),
        _Plan("projection", "Projection: the part along the ones-vector", figures.projection_over_depth, "layernorms",
              "mean_share"),
    )),
    ("keys-pictures", "Which keys a query can select", "Per head, as attention sees the keys, under each variant.", (
        _Plan("attainable", "Attention a key can get", figures.attainable_over_depth, "heads", "attainable_median"),
        _Plan("margins", "Margins over depth", figures.margins_over_depth, "heads", "margin_median"),
        _Plan("unselectable", "Keys no query can select", figures.unselectable_by_head, "heads",
              "unselectable_fraction"),
        _Plan("margin-map", "Margins by head", figures.margins_by_head, "heads", "margin_median"),
    )),
    ("queries-pictures", "How attention spreads", "What the queries do with these keys.", (
        _Plan("entropy", "How uniform attention is", figures.entropy_by_layer, "heads", "entropy_ratio"),
        _Plan("angle", "Queries and the uniform direction", figures.uniform_angle_by_layer, "heads",
              "uniform_angle_deg"),
    )),
    ("causal-pictures", "What the model loses without it", "A term switched off in the running model.", (
        _Plan("causal", "Change of the loss", causal_effects, "causal", "delta_loss"),
    )),
)  # fmt: skip

_ABOUT = {
    "layernorms": ("Norms", "A row per norm; columns ending in _tail leave position 0 out."),
    "heads": ("Heads", "A row per (layer, head, space, variant); head −1 is the whole layer at the norm's output."),
    "tokens": (
        "Tokens",
        "What keys of each token can get, over all heads of the prompts kept here: position 0 and attention sinks "
        "apart, then the tokens that lose most when scaling is taken away.",
    ),
    "keys": ("Keys", "The hardest keys of each head and a sample, each under all variants; hardest first."),
    "causal": ("Interventions", "A row per group of norms and variant: the running model with a term switched off."),
    "unembedding": ("Unembedding", "Tokens that are hard to predict, over everything the final norm can put out."),
}


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


def report_page(report: Report) -> str:
    """The whole report as one HTML page that opens offline."""
    from ln_probe.findings import findings

    groups = tuple(_groups(report))
    tables = tuple(_tables(report))
    shown = {p.id: p.title for g in groups for p in g.pictures} | {f"table-{t.name}": t.title for t in tables}
    script = own_script("unpack.js", "page.js")
    frame: Markup | str = ""
    scripts = [script]
    if report.exhibits.attention:
        frame = attention.frame(attention.attention_document(report.exhibits), height=attention.FRAME_HEIGHT)
        scripts += attention.scripts()  # a frame's own policy is joined with the page's
    return (
        environment()
        .get_template("report.html")
        .render(
            name=report.name,
            facts=list(_facts(report)),
            findings=[{"text": f.text, "picture": f.picture, "title": shown.get(f.picture)} for f in findings(report)],
            notes=(*report.notes, *report.exhibits.notes),
            groups=groups,
            causal="causal" in shown,
            attention=frame,
            tables=tables,
            provenance=flat(report.provenance),
            policy=policy(*scripts),
            script=Markup(script),
        )
    )


def notebook_cell(report: Report) -> str:
    """A small summary: no scripts, no pictures beyond one, some tens of kilobytes."""
    heads = report.heads[report.heads["space"] == "head"] if len(report.heads) else report.heads
    tables = []
    if len(heads):
        numbers = ["unselectable_fraction", "attainable_median", "margin_median", "entropy_ratio", "score_spread"]
        median = heads.groupby("variant", sort=False)[numbers].median().reset_index()
        tables.append(table("summary", "", "Median head, by variant:", median, interactive=False))
    elif len(report.layernorms):
        columns = ["site", "kind", "mean_share", "norm_before_mean", "sigma_mean"]
        tables.append(table("norms", "", "Norms:", report.layernorms[columns].head(12), interactive=False))
    plan = next((p for _, _, _, plans in _GROUPS[1:2] for p in plans if _has(report, p)), None)
    return (
        environment()
        .get_template("cell.html")
        .render(
            name=report.name,
            findings=report.findings()[:CELL_FINDINGS],
            notes=report.notes,
            tables=tables,
            pictures=[] if plan is None else [_drawn(report, plan, "cell-").svg],
        )
    )


def flat(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested provenance as rows of name and text."""
    if isinstance(values, dict) or hasattr(values, "items"):
        return [row for key, value in values.items() for row in flat(value, f"{prefix}{key} · ")]
    if isinstance(values, list | tuple):
        values = ", ".join(map(str, values))
    return [(prefix.removesuffix(" · "), figure_text(values))]


def _has(report: Report, plan: _Plan) -> bool:
    frame: pd.DataFrame = getattr(report, plan.table)
    return plan.column in frame and not frame[plan.column].isna().all()


def _drawn(report: Report, plan: _Plan, prefix: str = "") -> Drawing:
    caption = (plan.draw.__doc__ or "").strip().splitlines()[0]
    if plan.id == "projection" and not report.layernorms["kind"].isin(["layernorm", "projection_only"]).any():
        caption = "No norm here projects. What one would remove: the share of squared length along the ones-vector."
    name = f"{prefix}{plan.id}"
    return Drawing(plan.title, Markup(svg(plan.draw(report), name, f"{plan.title}. {caption}")), caption)


def _groups(report: Report) -> Iterator[Group]:
    for name, title, about, plans in _GROUPS:
        pictures = [Picture(p.id, p.title, (_drawn(report, p),)) for p in plans if _has(report, p)]
        if name == "norms-pictures":
            pictures += _geometry(report)
        if pictures:
            yield Group(name, title, about, tuple(pictures))


def _geometry(report: Report) -> list[Picture]:
    samples = report.exhibits.samples
    if not samples:
        return []
    first = geometry.most_spread(report)
    spaced = {samples[i].site for i in np.linspace(0, len(samples) - 1, min(GEOMETRIES, len(samples))).astype(int)}
    drawings = []
    for number, sample in enumerate(samples):
        if sample is not first and sample.site not in spaced:
            continue
        text = geometry.caption(sample)
        drawn = Markup(svg(geometry.draw(sample), f"geometry-{number}", f"Geometry. {text}"))
        drawings.append(Drawing(shortened(visible(sample.site)), drawn, text, first=sample is first))
    return [Picture("geometry", "Tokens around a norm: projection and scaling", tuple(drawings), wide=True)]


def _tables(report: Report) -> Iterator[Table]:
    from ln_probe.tokens import by_token

    frames = {
        "layernorms": report.layernorms.drop(columns="evidence", errors="ignore"),
        "heads": report.heads,
        "tokens": by_token(report.exhibits),
        "keys": hardest_first(report.keys),
        "causal": report.causal,
        "unembedding": report.unembedding,
    }
    for name, frame in frames.items():
        if len(frame):
            yield table(name, *_ABOUT[name], frame)


def hardest_first(keys: pd.DataFrame) -> pd.DataFrame:
    """The keys table as a reader wants it: head space and the intact norm first, the hardest on top."""
    if not len(keys):
        return keys
    rank = keys["verdict"].map({"unselectable": 0, "duplicate": 1, "undecided": 2}).fillna(3)
    order = keys.assign(rank=rank, first=keys["variant"] != "intact", other=keys["space"] != "head")
    return order.sort_values(["other", "first", "rank", "attainable", "margin_upper"], kind="stable").drop(
        columns=["rank", "first", "other"]
    )


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """What was analyzed, in a few words each; what is not known is left out."""
    of = report.provenance
    model, prompts = of.get("model", {}), of.get("prompts", {})
    norms, heads = report.layernorms, report.heads
    if len(norms):
        kinds = Counter(f"{kind} ({state})" for kind, state in zip(norms["kind"], norms["state"], strict=True))
        yield "Norms", ", ".join(f"{n} {what}" for what, n in kinds.items())
    inside = heads[heads["space"] == "head"] if len(heads) else heads
    if len(inside):
        yield "Attention", f"{inside['layer'].nunique()} layers × {inside['head'].nunique()} heads"
    if prompts:
        yield "Prompts", f"{prompts.get('count')} ({prompts.get('source')}), {prompts.get('tokens')} tokens"
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
