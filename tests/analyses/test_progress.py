"""The line that shows how far a long call is."""

from __future__ import annotations

import pytest

from ln_probe.analyses.progress import ProgressLine, tell, tell_inner


def test_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as line:
        line._printed -= 60  # as after a minute
        tell("gpt2: downloading", 212e6, 548e6, "B")
        tell("gpt2: downloading", 213e6, 548e6, "B")
    assert capsys.readouterr().err == "0:00:00  gpt2: downloading: 212 of 548 MB\n"
    with ProgressLine(quiet=True):
        tell("working")
    assert capsys.readouterr().err == ""


def test_the_inner_line_shows_nothing_of_its_own() -> None:
    with ProgressLine(quiet=True) as outer, ProgressLine():
        tell("second pass", 3, 64, "prompts")
        tell_inner("edited passes: 2 of 6")
    assert str(outer).endswith("second pass: 3 of 64 prompts (edited passes: 2 of 6)")
    tell("nobody shows this")


def test_the_time_left_is_shown_once_it_is_more_than_a_guess() -> None:
    with ProgressLine(quiet=True) as line:
        tell("pass", 1, 4, "prompts")
        assert "left" not in str(line)
        line.stage_started -= 60
        assert str(line).endswith("0:03:00 left")
