"""Real tokens around one norm, drawn as the paper draws them: off the ones-vector, then onto a sphere.

Brody, Alon & Yahav 2023, figure 1. Height is the coordinate along the ones-vector; the plane stands for everything
orthogonal to it. A token's direction in the plane comes from two principal axes, its distance from the middle is its
true length there, so that "all on one sphere" can be seen in a picture of three dimensions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mpl_toolkits.mplot3d.art3d import Line3DCollection  # type: ignore[import-untyped]

from ln_probe.render.drawing import Figure
from ln_probe.render.svg import BLUE, GREEN, GRID, ORANGE
from ln_probe.reporting.exhibits import SiteSample

if TYPE_CHECKING:
    from ln_probe.reporting.contents import Contents

__all__ = [
    "geometry",
]

EDGE = 1.15  # of the circle's radius: what is farther out is drawn there, hollow
_VIEW = {"elev": 18, "azim": -60}


def geometry(report: Contents, site: str | None = None) -> Figure:
    """Tokens before a norm, after its projection and after its scaling, on the ones-direction and two principal axes.

    Args:
        report: one that keeps samples of norm inputs.
        site: the norm; None means the one whose input lengths vary most.

    Raises:
        ValueError: no sample was kept of that site (says of which there are).
    """
    samples = report.exhibits.samples
    found = next((s for s in samples if s.site == site), None) if site is not None else most_spread(report)
    if found is None:
        raise ValueError(f"no vectors were kept of {site!r}: there are some of {[s.site for s in samples]}")
    return draw(found)


def most_spread(report: Contents) -> SiteSample | None:
    """The sample whose lengths vary most, position 0 left out: where scaling has most to do."""

    def spread(sample: SiteSample) -> float:
        lengths = sample.length[sample.position > 0] if (sample.position > 0).any() else sample.length
        return float(np.std(lengths) / max(float(np.mean(lengths)), 1e-300))

    return max(report.exhibits.samples, key=spread, default=None)


def steps(sample: SiteSample) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """What the norm does, step by step: a title, heights along the ones-vector, lengths in the plane."""
    ones, length = sample.ones.astype(float), sample.length.astype(float)
    found = [("x, as it comes", ones, length)]
    if sample.kind in ("layernorm", "projection_only"):
        ones = np.zeros_like(ones)
        found.append(("projected: Px", ones, length))
    if sample.kind in ("layernorm", "rmsnorm", "scaling_only"):
        symbol = "Px" if sample.kind == "layernorm" else "x"
        found.append((f"scaled: {symbol} / sigma", ones / sample.sigma, length / sample.sigma))
    return found


def draw(sample: SiteSample) -> Figure:
    """The picture of one sample."""
    drawn = steps(sample)
    figure = Figure(figsize=(3.1 * len(drawn), 3.7))
    angle = np.arctan2(sample.axis2.astype(float), sample.axis1.astype(float))
    first = sample.position == 0
    for number, (title, height, length) in enumerate(drawn, start=1):
        axes: Any = figure.add_subplot(1, len(drawn), number, projection="3d", computed_zorder=False)
        x, y = length * np.cos(angle), length * np.sin(angle)
        on_sphere = title.startswith("scaled")
        typical = np.hypot(length, height)[~first] if (~first).any() else np.hypot(length, height)
        radius = math.sqrt(sample.d) if on_sphere else float(np.quantile(typical, 0.95)) if len(typical) else 1.0
        radius = max(radius, 1e-12)
        reach = EDGE * radius
        size = np.hypot(length, height)
        outside = size > EDGE * radius  # sinks: drawn at the edge, so that the rest can be seen
        shrink = np.where(outside, EDGE * radius / np.maximum(size, 1e-300), 1.0)
        x, y, z = x * shrink, y * shrink, height * shrink
        _plane(axes, radius, on_sphere)
        axes.plot([0, 0], [0, 0], [-reach, reach], color=GREEN, lw=1.5, zorder=2)
        axes.text(0, 0, 1.04 * reach, "ones", color=GREEN, fontsize=9, ha="center", va="bottom")
        if number == 1:
            stems = [[(a, b, c), (a, b, 0.0)] for a, b, c in zip(x, y, z, strict=True)]
            axes.add_collection3d(Line3DCollection(stems, colors=GRID, linewidths=0.6, alpha=0.6, zorder=3))
        for those, place, far in (
            ({"s": 9, "color": BLUE, "alpha": 0.8}, ~first, False),
            ({"s": 34, "color": ORANGE, "marker": "^"}, first, False),
            ({"s": 12, "color": BLUE, "facecolors": "none"}, ~first, True),
            ({"s": 34, "color": ORANGE, "facecolors": "none", "marker": "^"}, first, True),
        ):
            mine = place & (outside == far)
            if mine.any():
                axes.scatter(x[mine], y[mine], z[mine], lw=0.9 if far else 0, depthshade=False, zorder=5, **those)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), zlim=(-reach, reach))
        axes.set_box_aspect((1, 1, 0.9), zoom=1.35)
        axes.set_axis_off()
        axes.view_init(**_VIEW)
        longest = "radius √d" if on_sphere else "circle: length"
        axes.set_title(f"{number}. {title}\n{longest} = {radius:.3g}", fontsize=9.5, y=1.0)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=0.84, wspace=0)
    return figure


def _plane(axes: Any, radius: float, sphere: bool) -> None:
    turn = np.linspace(0, 2 * math.pi, 97)
    edge_x, edge_y = radius * np.cos(turn), radius * np.sin(turn)
    axes.plot(edge_x, edge_y, 0 * turn, color=GRID, lw=1.2, zorder=1)
    for scale in (1 / 3, 2 / 3):
        axes.plot(scale * edge_x, scale * edge_y, 0 * turn, color=GRID, lw=0.4, alpha=0.7, zorder=1)
    for around in (0.0, math.pi / 2):
        way_x, way_y = radius * math.cos(around), radius * math.sin(around)
        axes.plot([-way_x, way_x], [-way_y, way_y], [0, 0], color=GRID, lw=0.6, zorder=1)
        if sphere:
            axes.plot(
                way_x * np.cos(turn),
                way_y * np.cos(turn),
                radius * np.sin(turn),
                color=GRID,
                lw=0.7,
                alpha=0.8,
                zorder=1,
            )


def caption(sample: SiteSample) -> str:
    """What the reader of the picture has to know."""
    before = "" if (sample.position > 0).all() else " Triangles: position 0. Hollow: farther away than drawn."
    return (
        f"{len(sample.tokens)} tokens at {sample.site} (d = {sample.d}). Height: coordinate along the ones-vector. "
        f"Direction in the plane: two principal axes, which hold {100 * sample.axes_share:.0f} % of the squared length "
        f"there; distance from the middle: true length.{before}"
    )
