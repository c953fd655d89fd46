"""Text and numbers as they may be shown (control characters are escaped), and checks of what users pass."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

_MOST_DECIMALS = 6  # of a change beside its interval
LONGEST = 80  # characters of a token shown: longer ones would push everything else off the page


def disarmed(text: str) -> str:
    """Text whose control characters and direction marks are written out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


def encodable(text: str) -> str:
    """Text that can be written: halves of a surrogate pair, which are no characters, stand as \\ud800 and the like."""
    return text.encode("utf-8", "backslashreplace").decode()


def visible(text: object) -> str:
    """A token as it can be read: white space shown as well."""
    marks = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})
    return disarmed(str(text).translate(marks)) or "∅"


def shortened(text: str, longest: int = LONGEST) -> str:
    """Text of at most `longest` characters; what was cut is counted."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text)} characters)"


def counted(count: float, what: str) -> str:
    """ "1 head", "4 heads"."""
    return f"{count:.0f} {what}{'' if count == 1 else 's'}"


def number(value: float) -> str:
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share in %, two digits where it is small."""
    if 0 < share < 1e-5:
        return "less than 0.001 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def signed(value: float) -> str:
    """A change, two digits where it is small: "+0.33", "-190"."""
    return f"{value:+.2g}" if abs(value) < 99.5 else f"{value:+.0f}"


def with_interval(value: float, low: float, high: float) -> tuple[str, str]:
    """A change and its interval with equal decimals, two digits of the interval's width: "+0.280", "+0.256 to +0.304".

    The interval is empty where an end is not known; the change is then `signed`.
    """
    width = high - low
    if not math.isfinite(width):
        return signed(value), ""
    decimals = 1 - math.floor(math.log10(width)) if width > 0 else _MOST_DECIMALS + 1
    form = "+.2g" if decimals > _MOST_DECIMALS else f"+.{max(0, decimals)}f"
    size = f"{value:{form}}"
    return size if float(size) else size.replace("-", "+"), f"{low:{form}} to {high:{form}}"  # no -0


def signed_percent(share: float) -> str:
    """A change in %: "+7.6 %", "-190 %"."""
    text = percent(abs(share))
    return text if share == 0 or text.startswith("less") else f"{'-' if share < 0 else '+'}{text}"


def quoted(text: str, most: int = 60) -> str:
    """The same in quotes; what is no printable character is escaped."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}… ({len(text)} characters)"


def whole_number(text: str, digits: int = 9) -> int | None:
    """The number that a text of at most so many ASCII digits says; None if it says something else."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


_STEP_NAME = re.compile(r"(?:step|checkpoint)[-_ ]?([0-9]{1,18})")


def step_named(name: str) -> int | None:
    """Return the training step that a branch, folder or revision names (step1000, checkpoint-1000), or None.

    Digits alone may be a date or a commit's hash.
    """
    match = _STEP_NAME.fullmatch(name)
    return None if match is None else int(match[1])


# --------------------------------------------------------------------------------------------- arguments of users


def received(value: object) -> str:
    """A wrong argument for an error: plain values as they are, of any other (a model, a table) its type."""
    if value is None or isinstance(value, str | bytes | int | float):
        return f"{value!r:.80}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_flags(**flags: object) -> None:
    """Raise TypeError for a flag that is neither True nor False: the text "no" would count as True."""
    import numpy as np  # (the command line's help does without)

    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, got {received(value)}")


def check_text(name: str, value: object) -> None:
    """Raise TypeError for what is not a text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {received(value)}")


def path_of(value: Any, name: str = "path") -> Path:
    """The path that a text or a `pathlib.Path` names; TypeError for anything else, ValueError for an empty text."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a text or a pathlib.Path, got {received(value)}")
    if value == "":
        here = ": write . for the current folder" if name == "folder" else ": give a path"
        raise ValueError(f"{name} is empty{here}")
    return Path(value)
