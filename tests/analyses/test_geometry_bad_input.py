"""Input that the geometry cannot use: the error names the value and says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

import ln_probe

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


def test_a_key_of_a_batch_is_that_key_of_that_set():
    sets = np.random.default_rng(0).standard_normal((2, 5, 3))
    geometry = ln_probe.key_geometry(sets)
    for b, i in ((1, 0), (0, 4), (1, 3)):
        scores = sets[b] @ geometry.witness(b, i)
        assert geometry.verdict[b, i] == "selectable"
        assert scores.argmax() == i


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
