"""A training step of the counting experiment's recurrent taggers, there and back, each way it can be run.

16 words of 64 letters, 10 hidden units, forward and backward of one layer: torch's own kernel (it has no place for a
norm), step by step in torch's operations, and the lab's compiled loops. The ways take turns in every repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import typer
from harness import in_turn
from torch import Tensor

from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig

WORDS, LETTERS = 16, 64
CASES = [
    *((cell, "none", "gates") for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    ("lstm", "layernorm", "state"), ("lstm", "layernorm", "readout"), ("lstm", "layernorm", "gates"),
    ("gru", "layernorm", "state"), ("gru", "layernorm", "gates"), ("rnn_relu", "layernorm", "state"),
]  # fmt: skip


def there_and_back(way: Callable[[Tensor], Tensor], x: Tensor) -> None:
    way(x).sum().backward()


def main(repeats: int = 51) -> None:
    torch.set_num_threads(1)
    print(f"{WORDS} words of {LETTERS} letters, forward and backward, ms, 1 thread, medians of {repeats}")
    print(f"{'cell':10}{'norm':22}{'torch':>8}{'step by step':>14}{'the lab':>9}{'times':>8}")
    x = torch.randn(WORDS, LETTERS, 4)
    for cell, norm, site in CASES:
        layer = RecurrentConfig(cell, 3, 2, norm=norm, norm_site=site).build().layers[0]
        ways: dict[str, Callable[[Tensor], Tensor]] = {"steps": layer.unfused, "lab": layer}
        if norm == "none":
            ways["torch"] = lambda inputs, layer=layer: layer.weights(inputs)[0]
        taken = in_turn({name: partial(there_and_back, way, x) for name, way in ways.items()}, repeats, warm=2)
        middle = {name: 1e3 * float(np.median(times[:, 0])) for name, times in taken.items()}
        where = "none" if norm == "none" else f"{norm}, {site}"
        torchs = f"{middle['torch']:8.2f}" if "torch" in middle else " " * 8
        print(
            f"{cell:10}{where:22}{torchs}{middle['steps']:14.2f}{middle['lab']:9.2f}"
            f"{middle['steps'] / middle['lab']:8.1f}"
        )


if __name__ == "__main__":
    typer.run(main)
