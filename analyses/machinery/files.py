"""Writing a file so that nobody ever sees half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to: renamed into place at the end, removed on failure; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")  # two processes may write the same result
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path` and rename into place; missing folders are made."""
    with replacing(path) as aside:
        aside.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """The same of a text; halves of a surrogate pair, which no encoding has, stand as \\ud800 and the like."""
    write_atomically(path, text.encode("utf-8", "backslashreplace"))
