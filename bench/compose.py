"""User's hooks at a norm's hook points under every edit, of every model class and architecture: `tests/compose.py`.

Prints how many cases are equal to the model edited by hand, allowed (the one difference that is documented), refused or
lost, by edit; `--out FILE.csv` writes a row per model (other rows of the file stay). Exit status 1 if a hook is lost.
About two minutes a model.
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
from compose import bridge, every_outcome, hooked, lab, tolerance
from harness import keep

ARCHITECTURES = ("gpt2", "neox", "llama", "opt", "neo", "gemma", "qwen3", "gemma2", "bloom", "gptj", "bert")
OURS = {"hooked": hooked, "lab": lab, "lab-hooked": partial(lab, "hooked")}
OUTCOMES = ("equal", "allowed", "refused", "lost")


def main(
    architectures: Annotated[
        list[str] | None, typer.Argument(help='of tests/architectures.py, "hooked", "lab" or "lab-hooked"; none: all')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the table to this file, after each model")] = None,
) -> None:
    lost = 0
    for name in architectures or (*OURS, *ARCHITECTURES):
        model = OURS[name]() if name in OURS else bridge(name)
        if model is None:
            continue
        by_edit: dict[str, Counter[str]] = {}
        for case, outcome in every_outcome(model, tolerance(name)):
            kind = outcome.split(":")[0]
            by_edit.setdefault(case[0], Counter())[kind] += 1
            if kind in ("refused", "lost"):
                print(f"    {' '.join(case)}: {outcome}", flush=True)
        for edit, counts in by_edit.items():
            print(f"{name}, {edit}:", *(f"{counts[kind]} {kind}" for kind in OUTCOMES), flush=True)
        total = sum(by_edit.values(), Counter())
        lost += total["lost"]
        architecture = {"hooked": "gpt2", "lab-hooked": "lab"}.get(name, name)
        row = (version("transformer-lens"), type(model).__name__, architecture, *(total[kind] for kind in OUTCOMES))
        keep(out, ("transformer_lens", "model_class", "architecture", *OUTCOMES), [row], about=3)
    raise typer.Exit(int(lost > 0))


if __name__ == "__main__":
    typer.run(main)
