"""Hostile text in pages stays text: nothing in it runs, and nothing is fetched, in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_up import HOSTILE, UNSEEN, Page

import ln_probe
from ln_probe.analyses.text import disarmed, shortened, visible
from ln_probe.page import attention, circuitsvis_script
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.report import Report

# A bundle that has nothing but what circuitsvis documents.
PUBLIC = """;CircuitsVis = new Proxy(CircuitsVis, { get(all, name) {
  if (name !== "render" && name !== "AttentionPattern") throw new Error(`${name} is not public`);
  return all[name]; } });"""


@pytest.mark.slow
@pytest.mark.release
def test_attention_needs_the_public_render_alone(
    long_report: Report, visit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = circuitsvis_script() + PUBLIC
    monkeypatch.setattr(attention, "circuitsvis_script", lambda: bundle)
    opened = visit(long_report.attention().document())
    opened.page.locator("#pattern canvas").wait_for()
    for head in (1, 0, 1):
        opened.page.locator(f'#map button[data-layer="2"][data-head="{head}"]').click()
    opened.page.locator("#frozen canvas").wait_for()
    assert opened.page.locator("#pattern canvas").count() == 1
    opened.quiet()


def test_the_view_in_a_notebook(long_report: Report, visit: Any) -> None:
    opened = visit(f"<!DOCTYPE html><body>{long_report.attention(1, 1, prompt=2)._repr_html_()}</body>")
    frame = opened.attention()
    assert frame.locator("#title").inner_text().startswith("Layer 1, head 1")
    assert frame.locator("#keys .key").count() == 5
    assert opened.page.frames[1].evaluate("window.origin") == "null", "the frame can reach the page around it"
    fits = "document.querySelector('iframe.attention').style.height"
    wanted = frame.locator("body").evaluate("b => `${document.documentElement.offsetHeight}px`")
    opened.until(f"{fits} === '{wanted}'")
    opened.page.evaluate("postMessage({ lnProbeHeight: 77 }, '*')")  # from elsewhere than the frame
    opened.page.wait_for_timeout(50)
    assert opened.page.evaluate(fits) == wanted
    opened.quiet()


# ------------------------------------------------------------------------------------------------------ hostile text


@pytest.mark.slow
@pytest.mark.release
def test_hostile_tokens_sites_and_tables(dirty: list[Report], visit: Any, page_of: Any) -> None:
    said, chips = "", set()
    for one in dirty:
        opened = visit(page_of(one))
        frame = opened.attention()
        opened.page.locator("#table-keys button", has_text="Download CSV").wait_for()
        for prompt in ("0", "1"):
            frame.locator("#prompt").select_option(prompt)
            texts = frame.locator("#keys .key").evaluate_all("found => found.map(e => e.textContent)")
            chips |= {t.split(" ", 1)[-1] if t[:1] in "▲✕?" else t for t in texts}
            for i in range(0, len(texts), 5):
                frame.locator("#keys .key").nth(i).hover()
        for head in opened.page.locator("#table-keys thead button").all()[:8]:
            head.click()
        said += opened.page.evaluate("document.body.textContent")
        frame.locator("#top button").first.click()
        saved = ElementTree.parse(opened.download(opened.page.locator("#margins .saves button", has_text="SVG")).path())
        assert {e.tag.split("}")[1] for e in saved.iter()}.isdisjoint({"script", "foreignObject", "image", "a"})
        assert not [name for e in saved.iter() for name in e.attrib if name.startswith("on")]
        assert opened.page.locator("img, object, embed, base, form, textarea").count() == 0
        assert opened.page.locator("iframe").count() == 1
        assert frame.locator("img, iframe, object, a").count() == 0
        opened.quiet()
    for text in HOSTILE:
        assert shortened(visible(text)) in chips, text
        assert shortened(visible(text)) in said, text


@pytest.mark.slow
@pytest.mark.release
def test_hostile_names_paths_and_provenance(single: list[Report], visit: Any, page_of: Any, tmp_path: Path) -> None:
    opened = visit("<!DOCTYPE html><body></body>")
    for i, (text, one) in enumerate(zip(HOSTILE, single, strict=True)):
        for kind, html in (("page", page_of(one)), ("cell", one._repr_html_())):
            path = tmp_path / f"{kind}{i}.html"
            path.write_text(
                f"<!DOCTYPE html><meta charset='utf-8'>{html}" if kind == "cell" else html, encoding="utf-8"
            )
            opened.page.goto(path.as_uri())
            assert opened.page.evaluate("document.querySelectorAll('img, iframe, form, base, object').length") == 0
            literal = shortened(disarmed(text), 200).strip()
            assert literal.replace("\n", "") in opened.page.evaluate("document.body.textContent").replace("\n", "")
            assert opened.page.evaluate("window.hasFired !== true")
    assert [s for s in opened.said if not s.startswith("request: file:")] == []


@pytest.mark.slow
@pytest.mark.release
def test_hostile_names_in_indexes_and_comparisons(dirty: list[Report], single: list[Report], visit: Any) -> None:
    entries = [IndexEntry(t, t, one) for t, one in zip(HOSTILE, single, strict=True)]
    entries += [IndexEntry(t, t, dirty[0]) for t in HOSTILE[:6]]
    entries += [IndexEntry(t, f"{i}/report.html", error=t) for i, t in enumerate(HOSTILE)]
    html = index_page(entries)
    assert not [c for c in UNSEEN if c in html]
    opened = visit(html)
    opened.page.locator("#table-comparison button", has_text="Download CSV").wait_for()
    assert opened.page.locator("img, iframe, object, form, base").count() == 0
    said = opened.page.evaluate("document.body.textContent").replace("\n", "")
    for text in HOSTILE:
        assert shortened(disarmed(text), 200).strip().replace("\n", "") in said
    for href in opened.page.locator("a").evaluate_all("found => found.map(a => a.href)"):
        assert href.startswith("file:///")
    opened.quiet()
    cell = ln_probe.compare(dirty, HOSTILE[: len(dirty)])._repr_html_()
    for one in (cell, *(r._repr_html_() for r in dirty)):
        assert not Page(one).acts()
        assert not [c for c in UNSEEN if c in one]
    visit(f"<!DOCTYPE html><meta charset='utf-8'><body>{cell}</body>").quiet()
