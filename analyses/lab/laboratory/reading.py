"""What the page of the laboratory reads: kept tables, kept conclusions, prose; and how it prints a figure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.intervals import SIGNIFICANT
from ln_probe.analyses.lab.keeping import table_at
from ln_probe.analyses.lab.published import folder

Keys = dict[str, Any]


def kept_table(experiment: str, name: str = "summary") -> pd.DataFrame:
    return table_at(folder(experiment), name)


def kept_about(experiment: str) -> Keys:
    found: Keys = json.loads((folder(experiment) / "results.json").read_text())
    return found


def sentences(experiment: str, *containing: str) -> Iterator[str]:
    """The kept conclusions that hold one of these strings (all of them without any), as a list."""
    for sentence in kept_about(experiment)["conclusions"]:
        if not containing or any(part in sentence for part in containing):
            yield f"- {sentence}"
    yield ""


@cache
def _sections() -> dict[str, str]:
    text = Path(__file__).with_name("prose.md").read_text()
    parts = re.split(r"^\[\[(.+)\]\]\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def prose(section: str) -> Iterator[str]:
    """A section of the prose, line by line."""
    yield from _sections()[section].removesuffix("\n").split("\n")


def rows_where(table: pd.DataFrame, **where: object) -> pd.DataFrame:
    """The rows where all these columns have these values."""
    for column, value in where.items():
        table = table[table[column] == value]
    return table


def only_row(table: pd.DataFrame, **where: object) -> pd.Series:
    """The only row where all these columns have these values.

    Raises:
        LookupError: there is none, or several.
    """
    table = rows_where(table, **where)
    if len(table) != 1:
        raise LookupError(f"{len(table)} rows where {where}")
    return table.iloc[0]


def with_interval(row: pd.Series, scale: float = 1.0, digits: int = 0, sign: bool = False) -> str:
    """Center and interval of a row, "93 [90, 95]"."""
    plus = "+" if sign else ""
    numbers = [f"{scale * float(row[c]):{plus}.{digits}f}" for c in ("mean", "ci_low", "ci_high")]
    return numbers[0] if np.isnan(row["ci_low"]) else f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def change(row: pd.Series, scale: float = 1.0, digits: int = 0) -> str:
    """A difference with its interval, bold where Holm's p lets it be told, and that p."""
    said = with_interval(row, scale, digits, sign=True)
    told = float(row["p_holm"]) < SIGNIFICANT
    return f"{f'**{said}**' if told else said} (Holm {float(row['p_holm']):.2g})"


def fewer_seeds(row: pd.Series, usual: int) -> str:
    """How many seeds, where they are not as many as elsewhere."""
    return "" if row["seeds"] == usual else f" ({int(row['seeds'])} seeds)"


def short_power(x: float) -> str:
    return "–" if np.isnan(x) else f"{x:.2g}" if x >= 0.01 else f"{x:.0e}".replace("e-0", "e-")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
