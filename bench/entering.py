"""What entering `without` and `linearized` costs, and a pass inside; processor time of one thread.

    first     of a model, in passes of two tokens: its norms are found and edits proved to reach the output
    again     in milliseconds: what is known is compared with the modules and weights
    pass      in intact passes of 4 x 128 tokens, in turn

`lm-layernorm`, and GPT-2 small's shape with random weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import typer
from harness import gpt2_small

import ln_probe
from ln_probe.hooks import linearized, without

EDITS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "scaling": lambda model: without(model, "scaling", scale=2.0),
    "projection": lambda model: without(model, "projection"),
    "scaling, keys": lambda model: without(model, "scaling", scale=2.0, only="keys"),
    "linearized": linearized,
}


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def enter(model: Any, edit: str) -> None:
    with EDITS[edit](model):
        pass


def main(repeats: int = 15) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randint(0, 1000, shape, generator=generator) for shape in ((1, 2), (4, 128)))
    for name, load in (("lm-layernorm", partial(ln_probe.load_model, "lm-layernorm")), ("GPT-2's shape", gpt2_small)):
        with torch.no_grad():
            enter(load(), "scaling")  # (what torch and TransformerLens do once)
            firsts = []
            for _ in range(5):
                model = load()
                model(short)
                of_two = float(np.median([seconds(partial(model, short)) for _ in range(repeats)]))
                firsts.append(seconds(partial(enter, model, "scaling")) / of_two)
            first = np.median(firsts)
            print(f"{name}: first entry {first:.1f} passes of two tokens ({1e3 * of_two:.1f} ms)")
            for edit, context in EDITS.items():
                again = np.median([seconds(partial(enter, model, edit)) for _ in range(repeats)])
                ratios = []
                for _ in range(repeats):
                    intact = seconds(partial(model, long))
                    with context(model):
                        ratios.append(seconds(partial(model, long)) / intact)
                print(f"    {edit:14} again {1e3 * again:5.1f} ms, pass {np.median(ratios):.3f}")


if __name__ == "__main__":
    typer.run(main)
