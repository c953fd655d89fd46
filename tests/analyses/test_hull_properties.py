"""Laws of selectability, its agreement with a linear program, pools of many keys, and results that repeat."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import ln_probe
from ln_probe.analyses.geometry import decide
from ln_probe.analyses.geometry.api import KeyGeometry, key_geometry


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
    corners = np.concatenate([np.eye(12), -np.eye(12)]) * 3
    inside = rng.dirichlet(np.full(24, 0.3), 10_000) @ corners * 0.999
    geometry = ln_probe.key_geometry(np.concatenate([inside, corners]), margins=False)
    assert (geometry.verdict[:10_000] == "unselectable").all()
    assert (geometry.verdict[10_000:] == "selectable").all()
    sphere = rng.standard_normal((10_000, 12))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    assert (ln_probe.key_geometry(sphere, margins=False).verdict == "selectable").all()


# Small sets of keys on a coarse grid (ties, lines and planes are common) and generic ones.
GRID = st.integers(0, 10**6).map(
    lambda seed: np.random.default_rng(seed).integers(-2, 3, (3 + seed % 15, 1 + seed % 3)).astype(float)
)


GENERIC = st.integers(0, 10**6).map(
    lambda seed: np.random.default_rng(seed).standard_normal((3 + seed % 30, 1 + seed % 5))
)


KEYS = st.one_of(GRID, GENERIC)


SEEDS = st.integers(0, 10**6)


def verdicts(keys, **arguments):
    geometry = ln_probe.key_geometry(keys, margins=False, **arguments)
    geometry.certify()
    assert "undecided" not in geometry.verdict
    return geometry.verdict


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(KEYS, SEEDS)
def test_well_conditioned_affine_maps_do_not_matter(keys, seed):
    rng = np.random.default_rng(seed)
    d = keys.shape[1]
    left, right = (np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(2))
    change = left * rng.uniform(0.2, 5, d) @ right
    scale = 10.0 ** rng.uniform(-20, 20)
    moved = (keys @ change + rng.standard_normal(d) * 10) * scale
    assert (verdicts(moved) == verdicts(keys)).all()


@settings(deadline=None, max_examples=100)
@given(KEYS, SEEDS)
def test_an_interior_key_changes_nothing_else(keys, seed):
    # All weights positive on keys that are not all equal: strictly inside the hull.
    inside = np.random.default_rng(seed).dirichlet(np.full(len(keys), 5.0)) @ keys
    before, after = verdicts(keys), verdicts(np.concatenate([keys, inside[None]]))
    assert (after[:-1] == before).all()
    if np.ptp(keys, axis=0).max() > 0:
        assert after[-1] == "unselectable"


@settings(deadline=None, max_examples=100)
@given(KEYS, st.one_of(st.none(), SEEDS))
@pytest.mark.slow
def test_unselectability_is_monotone_in_t(keys, seed):
    bias = None if seed is None else np.random.default_rng(seed).integers(-1, 2, len(keys)).astype(float)
    geometry = ln_probe.key_geometry(keys, bias=bias, causal=True)
    geometry.certify()
    for t in range(len(keys)):
        now = verdicts(keys[: t + 1], bias=None if bias is None else bias[: t + 1])
        first = geometry.first_unselectable_at[: t + 1]
        by_position = (first >= 0) & (first <= t)
        assert (by_position == (now == "unselectable")).all()


def by_linear_program(keys, i, bias):
    """Feasible convex weights of the others: inside."""
    others = np.delete(keys, i, axis=0)
    sums = np.vstack([others.T, np.ones(len(others))])
    extra = {} if bias is None else {"A_ub": -np.delete(bias, i)[None], "b_ub": [-bias[i]]}
    solved = linprog(np.zeros(len(others)), A_eq=sums, b_eq=np.append(keys[i], 1.0), method="highs", **extra)
    assert solved.status in (0, 2)
    return "unselectable" if solved.status == 0 else "selectable"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "d"), [(100, 2), (150, 4), (100, 8), (100, 12)])
def test_agreement_with_a_linear_program(n, d, biased):
    rng = np.random.default_rng(1)
    keys, bias = rng.standard_normal((n, d)) * rng.lognormal(0, 1, (n, 1)), rng.standard_normal(n) if biased else None
    geometry = ln_probe.key_geometry(keys, bias=bias)
    geometry.certify()
    assert geometry.verdict.tolist() == [by_linear_program(keys, i, bias) for i in range(n)]
    assert (geometry.verdict == "unselectable").sum() > 5


def fingerprint(geometry: KeyGeometry) -> bytes:
    arrays = (
        geometry.margin_lower,
        geometry.margin_upper,
        geometry.attainable,
        geometry.attainable_upper,
        geometry.first_unselectable_at,
    )
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays) + "".join(geometry.verdict.ravel()).encode()


@pytest.mark.parametrize(("keys", "d"), [(24, 8), (40, 3), (90, 16)])
def test_bytes_do_not_depend_on_memory_or_threads(keys: int, d: int) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(4, keys, d)) * rng.lognormal(size=(4, keys, 1))
    ellipsoid = rng.normal(size=(4, d)), 3 * rng.normal(size=(4, d, d))
    seen = set()
    for trial in range(30):
        clutter = [np.full(int(n), np.nan) for n in rng.integers(1, 400, size=30)]  # holes for the allocator
        del clutter[:: 1 + trial % 3]
        geometry = key_geometry(vectors, query_set=ellipsoid, causal=True, threads=1 + trial % 3)
        seen.add(fingerprint(geometry))
    assert len(seen) == 1
