"""How narrow brackets are, how few keys the search leaves, and what a small budget buys: no worse than was recorded.

A bound that holds because it is wide, or a search that takes twice the steps, passes every proof. What is measured of
each family, over `SETS` (a budget counts multiply-adds, so nothing depends on the clock):

* late: keys that only the search in more digits decided, or that none did;
* margins, exact: summed widths of the brackets of each precision, each as a share of the margin (at most 1; of a
  ten-thousandth of the largest margin where that is more);
* attention: summed widths of its brackets;
* for each budget: undecided keys and the summed widths of margins and of attention.

`RECORDED` is what `measured` returned when this test was written. `SLACK` leaves room for the rounding of other
processors. Smaller is better: lower a figure when it falls.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from geometry_families import FAMILIES, rms

import ln_probe

# Keys, dimensions and seeds; radii of the query sets of families without one, over the keys' RMS norm.
SETS = [(24, 2, 3), (40, 4, 2), (60, 8, 2), (96, 20, 1)]
RADII = 3.0, 30.0
# Seconds per key, for each number of a set.
BUDGETS = 1e-8, 5e-8, 2e-7
SLACK = 1.1
# What is added to each figure: a key, for counts; widths of some keys where there are next to none.
MORE = np.array([1.0, 0.01, 1e-3, 0.01] + [1.0, 0.01, 0.01] * len(BUDGETS))
# Late, margins, exact, attention; then of each budget undecided, margins, attention.
# fmt: off
RECORDED = {
    "normal": [0, 0.106, 1.02e-08, 0.875, 2, 9.98, 50.5, 0, 0.106, 23.9, 0, 0.106, 0.965],
    "norms × lognormal(1)": [0, 0.0343, 2.53e-07, 1.2, 38, 41.7, 70.2, 0, 0.0343, 24.6, 0, 0.0343, 1.55],
    "half planted interior": [0, 0.0588, 2.59e-08, 1.19, 48, 50.1, 58.8, 0, 0.0588, 15.7, 0, 0.0588, 1.4],
    "low-rank heavy-tailed": [0, 0.0252, 2.03e-07, 1.29, 28, 45.3, 67.1, 0, 5.98, 32.3, 0, 0.0252, 1.37],
    "keys of a head": [0, 0.0324, 3.88e-07, 0.894, 2, 29.2, 68.5, 0, 0.0324, 19.1, 0, 0.0324, 0.969],
    "LayerNorm'd normal": [0, 72.1, 72, 0.527, 0, 72.1, 9.68, 0, 72.1, 0.602, 0, 72.1, 0.527],
    "pairs about 1e-3 apart": [0, 0.0245, 7.38e-05, 1.27, 6, 8.93, 57.4, 0, 0.0245, 28.5, 0, 0.0245, 1.52],
    "pairs about 1e-6 apart": [23, 33.9, 33.9, 1, 3, 42.8, 62.5, 0, 33.9, 36.4, 0, 33.9, 1.15],
    "pairs about 1e-7 apart": [135, 77.4, 77.3, 0.897, 4, 87.1, 52.1, 0, 77.4, 28.5, 0, 77.4, 0.94],
    "pairs about 1e-8 apart": [0, 21.6, 21.2, 0.847, 0, 30.5, 53.9, 0, 21.6, 25.7, 0, 21.6, 1.04],
    "everything twice": [0, 368, 368, 1.07, 0, 368, 56.3, 0, 368, 31.7, 0, 368, 1.36],
    "low rank, t(2)": [0, 0.055, 2.1e-07, 1.27, 8, 33.8, 76, 0, 0.055, 36.4, 0, 0.055, 1.53],
    "normal, with a bias": [0, 0.04, 0, 0.992, 11, 38.3, 48.4, 0, 0.04, 22.9, 0, 0.04, 1.07],
    "float32 LayerNorm'd": [58, 5.18, 5, 0.521, 0, 5.2, 9.16, 0, 5.18, 0.81, 0, 5.18, 0.521],
    "norms log-uniform over 8 decades": [0, 0.0345, 0.00622, 1.18, 113, 30.4, 29, 1, 0.509, 8.1, 0, 0.0345, 1.18],
    "norms × lognormal(4)": [0, 0.0189, 0.000199, 1.09, 106, 19.7, 57.4, 6, 0.433, 9.06, 0, 0.0189, 1.1],
    "clusters up to 1e8 apart": [71, 76.3, 76.1, 0.000258, 2, 80.8, 0.000251, 0, 77, 0.000258, 0, 76.3, 0.000258],
    "sink, clusters, heavy tails": [0, 0.0648, 1.51e-07, 0.982, 18, 25, 52, 0, 0.0648, 3.68, 0, 0.0648, 0.982],
    "copies 0.3 to 3 tau apart": [188, 56.8, 56.5, 1.06, 15, 62, 60.8, 0, 56.8, 32.3, 0, 56.8, 1.1],
    "chains of near-equal keys": [260, 145, 146, 0.839, 7, 158, 28.8, 0, 145, 12.7, 0, 145, 0.839],
    "lattice": [0, 0.13, 6.93e-09, 0.799, 0, 3.67, 33.9, 0, 0.13, 18, 0, 0.13, 1.47],
    "rank-deficient": [0, 0.0366, 2.08e-07, 1.2, 0, 0.0488, 96.3, 0, 0.0366, 33.4, 0, 0.0366, 1.21],
    "offset 1e8 to 1e10": [0, 0.107, 6.1e-08, 0.872, 6, 14.2, 52.7, 0, 0.107, 26.4, 0, 0.107, 0.984],
    "on a facet, and a few tau beside it": [0, 0.0455, 0.00342, 1.19, 49, 49.7, 76.6, 0, 0.0455, 42.5, 0, 0.0455, 1.69],
    "bias with a large linear part": [
        0, 0.0021, 0, 9.38e-09, 5, 0.0021, 9.38e-09, 0, 0.0021, 9.38e-09, 0, 0.0021, 9.38e-09,
    ],
    "lattice, with a bias": [0, 0.075, 0, 0.867, 4, 16.1, 29.4, 0, 0.075, 10.9, 0, 0.075, 0.912],
    "through an off-centre query set": [0, 0.0193, 3.9e-07, 25.3, 32, 42.3, 104, 0, 0.761, 85.8, 0, 0.0193, 78.3],
    "through queries along fewer axes": [0, 0.0194, 8.51e-07, 0.328, 13, 9.01, 40, 0, 0.0194, 4.06, 0, 0.0194, 0.625],
    "through queries, basis changed by 1e4 to 1e7": [
        2, 0.0772, 9.82e-06, 0.821, 2, 4.46, 12.8, 0, 0.0772, 1.07, 0, 0.0772, 0.821,
    ],
}
# fmt: on


def widths(lower: np.ndarray, upper: np.ndarray, *, relative: bool = True) -> float:
    """The summed widths of brackets; 1 for a bracket without an end."""
    width, size = upper - lower, np.nan_to_num(np.maximum(np.abs(lower), np.abs(upper)), posinf=0.0)
    if relative:  # what is known to be about 0 is narrow
        width = width / np.maximum(size, max(1e-4 * size.max(), 1e-300))
    return float(np.minimum(np.nan_to_num(width, posinf=np.inf), 1.0).sum())


def measured(name: str) -> np.ndarray:
    """The figures of a family, in the order of `RECORDED`."""
    total = np.zeros(4 + 3 * len(BUDGETS))
    for n, d, seeds in SETS:
        for seed in range(seeds):
            case = FAMILIES[name](np.random.default_rng([zlib.crc32(name.encode()), seed, n]), n, d)
            given = case.arguments()
            queries = RADII[seed % 2] / rms(case.keys) if case.query_set is None else case.query_set
            exact = ln_probe.key_geometry(**given, margins="exact", threads=1)
            row = []
            for budget in (1.0, *(share * n * d for share in BUDGETS)):
                one = ln_probe.key_geometry(**given | {"query_set": queries}, budget=budget, threads=1)
                late = one.undecided + (one.repaired if budget == 1.0 else 0)
                row += [late, widths(one.margin_lower, one.margin_upper)]
                row += [widths(one.attainable, one.attainable_upper, relative=False)]
            total += [*row[:2], widths(exact.margin_lower, exact.margin_upper), *row[2:]]
    return total


@pytest.mark.parametrize("name", FAMILIES)
def test_the_search_is_no_worse_than_it_was(name: str) -> None:
    figures = measured(name)
    most = SLACK * np.array(RECORDED[name]) + MORE
    assert (figures <= most).all(), f"{name}: {figures.round(4)}, at most {most.round(4)}"
