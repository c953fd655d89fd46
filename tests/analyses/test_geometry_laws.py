"""Laws: what must not change a result; coordinates and rounding, where the truth is known exactly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from geometry_families import FAMILIES, Case, conditioned

import ln_probe
from ln_probe.analyses.geometry import decide
from ln_probe.analyses.geometry import keys as key_sets


def case_of(name: str) -> Case:
    return FAMILIES[name](np.random.default_rng(1), 24, 4)


def geometry_of(case: Case):
    geometry = ln_probe.key_geometry(**case.arguments())
    geometry.certify()
    return geometry


def differing_keys(here, there, order):
    """Keys with different verdicts, or brackets that are apart; `order[i]` is the place of key i in the second."""
    decided = (here.verdict != "undecided") & (there.verdict[order] != "undecided")
    different = (here.verdict != there.verdict[order]) & decided
    for lower, upper, slack in (("margin_lower", "margin_upper", 0.0), ("attainable", "attainable_upper", 1e-9)):
        (low, high), (other_low, other_high) = ((getattr(g, lower), getattr(g, upper)) for g in (here, there))
        # Without a query set attention has no bounds: NaN.
        different |= (low > other_high[order] + slack) | (other_low[order] > high + slack)
    return np.flatnonzero(different)


@pytest.mark.parametrize("name", ["normal", "normal, with a bias", "lattice", "through an off-centre query set"])
def test_large_sets_do_without_a_table_of_products(name, monkeypatch):
    case = case_of(name)
    here = geometry_of(case)
    monkeypatch.setattr(decide, "MOST_PRODUCTS", 8)
    there = geometry_of(case)
    assert not len(differing_keys(here, there, np.arange(len(case.keys))))
    assert here.repaired == there.repaired == 0


def test_a_constant_added_to_every_bias_changes_nothing():
    rng = np.random.default_rng(2)
    keys, bias = rng.standard_normal((40, 3)), rng.integers(-8, 9, 40) / 4
    here, there = geometry_of(Case(keys, bias)), geometry_of(Case(keys, bias + 1e14))
    assert (here.verdict == there.verdict).all()
    for i in np.flatnonzero(there.verdict == "selectable"):
        assert (keys @ there.witness(int(i)) + bias).argmax() == i


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_of_every_key_makes_duplicates(name):
    case = case_of(name)
    here = geometry_of(case)
    bias = None if case.bias is None else np.concatenate([case.bias, case.bias])
    there = geometry_of(Case(np.concatenate([case.keys, case.keys]), bias, case.query_set))
    expected = np.where(here.verdict == "selectable", "duplicate", here.verdict)
    assert (there.verdict == np.concatenate([expected, expected])).all()
    assert (there.representative == np.concatenate([here.representative, here.representative])).all()
    assert not (there.margin_lower > 0).any()


@pytest.mark.parametrize("turned", [False, True])
def test_a_bias_that_is_rounding_is_none(turned):
    # The keys do not differ along the center, which the axes lack: all its scores are the same, up to rounding.
    rng = np.random.default_rng(6)
    turn = np.linalg.qr(rng.standard_normal((4, 4)))[0] if turned else np.eye(4)
    keys = np.column_stack([rng.standard_normal((40, 3)), np.full(40, 2.0)])
    found = geometry_of(Case(keys @ turn, None, (3.0 * turn[3], turn[:3].T)))
    assert (found.verdict == ln_probe.key_geometry(keys[:, :3]).verdict).all()
    for i in np.flatnonzero(found.verdict == "selectable"):
        assert (keys @ turn @ found.witness(int(i))).argmax() == i


def test_bytes_do_not_depend_on_memory_or_threads():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(4, 40, 8)) * rng.lognormal(size=(4, 40, 1))
    ellipsoid = rng.normal(size=(4, 8)), 3 * rng.normal(size=(4, 8, 8))
    seen = set()
    for trial in range(10):
        clutter = [np.full(int(n), np.nan) for n in rng.integers(1, 400, size=30)]  # holes for the allocator
        del clutter[:: 1 + trial % 3]
        found = ln_probe.key_geometry(vectors, query_set=ellipsoid, threads=1 + trial % 3)
        arrays = found.margin_lower, found.margin_upper, found.attainable, found.attainable_upper
        bits = b"".join(a.tobytes() for a in arrays)
        seen.add(bits + "".join(found.verdict.ravel()).encode())
    assert len(seen) == 1


def keys_of(kind: str, rng: np.random.Generator, n: int = 30, d: int = 5) -> np.ndarray:
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
        bias = rng.standard_normal((1, len(keys))) if biased else None
        rows = key_sets.judge(*key_sets.centre(keys[None]), bias, None).rows
        values = np.linalg.svd(rows[0], compute_uv=False) / np.sqrt(len(keys))
        ways = [key_sets.whiten(rows, biased), key_sets.whiten_carefully(rows[0], biased)]
        if kind == "flat" and not biased:
            flat = key_sets.whiten_flat(rows[0], biased)
            assert flat.thinnest[0] == pytest.approx(values[values > 1e-9].min())
            ways.append(flat)
        assert not biased or key_sets.whiten_flat(rows[0], biased) is None
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
            sets = key_sets.query_sets((center, axes), 1, 4)
            points, _ = key_sets.centre(keys[None])
            level, found = key_sets.level_queries(key_sets.see(points, None, sets), sets, None)
            assert bool(found[0]) == known
            if known:
                scores = keys @ (sets[0].center + sets[0].axes @ level[0])
                assert np.ptp(scores) <= 1e-9
                assert np.linalg.norm(level[0]) <= 1.0
        bias = points[0] @ axes @ inside  # what the queries can take away
        sets = key_sets.query_sets((np.zeros(4), axes), 1, 4)
        seen = key_sets.see(points, bias[None], sets)
        level, found = key_sets.level_queries(seen, sets, bias[None])
        assert found[0]
        assert np.ptp(seen.rows[0] @ level[0] + seen.offset[0]) <= 1e-9


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
        steps = scores - scores.max()
        steps = np.array([Exact(1) * s.numerator / Exact(s.denominator) if s else Exact(0) for s in steps])
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
        for i, best in enumerate((reach + lead, reach - lead)):
            assert geometry.margin_lower[i] <= best + 1e-16 * abs(best)
            assert geometry.margin_upper[i] >= best - 1e-16 * abs(best)
            assert geometry.margin_upper[i] - geometry.margin_lower[i] <= 1e-13 * (size + 100)
        many = rng.integers(1, 30, 2)
        which = np.repeat([0, 1], many)
        geometry = ln_probe.key_geometry(pair[which], bias[which], (center, axes))
        for i, best in enumerate((reach + lead, reach - lead)):
            weight = 1 / (many[i] + many[1 - i] * np.exp(-best))
            got = np.flatnonzero(which == i)
            assert (geometry.attainable[got] <= weight * (1 + 1e-15 * abs(best))).all()
            assert (geometry.attainable_upper[got] >= weight * (1 - 1e-15 * abs(best))).all()
