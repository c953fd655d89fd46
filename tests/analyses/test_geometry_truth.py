"""Faults that the geometry had, each from the input that showed it; the numbers count them.

What is asserted is the meaning of the results, against exact arithmetic or a bracket of the truth, not one number that
a version gave.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from geometry_families import TAU, Case, layernormed32, log_uniform, lognormal_4, near_copies, rms, unit
from geometry_reference import Truth

import ln_probe
from ln_probe.analyses.geometry.api import KeyGeometry


def proved(case: Case, only=None, **options):
    """The geometry of a case, after all that it says of some keys was found to be true."""
    geometry = ln_probe.key_geometry(**case.arguments(), **options)
    report = Truth(case).judge(geometry, only)
    assert not report.wrong, str(report)
    assert not report.unproved, str(report)
    geometry.certify()
    return geometry


def margins_hold(case: Case, keys=None, **options):
    geometry = ln_probe.key_geometry(**case.arguments(), **options)
    report, widest = Truth(case).judge_margins(geometry, range(len(case.keys)) if keys is None else keys)
    assert widest < 1e-6
    assert not report.bounds, str(report)
    geometry.certify()
    return geometry


# 1. Above 4096 distinct keys.


@pytest.mark.parametrize("d", [pytest.param(5, marks=pytest.mark.slow), 16])
def test_a01_weights_on_the_own_group_are_no_proof(d):
    keys = layernormed32(np.random.default_rng(d), 4600, d)
    geometry = ln_probe.key_geometry(keys, margins=False)
    for i in (0, 1, 4599, *np.flatnonzero(geometry.verdict == "unselectable")[:5]):
        if geometry.verdict[i] == "unselectable":
            used = np.flatnonzero(geometry.weights(i))
            assert geometry.representative[i] not in geometry.representative[used]
    geometry.certify()


# 2. A large bias.

LARGE_KEYS = np.array([0.7134277543772384, -0.15147551947498294, -2.4230035402710266, 1.1407576012853875])[:, None]
LARGE_BIAS = np.array([62426108.52498739, -123826051.85928093, -15394804.789543832, -116705747.23966487])


@pytest.mark.parametrize("margins", [True, "exact"])
def test_a02_margins_with_a_large_bias(margins):
    geometry = ln_probe.key_geometry(LARGE_KEYS, bias=LARGE_BIAS, query_set=1.0, margins=margins)
    truth = Truth(Case(LARGE_KEYS, LARGE_BIAS, (np.zeros(1), np.eye(1))))
    for i in range(4):
        lower, upper = truth.margin(i)
        assert float(upper - lower) < 1.0  # of scores of 10⁸
        assert geometry.margin_lower[i] <= upper
        assert geometry.margin_upper[i] >= lower
    geometry.certify()


@pytest.mark.parametrize("ratio", [1e6, 1e7, 1e8])
def test_a02_margins_at_any_ratio_of_bias_to_scores(ratio):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((4 + seed, 1 + seed % 3))
        bias = ratio * rng.standard_normal(len(keys))
        margins_hold(Case(keys, bias, (np.zeros(keys.shape[1]), np.eye(keys.shape[1]))), margins="exact")


# 3. Near-copies.


def test_a03_margins_count_merged_near_copies():
    size = 8000000.0
    for _ in range(4):  # the RMS norm depends, a little, on what is placed relative to it
        keys = np.array([[0, 0], [0, -0.95e-7 * size], [0, -2e-7 * size], [1e7, 1e7], [-1e7, 1e7]])
        size = rms(keys)
    case = Case(keys, None, (np.zeros(2), 100 * np.eye(2)))
    geometry = margins_hold(case, margins="exact")
    # The copy at .95e-7, not the one it was merged with.
    assert geometry.margin_lower[2] == pytest.approx(84.0, rel=1e-5)


@pytest.mark.parametrize("query_set", [False, True])
def test_a03_margins_of_float32_keys_near_tau(query_set):
    rng = np.random.default_rng(3)
    keys = layernormed32(rng, 30, 6).astype(np.float64)
    keys = np.concatenate([keys, keys[:15] + TAU * rng.uniform(0.3, 3, (15, 1)) * rms(keys) * unit(rng, 15, 6)])
    queries = (np.zeros(6), 1e7 * np.eye(6)) if query_set else None
    margins_hold(Case(keys, None, queries), keys=[*range(0, 15, 2), *range(30, 45, 2)])


# 4. The center of the query set.


def test_a04_a_margin_is_not_far_above_what_its_key_can_get():
    # A gap of m nats over each of n - 1 keys gives at least 1 / (1 + (n - 1) e^-m).
    for seed in range(10):
        rng = np.random.default_rng(seed)
        keys, axes = rng.standard_normal((24, 4)), rng.standard_normal((4, 4))
        geometry = ln_probe.key_geometry(keys, query_set=(5 * rng.standard_normal(4), axes))
        promised = 1 / (1 + (len(keys) - 1) * np.exp(-geometry.margin_lower))
        assert (promised <= geometry.attainable_upper + 1e-12).all()
        # And the odds of a key are at most e to its lead over the next.
        weight = np.minimum(geometry.attainable, 1 - 1e-9)
        assert (np.log(weight / (1 - weight)) <= geometry.margin_upper + 1e-6).all()


def test_a04_a_bias_per_key_is_a_center_in_one_more_dimension():
    rng = np.random.default_rng(5)
    keys, bias = rng.standard_normal((15, 3)), 4 * rng.standard_normal(15)
    lifted = np.column_stack([keys, bias])
    center = np.array([0.0, 0.0, 0.0, 1.0])
    here = margins_hold(Case(keys, bias, (np.zeros(3), np.eye(3))))
    there = margins_hold(Case(lifted, None, (center, np.eye(4)[:, :3])))
    assert (here.margin_lower <= there.margin_upper).all()
    assert (there.margin_lower <= here.margin_upper).all()


# 5. The basis of a head.


def test_a05_verdicts_are_about_the_keys_and_margins_about_the_queries_of_the_set():
    square = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
    square[:, 2] *= 5e-8  # within tau of the middle of the square, but 40 nats above it for the set's queries
    geometry = proved(Case(square, None, (np.zeros(3), np.diag([1.0, 1.0, 8e8]))))
    assert geometry.verdict.tolist() == ["selectable"] * 4 + ["unselectable"]
    assert geometry.attainable[4] > 0.99
    assert geometry.margin_lower[4] > 1.0
    assert geometry.reachable.all()


def test_a05_a_key_may_be_out_of_reach():
    # The fifth key leads the square by its length along an axis, and the set's queries are short there.
    square = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
    geometry = proved(Case(square, None, (np.zeros(3), np.diag([1.0, 1.0, 1e-8]))))
    assert geometry.verdict.tolist() == ["selectable"] * 5
    assert geometry.reachable.tolist() == [True] * 4 + [False]
    assert 0.0 <= geometry.margin_lower[4] <= geometry.margin_upper[4] < 1e-7
    assert ln_probe.key_geometry(square).reachable is None
    assert ln_probe.key_geometry(square, query_set=1.0, margins=False).reachable is None
    assert ln_probe.key_geometry(square[:1], query_set=1.0).reachable.tolist() == [True]
    assert ln_probe.key_geometry(square[[0, 0, 1]], query_set=1.0).reachable.tolist() == [False, False, True]


# 6. Radii at which scores are rounding.


def unless_refused(keys: np.ndarray, radius: float) -> KeyGeometry | None:
    """The geometry, or None where the radius is refused because scores would be rounding or overflow."""
    try:
        return ln_probe.key_geometry(keys, query_set=radius)
    except ValueError as error:
        if any(word in str(error) for word in (f"{radius:g}", "overflow", "round")):
            return None
        raise


@pytest.mark.parametrize("radius", [1e14, 1e18])
def test_a06_the_middle_of_two_keys_gets_no_more_than_a_third(radius):
    keys = np.array([[-1.0, 0.5], [3.0, -0.25], [1.0, 0.125]])  # the third is the middle of the others, exactly
    if (geometry := unless_refused(keys, radius)) is not None:
        assert geometry.attainable[2] <= 1 / 3 + 1e-9
        assert geometry.attainable_upper[2] >= 1 / 3 - 1e-9


@pytest.mark.parametrize("radius", [1e12, 1e14, 1e16, 1e18])
def test_a06_what_is_said_at_large_radii_is_true(radius):
    # The third key is within rounding of the middle: at these scores that decides, and exact arithmetic knows how.
    keys = np.array([[0.1, 0.3], [0.7, 0.9], [0.4, 0.6]])
    truth = Truth(Case(keys, None, (np.zeros(2), radius * np.eye(2))))
    if (geometry := unless_refused(keys, radius)) is not None:
        lower, upper = truth.margin(2)
        # A best gap of m nats over two keys leaves between 1 / (1 + 2 e^-m) and 1 / (1 + e^-m).
        least, most = 1 / (1 + 2 * np.exp(-min(float(lower), 700))), 1 / (1 + np.exp(-min(float(upper), 700)))
        assert geometry.attainable_upper[2] >= least - 1e-9
        assert geometry.attainable[2] <= most + 1e-9


# 7. Undecided where there is an answer.


def test_a07_gaps_between_tau_and_twice_tau_with_a_bias():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        d, share = int(rng.integers(1, 5)), rng.uniform(1.02, 1.98)
        corners = np.concatenate([np.eye(d), -np.eye(d)])
        facet = rng.dirichlet(np.ones(d)) @ np.eye(d)
        keys = np.concatenate([corners, facet[None]])
        keys[-1] += share * TAU * rms(keys) / np.sqrt(d)
        bias = rng.standard_normal(len(keys))
        bias[-1] = -(10 ** rng.uniform(-1, 3))
        geometry = proved(Case(keys, bias), margins=False)
        assert geometry.verdict[-1] == "selectable"


# 8. The checker, and chains of near-equal keys.


def test_a08_certify_believes_what_is_true_of_axes_that_are_zero():
    rng = np.random.default_rng(8)
    keys = rng.standard_normal((30, 4))
    geometry = ln_probe.key_geometry(keys, query_set=(np.ones(4), np.zeros((4, 2))))
    geometry.certify()
    order = np.sort(keys.sum(axis=1))
    best = int(keys.sum(axis=1).argmax())
    # The one query of the set puts the key with the largest sum on top; its lead is its margin.
    assert geometry.margin_lower[best] <= order[-1] - order[-2] + 1e-12
    assert geometry.margin_upper[best] >= order[-1] - order[-2] - 1e-12
    assert (np.delete(geometry.margin_upper, best) <= 0.0).all()


def test_a08_a_representative_is_the_first_key_within_tau():
    # A chain: each key within tau of the next only. The relation is not transitive, and no group is made of it.
    far = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    size = rms(np.concatenate([far, far[:1]]))
    chain = far[0] + np.outer(np.arange(3), [0.0, 0.7 * TAU * size])
    geometry = ln_probe.key_geometry(np.concatenate([chain, far[1:]]))
    assert geometry.representative.tolist() == [0, 0, 1, 3, 4, 5]


# 9. Time.


def test_a09_a_budget_ends_in_something_true():
    assert "budget" in inspect.signature(ln_probe.key_geometry).parameters
    rng = np.random.default_rng(9)
    for keys in (log_uniform(rng, 60, 12), lognormal_4(rng, 60, 12), near_copies(rng, 60, 6)):
        case = Case(keys)
        geometry = proved(case, margins=True, budget=1e-7)
        report, _ = Truth(case).judge_margins(geometry, range(0, 60, 6))
        assert not report.bounds, str(report)
        whole = ln_probe.key_geometry(keys)
        known = np.isin(geometry.verdict, ("selectable", "unselectable", "duplicate"))
        assert (geometry.verdict[known] == whole.verdict[known]).all()


# 11. (10, what is no index: test_geometry_bad_input.py.) How near attainable weights are to their bound.


def test_a11_attainable_is_within_a_hundredth_of_its_bound():
    rng = np.random.default_rng(11)
    keys = rng.standard_normal((100, 8)) * rng.lognormal(0, 1, (100, 1))
    geometry = ln_probe.key_geometry(keys, query_set=(rng.standard_normal(8), 3 * np.eye(8)))
    width = geometry.attainable_upper - geometry.attainable
    assert (width >= 0).all()
    assert (width <= 0.01 + 1e-12).all()
    assert "absolute" in str(KeyGeometry.__doc__)  # said where a reader of the column looks
