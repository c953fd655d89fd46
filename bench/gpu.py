"""What a GPU changes: reports of GPT-2 small's shape and of a layer of Llama-3-8B's, on the processor and on the GPU.

Random weights and token ids, so nothing is downloaded; kernels are compiled before the clock starts. `geometry_s` are
seconds of the wall in which keys were judged on the processor, during the probe `selectability` alone.

    python bench/gpu.py                            on both devices, all scenes
    python bench/gpu.py --devices cpu --scenes report
    python bench/gpu.py --out bench/results/gpu.csv
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import in_turn, write_table
from transformer_lens import HookedTransformer, HookedTransformerConfig

import ln_probe
from ln_probe.analyses.probes import selectability

COLUMNS = ("card", "processors", "scene", "device", "wall_s", "cpu_s", "geometry_s", "tokens_per_s", "gpu_gb")
GPT2 = {
    "n_layers": 12, "d_model": 768, "n_heads": 12, "d_head": 64, "d_mlp": 3072, "d_vocab": 50257, "n_ctx": 1024,
    "act_fn": "gelu_new", "normalization_type": "LN",
}  # fmt: skip
LLAMA = {
    "n_layers": 1, "d_model": 4096, "n_heads": 32, "n_key_value_heads": 8, "d_head": 128, "d_mlp": 14336,
    "d_vocab": 16384, "n_ctx": 2048, "act_fn": "silu", "gated_mlp": True, "normalization_type": "RMS",
    "positional_embedding_type": "rotary", "rotary_dim": 128, "final_rms": True, "dtype": torch.bfloat16,
}  # fmt: skip


def model_of(shape: dict[str, Any], device: str) -> Any:
    """A model of a shape with random weights."""
    config = HookedTransformerConfig(**shape, device=device, seed=0, init_weights=True)
    return HookedTransformer(config, move_to_device=True)


def tokens_of(shape: dict[str, Any], prompts: int, length: int) -> torch.Tensor:
    return torch.randint(0, shape["d_vocab"], (prompts, length), generator=torch.Generator().manual_seed(0))


def report(model: Any, tokens: torch.Tensor, **asked: Any) -> None:
    found = ln_probe.analyze(model, tokens, progress=False, **asked)
    if found.failures:
        raise SystemExit(str(found.failures))


def measured(device: str, work: Callable[[], object]) -> dict[str, float]:
    """Seconds of the wall, of the processor and of the geometry within it, and the GPU's memory."""
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
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    begun, used = time.perf_counter(), time.process_time()
    try:
        work()
    finally:
        for name, function in kept.items():
            setattr(selectability, name, function)
    spent = {"wall_s": time.perf_counter() - begun, "cpu_s": time.process_time() - used, "geometry_s": inside}
    return spent | ({} if device == "cpu" else {"gpu_gb": torch.cuda.max_memory_allocated() / 2**30})


def speed(model: Any, tokens: torch.Tensor) -> float:
    """Tokens per second of plain passes, a prompt at a time."""

    def work() -> None:
        with torch.no_grad():
            for row in tokens:
                model(row[None])
        if row.device.type == "cpu" and torch.cuda.is_available():
            torch.cuda.synchronize()

    taken = in_turn({"passes": work}, repeats=3)["passes"]
    return float(tokens.numel() / sorted(taken[:, 0])[1])


SCENES: dict[str, tuple[dict[str, Any], tuple[int, int], dict[str, Any]]] = {
    "GPT-2's shape, selectability, 4 × 128 tokens": (GPT2, (4, 128), {"probes": ("selectability",)}),
    "GPT-2's shape, default, 4 × 128 tokens": (GPT2, (4, 128), {}),
    "GPT-2's shape, default, 32 × 128 tokens": (GPT2, (32, 128), {}),
    "layer of Llama-3-8B's shape, selectability, 1 × 512 tokens": (LLAMA, (1, 512), {"probes": ("selectability",)}),
}


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    given.add_argument("--scenes", nargs="+", help="those whose names begin so (default: all)")
    given.add_argument("--out", type=Path, help="a CSV file for the table")
    asked = given.parse_args()
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    rows = []
    small = {**GPT2, "n_layers": 1, "d_vocab": 64}
    for device in asked.devices:
        report(model_of(small, device), tokens_of(small, 2, 40))  # compiles
        for name, (shape, size, options) in SCENES.items():
            if asked.scenes and not name.startswith(tuple(asked.scenes)):
                continue
            model, tokens = model_of(shape, device), tokens_of(shape, *size)
            found = measured(device, lambda m=model, t=tokens, o=options: report(m, t, **o))  # type: ignore[misc]
            found["tokens_per_s"] = speed(model, tokens[:4])
            place = {"card": card, "processors": len(os.sched_getaffinity(0)), "scene": name, "device": device}
            rows.append(
                [
                    f"{(place | found).get(c, ''):.4g}"
                    if isinstance((place | found).get(c), float)
                    else (place | found).get(c, "")
                    for c in COLUMNS
                ]
            )
            print(*rows[-1], sep=", ", flush=True)
            del model
            if device != "cpu":
                torch.cuda.empty_cache()
    write_table(asked.out, [COLUMNS, *rows])


if __name__ == "__main__":
    main()
