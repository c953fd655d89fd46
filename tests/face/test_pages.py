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
from ln_probe.page import attention, figures, own_script
from ln_probe.page import tables as page_tables
from ln_probe.page.index import IndexEntry, index_page, short_names, write_index
from ln_probe.page.page import notebook_cell, report_page
from ln_probe.page.tables import table
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
        raw[4:start], object_hook=lambda v: np.frombuffer(raw, np.uint8, v["n"], start + v["$"]) if "$" in v else v
    )


def cut(report: Report, tokens: int, heads: int, length: int) -> Report:
    """The report with attention of fewer or more tokens and heads."""
    shown = report.exhibits.attention
    names, weights = tuple(f"t{i}" for i in range(tokens)), np.tril(np.full((1, heads, tokens, tokens), 40, np.uint8))
    shown = replace(shown, tokens=names, length=length, layers=(0,), heads=tuple(range(heads)))
    shown = replace(shown, intact=weights, frozen=weights)
    return replace(report, exhibits=replace(report.exhibits, attention=shown))


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
    for text in one.findings():
        assert " ".join(text.split()) in " ".join(page.text.split())
        assert " ".join(text.split()) in " ".join(Page(cell).text.split())
    assert " 0 books" not in page.text
    assert all(300 <= int(width) <= 1400 for width in re.findall(r"--legible:(\d+)px", html)), "a phone to a screen"
    assert ("loss was not measured" in page.text) == (not len(one.tables["causal"]))
    expected = {"512 tokens": "the first 128 of 512 tokens", "another loss": "points", "no loss": "not measured"}
    assert expected.get(form, "") in page.text


def test_the_map_says_how_each_head_was_measured(report: Report) -> None:
    ends = {"delta_loss_low": 0.01, "delta_loss_high": 0.04, "estimate": 0.02}
    rows = [
        {"layer": 0, "head": 0, "delta_loss": 0.02, "p": 0.001, "n": 64, **ends},
        {"layer": 0, "head": 1, "delta_loss": -0.003, "p": 0.5, "n": 64},
        {"layer": 0, "head": 2, "delta_loss": 0.05, "p": 0.0009, "n": 64},
        {"layer": 1, "head": 0, "delta_loss": math.nan, "estimate": 0.2},
        {"layer": 1, "head": 1, "delta_loss": 0.0002},
    ]
    one = cut(effects(report, rows), 3, 2, 3)  # attention of heads 0 and 1 of layer 0
    heads = attention.head_map(one)
    assert [[cell.name for cell in row] for row in heads.rows] == [[f"L{i}H{h}" for h in range(3)] for i in (1, 0)]
    assert {cell.name: (cell.classes, cell.what, cell.shown) for cell in heads.cells} == {
        "L0H0": ("more3 significant",
                 "Layer 0, head 0 (q, k, v): +0.020 nats/token (95 % CI +0.010 to +0.040); p = 0.001", True),
        "L0H1": ("less2 pale", "Layer 0, head 1 (q, k, v): -0.003 nats/token; p = 0.5", True),
        "L0H2": ("more4 significant", "Layer 0, head 2 (q, k, v): +0.05 nats/token; p < 0.001", False),
        "L1H0": ("more5 pale estimate", "Layer 1, head 0 (q, k, v): +0.2 nats/token; first-order estimate", False),
        "L1H1": ("more0 pale", "Layer 1, head 1 (q, k, v): +0.0002 nats/token; not tested, 6 prompts", False),
        "L1H2": ("unknown", "Layer 1, head 2 (q, k, v): not measured", False),
    }  # fmt: skip
    assert [cell.name for cell in heads.top] == ["L0H2", "L0H0"]
    assert heads.first is not None
    assert heads.first.name == "L0H0", "of the largest, one whose attention is shown"
    scale = list(enumerate(attention.STEPS, start=1))
    assert list(heads.legend) == [
        *((f"less{i}", f"−{step:g}") for i, step in scale[::-1]), ("more0", "0"),
        *((f"more{i}", f"+{step:g}") for i, step in scale), ("more4 significant", "outlined: significant"),
        ("more4 pale", "pale: not significant or not tested, 6 prompts"),
        ("more4 pale estimate", "hatched: first-order estimate, not tested"), ("unknown", "grey: not measured"),
    ]  # fmt: skip
    untested = replace(one, tables={**one.tables, "head_effects": one.head_effects.assign(p=0.5)})
    heads = attention.head_map(untested)
    assert [cell.name for cell in heads.top] == ["L1H0", "L0H2", "L0H0", "L0H1", "L1H1"]
    assert dict(heads.legend)["more4 pale"] == "pale: not significant"
    points = replace(untested, provenance={**one.provenance, "loss": {"unit": "points"}})
    assert {cell.name: cell.step for cell in attention.head_map(points).cells} == {
        "L0H0": 3, "L0H1": -1, "L0H2": 3, "L1H0": 5, "L1H1": 0, "L1H2": 0,
    }, "the last colour begins at the largest change"  # fmt: skip
    assert attention.head_map(effects(one, [])).legend == (("unknown", "not measured"),)


def test_tables_of_a_page_hold_text_and_six_digits(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "DATA_ROWS", 100)
    shown = table(report.declared["keys"], report.keys.assign(attainable=math.nan))
    assert (shown.rows, shown.sent, shown.columns) == (len(report.keys), 100, len(report.keys.columns) - 1)
    content = unpacked(shown.data)
    assert content["data"]["verdict"] == report.keys["verdict"][:100].tolist()
    assert content["data"]["margin_upper"] == [float(f"{value:.6g}") for value in report.keys["margin_upper"][:100]]
    declared = report.declared["causal"]
    frame = declared.frame([{"sites": "all", "loss": 4.0}, {"sites": "mlp", "p": math.inf, "n": 3}])
    shown = table(declared, frame.astype({"variant": object}), loss="points", links=["a", "b"])
    assert [name for name, _ in shown.meanings] == ["sites", "loss", "p", "n"]
    assert dict(shown.meanings)["loss"].endswith("(points)")
    assert dict(shown.meanings)["n"] == declared.columns["n"][1]
    assert unpacked(shown.data)["data"] == {
        "sites": ["all", "mlp"], "loss": [4, None], "p": [None, None], "n": [None, 3],
    }  # fmt: skip


def test_what_a_page_says_of_its_report(report: Report) -> None:
    row = report.causal.iloc[0]
    loss = f"intact loss {row['loss'] - row['delta_loss']:.3g} nats/token"
    shape = f"2 layers of 4 heads · norms: 5 layernorm · 1 prompt (tokens), 24 tokens · {loss}"
    rows = dict(re.findall(r'<th scope="row">([^<]*)</th><td class="wide">([^<]*)</td>', report_page(report)))
    assert rows["arguments · probes"] == ", ".join(report.provenance["arguments"]["probes"])
    assert rows["constants · ln_final · rest"] == f"{report.provenance['constants']['ln_final']['rest']:.6g}"
    named = replace(report, provenance={"model": {"name": "/runs/last/"}})
    for one, facts, parts in (
        (report, shape, ("keys are of the first 1 of them", "other than prompt 0.")),
        (cut(report, 3, 2, 5), shape, ("keys are of the first 1 of them", "other than prompt 0, and tokens after 3.")),
        (named, f"/runs/last/ · {loss}", ("Losses are of 0 prompts.", "other than prompt 0.")),
    ):
        html = report_page(one)
        assert f'<p class="soft">{facts}</p>' in html
        limits = html.partition('id="limits"')[2].partition("<li>Whether one head")[0]
        assert limits.count("<li>") == len(parts)
        assert all(part in limits for part in parts)
    assert "<h1>last " in html


def marks(axes: Any) -> list[tuple[str, float, float, float | None]]:
    """Marker, place and opacity of every mark."""
    points = [line for line in axes.lines if line.get_marker() != "None"]
    return [(p.get_marker(), float(x), round(float(y), 6), p.get_alpha()) for p in points for x, y in p.get_xydata()]


def legend_of(figure: figures.Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_changes_are_drawn_with_their_intervals(report: Report, causal: pd.DataFrame) -> None:
    causal = causal.assign(delta_loss_optimal=causal["delta_loss"] / 2)
    books = [
        {"prompt": i, "stratum": "ab"[i % 2], "sites": "all", "variant": "no_scaling", "loss": 4.0, "n": 1}
        | {"delta_loss": float(i), "shift": 0.0} for i in range(4)
    ]  # fmt: skip
    given = {"causal": causal, "causal_prompts": report.declared["causal_prompts"].frame(books)}
    figure = figures.loss_changes(Report(report.tables | given, report.provenance))
    (axes,) = figure.axes
    _, *intervals = [lines.get_segments() for lines in axes.collections]
    rows = causal[causal["family"] == "primary"].set_index(["sites", "variant"])
    ends = [rows.loc[place, ["delta_loss_low", "delta_loss_high"]].tolist() for place in PRIMARY]
    assert [segments[0][:, 0].tolist() for segments in intervals] == ends
    expected, values = [], []
    for place, (sites, variant) in enumerate(PRIMARY):
        change, significant = rows.loc[(sites, variant), "delta_loss"], variant == "no_scaling"
        opacity = 1.0 if significant else figures.PALENESS
        expected += [("o", change, place, opacity), ("o", change / 2, place + 0.16, opacity)]
        expected += [("|", 1.0, 0.3, None), ("|", 2.0, 0.3, None)] * (not place)  # means of the books
        values.append((f"{change:+.3f}", "bold" if significant else "normal"))
    assert marks(axes) == expected
    assert [(text.get_text(), text.get_weight()) for text in axes.texts if text.get_ha() == "right"] == values
    faces = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"]
    assert [face == "none" for face in faces] == [False, True] * len(PRIMARY), "loss-optimal constants are hollow"
    assert legend_of(figure) == ["mean constants", "loss-optimal constants", "one book", "pale: not significant"]
    assert axes.get_ylim()[0] > len(PRIMARY) - 0.84 > -0.2 > axes.get_ylim()[1]
    for values, text in (
        ({"delta_loss": 0.0, "delta_loss_low": 0.0, "delta_loss_high": 0.0}, ["unchanged"]),
        ({"p": math.nan}, ["+0.300, not tested"]), ({"delta_loss": math.nan}, []),
    ):  # fmt: skip
        assert [c.text for c in figures.contrasts(Report({"causal": causal.assign(**values)}))[:1]] == text


def test_each_panel_over_training_shows_the_changes_of_its_edit(report: Report) -> None:
    figure = figures.loss_over_training({"run": [(0, report), (1000, report), (100, Report())]})
    changes = report.causal[report.causal["sites"] == "all"].set_index("variant")["delta_loss"]
    for axes, variant in zip(figure.axes, ("no_scaling", "no_projection"), strict=True):
        assert axes.lines[0].get_ydata() == [0, 0]
        assert axes.lines[1].get_xydata().tolist() == [[0, changes[variant]], [1000, changes[variant]]]
        assert [mark[1:3] for mark in marks(axes)] == [(step, round(changes[variant], 6)) for step in (0, 1000)]
        assert axes.xaxis.get_transform().linthresh == 100


def test_norms_and_keys_are_drawn_over_the_depth(report: Report) -> None:
    shares, sigmas = figures.norms_over_depth(report).axes
    for axes, column in ((shares, "projected_share"), (sigmas, "sigma_mean")):
        assert [mark[1:3] for mark in marks(axes)] == list(enumerate(report.layernorms[column].round(6)))
    low, high = sigmas.get_ylim()
    assert [tick for tick in sigmas.get_yticks() if low < tick < high] == [0.5, 1, 2, 5], "of a logarithmic axis"
    assert [text.get_text() for text in shares.get_yticklabels()][:3] == ["1 %", "2 %", "3 %"], "within one decade"
    first_none = report.layernorms["projected_share"].where(lambda s: s.index > 0, 0.0)
    norms = report.layernorms.assign(projected_share=first_none)
    axes = figures.norms_over_depth(replace(report, tables={**report.tables, "layernorms": norms})).axes[0]
    low, high = axes.get_ylim()
    assert sum(low < tick < high for tick in axes.get_yticks()) >= 2, "over twelve decades"
    shares = report.heads["head"] ** 2 / 10_000  # the last 0.09 %
    few = report.heads.assign(unselectable=shares.where(report.heads["variant"].isin(["intact", "no_scaling"]), 0.5))
    axes = figures.keys_over_depth(replace(report, tables={**report.tables, "heads": few})).axes[0]
    places = [(marker, layer + shift) for marker, shift in (("o", -0.1), ("s", 0.1)) for layer in (0, 1)]
    assert [mark[:3] for mark in marks(axes)] == [(marker, x, 0.00025) for marker, x in places]
    assert [c.get_segments()[0].tolist() for c in axes.collections] == [[[x, 0], [x, 0.0009]] for _, x in places]
    assert (axes.get_ylim()[0], axes.get_ylim()[1] >= 0.01) == (0, True), "small shares look small"
    keys = {**report.provenance["selectability"], "random_unselectable": 0.25, "keys_per_prompt": 8}
    of_random_keys = replace(report, provenance={**report.provenance, "selectability": keys})
    upper, lower = figures.keys_over_depth(of_random_keys).axes
    for axes, level in ((upper, 0.25), (lower, 1 / 8)):  # random keys, uniform attention
        levels = [y for line in axes.lines for y in line.get_ydata() if line.get_linestyle() in (":", "--")]
        assert levels == [level] * 2


def test_the_page_holds_every_weight_of_every_head(report: Report) -> None:
    shown = report.exhibits.attention
    content = unpacked(attention.attention_data(report)["data"])
    rows, columns = np.tril_indices(len(shown.tokens))
    shape = (len(shown.layers), len(shown.heads), len(rows))
    intact = content["intact"].reshape(shape)
    assert np.array_equal(intact, shown.intact[..., rows, columns])
    frozen = intact + content["change"].reshape(shape)  # in 8 bits
    assert np.array_equal(frozen, shown.frozen[..., rows, columns])
    same = {"tokens": list(shown.tokens), "layers": [0, 1], "heads": [0, 1, 2, 3], "causal": True}
    assert {name: content[name] for name in same} == same
    both_ways = replace(report, exhibits=Exhibits(replace(shown, causal=False)))
    content = unpacked(attention.attention_data(both_ways)["data"])
    assert np.array_equal(content["intact"].reshape(shown.intact.shape), shown.intact)


def test_the_text_is_coloured_by_the_change_of_each_tokens_loss(report: Report) -> None:
    data, losses = attention.token_data(report), report.tokens(n=None).query("prompt == 0")
    content, full = unpacked(data["colored"]), losses["no_scaling"].abs().quantile(0.98)
    assert content["values"] == losses["no_scaling"].round(4).tolist()
    assert (content["tokens"], content["full"]) == (losses["token"].tolist(), pytest.approx(full))
    assert data["colored_about"] == f"prompt 0, after its first token; colours are full at ±{full:.2g} nats"
    long = pd.concat([losses.assign(prompt=3, no_scaling=0.0)] * 9 + [losses.assign(prompt=4)])
    data = attention.token_data(replace(report, exhibits=Exhibits(token_losses=long)))
    assert data["colored_about"].startswith("the first 128 tokens of prompt 3, ")
    assert unpacked(data["colored"])["full"] == 1
    assert len(unpacked(data["colored"])["values"]) == 128


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
    titles = []
    for panel, (label, pattern) in zip(content["panels"], picture.patterns.items(), strict=True):
        assert panel["names"] == ["H3", "H15"]
        assert np.array_equal(panel["weights"], to_bytes(pattern).ravel())
        stuck = picture.verdicts[label].isin(["unselectable", "duplicate"]).to_numpy().reshape(2, 200)
        titles.append(f"{label.capitalize()}. ⊘ by head: H3 {stuck[0].sum()}, H15 {stuck[1].sum()}")
        # circuitsvis writes a token's index, which is its position
        endings = [("", "⊘1", "⊘")[n] for n in stuck.sum(0)]
        expected = [attention.axis_label(t) + end for t, end in zip(picture.tokens, endings, strict=True)]
        assert panel["tokens"] == expected
    assert re.findall(r"<figcaption>([^<]*)<", document) == titles
    weights = np.stack(list(picture.patterns.values()))
    assert content["full"] == pytest.approx(np.quantile(weights[weights > 0], 0.995))
    assert (content["least"], content["causal"]) == (pytest.approx(content["full"] / 20), True)
    few = ln_probe.attention(model, [tokens[0][:9]], layer=-1, heads=2, edit=None)
    content = unpacked(re.search(r'id="data">([^<]*)<', few.document())[1])  # type: ignore[index]
    assert (few.layer, few.heads, content["least"]) == (3, (2,), 0)
    assert repr(picture) == "LayerAttention(layer 1, heads 3, 15, 200 tokens; intact, scaling frozen)"
    assert list(ln_probe.attention(model, tokens, 0, 2, edit=None).patterns) == ["intact"]
    capped = ln_probe.attention(make_bridge("gemma2"), [tokens[0][:9]], 0, 2, edit=None)
    assert capped.verdicts.empty, "with a soft cap, unknown"
    for options, word in (({"layer": 9}, "layer 9"), ({"layer": 0, "heads": 99}, "head 99")):
        with pytest.raises(ValueError, match=word):
            ln_probe.attention(model, tokens, **options)


def named(report: Report, name: str, step: int | None = None) -> Report:
    return replace(report, provenance={**report.provenance, "model": {"name": name, "step": step}})


def test_a_folder_of_reports_has_an_index(report: Report, tmp_path: Path) -> None:
    for name in ("a", "org/b"):
        named(report, name).save(tmp_path / name)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.json").write_text('{"format": 4}')
    for step in (100, 20):
        named(report, "a", step).save(tmp_path / f"a{step}")
    html = write_index(tmp_path, {"bad": "ValueError: broken"}).read_text()
    assert re.findall(r'<dt><a href="([^"]*)">([^<]*)</a>', html) == [
        (f"{path}/report.html", name)
        for path, name in (("a", "a"), ("a20", "a step 20"), ("a100", "a step 100"), ("org/b", "org/b"))
    ]
    assert html.count('class="heads"') == 4
    assert 'href="org/b/report.html"' in html
    assert 'id="table-comparison"' in html
    assert "bad failed: ValueError: broken" in Page(html).text
    assert "old failed" in Page(html).text


def test_an_index_of_checkpoints_is_drawn_over_training(report: Report) -> None:
    runs = [IndexEntry(f"m step {s}", f"{s}/report.html", named(report, "m", s)) for s in (0, 10)]
    assert 'id="training"' in index_page(runs)
    assert 'id="training"' not in index_page(runs[:1])
    assert short_names(["/x/run step 5", "/x/run step 10", "gpt2"]) == ["run step 5", "run step 10", "gpt2"]
    assert short_names(["/x/a/run", "/x/b/run", "o/m"]) == ["a/run", "b/run", "o/m"]


@pytest.mark.parametrize("most", [1, 2])
def test_the_forest_plot_shows_the_numbers_of_its_first_models(
    most: int, report: Report, causal: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "ROWS", most)
    (axes,) = figures.forest(["a", "b"], [replace(report, tables={"causal": causal}), Report()]).axes
    assert marks(axes) == [("o", 0.3, 0.0, 1.0), ("o", -0.01, 0.2, figures.PALENESS)]
    texts = [("a", "normal"), ("+0.300", "bold"), ("b", "normal"), ("not measured", "normal")][: 2 * most]
    assert [(text.get_text(), text.get_weight()) for text in axes.texts] == texts


def test_hostile_names_in_pages_without_scripts(report: Report, tmp_path: Path) -> None:
    entries = [IndexEntry(text, text, named(report, text) if i < 3 else None, text) for i, text in enumerate(HOSTILE)]
    cell = notebook_cell(replace(named(report, HOSTILE[0]), notes=tuple(HOSTILE)))
    both = ln_probe.compare([report] * 20, HOSTILE[:20])._repr_html_()
    for html in (index_page(entries), cell, both, lab_page(tmp_path, dict.fromkeys(HOSTILE, 1.0))):
        assert not Page(html).acts()
        assert not [c for c in UNSEEN if c in html]


def test_names_on_axes_are_cut_in_the_middle() -> None:
    whole, longer = "m" * figures.LABEL, "a" + "m" * 30 + "z"
    assert figures.axis_text(whole) == whole
    assert re.fullmatch("am+…m+z", figures.axis_text(longer))


def test_a_lab_page_holds_its_pictures_and_its_table(tmp_path: Path) -> None:
    html = lab_page(tmp_path, {"None": 1.0}, figures={"loss_by_step": figures.Figure((1, 1))})
    assert "Loss by step" in Page(html).text
    assert base64.b64encode((tmp_path / "loss_by_step.png").read_bytes()).decode() in html
    rows = unpacked(re.search(r'class="rows">([^<]*)<', html)[1])["data"]  # type: ignore[index]
    assert (rows["norm"], rows["mean"]) == (["None"], [1])
