"""Products of matrices whose terms cancel: exact but for one rounding of the result.

Seen through the axes of a query set, keys of an ill-conditioned basis are small differences of large terms, and a plain
product leaves nothing of them. Here both factors are cut into slices of so few bits that the product of any two slices
is exact in float64 whatever the order of its sums, so ordinary matrix products do the work.

Source: K. Ozaki, T. Ogita, S. Oishi, S. M. Rump, "Error-free transformations of matrix multiplication by using fast
routines of matrix multiplication and its applications", Numerical Algorithms 59 (2012) 95-118.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

_BITS = 53
# Slices of each factor. Three hold at least 63 bits of inner products of up to 2048 terms (21 bits each): ten more than
# float64 has.
_SLICES = 3
# What the product of the slices leaves out, relative to the largest entry of the row times that of the column.
LEFT_OUT = 2.0**-60


def accurate_product(left: Float64[np.ndarray, "n k"], right: Float64[np.ndarray, "k m"]) -> Float64[np.ndarray, "n m"]:
    """`left @ right` with an error of at most 4 ulp of the result plus `k · LEFT_OUT · max|row| · max|column|`.

    Args:
        left, right: finite, of moderate size (no product may overflow).
    """
    terms = max(left.shape[1], 2)
    bits = int((_BITS - np.ceil(np.log2(terms))) // 2)
    ours, theirs = _slices(left, bits, axis=1), _slices(right, bits, axis=0)
    pairs = [(p, q) for p in range(_SLICES) for q in range(_SLICES) if p + q < _SLICES + 1]
    total = np.zeros((left.shape[0], right.shape[1]))
    carried = np.zeros_like(total)
    for p, q in sorted(pairs, key=sum, reverse=True):  # small ones first; each sum's own rounding is carried along
        part = ours[p] @ theirs[q]
        grown = total + part
        back = grown - total
        carried += (total - (grown - back)) + (part - back)
        total = grown
    return np.asarray(total + carried)


def seen_from(
    keys: Float64[np.ndarray, "key d"], shift: Float64[np.ndarray, " d"], moving: Float64[np.ndarray, "d r"]
) -> Float64[np.ndarray, "key r"]:
    """`(keys - shift) @ moving`, as accurately: what a difference loses to rounding is multiplied too.

    Each coordinate of the keys is first brought to about 1 by a power of two, which is exact.
    """
    near = keys - shift
    back = near - keys
    lost = (keys - (near - back)) - (shift + back)
    exponent = np.frexp(np.abs(near).max(axis=0))[1]
    near, lost, moving = np.ldexp(near, -exponent), np.ldexp(lost, -exponent), np.ldexp(moving, exponent[:, None])
    return np.asarray(accurate_product(near, moving) + lost @ moving)


def _slices(values: Float64[np.ndarray, "a b"], bits: int, axis: int) -> list[Float64[np.ndarray, "a b"]]:
    """Values as a sum of slices: multiples of a unit that `bits` bits reach from the largest entry along the axis."""
    largest = np.abs(values).max(axis=axis, keepdims=True, initial=0.0)
    exponent = np.frexp(largest)[1]
    found, rest = [], values.copy()
    for number in range(_SLICES):
        # Adding and taking off this much rounds to multiples of 2^(exponent - bits·(number+1)).
        anchor = np.ldexp(0.75, exponent - bits * (number + 1) + _BITS)
        part = (rest + anchor) - anchor
        found.append(part)
        rest -= part
    return found
