"""Reports side by side, and the index that compares their losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ln_probe
from ln_probe.analyses.probes.statistics import holm, infer_mean
from ln_probe.analyses.probes.tables import CAUSAL_PROMPTS
from ln_probe.comparison import labels, run_of, step_of
from ln_probe.page import figures
from ln_probe.report import Report


def named(report: Report, name: str, **model: Any) -> Report:
    return replace(report, provenance={**report.provenance, "model": {"name": name, **model}})


@pytest.fixture(scope="module")
def models(causal: pd.DataFrame) -> list[Report]:
    """Three models on the same 40 prompts, which differ much from one another: their losses change by 0.1 more from
    model to model, to within 0.01; two of one run."""
    generator = np.random.default_rng(0)
    hard = generator.lognormal(0, 1, 40)
    place = {"prompt": range(40), "stratum": "", "sites": "all", "variant": "no_scaling"}
    found = []
    for i in range(3):
        changes = hard + 0.1 * i + generator.normal(0, 0.01, 40)
        rows = pd.DataFrame(place | {"loss": 4.0, "delta_loss": changes, "shift": 0.0, "n": 10})
        model = {"name": "run", "step": 1000 * i} if i else {"name": "one"}
        provenance = {"model": model, "prompts": {"sha256": "x"}}
        found.append(Report({"causal_prompts": CAUSAL_PROMPTS.check(rows), "causal": causal}, provenance))
    return found


def test_heads_stand_side_by_side(report: Report) -> None:
    heads = report.heads.assign(margin_median=report.heads["margin_median"] + 1)
    moved = replace(report, tables={**report.tables, "heads": heads})
    both = ln_probe.compare([named(report, "a"), named(moved, "b")])
    assert both.names == ("a", "b")
    wide = both.by_head["margin"]
    assert list(wide.columns) == ["a", "b"]
    assert np.allclose((wide["b"] - wide["a"]).dropna(), 1)
    row = report.by_head().dropna(subset=["margin"]).iloc[3]
    assert wide.loc[(row["layer"], row["head"]), "a"] == row["margin"]
    assert repr(both) == "Comparison('a', 'b')"
    assert list(both.figure().tips.values()) == list(figures.forest(both.names, both.reports).tips.values())


def test_models_of_different_shape(report: Report, long_report: Report) -> None:
    both = ln_probe.compare([named(report, "small"), named(long_report, "deep")])
    heads = both.by_head["entropy_ratio"]
    assert [heads[name].notna().sum() for name in both.names] == [len(r.by_head()) for r in both.reports]
    summary = both.summary.set_index("model")
    inside = long_report.heads.query("variant == 'intact'")
    keys = long_report.keys.query("variant == 'intact'")
    assert summary.loc["deep", "unselectable"] == pytest.approx((keys["verdict"] == "unselectable").mean())
    assert summary.loc["deep", "margin"] == inside["margin_median"].median()
    assert "deep" in both._repr_html_()
    assert len(both._repr_html_()) < 150_000
    assert both._repr_html_().count("<svg") == 1


def test_the_difference_of_losses_is_a_mean_over_tokens(models: list[Report]) -> None:
    rows = models[1].causal_prompts.assign(n=lambda rows: 1 + rows["prompt"] % 3)
    other = rows.assign(loss=rows["loss"] + 0.1 * rows["prompt"])
    both = [replace(m, tables={**m.tables, "causal_prompts": r}) for m, r in zip(models, (rows, other), strict=False)]
    each = rows.drop_duplicates("prompt")
    expected = np.average(0.1 * each["prompt"], weights=each["n"])
    summary = ln_probe.compare(both).summary
    assert summary["loss_difference"][1] == pytest.approx(expected, rel=1e-6)
    assert summary["loss"][1] == pytest.approx(4.0 + expected)


def test_names_are_labels(report: Report) -> None:
    reports = [
        named(report, "p", revision="step0"), named(report, "p", revision="step1000"),
        named(report, "q"), named(report, "q"), named(report, "p", revision="main"),
    ]  # fmt: skip
    assert labels(reports) == ("p step 0", "p step 1000", "q", "q (2)", "p")
    assert ln_probe.compare(reports).names == labels(reports)


@pytest.mark.parametrize(("name", "model", "run", "step"), [
    *(("m", model, "m", step) for model, step in (
        ({"step": 5}, 5), ({"revision": "step143000"}, 143000), ({"revision": "20240101"}, None), ({}, None),
        ({"revision": "main"}, None), ({"revision": None}, None), ({"revision": "v1.2"}, None),
        ({"step": 0, "revision": "step9"}, 0))),
    ("/a/run/checkpoint-500", {}, "/a/run", 500), ("run/step30", {}, "run", 30), ("step30", {}, "step30", None),
    ("/a/run/final", {}, "/a/run/final", None), ("owner/model", {}, "owner/model", None),
])  # fmt: skip
def test_training_steps(name: str, model: dict[str, Any], run: str, step: int | None) -> None:
    found = named(Report(), name, **model)
    assert (run_of(found), step_of(found)) == (run, step)


def test_bad_input(report: Report) -> None:
    for reports in ([], ["out/gpt2"]):
        with pytest.raises(TypeError, match="Report"):
            ln_probe.compare(reports)  # type: ignore[arg-type]
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="names"):
            ln_probe.compare([report, report], names)
    assert np.isnan(ln_probe.compare([Report()]).summary.loc[0, "margin"])


def test_the_paired_table_by_definition(models: list[Report]) -> None:
    """Means over tokens; influences of the constants in the intervals alone; groups of norms adjusted apart."""
    generator, sites = np.random.default_rng(1), ("all", "mlp", "blocks.0.ln1", "blocks.0.ln2")
    reports = []
    for report in models[:2]:
        rows = pd.concat([report.causal_prompts.assign(sites=site) for site in sites], ignore_index=True)
        rows["delta_loss"] += generator.normal(0, 0.3, len(rows))
        rows = rows.assign(n=1 + rows["prompt"] % 3, stratum=(rows["prompt"] % 2).map({0: "b", 1: "a"}))
        rows["shift"] = generator.normal(0, 0.1, len(rows))
        reports.append(replace(report, tables={**report.tables, "causal_prompts": rows}))
    table = ln_probe.compare(reports).paired.set_index("sites")
    p = {}
    for site in sites:
        one, two = (rows[rows["sites"] == site] for rows in (r.causal_prompts for r in reports))
        n, each = one["n"].to_numpy(float), two["delta_loss"].to_numpy() - one["delta_loss"].to_numpy()
        moved = two["shift"].to_numpy() - one["shift"].to_numpy()
        inference = infer_mean(each * n + moved, n, np.arange(40) % 2 == 0)
        p[site] = inference.p
        row = table.loc[site]
        assert row["difference"] == pytest.approx(np.average(each, weights=n))
        assert (row["low"], row["high"]) == pytest.approx((inference.low, inference.high))
        assert (row["prompts_more"], row["n"]) == ((each > 0).sum(), 40)
    for family in (sites[:2], sites[2:]):
        assert table.loc[list(family), "p"].tolist() == pytest.approx(holm([p[site] for site in family]).tolist())
    prompts = [report.causal_prompts for report in reports]
    one, other = (rows.assign(n=rows["n"].where(rows["prompt"] < 30, 0)) for rows in prompts)
    one.loc[one["n"] == 0, "delta_loss"] = np.nan  # nothing to predict
    short = [replace(r, tables={"causal_prompts": t}) for r, t in zip(reports, (one, other), strict=True)]
    assert set(ln_probe.compare(short).paired["n"]) == {30}
    infinite = reports[1].causal_prompts.assign(delta_loss=np.inf)
    other = replace(reports[1], tables={"causal_prompts": infinite})
    assert ln_probe.compare([reports[0], other]).paired["prompts_more"].isna().all()


@pytest.mark.parametrize(("change", "same_loss"), [
    ({"prompts": {"sha256": "another"}}, False),
    ({"loss": {"name": "my:accuracy", "unit": "units of my:accuracy"}}, False),
    ({"arguments": {"layers": [0]}}, True),
])  # fmt: skip
def test_only_what_is_comparable_is_paired(change: dict[str, Any], same_loss: bool, models: list[Report]) -> None:
    other = replace(models[1], provenance={**models[1].provenance, **change})
    both = ln_probe.compare([models[0], other], ["a", "b"])
    assert not len(both.paired)
    assert both.summary["loss_difference"].notna().tolist() == [False, same_loss]
    assert len(both.notes) == 1
    assert "not paired" in both.notes[0]
    assert both.notes[0] in both._repr_html_()
    assert ln_probe.compare(models[:2]).notes == ()
    newer = ln_probe.compare([models[0], replace(models[1], provenance=models[1].provenance | {"ln_probe": "9"})])
    assert (len(newer.paired), len(newer.notes), "not paired" in newer.notes[0]) == (1, 1, False)
    assert ln_probe.compare(models)._repr_html_().count("<svg") == 1, "without the picture over training"
