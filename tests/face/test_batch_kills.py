"""kill -9, a full disk and a lost worker: the same command goes on, and the tables come out byte for byte the same."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ln_probe.analyses.probes.columns import BUILT_IN
from ln_probe.batch.run import WORK_FOLDER

TOKENS = [[1, 7, 30, 4, 22, 9, 41, 13, 2, 38], [5, 5, 17, 46, 3, 28, 11], [44, 8, 19, 6, 33, 25, 12, 40]]
TABLES = tuple(table.name for table in BUILT_IN)


class Batch:
    """One `ln-probe report` command, to be run in processes of its own."""

    def __init__(
        self,
        home: Path,
        models: list[Path],
        *options: str,
        workers: int = 2,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.environment = environment or {}
        self.prompts = home / "pröm pts.jsonl"
        self.prompts.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in TOKENS))
        self.arguments = [
            *map(str, models),
            "--prompts",
            str(self.prompts),
            "--shard",
            "1",
            "--max-tokens",
            "12",
            "--workers",
            str(workers),
            *options,
        ]

    def start(self, out: Path, limit: int | None = None) -> subprocess.Popen[str]:
        def restrict() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job that a shell runs in the background ignores it
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return subprocess.Popen(
            [sys.executable, "-m", "ln_probe.cli", "report", *self.arguments, "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=restrict,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment,
        )

    def finish(self, out: Path, limit: int | None = None) -> tuple[int, str]:
        process = self.start(out, limit)
        said, _ = process.communicate(timeout=3000)
        return process.returncode, said


def tables(out: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.glob("*/*.parquet"))}
    assert {Path(name).stem for name in found} == set(TABLES)
    return found


def workers_of(driver: psutil.Process) -> list[psutil.Process]:
    return [p for p in driver.children() if is_worker(p)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # ended since it was listed (a zombie has no command line either)
        return False


def wait_for(seconds: float, what: object) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


ENDS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}  # exit statuses


def torment(
    batch: Batch,
    out: Path,
    moments: Iterator[float],
    numbers: Iterator[signal.Signals],
    kills: int,
    expected: dict[str, bytes],
) -> list[str]:
    """Start, and at random moments end the driver (and start it again) or kill a worker at work; then let it finish.

    The driver gets the next of `numbers`, a worker SIGKILL after each. Returns what was ended, at most `kills` of
    them: fewer if the run was over before.
    """
    killed: list[str] = []
    process = batch.start(out)
    while len(killed) < kills:
        time.sleep(next(moments))
        if process.poll() is not None:
            break
        workers = workers_of(psutil.Process(process.pid))
        there = "with results on disk" if next((out / WORK_FOLDER).rglob("units/*/*"), None) else "before any result"
        if workers and len(killed) % 2:
            random.choice(workers).kill()
            killed.append(f"SIGKILL of a worker, {there}")
            continue
        number = next(numbers)
        process.send_signal(number)
        said, _ = process.communicate(timeout=3000)
        if process.returncode == 0:  # it was over before the signal came
            process = batch.start(out)
            break
        assert process.returncode in (ENDS[number], -number), said
        killed.append(f"{number.name} with {len(workers)} workers, {there}")
        assert wait_for(20, lambda gone=workers: not any(map(alive, gone))), "workers outlived their driver"
        process = batch.start(out)
    said, _ = process.communicate(timeout=3000)
    assert process.returncode == 0, said
    assert tables(out) == expected
    return killed


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SHORT = ("--probes", "decomposition,selectability,uniformity", "--layers", "1")


@pytest.fixture(scope="module")
def whole(lab_suite: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Batch, dict[str, bytes]]:
    """A command, and the tables it makes when nobody disturbs it."""
    home = tmp_path_factory.mktemp("whole")
    batch = Batch(home, lab_suite, *SHORT)
    code, said = batch.finish(home / "out")
    assert code == 0, said
    return batch, tables(home / "out")


@pytest.mark.slow
def test_a_killed_worker_is_replaced(whole: tuple[Batch, dict[str, bytes]], tmp_path: Path) -> None:
    batch, expected = whole
    process = batch.start(tmp_path / "out")
    driver = psutil.Process(process.pid)
    assert wait_for(120, lambda: workers_of(driver))
    workers_of(driver)[0].kill()
    said, _ = process.communicate(timeout=3000)
    assert process.returncode == 0, said
    assert "the worker process ended" in said
    assert tables(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_killed_driver_takes_its_workers_along(whole: tuple[Batch, dict[str, bytes]], tmp_path: Path) -> None:
    batch, expected = whole
    process = batch.start(tmp_path / "out")
    driver = psutil.Process(process.pid)
    assert wait_for(120, lambda: workers_of(driver))
    workers = workers_of(driver)
    process.kill()
    process.communicate()
    assert wait_for(20, lambda: not any(map(alive, workers))), "workers outlived their driver"
    code, said = batch.finish(tmp_path / "out")
    assert code == 0, said
    assert tables(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_full_disk(whole: tuple[Batch, dict[str, bytes]], tmp_path: Path) -> None:
    """Files may not grow past 4 kB: the results of units do. What is there stays whole, and the run goes on later."""
    batch, expected = whole
    code, said = batch.finish(tmp_path / "out", limit=4096)
    assert code == 1, said
    assert "cannot write to" in said
    assert "run the same command again" in said
    assert not list((tmp_path / "out").rglob("*.parquet"))
    assert not list((tmp_path / "out").rglob("*.partial"))
    code, said = batch.finish(tmp_path / "out")
    assert code == 0, said
    assert tables(tmp_path / "out") == expected


@pytest.mark.slow
def test_kill_after_kill(lab_suite: list[Path], tmp_path: Path) -> None:
    """Five checkpoints in three shards each: a lab run at four steps, and lm-layernorm; forty kills with
    LN_PROBE_FAULTS=all, else eight. A user's files in the report's folders and beside compiled kernels stay."""
    kills = 40 if os.environ.get("LN_PROBE_FAULTS") == "all" else 8
    kernels = tmp_path / "kernels"
    theirs = [kernels / "numba-mine" / "notes.md", kernels / "notes.md"]
    batch = Batch(
        tmp_path,
        [lab_suite[0], Path("lm-layernorm")],
        "--checkpoints",
        "all",
        "--layers",
        "1",
        environment={"NUMBA_CACHE_DIR": str(kernels)},
    )
    code, said = batch.finish(tmp_path / "compiling")  # and so the next one says how long a run takes
    assert code == 0, said
    start = time.monotonic()
    code, said = batch.finish(tmp_path / "whole")
    took = time.monotonic() - start
    assert code == 0, said
    expected = tables(tmp_path / "whole")
    assert len(expected) == 5 * len(TABLES)
    generator = random.Random(0)
    moments = iter(lambda: generator.uniform(0, took / 3), None)
    numbers = itertools.cycle(ENDS)  # over all runs: few get to a third signal
    killed: list[str] = []
    for number in range(40):
        out = tmp_path / f"out {number}"
        early, late = [*theirs, out / "notes.md"], [out / "lm-layernorm" / n for n in ("notes.md", "more/a.csv")]
        mine = [*early, *late]

        def write(paths: list[Path], text: str = f"the user's, of run {number}") -> None:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

        write(early)
        os.utime(theirs[0].parent, (0, 0))  # as old as a file can be
        done = torment(batch, out, moments, numbers, min(4, kills - len(killed)), expected)
        write(late)  # a folder that holds a user's files before there is a report is left alone: `lm-layernorm-2`
        code, said = batch.finish(out)
        assert (code, tables(out) == expected) == (0, True), said
        assert [path.read_text() for path in mine] == [f"the user's, of run {number}"] * len(mine)
        killed += done
        print(f"run {number}: {'; '.join(done) or 'nothing'}; {len(killed)} in all; identical", flush=True)
        if len(killed) == kills:
            break
    on_disk = sum("results on disk" in what for what in killed)
    print(f"{len(killed)} kills, {on_disk} with results on disk")
    assert len(killed) == kills, "the runs were over too soon"
    assert on_disk >= kills / 2
