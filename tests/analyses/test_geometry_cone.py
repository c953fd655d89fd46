"""Margins against an independent cone program, whose answer is itself bracketed in exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from geometry_families import FAMILIES, Case
from geometry_reference import Report, Truth, cone_program

import ln_probe

# Widest bracket of the cone program that may judge, over the diameter of the measured keys: Clarabel reaches 1e-8 to
# 1e-12. The geometry's own bracket is 1 % of the margin, or with "exact" about a millionth.
SHARP = 1e-6


def off_centre(rng: np.random.Generator) -> Case:
    """Keys of any kind under an ellipsoid that is off its centre, of any rank, with or without a bias."""
    n, d = int(rng.integers(3, 20)), int(rng.integers(1, 7))
    keys = rng.standard_normal((n, d)) * rng.lognormal(0, rng.choice([0.0, 1.0]), (n, 1))
    if rng.random() < 0.2:
        keys[1] = keys[0]
    if rng.random() < 0.2:
        keys[2] = keys[0] + 1e-7 * rng.standard_normal(d)
    bias = rng.standard_normal(n) * 10.0 ** rng.uniform(-2, 7) if rng.random() < 0.5 else None
    axes = rng.standard_normal((d, int(rng.integers(1, d + 3)))) * 10.0 ** rng.uniform(-2, 2)
    return Case(keys, bias, (rng.standard_normal(d) * 10.0 ** rng.uniform(-2, 2), axes))


def judged(seeds: range) -> Report:
    report = Report()
    for seed in seeds:
        rng = np.random.default_rng([7, seed])
        case = off_centre(rng)
        geometry = ln_probe.key_geometry(**case.arguments(), margins="exact" if seed % 3 == 0 else True)
        keys = {int(rng.integers(len(case.keys))), int(np.argmax(geometry.margin_lower)), 0}
        found, widest = Truth(case).judge_margins(geometry, sorted(keys))
        assert widest < SHARP
        report.add(found, f"seed {seed}")
    return report


def test_the_program_knows_a_square():
    # From the middle of the right edge of a square to its left: the best query is (1, 0), weights are the ends'.
    steps = np.array([[2.0, 1.0], [2.0, -1.0]])
    query, weights = cone_program(steps, np.array([0.5, 0.5]))
    np.testing.assert_allclose(query, [1, 0], atol=1e-6)
    np.testing.assert_allclose(weights / weights.sum(), [0.5, 0.5], atol=1e-6)
    case = Case(np.array([[2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), None, (np.array([0.25, 0.0]), np.eye(2)))
    lower, upper = Truth(case).margin(0)
    assert float(lower) == pytest.approx(2.5, abs=1e-9)
    assert lower <= 2.5 <= upper


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(100), range(1000, 6000)], ids=len)
def test_margins_of_off_centre_ellipsoids(seeds):
    report = judged(seeds)
    assert not report.bounds, str(report)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "bias" not in name])
def test_margins_of_every_family(name):
    for d in (2, 5):
        case = FAMILIES[name](np.random.default_rng(d), 24, d)
        truth = Truth(case)
        for margins in (True, "exact"):
            geometry = ln_probe.key_geometry(**case.arguments(), margins=margins)
            report, widest = truth.judge_margins(geometry, range(0, len(case.keys), 4))
            assert widest < SHARP
            assert not report.bounds, str(report)


@pytest.mark.parametrize(("margins", "most"), [(True, 0.0102), ("exact", 2e-5)])
@pytest.mark.parametrize(
    "name", ["normal", "normal, with a bias", "copies 0.3 to 3 tau apart", "through an off-centre query set"]
)
def test_brackets_are_narrow(name, margins, most):
    # A bound that holds because it is wide would pass what is above.
    case = FAMILIES[name](np.random.default_rng(1), 30, 3)
    geometry = ln_probe.key_geometry(**case.arguments(), margins=margins)
    width = geometry.margin_upper - geometry.margin_lower
    size = np.maximum(np.abs(geometry.margin_upper), np.abs(geometry.margin_lower))
    clear = (size > 1e-5 * np.abs(size).max()) & (geometry.verdict != "unselectable")
    assert clear.any() or name.startswith("copies")
    if geometry.margin_unit == "rms":  # what tau decides is not measured more closely than tau
        assert (geometry.margin_upper[geometry.verdict == "unselectable"] <= 1.01 * geometry.tau).all()
    assert (width[clear] <= most * size[clear]).all()
