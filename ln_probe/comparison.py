"""Several reports side by side: the same tables with a column per model, and one row of summary for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ln_probe.analyses.checkpoint_names import step_named
from ln_probe.analyses.files import write_atomically
from ln_probe.report import Report

_ROW_OF = {
    "layernorms": ("site",),
    "heads": ("layer", "head", "space", "variant"),
    "keys": ("layer", "head", "space", "variant", "prompt", "position"),
    "causal": ("sites", "variant"),
    "unembedding": ("token_id",),
}
SUMMARY_COLUMNS = (
    "model", "step", "norms", "mean_share", "unselectable", "unselectable_no_scaling", "attainable",
    "attainable_no_scaling", "margin", "margin_no_scaling", "entropy_ratio", "entropy_ratio_no_scaling",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Reports side by side.

    Attributes:
        names: one per report, told apart; reports: the reports themselves.
        summary: a row per report (SUMMARY_COLUMNS): shares and medians over heads, intact and without scaling.
        layernorms, heads, keys, causal, unembedding: the reports' tables joined on what a row is about, with columns
            (measure, name), so that `heads["margin_median"]` has a column per model.
    """

    names: tuple[str, ...]
    reports: tuple[Report, ...]
    summary: pd.DataFrame
    layernorms: pd.DataFrame
    heads: pd.DataFrame
    keys: pd.DataFrame
    causal: pd.DataFrame
    unembedding: pd.DataFrame

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.names))})"

    def _repr_html_(self) -> str:
        from ln_probe.render.index import comparison_cell

        return comparison_cell(self)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page: summary and small multiples; the path written."""
        from ln_probe.render.index import IndexEntry, index_page

        path = Path(path)
        entries = [IndexEntry(name, report=report) for name, report in zip(self.names, self.reports, strict=True)]
        write_atomically(path, index_page(entries).encode())
        return path


def compare(reports: Sequence[Report], names: Sequence[str] | None = None) -> Comparison:
    """The same tables of several reports side by side.

    Args:
        reports: at least one.
        names: what to call them; None means their models' names, with the training step or a number where two are
            the same.

    Raises:
        ValueError: no reports, or names that are not one per report and all different.
        TypeError: something that is not a Report.
    """
    found = tuple(reports)
    if not found:
        raise ValueError("nothing to compare: give at least one report")
    for report in found:
        if not isinstance(report, Report):
            raise TypeError(f"compare takes reports, got {type(report).__name__}: load one with ln_probe.load_report")
    called = told_apart(found) if names is None else tuple(map(str, names))
    if len(called) != len(found) or len(set(called)) != len(called):
        raise ValueError(f"names must be {len(found)} different ones, one per report, got {list(called)}")
    summary = pd.DataFrame(
        [{"model": n, **overview(r)} for n, r in zip(called, found, strict=True)], columns=list(SUMMARY_COLUMNS)
    )
    return Comparison(called, found, summary, **{t: _side_by_side(t, called, found) for t in _ROW_OF})


def step_of(report: Report) -> int | None:
    """The training step a report is about: `provenance["model"]["step"]`, or the number in a revision `step1000`."""
    model = report.provenance.get("model", {})
    if isinstance(model.get("step"), int):
        return int(model["step"])
    return step_named(str(model.get("revision") or ""))


def told_apart(reports: Sequence[Report]) -> tuple[str, ...]:
    """A name per report: the model's, with its step or a number where several share it."""
    plain = [r.name for r in reports]
    steps = [step_of(r) for r in reports]
    found: list[str] = []
    for name, step in zip(plain, steps, strict=True):
        called = name if plain.count(name) == 1 or step is None else f"{name} step {step}"
        again = sum(f == called or f.startswith(f"{called} (") for f in found)
        found.append(called if not again else f"{called} ({again + 1})")
    return tuple(found)


def overview(report: Report) -> dict[str, float | int | None]:
    """One row of figures about a report: shares over all keys, medians over norms and heads."""
    norms, heads = report.layernorms, report.heads
    found: dict[str, float | int | None] = {"step": step_of(report), "norms": len(norms)}
    found["mean_share"] = float(norms["mean_share"].median()) if len(norms) else math.nan
    for variant, ending in (("intact", ""), ("no_scaling", "_no_scaling")):
        rows = heads[(heads["space"] == "head") & (heads["variant"] == variant)] if len(heads) else heads
        keys = rows["keys"].sum() if len(rows) else 0
        found[f"unselectable{ending}"] = rows["unselectable"].sum() / keys if keys else math.nan
        for name, column in (
            ("attainable", "attainable_median"), ("margin", "margin_median"), ("entropy_ratio", "entropy_ratio"),
        ):  # fmt: skip
            found[f"{name}{ending}"] = float(rows[column].median()) if len(rows) else math.nan
    return found


def _side_by_side(table: str, names: Sequence[str], reports: Sequence[Report]) -> pd.DataFrame:
    about = list(_ROW_OF[table])
    frames = {}
    for name, report in zip(names, reports, strict=True):
        frame: pd.DataFrame = getattr(report, table)
        if len(frame):
            frames[name] = frame.drop_duplicates(about).set_index(about)
    if not frames:
        return pd.DataFrame()
    joined = pd.concat(frames, axis=1, sort=False)
    measures = list(dict.fromkeys(joined.columns.get_level_values(1)))
    wide: pd.DataFrame = joined.swaplevel(axis=1)[measures]
    return wide
