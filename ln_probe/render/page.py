"""HTML: a report as a page, as a notebook cell, and the index of several. Nothing is fetched, everything is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from ln_probe.render import figures
from ln_probe.render.text import disarmed, visible

if TYPE_CHECKING:
    from ln_probe.report import Report

TABLE_ROWS = 400  # rows of a table shown in the page; the parquet files hold all, and the page says so
CELL_FINDINGS = 6

_PICTURES = (
    ("margins", "Margins of keys", figures.margins_over_depth, "heads", "margin_median"),
    (
        "unselectable",
        "Keys no query can select",
        figures.unselectable_by_head,
        "heads",
        "unselectable_fraction",
    ),
    (
        "norms",
        "Lengths before and after each norm",
        figures.norms_over_depth,
        "layernorms",
        "norm_before_mean",
    ),
    ("share", "What projection removes", figures.mean_share_over_depth, "layernorms", "mean_share"),
    (
        "angle",
        "Queries and the uniform direction",
        figures.uniform_angle_by_layer,
        "heads",
        "uniform_angle_deg",
    ),
    ("entropy", "How uniform attention is", figures.entropy_by_layer, "heads", "entropy_ratio"),
)


@dataclass(frozen=True)
class IndexEntry:
    """A model in an index: its report and folder, or why it failed."""

    name: str
    href: str = ""
    report: Report | None = None
    error: str = ""


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        value = float(value)
        if math.isnan(value):
            return "–"
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"
    if value is None:
        return "–"
    return str(value)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ln_probe.render", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else disarmed(value),
    )
    environment.filters |= {"cell": _cell, "visible": visible}
    return environment


def _table(frame: pd.DataFrame) -> dict[str, Any]:
    shown = frame.head(TABLE_ROWS)
    kept = [c for c in shown.columns if c not in ("evidence",)]
    return {
        "columns": kept,
        "rows": shown[kept].to_dict("records"),
        "cut": len(frame) - len(shown),
        "total": len(frame),
    }


def _pictures(report: Report) -> list[dict[str, Any]]:
    found = []
    for name, title, draw, table, column in _PICTURES:
        frame: pd.DataFrame = getattr(report, table)
        if column in frame and not frame[column].isna().all():
            figure: Figure = draw(report)
            caption = (draw.__doc__ or "").strip().splitlines()[0]
            found.append({"id": name, "title": title, "caption": caption, "svg": Markup(figures.svg(figure, name))})
    return found


def _hardest(report: Report) -> pd.DataFrame:
    """The keys table as a reader wants it: head space, hardest first under the intact norm."""
    keys = report.keys
    if not len(keys):
        return keys
    rank = keys["verdict"].map({"unselectable": 0, "duplicate": 1, "undecided": 2}).fillna(3)
    order = keys.assign(rank=rank, first=keys["variant"] != "intact", other=keys["space"] != "head")
    return order.sort_values(["other", "first", "rank", "attainable", "margin_upper"], kind="stable").drop(
        columns=["rank", "first", "other"]
    )


def report_page(report: Report) -> str:
    """The whole report as one HTML page that opens offline."""
    tables = {
        "layernorms": _table(report.layernorms),
        "heads": _table(report.heads),
        "keys": _table(_hardest(report)),
        "causal": _table(report.causal),
        "unembedding": _table(report.unembedding),
    }
    return (
        _environment()
        .get_template("report.html")
        .render(
            name=report.name,
            findings=report.findings(),
            notes=report.notes,
            pictures=_pictures(report),
            tables={k: v for k, v in tables.items() if v["total"]},
            provenance=_flat(report.provenance),
        )
    )


def notebook_cell(report: Report) -> str:
    """A small summary: no scripts, no pictures beyond one, some tens of kilobytes."""
    pictures = _pictures(report)[:1]
    by_variant = report.heads[report.heads["space"] == "head"] if len(report.heads) else report.heads
    summary = pd.DataFrame()
    if len(by_variant):
        numbers = ["unselectable_fraction", "margin_median", "margin_p05", "entropy_ratio", "score_spread"]
        summary = by_variant.groupby("variant", sort=False)[numbers].median().reset_index()
    return (
        _environment()
        .get_template("cell.html")
        .render(
            name=report.name,
            findings=report.findings()[:CELL_FINDINGS],
            notes=report.notes,
            pictures=pictures,
            summary=_table(summary),
        )
    )


def index_page(entries: Sequence[IndexEntry]) -> str:
    """The index of several reports: one row a model, failures named."""
    rows = []
    for entry in entries:
        rows.append(
            {"name": entry.name, "href": entry.href, "error": entry.error}
            | (_overview(entry.report) if entry.report else {})
        )
    return _environment().get_template("index.html").render(rows=rows, columns=_OVERVIEW)


_OVERVIEW = (
    ("norms", "norms"),
    ("share", "median mean share"),
    ("unselectable", "unselectable, intact"),
    ("unselectable_frozen", "… without scaling"),
    ("margin", "median margin, nats"),
    ("margin_frozen", "… without scaling"),
    ("entropy", "median entropy ratio"),
)


def _overview(report: Report) -> dict[str, Any]:
    norms, heads = report.layernorms, report.heads
    found: dict[str, Any] = {"norms": len(norms), "first": next(iter(report.findings()), "")}
    found["share"] = float(norms["mean_share"].median()) if len(norms) else math.nan
    for variant, ending in (("intact", ""), ("no_scaling", "_frozen")):
        rows = heads[(heads["space"] == "head") & (heads["variant"] == variant)] if len(heads) else heads
        found[f"unselectable{ending}"] = (
            rows["unselectable"].sum() / rows["keys"].sum() if len(rows) and rows["keys"].sum() else math.nan
        )
        found[f"margin{ending}"] = float(rows["margin_median"].median()) if len(rows) else math.nan
        found[f"entropy{ending}"] = float(rows["entropy_ratio"].median()) if len(rows) else math.nan
    return found


def _flat(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(values, dict) or hasattr(values, "items"):
        return [row for key, value in values.items() for row in _flat(value, f"{prefix}{key} · ")]
    if isinstance(values, list | tuple):
        values = ", ".join(map(str, values))
    return [(prefix.removesuffix(" · "), _cell(values))]
