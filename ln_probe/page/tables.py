"""Tables of a page: the first rows as HTML, all rows as data for sorting and downloading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses.schema import Column
from ln_probe.analyses.schema import Table as Declared
from ln_probe.analyses.text import disarmed, shortened, visible
from ln_probe.page import packed

STATIC_ROWS = 40  # rows shown without scripts
DATA_ROWS = 20_000  # rows that scripts can sort and download: about 0.4 MB compressed for the widest table
DIGITS = 6  # significant digits on the page; the parquet files have full precision
TOKEN_COLUMNS = ("token",)  # shown with white space made visible


@dataclass(frozen=True)
class Table:
    """One table of a page.

    Attributes:
        name: its id and file name; title, about: text above the table.
        columns: names; text: columns that hold no numbers in the frame; meanings: descriptions for tooltips.
        rows: the first rows, as text.
        total: rows of the frame; kept: rows in `data`.
        data: all columns, packed for the scripts; empty without interaction.
    """

    name: str
    title: str
    about: str
    columns: list[str]
    meanings: list[str]
    text: frozenset[str]
    rows: list[list[str]]
    total: int
    kept: int
    data: str = field(default="", repr=False)


def table(
    declared: Declared, frame: pd.DataFrame, *, links: Sequence[str] = (), interactive: bool = True, about: str = ""
) -> Table:
    """Return a frame as a page shows it, without columns that are declared as not shown.

    Args:
        frame: rows of the declared table, with all its columns or some.
        links: relative addresses for the cells of the first column, one per row.
        interactive: include the data (a notebook's cell has no scripts).
        about: text above the table; by default the description of a row.
    """
    known = {c.name: c for c in declared.columns}
    columns = [str(c) for c in frame.columns if str(c) not in known or known[str(c)].shown]
    meanings = [_meaning(known.get(c)) for c in columns]
    text = frozenset(c for c in columns if not pd.api.types.is_numeric_dtype(frame[c]))
    kept = frame[columns].head(DATA_ROWS)
    rows = [
        [_cell(value, column) for column, value in zip(columns, row, strict=True)]
        for row in kept.head(STATIC_ROWS).itertuples(index=False, name=None)
    ]
    data = ""
    if interactive:
        sent = {
            c: ["" if v is None else _cell(v, c) for v in kept[c]] if c in text else _numbers(kept[c]) for c in columns
        }
        data = packed({"columns": columns, "text": sorted(text), "rows": len(kept), "data": sent, "links": links})
    shown = about or declared.about
    return Table(declared.name, declared.title, shown, columns, meanings, text, rows, len(frame), len(kept), data)


def _meaning(column: Column | None) -> str:
    if column is None:
        return ""
    return f"{column.meaning} ({column.unit})" if column.unit else column.meaning


def figure_text(value: Any) -> str:
    """Return a number with four digits; a dash for a missing value."""
    if value is None or value is pd.NA or (isinstance(value, float | np.floating) and math.isnan(value)):
        return "–"
    if isinstance(value, float | np.floating):
        value = float(value)
        if value.is_integer() and abs(value) < 1e5:
            return str(int(value))
        return f"{value:.4g}" if 1e-4 <= abs(value) < 1e5 else f"{value:.3e}"
    return str(value)


def _cell(value: Any, column: str) -> str:
    if column in TOKEN_COLUMNS:
        return shortened(visible(value))
    return shortened(disarmed(value), 400) if isinstance(value, str) else figure_text(value)


def _numbers(column: pd.Series) -> list[float | int | None]:
    found: list[float | int | None] = []
    for value in column.tolist():
        if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
            found.append(None)
        elif isinstance(value, float):
            found.append(float(f"{value:.{DIGITS}g}"))
        else:
            found.append(int(value))
    return found
