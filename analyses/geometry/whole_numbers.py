"""A set of keys as whole numbers, and products with them in float64 whose error is bounded."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Half an ulp of 1: the relative error of one float64 operation that neither over- nor underflows.
_HALF_ULP = 2.0**-53
# More than all that underflow can take from a sum of products whose factors are at most 1: a product loses less than
# 2^-1074, and there are fewer than 10^10 of them.
UNDERFLOW = 1e-300


class WholeSet:
    """Keys, their bias, and what they are measured through, in whole numbers of powers of two.

    Args:
        points: float64, keys × d.
        bias: one number per key, or None.
        axes: d × r; keys are then measured as `axesᵀ k`, in exact products. None: as they are.
        center: of the queries; `center · k` is added to the bias. (Only its part outside the span of the axes
            matters.)

    Raises:
        ValueError: shapes that do not fit, NaN or infinite values.
    """

    def __init__(self, points: Any, bias: Any = None, *, axes: Any = None, center: Any = None) -> None:
        self.points = _array("points", points, 2)
        number, d = self.points.shape
        self.bias = None if bias is None else _array("bias", bias, 1)
        self.axes = None if axes is None else _array("axes", axes, 2)
        self.center = None if center is None else _array("center", center, 1)
        for name, given, size in (("bias", self.bias, number), ("axes", self.axes, d), ("center", self.center, d)):
            if given is not None and len(given) != size:
                raise ValueError(f"{name} must have the length {size}, got the shape {given.shape}")
        if self.center is not None and not self.center.any():
            self.center = None
        self.biased = self.bias is not None or self.center is not None
        # Key j is 2^low[t] * whole number along dimension t.
        self._mantissa, self._exponent, low = _dyadic(self.points, 0)
        self._low: list[int] = [int(value) for value in low]
        self._axes_scale = 0 if self.axes is None else exponent_of(self.axes)
        self._across = None if self.axes is None else np.ldexp(self.axes, -self._axes_scale)
        # The axes, in units that make their products with those whole numbers whole.
        self._axes: list[list[int]] | None = None
        if self.axes is not None:
            mantissa, exponent, least = _dyadic(self.axes, 0, shift=low)
            self._axes_low = [int(value) for value in least]
            self._axes = [
                [int(m) << int(e - c) for m, e, c in zip(ms, es, self._axes_low, strict=True)]
                for ms, es in zip(mantissa, exponent, strict=True)
            ]
        lifts = np.zeros(number) if self.bias is None else self.bias
        slope = np.zeros(d) if self.center is None else self.center
        m_bias, e_bias, _ = _dyadic(lifts[:, None], 0)
        m_slope, e_slope, _ = _dyadic(slope[:, None], 0, shift=low)
        used = np.concatenate([e_bias[m_bias != 0], e_slope[m_slope != 0]])
        self._bias_low = int(used.min()) if len(used) else 0
        self._bias = [
            int(m) << int(e - self._bias_low) if m else 0 for m, e in zip(m_bias[:, 0], e_bias[:, 0], strict=True)
        ]
        self._slope = [
            int(m) << int(e - self._bias_low) if m else 0 for m, e in zip(m_slope[:, 0], e_slope[:, 0], strict=True)
        ]
        # Scaled by powers of two to at most 1/2, for products in floating point.
        self._scale = exponent_of(self.points)
        self._scaled = np.ldexp(self.points, -self._scale - 1)
        terms = ((lifts, 0), (slope, self._scale))
        self._bias_scale = max((exponent_of(v) + power for v, power in terms if v.any()), default=0)
        self._lifts = np.ldexp(lifts, -self._bias_scale - 1)
        self._whole: dict[int, tuple[list[int], int]] = {}

    @property
    def lows(self) -> list[int]:
        """Measured keys are 2 to these, times whole numbers."""
        return self._low if self._axes is None else self._axes_low

    @property
    def bias_low(self) -> int:
        """The bias is 2 to this, times whole numbers."""
        return self._bias_low

    def measured(self, j: int) -> tuple[list[int], int]:
        """Key j in whole numbers: as measured, and its bias."""
        if j not in self._whole:
            plain = [
                int(m) << int(e - low) if m else 0
                for m, e, low in zip(self._mantissa[j], self._exponent[j], self._low, strict=True)
            ]
            lift = self._bias[j] + sum(a * b for a, b in zip(self._slope, plain, strict=True))
            if self._axes is not None:
                plain = [
                    sum(a[r] * k for a, k in zip(self._axes, plain, strict=True)) for r in range(len(self._axes_low))
                ]
            self._whole[j] = plain, lift
        return self._whole[j]

    def steps(self, i: int) -> tuple[Floats, Floats]:
        """All keys and biases less those of key i, scaled by powers of two: what `products` is asked with."""
        return self._scaled - self._scaled[i], self._lifts - self._lifts[i]

    def steps_as_measured(self, steps: Floats, lifts: Floats) -> tuple[Floats, Floats, Ints]:
        """Rows of `steps` as measured, in float64 (a bias last), and what powers of two make whole numbers of them."""
        if self.center is not None:
            lifts = lifts + steps @ np.ldexp(self.center, self._scale - self._bias_scale)
        shift = self._scale + 1
        if self._across is not None:
            steps, shift = steps @ self._across, shift + self._axes_scale
        powers = [shift - low for low in self.lows]
        if not self.biased:
            return steps, np.zeros(len(steps)), np.array(powers)
        return steps, lifts, np.array([*powers, self._bias_scale + 1 - self._bias_low])

    def may_be_equal(self, steps: Floats) -> NDArray[np.bool_]:
        """Which rows of `steps` may be 0 as measured; float64 rules out most that are not."""
        if self._across is None:
            return np.asarray((steps == 0.0).all(axis=1))
        seen = np.abs(steps @ self._across) > 1e-9 * (np.abs(steps) @ np.abs(self._across)) + UNDERFLOW
        return np.asarray(~seen.any(axis=1))

    def products(
        self, steps: Floats, lifts: Floats, row: list[int], last: Floats, last_power: int
    ) -> tuple[Floats, Floats]:
        """Products of whole numbers with steps, their lifts (if biased), and `last * 2**last_power`.

        Args:
            steps, lifts: rows of what `steps` gave.
            row: a factor for each coordinate, the bias and `last`.
            last: at most 1 each.

        Returns:
            the products and what they may be off by, both up to one positive factor.
        """
        along = row[: len(self.lows)]
        lift = row[-2] if self.biased else 0
        if self._axes is not None:
            along = [sum(a * b for a, b in zip(axis, along, strict=True)) for axis in self._axes]
        along = [a + lift * b for a, b in zip(along, self._slope, strict=True)] if lift else along
        parts = [mantissa(value) for value in [*along, lift, row[-1]]]
        powers = [self._scale + 1 - low for low in self._low] + [self._bias_scale + 1 - self._bias_low, last_power]
        top = max((e + s for (m, e), s in zip(parts, powers, strict=True) if m), default=0)
        factor = np.array([np.ldexp(m, max(e + s - top, -2000)) for (m, e), s in zip(parts, powers, strict=True)])
        value = steps @ factor[:-2] + lifts * factor[-2] + last * factor[-1]
        size = np.abs(steps) @ np.abs(factor[:-2]) + np.abs(lifts * factor[-2]) + np.abs(last * factor[-1])
        # One error for each factor, difference, product and sum, in any order of summation; 8 to spare.
        return value, (len(factor) + 8) * 1.01 * _HALF_ULP * size + UNDERFLOW


def _array(name: str, values: Any, dims: int) -> Floats:
    found = np.asarray(values, np.float64)
    if found.ndim != dims or (dims == 2 and name == "points" and 0 in found.shape):
        raise ValueError(f"{name} must have {dims} axes and not be empty, got the shape {found.shape}")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} contains NaN or infinite values: remove or repair them first")
    return found


def _dyadic(values: Floats, axis: int, shift: Ints | None = None) -> tuple[Ints, Ints, Ints]:
    """Odd whole numbers (or 0) and exponents whose powers of two they multiply; and the least exponent along `axis`.

    `shift` is added to the exponents of every row.
    """
    fraction, exponent = np.frexp(values)
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    zeros = np.frexp((mantissa & -mantissa).astype(np.float64))[1].astype(np.int64) - 1
    zeros[mantissa == 0] = 0
    power = exponent.astype(np.int64) - 53 + zeros
    if shift is not None:
        power += shift[:, None]
    most = np.iinfo(np.int64).max
    low = np.where(mantissa != 0, power, most).min(axis=axis)
    low[low == most] = 0
    power = np.where(mantissa != 0, power, np.broadcast_to(low, power.shape))
    return mantissa >> zeros, power, low


def exponent_of(values: Floats) -> int:
    return int(np.frexp(np.abs(values).max(initial=0.0))[1])


def mantissa(value: int) -> tuple[float, int]:
    """A number of at most 1 that, times two to the second, is `value` up to a little more than half an ulp."""
    extra = max(value.bit_length() - 200, 0)
    fraction, exponent = np.frexp(float(value >> extra))
    return float(fraction), int(exponent) + extra


def power_of_two(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)
