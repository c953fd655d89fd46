"""Tables of a page: all rows as data that a script shows, sorts and downloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ln_probe.analyses.schema import Table as Declared
from ln_probe.analyses.text import disarmed, shortened, visible
from ln_probe.hooks.norm import INTACT
from ln_probe.page import packed

DATA_ROWS = 5_000  # rows that scripts can sort and download: about 0.2 MB compressed for the widest table
DIGITS = 6  # significant digits on the page; the parquet files have full precision
PLAIN = ("", "text", "true/false", "index", "count")  # units that need not be said


@dataclass(frozen=True)
class Table:
    """One table of a page.

    Attributes:
        name: its id and file name; title, about: text above the table.
        meanings: (column, unit and meaning) of each column that is declared.
        rows: of the frame; sent: rows in `data`.
        columns: how many.
        data: all columns, packed for the scripts.
    """

    name: str
    title: str
    about: str
    meanings: list[tuple[str, str]]
    rows: int
    sent: int
    columns: int
    data: str = field(repr=False)


def table(declared: Declared, frame: pd.DataFrame, *, loss: str = "nats/token", links: Sequence[str] = ()) -> Table:
    """Return a frame as a page shows it, without columns that have no value.

    Args:
        frame: rows of the declared table, with all its columns or some.
        loss: the unit of the loss.
        links: relative addresses for the cells of the first column, one per row.
    """
    columns = [str(c) for c in frame.columns if frame[c].notna().any()]
    text = [c for c in columns if not pd.api.types.is_numeric_dtype(frame[c])]
    rows = frame[columns].head(DATA_ROWS)
    data = {c: [_text(v, c) for v in rows[c]] if c in text else [_number(v) for v in rows[c].tolist()] for c in columns}
    content = {"columns": columns, "text": text, "rows": len(rows), "data": data, "links": links}
    meanings = [
        (name, meaning if unit in PLAIN else f"{meaning} ({loss if unit == 'loss' else unit})")
        for name, (unit, meaning) in declared.columns.items()
        if name in columns
    ]
    about = declared.title, declared.about, meanings, len(frame), len(rows), len(columns)
    return Table(declared.name, *about, packed(content))


def in_order(keys: pd.DataFrame) -> pd.DataFrame:
    """Return the keys at intact norms first, unselectable ones on top, then by attainable attention."""
    rank = keys["verdict"].map({"unselectable": 0, "duplicate": 1, "undecided": 2}).fillna(3)
    ranked = keys.assign(edited=keys["variant"] != INTACT.name, rank=rank)
    return ranked.sort_values(["edited", "rank", "attainable", "margin_upper"], kind="stable")[keys.columns]


def _text(value: Any, column: str) -> str:
    if value is None or value is pd.NA:
        return ""
    return shortened(visible(value)) if column == "token" else shortened(disarmed(str(value)), 400)


def _number(value: Any) -> float | int | None:
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else int(value)
