"""Tables and figures of the site, read from committed measurements while the site is built.

    ```{measured} bench/results/headline.csv
    :where: loss > 0
    model = `{model}`
    loss increase (95 % CI) = {difference:+.4f} [{low:.4f}, {high:.4f}]
    ```

makes a table with a column per line (its title and a format string, in which names have no dots) and a row per row of
the file. Several files, by a pattern, are put one after the other, with the column `case`: the folder of each. The
directive `claims` shows what `analyses/lab/published/sources.toml` says of one source, its figures read from the kept
tables.
"""

from __future__ import annotations

import re
import tomllib
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


STATUS, ORDERING = ("done", "scaled down", "not done"), ("yes", "partly", "no", "-")
FIGURE, INTERVAL = re.compile(r"[\d.]+"), re.compile(r"\[([-+.\de]+), ([-+.\de]+)\]")
CLAIMS = ROOT / "analyses" / "lab" / "published" / "sources.toml"


def claims(source: str) -> list[dict[str, str]]:
    """The rows of a source's claims, `here` filled in from its kept table; ValueError if something is missing."""
    rows, sources = [], tomllib.loads(CLAIMS.read_text(encoding="utf-8"))
    for claim in sources[source]:
        status = claim.get("status", "done")
        scaled = ["how", "published", "here", "refutable"]
        needed = {"done": ["published", "here"], "not done": ["how"]}.get(status, scaled)
        if status not in STATUS or not all(claim.get(k) for k in needed) or claim.get("ordering", "-") not in ORDERING:
            raise ValueError(f"{source}, {claim['claim']!r}: status, ordering or one of {', '.join(needed)} is wrong")
        if "table" in claim:
            found = pd.read_csv(CLAIMS.parent / f"{claim['table']}.csv", keep_default_na=False, na_values=[""])
            found = found.query(claim["where"])
            if len(found) != 1:
                raise ValueError(f"{source}, {claim['claim']!r}: {len(found)} rows of {claim['table']}, not one")
            claim = claim | {"here": claim["here"].format(**found.iloc[0])}
        defaults = {"status": status, "version": sources["version"][source], "published": "-", "here": "-", "how": ""}
        row = defaults | {"ordering": "-" if status == "not done" else "yes", "refutable": ""} | claim
        rows.append(row | {"agrees": agreement(row["ordering"], row["published"], row["here"])})
    return rows


def agreement(ordering: str, published: str, here: str) -> str:
    """Whether the published ordering holds; partly, too, if `published` begins with a figure outside our interval."""
    figure, interval = FIGURE.match(published), INTERVAL.search(here)
    if ordering != "yes" or figure is None or interval is None:
        return ordering
    low, high = map(float, interval.groups())
    return "yes" if low <= float(figure[0]) <= high else "partly"


def claims_table(source: str) -> str:
    """`claims` as a Markdown table."""
    lines = [
        "| version, place | claim | status | published | here (95 % CI) | agrees | scale, reason, remark |",
        "|---" * 7 + "|",
    ]
    for row in claims(source):
        how = row["how"] + (f". Could have refuted: {row['refutable']}" if row["refutable"] else "")
        columns = ("claim", "status", "published", "here", "agrees")
        shown = [f"{row['version']}, {row['place']}", *(row[k] for k in columns)]
        cells = [*("–" if cell == "-" else cell for cell in shown), how]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
