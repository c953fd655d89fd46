"""The probe `decomposition`: every norm, term by term.

It sees no prompt of its own: the first pass takes these statistics of every norm, because the constants that stand for
sigma come from them (`ln_probe.analyses.norm_statistics`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ln_probe.analyses.probes.protocol import DESCRIBED, Context, Finding, Found, Needs, Piece, Probe
from ln_probe.analyses.probes.sentences import largest
from ln_probe.analyses.tables import LAYERNORMS
from ln_probe.analyses.wording import percent


class Decomposition(Probe):
    name = "decomposition"
    summary = "every norm, term by term"
    tables = (LAYERNORMS,)
    needs = Needs(calibration=True)

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        norms = context.calibration.norms
        # A norm that attention reads can stand in the block before (post-norm): calibrated, but not asked for.
        wanted = norms if context.layers is None else norms[norms["layer"].isin(list(context.layers))]
        return Found({LAYERNORMS.name: wanted.reset_index(drop=True)})

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        norms = tables[LAYERNORMS.name]
        return [
            *(Finding(text, "projection", DESCRIBED) for text in _projection(norms)),
            *(Finding(text, "norms", DESCRIBED) for text in _scaling(norms)),
        ]


def _projection(norms: pd.DataFrame) -> list[str]:
    rows = norms[norms["kind"].isin(["layernorm", "projection_only"])] if len(norms) else norms
    if not len(rows) or rows["mean_share"].isna().all():
        return []
    if rows["state"].str.contains("centred").all():
        return ["Projection removes nothing: the residual stream is already centred at every norm, by construction."]
    worst = largest(rows, rows["mean_share_tail"].fillna(rows["mean_share"]))
    share = worst["mean_share_tail"] if not math.isnan(worst["mean_share_tail"]) else worst["mean_share"]
    middle = rows["mean_share_tail"].fillna(rows["mean_share"]).median()
    angle = rows["angle_to_ones_deg_tail"].median()
    text = (
        f"Projection removes {percent(middle)} of a vector's squared length at the median norm and at most "
        f"{percent(share)} ({worst['site']})"
    )
    if not math.isnan(angle):
        text += f"; the streams stand at {angle:.1f}° to the ones-vector (90° would leave projection nothing to do)"
    return [text + "."]


def _norm_free(norms: pd.DataFrame) -> str:
    """That the model has no norm which scales, as norm-free checkpoints do not (GPT-2 with eps 1e12, for example)."""
    projecting = int((norms["kind"] == "projection_only").sum())
    parts = [
        f"{count} {what}"
        for count, what in (
            (projecting, "take the mean out and divide by a constant"),
            (len(norms) - projecting, "only divide by a constant"),
        )
        if count
    ]
    return (
        f"A norm-free model: none of its {len(norms)} norms scales ({'; '.join(parts)}), so taking scaling away "
        "changes nothing, and queries have no bound but what really occurs."
    )


def _scaling(norms: pd.DataFrame) -> list[str]:
    if len(norms) and norms["kind"].isin(["projection_only", "none"]).all():
        return [_norm_free(norms)]
    rows = norms[norms["kind"].isin(["layernorm", "rmsnorm", "scaling_only"])] if len(norms) else norms
    if not len(rows) or rows["norm_before_mean"].isna().all() or rows["norm_before_cv_tail"].isna().all():
        return []  # of single tokens lengths do not vary
    first = (rows["sigma_mean"] / rows["sigma_mean_tail"]).max()
    spread = largest(rows, rows["norm_before_cv_tail"].fillna(0))
    text = (
        f"What scaling evens out is largest at {spread['site']}: input lengths there vary by "
        f"{percent(spread['norm_before_cv_tail'])} of their mean"
    )
    if not math.isnan(first) and first > 1.5:
        at = largest(rows, rows["sigma_mean"] / rows["sigma_mean_tail"])
        text += f"; position 0 alone raises the mean divisor {first:.1f}-fold at {at['site']}, so it is kept apart"
    return [text + "."]
