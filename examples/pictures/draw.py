"""Draw the pictures of the README and of docs/heads.md: concepts, estimates, parts of a page as Chromium shows them.

    python examples/pictures/draw.py [FOLDER] [REPORT]

FOLDER is where they go (examples/ by default). REPORT is a folder that `ln-probe report` wrote about a bundled model;
one is made if it is not given. The concepts are computed, not sketched: verdicts and weights come from `key_geometry`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import ln_probe
from ln_probe.hooks.norm import VARIANTS
from ln_probe.page.figures import BLUE, GREEN, GRID, ORANGE, Figure

DPI = 110
EXAMPLES = Path(__file__).resolve().parents[1]


def projection_and_scaling(model: Any, layer: int = 1) -> Figure:
    """Tokens before a norm, after its projection and after its scaling, as in Brody, Alon & Yahav 2023, figure 1.

    Height is the coordinate along the all-ones direction. The plane represents everything orthogonal to it: a token's
    direction there comes from two principal axes, its distance from the centre is its true length.
    """
    prompts = [prompt[None, :64] for prompt in model.bundled_prompts.measured[:2]]
    x = torch.cat([model.run_with_cache(prompt)[1]["resid_pre", layer][0] for prompt in prompts]).double().cpu()
    ones = x.mean(-1) * x.shape[-1] ** 0.5
    projected = x - x.mean(-1, keepdim=True)
    length = projected.norm(dim=-1)
    sigma = length / x.shape[-1] ** 0.5
    axis1, axis2 = (projected @ torch.linalg.svd(projected / length[:, None], full_matrices=False).Vh[:2].T).T
    angle = torch.atan2(axis2, axis1)
    figure = Figure(figsize=(9.3, 3.7))
    turn = np.linspace(0, 2 * np.pi, 97)
    zero = torch.zeros_like(ones)
    steps = [
        ("1. input x", ones, length),
        ("2. projected: Px", zero, length),
        ("3. scaled: Px / sigma", zero, length / sigma),
    ]
    for place, (title, height, distance) in enumerate(steps, start=1):
        axes: Any = figure.add_subplot(1, 3, place, projection="3d", computed_zorder=False)
        radius = float(distance.quantile(0.95))
        axes.plot(radius * np.cos(turn), radius * np.sin(turn), 0 * turn, color=GRID, lw=1.2)
        axes.plot([0, 0], [0, 0], [-radius, radius], color=GREEN, lw=1.5)
        axes.text(0, 0, 1.04 * radius, "ones", color=GREEN, fontsize=9, ha="center")
        shown = distance <= 1.15 * radius
        at = (distance * angle.cos(), distance * angle.sin(), height)
        axes.scatter(*(values[shown].numpy() for values in at), s=9, color=BLUE, alpha=0.8, depthshade=False)
        axes.set(xlim=(-radius, radius), ylim=(-radius, radius), zlim=(-radius, radius))
        axes.set_box_aspect((1, 1, 0.9), zoom=1.35)
        axes.set_axis_off()
        axes.view_init(elev=18, azim=-60)
        axes.set_title(f"{title}\ncircle: length {radius:.3g}", fontsize=9)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=0.84, wspace=0)
    return figure


def reachable() -> Figure:
    """Queries that a head can make, queries of the size that occur, and how much attention each key can get."""
    rng = np.random.default_rng(3)
    keys, center = rng.normal(size=(12, 2)), np.array([0.6, 0.2])
    axes_of = np.array([[2.6, 0.5], [0.2, 1.5]])
    shrink = 0.5
    most = [ln_probe.key_geometry(keys, query_set=(center, r * axes_of)).attainable for r in (1.0, shrink)]
    turn = np.stack([np.cos(t := np.linspace(0, 2 * np.pi, 200)), np.sin(t)])
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for radius, colour, name in ((1.0, BLUE, "reachable"), (shrink, GREEN, "observed")):
        left.fill(
            *(center[:, None] + radius * axes_of @ turn), facecolor=colour, alpha=0.12, edgecolor=colour, label=name
        )
    left.plot(*center, "+", color="black", label="c = W_Qᵀ bias + b_Q")
    left.set_title("queries: c + A u, |u| ≤ 1", fontsize=10)
    left.set(aspect="equal", xticks=[], yticks=[])
    left.spines[:].set_visible(False)
    left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.02))
    order = np.argsort(-most[0])
    for values, colour, name in zip(most, (BLUE, GREEN), ("reachable", "observed"), strict=True):
        right.bar(range(len(keys)), values[order], color=colour, alpha=0.75, label=name)
    right.set(xlabel="key", ylabel="attainable attention", ylim=(0, 1), xticks=[])
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    right.set_title("most attention each key can get", fontsize=10)
    return figure


def estimates() -> Figure:
    """First-order effects of every head beside exact ones, of committed tables (docs/heads.md)."""
    folder, names = EXAMPLES / "checkpoints" / "tables", ("lm-layernorm", "MGM")
    tables = {name: pd.read_csv(folder / f"heads-{name}.csv") for name in names}
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, tables.items(), strict=True):
        for variant, colour in (("no_scaling", ORANGE), ("no_projection", GREEN)):
            some = rows[rows["variant"] == variant]
            style = {"ms": 3.5, "color": colour, "alpha": 0.7, "label": VARIANTS[variant].label}
            axes.plot(some["delta_loss"], some["estimate"], "o", **style)
        ends = [rows["delta_loss"].min(), rows["delta_loss"].max()]
        axes.plot(ends, ends, color=GRID, lw=1, zorder=0)
        axes.set(title=name, xlabel="change of the loss, run exactly", ylabel="first-order estimate")
        axes.locator_params(axis="x", nbins=4)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def screenshots(page: Path, folder: Path) -> None:
    """The first screen of a report's page, and the attention of one head."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots need Chromium on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1440, "height": 880}, color_scheme="light")
        view.goto(page.resolve().as_uri())
        view.locator("#difference canvas").wait_for()
        view.wait_for_timeout(500)
        view.screenshot(path=folder / "report.png")
        view.set_viewport_size({"width": 1300, "height": 900})
        view.evaluate("document.querySelector('#heads').scrollIntoView()")
        view.wait_for_timeout(1500)
        view.screenshot(path=folder / "attention.png")
        browser.close()


def main(folder: Path = EXAMPLES, report: Path | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = ln_probe.load_model("lm-layernorm")
        if report is None:
            report = ln_probe.analyze(model, progress=False).save(Path(scratch) / "lm-layernorm")
        projection_and_scaling(model).savefig(folder / "projection_and_scaling.png", dpi=DPI)
        for draw in (reachable, estimates):
            draw().savefig(folder / f"{draw.__name__}.png", dpi=DPI)
        screenshots(report / "report.html", folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
