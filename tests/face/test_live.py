"""Signs of life: what is said without a terminal, how long is left, and what other processes are doing."""

from __future__ import annotations

import io
import multiprocessing
import time
from pathlib import Path

import pytest

from ln_probe.analyses import progress
from ln_probe.analyses.progress import ProgressLine, left_of
from ln_probe.batch.pool import Display
from ln_probe.batch.results import DONE, Outcome
from ln_probe.batch.run import CALIBRATION, PROMPTS, REPORT, Unit
from ln_probe.batch.suite import Target


def test_c11_without_a_terminal_a_line_comes_soon_and_then_regularly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.FIRST + 1.0 < 2.0, "with Python's own start"
    assert progress.EVERY < 30.0
    monkeypatch.setattr(progress, "FIRST", 0.02)
    monkeypatch.setattr(progress, "EVERY", 0.1)
    monkeypatch.setattr(progress, "_TICK", 0.01)
    log = io.StringIO()
    with ProgressLine(stream=log) as shown:
        progress.tell("gpt2: downloading", 212e6, 548e6, "B")
        deadline = time.monotonic() + 30
        while log.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        shown.say("gpt2: done")
    lines = log.getvalue().splitlines()
    assert lines[0] == "0:00:00  gpt2: downloading: 212 MB of 548 MB"
    assert len(lines) >= 4
    assert lines[-1] == "gpt2: done"
    assert str(progress.now()) == ""


def test_quiet_says_only_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    log = io.StringIO()
    with ProgressLine(stream=log, quiet=True) as shown:
        progress.tell("working")
        time.sleep(0.05)
        shown.say("a line")
    assert log.getvalue() == "a line\n"


def test_what_is_left_is_told_once_it_is_more_than_a_guess() -> None:
    now = time.time()
    assert left_of(progress.Progress("x", 0, 10, "prompts", now - 60)) == ""
    assert left_of(progress.Progress("x", 5, 10, "prompts", now - 1)) == ""
    assert left_of(progress.Progress("x", 5, since=now - 60)) == "", "no total, no end in sight"
    assert left_of(progress.Progress("x", 2, 10, "prompts", now - 60)) == " · 4 min 00 s left"


def test_d3_a_long_prompt_and_kernels_that_are_compiled_are_counted_and_named() -> None:
    """The count of prompts gave way to "edited passes: 0 of 6", for minutes."""
    import numba
    from numba.core import event

    import ln_probe.analyses.geometry.compiled  # noqa: F401

    heard: list[str] = []

    class Listener(event.Listener):
        def on_start(self, _event: event.Event) -> None:
            heard.append(str(progress.now()))

        def on_end(self, _event: event.Event) -> None: ...

    progress.tell("second pass", 3, 64, "prompts")
    progress.tell_inner("edited passes: 2 of 6")
    assert str(progress.now()) == "second pass: 3 of 64 prompts (edited passes: 2 of 6)"
    with event.install_listener("numba:compile", Listener()):
        numba.njit(lambda x: x + 1)(1.0)
    assert heard[0] == (
        "second pass: 3 of 64 prompts (edited passes: 2 of 6; compiling kernels: a minute or two, only the first time)"
    )
    assert "compiling" not in str(progress.now())
    progress.tell("second pass", 4, 64, "prompts")
    assert str(progress.now()) == "second pass: 4 of 64 prompts"
    progress.tell("")


def _elsewhere(path: Path) -> None:
    progress.write_to(path)
    progress.tell("edited passes", 3, 26)


def test_another_process_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "sign"
    assert progress.read(path) == progress.Progress()
    process = multiprocessing.get_context("fork").Process(target=_elsewhere, args=(path,))
    process.start()
    process.join()
    assert str(progress.read(path)) == "edited passes: 3 of 26"
    path.write_bytes(b'{"what": "half')
    assert progress.read(path) == progress.Progress()


def test_a_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("gpt2", None, "gpt2", "x")
    display = Display(quiet=True)
    display.workers = 2
    display.stages = lambda: [progress.Progress("edited passes", 3, 26, "", time.time())]
    display.began(target, Unit(CALIBRATION))
    assert display.line() == "gpt2: calibration · edited passes: 3 of 26"
    left = [Unit(PROMPTS, 0), Unit(PROMPTS, 1), Unit(REPORT)]
    display.ended(target, Unit(CALIBRATION), Outcome(DONE, "", 10.0, 400), left)
    assert "left" not in display.line(), "nobody knows yet how long prompts take"
    display.began(target, Unit(PROMPTS, 0))
    display.ended(target, Unit(PROMPTS, 0), Outcome(DONE, "", 30.0, 200), left[1:])
    assert "2 of 4 units" in display.line()
    assert display.line().endswith("15 s left"), "one more of thirty seconds, for two workers"
