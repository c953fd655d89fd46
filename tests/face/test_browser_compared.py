"""Models compared head by head in a real browser: maps, differences, attention side by side, the steps of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ln_probe
from ln_probe.exhibits import to_weights
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
def page(report: Report) -> str:
    runs = [IndexEntry(f"run · step{s}", "", changed(report, s / 1000, step=s)) for s in (10, 0, 200)]
    return index_page([IndexEntry("one", "one/report.html", report), *runs])


def points(value: float) -> str:
    return f"{float(f'{100 * value:.2g}'):g} points"


def test_the_head_that_differs_is_found(report: Report, page: str, visit: Any) -> None:
    opened = visit(page)
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


def test_heads_that_are_not_significant_are_hatched(report: Report, visit: Any) -> None:
    """As in each model's own page; the difference of two models is not tested."""
    p = np.where(report.head_effects[["layer", "head"]].eq(1).all(axis=1), 0.001, 0.5)
    one = report.with_tables(head_effects=report.head_effects.assign(p_adjusted=p))
    opened = visit(index_page([IndexEntry(str(n), f"{n}/report.html", r) for n, r in enumerate((one, report))]))
    part = opened.page.locator("section.compared")
    part.locator(".measure").select_option(label="Loss increase, scaling frozen")
    cells = [part.locator(".map").nth(i).locator("button") for i in range(2)]
    titles = cells[0].evaluate_all("b => b.map(c => c.title)")
    assert [t.split(":")[0] for t in titles if "not significant" not in t] == ["L1H1"]
    assert part.locator(".map").first.locator("button.small").count() == len(titles) - 1
    assert all("not significant" in t for t in cells[1].evaluate_all("b => b.map(c => c.title)"))
    opened.quiet()


def test_keyboard_reaches_every_head_and_every_weight(report: Report, page: str, visit: Any) -> None:
    opened = visit(page, at="#L0H0P0")
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


def test_a_slider_goes_through_the_steps_of_a_run(page: str, visit: Any) -> None:
    opened = visit(page, color_scheme="dark")
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
    opened.quiet()


def test_differences_are_told_in_words(report: Report, parsed: Callable[[str], Any]) -> None:
    pair = ln_probe.compare([report, changed(report, 0.5)], ["one", "two <b>"])
    ((name, text),) = answers(pair.names, pair.summary, pair.paired, pair.reports)
    assert name == "two <b>"
    assert "Sinks: 12 % of its heads give position 0 over 30 % of their attention, 0 % in the first model" in text
    link = '<a href="#L1H1P0" data-model="1" data-measure="first_attention">L1H1</a>'
    assert f"{link} differs most in attention to position 0: " in text
    wide = pair.by_head["first_attention"]
    assert (wide["two <b>"] - wide["one"]).loc[(1, 1)] == pytest.approx(0.5)
    said = parsed(index_page([IndexEntry(n, report=r) for n, r in zip(pair.names, pair.reports, strict=True)])).text
    assert "two <b>" in said
    assert "Attention to position 0 of every head (dots)" in said


def test_many_models_get_coarser_patterns(report: Report, long_report: Report) -> None:
    assert compared([report], ["a"], ["a"], [None]) is None
    assert compared([Report(), Report()], ["a", "b"], ["a", "b"], [None, None]) is None
    shown = long_report.exhibits.attention[0]
    coarse = shown.coarser(8)
    assert coarse.cells.shape == (3, 2, 8, 8)
    assert to_weights(coarse.cells).sum(-1) == pytest.approx(np.ones((3, 2, 8)), abs=0.02)
    assert list(coarse.edges[[0, -1]]) == [0, 150]
    assert shown.coarser(64) is shown
    many = compared([long_report] * 70, ["m"] * 70, ["m"] * 70, [None] * 70)
    assert (many["count"], many["total"]) == (64, 70)
