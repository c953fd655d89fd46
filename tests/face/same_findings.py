"""When two reports of one model say the same: column by column, as near as each column's arithmetic allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses.geometry.check import TAU
from ln_probe.analyses.geometry.decide import WEIGHT_GAP
from ln_probe.analyses.probes.tables import CAUSAL, LAYERNORMS

TABLES = ("layernorms", "heads", "keys", "causal")
# Must be the same in both, letter by letter and number by number.
SAME = {
    "layernorms": ["site", "layer", "reads", "n"],
    "heads": ["layer", "head", "variant", "unselectable", "unreachable", "n"],
    "keys": ["layer", "head", "variant", "prompt", "position", "token", "n", "reachable"],
    # (Not `prompts_worse`: where nothing changes but rounding, a loss may rise in one world and fall in the other.)
    "causal": ["sites", "variant", "family", "n"],
}
# Formulas of activations and weights: as near as the arithmetic allows.
CLOSED_FORM = {
    "layernorms": [c for c in LAYERNORMS.names if c not in (*SAME["layernorms"], "reconstruction_error")],
    "heads": ["pattern_max_median", "entropy_ratio", "uniform_angle_deg"],
    "keys": ["pattern_max"],
    "causal": [c for c in CAUSAL.names if c not in (*SAME["causal"], "prompts_worse", "p")],
}
# Found by search to a stated gap: both ends are lower bounds of the same number, at most this far below it.
BRACKETED = {"heads": ["attainable_median"], "keys": ["attainable", "attainable_upper"]}
# What a projection removes from a centred stream is rounding, by construction: nothing to agree about.
ROUNDING_IF_CENTRED = ("projected_share",)
# Share of a vector's squared length along the all-ones direction below which a stream is centred: weights that are
# centred in float32 leave 1e-14, a trained stream that is not centred is above 1e-6.
CENTRED = 1e-9

# Differences of losses or entropies in nats, and their estimates: relative to the loss, not to what cancels.
CHANGES = [c for c in CAUSAL.names if c.startswith("delta_loss")]
CHANGES += ["equivalence_bound", "estimate"]
# Entropy of attention that is one-hot to float64's precision (3e-160 without scaling, in SmolLM2): zero.
ONE_HOT = 1e-15
# Exponentials of scores: a part of the scores' size in nats is their relative error.
SOFTMAX_WEIGHTS = ("pattern_max", "pattern_max_median")


def assert_same_findings(
    one: dict[str, pd.DataFrame], two: dict[str, pd.DataFrame], tolerance: float, which: str = ""
) -> None:
    """Closed-form columns within `tolerance` relative; sites, kinds, states, counts and NaN masks identical; clear
    verdicts identical; brackets overlapping. What differs is named, all of it."""
    wrong = [f"{which}: {text}" for text in differences(one, two, tolerance)]
    assert not wrong, "\n".join(wrong)


def differences(one: dict[str, pd.DataFrame], two: dict[str, pd.DataFrame], tolerance: float) -> Iterator[str]:
    for table in TABLES:
        a, b = one[table], two[table]
        if not len(a) and not len(b) and table == "causal":  # not asked for
            continue
        if list(a.columns) != list(b.columns) or len(a) != len(b) or not len(a):
            yield f"{table}: {len(a)} rows of {list(a.columns)} and {len(b)} of {list(b.columns)}"
            continue
        for column in SAME[table]:
            unknown = a[column].isna() & b[column].isna()
            if not (unlike := (a[column].astype(str) != b[column].astype(str)) & ~unknown).any():
                continue
            row = int(np.argmax(unlike))
            yield f"{table}.{column}: {int(unlike.sum())} rows differ, first {a[column][row]!r} and {b[column][row]!r}"
        for column in a.select_dtypes("number").columns:
            x, y = (t[column].to_numpy(float) for t in (a, b))
            if (np.isnan(x) != np.isnan(y)).any():
                yield f"{table}.{column}: NaN in other rows"
        for column in CLOSED_FORM[table]:
            x, y = (t[column].to_numpy(float) for t in (a, b))
            compared = ~np.isnan(x)
            if column in ROUNDING_IF_CENTRED:
                rounding = (a["projected_share"] < CENTRED).to_numpy()
                compared &= ~rounding
                if max(np.max(x[rounding], initial=0), np.max(y[rounding], initial=0)) > 1e-12:  # (16 eps of float32)²
                    yield f"{table}.{column}: more than rounding in a centred stream"
            scale = np.maximum(np.maximum(np.abs(x), np.abs(y)), 1e-300)
            if column == "entropy_ratio":
                compared &= ~((x < ONE_HOT) & (y < ONE_HOT))
            if column in CHANGES:
                scale = np.maximum(scale, a["loss"].to_numpy(float))
            if column in SOFTMAX_WEIGHTS:
                scale = scale * (1 + _largest(table, a, np.log(scale)))
            error = np.abs(x - y) / scale
            worst = np.max(error[compared & (x != y)], initial=0.0)
            if worst > tolerance:
                row = int(np.argmax(np.where(compared & (x != y), error, -1)))
                yield f"{table}.{column}: {worst:.1e} relative (row {row}: {x[row]:.6g}, {y[row]:.6g})"
        for column in BRACKETED.get(table, []):
            x, y = (t[column].to_numpy(float) for t in (a, b))
            worst = np.nanmax(np.abs(x - y), initial=0.0)
            if worst > WEIGHT_GAP + tolerance:
                yield f"{table}.{column}: {worst:.1e} apart, gap {WEIGHT_GAP}"
        if "verdict" in a:
            # margin_lower of a clear verdict is above 10 tau; unselectable ones have none, and must be so in both
            lower = np.fmax(*(t["margin_lower"].to_numpy(float) for t in (a, b)))
            clear = ~(lower <= 10 * TAU) | (a["verdict"] == "unselectable") | (b["verdict"] == "unselectable")
            if (unlike := clear & (a["verdict"] != b["verdict"])).any():
                yield f"{table}.verdict: {int(unlike.sum())} clear ones differ"
            slack = tolerance * _largest(table, a, a["margin_upper"])
            for low, high in ((a, b), (b, a)):
                if (low["margin_lower"].to_numpy(float) > high["margin_upper"].to_numpy(float) + slack).any():
                    yield f"{table}: margins whose brackets do not overlap"


def _largest(table: str, rows: pd.DataFrame, values: Any) -> np.ndarray:
    """The largest absolute value in the same set of keys: moving all keys by a part of their size moves any score or
    margin by that part of the largest."""
    size = pd.Series(np.abs(np.asarray(values, float)), index=rows.index)
    if table == "keys":
        return size.groupby([rows[c] for c in ("layer", "head", "variant", "prompt")]).transform("max").to_numpy()
    return size.to_numpy() if table == "heads" else np.full(len(rows), size.max())
