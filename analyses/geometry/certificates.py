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
    """The keys of one set, and claims about them that either hold or raise CertificateError.

    Args:
        keys, bias: as the user gave them, in float64.
        group: index of the key that stands for each key; equal keys do not compete.
        tau: tolerance of verdicts.
        name: of the set, for messages.
    """

    def __init__(
        self,
        keys: Float64[np.ndarray, "key d"],
        bias: Float64[np.ndarray, " key"] | None,
        group: Int64[np.ndarray, " key"],
        tau: float,
        name: str = "",
    ) -> None:
        self.keys, self.key_scale = _unit(keys)
        lift, self.bias_scale = _unit(np.zeros((len(keys), 1)) if bias is None else bias[:, None])
        self.bias = None if bias is None else lift[:, 0]
        self.group, self.tau, self.name = group, tau, name
        # Margins are measured among the normalized keys, unless a query set is asked about.
        self.points = self.keys
        self.heights = None if self.bias is None or not self.bias.any() else self.bias

    def ask(self, center: Float64[np.ndarray, " d"], axes: Float64[np.ndarray, "d r"]) -> None:
        """From now on margins are in nats over this set of queries, and attention is asked about."""
        with np.errstate(under="ignore"):
            self.points = self.keys @ (axes * self.key_scale)
            self.scores = self.keys @ (center * self.key_scale)
        if self.bias is not None:
            self.scores = self.scores + self.bias * self.bias_scale
        if self.heights is not None:
            self.heights = self.heights * self.bias_scale

    def _fail(self, i: int, text: str) -> None:
        raise CertificateError(f"key {i}{self.name}: {text}")

    def selects(self, i: int, query: Float64[np.ndarray, " d"], until: int | None = None) -> None:
        """The query scores key i above all that differ (up to position `until`) by tau of its own length."""
        rivals = np.flatnonzero(self.group[: None if until is None else until + 1] != self.group[i])
        if len(rivals) == 0:
            return
        if not np.isfinite(query).all():
            self._fail(i, "has no witness query")
        if self.bias is None:
            length = float(np.linalg.norm(query))
            if length == 0:
                self._fail(i, "its witness is the zero query")
            scores = self.keys @ (query / length)
        else:
            scaled = query * (self.key_scale / self.bias_scale)
            length = float(np.hypot(np.linalg.norm(scaled), 1.0))
            scores = self.keys @ (scaled / length) + self.bias / length
        gap = scores[i] - scores[rivals].max()
        if not gap > self.tau * (1 - _SLACK):
            rival = rivals[np.argmax(scores[rivals])]
            self._fail(i, f"its witness gives key {rival} a score gap of {gap:.3g} (tau {self.tau:.3g})")

    def reproduces(
        self,
        i: int,
        index: Int64[np.ndarray, " n"],
        weight: Float64[np.ndarray, " n"],
        until: int | None = None,
    ) -> None:
        """The weights are convex, on other keys (up to `until`), and their mean is key i within tau."""
        self._are_convex(i, index, weight)
        if until is not None and index.max() > until:
            self._fail(i, f"its weights use key {index.max()}, but it is said to be inside at {until}")
        miss = self._miss(i, self.keys, self.bias, index, weight)
        if not miss <= self.tau * (1 + _SLACK):
            self._fail(i, f"its convex weights miss it by {miss:.3g} (tau {self.tau:.3g})")

    def equals(self, i: int, j: int) -> None:
        """Keys i and j agree within tau."""
        miss = float(np.linalg.norm(self.keys[i] - self.keys[j]))
        if self.bias is not None:
            miss = float(np.hypot(miss, self.bias[i] - self.bias[j]))
        if not miss <= self.tau * (1 + _SLACK):
            self._fail(i, f"differs from key {j}, its equal, by {miss:.3g} (tau {self.tau:.3g})")

    def is_away(self, i: int, lower: float, query: Float64[np.ndarray, " dim"]) -> None:
        """The query proves that key i is at least `lower` from the hull of the other keys."""
        if lower <= 0.0:
            return
        rivals = np.flatnonzero((self.group == np.arange(len(self.group))) & (self.group != i))
        unit = query / np.linalg.norm(query)
        steps = self.points[i] - self.points[rivals]
        gaps = steps @ unit[: self.points.shape[1]]
        if self.heights is not None:
            gaps = gaps + (self.heights[i] - self.heights[rivals]) * max(unit[-1], 0.0)
        if gaps.min() < lower * (1 - 1e-6) - 1e-9 * float(np.abs(steps).max()):
            self._fail(i, f"margin_lower is {lower:.6g}, its query proves {gaps.min():.6g} only")

    def is_within(
        self, i: int, upper: float, index: Int64[np.ndarray, " n"], weight: Float64[np.ndarray, " n"]
    ) -> None:
        """The weights prove that key i is at most `upper` from the hull of the others."""
        self._are_convex(i, index, weight)
        miss = self._miss(i, self.points, self.heights, index, weight)
        if miss > upper * (1 + 1e-6) + 1e-9 * float(np.abs(self.points[index] - self.points[i]).max()):
            self._fail(i, f"margin_upper is {upper:.6g}, its weights prove {miss:.6g} only")

    def gets(self, i: int, weight: float, u: Float64[np.ndarray, " r"]) -> None:
        """The query u of the set gives key i this softmax weight."""
        proved = self._softmax(i, u)[i]
        if not weight <= proved + 1e-6:
            self._fail(i, f"attainable is {weight:.6g}, but its query gives {proved:.6g}")

    def gets_at_most(self, i: int, upper: float, u: Float64[np.ndarray, " r"]) -> None:
        """The gradient of the log weight at u proves that no query of the set gives key i more."""
        softmax = self._softmax(i, u)
        slope = softmax @ (self.points - self.points[i])
        proved = min(float(softmax[i] * np.exp(min(slope @ u + np.linalg.norm(slope), 700.0))), 1.0)
        if not upper >= proved - 1e-6:
            self._fail(i, f"attainable_upper is {upper:.6g}, but its query proves {proved:.6g}")

    def _softmax(self, i: int, u: Float64[np.ndarray, " r"]) -> Float64[np.ndarray, " key"]:
        if np.linalg.norm(u) > 1 + 1e-9:
            self._fail(i, "the query of its attention is outside the query set")
        scores = self.scores + self.points @ u
        found = np.exp(scores - scores.max())
        return np.asarray(found / found.sum())

    def _are_convex(self, i: int, index: Int64[np.ndarray, " n"], weight: Float64[np.ndarray, " n"]) -> None:
        if len(index) == 0:
            self._fail(i, "has no convex weights")
        own = (self.group[index] == self.group[i]).any()
        if own or not (weight >= 0).all() or abs(weight.sum() - 1) > 1e-9:
            self._fail(i, f"its weights are not convex weights of other keys (sum {weight.sum():.12g})")

    def _miss(
        self,
        i: int,
        points: Float64[np.ndarray, "key dim"],
        heights: Float64[np.ndarray, " key"] | None,
        index: Int64[np.ndarray, " n"],
        weight: Float64[np.ndarray, " n"],
    ) -> float:
        miss = float(np.linalg.norm(weight @ (points[index] - points[i])))
        if heights is not None:
            miss = float(np.hypot(miss, min(weight @ (heights[index] - heights[i]), 0.0)))
        return miss
