"""Margins against a cone program, attainable attention against a general solver's ascent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from architectures import cases
from geometry_families import FAMILIES, TAU, Case, layernormed32, rms, unit
from geometry_reference import attention, cone_program, margin, measured

import ln_probe

# What the references may lose to rounding, relative to the largest score.
ROUNDING = 1e-9


def wrong_margins(case: Case, keys: Iterable[int], **options: Any) -> list[str]:
    """Return the keys whose bracket misses the reference's, of a geometry whose certificates are right."""
    geometry = ln_probe.key_geometry(**case.arguments(), **options)
    geometry.certify()
    rows, lifts = measured(case)
    size = ROUNDING * (np.abs(rows).max() + np.abs(lifts).max())
    wrong = []
    for i in keys:
        lower, upper = margin(case, i)
        low, high = geometry.margin_lower[i], geometry.margin_upper[i]
        if not (low <= high and low <= upper + size and high >= lower - size):
            wrong.append(f"key {i}: [{low}, {high}], truth [{lower}, {upper}]")
    return wrong


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
    np.testing.assert_allclose(margin(case, 0), 2.5, atol=1e-9)


@pytest.mark.parametrize("seeds", cases(range(20), slow=[range(100), range(1000, 6000)]), ids=len)
def test_margins_of_off_centre_ellipsoids(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng([7, seed])
        case = off_centre(rng)
        keys = sorted({0, int(rng.integers(len(case.keys))), len(case.keys) - 1})
        assert not wrong_margins(case, keys, margins="exact" if seed % 3 == 0 else True)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "bias" not in name])
def test_margins_of_every_family(name: str) -> None:
    for d, margins in ((2, "exact"), (5, True)):
        case = FAMILIES[name](np.random.default_rng(d), 24, d)
        assert not wrong_margins(case, range(0, len(case.keys), 4), margins=margins)


@pytest.mark.parametrize(("margins", "most"), [(True, 0.0102), ("exact", 2e-5)])
@pytest.mark.parametrize(("name", "n", "d"), [
    ("normal", 30, 3), ("lattice", 30, 3), ("sink, clusters, heavy tails", 30, 3), ("pairs about 1e-6 apart", 60, 8),
    ("through an off-centre query set", 150, 8),
])  # fmt: skip
def test_brackets_are_narrow(name: str, n: int, d: int, margins: Any, most: float) -> None:
    # A bound that holds because it is wide would pass what is above.
    if name.startswith("pairs") and margins == "exact":
        most = 0.0102  # some tau: not measured more closely
    case = FAMILIES[name](np.random.default_rng(0), n, d)
    geometry = ln_probe.key_geometry(**case.arguments(), margins=margins)
    width = geometry.margin_upper - geometry.margin_lower
    size = np.maximum(np.abs(geometry.margin_upper), np.abs(geometry.margin_lower))
    clear = (size > 1e-5 * np.abs(size).max()) & (geometry.verdict != "unselectable")
    assert clear.any() or name == "lattice"
    if geometry.margin_unit == "rms":  # what tau decides is not measured more closely than tau
        assert (geometry.margin_upper[geometry.verdict == "unselectable"] <= 1.01 * geometry.tau).all()
    assert (width[clear] <= most * size[clear]).all()
    assert case.query_set is None or (geometry.attainable_upper - geometry.attainable <= 0.01 + 1e-12).all()


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e6, 1e8])
def test_margins_at_any_ratio_of_bias_to_scores(ratio: float) -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((4 + seed, 1 + seed % 3))
        bias = ratio * rng.standard_normal(len(keys))
        queries = np.zeros(keys.shape[1]), np.eye(keys.shape[1])
        case = Case(keys, bias, queries)
        assert not wrong_margins(case, range(len(keys)), margins=True if seed % 2 else "exact")


@pytest.mark.parametrize("query_set", [False, True])
def test_margins_of_float32_keys_near_tau(query_set: bool) -> None:
    rng = np.random.default_rng(3)
    keys = layernormed32(rng, 30, 6).astype(np.float64)
    keys = np.concatenate([keys, keys[:15] + TAU * rng.uniform(0.3, 3, (15, 1)) * rms(keys) * unit(rng, 15, 6)])
    queries = (np.zeros(6), 1e7 * np.eye(6)) if query_set else None
    assert not wrong_margins(Case(keys, None, queries), [*range(0, 15, 2), *range(30, 45, 2)])


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


@pytest.mark.parametrize(("seeds", "least"), cases((range(40), 100), slow=[(range(100, 2100), 5000)]))
def test_attention_is_bracketed(seeds: range, least: int) -> None:
    sharp = 0
    for seed in seeds:
        rng = np.random.default_rng([11, seed])
        n, d = int(rng.integers(2, 16)), int(rng.integers(1, 6))
        keys = rng.standard_normal((n, d)) * rng.lognormal(0, rng.choice([0.0, 1.0]), (n, 1))
        bias = 3 * rng.standard_normal(n) if rng.random() < 0.5 else None
        axes = rng.standard_normal((d, int(rng.integers(1, d + 2)))) * 10.0 ** rng.uniform(-1, 1.3)
        case = Case(keys, bias, (3 * rng.standard_normal(d), axes))
        geometry = ln_probe.key_geometry(**case.arguments(), margins=False)
        for i in range(min(n, 3)):
            lower, upper = attention(case, i, 0.1 * rng.standard_normal(axes.shape[1]))
            assert geometry.attainable[i] <= upper + ROUNDING, f"seed {seed} key {i}"
            assert geometry.attainable_upper[i] >= lower - ROUNDING, f"seed {seed} key {i}"
            assert geometry.attainable_upper[i] - geometry.attainable[i] <= 0.01 + 1e-12
            sharp += upper - lower < 1e-3
    assert sharp > least  # brackets narrow enough to mean something, of some three a set
