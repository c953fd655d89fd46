"""How fast and how right the geometry of keys is. Prints tables; `python bench/geometry.py [section …]`.

Sections: speed (verdicts and margins against a linear program per key and the published algorithm, one thread), heads
(all heads of a layer of lm-layernorm's and GPT-2's shape, one thread and two), rational (certificates of families
checked in exact arithmetic), compilation (processor seconds of a cold cache, and of a warm one). Ratios are per core:
OPENBLAS_NUM_THREADS and the like are set to 1 and the script starts itself again. `--out bench/results` writes tables.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import baselines
import families
import numpy as np
from harness import THREADS, show, show_head, write_table

import ln_probe
from ln_probe.analyses.geometry.decide import Request, solve_sets
from ln_probe.analyses.geometry.keys import QuerySet

REPEATS = 5
SAMPLE = 12  # keys of a set that the slow competitors are timed on, per repeat
SPEED = [  # family, keys, dimensions, heads
    ("normal", 512, 64, 1),
    ("LayerNorm'd normal", 512, 64, 1),
    ("norms × lognormal(1)", 512, 64, 1),
    ("half planted interior", 512, 64, 1),
    ("low-rank heavy-tailed", 512, 64, 1),
    ("normal", 512, 8, 1),
    ("normal", 128, 2, 12),
    ("normal", 128, 4, 12),
]
SHAPES = {"lm-layernorm": (64, 8, 8), "GPT-2": (768, 12, 64)}  # d_model, heads, d_head
SETS = [(40, 2), (60, 8), (128, 16), (256, 32), (256, 64)]  # keys, dimensions
KEYS = 5000  # of each family that are checked

printed: list[tuple[object, ...]] = []  # the head and rows of one section


def head(*cells: object) -> None:
    printed.append(cells)
    show_head(*cells)


def row(*cells: object) -> None:
    printed.append(cells)
    show(*cells)


def seconds(work: Callable[..., object], *arguments: object, **named: object) -> float:
    start = time.process_time()
    work(*arguments, **named)
    return time.process_time() - start


def each(decide: Callable[[np.ndarray, int], object], keys: np.ndarray, sample: np.ndarray) -> None:
    for which, i in sample:
        decide(keys[which], i)


def speed() -> None:
    """Time per key of a verdict with its certificate; margins are timed with it."""
    print(f"\nspeed: one thread, medians of {REPEATS} repeats in μs per key. (a) HiGHS feasibility,")
    print(f"(b) reflections and Chebyshev centre, both on {SAMPLE} of the same keys per repeat")
    head("keys", "n", "d", "hidden", "(a)", "(b)", "verdict", "+ margin", "(a)/verdict", "(b)/verdict")
    for name, n, d, heads in SPEED:
        rng = np.random.default_rng(0)
        keys = np.stack([families.RANDOM[name](rng, n, d) for _ in range(heads)])
        geometry = ln_probe.key_geometry(keys, threads=1)
        taken = []
        for _ in range(REPEATS):
            sample = np.stack([rng.integers(0, heads, SAMPLE), rng.integers(0, n, SAMPLE)], axis=1)
            taken.append(
                (
                    seconds(each, baselines.feasibility, keys, sample) / SAMPLE,
                    seconds(each, baselines.published, keys, sample) / SAMPLE,
                    seconds(ln_probe.key_geometry, keys, margins=False, threads=1) / (n * heads),
                    seconds(ln_probe.key_geometry, keys, threads=1) / (n * heads),
                )
            )
        a, b, verdict, margin = 1e6 * np.median(taken, axis=0)
        hidden = (geometry.verdict == "unselectable").mean()
        times = f"{a:.0f}", f"{b:.0f}", f"{verdict:.1f}", f"{margin:.1f}"
        row(name, n, f"{d} × {heads}", f"{hidden:.2f}", *times, f"{a / verdict:.0f}", f"{b / verdict:.1f}")


def heads() -> None:
    """Time per key of everything that a report asks of one layer."""
    print("\nheads: μs per key of all heads of a layer, 128 tokens; processor time, and the wall with two threads")
    head("shape", "asked", "processor", "wall, 1 thread", "wall, 2 threads")
    for shape, (d_model, count, d_head) in SHAPES.items():
        rng = np.random.default_rng(0)
        x = families.layernormed(rng, 128, d_model)
        keys = np.stack([x @ rng.standard_normal((d_model, d_head)) * d_model**-0.5 for _ in range(count)])
        axes = rng.standard_normal((count, d_head, d_head)) * (d_model / d_head) ** 0.5 * 0.5
        queries = [QuerySet(0.1 * rng.standard_normal(d_head), a) for a in axes]
        for asked, request in (("verdicts", Request(None, attention=False)), ("everything", Request())):
            how = keys, None, queries, None if request.gap is None else np.full(count, 0.5), request
            solve_sets(*how)
            processor, walls = min(seconds(solve_sets, *how, threads=1) for _ in range(REPEATS)), []
            for threads in (1, 2):
                start = time.perf_counter()
                for _ in range(REPEATS):
                    solve_sets(*how, threads=threads)
                walls.append((time.perf_counter() - start) / REPEATS)
            row(shape, asked, *(f"{1e6 * t / keys[..., 0].size:.1f}" for t in (processor, *walls)))


def rational() -> None:
    """Check every certificate in exact arithmetic on the keys as given."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analyses"))
    from rational_checker import RationalChecker, Report

    print(f"\nrational: certificates in exact arithmetic, at least {KEYS} keys of each family")
    head("family", "keys", "unselectable", "undecided", "wrong")
    for name, family in (families.RANDOM | families.HARD).items():
        report, seed = Report(), 0
        while report.keys < KEYS:
            n, d = SETS[seed % len(SETS)]
            keys = family(np.random.default_rng([seed, n]), n, d)
            report.add(RationalChecker(keys).check(ln_probe.key_geometry(keys, margins=False, threads=1)))
            seed += 1
        row(name, report.keys, report.verdicts.get("unselectable", 0), report.undecided, len(report.wrong))


def compilation() -> None:
    """Processor seconds until the kernels are ready."""
    print("\ncompilation: processor seconds until the kernels are ready")
    head("cache", "seconds")
    code = (
        "import time; from ln_probe.analyses.geometry.decide import compilation\n"
        "start = time.process_time(); compilation.wait(); print(time.process_time() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            environment = os.environ | {"NUMBA_CACHE_DIR": folder}
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
            row(cache, f"{float(done.stdout.split()[-1]):.1f}")


SECTIONS = {"speed": speed, "heads": heads, "rational": rational, "compilation": compilation}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--out", type=Path, help="a folder for geometry-SECTION.csv")
    arguments = parser.parse_args()
    chosen = arguments.sections or list(SECTIONS)
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}: choose from {', '.join(SECTIONS)}")
    if any(name not in os.environ for name in THREADS):  # they count only if they are set before the start
        os.environ.update({name: os.environ.get(name, "1") for name in THREADS})
        os.execv(sys.executable, [sys.executable, *sys.argv])
    for name in chosen:
        printed.clear()
        SECTIONS[name]()
        if arguments.out:
            write_table(arguments.out / f"geometry-{name}.csv", printed)


if __name__ == "__main__":
    main()
