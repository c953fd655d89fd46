"""Attainable weights against a general solver whose answer is bracketed in fifty digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from geometry_families import Case
from geometry_reference import Truth
from scipy.optimize import minimize

import ln_probe

DIGITS = 50
# Widest bracket of the reference that may judge: a tenth of what attainable weights are read to.
SHARP = 1e-3


def bracket(truth: Truth, i: int, start: np.ndarray) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The largest softmax weight of key i over the set: at a point, and at most, as log w is concave."""
    scores = np.array([float(v * truth.h_scale) for v in truth.h - truth.h[i]])
    steps = np.array([[float(v * truth.scale) for v in row] for row in truth.z - truth.z[i]])

    def loss(u):
        return np.logaddexp.reduce(scores + steps @ u)

    def slope(u):
        exponents = scores + steps @ u
        share = np.exp(exponents - np.logaddexp.reduce(exponents))
        return share @ steps

    ball = {"type": "ineq", "fun": lambda u: 1 - u @ u, "jac": lambda u: -2 * u}
    best = None
    for first in (start, 0.5 * start):
        solved = minimize(
            loss, first, jac=slope, constraints=ball, method="SLSQP", options={"maxiter": 1000, "ftol": 1e-14}
        )
        if best is None or solved.fun < best.fun:
            best = solved
    u = best.x / max(np.linalg.norm(best.x), 1.0)
    with mpmath.workdps(DIGITS):
        at = [mpmath.mpf(float(v)) for v in u]
        length = mpmath.sqrt(sum(v * v for v in at))
        at = [v / length for v in at] if length > 1 else at
        whole = [[as_mpf(v * truth.scale) for v in row] for row in truth.z - truth.z[i]]
        lifts = [as_mpf(v * truth.h_scale) for v in truth.h - truth.h[i]]
        odds = [
            mpmath.exp(h + sum(a * b for a, b in zip(row, at, strict=True)))
            for h, row in zip(lifts, whole, strict=True)
        ]
        weight = 1 / sum(odds)
        gradient = [-sum(o * row[t] for o, row in zip(odds, whole, strict=True)) * weight for t in range(len(at))]
        gap = mpmath.sqrt(sum(g * g for g in gradient)) - sum(g * v for g, v in zip(gradient, at, strict=True))
        return weight, min(weight * mpmath.exp(gap), mpmath.mpf(1))


def as_mpf(value):
    return mpmath.mpf(value.numerator) / value.denominator


def judged(seeds: range) -> int:
    sharp = 0
    for seed in seeds:
        rng = np.random.default_rng([11, seed])
        n, d = int(rng.integers(2, 16)), int(rng.integers(1, 6))
        keys = rng.standard_normal((n, d)) * rng.lognormal(0, rng.choice([0.0, 1.0]), (n, 1))
        bias = 3 * rng.standard_normal(n) if rng.random() < 0.5 else None
        axes = rng.standard_normal((d, int(rng.integers(1, d + 2)))) * 10.0 ** rng.uniform(-1, 1.3)
        case = Case(keys, bias, (3 * rng.standard_normal(d), axes))
        geometry = ln_probe.key_geometry(**case.arguments(), margins=False)
        truth = Truth(case)
        for i in range(min(n, 3)):
            # To start in the middle of the set shares nothing with what is judged; `u` may be of other axes.
            lower, upper = bracket(truth, i, 0.1 * rng.standard_normal(axes.shape[1]))
            assert geometry.attainable[i] <= upper, f"seed {seed} key {i}"
            assert geometry.attainable_upper[i] >= lower, f"seed {seed} key {i}"
            assert geometry.attainable_upper[i] - geometry.attainable[i] <= 0.01 + 1e-12
            sharp += upper - lower < SHARP
    return sharp


def test_two_opposite_keys_are_bracketed_sharply():
    truth = Truth(Case(np.array([[1.0], [-1.0]]), None, (np.zeros(1), np.eye(1))))
    lower, upper = bracket(truth, 0, np.zeros(1))
    assert float(lower) == pytest.approx(1 / (1 + np.exp(-2)), abs=1e-9)
    assert lower <= 1 / (1 + mpmath.exp(-2)) + mpmath.mpf(10) ** -15
    assert float(upper - lower) < 1e-6


@pytest.mark.parametrize(
    ("seeds", "least"), [(range(60), 170), pytest.param(range(100, 2100), 5500, marks=pytest.mark.slow)]
)
def test_weights_are_bracketed(seeds, least):
    assert judged(seeds) > least  # brackets narrow enough to mean something, of some three a set
