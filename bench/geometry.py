"""How fast and how right the geometry of keys is. Prints tables; `python bench/geometry.py [section …]`.

Sections: speed (against a linear program per key and the published algorithm, one thread), verdicts (hundreds of
thousands of keys against construction, certificates and linear programs), screen (the first stage in float32 tensors,
against the kernels alone), hard (families that are slow to decide, one thread), worst (the slowest single key of
every family), checks (what proofs cost), heads (the shape of GPT-2 small). Ratios are per core: unless they are set,
OPENBLAS_NUM_THREADS and the like are set to 1 and the script starts itself again.
`--out bench/results` writes each section's table, which the site shows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import baselines
import families
import numpy as np
import torch
from harness import THREADS, show, show_head, write_table

import ln_probe
from ln_probe.analyses.geometry.checker import Checker
from ln_probe.analyses.geometry.coordinates import TAU, KeyCoordinates, coordinates
from ln_probe.analyses.geometry.decide import SELECTABLE, UNDECIDED, _Deciding, decide
from ln_probe.analyses.geometry.inputs import score_space
from ln_probe.analyses.geometry.margins import RELATIVE_GAP
from ln_probe.analyses.geometry.prove import prove_margins, prove_verdicts
from ln_probe.analyses.geometry.wolfe import BUDGET

REPEATS = 5
SAMPLE = 12  # keys of a set that the slow competitors are timed on, per repeat
SPEED = [  # family, keys, dimensions, heads, target ratio against (a)
    ("normal", 512, 64, 1, 1000),
    ("LayerNorm'd normal", 512, 64, 1, 1000),
    ("norms × lognormal(1)", 512, 64, 1, 100),
    ("half planted interior", 512, 64, 1, 100),
    ("low-rank heavy-tailed", 512, 64, 1, 100),
    ("normal", 512, 8, 1, 200),
    ("normal", 128, 2, 12, 200),
    ("normal", 128, 4, 12, 200),
]
HARD = [  # family, keys, dimensions, with margins over a radius, target in ms per key
    ("norms over 8 decades", 512, 128, False, 5.0),
    ("norms × lognormal(4)", 512, 64, False, 2.0),
    ("attention-like", 4096, 128, True, 1.0),
    ("clusters 1e7 apart", 400, 6, False, 0.1),
]
WORST = [(128, 2), (400, 6), (512, 64), (512, 128)]  # keys, dimensions
WORST_SAMPLE = 40  # keys per set, of those that are left when white queries have been tried
CHECKS = ("__init__", "selects", "leads", "reproduces", "gap_at_least", "gap_at_most", "attention")  # of the checker

printed: list[tuple[object, ...]] = []  # the head and rows of one section


def seconds(work: Callable[..., object], *arguments: object, **named: object) -> float:
    start = time.perf_counter()
    work(*arguments, **named)
    return time.perf_counter() - start


def head(*cells: object) -> None:
    printed.append(cells)
    show_head(*cells)


def row(*cells: object) -> None:
    printed.append(cells)
    show(*cells)


def each(decide: Callable[[np.ndarray, int], object], keys: np.ndarray, sample: np.ndarray) -> None:
    for head, i in sample:
        decide(keys[head], i)


def speed(repeats: int = REPEATS) -> None:
    """Time per key of a verdict with its certificate; margins are timed with it."""
    print(f"\nspeed: one thread, medians of {repeats} repeats in μs per key. (a) HiGHS feasibility,")
    print(f"(b) reflections and Chebyshev centre, both on {SAMPLE} of the same keys per repeat")
    head("keys", "n", "d", "hidden", "(a)", "(b)", "verdict", "+ margin", "(a)/verdict", "goal", "(b)/verdict")
    for name, n, d, heads, target in SPEED:
        rng = np.random.default_rng(0)
        keys = np.stack([families.RANDOM[name](rng, n, d) for _ in range(heads)])
        geometry = ln_probe.key_geometry(keys, threads=1)  # compiles on the first call
        taken: list[tuple[float, ...]] = []
        for _ in range(repeats):
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
        dims = f"{d} × {heads} heads" if heads > 1 else d
        times = f"{a:.0f}", f"{b:.0f}", f"{verdict:.1f}", f"{margin:.1f}"
        row(name, n, dims, f"{hidden:.2f}", *times, f"{a / verdict:.0f}", target, f"{b / verdict:.1f}")


def verdicts(wanted: int = 200_000, by_program: int = 3000) -> None:
    """Every certificate is checked; adversarial families against construction, samples against HiGHS."""
    number = undecided = wrong = unproved = seed = 0
    start = time.perf_counter()
    while number < wanted:
        rng = np.random.default_rng(seed)
        sets: list[tuple[str, np.ndarray, list[str] | None]] = list(families.adversarial(rng))
        for n, d in ((512, 64), (512, 8), (128, 2), (128, 4)):
            sets += [(name, family(rng, n, d), None) for name, family in families.RANDOM.items()]
            for exponent in range(3, 10):
                keys = families.pairs(rng, n // 2, d, 10.0**-exponent)
                sets.append((f"pairs about 1e-{exponent} apart", keys, None))
        for name, keys, expected in sets:
            geometry = ln_probe.key_geometry(keys, margins=False)
            number += len(keys)
            undecided += int((geometry.verdict == "undecided").sum())
            differ = 0 if expected is None else int((geometry.verdict != np.array(expected)).sum())
            wrong += differ
            if differ:
                print(f"  {differ} wrong: {name}, seed {seed}")
            try:
                geometry.certify()
            except AssertionError as error:
                unproved += 1
                print(f"  {name}, seed {seed}: {error}")
        seed += 1
    print(f"\nverdicts: {number} keys, {undecided} undecided, {wrong} wrong by construction, ", end="")
    print(f"{unproved} sets with a certificate that fails; {time.perf_counter() - start:.0f} s")
    rng = np.random.default_rng(10**6)
    asked = differ = close = gave_up = 0
    while asked < by_program:
        for n, d in ((256, 32), (512, 8), (128, 2), (128, 4)):
            for family in families.RANDOM.values():
                keys = family(rng, n, d)
                geometry = ln_probe.key_geometry(keys)
                for i in rng.integers(0, n, 10):
                    asked += 1
                    selectable = baselines.feasibility(keys, int(i))
                    gave_up += selectable is None
                    if selectable is None or selectable == (geometry.verdict[i] == "selectable"):
                        continue
                    # HiGHS accepts residuals of 1e-7 per equation: this near, either answer is right.
                    near = 0.0 < geometry.margin_upper[i] < 1e-6
                    close += near
                    differ += not near
    print(f"HiGHS feasibility: {differ} of {asked} differ, {close} within its tolerance, {gave_up} given up")


def processor_seconds(work: Callable[..., object], *arguments: object, **named: object) -> float:
    """Of this process: other work on the machine does not count."""
    start = time.process_time()
    work(*arguments, **named)
    return time.process_time() - start


def screen(wanted: int = 500_000, heads: int = 12) -> None:
    """White queries of all heads of a layer at once, in float32 tensors with a bound of rounding, against the kernels
    alone, which decide every key without white queries."""
    print(f"\nscreen: {heads} sets at a time in float32 tensors, one thread; processor μs per key, one run")
    head("keys", "n", "d", "number", "decided", "differ", "undecided", "float32 tensors", "white queries", "kernels")
    shapes = [(name, n, d) for n, d in ((512, 64), (512, 8)) for name in families.RANDOM]
    for place, (name, n, d) in enumerate(shapes):
        rng, done, decided, differ, undecided = np.random.default_rng(place), 0, 0, 0, 0
        spent = np.zeros(3)
        while done < wanted / len(shapes):
            sets = [coordinates(families.RANDOM[name](rng, n, d)) for _ in range(heads)]
            if len({one.white.shape for one in sets}) > 1:  # keys that are equal, or lie in a plane: these are no stack
                continue
            codes = list[np.ndarray]()
            for stages in (("white_queries",), ("nearest_points", "alone")):
                begun = time.process_time()
                works = [_Deciding(one, 1, BUDGET) for one in sets]
                for work, stage in itertools.product(works, stages):
                    getattr(work, stage)()
                spent[1 + len(codes)] += time.process_time() - begun
                codes.append(np.stack([work.code[one.leaders] for work, one in zip(works, sets, strict=True)]))
            begun = time.process_time()
            found = _screened(sets)
            spent[0] += time.process_time() - begun
            done += found.size
            decided += int(found.sum())
            differ += int((found & ~np.isin(codes[1], (UNDECIDED, SELECTABLE))).sum())
            undecided += int((codes[1] == UNDECIDED).sum())
        row(name, n, d, done, decided, differ, undecided, *(f"{1e6 * t / done:.1f}" for t in spent))


def _screened(sets: list[KeyCoordinates]) -> np.ndarray:
    """Which keys of each set their white queries select by more than TAU, rounding in float32 allowed for."""
    white = torch.from_numpy(np.stack([one.white for one in sets]))
    stretch = torch.from_numpy(np.stack([one.stretch for one in sets]))[:, None]
    length = white.norm(dim=2)
    queries = white / length[..., None]
    scores = torch.bmm(queries.float(), white.float().mT)
    own = scores.diagonal(dim1=1, dim2=2).double()
    scores.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    lost = 2 * (white.shape[2] + 8) * 2.0**-24 * length.amax(1, keepdim=True)  # of two scores
    gap = own - scores.amax(2).double() - lost
    return (gap > TAU * (queries / stretch).norm(dim=2)).numpy()


def hard(repeats: int = REPEATS) -> None:
    """Verdicts, and margins where they are asked for, of families whose norms or places range over many decades."""
    print(f"\nhard: one thread, medians of {repeats} repeats, processor time in ms per key")
    head("keys", "n", "d", "bias", "hidden", "undecided", "verdict", "+ margin", "goal")
    for name, n, d, measured, goal in HARD:
        for biased in (False, True):
            rng = np.random.default_rng(0)
            keys = families.HARD[name](rng, n, d)
            bias = rng.standard_normal(n) if biased else None
            geometry = ln_probe.key_geometry(keys, bias=bias, margins=False, threads=1)  # compiles on the first call
            verdict, margin = (
                1e3 / n * np.median([processor_seconds(_decide, keys, bias, with_margins) for _ in range(repeats)])
                for with_margins in (False, True)
            )
            hidden, open_ = (geometry.verdict == "unselectable").mean(), int((geometry.verdict == "undecided").sum())
            limit = "" if biased else f"{goal:g} {'with margins' if measured else 'verdict'}"
            row(name, n, d, "yes" if biased else "no", f"{hidden:.2f}", open_, f"{verdict:.3f}", f"{margin:.3f}", limit)


def _decide(keys: np.ndarray, bias: np.ndarray | None, with_margins: bool) -> None:
    ln_probe.key_geometry(keys, bias=bias, margins=with_margins, threads=1)


def worst() -> None:
    """The slowest key of every family: alone, what white queries leave of a set is decided and its margin bracketed."""
    print(f"\nworst: one thread, processor time in ms of the slowest of {WORST_SAMPLE} keys that white queries leave")
    head("keys", "n", "d", "bias", "verdict", "margin")
    every = {**families.RANDOM, **families.HARD}
    slowest = 0.0
    for name, family in every.items():
        for n, d in WORST:
            for biased in (False, True):
                rng = np.random.default_rng(0)
                keys = family(rng, n, d)
                bias = rng.standard_normal(n) if biased else None
                where = score_space(keys, bias, None)
                sets, checker = coordinates(keys, bias), Checker(keys, bias, None, TAU)
                everything = prove_verdicts(checker, sets, decide(sets, 1)).verdicts
                none = processor_seconds(decide, sets, 1, np.empty(0, np.int64))  # white queries alone
                left = np.flatnonzero(decide(sets, 1, np.empty(0, np.int64)).code == UNDECIDED)
                some = rng.permutation(left if len(left) else np.arange(n))[:WORST_SAMPLE]
                verdict = max(processor_seconds(decide, sets, 1, np.array([i])) for i in some) - none
                bracket = checker, sets, where, everything, False, RELATIVE_GAP
                margin = max(processor_seconds(prove_margins, *bracket, np.array([i])) for i in some)
                slowest = max(slowest, verdict, margin)
                row(name, n, d, "yes" if biased else "no", f"{1e3 * verdict:.1f}", f"{1e3 * margin:.1f}")
    print(f"slowest: {1e3 * slowest:.0f} ms")


def checks(repeats: int = REPEATS) -> None:
    """What proving costs: processor time inside the independent checker, over the solvers' (bound: 0.15)."""
    print(f"\nchecks: one thread, medians of {repeats} repeats, the checker's processor time over the solvers'")
    head("keys", "n", "d", "verdicts", "verdicts and margins")
    for name, n, d, sets, _ in SPEED:
        keys = np.stack([families.RANDOM[name](np.random.default_rng(seed), n, d) for seed in range(sets)])
        row(name, n, d, *(f"{np.median([_share(keys, also) for _ in range(repeats)]):.2f}" for also in (False, True)))


def _share(keys: np.ndarray, with_margins: bool) -> float:
    """The checker's processor time over the rest of one call's, every public entry of the checker counted once."""
    spent, inside = 0.0, False

    def timed(work: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal spent, inside
            if inside:
                return work(*arguments, **named)
            inside, start = True, time.process_time()
            try:
                return work(*arguments, **named)
            finally:
                spent += time.process_time() - start
                inside = False

        return call

    own = {name: getattr(Checker, name) for name in CHECKS}
    for name, work in own.items():
        setattr(Checker, name, timed(work))
    try:
        whole = processor_seconds(_decide, keys, None, with_margins)
    finally:
        for name, work in own.items():
            setattr(Checker, name, work)
    return spent / (whole - spent)


def heads(layers: int = 12) -> None:
    """12 heads per layer of d_head 64, 512 keys each, in two threads."""
    print("\nheads: 12 × 12 heads of d_head 64, 512 keys, 2 threads; seconds, from one layer of them")
    head("keys", "verdicts", "and margins", "and attainable", "undecided", "margins > 1 %", "weights > 0.01")
    rng = np.random.default_rng(0)
    for name in ("normal", "norms × lognormal(1)", "low-rank heavy-tailed"):
        keys = np.stack([families.RANDOM[name](rng, 512, 64) for _ in range(12)])
        # Queries of the ellipsoid's surface give scores with a standard deviation of about 2.
        axes = np.stack([16 * np.eye(64) / np.sqrt((one**2).sum(1).mean()) for one in keys])
        queries = 0.1 * rng.standard_normal((12, 64)), axes
        geometry = ln_probe.key_geometry(keys, query_set=queries, threads=2)
        times = [
            layers * seconds(ln_probe.key_geometry, keys, threads=2, **named)
            for named in ({"margins": False}, {}, {"query_set": queries})
        ]
        here = geometry.verdict == "selectable"
        wide = geometry.margin_upper[here] > 1.0101 * geometry.margin_lower[here]
        open_ = geometry.attainable_upper - geometry.attainable > 0.0101
        undecided = int((geometry.verdict == "undecided").sum())
        row(name, *(f"{t:.1f}" for t in times), undecided, f"{wide.mean():.4f}", f"{open_.mean():.4f}")


SECTIONS = {
    "speed": speed,
    "verdicts": verdicts,
    "screen": screen,
    "hard": hard,
    "worst": worst,
    "checks": checks,
    "heads": heads,
}


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
        if arguments.out and printed:
            write_table(arguments.out / f"geometry-{name}.csv", printed)


if __name__ == "__main__":
    main()
