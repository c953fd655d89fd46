"""Every error that the geometry allows for is at least what the error is in whole numbers, where they are near."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ln_probe.analyses.geometry.keys import centre, judge, query_sets, see


def exact(values: np.ndarray) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(np.asarray(values, float))


@pytest.mark.parametrize("scale", [1.0, 1e8])
@pytest.mark.parametrize("wide", [2, 9])
def test_what_scores_may_be_off_is_enough(wide: int, scale: float) -> None:
    # Keys far from the origin, and terms that cancel: rounding is much of what is left.
    for seed in range(4):
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((8, wide)) + scale
        bias = scale * rng.standard_normal(8)
        center, axes = scale * rng.standard_normal(wide), rng.standard_normal((wide, wide + 3))
        points, _ = centre(keys[None])
        seen = see(points, bias[None], query_sets((center, axes), 1, wide))
        scores = exact(keys) @ exact(center) + exact(bias)
        off = exact(seen.offset[0]) - scores
        allowed = seen.noise[0][:, None] + seen.noise[0][None, :]
        assert (np.abs((off[:, None] - off[None, :]).astype(float)) <= allowed).all()
        # Only the products of the axes are the same, so lengths of differences are compared.
        rows = exact(seen.rows[0])
        given = exact(keys) @ exact(axes)
        for i, j in ((0, 1), (2, 5)):
            here = float(((rows[i] - rows[j]) ** 2).sum()) ** 0.5
            there = float(((given[i] - given[j]) ** 2).sum()) ** 0.5
            assert abs(here - there) <= allowed[i, j]


def test_rows_are_the_keys_over_their_rms_norm() -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((12, 3)) + 1e6
    bias = rng.standard_normal(12) + 1e6
    judged = judge(*centre(keys[None]), bias[None], None)
    centred = exact(keys) - exact(keys).sum(axis=0) / 12
    size = float((centred**2).sum() / 12) ** 0.5
    assert judged.size[0] == pytest.approx(size, rel=1e-12)
    miss = exact(judged.rows[0, :, :3] * judged.size[0]) - centred
    miss = miss - miss.mean(axis=0)
    lengths = np.sqrt((miss**2).sum(axis=1).astype(float)) / size
    assert (lengths <= judged.noise[0]).all()
    lift = exact(bias) - exact(bias).mean()
    assert judged.lift_size[0] == pytest.approx(float((lift**2).mean()) ** 0.5, rel=1e-12)
    np.testing.assert_allclose(judged.rows[0, :, 3], (lift / Fraction(judged.lift_size[0])).astype(float), rtol=1e-9)
