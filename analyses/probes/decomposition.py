"""The probe `decomposition`: every norm, term by term.

    LN(x) = gain * (Px) / sigma + bias,     P = I - 11ᵀ/d,  mu = mean(x),  sigma = sqrt(mean((Px)²) + eps)

(Brody, Alon & Yahav 2023, section 2; the geometry of the terms: Gupta, Ozdemir & Anumanchipalli 2024.) The probe sees
no separate prompt: the first pass takes these statistics of every norm, because the constants that replace sigma come
from them. Sums are in float64, so a corpus costs no more memory than a forward pass.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ln_probe.analyses.probes.base import Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.tables import LAYERNORMS
from ln_probe.hooks.norm import Norm, bias_of, gain_of

# What is measured of every vector: the columns of an array.
SHARE, ANGLE, INPUT, OUTPUT, SIGMA = range(5)
QUANTITIES = 5


def _measure_terms(
    site: Norm, gain: NDArray[np.float64], bias: NDArray[np.float64], x: NDArray[Any], y: NDArray[Any]
) -> tuple[NDArray[np.float64], float]:
    """Return the quantities of each position in float64, and the largest error of the sum of the norm's terms."""
    values = np.full((len(x), QUANTITIES), math.nan)
    inputs = x.astype(np.float64)
    mean, squares = inputs.mean(axis=1), np.einsum("pd,pd->p", inputs, inputs)
    values[:, SHARE] = x.shape[1] * mean * mean / np.maximum(squares, 1e-300)
    values[:, ANGLE] = np.rad2deg(np.arccos(np.sqrt(np.clip(values[:, SHARE], 0, 1))))
    values[:, INPUT] = np.sqrt(squares)
    values[:, OUTPUT] = np.sqrt(np.einsum("pd,pd->p", y, y, dtype=np.float64))
    if site.projects:
        inputs -= mean[:, None]
    values[:, SIGMA] = site.constant_scale
    if site.scales:
        spread = np.einsum("pd,pd->p", inputs, inputs) / x.shape[1]
        values[:, SIGMA] = np.sqrt(spread + site.eps) * (math.sqrt(site.d) / site.radius)
    inputs /= values[:, SIGMA, None]
    inputs *= gain
    inputs += bias
    inputs -= y
    return values, max(float(inputs.max()), -float(inputs.min()))


class NormStatistics:
    """Running statistics of one norm; `add` a prompt at a time, `row` at the end."""

    def __init__(self, site: Norm) -> None:
        self.site = site
        self.count, self.entries = 0, 0
        self.sums, self.squares = np.zeros(QUANTITIES), np.zeros(QUANTITIES)
        self.error = 0.0
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
        values, error = _measure_terms(self.site, self._gain, self._bias, before, after)
        self.error = max(self.error, error)
        self.count += len(values)
        self.sums = self.sums + values.sum(0)
        self.squares = self.squares + np.square(values).sum(0)
        self.entries += y.numel()
        first, rest = values[:heads, SIGMA], values[heads:, SIGMA]
        return (float(first.sum()), float(rest.sum())), (len(first), len(rest))

    def mean(self, quantity: int) -> float:
        """Return the mean of a quantity over all vectors."""
        return float(self.sums[quantity]) / self.count if self.count else math.nan

    def cv(self, quantity: int) -> float:
        """Return the standard deviation of a quantity over its mean."""
        if not self.count or self.mean(quantity) == 0:
            return math.nan
        variance = float(self.squares[quantity]) / self.count - self.mean(quantity) ** 2
        return math.sqrt(max(variance, 0.0)) / abs(self.mean(quantity))

    @property
    def reconstruction_error(self) -> float:
        """max |LN(x) - sum of the terms| over the RMS of LN(x)."""
        rms = math.sqrt(self.squares[OUTPUT] / self.entries) if self.squares[OUTPUT] else math.nan
        return self.error / rms

    def row(self) -> dict[str, object]:
        """Return the norm's row of the table `layernorms`."""
        return {
            "site": self.site.name,
            "layer": self.site.layer,
            "reads": self.site.reads,
            "projected_share": self.mean(SHARE),
            "angle_to_ones_deg": self.mean(ANGLE),
            "input_norm": self.mean(INPUT),
            "sigma_mean": self.mean(SIGMA),
            "sigma_cv": self.cv(SIGMA),
            "reconstruction_error": self.reconstruction_error,
            "n": self.count,
        }


class Decomposition(Probe):
    name = "decomposition"
    summary = "every norm, term by term"
    tables = (LAYERNORMS,)

    def start(self, run: Run) -> Observer:
        return _TermsObserver(run)


class _TermsObserver(Observer):
    """Makes the table of the statistics that the first pass has collected."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def finish(self) -> ProbeResults:
        # A norm that attention reads can stand in the block before (post-norm): measured, but not asked for.
        layers = {*self.run.layers, len(self.run.model.blocks)}
        rows = [statistics.row() for statistics in self.run.statistics if statistics.site.layer in layers]
        notes = []
        if any(s.site.kind in ("rmsnorm", "scaling_only") for s in self.run.statistics):
            notes.append("RMSNorm has no projection: projected_share and angle_to_ones_deg describe its input")
        return ProbeResults({LAYERNORMS.name: LAYERNORMS.frame(rows)}, notes)
