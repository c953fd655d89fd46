"""Tables and figures of the site, read from committed measurements while the site is built.

    ```{measured} bench/results/headline.csv
    :where: loss > 0
    model = `{model}`
    loss increase (95 % CI) = {difference:+.4f} [{low:.4f}, {high:.4f}]
    ```

makes a table with a column per line (its title and a format string, in which names have no dots) and a row per row of
the file. Several files, by a pattern, are put one after the other, with the column `case`: the folder of each. In the
text `{{ make_report_warm }}` is the figure of that name in `bench/results/single.csv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]


def table(files: str, columns: Sequence[str], where: str = "") -> str:
    """A Markdown table of the rows of some committed CSV files.

    Args:
        files: a path or pattern below the repository.
        columns: a `title = format string` each.
        where: which rows, as `pandas.DataFrame.query` reads it; empty: all.

    Raises:
        ValueError: no file or no row; a line without a title.
    """
    paths = sorted(ROOT.glob(files))
    frames = [pd.read_csv(path, keep_default_na=False, na_values=[""]) for path in paths]
    if "*" in files:
        frames = [frame.assign(case=path.parent.name) for frame, path in zip(frames, paths, strict=True)]
    rows = pd.concat(frames).rename(columns=lambda name: name.replace(".", "_")) if frames else pd.DataFrame()
    rows = rows.query(where) if where else rows
    pairs = [line.partition(" = ")[::2] for line in columns if line.strip()]
    if rows.empty or not pairs or not all(template for _, template in pairs):
        raise ValueError(f"{files}: no row where {where!r}, or a column that is not `title = format string`")
    head = [title.strip() for title, _ in pairs]
    cells = [[_cell(template.strip(), row) for _, template in pairs] for row in rows.to_dict("records")]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))


def _cell(template: str, row: dict[Any, Any]) -> str:
    text = template.format(**row)
    return "–" if "nan" in text else text


def single() -> dict[str, str]:
    """Single figures by name, with underscores."""
    rows = pd.read_csv(ROOT / "bench" / "results" / "single.csv", dtype=str)
    return dict(zip(rows["name"].str.replace("-", "_"), rows["value"], strict=True))
