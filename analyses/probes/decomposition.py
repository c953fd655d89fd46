"""The probe `decomposition`: every norm, term by term.

    LN(x) = gain * (Px) / sigma + bias,     P = I - 11ᵀ/d,  mu = mean(x),  sigma = sqrt(mean((Px)²) + eps)

(Brody, Alon & Yahav 2023, section 2; the geometry of the terms: Gupta, Ozdemir & Anumanchipalli 2024.) The probe sees
no separate prompt: the first pass takes these statistics of every norm, because the constants that replace sigma come
from them. Sums are in float64, so a corpus costs no more memory than a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ln_probe.analyses.probes.base import Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.tables import LAYERNORMS
from ln_probe.hooks.model import n_layers
from ln_probe.hooks.norm import Norm, bias_of, gain_of

# Largest `reconstruction_error` that rounding explains. float32: measured up to 3e-6 (SmolLM2, MiniLM). A norm in half
# precision is computed in float32 and then rounded, to the format's eps/2 of each entry: once for itself, and once each
# for gain and bias where they are applied afterwards; so at most three times, and at the largest entry.
RECONSTRUCTION_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}
HALF_ROUNDINGS = 3

# What is measured of every vector: the columns of an array.
SHARE, ANGLE, INPUT, OUTPUT, SIGMA = range(5)
QUANTITIES = 5


def _measure_terms(
    site: Norm, gain: NDArray[np.float64], bias: NDArray[np.float64], x: NDArray[Any], y: NDArray[Any]
) -> tuple[NDArray[np.float64], float, float]:
    """Return the quantities of each position in float64; the largest error of `Norm.decompose`, and |entry| of y."""
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
    largest = max(float(y.max()), -float(y.min()))
    return values, max(float(inputs.max()), -float(inputs.min())), largest


class NormStatistics:
    """Running statistics of one norm; `add` a prompt at a time, `row` at the end."""

    def __init__(self, site: Norm) -> None:
        self.site, self.dtype = site, torch.float64
        self.count, self.entries = 0, 0
        self.sums, self.squares = np.zeros(QUANTITIES), np.zeros(QUANTITIES)
        self.error, self.largest = 0.0, 0.0
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
        values, error, largest = _measure_terms(self.site, self._gain, self._bias, before, after)
        self.error, self.largest = max(self.error, error), max(self.largest, largest)
        self.count += len(values)
        self.sums = self.sums + values.sum(0)
        self.squares = self.squares + np.square(values).sum(0)
        self.entries += y.numel()
        self.dtype = y.dtype
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
    def output_rms(self) -> float:
        """The RMS of the norm's output."""
        return math.sqrt(self.squares[OUTPUT] / self.entries) if self.squares[OUTPUT] else math.nan

    @property
    def reconstruction_error(self) -> float:
        """max |LN(x) - sum of the terms| over the RMS of LN(x)."""
        return self.error / self.output_rms

    @property
    def reconstruction_bound(self) -> float:
        """What rounding in the format of its output explains; NaN where there is nothing to compare."""
        if self.dtype in RECONSTRUCTION_BOUND:
            return RECONSTRUCTION_BOUND[self.dtype]
        return HALF_ROUNDINGS * torch.finfo(self.dtype).eps / 2 * self.largest / self.output_rms

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
        layers = {*self.run.layers, n_layers(self.run.model)}
        rows = [statistics.row() for statistics in self.run.statistics if statistics.site.layer in layers]
        return ProbeResults({LAYERNORMS.name: LAYERNORMS.frame(rows)}, _notes(self.run.statistics))


def _notes(statistics: Sequence[NormStatistics]) -> list[str]:
    """Return what a reader of the table has to know."""
    notes = []
    if beyond := [s for s in statistics if s.reconstruction_error > s.reconstruction_bound]:
        worst = max(beyond, key=lambda s: s.reconstruction_error)
        notes.append(
            f"{len(beyond)} of {len(statistics)} norms differ from the sum of their terms by more than rounding in "
            f"{str(worst.dtype).removeprefix('torch.')} explains, most {worst.site.name}, by "
            f"{worst.reconstruction_error:.1e}: do they compute in a lower precision?"
        )
    if any(s.site.kind in ("rmsnorm", "scaling_only") for s in statistics):
        notes.append("RMSNorm has no projection: projected_share and angle_to_ones_deg describe its input")
    return notes
