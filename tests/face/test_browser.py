"""Pages in a real headless Chromium without a network: silent, drawn, usable, without a word from axe-core."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_up import HOSTILE

import ln_probe
from ln_probe.analyses.schema import Table
from ln_probe.analyses.text import disarmed, shortened, visible
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.page.page import notebook_cell, report_page
from ln_probe.report import Report

AXE = os.environ.get("LN_PROBE_AXE", "")  # axe.min.js of the npm package axe-core; .ci/run fetches it
WATCH = """() => { const given = CircuitsVis.render; window.drawn = [];
  window.CircuitsVis = { ...CircuitsVis,
    render: (id, what, props) => { drawn.push(props); given(id, what, props); } }; }"""


def charts(view: Any) -> None:
    view.until("document.querySelectorAll('#intact canvas, #frozen canvas').length === 2")


def accessible(view: Any) -> None:
    """No violation of axe-core, in both colour schemes, and nothing wider than the window."""
    for width in (1440, 1024, 390):
        view.page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            view.page.emulate_media(color_scheme=scheme)
            assert view.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if AXE:
                view.page.evaluate(Path(AXE).read_text())
                found = view.page.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.nodes[0].html]))")
                assert found == [], (width, scheme)


@pytest.mark.slow
@pytest.mark.release
def test_a_page_is_drawn_and_used(report: Report, visit: Any) -> None:
    view = visit(report_page(report, "../index.html"))
    charts(view)
    assert view.page.evaluate("document.documentElement.scrollHeight <= 6 * 900")
    shown = report.exhibits.attention
    view.page.evaluate(WATCH)
    view.page.locator('button[data-name="L1H2"]').click()
    view.until("drawn.length === 3")  # intact, frozen, difference
    charts(view)
    intact = view.page.evaluate("drawn[0]")
    names = [shortened(visible(t), 14).replace("<", "‹").replace(">", "›") for t in shown.tokens]
    assert intact["tokens"] == names, "the index that circuitsvis adds is the position"
    place = shown.layers.index(1), shown.heads.index(2)
    for query in (0, 5, len(names) - 1):
        expected = (shown.intact[place][query, : query + 1] / 255.0) ** 2
        assert intact["attention"][query] == pytest.approx(expected.tolist(), rel=6e-3)
    assert view.page.locator("#head").inner_text() == "Attention of L1H2"
    assert view.page.evaluate("location.hash") == "#L1H2"
    view.page.keyboard.press("ArrowLeft")
    assert view.page.locator("#head").inner_text() == "Attention of L1H1"
    view.page.goto(f"{view.page.url.split('#')[0]}#L0H3")
    view.until("document.querySelector('#head').textContent === 'Attention of L0H3'")

    table = view.page.locator("#table-keys")
    table.locator("summary").first.click()
    table.locator("tbody tr").first.wait_for()
    assert table.locator("th").count() <= 8
    table.locator("th button", has_text="position").click()
    assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    with view.page.expect_download() as download:
        table.locator("button", has_text="CSV").press("Enter")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text("utf-8-sig"))))
    assert len(rows) == len(report.keys)
    assert [float(r["position"]) for r in rows] == sorted(report.keys["position"])
    table.locator("button", has_text="All").click()
    assert table.locator("th").count() > 8
    charts(view)
    accessible(view)
    view.quiet()


@pytest.mark.slow
@pytest.mark.release
def test_hostile_text_stays_text(report: Report, visit: Any) -> None:
    """Every string in tokens, names, paths, notes, tables and provenance."""
    for start in range(0, len(HOSTILE), 12):
        some = HOSTILE[start : start + 12]

        def spread(count: int, some: list[str] = some) -> list[str]:
            return [some[i % len(some)] for i in range(count)]

        tables = {
            name: frame.assign(**{c: spread(len(frame)) for c in frame if frame[c].dtype in (object, "str")})
            for name, frame in report.tables.items()
            if name not in ("heads", "causal", "head_effects")
        }
        shown = report.exhibits.attention
        exhibits = replace(report.exhibits, attention=replace(shown, tokens=tuple(spread(len(shown.tokens)))))
        about = {**report.provenance, "model": {"name": some[0], "norms": {t: t for t in some}}, "list": some}
        about["prompts"] = {**about["prompts"], "source": some[-1], "begin": some}
        title, meaning = spread(4)[2:]
        own = Table("own", title, meaning, (some[0],), {some[0]: ("text", meaning or "-")})
        frames = {**report.tables, **tables, "own": pd.DataFrame({some[0]: some})}
        one = Report(frames, about, tuple(some), exhibits, declared={"own": own})
        view = visit(report_page(one))
        charts(view)
        for summary in view.page.locator("details > summary").all():
            if summary.is_visible():
                summary.click()
        view.page.locator("#table-sinks tbody tr").first.wait_for()
        text = view.page.evaluate("document.body.textContent")
        for string in some:
            assert shortened(disarmed(string), 200).strip() in text, string
        assert view.page.locator("img, object, embed, base, form, textarea, iframe").count() == 0
        view.quiet()
        for html in (notebook_cell(one), index_page([IndexEntry(t, t, one, t) for t in some])):
            visit(f"<!DOCTYPE html><meta charset='utf-8'>{html}").quiet()


def test_the_view_in_a_notebook(report: Report, visit: Any) -> None:
    view = visit(f"<!DOCTYPE html><body>{report.attention(1, 1)._repr_html_()}</body>")
    frame = view.page.frame_locator("iframe")
    frame.locator("#frozen canvas").wait_for()
    assert frame.locator("#head").inner_text() == "Attention of L1H1"
    assert view.page.frames[1].evaluate("window.origin") == "null", "the frame can reach the page around it"
    frame.locator('button[data-name="L0H0"]').click()
    assert frame.locator("#head").inner_text() == "Attention of L0H0"
    view.quiet()


def test_the_heads_of_a_layer(visit: Any) -> None:
    picture = ln_probe.attention(ln_probe.load_model("lm-layernorm"), [list(range(5, 31))], 1, [0, 3], scale=2.0)
    view = visit(picture.document())
    view.until("document.querySelectorAll('#panel1 canvas').length === 3")  # two small ones, and one of them large
    view.quiet()
