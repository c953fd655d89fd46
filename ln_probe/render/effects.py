"""What the loss does when a term is switched off in the running model: bars per group of norms, points per norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import pandas as pd

from ln_probe.hooks.variants import VARIANTS
from ln_probe.render.drawing import Figure
from ln_probe.render.figures import COLOURS, LABELS, MARKERS, SIZE, dress, legend, name_sites
from ln_probe.render.svg import GRID

if TYPE_CHECKING:
    from ln_probe.reporting.contents import Contents

__all__ = [
    "causal_effects",
]

GROUPS = ("attention", "mlp", "final", "all")
# Where the largest change is this many times the median one, the axis is linear near 0 and logarithmic beyond: a frozen
# scale at one attention sink can cost tens of nats (SmolLM2, layer 16: 32), and everything else would look like 0.
WIDE = 30.0


def causal_effects(report: Contents) -> Figure:
    """Change of the loss when a term is switched off, 95 % intervals: per group of norms, and each norm alone.

    Terms that are not there to take away (`no_op`) are left out.
    """
    rows = report.causal[(report.causal["variant"] != "intact") & report.causal["delta_loss"].notna()]
    if "no_op" in rows:
        rows = rows[rows["no_op"].fillna("") == ""]
    groups = rows[rows["sites"].isin(GROUPS)]
    single = rows[~rows["sites"].isin(GROUPS)]
    parts = [found for found in (groups, single) if len(found)]
    shape = [0.35 + 0.22 * len(groups)] * bool(len(groups)) + [2.6] * bool(len(single))
    figure = Figure(figsize=(SIZE[0], 0.9 + sum(shape)), layout="constrained")
    panels = figure.subplots(max(1, len(parts)), 1, squeeze=False, height_ratios=shape or [1])[:, 0]
    for axes, found in zip(panels, parts, strict=False):
        (_bars if found is groups else _points)(axes, found)
    if parts:
        legend(panels[0])
    return figure


def _bars(axes: mpl.axes.Axes, rows: pd.DataFrame) -> None:
    dress(axes, "", grid="x")
    axes.set_xlabel("change of loss, nats per token")
    axes.axvline(0, color=GRID, lw=1)
    names = list(dict.fromkeys(rows["sites"]))
    variants = [v for v in VARIANTS if (rows["variant"] == v).any()]
    width = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        mine = rows[rows["variant"] == variant].drop_duplicates("sites")
        place = mine["sites"].map(names.index).to_numpy(float) + (number - (len(variants) - 1) / 2) * width
        value, low, high = _numbers(mine)
        axes.barh(place, value, 0.9 * width, color=COLOURS[variant], alpha=0.75, label=LABELS[variant])
        axes.hlines(place, low, high, color="black", lw=1.3)
        for end in (low, high):
            axes.plot(end, place, "|", color="black", ms=5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    if is_wide(rows):
        axes.set_xscale("symlog", linthresh=threshold(rows))
        axes.set_xlabel("change of loss, nats per token (logarithmic away from 0)")


def _points(axes: mpl.axes.Axes, rows: pd.DataFrame) -> None:
    dress(axes, "each norm alone, nats")
    axes.axhline(0, color=GRID, lw=1)
    names = list(dict.fromkeys(rows["sites"]))
    for number, variant in enumerate(v for v in VARIANTS if (rows["variant"] == v).any()):
        mine = rows[rows["variant"] == variant].drop_duplicates("sites")
        place = mine["sites"].map(names.index).to_numpy(float) + 0.16 * (number - 1)
        value, low, high = _numbers(mine)
        axes.vlines(place, low, high, color=COLOURS[variant], lw=1.3)
        axes.plot(place, value, MARKERS[variant], ms=4, color=COLOURS[variant], label=LABELS[variant])
    name_sites(axes, pd.DataFrame({"site": names}))
    if is_wide(rows):
        axes.set_yscale("symlog", linthresh=threshold(rows))


def _numbers(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Value and interval; an interval that is not known has no length."""
    value, low, high = (rows[c].to_numpy(float) for c in ("delta_loss", "delta_loss_low", "delta_loss_high"))
    return value, np.where(np.isfinite(low), low, value), np.where(np.isfinite(high), high, value)


def is_wide(rows: pd.DataFrame) -> bool:
    """Whether one change would make the others invisible on a linear axis."""
    sizes = rows["delta_loss"].abs()
    return bool(sizes.max() > max(1.0, WIDE * float(sizes.median())))


def threshold(rows: pd.DataFrame) -> float:
    """Where such an axis stops being linear."""
    return max(1e-3, float(f"{rows['delta_loss'].abs().median():.1g}"))
