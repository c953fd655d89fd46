"""Queries that heads can make, and their angles to the uniform direction, against plain numpy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import norm_of

from ln_probe.analyses.geometry import queries
from ln_probe.hooks.attention import Heads, Rotary

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
    heads = heads_of(1)
    if position is not None:
        heads = replace(heads, rotary=rotary(8))
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


@pytest.mark.parametrize(("wide", "condition"), [(6, 1e2), (6, 1e9), (4, 1e2)])
def test_the_inverse_of_axes(wide: int, condition: float) -> None:
    rng = np.random.default_rng(2)
    left, right = np.linalg.qr(rng.standard_normal((6, 6)))[0], np.linalg.qr(rng.standard_normal((wide, wide)))[0]
    axes = np.stack([left[:, :wide] * np.geomspace(1.0, 1.0 / condition, wide) @ right, left[:, :wide] @ right])
    inverse = queries.ReachableQueries(torch.zeros(2, 6), torch.from_numpy(axes)).inverse.numpy()
    assert inverse.shape == (2, wide, 6)
    for part, given in zip(inverse, axes, strict=True):
        np.testing.assert_allclose(given @ part @ given, given, atol=1e-9)
        np.testing.assert_allclose(
            part, np.linalg.pinv(given, rcond=1e-15 * wide), rtol=1e-3, atol=1e-3 * np.abs(part).max()
        )


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
