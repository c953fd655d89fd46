"""The examples, notebooks kept as text, run top to bottom; a cell shows one line, a picture, a frame that fits."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import ln_probe
from ln_probe import hooks
from ln_probe.report import Report

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NAMES = (
    "does_projection_matter",
    "tour",
    "where_does_this_logit_come_from",
    "why_attend_to_position_0",
    "your_own_checkpoint",
)
NOTEBOOKS = [FOLDER / f"{name}.py" for name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run_and_show_what_they_made(path: Path, tmp_path: Path) -> None:
    jupytext = pytest.importorskip("jupytext", reason="notebooks are run with jupytext and nbclient (extra: dev)")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run with jupytext and nbclient (extra: dev)")
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": tmp_path}}).execute()
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code)
    outputs = [o for c in code for o in c.outputs]
    said = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert not said, "a stray warning, or worse"
    displays = [list(o["data"]) for o in outputs if o.output_type == "display_data"]
    assert ["text/plain"] not in displays, "a line of progress, or a widget's name"
    bare = [o["data"]["text/plain"] for o in outputs if list(o.get("data", ())) == ["text/plain"]]
    assert not [text for text in bare if text.startswith("<")], "a word for a picture, and no picture"
    assert any("text/html" in o.get("data", {}) for o in outputs)
    assert all("<script" not in o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {}))


@pytest.mark.parametrize("path", sorted((FOLDER / "hooks").glob("*.py")), ids=lambda p: p.stem)
def test_scripts_for_hooks_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) <= 15
    if path.stem.startswith("sae"):
        pytest.importorskip("sae_lens", reason="pip install sae-lens")
    runpy.run_path(str(path))
    first, second = (float(n) for n in re.findall(r"\d+\.\d+", "0.0 " + capsys.readouterr().out)[-2:])
    assert second > 0.1
    assert first == 0.0 or abs(first - second) < 0.5  # the rest of the logit is the norm's bias and the unembedding's


@pytest.mark.parametrize("path", sorted((FOLDER / "scripts").glob("*.py")), ids=lambda p: p.stem)
def test_short_scripts_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def test_every_notebook_of_the_site_opens_in_colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(FOLDER.glob("*.py")) == NOTEBOOKS
    jupytext = pytest.importorskip("jupytext", reason="the site's notebooks are made with jupytext (extra: docs)")
    for path in (*NOTEBOOKS, *(FOLDER.parent / "docs").glob("*.py")):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.parent.name)
    shutil.copytree(FOLDER.parent / "bench" / "results", tmp_path / "bench" / "results")
    monkeypatch.setenv("GITHUB_REPOSITORY", "some/one")
    runpy.run_path(str(tmp_path / "docs" / "conf.py"))
    for path in NOTEBOOKS:
        shown = (tmp_path / "docs" / "notebooks" / path.name).read_text()
        assert f"github/some/one/blob/gh-pages/colab/{path.stem}.ipynb" in shown
        code = [c.source for c in jupytext.read(path).cells if c.cell_type == "code"]
        assert [c.source for c in jupytext.reads(shown, fmt="py:percent").cells if c.cell_type == "code"] == code
        alone = jupytext.read(tmp_path / "docs" / "_extra" / "colab" / f"{path.stem}.ipynb")
        assert [c.source for c in alone.cells if c.cell_type == "code"][1:] == code  # after how to install


def test_the_pictures_of_the_readme_can_be_drawn(model: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["draw.py"])
    draw = runpy.run_path(str(FOLDER / "pictures" / "draw.py"))
    assert len(draw["projection_and_scaling"](model).axes) == 3
    assert len(draw["reachable"]().axes[1].patches) == 2 * 12  # a bar for each key and set of queries
    for axes in draw["estimates"]().axes:
        assert axes.lines
    idea = runpy.run_path(str(FOLDER / "pictures" / "idea.py"))["idea"]()
    texts = [axes.texts[-1].get_text() for axes in idea.axes[:2]]
    assert [text[:6] for text in texts] == ["6 of 7", "7 of 7"]
    weights = [bar.get_height() for bar in idea.axes[2].patches]
    assert weights[7:] == pytest.approx([1 / 7] * 7)  # along (1, 1, 1), with the mean subtracted
    assert max(weights[:7]) > 2 / 7


LINE = 200  # characters; a cell is wider, and a repr may stand in a list of others


@pytest.fixture(scope="module")
def model() -> object:
    return ln_probe.load_model("lm-layernorm")


def results(model: object, report: Report) -> Iterator[object]:
    """One of everything that a public function returns, but models, frames and figures."""
    tokens = torch.arange(1, 25)[None]
    site = hooks.find_norms(model)[0]
    yield from (report, report.attention(), report.attention(1, 2), report.exhibits, report.exhibits.attention)
    yield from (*report.declared.values(), ln_probe.compare([report, report]))
    yield from (site, site.decompose(torch.randn(3, 128)), ln_probe.outlier_tokens(model, tokens))
    with hooks.without(model, "scaling", scale=2.0) as done:
        yield done
    keys = np.random.default_rng(0).normal(size=(20, 3))
    yield from (ln_probe.key_geometry(keys), ln_probe.attribute_logits(model, tokens))
    yield ln_probe.attribute_scores(model, tokens, 1, 2, 20, 3)


def test_results_show_themselves_in_one_line(model: object, report: Report) -> None:
    """repr(report.attention()) was 143,712 characters."""
    for result in results(model, report):
        said = repr(result)
        assert said.startswith(type(result).__name__), said[:LINE]
        assert len(said) <= LINE, said[:LINE]
        assert "\n" not in said
