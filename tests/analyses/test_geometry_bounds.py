"""Margins against a cone program, attainable attention against an ascent, queries that heads can make."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases
from geometry_families import FAMILIES, TAU, Case, layernormed32, rms, unit
from geometry_reference import attention, margin, measured
from small_models import norm_of

import ln_probe
from ln_probe.analyses.geometry import queries
from ln_probe.analyses.geometry.attention import exponentials
from ln_probe.analyses.geometry.decide import WEIGHT_GAP, solve_sets
from ln_probe.analyses.geometry.keys import query_sets
from ln_probe.hooks.attention import Heads, Rotary

ROUNDING = 1e-9  # of the references, relative to the largest score


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
    order, best = np.sort(keys.sum(axis=1)), keys.sum(axis=1).argmax()
    # The one query of the set puts the key with the largest sum on top; its lead is its margin.
    lead = order[-1] - order[-2]
    assert geometry.margin_lower[best] - 1e-12 <= lead <= geometry.margin_upper[best] + 1e-12
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


def weights(keys, queries):
    scores = queries @ keys.T
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def test_axes_that_lack_directions_and_axes_of_no_length():
    rng = np.random.default_rng(0)
    keys, center, axis = rng.standard_normal((20, 4)), rng.standard_normal(4), rng.standard_normal((4, 1))
    best = weights(keys, center + np.linspace(-1, 1, 20001)[:, None] @ axis.T).max(axis=0)
    for axes in (axis, np.concatenate([axis, np.zeros((4, 2))], axis=1), axis @ np.array([[0.6, 0.8]])):
        geometry = ln_probe.key_geometry(keys, query_set=(center, axes))
        geometry.certify()
        assert (np.abs(geometry.attainable - best) <= WEIGHT_GAP + 1e-6).all()
        # A line of queries sees two coordinates of a key: its score in the middle of the line, and how it grows.
        assert (geometry.verdict == ln_probe.key_geometry(keys @ axis, bias=keys @ center).verdict).all()
    point = ln_probe.key_geometry(keys, query_set=(center, np.zeros((4, 0))))
    np.testing.assert_allclose(point.attainable, weights(keys, center[None])[0], atol=1e-12)
    np.testing.assert_allclose(point.attainable_upper, point.attainable, atol=1e-12)


def test_exponentials_are_exact_to_about_an_ulp() -> None:
    values, room, powers = np.linspace(-720.0, 3.0, 2001), np.empty(2001), np.empty(2001)
    total = exponentials.py_func(values, 3.0, room, room.view(np.int64), powers)
    np.testing.assert_allclose(powers, np.exp(values - 3.0), rtol=5e-16, atol=1e-304)
    assert total == pytest.approx(powers.sum(), rel=1e-14)


def test_attainable_at_is_the_query() -> None:
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((3, 40, 5)) * rng.lognormal(size=(3, 40, 1))
    center, axes = rng.standard_normal((3, 5)), rng.standard_normal((3, 5, 4))
    geometry = ln_probe.key_geometry(keys, query_set=(center, axes))
    assert (np.linalg.norm(geometry.attainable_at, axis=-1) <= 1 + 1e-12).all()
    for b in range(3):
        paid = weights(keys[b], center[b] + geometry.attainable_at[b] @ axes[b].T)
        np.testing.assert_allclose(paid.diagonal(), geometry.attainable[b], rtol=1e-9)
    alone = ln_probe.key_geometry(keys)
    assert alone.attainable_at is None
    assert np.isnan(alone.attainable).all()


def test_attention_over_a_part_of_a_set_is_that_of_the_set_shrunk_about_its_center() -> None:
    rng = np.random.default_rng(5)
    keys, bias = rng.standard_normal((3, 30, 4)), rng.standard_normal((3, 30))
    center, axes, radii = rng.standard_normal((3, 4)), rng.standard_normal((3, 4, 6)), np.array([0.1, 0.5, 1.0])
    solved = solve_sets(keys, bias, query_sets((center, axes), 3, 4), radii)
    shrunk = ln_probe.key_geometry(keys, bias=bias, query_set=(center, axes * radii[:, None, None]))
    for b, one in enumerate(solved):
        attention = one.answers.attention
        assert (attention.upper - attention.lower <= WEIGHT_GAP).all()
        assert (attention.lower <= shrunk.attainable_upper[b] + 1e-12).all()
        assert (shrunk.attainable[b] <= attention.upper + 1e-12).all()


D, D_HEAD = 12, 6


def heads_of(seed: int, heads: int = 2) -> Heads:
    draw = np.random.default_rng(seed).standard_normal
    W_Q, W_K, b_Q, b_K = (torch.from_numpy(draw((heads, *s))) for s in ((D, D_HEAD), (D, D_HEAD), (D_HEAD,), (D_HEAD,)))
    return Heads(0, W_Q, b_Q, W_K, b_K, 2.5, None, None, None)


def rotary(positions: int) -> Rotary:
    angles = torch.outer(torch.arange(float(positions)), torch.tensor([1.0, 0.3, 0.05])).repeat(1, 2).double()
    return Rotary(angles.cos(), angles.sin(), False)


def matrix_at(table: Rotary, position: int) -> np.ndarray:
    """R with R q the query q at a position."""
    eye = torch.eye(D_HEAD, dtype=torch.float64)[:, None]
    return table(eye, torch.full((D_HEAD,), position))[:, 0].numpy().T


@pytest.mark.parametrize("position", [None, 0, 5])
def test_a_query_of_a_norm_output_is_in_the_ellipsoid(position: int | None) -> None:
    site = norm_of(d_model=D, n_heads=1, n_ctx=64)
    heads = replace(heads_of(1), rotary=None if position is None else rotary(8))
    gain, bias = site.gain.double().numpy(), site.bias.double().numpy()
    turn = np.eye(D_HEAD) if position is None else matrix_at(heads.rotary, position)
    for _ in range(2):  # computed, and as it is known
        center, axes = (part.numpy() for part in queries.query_ellipsoid(heads, site, position or 0))
        wide = queries.query_directions(heads, site, position or 0)
        assert axes.shape == wide[1].shape == (2, D_HEAD, D_HEAD)
        for h in range(2):
            W = heads.W_Q[h].numpy()
            full = turn @ (W * gain[:, None]).T @ (np.eye(D) - 1 / D) / heads.divisor
            middle = turn @ (bias @ W + heads.b_Q[h].numpy()) / heads.divisor
            np.testing.assert_allclose(center[h], middle, atol=1e-9)
            np.testing.assert_allclose(wide[0][h], middle, atol=1e-9)
            np.testing.assert_allclose(axes[h] @ axes[h].T, D * full @ full.T, atol=1e-6)
            np.testing.assert_allclose(wide[1][h] @ wide[1][h].T, full @ full.T, atol=1e-6)
    other = queries.query_ellipsoid(heads, site, 3)[1].numpy()
    assert np.allclose(other, axes) == (position is None)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
def test_angles_of_many_rotated_queries(causal: bool, window: int | None) -> None:
    count, site = 70, norm_of(d_model=D, n_heads=1, n_ctx=64)
    heads = replace(heads_of(3), rotary=rotary(count), causal=causal, window=window)
    q = torch.from_numpy(np.random.default_rng(4).standard_normal((count, 2, D_HEAD)))
    got, gain = queries.angle_to_uniform(heads, site, q).numpy(), site.gain.double().numpy()
    table = np.stack([matrix_at(heads.rotary, t) for t in range(count)])
    expected = np.empty((count, 2))
    for t in range(count):
        seen = [j for j in range(count) if not causal or (j <= t and (window is None or j > t - window))]
        for h in range(2):
            v = gain * np.einsum("de,jfe,f->jd", heads.W_K[h].numpy(), table[seen], table[t] @ q[t, h].numpy())
            cosine = np.abs(v.sum(1)) / np.linalg.norm(v, axis=1) / math.sqrt(D)
            expected[t, h] = np.degrees(np.arccos(cosine)).mean()
    np.testing.assert_allclose(got, expected, rtol=1e-7)
    mean = queries.mean_angle(heads, site, q).numpy()
    np.testing.assert_allclose(mean, expected[1 if causal else 0 :].mean(0), rtol=1e-7)
    assert np.isnan(queries.mean_angle(heads, site, q[:1]).numpy()).all()
    assert np.isfinite(queries.mean_angle(heads, site, q[:2]).numpy()).all()
    assert np.isnan(queries.mean_angle(heads, replace(site, kind="rmsnorm"), q).numpy()).all()
