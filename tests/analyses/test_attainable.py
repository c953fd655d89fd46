"""How much attention a key can get: known answers (test_geometry_weights.py asks a general solver)."""

import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry.api import attainable_attention
from ln_probe.analyses.geometry.newton import WEIGHT_GAP


def weights(keys, queries):
    scores = queries @ keys.T
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def test_two_opposite_keys():
    # The best query of length R along a key gives it the score R, the other -R.
    for radius in (0.1, 1.0, 3.0):
        geometry = ln_probe.key_geometry(np.array([[1.0], [-1.0]]), query_set=radius)
        expected = 1 / (1 + np.exp(-2 * radius))
        assert (geometry.attainable <= expected + 1e-12).all()
        assert (geometry.attainable >= expected - WEIGHT_GAP).all()
        assert (geometry.attainable_upper >= expected - 1e-12).all()
        geometry.certify()


def test_a_key_in_the_middle_of_a_square():
    # By symmetry no query does better than zero: a fifth each.
    keys = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    geometry = ln_probe.key_geometry(keys, query_set=50.0)
    assert geometry.attainable[4] == pytest.approx(0.2, abs=WEIGHT_GAP)
    assert geometry.attainable_upper[4] >= 0.2
    assert (geometry.attainable[:4] > 0.98).all()
    assert np.isnan(ln_probe.key_geometry(keys).attainable).all()


def test_a_degenerate_ellipsoid_is_a_set_of_fewer_dimensions():
    rng = np.random.default_rng(0)
    keys, center = rng.standard_normal((20, 4)), rng.standard_normal(4)
    axis = rng.standard_normal((4, 1))
    line = np.linspace(-1, 1, 20001)[:, None]
    best = weights(keys, center + line @ axis.T).max(axis=0)
    for axes in (axis, np.concatenate([axis, np.zeros((4, 2))], axis=1), axis @ np.array([[0.6, 0.8]])):
        geometry = ln_probe.key_geometry(keys, query_set=(center, axes))
        geometry.certify()
        assert (np.abs(geometry.attainable - best) <= WEIGHT_GAP + 1e-6).all()
        # A line of queries sees two coordinates of a key: its score in the middle of the line, and how it grows.
        seen = ln_probe.key_geometry(keys @ axis, bias=keys @ center)
        assert (geometry.verdict == seen.verdict).all()
        scores = keys @ (center + line @ axis.T).T
        best_gap = [(scores[i] - np.delete(scores, i, axis=0).max(axis=0)).max() for i in range(20)]
        between = 2 * np.abs(keys @ axis).max() * (line[1, 0] - line[0, 0])  # what may be missed between two queries
        assert (geometry.margin_lower <= np.array(best_gap) + between).all()
        assert (geometry.margin_upper >= np.array(best_gap) - 1e-9).all()
    point = ln_probe.key_geometry(keys, query_set=(center, np.zeros((4, 0))))
    np.testing.assert_allclose(point.attainable, weights(keys, center[None])[0], atol=1e-12)
    np.testing.assert_allclose(point.attainable_upper, point.attainable, atol=1e-12)


def test_only_the_shape_of_the_ellipsoid_matters():
    rng = np.random.default_rng(0)
    keys, center, axes = rng.standard_normal((30, 4)), rng.standard_normal(4), rng.standard_normal((4, 4))
    rotation = np.linalg.qr(rng.standard_normal((9, 9)))[0][:4]
    here = ln_probe.key_geometry(keys, query_set=(center, axes), margins="exact")
    there = ln_probe.key_geometry(keys, query_set=(center, axes @ rotation), margins="exact")
    np.testing.assert_allclose(here.margin_lower, there.margin_lower, rtol=1e-5)
    np.testing.assert_allclose(here.attainable, there.attainable, atol=WEIGHT_GAP)


def test_nested_sets_give_nested_weights():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((100, 16)) * rng.lognormal(0, 1, (100, 1))
    center, axes = rng.standard_normal(16), rng.standard_normal((16, 16))
    small, _ = attainable_attention(keys, (center, 0.4 * axes))
    large, above = attainable_attention(keys, (center, axes))
    assert (small <= above + 1e-9).all()
    assert large.mean() > small.mean() + 0.05


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
    keys = rng.standard_normal((512, 64)) * rng.lognormal(0, 1, (512, 1))
    for size in (0.3, 1.0, 3.0):  # scores up to some 100 nats
        geometry = ln_probe.key_geometry(keys, query_set=size)
        assert (geometry.attainable_upper - geometry.attainable <= WEIGHT_GAP + 1e-12).all()
        geometry.certify()


def test_scores_that_overflow():
    keys = np.random.default_rng(0).standard_normal((9, 3)) * 1e200
    with pytest.raises(ValueError, match=r"scores of the keys over the query set overflow float64 \(.*\): scale keys"):
        ln_probe.key_geometry(keys, query_set=1e140)


def test_attention_alone_is_that_of_the_geometry():
    rng = np.random.default_rng(0)
    keys, bias = rng.standard_normal((3, 20, 4)), rng.standard_normal((3, 20))
    queries = rng.standard_normal((3, 4)), rng.standard_normal((3, 4, 6))
    geometry = ln_probe.key_geometry(keys, bias=bias, query_set=queries)
    weight, upper = attainable_attention(keys, queries, bias)
    np.testing.assert_allclose(weight, geometry.attainable, atol=WEIGHT_GAP)
    assert (weight <= geometry.attainable_upper + 1e-12).all()
    assert (geometry.attainable <= upper + 1e-12).all()
    alone, _ = attainable_attention(keys[1], (queries[0][1], queries[1][1]), bias[1])
    np.testing.assert_allclose(alone, weight[1], rtol=1e-9)
    tight, above = attainable_attention(keys, queries, bias, gap=1e-6)
    assert (above - tight <= 1e-6).all()
    assert (tight >= weight - 1e-9).all()


def test_attainable_at_is_the_query_and_a_good_place_to_start_from():
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((3, 40, 5)) * rng.lognormal(size=(3, 40, 1))
    center, axes = rng.standard_normal((3, 5)), rng.standard_normal((3, 5, 4))
    geometry = ln_probe.key_geometry(keys, query_set=(center, axes))
    assert (np.linalg.norm(geometry.attainable_at, axis=-1) <= 1 + 1e-12).all()
    for b in range(3):
        paid = weights(keys[b], center[b] + geometry.attainable_at[b] @ axes[b].T)
        np.testing.assert_allclose(paid.diagonal(), geometry.attainable[b], rtol=1e-9)
    cold, cold_upper = attainable_attention(keys, (center, axes / 2))
    warm, warm_upper = attainable_attention(keys, (center, axes / 2), starts=geometry.attainable_at)
    assert (warm_upper - warm <= WEIGHT_GAP).all()
    assert ((warm <= cold_upper + 1e-12) & (cold <= warm_upper + 1e-12)).all()  # both are certified
    one = attainable_attention(keys[0], (center[0], axes[0] / 2), starts=geometry.attainable_at[0])
    np.testing.assert_array_equal(one[0], warm[0])
    assert ln_probe.key_geometry(keys).attainable_at is None
