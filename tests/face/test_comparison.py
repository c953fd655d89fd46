"""Reports side by side, and the index that compares their losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_up import HOSTILE, Page

import ln_probe
from ln_probe.analyses.probes.columns import CAUSAL_PROMPTS
from ln_probe.comparison import labels, paired, run_of, step_of
from ln_probe.page import index
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.report import Report


def named(report: Report, name: str, **model: Any) -> Report:
    return replace(report, provenance={**report.provenance, "model": {"name": name, **model}})


@pytest.fixture(scope="module")
def models(causal: pd.DataFrame) -> list[Report]:
    """Three models on the same 40 prompts, which differ much from one another: their losses change by 0.1 more from
    model to model, to within 0.01; two of one run."""
    generator = np.random.default_rng(0)
    hard = generator.lognormal(0, 1, 40)
    place = {"prompt": range(40), "group": range(40), "sites": "all", "variant": "no_scaling"}
    unknown = dict.fromkeys(CAUSAL_PROMPTS.names[7:], 0.0)
    found = []
    for i in range(3):
        changes = hard + 0.1 * i + generator.normal(0, 0.01, 40)
        rows = pd.DataFrame(place | {"predicted": 10, "loss": 4.0, "delta_loss": changes} | unknown)
        model = {"name": "run", "step": 1000 * i} if i else {"name": "one"}
        provenance = {"model": model, "prompts": {"sha256": "x"}}
        found.append(Report({"causal_prompts": CAUSAL_PROMPTS.check(rows), "causal": causal}, provenance))
    return found


def test_an_index_keeps_what_it_shows(report: Report) -> None:
    """The page is the same, while the tables that it does not read are let go."""
    whole = [IndexEntry(name, f"{name}.html", named(report, name)) for name in ("a", "b")]
    kept = [replace(e, report=index.for_index(named(report, e.name), i)) for i, e in enumerate(whole)]
    assert index_page(kept) == index_page(whole)
    assert len(report.keys) > len(kept[0].report.keys) == 0
    assert index.for_index(report, index.MOST).exhibits.attention == ()


def test_tables_stand_side_by_side(report: Report) -> None:
    moved = report.with_tables(heads=report.heads.assign(margin_median=report.heads["margin_median"] + 1))
    both = ln_probe.compare([named(report, "a"), named(moved, "b")])
    assert list(both.causal["delta_loss"].columns) == ["a", "b"]
    assert both.names == ("a", "b")
    wide = both.heads["margin_median"]
    assert list(wide.columns) == ["a", "b"]
    assert np.allclose((wide["b"] - wide["a"]).dropna(), 1)
    row = report.heads.iloc[7]
    assert wide.loc[(row["layer"], row["head"], row["space"], row["variant"]), "a"] == row["margin_median"]
    assert list(both.layernorms.index) == list(report.layernorms["site"])
    assert len(both.keys) == len(report.keys)
    assert repr(both) == "Comparison('a', 'b')"


def test_models_of_different_shape(report: Report, long_report: Report) -> None:
    both = ln_probe.compare([named(report, "small"), named(long_report, "deep")])
    share = both.layernorms["mean_share"]
    assert share["small"].notna().sum() == len(report.layernorms)
    assert share["deep"].notna().sum() == len(long_report.layernorms)
    assert len(share) == len(set(report.layernorms["site"]) | set(long_report.layernorms["site"]))
    summary = both.summary.set_index("model")
    inside = long_report.heads.query("space == 'head' and variant == 'intact'")
    assert summary.loc["deep", "unselectable"] == inside["unselectable"].sum() / inside["keys"].sum()
    assert summary.loc["deep", "margin"] == inside["margin_median"].median()
    assert "deep" in both._repr_html_()
    assert len(both._repr_html_()) < 150_000


def test_prompts_of_a_group_count_once(models: list[Report]) -> None:
    """Every prompt twice: as one group each, intervals and sign test are what they were; as two, they are narrower."""
    once = ln_probe.compare(models[:2])

    def twice(grouped: bool) -> ln_probe.Comparison:
        made = []
        for report in models[:2]:
            rows = report.causal_prompts
            again = rows.assign(prompt=rows["prompt"] + 40, group=rows["group"] + (0 if grouped else 40))
            made.append(report.with_tables(causal_prompts=pd.concat([rows, again], ignore_index=True)))
        return ln_probe.compare(made)

    same = ["difference", "low", "high", "p_mean", "p_sign"]
    pd.testing.assert_frame_equal(twice(grouped=True).paired[same], once.paired[same])
    loss = [c for c in once.summary if c.startswith("loss_difference")]
    pd.testing.assert_frame_equal(twice(grouped=True).summary[loss], once.summary[loss])
    widths = [(c.paired["high"] - c.paired["low"]).item() for c in (once, twice(grouped=False))]
    assert widths[1] < 0.8 * widths[0]


def test_names_are_labels(report: Report) -> None:
    reports = [
        named(report, "p", revision="step0"),
        named(report, "p", revision="step1000"),
        named(report, "q"),
        named(report, "q"),
        named(report, "p", revision="main"),
    ]
    assert labels(reports) == ("p step 0", "p step 1000", "q", "q (2)", "p")
    assert ln_probe.compare(reports).names == labels(reports)


@pytest.mark.parametrize(("name", "model", "run", "step"), [
    *(("m", model, "m", step) for model, step in (
        ({"step": 5}, 5), ({"revision": "step143000"}, 143000), ({"revision": "1000"}, 1000), ({}, None),
        ({"revision": "main"}, None), ({"revision": None}, None), ({"revision": "v1.2"}, None),
        ({"step": 0, "revision": "step9"}, 0))),
    ("/a/run/checkpoint-500", {}, "/a/run", 500), ("run/step30", {}, "run", 30), ("step30", {}, "step30", None),
    ("/a/run/final", {}, "/a/run/final", None), ("owner/model", {}, "owner/model", None),
])  # fmt: skip
def test_training_steps(name: str, model: dict[str, Any], run: str, step: int | None) -> None:
    found = named(Report(), name, **model)
    assert (run_of(found), step_of(found)) == (run, step)


@pytest.fixture(scope="module")
def drawn(report: Report) -> Report:
    """What an index draws over depth and training, alone."""
    return Report({"layernorms": report.layernorms, "heads": report.heads}, report.provenance)


def test_the_index_draws_training_over_steps_and_models_over_depth(drawn: Report) -> None:
    runs = [named(drawn, "p", revision=f"step{s}") for s in (0, 10, 1000)]
    entries = [IndexEntry(n, f"{i}/report.html", r) for i, (n, r) in enumerate(zip("abc", runs, strict=True))]
    page = Page(index_page([*entries, IndexEntry("other", "o/report.html", named(drawn, "other"))]))
    ids = {a.get("id") for t, a in page.tags if t == "figure"}
    assert {"training-margin_median", "depth-margin_median", "training-entropy_ratio"} <= ids
    assert {"training step", "depth"} <= set(page.text.split("\n")) or "training step" in page.text
    unbounded = drawn.heads.assign(margin_median=drawn.heads["margin_median"].where(drawn.heads["head"] == -1))
    without = Page(index_page([IndexEntry("x", "x/report.html", drawn.with_tables(heads=unbounded))]))
    assert "depth-margin_median" not in {a.get("id") for t, a in without.tags if t == "figure"}
    alone = Page(index_page([IndexEntry("other", "o/report.html", named(drawn, "other", revision="step5"))]))
    assert not [a for t, a in alone.tags if t == "figure" and (a.get("id") or "").startswith("training")]


@pytest.mark.slow
def test_many_models_are_cut_and_it_is_said(report: Report) -> None:
    heads = report.heads[report.heads["layer"] == 0]
    small = Report({"layernorms": report.layernorms, "heads": heads}, report.provenance)
    page = Page(index_page([IndexEntry(f"m{i}", f"m{i}/report.html", small) for i in range(30)]))
    assert "The first 24 of 30 models are drawn." in page.text
    assert all(f"m{i}" in page.text for i in range(30))


def test_one_page_for_all(models: list[Report], tmp_path: Path) -> None:
    path = ln_probe.compare(models[:2]).to_html(tmp_path / "x" / "both.html")
    assert "<svg" in path.read_text()


def test_bad_input(report: Report) -> None:
    with pytest.raises(ValueError, match="nothing to compare: give at least one report"):
        ln_probe.compare([])
    with pytest.raises(TypeError, match="compare takes a list of reports, got one NoneType"):
        ln_probe.compare(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"compare takes reports, got str: load one with ln_probe\.load_report"):
        ln_probe.compare(["out/gpt2"])  # type: ignore[list-item]
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="names must be 2 different ones, one per report, got"):
            ln_probe.compare([report, report], names)
    wrong: dict[str, Any] = {"a list of texts, one per report, got 3": 3, "got 'ab'": "ab", "got None": [None, "b"]}
    for said, names in wrong.items():
        with pytest.raises(TypeError, match=said):
            ln_probe.compare([report, report], names)
    empty = Report()
    assert np.isnan(ln_probe.compare([empty]).summary.loc[0, "margin"])


def test_differences_are_paired_by_prompt(models: list[Report]) -> None:
    """Of prompts that differ much from one another, and of models that differ little."""
    kept = [m.tables["causal_prompts"]["delta_loss"] for m in models]
    (row,) = ln_probe.compare(models[:2]).paired.to_dict("records")
    assert row["difference"] == pytest.approx(np.mean(kept[1] - kept[0]))
    assert 0.09 < row["low"] < row["difference"] < row["high"] < 0.11  # unpaired, it would be ten times wider than that
    assert (row["model"], row["against"], row["prompts"], row["prompts_more"]) == ("run", "one", 40, 40)
    assert row["p_mean"] < 0.001


@pytest.mark.parametrize(("change", "same_loss", "said"), [
    ({"prompts": {"sha256": "another"}}, False, "b: measured on other prompts than a"),
    ({"loss": {"name": "my:accuracy", "unit": "units of my:accuracy"}}, False, "b: measured by another loss than a"),
    ({"arguments": {"layers": [0]}}, True, "b: measured in other layers than a"),
])  # fmt: skip
def test_only_what_is_comparable_is_paired(
    change: dict[str, Any], same_loss: bool, said: str, models: list[Report]
) -> None:
    other = replace(models[1], provenance={**models[1].provenance, **change})
    both = ln_probe.compare([models[0], other], ["a", "b"])
    assert not len(both.paired)
    assert both.summary["loss_difference"].notna().tolist() == [False, same_loss]
    assert said in both.notes[0]
    assert said in both._repr_html_()
    assert ln_probe.compare(models[:2]).notes == ()


def test_folders_are_named_by_what_tells_them_apart() -> None:
    from ln_probe.page.index import short_names

    assert short_names(["/a/run layernorm · step0", "/a/run none · step0", "gpt2", "org/gpt2"]) == [
        "run layernorm · step0",
        "run none · step0",
        "gpt2",
        "org/gpt2",
    ]
    assert short_names(["/a/one/model", "/b/two/model", "/a/one/model"]) == ["one/model", "two/model", "one/model"]
    assert short_names(["/a/model", "model"]) == ["/a/model", "model"], "two names never become one"
    assert short_names(["/a/b", "/b"]) == ["a/b", "/b"]
    assert short_names(["/a · b/x · step1", "/a · b/y"]) == ["x · step1", "y"]
    assert short_names([]) == []


def test_long_names_on_an_axis_keep_both_ends() -> None:
    from ln_probe.page.figures import axis_text

    first, second = (axis_text(f"EleutherAI/pythia-70m-deduped · step{n}") for n in (0, 143000))
    assert first != second
    assert second.endswith("step143000")
    assert len(second) <= 24


# ------------------------------------------------------------------------------------------------------------ the index


def test_d5_an_index_draws_no_axis_of_zeros(drawn: Report) -> None:
    zero = drawn.with_tables(heads=drawn.heads.assign(unselectable_fraction=0.0))
    html = index_page([IndexEntry("a", report=zero), IndexEntry("b", report=zero)])
    assert "0 in every model, layer and variant." in Page(html).text
    assert "depth-unselectable-fraction-title" not in html
    assert "depth-margin-median-title" in html


def test_the_index_is_a_comparison_of_losses(models: list[Report]) -> None:
    html = index_page([IndexEntry(f"m{i}", f"m{i}/report.html", r) for i, r in enumerate(models)])
    page = Page(html)
    for name in ("losses", "paired", "losses-training"):
        assert f'id="{name}"' in html
    assert html.count('id="paired-') >= 3, "every model can be the baseline"
    assert "Change of the loss minus its change in m1, paired by prompt" in page.text
    assert html.index('id="losses"') < html.index('id="table-comparison"')


def test_the_forest_plot_shows_the_tables_numbers(models: list[Report]) -> None:
    rows = index.losses(["a", "b", "c"], models)
    figure = index.forest(["a", "b", "c"], rows)
    scaling = figure.axes[0]
    filled = scaling.lines[0]
    assert list(filled.get_xdata()) == [0.3] * 3
    (bars, *_) = scaling.collections
    assert [tuple(s[:, 0]) for s in bars.get_segments()] == [(pytest.approx(0.28), pytest.approx(0.33))] * 3
    for baseline, expected in ((0, [0.1, 0.2]), (2, [-0.2, -0.1])):
        table = paired(["a", "b", "c"], models, baseline)
        assert list(table["difference"]) == pytest.approx(expected, abs=0.01)
        assert set(table["against"]) == {"abc"[baseline]}
        drawn = index.differences(["a", "b", "c"], table)
        assert list(drawn["place"]) == [i for i in range(3) if i != baseline]
        assert list(drawn["value"]) == list(table["difference"])
    steps = index.over_steps(rows, [None, 1000, 2000], ["one", "run", "run"])
    assert list(steps.axes[0].lines[0].get_xdata()) == [1000, 2000]


def test_an_index_without_losses_says_so(report: Report) -> None:
    blank = Report({"layernorms": report.layernorms}, report.provenance)
    assert "No model here was measured with a term removed" in Page(index_page([IndexEntry("a", report=blank)])).text


@pytest.mark.slow
def test_hostile_names_in_forest_plots(models: list[Report]) -> None:
    for start in range(0, len(HOSTILE), 40):
        some = HOSTILE[start : start + 40]
        html = index_page([IndexEntry(t, f"{i}", models[i % 3]) for i, t in enumerate(some)])
        page = Page(html)
        assert sum(t == "script" for t, _ in page.tags) <= 3
        assert not page.acts()
        assert not [t for t, _ in page.tags if t == "iframe"]
