"""How a command ends: exit status and last words."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from ln_probe.analyses.processes import Stopped
from ln_probe.analyses.text import shortened
from ln_probe.loading.hub import causes

# DONE: all as asked. SOME_FAILED: a model or a probe failed, or something else than asked was measured. After a signal
# the status is 128 plus its number: 130 after Ctrl-C, 143 after SIGTERM.
DONE, SOME_FAILED, BAD_ARGUMENTS = 0, 1, 2
TRACEBACK = "LN_PROBE_TRACEBACK"  # set: errors that nothing has caught are shown in full

# What libraries say, in errors of many classes, when the system gives them no more memory.
_NO_MEMORY = (
    "allocate memory",
    "unable to allocate",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
)


def refuse(message: str, status: int = BAD_ARGUMENTS) -> typer.Exit:
    """To be raised: says what is wrong with a command, which ends with this status."""
    short = re.sub(r"\S{1000,}", lambda word: shortened(word[0]), message)
    typer.echo(f"ln-probe: {short}", err=True)
    return typer.Exit(status)


@contextmanager
def refusing(*errors: type[Exception], status: int = BAD_ARGUMENTS) -> Iterator[None]:
    """Errors of these classes end the command with their message and this status."""
    try:
        yield
    except errors as error:
        raise refuse(str(error), status) from error


def interrupted(stop: BaseException) -> int:
    """The status after Ctrl-C or SIGTERM; says how to resume."""
    typer.echo(f"ln-probe: {Stopped.message}", err=True)
    return int(getattr(stop, "status", 130))


def last_words(error: BaseException) -> str:
    """What to say of an error that nothing has caught."""
    message = shortened(" ".join(str(error).split()), 300)
    if out_of_memory(error):
        return (
            f"not enough memory ({type(error).__name__}: {message or 'no more could be had'}): allow this command more "
            "(ulimit -v, or the limit of its job), or use fewer --workers, a smaller --batch-size or --max-tokens"
        )
    return f"{type(error).__name__}: {message}\nThis is a fault of ln_probe; {TRACEBACK}=1 shows where it is."


def why_failed(error: BaseException) -> str:
    """What to say of an error that costs a checkpoint its report."""
    if out_of_memory(error):
        return f"not enough memory ({error}): use fewer --workers, a smaller --batch-size or --max-tokens"
    return f"{type(error).__name__}: {error}"


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is about memory that could not be had."""
    for each in causes(error):
        if isinstance(each, MemoryError) or any(words in str(each).lower() for words in _NO_MEMORY):
            return True
        if isinstance(each, SystemError) and _memory_is_limited():  # C code that could not even make a MemoryError
            return True
    return False


def _memory_is_limited() -> bool:
    """Whether this process may have less memory than the machine has (`ulimit -v`)."""
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def writable(out: Path) -> None:
    """Exit if a folder cannot be written to."""
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise refuse(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
