"""Margins of keys with a bias that is large beside them: the bounds hold as statements about the numbers given."""

import numpy as np
import pytest

import ln_probe


def test_a_large_bias_does_not_lower_a_margins_truth():
    # One dimension, biases of 1e8 and keys of 1: key 3 lies between keys 2 and 0, of which both have more bias.
    keys = np.array([[0.7134277543772384], [-0.15147551947498294], [-2.4230035402710266], [1.1407576012853875]])
    bias = np.array([62426108.52498739, -123826051.85928093, -15394804.789543832, -116705747.23966487])
    geometry = ln_probe.key_geometry(keys, bias=bias, query_set=1.0, margins="exact")
    truth = keys[3, 0] - keys[0, 0]  # the nearest key with more bias; no other key is further to the right
    assert truth == pytest.approx(0.427, abs=1e-3)
    assert geometry.margin_lower[3] <= truth <= geometry.margin_upper[3]
    rough = ln_probe.key_geometry(keys, bias=bias, query_set=1.0)
    assert rough.margin_lower[3] <= truth <= rough.margin_upper[3]


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e6, 1e8])
def test_margins_on_a_line_with_a_bias(ratio):
    # With a bias the hull is what lies under the upper concave envelope: in the plane its distance to a point is the
    # least over the segments of that envelope, the ends' vertical rays included.
    rng = np.random.default_rng(int(np.log10(ratio)))
    for _ in range(40):
        place, height = rng.standard_normal(6), ratio * rng.standard_normal(6)
        found = ln_probe.key_geometry(place[:, None], bias=height, query_set=1.0)
        for i in range(6):
            if found.verdict[i] != "selectable":
                continue
            truth = _distance_below(np.delete(place, i), np.delete(height, i), place[i], height[i])
            room = 1e-9 * max(1.0, ratio * 1e-5)  # of the reference, which subtracts heights of that size
            assert found.margin_lower[i] <= truth * (1 + 1e-6) + room
            assert truth <= found.margin_upper[i] * (1 + 1e-6) + room


def _distance_below(place: np.ndarray, height: np.ndarray, x: float, y: float) -> float:
    """From (x, y) to the hull of the points and of all that lies under them."""
    least = np.inf
    for a in range(len(place)):
        least = min(least, np.hypot(x - place[a], max(y - height[a], 0.0)))
        for b in range(a):
            along = np.array([place[b] - place[a], height[b] - height[a]])
            off = np.array([x - place[a], y - height[a]])
            share = np.clip((off @ along) / (along @ along), 0.0, 1.0)
            least = min(least, float(np.linalg.norm(off - share * along)))
            inside = (x - place[a]) / along[0]
            if 0.0 <= inside <= 1.0 and height[a] + inside * along[1] >= y:
                least = 0.0
    return least
