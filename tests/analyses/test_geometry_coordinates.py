"""Coordinates in which keys are judged, seen and searched, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from geometry_families import conditioned

from ln_probe.analyses.geometry.keys import (
    centre,
    judge,
    level_queries,
    query_sets,
    see,
    whiten,
    whiten_carefully,
    whiten_flat,
)

Keys = np.ndarray


def keys_of(kind: str, rng: np.random.Generator, n: int = 30, d: int = 5) -> Keys:
    keys = rng.standard_normal((n, d)) * np.geomspace(1.0, 30.0, d)
    if kind == "flat":
        keys[:, 1] = keys[:, 0] + keys[:, 2]
    if kind == "thin":
        keys[:, 1] = 1e-6 * keys[:, 1] + keys[:, 3]
    return keys @ conditioned(rng, d, 1.0) if kind != "few" else keys[: d - 2]


@pytest.mark.parametrize("kind", ["round", "flat", "thin", "few"])
@pytest.mark.parametrize("biased", [False, True])
def test_white_keys_have_one_length_along_every_direction(kind: str, biased: bool) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        keys = keys_of(kind, rng)
        rows = judge(*centre(keys[None]), rng.standard_normal((1, len(keys))) if biased else None, None).rows
        values = np.linalg.svd(rows[0], compute_uv=False) / np.sqrt(len(keys))
        ways = [whiten(rows, biased), whiten_carefully(rows[0], biased)]
        if kind == "flat" and not biased:
            flat = whiten_flat(rows[0], biased)
            assert flat.thinnest[0] == pytest.approx(values[values > 1e-9].min())
            ways.append(flat)
        assert not biased or whiten_flat(rows[0], biased) is None
        for white in ways:
            rank = min(int((values > 1e-9).sum()), len(keys) - 1)
            assert white.rows.shape == (1, len(keys), rank)
            tall = white.rows[0].T @ white.rows[0] / len(keys)
            np.testing.assert_allclose(tall, np.eye(rank), atol=1e-9 if kind != "thin" else 1e-3)
            np.testing.assert_allclose(rows @ white.to_query, white.rows, atol=1e-9 if kind != "thin" else 1e-3)
            assert white.lifted == (biased and kind != "few")  # a bias of few keys is an affine function of them
            if kind != "few":
                assert values[rank - 1] * 0.99 <= white.thinnest[0] <= 30 * rank * values[rank - 1]
            if white.lifted:  # only the last coordinate looks along the bias, and it looks up
                assert (white.to_query[0, -1, :-1] == 0.0).all()
                assert white.to_query[0, -1, -1] > 0.0


def test_the_query_under_which_all_keys_score_alike() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        keys = rng.standard_normal((12, 4))
        axes = rng.standard_normal((4, int(rng.integers(3, 7))))
        inside = 0.5 * rng.standard_normal(axes.shape[1])
        inside /= max(1.0, 1.1 * np.linalg.norm(inside))
        for center, known in ((-axes @ inside, True), (100.0 * np.ones(4), False), (np.zeros(4), True)):
            sets = query_sets((center, axes), 1, 4)
            points, _ = centre(keys[None])
            seen = see(points, None, sets)
            level, found = level_queries(seen, sets, None)
            assert bool(found[0]) == known
            if known:
                scores = keys @ (sets[0].center + sets[0].axes @ level[0])
                assert np.ptp(scores) <= 1e-9
                assert np.linalg.norm(level[0]) <= 1.0
        bias = points[0] @ axes @ inside  # what the queries can take away
        sets = query_sets((np.zeros(4), axes), 1, 4)
        seen = see(points, bias[None], sets)
        level, found = level_queries(seen, sets, bias[None])
        assert found[0]
        assert np.ptp(seen.rows[0] @ level[0] + seen.offset[0]) <= 1e-9
