"""How fast and how right the geometry of keys is. Prints tables; `python bench/geometry.py [section …]`.

Sections: speed (verdicts and margins against a linear program per key, one thread), heads (all heads of a layer of
lm-layernorm's and GPT-2's shape, one thread and two), rational (certificates of families checked in exact arithmetic,
samples against the linear program), compilation (processor seconds of a cold cache, and of a warm one). Ratios are per
core: OPENBLAS_NUM_THREADS and the like are set to 1 and the script starts itself again. `--out bench/results` writes
tables. `--state FILE` keeps what `rational` has checked: the next run checks only what is new or has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import families
import numpy as np
from harness import THREADS, show, show_head, write_table
from scipy.optimize import linprog

import ln_probe
from ln_probe.analyses.geometry.decide import Request, solve_sets
from ln_probe.analyses.geometry.key_geometry import KeyGeometry
from ln_probe.analyses.geometry.keys import QuerySet

REPEATS = 5
SAMPLE = 12  # keys of a set that linear programs are timed on, per repeat
# Seconds after which a linear program is given up: HiGHS cycles without end on some keys with lognormal norms.
TIME_LIMIT = 1.0
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
SETS = [(40, 2), (60, 8), (128, 16), (256, 32), (60, 4), (128, 8), (256, 64)]  # keys, dimensions
KEYS = 10_000  # of each family that are checked
PROGRAMS = 10  # keys of a set that are compared with HiGHS

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


def feasibility(keys: np.ndarray, i: int) -> bool | None:
    """Is key i selectable, by HiGHS: no convex weights of the other keys reproduce it. None: it gave up."""
    others = np.delete(keys, i, axis=0)
    sums = np.vstack([others.T, np.ones(len(others))])
    right, limit = np.append(keys[i], 1.0), {"time_limit": TIME_LIMIT}
    solved = linprog(np.zeros(len(others)), A_eq=sums, b_eq=right, method="highs", options=limit)
    return {0: False, 2: True}.get(int(solved.status))


def programs(keys: np.ndarray, sample: np.ndarray) -> None:
    for which, i in sample:
        feasibility(keys[which], i)


def speed() -> None:
    """Time per key of a verdict with its certificate; margins are timed with it."""
    print(f"\nspeed: one thread, medians of {REPEATS} repeats in μs per key; HiGHS on {SAMPLE} of the keys per repeat")
    head("keys", "n", "d", "hidden", "HiGHS", "verdict", "+ margin", "ratio")
    for name, n, d, heads in SPEED:
        rng = np.random.default_rng(0)
        keys = np.stack([families.RANDOM[name](rng, n, d) for _ in range(heads)])
        geometry = ln_probe.key_geometry(keys, threads=1)
        times = []
        for _ in range(REPEATS):
            sample = np.stack([rng.integers(0, heads, SAMPLE), rng.integers(0, n, SAMPLE)], axis=1)
            own = [seconds(ln_probe.key_geometry, keys, margins=m, threads=1) / (n * heads) for m in (False, True)]
            times.append((seconds(programs, keys, sample) / SAMPLE, *own))
        program, verdict, margin = 1e6 * np.median(times, axis=0)
        hidden = (geometry.verdict == "unselectable").mean()
        cells = f"{hidden:.2f}", f"{program:.0f}", f"{verdict:.1f}", f"{margin:.1f}", f"{program / verdict:.0f}"
        row(name, n, f"{d} × {heads}", *cells)


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
                times = []
                for _ in range(4 * REPEATS):
                    start = time.perf_counter()
                    solve_sets(*how, threads=threads)
                    times.append(time.perf_counter() - start)
                walls.append(np.median(times))
            row(shape, asked, *(f"{1e6 * t / keys[..., 0].size:.1f}" for t in (processor, *walls)))


def rational(state: Path | None = None) -> None:
    """Check every certificate in exact arithmetic on the keys as given."""
    print(f"\nrational: certificates in exact arithmetic, {KEYS} keys of each family; {PROGRAMS} of a set by HiGHS")
    head("family", "keys", "large", "unselectable", "undecided", "wrong", "programs", "differ")
    checked = {} if state is None or not state.exists() else dict(map(json.loads, state.read_text().splitlines()))
    for name, family in (families.RANDOM | families.HARD | {"near-ties": families.near_ties}).items():
        total, seed = Counter[str](), 0
        while total["keys"] < KEYS:
            n, d = SETS[seed % len(SETS)]
            keys = family(np.random.default_rng([seed, n]), n, d)
            geometry = ln_probe.key_geometry(keys, margins=False, threads=1)
            digest = certificates_digest(keys, geometry)
            if digest not in checked:
                checked[digest] = check(keys, geometry, np.random.default_rng(seed))
                if state is not None:
                    with state.open("a") as file:
                        file.write(json.dumps([digest, checked[digest]]) + "\n")
            total += Counter(checked[digest])
            total["large"] += n if n >= 256 and d >= 32 else 0
            seed += 1
        columns = "keys", "large", "unselectable", "undecided", "wrong", "programs", "differ"
        row(name, *(total[column] for column in columns))


def certificates_digest(keys: np.ndarray, geometry: KeyGeometry) -> str:
    """Return a digest of keys and of all that proves their verdicts."""
    digest = hashlib.sha256(keys.tobytes())
    for part in geometry._sets[0].solved.answers.verdicts:
        digest.update(part.tobytes())
    return digest.hexdigest()


def check(keys: np.ndarray, geometry: KeyGeometry, rng: np.random.Generator) -> dict[str, int]:
    """Return how many certificates of a set are wrong, and how many verdicts differ from HiGHS's."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analyses"))
    from rational_checker import RationalChecker

    report = RationalChecker(keys).check(geometry)
    for text in report.wrong:
        print(text, flush=True)
    apart = np.flatnonzero(geometry.verdict != "duplicate")  # a copy reproduces a key, and does not compete with it
    sample = rng.permutation(apart)[:PROGRAMS]
    answers = [(feasibility(keys, i), geometry.verdict[i] != "unselectable") for i in sample]
    known = [ours == theirs for theirs, ours in answers if theirs is not None]
    counts = {"keys": report.keys, "undecided": report.undecided, "wrong": len(report.wrong)}
    return counts | report.verdicts | {"programs": len(known), "differ": known.count(False)}


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


SECTIONS: dict[str, Callable[[], None]] = {work.__name__: work for work in (speed, heads, rational, compilation)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--out", type=Path, help="a folder for geometry-SECTION.csv")
    parser.add_argument("--state", type=Path, help="a file that keeps what `rational` has checked")
    arguments = parser.parse_args()
    if any(name not in os.environ for name in THREADS):  # they count only if they are set before the start
        os.environ.update({name: os.environ.get(name, "1") for name in THREADS})
        os.execv(sys.executable, [sys.executable, *sys.argv])
    for name in arguments.sections or SECTIONS:
        printed.clear()
        SECTIONS[name]() if name != "rational" else rational(arguments.state)
        if arguments.out:
            write_table(arguments.out / f"geometry-{name}.csv", printed)


if __name__ == "__main__":
    main()
