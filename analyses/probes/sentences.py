"""What findings of several probes are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

NOTEWORTHY = 0.01  # a change of less than a hundredth, in share of attention or of entropy, is not pointed out

NOT_SIZE_MATCHED = "no_projection is not size-matched: its vectors are longer by 1/sqrt(1 - mean_share)"


def asked_layers(provenance: Mapping[str, Any]) -> list[int] | None:
    """The layers that an analysis was asked for, in order; None: all of them."""
    asked = provenance.get("arguments", {}).get("layers")
    return None if asked is None else sorted(set(asked))


def in_layers(provenance: Mapping[str, Any]) -> str:
    """Where, to stand behind "every norm" and the like: " in layer 2", " in layers 0, 1"; nothing if all were asked."""
    asked = asked_layers(provenance)
    if asked is None:
        return ""
    return f" in layer{'' if len(asked) == 1 else 's'} {', '.join(map(str, asked))}"


def among_heads(provenance: Mapping[str, Any]) -> str:
    """Of which heads a figure speaks: " (heads 0, 1 alone)"; nothing if all were asked."""
    asked = provenance.get("arguments", {}).get("heads")
    if asked is None:
        return ""
    return f" (head{'' if len(asked) == 1 else 's'} {', '.join(map(str, sorted(set(asked))))} alone)"


def even_share(heads: pd.DataFrame) -> float:
    """Attention that each key of a prompt of average length would get if all got the same, by a `heads` table: of the
    prompts that its keys come from. NaN if it does not say how many."""
    if not {"prompts", "keys_all"} <= set(heads) or not (keys := heads["keys_all"].sum()) > 0:
        return math.nan
    return float(heads["prompts"].sum(min_count=1) / keys)


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
