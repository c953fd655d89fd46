"""Bounds hold to the last bit where the truth is known exactly, and are about as tight as float64 allows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import ln_probe

Exact = np.longdouble


def exactly(values: np.ndarray) -> np.ndarray:
    """Return floats as fractions."""
    return np.array([Fraction(float(v)) for v in np.ravel(values)], object).reshape(np.shape(values))


def holds(lower: float, truth: Exact, upper: float) -> bool:
    rounding = 8 * np.finfo(Exact).eps * abs(truth)  # of the truth
    return bool(lower <= truth + rounding and truth - rounding <= upper)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e4, 1e7])
@pytest.mark.parametrize("biased", [False, True])
def test_one_query_alone(size: float, biased: bool) -> None:
    # Scores are those of the center: the margin is the gap to the best rival, attention a softmax.
    for seed in range(12):
        rng = np.random.default_rng([seed, biased])
        n, d = int(rng.integers(2, 60)), int(rng.integers(1, 9))
        keys, center = rng.standard_normal((n, d)), rng.standard_normal(d)
        far = (rng.random(n) < 0.4) * size  # far below the rest: their size rounds, their weight is 0
        if biased:
            bias = rng.standard_normal(n) - far
        else:
            bias, keys, center = None, np.column_stack([keys, -far]), np.append(center, 1.0)
        if size == 0.0:
            keys, bias = keys * 0.0, None
        axes = np.zeros((len(center), int(rng.integers(0, 3))))
        geometry = ln_probe.key_geometry(keys, bias, (center, axes))
        scores = exactly(keys) @ exactly(center) + (0 if bias is None else exactly(bias))
        steps = np.array(
            [Exact(1) * s.numerator / Exact(s.denominator) if s else Exact(0) for s in scores - scores.max()]
        )
        weights = np.exp(steps) / np.exp(steps).sum()
        largest = float(max(abs(scores)))
        for i in range(n):
            gap = scores[i] - max(np.delete(scores, i))
            lower, upper = (Fraction(float(v)) for v in (geometry.margin_lower[i], geometry.margin_upper[i]))
            assert lower <= gap <= upper
            assert float(upper - lower) <= 1e-13 * n * largest
            assert holds(geometry.attainable[i], weights[i], geometry.attainable_upper[i])
            assert geometry.attainable_upper[i] - geometry.attainable[i] <= 1e-13 * n * (1.0 + largest)


def test_two_keys_and_their_copies() -> None:
    # The margin of two keys is |Aᵀ(k - k')| + c·(k - k') + b - b'; copies of both share the attention.
    for seed in range(40):
        rng = np.random.default_rng(seed)
        d, size = int(rng.integers(1, 6)), 10.0 ** rng.uniform(-3, 3)
        pair, bias = rng.standard_normal((2, d)), size * rng.standard_normal(2)
        center, axes = rng.standard_normal(d), rng.standard_normal((d, d)) * 10.0 ** rng.uniform(-1, 1)
        step = exactly(pair[0]) - exactly(pair[1])
        along = (exactly(axes).T @ step).astype(Exact)
        lead = Exact(float(exactly(center) @ step + Fraction(bias[0]) - Fraction(bias[1])))
        reach = np.sqrt((along * along).sum())
        geometry = ln_probe.key_geometry(pair, bias, (center, axes))
        room = 1e-13 * (size + 100)
        for i, best in enumerate((reach + lead, reach - lead)):
            assert geometry.margin_lower[i] <= best + 1e-16 * abs(best)
            assert geometry.margin_upper[i] >= best - 1e-16 * abs(best)
            assert geometry.margin_upper[i] - geometry.margin_lower[i] <= room
        many = rng.integers(1, 30, 2)
        which = np.repeat([0, 1], many)
        geometry = ln_probe.key_geometry(pair[which], bias[which], (center, axes))
        for i, best in enumerate((reach + lead, reach - lead)):
            weight = 1 / (many[i] + many[1 - i] * np.exp(-best))
            got = np.flatnonzero(which == i)
            assert (geometry.attainable[got] <= weight * (1 + 1e-15 * abs(best))).all()
            assert (geometry.attainable_upper[got] >= weight * (1 - 1e-15 * abs(best))).all()


def test_a_bias_that_all_keys_share_is_none() -> None:
    for n in range(3, 30):
        keys = np.random.default_rng(n).standard_normal((n, 2))
        alone, shared = ln_probe.key_geometry(keys), ln_probe.key_geometry(keys, np.full(n, 0.1))
        assert (shared.verdict == alone.verdict).all()
        assert (shared.margin_lower == alone.margin_lower).all()
        assert (shared.margin_upper == alone.margin_upper).all()
