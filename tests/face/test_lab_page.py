"""The page of a lab experiment."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from ln_probe.analyses.lab.results import Results, summarize, write_results
from ln_probe.page.lab import FIRST, write_lab_page


def test_page_shows_what_was_found_and_escapes_it(tmp_path: Path) -> None:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    values = pd.DataFrame({"norm": [f"<b>{i}</b>" for i in range(300)], "seed": 0, "value": 0.25})
    results = Results(
        summarize(values, ["norm"]),
        figures={"a_curve": figure},
        diverged=("seed 9",),
        settings={"steps": 7},
        conclusions=("2 < 3 & so on", *(f"finding {i}" for i in range(FIRST + 4))),
    )
    write_results(results, tmp_path, experiment="toy", command="ln-probe lab run toy", ln_probe_version="0", seconds=1)
    text = write_lab_page(tmp_path).read_text()
    for shown in ("ln-probe lab run toy", "2 &lt; 3 &amp; so on", "&lt;b&gt;0&lt;/b&gt;", "Diverged: seed 9", "0.25"):
        assert shown in text
    assert "<b>" not in text
    assert "data:image/png;base64,iVBOR" in text
    assert "A curve</h3>" in text
    assert "<summary>5 more</summary>" in text
    assert "of 300 rows shown" in text
    assert "--paper: #fff" in text  # the report's style, both its parts
    assert 'content="default-src &#39;none&#39;; script-src &#39;sha256-' in text
    assert 'src="http' not in text
    assert 'href="http' not in text


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no results\.json: run the experiment first"):
        write_lab_page(tmp_path)
