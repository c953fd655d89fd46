"""The committed tables, which README and the site quote, are what the commands of README measure."""

from __future__ import annotations

import pandas as pd
import pytest
from test_documents import BUNDLED, TABLES

import ln_probe
from ln_probe.report import Report

pytestmark = [pytest.mark.slow, pytest.mark.release]

NUMBERS = ["loss", "delta_loss", "delta_loss_low", "delta_loss_high"]


@pytest.fixture(scope="module")
def whole() -> Report:
    """The report that README's second command makes."""
    return ln_probe.analyze(ln_probe.load_model("lm-layernorm"), progress=False)


def primary(table: pd.DataFrame) -> pd.DataFrame:
    rows = table[table["family"] == "primary"].set_index(["sites", "variant"])
    return rows[NUMBERS].astype(float)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_headline_is_the_committed_number(name: str) -> None:
    """Of the 64 windows; committed with six digits, and measured on another number of threads."""
    cost = ln_probe.freezing_cost(ln_probe.load_model(name))
    committed = primary(pd.read_csv(TABLES / f"{name}-books" / "causal.csv"))
    pd.testing.assert_frame_equal(primary(cost.table), committed, rtol=5e-3, atol=2e-3)


def test_no_column_of_a_default_report_is_constant_or_empty(whole: Report) -> None:
    assert sum(len(table.columns) for table in whole.tables.values()) <= 90
    for name, table in whole.tables.items():
        assert len(table), name
        constant = {column for column in table if table[column].nunique(dropna=False) == 1}
        assert constant <= {"n", "variant" if name == "head_effects" else "n"}, name
