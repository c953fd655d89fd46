"""A training step of the counting experiment's recurrent taggers, there and back, each way it can be run.

16 words of 64 letters, 10 hidden units, forward and backward of one layer: torch's own kernel (it has no place for a
norm), step by step in torch's operations, and the lab's compiled loops. The ways take turns in every repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig

REPEATS, WORDS, LETTERS = 51, 16, 64
CASES = [
    *((cell, "none", "gates") for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    ("lstm", "layernorm", "state"), ("lstm", "layernorm", "readout"), ("lstm", "layernorm", "gates"),
    ("gru", "layernorm", "state"), ("gru", "layernorm", "gates"), ("rnn_relu", "layernorm", "state"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{WORDS} words of {LETTERS} letters, forward and backward, ms, 1 thread, medians of {args.repeats}")
    print(f"{'cell':10}{'norm':22}{'torch':>8}{'step by step':>14}{'the lab':>9}{'times':>8}")
    x = torch.randn(WORDS, LETTERS, 4)
    for cell, norm, site in CASES:
        layer = RecurrentConfig(cell, 3, 2, norm=norm, norm_site=site).build().layers[0]
        ways: dict[str, Callable[[Tensor], Tensor]] = {"steps": layer.unfused, "lab": layer}
        if norm == "none":
            ways["torch"] = lambda inputs, layer=layer: layer.weights(inputs)[0]
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(-2, args.repeats):  # the first two warm up
            for name, way in ways.items():
                start = time.perf_counter()
                way(x).sum().backward()
                if i >= 0:
                    taken[name].append(1e3 * (time.perf_counter() - start))
        middle = {name: statistics.median(values) for name, values in taken.items()}
        where = "none" if norm == "none" else f"{norm}, {site}"
        torchs = f"{middle['torch']:8.2f}" if "torch" in middle else " " * 8
        print(
            f"{cell:10}{where:22}{torchs}{middle['steps']:14.2f}{middle['lab']:9.2f}"
            f"{middle['steps'] / middle['lab']:8.1f}"
        )


if __name__ == "__main__":
    main()
