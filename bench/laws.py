"""Which laws hold, of which models: `tests/laws.py` over every architecture and every model class that can hold it.

Prints a table per law: how many models were tried, of how many the law held, how many were refused by name and how many
break it, with their names. `--out FILE.csv` writes it; rows of another TransformerLens version stay in the file. Exit
status 1 if a law is broken. About two minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import warnings
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import transformers
from laws import LAWS, Refused, cases, subject

COLUMNS = ("transformer_lens", "law", "tried", "held", "refused", "broken", "names_refused", "names_broken")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", help="of tests/architectures.py; none: all")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--verbose", action="store_true", help="print every refusal, and how a law was kept")
    asked = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    results: dict[tuple[str, str], list[str]] = defaultdict(list)
    for architecture, model_class in cases():
        if asked.architectures and architecture not in asked.architectures:
            continue
        for law, check in LAWS.items():
            name = f"{architecture} ({model_class})"
            try:
                result, detail = "held", check(subject(architecture), model_class)
            except Refused as refusal:
                result, detail = "refused", str(refusal)
            except Exception as error:  # any exception means that the law does not hold
                result, detail = "broken", f"{type(error).__name__}: {error}"
            results[law, result].append(name)
            if asked.verbose or result == "broken":
                print(f"{law}, {name}: {result}: {detail}", flush=True)
    rows = [row_of(law, results) for law in LAWS]
    for row in rows:
        print(", ".join(f"{column} {row[column]}" for column in COLUMNS[1:6]))
    if asked.out:
        write(asked.out, rows)
    return int(any(int(row["broken"]) for row in rows))


def row_of(law: str, results: dict[tuple[str, str], list[str]]) -> dict[str, str]:
    """The table's row of one law."""
    names = {result: results[law, result] for result in ("held", "refused", "broken")}
    counts = {result: str(len(those)) for result, those in names.items()}
    lists = {f"names_{result}": "; ".join(names[result]) for result in ("refused", "broken")}
    tried = str(sum(map(len, names.values())))
    return {"transformer_lens": version("transformer-lens"), "law": law, "tried": tried, **counts, **lists}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write the rows, and keep those that the file has of another version."""
    kept: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [r for r in csv.DictReader(file) if r["transformer_lens"] != rows[0]["transformer_lens"]]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *rows], key=lambda row: row["transformer_lens"]))


if __name__ == "__main__":
    sys.exit(main())
