"""Running statistics of one norm over prompts: what its terms do, and how far its output is from their sum.

Sums are in float64, so a corpus costs no more memory than a forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ln_probe.analyses.geometry.compiled import compiled_reordered
from ln_probe.hooks.norm import Norm, bias_of, gain_of

# Largest `reconstruction_error` that rounding explains. float32: measured up to 3e-6 (SmolLM2, MiniLM). A norm in half
# precision is computed in float32 and then rounded, to the format's eps/2 of each entry: once for itself, and once each
# for gain and bias where they are applied afterwards; so at most three times, and at the largest entry.
RECONSTRUCTION_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}
HALF_ROUNDINGS = 3


# What is measured of every token, in the order of the kernel's output.
SHARE, ANGLE, BEFORE, AFTER, SCALE, SIGMA = range(6)
QUANTITIES = 6


@dataclass
class _Sums:
    """Count, sum and sum of squares of the quantities of every token."""

    count: int = 0
    first: NDArray[np.float64] = field(default_factory=lambda: np.zeros(QUANTITIES))
    second: NDArray[np.float64] = field(default_factory=lambda: np.zeros(QUANTITIES))

    def add(self, values: Float[np.ndarray, "pos quantity"]) -> None:
        self.count += len(values)
        self.first = self.first + values.sum(0)
        self.second = self.second + np.square(values).sum(0)

    def mean(self, i: int) -> float:
        return float(self.first[i]) / self.count if self.count else math.nan

    def cv(self, i: int) -> float:
        """Standard deviation over mean."""
        if not self.count or self.mean(i) == 0:
            return math.nan
        variance = float(self.second[i]) / self.count - self.mean(i) ** 2
        return math.sqrt(max(variance, 0.0)) / abs(self.mean(i))


# Columns that are given over all positions and, with the ending "_tail", without position 0.
STATISTICS = {
    "mean_share": (_Sums.mean, SHARE),
    "angle_to_ones_deg": (_Sums.mean, ANGLE),
    "norm_before_mean": (_Sums.mean, BEFORE),
    "norm_before_cv": (_Sums.cv, BEFORE),
    "norm_after_mean": (_Sums.mean, AFTER),
    "scale_mean": (_Sums.mean, SCALE),
    "scale_cv": (_Sums.cv, SCALE),
    "sigma_mean": (_Sums.mean, SIGMA),
}


@compiled_reordered
def _measure_terms(
    x: NDArray[Any],
    y: NDArray[Any],
    gain: NDArray[np.float64],
    bias: NDArray[np.float64],
    projects: bool,
    scales: bool,
    eps: float,
    stretch: float,
    constant: float,
    out: NDArray[np.float64],
) -> tuple[float, float]:
    """The quantities of each position (but ANGLE) into `out`; largest error and |entry| of y.

    What `Norm.decompose` says, in float64, a row at a time: reading the activations once is all that it costs.
    """
    n, d = x.shape
    row = np.empty(d)
    error, largest = 0.0, 0.0
    for i in range(n):
        total, square = 0.0, 0.0
        for j in range(d):
            v = np.float64(x[i, j])
            row[j] = v
            total += v
            square += v * v
        mean = total / d
        removed = mean if projects else 0.0
        sigma = constant
        if scales:
            spread = 0.0
            for j in range(d):
                v = row[j] - removed
                spread += v * v
            sigma = math.sqrt(spread / d + eps) * stretch
        made = 0.0
        for j in range(d):
            v = np.float64(y[i, j])
            made += v * v
            largest = max(largest, abs(v))
            row[j] = abs((row[j] - removed) / sigma * gain[j] + bias[j] - v)
        for j in range(d):
            error = max(error, row[j])
        out[i, SHARE] = d * mean * mean / max(square, 1e-300)
        out[i, BEFORE] = math.sqrt(square)
        out[i, AFTER] = math.sqrt(made)
        out[i, SCALE] = 1.0 / sigma
        out[i, SIGMA] = sigma
    return error, largest


class NormStatistics:
    """Running statistics of one norm; `add` a prompt at a time, `row` at the end."""

    def __init__(self, site: Norm) -> None:
        self.everywhere, self.tail = _Sums(), _Sums()
        self.error, self.largest = 0.0, 0.0
        self.out_square, self.out_count = 0.0, 0
        self.dtype = torch.float64
        self.site = site
        self._gain, self._bias = (t.contiguous().numpy() for t in (gain_of(site), bias_of(site)))

    def add(
        self, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"], *, heads: int = 1
    ) -> tuple[tuple[float, float], tuple[int, int]]:
        """Take in a prompt: the norm's inputs and true outputs; `heads` rows a position for norms inside attention.

        Returns:
            the sums of sigma at position 0 and elsewhere, and how many each is a sum of.
        """
        size = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32  # holds 16-bit numbers exactly
        before, after = (t.detach().to("cpu", size).contiguous().numpy() for t in (x, y))
        values = np.full((len(before), QUANTITIES), math.nan)
        site = self.site
        stretch = math.sqrt(site.d) / site.radius if site.scales else math.nan
        terms = (self._gain, self._bias, site.projects, site.scales, site.eps, stretch, site.constant_scale)
        error, largest = _measure_terms(before, after, *terms, values)
        self.error, self.largest = max(self.error, error), max(self.largest, largest)
        self.out_square += float(np.square(values[:, AFTER]).sum())
        values[:, ANGLE] = np.rad2deg(np.arccos(np.sqrt(np.clip(values[:, SHARE], 0, 1))))
        self.everywhere.add(values)
        self.tail.add(values[heads:])
        self.out_count += y.numel()
        self.dtype = y.dtype
        first, rest = values[:heads, SIGMA], values[heads:, SIGMA]
        return (float(first.sum()), float(rest.sum())), (len(first), len(rest))

    @property
    def out_rms(self) -> float:
        return math.sqrt(self.out_square / self.out_count) if self.out_square else math.nan

    @property
    def reconstruction_error(self) -> float:
        """max |LN(x) - sum of the terms| over the RMS of LN(x)."""
        return self.error / self.out_rms

    @property
    def reconstruction_bound(self) -> float:
        """What rounding in the format of its output explains; NaN where there is nothing to compare."""
        if self.dtype in RECONSTRUCTION_BOUND:
            return RECONSTRUCTION_BOUND[self.dtype]
        return HALF_ROUNDINGS * torch.finfo(self.dtype).eps / 2 * self.largest / self.out_rms

    def row(self) -> dict[str, object]:
        site = self.site
        gain = None if site.gain is None else site.gain.double()
        if gain is None and site.kind in ("layernorm", "rmsnorm"):
            gain = torch.ones(1, dtype=torch.float64)  # folded away: as good as 1
        bias_norm = 0.0 if site.kind == "layernorm" else math.nan
        if site.bias is not None:
            bias_norm = float(site.bias.double().norm())
        row: dict[str, object] = {
            "site": site.name,
            "layer": site.layer,
            "kind": site.kind,
            "reads": site.reads,
            "tokens": self.everywhere.count,
            "gain_mean": math.nan if gain is None else float(gain.mean()),
            "gain_cv": math.nan if gain is None else float(gain.std(correction=0) / gain.mean().abs()),
            "bias_norm": bias_norm,
            "eps": site.eps if site.scales else math.nan,
            "reconstruction_error": self.reconstruction_error,
            "reconstruction_bound": self.reconstruction_bound,
        }
        for sums, ending in ((self.everywhere, ""), (self.tail, "_tail")):
            row |= {f"{column}{ending}": statistic(sums, i) for column, (statistic, i) in STATISTICS.items()}
        return row
