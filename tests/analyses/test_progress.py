"""The line that shows how far a long call is."""

from __future__ import annotations

import pytest

from ln_probe.analyses.progress import ProgressLine, TimeLeft, about, tell, tell_inner, tell_left


def test_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as line:
        line._printed -= 60  # as after a minute
        tell("second pass", 2, 64, "prompts")
        tell("second pass", 3, 64, "prompts")
    assert capsys.readouterr().err == "0:00  second pass: 2 of 64 prompts\n"
    with ProgressLine(quiet=True):
        tell("working")
    assert capsys.readouterr().err == ""


def test_the_inner_line_shows_nothing_of_its_own() -> None:
    seconds: list[float] = []
    with ProgressLine(quiet=True, on_left=seconds.append) as outer, ProgressLine():
        tell("second pass", 3, 64, "prompts")
        tell_inner("edited passes: 2 of 6")
        tell_left(38.0)
    assert str(outer) == "0:00  second pass: 3 of 64 prompts, about 40 s left (edited passes: 2 of 6)"
    assert seconds == [38.0]
    tell("nobody shows this")


def test_the_time_left_is_that_of_each_kind_of_step() -> None:
    work = TimeLeft({"keys": 2, "heads": 10})
    for prompt in range(4):
        for kind, seconds in (("keys", 5.0), ("heads", 2.0 + 7.0 * (prompt == 0))):
            if kind == "heads" or prompt < 2:
                work.add(kind, seconds)
    assert work.left == pytest.approx(6 * 2.0)  # the first step of heads took longer
    assert [about(seconds) for seconds in (4.4, 43.0, 200.0)] == ["about 4 s", "about 45 s", "about 3 min"]
    assert [about(s) for s in (14.4, 15.0, 59.0, 64.0, 99.0, 100.0)] == [
        "about 14 s", "about 15 s", "about 60 s", "about 60 s", "about 100 s", "about 2 min"
    ]  # fmt: skip


def test_a_notebook_shows_one_line_and_empties_it(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display", reason="a notebook has it")
    shown: list[str | None] = []

    def show(_: object, data: dict[str, str], *, raw: bool) -> None:
        assert raw, "the data are texts by their types, and not an object to be shown"
        shown.append(data.get("text/plain"))

    for name in ("display", "update"):
        monkeypatch.setattr(display.DisplayHandle, name, show)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with ProgressLine():
        tell("second pass", 2, 64, "prompts")
    assert shown[1:] == ["0:00  second pass: 2 of 64 prompts", None]
