"""Draw the picture of the idea (README, docs/idea.md): what the two terms of LayerNorm do for seven keys.

    python examples/pictures/idea.py [FILE]

FILE is `examples/idea.png` by default. The seven vectors have three components, so that projection leaves a plane.
Verdicts come from `key_geometry`, attention weights from a softmax of the scores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import ln_probe

INK, GRAY, BLUE, ORANGE, FILL = "#1a1a1a", "#767676", "#004f80", "#d55e00", "#dbe8f2"
NAMES = "ABCDEFG"
SHORT = 3  # the key (D) that is shorter than its neighbours
ANGLES = np.radians([100.0, 152.0, 205.0, 36.0, 262.0, 318.0, 4.0])
LENGTHS = np.array([1.9, 1.5, 2.1, 0.75, 1.7, 1.45, 2.0])
MEANS = np.array([0.75, -0.45, 0.1, 0.15, -0.5, -0.3, 0.4])
PLANE = np.array([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]]) / np.sqrt([[2.0], [6.0]])  # axes orthogonal to (1, 1, 1)
ONES = np.ones(3)
DPI = 200  # 1400 pixels wide: sharp where it is shown at 700


def vectors() -> np.ndarray:
    """Return the seven vectors [key, 3] before the norm."""
    plane = LENGTHS[:, None] * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)
    return plane @ PLANE + MEANS[:, None] * ONES


def attention(keys: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the softmax of the scores of the keys [key, 3] with one query."""
    weights = np.exp(keys @ query)
    return np.asarray(weights / weights.sum())


def draw_plane(axes: Any, keys: np.ndarray, title: str) -> None:
    """Draw keys [key, 2], their hull, and a query toward the short key, up to the key that it selects."""
    geometry = ln_probe.key_geometry(keys)
    corner = geometry.verdict == "selectable"
    if corner.all():
        turn = np.linspace(0, 2 * np.pi, 200)
        axes.plot(*np.linalg.norm(keys[0]) * np.stack([np.cos(turn), np.sin(turn)]), color=GRAY, lw=1)
    outline = keys[corner][np.argsort(np.arctan2(*keys[corner].T[::-1]))]
    axes.fill(*outline.T, facecolor=FILL, edgecolor=BLUE, lw=1.2)
    query = geometry.witness(SHORT) if corner[SHORT] else keys[SHORT]
    query = query / np.linalg.norm(query)
    scores = keys @ query
    across = np.array([-query[1], query[0]])
    best = int(np.argmax(scores))
    line = np.array([scores[best] * query + side * across for side in (-1.5, 1.5)])
    axes.plot(*line.T, color=GRAY, lw=1.2, ls=(0, (4, 3)))
    arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", scores[best] * query, (0, 0), arrowprops=arrow)
    axes.plot(0, 0, ".", color=INK, ms=4)
    axes.plot(*keys[corner].T, "o", color=BLUE, ms=8)
    axes.plot(*keys[~corner].T, "X", color=ORANGE, ms=10, mec="white", mew=0.8)
    for name, key, is_corner in zip(NAMES, keys, corner, strict=True):
        outward = key / np.linalg.norm(key) if is_corner else -across
        style = {"color": INK} if is_corner else {"color": ORANGE, "weight": "bold"}
        axes.annotate(name, key + 0.33 * outward, ha="center", va="center", fontsize=9, **style)
    axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal")
    axes.set_title(title, fontsize=9, weight="bold", color=INK)
    axes.axis("off")
    verdict = f"{corner.sum()} of {len(keys)} keys can be selected."
    reason = (
        f"{NAMES[SHORT]} is a corner, too: along the\narrow it is the farthest."
        if corner[SHORT]
        else f"{NAMES[SHORT]} is inside the hull of the others.\nAlong any arrow another key is farther."
    )
    axes.text(0.5, -0.03, f"{verdict}\n{reason}", transform=axes.transAxes, ha="center", va="top", fontsize=8.5)


def draw_uniform(axes: Any, with_mean: np.ndarray, without_mean: np.ndarray) -> None:
    """Draw the attention of a query along (1, 1, 1) over keys [key, 3] with and without their means."""
    places = np.arange(len(NAMES))
    shares = [attention(keys, ONES / np.sqrt(3)) for keys in (with_mean, without_mean)]
    hatched = {"facecolor": "white", "edgecolor": ORANGE, "hatch": "////", "lw": 1}
    axes.bar(places - 0.21, shares[0], 0.4, label="mean left in", **hatched)
    axes.bar(places + 0.21, shares[1], 0.4, color=BLUE, label="mean subtracted")
    axes.set_xticks(places, list(NAMES), fontsize=9)
    axes.set(ylim=(0, 0.5), yticks=[])
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="upper center", borderaxespad=0, handlelength=1.4)
    axes.set_title("3. A query along (1, 1, 1)", fontsize=9, weight="bold", color=INK)
    low, high = 100 * shares[0].min(), 100 * shares[0].max()
    text = f"Attention per key: {low:.0f} to {high:.0f} %\nwith the mean, 1/{len(NAMES)} without it."
    axes.text(0.5, -0.13, text, transform=axes.transAxes, ha="center", va="top", fontsize=8.5)


def idea() -> Figure:
    """Return the picture: keys with scaling frozen, the same keys scaled, and a query along (1, 1, 1)."""
    x = vectors()
    projected = x - x.mean(axis=1, keepdims=True)
    sigma = np.sqrt((projected**2).mean(axis=1, keepdims=True))
    figure = Figure(figsize=(7.0, 3.35), facecolor="white")
    axes = [figure.add_axes((left, 0.24, width, 0.66)) for left, width in ((0.012, 0.34), (0.34, 0.33), (0.695, 0.285))]
    draw_plane(axes[0], projected / sigma.mean() @ PLANE.T, "1. Scaling frozen: lengths differ")
    draw_plane(axes[1], projected / sigma @ PLANE.T, "2. With scaling: one length")
    draw_uniform(axes[2], x / sigma, projected / sigma)
    return figure


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "idea.png"
    idea().savefig(file, dpi=DPI)
