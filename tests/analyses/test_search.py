"""How much the search decides within its budget: a slower or looser search leaves more, though all is proved."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from geometry_families import FAMILIES, rms

import ln_probe

SIZES = ((12, 2), (40, 4), (60, 8), (100, 20), (200, 8))
# What 520 keys a family leave at 10, 30 and 100 multiplications per entry of the keys, and without a limit: margins
# wider than 1 %, attention wider than 0.01, verdicts that are open, verdicts that the compiled search left to the last
# stage. Measured when the search was last changed on purpose (`print` what `left_over` returns).
LEFT: dict[str, list[tuple[int, int, int, int]]] = {
    "normal": [(50, 89, 4, 22), (0, 43, 0, 0), (0, 17, 0, 0), (0, 0, 0, 0)],
    "norms × lognormal(1)": [(59, 186, 41, 68), (7, 122, 6, 2), (0, 26, 0, 0), (0, 0, 0, 0)],
    "half planted interior": [(61, 168, 51, 66), (0, 101, 0, 0), (0, 18, 0, 0), (0, 0, 0, 0)],
    "low-rank heavy-tailed": [(58, 220, 29, 72), (3, 144, 0, 0), (0, 30, 0, 0), (0, 0, 0, 0)],
    "keys of a head": [(116, 173, 7, 18), (5, 74, 0, 0), (0, 12, 0, 0), (0, 0, 0, 0)],
    "LayerNorm'd normal": [(25, 43, 0, 0), (24, 21, 0, 0), (24, 0, 0, 0), (24, 0, 0, 0)],
    "pairs about 1e-3 apart": [(37, 107, 10, 30), (0, 68, 0, 0), (0, 18, 0, 0), (0, 0, 0, 0)],
    "pairs about 1e-6 apart": [(35, 93, 7, 45), (2, 69, 0, 38), (2, 26, 0, 38), (2, 0, 0, 38)],
    "pairs about 1e-7 apart": [(48, 94, 7, 218), (12, 58, 0, 215), (11, 20, 0, 215), (11, 0, 0, 215)],
    "pairs about 1e-8 apart": [(158, 96, 0, 20), (126, 60, 0, 0), (126, 19, 0, 0), (126, 0, 0, 0)],
    "everything twice": [(484, 104, 2, 16), (482, 64, 0, 0), (482, 32, 0, 0), (482, 0, 0, 0)],
    "low rank, t(2)": [(86, 219, 10, 47), (5, 141, 0, 0), (0, 28, 0, 0), (0, 0, 0, 0)],
    "normal, with a bias": [(17, 88, 36, 26), (2, 50, 0, 1), (0, 18, 0, 0), (0, 0, 0, 0)],
    "float32 LayerNorm'd": [(3, 54, 0, 56), (0, 18, 0, 56), (0, 0, 0, 56), (0, 0, 0, 56)],
    "norms log-uniform over 8 decades": [(55, 91, 127, 45), (6, 73, 12, 11), (0, 3, 0, 0), (0, 0, 0, 0)],
    "norms × lognormal(4)": [(44, 170, 99, 120), (4, 101, 28, 13), (0, 8, 0, 0), (0, 0, 0, 0)],
    "clusters up to 1e8 apart": [(9, 0, 2, 143), (2, 0, 0, 141), (1, 0, 0, 141), (1, 0, 0, 141)],
    "sink, clusters, heavy tails": [(58, 160, 23, 63), (1, 100, 0, 1), (0, 7, 0, 0), (0, 0, 0, 0)],
    "copies 0.3 to 3 tau apart": [(34, 96, 37, 266), (10, 60, 0, 295), (10, 22, 0, 295), (10, 0, 0, 295)],
    "chains of near-equal keys": [(83, 44, 15, 409), (40, 19, 0, 423), (35, 15, 0, 423), (35, 0, 0, 423)],
    "lattice": [(35, 77, 3, 18), (0, 36, 0, 0), (0, 11, 0, 0), (0, 0, 0, 0)],
    "rank-deficient": [(1, 161, 0, 0), (0, 101, 0, 0), (0, 17, 0, 0), (0, 0, 0, 0)],
    "offset 1e8 to 1e10": [(58, 88, 13, 29), (0, 47, 0, 0), (0, 21, 0, 0), (0, 0, 0, 0)],
    "on a facet, and a few tau beside it": [(60, 167, 51, 68), (0, 124, 1, 9), (0, 44, 0, 0), (0, 0, 0, 0)],
    "bias with a large linear part": [(0, 0, 26, 41), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)],
    "lattice, with a bias": [(20, 76, 16, 3), (1, 40, 0, 0), (0, 9, 0, 0), (0, 0, 0, 0)],
    "through an off-centre query set": [(19, 66, 38, 58), (1, 60, 1, 4), (0, 59, 0, 0), (0, 36, 0, 0)],
    "through queries along fewer axes": [(12, 68, 35, 23), (1, 32, 0, 0), (0, 3, 0, 0), (0, 0, 0, 0)],
    "through queries, basis changed by 1e4 to 1e7": [(8, 150, 17, 31), (0, 54, 0, 24), (0, 0, 0, 24), (0, 0, 0, 24)],
}


def left_over(name: str, budget: float) -> tuple[int, int, int, int]:
    """Count what a budget per entry of the keys leaves open in a family's sets."""
    total = np.zeros(4, int)
    for n, d in SIZES:
        for seed in range(2 if n < 100 else 1):
            case = FAMILIES[name](np.random.default_rng([zlib.crc32(name.encode()), seed, n]), n, d)
            arguments = case.arguments()
            if case.query_set is None:
                arguments["query_set"] = (30.0 if (seed + n // 20) % 2 else 3.0) / rms(case.keys)
            geometry = ln_probe.key_geometry(**arguments, budget=budget * n * d * 1e-9)
            width = geometry.margin_upper - geometry.margin_lower
            size = np.maximum(np.abs(geometry.margin_upper), np.abs(geometry.margin_lower))
            clear = (geometry.verdict != "unselectable") & (size > 1e-5 * size.max())
            wide = clear & (width > 0.0101 * size), geometry.attainable_upper - geometry.attainable > 0.0101
            total += [wide[0].sum(), wide[1].sum(), geometry.undecided, geometry.repaired]
    return tuple(total.tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_budget_leaves(name: str) -> None:
    for budget, recorded in zip((10.0, 30.0, 100.0, 1e9), LEFT[name], strict=True):
        now = left_over(name, budget)
        for left, before in zip(now, recorded, strict=True):
            assert left <= before + 2 + 0.05 * before, (budget, now, recorded)
        if budget == 10.0:  # a budget that nothing counts would leave nothing
            assert sum(now) >= sum(recorded) / 2
