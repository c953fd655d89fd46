"""Pages in a real headless Chromium without a network: silent, drawn, usable, addressed, without a word from axe-core;
hostile text stays text."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.image
import pandas as pd
import pytest
from matplotlib.figure import Figure

import ln_probe
from ln_probe.analyses.attribution.pairs import TERMS
from ln_probe.analyses.lab.results import Results, summarize, write_results
from ln_probe.analyses.probes.text import disarmed, shortened, visible
from ln_probe.page import attention as frames
from ln_probe.page import own_script
from ln_probe.page import page as pages
from ln_probe.page.heads import HeadMap
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.page.lab import write_lab_page
from ln_probe.page.page import report_page
from ln_probe.report import Report

COLOURS = """canvas => { const { width, height } = canvas;
  const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
  return new Set(data).size; }"""


def test_attention_is_drawn_and_its_selectors_work(long_report: Report, visit: Any, page_of: Any) -> None:
    opened = visit(page_of(long_report))
    frame = opened.attention()
    opened.page.wait_for_timeout(300)
    assert frame.locator("#pattern canvas").evaluate(COLOURS) > 20
    assert frame.locator("#heads canvas").count() == 2
    assert frame.locator("#heads canvas").first.evaluate(COLOURS) > 20
    layer, head = HeadMap.of(long_report).most_affected(long_report.exhibits)
    assert frame.locator("#title").inner_text() == f"Layer {layer}, head {head}"
    assert "Reduced: 150 tokens in 64 × 64 cells of 2–3 tokens" in frame.locator("#resolution").inner_text()
    assert frame.locator("#keys .key").count() == 150

    frame.locator("#layer").select_option("2")
    frame.locator("#heads button").nth(1).click()
    assert frame.locator("#title").inner_text() == "Layer 2, head 1"
    keys = long_report.keys.query(
        "space == 'head' and variant == 'intact' and layer == 2 and head == 1 and prompt == 0"
    )
    stuck = int((keys["verdict"] == "unselectable").sum())
    assert frame.locator("#keys .key.m2").count() == stuck > 0

    frame.locator("#keys .key").nth(17).click()
    told = frame.locator("#detail").inner_text()
    row = keys.set_index("position").loc[17]
    assert told.startswith(f"Key 17, “{row['token']}”: ")
    assert str(row["verdict"]) in told or "hard to select" in told
    assert f"margin {float(f'{(row.margin_lower + row.margin_upper) / 2:.3g}'):g} nats" in told
    assert "attainable attention" in told

    assert frame.locator("#navigator").evaluate(COLOURS) > 20
    box = frame.locator("#navigator").bounding_box()
    frame.locator("#navigator").click(position={"x": box["width"] * 0.1, "y": box["height"] * 0.95})
    assert "one cell per weight" in frame.locator("#resolution").inner_text()
    assert "Tokens 86–149 of 150" in frame.locator("#resolution").inner_text()
    assert frame.locator("#where").inner_text().startswith("Query 14")
    frame.locator("#back").click()
    assert "Reduced" in frame.locator("#resolution").inner_text()

    frame.locator("#prompt").select_option("2")
    assert frame.locator("#keys .key").count() == 5
    assert frame.locator("#title").inner_text() == "Layer 2, head 1"
    assert frame.locator("#resolution").inner_text().startswith("Each cell is one attention weight.")
    assert frame.locator("#whole").is_hidden()
    assert frame.locator("#pattern canvas").count() == 1, "earlier choices left their charts"
    opened.quiet()


def test_hovering_over_a_cell_shows_what_circuitsvis_shows(long_report: Report, visit: Any, page_of: Any) -> None:
    opened = visit(page_of(long_report))
    frame = opened.attention()
    opened.page.wait_for_timeout(300)
    opened.page.locator("iframe.attention").scroll_into_view_if_needed()  # frames out of sight are not painted
    canvas = frame.locator("#pattern canvas")
    before = canvas.screenshot()
    canvas.hover(position={"x": 150, "y": 200})
    opened.page.wait_for_timeout(600)
    assert canvas.screenshot() != before, "no tooltip appeared"
    opened.quiet()


@pytest.mark.slow
def test_many_choices_leave_one_chart(long_report: Report, visit: Any, page_of: Any) -> None:
    opened = visit(page_of(long_report))
    frame = opened.attention()
    for _ in range(5):
        for head in (1, 0):
            frame.locator("#heads button").nth(head).click()
    opened.page.wait_for_timeout(300)
    assert frame.locator("#pattern canvas").count() == 1
    opened.quiet()


@pytest.mark.slow
def test_tables_sort_filter_and_download(report: Report, visit: Any, page_of: Any) -> None:
    opened = visit(page_of(report))
    section = opened.page.locator("#table-keys")
    section.locator("button", has_text="Download CSV").wait_for()
    assert section.locator(".count").inner_text() == f"100 of {len(report.keys)} rows shown."
    section.locator("button", has_text="Show more rows").click()
    assert section.locator("tbody tr").count() == 200

    head = section.locator("thead th", has_text="position")
    place = section.locator("thead th").all_inner_texts().index("position")
    for order, sign in (("ascending", 1), ("descending", -1)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        shown = [int(t) for t in section.locator(f"tbody td:nth-child({place + 1})").all_inner_texts()]
        assert shown == sorted(report.keys["position"], key=lambda p, s=sign: s * p)[: len(shown)]

    section.locator("input").fill("normalized no_scaling")
    kept = report.keys.query("space == 'normalized' and variant == 'no_scaling'")
    assert (
        section.locator(".count").inner_text().startswith(f"{len(kept)} of {len(kept)} rows shown ({len(report.keys)}")
    )
    with opened.page.expect_download() as download:
        section.locator("button", has_text="Download CSV").click()
    assert download.value.suggested_filename == "tiny-keys.csv"
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8-sig"))))
    assert len(rows) == len(kept)
    assert list(rows[0]) == list(report.keys.columns)
    assert sorted(float(r["margin_lower"]) for r in rows) == pytest.approx(sorted(kept["margin_lower"]), rel=1e-5)
    opened.quiet()


def test_c09_cells_of_a_download_are_no_formulas(report: Report, visit: Any, page_of: Any) -> None:
    """What a spreadsheet would compute stands behind an apostrophe, whatever is before it and however wide it is."""
    opened = visit(page_of(report))
    acting = [
        "=1+1",
        " =1",
        "\n=1",
        "\u3000=1",
        "\u00a0+1",
        "\u200b=1",
        "\ufeff-1",
        "＝1",
        "＋1",
        "－1",
        "＠SUM",
        "\t1",
    ]
    plain = ["the", " the", "a=1", "1-2", "", "·", "…"]
    written = opened.page.evaluate("texts => texts.map(t => csvCell(t, true))", [*acting, *plain])
    cells = [w[1:-1] if w.startswith('"') else w for w in written]
    assert [c for c in cells[: len(acting)] if not c.startswith("'")] == []
    assert cells[len(acting) :] == plain
    assert opened.page.evaluate("csvCell(-2.5, false)") == "-2.5"
    opened.quiet()


def test_unknown_values_sort_last_either_way(report: Report, visit: Any, page_of: Any) -> None:
    opened = visit(page_of(report))
    section = opened.page.locator("#table-heads")
    section.locator("button", has_text="Download CSV").wait_for()
    place = section.locator("thead th").all_inner_texts().index("entropy_ratio")
    for _ in range(2):
        section.locator("thead th").nth(place).locator("button").click()
        shown = section.locator(f"tbody td:nth-child({place + 1})").all_inner_texts()
        assert shown[0] != "–"
        assert shown[-1] == "–"


def test_a_norm_can_be_chosen(report: Report, visit: Any, page_of: Any) -> None:
    opened = visit(page_of(report))
    figure = opened.page.locator("#geometry")
    for site in ("blocks.0.ln1", "ln_final"):
        figure.locator("select").select_option(site)
        seen = figure.locator("figcaption:visible").all_inner_texts()
        assert len(seen) == 1
        assert f"at {site} " in seen[0]
    opened.quiet()


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1200),
        ("dark", 360),
        *(pytest.param(*w, marks=pytest.mark.slow) for w in (("dark", 1200), ("light", 390))),
    ],
)
def test_schemes_and_widths(scheme: str, width: int, long_report: Report, visit: Any, page_of: Any) -> None:
    opened = visit(page_of(long_report), color_scheme=scheme, viewport={"width": width, "height": 900})
    frame = opened.attention()
    opened.page.wait_for_timeout(300)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert frame.locator("body").evaluate("b => document.documentElement.scrollWidth - innerWidth") <= 0
    paper, ink = opened.page.evaluate(
        "[document.body, document.querySelector('figure svg text')].map(e => { const s = getComputedStyle(e);"
        " return (e === document.body ? s.backgroundColor : s.fill).match(/\\d+/g).slice(0, 3)"
        ".reduce((a, b) => a + Number(b), 0) / 3 })"
    )
    assert (paper < 60 and ink > 180) if scheme == "dark" else (paper > 240 and ink < 60)
    # A heat map's colours mean numbers: they are the same on dark paper.
    cell = opened.page.locator("#unselectable svg [style*='fill: #']").first
    assert cell.evaluate("e => getComputedStyle(e).filter") == "none"
    assert opened.page.evaluate("getComputedStyle(document.querySelector('#unselectable svg')).filter") == "none"
    wanted = frame.locator("body").evaluate("b => document.documentElement.offsetHeight")
    opened.until(f"document.querySelector('iframe.attention').offsetHeight >= {wanted}")
    opened.quiet()


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


def test_the_index_links_to_its_reports(report: Report, visit: Any) -> None:
    entries = [IndexEntry(f"model {i}", f"m{i}/report.html", report) for i in range(3)]
    opened = visit(index_page([*entries, IndexEntry("bad", error="ValueError: broken")]))
    section = opened.page.locator("#table-comparison")
    section.locator("button", has_text="Download CSV").wait_for()
    section.locator("thead th").first.locator("button").dblclick()
    links = section.locator("tbody td:first-child a")
    assert links.all_inner_texts() == ["model 2", "model 1", "model 0"]
    assert links.first.get_attribute("href") == "m2/report.html"
    opened.quiet()


# ------------------------------------------------------------------------------------------------------ hostile text


@pytest.mark.slow
def test_hostile_tokens_sites_and_tables(dirty: list[Report], hostile: list[str], visit: Any, page_of: Any) -> None:
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
        with opened.page.expect_download() as download:
            opened.page.locator("#geometry .saves button", has_text="SVG").click()
        saved = ElementTree.parse(download.value.path())
        assert {e.tag.split("}")[1] for e in saved.iter()}.isdisjoint({"script", "foreignObject", "image", "a"})
        assert not [name for e in saved.iter() for name in e.attrib if name.startswith("on")]
        assert opened.page.locator("img, object, embed, base, form, textarea").count() == 0
        assert opened.page.locator("iframe").count() == 1
        assert frame.locator("img, iframe, object, a").count() == 0
        opened.quiet()
    for text in hostile:
        assert shortened(visible(text)) in chips, text
        assert shortened(visible(text)) in said, text


@pytest.mark.slow
def test_hostile_names_paths_and_provenance(
    single: list[Report], hostile: list[str], visit: Any, page_of: Any, tmp_path: Path
) -> None:
    opened = visit("<!DOCTYPE html><body></body>")
    for i, (text, one) in enumerate(zip(hostile, single, strict=True)):
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
def test_hostile_names_in_indexes_and_comparisons(
    dirty: list[Report], single: list[Report], hostile: list[str], visit: Any
) -> None:
    entries = [IndexEntry(t, t, one) for t, one in zip(hostile, single, strict=True)]
    entries += [IndexEntry(t, t, dirty[0]) for t in hostile[:6]]
    entries += [IndexEntry(t, f"{i}/report.html", error=t) for i, t in enumerate(hostile)]
    opened = visit(index_page(entries))
    opened.page.locator("#table-comparison button", has_text="Download CSV").wait_for()
    assert opened.page.locator("img, iframe, object, form, base").count() == 0
    said = opened.page.evaluate("document.body.textContent").replace("\n", "")
    for text in hostile:
        assert shortened(disarmed(text), 200).strip().replace("\n", "") in said
    for href in opened.page.locator("a").evaluate_all("found => found.map(a => a.href)"):
        assert href.startswith("file:///")
    opened.quiet()
    cell = ln_probe.compare(dirty, hostile[: len(dirty)])._repr_html_()
    visit(f"<!DOCTYPE html><meta charset='utf-8'><body>{cell}</body>").quiet()


def test_a_lab_page_shows_its_plots_and_sorts_its_table(visit: Any, tmp_path: Path) -> None:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    values = pd.DataFrame({"norm": ["none", "layernorm", "</td><script>fired()</script>"], "seed": 0})
    results = Results(
        summarize(values.assign(value=[0.2, 0.1, 0.3]), ["norm"]),
        figures={"curve": figure},
        conclusions=("<script>fired()</script>",),
        settings={"steps": 7},
    )
    write_results(results, tmp_path, experiment="toy", command="ln-probe lab run toy", ln_probe_version="0", seconds=1)
    opened = visit(write_lab_page(tmp_path).read_text())
    page = opened.page
    page.locator("#table-summary button", has_text="Download CSV").wait_for()
    assert page.locator("img").evaluate("image => image.naturalWidth") > 50
    page.locator("#table-summary th button", has_text="mean").click()
    assert page.locator("#table-summary tbody td:first-child").all_inner_texts() == [
        "layernorm",
        "none",
        "</td><script>fired()</script>",
    ]
    opened.quiet()


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
    about = " ".join(frame.locator("#about").inner_text().split())
    row = report.by_head().set_index(["layer", "head"]).loc[(1, 1)]
    amount = f"{'+' if row['delta_loss'] > 0 else ''}{float(f'{row.delta_loss:.3g}'):g}"
    assert f"Loss increase, scaling frozen {amount}" in about
    opened.page.evaluate("location.hash = '#L0H3P0'")  # what a link of a finding does
    frame.locator("#title", has_text="Layer 0, head 3").wait_for()
    frame.locator("#measure").select_option(label="Entropy")
    assert "attention entropy over" in frame.locator("#meaning").inner_text()
    opened.quiet()


def test_the_map_says_what_is_significant(report: Report, visit: Any, page_of: PageOf) -> None:
    """Colour begins at the threshold, what is not significant is hatched, the largest heads are a list."""
    effects = report.head_effects.copy()
    frozen = effects["variant"] == "no_scaling"
    places = {(0, 1): (0.2, 0.001), (1, 2): (0.3, 0.5), (1, 0): (0.005, 0.001)}
    effects.loc[frozen, ["delta_loss", "p_adjusted"]] = 0.0, 1.0
    for (layer, head), values in places.items():
        mine = frozen & (effects["layer"] == layer) & (effects["head"] == head)
        effects.loc[mine, ["delta_loss", "p_adjusted"]] = values
    opened = visit(page_of(report.with_tables(head_effects=effects)))
    frame = opened.attention()

    def cell(layer: int, head: int) -> tuple[str, bool]:
        found = frame.locator(f'#map button[data-layer="{layer}"][data-head="{head}"]')
        hatched = found.evaluate("e => getComputedStyle(e).backgroundImage.includes('gradient')")
        assert hatched == ("not significant" in found.get_attribute("aria-label"))
        return found.evaluate("e => getComputedStyle(e).backgroundColor"), hatched

    blank, unsure = cell(0, 0)
    assert unsure
    assert cell(1, 0) == (blank, False), "significant, but below the threshold"
    assert cell(1, 2)[1]
    assert len({blank, cell(0, 1)[0], cell(1, 2)[0]}) == 3
    assert frame.locator("#tested").inner_text().startswith("2 of 8 heads are significant")
    assert "Colour begins at ±0.01 nats per token." in frame.locator("#meaning").inner_text()
    lines = [" ".join(t.split()) for t in frame.locator("#top li").all_inner_texts()]
    assert lines[:3] == ["L1H2 +0.3", "L0H1 +0.2 (significant)", "L1H0 +0.005 (significant)"]
    frame.locator("#top button").nth(1).click()
    assert place(frame) == "Layer 0, head 1"
    opened.until("location.hash === '#L0H1P0'")
    frame.locator("#measure").select_option(label="Entropy")
    assert frame.locator("#tested").is_hidden()
    assert frame.locator("#hatched").is_hidden()
    assert frame.locator("#top li").first.inner_text().split()[0] == "L{:.0f}H{:.0f}".format(
        *report.by_head("entropy_ratio").iloc[0][["layer", "head"]]
    )
    opened.quiet()


def test_why_a_head_attends_there(long_report: Report, visit: Any, page_of: PageOf) -> None:
    """One click on the map answers it for position 0, another for the strongest pairs of query and key."""
    opened = visit(page_of(long_report))
    frame = opened.attention()
    (sums,) = long_report.exhibits.scores
    tokens = long_report.exhibits.of_prompt(0).tokens
    frame.locator('#map button[data-layer="2"][data-head="1"]').click()
    mine = [i for i in range(len(sums.head)) if (sums.layer[i], sums.head[i]) == (2, 1)]
    assert len(mine) == frame.locator("#pairs button").count() == 3
    for n, i in enumerate(mine):
        frame.locator("#pairs button").nth(n).click()
        assert frame.locator("#pairs [aria-pressed=true]").count() == 1
        because = frame.locator("#because").inner_text()
        whose = "The average query" if n == 0 else f"Query {sums.query[i]} “{tokens[sums.query[i]]}”"
        assert because.startswith(f"{whose} gives ")
        assert f"“{tokens[sums.key[i]]}”" in because
        assert f"score is {float(f'{abs(float(sums.score[i])):.3g}'):g} nats " in because
        assert ("above" if sums.score[i] > 0 else "below") in because
        assert "On the first 128 tokens of the prompt." in because
        for s, side in ((1, 0), (0, 1)):
            rows = frame.locator("#reasons table").nth(side).locator("tr")
            numbers = [float(t) for t in rows.locator("td:last-child").all_inner_texts()]
            assert sum(numbers) == pytest.approx(float(sums.score[i]), abs=0.02 * max(1, abs(float(sums.score[i]))))
            names = rows.locator("th").all_inner_texts()
            assert names == [*(sums.parts[p] for p in sums.part[i, s]), "all others"]
        terms = frame.locator("#reasons table").nth(2).locator("th").all_inner_texts()
        assert {"sigma of the query", "sigma of the key"} <= set(terms)
    assert frame.locator("#difference canvas").count() == 1
    assert "more attention with scaling frozen" in frame.locator("#apartScale").inner_text()
    frame.locator("#prompt").select_option("2")
    assert frame.locator("#because").inner_text() == "Scores are explained for prompt 0."
    assert frame.locator("#reasons table").count() == 0
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


SILENT = "for (const kind of ['ResizeObserver', 'IntersectionObserver']) window[kind].prototype.observe = () => {};"


@pytest.mark.parametrize("observers", ["told", "silent"])
def test_a_frame_drawn_before_it_had_a_place_is_drawn_again(
    observers: str, report: Report, visit: Any, page_of: PageOf
) -> None:
    opened = visit(page_of(report))
    if observers == "silent":  # as they are where a browser does not draw a frame out of sight
        opened.context.add_init_script(SILENT)
        opened.page.reload()
        opened.page.locator("html.whole").wait_for()
    frame = opened.attention()
    opened.page.evaluate("document.querySelector('iframe.attention').style.display = 'none'")
    opened.page.evaluate("location.hash = '#L0H3P0'")
    frame.locator("#title", has_text="Layer 0, head 3").wait_for(state="attached")
    frame.locator("#pattern canvas[width='0']").wait_for(state="attached")
    opened.page.evaluate("document.querySelector('iframe.attention').style.display = ''")
    canvas = opened.attention().locator("#pattern canvas")
    wide = canvas.evaluate("e => e.width")
    assert wide > 300
    if observers == "told":
        opened.page.set_viewport_size({"width": 500, "height": 800})  # a telephone that was turned
        frame.locator(f"#pattern canvas:not([width='{wide}'])").wait_for()
        assert 200 < canvas.evaluate("e => e.width") < 500
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
    said = section.locator(".count").inner_text
    for words, told in (
        ("delta>0.005", 'No column is named "delta": there are layer, head, space, variant'),
        ("entropy_ratio>much", '"much" is no number, and entropy_ratio holds numbers. 0 of 0 rows shown'),
        ("variant<intact", "variant holds text: use = or !=."),
        ("layer=", '"layer=" lacks a value.'),
        ("<img>0", 'No column is named "": there are layer'),
    ):
        section.locator("input").fill(words)
        assert said().startswith(told), words
    section.locator("input").fill("variant!=intact")
    assert f"of {(heads['variant'] != 'intact').sum()} rows shown" in said()
    norms = opened.page.locator("#table-layernorms")
    norms.locator("input").fill("L1H2")
    assert norms.locator(".count").inner_text().startswith('No column is named "head": there are site, layer')
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
    assert opened.page.locator(".still svg").is_visible()
    assert "Attention patterns are drawn by a script" in opened.page.locator("noscript").all_inner_texts()[-1]
    assert opened.page.locator("#table-heads tbody tr").count() == 40


def test_d6_phones_show_text_of_eleven_pixels(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report), viewport={"width": 390, "height": 844})
    frame = opened.attention()
    smallest = """() => Math.min(...[...document.querySelectorAll("*")].filter((e) => e.checkVisibility() &&
      [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => { const m = e.getScreenCTM?.();
      return parseFloat(getComputedStyle(e).fontSize) * (m && e.ownerSVGElement ? Math.hypot(m.a, m.b) : 1); }))"""
    assert opened.page.evaluate(smallest) >= 10.9
    assert frame.locator("body").evaluate(smallest) >= 10.9


def test_charts_fit_a_phone(report: Report, causal: pd.DataFrame, visit: Any) -> None:
    """At 390 pixels no chart is wider than its box, with text of eleven pixels."""
    both = report.with_tables(causal=causal)
    listed = index_page([IndexEntry(f"model {i}", f"{i}.html", both) for i in range(2)])
    for html in (report_page(both), listed):
        opened = visit(html, viewport={"width": 390, "height": 844})
        wide = opened.page.evaluate("""[...document.querySelectorAll(".drawing")].filter((e) => e.offsetWidth)
          .map((e) => [e.scrollWidth - e.clientWidth, e.querySelector("svg").getAttribute("aria-labelledby")])""")
        assert len(wide) >= 3
        assert [w for w in wide if w[0] > 0] == []


@pytest.mark.parametrize(("width", "scrolls"), [(1440, False), (390, True)])
def test_the_bar_of_sections_shows_that_it_scrolls(
    width: int, scrolls: bool, report: Report, visit: Any, page_of: PageOf
) -> None:
    """All sections stand on one line; what does not fit is announced by a shadow at that end."""
    opened = visit(page_of(report), viewport={"width": width, "height": 844})
    bar = opened.page.locator("nav")
    assert bar.bounding_box()["height"] < 60
    assert bar.evaluate("e => e.scrollWidth > e.clientWidth") == scrolls
    assert bar.evaluate("e => getComputedStyle(e).backgroundAttachment").startswith("local, local, scroll, scroll")
    opened.page.locator("nav a").last.focus()
    end = bar.bounding_box()
    last = opened.page.locator("nav a").last.bounding_box()
    assert last["x"] + last["width"] <= end["x"] + end["width"] + 1


def test_black_markers_are_filled_in_the_dark(report: Report, causal: pd.DataFrame, visit: Any) -> None:
    """What matplotlib fills with black has no colour in its SVG: it takes the page's ink, in the legend too."""
    opened = visit(index_page([IndexEntry("a", "a.html", report.with_tables(causal=causal))]), color_scheme="dark")
    fills = opened.page.evaluate(
        "[...document.querySelectorAll('#losses svg [id*=legend] use')].map((e) => getComputedStyle(e).fill)"
    )
    ink = opened.page.evaluate("getComputedStyle(document.body).color")
    assert ink in fills
    assert "rgb(0, 0, 0)" not in fills


def test_pictures_are_saved_with_their_captions(report: Report, visit: Any, page_of: PageOf) -> None:
    """SVG and PNG named after model and picture, ink on white whatever the page's scheme is."""
    opened = visit(page_of(report), color_scheme="dark")
    figure = opened.page.locator("#geometry")
    figure.locator("select").select_option("ln_final")
    caption = figure.locator("figcaption:visible").inner_text()

    def saved(kind: str) -> Path:
        with opened.page.expect_download() as download:
            figure.locator(".saves button", has_text=kind).click()
        assert download.value.suggested_filename == f"tiny-geometry.{kind.lower()}"
        return Path(download.value.path())

    root = ElementTree.fromstring(saved("SVG").read_text(encoding="utf-8"))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    assert len(root.findall(f"{svg}svg")) == 3
    title, *lines = [e.text for e in root.findall(f"{svg}text")]
    assert title == "Tokens before and after a norm: projection and scaling"
    assert " ".join(map(str, lines)) == " ".join(caption.split())
    image = saved("PNG").read_bytes()
    assert image.startswith(b"\x89PNG")
    pixels = mpl.image.imread(io.BytesIO(image))
    assert pixels[0, 0, :3].tolist() == [1, 1, 1]
    assert 0.005 < (pixels[..., :3].min(-1) < 0.6).mean() < 0.3
    opened.quiet()


def test_headings_have_addresses(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report))
    links = opened.page.locator("a.anchor")
    named = links.evaluate_all("all => all.map((a) => [a.getAttribute('href'), a.getAttribute('aria-label')])")
    assert ["#margins", "Link to Margins over depth"] in named
    assert ["#table-keys", f"Link to {report.declared['keys'].title}"] in named
    assert opened.page.evaluate("[...document.querySelectorAll('h2[id]')].every((h) => h.querySelector('a.anchor'))")
    for href, _ in named:
        assert opened.page.locator(href).count() == 1, href
    links.last.click()
    opened.until(f"location.hash === '{named[-1][0]}'")
    opened.quiet()


def test_the_first_screen_answers(report: Report, causal: pd.DataFrame, visit: Any) -> None:
    """At 1440 × 900 model, text, loss, picture and findings are seen without scrolling; each links to a part."""
    opened = visit(report_page(report.with_tables(causal=causal)), viewport={"width": 1440, "height": 900})
    seen = "e => { const b = e.getBoundingClientRect(); return b.top >= 0 && b.bottom <= innerHeight; }"
    for part in ("h1", "dl.facts >> nth=0", "section.verdict .bars", "section.verdict .legend", ".answers > ol"):
        assert opened.page.locator(part).evaluate(seen), part
    assert opened.page.locator("dl.facts").first.locator("dt").all_inner_texts()[-3:] == ["Model", "Text", "Loss"]
    answers = opened.page.locator(".answers > ol > li")
    assert 3 <= answers.count() <= 5
    for answer in answers.all():
        assert answer.locator("strong").inner_text().endswith("?")
        (target,) = answer.locator("a.see").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
        assert opened.page.locator(target).count() == 1
    bars = opened.page.locator("section.verdict .bars .bar.scaling, section.verdict .bars .bar.projection")
    sure = bars.evaluate_all("all => all.map((e) => e.classList.contains('told'))")
    hatched = bars.locator(".fill").evaluate_all(
        "all => all.map((e) => getComputedStyle(e).backgroundImage !== 'none')"
    )
    assert [not s for s in sure] == hatched
    assert set(sure) == {True, False}
    opened.quiet()


def test_d6_printed_pictures_stay_with_their_titles(report: Report, visit: Any, page_of: PageOf) -> None:
    opened = visit(page_of(report))
    opened.page.emulate_media(media="print")
    styles = opened.page.evaluate("""[...document.querySelectorAll(".pictures > figure")].map((e) => {
      const s = getComputedStyle(e); return `${s.breakInside} ${s.contentVisibility} ${e.offsetHeight > 50}`; })""")
    assert styles
    assert set(styles) == {"avoid visible true"}
    # The frame is not printed: a still map and the heads with the largest values take its place.
    assert opened.page.locator("iframe.attention").is_hidden()
    assert opened.page.locator(".still svg").bounding_box()["height"] > 50
    row = report.by_head("delta_loss").iloc[0]
    assert f"Largest: L{row.layer:.0f}H{row['head']:.0f} " in opened.page.locator(".still").inner_text()


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE:
        pytest.skip("set LN_PROBE_AXE to axe.min.js of the npm package axe-core (npm pack axe-core)")
    return Path(AXE).read_text(encoding="utf-8")


def violations(where: Any, axe: str) -> list[str]:
    where.evaluate(axe)
    found = where.evaluate("() => axe.run(document, { iframes: false, resultTypes: ['violations'] })")
    return [f"{v['id']}: {n['html'][:160]}" for v in found["violations"] for n in v["nodes"]]


def of_step(report: Report, step: int) -> Report:
    return replace(report, provenance={**report.provenance, "model": {"name": "run", "step": step}})


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
        "index": index_page(
            [
                IndexEntry("a", "a/report.html", both),
                *(IndexEntry(f"run · step{s}", f"{s}/report.html", of_step(both, s)) for s in (0, 10)),
                IndexEntry("b", error="ValueError: broken"),
            ]
        ),
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
