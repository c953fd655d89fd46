"""What a cell of a notebook shows: one line, a picture, a frame that fits; and nothing else."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image

import ln_probe
from ln_probe import hooks
from ln_probe.page import figures, heads
from ln_probe.page.figures import geometry
from ln_probe.report import Report

LINE = 200  # characters; a cell is wider, and a repr may stand in a list of others


@pytest.fixture(scope="module")
def model() -> object:
    return ln_probe.load_model("lm-layernorm")


def results(model: object, report: Report) -> Iterator[object]:
    """One of everything that a public function returns, but models, frames and figures."""
    tokens = torch.arange(1, 25)[None]
    site = hooks.find_sites(model)[0]
    yield from (report, report.attention(), report.attention(1, 0, 2), report.exhibits, *report.exhibits.attention)
    yield from (*report.exhibits.samples, *report.declared.values(), ln_probe.compare([report, report]))
    yield from (site, site.decompose(torch.randn(3, 128)), ln_probe.outlier_tokens(model, tokens))
    yield from (hooks.check_equivalent(model, model), ln_probe.sampled(3))
    with hooks.without(model, "scaling", scale=2.0) as done:
        yield done
    keys = np.random.default_rng(0).normal(size=(20, 3))
    yield from (ln_probe.key_geometry(keys), ln_probe.attribute_logits(model, tokens))
    yield ln_probe.attribute_scores(model, tokens, 1, 2, 20, 3)


def test_d6_results_show_themselves_in_one_line(model: object, report: Report) -> None:
    """repr(report.attention()) was 143,712 characters."""
    for result in results(model, report):
        said = repr(result)
        assert said.startswith(type(result).__name__), said[:LINE]
        assert len(said) <= LINE, said[:LINE]
        assert "\n" not in said


def test_d2_pictures_show_without_any_magic(report: Report) -> None:
    """They printed <Figure size …> unless `%matplotlib inline` was called."""
    drawn = [figures.margins_over_depth(report), geometry(report), heads.heads_map(report, "entropy_change")]
    drawn.append(figures.causal_effects(report)) if len(report.causal) else None
    for figure in drawn:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            png, size = figure._repr_png_()
        shown = Image.open(io.BytesIO(png))
        for pixels, meant in zip(shown.size, (size["width"], size["height"]), strict=True):
            assert abs(pixels - 2 * meant) <= 1, "not sharp on dense screens"
        assert 400 <= size["width"] <= 1100, "wider than a cell"
        assert len(np.unique(np.asarray(shown.convert("L")))) > 10, "nothing is drawn"
        assert not mpl._pylab_helpers.Gcf.get_all_fig_managers(), "pyplot keeps figures alive"  # type: ignore[attr-defined]


def test_labels_of_any_script_are_drawn_without_a_word() -> None:
    figure = figures.Figure(figsize=(5, 3))
    figure.subplots().set_title("𒀀 ⵣ \U0010fffd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert figure._repr_png_()[0]


def test_attention_of_a_head(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("ln_probe.page.attention.packed", lambda content: sent.append(content) or "")
    kept = report.exhibits.attention[0]
    layer, head = kept.layers[-1], kept.heads[-1]
    assert f"layer={layer}, head={head}" in repr(report.attention(layer, head=head))
    assert report.attention(layer, head=head).document()
    assert (sent[-1]["layer"], sent[-1]["head"]) == (layer, head)
    assert report.attention(layer).document()
    assert sent[-1]["layer"] == layer
    with pytest.raises(ValueError, match=r"no attention was kept of head 99: there is some of heads 0, 1"):
        report.attention(layer, head=99)


def test_d6_the_frame_of_a_notebook_follows_its_content(report: Report) -> None:
    shown = report.attention()._repr_html_()
    assert shown.startswith('<iframe class="attention"')
    assert "lnProbeHeight" in shown[: shown.index("srcdoc=")]
    assert "<script" not in shown[: shown.index("srcdoc=")]
