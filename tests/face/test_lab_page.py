"""The page of a lab experiment."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from ln_probe.analyses.lab.results import Results, summarize, write_results
from ln_probe.render.lab_page import TABLE_ROWS, write_lab_page


def test_page_shows_what_was_found_and_escapes_it(tmp_path: Path) -> None:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    values = pd.DataFrame({"norm": [f"<b>{i}</b>" for i in range(TABLE_ROWS + 3)], "seed": 0, "value": 0.25})
    results = Results(
        summarize(values, ["norm"]), figures={"curve": figure}, conclusions=("2 < 3 & so on",), diverged=("seed 9",),
        settings={"steps": 7},
    )  # fmt: skip
    write_results(results, tmp_path, experiment="toy", command="ln-probe lab run toy", ln_probe_version="0", seconds=1)
    text = write_lab_page(tmp_path).read_text()
    for shown in ("ln-probe lab run toy", "2 &lt; 3 &amp; so on", "&lt;b&gt;0&lt;/b&gt;", "Diverged: seed 9", "0.25"):
        assert shown in text
    assert "<b>" not in text
    assert "data:image/png;base64,iVBOR" in text
    assert "3 more rows in summary.csv" in text
    assert "http://" not in text
    assert "https://" not in text


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no results\.json: run the experiment first"):
        write_lab_page(tmp_path)
