"""Reports are saved whole and load as they were; damaged folders are named; the attention kept for pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from made_up import HOSTILE

import ln_probe
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.exhibits import (
    BUDGET,
    TOKENS_SHOWN,
    AttentionRecorder,
    Exhibits,
    load_arrays,
    save_arrays,
    to_bytes,
)
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
    assert report.by_head("p")["p"].dropna().is_monotonic_increasing
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
    monkeypatch.setattr("ln_probe.page.page.report_page", lambda *_: 1 / (tmp_path / "report.json").exists())
    with pytest.raises(ZeroDivisionError):  # report.json is not there before the page
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


STORED = 0.004  # what the page promises: to within 0.4 % of the attention


@settings(deadline=None)
@given(hnp.arrays(np.float64, (7, 5), elements=st.floats(0, 1)))
def test_weights_are_stored_to_within_what_is_promised(weights: np.ndarray) -> None:
    assert np.abs(to_weights(to_bytes(weights)) - weights).max() <= STORED
    assert (to_weights(to_bytes(np.array([0.0, 1.0]))) == [0, 1]).all()
    assert len(set(to_bytes(np.array([1e-4, 2e-4, 5e-4, 1e-3, 2e-3])))) == 5


def to_weights(stored: np.ndarray) -> np.ndarray:
    """The weights that `to_bytes` stored."""
    return np.square(stored / 255.0)


def test_patterns_are_the_models_own(long_report: Report, long_model: Any, long_prompts: list[list[int]]) -> None:
    """Of the first prompt, its first 128 tokens, which the report says."""
    shown = long_report.exhibits.attention
    assert shown is not None
    (note,) = long_report.exhibits.notes
    assert "first 128 of the 150 tokens" in note
    assert (shown.prompt, shown.length, shown.layers, shown.heads, shown.causal) == (0, 150, (0, 1, 2), (0, 1), True)
    assert shown.tokens == tuple(map(str, long_prompts[0][:TOKENS_SHOWN]))
    _, cache = long_model.run_with_cache(torch.tensor([long_prompts[0]]))
    frozen: dict[str, Any] = {"only": "keys", "scale": long_report.constants.of(0)}
    with ln_probe.hooks.without(long_model, "scaling", sites=["blocks.0.ln1"], **frozen):
        _, edited = long_model.run_with_cache(torch.tensor([long_prompts[0]]))
    for layer in shown.layers:
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, :, :128, :128].numpy()
        assert np.abs(to_weights(shown.intact[layer]) - pattern).max() <= STORED
    pattern = edited["blocks.0.attn.hook_pattern"][0, :, :128, :128].numpy()
    assert np.abs(to_weights(shown.frozen[0]) - pattern).max() <= STORED
    assert np.abs(to_weights(shown.frozen[0]) - to_weights(shown.intact[0])).max() > 10 * STORED


def test_heads_that_were_asked_for() -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(1, 25)[None]
    how: dict[str, Any] = {"probes": ["uniformity"], "progress": False}
    part = ln_probe.analyze(model, tokens, heads=[3, 1], layers=[1], **how).exhibits.attention
    whole = ln_probe.analyze(model, tokens, **how).exhibits.attention
    assert part is not None
    assert whole is not None
    assert (part.layers, part.heads) == ((1,), (1, 3))
    assert np.array_equal(part.intact[0], whole.intact[1][[1, 3]])
    assert ln_probe.analyze(model, tokens, probes=("decomposition",), progress=False).exhibits.attention is None
    both_ways = ln_probe.analyze(make_bridge("bert"), tokens[:, :3], **how).exhibits.attention  # and fewer tokens
    assert both_ways is not None
    assert (both_ways.causal, both_ways.heads, both_ways.intact.shape) == (False, (0, 1, 2, 3), (2, 4, 3, 3))


@pytest.mark.parametrize(("layers", "heads", "length"), [(12, 12, 512), (4, 16, 128), (48, 25, 1024), (200, 64, 90)])
def test_what_is_stored_is_bounded(layers: int, heads: int, length: int) -> None:
    recorder = AttentionRecorder([["a"] * length], range(layers), range(heads))
    size = 2 * len(recorder.chosen) * heads * min(length, TOKENS_SHOWN) ** 2
    assert size <= BUDGET
    assert (recorder.chosen[0], recorder.chosen[-1]) == (0, layers - 1)
    assert (len(recorder.chosen) == layers) == (layers <= 12)


def test_saved_arrays_load_as_they_were(report: Report, tmp_path: Path) -> None:
    shown = report.exhibits.attention
    assert shown is not None
    hostile = replace(shown, tokens=tuple((HOSTILE * 2)[: len(shown.tokens)]))
    save_arrays(tmp_path / "e.npz", Exhibits(hostile, ("a note",)), report.constants)
    loaded, constants = load_arrays(tmp_path / "e.npz")
    assert loaded.attention is not None
    assert loaded.notes == ("a note",)
    for one in fields(hostile):
        assert np.array_equal(getattr(loaded.attention, one.name), getattr(hostile, one.name)), one.name
    assert report.constants is not None
    assert all(np.array_equal(constants[name], array) for name, array in report.constants.arrays().items())
    save_arrays(tmp_path / "none.npz", Exhibits(), None)
    assert load_arrays(tmp_path / "none.npz")[0].attention is None
    (tmp_path / "none.npz").write_bytes(b"not a zip")
    with pytest.raises(ValueError, match="damaged"):
        load_arrays(tmp_path / "none.npz")
