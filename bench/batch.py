"""Batch reports: 2 workers against 1, the overhead over a bare loop, and the driver's memory.

Every figure comes from whole commands in separate processes, imports included; times of one pair are taken one
after the other, several times, and the medians are given. CPU seconds (of all processes together) are given with the
wall clock's, since they depend less on what else the machine does. The loop saves its tables; the command also writes
a page for each checkpoint and an index, and that counts as its overhead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
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
import resource, sys
from ln_probe.cli import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    print(end.code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def timed(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command and all it starts."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=os.environ | THREADS, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return time.perf_counter() - start, used


def report(out: Path, *options: str, workers: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ln_probe.cli",
        "report",
        "--quiet",
        "--out",
        str(out),
        "--workers",
        str(workers),
        *options,
    ]


def write_prompts(path: Path, rows: list[list[int]]) -> str:
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    return str(path)


def speed(home: Path, repeats: int, prompts: int) -> None:
    rng = random.Random(0)
    rows = [[rng.randrange(1000) for _ in range(TOKENS)] for _ in range(prompts)]
    file = write_prompts(home / "prompts.jsonl", rows)
    ways = {
        "bare loop over analyze": lambda out: [sys.executable, "-c", _LOOP, str(out), file, *MODELS],
        "1 worker": lambda out: report(out, *MODELS, "--prompts", file, workers=1),
        "2 workers": lambda out: report(out, *MODELS, "--prompts", file, workers=2),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(repeats):
        for name, way in ways.items():
            found[name].append(timed(way(home / f"{name} {number}")))
    wall = {name: statistics.median(w for w, _ in pairs) for name, pairs in found.items()}
    used = {name: statistics.median(c for _, c in pairs) for name, pairs in found.items()}
    print(f"\nbatch: {' and '.join(MODELS)}, {prompts} prompts of {TOKENS} tokens, medians of {repeats}")
    print("| | wall, s | CPU, s |\n|---|---|---|")
    for name in ways:
        print(f"| {name} | {wall[name]:.1f} | {used[name]:.1f} |")
    loop, one, two = ways
    print(
        f"2 workers are {wall[one] / wall[two]:.2f}× as fast as 1; overhead over the bare loop "
        f"{100 * (wall[one] / wall[loop] - 1):.1f} % of wall, {100 * (used[one] / used[loop] - 1):.1f} % of CPU"
    )


def memory(home: Path) -> None:
    print("\n| units | driver's peak memory, MB |\n|---|---|")
    for units in (10, 1000):
        rows = [[i % 50, (7 * i) % 50, 3] for i in range(units - 3)]  # plus calibration, unembedding and report
        prompts = write_prompts(home / f"{units}.jsonl", rows)
        options = ["--prompts", prompts, "--shard", "1", "--layers", "0", "--workers", "1", "--quiet"]
        command = [sys.executable, "-c", _DRIVER, "report", MODELS[0], "--out", str(home / f"m{units}"), *options]
        done = subprocess.run(command, env=os.environ | THREADS, check=True, capture_output=True, text=True)
        code, peak = done.stdout.split()[-2:]
        assert code == "0", done.stderr
        print(f"| {units} | {int(peak) / 1024:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speed(Path(folder), arguments.repeats, arguments.prompts)
        memory(Path(folder))


if __name__ == "__main__":
    main()
