"""JSON that others may have written: read within bounds, and refused in words that name the file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Nesting that is read: configurations and our own files stay below 10, and what walks a tree by recursion (Python's
# own parser at about 1000, json.dumps, templates) must not meet one deeper than its stack.
DEEPEST = 64
# Bytes of a file that is read whole; the index of a checkpoint in 1000 parts has 20 MB.
LARGEST = 256 * 2**20
SEAL = "sha256"

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class JsonError(ValueError):
    """A file or a line of one is not JSON that can be read, or not what was written."""


def parse(text: str, where: str) -> Any:
    """What a JSON text says.

    Args:
        text: JSON.
        where: the file (and line) it is from, for errors.

    Raises:
        JsonError: not JSON, nested deeper than DEEPEST, or with a whole number of thousands of digits.
    """
    if text.count("[") + text.count("{") > DEEPEST:
        depth = 0
        for found in _BRACKETS.finditer(text):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
            if depth > DEEPEST:
                raise JsonError(f"{where}: JSON nested deeper than {DEEPEST} levels (at character {found.start()})")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"character {error.pos}"
        raise JsonError(f"{where}: not JSON ({error.msg}, {at})") from error
    except ValueError as error:  # int() refuses what would take it minutes
        raise JsonError(f"{where}: a whole number has too many digits to be one that is meant") from error


def read(path: Path) -> Any:
    """What a JSON file says.

    Raises:
        OSError: it cannot be read.
        JsonError: as `parse`; it is larger than LARGEST, or not UTF-8.
    """
    size = path.stat().st_size
    if size > LARGEST:
        raise JsonError(f"{path}: a JSON file of {size} bytes (at most {LARGEST} are read)")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return parse(text, str(path))


def sealed(content: Mapping[str, Any]) -> bytes:
    """A JSON object as a file, with a SHA-256 over everything that it says."""
    content = json.loads(json.dumps(content, allow_nan=False))  # as it will be read: keys are text, tuples lists
    return (json.dumps({**content, SEAL: _seal(content)}, indent=1, allow_nan=False) + "\n").encode()


def opened(held: Any, where: str) -> dict[str, Any]:
    """The content that `sealed` wrote, from what `read` says.

    Raises:
        JsonError: it is no object, has no seal, or says something else than what was written.
    """
    if not isinstance(held, dict):
        raise JsonError(f"{where}: holds a {type(held).__name__}, not an object")
    content = {k: v for k, v in held.items() if k != SEAL}
    if held.get(SEAL) != _seal(content):
        raise JsonError(f"{where}: its content is not what was written (its {SEAL} differs)")
    return content


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
