"""Models compared head by head in a real browser: maps, differences, attention side by side, the steps of a run;
the view in a notebook, and hostile text in all kinds of pages, which stays text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from made_up import HOSTILE, UNSEEN, Page

import ln_probe
from ln_probe.analyses.attribution.pairs import TERMS
from ln_probe.analyses.text import disarmed, shortened, visible
from ln_probe.exhibits import to_weights
from ln_probe.page import attention as frames
from ln_probe.page import own_script
from ln_probe.page import page as pages
from ln_probe.page.compared import answers, compared
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.report import Report


def changed(report: Report, by: float, **model: Any) -> Report:
    """The report as of another model: head 1 of layer 1 gives position 0 more attention, by `by`."""
    sinks = report.sink_heads.set_index(["layer", "head"])
    sinks.loc[(1, 1), "first_attention"] += by
    effects = report.head_effects.assign(delta_loss=report.head_effects["delta_loss"] * (1 + by))
    moved = report.with_tables(sink_heads=sinks.reset_index()[list(report.sink_heads)], head_effects=effects)
    shown = report.exhibits.attention[0]
    other = replace(report.exhibits, attention=(replace(shown, cells=np.roll(shown.cells, 1, axis=1)),))
    return replace(moved, exhibits=other, provenance={**report.provenance, "model": {"name": "run", **model}})


@pytest.fixture(scope="module")
def opened(report: Report, visit_once: Any) -> Any:
    """One model, of which one head is significant, and three steps of a run, of which none is."""
    p = np.where(report.head_effects[["layer", "head"]].eq(1).all(axis=1), 0.001, 0.5)
    one = report.with_tables(head_effects=report.head_effects.assign(p_sign=p))
    runs = [IndexEntry(f"run · step{s}", "", changed(report, s / 1000, step=s)) for s in (10, 0, 200)]
    return visit_once(index_page([IndexEntry("one", "one/report.html", one), *runs]))


def points(value: float) -> str:
    return f"{float(f'{100 * value:.2g}'):g} points"


def test_the_head_that_differs_is_found(report: Report, opened: Any) -> None:
    opened.again()
    part = opened.page.locator("section.compared")
    part.locator(".map").first.wait_for()
    opened.page.locator("#answers + ul a", has_text="L1H1").last.click()  # one click from the first screen
    assert part.locator(".head-name").inner_text() == "Layer 1, head 1"
    assert part.locator(".measure option:checked").inner_text() == "Attention to position 0"
    assert part.locator(".model-b option:checked").inner_text() == "run · step200"
    assert part.locator(".most li").count() == 1
    assert "(+20 points)" in part.locator(".most li").inner_text()
    part.locator(".most button").click()
    assert part.locator(".head-name").inner_text() == "Layer 1, head 1"
    opened.until("location.hash === '#L1H1P0'")
    row = report.by_head().set_index(["layer", "head"]).loc[(1, 1)]
    cells = part.locator(".figures tr", has_text="Attention to position 0").locator("td").all_inner_texts()
    assert cells[2] == "+20 points"
    assert float(cells[1].split()[0]) - float(cells[0].split()[0]) == pytest.approx(20, abs=0.2)
    assert float(cells[0].split()[0]) == pytest.approx(100 * row["first_attention"], rel=0.02)
    part.locator(".model-a").select_option(label="run · step200")
    assert part.locator(".state").inner_text() == "A and B are the same model."
    assert part.locator(".most li").inner_text() == "None: A and B are equal in this measure."
    opened.quiet()


def test_keyboard_reaches_every_head_and_every_weight(report: Report, opened: Any) -> None:
    opened.again(at="#L0H0P0")
    part = opened.page.locator("section.compared")
    part.locator(".head-name", has_text="Layer 0, head 0").wait_for()
    difference = part.locator(".map").nth(2)
    assert difference.locator('[tabindex="0"]').count() == 1
    for key, name in (("ArrowDown", "L1H0"), ("ArrowRight", "L1H1"), ("ArrowDown", "L1H1"), ("ArrowLeft", "L1H0")):
        difference.locator('[aria-pressed="true"]').press(key)
        assert opened.page.evaluate("document.activeElement.title").startswith(name)
    part.locator("canvas").nth(1).press("ArrowDown")
    part.locator("canvas").nth(1).press("ArrowRight")
    part.locator("canvas").nth(1).press("ArrowDown")
    shown = report.exhibits.attention[0]
    weights = [to_weights(cells[1, 0])[2, 1] for cells in (shown.cells, np.roll(shown.cells, 1, axis=1))]
    told = part.locator(".read").inner_text()
    assert told.startswith(f"Query 2 “{shown.tokens[2]}” gives key 1 “{shown.tokens[1]}”: A ")
    assert [float(t.split(" %")[0]) for t in (told.split("A ")[-1], told.split("B ")[-1])] == pytest.approx(
        [100 * w for w in weights], rel=0.06
    )
    opened.quiet()


def test_a_slider_goes_through_the_steps_of_a_run_and_what_is_not_significant_is_hatched(opened: Any) -> None:
    opened.look(color_scheme="dark")
    opened.again()
    part = opened.page.locator("section.compared")
    assert part.locator(".model-b option:checked").inner_text() == "run · step10"
    part.locator(".measure").select_option(label="Attention to position 0")
    part.locator(".map").nth(0).locator('button[title^="L1H1"]').click()
    slider = part.locator(".steps input")
    for key, step, place in (("End", "200", 3), ("ArrowLeft", "10", 2), ("Home", "0", 1)):
        slider.press(key)
        assert part.locator(".steps output").inner_text() == f"{step} ({place} of 3)"
        assert part.locator(".model-b option:checked").inner_text() == f"run · step{step}"
        assert slider.get_attribute("aria-valuetext") == f"step {step}"
    told = part.locator(".curve svg").get_attribute("aria-label")
    assert told.startswith("Attention to position 0 of this head over training: step 0 ")
    ink = opened.page.evaluate("getComputedStyle(document.body).color")
    assert part.locator(".curve text").first.evaluate("e => getComputedStyle(e).fill") == ink
    assert part.locator(".curve circle").count() == 3
    assert part.locator(".curve circle.now").count() == 1
    part.locator(".model-b").select_option(label="one")
    assert part.locator(".steps").is_hidden()
    assert part.locator(".curve").is_hidden()
    part.locator(".model-b").select_option(label="run · step10")
    part.locator(".measure").select_option(label="Loss increase, scaling frozen")  # as in each model's own page
    cells = [part.locator(".map").nth(i).locator("button") for i in range(2)]
    titles = cells[0].evaluate_all("b => b.map(c => c.title)")
    assert [t.split(":")[0] for t in titles if "not significant" not in t] == ["L1H1"]
    assert part.locator(".map").first.locator("button.small").count() == len(titles) - 1
    assert all("not significant" in t for t in cells[1].evaluate_all("b => b.map(c => c.title)"))
    opened.quiet()


def test_differences_are_told_in_words(report: Report) -> None:
    pair = ln_probe.compare([report, changed(report, 0.5)], ["one", "two <b>"])
    ((name, text),) = answers(pair.names, pair.summary, pair.paired, pair.reports)
    assert name == "two <b>"
    assert "Sinks: 12 % of its heads give position 0 over 30 % of their attention, 0 % in the first model" in text
    link = '<a href="#L1H1P0" data-model="1" data-measure="first_attention">L1H1</a>'
    assert f"{link} differs most in attention to position 0: " in text
    wide = pair.by_head["first_attention"]
    assert (wide["two <b>"] - wide["one"]).loc[(1, 1)] == pytest.approx(0.5)
    said = Page(index_page([IndexEntry(n, report=r) for n, r in zip(pair.names, pair.reports, strict=True)])).text
    assert "two <b>" in said
    assert "Attention to position 0 of every head (dots)" in said


@pytest.mark.slow
def test_many_models_get_coarser_patterns(report: Report, long_report: Report) -> None:
    assert compared([report], ["a"], ["a"], [None]) is None
    assert compared([Report(), Report()], ["a", "b"], ["a", "b"], [None, None]) is None
    shown = long_report.exhibits.attention[0]
    coarse = shown.coarser(8)
    assert coarse.cells.shape == (3, 2, 8, 8)
    assert to_weights(coarse.cells).sum(-1) == pytest.approx(np.ones((3, 2, 8)), abs=0.02)
    assert list(coarse.edges[[0, -1]]) == [0, 150]
    assert shown.coarser(64) is shown
    many = compared([report] * 70, ["m"] * 70, ["m"] * 70, [None] * 70)
    assert (many["count"], many["total"]) == (64, 70)


# ------------------------------------------------------------------------------------------- a notebook, an old browser


def test_the_view_in_a_notebook(long_report: Report, visit: Any) -> None:
    opened = visit(f"<!DOCTYPE html><body>{long_report.attention(1, 2, head=1)._repr_html_()}</body>")
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


@pytest.mark.slow
def test_an_old_browser_is_told(long_report: Report, visit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The scripts ask for a stream that no browser has. (Deleting the real one by an init script sometimes came too late
    # for the frame; changing the finished page would break its security policy.)
    def future(*names: str) -> str:
        script = own_script(*names)
        assert "typeof DecompressionStream" in script
        return script.replace("typeof DecompressionStream", "typeof StreamOfTheFuture")

    for module in (pages, frames):
        monkeypatch.setattr(module, "own_script", future)
    opened = visit(pages.report_page(long_report))
    frame = opened.page.frame_locator("iframe.attention")
    frame.locator("#title", has_text="Attention cannot be drawn: this browser cannot decompress").wait_for()
    opened.page.locator("#table-heads .count", has_text="Only the first rows are shown: this browser").wait_for()
    assert opened.page.locator("#table-heads tbody tr").count() == len(long_report.heads) == 36


# ------------------------------------------------------------------------------------------------------ hostile text


@pytest.mark.slow
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
        frame.locator("#prompt").select_option("0")
        for pair in frame.locator("#pairs button").all():
            pair.click()
            named = set(frame.locator("#reasons th").all_text_contents())
            assert named <= {*one.exhibits.scores[0].parts, "all others"} | {
                f"{t} of the {side}" for t in TERMS for side in ("query", "key")
            }
        frame.locator("#top button").first.click()
        saved = ElementTree.parse(
            opened.download(opened.page.locator("#geometry .saves button", has_text="SVG")).path()
        )
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
