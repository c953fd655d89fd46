"""The probe `decomposition`: every norm, term by term.

    LN(x) = gain * (Px) / sigma + bias,     P = I - 11ᵀ/d,  mu = mean(x),  sigma = sqrt(mean((Px)²) + eps)

(Brody, Alon & Yahav 2023, section 2; the geometry of the pieces: Gupta, Ozdemir & Anumanchipalli 2024.) The probe sees
no separate prompt: the first pass takes these statistics of every norm (`norm_statistics`), because the constants that
replace sigma come from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ln_probe.analyses.constants import CONSTANT_COLUMNS, Constants
from ln_probe.analyses.probes.base import DESCRIBED, Finding, Observer, Probe, ProbeResults, Run, largest
from ln_probe.analyses.probes.columns import LAYERNORMS
from ln_probe.analyses.probes.norm_statistics import NormStatistics
from ln_probe.analyses.text import percent
from ln_probe.hooks.model import n_layers

# Share of a vector's squared length along the all-ones direction below which a stream is centred: weights that are
# centred in float32 leave 1e-14, a trained stream that is not centred is above 1e-6.
CENTRED = 1e-9


class Decomposition(Probe):
    name = "decomposition"
    summary = "every norm, term by term"
    tables = (LAYERNORMS,)
    interleaved = True

    def start(self, run: Run) -> Observer:
        return _Watching(run)

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        norms = tables[LAYERNORMS.name]
        return [
            *(Finding(text, "projection", DESCRIBED) for text in _projection(norms)),
            *(Finding(text, "norms", DESCRIBED) for text in _scaling(norms)),
        ]


class _Watching(Observer):
    """Makes the table of the statistics that the first pass has collected."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def finish(self) -> ProbeResults:
        norms = layernorms_table(self.run.statistics, self.run.constants)
        # A norm that attention reads can stand in the block before (post-norm): measured, but not asked for.
        wanted = norms["layer"].isin([*self.run.layers, n_layers(self.run.model)])
        return ProbeResults({LAYERNORMS.name: norms[wanted].reset_index(drop=True)}, _notes(self.run.statistics))


def _notes(statistics: Sequence[NormStatistics]) -> list[str]:
    """Return what a reader of the table has to know."""
    notes = []
    if beyond := [s for s in statistics if s.reconstruction_error > s.reconstruction_bound]:
        worst = max(beyond, key=lambda s: s.reconstruction_error)
        notes.append(
            f"{len(beyond)} of {len(statistics)} norms differ from the sum of their terms by more than "
            f"rounding in {str(worst.dtype).removeprefix('torch.')} explains (reconstruction_bound), most "
            f"{worst.site.name}, by {worst.reconstruction_error:.1e}: do they compute in a lower precision?"
        )
    if any(s.site.kind in ("rmsnorm", "scaling_only") for s in statistics):
        notes.append("RMSNorm has no projection: columns about the ones-direction describe its input, not what it does")
    return notes


def _projection(norms: pd.DataFrame) -> list[str]:
    rows = norms[norms["kind"].isin(["layernorm", "projection_only"])] if len(norms) else norms
    if not len(rows) or rows["mean_share"].isna().all():
        return []
    if (rows["mean_share"] < CENTRED).all():
        return ["Projection removes nothing: the residual stream is centred at every norm (folded weights are)."]
    shares = rows["mean_share_tail"].fillna(rows["mean_share"])
    angle = rows["angle_to_ones_deg_tail"].median()
    text = (
        f"Projection removes {percent(shares.median())} of a vector's squared length at the median norm and at most "
        f"{percent(shares.max())} ({largest(rows, shares)['site']})"
    )
    if not math.isnan(angle):
        text += f"; residual vectors are at {angle:.1f}° to the all-ones direction (at 90° projection would do nothing)"
    return [text + "."]


def _norm_free(norms: pd.DataFrame) -> str:
    """That the model has no norm which scales, as norm-free checkpoints do not (GPT-2 with eps 1e12, for example)."""
    projecting = int((norms["kind"] == "projection_only").sum())
    parts = {
        "subtract the mean and divide by a constant": projecting,
        "only divide by a constant": len(norms) - projecting,
    }
    return (
        f"A norm-free model: none of its {len(norms)} norms scales "
        f"({'; '.join(f'{count} {what}' for what, count in parts.items() if count)}), so freezing scaling changes "
        "nothing, and queries are not bounded: there are no margins and no attainable attention."
    )


def _scaling(norms: pd.DataFrame) -> list[str]:
    if len(norms) and norms["kind"].isin(["projection_only", "none"]).all():
        return [_norm_free(norms)]
    rows = norms[norms["kind"].isin(["layernorm", "rmsnorm", "scaling_only"])] if len(norms) else norms
    if not len(rows) or rows["norm_before_mean"].isna().all() or rows["norm_before_cv_tail"].isna().all():
        return []  # of single tokens lengths do not vary
    first = rows["sigma_mean"] / rows["sigma_mean_tail"]
    spread = largest(rows, rows["norm_before_cv_tail"].fillna(0))
    text = (
        f"Scaling does most at {spread['site']}, where the norms of the input vectors vary by "
        f"{percent(spread['norm_before_cv_tail'])} of their mean"
    )
    if first.max() > 1.5:
        text += (
            f"; position 0 alone multiplies the mean divisor by {first.max():.1f} at {largest(rows, first)['site']}, "
            "so it has its own constant"
        )
    return [text + "."]


def layernorms_table(statistics: Sequence[NormStatistics], constants: Constants) -> pd.DataFrame:
    """The `layernorms` table: a row per site."""
    known: Any = constants.ratios().to_dict("index")
    blank = dict.fromkeys(CONSTANT_COLUMNS, math.nan)
    return LAYERNORMS.frame([s.row() | known.get(s.site.name, blank) for s in statistics])
