"""The tensors of a GPU, on the processor: what they prove agrees with the kernels, and the kernels do the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from geometry_families import bench

from ln_probe.analyses.geometry.decide import NAMES, WEIGHT_GAP, Request, known_answers, solve_sets
from ln_probe.analyses.geometry.keys import QuerySet

CPU = torch.device("cpu")


def sets(name: str, count: int = 2, n: int = 40, d: int = 32) -> tuple[np.ndarray, list[QuerySet]]:
    rng = np.random.default_rng(len(name))
    keys = np.stack([(bench.RANDOM | bench.HARD)[name](rng, n, d) for _ in range(count)])
    keys[:, 1] = keys[:, 0]  # copies, which the tensors leave to the kernels
    axes = 2 * rng.standard_normal((count, d, d)) / d**0.5
    return keys, [QuerySet(0.3 * rng.standard_normal(d), one) for one in axes]


@pytest.mark.parametrize("name", [*bench.RANDOM, "attention-like"])
def test_tensors_and_kernels_agree(name: str) -> None:
    keys, queries = sets(name)
    inner, request = np.array([0.3, 1.0]), Request()
    alone = solve_sets(keys, None, queries, inner, request)
    together = solve_sets(keys, None, queries, inner, request, device=CPU)
    known = known_answers(keys, None, queries, inner, request, CPU)
    assert known is not None
    for one, two, proved in zip(alone, together, known, strict=True):
        one, two = one.answers, two.answers
        assert (one.verdicts.code == two.verdicts.code).all()
        decided = NAMES[proved.verdicts.code] == "selectable"
        assert decided[2:].any()
        assert (one.verdicts.code == proved.verdicts.code)[decided].all()
        for part in ("margins", "attention", "inner"):
            for other in (two, proved):
                low, high = (np.array(bound) for bound in getattr(one, part)[:2])
                lower, upper = (np.array(bound) for bound in getattr(other, part)[:2])
                assert not ((low > upper + 1e-12) | (lower > high + 1e-12)).any(), part
        assert (two.attention.upper - two.attention.lower <= WEIGHT_GAP).all()
        assert (two.inner.upper - two.inner.lower <= WEIGHT_GAP).all()


def test_verdicts_alone_and_what_is_not_suited() -> None:
    keys, queries = sets("normal")
    request = Request(gap=None, attention=False)
    codes = [solved.answers.verdicts.code for solved in solve_sets(keys, None, None, None, request, device=CPU)]
    assert all((NAMES[code[2:]] == "selectable").all() for code in codes)
    assert known_answers(keys, np.zeros(keys.shape[:2]), queries, None, request, CPU) is None
    assert known_answers(keys[:, :, :8], None, None, None, request, CPU) is None
