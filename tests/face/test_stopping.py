"""Ctrl-C, SIGTERM, kill -9, a full disk and a lost worker: a command says how to resume and leaves nothing over, the
same command goes on, and the tables come out byte for byte the same."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import idling
import psutil
import pytest
from faulty import PROBES, command, disturb, ended, lab_model, report, started, tables, without_pages, write_prompts

from ln_probe.analyses.probes.columns import BUILT_IN
from ln_probe.analyses.processes import Stopped, starting_workers
from ln_probe.batch import pool
from ln_probe.batch.run import WORK_FOLDER, Run, Unit
from ln_probe.batch.suite import Target

RESUME = "ln-probe: stopped: re-run the same command to resume\n"
TOKENS = [[1, 7, 30, 4, 22, 9, 41, 13, 2, 38], [5, 5, 17, 46, 3, 28, 11], [44, 8, 19, 6, 33, 25, 12, 40]]


def wait(process: subprocess.Popen[str], there: Callable[[], object]) -> None:
    """Until it is there, or the process is over."""
    while process.poll() is None and not there():
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------ Ctrl-C and SIGTERM


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
    for place in ("ln_probe.batch.suite.suite", "ln_probe.batch.shards.divide", "ln_probe.batch.run.claim", ""):
        with monkeypatch.context() as patched:
            patched.setattr(place, stop) if place else disturb(patched, 2, stop)
            code, _, said = report(*line)
        assert (code, said.endswith(RESUME)) == (status, True), said
    monkeypatch.setattr("ln_probe.analyses.lab.experiments.run", stop)
    code, _, said = command("lab", "run", "majority", "--quick", "--out", tmp_path / "lab")
    assert (code, said.endswith(RESUME)) == (status, True), said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_b04_a_signal_in_the_middle(number: signal.Signals, status: int, tmp_path: Path) -> None:
    """To the whole group, as Slurm and a terminal send it; then the same command, and the tables of one left alone."""
    model, prompts, temporary = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl"), tmp_path / "tmp"
    temporary.mkdir()
    line = ["report", model, "--prompts", prompts, "--shard", 1, "--probes", PROBES, "--quiet"]
    process = started(*line, "--out", tmp_path / "out", "--workers", 2, TMPDIR=str(temporary))
    wait(process, lambda: list(tmp_path.glob("out/.ln_probe/units/*/calibration-*.safetensors")))
    os.killpg(process.pid, number)
    code, said = ended(process)
    assert "Traceback" not in said
    assert (code, said.endswith(RESUME)) == (status, True), said
    assert list(temporary.iterdir()) == [], "temporary folders are left"
    assert command(*line, "--out", tmp_path / "out", "--workers", 0)[0] == 0
    assert command(*line, "--out", tmp_path / "whole", "--workers", 0)[0] == 0
    assert tables(tmp_path / "out") == tables(tmp_path / "whole") != {}


@pytest.mark.slow
def test_b04_what_a_killed_command_left_is_swept_by_the_next(tmp_path: Path) -> None:
    model, prompts, temporary = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl"), tmp_path / "tmp"
    temporary.mkdir()
    line = [model, "--prompts", prompts, "--probes", PROBES, "--quiet", "--out", tmp_path / "out"]
    process = started("report", *line, "--workers", 1, TMPDIR=str(temporary))
    wait(process, lambda: list(temporary.glob("ln-probe-*/0")))
    process.kill()
    process.communicate(timeout=600)
    assert list(temporary.glob("ln-probe-*"))
    ended(started("plan", *line, TMPDIR=str(temporary)), 0)
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_b04_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    """A module that stands for any that takes its time: importing it is interrupted."""
    for name in ("typer", "filelock"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n" * 2)
        path = f"{tmp_path / name}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        line = ["report", lab_model(tmp_path / "m"), "--out", tmp_path / "out", "--quiet", "--probes", "decomposition"]
        assert ended(started(*line, PYTHONPATH=path)) == (130, RESUME)


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


# ----------------------------------------------------------------------------------------------------------- workers


def test_closing_an_engine_ends_its_busy_workers_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_serve", idling.serve)
    run, target, unit = (object.__new__(kind) for kind in (Run, Target, Unit))  # the engine only hands them on
    foreign = multiprocessing.get_context("spawn").Process(target=idling.idle)
    foreign.start()
    engine = pool.LocalEngine(run, 2)
    try:
        engine.submit(0, target, unit)
        engine.submit(1, target, unit)
        ours = set(multiprocessing.active_children()) - {foreign}
        assert len(ours) == 2
        assert engine.wait(0.01) == []
        engine.close()
        for process in ours:
            process.join(60)
            assert process.exitcode is not None
        assert foreign.is_alive()
    finally:
        foreign.terminate()
        foreign.join(60)
    engine.close()  # again: nothing is left to do


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.NoSuchProcess):  # ended since it was listed (a zombie has no command line either)
            found += [child] * ("spawn_main" in " ".join(child.cmdline()))
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def line(tmp_path: Path) -> list[object]:
    prompts = write_prompts(tmp_path / "pröm pts.jsonl", TOKENS)
    return ["report", "--prompts", prompts, "--shard", 1, "--max-tokens", 12, "--workers", 2, "--layers", 1]


@pytest.mark.slow
def test_a_killed_worker_and_a_full_disk(line: list[object], lab_suite: list[Path], tmp_path: Path) -> None:
    """Files may not grow past 4 kB: the results of units do. What is there stays whole, and the run goes on later."""
    line += [*lab_suite, "--probes", "decomposition,selectability,uniformity"]
    ended(started(*line, "--out", tmp_path / "whole"), 0)
    process = started(*line, "--out", tmp_path / "killed")
    wait(process, lambda: workers_of(process))
    workers_of(process)[0].kill()
    _, said = ended(process, 0)
    assert "the worker process ended" in said
    out = tmp_path / "full"
    _, said = ended(started(*line, "--out", out, limit=4096), 1)
    assert "cannot write to" in said
    assert "run the same command again" in said
    assert not [*out.rglob("*.parquet"), *out.rglob("*.partial")]
    ended(started(*line, "--out", out), 0)
    assert tables(out) == tables(tmp_path / "killed") == tables(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stopped and continued", "a second driver"])
def test_what_happens_beside_a_command_changes_nothing(what: str, tmp_path: Path) -> None:
    model, prompts = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    line = [model, "--prompts", prompts, "--shard", 1, "--out", tmp_path / "out"]
    process = started("report", *line, "--workers", 1, "--probes", PROBES)
    wait(process, lambda: list(tmp_path.glob("out/.ln_probe/units/*/calibration-*.safetensors")))
    if what == "a second driver":
        code, _, said = report(*line)
        assert code in (0, 2), said
        assert code == 0 or f"{tmp_path / 'out'} is being written by process {process.pid} on" in said
    else:
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGCONT)
    ended(process, 0)
    with pytest.MonkeyPatch.context() as patched:
        without_pages(patched)
        assert report(*line[:-1], tmp_path / "whole")[0] == 0
    assert tables(tmp_path / "out") == tables(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------- kill after kill

ENDS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}  # exit statuses


def torment(
    line: list[object], out: Path, moments: Iterator[float], numbers: Iterator[signal.Signals], kills: int, **more: str
) -> list[str]:
    """Start, and at random moments end the driver (and start it again) or kill a worker at work; then let it finish.

    The driver gets the next of `numbers`, a worker SIGKILL after each. Returns what was ended, at most `kills` of
    them: fewer if the run was over before.
    """
    killed: list[str] = []
    process = started(*line, "--out", out, **more)
    while len(killed) < kills:
        time.sleep(next(moments))
        if process.poll() is not None:
            break
        workers = workers_of(process)
        there = "with results on disk" if next((out / WORK_FOLDER).rglob("units/*/*"), None) else "before any result"
        if workers and len(killed) % 2:
            random.choice(workers).kill()
            killed.append(f"SIGKILL of a worker, {there}")
            continue
        number = next(numbers)
        process.send_signal(number)
        code, said = ended(process)
        if code == 0:  # it was over before the signal came
            process = started(*line, "--out", out, **more)
            break
        # (Ctrl-C before Python has read its own modules: the interpreter ends with 1, and nothing of ours has run.)
        assert code in (ENDS[number], -number) or said.startswith("Fatal Python error: init_import_site"), said
        killed.append(f"{number.name} with {len(workers)} workers, {there}")
        end = time.monotonic() + 20
        while any(map(alive, workers)):
            assert time.monotonic() < end, "workers outlived their driver"
            time.sleep(0.02)
        process = started(*line, "--out", out, **more)
    ended(process, 0)
    return killed


@pytest.mark.slow
def test_kill_after_kill(line: list[object], lab_suite: list[Path], tmp_path: Path) -> None:
    """Five checkpoints in three shards each: a lab run at four steps, and lm-layernorm; forty kills with
    LN_PROBE_FAULTS=all, else eight. A user's files in the report's folders and beside compiled kernels stay."""
    kills = 40 if os.environ.get("LN_PROBE_FAULTS") == "all" else 8
    kernels = tmp_path / "kernels"
    theirs = [kernels / "numba-mine" / "notes.md", kernels / "notes.md"]
    more = {"NUMBA_CACHE_DIR": str(kernels)}
    line += [lab_suite[0], "lm-layernorm", "--checkpoints", "all"]
    ended(started(*line, "--out", tmp_path / "compiling", **more), 0)
    start = time.monotonic()
    ended(started(*line, "--out", tmp_path / "whole", **more), 0)
    took = time.monotonic() - start
    expected = tables(tmp_path / "whole")
    assert len([name for name in expected if name.endswith(".parquet")]) == 5 * len(BUILT_IN)
    generator = random.Random(0)
    moments = iter(lambda: generator.uniform(0, took / 2), None)
    numbers = itertools.cycle(ENDS)  # over all runs: few get to a third signal
    killed: list[str] = []
    for number in range(40):
        out, text = tmp_path / f"out {number}", f"the user's, of run {number}"
        early, late = [*theirs, out / "notes.md"], [out / "lm-layernorm" / n for n in ("notes.md", "more/a.csv")]

        def write(paths: list[Path], text: str = text) -> None:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

        write(early)
        os.utime(theirs[0].parent, (0, 0))  # as old as a file can be
        done = torment(line, out, moments, numbers, min(4, kills - len(killed)), **more)
        assert tables(out) == expected
        write(late)  # a folder that holds a user's files before there is a report is left alone: `lm-layernorm-2`
        _, said = ended(started(*line, "--out", out, **more), 0)
        assert tables(out) == expected, said
        assert {path.read_text() for path in (*early, *late)} == {text}
        killed += done
        print(f"run {number}: {'; '.join(done) or 'nothing'}; {len(killed)} in all; identical", flush=True)
        if len(killed) == kills:
            break
    on_disk = sum("results on disk" in what for what in killed)
    print(f"{len(killed)} kills, {on_disk} with results on disk")
    assert len(killed) == kills, "the runs were over too soon"
    assert on_disk >= kills / 2
