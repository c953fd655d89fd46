"""What a table is: its columns with unit and meaning, and what a row is; frames are checked against it.

Example:
    >>> from ln_probe.analyses.schema import Table
    >>> lengths = Table("lengths", "Lengths", "A row per norm.", ("site",), {
    ...     "site": ("text", "the norm"),
    ...     "longest": ("L2 norm", "length of the longest vector"),
    ... })
    >>> frame = lengths.check(lengths.frame([{"site": "blocks.0.ln1", "longest": 3.5}]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

# Units that decide a column's type; numbers of any other unit are float64.
TEXT, TRUTH = "text", "true/false"
_DTYPES: dict[str, Any] = {TEXT: object, TRUTH: "boolean", "index": np.int64, "count": np.int64}

__all__ = ["Table", "TableError"]


class TableError(ValueError):
    """A frame does not match its table's declaration, or a declaration contradicts itself or another one."""


@dataclass(frozen=True, repr=False)
class Table:
    """One table.

    Attributes:
        name: in `Report.tables`, and of its parquet file.
        title: above it on a page.
        about: one sentence on what a row is.
        key: the columns that identify a row.
        columns: unit and meaning of each column, in order. Units "text", "true/false", "index" and "count" (whole
            numbers) decide the type; "loss" is the unit of the report's loss.
    """

    name: str
    title: str
    about: str
    key: tuple[str, ...]
    columns: Mapping[str, tuple[str, str]]

    def __repr__(self) -> str:
        return f"Table({self.name!r}: {len(self.columns)} columns, a row per {', '.join(self.key)})"

    def __post_init__(self) -> None:
        if not self.name.isidentifier():  # it names a file and an element of a page
            raise TableError(f"a table's name must be letters, digits and _, got {self.name!r}")
        for column, about in self.columns.items():
            if len(about) != 2 or not about[1]:
                raise TableError(f"table {self.name!r}: column {column!r} needs (unit, meaning), got {about!r}")

    @property
    def names(self) -> list[str]:
        """The names of its columns."""
        return list(self.columns)

    def empty(self) -> pd.DataFrame:
        """Return a frame of no rows with the declared columns and their types."""
        units = {name: unit for name, (unit, _) in self.columns.items()}
        return pd.DataFrame({name: pd.Series(dtype=_DTYPES.get(unit, np.float64)) for name, unit in units.items()})

    def frame(self, rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
        """Return rows as a frame with the declared columns; what a row lacks is NaN.

        Raises:
            TableError: a row has a value for which no column is declared.
        """
        if extra := [name for row in rows for name in row if name not in self.columns]:
            raise TableError(f"table {self.name!r} has a value {extra[0]!r} for which no column is declared")
        return pd.DataFrame(list(rows), columns=self.names) if rows else self.empty()

    def check(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return `frame` itself if it has these columns, of these types, and no two rows with one key.

        Raises:
            TableError: it does not; names the column.
        """
        if list(frame.columns) != self.names:
            wrong = next(iter({*map(str, frame.columns)} ^ {*self.names}), "their order")
            raise TableError(f"table {self.name!r} must have the columns {', '.join(self.names)}: see {wrong!r}")
        if not len(frame):
            return self.empty()
        for name, (unit, _) in self.columns.items():
            if pd.api.types.is_numeric_dtype(frame[name]) == (unit == TEXT):
                raise TableError(f"{self.name}.{name} has the unit {unit!r}, and holds {frame[name].dtype}")
        if self.key and frame.duplicated(list(self.key)).any():
            row = frame[frame.duplicated(list(self.key))].iloc[0]
            raise TableError(f"table {self.name!r} has two rows of {', '.join(f'{k} {row[k]!r}' for k in self.key)}")
        return frame

    def merged(self, frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
        """Return frames that each hold the key and some of the columns side by side; what no frame holds is NaN.

        Raises:
            TableError: a frame has a column that is not declared.
        """
        if wrong := [str(name) for frame in frames for name in frame.columns if name not in self.columns]:
            raise TableError(f"table {self.name!r}: the column {wrong[0]!r} is not declared")
        filled = [frame.set_index(list(self.key)) for frame in frames if len(frame)] if self.key else list(frames)
        if not filled:
            return self.empty()
        whole = filled[0]
        for frame in filled[1:]:
            whole = whole.combine_first(frame).reindex(whole.index.union(frame.index, sort=False))
        whole = whole.reset_index() if self.key else whole
        return whole.reindex(columns=self.names)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Table:
        """Return the declaration from the dictionary of its fields, as JSON has it."""
        columns = {str(name): (str(unit), str(meaning)) for name, (unit, meaning) in plain["columns"].items()}
        return cls(plain["name"], plain["title"], plain["about"], tuple(plain["key"]), columns)
