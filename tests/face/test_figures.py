"""Figures are matplotlib's, and as SVG they follow the page without turning their colour scales round."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from ln_probe.exhibits import SiteSample
from ln_probe.hooks.variants import VARIANTS
from ln_probe.page import figures, index
from ln_probe.page.figures import svg
from ln_probe.page.heads import heads_map
from ln_probe.report import Report

DRAWN: list[Callable[[Report], Figure]] = [
    figures.norms_over_depth,
    figures.projection_over_depth,
    figures.margins_over_depth,
    figures.attainable_over_depth,
    figures.unselectable_by_head,
    figures.margins_by_head,
    figures.uniform_angle_by_layer,
    figures.entropy_by_layer,
    figures.norm_geometry,
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
    if draw is not figures.norm_geometry:
        visible = [a for a in figure.axes if a.get_visible() and a.get_label() != "<colorbar>"]
        assert any(a.get_ylabel() for a in visible)
        assert any(a.get_xlabel() or any(t.get_text() for t in a.get_xticklabels()) for a in visible)


@pytest.mark.parametrize("draw", [*DRAWN, heads_map], ids=lambda d: d.__name__)
def test_a_picture_says_what_it_shows_and_of_what(draw: Callable[[Report], Figure], report: Report) -> None:
    named = replace(report, provenance={**report.provenance, "model": {"name": "a $model$\n" + "x" * 100}})
    about, _, text = draw(named).get_suptitle().replace("\n", " ").partition(". ")
    assert re.fullmatch(r"a \$model\$ x+…x+, \d+ prompts?", about)
    assert len(text) > 20


def test_heat_maps_keep_their_colours(report: Report) -> None:
    text = svg(figures.heat_maps(report, "entropy_ratio", "entropy"), "x")
    cells = set(re.findall(r"fill: (#[0-9a-f]{6})", text))
    top = mpl.colors.to_hex(mpl.colormaps["cividis"](1.0))
    assert top in cells, "the largest value has the scale's last colour"


def test_ids_do_not_clash_and_a_title_is_text(report: Report) -> None:
    ids = [
        set(re.findall(r'\bid="([^"]+)"', svg(figures.norms_over_depth(report), name, "a title")))
        for name in ("a", "b")
    ]
    assert not ids[0] & ids[1]
    used = re.findall(r'(?:url\(#|href="#)([^")]+)', svg(figures.norms_over_depth(report), "a", "a title"))
    assert set(used) <= ids[0]
    assert "&lt;script&gt;" in svg(Figure(), "x", "<script>")


def sample(kind: str, n: int = 40) -> SiteSample:
    x = np.random.default_rng(0).normal(size=(n, 8)) + 1
    kept = x - x.mean(1, keepdims=True)
    length = np.linalg.norm(kept, axis=1)
    sigma = np.linalg.norm(kept if kind == "layernorm" else x, axis=1) / np.sqrt(8)
    ones, places = x.sum(1) / np.sqrt(8), (np.zeros(n, int), np.arange(n))
    return SiteSample("s", 0, kind, 8, ones, kept[:, 0], kept[:, 1], length, sigma, 0.5, *places, tuple("t" * n))


def test_steps_of_a_layernorm_end_on_the_sphere() -> None:
    (_, before, _), (_, flat, inside), (_, height, length) = figures.geometry_steps(sample("layernorm"))
    assert np.abs(before).max() > 1
    assert (flat == 0).all()
    assert inside.std() > 0.1
    assert (height == 0).all()
    assert np.allclose(length, np.sqrt(8))


def test_steps_of_other_norms() -> None:
    (_, _, _), (_, height, length) = figures.geometry_steps(sample("rmsnorm"))
    assert np.allclose(np.hypot(height, length), np.sqrt(8)), "an RMSNorm's outputs are on the sphere, not in the plane"
    assert np.abs(height).max() > 0.1
    assert [t for t, _, _ in figures.geometry_steps(sample("projection_only"))] == ["input x", "projected: Px"]
    assert len(figures.geometry_steps(sample("none"))) == 1
    for kind in ("layernorm", "rmsnorm", "projection_only", "scaling_only", "none"):
        assert figures.draw_geometry(sample(kind)).axes
        assert figures.draw_geometry(sample(kind, 1)).axes


def test_tokens_far_away_are_drawn_at_the_edge() -> None:
    near = sample("layernorm")
    length = near.length.copy()
    length[3] *= 500
    axes = figures.draw_geometry(replace(near, length=length)).axes[0]
    assert np.abs(axes.get_xlim()).max() < 3 * near.length.max(), "one sink decides what can be seen"
    assert "Hollow: farther away than drawn" in figures.geometry_caption(near)


def test_a_site_that_was_not_kept_and_an_unknown_measure_are_named(report: Report) -> None:
    assert figures.norm_geometry(report, "blocks.1.ln1").axes
    with pytest.raises(ValueError, match=r"no vectors were kept of 'ln9': there are some of \['blocks\.0\.ln1'"):
        figures.norm_geometry(report, "ln9")
    with pytest.raises(KeyError, match="marginal"):
        index.over_depth([report], ["a"], "marginal")
    with pytest.raises(KeyError, match="marginal"):
        figures.heat_maps(report, "marginal", "")


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
