"""What entering `without` and `linearized` costs, in forward passes of 4 x 128 tokens; medians of alternating repeats.

    first     of a model: its norms are found, the edit's effect proved, constants measured on the default prompts
    again     what was found is kept, and only compared with the model's weights (goal: at most 0.2 passes)

Two threads. `lm-layernorm`, and GPT-2 small's shape with random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from attribution import gpt2_small

import ln_probe
from ln_probe.hooks import linearized, without

BATCH, TOKENS, THREADS = 4, 128, 2
EDITS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "scaling": lambda model: without(model, "scaling"),
    "projection": lambda model: without(model, "projection"),
    "linearized": linearized,
}


def seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
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
        first = {edit: seconds(lambda edit=edit: enter(edit)) for edit in EDITS}
        again, passes = {edit: list[float]() for edit in EDITS}, list[float]()
        for _ in range(repeats):
            passes.append(seconds(forward))
            for edit in EDITS:
                again[edit].append(seconds(lambda edit=edit: enter(edit)))
        a_pass = statistics.median(passes)
        print(f"{name}: a pass of {BATCH} x {TOKENS} tokens {1e3 * a_pass:.0f} ms")
        for edit in EDITS:
            ratio = statistics.median(again[edit]) / a_pass
            print(f"    {edit:12} first {first[edit] / a_pass:6.2f} passes, again {ratio:.3f} passes")


if __name__ == "__main__":
    main()
