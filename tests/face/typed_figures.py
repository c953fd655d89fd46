"""Figures of a page that are typed: what stands outside made blocks and code, and looks like a measurement."""

from __future__ import annotations

import re

_NOT_READ = re.compile(
    r"^<!-- made: .*?^<!-- end -->"  # made of committed tables
    r"|^```.*?^```|^(?: {4}|\t).*?$|`[^`\n]*`"  # code
    r"|\]\([^)]*\)|^\s*\|[-| :]+\|$",  # where a link leads, lines of tables
    re.DOTALL | re.MULTILINE,
)
_UNITS = (
    r"%|per cent|×(?! ?\d)|times|[mμ]?s|seconds?|min|minutes?|h|hours?|[kMG]i?B|bits|GFLOP(?:/s)?|nats?|points|passes"
)
_WORDS = "half an?|about an?|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|fifty|hundred|thousand"
_NUMBER = r"(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d+)*(?:e[+-]?\d+|[⁻⁰¹²³⁴-⁹]+)?"
_FIGURE = re.compile(
    rf"(?<![\w.-])[+−-]?(?:\d+(?:\.\d+)?·)?{_NUMBER}(?!\w)(?: ?(?:{_UNITS})(?!\w))?"
    rf"|\b(?:{_WORDS}) (?:times|per cent|seconds?|minutes?|hours?|pass|passes)\b"
)
_MEASURED = re.compile(r"\.\d|\de[+-]?\d|[⁻⁰¹²³⁴-⁹]|\d{3}|[^\d+−-]")  # not: a plain number below a hundred


def typed_figures(page: str) -> set[str]:
    """Decimals, powers, numbers of three digits or more, and whatever has a unit, in digits or in words."""
    text = re.sub(r"\s+", " ", _NOT_READ.sub(" ", page))
    return {m[0] for m in _FIGURE.finditer(text) if _MEASURED.search(m[0])}
