"""The map of heads, addresses and filters in a real browser, and axe-core on every kind of page."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ln_probe.analyses.lab.results import Results, summarize, write_results
from ln_probe.page.heads import HeadMap
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.page.lab import write_lab_page
from ln_probe.page.page import report_page
from ln_probe.report import Report

PageOf = Callable[[Report], str]
AXE = os.environ.get("LN_PROBE_AXE", "")  # axe.min.js of the npm package axe-core; .ci/run fetches it

HOSTILE_ADDRESSES = [
    "#L0H0P0<img src=x onerror=fired()>",
    "#L0H0P0%3Cscript%3Efired()%3C/script%3E",
    "#L-1H0P0",
    "#L1e0H0P0",
    "#L0H0P0#L1H1P0",
    "#L999999H0P0",
    "#L\u0660H0P0",
    "#javascript:fired()",
    "#__proto__",
    "#" + "L" * 5000,
]


def place(frame: Any) -> str:
    return str(frame.locator("#title").inner_text())


def test_a_head_has_an_address(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report))
    frame = opened.attention()
    layer, head = HeadMap.of(report).most_affected(report.exhibits)
    assert place(frame) == f"Layer {layer}, head {head}"
    assert opened.page.evaluate("location.hash") == "", "nobody has chosen anything"
    frame.locator('#map button[data-layer="1"][data-head="2"]').click()
    assert place(frame) == "Layer 1, head 2"
    opened.until("location.hash === '#L1H2P0'")
    frame.locator('#map [aria-pressed="true"]').press("ArrowLeft")
    opened.until("location.hash === '#L1H1P0'")
    assert frame.locator("#frozen canvas").count() == 1
    about = frame.locator("#about").inner_text()
    row = report.by_head().set_index(["layer", "head"]).loc[(1, 1)]
    amount = f"{'+' if row['delta_loss'] > 0 else ''}{float(f'{row.delta_loss:.3g}'):g}"
    assert f"Loss increase, scaling frozen {amount}" in about
    opened.page.evaluate("location.hash = '#L0H3P0'")  # what a link of a finding does
    frame.locator("#title", has_text="Layer 0, head 3").wait_for()
    frame.locator("#measure").select_option(label="Entropy")
    assert "attention entropy over" in frame.locator("#meaning").inner_text()
    opened.quiet()


def test_a_page_opens_at_its_address_and_hostile_ones_do_nothing(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report), at="#L1H3P0")
    frame = opened.attention()
    frame.locator("#title", has_text="Layer 1, head 3").wait_for()
    for address in HOSTILE_ADDRESSES:
        opened.page.evaluate("to => { location.hash = to; }", address)
        assert place(frame) == "Layer 1, head 3"
    opened.page.evaluate("location.hash = '#L7H0P0'")
    frame.locator("#lost", has_text="The attention of layer 7, head 0 on prompt 0 is not kept here.").wait_for()
    assert place(frame) == "Layer 1, head 3"
    # What the frame says is checked as well, and nobody else is listened to.
    before = opened.page.evaluate("location.hash")
    inside = opened.page.frames[1]
    for said in ("{ lnProbeAt: ['<img>', 0, 0] }", "{ lnProbeAt: 'L0H0' }", "{ lnProbeAt: [{}, [], null] }", "null"):
        inside.evaluate(f"parent.postMessage({said}, '*')")
    opened.page.evaluate("postMessage({ lnProbeAt: [0, 0, 0] }, '*')")
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("location.hash") == before
    opened.quiet()


def test_a_frame_that_was_ready_too_early_says_so_again(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report))
    frame = opened.attention()
    # As if the page had not listened yet when the frame was ready: an address that nobody was told of.
    opened.page.evaluate("history.replaceState(null, '', '#L1H3P0')")
    opened.page.evaluate("document.querySelector('iframe.attention').style.height = '10px'")
    opened.page.evaluate(
        "document.querySelector('iframe.attention').contentWindow.postMessage({ lnProbeAsk: true }, '*')"
    )
    frame.locator("#title", has_text="Layer 1, head 3").wait_for()
    opened.until("parseFloat(document.querySelector('iframe.attention').style.height) > 100")
    opened.quiet()


def test_a_frame_drawn_before_it_had_a_place_is_drawn_again(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report))
    frame = opened.attention()
    opened.page.evaluate("document.querySelector('iframe.attention').style.display = 'none'")
    opened.page.evaluate("location.hash = '#L0H3P0'")
    frame.locator("#title", has_text="Layer 0, head 3").wait_for(state="attached")
    frame.locator("#pattern canvas[width='0']").wait_for(state="attached")
    opened.page.evaluate("document.querySelector('iframe.attention').style.display = ''")
    canvas = opened.attention().locator("#pattern canvas")
    wide = canvas.evaluate("e => e.width")
    assert wide > 300
    opened.page.set_viewport_size({"width": 500, "height": 800})  # a telephone that was turned
    frame.locator(f"#pattern canvas:not([width='{wide}'])").wait_for()
    assert 200 < canvas.evaluate("e => e.width") < wide
    opened.quiet()


def test_d6_filters_know_columns(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report))
    section = opened.page.locator("#table-heads")
    section.locator("button", has_text="Download CSV").wait_for()
    heads = report.heads
    for words, kept in (
        ("layer=1", heads["layer"] == 1),
        ("layer=1 head=2", (heads["layer"] == 1) & (heads["head"] == 2)),
        ("head>=2 variant=intact", (heads["head"] >= 2) & (heads["variant"] == "intact")),
        ("normalized", heads["space"] == "normalized"),
        ("layer=nothing", heads["layer"] == 99),
        ("layer = 1 head >= 2", (heads["layer"] == 1) & (heads["head"] >= 2)),
        ("L1H2", (heads["layer"] == 1) & (heads["head"] == 2)),
    ):
        section.locator("input").fill(words)
        assert f"of {kept.sum()} rows shown" in section.locator(".count").inner_text(), words
    section.locator("input").fill("delta>0.005")
    assert section.locator(".count").inner_text().startswith('No column is named "delta". 0 of 0 rows shown')
    section.locator("input").fill("projection")  # a piece of a name
    assert 0 < int(section.locator(".count").inner_text().split(" of ")[1].split()[0]) < len(heads)
    opened.quiet()


def test_d6_dark_pages_have_dark_panels(report: Report, visit: Any, page_of: PageOf) -> None:
    for scheme, turned in (("light", False), ("dark", True)):
        frame = visit(page_of(report), color_scheme=scheme).attention()
        found = frame.locator("#pattern").evaluate("e => getComputedStyle(e).filter")
        assert (found != "none") == turned


def test_d6_without_scripts_nothing_is_empty(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report), java_script_enabled=False)
    assert opened.page.locator("iframe.attention").is_hidden()
    assert opened.page.locator("noscript svg").count() == 1
    assert opened.page.locator("#table-heads tbody tr").count() == 40


def test_d6_phones_show_text_of_eleven_pixels(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report), viewport={"width": 390, "height": 844})
    frame = opened.attention()
    smallest = """() => Math.min(...[...document.querySelectorAll("*")].filter((e) => e.checkVisibility() &&
      [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => { const m = e.getScreenCTM?.();
      return parseFloat(getComputedStyle(e).fontSize) * (m && e.ownerSVGElement ? Math.hypot(m.a, m.b) : 1); }))"""
    assert opened.page.evaluate(smallest) >= 10.9
    assert frame.locator("body").evaluate(smallest) >= 10.9


def test_d6_printed_pictures_stay_with_their_titles(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report))
    opened.page.emulate_media(media="print")
    styles = opened.page.evaluate("""[...document.querySelectorAll(".pictures > figure")].map((e) => {
      const s = getComputedStyle(e); return `${s.breakInside} ${s.contentVisibility} ${e.offsetHeight > 50}`; })""")
    assert styles
    assert set(styles) == {"avoid visible true"}


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE:
        pytest.skip("set LN_PROBE_AXE to axe.min.js of the npm package axe-core (npm pack axe-core)")
    return Path(AXE).read_text(encoding="utf-8")


def violations(where: Any, axe: str) -> list[str]:
    where.evaluate(axe)
    found = where.evaluate("() => axe.run(document, { iframes: false, resultTypes: ['violations'] })")
    return [f"{v['id']}: {n['html'][:160]}" for v in found["violations"] for n in v["nodes"]]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing(
    scheme: str, report: Report, causal: pd.DataFrame, visit: Any, axe: str, tmp_path: Path
) -> None:
    both = report.with_tables(causal=causal)
    values = pd.DataFrame({"norm": ["none", "layernorm"], "seed": 0, "value": [0.2, 0.1]})
    results = Results(summarize(values, ["norm"]), conclusions=("The norm helps.",), settings={"steps": 7})
    write_results(results, tmp_path, experiment="toy", command="ln-probe lab run toy", ln_probe_version="0", seconds=1)
    pages = {
        "report": report_page(both, "../index.html"),
        "index": index_page([IndexEntry("a", "a/report.html", both), IndexEntry("b", error="ValueError: broken")]),
        "view": both.attention().document(),
        "lab": write_lab_page(tmp_path).read_text(),
    }
    found: list[str] = []
    for name, html in pages.items():
        opened = visit(html, color_scheme=scheme)
        if name == "report":
            opened.attention()
            found += [f"frame, {v}" for v in violations(opened.page.frames[1], axe)]
        if name == "view":
            opened.page.locator("#pattern canvas").wait_for()
        found += [f"{name}, {v}" for v in violations(opened.page, axe)]
    assert found == []
