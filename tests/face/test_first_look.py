"""A page of what is known soon stands where a long report will, and changes nothing about that report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import ln_probe
from ln_probe.batch import cost, work
from ln_probe.batch.plan import CALIBRATION, LOOK, PROMPTS, REPORT, WEIGHTS, Unit
from ln_probe.batch.schedule import Schedule
from ln_probe.batch.suite import Target
from ln_probe.batch.work import DIED, DONE, FAILED, Outcome
from ln_probe.cli import app
from ln_probe.hooks.model import HookedModel, evaluating
from ln_probe.measuring.first_look import PROMPTS as LOOKED_AT
from ln_probe.measuring.first_look import TOKENS, first_look
from ln_probe.measuring.settings import Settings

ARGUMENTS = ("--probes", "decomposition,causal", "--workers", "0", "--prompts")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    ids = torch.randint(0, 256, (5, 90), generator=torch.Generator().manual_seed(0))
    path.write_text("".join(f'{{"tokens": {row.tolist()}}}\n' for row in ids))
    return path


def report(out: Path, prompts: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", "lm-none", "--out", str(out), *ARGUMENTS, str(prompts), *more])
    return result.exit_code, result.stderr


def tables(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((out / "lm-none").glob("*.parquet"))}


def test_a_page_stands_there_before_the_report(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(tmp_path / "plain", prompts)[0] == 0
    early: list[str] = []
    calibrate = work.Worker._calibrate

    def after_the_look(self: work.Worker, target: Target, unit: Unit) -> Any:
        early.append((tmp_path / "out" / "lm-none" / "report.html").read_text())
        assert not (tmp_path / "out" / "lm-none" / "report.json").exists()
        return calibrate(self, target, unit)

    monkeypatch.setattr(work.Worker, "_calibrate", after_the_look)
    monkeypatch.setattr(cost, "LOOK_ABOVE", 0.0)
    code, said = report(tmp_path / "out", prompts)
    assert code == 0
    assert "lm-none: a first look is in " in said
    (page,) = early
    assert '<meta http-equiv="refresh" content="30">' in page
    assert f"A first look, at {LOOKED_AT} prompts of at most {TOKENS} tokens." in page
    assert "Not run:" not in page
    final = (tmp_path / "out" / "lm-none" / "report.html").read_text()
    assert "refresh" not in final
    assert "A first look" not in final
    assert tables(tmp_path / "out") == tables(tmp_path / "plain")  # to the last byte
    assert "a first look" not in report(tmp_path / "out", prompts)[1]  # nothing is left to do


def test_what_it_says_is_what_analyze_says_of_the_same_tokens() -> None:
    model = ln_probe.load_model("lm-layernorm")
    rows = [torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(k)) for k in range(6)]
    with evaluating(cast(nn.Module, model)):
        look = first_look(cast(HookedModel, model), Settings(), rows, "ids", str)
    whole = ln_probe.analyze(
        model,
        prompts=[r[:TOKENS].tolist() for r in rows[:LOOKED_AT]],
        probes=("decomposition", "causal"),
        progress=False,
    )
    pd.testing.assert_frame_equal(look.layernorms, whole.layernorms)
    groups = whole.causal[whole.causal["sites"].isin(("attention", "mlp", "final", "all"))].reset_index(drop=True)
    assert len(look.causal) == len(groups) == 16
    left_out = ["delta_loss_uniform", "delta_loss_resampled"]
    mine = look.causal.drop(columns=left_out)
    pd.testing.assert_frame_equal(mine, groups.drop(columns=left_out), rtol=1e-5, atol=1e-6)
    scaled = look.causal[look.causal["variant"].isin(("no_scaling", "neither"))]
    assert scaled[left_out].isna().all(axis=None)


def test_nothing_that_can_be_looked_at() -> None:
    model = ln_probe.load_model("lm-none")
    with pytest.raises(ValueError, match=r"^nothing of unembedding can be said quickly$"):
        first_look(cast(HookedModel, model), Settings(probes=("unembedding",)), [torch.arange(9)], "ids", str)


def test_a_look_that_fails_is_said_and_does_no_harm(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(cost, "LOOK_ABOVE", 0.0)
    monkeypatch.setattr(work, "first_look", fails)
    code, said = report(tmp_path / "out", prompts)
    assert code == 0
    assert "lm-none: no first look (RuntimeError: no memory for it)" in said
    assert len(tables(tmp_path / "out")) > 2


@pytest.mark.slow
def test_a_report_that_is_there_is_not_written_over(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report(tmp_path / "out", prompts)[0] == 0
    page = tmp_path / "out" / "lm-none" / "report.html"
    (tmp_path / "out" / "lm-none" / "causal.parquet").write_bytes(b"")  # damaged, so it is made again
    before = page.read_bytes()
    seen: list[bytes] = []
    calibrate = work.Worker._calibrate

    def after_the_look(self: work.Worker, target: Target, unit: Unit) -> Any:
        seen.append(page.read_bytes())
        return calibrate(self, target, unit)

    monkeypatch.setattr(cost, "LOOK_ABOVE", 0.0)
    monkeypatch.setattr(work.Worker, "_calibrate", after_the_look)
    code, said = report(tmp_path / "out", prompts)
    assert code == 0
    assert seen == [before]
    assert "a first look is in" not in said


@settings(max_examples=50, deadline=None)
@given(st.sampled_from((DONE, FAILED, DIED)), st.integers(1, 3))
def test_however_it_ends_the_rest_is_done_once(state: str, workers: int) -> None:
    target = Target("m", None, "m", "x")
    weights = Unit(WEIGHTS, probe="unembedding")
    todo = [Unit(CALIBRATION), Unit(PROMPTS, 0), weights]
    schedule = Schedule({target: todo}, looks=[target])
    assert len(schedule) == len(list(schedule.left())) == 5
    done: list[Unit] = []
    running: dict[int, Unit] = {}
    while True:
        for worker in range(workers):
            if worker not in running and (job := schedule.next(worker)) is not None:
                running[worker] = job[1]
        assert not {Unit(LOOK), Unit(CALIBRATION)} <= set(running.values())
        if not running:
            break
        worker, unit = running.popitem()
        schedule.ended(target, unit, Outcome(state, "why") if unit.kind == LOOK else Outcome(DONE))
        done.append(unit)
    assert done.count(Unit(LOOK)) == 1
    assert sorted(map(str, done)) == sorted(map(str, [Unit(LOOK), *todo, Unit(REPORT)]))
    assert done[-1] == Unit(REPORT)
    assert len(schedule) == 0
    assert not schedule.errors
