"""Distances to a hull that reaches down without end along a bias which is large beside the keys: both bounds hold.

What `key_geometry` makes of such sets is in test_geometry_truth; here the solver is asked itself.
"""

import numpy as np
import pytest

from ln_probe.analyses.geometry.wolfe import nearest_points


def distances(keys, bias, gap):
    """Lower and upper bound of each key's distance, bias included, to the others and all that lies under them."""
    rows = np.ascontiguousarray(np.column_stack([keys, bias]))
    _, lower, upper, *_ = nearest_points(rows, np.arange(len(rows)), tau=1e-12, gap=gap, ray=True, careful=True)
    return lower, upper


def test_a_large_bias_does_not_lower_a_margins_truth():
    # One dimension, biases of 1e8 and keys of 1: key 3 lies between keys 2 and 0, of which both have more bias.
    keys = np.array([[0.7134277543772384], [-0.15147551947498294], [-2.4230035402710266], [1.1407576012853875]])
    bias = np.array([62426108.52498739, -123826051.85928093, -15394804.789543832, -116705747.23966487])
    truth = keys[3, 0] - keys[0, 0]  # the nearest key with more bias; no other key is further to the right
    assert truth == pytest.approx(0.427, abs=1e-3)
    for gap in (1e-6, 0.01):
        lower, upper = distances(keys, bias, gap)
        assert lower[3] <= truth * (1 + 1e-9)
        assert truth * (1 - 1e-9) <= upper[3]


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e6, 1e8])
def test_margins_on_a_line_with_a_bias(ratio):
    # With a bias the hull is what lies under the upper concave envelope: in the plane its distance to a point is the
    # least over the segments of that envelope, the ends' vertical rays included.
    rng = np.random.default_rng(int(np.log10(ratio)))
    for _ in range(40):
        place, height = rng.standard_normal(6), ratio * rng.standard_normal(6)
        lower, upper = distances(place[:, None], height, 0.01)
        for i in range(6):
            truth = _distance_below(np.delete(place, i), np.delete(height, i), place[i], height[i])
            room = 1e-9 * max(1.0, ratio * 1e-5)  # of the reference, which subtracts heights of that size
            assert lower[i] <= truth * (1 + 1e-6) + room
            assert truth <= upper[i] * (1 + 1e-6) + room


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
