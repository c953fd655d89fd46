"""Make `ln_probe/data/windows.json`: the prompts that the bundled models are measured on when the user gives none.

    LN_PROBE_SHARED=… python bench/windows.py

64 windows of 128 tokens, evenly spread over the held-out ends of the three books that the models were trained on, as
`examples/checkpoints/measure.py` chooses and orders them (`books`): the books alternate, so that any number of the
first windows is balanced over them. 16 windows between these are for calibration. Every window begins at a word, with
line breaks and verse numbers as they stand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np

import ln_probe
from ln_probe.hooks.model import facts_of
from ln_probe.hooks.task import encode

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP / "examples" / "checkpoints"))

import measure  # noqa: E402

TOKENS, CALIBRATION = 128, 16
SOURCE = "held-out windows of the model's training books"
TITLES = ("King James Bible", "Shakespeare", "Moby Dick")  # of `measure.BOOKS`, which alternate


def between(model: object, measured: list[list[int]]) -> list[list[int]]:
    """Windows from the middles between the measured ones, which they do not overlap."""
    found = []
    for number, name in enumerate(measure.BOOKS):
        text = measure.corpus(name)
        held = text[int(len(text) * (1 - measure.HELD_OUT)) :]
        count = measure.PROMPTS // len(measure.BOOKS) + (number < measure.PROMPTS % len(measure.BOOKS))
        starts = np.linspace(0, len(held) - 8 * TOKENS, count).astype(int)
        middles = (starts[:-1] + starts[1:]) // 2
        wanted = CALIBRATION // len(measure.BOOKS) + (number < CALIBRATION % len(measure.BOOKS))
        for start in middles[np.linspace(0, len(middles) - 1, wanted).astype(int)]:
            window = re.sub(r"^\S*\s+", "", held[start : start + 8 * TOKENS])
            found.append(encode(facts_of(model), window)[:TOKENS].tolist())  # type: ignore[arg-type]
    assert not {tuple(row) for row in found} & {tuple(row) for row in measured}
    return found


def main() -> None:
    model = ln_probe.load_model("lm-layernorm")
    measured = measure.books(model, TOKENS)
    books = [TITLES[number % len(TITLES)] for number in range(len(measured))]
    content = {"source": SOURCE, "books": books, "measured": measured, "calibration": between(model, measured)}
    path = TOP / "ln_probe" / "data" / "windows.json"
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{path.name}: {len(measured)} windows, {len(content['calibration'])} for calibration")


if __name__ == "__main__":
    main()
