"""Pages in a real headless Chromium without a network: silent, drawn, usable, addressed, without a word from axe-core;
hostile text stays text. Two reports and an index are opened once each, and tests leave them as they need them."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.image
import pandas as pd
import pytest
from architectures import make_bridge
from made_up import lab_page
from matplotlib.figure import Figure

import ln_probe
from ln_probe.exhibits import Exhibits
from ln_probe.page.attention import marks
from ln_probe.page.heads import HeadMap
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.page.page import report_page
from ln_probe.report import Report

AXE = os.environ.get("LN_PROBE_AXE", "")  # axe.min.js of the npm package axe-core; .ci/run fetches it
COLOURS = """canvas => { const { width, height } = canvas;
  const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
  return new Set(data).size; }"""
EFFECTS = {(0, 1): (0.2, 0.001), (1, 2): (0.3, 0.5), (1, 0): (0.005, 0.001), (1, 1): (0.004, 1.0)}  # and p


@pytest.fixture(scope="module")
def shown(report: Report, causal: pd.DataFrame) -> Report:
    """With interventions; scaling frozen has these effects on these heads, and none on the others."""
    effects = report.head_effects.copy()
    frozen = effects["variant"] == "no_scaling"
    effects.loc[frozen, ["delta_loss", "p_sign"]] = 0.0, 1.0
    for (layer, head), values in EFFECTS.items():
        mine = frozen & (effects["layer"] == layer) & (effects["head"] == head)
        effects.loc[mine, ["delta_loss", "p_sign"]] = values
    return report.with_tables(causal=causal, head_effects=effects)


@pytest.fixture(scope="module")
def html(shown: Report) -> str:
    return report_page(shown, "../index.html")


@pytest.fixture(scope="module")
def opened_once(html: str, visit_once: Any) -> Any:
    return visit_once(html)


@pytest.fixture
def opened(opened_once: Any) -> Any:
    opened_once.look()
    return opened_once


@pytest.fixture(scope="module")
def long_once(long_report: Report, visit_once: Any, page_of: Any) -> Any:
    return visit_once(page_of(long_report))


@pytest.fixture
def long(long_once: Any) -> Any:
    long_once.look(1200)
    return long_once


@pytest.fixture(scope="module")
def index(shown: Report, visit_once: Any) -> Any:
    """Three models, two steps of a run, and one that failed."""
    entries = [IndexEntry(f"model {i}", f"m{i}/report.html", shown) for i in range(3)]
    for step in (0, 10):
        one = replace(shown, provenance={**shown.provenance, "model": {"name": "run", "step": step}})
        entries.append(IndexEntry(f"run step {step}", f"{step}/report.html", one))
    return visit_once(index_page([*entries, IndexEntry("bad", error="ValueError: broken")]))


@pytest.mark.slow
@pytest.mark.release
def test_attention_is_drawn_and_its_selectors_work(long_report: Report, long: Any) -> None:
    long.again()
    frame = long.attention()
    long.page.wait_for_timeout(300)
    assert frame.locator("#pattern canvas").evaluate(COLOURS) > 20
    assert frame.locator("#heads canvas").count() == 2
    assert frame.locator("#heads canvas").first.evaluate(COLOURS) > 20
    layer, head = HeadMap.of(long_report).most_affected(long_report.exhibits)
    assert frame.locator("#title").inner_text() == f"Layer {layer}, head {head}"
    assert "Reduced: 150 tokens in 64 × 64 cells of 2–3 tokens" in frame.locator("#resolution").inner_text()
    assert frame.locator("#keys .key").count() == 150
    long.page.locator("iframe.attention").scroll_into_view_if_needed()  # frames out of sight are not painted
    canvas = frame.locator("#pattern canvas")
    before = canvas.screenshot()
    canvas.hover(position={"x": 150, "y": 200})  # what CircuitsVis shows of a cell
    long.page.wait_for_timeout(600)
    assert canvas.screenshot() != before, "no tooltip appeared"

    frame.locator("#layer").select_option("2")
    frame.locator("#heads button").nth(1).click()
    assert frame.locator("#title").inner_text() == "Layer 2, head 1"
    stuck = int((marks(long_report.exhibits.of_prompt(0))[2, 1] == 2).sum())
    assert frame.locator("#keys .key.m2").count() == stuck > 0

    keys = long_report.keys.query(
        "space == 'head' and variant == 'intact' and layer == 2 and head == 1 and prompt == 0"
    )
    row = keys.iloc[0]
    frame.locator("#keys .key").nth(row["position"]).click()
    told = frame.locator("#detail").inner_text()
    assert told.startswith(f"Key {row['position']}, “{row['token']}”: ")
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
    long.quiet()


def test_tables_sort_and_download(shown: Report, opened: Any) -> None:
    opened.again()
    section = opened.page.locator("#table-keys")
    section.locator("button", has_text="Download CSV").wait_for()
    assert section.locator(".count").inner_text() == f"100 of {len(shown.keys)} rows shown."
    section.locator("button", has_text="Show more rows").click()
    assert section.locator("tbody tr").count() == 200

    head = section.locator("thead th", has_text="position")
    place = section.locator("thead th").all_inner_texts().index("position")
    for order, sign in (("ascending", 1), ("descending", -1)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        told = [int(t) for t in section.locator(f"tbody td:nth-child({place + 1})").all_inner_texts()]
        assert told == sorted(shown.keys["position"], key=lambda p, s=sign: s * p)[: len(told)]

    download = opened.download(section.locator("button", has_text="Download CSV"))
    assert download.suggested_filename == "tiny-keys.csv"
    rows = list(csv.DictReader(io.StringIO(Path(download.path()).read_text(encoding="utf-8-sig"))))
    assert len(rows) == len(shown.keys)
    assert list(rows[0]) == list(shown.keys.columns)
    expected = sorted(shown.keys["margin_lower"].dropna())
    assert sorted(float(r["margin_lower"]) for r in rows if r["margin_lower"]) == pytest.approx(expected, rel=1e-5)

    heads = opened.page.locator("#table-heads")
    place = heads.locator("thead th").all_inner_texts().index("entropy_ratio")
    for _ in range(2):
        heads.locator("thead th").nth(place).locator("button").click()
        told = heads.locator(f"tbody td:nth-child({place + 1})").all_inner_texts()
        assert told[0] != "–"
        assert told[-1] == "–", "unknown values are last either way"
    opened.quiet()


def test_c09_cells_of_a_download_are_no_formulas(opened: Any) -> None:
    """What a spreadsheet would compute stands behind an apostrophe, whatever is before it and however wide it is."""
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


def test_schemes_widths_and_print(shown: Report, opened: Any) -> None:
    """Text of eleven pixels and charts that fit on a phone, dark panels in the dark, pictures with their titles."""
    frame = opened.attention()
    for scheme, turned in (("light", False), ("dark", True)):
        opened.look(color_scheme=scheme)
        assert (frame.locator("#pattern").evaluate("e => getComputedStyle(e).filter") != "none") == turned
    bar = opened.page.locator("nav")
    for width, scrolls in ((1440, False), (390, True)):  # what does not fit is announced by a shadow at that end
        opened.look(width, 844)
        assert bar.bounding_box()["height"] < 60
        assert bar.evaluate("e => e.scrollWidth > e.clientWidth") == scrolls
        assert bar.evaluate("e => getComputedStyle(e).backgroundAttachment").startswith("local, local, scroll, scroll")
        opened.page.evaluate("document.activeElement.blur()")
        opened.page.locator("nav a").last.focus()
        end = bar.bounding_box()
        last = opened.page.locator("nav a").last.bounding_box()
        assert last["x"] + last["width"] <= end["x"] + end["width"] + 1
    smallest = """() => Math.min(...[...document.querySelectorAll("*")].filter((e) => e.checkVisibility() &&
      [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => { const m = e.getScreenCTM?.();
      return parseFloat(getComputedStyle(e).fontSize) * (m && e.ownerSVGElement ? Math.hypot(m.a, m.b) : 1); }))"""
    assert opened.page.evaluate(smallest) >= 10.9
    assert opened.attention().locator("body").evaluate(smallest) >= 10.9
    charts_fit(opened)
    opened.look(media="print")
    styles = opened.page.evaluate("""[...document.querySelectorAll(".pictures > figure")].map((e) => {
      const s = getComputedStyle(e); return `${s.breakInside} ${s.contentVisibility} ${e.offsetHeight > 50}`; })""")
    assert styles
    assert set(styles) == {"avoid visible true"}
    # The frame is not printed: a still map and the heads with the largest values take its place.
    assert opened.page.locator("iframe.attention").is_hidden()
    assert opened.page.locator(".still svg").bounding_box()["height"] > 50
    opened.quiet()


def charts_fit(opened: Any) -> None:
    """No chart is wider than its box."""
    wide = opened.page.evaluate("""[...document.querySelectorAll(".drawing")].filter((e) => e.offsetWidth)
      .map((e) => [e.scrollWidth - e.clientWidth, e.querySelector("svg").getAttribute("aria-labelledby")])""")
    assert wide
    assert [w for w in wide if w[0] > 0] == []


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360), ("dark", 1200), ("light", 390)])
def test_schemes_and_widths(scheme: str, width: int, long: Any) -> None:
    long.look(width, color_scheme=scheme)
    frame = long.attention()
    long.page.wait_for_timeout(300)
    assert long.page.evaluate("document.documentElement.scrollWidth") <= width
    assert frame.locator("body").evaluate("b => document.documentElement.scrollWidth - innerWidth") <= 0
    paper, ink = long.page.evaluate(
        "[document.body, document.querySelector('figure svg text')].map(e => { const s = getComputedStyle(e);"
        " return (e === document.body ? s.backgroundColor : s.fill).match(/\\d+/g).slice(0, 3)"
        ".reduce((a, b) => a + Number(b), 0) / 3 })"
    )
    assert (paper < 60 and ink > 180) if scheme == "dark" else (paper > 240 and ink < 60)
    wanted = frame.locator("body").evaluate("b => document.documentElement.offsetHeight")
    long.until(f"document.querySelector('iframe.attention').offsetHeight >= {wanted}")
    long.quiet()


def test_d6_without_scripts_nothing_is_empty(html: str, visit: Any) -> None:
    opened = visit(html, java_script_enabled=False)
    assert opened.page.locator("iframe.attention").is_hidden()
    assert opened.page.locator(".still svg").is_visible()
    assert "Attention patterns are drawn by a script" in opened.page.locator("noscript").all_inner_texts()[-1]
    assert opened.page.locator("#table-heads tbody tr").count() == 40


def test_pictures_are_saved_with_their_captions(opened: Any) -> None:
    """SVG and PNG named after model and picture, ink on white whatever the page's scheme is."""
    opened.look(color_scheme="dark")
    figure = opened.page.locator("#margins")
    caption = figure.locator("figcaption").inner_text()

    def saved(kind: str) -> Path:
        download = opened.download(figure.locator(".saves button", has_text=kind))
        assert download.suggested_filename == f"tiny-margins.{kind.lower()}"
        return Path(download.path())

    root = ElementTree.fromstring(saved("SVG").read_text(encoding="utf-8"))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    assert len(root.findall(f"{svg}svg")) == 1
    title, *lines = [e.text for e in root.findall(f"{svg}text")]
    assert title == "Margins over depth"
    assert " ".join(map(str, lines)) == " ".join(caption.split())
    picture = saved("PNG").read_bytes()
    assert picture.startswith(b"\x89PNG")
    pixels = mpl.image.imread(io.BytesIO(picture))
    assert pixels[0, 0, :3].tolist() == [1, 1, 1]
    assert 0.005 < (pixels[..., :3].min(-1) < 0.6).mean() < 0.3
    opened.quiet()


def test_the_first_screen_answers_and_headings_have_addresses(shown: Report, opened: Any) -> None:
    """At 1440 × 900 model, text, loss, picture and findings are seen without scrolling; each links to a part."""
    opened.again()
    page = opened.page
    seen = "e => { const b = e.getBoundingClientRect(); return b.top >= 0 && b.bottom <= innerHeight; }"
    for part in ("h1", "dl.facts >> nth=0", "section.verdict .bars", "section.verdict .legend", ".answers > ol"):
        assert page.locator(part).evaluate(seen), part
    assert page.locator("dl.facts").first.locator("dt").all_inner_texts()[-3:] == ["Model", "Text", "Loss"]
    answers = page.locator(".answers > ol > li")
    assert 3 <= answers.count() <= 5
    for answer in answers.all():
        assert answer.locator("strong").inner_text().endswith("?")
        (target,) = answer.locator("a.see").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
        assert page.locator(target).count() == 1
    bars = page.locator("section.verdict .bars .bar.scaling, section.verdict .bars .bar.projection")
    sure = bars.evaluate_all("all => all.map((e) => e.classList.contains('told'))")
    filled = bars.locator(".fill").evaluate_all("all => all.map((e) => getComputedStyle(e).backgroundImage !== 'none')")
    assert [not s for s in sure] == filled
    assert set(sure) == {True, False}
    links = page.locator("a.anchor")
    named = links.evaluate_all("all => all.map((a) => [a.getAttribute('href'), a.getAttribute('aria-label')])")
    assert ["#margins", "Link to Margins over depth"] in named
    assert ["#table-keys", f"Link to {shown.declared['keys'].title}"] in named
    assert page.evaluate("[...document.querySelectorAll('h2[id]')].every((h) => h.querySelector('a.anchor'))")
    for href, _ in named:
        assert page.locator(href).count() == 1, href
    links.last.click()
    opened.until(f"location.hash === '{named[-1][0]}'")
    opened.quiet()


# --------------------------------------------------------------------------------------------------- heads, addresses

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


@pytest.mark.slow
@pytest.mark.release
def test_a_head_has_an_address(shown: Report, opened: Any) -> None:
    opened.again()
    frame = opened.attention()
    layer, head = HeadMap.of(shown).most_affected(shown.exhibits)
    assert place(frame) == f"Layer {layer}, head {head}"
    assert opened.page.evaluate("location.hash") == "", "nobody has chosen anything"
    frame.locator('#map button[data-layer="1"][data-head="0"]').click()
    assert place(frame) == "Layer 1, head 0"
    opened.until("location.hash === '#L1H0P0'")
    frame.locator('#map [aria-pressed="true"]').press("ArrowRight")
    opened.until("location.hash === '#L1H1P0'")
    assert frame.locator("#frozen canvas").count() == 1
    about = " ".join(frame.locator("#about").inner_text().split())
    assert "Loss increase, scaling frozen +0.004" in about
    opened.page.evaluate("location.hash = '#L0H3P0'")  # what a link of a finding does
    frame.locator("#title", has_text="Layer 0, head 3").wait_for()
    frame.locator("#measure").select_option(label="Entropy")
    assert "attention entropy over" in frame.locator("#meaning").inner_text()
    opened.quiet()


@pytest.mark.slow
@pytest.mark.release
def test_the_map_says_what_is_significant(shown: Report, opened: Any) -> None:
    """Colour begins at the threshold, what is not significant is hatched, the largest heads are a list."""
    opened.again()
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
        *shown.by_head("entropy_ratio").iloc[0][["layer", "head"]]
    )
    opened.quiet()


@pytest.mark.slow
@pytest.mark.release
def test_a_page_opens_at_its_address_and_hostile_ones_do_nothing(opened: Any) -> None:
    opened.again(at="#L1H3P0")
    frame = opened.attention()
    frame.locator("#title", has_text="Layer 1, head 3").wait_for()
    for address in HOSTILE_ADDRESSES:
        opened.page.evaluate("to => { location.hash = to; }", address)
        assert place(frame) == "Layer 1, head 3"
    opened.page.evaluate("location.hash = '#L7H0P0'")
    frame.locator("#lost", has_text="The attention of layer 7, head 0 on prompt 0 is not kept here: this").wait_for()
    assert place(frame) == "Layer 1, head 3"
    # What the frame says is checked as well, and nobody else is listened to.
    before = opened.page.evaluate("location.hash")
    inside = opened.page.frames[1]
    for said in ("{ lnProbeAt: ['<img>', 0, 0] }", "{ lnProbeAt: 'L0H0' }", "{ lnProbeAt: [{}, [], null] }", "null"):
        inside.evaluate(f"parent.postMessage({said}, '*')")
    opened.page.evaluate("postMessage({ lnProbeAt: [0, 0, 0] }, '*')")
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("location.hash") == before
    # As if the page had not listened yet when the frame was ready: an address that nobody was told of.
    opened.page.evaluate("history.replaceState(null, '', '#L0H2P0')")
    opened.page.evaluate("document.querySelector('iframe.attention').style.height = '10px'")
    opened.page.evaluate(
        "document.querySelector('iframe.attention').contentWindow.postMessage({ lnProbeAsk: true }, '*')"
    )
    frame.locator("#title", has_text="Layer 0, head 2").wait_for()
    opened.until("parseFloat(document.querySelector('iframe.attention').style.height) > 100")
    opened.quiet()


@pytest.mark.slow
@pytest.mark.release
def test_a_page_about_some_heads_says_so(visit: Any) -> None:
    """Its map has a place for every head of the model; an address of a head that it has not is answered."""
    options: dict[str, Any] = {"probes": ["uniformity"], "layers": [1], "progress": False}
    report = ln_probe.analyze(make_bridge("gpt2"), [list(range(3, 12))], heads=[1, 3], **options)
    opened = visit(report_page(report), at="#L0H2P0")
    frame = opened.attention()
    frame.locator("#lost", has_text="The attention of layer 0, head 2 on prompt 0 is not kept here").wait_for()
    said = frame.locator("#lost").inner_text()
    assert "this page has layers 1, heads 1, 3, prompts 0. Layers and heads of a report are chosen with" in said
    heads = frame.locator("#map button")
    absent = [t for t in heads.evaluate_all("all => all.map((b) => b.title)") if t.endswith("not in this report")]
    assert (heads.count(), len(absent)) == (8, 6)
    assert "Dashed: not in this report." in frame.locator("#overview").inner_text()
    opened.quiet()
    bare = visit(report_page(replace(report, exhibits=Exhibits())), at="#L0H2P0")
    bare.page.locator("p.lost", has_text="This page has no attention patterns, of layer 0, head 2 or").wait_for()
    bare.quiet()


SILENT = "for (const kind of ['ResizeObserver', 'IntersectionObserver']) window[kind].prototype.observe = () => {};"


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("observers", ["told", "silent"])
def test_a_frame_drawn_before_it_had_a_place_is_drawn_again(observers: str, html: str, opened: Any, visit: Any) -> None:
    if observers == "silent":  # as they are where a browser does not draw a frame out of sight
        opened = visit(html)
        opened.context.add_init_script(SILENT)
    opened.again()
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
        opened.look(500, 800)  # a telephone that was turned
        frame.locator(f"#pattern canvas:not([width='{wide}'])").wait_for()
        assert 200 < canvas.evaluate("e => e.width") < 500
    opened.quiet()


# ---------------------------------------------------------------------------------------- the index, a lab page, axe


def test_the_index(index: Any) -> None:
    """It links to its reports, fits a phone, and has ink for what matplotlib fills with black."""
    section = index.page.locator("#table-comparison")
    section.locator("button", has_text="Download CSV").wait_for()
    section.locator("thead th").first.locator("button").dblclick()
    links = section.locator("tbody td:first-child a")
    assert links.all_inner_texts() == ["run step 10", "run step 0", "model 2", "model 1", "model 0"]
    assert links.nth(2).get_attribute("href") == "m2/report.html"
    index.look(390, 844, color_scheme="dark")
    charts_fit(index)
    fills = index.page.evaluate(
        "[...document.querySelectorAll('#losses svg [id*=legend] use')].map((e) => getComputedStyle(e).fill)"
    )
    assert index.page.evaluate("getComputedStyle(document.body).color") in fills
    assert "rgb(0, 0, 0)" not in fills
    index.quiet()


def test_a_lab_page_shows_its_plots_and_sorts_its_table(visit: Any, tmp_path: Path) -> None:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    hostile = "</td><script>fired()</script>"
    means = {"none": 0.2, "layernorm": 0.1, hostile: 0.3}
    opened = visit(lab_page(tmp_path, means, figures={"curve": figure}))
    page = opened.page
    page.locator("#table-summary button", has_text="Download CSV").wait_for()
    assert page.locator("img").evaluate("image => image.naturalWidth") > 50
    page.locator("#table-summary th button", has_text="mean").click()
    assert page.locator("#table-summary tbody td:first-child").all_inner_texts() == ["layernorm", "none", hostile]
    opened.quiet()


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: str, shown: Report, opened: Any, index: Any, visit: Any, tmp_path: Path) -> None:
    if not AXE:
        pytest.skip("set LN_PROBE_AXE to axe.min.js of the npm package axe-core (npm pack axe-core)")
    axe = Path(AXE).read_text(encoding="utf-8")
    opened.again()
    opened.attention()
    view = visit(shown.attention().document())
    view.page.locator("#pattern canvas").wait_for()
    lab = visit(lab_page(tmp_path, {"none": 0.2, "layernorm": 0.1}))
    found = []
    for name, one in (("report", opened), ("index", index), ("view", view), ("lab", lab)):
        one.look(color_scheme=scheme)
        for where in [one.page, *([one.page.frames[1]] if name == "report" else [])]:
            where.evaluate(axe)
            said = where.evaluate("() => axe.run(document, { iframes: false, resultTypes: ['violations'] })")
            found += [f"{name}, {v['id']}: {n['html'][:160]}" for v in said["violations"] for n in v["nodes"]]
    assert found == []
