"""What `analyze` does when the model is changed during a run: `tests/seal_cases.py` over every model class.

Prints each case with its outcome (identical, accepted and noted, refused, wrong) and the words that tell it. `--out
FILE.csv` writes the table; rows of another TransformerLens version stay in the file. `--cost` measures what the seal
costs on GPT-2's shape instead. Exit status 1 if an outcome is wrong, or other than it should be. About two minutes.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import transformers
from seal_cases import CASES, measured, models, outcome

COLUMNS = ("transformer_lens", "model", "case", "outcome", "words")
WORDS = 140  # of a message or a note
REPEATS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--cost", action="store_true", help="seconds for GPT-2's shape, and nothing else")
    asked = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if asked.cost:
        return cost()
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
    if asked.out:
        write(asked.out, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
    print(f"{len(rows)} cases, {unexpected} with another outcome than they should have")
    return int(unexpected > 0)


def cost() -> int:
    """Print the seconds that the seal adds to a report of GPT-2's shape: what it does once, and between passes."""
    from ln_probe.hooks.sealing import Fingerprint
    from ln_probe.seal import Seal, hooked_model

    model, _ = hooked_model(transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval())
    size = sum(p.numel() for _, p in model.named_parameters())
    for what, work in (
        ("checksums of all weights", lambda: Fingerprint(model)),
        ("seal, entered and left", lambda: Seal(model).__enter__().__exit__(None)),
    ):
        print(f"{what} ({size / 1e6:.0f} million): {_seconds(work):.3f} s")
    with Seal(model) as seal:
        print(f"between two passes: {_seconds(seal.rest):.5f} s")
    return 0


def _seconds(work: object) -> float:
    assert callable(work)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]


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
