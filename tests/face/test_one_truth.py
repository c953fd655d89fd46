"""One number at every door: committed tables, which README and the site quote, the headline, the report, its page."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_documents import BUNDLED, TABLES

import ln_probe
from ln_probe.page.page import report_page

NUMBERS = ["loss", "delta_loss", "delta_loss_low", "delta_loss_high", "delta_loss_optimal", "p"]


def primary(table: pd.DataFrame) -> pd.DataFrame:
    rows = table[table["family"] == "primary"].set_index(["sites", "variant"])
    return rows[NUMBERS].astype(float)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("name", BUNDLED)
def test_the_headline_is_the_committed_number(name: str) -> None:
    """Of the 64 windows; committed with six digits, and measured on another number of threads."""
    cost = ln_probe.freezing_cost(ln_probe.load_model(name))
    kept = primary(pd.read_csv(TABLES / f"{name}-books" / "causal.csv"))
    pd.testing.assert_frame_equal(primary(cost.table), kept, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.release
def test_the_page_and_the_findings_say_the_number_of_the_table(tmp_path: Path) -> None:
    """As the first command of the README makes them, but for the probes of heads and keys."""
    report: Any = ln_probe.analyze(ln_probe.load_model("lm-layernorm"), probes=["causal"], progress=False)
    row = primary(report.causal).loc[("all", "no_scaling")]
    quoted = f"{row['delta_loss']:.3g}"
    assert f"raises the loss by {quoted} nats/token" in report.findings()[0]
    page = re.sub(r"<[^>]+>", " ", report_page(report))
    assert f"raises the loss by {quoted} nats/token" in page
    assert "held-out windows of the model's training books" in page.replace("&#39;", "'")
    if not math.isnan(row["delta_loss_optimal"]):
        assert f"with loss-optimal constants {row['delta_loss_optimal']:+.2g}" in report.findings()[0]
