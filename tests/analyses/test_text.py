"""Numbers and tokens as text, and what texts say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ln_probe.analyses.text import (
    FileError,
    check_flags,
    counted,
    disarmed,
    number,
    percent,
    read_json,
    received,
    replacing,
    shortened,
    signed,
    step_named,
    visible,
    whole_number,
    with_interval,
    write_text,
)


def test_numbers_as_text() -> None:
    assert [percent(v) for v in (0.0, 9e-6, 2e-5, 0.0123, 0.0999, 0.1, 0.456)] == [
        "0 %", "less than 0.001 %", "0.002 %", "1.2 %", "10 %", "10 %", "46 %"
    ]  # fmt: skip
    assert [signed(v) for v in (0.333, -99.4, 99.6, -190.4)] == ["+0.33", "-99", "+100", "-190"]
    assert [counted(n, "head") for n in (0, 1, 4)] == ["0 heads", "1 head", "4 heads"]
    assert number(1234.5) == "1.23e+03"
    for given, texts in (
        ((0.28, 0.256, 0.304), ("+0.280", "+0.256 to +0.304")), ((12.0, 2.0, 52.0), ("+12", "+2 to +52")),
        ((-0.0001, -0.1, 0.1), ("+0.00", "-0.10 to +0.10")), ((5.0, math.nan, 6.0), ("+5", "")),
        ((2e-9, 1e-9, 3e-9), ("+2e-09", "+1e-09 to +3e-09")), ((0.5, 0.5, 0.5), ("+0.5", "+0.5 to +0.5")),
    ):  # fmt: skip
        assert with_interval(*given) == texts


def test_what_texts_say() -> None:
    assert [whole_number(t) for t in (" 12 ", "1" * 9, "1" * 10, "-1", "1.0", "²", "")] == [12, 111111111] + [None] * 5
    names = ("step1000", "checkpoint-20", "step_3", "1000", "step", "mystep1", "step" + "1" * 19)
    assert [step_named(name) for name in names] == [1000, 20, 3, None, None, None, None]
    assert visible(" a\n\t\r") == "·a⏎⇥␍"
    assert visible("") == "∅"
    assert disarmed("a\u202eb\nc\x00") == "a\\u202eb\nc\\u0000"
    assert (shortened("abc", 3), shortened("abcd", 3)) == ("abc", "abc… (4 characters)")
    assert [received(v) for v in (None, "x", 2.5, int, [1])] == ["None", "'x'", "2.5", "the class int", "a list"]
    check_flags(one=True, two=np.bool_(False))
    for wrong in ("no", 1, None):
        with pytest.raises(TypeError, match="one must"):
            check_flags(one=wrong)


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.json"
    write_text(path, '{"a": "\ud800"}')
    assert read_json(path) == {"a": "\ud800"}
    with pytest.raises(TypeError), replacing(path) as aside:
        aside.write_bytes("[]")  # type: ignore[arg-type]
    assert read_json(path) == {"a": "\ud800"}
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(path) == [1]
    for content in (b"\xff", b"[", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"a\.json"):
            read_json(path)
