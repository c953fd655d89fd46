"""Entries of the list of faults that concern pages: each has a test of its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_up import HOSTILE, Page

from ln_probe.analyses.probes.base import even_share
from ln_probe.exhibits import Exhibits, to_weights
from ln_probe.page import figures, index
from ln_probe.page.figures import LEGIBLE, POINTS, SMALLEST, svg
from ln_probe.page.heads import MEASURES, HeadMap, address, linked
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.page.page import report_page, title_of
from ln_probe.report import Report

PageOf = Callable[[Report], str]


# ------------------------------------------------------------------------------------------------ shares, coincidence


def test_d3_shares_stand_beside_an_even_one(report: Report) -> None:
    axes = figures.attainable_over_depth(report).axes[0]
    even = even_share(report.heads)
    assert even == 1 / 24
    (line,) = [found for found in axes.lines if found.get_linestyle() == ":"]
    assert list(line.get_ydata()) == [even, even]
    assert line.get_label() == "uniform attention, 1/n = 4.2 %"
    without = replace(report, tables={**report.tables, "heads": report.heads.drop(columns="prompts")})
    assert not [found for found in figures.attainable_over_depth(without).axes[0].lines if found.get_linestyle() == ":"]


def test_d4_the_page_says_whose_attention_a_share_is_of(report: Report, page_of: PageOf) -> None:
    """Attainable attention is of the last position, received attention of all queries; the page says both."""
    html = page_of(report)
    assert "attainable attention at the last position" in html
    assert "from the average query that sees it" in html


def test_d5_lines_that_coincide_are_one_and_say_so(report: Report) -> None:
    heads = report.heads[report.heads["variant"].isin(["intact", "no_scaling"])]
    copies = heads[heads["variant"] == "intact"].assign(variant="no_projection")
    axes = figures.margins_over_depth(report.with_tables(heads=pd.concat([heads, copies], ignore_index=True))).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert "intact = projection removed" in labels
    assert "scaling frozen" in labels
    assert "intact" not in labels


# --------------------------------------------------------------------------------------- reading: phones, titles, ways


def test_d6_text_of_charts_is_legible_on_phones(report: Report, causal: pd.DataFrame, page_of: PageOf) -> None:
    """Every chart says how wide it must be for its smallest text to have 11 px, and phones show it so."""
    html = page_of(report) + svg(index.forest(["a", "b"], [report.with_tables(causal=causal)] * 2), "x")
    drawn = re.findall(r'<svg [^>]*--legible:(\d+)px"[^>]*viewBox="0 0 ([\d.]+) [\d.]+".*?</svg>', html, re.DOTALL)
    texts = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    assert len(drawn) == len(texts) >= 7
    for (legible, width), text in zip(drawn, texts, strict=True):
        assert float(legible) * SMALLEST / float(width) == pytest.approx(LEGIBLE, rel=0.01)
        sizes = [float(s) for s in re.findall(r"font(?:-size)?: (?:[\w ]+ )?([\d.]+)px", text)]
        assert sizes
        assert min(sizes) >= SMALLEST
    assert POINTS == 72
    style = html[: html.index("</style>")]
    assert "min-width: min(100%, var(--legible))" in style[style.index("@media (max-width: 44rem)") :]


@pytest.mark.parametrize(("name", "title"), [
    ("/data/models/gpt2", "gpt2"), ("./a/b.gguf", "b.gguf"), ("~/x/", "x"), ("C:\\models\\llama", "llama"),
    ("EleutherAI/pythia-70m", "EleutherAI/pythia-70m"), ("gpt2", "gpt2"), ("/", "/"), ("../..", "../.."), ("", ""),
])  # fmt: skip
def test_d6_the_title_is_a_name(name: str, title: str) -> None:
    assert title_of(name) == title


def test_d6_a_page_leads_back_to_its_index(report: Report, tmp_path: Path) -> None:
    small = Report({"layernorms": report.layernorms.head(2)}, report.provenance)
    alone, listed = report_page(small), report_page(small, "../index.html")
    assert "All models" not in alone
    assert ("a", {"href": "../index.html"}) in Page(listed).tags
    assert 'href="javascript%3Afired%28%29"' in report_page(small, "javascript:fired()")
    page = Path(small.save(tmp_path / "r", index="../index.html"), "report.html")
    assert 'href="../index.html"' in page.read_text()


def test_d6_every_page_has_a_main_part_and_no_path_for_a_title(report: Report, page_of: PageOf) -> None:
    moved = Report({"layernorms": report.layernorms}, {"model": {"name": "/a/b/mine"}})
    html = report_page(moved)
    assert "<title>mine · ln_probe</title>" in html
    assert "/a/b/mine" in Page(html).text
    for page in (html, index_page([IndexEntry("x", report=report)]), report.attention().document()):
        assert sum(t == "main" for t, _ in Page(page).tags) == 1
        assert sum(t == "h1" for t, _ in Page(page).tags) == 1


def test_d6_tooltips_are_the_declarations(report: Report, page_of: PageOf) -> None:
    tips = {a.get("title") for t, a in Page(page_of(report)).tags if t == "th"}
    for name, table in report.declared.items():
        frame = report.tables[name]
        for column in table.columns if len(frame) and name != "causal_prompts" else ():
            if column.shown and frame[column.name].notna().any():
                unit = f" ({column.unit})" if column.unit else ""
                assert f"{column.meaning}{unit}" in tips, (name, column.name)


# ------------------------------------------------------------------------------------------------------ head explorer


def test_patterns_without_scaling_are_kept(long_report: Report) -> None:
    """Rows sum to 1, no query sees ahead, the entropy is that of the `heads` table; another pattern than the intact."""
    heads = long_report.heads.query("space == 'head' and variant == 'no_scaling'").set_index(["layer", "head"])
    (short,) = [a for a in long_report.exhibits.attention if a.prompt == 2]
    assert short.cells_frozen is not None
    patterns = to_weights(short.cells_frozen)
    assert np.abs(patterns.sum(-1) - 1).max() < 0.02
    assert not np.triu(patterns, 1).any()
    assert np.abs(patterns - to_weights(short.cells)).max() > 0.05
    ratios = []
    for shown in long_report.exhibits.attention:
        assert shown.cells_frozen is not None
        if not shown.pooled:
            p = to_weights(shown.cells_frozen)
            entropy = -(p * np.log(np.maximum(p, 1e-12))).sum(-1)[..., 1:]
            ratios.append(entropy / np.log(np.arange(2, p.shape[-1] + 1)))
    assert len(ratios) == 1
    assert (ratios[0] > 0).all()
    assert (ratios[0] < 1.02).all()
    assert heads["entropy_ratio"].between(0, 1).all()


def test_the_view_opens_at_the_most_affected_head(report: Report) -> None:
    table = report.by_head()
    heads = HeadMap.of(report)
    first = next(iter(heads.values))
    assert first == "delta_loss"
    worst = table.loc[table["delta_loss"].abs().idxmax()]
    assert heads.most_affected(report.exhibits) == (worst["layer"], worst["head"])
    assert heads.most_affected(report.exhibits, layer=1)[0] == 1
    for measure, grid in heads.values.items():
        expected = table.pivot(index="layer", columns="head", values=measure).to_numpy()
        np.testing.assert_array_equal(grid, expected)
        assert measure in MEASURES
    assert HeadMap().most_affected(report.exhibits) == (0, 0)
    blank = report.with_tables(head_effects=report.tables["head_effects"].head(0))
    assert next(iter(HeadMap.of(blank).values)) == "entropy_change"
    with pytest.raises(ValueError, match="attention"):
        heads.most_affected(Exhibits())


def test_findings_lead_to_heads(report: Report, page_of: PageOf) -> None:
    assert linked("of L1H2: a, L9H9 b", report.exhibits) == 'of <a href="#L1H2P0">L1H2</a>: a, L9H9 b'
    assert address(1, 2) == "#L1H2P0"
    named = [f for f in report.findings() if re.search(r"\bL\d+H\d+\b", f)]
    assert named
    links = {a["href"] for t, a in Page(page_of(report)).tags if t == "a"}
    for sentence in named:
        for layer, head in re.findall(r"\bL(\d+)H(\d+)\b", sentence):
            assert address(int(layer), int(head)) in links
    for text in HOSTILE:
        page = Page(str(linked(f"{text} L0H1 {text}L0H0{text}", report.exhibits)))
        assert {t for t, _ in page.tags} <= {"a"}
        assert {a["href"] for _, a in page.tags} <= {"#L0H1P0", "#L0H0P0"}
