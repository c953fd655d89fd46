"""Numbers and tokens as text, and what texts say."""

from __future__ import annotations

import math

from ln_probe.analyses.text import (
    counted,
    number,
    percent,
    signed,
    with_interval,
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
