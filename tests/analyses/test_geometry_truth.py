"""Verdicts, margins and attainable weights against exact arithmetic, a cone program and a general solver.

What is asserted is the meaning of the results, against exact arithmetic or a bracket of the truth, not one number that
a version gave.
"""

from __future__ import annotations

import zlib
from typing import Any

import mpmath
import numpy as np
import pytest
from architectures import cases
from geometry_families import (
    FAMILIES,
    TAU,
    Case,
    bench,
    layernormed32,
    log_uniform,
    lognormal_4,
    near_copies,
    rms,
    unit,
)
from geometry_reference import Report, Truth, cone_program
from scipy.optimize import minimize

import ln_probe
from ln_probe.analyses.geometry.api import KeyGeometry

# Widest bracket of the cone program that may judge, over the diameter of the measured keys: Clarabel reaches 1e-8 to
# 1e-12. The geometry's own bracket is 1 % of the margin, or with "exact" about a millionth.
SHARP = 1e-6
DIGITS = 50
SHARP_WEIGHT = 1e-3  # of the general solver: a tenth of what attainable weights are read to


def generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), seed])


def judged(case: Case, **options: Any) -> tuple[KeyGeometry, Report]:
    geometry = ln_probe.key_geometry(**case.arguments(), **options)
    geometry.certify()
    return geometry, Truth(case).judge(geometry)


def true(report: Report) -> bool:
    assert not report.wrong, str(report)
    assert not report.unproved, str(report)
    assert not report.bounds, str(report)
    return True


# Verdicts.


@pytest.mark.parametrize("name", FAMILIES)
def test_no_verdict_is_wrong(name: str) -> None:
    for n, d in ((10, 1), (20, 3)):
        assert true(judged(FAMILIES[name](generator(name, d), n, d))[1])


@pytest.mark.parametrize("sizes", cases([(8, 1), (16, 2)], slow=[[(20, 4), (20, 3), (20, 6), (30, 20)]]), ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_strict_verdicts_are_those_of_exact_arithmetic(name: str, sizes: list[tuple[int, int]]) -> None:
    for n, d in sizes:
        case = FAMILIES[name](generator(name, 10 + d), n, d)
        geometry = ln_probe.key_geometry(**case.arguments(), margins=False, strict=True)
        truth = Truth(case)
        assert geometry.verdict.tolist() == [truth.verdicts.decide(i).code for i in range(len(case.keys))]


def test_the_reference_sees_what_is_wrong() -> None:
    case = Case(np.array([[0.0, 0.0], [1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]))
    truth, geometry = Truth(case), ln_probe.key_geometry(case.keys)
    assert not truth.judge(geometry).wrong
    geometry.verdict[0], geometry.verdict[1] = "selectable", "unselectable"
    geometry.representative[4] = 3

    class Lies:
        verdict, representative, tau = geometry.verdict, geometry.representative, geometry.tau

        def witness(self, i: int) -> np.ndarray:
            return np.array([1.0, 0.5])

        def weights(self, i: int) -> np.ndarray:
            return np.array([0.5, 0.0, 0.0, 0.0, 0.5])

    report = truth.judge(Lies())
    assert report.wrong == [
        "key 0 is selectable, but in the hull of its rivals",
        "key 1 is unselectable, but further than tau from the hull of its rivals",
        "representative of key 4 is 3",
    ]
    assert len(report.unproved) == 5  # the witness above selects key 1 alone


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 3, 4, 6, 20])
def test_twenty_thousand_keys(d: int) -> None:
    report, seed = Report(), 0
    while report.keys < (5000 if d != 20 else 1500):
        for name, family in FAMILIES.items():
            report.add(judged(family(generator(name, 100 + 1000 * d + seed), 60 if d == 20 else 40, d))[1], name)
        seed += 1
    assert true(report)
    assert report.undecided <= 0.001 * report.keys, str(report)


@pytest.mark.parametrize("seed", cases(0, slow=[1, 2]))
def test_verdicts_that_follow_from_a_construction(seed: int) -> None:
    for name, keys, expected in bench.adversarial(np.random.default_rng(seed)):
        geometry = ln_probe.key_geometry(keys, causal=True)
        geometry.certify()
        assert geometry.verdict.tolist() == expected, name


def test_gaps_between_tau_and_twice_tau_with_a_bias_are_decided() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        d, share = int(rng.integers(1, 5)), rng.uniform(1.02, 1.98)
        corners = np.concatenate([np.eye(d), -np.eye(d)])
        facet = rng.dirichlet(np.ones(d)) @ np.eye(d)
        keys = np.concatenate([corners, facet[None]])
        keys[-1] += share * TAU * rms(keys) / np.sqrt(d)
        bias = rng.standard_normal(len(keys))
        bias[-1] = -(10 ** rng.uniform(-1, 3))
        geometry, report = judged(Case(keys, bias), margins=False)
        assert true(report)
        assert geometry.verdict[-1] == "selectable"


def test_above_4096_keys_weights_on_the_own_group_are_no_proof() -> None:
    keys = layernormed32(np.random.default_rng(16), 4600, 16)
    geometry = ln_probe.key_geometry(keys, margins=False)
    for i in (0, 1, 4599, *np.flatnonzero(geometry.verdict == "unselectable")[:5]):
        if geometry.verdict[i] == "unselectable":
            used = np.flatnonzero(geometry.weights(i))
            assert geometry.representative[i] not in geometry.representative[used]
    geometry.certify()


def test_verdicts_are_about_the_keys_and_margins_about_the_queries_of_the_set() -> None:
    square = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
    near = square * [1.0, 1.0, 5e-8]  # within tau of the middle of the square, but 40 nats above it for the queries
    geometry, report = judged(Case(near, None, (np.zeros(3), np.diag([1.0, 1.0, 8e8]))))
    assert true(report)
    assert geometry.verdict.tolist() == ["selectable"] * 4 + ["unselectable"]
    assert geometry.attainable[4] > 0.99
    assert geometry.margin_lower[4] > 1.0
    assert geometry.reachable.all()
    # The fifth key leads the square by its length along an axis, and the set's queries are short there.
    geometry, report = judged(Case(square, None, (np.zeros(3), np.diag([1.0, 1.0, 1e-8]))))
    assert true(report)
    assert geometry.verdict.tolist() == ["selectable"] * 5
    assert geometry.reachable.tolist() == [True] * 4 + [False]
    assert 0.0 <= geometry.margin_lower[4] <= geometry.margin_upper[4] < 1e-7
    assert ln_probe.key_geometry(square).reachable is None
    assert ln_probe.key_geometry(square, query_set=1.0, margins=False).reachable is None
    assert ln_probe.key_geometry(square[:1], query_set=1.0).reachable.tolist() == [True]
    assert ln_probe.key_geometry(square[[0, 0, 1]], query_set=1.0).reachable.tolist() == [False, False, True]


def test_a_budget_ends_in_something_true() -> None:
    rng = np.random.default_rng(9)
    for keys in (log_uniform(rng, 60, 12), lognormal_4(rng, 60, 12), near_copies(rng, 60, 6)):
        geometry, report = judged(Case(keys), margins=True, budget=1e-7)
        assert true(report)
        assert true(Truth(Case(keys)).judge_margins(geometry, range(0, 60, 6))[0])
        whole = ln_probe.key_geometry(keys)
        known = np.isin(geometry.verdict, ("selectable", "unselectable", "duplicate"))
        assert (geometry.verdict[known] == whole.verdict[known]).all()


# Margins.


def margins_hold(case: Case, keys: Any = None, **options: Any) -> KeyGeometry:
    geometry = ln_probe.key_geometry(**case.arguments(), **options)
    report, widest = Truth(case).judge_margins(geometry, range(len(case.keys)) if keys is None else keys)
    assert widest < SHARP
    assert true(report)
    geometry.certify()
    return geometry


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


def test_the_program_knows_a_square() -> None:
    # From the middle of the right edge of a square to its left: the best query is (1, 0), weights are the ends'.
    steps = np.array([[2.0, 1.0], [2.0, -1.0]])
    query, weights = cone_program(steps, np.array([0.5, 0.5]))
    np.testing.assert_allclose(query, [1, 0], atol=1e-6)
    np.testing.assert_allclose(weights / weights.sum(), [0.5, 0.5], atol=1e-6)
    case = Case(np.array([[2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), None, (np.array([0.25, 0.0]), np.eye(2)))
    lower, upper = Truth(case).margin(0)
    assert float(lower) == pytest.approx(2.5, abs=1e-9)
    assert lower <= 2.5 <= upper


@pytest.mark.parametrize("seeds", cases(range(20), slow=[range(100), range(1000, 6000)]), ids=len)
def test_margins_of_off_centre_ellipsoids(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng([7, seed])
        case = off_centre(rng)
        geometry = ln_probe.key_geometry(**case.arguments(), margins="exact" if seed % 3 == 0 else True)
        keys = {int(rng.integers(len(case.keys))), int(np.argmax(geometry.margin_lower)), 0}
        report, widest = Truth(case).judge_margins(geometry, sorted(keys))
        assert widest < SHARP
        assert true(report), f"seed {seed}"


@pytest.mark.parametrize("name", [name for name in FAMILIES if "bias" not in name])
def test_margins_of_every_family(name: str) -> None:
    for d, margins in ((2, "exact"), (5, True)):
        case = FAMILIES[name](np.random.default_rng(d), 24, d)
        margins_hold(case, range(0, len(case.keys), 4), margins=margins)


@pytest.mark.parametrize(("margins", "most"), [(True, 0.0102), ("exact", 2e-5)])
@pytest.mark.parametrize(
    "name", ["normal", "normal, with a bias", "copies 0.3 to 3 tau apart", "through an off-centre query set"]
)
def test_brackets_are_narrow(name: str, margins: Any, most: float) -> None:
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


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e6, 1e8])
def test_margins_at_any_ratio_of_bias_to_scores(ratio: float) -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((4 + seed, 1 + seed % 3))
        bias = ratio * rng.standard_normal(len(keys))
        queries = np.zeros(keys.shape[1]), np.eye(keys.shape[1])
        margins_hold(Case(keys, bias, queries), margins=True if seed % 2 else "exact")


@pytest.mark.parametrize("query_set", [False, True])
def test_margins_of_float32_keys_near_tau(query_set: bool) -> None:
    rng = np.random.default_rng(3)
    keys = layernormed32(rng, 30, 6).astype(np.float64)
    keys = np.concatenate([keys, keys[:15] + TAU * rng.uniform(0.3, 3, (15, 1)) * rms(keys) * unit(rng, 15, 6)])
    queries = (np.zeros(6), 1e7 * np.eye(6)) if query_set else None
    margins_hold(Case(keys, None, queries), keys=[*range(0, 15, 2), *range(30, 45, 2)])


def test_margins_under_axes_that_are_zero() -> None:
    keys = np.random.default_rng(8).standard_normal((30, 4))
    geometry = ln_probe.key_geometry(keys, query_set=(np.ones(4), np.zeros((4, 2))))
    geometry.certify()
    order = np.sort(keys.sum(axis=1))
    best = int(keys.sum(axis=1).argmax())
    # The one query of the set puts the key with the largest sum on top; its lead is its margin.
    assert geometry.margin_lower[best] <= order[-1] - order[-2] + 1e-12
    assert geometry.margin_upper[best] >= order[-1] - order[-2] - 1e-12
    assert (np.delete(geometry.margin_upper, best) <= 0.0).all()


# Attainable weights.


@pytest.mark.parametrize("radius", [1e12, 1e14, 1e16, 1e18])
def test_what_is_said_at_radii_at_which_scores_are_rounding_is_true(radius: float) -> None:
    # The third key is within rounding of the middle: at these scores that decides, and exact arithmetic knows how.
    keys = np.array([[0.1, 0.3], [0.7, 0.9], [0.4, 0.6]])
    truth = Truth(Case(keys, None, (np.zeros(2), radius * np.eye(2))))
    try:
        geometry = ln_probe.key_geometry(keys, query_set=radius)
    except ValueError as error:
        if not any(word in str(error) for word in (f"{radius:g}", "overflow", "round")):
            raise
        return
    lower, upper = truth.margin(2)
    # A best gap of m nats over two keys leaves between 1 / (1 + 2 e^-m) and 1 / (1 + e^-m).
    least, most = 1 / (1 + 2 * np.exp(-min(float(lower), 700))), 1 / (1 + np.exp(-min(float(upper), 700)))
    assert geometry.attainable_upper[2] >= least - 1e-9
    assert geometry.attainable[2] <= most + 1e-9


def as_mpf(value: Any) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def bracket(truth: Truth, i: int, start: np.ndarray) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The largest softmax weight of key i over the set: at a point, and at most, as log w is concave."""
    scores = np.array([float(v * truth.h_scale) for v in truth.h - truth.h[i]])
    steps = np.array([[float(v * truth.scale) for v in row] for row in truth.z - truth.z[i]])

    def loss(u: np.ndarray) -> Any:
        return np.logaddexp.reduce(scores + steps @ u)

    def slope(u: np.ndarray) -> Any:
        exponents = scores + steps @ u
        share = np.exp(exponents - np.logaddexp.reduce(exponents))
        return share @ steps

    ball = {"type": "ineq", "fun": lambda u: 1 - u @ u, "jac": lambda u: -2 * u}
    options = {"maxiter": 1000, "ftol": 1e-14}
    tries = [
        minimize(loss, s, jac=slope, constraints=ball, method="SLSQP", options=options) for s in (start, 0.5 * start)
    ]
    best = min(tries, key=lambda found: found.fun)
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


@pytest.mark.parametrize(("seeds", "least"), cases((range(40), 110), slow=[(range(100, 2100), 5500)]))
def test_weights_are_bracketed(seeds: range, least: int) -> None:
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
            sharp += upper - lower < SHARP_WEIGHT
    assert sharp > least  # brackets narrow enough to mean something, of some three a set
