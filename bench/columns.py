"""Write `docs/columns.md`: what the columns of a report's tables mean.

python bench/columns.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ln_probe.analyses.probes.tables import SUMMARY, TABLES
from ln_probe.analyses.schema import Table

PAGE = Path(__file__).parents[1] / "docs" / "columns.md"


def document(tables: Iterable[Table] = (*TABLES, SUMMARY)) -> str:
    """Return the column reference of these tables, as Markdown."""
    lines = ["# Columns", "", "Written by `python bench/columns.py`.", ""]
    for table in tables:
        keys = ", ".join(f"`{k}`" for k in table.key)
        lines += [f"## `{table.name}`", f"{table.about} Rows are identified by {keys}.", ""]
        lines += ["| column | unit | meaning |", "|---|---|---|"]
        for name, (unit, meaning) in table.columns.items():
            lines.append(f"| `{name}` | {unit} | {meaning.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(document())
