"""The examples, notebooks kept as text, run top to bottom."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ln_probe.reporting.report import Report

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run_and_show_what_they_made(path: Path, tmp_path: Path) -> None:
    jupytext = pytest.importorskip("jupytext", reason="notebooks are run with jupytext and nbclient (extra: dev)")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run with jupytext and nbclient (extra: dev)")
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code)
    outputs = [o for c in code for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr" and "Error" in o.text]
    assert any("text/html" in o.get("data", {}) for o in outputs)
    assert all("<script" not in o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {}))


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
        "tour",
        "where_does_this_logit_come_from",
        "why_attend_to_position_0",
        "your_own_checkpoint",
    }
