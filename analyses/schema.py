"""What a table is: its columns with type, unit and meaning, and what a row is about; frames are checked against it.

A table is declared once. Empty frames, the page's titles and tooltips, `Report.describe`, the column reference and the
tests read the declaration, and no frame goes into a report that does not match it.

Example:
    >>> from ln_probe.analyses.schema import Column, Table, declare
    >>> lengths = declare("lengths", "Lengths", "A row per norm.", ("site",), '''
    ...     site (text): the norm
    ...     longest (float, L2 norm): length of the longest vector
    ... ''')
    >>> frame = lengths.check(lengths.frame([{"site": "blocks.0.ln1", "longest": 3.5}]))
    >>> isinstance(lengths, Table), isinstance(lengths.columns[0], Column)
    (True, True)
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import pandas as pd

Kind = Literal["int", "float", "text", "bool"]
_DTYPES: dict[str, Any] = {"int": np.int64, "float": np.float64, "text": object, "bool": np.bool_}


__all__ = ["Column", "Table", "TableError", "declare"]


class TableError(ValueError):
    """A frame does not match its table's declaration, or a declaration contradicts itself or another one."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: as in the frame.
        kind: "int" (float where a value is missing: NaN), "float", "text" or "bool" (pandas' "boolean" where a value is
            missing).
        meaning: a sentence; where it can be NaN, when.
        unit: of its numbers; empty for counts and text.
        shown: whether a page shows it.
    """

    name: str
    kind: Kind
    meaning: str
    unit: str = ""
    shown: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise TableError(
                f"column {self.name!r}: kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}"
            )
        if not self.name or not self.meaning:
            raise TableError(f"column {self.name!r} needs a name and a meaning")


def columns(*parts: str | Iterable[Column]) -> tuple[Column, ...]:
    """Return columns that text declares, and others between them.

    A line is `name (kind, unit): meaning`; lines that are indented more than the first go on with it. The unit
    "hidden" means that a page does not show the column.

    Raises:
        TableError: a line declares no column.
    """
    declared: list[Column] = []
    for part in parts:
        if not isinstance(part, str):
            declared += part
            continue
        lines: list[str] = []
        for line in textwrap.dedent(part).strip().splitlines():
            if line.startswith(" "):
                lines[-1] += f" {line.strip()}"
            else:
                lines.append(line)
        declared += map(_column, lines)
    return tuple(declared)


def _column(line: str) -> Column:
    head, _, meaning = line.partition("): ")
    name, _, about = head.partition(" (")
    kind, _, unit = about.partition(", ")
    if not about or not meaning:
        raise TableError(f"this declares no column: {line!r}")
    hidden = unit == "hidden"
    return Column(name, cast(Kind, kind), meaning, "" if hidden else unit, shown=not hidden)


@dataclass(frozen=True, repr=False)
class Table:
    """One table.

    Attributes:
        name: in `Report.tables`, and of its parquet file.
        title: above it on a page.
        about: one sentence on what a row is.
        key: the columns that tell rows apart: no two rows have the same values in all of them.
        columns: all of them, in order.
    """

    name: str
    title: str
    about: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    def __repr__(self) -> str:
        return f"Table({self.name!r}: {len(self.columns)} columns, a row per {', '.join(self.key)})"

    def __post_init__(self) -> None:
        if not self.name.isidentifier():  # it names a file and an element of a page
            raise TableError(f"a table's name must be letters, digits and _, got {self.name!r}")
        twice = sorted({n for n in self.names if self.names.count(n) > 1})
        if twice:
            raise TableError(f"table {self.name!r} declares the column {twice[0]!r} twice")
        if lost := [k for k in self.key if k not in self.names]:
            raise TableError(f"table {self.name!r}: {lost[0]!r} of its row key is not among its columns")

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.columns]

    def column(self, name: str) -> Column | None:
        return next((c for c in self.columns if c.name == name), None)

    def empty(self) -> pd.DataFrame:
        """No rows, the declared columns and their types."""
        return pd.DataFrame({c.name: pd.Series(dtype=_DTYPES[c.kind]) for c in self.columns})

    def frame(self, rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
        """Rows as a frame with the declared columns in their order; what a row lacks is unknown (NaN).

        Raises:
            TableError: a row has a value for which no column is declared.
        """
        declared = set(self.names)
        if extra := next((name for row in rows for name in row if name not in declared), None):
            raise TableError(f"table {self.name!r} has a value {extra!r} for which no column is declared")
        return pd.DataFrame(list(rows), columns=self.names) if rows else self.empty()

    def check(self, frame: object) -> pd.DataFrame:
        """`frame` itself, if it has these columns, of these types, and no two rows about the same thing.

        Raises:
            TableError: it does not (says which column, and what was found).
        """
        if not isinstance(frame, pd.DataFrame):
            raise TableError(f"table {self.name!r} is a {type(frame).__name__}, not a DataFrame")
        found = list(frame.columns)
        if missing := [n for n in self.names if n not in found]:
            raise TableError(
                f"table {self.name!r} lacks the column {missing[0]!r}: it has {', '.join(map(str, found))}"
            )
        if extra := [n for n in found if n not in self.names]:
            raise TableError(f"table {self.name!r} has a column {extra[0]!r} that is not declared")
        if found != self.names:
            raise TableError(f"table {self.name!r} has its columns in another order: {', '.join(found)}")
        if not len(frame):
            return self.empty()
        for column in self.columns:
            if not _is_kind(frame[column.name], column.kind):
                raise TableError(
                    f"{self.name}.{column.name} is declared as {column.kind}, and holds {frame[column.name].dtype}"
                )
        if self.key and frame.duplicated(list(self.key)).any():
            row = frame[frame.duplicated(list(self.key))].iloc[0]
            said = ", ".join(f"{k} {row[k]!r}" for k in self.key)
            raise TableError(f"table {self.name!r} has two rows about the same thing ({said})")
        return frame

    def complete(self, *frames: pd.DataFrame) -> pd.DataFrame:
        """Return frames that each hold the key and some of the columns, side by side.

        What no frame holds is NaN, or empty text. Where two frames hold a column, the first one's values stand.

        Raises:
            TableError: a frame lacks the key, or has a column that is not declared.
        """
        key = list(self.key)
        whole = pd.DataFrame(columns=key)
        for frame in frames:
            if extra := [str(name) for name in frame.columns if name not in self.names]:
                raise TableError(f"table {self.name!r} has a column {extra[0]!r} that is not declared")
            if missing := [name for name in key if name not in frame.columns]:
                raise TableError(f"table {self.name!r} lacks the column {missing[0]!r} of its row key")
            if not len(frame):
                continue
            if not len(whole):
                whole = frame
                continue
            one, two = whole.set_index(key), frame.set_index(key)
            added = two.loc[~two.index.isin(one.index), one.columns.intersection(two.columns)]
            rows = pd.concat([one, added]) if len(added) else one
            new = two[two.columns.difference(one.columns, sort=False)].reindex(rows.index)
            whole = pd.concat([rows, new], axis=1).reset_index()
        if not len(whole):
            return self.empty()
        whole = whole.copy()
        for column in self.columns:
            if column.name not in whole:
                whole[column.name] = "" if column.kind == "text" else np.nan
            elif column.kind == "text":
                whole[column.name] = whole[column.name].fillna("")
        return whole[self.names]

    def describe(self) -> pd.DataFrame:
        """A row per column: `column`, `dtype`, `unit`, `meaning`."""
        rows = [(c.name, c.kind, c.unit, c.meaning) for c in self.columns]
        return pd.DataFrame(rows, columns=["column", "dtype", "unit", "meaning"])

    def plain(self) -> dict[str, Any]:
        """As JSON has it: what a saved report keeps, so that it can be read where its probe is not installed."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Table:
        """What `plain` was made from.

        Raises:
            TableError: it is not a table's description.
        """
        try:
            columns = tuple(Column(**c) for c in plain["columns"])
            return cls(plain["name"], plain["title"], plain["about"], tuple(plain["key"]), columns)
        except (KeyError, TypeError, AttributeError) as error:
            raise TableError(f"this describes no table ({error!r})") from error

    @classmethod
    def of_frame(cls, name: str, frame: pd.DataFrame) -> Table:
        """A description of a frame of which nothing is known but what it holds."""
        kinds: dict[str, Kind] = {"i": "int", "u": "int", "f": "float", "b": "bool"}
        said = "not described: its probe is not known"
        columns = tuple(
            Column(str(c), kinds.get(getattr(frame[c].dtype, "kind", ""), "text"), said) for c in frame.columns
        )
        return cls(name, name, "A table that no known probe declares.", (), columns)


def declare(name: str, title: str, about: str, key: tuple[str, ...], *parts: str | Iterable[Column]) -> Table:
    """A table whose columns are declared as text (`columns`)."""
    return Table(name, title, about, key, columns(*parts))


def _is_kind(values: pd.Series, kind: str) -> bool:
    types = pd.api.types
    if kind == "int":  # missing values make a column of whole numbers one of floats
        return types.is_integer_dtype(values) or (types.is_float_dtype(values) and bool(values.isna().any()))
    if kind == "float":
        return types.is_float_dtype(values)
    if kind == "bool":
        return types.is_bool_dtype(values)
    return not (types.is_numeric_dtype(values) or types.is_bool_dtype(values))


def reference(tables: Iterable[Table]) -> str:
    """Return the column reference of these tables, as Markdown.

    Example:
        >>> from ln_probe.analyses.probes.columns import BUILT_IN
        >>> from ln_probe.analyses.schema import reference
        >>> print(reference(BUILT_IN))
    """
    said = []
    for table in tables:
        said += [f"## `{table.name}`", "", table.about, ""]
        if table.key:
            said += [f"Rows are identified by {', '.join(f'`{k}`' for k in table.key)}.", ""]
        said += ["| column | type | unit | meaning |", "|---|---|---|---|"]
        said += [
            f"| `{c.name}` | {c.kind} | {c.unit} | {c.meaning.replace('|', chr(92) + '|')} |" for c in table.columns
        ]
        said.append("")
    return "\n".join(said)
