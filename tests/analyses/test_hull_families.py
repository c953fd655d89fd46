"""Verdicts that follow from a construction, on families made to break solvers; and pools of many keys."""

import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry import decide


def cross(d):
    return np.concatenate([np.eye(d), -np.eye(d)])


def check(keys, expected):
    geometry = ln_probe.key_geometry(keys, causal=True)
    geometry.certify()
    assert geometry.verdict.tolist() == expected


@pytest.mark.parametrize("d", [3, 8, 32])
@pytest.mark.parametrize("exponent", [3, 4, 5, 6, 8, 9])
def test_near_duplicates(d, exponent):
    # A corner of the cross-polytope and a copy moved along the plane that touches it there: both are
    # vertices, a good share of the step away from the hull, unless the step is below tau.
    for seed in range(5):
        step = np.random.default_rng(seed).standard_normal(d)
        step[0] = 0
        copy = np.eye(d)[0] + 10.0**-exponent * step / np.linalg.norm(step)
        twin = "duplicate" if exponent >= 8 else "selectable"
        check(np.concatenate([cross(d), copy[None]]), [twin] + ["selectable"] * (2 * d - 1) + [twin])


@pytest.mark.parametrize("d", [3, 8, 64])
def test_pairs_as_far_apart_as_the_tolerance(d):
    rng = np.random.default_rng(d)
    keys = rng.standard_normal((256, d))
    rms = np.sqrt((keys**2).sum(1).mean())
    keys = np.concatenate([keys, keys + 1e-7 * rms / np.sqrt(d) * rng.standard_normal((256, d))])
    geometry = ln_probe.key_geometry(keys, causal=True)
    geometry.certify()
    assert "undecided" not in geometry.verdict
    assert 50 < (geometry.representative[256:] < 256).sum() < 206  # about half are one key
    vertex = geometry.verdict == "selectable"
    assert (geometry.margin_upper[vertex] <= 1.0101 * geometry.margin_lower[vertex]).all()


@pytest.mark.parametrize("d", [3, 8, 32])
@pytest.mark.parametrize("offset", [1e-6, -1e-6, 0])
def test_a_point_near_a_facet(d, offset):
    verdict = "selectable" if offset > 0 else "unselectable"
    for seed in range(5):
        facet = np.random.default_rng(seed).dirichlet(np.full(d, 10.0)) @ np.eye(d)
        point = facet + offset * np.ones(d) / np.sqrt(d)
        check(np.concatenate([cross(d), point[None]]), ["selectable"] * (2 * d) + [verdict])


@pytest.mark.parametrize("d", [2, 8, 32])
def test_a_line_in_any_direction(d):
    rng = np.random.default_rng(d)
    place = rng.permutation(np.arange(50.0))
    expected = ["selectable" if p in (0, 49) else "unselectable" for p in place]
    check(place[:, None] * rng.standard_normal(d) + 3, expected)


@pytest.mark.parametrize("d", [2, 8, 32])
def test_two_clusters(d):
    rng = np.random.default_rng(d)
    far = np.concatenate([rng.standard_normal((20, d)), rng.standard_normal((20, d)) + 1e10])
    check(far, ["duplicate"] * 40)  # each cluster is smaller than tau
    shift = np.zeros(d)
    shift[0] = 1e3
    one = np.concatenate([cross(d), np.zeros((1, d))])
    first, second = (["selectable"] * (2 * d) + ["unselectable"] for _ in range(2))
    first[0] = second[d] = "unselectable"  # the corners that face the other cluster
    check(np.concatenate([one, one + shift]), first + second)


@pytest.mark.parametrize("d", [3, 8, 32])
def test_float32_keys_on_a_sphere_and_inside(d):
    rng = np.random.default_rng(d)
    seeds = rng.standard_normal((3 * d, d))
    seeds /= np.linalg.norm(seeds, axis=1, keepdims=True)
    mixed = rng.dirichlet(np.ones(3 * d), 3 * d) @ seeds
    keys = np.concatenate([seeds, mixed]).astype(np.float32)
    check(keys, ["selectable"] * (3 * d) + ["unselectable"] * (3 * d))


def test_a_grid():
    grid = np.stack(np.meshgrid(*[np.arange(-1.0, 2.0)] * 3), axis=-1).reshape(-1, 3)
    corner = (np.abs(grid) == 1).all(axis=1)
    check(grid, ["selectable" if c else "unselectable" for c in corner])


def test_a_cyclic_polytope():
    t = np.linspace(-1, 1, 40)
    check(np.stack([t, t**2, t**3, t**4], axis=1), ["selectable"] * 40)


def families(rng, n, d):
    yield rng.standard_normal((n, d))
    yield rng.standard_normal((n, d)) * rng.lognormal(0, 1, (n, 1))
    yield rng.standard_normal((n, d)) * np.exp(-np.arange(d) / 6) * rng.lognormal(0, 1, (n, 1))
    seeds = rng.standard_normal((n // 2, d))
    yield np.concatenate([seeds, rng.dirichlet(np.ones(n // 2), n - n // 2) @ seeds])
    half = rng.standard_normal((n // 2, d))
    yield np.concatenate([half, half])  # everything twice


@pytest.mark.slow
@pytest.mark.parametrize(("large", "pool"), [(4096, 100), (100, 100)])
@pytest.mark.parametrize(("n", "d"), [(600, 4), (500, 24)])
def test_a_pool_gives_the_same_verdicts(n, d, large, pool, monkeypatch):
    for biased in (False, True):
        for keys in families(np.random.default_rng(n), n, d):
            bias = np.random.default_rng(d).standard_normal(n) if biased else None
            direct = ln_probe.key_geometry(keys, bias=bias, margins=False)
            with monkeypatch.context() as patch:
                patch.setattr(decide, "POOL", pool)
                patch.setattr(decide, "LARGE", large)
                pooled = ln_probe.key_geometry(keys, bias=bias, margins=False)
                one = ln_probe.key_geometry(keys, bias=bias, margins=False, threads=1)
            assert (direct.verdict == pooled.verdict).all()
            assert (one.verdict == pooled.verdict).all()
            assert "undecided" not in pooled.verdict
            pooled.certify()


def test_a_pool_of_ten_thousand_keys():
    rng = np.random.default_rng(0)
    corners = cross(12) * 3
    inside = rng.dirichlet(np.full(24, 0.3), 10_000) @ corners * 0.999
    geometry = ln_probe.key_geometry(np.concatenate([inside, corners]), margins=False)
    assert (geometry.verdict[:10_000] == "unselectable").all()
    assert (geometry.verdict[10_000:] == "selectable").all()
    sphere = rng.standard_normal((10_000, 12))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    assert (ln_probe.key_geometry(sphere, margins=False).verdict == "selectable").all()
