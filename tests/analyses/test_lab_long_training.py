"""The long training: its stages are parts of the grids, what is kept is not trained again, and it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ln_probe.analyses.lab import long_training
from ln_probe.analyses.lab.approximation import approximation
from ln_probe.analyses.lab.counting import qrnn_budget
from ln_probe.analyses.lab.experiments import Request, run
from ln_probe.analyses.lab.long_training import STAGES, main, stages
from ln_probe.analyses.lab.training import TrainConfig


def test_every_stage_has_runs_and_none_that_is_kept(tmp_path: Path) -> None:
    found = list(stages(tmp_path, ()))
    assert [stage for stage, _ in found] == [
        s for s in STAGES if s.experiment != "language_model_bundled" and not s.kept
    ]
    for stage, runs in found:
        assert runs, stage
        assert {r.seed for r in runs} <= set(stage.seeds)
    depth = [r for stage, runs in found if stage.experiment == "depth" for r in runs]
    assert not [r for r in depth if r.keys["norm_order"] == "post" and r.seed < 3], "three seeds of it are kept"
    assert not [r for r in depth if r.keys["positions"] != "none"]


def test_it_goes_on_and_can_be_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(approximation, "training", lambda quick, seed, lr: TrainConfig(steps=2, batch=2, seed=seed))
    (one,) = [s for s in STAGES if s.experiment == "approximation" and "FFN" in s.why]
    small = replace(one, seeds=(0,), kept=False, wanted=lambda k: one.wanted(k) and k["heads"] == 1 and k["lr"] == 0.01)
    monkeypatch.setattr(long_training, "STAGES", (small,))
    main(["--out", str(tmp_path)])
    assert "0 of 4 runs done" in capsys.readouterr().out
    main(["--out", str(tmp_path), "--status"])
    assert "4 of 4 runs done" in capsys.readouterr().out
    request = Request(tmp_path / "approximation", (0,), collect=True, progress=False)
    summary = run("approximation", request, command="", ln_probe_version="0").summary
    assert set(summary["width"]) == {0}
    assert len(summary) == 2 * 4


def test_what_a_qrnn_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qrnn_budget, "training", lambda quick, seed, lr: TrainConfig(4, 2, seed=seed, evaluate_every=2))
    monkeypatch.setitem(qrnn_budget.PUBLISHED, ("L5", "qrnn"), (0,) * 6)  # reached at once
    monkeypatch.setitem(qrnn_budget.PUBLISHED, ("L5", "qrnn+"), (101,) * 6)  # never
    request = Request(tmp_path / "budget", (0, 1), quick=True, progress=False)
    results = run("counting_budget", request, command="", ln_probe_version="0")
    read = results.tables["readings"]
    counts = read.groupby(["model", "read"])["step"].unique().map(list).to_dict()
    end, there = qrnn_budget.AT_END, qrnn_budget.WHEN_REACHED
    assert counts == {("qrnn", end): [4], ("qrnn", there): [2], ("qrnn+", end): [4]}
    first, second = results.conclusions
    assert "L5, qrnn: 2 of 2 runs reach the published accuracy at length 64 (0 %)" in first
    assert "0 of 2 runs" in second
    assert second.endswith("this budget does not reach it, so nothing is said beyond that length.")
    # 37.5 % of L5's labels at length 64 are no: the constant answer of the published table
    row = results.summary[results.summary["measure"] == "accuracy_64"].iloc[0]
    assert row["constant_no"] == pytest.approx(0.375, abs=0.01)
    assert row["constant_yes"] + row["constant_no"] == pytest.approx(1)
