"""Figures are matplotlib's, and as SVG they follow the page without turning their colour scales round."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.figure import Figure

from ln_probe.hooks.norm import VARIANTS
from ln_probe.page import figures
from ln_probe.page.figures import svg
from ln_probe.report import Report

DRAWN: list[Callable[[Report], Figure]] = [
    figures.norms_over_depth,
    figures.projection_over_depth,
    figures.margins_over_depth,
    figures.attainable_over_depth,
    figures.uniform_angle_by_layer,
    figures.entropy_by_layer,
]


@pytest.mark.parametrize("draw", DRAWN, ids=lambda d: d.__name__)
def test_figures_are_labelled_can_be_restyled_and_are_drawn_alike_twice(
    draw: Callable[[Report], Figure], report: Report
) -> None:
    figure = draw(report)
    assert isinstance(figure, Figure)
    text = svg(figure, "x")
    assert text == svg(draw(report), "x")
    assert text.startswith("<svg role=")
    assert not re.search(r": #000000|: #0072b2|: #d55e00", text), "a colour that does not follow the page"
    assert not mpl.rcParams["svg.hashsalt"], "the user's settings were changed"
    assert any(a.get_ylabel() for a in figure.axes)
    assert any(a.get_xlabel() or any(t.get_text() for t in a.get_xticklabels()) for a in figure.axes)


def test_ids_do_not_clash_and_a_title_is_text(report: Report) -> None:
    ids = [
        set(re.findall(r'\bid="([^"]+)"', svg(figures.norms_over_depth(report), name, "a title")))
        for name in ("a", "b")
    ]
    assert not ids[0] & ids[1]
    used = re.findall(r'(?:url\(#|href="#)([^")]+)', svg(figures.norms_over_depth(report), "a", "a title"))
    assert set(used) <= ids[0]
    assert "&lt;script&gt;" in svg(Figure(), "x", "<script>")


def test_interventions_are_bars_for_groups_and_points_for_norms(report: Report, causal: pd.DataFrame) -> None:
    figure = figures.causal_effects(report.with_tables(causal=causal))
    above, below = figure.axes
    assert [t.get_text() for t in above.get_yticklabels()] == ["attention", "all"]
    bars = sorted(round(p.get_width(), 6) for p in above.patches)
    assert bars == sorted([0.3, -0.01, 0.31] * 2)
    assert [t.get_text() for t in below.get_xticklabels()] == ["0.ln1"]
    drawn = [line.get_ydata()[0] for line in below.lines if line.get_label() in {v.label for v in VARIANTS.values()}]
    assert sorted(drawn) == sorted([0.3, -0.01, 0.31])


def test_terms_that_do_nothing_are_not_drawn_and_huge_losses_do_not_hide_the_rest(
    report: Report, causal: pd.DataFrame
) -> None:
    still = causal.assign(no_op=["it has no projection" if v == "no_projection" else "" for v in causal["variant"]])
    above = figures.causal_effects(report.with_tables(causal=still)).axes[0]
    assert len(above.patches) == 4
    assert above.get_xscale() == "linear"
    huge = pd.concat(
        [causal, causal[causal["variant"] == "no_scaling"].head(1).assign(sites="mlp", delta_loss=32.0)],
        ignore_index=True,
    )
    assert figures.causal_effects(report.with_tables(causal=huge)).axes[0].get_xscale() == "symlog"
    assert not figures.causal_effects(report.with_tables(causal=causal.head(0))).axes[0].patches


def test_long_legends_leave_room_for_the_axes() -> None:
    """Lines that coincide share a label as wide as the figure; matplotlib warned, and drew an axis of no size."""
    from ln_probe.page.figures import SIZE, legend

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for label in (" = ".join(v.label for v in VARIANTS.values()), "5th percentile", "uniform attention, 1/n = 0.53 %"):
        axes.plot([0, 1], [0, 1], label=label)
    legend(axes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    assert axes.get_position().width > 0.5
