"""User's hooks at a norm's hook points under every edit, of every model class and architecture: `tests/compose.py`.

Prints how many cases are equal to the model edited by hand, refused, or lost; `--out FILE.csv` writes a row per model
and edit (other rows of the file stay). Exit status 1 if a hook is lost. About two minutes a model.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import typer
from compose import every_outcome, hooked, lab, subjects, tolerance
from harness import keep

ARCHITECTURES = ("gpt2", "neox", "llama", "opt", "neo", "gemma", "qwen3", "gemma2", "bloom", "gptj")
OURS = {"hooked": hooked, "lab": lab, "lab-hooked": partial(lab, "hooked")}
COLUMNS = ("transformer_lens", "model_class", "architecture", "edit", "equal", "refused", "lost", "which")


def main(
    architectures: Annotated[
        list[str] | None, typer.Argument(help='of tests/architectures.py, "hooked", "lab" or "lab-hooked"; none: all')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the table to this file, after each model")] = None,
) -> None:
    lost = False
    for name in architectures or (*OURS, *ARCHITECTURES):
        model = OURS[name]() if name in OURS else dict(subjects(name))["bridge"]
        if model is None:
            continue
        counts: dict[str, Counter[str]] = {}
        which: dict[str, list[str]] = {}
        for case, outcome in every_outcome(model, tolerance(name)):
            kind = outcome.split(":")[0]
            counts.setdefault(case[0], Counter())[kind] += 1
            if kind != "equal":
                which.setdefault(case[0], []).append(f"{' '.join(case[1:])}: {outcome}")
        of = version("transformer-lens"), type(model).__name__, {"hooked": "gpt2", "lab-hooked": "lab"}.get(name, name)
        rows = []
        for edit, count in counts.items():
            numbers = [str(count[kind]) for kind in ("equal", "refused", "lost")]
            values = (*of, edit, *numbers, "; ".join(which.get(edit, ())))
            rows.append(values)
            print(", ".join(values[:7]), *which.get(edit, ()), sep="\n    ", flush=True)
            lost |= count["lost"] > 0
        keep(out, COLUMNS, rows, about=3)
    raise typer.Exit(int(lost))


if __name__ == "__main__":
    typer.run(main)
