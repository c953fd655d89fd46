"""How much attention a key can get from one set of queries: known answers (test_geometry_bounds.py asks a solver)."""

from __future__ import annotations

import numpy as np

import ln_probe
from ln_probe.analyses.geometry.decide import WEIGHT_GAP, solve_sets
from ln_probe.analyses.geometry.keys import query_sets


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


def test_an_unselectable_key_gets_at_most_half():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((200, 4))
    geometry = ln_probe.key_geometry(keys, query_set=100.0)
    hidden = geometry.verdict == "unselectable"
    assert hidden.sum() > 50
    assert (geometry.attainable[hidden] <= 0.5).all()
    assert (geometry.attainable[geometry.margin_lower > 10.0] > 0.98).all()


def test_heavy_tailed_heads_are_certified():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((256, 32)) * rng.lognormal(0, 1, (256, 1))
    geometry = ln_probe.key_geometry(keys, query_set=3.0)  # scores up to some 100 nats
    assert (geometry.attainable_upper - geometry.attainable <= WEIGHT_GAP + 1e-12).all()
    geometry.certify()


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
