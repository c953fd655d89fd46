"""Pages of every form of a report: what they show is what the tables hold, and text stays text."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge
from made_up import HOSTILE, UNSEEN, Page, lab_page

import ln_probe
from ln_probe.exhibits import Exhibits, to_bytes
from ln_probe.hooks import without
from ln_probe.models import BUNDLED
from ln_probe.page import attention, figures, own_script
from ln_probe.page.index import IndexEntry, index_page, write_index
from ln_probe.page.page import notebook_cell, report_page
from ln_probe.page.tables import in_order, table
from ln_probe.report import Report


def effects(report: Report, rows: list[dict[str, Any]]) -> Report:
    """The report with these effects of heads."""
    defaults = {"variant": "no_scaling", "p": math.nan, "n": 6}
    frame = report.declared["head_effects"].frame([defaults | row for row in rows])
    return replace(report, tables={**report.tables, "head_effects": frame})


PRIMARY = [(sites, variant) for variant in ("no_scaling", "no_projection") for sites in ("all", "attention")]


def unpacked(text: str) -> Any:
    """What `unpack` in page.js does, written again."""
    raw = zlib.decompress(base64.b64decode(text))
    start = 4 + int.from_bytes(raw[:4], "little")
    return json.loads(
        raw[4:start],
        object_hook=lambda v: np.frombuffer(raw, np.uint8, v["n"], start + v["$"]) if "$" in v else v,
    )


def cut(report: Report, tokens: int, heads: int, length: int) -> Report:
    """The report with attention of fewer or more tokens and heads."""
    shown = report.exhibits.attention
    weights = np.tril(np.full((1, heads, tokens, tokens), 40, np.uint8))
    new = replace(
        shown,
        tokens=tuple(f"t{i}" for i in range(tokens)),
        length=length,
        layers=(0,),
        heads=tuple(range(heads)),
        intact=weights,
        frozen=weights,
    )
    return replace(report, exhibits=replace(report.exhibits, attention=new))


FORMS = {
    "nothing": lambda report: Report(),
    "norms alone": lambda report: Report({"layernorms": report.layernorms}, report.provenance),
    "no loss": lambda report: replace(
        report, tables={n: t for n, t in report.tables.items() if not n.startswith(("causal", "head_e"))}
    ),
    "no attention": lambda report: replace(report, exhibits=Exhibits()),
    "one head, one token": lambda report: cut(report, 1, 1, 1),
    "512 tokens": lambda report: cut(report, 128, 2, 512),
    "another loss": lambda report: replace(report, provenance={**report.provenance, "loss": {"unit": "points"}}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_report_has_a_page_and_a_cell(form: str, report: Report) -> None:
    one = FORMS[form](report)
    html = report_page(one)
    assert own_script("page.js", "heads.js") in html
    assert html.count("sha256-") == (2 if one.exhibits.attention else 1), "circuitsvis is added"
    page, cell = Page(html), notebook_cell(one)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"][1:] for t, a in page.tags if t == "a" and str(a.get("href")).startswith("#")]
    assert {link for link in links if not re.fullmatch(r"L\d+H\d+", link)} <= set(ids)
    assert not page.acts()
    assert "<script" not in cell
    assert " 0 books" not in page.text
    assert all(300 <= int(width) <= 1400 for width in re.findall(r"--legible:(\d+)px", html)), "a phone to a screen"
    expected = {"512 tokens": "the first 128 of 512 tokens", "another loss": "points", "no loss": "not measured"}
    assert expected.get(form, "") in page.text


def test_the_map_says_how_each_head_was_measured(report: Report) -> None:
    ends = {"delta_loss_low": 0.01, "delta_loss_high": 0.04, "estimate": 0.02}
    one = effects(
        report,
        [
            {"layer": 0, "head": 0, "delta_loss": 0.02, "p": 0.001, "n": 64, **ends},
            {"layer": 0, "head": 1, "delta_loss": -0.004, "p": 0.5, "n": 64},
            {"layer": 1, "head": 0, "delta_loss": math.nan, "estimate": 0.2},
            {"layer": 1, "head": 1, "delta_loss": 0.0002},
        ],
    )
    heads = attention.head_map(one)
    assert [row[0].layer for row in heads.rows] == [1, 0], "layer 0 is at the bottom"
    cells = {cell.name: cell for cell in heads.cells}
    assert cells["L0H0"].classes == "more3 significant"
    assert "95 % CI" in cells["L0H0"].what
    assert cells["L0H1"].classes == "less2 pale"
    assert cells["L1H0"].classes == "more5 pale estimate"
    assert "first-order estimate" in cells["L1H0"].what
    assert "not tested, 6 prompts" in cells["L1H1"].what
    assert "p = 0.001" in cells["L0H0"].what
    assert "p = 0.5" in cells["L0H1"].what
    assert cells["L1H2"].classes == "unknown"
    assert [cell.name for cell in heads.top] == ["L0H0"]
    untested = attention.head_map(replace(one, tables={**one.tables, "head_effects": one.head_effects.assign(p=0.5)}))
    assert [cell.name for cell in untested.top] == ["L1H0", "L0H0", "L0H1", "L1H1"]
    legend = " ".join(text for _, text in heads.legend)
    assert all(text in legend for text in ("hatched", "not tested", "grey"))


def test_the_first_keys_are_those_that_nothing_selects_and_then_those_of_little_attention(report: Report) -> None:
    keys = report.keys[report.keys["variant"] == "intact"]
    ranked = keys.assign(selectable=keys["verdict"] != "unselectable").sort_values(["selectable", "attainable"])
    assert in_order(report.keys)["attainable"][:8].tolist() == ranked["attainable"][:8].tolist()


def test_tables_of_a_page_hold_text_and_six_digits(report: Report) -> None:
    data = unpacked(table(report.declared["keys"], report.keys).data)["data"]
    assert data["verdict"] == report.keys["verdict"].tolist()
    margins = report.keys["margin_upper"]
    assert data["margin_upper"] == [float(f"{value:.6g}") for value in margins]


def test_changes_are_drawn_with_their_intervals(report: Report, causal: pd.DataFrame) -> None:
    causal["delta_loss_optimal"] = causal["delta_loss"] / 2
    one = Report({**report.tables, "causal": causal}, report.provenance, (), report.exhibits)
    (axes,) = figures.loss_changes(one).axes
    _, *intervals = [lines.get_segments() for lines in axes.collections]
    rows = causal[causal["family"] == "primary"].set_index(["sites", "variant"])
    ends = [rows.loc[place, ["delta_loss_low", "delta_loss_high"]].tolist() for place in PRIMARY]
    assert [segments[0][:, 0].tolist() for segments in intervals] == ends
    bold = [text.get_weight() == "bold" for text in axes.texts if text.get_ha() == "right"]
    assert bold == [True, True, False, False], "what is significant"
    heights = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "o"][: 2 * len(PRIMARY)]
    assert np.diff(heights)[::2] == pytest.approx([0.16] * len(PRIMARY)), "loss-optimal constants are below"
    faces = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"][: 2 * len(PRIMARY)]
    assert [face == "none" for face in faces] == [False, True] * len(PRIMARY), "and hollow"


def test_each_panel_over_training_shows_the_changes_of_its_edit(report: Report) -> None:
    figure = figures.loss_over_training({"run": [(0, report), (1000, report)]})
    changes = report.causal[report.causal["sites"] == "all"].set_index("variant")["delta_loss"]
    for axes, variant in zip(figure.axes, ("no_scaling", "no_projection"), strict=True):
        assert axes.lines[1].get_ydata() == pytest.approx([changes[variant]] * 2)


def test_the_page_holds_every_weight_of_every_head(report: Report) -> None:
    shown = report.exhibits.attention
    content = unpacked(attention.attention_data(report)["data"])
    rows, columns = np.tril_indices(len(shown.tokens))
    shape = (len(shown.layers), len(shown.heads), len(rows))
    intact = content["intact"].reshape(shape)
    assert np.array_equal(intact, shown.intact[..., rows, columns])
    frozen = intact + content["change"].reshape(shape)  # in 8 bits
    assert np.array_equal(frozen, shown.frozen[..., rows, columns])
    assert len(content["tokens"]) == len(shown.tokens)


def test_the_text_is_coloured_by_the_change_of_each_tokens_loss(report: Report) -> None:
    content = unpacked(attention.token_data(report)["colored"])
    losses = report.tokens(n=None).query("prompt == 0")
    assert content["values"] == pytest.approx(losses["no_scaling"].tolist(), abs=1e-4)
    assert len(content["tokens"]) == len(losses)


def test_contrasts_are_those_of_the_table(report: Report) -> None:
    for contrast in figures.contrasts(report):
        row = report.causal.set_index(["sites", "variant"]).loc[(contrast.sites, contrast.variant.name)]
        assert contrast.change[0] == row["delta_loss"]
        assert contrast.loss == pytest.approx(row["loss"] - row["delta_loss"])


def test_attention_of_a_head(report: Report, tmp_path: Path) -> None:
    view = report.attention(1, 2)
    assert view.to_html(tmp_path / "head.html").read_text(encoding="utf-8") == view.document()
    assert 'data-first="L1H2"' in view.document()
    assert repr(view) == "AttentionView(layer=1, head=2)"
    assert view._repr_html_().startswith('<iframe title="Attention" sandbox="allow-scripts"')
    with pytest.raises(ValueError, match="head"):
        report.attention(0, 99)
    with pytest.raises(ValueError, match="attention"):
        replace(report, exhibits=Exhibits()).attention()


def test_attention_of_a_layer_intact_beside_an_edit() -> None:
    model, tokens = ln_probe.load_model("lm-layernorm"), [list(range(5, 205))]
    scale = {"blocks.1.ln1": 2.0}
    picture = ln_probe.attention(model, tokens, layer=1, heads=[3, -1], scale=scale)
    point, seen = "blocks.1.attn.hook_pattern", list[Any]()
    for edit in (nullcontext(), without(model, "scaling", sites="blocks.1.ln1", scale=scale)):
        with edit:
            model.run_with_hooks(torch.tensor(tokens), fwd_hooks=[(point, lambda p, hook: seen.append(p[0, [3, 15]]))])
    assert list(picture.patterns) == ["intact", "scaling frozen"]
    for pattern, expected in zip(picture.patterns.values(), seen, strict=True):
        assert np.allclose(pattern, expected.detach(), atol=1e-6)
    key = picture.verdicts.query("head == 15 and intact == 'unselectable'").iloc[0]
    assert key["token"] == model.tokenizer.decode([5 + key["position"]])
    document = picture.document()
    content = unpacked(re.search(r'id="data">([^<]*)<', document)[1])  # type: ignore[index]
    assert content["count"] == 200
    panel = content["panels"][0]
    assert np.array_equal(panel["weights"], to_bytes(picture.patterns["intact"]).ravel())
    stuck = (
        picture.verdicts.assign(stuck=picture.verdicts["intact"] == "unselectable").groupby("position")["stuck"].sum()
    )
    for position, label in enumerate(panel["tokens"]):  # circuitsvis writes a token's index, which is its position
        assert ("⊘" in label) == (stuck[position] > 0)
    assert "⊘ by head: H3 " in document
    assert repr(picture) == "LayerAttention(layer 1, heads 3, 15, 200 tokens; intact, scaling frozen)"
    assert list(ln_probe.attention(model, tokens, 0, 2, edit=None).patterns) == ["intact"]
    assert ln_probe.attention(make_bridge("gemma2"), [tokens[0][:9]], 0, 2, edit=None).verdicts.empty, (
        "with a soft cap, unknown"
    )
    for options, word in (({"layer": 9}, "layer 9"), ({"layer": 0, "heads": 99}, "head 99")):
        with pytest.raises(ValueError, match=word):
            ln_probe.attention(model, tokens, **options)


# ------------------------------------------------------------------------------------------------------------ the index


def named(report: Report, name: str, step: int | None = None) -> Report:
    return replace(report, provenance={**report.provenance, "model": {"name": name, "step": step}})


def test_a_folder_of_reports_has_an_index(report: Report, tmp_path: Path) -> None:
    for name in ("a", "org/b"):
        named(report, name).save(tmp_path / name)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.json").write_text('{"format": 4}')
    html = write_index(tmp_path, {"bad": "ValueError: broken"}).read_text()
    assert 'href="org/b/report.html"' in html
    assert 'id="table-comparison"' in html
    assert "bad failed: ValueError: broken" in Page(html).text
    assert "old failed" in Page(html).text


def test_an_index_says_what_the_bundled_models_are(report: Report) -> None:
    assert set(BUNDLED) == set(ln_probe.bundled_models())
    text = Page(index_page([IndexEntry(n, f"{n}/report.html", named(report, n)) for n in BUNDLED])).text
    assert all(sentence in text for sentence in BUNDLED.values())


def test_an_index_of_checkpoints_is_drawn_over_training(report: Report) -> None:
    runs = [IndexEntry(f"m step {s}", f"{s}/report.html", named(report, "m", s)) for s in (0, 10)]
    assert 'id="training"' in index_page(runs)
    assert 'id="training"' not in index_page(runs[:1])


@pytest.mark.parametrize("most", [1, 2])
def test_the_forest_plot_shows_the_numbers_of_its_first_models(
    most: int, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "ROWS", most)
    figure = figures.forest(["a", "b"], [report, report])
    (row,) = report.causal.query("sites == 'all' and variant == 'no_scaling'").to_dict("records")
    drawn = [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert drawn.count(row["delta_loss"]) == most


def test_hostile_names_in_pages_without_scripts(report: Report, tmp_path: Path) -> None:
    entries = [IndexEntry(text, text, named(report, text) if i < 3 else None, text) for i, text in enumerate(HOSTILE)]
    cell = notebook_cell(replace(named(report, HOSTILE[0]), notes=tuple(HOSTILE)))
    both = ln_probe.compare([report] * 20, HOSTILE[:20])._repr_html_()
    for html in (index_page(entries), cell, both, lab_page(tmp_path, dict.fromkeys(HOSTILE, 1.0))):
        assert not Page(html).acts()
        assert not [c for c in UNSEEN if c in html]


def test_a_lab_page_holds_its_pictures(tmp_path: Path) -> None:
    html = lab_page(tmp_path, {"a": 1.0}, figures={"loss_by_step": figures.Figure((1, 1))})
    assert "Loss by step" in Page(html).text
    assert base64.b64encode((tmp_path / "loss_by_step.png").read_bytes()).decode() in html
