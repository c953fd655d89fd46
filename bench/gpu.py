"""What a GPU changes: every default probe through `analyze`, on four prompts of 128 tokens of GPT-2 small's shape.

Random weights and token ids, so nothing is downloaded; kernels are compiled before the clock starts. Every row is one
run, and repeats the first pass over the prompts. `geometry_s`: seconds of the wall in which `selectability` judged keys
on the processor; `tokens_per_s`: of plain passes, a prompt at a time.

    python bench/gpu.py                                  on the GPU
    python bench/gpu.py --device cpu --probes causal
    python bench/gpu.py --out FILE.csv                   rows of other machines in it are kept
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import in_turn, keep
from transformer_lens import HookedTransformer, HookedTransformerConfig

import ln_probe
from ln_probe.analyses.probes import selectability
from ln_probe.analyses.probes.registry import DEFAULT

COLUMNS = ("machine", "device", "probe", "wall_s", "cpu_s", "geometry_s", "tokens_per_s")
GPT2 = {
    "n_layers": 12, "d_model": 768, "n_heads": 12, "d_head": 64, "d_mlp": 3072, "d_vocab": 50257, "n_ctx": 1024,
    "act_fn": "gelu_new", "normalization_type": "LN",
}  # fmt: skip


def model_of(shape: dict[str, Any], device: str) -> Any:
    """A model of a shape with random weights."""
    return HookedTransformer(HookedTransformerConfig(**shape, device=device, seed=0))


def tokens_of(shape: dict[str, Any], prompts: int, length: int) -> torch.Tensor:
    return torch.randint(0, shape["d_vocab"], (prompts, length), generator=torch.Generator().manual_seed(0))


def measure(model: Any, tokens: torch.Tensor, probe: str) -> dict[str, float]:
    """Seconds of the wall, of the processor, and of the geometry of keys within it."""
    inside = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal inside
            begun = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                inside += time.perf_counter() - begun

        return call

    kept = {name: getattr(selectability, name) for name in ("in_threads", "_at_the_norm")}
    for name, function in kept.items():
        setattr(selectability, name, timed(function))
    begun, used = time.perf_counter(), time.process_time()
    try:
        found = ln_probe.analyze(model, tokens, probes=(probe,), progress=False)
    finally:
        for name, function in kept.items():
            setattr(selectability, name, function)
    if found.failures:
        raise SystemExit(str(found.failures))
    return {"wall_s": time.perf_counter() - begun, "cpu_s": time.process_time() - used, "geometry_s": inside}


def speed(model: Any, tokens: torch.Tensor) -> float:
    """Tokens per second of plain passes, a prompt at a time."""

    def work() -> None:
        with torch.no_grad():
            for row in tokens:
                model(row[None])
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    taken = in_turn({"passes": work}, repeats=3)["passes"]
    return float(tokens.numel() / sorted(taken[:, 0])[1])


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--device", default="cuda")
    given.add_argument("--probes", nargs="+", choices=DEFAULT, default=DEFAULT)
    given.add_argument("--out", type=Path, help="a CSV file for the table; rows of other machines in it are kept")
    asked = given.parse_args()
    card = "CPU" if asked.device == "cpu" else torch.cuda.get_device_name(0)
    machine = f"{card}, {len(os.sched_getaffinity(0))} processors"
    small = {**GPT2, "n_layers": 1, "d_vocab": 64}
    for probe in asked.probes:
        measure(model_of(small, asked.device), tokens_of(small, 2, 40), probe)  # compiles
    model, tokens = model_of(GPT2, asked.device), tokens_of(GPT2, 4, 128)
    rows, tokens_per_s = [], round(speed(model, tokens))
    for probe in asked.probes:
        found = {name: round(value, 1) for name, value in measure(model, tokens, probe).items()}
        rows.append((machine, asked.device, probe, *found.values(), tokens_per_s))
        print(*rows[-1], sep=", ", flush=True)
    keep(asked.out, COLUMNS, rows)


if __name__ == "__main__":
    main()
