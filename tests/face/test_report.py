"""Reports are saved whole, load as they were, and their pages show hostile text as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import ln_probe
from ln_probe.render.page import IndexEntry, index_page, report_page
from ln_probe.render.text import visible
from ln_probe.report import TABLES, Report, slug

HOSTILE = [
    "</script><img src=x onerror=alert(1)>", '"><svg onload=alert(1)>', "</style><script>alert(1)</script>", "\u2028",
    "\x00", "\u202eevil", "<|endoftext|>", "a" * 5000, "🙂", "{{ 7 * 7 }}", "]]>", "<!--", "' onmouseover='alert(1)",
]  # fmt: skip


@pytest.fixture
def report(make_bridge: Callable[..., Any]) -> Report:
    return ln_probe.analyze(make_bridge("gpt2"), torch.arange(1, 25)[None], progress=False)


class Page(HTMLParser):
    """Elements and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_saved_reports_load_as_they_were(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    loaded = ln_probe.load_report(folder)
    for table in TABLES:
        pd.testing.assert_frame_equal(getattr(loaded, table), getattr(report, table), check_dtype=False)
    assert dict(loaded.provenance) == json.loads(json.dumps(report.provenance))
    assert (loaded.notes, loaded.findings(), repr(loaded)) == (report.notes, report.findings(), repr(report))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["report.json", "report.html", *(f"{t}.parquet" for t in TABLES)]
    )


def test_damaged_reports(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    with pytest.raises(FileNotFoundError, match=r"holds no report\.json: not a finished report's folder"):
        ln_probe.load_report(tmp_path)
    heads = folder / "heads.parquet"
    content = heads.read_bytes()
    heads.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"heads\.parquet is damaged .*make the report again"):
        ln_probe.load_report(folder)
    heads.unlink()
    with pytest.raises(FileNotFoundError, match=r"heads\.parquet is missing: make the report again"):
        ln_probe.load_report(folder)
    (folder / "report.json").write_text('{"format": 1')
    with pytest.raises(ValueError, match=r"report\.json is damaged"):
        ln_probe.load_report(folder)
    (folder / "report.json").write_text('{"format": 99, "provenance": {}, "notes": []}')
    with pytest.raises(ValueError, match="has format 99, this ln_probe reads 1"):
        ln_probe.load_report(folder)


def test_the_page_fetches_nothing_and_shows_the_tables(report: Report) -> None:
    page = Page(report_page(report))
    assert not [t for t, _ in page.tags if t in ("script", "iframe", "object", "embed", "link", "img", "base", "form")]
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith(("#", "data:image/png;base64,")), (tag, name, value)
    policy = next(
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for column in ("mean_share", "margin_median", "first_unselectable_at"):
        assert column in page.text
    assert sum(t == "svg" for t, _ in page.tags) >= 5
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids)), "two pictures share an id"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_tokens_names_and_notes_are_text(text: str, report: Report) -> None:
    keys = report.keys.assign(token=text)
    provenance = {**report.provenance, "model": {**report.provenance["model"], "name": text}}
    clean = Page(report_page(report))
    norms = report.layernorms.assign(site=text)
    dirty_report = Report(norms, report.heads, keys, provenance=provenance, notes=(*report.notes, text))
    pages = [
        report_page(dirty_report),
        dirty_report._repr_html_(),
        index_page([IndexEntry(text, "x/report.html", dirty_report), IndexEntry(text, error=text)]),
    ]
    dirty = Page(pages[0])
    extra = {t for t, _ in dirty.tags} - {t for t, _ in clean.tags}
    assert not extra, extra
    for html in pages:
        parsed = Page(html)
        assert not {"script", "img", "iframe"} & {t for t, _ in parsed.tags}
        assert not [n for _, a in parsed.tags for n in a if n.startswith("on")]
        assert not [c for c in "\x00\u202e\u2028" if c in html]
    assert visible(text)[:200] in dirty.text


def test_control_characters_are_made_visible() -> None:
    assert visible("a b\n\t") == "a·b⏎⇥"
    assert visible("\u202e\x00\u2028") == "\\u202e\\u0000\\u2028"
    assert visible("") == "∅"
    assert visible("🙂 <b>") == "🙂·<b>"


def test_notebook_cell_is_small(report: Report) -> None:
    cell = report._repr_html_()
    assert len(cell) < 100_000
    assert "<script" not in cell


def test_index_names_failures(report: Report) -> None:
    page = index_page([IndexEntry("good", "good/report.html", report), IndexEntry("bad", error="ValueError: broken")])
    assert 'href="good/report.html"' in page
    assert "failed: ValueError: broken" in page


@pytest.mark.parametrize(("name", "folder"), [
    ("gpt2", "gpt2"), ("EleutherAI/pythia-70m", "EleutherAI-pythia-70m"), ("../..", "model"), ("a b\u00e9", "a-b"),
    ("</script>", "script"), ("..", "model"),
])  # fmt: skip
def test_slugs_are_plain_folder_names(name: str, folder: str) -> None:
    assert slug(name) == folder


def test_figures_are_matplotlib_figures(report: Report) -> None:
    from matplotlib.figure import Figure

    from ln_probe.render import figures

    for draw in (
        figures.norms_over_depth,
        figures.margins_over_depth,
        figures.unselectable_by_head,
        figures.entropy_by_layer,
    ):
        figure = draw(report)
        assert isinstance(figure, Figure)
        assert figures.svg(figure, "x") == figures.svg(draw(report), "x")
