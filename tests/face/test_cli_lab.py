"""`ln-probe lab` as a user runs it."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from ln_probe.analyses.lab import experiments
from ln_probe.analyses.lab.experiments import EXPERIMENTS, Experiment, Request
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.cli import app

runner = CliRunner()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """An experiment called `toy` that returns at once; the requests it got."""
    seen: list[Request] = []
    module = types.ModuleType("toy_experiment")

    def run(request: Request) -> Results:
        seen.append(request)
        values = pd.DataFrame({"norm": "a", "seed": request.seeds, "value": [float(s) for s in request.seeds]})
        return Results(
            summarize(values, ["norm"]), conclusions=("All is well.",), diverged=("seed 9",) * request.collect
        )

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_experiment", module)
    monkeypatch.setitem(
        EXPERIMENTS,
        "toy",
        Experiment("toy_experiment", "a toy", "nobody", seeds=3, quick_seeds=2, duration=("1 s", "1 s")),
    )
    return seen


def test_every_experiment_has_something_to_run() -> None:
    for name, experiment in EXPERIMENTS.items():
        assert callable(getattr(importlib.import_module(experiment.module), experiment.function)), name


def test_the_command_line(toy: list[Request], tmp_path: Path) -> None:
    listed = runner.invoke(app, ["lab", "list"])
    assert listed.exit_code == 0
    assert "majority" in listed.stdout
    assert "toy: a toy" in listed.stdout
    done = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "o"), "--quick"])
    assert done.exit_code == 0, done.stderr
    assert "All is well." in done.stdout
    assert toy[-1].seeds == (0, 1)
    assert json.loads((tmp_path / "o" / "results.json").read_text())["experiment"] == "toy"
    again = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "o"), "--quick", "--seeds", "5"])
    assert again.exit_code == 0
    assert toy[-1].seeds == (0, 1, 2, 3, 4)
    failed = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "o"), "--quick", "--collect"])
    assert failed.exit_code == 1
    assert "diverged: seed 9" in failed.stderr


def test_ctrl_c_says_how_to_go_on(toy: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(request: Request) -> Results:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["toy_experiment"], "run", stopped)
    result = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "o")])
    assert result.exit_code == 130
    assert result.stderr.endswith("ln-probe: stopped: re-run the same command to resume\n")


@pytest.mark.parametrize(("args", "said"), [
    (["nothing"], "unknown experiment 'nothing': known ones are majority, majority_in_space, random_keys"),
    (["toy", "--text", "x.txt"], "toy takes no text and no tokenizer: leave out x.txt"),
    (["language_model"], "language_model trains on text that you give: add --text FILE"),
    (["language_model", "--text", "no-such.txt"], "no text file no-such.txt"),
])  # fmt: skip
def test_bad_arguments(args: list[str], said: str, toy: list[Request], tmp_path: Path) -> None:
    result = runner.invoke(app, ["lab", "run", *args, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not toy


def test_no_seeds(tmp_path: Path) -> None:
    assert runner.invoke(app, ["lab", "run", "majority", "--seeds", "0", "--out", str(tmp_path)]).exit_code == 2
    with pytest.raises(ValueError, match="no seeds: at least 1 is needed"):
        experiments.run("majority", Request(tmp_path, ()), command="", ln_probe_version="")


def test_folders_of_something_else_are_left_alone(toy: list[Request], tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "one.txt").write_text("mine")
    result = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "thesis")])
    assert result.exit_code == 2
    assert "is not empty and holds no experiment: choose another --out" in result.stderr
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["one.txt"]
    assert runner.invoke(app, ["lab", "run", "toy", "--quick", "--out", str(tmp_path / "o")]).exit_code == 0
    result = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert "holds another experiment (toy, quick; this is toy)" in result.stderr
    (tmp_path / "o" / "experiment.json").write_text("{")
    result = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert "experiment.json: not JSON (" in result.stderr
    (tmp_path / "o" / "experiment.json").write_text("[]")
    assert (
        "experiment.json is damaged" in runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "o")]).stderr
    )
    result = runner.invoke(app, ["lab", "run", "toy", "--out", str(tmp_path / "thesis" / "one.txt")])
    assert result.exit_code == 2
    assert "one.txt (Not a directory): choose another --out" in result.stderr
    (tmp_path / "cut").mkdir()  # as a kill can leave it
    (tmp_path / "cut" / ".experiment.json.7.partial").write_text("{")
    assert runner.invoke(app, ["lab", "run", "toy", "--quick", "--out", str(tmp_path / "cut")]).exit_code == 0
