"""How a command ends: exit status and last words."""

from __future__ import annotations

from pathlib import Path

import typer

from ln_probe.batch.arguments import check_writable

DONE, SOME_FAILED, BAD_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130
GOES_ON = "stopped; the same command goes on from here"


def refuse(message: str) -> typer.Exit:
    """To be raised: says what is wrong with a command, which ends with BAD_ARGUMENTS."""
    typer.echo(f"ln-probe: {message}", err=True)
    return typer.Exit(BAD_ARGUMENTS)


def interrupted() -> typer.Exit:
    """To be raised after Ctrl-C in a command that can go on."""
    typer.echo(f"ln-probe: {GOES_ON}", err=True)
    return typer.Exit(INTERRUPTED)


def writable(out: Path) -> None:
    """Exit if a folder cannot be written to."""
    try:
        check_writable(out)
    except OSError as error:
        raise refuse(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
