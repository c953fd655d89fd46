"""What findings of several probes are made of."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

NOTEWORTHY = 0.01  # a change of less than a hundredth, in share of attention or of entropy, is not pointed out

NOT_SIZE_MATCHED = "no_projection is not size-matched: its vectors are longer by 1/sqrt(1 - mean_share)"


def largest(rows: pd.DataFrame, values: pd.Series) -> pd.Series:
    """The row at which `values` is largest."""
    return rows.iloc[int(np.nanargmax(values.to_numpy(float)))]


def of_variant(heads: pd.DataFrame, variant: str, space: str = "head") -> pd.DataFrame:
    return heads[(heads["space"] == space) & (heads["variant"] == variant)]


def medians(heads: pd.DataFrame, column: str) -> tuple[float, float]:
    """The median head's value, intact and without scaling; the second is NaN where that changes nothing."""
    if not len(heads):
        return math.nan, math.nan
    frozen = of_variant(heads, "no_scaling")
    changes_nothing = len(frozen) > 0 and bool((frozen["no_op"] != "").all())
    return (
        float(of_variant(heads, "intact")[column].median()),
        math.nan if changes_nothing else float(frozen[column].median()),
    )
