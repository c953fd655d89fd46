"""One number at every door: committed tables, which README and the site quote, the headline, the report, its page."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pandas as pd
import pytest
from test_documents import BUNDLED, TABLES

import ln_probe
from ln_probe.page.page import report_page
from ln_probe.report import Report, answers

pytestmark = [pytest.mark.slow, pytest.mark.release]

README = Path(__file__).parents[2] / "README.md"
NUMBERS = ["loss", "delta_loss", "delta_loss_low", "delta_loss_high"]
ROUNDING = 0.0015  # of a number quoted with three digits behind the point; ends of CIs are of another seed's resamples


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


def test_readme_quotes_the_report(whole: Report) -> None:
    """The loss increase of both terms with their CIs, and the means of the three books."""
    text = " ".join(README.read_text().split())
    rows = primary(whole.causal)
    quoted = [tuple(map(float, match)) for match in re.findall(r"\+(0\.\d+) \[(0\.\d+), (0\.\d+)\]", text)]
    for variant in ("no_scaling", "no_projection"):
        row = rows.loc[("all", variant)]
        numbers = [row["delta_loss"], row["delta_loss_low"], row["delta_loss_high"]]
        assert any(numbers == pytest.approx(list(each), abs=ROUNDING) for each in quoted), (variant, numbers)
    prompts = whole.causal_prompts.query("sites == 'all' and variant == 'no_scaling'")
    for _, book in prompts.groupby("stratum"):
        mean = (book["delta_loss"] * book["n"]).sum() / book["n"].sum()
        assert f"+{mean:.3f}" in text


def test_every_door_says_the_same_in_the_same_order(whole: Report, tmp_path: Path) -> None:
    """`findings()`, `print`, the notebook's cell, the page, a loaded report, and of the loss the headline."""
    texts = whole.findings()
    assert texts == [answer.text for answer in answers(whole)]
    assert [answer.question for answer in answers(whole)] == ["loss"] * 3 + ["heads", "keys", "sinks", "uniform"]
    doors = {
        "print": " ".join(str(whole).split()),
        "notebook": " ".join(html.unescape(re.sub(r"<[^>]+>", "", whole._repr_html_())).split()),
        "page": " ".join(html.unescape(re.sub(r"<[^>]+>", "", report_page(whole))).split()),
        "loaded": " ".join(str(ln_probe.load_report(whole.save(tmp_path / "r"))).split()),
    }
    for door, content in doors.items():
        places = [content.find(" ".join(text.split())) for text in texts]
        assert -1 not in places, (door, texts[places.index(-1)])
        assert places == sorted(places), door
    headline = repr(ln_probe.freezing_cost(ln_probe.load_model("lm-layernorm"), progress=False))
    assert re.sub(r"; with loss-optimal constants [+-]\d+\.\d+", "", texts[0]) == headline
