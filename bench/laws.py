"""Which laws hold, of which models: `tests/laws.py` over every architecture and every model class that can hold it.

Prints a table per law: how many models were tried, of how many the law held, how many were refused by name and how many
break it, with their names. `--out FILE.csv` writes it; rows of another TransformerLens version stay in the file. Exit
status 1 if a law is broken. About two minutes on one core.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import transformers
import typer
from harness import keep
from laws import LAWS, Refused, cases, subject

COLUMNS = ("transformer_lens", "law", "tried", "held", "refused", "broken", "names_refused", "names_broken")


def main(
    architectures: Annotated[list[str] | None, typer.Argument(help="of tests/architectures.py; none: all")] = None,
    out: Annotated[Path | None, typer.Option(help="write the table to this file")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="print every refusal, and how a law was kept")] = False,
) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    results: dict[tuple[str, str], list[str]] = defaultdict(list)
    for architecture, model_class in cases():
        if architectures and architecture not in architectures:
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
            if verbose or result == "broken":
                print(f"{law}, {name}: {result}: {detail}", flush=True)
    rows = [row_of(law, results) for law in LAWS]
    for row in rows:
        print(", ".join(f"{column} {cell}" for column, cell in zip(COLUMNS[1:6], row[1:6], strict=True)))
    keep(out, COLUMNS, rows, order=str)
    raise typer.Exit(int(any(result == "broken" for _, result in results)))


def row_of(law: str, results: dict[tuple[str, str], list[str]]) -> tuple[object, ...]:
    """The table's row of one law."""
    names = [results.get((law, result), []) for result in ("held", "refused", "broken")]
    counts = [len(those) for those in names]
    return version("transformer-lens"), law, sum(counts), *counts, *("; ".join(those) for those in names[1:])


if __name__ == "__main__":
    typer.run(main)
