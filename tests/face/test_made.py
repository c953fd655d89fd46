"""What was measured stands in made blocks of a page, and they say what the committed tables say."""

from __future__ import annotations

import csv
import re
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typed_figures import typed_figures

TOP = Path(__file__).resolve().parents[2]
MARK = re.compile(r"^<!-- made:", re.MULTILINE)
RESULTS = TOP / "bench" / "results"
MADE: dict[str, Any] = runpy.run_path(str(TOP / "docs" / "made.py"))
BENCH: dict[str, Any] = runpy.run_path(str(TOP / "bench" / "document.py"))

# By page: what may be typed, and why it is no measurement.
TYPED: dict[str, dict[str, str]] = {
    "CONTRIBUTING": {
        "rules": "400",  # lines of a file
        "versions": "3.9; 4.3",
        "definitions": "two passes; 10 seconds",  # of measuring/, of a mutant's tests
    },
    "docs/api": {},
    "docs/attribution": {"bounds that code states": "1e-5; 1e-11; 0.03; 0.004"},
    "docs/compiler": {"years": "2024; 2025", "limits that code states": "150; 256"},
    "docs/concepts": {},
    "docs/cost": {
        "versions": "0.1.0",
        "limits that code states": "1024; 2 %",
        "times that code states": "three seconds; half a second; 25 seconds",
        "tolerances of a test": "1e-6; 1e-9",
        "HTTP's": "401; 403",
    },
    "docs/extending": {},
    "docs/faults": {
        "versions": "0.1.0",
        "limits that code states": "10 000; 100 000; 2²⁴; 512 MiB; 100; 128 MiB; 1 GiB; 1 MiB; 10⁹; 10 seconds; 150",
        "exit statuses": "130; 143",
    },
    "docs/geometry": {
        "tolerances, widths and budgets that code states": "1e-7; 1 %; 1e-6; 0.01; 1.0; two minutes",
        "an example's": "0.7; 1.4; 2.1; 0.02; 1e15; 1e-300; 1e300; 1e600",
        "limits that code states": "150; 1e-9; 1e150; 1e153 nats",
        "a nominal processor; condition numbers that a test goes to": "1e9",
        "years and places in a book": "2002; 3.1; 19.4",
    },
    "docs/heads": {
        "years": "2023; 2024",
        "sizes of models, and the limit": "10⁹; 5·10⁷; 4·10⁸; 144; 1.2·10¹⁰",
    },
    "docs/howto": {},
    "docs/index": {},
    "docs/interventions": {"level of intervals": "95 %", "years": "2024"},
    "docs/migrating": {"versions": "0.5; 0.8; 2.13; 3.11; 3.9; 5.23; 6.54"},
    "docs/models": {
        "versions": "3.9",
        "TransformerLens's own context": "2048",
        "bounds that code states": "2e-4; 1e-6; 1e-5; 1e-3; four times; about an hour",
        "level of intervals, share of an ellipsoid": "95 %",
        "how norm-free checkpoints are released": "1e12; 1e6",
    },
    "docs/quickstart": {
        "definitions": "5 %",
        "a format and its rounding": "8 bits; 0.4 %",
        "sizes of files on the hub": "0.5 GB; 0.2 GB",
    },
    "docs/reading": {"level of intervals": "95 %", "thresholds that code states": "0.01 nats; 1 %"},
    "docs/sinks": {
        "definitions": "0.3; 10 times; 100; 1000 times; 30 %",
        "years": "2024; 2025",
        "settings of an experiment": "500; 2048",
        "how norm-free checkpoints are released": "1e12; 1e6",
    },
    "docs/speed": {"versions": "0.1.0", "the setting": "512", "an aim": "0.15"},
    "docs/stability": {"versions": "0.1.0; 1.0"},
    "docs/suites": {"exit statuses": "130; 143"},
}
# Of these all is made, or their figures have tests of their own.
ELSEWHERE = {"README", "docs/checkpoints", "docs/columns", "docs/laboratory", "docs/statistics"}


@pytest.fixture(scope="module")
def blocks() -> dict[str, Callable[[], str]]:
    return {name: cache(make) for name, make in MADE["blocks"]().items()}


def test_pages_hold_what_the_tables_say(blocks: dict[str, Callable[[], str]]) -> None:
    marked = []
    for page in MADE["PAGES"]:
        text = page.read_text(encoding="utf-8")
        marked += [m[2] for m in MADE["BLOCK"].finditer(text)]
        assert len(MARK.findall(text)) == len(MADE["BLOCK"].findall(text)), f"{page.name}: a block without its end"
        assert MADE["made"](text, blocks) == text, f"{page.name}: run python docs/made.py"
    assert sorted(marked) == sorted(blocks)


def test_every_page_is_looked_at() -> None:
    pages = {"README", "CONTRIBUTING", *(f"docs/{p.stem}" for p in (TOP / "docs").glob("*.md"))}
    assert pages == TYPED.keys() | ELSEWHERE
    marked = {name for name in pages if MARK.search((TOP / f"{name}.md").read_text(encoding="utf-8"))}
    assert marked == {str(p.relative_to(TOP).with_suffix("")) for p in MADE["PAGES"]}


@pytest.mark.parametrize("page", TYPED)
def test_no_measured_figure_is_typed(page: str) -> None:
    allowed = {figure for figures in TYPED[page].values() for figure in figures.split("; ")}
    assert typed_figures((TOP / f"{page}.md").read_text(encoding="utf-8")) == allowed


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("it takes 12 s, or 0.5 GB, with 2 threads", {"12 s", "0.5 GB"}),
        ("| a | 35214 | 2.4 |\n|---|---|---|", {"35214", "2.4"}),
        ("of 205,800 keys 3·10⁴ differ by 4.8e-6 or −3 %", {"205,800", "3·10⁴", "4.8e-6", "−3 %"}),
        ("ten times faster, about a second", {"ten times", "about a second"}),
        ("1.9\npasses and 1.3 times", {"1.9 passes", "1.3 times"}),
        ("GPT-2, SHA-256, float32, 12 × 12 heads in `0.7 s`", set()),
        ("[a page](of.md#3.5)\n\n    python 3.5\n\n```\n3.5\n```\n<!-- made: a -->\n3.5\n<!-- end -->\n", set()),
    ],
)
def test_what_looks_like_a_measurement(text: str, figures: set[str]) -> None:
    assert typed_figures(text) == figures


def test_a_changed_digit_is_noticed(blocks: dict[str, Callable[[], str]]) -> None:
    for page in MADE["PAGES"]:
        text = page.read_text(encoding="utf-8")
        for block in MADE["BLOCK"].finditer(text):
            digit = re.search(r"\d", block[0].removeprefix(block[1]))
            assert digit is not None, f"{block[2]} has no figure: type it"
            at = block.start() + len(block[1]) + digit.start()
            other = text[:at] + str((int(digit[0]) + 1) % 10) + text[at + 1 :]
            assert MADE["made"](other, blocks) == text != other


def test_every_table_says_where_it_comes_from() -> None:
    about = BENCH["read"]("about")
    tables = {p.stem for p in RESULTS.glob("*.csv")} - {"about"}
    assert [row["table"] for row in about] == sorted(tables)
    assert all(row["command"] for row in about)
    assert all(row["what"] for row in BENCH["read"]("single"))


def test_no_table_and_no_single_figure_is_left_over() -> None:
    text = (TOP / "bench" / "document.py").read_text(encoding="utf-8")
    names = [row["name"] for row in BENCH["read"]("single")]
    assert len(set(names)) == len(names)
    assert [name for name in names if f"'{name}'" not in text and f'"{name}"' not in text] == []
    pages = "".join(page.read_text(encoding="utf-8") for page in (TOP / "docs").glob("*.md"))
    tables = {p.stem for p in RESULTS.glob("*.csv")} - {"about"}
    assert [t for t in tables if f'"{t}"' not in text and f"`bench/results/{t}.csv`" not in pages] == []


@pytest.mark.parametrize("script", ["attribution", "page", "scale", "whole"])
def test_a_script_writes_the_columns_of_its_table(script: str) -> None:
    with (RESULTS / f"{script}.csv").open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file))
    source = (TOP / "bench" / f"{script}.py").read_text(encoding="utf-8")
    assert "(" + ", ".join(f'"{c}"' for c in columns) + ")" in source


def test_what_follows_from_figures_beside_it_follows() -> None:
    """Ratios were printed from unrounded times: as far as rounding allows."""
    for row in BENCH["read"]("geometry-speed"):
        for over in ("(a)", "(b)"):
            low, high = (float(row[over]) + sign * _half(row[over]) for sign in (-1, 1))
            verdict, half = float(row["verdict"]), _half(row["verdict"])
            ratio, doubt = float(row[f"{over}/verdict"]), _half(row[f"{over}/verdict"])
            assert low / (verdict + half) - doubt <= ratio <= high / (verdict - half) + doubt, row
    for row in BENCH["read"]("decomposition"):
        bare = BENCH["where"]("decomposition", world=row["world"], part="bare")
        assert f"{float(row['peak_mb']) / float(bare['peak_mb']):.2f}" == row["memory"]


def _half(figure: str) -> float:
    return 0.5 * 10.0 ** -len(figure.partition(".")[2])
