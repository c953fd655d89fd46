"""How right the geometry of keys is, family by family: prints one table. `python bench/truth.py [keys per family]`.

Every verdict is compared with exact rational arithmetic and every fourth margin (without a bias, or through queries)
with a cone program that is bracketed exactly. Columns: keys tried; verdicts that are wrong; that are right but not
proved by what `witness` or `weights` gives; brackets of margins that the truth is outside of; undecided keys; sets
that `certify()` complains about; the longest time per key of a set in ms, one thread, the fastest of two runs.
"""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analyses"))

from geometry_families import FAMILIES, Case
from geometry_reference import Report, Truth

import ln_probe

KEYS_PER_FAMILY = 800
# Of the sets, in turn: keys and dimensions.
SHAPES = [(40, 2), (40, 3), (50, 4), (50, 6), (60, 20)]


def timed(case: Case) -> tuple[ln_probe.analyses.geometry.api.KeyGeometry, float]:
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        geometry = ln_probe.key_geometry(**case.arguments(), threads=1)
        taken.append(time.perf_counter() - start)
    return geometry, 1e3 * min(taken) / len(case.keys)


def family(name: str, wanted: int) -> tuple[Report, int, int, float]:
    """What is wrong with a family: the report, false alarms of `certify()`, margins compared, and the worst time."""
    report, alarms, margins, worst, seed = Report(), 0, 0, 0.0, 0
    while report.keys < wanted:
        rng = np.random.default_rng([zlib.crc32(name.encode()), 10**6 + seed])
        case = FAMILIES[name](rng, *SHAPES[seed % len(SHAPES)])
        geometry, took = timed(case)
        worst, truth = max(worst, took), Truth(case)
        report.add(truth.judge(geometry))
        if case.bias is None or case.query_set is not None:
            found, _ = truth.judge_margins(geometry, range(0, len(case.keys), 4))
            margins += found.keys
            report.bounds += found.bounds
        try:
            geometry.certify()
        except AssertionError:
            alarms += 1
        seed += 1
    return report, alarms, margins, worst


def main() -> None:
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else KEYS_PER_FAMILY
    ln_probe.key_geometry(np.random.default_rng(0).standard_normal((20, 3)), query_set=1.0)  # compiles
    heads = ("family", "keys", "wrong", "unproved", "margins", "false bounds", "undecided", "alarms", "ms per key")
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    total, all_alarms, all_margins, slowest = Report(), 0, 0, 0.0
    for name in FAMILIES:
        report, alarms, margins, worst = family(name, wanted)
        total.add(report, name)
        all_alarms, all_margins, slowest = all_alarms + alarms, all_margins + margins, max(slowest, worst)
        row(name, report, margins, alarms, worst)
    row("all", total, all_margins, all_alarms, slowest)
    for text in (total.wrong + total.unproved + total.bounds)[:20]:
        print(text)


def row(name: str, report: Report, margins: int, alarms: int, worst: float) -> None:
    counts = (report.keys, len(report.wrong), len(report.unproved), margins, len(report.bounds), report.undecided)
    print("| " + " | ".join(map(str, (name, *counts, alarms, f"{worst:.2f}"))) + " |", flush=True)


if __name__ == "__main__":
    main()
