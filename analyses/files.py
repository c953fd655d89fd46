"""Files: written so that no reader sees half of one, listed with their checksums, and read within bounds.

Three rules hold for every file of ln_probe:

* What we write is written beside its place and renamed into it (`replacing`).
* A folder that we write to has a manifest: a JSON file with its own checksum (`with_checksum`) that lists our files
  with theirs (`checksums`). Only listed files are ever checked, repaired or deleted (`first_damaged`,
  `remove_listed`). Folders that are ours as a whole (caches, temporary ones) hold a marker; a folder without it is
  left alone.
* What others may have written is read by `read_bytes`, `read_text`, `read_lines` or `read_json`: a regular file of at
  most so many bytes, counted while they are read. A named pipe, a device or a link to one is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

from ln_probe.analyses.arguments import path_of
from ln_probe.analyses.text import encodable

PARTIAL = ".partial"
CHECKSUM = "sha256"
# Bytes of a file that is read whole; the index of a checkpoint in 1000 parts has 20 MB, the largest tokenizers 35 MB.
LARGEST = 2**27
# Characters of a line, and of a prompt. A long book has a million.
LONGEST_LINE = 2**24
SECONDS = 10.0  # for a file that is read whole: a disk or a network that is slower does not answer
# Nesting that is read: configurations and our own files stay below 10, and what walks a tree by recursion (Python's
# own parser at about 1000, json.dumps, templates) must not meet one deeper than its stack.
DEEPEST = 64
MOST_BRACKETS = 2**21  # lists and objects of a file; the merges of the largest tokenizers are half a million

MARKER = ".made-by-ln_probe"
TEMPORARY = "ln-probe-"  # how the names of temporary folders begin

_BLOCK = 2**22  # bytes read at a time
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKETS = re.compile(r"[\[{\]}]")


class FileError(ValueError):
    """A file, or a line of one, cannot be read or is not what was written; the message names it."""


# ------------------------------------------------------------------------------------------------------------- writing


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to: renamed into place at the end, removed on failure; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    mine = f"{os.getpid()}-{threading.get_ident()}"  # two processes, or threads, may write the same result
    return path.with_name(f".{path.name}.{mine}{PARTIAL}")


def to_be_written(given: str | Path) -> Path:
    """The path of a file, tried before what it will hold is made: its folder is made, and takes a file.

    Raises:
        TypeError, ValueError: no path.
        OSError: a folder, or a file that cannot be written.
    """
    path = path_of(given)
    if os.path.isdir(path):  # pathlib raises for names that are too long
        raise IsADirectoryError(f"{path} is a folder: give a file, such as {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _aside(path).touch()
        _aside(path).unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written ({error.strerror}): choose another path") from error
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path` and rename into place; missing folders are made."""
    with replacing(path) as aside:
        aside.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """The same of a text, as UTF-8 (`encodable`)."""
    write_atomically(path, encodable(text).encode())


# ------------------------------------------------------------------------------------------------------------- reading


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened.
        FileError: it is a folder, a named pipe, a device or a socket. None of them is waited for.
    """
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind):
        raise FileError(f"{path}: {_KINDS.get(stat.S_IFMT(kind), 'something else than a file')}, not a file")
    # (If it is another one by now, this does not wait either.)
    return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Read a whole file.

    Args:
        path: a regular file.
        most: its largest size in bytes. They are counted as they are read.

    Raises:
        OSError: it cannot be opened or read.
        FileError: it is no regular file, has more bytes, or takes more than SECONDS.
    """
    end = time.monotonic() + SECONDS
    blocks, total = [], 0
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FileError(f"{path}: a file of {size} bytes (at most {most} are read)")
        while block := file.read(_BLOCK):
            blocks.append(block)
            total += len(block)
            if total > most:
                raise FileError(f"{path}: a file of more than {most} bytes (at most {most} are read)")
            if len(block) == _BLOCK and time.monotonic() > end:
                raise FileError(f"{path}: {total} bytes came in {SECONDS:.0f} seconds, and more are to come")
    return b"".join(blocks)


def read_text(path: Path, most: int = LARGEST, encoding: str = "utf-8") -> str:
    """Read a whole text file; arguments and errors as `read_bytes`, and FileError if it is not UTF-8."""
    try:
        return read_bytes(path, most).decode(encoding)
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file of any size, one after another, each with its line break.

    Raises:
        OSError: it cannot be opened or read.
        FileError: it is no regular file, not UTF-8, or has a line of more than LONGEST_LINE characters.
    """
    with TextIOWrapper(open_regular(path), "utf-8") as file:
        number = 0
        try:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise FileError(f"{path}, line {number}: longer than {LONGEST_LINE} characters")
                yield line
        except UnicodeDecodeError as error:
            raise FileError(f"{path} is not a readable UTF-8 text file: {error}") from error


def read_json(path: Path) -> Any:
    """What a JSON file says; errors as `read_text` and `parse_json`."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """What a JSON text says.

    Args:
        text: JSON.
        where: the file (and line) it is from, for errors.

    Raises:
        FileError: not JSON, nested deeper than DEEPEST, of more than MOST_BRACKETS lists and objects (which take 20
            times their text in memory), or with a whole number of thousands of digits.
    """
    brackets = text.count("[") + text.count("{")
    if brackets > MOST_BRACKETS:
        raise FileError(f"{where}: JSON of {brackets} lists and objects (at most {MOST_BRACKETS} are read)")
    if brackets > DEEPEST:
        depth = 0
        for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
            depth += 1 if bracket in "[{" else -1
            if depth > DEEPEST:
                raise FileError(f"{where}: JSON nested deeper than {DEEPEST} levels")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if "\n" in text.rstrip() else f"character {error.pos}"
        raise FileError(f"{where}: not JSON ({error.msg}, {at})") from error
    except ValueError as error:  # int() refuses what would take it minutes
        raise FileError(f"{where}: a whole number has too many digits to be one that is meant") from error


# ----------------------------------------------------------------------------------------------------------- checksums


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a regular file of any size, in constant memory."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_checksum(content: Mapping[str, Any]) -> bytes:
    """A JSON object as the bytes of a file, with a SHA-256 over everything that it says."""
    content = json.loads(json.dumps(content, allow_nan=False))  # as it will be read: keys are text, tuples lists
    return (json.dumps({**content, CHECKSUM: _checksum(content)}, indent=1, allow_nan=False) + "\n").encode()


def verify(held: Any, where: str) -> dict[str, Any]:
    """The content that `with_checksum` wrote, from what `read_json` returned.

    Raises:
        FileError: it is no object, has no checksum, or says something else than what was written.
    """
    if not isinstance(held, dict):
        raise FileError(f"{where}: holds a {type(held).__name__}, not an object")
    content = {k: v for k, v in held.items() if k != CHECKSUM}
    if held.get(CHECKSUM) != _checksum(content):
        raise FileError(f"{where}: its content is not what was written (its {CHECKSUM} differs)")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ what a manifest lists


def listed(manifest: Path) -> dict[str, str]:
    """The files that a manifest lists, with their checksums; none if there is no manifest or it is damaged."""
    try:
        files = verify(read_json(manifest), str(manifest))["files"]
        return {_plain(str(name)): str(digest) for name, digest in files.items()}
    except (OSError, FileError, KeyError, AttributeError):
        return {}


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files by name, as a manifest lists them."""
    return {name: sha256_of_file(folder / name) for name in names}


def first_damaged(folder: Path, files: Mapping[str, str]) -> str:
    """The first of a manifest's files that is missing or altered; empty if all are what was written."""
    for name, digest in files.items():
        try:
            if sha256_of_file(folder / _plain(name)) == digest:
                continue
        except (OSError, FileError):
            pass
        return name
    return ""


def remove_listed(folder: Path, names: Iterable[str]) -> None:
    """Delete the files that a manifest lists, and the folder if nothing else is in it."""
    for name in names:
        with suppress(IsADirectoryError, PermissionError):  # a user's folder of that name stays
            (folder / _plain(name)).unlink(missing_ok=True)
    with suppress(OSError):  # it is not there, or holds something that is not ours
        folder.rmdir()


def _plain(name: str) -> str:
    if name != Path(name).name or not name:
        raise FileError(f"a manifest lists {name!r}, which is no name of a file in its folder")
    return name


# ------------------------------------------------------------------------------------------ folders that are ours alone


def mark(folder: Path) -> None:
    """Mark a folder that we made: everything in it is ours, and may be deleted when it is not used any more."""
    write_text(folder / MARKER, "Made by ln_probe, which deletes this folder when it is not used any more.\n")


def is_marked(folder: Path) -> bool:
    """Whether a folder, and no link to one, holds the marker and belongs to this user."""
    try:
        status = folder.lstat()
        mine = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        return mine and stat.S_ISDIR(status.st_mode) and stat.S_ISREG((folder / MARKER).lstat().st_mode)
    except OSError:
        return False


@contextmanager
def temporary_folder(base: str | Path | None = None) -> Iterator[Path]:
    """A folder for as long as it lasts; those that killed processes left behind are removed on the way.

    Args:
        base: where it is made; None: where temporary files go.
    """
    from filelock import FileLock

    sweep(Path(base or tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=base))
    try:
        with FileLock(folder / _LOCK):  # held before the folder is marked, so that no other process sweeps it
            mark(folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_LOCK = ".lock"


def sweep(base: Path) -> None:
    """Remove the temporary folders of ours that no process holds any more."""
    from filelock import FileLock, Timeout

    with suppress(OSError):
        for folder in base.glob(f"{TEMPORARY}*"):
            if not is_marked(folder):
                continue
            with suppress(OSError, Timeout), FileLock(folder / _LOCK, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)


class Undo:
    """Removes what a command has made since, if it is refused.

    Args:
        out: the folder that the command writes to, whether it is there yet or not.
        own: a file or folder in it that is ours.
    """

    def __init__(self, out: Path, own: Path) -> None:
        self.own = own
        self.folders = [p for p in (out.absolute(), *out.absolute().parents) if not p.exists()]
        self.before = set(self._there())

    def _there(self) -> list[Path]:
        return [self.own, *self.own.rglob("*")] if os.path.lexists(self.own) else []

    def __call__(self, kept: Callable[[Path], bool] = lambda path: False) -> None:
        """Delete what is new in `own` and not `kept`, and the folders that were made for it if they are empty."""
        for path in sorted(set(self._there()) - self.before, reverse=True):  # what is inside before the folder
            if kept(path):
                continue
            with suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for folder in self.folders:  # the innermost first
            with suppress(OSError):
                folder.rmdir()
