"""The examples, notebooks kept as text, run top to bottom."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ln_probe.report import Report

FOLDER = Path(__file__).resolve().parents[2] / "examples"
LONG = (  # a quarter of a minute and more
    "tour",
    "does_projection_matter",
    "why_attend_to_position_0",
    "your_own_checkpoint",
    "where_does_this_logit_come_from",
    "features_of_a_small_sae",
)
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in LONG else []) for p in NOTEBOOKS],
)
def test_d8_notebooks_run_and_show_what_they_made(path: Path, tmp_path: Path) -> None:
    jupytext = pytest.importorskip("jupytext", reason="notebooks are run with jupytext and nbclient (extra: dev)")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run with jupytext and nbclient (extra: dev)")
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": tmp_path}}).execute()
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code)
    outputs = [o for c in code for o in c.outputs]
    said = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert not said, "a stray warning, or worse"
    bare = [o["data"]["text/plain"] for o in outputs if list(o.get("data", ())) == ["text/plain"]]
    assert not [text for text in bare if text.startswith("<")], "a word for a picture, and no picture"
    assert any("text/html" in o.get("data", {}) for o in outputs)
    assert all("<script" not in o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {}))


@pytest.mark.parametrize("path", sorted((FOLDER / "hooks").glob("*.py")), ids=lambda p: p.stem)
def test_scripts_for_hooks_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) <= 15
    runpy.run_path(str(path))
    first, second = (float(n) for n in re.findall(r"\d+\.\d+", "0.0 " + capsys.readouterr().out)[-2:])
    assert second > 0.1
    assert first == 0.0 or abs(first - second) < 0.5  # the rest of the logit is the norm's bias and the unembedding's


@pytest.mark.parametrize("path", sorted((FOLDER / "scripts").glob("*.py")), ids=lambda p: p.stem)
def test_short_scripts_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in path.read_text().splitlines() if line]) <= 15
    runpy.run_path(str(path))
    assert len(capsys.readouterr().out.splitlines()) >= 7


def test_every_notebook_of_the_site_opens_in_colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jupytext = pytest.importorskip("jupytext", reason="the site's notebooks are made with jupytext (extra: docs)")
    shutil.copytree(
        FOLDER,
        tmp_path / "examples",
        ignore=shutil.ignore_patterns("checkpoints", "hooks", "pictures", "scripts", "*.png"),
    )
    (tmp_path / "docs").mkdir()
    for name in ("conf.py", "measured.py"):
        shutil.copy(FOLDER.parent / "docs" / name, tmp_path / "docs")
    shutil.copytree(FOLDER.parent / "bench" / "results", tmp_path / "bench" / "results")
    for repository, address in (("some/one", "github/some/one/blob/gh-pages/colab/{}.ipynb"), (None, "#upload=true")):
        monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
        if repository:
            monkeypatch.setenv("GITHUB_REPOSITORY", repository)
        runpy.run_path(str(tmp_path / "docs" / "conf.py"))
        for path in NOTEBOOKS:
            shown = (tmp_path / "docs" / "notebooks" / path.name).read_text()
            assert f'href="https://colab.research.google.com/{address.format(path.stem)}"' in shown
            code = [c.source for c in jupytext.read(path).cells if c.cell_type == "code"]
            assert [c.source for c in jupytext.reads(shown, fmt="py:percent").cells if c.cell_type == "code"] == code
            alone = jupytext.read(tmp_path / "docs" / "_extra" / "colab" / f"{path.stem}.ipynb")
            assert [c.source for c in alone.cells if c.cell_type == "code"] == ["%pip install -q ln-probe", *code]


def test_the_pictures_of_the_readme_can_be_drawn(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["draw.py"])
    drawn = runpy.run_path(str(FOLDER / "pictures" / "draw.py"))["concepts"](report)
    assert set(drawn) == {"projection_and_scaling", "selectable", "reachable", "uniform"}
    for draw in drawn.values():
        assert isinstance(draw(), Figure)
    weights = [bar.get_height() for bar in drawn["uniform"]().axes[1].patches]
    assert weights == pytest.approx([1 / 12] * 12), "a query along the ones-vector attends uniformly to projected keys"


def test_there_are_the_notebooks_that_the_readme_names() -> None:
    assert {p.stem for p in NOTEBOOKS} == {
        "does_projection_matter",
        "features_of_a_small_sae",
        "tour",
        "where_does_this_logit_come_from",
        "why_attend_to_position_0",
        "your_own_checkpoint",
    }
