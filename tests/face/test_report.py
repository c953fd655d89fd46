"""Reports are saved whole and load as they were; damaged folders are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import ln_probe
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.report import Report, answers


@pytest.fixture(autouse=True)
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ln_probe.page.page.report_page", lambda *_: "")


def test_saved_reports_load_as_they_were(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    loaded = ln_probe.load_report(folder)
    for table in (t.name for t in TABLES):
        pd.testing.assert_frame_equal(loaded.tables[table], report.tables[table], check_dtype=False)
    assert loaded.causal is loaded.tables["causal"]
    assert dict(loaded.provenance) == json.loads(json.dumps(report.provenance))
    assert (loaded.notes, loaded.findings(), repr(loaded)) == (report.notes, report.findings(), repr(report))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["report.json", "report.html", "exhibits.npz", *(f"{t}.parquet" for t in (d.name for d in TABLES))]
    )
    assert loaded.tokens().equals(report.tokens())


def test_print_shows_the_findings_in_their_order(report: Report) -> None:
    lines = " ".join(line.strip() for line in str(report).splitlines())
    texts = [answer.text for answer in answers(report)]
    assert lines == " ".join(
        [f"{report.name} on {report.provenance['prompts']['count']} prompt (tokens)", *(f"- {text}" for text in texts)]
    )
    assert report.findings() == texts
    assert "\x1b" not in str(replace(report, provenance={"model": {"name": "\x1b[31m"}}))
    assert all(text.startswith("Not measured") for text in Report().findings())


def test_every_value_by_head_is_that_of_its_table(report: Report) -> None:
    table = report.by_head().set_index(["layer", "head"])
    assert table.index.tolist() == [(i, h) for i in range(2) for h in range(4)]
    effects = report.head_effects.set_index(["layer", "head", "variant"])
    heads = report.heads.set_index(["layer", "head", "variant"])
    sinks = report.sink_heads.set_index(["layer", "head"])
    for place, row in table.iterrows():
        intact, frozen = (heads.loc[(*place, variant)] for variant in ("intact", "no_scaling"))
        effect, sink = effects.loc[(*place, "no_scaling")], sinks.loc[place]
        assert row.drop("estimated").to_dict() == pytest.approx({
            "delta_loss": effect["delta_loss"], "p": effect["p"], "entropy_ratio": intact["entropy_ratio"],
            "entropy_change": frozen["entropy_ratio"] - intact["entropy_ratio"],
            "unselectable": intact["unselectable"], "attainable": intact["attainable_median"],
            "attainable_change": frozen["attainable_median"] - intact["attainable_median"],
            "received": intact["pattern_max_median"], "margin": intact["margin_median"],
            "margin_change": frozen["margin_median"] - intact["margin_median"], "sink_rate": sink["sink_rate"],
            "first_attention": sink["first_attention"],
            "first_change": sink["first_attention_no_scaling"] - sink["first_attention"],
        }, nan_ok=True)  # fmt: skip
    assert not table["estimated"].any()
    unrun = report.head_effects.copy()
    unrun.loc[(unrun["layer"] == 1) & (unrun["head"] == 2), ["delta_loss", "p"]] = float("nan")
    table = replace(report, tables={**report.tables, "head_effects": unrun}).by_head().set_index(["layer", "head"])
    assert table.loc[(1, 2), "delta_loss"] == effects.loc[(1, 2, "no_scaling"), "estimate"]
    assert table["estimated"].tolist() == [place == (1, 2) for place in table.index]
    assert report.by_head("delta_loss")["delta_loss"].abs().is_monotonic_decreasing
    assert Report().by_head().empty
    assert Report().by_head().columns.tolist() == report.by_head().columns.tolist()
    without = replace(report, tables={**report.tables, "head_effects": report.head_effects.iloc[:0]}).by_head()
    assert len(without) == 8
    assert without["delta_loss"].isna().all()


def test_damaged_reports(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    for name in ("exhibits.npz", "heads.parquet"):
        whole = (folder / name).read_bytes()
        for broken in (whole[: len(whole) // 2], whole[:-30], b"", b"not a zip"):
            (folder / name).write_bytes(broken)
            with pytest.raises(ValueError, match=name):
                ln_probe.load_report(folder)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            ln_probe.load_report(folder)
        (folder / name).write_bytes(whole)
    for content in ('{"format": 99}', '{"format": 6', "[]", '{"format": 6, "tables": {}}', ""):
        (folder / "report.json").write_text(content)
        with pytest.raises(ValueError, match="damaged"):
            ln_probe.load_report(folder)


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda r: r.save(3), "int"),
    (lambda r: r.save("file"), "file"),
    (lambda r: r.to_html("file/page.html"), "file"),
    (lambda r: r.attention(99), "layer 99"),
    (lambda r: r.attention(head=-1), "head -1"),
    (lambda r: r.by_head("size"), "size"),
    (lambda r: ln_probe.load_report("nope"), "nope"),
    (lambda r: ln_probe.load_report("file"), "file"),
    (lambda r: ln_probe.load_report("."), "report.json"),
]


@pytest.mark.parametrize(("call", "word"), WRONG)
def test_wrong_arguments_leave_no_file(
    call: Callable[[Any], object], word: str, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, OSError), match=word):
        call(report)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("changes", [
    {"provenance": {"seen": {1}}},
    {"provenance": {"seen": float("nan")}},
    {"tables": {"sinks": pd.DataFrame({"token": [1, "a"]})}},
])  # fmt: skip
def test_a_save_that_fails_leaves_the_report_saved_before(
    changes: dict[str, Any], report: Report, tmp_path: Path
) -> None:
    folder = report.save(tmp_path / "r")
    before = sorted(folder.iterdir())
    with pytest.raises((ValueError, TypeError)):
        replace(report, **changes).save(folder)
    assert sorted(folder.iterdir()) == before
    pd.testing.assert_frame_equal(ln_probe.load_report(folder).heads, report.heads)


def test_a_page_that_fails_costs_no_table(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ln_probe.page.page.report_page", lambda *_: [][0])
    with pytest.raises(IndexError):
        report.save(tmp_path)
    pd.testing.assert_frame_equal(ln_probe.load_report(tmp_path).heads, report.heads)


@pytest.mark.parametrize("change", [
    lambda t: t.drop(columns="layer"),
    lambda t: t.assign(n="many"),
    lambda t: pd.concat([t, t]),
])  # fmt: skip
def test_tables_that_are_not_what_they_should_be(
    change: Callable[[pd.DataFrame], pd.DataFrame], report: Report, tmp_path: Path
) -> None:
    file = report.save(tmp_path / "r") / "heads.parquet"
    change(pd.read_parquet(file)).to_parquet(file, index=False)
    with pytest.raises(ValueError, match="heads"):
        ln_probe.load_report(file.parent)


def test_losses_of_tokens_sum_to_the_causal_table(tmp_path: Path) -> None:
    model: Any = ln_probe.load_model("lm-layernorm")
    report = ln_probe.analyze(model, max_prompts=3, probes="causal", progress=False)
    every = report.tokens(n=None)
    causal = report.causal.set_index(["sites", "variant"])["delta_loss"]
    for variant in ("no_scaling", "no_projection"):
        assert every[variant].mean() == pytest.approx(causal["all", variant], abs=1e-6)
    of_prompts = report.causal_prompts.query("sites == 'all' and variant == 'no_scaling'").set_index("prompt")
    changes = every.groupby("prompt")["no_scaling"].mean()
    assert changes.to_numpy() == pytest.approx(of_prompts["delta_loss"].to_numpy(), abs=1e-6)
    tokens = model.bundled_prompts.measured[1]
    with torch.no_grad():
        logits = model(tokens[None])[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    of_one = every[every["prompt"] == 1]
    assert of_one["loss"].to_numpy() == pytest.approx(losses.numpy(), abs=1e-4)
    assert list(of_one["token"]) == [model.tokenizer.decode([int(token)]) for token in tokens[1:]]
    largest = report.tokens()
    assert len(largest) == 20
    assert largest["no_scaling"].abs().min() == every["no_scaling"].abs().nlargest(20).min()
    assert ln_probe.load_report(report.save(tmp_path)).tokens().equals(largest)
    with pytest.raises(ValueError, match="causal"):
        Report().tokens()
