"""What `analyze` does when the model is changed during a run: `tests/seal_cases.py` over every model class.

Prints each case with its outcome (identical, accepted and noted, refused, wrong) and the words that tell it. `--out
FILE.csv` writes the table; rows of another TransformerLens version stay in the file. `--cost` measures what the seal
costs on GPT-2's shape instead. Exit status 1 if an outcome is wrong, or other than it should be. About two minutes.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import transformers
import typer
from harness import in_turn, keep
from seal_cases import CASES, measured, models, outcome

COLUMNS = ("transformer_lens", "model", "case", "outcome", "words")
WORDS = 140  # of a message or a note
REPEATS = 5


def main(
    out: Annotated[Path | None, typer.Option(help="write the table to this file")] = None,
    cost: Annotated[bool, typer.Option("--cost", help="seconds for GPT-2's shape, and nothing else")] = False,
) -> None:
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if cost:
        return print_cost()
    rows, unexpected = [], 0
    for name, make in models().items():
        model = make()
        reference = measured(model)
        for case, (do, right) in CASES.items():
            result, words = outcome(do, model, reference)
            unexpected += result not in right
            rows.append((version("transformer-lens"), name, case, result, words[:WORDS]))
            print(", ".join(rows[-1][1:]), flush=True)
            if "weight edit" in case:
                model = make()
    keep(out, COLUMNS, rows, order=str)
    print(f"{len(rows)} cases, {unexpected} with another outcome than they should have")
    raise typer.Exit(int(unexpected > 0))


def print_cost() -> None:
    """Print the seconds that the seal adds to a report of GPT-2's shape: what it does once, and between passes."""
    from ln_probe.hooks.sealing import Fingerprint
    from ln_probe.seal import Seal, hooked_model

    model, _ = hooked_model(transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval())
    size = sum(p.numel() for _, p in model.named_parameters())
    ways = {
        f"checksums of all weights ({size / 1e6:.0f} million)": lambda: Fingerprint(model),
        "seal, entered and left": lambda: Seal(model).__enter__().__exit__(None),
    }
    with Seal(model) as seal:
        seconds = in_turn({"between two passes": seal.rest}, REPEATS, warm=0)
    for what, taken in (in_turn(ways, REPEATS, warm=0) | seconds).items():
        print(f"{what}: {np.median(taken[:, 0]):.5f} s")


if __name__ == "__main__":
    typer.run(main)
