"""Ctrl-C and SIGTERM end a command alike: in a sentence that says how to resume, and with nothing left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faulty import PROBES, command, disturb, lab_model, report, tables, write_prompts

from ln_probe.analyses.processes import Stopped, starting_workers

RESUME = "ln-probe: stopped: re-run the same command to resume\n"


def started(arguments: list[object], folder: Path, module: str = "ln_probe", **more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # (A shell that runs the tests in the background ignores Ctrl-C, and what it starts would inherit that.)
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)} | more,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


def test_b04_a_command_that_is_stopped_while_its_arguments_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer makes 130 of any signal there, and says nothing."""
    from ln_probe import cli

    def stop(*_: object, **__: object) -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handlers
    monkeypatch.setattr(cli._Commands, "make_context", stop)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().err) == (143, RESUME)


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (lambda: Stopped(signal.SIGTERM), 143)])
def test_b04_a_command_that_is_stopped(
    error: type[BaseException], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is: while it looks for models, reads prompts, measures, or trains."""

    def stop(*_: object, **__: object) -> None:
        raise error()

    line = [lab_model(tmp_path / "m"), "--prompts", write_prompts(tmp_path / "p.jsonl"), "--out", tmp_path / "out"]
    for place in ("ln_probe.batch.suite.suite", "ln_probe.batch.shards.divide", "ln_probe.batch.run.claim"):
        with monkeypatch.context() as patched:
            patched.setattr(place, stop)
            code, _, said = report(*line)
        assert (code, said.endswith(RESUME)) == (status, True), said
    with monkeypatch.context() as patched:
        disturb(patched, 2, stop)
        code, _, said = report(*line)
    assert (code, said.endswith(RESUME)) == (status, True), said
    with monkeypatch.context() as patched:
        patched.setattr("ln_probe.analyses.lab.experiments.run", stop)
        code, _, said = command("lab", "run", "majority", "--quick", "--out", tmp_path / "lab")
    assert (code, said.endswith(RESUME)) == (status, True), said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_b04_a_signal_in_the_middle(number: signal.Signals, status: int, tmp_path: Path) -> None:
    """To the whole group, as Slurm and a terminal send it; then the same command, and the tables of one left alone."""
    model, prompts = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    line = ["report", model, "--prompts", prompts, "--shard", 1, "--probes", PROBES, "--quiet"]
    process = started([*line, "--out", tmp_path / "out", "--workers", 2], tmp_path / "tmp")
    while process.poll() is None and not list(tmp_path.glob("out/.ln_probe/units/*/calibration-*.safetensors")):
        time.sleep(0.01)
    os.killpg(process.pid, number)
    code, said = ended(process)
    assert "Traceback" not in said
    assert (code, said.endswith(RESUME)) == (status, True), said
    assert list((tmp_path / "tmp").iterdir()) == [], "temporary folders are left"
    assert command(*line, "--out", tmp_path / "out", "--workers", 0)[0] == 0
    assert command(*line, "--out", tmp_path / "whole", "--workers", 0)[0] == 0
    assert tables(tmp_path / "out") == tables(tmp_path / "whole") != {}


@pytest.mark.slow
def test_b04_what_a_killed_command_left_is_swept_by_the_next(tmp_path: Path) -> None:
    model, prompts = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    line = ["report", model, "--prompts", prompts, "--probes", PROBES, "--quiet", "--out", tmp_path / "out"]
    process = started([*line, "--workers", 1], tmp_path / "tmp")
    while process.poll() is None and not list(tmp_path.glob("tmp/ln-probe-*/0")):
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=600)
    assert list(tmp_path.glob("tmp/ln-probe-*"))
    code, said = ended(started(["plan", *line[1:]], tmp_path / "tmp"))
    assert code == 0, said
    assert list((tmp_path / "tmp").iterdir()) == []


def test_b04_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    """A module that stands for any that takes its time: importing it is interrupted."""
    for name in ("typer", "filelock"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n" * 2)
        path = f"{tmp_path / name}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        line = ["report", lab_model(tmp_path / "m"), "--out", tmp_path / "out", "--quiet", "--probes", "decomposition"]
        code, said = ended(started(line, tmp_path / "tmp", PYTHONPATH=path))
        assert (code, said) == (130, RESUME)


def test_b04_workers_are_not_interrupted_while_they_start() -> None:
    """A terminal sends Ctrl-C to them, too, before they can say that they leave it to their parent."""
    code = (
        "import signal, sys; print(sorted(s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, []) "
        "if s in (signal.SIGINT, signal.SIGTERM)));"
        "from ln_probe.analyses.processes import follow_parent; follow_parent();"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with starting_workers():
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["['SIGINT', 'SIGTERM']", "True set()"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_b04_a_signal_whose_exception_was_lost() -> None:
    """What a handler raises inside a callback is printed and forgotten: the request to stop is not."""
    code = (
        "import os, signal\n"
        "from ln_probe.analyses.processes import check_stopped, stop_on_signals\n"
        "stop_on_signals()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM); raise SystemExit('not stopped')\n"
        "except KeyboardInterrupt: pass\n"
        "os.kill(os.getpid(), signal.SIGTERM)  # a second one disturbs nothing\n"
        "try: check_stopped()\n"
        "except KeyboardInterrupt as stop: raise SystemExit(stop.status)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 143
