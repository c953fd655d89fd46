"""What a report's tables say of each head, in one row."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ln_probe.analyses.probes.head_columns import BY_HEAD
from ln_probe.reporting.contents import Contents

_KEY = ["layer", "head"]
# Column of the `heads` table, intact: its name here, and whether what keys without scaling do to it is given too.
_OF_HEADS = {
    "entropy_ratio": ("entropy_ratio", "entropy_change"),
    "attainable_last_median": ("attainable", "attainable_change"),
    "pattern_max_median": ("received", None),
    "margin_median": ("margin", "margin_change"),
}


def by_head(report: Contents, sort: str | None = None) -> pd.DataFrame:
    """`Report.by_head`."""
    if sort is not None and sort not in BY_HEAD.names:
        raise ValueError(f"by_head has no column {sort!r}: there are {', '.join(BY_HEAD.names)}")
    heads = report.heads
    heads = heads[heads["space"] == "head"] if len(heads) else heads
    effects, sinks = report.tables["head_effects"], report.tables["sink_heads"]
    pairs = pd.concat([t[_KEY] for t in (heads, effects, sinks)]).drop_duplicates().astype(np.int64)
    made = pairs.sort_values(_KEY).set_index(_KEY)
    for name in BY_HEAD.names[len(_KEY) :]:
        made[name] = False if name == "exact" else math.nan
    _effects(made, effects)
    intact, frozen = (heads[heads["variant"] == v].set_index(_KEY) for v in ("intact", "no_scaling"))
    for column, (name, change) in _OF_HEADS.items():
        made[name] = intact[column].astype(float).reindex(made.index)
        if change is not None:
            made[change] = (frozen[column].astype(float).reindex(made.index) - made[name]).astype(float)
    for name in ("first_attention", "sink_rate", "first_uniform"):
        made[name] = sinks.set_index(_KEY)[name].astype(float).reindex(made.index)
    table = made.reset_index()[BY_HEAD.names]
    if sort is not None:
        table = table.sort_values(
            sort, key=lambda c: c.abs() if c.dtype == float else c, ascending=False, kind="stable"
        )
    return BY_HEAD.check(table.reset_index(drop=True))


def _effects(made: pd.DataFrame, effects: pd.DataFrame) -> None:
    """The columns about the loss: as run, or as estimated."""
    for variant, name in (
        ("no_scaling", "delta_loss"),
        ("no_projection", "delta_loss_no_projection"),
        ("neither", "delta_loss_neither"),
    ):
        rows = effects[effects["variant"] == variant].set_index(_KEY)
        exact, estimate = (rows[c].astype(float).reindex(made.index) for c in ("delta_loss", "estimate"))
        made[name] = exact.fillna(estimate)
        if name == "delta_loss":
            made["exact"] = exact.notna()
            made["p_adjusted"] = rows["p_adjusted"].astype(float).reindex(made.index)
            made["loss"] = rows["loss"].astype(float).reindex(made.index)
