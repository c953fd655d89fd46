"""Laws: what must not change a result: order, padding, a table of products, a constant bias, memory, threads.

Permutations and padding are exact in float64: verdicts are the same, and brackets (of the same truth) overlap. What
rounds moves the truth itself; test_geometry_bounds.py compares with that, in every family.
"""

from __future__ import annotations

import numpy as np
import pytest
from geometry_families import FAMILIES, Case, conditioned

import ln_probe
from ln_probe.analyses.geometry import decide

PLAIN = [name for name in FAMILIES if "bias" not in name and "quer" not in name]


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


@pytest.mark.parametrize("name", FAMILIES)
def test_neither_order_nor_zero_dimensions_matter(name):
    case = case_of(name)
    here = geometry_of(case)
    order = np.random.default_rng(0).permutation(len(case.keys))
    place = np.argsort(order)
    bias = None if case.bias is None else case.bias[order]
    there = geometry_of(Case(case.keys[order], bias, case.query_set))
    assert not len(differing_keys(here, there, place))
    if name in PLAIN:
        there = geometry_of(Case(np.pad(case.keys, ((0, 0), (1, 3)))))
        assert not len(differing_keys(here, there, np.arange(len(case.keys))))


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
        scores = keys @ there.witness(int(i)) + bias
        assert scores.argmax() == i


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_of_every_key_makes_duplicates(name):
    case = case_of(name)
    here = geometry_of(case)
    bias = None if case.bias is None else np.concatenate([case.bias, case.bias])
    twice = Case(np.concatenate([case.keys, case.keys]), bias, case.query_set)
    there = geometry_of(twice)
    number = len(case.keys)
    expected = np.where(here.verdict == "selectable", "duplicate", here.verdict)
    assert (there.verdict[:number] == expected).all()
    assert (there.verdict[number:] == expected).all()
    assert (there.representative == np.concatenate([here.representative, here.representative])).all()
    assert not (there.margin_lower > 0).any()


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_directions_that_axes_lack_are_not_those_of_the_keys(shift):
    # Along them a center is a bias per key, and keys that differ along them alone are copies.
    for seed in range(3):
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((30, 5))
        keys[3] = keys[2]
        turn = np.linalg.qr(rng.standard_normal((5, 5)))[0]
        kept, lost = turn[:, :3], turn[:, 3:]
        keys[3] += lost @ rng.standard_normal(2)
        center = kept @ rng.standard_normal(3) + shift * lost @ rng.standard_normal(2)
        axes = kept @ conditioned(rng, 3, 1e6)
        found = geometry_of(Case(keys, None, (center, axes)))
        bias = None if shift == 0.0 else keys @ lost @ (lost.T @ center)
        expected = ln_probe.key_geometry(keys @ kept, bias)
        assert (found.verdict == expected.verdict).all()
        if shift == 0.0:
            assert "selectable" not in found.verdict[2:4]
        for i in np.flatnonzero(found.verdict == "selectable"):
            witness = found.witness(int(i))
            scores = keys @ witness
            assert scores.argmax() == i
            assert (np.delete(scores, i) < scores[i]).all()
            beside = lost.T @ (witness - center) if shift else lost.T @ witness
            assert np.linalg.norm(beside) <= 1e-8 * np.linalg.norm(witness)


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
