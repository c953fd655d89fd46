"""Text: as it may be shown (control characters escaped), as files that are written aside and renamed into place,
so that no reader sees half of one, and as what users pass."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # ends the name of a file that is being written
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


# ----------------------------------------------------------- arguments of users


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


# ------------------------------------------------------------------------ files


class FileError(ValueError):
    """A file is not what it should be: the message names it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to; rename it to `path` at the end, remove it after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file aside and rename it into place; missing folders are made."""
    with replacing(path) as aside:
        aside.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file, in UTF-8, as `write_atomically` does."""
    write_atomically(path, encodable(text).encode())


def read_text(path: Path) -> str:
    """Return the content of a text file in UTF-8, without the byte order mark of some editors.

    Raises:
        OSError: it cannot be read.
        FileError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: it cannot be read.
        FileError: it is not UTF-8, or not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON ({error})") from error


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
