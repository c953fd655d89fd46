"""Files that are written aside and renamed into place, so that no reader sees half of one; text, JSON and hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ln_probe.analyses.text import encodable, path_of

PARTIAL = ".partial"  # ends the name of a file that is being written


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


def to_be_written(given: str | Path) -> Path:
    """Return the path of a file, after its folder has been made and shown to take a file.

    Raises:
        TypeError, ValueError: no path.
        OSError: a folder, or a file that cannot be written.
    """
    path = path_of(given)
    if os.path.isdir(path):  # pathlib raises for names that are too long
        raise IsADirectoryError(f"{path} is a folder: give a file, such as {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written ({error.strerror}): choose another path") from error
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file aside and rename it into place; missing folders are made."""
    with replacing(path) as aside:
        aside.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file, in UTF-8, as `write_atomically` does."""
    write_atomically(path, encodable(text).encode())


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the content of a text file.

    Raises:
        OSError: it cannot be read.
        FileError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; errors as `read_text` and `parse_json`."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """Return what a JSON text says; `where` is the file (and line) it is from.

    Raises:
        FileError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: not JSON ({error})") from error


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_labels(path: Path) -> list[str]:
    """Return the group labels of a file, a line for each prompt.

    Raises:
        OSError: it cannot be read.
        FileError: it is not UTF-8, or a line holds no label.
    """
    labels = read_text(path).splitlines()
    empty = next((number for number, label in enumerate(labels, start=1) if not label.strip()), 0 if labels else 1)
    if empty:
        raise FileError(f"{path}: line {empty} holds no label; write one label a line, a line for each prompt")
    return labels
