"""Batch reports: 2 workers against 1, the overhead over a bare loop, and the driver's memory.

Every figure comes from whole commands in separate processes, imports included; times of one pair are taken one
after the other, several times, and the medians are given. CPU seconds (of all processes together) are given with the
wall clock's, since they depend less on what else the machine does. The loop saves its tables; the command also writes
a page for each checkpoint and an index, and that counts as its overhead.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import typer
from harness import LN_PROBE, THREADS, environment_of, measure_command, show, show_head, write_prompts

ONE_THREAD = dict.fromkeys(THREADS, "1")
MODELS = ("lm-layernorm", "lm-projection_only")
TOKENS = 256
_LOOP = """
import pathlib, sys, torch, ln_probe
from ln_probe.analyses.geometry.compiled import use_processors
torch.set_num_threads(1)
use_processors(1)
out, prompts, *models = sys.argv[1:]
for name in models:
    ln_probe.analyze(ln_probe.load_model(name), pathlib.Path(prompts), progress=False).save(f"{out}/{name}")
"""
_DRIVER = """
import atexit, resource
from ln_probe.cli import app
atexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
app()
"""


def report(out: Path, *options: str, workers: int) -> list[str]:
    return [*LN_PROBE, "report", "--quiet", "--out", str(out), "--workers", str(workers), *options]


def speed(home: Path, repeats: int, prompts: int) -> None:
    rng = random.Random(0)
    rows = [[rng.randrange(1000) for _ in range(TOKENS)] for _ in range(prompts)]
    file = write_prompts(home / "prompts.jsonl", rows)
    ways = {
        "bare loop over analyze": lambda out: [sys.executable, "-c", _LOOP, str(out), file, *MODELS],
        "1 worker": lambda out: report(out, *MODELS, "--prompts", file, workers=1),
        "2 workers": lambda out: report(out, *MODELS, "--prompts", file, workers=2),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(repeats):
        for name, way in ways.items():
            seconds = measure_command(way(home / f"{name} {number}"), **ONE_THREAD)
            found[name].append([seconds["wall"], seconds["cpu"]])
    medians = {name: np.median(pairs, axis=0) for name, pairs in found.items()}
    print(f"\nbatch: {' and '.join(MODELS)}, {prompts} prompts of {TOKENS} tokens, medians of {repeats}")
    show_head("", "wall, s", "CPU, s")
    for name, pair in medians.items():
        show(name, *(f"{seconds:.1f}" for seconds in pair))
    loop, one, two = medians.values()
    more = 100 * (one / loop - 1)
    print(
        f"2 workers are {one[0] / two[0]:.2f}× as fast as 1; overhead over the bare loop {more[0]:.1f} % of wall, "
        f"{more[1]:.1f} % of CPU"
    )


def memory(home: Path) -> None:
    print()
    show_head("units", "driver's peak memory, MB")
    for units in (10, 1000):
        rows = [[i % 50, (7 * i) % 50, 3] for i in range(units - 3)]  # plus calibration, unembedding and report
        prompts = write_prompts(home / f"{units}.jsonl", rows)
        given = report(home / f"m{units}", MODELS[0], "--prompts", prompts, "--shard", "1", "--layers", "0", workers=1)
        command = [sys.executable, "-c", _DRIVER, *given[len(LN_PROBE) :]]
        done = subprocess.run(command, env=environment_of() | ONE_THREAD, check=True, stdout=subprocess.PIPE, text=True)
        show(units, f"{int(done.stdout.split()[-1]) / 1024:.0f}")


def main(repeats: int = 3, prompts: int = 32) -> None:
    with tempfile.TemporaryDirectory() as folder:
        speed(Path(folder), repeats, prompts)
        memory(Path(folder))


if __name__ == "__main__":
    typer.run(main)
