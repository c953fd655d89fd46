"""Verdicts, bounds and certificates at any scale of keys, queries and biases, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from geometry_families import Case
from geometry_reference import Truth, fractions

import ln_probe
from ln_probe.analyses.geometry.checker import CertificateError, Checker
from ln_probe.analyses.geometry.coordinates import TAU
from ln_probe.analyses.geometry.exact import ExactSet
from ln_probe.analyses.geometry.inputs import outwards

TINY = 5e-324  # the smallest number that float64 has


def inside_and_out(rng: np.random.Generator, n: int = 24, d: int = 3) -> np.ndarray:
    """Keys of which some lie among the others, some are copies and some near copies."""
    keys = rng.standard_normal((n, d))
    keys[:4] = rng.dirichlet(np.ones(n - 4), 4) @ keys[4:]
    keys[4], keys[5] = keys[6], keys[7] + 1e-9
    return keys


def selected(keys: np.ndarray, bias: np.ndarray | None, query: object, i: int, among: np.ndarray | None = None) -> bool:
    """Whether a query scores key i above all keys that are not equal to it (or those of `among`), in fractions."""
    whole = np.array([Fraction(q) for q in np.asarray(query, object).tolist()], object)
    scores = (fractions(keys) * whole).sum(axis=1) + (0 if bias is None else fractions(bias))
    equal = (keys == keys[i]).all(axis=1) & (True if bias is None else bias == bias[i])
    rivals = ~equal if among is None else among & ~equal
    return all(scores[i] > score for score in scores[rivals])


def same(here: ln_probe.analyses.geometry.api.KeyGeometry, there: ln_probe.analyses.geometry.api.KeyGeometry) -> None:
    """Bit for bit."""
    for name in ("verdict", "representative", "margin_lower", "margin_upper", "attainable", "attainable_upper"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name), err_msg=name)
    if here.first_unselectable_at is not None:
        np.testing.assert_array_equal(here.first_unselectable_at, there.first_unselectable_at)


# Units


@pytest.mark.parametrize("power", [-960, 7, 1010])
@pytest.mark.parametrize("biased", [False, True])
def test_powers_of_two_change_no_bit(power: int, biased: bool) -> None:
    rng = np.random.default_rng(abs(power))
    keys, bias = inside_and_out(rng), rng.standard_normal(24) if biased else None
    here = ln_probe.key_geometry(keys, bias, causal=True)
    for other in (-power, power // 2):
        moved = None if bias is None else np.ldexp(bias, other)
        there = ln_probe.key_geometry(np.ldexp(keys, power), moved, causal=True)
        same(here, there)
        there.certify()


@pytest.mark.parametrize("power", [-480, 3, 480])
@pytest.mark.parametrize("biased", [False, True])
def test_keys_and_queries_scale_against_each_other(power: int, biased: bool) -> None:
    rng = np.random.default_rng(power + 1000)
    keys, bias = inside_and_out(rng), rng.standard_normal(24) if biased else None
    center, axes = rng.standard_normal(3), rng.standard_normal((3, 3))
    here = ln_probe.key_geometry(keys, bias, (center, axes), causal=True)
    there = ln_probe.key_geometry(
        np.ldexp(keys, power), bias, (np.ldexp(center, -power), np.ldexp(axes, -power)), causal=True
    )
    same(here, there)
    there.certify()


@pytest.mark.parametrize("biased", [False, True])
def test_scores_do_not_depend_on_the_unit_of_a_coordinate(biased: bool) -> None:
    """Verdicts do, as tau is relative to the keys in their own coordinates; exact ones do not."""
    rng = np.random.default_rng(5 + biased)
    keys, bias = inside_and_out(rng), rng.standard_normal(24) if biased else None
    center, axes, powers = rng.standard_normal(3), rng.standard_normal((3, 3)), rng.integers(-300, 300, 3)
    queries = np.ldexp(center, -powers), np.ldexp(axes, -powers[:, None])
    for strict in (False, True):
        here = ln_probe.key_geometry(keys, bias, (center, axes), margins="exact", strict=strict)
        there = ln_probe.key_geometry(np.ldexp(keys, powers), bias, queries, margins="exact", strict=strict)
        there.certify()
        for name in ("margin", "attainable"):
            lower, upper = ("margin_lower", "margin_upper") if name == "margin" else (name, "attainable_upper")
            assert (getattr(there, lower) <= getattr(here, upper)).all()
            assert (getattr(here, lower) <= getattr(there, upper)).all()
        np.testing.assert_array_equal(here.reachable, there.reachable)
        assert (here.verdict == there.verdict).all() == strict


def test_margins_below_the_range_of_float64_keep_their_sides() -> None:
    keys = np.random.default_rng(0).standard_normal((20, 3))
    below = ln_probe.key_geometry(keys * 1e-200, query_set=1e-140)
    below.certify()
    assert (below.verdict == ln_probe.key_geometry(keys).verdict).all()
    assert (below.margin_lower <= 0.0).all()
    assert (below.margin_upper > 0.0).all()
    bounds = np.array([0.75, -0.75, 0.0, np.inf, np.nan])
    largest = float(np.finfo(np.float64).max)
    assert outwards(bounds, 1100, up=False).tolist()[:4] == [largest, -np.inf, 0.0, np.inf]
    assert outwards(bounds, 1100, up=True).tolist()[:4] == [np.inf, -largest, 0.0, np.inf]
    assert outwards(bounds, -1100, up=False).tolist()[:4] == [0.0, -TINY, 0.0, np.inf]
    assert outwards(bounds, -1100, up=True).tolist()[:4] == [TINY, 0.0, 0.0, np.inf]
    assert np.isnan(outwards(bounds, -1100, up=True)[4])


@pytest.mark.parametrize("biased", [False, True])
def test_denormal_keys_are_the_whole_numbers_that_they_count(biased: bool) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        whole = rng.integers(-40, 41, (20, 2)).astype(float)
        bias = rng.integers(-5, 6, 20).astype(float) if biased else None
        here = ln_probe.key_geometry(whole, bias)
        there = ln_probe.key_geometry(whole * TINY, None if bias is None else bias * TINY)
        same(here, there)
        there.certify()
        for i in np.flatnonzero(there.verdict == "selectable"):
            assert selected(whole * TINY, None if bias is None else bias * TINY, there.witness(int(i)), int(i))


@pytest.mark.parametrize(("size", "by"), [(1.0, 1e300), (1e200, 1e300), (1.0, 1e-300), (1e300, 1.0)])
def test_a_bias_of_any_size(size: float, by: float) -> None:
    rng = np.random.default_rng(3)
    keys, bias = inside_and_out(rng) * size, rng.standard_normal(24) * by
    geometry = ln_probe.key_geometry(keys, bias)
    geometry.certify()
    plain = ln_probe.key_geometry(keys / size, bias / by)
    assert (geometry.verdict == plain.verdict).all()
    np.testing.assert_allclose(geometry.margin_lower, plain.margin_lower, rtol=1e-6, atol=1e-9)
    for i in np.flatnonzero(geometry.verdict == "selectable"):
        query = geometry.witness(int(i))
        assert np.isfinite(query).all()
        assert selected(keys, bias, query, int(i))


def test_a_constant_bias_is_none_whatever_its_size() -> None:
    rng = np.random.default_rng(4)
    keys = inside_and_out(rng)
    here = ln_probe.key_geometry(keys, query_set=1.0)
    for value in (1e308, -3.7, 1e-320):
        there = ln_probe.key_geometry(keys, np.full(24, value), query_set=1.0)
        same(here, there)
        there.certify()
    alone = ln_probe.key_geometry(keys, np.full(24, 1e308))
    assert (alone.verdict == here.verdict).all()
    alone.certify()
    assert np.linalg.norm(alone.witness(int(np.flatnonzero(alone.verdict == "selectable")[0]))) == pytest.approx(1.0)


# Offsets


@pytest.mark.parametrize("offset", [1e6, 1e13, 4e15])
def test_offsets_of_keys_and_bias_decide_nothing(offset: float) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        keys = inside_and_out(rng, 30, 2)
        bias = np.round(rng.standard_normal(30) * 4) + offset  # (whole numbers, which every offset leaves as they are)
        here, there = ln_probe.key_geometry(keys, bias), ln_probe.key_geometry(keys, bias - offset)
        assert here.undecided == there.undecided == 0
        assert (here.verdict == there.verdict).all()
        np.testing.assert_allclose(here.margin_lower, there.margin_lower, atol=1e-12)
        here.certify()
        report = Truth(Case(keys, bias)).judge(here)
        assert not report.wrong + report.unproved, str(report)
        whole = rng.integers(-6, 7, (30, 2)).astype(float)
        here, there = ln_probe.key_geometry(whole + offset, causal=True), ln_probe.key_geometry(whole, causal=True)
        assert (here.verdict == there.verdict).all()
        assert (here.first_unselectable_at == there.first_unselectable_at).all()
        np.testing.assert_allclose(here.margin_lower, there.margin_lower, atol=1e-12)
        here.certify()


def test_the_rounding_of_a_bias_is_relative_to_its_spread() -> None:
    """A bias far from zero is known to half an ulp of its differences; the noise of a height owns up to no more."""
    rng = np.random.default_rng(3)
    points, bias = rng.standard_normal((12, 2)), 1e10 + rng.standard_normal(12)
    space = Checker(points, bias, None, TAU).judged
    exact = fractions(bias)
    high = [e - sum(exact) / 12 for e in exact]
    true = np.array([float(h) for h in high])
    true /= np.sqrt((true**2).mean())
    error = np.abs(space.rows[:, -1] - true)
    assert (np.abs(error - error.mean()) <= space.noise).all()
    assert space.noise.max() < 1e-14


# Witnesses and weights as they are given out


def strict_sets(seeds: range) -> list[Case]:
    """Keys, biases and queries of all kinds, many on a common plane up to rounding."""
    found = []
    for seed in seeds:
        rng = np.random.default_rng([9, seed])
        n, d = int(rng.integers(4, 14)), int(rng.integers(1, 4))
        keys = rng.standard_normal((n, d)) * 10.0 ** rng.integers(-3, 4, (n, 1))
        if seed % 3 == 0:
            keys = rng.integers(-2, 3, (n, d)).astype(float)
        if seed % 3 == 1:
            keys[: n // 2] = rng.dirichlet(np.ones(min(d, n - n // 2)), n // 2) @ keys[n // 2 :][:d]
        bias = (None, rng.integers(-1, 2, n).astype(float), rng.standard_normal(n) * 1e-3)[seed // 3 % 3]
        queries = None
        if seed % 2:
            axes = rng.standard_normal((d, int(rng.integers(1, d + 4))))
            queries = (rng.standard_normal(d) * 10.0 ** rng.integers(-2, 3), axes)
        found.append(Case(keys, bias, queries))
    return found


def test_strict_certificates_are_proved_as_they_are_given_out() -> None:
    asked = refused = 0
    for case in strict_sets(range(18)):
        geometry = ln_probe.key_geometry(**case.arguments(), strict=True, causal=True, margins=False)
        geometry.certify()
        center, axes = case.query_set or (None, None)
        seen = ExactSet(case.keys, case.bias, axes=axes, center=center)
        for i, name in enumerate(geometry.verdict):
            asked += 1
            equal = np.isin(np.arange(len(case.keys)), [i, *seen.copies(i)])
            if name in ("selectable", "duplicate"):
                assert selected(case.keys, case.bias, geometry.witness(i, exact=True), i, ~equal)
                query = geometry._found[0].witness(i)
                if query is None:
                    refused += 1
                else:
                    assert (query == geometry.witness(i)).all()
                    assert selected(case.keys, case.bias, query, i, ~equal)
            if name in ("unselectable", "duplicate"):
                weights, exact = geometry.weights(i), geometry.weights(i, exact=True)
                assert sum(exact) == 1
                assert exact[i] == 0
                assert min(exact) >= 0
                np.testing.assert_allclose(weights, [float(w) for w in exact], rtol=1e-15)
                mean, own = exact @ seen.whole, seen.whole[i]
                assert (mean[: len(own) - seen.biased] == own[: len(own) - seen.biased]).all()
                assert mean[-1] >= own[-1]
    assert asked > 120
    assert refused <= 0.02 * asked  # (on a facet up to rounding, beside it by less)


def test_what_float64_cannot_express_is_said() -> None:
    rng = np.random.default_rng(0)
    keys, bias = rng.standard_normal((12, 2)) * 1e-300, rng.standard_normal(12) * 1e300
    strict = ln_probe.key_geometry(keys, bias, strict=True)
    strict.certify()
    i = int(np.flatnonzero(strict.verdict == "selectable")[0])
    with pytest.raises(ValueError, match=rf"but no query in float64 .* select it: witness\({i}, exact=True\) gives"):
        strict.witness(i)
    query = strict.witness(i, exact=True)
    assert all(isinstance(q, Fraction) for q in query)
    assert selected(keys, bias, query, i)
    tolerant = ln_probe.key_geometry(keys, bias)
    tolerant.certify()
    assert (tolerant.verdict == strict.verdict).all()
    with pytest.raises(ValueError, match=rf"decide with strict=True, then witness\({i}, exact=True\) gives one in fr"):
        tolerant.witness(i)
    with pytest.raises(ValueError, match=rf"witness\({i}, exact=True\) needs verdicts of exact arithmetic: ask for"):
        tolerant.witness(i, exact=True)
    j = int(np.flatnonzero(tolerant.verdict == "unselectable")[0])
    with pytest.raises(ValueError, match=rf"weights\({j}, exact=True\) needs verdicts of exact arithmetic: ask for"):
        tolerant.weights(j, exact=True)


def test_a_false_witness_or_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    keys = inside_and_out(rng)
    for strict in (False, True):
        geometry = ln_probe.key_geometry(keys, query_set=(np.ones(3), rng.standard_normal((3, 3))), strict=strict)
        geometry.certify()
        one = type(geometry._found[0])
        with monkeypatch.context() as patch:
            witness = one.witness
            patch.setattr(one, "witness", lambda self, i, witness=witness: -witness(self, i))
            with pytest.raises(CertificateError, match=r"key \d+: its witness, as it is given out, does not score it"):
                geometry.certify()
        with monkeypatch.context() as patch:
            weights = one.weights
            patch.setattr(
                one, "weights", lambda self, i, weights=weights: (weights(self, i)[0], 2 * weights(self, i)[1])
            )
            with pytest.raises(CertificateError, match=r"key \d+: its weights are not convex .* \(they sum to 2\)"):
                geometry.certify()
    geometry = ln_probe.key_geometry(keys)
    i = int(np.flatnonzero(geometry.verdict == "unselectable")[0])
    other = int(np.flatnonzero(geometry.verdict == "selectable")[0])
    with monkeypatch.context() as patch:
        weights = one.weights
        wrong = np.array([other]), np.ones(1)
        patch.setattr(one, "weights", lambda self, k: wrong if k == i else weights(self, k))
        with pytest.raises(CertificateError, match=f"key {i}: its weights, as they are given out, miss it by"):
            geometry.certify()


# Positions


def inside_at(exact: ExactSet, i: int, number: int) -> int:
    """The position from which on key i is in the hull of the others, in exact arithmetic, one position at a time."""
    return next(t for t in range(i, number) if exact.decide(i, among=np.arange(t + 1)).code == "unselectable")


def sixteen_decades(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((8, 2)) * 10.0 ** rng.uniform(-8, 8, (8, 1))


def test_positions_of_keys_with_norms_over_sixteen_decades() -> None:
    keys = sixteen_decades(np.random.default_rng(43))
    geometry = ln_probe.key_geometry(keys, causal=True)
    assert geometry.first_unselectable_at[3] == 5
    assert proved_positions(range(20)) > 5


def test_weights_that_copies_share_are_not_replaced_for_one_of_them() -> None:
    for d, seed in ((2, 3358), (3, 1422), (3, 2088), (4, 780)):
        rng = np.random.default_rng([d, seed])
        n = int(rng.integers(12, 30))
        keys = rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-8, 8, (n, 1))  # the shortest are copies
        ln_probe.key_geometry(keys, causal=True, margins=False).certify()


@pytest.mark.slow
def test_positions_of_three_thousand_sets() -> None:
    assert proved_positions(range(3000)) > 1000


def proved_positions(seeds: range) -> int:
    """How many keys are unselectable from a later key on, when all that is said of positions was found to be true."""
    late = 0
    for seed in seeds:
        keys = sixteen_decades(np.random.default_rng(seed))
        geometry = ln_probe.key_geometry(keys, causal=True)
        geometry.certify()
        assert geometry.open_positions == 0
        truth = Truth(Case(keys))
        for i in np.flatnonzero(geometry.verdict == "unselectable"):
            at = int(geometry.first_unselectable_at[i])
            late += at > i
            weights = geometry.weights(int(i))
            assert np.flatnonzero(weights).max() <= at
            assert abs(sum(map(Fraction, weights)) - 1) < 1e-14
            rivals = np.flatnonzero([float(v) ** 0.5 > TAU for v in truth.distances(int(i))[:at]])
            if at > i and len(rivals):  # among the keys before that differ from it, a query selects it
                assert truth.verdicts.decide(int(i), among=rivals).code == "selectable"
    return late


def test_strict_positions_are_those_of_exact_arithmetic() -> None:
    for case in [*strict_sets(range(9)), *(Case(sixteen_decades(np.random.default_rng(s))) for s in range(6))]:
        geometry = ln_probe.key_geometry(**case.arguments(), strict=True, causal=True, margins=False)
        geometry.certify()
        center, axes = case.query_set or (None, None)
        exact = ExactSet(case.keys, case.bias, axes=axes, center=center)
        assert geometry.open_positions == 0
        for i, name in enumerate(geometry.verdict):
            at = int(geometry.first_unselectable_at[i])
            assert at == (inside_at(exact, i, len(case.keys)) if name == "unselectable" else -1)
            if name == "unselectable":
                assert np.flatnonzero([w > 0 for w in geometry.weights(i, exact=True)]).max() <= at


def test_a_false_position_is_found() -> None:
    geometry = ln_probe.key_geometry(sixteen_decades(np.random.default_rng(43)), causal=True)
    first = geometry._found[0].first
    first.at[3] = 6
    with pytest.raises(CertificateError, match="key 3: its query does not select it among the keys before 6"):
        geometry.certify()
    keys = np.array([[0.0], [2.0], [4.0], [1.0], [3.0]])
    strict = ln_probe.key_geometry(keys, causal=True, strict=True)
    strict.certify()
    assert strict.first_unselectable_at.tolist() == [-1, 2, -1, 3, 4]
    strict._found[0].first.at[1] = 3
    with pytest.raises(CertificateError, match="key 1: its exact query does not select it among the keys before 3"):
        strict.certify()
