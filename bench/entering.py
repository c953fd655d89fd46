"""What entering `without` and `linearized` costs, in forward passes of 4 x 128 tokens; medians of alternating repeats.

    first     of a model: its norms are found, the edit's effect proved, constants measured on the default prompts
    again     what was found is kept, and only compared with the model's weights (goal: at most 0.2 passes)

Two threads. `lm-layernorm`, and GPT-2 small's shape with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import typer
from harness import gpt2_small, in_turn

import ln_probe
from ln_probe.hooks import linearized, without

BATCH, TOKENS, THREADS = 4, 128, 2
EDITS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "scaling": lambda model: without(model, "scaling"),
    "projection": lambda model: without(model, "projection"),
    "linearized": linearized,
}


def main(repeats: int = 15) -> None:
    torch.set_num_threads(THREADS)
    models: dict[str, Callable[[], Any]] = {
        "lm-layernorm": lambda: ln_probe.load_model("lm-layernorm"),
        "gpt2 small's shape": gpt2_small,
    }
    for name, load in models.items():
        model = load()
        tokens = torch.randint(0, 1000, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))

        def enter(edit: str, model: Any = model) -> None:
            with EDITS[edit](model):
                pass

        def forward(model: Any = model, tokens: torch.Tensor = tokens) -> None:
            with torch.no_grad():
                model(tokens)

        forward()
        edits = {edit: partial(enter, edit) for edit in EDITS}
        first = in_turn(edits, 1, warm=0)
        taken = in_turn({"pass": forward, **edits}, repeats, warm=0)
        again = {what: float(np.median(times[:, 0])) for what, times in taken.items()}
        a_pass = again.pop("pass")
        print(f"{name}: a pass of {BATCH} x {TOKENS} tokens {1e3 * a_pass:.0f} ms")
        for edit, seconds in again.items():
            print(f"    {edit:12} first {first[edit][0, 0] / a_pass:6.2f} passes, again {seconds / a_pass:.3f} passes")


if __name__ == "__main__":
    typer.run(main)
