"""Does a certificate prove what it is said to prove?

Plain array arithmetic on the user's own keys; nothing here is shared with what found the certificates. `tau`
is relative to the RMS norm of the centred keys (and, for a bias, to its standard deviation).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

# The checker computes in other coordinates and another order than the solver: agreement to this share of tau
# is asked.
_SLACK = 1e-3


class CertificateError(AssertionError):
    """A certificate does not prove its verdict; the message says which and by how much."""


def _unit(values: Float64[np.ndarray, "key n"]) -> tuple[Float64[np.ndarray, "key n"], float]:
    big = np.abs(values).max()
    if big == 0.0:
        return values, 1.0
    centred = values / big - (values / big).mean(axis=0)
    size = np.linalg.norm(centred) / len(values) ** 0.5
    if size < 1e-14:
        return centred * 0.0, 1.0
    return centred / size, float(size * big)


class Checker:
    """The keys of one set, and claims about them that either hold or raise CertificateError."""

    def __init__(
        self,
        keys: Float64[np.ndarray, "key d"],
        bias: Float64[np.ndarray, " key"] | None,
        tau: float,
        name: str = "",
    ) -> None:
        self.keys, self.key_scale = _unit(keys)
        lift, self.bias_scale = _unit(np.zeros((len(keys), 1)) if bias is None else bias[:, None])
        self.bias = None if bias is None else lift[:, 0]
        self.tau, self.name = tau, name

    def _fail(self, i: int, text: str) -> None:
        raise CertificateError(f"key {i}{self.name}: {text}")

    def selects(self, i: int, query: Float64[np.ndarray, " d"], rivals: Int64[np.ndarray, " rival"]) -> None:
        """The query scores key i above every rival by more than tau of its own length."""
        if len(rivals) == 0:
            return
        if not np.isfinite(query).all():
            self._fail(i, "has no witness query")
        if self.bias is None:
            length = np.linalg.norm(query)
            if length == 0:
                self._fail(i, "its witness is the zero query")
            scores = self.keys @ (query / length)
        else:
            scaled = query * (self.key_scale / self.bias_scale)
            length = np.hypot(np.linalg.norm(scaled), 1.0)
            scores = self.keys @ (scaled / length) + self.bias / length
        gap = scores[i] - scores[rivals].max()
        if not gap > self.tau * (1 - _SLACK):
            rival = rivals[np.argmax(scores[rivals])]
            self._fail(i, f"its witness gives key {rival} a score gap of {gap:.3g} only (tolerance {self.tau:.3g})")

    def reproduces(self, i: int, index: Int64[np.ndarray, " n"], weight: Float64[np.ndarray, " n"]) -> None:
        """The weights are convex, leave key i out, and their mean is key i within tau (with no less bias)."""
        if len(index) == 0:
            self._fail(i, "has no convex weights")
        if (index == i).any() or not (weight >= 0).all() or abs(weight.sum() - 1) > 1e-9:
            self._fail(i, f"its weights are not convex weights of other keys (sum {weight.sum():.12g})")
        miss = float(np.linalg.norm(weight @ (self.keys[index] - self.keys[i])))
        if self.bias is not None:
            miss = float(np.hypot(miss, min(weight @ (self.bias[index] - self.bias[i]), 0.0)))
        if not miss <= self.tau * (1 + _SLACK):
            self._fail(i, f"its convex weights miss it by {miss:.3g} (tolerance {self.tau:.3g})")

    def equals(self, i: int, j: int) -> None:
        """Keys i and j agree within tau."""
        miss = float(np.linalg.norm(self.keys[i] - self.keys[j]))
        if self.bias is not None:
            miss = float(np.hypot(miss, self.bias[i] - self.bias[j]))
        if not miss <= self.tau * (1 + _SLACK):
            self._fail(
                i,
                f"differs from key {j}, which it is said to equal, by {miss:.3g} (tolerance {self.tau:.3g})",
            )


def check_bracket(
    points: Float64[np.ndarray, "key dim"],
    i: int,
    lower: float,
    upper: float,
    query: Float64[np.ndarray, " dim"],
    index: Int64[np.ndarray, " n"],
    weight: Float64[np.ndarray, " n"],
    rivals: Int64[np.ndarray, " rival"],
    ray: bool,
) -> None:
    """The query proves that key i is at least `lower` from the hull of the rivals, the weights at most
    `upper`.

    Args:
        points: keys in the coordinates of their margins; with `ray`, the last one is a bias.
    """
    size = float(np.abs(points - points[i]).max())
    slack = 1e-9 * size
    if lower > 0.0:
        gap = float(((points[i] - points[rivals]) @ (query / np.linalg.norm(query))).min())
        if gap < lower * (1 - 1e-6) - slack or (ray and query[-1] < 0):
            raise CertificateError(f"key {i}: margin_lower is {lower:.6g}, its query proves {gap:.6g} only")
    rest = weight @ (points[index] - points[i])
    if ray:
        rest[-1] = min(rest[-1], 0.0)
    miss = float(np.linalg.norm(rest))
    if miss > upper * (1 + 1e-6) + slack:
        raise CertificateError(f"key {i}: margin_upper is {upper:.6g}, its weights prove {miss:.6g} only")
