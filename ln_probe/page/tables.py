"""Tables of a page: all rows as data that a script shows, sorts and downloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ln_probe.analyses.schema import Table as Declared
from ln_probe.analyses.text import disarmed, percent, shortened, visible
from ln_probe.hooks.norm import INTACT
from ln_probe.page import packed

DATA_ROWS = 5_000  # rows that scripts can sort and download: about 0.2 MB compressed for the widest table
DIGITS = 6  # significant digits on the page; the parquet files have full precision
PLAIN = ("", "text", "true/false", "index", "count")  # units that need not be said
FIRST = 8  # columns shown before a reader asks for all
# The columns of a table that are shown first, where these are not the first ones.
CHOSEN = {
    "layernorms": ("site", "reads", "projected_share", "angle_to_ones_deg", "input_norm", "sigma_mean", "sigma_cv"),
    "heads": ("layer", "head", "variant", "unselectable", "attainable_median", "margin_median", "entropy_ratio"),
    "keys": ("layer", "head", "variant", "token", "position", "verdict", "margin_lower", "attainable"),
    "causal": ("sites", "variant", "loss", "delta_loss", "delta_loss_low", "delta_loss_high", "p", "n"),
    "causal_prompts": ("prompt", "stratum", "sites", "variant", "loss", "delta_loss", "shift", "n"),
    "head_effects": ("layer", "head", "delta_loss", "delta_loss_low", "delta_loss_high", "p", "estimate", "n"),
    "sinks": ("prompt", "position", "token", "kind", "length_ratio", "received", "uniform", "received_no_scaling"),
    "sink_heads": ("layer", "head", "sink_rate", "first_attention", "first_attention_no_scaling", "n"),
    "comparison": (
        *("model", "step", "loss", "unselectable", "unselectable_no_scaling"),
        *("entropy_ratio", "first_attention", "sink_rate"),
    ),
}


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
    first = [c for c in CHOSEN.get(declared.name, ()) if c in columns] or columns[:FIRST]
    content = {"columns": columns, "text": text, "rows": len(rows), "data": data, "links": links, "first": first}
    meanings = [
        (name, meaning if unit in PLAIN else f"{meaning} ({loss if unit == 'loss' else unit})")
        for name, (unit, meaning) in declared.columns.items()
        if name in columns
    ]
    about = declared.title, declared.about, meanings
    return Table(declared.name, *about, len(frame), len(rows), len(columns), packed(content))


def in_order(keys: pd.DataFrame) -> pd.DataFrame:
    """Return the keys at intact norms first, unselectable ones on top, then by attainable attention."""
    rank = keys["verdict"].map({"unselectable": 0, "duplicate": 1, "undecided": 2}).fillna(3)
    order = keys.assign(edited=keys["variant"] != INTACT.name, rank=rank)
    order = order.sort_values(["edited", "rank", "attainable", "margin_upper"], kind="stable")
    return order[keys.columns]


def hardest_keys(keys: pd.DataFrame, count: int = 8) -> list[tuple[str, ...]]:
    """Return the keys that are hardest to select at the intact norms, as text."""
    return [
        (
            f"L{row['layer']}H{row['head']}",
            shortened(visible(row["token"]), 24),
            f"{row['prompt']}, {row['position']}",
            disarmed(str(row["verdict"])),
            "–" if math.isnan(row["attainable"]) else percent(row["attainable"]),
            percent(1 / row["n"]) if row["n"] else "–",
        )
        for row in in_order(keys[keys["variant"] == INTACT.name]).head(count).to_dict("records")
    ]


def _text(value: Any, column: str) -> str:
    if value is None or value is pd.NA:
        return ""
    return shortened(visible(value)) if column == "token" else shortened(disarmed(str(value)), 400)


def _number(value: Any) -> float | int | None:
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else int(value)
