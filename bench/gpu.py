"""What a GPU changes: the geometry of all heads of a layer, and a whole report. `python bench/gpu.py [--whole]`.

Builds the kernels, checks bounds that are proved on the device against those of the kernels (none may contradict the
other), and times both: keys of a model's shape with random weights, GPT-2 small's (12 heads of 64) and Pythia-1.4b's
(16 heads of 128), 128 tokens, of several kinds. `open`: share of the keys that the device leaves to the kernels.
`--whole`: the default report of GPT-2's shape on four prompts of 128 tokens. Without a GPU the same code runs on the
processor, where it is not the default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import gpt2_small, show, show_head, write_table

import ln_probe
from ln_probe.analyses.geometry.decide import WEIGHT_GAP, Request, Solved, compilation, known_answers, solve_sets
from ln_probe.analyses.geometry.keys import QuerySet

SHAPES = {"GPT-2": (768, 12, 64), "Pythia-1.4b": (2048, 16, 128)}  # d_model, heads, d_head
KINDS = ("normed", "heavy-tailed", "low-rank", "sink")
TOKENS, INNER, LAYERS = 128, 0.5, 4
COLUMNS = ("shape", "keys", "device", "open", "contradicted", "device_s", "kernels_s", "both_s")


def layer(shape: str, kind: str, seed: int) -> tuple[np.ndarray, list[QuerySet]]:
    """Keys "head key d" of one layer, and each head's queries."""
    rng = np.random.default_rng(seed)
    d_model, heads, d_head = SHAPES[shape]
    x = rng.standard_normal((TOKENS, d_model)) * rng.lognormal(0, 0.5, d_model)
    x -= x.mean(1, keepdims=True)
    x /= x.std(1, keepdims=True)
    if kind == "heavy-tailed":
        x *= rng.lognormal(0, 1, (TOKENS, 1))
    if kind == "sink":
        x[0] *= 30
    every, queries = [], []
    for _ in range(heads):
        to_keys, to_queries = (0.02 * rng.standard_normal((d_model, d_head)) for _ in range(2))
        if kind == "low-rank":
            to_keys[:, 8:] *= 0.05
        left, values, _ = np.linalg.svd(d_model**0.5 / d_head**0.5 * to_queries.T, full_matrices=False)
        every.append(x @ to_keys)
        queries.append(QuerySet(0.3 * rng.standard_normal(d_head) / d_head**0.5, np.ascontiguousarray(left * values)))
    return np.stack(every), queries


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the wall and the result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def count(kernels: list[Solved], known: list[Any]) -> tuple[int, int]:
    """Keys that are left open, and bounds or verdicts that contradict each other."""
    left, wrong = 0, 0
    for one, two in zip((solved.answers for solved in kernels), known, strict=True):
        open_keys = two.verdicts.code == 0
        wrong += int((~open_keys & (one.verdicts.code != two.verdicts.code)).sum())
        for name in ("margins", "attention", "inner"):
            (low, high), (lower, upper) = getattr(one, name)[:2], getattr(two, name)[:2]
            asked = Request().gap * np.maximum(abs(lower), abs(upper)) if name == "margins" else WEIGHT_GAP
            open_keys |= ~(upper - lower <= asked)
            wrong += int(((low > upper) | (lower > high)).sum())
        left += int(open_keys.sum())
    return left, wrong


def geometry(device: torch.device) -> None:
    """Compare the device with the kernels on layers of every shape and kind."""
    show_head(*COLUMNS)
    for shape in SHAPES:
        for kind in KINDS:
            total = np.zeros(6)
            for seed in range(LAYERS):
                keys, queries = layer(shape, kind, seed)
                inner, request = np.full(len(keys), INNER), Request()
                if seed == 0:  # the first call builds and warms up
                    known_answers(keys, None, queries, inner, request, device)
                alone, known = seconds(lambda: known_answers(keys, None, queries, inner, request, device))  # noqa: B023
                kernel_time, kernels = seconds(lambda: solve_sets(keys, None, queries, inner, request))  # noqa: B023
                both, _ = seconds(lambda: solve_sets(keys, None, queries, inner, request, device=device))  # noqa: B023
                total += (keys.shape[0] * keys.shape[1], *count(kernels, known), alone, kernel_time, both)
            number, left, wrong, *times = total
            row = (shape, kind, device.type, f"{left / number:.4f}", int(wrong), *(f"{t / LAYERS:.3f}" for t in times))
            rows.append(row)
            show(*row)


def whole(device: torch.device) -> None:
    """Time the default report of GPT-2's shape."""
    model = gpt2_small().to(device)
    tokens = torch.randint(0, 50257, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    ln_probe.analyze(model, tokens[:1, :16], progress=False)
    taken, _ = seconds(lambda: ln_probe.analyze(model, tokens, progress=False))
    print(f"whole report of GPT-2's shape, 4 prompts of {TOKENS}: {taken:.1f} s on {device}")


rows: list[tuple[object, ...]] = [COLUMNS]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--whole", action="store_true", help="time a whole report, too")
    parser.add_argument("--out", type=Path, help="a CSV file for the table")
    arguments = parser.parse_args()
    start = time.perf_counter()
    compilation.wait()
    print(f"kernels ready after {time.perf_counter() - start:.1f} s")
    device = torch.device(arguments.device)
    geometry(device)
    if arguments.whole:
        whole(device)
    write_table(arguments.out, rows)


if __name__ == "__main__":
    main()
