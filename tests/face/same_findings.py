"""When two reports of one model say the same: column by column, as near as each column's arithmetic allows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ln_probe.analyses.geometry.check import TAU
from ln_probe.analyses.geometry.decide import WEIGHT_GAP

TABLES = ("layernorms", "heads", "keys", "causal")
# Rounding itself, or the sign of what is nothing but rounding where an edit changes nothing.
NOT_COMPARED = ("reconstruction_error", "prompts_worse", "p")
# Found by search to a stated gap: attention that can be had, and margins, whose brackets have to overlap.
ATTAINABLE = ("attainable", "attainable_upper", "attainable_median")
NOTHING = 1e-9  # what projection removes from a centred stream is rounding: 1e-14 of it, or less
OF_MARGINS = ("verdict", "margin_lower", "margin_upper", "margin_median")


def assert_same_findings(
    one: Mapping[str, pd.DataFrame], two: Mapping[str, pd.DataFrame], tolerance: float, which: str = ""
) -> None:
    """Numbers within `tolerance` of a column's largest; changes of the loss within that of the loss; clear verdicts,
    everything else and NaN the same; brackets of margins overlapping."""
    for name, a in one.items():
        b, place = two[name], f"{which} {name}"
        assert (list(a), len(a)) == (list(b), len(b)), place
        assert len(a) or name not in ("layernorms", "heads", "keys"), f"{place} is empty"
        for column in a.columns.difference([*NOT_COMPARED, *OF_MARGINS]):
            x, y = a[column], b[column]
            if not pd.api.types.is_float_dtype(x):
                pd.testing.assert_series_equal(x, y, check_dtype=False, obj=f"{place}.{column}")
                continue
            size = np.nanmax([NOTHING, x.abs().max(), a["loss"].max() if "loss" in a else NOTHING])
            most = WEIGHT_GAP + tolerance if column in ATTAINABLE else tolerance * size
            np.testing.assert_allclose(y, x, rtol=tolerance, atol=most, err_msg=f"{place}.{column}")
        if "verdict" in a:
            # A lower margin that is above 10 tau is clear; unselectable keys have none, and must be so in both.
            lower = np.fmax(a["margin_lower"], b["margin_lower"])
            clear = ~(lower <= 10 * TAU) | (a["verdict"] == "unselectable") | (b["verdict"] == "unselectable")
            assert (a["verdict"] == b["verdict"])[clear].all(), place
            slack = tolerance * a["margin_upper"].abs().max()
            for low, high in ((a, b), (b, a)):
                assert not (low["margin_lower"] > high["margin_upper"] + slack).any(), place
