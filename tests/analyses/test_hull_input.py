"""What `key_geometry` says about input it cannot use."""

import numpy as np
import pytest
import torch

import ln_probe

KEYS = np.random.default_rng(0).standard_normal((6, 3))


def with_value(value, *place):
    keys = KEYS.copy() if len(place) == 2 else np.stack([KEYS, KEYS])
    keys[place] = value
    return keys


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"keys": np.zeros((0, 3))}, ValueError, r"there are no keys: keys have the shape (0, 3)"),
        ({"keys": np.zeros((4, 0))}, ValueError, r"there are no dimensions: keys have the shape (4, 0)"),
        (
            {"keys": np.zeros((0, 4, 2))},
            ValueError,
            r"there are no sets of keys: keys have the shape (0, 4, 2)",
        ),
        ({"keys": np.zeros(3)}, ValueError, r'keys must have the shape "keys d" or "batch keys d", got (3,)'),
        ({"keys": with_value(np.nan, 4, 1)}, ValueError, r"key 4 contains NaN (1 of 6 do)"),
        ({"keys": with_value(np.inf, 2, 0)}, ValueError, r"key 2 contains an infinite value (1 of 6 do)"),
        ({"keys": with_value(np.nan, 1, 5, 0)}, ValueError, r"key 5 of set 1 contains NaN (1 of 12 do)"),
        ({"keys": np.ones((4, 2), int)}, TypeError, r"keys must be of a floating-point type, got int64"),
        ({"keys": torch.ones(4, 2, dtype=torch.bool)}, TypeError, r"floating-point type, got torch.bool"),
        ({"keys": KEYS.astype(complex)}, TypeError, r"floating-point type, got complex128"),
        (
            {"keys": KEYS, "bias": np.zeros(5)},
            ValueError,
            r"bias must have the shape (6,), one value per key, got (5,)",
        ),
        ({"keys": KEYS, "bias": np.full(6, np.nan)}, ValueError, r"bias 0 contains NaN (6 of 6 do)"),
        (
            {"keys": KEYS, "query_set": 0.0},
            ValueError,
            r"radius of a query set must be positive and finite, got 0.0",
        ),
        ({"keys": KEYS, "query_set": -1}, ValueError, r"must be positive and finite, got -1.0"),
        ({"keys": KEYS, "query_set": float("nan")}, ValueError, r"must be positive and finite, got nan"),
        (
            {"keys": KEYS, "query_set": "all"},
            TypeError,
            r"must be a radius or a pair (center, axes), got str",
        ),
        (
            {"keys": KEYS, "query_set": (np.zeros(2), np.eye(3))},
            ValueError,
            r"center of the query set must have the shape (3,) or (1, 3), got (2,)",
        ),
        (
            {"keys": KEYS, "query_set": (np.zeros(3), np.eye(2))},
            ValueError,
            r"axes of the query set must have the shape (3, r) or (1, 3, r), got (2, 2)",
        ),
        (
            {"keys": KEYS, "query_set": (np.zeros(3), np.full((3, 1), np.inf))},
            ValueError,
            r"axes of the query set contains NaN or infinite values",
        ),
        (
            {"keys": KEYS, "margins": "tight"},
            ValueError,
            r'margins must be True, False or "exact", got \'tight\'',
        ),
        ({"keys": np.stack([KEYS, KEYS]), "threads": 0}, ValueError, r"threads must be at least 1, got 0"),
    ],
)
def test_errors_say_what_was_wrong(arguments, error, text):
    with pytest.raises(error) as caught:
        ln_probe.key_geometry(**arguments)
    assert text.replace("\\", "") in str(caught.value)


def test_certificates_that_do_not_exist():
    geometry = ln_probe.key_geometry(np.array([[0.0], [1.0], [2.0]]))
    with pytest.raises(ValueError, match=r"key 1 is unselectable: it has no witness query, weights\(1\) gives"):
        geometry.witness(1)
    with pytest.raises(ValueError, match=r"key 0 is selectable: no convex weights of the other keys reproduce it, wit"):
        geometry.weights(0)
    with pytest.raises(IndexError, match=r"index \(3,\) is out of range: there are 3 along axis 0"):
        geometry.witness(3)
    with pytest.raises(IndexError, match=r"has the index \(i\), got \(0, 1\)"):
        geometry.witness(0, 1)
    assert geometry.witness(-1) == pytest.approx(geometry.witness(2))
