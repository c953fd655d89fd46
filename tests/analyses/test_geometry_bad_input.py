"""Input that the geometry cannot use: the error names the value and says what to do."""

from __future__ import annotations

import jaxtyping
import numpy as np
import pytest
import torch

import ln_probe

KEYS = np.random.default_rng(0).standard_normal((6, 3))
# Every message must say what to do: at least one of these, or what form is wanted.
REMEDIES = ("first", "must", "give", "use", "convert", "scale", "choose", "ask")

CASES = {
    "meta tensor": ({"keys": torch.empty(4, 2, device="meta")}, (TypeError, ValueError), "meta"),
    "meta bias": ({"keys": KEYS, "bias": torch.empty(6, device="meta")}, (TypeError, ValueError), "meta"),
    "sparse tensor": ({"keys": torch.eye(4).to_sparse()}, (TypeError, ValueError), "sparse"),
    "sparse csr tensor": ({"keys": torch.eye(4).to_sparse_csr()}, (TypeError, ValueError), "sparse"),
    "complex tensor": ({"keys": torch.ones(4, 2, dtype=torch.complex64)}, TypeError, "complex64"),
    "complex array": ({"keys": KEYS.astype(complex)}, TypeError, "complex128"),
    "quantity of objects": ({"keys": np.array([["a", "b"]], object)}, TypeError, "object"),
    "ragged lists": ({"keys": [[1.0, 2.0], [3.0]]}, (TypeError, ValueError), "keys"),
    "no dimensions": ({"keys": np.zeros((4, 0))}, ValueError, "(4, 0)"),
    "no keys": ({"keys": np.zeros((0, 4))}, ValueError, "(0, 4)"),
    "whole numbers": ({"keys": np.ones((4, 2), int)}, TypeError, "int64"),
    "radius 0": ({"keys": KEYS, "query_set": 0.0}, ValueError, "0.0"),
    "radius -1": ({"keys": KEYS, "query_set": -1.0}, ValueError, "-1.0"),
    "radius 1e300": ({"keys": KEYS, "query_set": 1e300}, ValueError, "1e+300"),
    "radius infinite": ({"keys": KEYS, "query_set": np.inf}, ValueError, "inf"),
    "radius NaN": ({"keys": KEYS, "query_set": np.nan}, ValueError, "nan"),
    "radius True": ({"keys": KEYS, "query_set": True}, TypeError, "bool"),
    "radius complex": ({"keys": KEYS, "query_set": 1j}, TypeError, "complex"),
    "three parts": ({"keys": KEYS, "query_set": (np.zeros(3), np.eye(3), 1.0)}, (TypeError, ValueError), "3"),
    "center too short": ({"keys": KEYS, "query_set": (np.zeros(2), np.eye(3))}, ValueError, "(2,)"),
    "axes of another dimension": ({"keys": KEYS, "query_set": (np.zeros(3), np.eye(4))}, ValueError, "(4, 4)"),
    "axes of another batch": ({"keys": KEYS, "query_set": (np.zeros(3), np.ones((2, 3, 3)))}, ValueError, "(2, 3, 3)"),
    "complex axes": ({"keys": KEYS, "query_set": (np.zeros(3), np.eye(3) * 1j)}, TypeError, "complex128"),
    "meta center": (
        {"keys": KEYS, "query_set": (torch.empty(3, device="meta"), torch.eye(3))},
        (TypeError, ValueError),
        "meta",
    ),
    "sparse axes": (
        {"keys": KEYS, "query_set": (np.zeros(3), torch.eye(3).to_sparse())},
        (TypeError, ValueError),
        "sparse",
    ),
    "center of 1e300": ({"keys": KEYS, "query_set": (np.full(3, 1e300), np.eye(3))}, ValueError, "1e+300"),
    "bias of another length": ({"keys": KEYS, "bias": np.zeros(5)}, ValueError, "(5,)"),
    "complex bias": ({"keys": KEYS, "bias": np.zeros(6) * 1j}, TypeError, "complex128"),
    "budget 0": ({"keys": KEYS, "budget": 0.0}, ValueError, "0.0"),
    "budget -1": ({"keys": KEYS, "budget": -1.0}, ValueError, "-1.0"),
    "budget NaN": ({"keys": KEYS, "budget": float("nan")}, ValueError, "nan"),
    "budget in words": ({"keys": KEYS, "budget": "long"}, TypeError, "long"),
    "margins tight": ({"keys": KEYS, "margins": "tight"}, ValueError, "tight"),
    "threads 0": ({"keys": np.stack([KEYS, KEYS]), "threads": 0}, ValueError, "0"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_the_value_and_the_remedy(name):
    arguments, error, value = CASES[name]
    with pytest.raises(error) as caught:
        ln_probe.key_geometry(**arguments)
    assert value in str(caught.value)
    assert any(word in str(caught.value) for word in REMEDIES), str(caught.value)


@pytest.mark.parametrize("batch", [False, True])
def test_indices_that_do_not_fit(batch):
    geometry = ln_probe.key_geometry(np.stack([KEYS, KEYS]) if batch else KEYS)
    place = (0,) if batch else ()
    for index in (1.5, np.float32(1.5), "a", None, 1j):
        for method in (geometry.witness, geometry.weights):
            with pytest.raises((TypeError, IndexError)) as caught:
                method(*place, index)
            assert str(index) in str(caught.value)
    for index in (6, -7):
        with pytest.raises(IndexError, match=str(index)):
            geometry.witness(*place, index)
    assert (geometry.witness(*place, np.int64(0)) == geometry.witness(*place, 0)).all()
    assert geometry.verdict[(*place, 0)] == "selectable"


@pytest.fixture
def unannotated():
    """Shape checks off: what is taken is more than what is annotated (lists, 128 bits)."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unannotated")
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
