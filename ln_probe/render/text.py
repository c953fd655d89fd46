"""Text from models and users as it may be shown: nothing in it acts, everything in it can be seen."""

from __future__ import annotations

LONGEST = 80  # characters of a token shown: longer ones would push everything else off the page


def disarmed(text: str) -> str:
    """Text whose control characters and direction marks are written out."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


def visible(text: object) -> str:
    """A token as it can be read: white space shown as well."""
    marks = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})
    return disarmed(str(text).translate(marks)) or "∅"


def shortened(text: str, longest: int = LONGEST) -> str:
    """Text of at most `longest` characters; what was cut is counted."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text)} characters)"
