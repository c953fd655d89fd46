"""Several reports side by side: the same tables with a column per model, and one row of summary for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ln_probe.analyses.machinery.files import write_text
from ln_probe.analyses.probes.columns import SUMMARY
from ln_probe.analyses.schema import Table
from ln_probe.reporting.comparable import apart
from ln_probe.reporting.overview import overview, told_apart
from ln_probe.reporting.paired import paired
from ln_probe.reporting.report import Report


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Reports side by side.

    Attributes:
        names: one per report, told apart; reports: the reports themselves.
        summary: a row per report (`ln_probe.analyses.probes.columns.SUMMARY`): shares and medians over heads, intact
            and without scaling.
        tables: the reports' tables joined on what a row is about, with columns (measure, name), so that
            `heads["margin_median"]` has a column per model; `layernorms`, `heads`, … are short for them.
        paired: how much more or less the loss changes in each report than in the first one, prompt by prompt
            (`ln_probe.analyses.probes.columns.PAIRED`); only reports on the same tokens and layers are paired.
        notes: what else than the model differs between the first report and the others (prompts, layers, version).
    """

    names: tuple[str, ...]
    reports: tuple[Report, ...]
    summary: pd.DataFrame
    tables: Mapping[str, pd.DataFrame]
    paired: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def layernorms(self) -> pd.DataFrame:
        return self.tables["layernorms"]

    @property
    def heads(self) -> pd.DataFrame:
        return self.tables["heads"]

    @property
    def keys(self) -> pd.DataFrame:
        return self.tables["keys"]

    @property
    def causal(self) -> pd.DataFrame:
        return self.tables["causal"]

    @property
    def unembedding(self) -> pd.DataFrame:
        return self.tables["unembedding"]

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.names))})"

    def _repr_html_(self) -> str:
        from ln_probe.render.index import comparison_cell

        return comparison_cell(self.names, self.reports, self.summary, self.notes)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page: summary and small multiples; the path written."""
        from ln_probe.render.index import IndexEntry, index_page

        path = Path(path)
        entries = [IndexEntry(name, report=report) for name, report in zip(self.names, self.reports, strict=True)]
        write_text(path, index_page(entries))
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
        [{"model": n, **overview(r)} for n, r in zip(called, found, strict=True)], columns=SUMMARY.names
    )
    tables = {name: table for report in found for name, table in report.declared.items() if table.key}
    joined = {n: _side_by_side(t, called, found) for n, t in tables.items()}
    return Comparison(called, found, summary, joined, paired(called, found), apart(called, found))


def _side_by_side(table: Table, names: Sequence[str], reports: Sequence[Report]) -> pd.DataFrame:
    about = list(table.key)
    frames = {}
    for name, report in zip(names, reports, strict=True):
        frame = report.tables.get(table.name)
        if frame is not None and len(frame):
            frames[name] = frame.drop_duplicates(about).set_index(about)
    if not frames:
        return pd.DataFrame()
    joined = pd.concat(frames, axis=1, sort=False)
    measures = list(dict.fromkeys(joined.columns.get_level_values(1)))
    wide: pd.DataFrame = joined.swaplevel(axis=1)[measures]
    return wide
