"""Known answers about which keys can be selected, laws of selectability, and input that cannot be used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

import ln_probe
from ln_probe.analyses.geometry.check import CertificateError


def circle(n):
    angle = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def test_a_circle_with_one_key_inside():
    keys = np.concatenate([circle(8), [[0.1, -0.2]]])
    geometry = ln_probe.key_geometry(keys)
    assert geometry.verdict.tolist() == ["selectable"] * 8 + ["unselectable"]
    geometry.certify()
    assert "8 selectable, 1 unselectable" in repr(geometry)
    for i in range(8):
        scores = keys @ geometry.witness(i)
        assert scores.argmax() == i
        assert (np.delete(scores, i) < scores[i]).all()
    weights = geometry.weights(8)
    assert weights[8] == 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(weights @ keys, keys[8], atol=1e-7)


def test_duplicates_of_a_vertex_and_of_an_interior_point():
    keys = np.concatenate([circle(6), circle(6)[2:3], [[0.1, 0.0], [0.1, 0.0], [0.1, 1e-9]]])
    geometry = ln_probe.key_geometry(keys)
    corners = ["selectable"] * 6
    corners[2] = "duplicate"
    assert geometry.verdict.tolist() == [*corners, "duplicate", *["unselectable"] * 3]
    assert geometry.representative.tolist() == [0, 1, 2, 3, 4, 5, 2, 7, 7, 7]
    # A copy leaves no margin; 1e-9 away it leaves no more than that.
    assert (geometry.margin_lower[[2, 6, 7, 8, 9]] == 0).all()
    assert (geometry.margin_upper[[2, 6, 7, 8]] < 1e-14).all()
    apart = 1e-9 / np.sqrt(((keys - keys.mean(0)) ** 2).sum(1).mean())
    assert apart * (1 - 1e-9) <= geometry.margin_upper[9] <= 1.01 * apart
    geometry.certify()
    scores = keys @ geometry.witness(6)
    assert set(np.flatnonzero(scores > scores.max() - 1e-9)) == {2, 6}
    assert geometry.weights(6)[2] == 1
    assert geometry.weights(2)[6] == 1
    assert (geometry.weights(8)[[7, 8, 9]] == 0).all()


def test_one_key_and_two():
    geometry = ln_probe.key_geometry(np.array([[1.0, 2.0]]))
    assert geometry.verdict.tolist() == ["selectable"]
    assert np.isnan([geometry.margin_lower, geometry.margin_upper]).all()
    assert (geometry.witness(0) == 0).all()
    geometry.certify()
    geometry = ln_probe.key_geometry(np.array([[1.0, 2.0], [4.0, -2.0]]), margins="exact")
    assert geometry.verdict.tolist() == ["selectable"] * 2
    np.testing.assert_allclose(geometry.margin_lower, 2, rtol=1e-6)  # 5 apart, each 2.5 from their mean
    geometry.certify()


@pytest.mark.parametrize("value", [1 / 3, -1e50])
def test_keys_that_are_all_equal(value):
    geometry = ln_probe.key_geometry(np.full((5, 3), value))
    assert (geometry.verdict == "duplicate").all()
    assert (geometry.margin_lower == 0).all()
    assert (geometry.margin_upper == 0).all()
    geometry.certify()


@pytest.mark.parametrize(("beside", "offset", "verdict"), [
    ("an edge", 1e-3, "selectable"), ("an edge", 1e-6, "selectable"),
    ("an edge", 1e-9, "unselectable"), ("an edge", -1e-6, "unselectable"),
    ("a corner", 1e-3, "selectable"), ("a corner", 1e-6, "selectable"),
    ("a corner", 1e-8, "duplicate"), ("a corner", 1e-9, "duplicate"),
])  # fmt: skip
def test_tolerance_decides_between_near_points(beside, offset, verdict):
    # Of a close pair at a corner, the outer one hides the inner one, unless they count as one.
    square = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    key = [1.0 + offset, 0.0 if beside == "an edge" else 1.0 + offset / 2]
    geometry = ln_probe.key_geometry(np.concatenate([square, [key]]))
    assert geometry.verdict[4] == verdict
    assert beside == "a corner" or (geometry.verdict[:4] == "selectable").all()
    geometry.certify()


def test_a_batch_is_its_sets_one_by_one_at_any_number_of_threads():
    rng = np.random.default_rng(0)
    keys, bias = rng.standard_normal((5, 50, 4)), rng.standard_normal((5, 50))
    one, two = (ln_probe.key_geometry(keys, bias=bias, query_set=1.0, threads=threads) for threads in (1, 2))
    for b in range(5):
        alone = ln_probe.key_geometry(keys[b], bias=bias[b], query_set=1.0)
        for name in ("verdict", "margin_lower", "margin_upper", "attainable", "representative"):
            for batch in (one, two):
                assert (getattr(batch, name)[b] == getattr(alone, name)).all()
        inside = np.flatnonzero(alone.verdict == "unselectable")[0]
        assert (two.weights(b, inside) == alone.weights(inside)).all()
        assert (two.weights((b, inside)) == alone.weights(inside)).all()
    two.certify()


@pytest.mark.parametrize(("part", "array", "key", "change", "word"), [
    ("verdicts", "query", 3, lambda v: -v, "query"),
    ("verdicts", "value", 8, lambda v: np.arange(len(v), dtype=float), "weights"),
    ("verdicts", "first", 5, lambda v: 4, "differ"),
    ("margins", "upper", 2, lambda v: v / 2, "margin_upper"),
    ("margins", "lower", 2, lambda v: v * 1.1, "margin_lower"),
    ("attention", "lower", 4, lambda v: v + 0.02, "attention"),
    ("attention", "upper", 4, lambda v: v - 0.02, "attention"),
])  # fmt: skip
def test_a_certificate_that_does_not_hold_is_found(part, array, key, change, word):
    query_set = 2.0 if part == "attention" else None
    geometry = ln_probe.key_geometry(np.concatenate([circle(8), [[0.1, -0.2]]]), query_set=query_set)
    geometry.certify()
    values = getattr(getattr(geometry._sets[0].solved.answers, part), array)
    values[key] = change(values[key])
    with pytest.raises(CertificateError, match=f"key {key}.*{word}"):
        geometry.certify()


KEYS = np.random.default_rng(0).standard_normal((6, 3))
# Every message must say what to do: at least one of these, or what form is wanted.
REMEDIES = ("first", "must", "give", "use", "convert", "scale", "choose", "ask")


def with_value(value, *place):
    keys = KEYS.copy() if len(place) == 2 else np.stack([KEYS, KEYS])
    keys[place] = value
    return keys


EITHER = (TypeError, ValueError)
# Arguments beside KEYS (or instead of it), the error, and a part of its message.
CASES = {
    "meta tensor": ({"keys": torch.empty(4, 2, device="meta")}, EITHER, "meta"),
    "sparse tensor": ({"keys": torch.eye(4).to_sparse()}, EITHER, "sparse"),
    "sparse array": ({"keys": sparse.csr_array(np.eye(4))}, TypeError, "csr_array"),
    "complex tensor": ({"keys": torch.ones(4, 2, dtype=torch.complex64)}, TypeError, "complex64"),
    "truth values": ({"keys": torch.ones(4, 2, dtype=torch.bool)}, TypeError, "torch.bool"),
    "objects": ({"keys": np.array([["a", "b"]], object)}, TypeError, "object"),
    "ragged lists": ({"keys": [[1.0, 2.0], [3.0]]}, EITHER, "keys"),
    "no dimensions": ({"keys": np.zeros((4, 0))}, ValueError, "(4, 0)"),
    "no keys": ({"keys": np.zeros((0, 4))}, ValueError, "(0, 4)"),
    "no sets": ({"keys": np.zeros((0, 4, 2))}, ValueError, "(0, 4, 2)"),
    "one axis": ({"keys": np.zeros(3)}, ValueError, "got (3,)"),
    "NaN": ({"keys": with_value(np.nan, 4, 1)}, ValueError, "key 4 contains NaN (1 of 6 do)"),
    "infinite": ({"keys": with_value(np.inf, 2, 0)}, ValueError, "key 2 contains an infinite value (1 of 6 do)"),
    "NaN in a set": ({"keys": with_value(np.nan, 1, 5, 0)}, ValueError, "key 5 of set 1 contains NaN (1 of 12 do)"),
    "whole numbers": ({"keys": np.ones((4, 2), int)}, TypeError, "int64"),
    "radius 0": ({"query_set": 0.0}, ValueError, "got 0.0"),
    "radius 1e300": ({"query_set": 1e300}, ValueError, "1e+300"),
    "radius True": ({"query_set": True}, TypeError, "bool"),
    "radius complex": ({"query_set": 1j}, TypeError, "complex"),
    "queries in words": ({"query_set": "all"}, TypeError, "str"),
    "three parts": ({"query_set": (np.zeros(3), np.eye(3), 1.0)}, EITHER, "3"),
    "center too short": ({"query_set": (np.zeros(2), np.eye(3))}, ValueError, "got (2,)"),
    "axes of another dimension": ({"query_set": (np.zeros(3), np.eye(4))}, ValueError, "got (4, 4)"),
    "axes infinite": ({"query_set": (np.zeros(3), np.full((3, 1), np.inf))}, ValueError, "infinite"),
    "axes of another batch": ({"query_set": (np.zeros(3), np.ones((2, 3, 3)))}, ValueError, "(2, 3, 3)"),
    "center of 1e300": ({"query_set": (np.full(3, 1e300), np.eye(3))}, ValueError, "1e+300"),
    "bias of another length": ({"bias": np.zeros(5)}, ValueError, "(5,)"),
    "bias NaN": ({"bias": np.full(6, np.nan)}, ValueError, "bias 0 contains NaN (6 of 6 do)"),
    "budget 0": ({"budget": 0.0}, ValueError, "0.0"),
    "budget NaN": ({"budget": float("nan")}, ValueError, "nan"),
    "keys None": ({"keys": None}, TypeError, "NoneType"),
    "keys of 1e70": ({"keys": KEYS * 1e70}, ValueError, "the largest key is 2.33e+70"),
    "keys of 1e-70": ({"keys": KEYS * 1e-70}, ValueError, "1e-60"),
    "bias of 1e70": ({"bias": np.full(6, 1e70)}, ValueError, "the largest bias is 1e+70"),
    "threads True": ({"threads": True}, ValueError, "1 or more, got True"),
    "budget in words": ({"budget": "long"}, TypeError, "long"),
    "margins tight": ({"margins": "tight"}, ValueError, "True, False or \"exact\", got 'tight'"),
    "threads 0": ({"keys": np.stack([KEYS, KEYS]), "threads": 0}, ValueError, "threads"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_the_value_and_the_remedy(name):
    arguments, error, value = CASES[name]
    with pytest.raises(error) as caught:
        ln_probe.key_geometry(**({"keys": KEYS} | arguments))
    assert value in str(caught.value)
    assert any(word in str(caught.value) for word in REMEDIES), str(caught.value)


@pytest.mark.parametrize("batch", [False, True])
def test_indices_that_do_not_fit(batch):
    geometry = ln_probe.key_geometry(np.stack([KEYS, KEYS]) if batch else KEYS)
    place = (0,) if batch else ()
    for index in (1.5, 1.0, np.float64(1), np.float32(1.5), "a", "1", None, 1j):
        for method in (geometry.witness, geometry.weights):
            with pytest.raises((TypeError, IndexError)) as caught:
                method(*place, index)
            assert str(index) in str(caught.value)
    for index in (6, -7):
        with pytest.raises(IndexError, match=str(index)):
            geometry.witness(*place, index)
    assert (geometry.witness(*place, np.int64(0)) == geometry.witness(*place, 0)).all()
    assert geometry.verdict[(*place, 0)] == "selectable"


def test_what_is_dense_and_floating_is_taken():
    expected = ln_probe.key_geometry(KEYS).verdict
    for keys in (
        torch.tensor(KEYS, requires_grad=True),
        torch.tensor(KEYS).T.contiguous().T,
        KEYS[:, ::-1][:, ::-1],
        np.asfortranarray(KEYS),
        KEYS.astype(np.longdouble),
        KEYS.astype(">f8"),
        KEYS.tolist(),
    ):
        assert (ln_probe.key_geometry(keys).verdict == expected).all()


def test_certificates_that_do_not_exist():
    geometry = ln_probe.key_geometry(np.array([[0.0], [1.0], [2.0]]))
    with pytest.raises(ValueError, match=r"weights\(1\)"):
        geometry.witness(1)
    with pytest.raises(ValueError, match=r"witness\(0\)"):
        geometry.weights(0)
    with pytest.raises(IndexError, match="range"):
        geometry.witness(3)
    with pytest.raises(IndexError, match=r"\(0, 1\)"):
        geometry.witness(0, 1)
    assert geometry.witness(-1) == pytest.approx(geometry.witness(2))
