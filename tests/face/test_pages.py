"""Pages without a browser: what is in them, that text in them is text, and that odd reports still make one."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge, make_hooked
from made_up import HOSTILE, UNSEEN, Page, lab_page, unpacked
from matplotlib.figure import Figure

import ln_probe
from ln_probe import page as payload
from ln_probe.analyses.probes.registry import DEFAULT, chosen
from ln_probe.analyses.schema import Table
from ln_probe.analyses.text import disarmed, shortened, visible
from ln_probe.exhibits import CELLS, Exhibits, PromptAttention, bin_edges, pooled, to_bytes
from ln_probe.page import attention, circuitsvis_script, own_script, packed, policy
from ln_probe.page.figures import causal_effects, svg
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.page.lab import write_lab_page
from ln_probe.page.page import QUESTIONS, answers, report_page
from ln_probe.page.tables import STATIC_ROWS, figure_text, table
from ln_probe.recording import FULL_HEADS, plan
from ln_probe.report import Report

PageOf = Callable[[Report], str]


def test_the_page_fetches_nothing_and_shows_the_tables(report: Report, page_of: PageOf) -> None:
    page = Page(page_of(report))
    assert not [t for t, _ in page.tags if t in ("object", "embed", "link", "base", "form", "img")]
    assert sum(t == "iframe" for t, _ in page.tags) == 1
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                allowed = ("#", "data:image/png;base64,", "https://arxiv.org/")
                assert (value or "").startswith(allowed), (tag, name, value)
    frame = next(a for t, a in page.tags if t == "iframe")
    assert frame["sandbox"] == "allow-scripts"
    policies = [
        a["content"] for p in (page, Page(frame["srcdoc"])) for t, a in p.tags if "content" in a and "http-equiv" in a
    ]
    assert len(policies) == 2
    for found in policies:
        assert found.startswith("default-src 'none'; script-src 'sha256-")
    for column in ("mean_share", "margin_median", "attainable_no_scaling_median"):
        assert column in page.text
    assert sum(t == "svg" for t, _ in page.tags) >= 7
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids)), "two pictures share an id"
    for drawn in (a for t, a in page.tags if t == "svg"):  # each says what it shows
        assert drawn["role"] == "img"
        assert drawn["aria-labelledby"] in ids


def test_answers_come_first_and_link_to_their_pictures(report: Report, page_of: PageOf) -> None:
    """Each is a question with the first sentence of a finding; all findings are listed below, in their order."""
    html = page_of(report)
    start = html.index('id="findings"')
    first = html[start : html.index("<details", start)]
    assert first.count("<li>") == len(QUESTIONS)
    targets = [a["href"][1:] for t, a in Page(first).tags if t == "a" and a.get("class") == "see"]
    assert len(targets) == len(QUESTIONS)
    ids = {a.get("id") for _, a in Page(html).tags}
    assert set(targets) <= ids
    titles = {t: "x" for t in ids if t}
    found = answers(report, titles)
    assert [a.question for a in found] == [*QUESTIONS.values()]
    for answer in found:
        sentence = Page(answer.text).text
        assert f"{answer.question} {sentence}" in Page(first).text
        start_of = sentence.split(" Freezing scaling for the keys changes")[0].removesuffix(".")
        assert any(f.startswith(start_of) for f in report.findings()), sentence
    every = Page(html[html.index("<details", start) :]).text
    places = [every.index(f) for f in report.findings()]
    assert places == sorted(places)


def test_what_norms_do_to_sinks_is_answered(report: Report) -> None:
    table = report.by_head().dropna(subset=["first_attention", "first_change"])
    assert len(table) == 8
    (said,) = [Page(a.text).text for a in answers(report, {}) if a.question == QUESTIONS["sinks"]]
    most = table.loc[table["first_change"].abs().idxmax()]
    change = 100 * float(table["first_change"].mean())
    assert abs(change) > 0.005
    assert f"by {float(f'{change:.2g}'):+g} percentage points (mean over 8 heads)" in said
    assert f"most in L{most['layer']:.0f}H{most['head']:.0f} (" in said
    shown = [replace(a, first_change=np.full((2, 4), -1e-9, np.float32)) for a in report.exhibits.attention]
    still = replace(report, exhibits=replace(report.exhibits, attention=tuple(shown)))
    (said,) = [Page(a.text).text for a in answers(still, {}) if a.question == QUESTIONS["sinks"]]
    assert "by less than 0.01 percentage points" in said
    none = replace(report, exhibits=Exhibits())
    (said,) = [Page(a.text).text for a in answers(none, {}) if a.question == QUESTIONS["sinks"]]
    assert "Freezing scaling" not in said


def asked_of(report: Report, *probes: str) -> Report:
    """The report as if these probes had been asked for."""
    arguments = report.provenance["arguments"] | {"probes": list(probes)}
    return replace(report, provenance={**report.provenance, "arguments": arguments})


@pytest.mark.slow
def test_a01_only_probes_that_did_not_run_are_called_not_run(report: Report, page_of: PageOf) -> None:
    everything = [p.name for p in chosen(DEFAULT)]
    assert "Not run:" not in page_of(asked_of(report, *everything)).replace("Not run: how the loss changes", "")
    page = page_of(asked_of(report, *(n for n in everything if n not in ("head_effects", "sinks"))))
    assert "Not run: which heads depend on their norm (the head_effects probe)." in page
    assert "Not run: attention sinks and outlier tokens (the sinks probe)." in page


@pytest.mark.slow
def test_interventions_are_drawn_when_there_are_some(report: Report, causal: pd.DataFrame, page_of: PageOf) -> None:
    emptied = report.with_tables(causal=causal.head(0))
    without = Page(report_page(asked_of(emptied, "decomposition", "selectability")))
    assert "Not run: how the loss changes when a term is removed" in without.text
    failed = Page(report_page(asked_of(emptied, "decomposition", "causal")))
    assert "Not run: how the loss changes" not in failed.text
    assert "unknown" in failed.text
    page = Page(report_page(report.with_tables(causal=causal)))
    assert "Not run: how the loss changes" not in page.text
    assert "change of loss, nats per token" in page.text
    assert sum(t == "svg" for t, _ in page.tags) == sum(t == "svg" for t, _ in without.tags) + 1
    unknown = causal.assign(delta_loss_low=np.nan, delta_loss_high=np.nan)
    assert "change of loss" in svg(causal_effects(report.with_tables(causal=unknown)), "x")


@pytest.mark.slow
def test_reductions_are_stated(long_report: Report) -> None:
    notes = ("attention is shown for the first 1 of 9 prompts; the tables hold all",)
    exhibits = replace(long_report.exhibits, notes=notes)
    assert notes[0] in report_page(replace(long_report, exhibits=exhibits))
    frame = pd.DataFrame({"a": np.arange(30_000)})
    cut = table(Table.of_frame("x", frame), frame)
    assert (cut.kept, cut.total, len(cut.rows)) == (20_000, 30_000, STATIC_ROWS)


# ------------------------------------------------------------------------------------------------------ hostile text


@pytest.mark.slow
def test_hostile_text_is_text_in_tables_and_pictures(report: Report, dirty: list[Report], page_of: PageOf) -> None:
    clean = {t for t, _ in Page(page_of(report)).tags}
    said = ""
    for one in dirty:
        html = page_of(one)
        page = Page(html)
        said += page.text
        assert {t for t, _ in page.tags} <= clean
        assert sum(t == "iframe" for t, _ in page.tags) == 1
        assert not page.acts()
        assert not [c for c in UNSEEN if c in html]
    for text in HOSTILE:
        assert shortened(visible(text)) in said, text


def test_hostile_text_is_text_in_every_single_place(single: list[Report], page_of: PageOf) -> None:
    """Names, paths, provenance: each string in every such place of a page and a cell of its own."""
    for text, one in zip(HOSTILE, single, strict=True):
        for html in (page_of(one), one._repr_html_()):
            page = Page(html)
            assert not page.acts()
            assert not [c for c in UNSEEN if c in html]
            assert shortened(disarmed(text), 200).strip() in page.text


def test_control_characters_are_made_visible() -> None:
    assert visible("a b\n\t") == "a·b⏎⇥"
    assert visible("\u202e\x00\u2028") == "\\u202e\\u0000\\u2028"
    assert visible("") == "∅"
    assert visible("🙂 <b>") == "🙂·<b>"
    assert shortened("a" * 100, 10) == "aaaaaaaaaa… (100 characters)"


# --------------------------------------------------------------------------------------------------------- odd input


def test_unknown_numbers_everywhere(report: Report, causal: pd.DataFrame) -> None:
    def emptied(frame: pd.DataFrame) -> pd.DataFrame:
        keep = ["layer", "head", "prompt", "position", "token_id"]
        numbers = [c for c in frame.select_dtypes("number").columns if c not in keep]
        return frame.assign(**dict.fromkeys(numbers, np.nan))

    blank = replace(report, tables={n: emptied(t) for n, t in (report.tables | {"causal": causal}).items()})
    page = Page(report_page(blank))
    assert "–" in page.text
    assert "nan" not in page.text.lower().split()
    assert blank._repr_html_()
    assert index_page([IndexEntry("blank", "blank/report.html", blank)])


def test_some_unknown_numbers(report: Report) -> None:
    heads = report.heads.copy()
    for column in ("margin_median", "unselectable_fraction", "attainable_p05", "entropy_ratio"):
        heads.loc[heads.index % 2 == 0, column] = np.nan
        heads.loc[heads.index % 7 == 1, column] = np.inf
    page = report_page(report.with_tables(heads=heads))
    for name in ("margins", "entropy"):
        assert f'aria-labelledby="{name}' in page, "a picture is missing"


def test_nothing_still_makes_pages(report: Report) -> None:
    assert "Nothing was measured" in Page(report_page(Report())).text
    assert "Nothing was measured" in Report()._repr_html_()
    assert "model" in index_page([IndexEntry("model", report=Report())])
    assert "0 models" in Page(index_page([])).text
    bad = IndexEntry("bad", error="ValueError: broken")
    page = index_page([IndexEntry("good", "good/report.html", report), bad])
    assert 'href="good/report.html"' in page
    for html in (page, index_page([bad])):
        assert "bad failed: ValueError: broken" in Page(html).text


def test_a_single_token_and_a_single_head(page_of: PageOf) -> None:
    one = ln_probe.analyze(make_hooked(n_heads=1, n_layers=1, d_head=32), torch.tensor([[3]]), progress=False)
    page = Page(page_of(one))
    assert "1 layers × 1 heads" in page.text
    assert one.attention(0).document()


@pytest.mark.slow
def test_two_hundred_layers(report: Report) -> None:
    norms = pd.concat([report.layernorms.assign(layer=i, site=f"blocks.{i}.ln1") for i in range(200)])
    norms = norms.drop_duplicates("site", ignore_index=True)
    inside = report.heads[report.heads["layer"] == 0]
    heads = pd.concat([inside.assign(layer=i) for i in range(200)], ignore_index=True)
    html = report_page(report.with_tables(layernorms=norms, heads=heads))
    assert "200 layers × 4 heads" in Page(html).text
    assert len(html) < 5_000_000


@pytest.mark.slow
def test_a_model_whose_norms_do_not_project() -> None:
    report = ln_probe.analyze(make_bridge("llama"), torch.arange(1, 20)[None], progress=False)
    assert "No norm of this model projects" in Page(report_page(report)).text


def test_notebook_cell_is_small(report: Report, long_report: Report) -> None:
    for one in (report, long_report):
        cell = one._repr_html_()
        assert len(cell) < 100_000
        assert "<script" not in cell


def test_the_attention_view_is_one_document(long_report: Report, tmp_path: Path) -> None:
    view = long_report.attention(1, prompt=2)
    frame = next(a for t, a in Page(view._repr_html_()).tags if t == "iframe")
    assert frame["sandbox"] == "allow-scripts"
    assert frame["srcdoc"] == view.document()
    assert view.to_html(tmp_path / "a" / "view.html").read_text() == view.document()
    assert view.document().count("<script>") == 1


@pytest.mark.parametrize(("value", "text"), [
    (float("nan"), "–"), (None, "–"), (3, "3"), (2.0, "2"), (0.123456, "0.1235"), (1.5e-7, "1.500e-07"), (True, "True"),
    (123456.7, "1.235e+05"), (float("inf"), "inf"),
])  # fmt: skip
def test_numbers_as_tables_show_them(value: Any, text: str) -> None:
    assert figure_text(value) == text


def test_a_lab_page_shows_what_was_found_and_escapes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="results"):
        write_lab_page(tmp_path)
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    text = lab_page(
        tmp_path,
        {f"<b>{i}</b>": 0.25 for i in range(300)},
        figures={"a_curve": figure},
        diverged=("seed 9",),
    )
    for shown in ("ln-probe lab run toy", "&lt;b&gt;0&lt;/b&gt;", "Diverged: seed 9", "0.25"):
        assert shown in text
    assert "<b>" not in text
    assert "data:image/png;base64,iVBOR" in text
    assert "A curve</h3>" in text
    assert "of 300 rows shown" in text
    assert "--paper: #fff" in text  # the report's style, both its parts
    assert 'content="default-src &#39;none&#39;; script-src &#39;sha256-' in text
    assert 'src="http' not in text
    assert 'href="http' not in text


def test_what_is_packed_arrives() -> None:
    sent = {
        "text": HOSTILE, "none": None, "yes": True, "nan": float("nan"), "n": np.int64(3), "x": np.float32(0.5),
        "u": np.arange(5, dtype=np.uint8), "h": np.array([0.5, np.nan], np.float16), "i": np.arange(3),
        "f": np.array([[1.5, -2.0]]), "nested": [{"a": (1, 2)}, np.arange(7, dtype=np.uint8)],
    }  # fmt: skip
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed(sent)), "it could leave its place"
    found = unpacked(packed(sent))
    assert found["text"] == HOSTILE
    assert (found["none"], found["yes"], found["nan"], found["n"], found["x"]) == (None, True, None, 3, 0.5)
    assert found["u"].tolist() == [0, 1, 2, 3, 4]
    assert found["h"].view(np.float16)[0] == 0.5
    assert np.isnan(found["h"].view(np.float16)[1])
    assert found["i"].tolist() == [0, 1, 2]
    assert found["f"].tolist() == [1.5, -2.0]
    assert found["nested"][0] == {"a": [1, 2]}
    assert found["nested"][1].tolist() == list(range(7))


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="set"):
        packed({"a": {1}})
    with pytest.raises(TypeError, match="U1"):
        packed(np.array(["a"]))


def test_scripts_cannot_end_their_element() -> None:
    for script in (circuitsvis_script(), own_script("unpack.js", "attention.js"), own_script("unpack.js", "page.js")):
        assert not re.search(r"</script|<script|<!--", script, re.IGNORECASE)
    assert "CircuitsVis" in circuitsvis_script()
    assert len(circuitsvis_script()) > 1_000_000


def test_a_policy_names_scripts_by_hash_and_lets_nothing_be_fetched() -> None:
    script = "let a = 1;"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy(script)
    assert policy().startswith("default-src 'none'; script-src 'none';")
    assert "unsafe-inline" not in policy(script).split("style-src")[0]
    assert "http" not in policy(script)


def test_a_missing_bundle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    circuitsvis_script.cache_clear()
    monkeypatch.setattr(payload, "find_spec", lambda _name: None)
    with pytest.raises(FileNotFoundError, match="circuitsvis"):
        circuitsvis_script()


def test_hard_keys_are_the_hardest_that_nobody_can_give_the_greater_part(long_report: Any) -> None:
    shown = long_report.exhibits.of_prompt(0)
    marks = attention.marks(shown)
    value = shown.attainable.astype(float)
    for place in np.ndindex(*marks.shape[:2]):
        hard = marks[place] == attention.MARKS.index(attention.HARD)
        assert (value[place][hard] < attention.HARD_BELOW).all()
        assert hard.sum() <= np.ceil(attention.HARDEST_SHARE * marks.shape[-1])
        stuck = np.isin(shown.verdict[place], [1, 2])
        assert (marks[place][stuck] == attention.MARKS.index("unselectable")).all()
    assert (marks == 1).any()


# A page about 12 × 12 heads at 512 tokens.

LIMIT = 6_000_000  # bytes; circuitsvis itself takes 63.8 MB for one layer
LAYERS, HEADS, TOKENS = 12, 12, 512


def incompressible(rng: np.random.Generator) -> Exhibits:
    """Attention without any structure that could be compressed, in the amount that a report keeps."""
    kept, prompts, _ = plan([TOKENS] * 4, range(LAYERS), HEADS, 4)
    assert len(kept) == LAYERS
    hidden, edges = np.triu(np.ones((TOKENS, TOKENS), bool), 1), bin_edges(TOKENS)
    shape = (LAYERS, HEADS, TOKENS)
    shown = []
    for prompt, whole in prompts.items():
        cells, full = [], {}
        for layer in range(LAYERS):
            scores = np.where(hidden, -np.inf, 1.5 * rng.normal(size=(HEADS, TOKENS, TOKENS)))
            pattern = np.exp(scores - scores.max(-1, keepdims=True))
            pattern /= pattern.sum(-1, keepdims=True)
            cells.append(to_bytes(pooled(pattern, edges)))
            full[layer, layer] = to_bytes(pattern[layer])
        numbers = [rng.lognormal(-3, 2, size=shape).clip(0, 1).astype(np.float16) for _ in range(3)]
        verdicts = [rng.choice(2, size=shape, p=[0.9, 0.1]).astype(np.uint8) for _ in range(2)]
        one = PromptAttention(
            prompt, tuple(f" w{rng.integers(5000)}" for _ in range(TOKENS)), tuple(range(LAYERS)), tuple(range(HEADS)),
            edges, np.array(cells), verdicts[0], numbers[0], numbers[1], verdicts[1], numbers[2],
            to_bytes(rng.lognormal(-6, 1, size=shape).clip(0, 1)), full if whole else {},
            cells_frozen=np.array(cells)[:, ::-1].copy(),
        )  # fmt: skip
        shown.append(one)
    return Exhibits(tuple(shown))


@pytest.mark.slow
def test_a_page_without_structure_to_compress_is_small(report: Report) -> None:
    rng = np.random.default_rng(0)
    exhibits = incompressible(rng)
    shown = exhibits.of_prompt(0)
    assert shown.cells.shape == (LAYERS, HEADS, CELLS, CELLS)
    assert len(shown.full) >= FULL_HEADS == 12
    assert all(p.shape == (TOKENS, TOKENS) for p in shown.full.values())
    layer = report.heads[report.heads["layer"] == 0]
    heads = [layer.assign(layer=i, head=layer["head"] + 4 * j) for i in range(LAYERS) for j in range(3)]
    keys = pd.concat([report.keys] * 33, ignore_index=True)  # as many as 12 × 12 heads have
    numbers = keys.select_dtypes("float").columns
    keys[numbers] = rng.lognormal(size=(len(keys), len(numbers)))
    tables = {**report.tables, "heads": pd.concat(heads, ignore_index=True), "keys": keys}
    big = replace(report, tables=tables, exhibits=exhibits)
    assert len(keys) > 10_000
    page = report_page(big)
    assert len(page.encode()) <= LIMIT
