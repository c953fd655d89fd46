"""A TOML file of options: `--config FILE`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ln_probe.analyses.machinery.files import FileError, read_text
from ln_probe.batch.endings import refuse

if TYPE_CHECKING:
    from typer import Context
else:  # what is handed to a callback is of the class below the one that typer exports
    Context = typer.Context.__base__

LARGEST = 2**20  # bytes of a file of options


def read_options(context: Context, path: Path | None) -> Path | None:
    """Put a file's options in the place of the command's defaults (a callback of the option that names it)."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_read(context, path)}
    return path


def _read(context: Context, path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(read_text(path, LARGEST))
    except (OSError, FileError, tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise refuse(f"--config {path} cannot be read ({said}): give a TOML file such as max-tokens = 256") from error
    known = {
        _spelled(name): option
        for option in context.command.params
        for name in (option.opts[-1], option.name or "")
        if option.name not in ("config", "help")
    }
    if unknown := [key for key in found if _spelled(key) not in known]:
        options = ", ".join(sorted({option.opts[-1].lstrip("-") for option in known.values()}))
        raise refuse(f"--config {path}: unknown option {unknown[0]!r}; {context.command.name} takes {options}")
    values: dict[str, Any] = {}
    for key, value in found.items():
        option = known[_spelled(key)]
        values[str(option.name)] = _value(value, f"--config {path}: {key}", several=option.nargs != 1)
    return values


def _spelled(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _value(value: Any, where: str, *, several: bool) -> Any:
    """As the command line would have it: a list is what stands there between commas."""
    if isinstance(value, list) and all(isinstance(v, str | int) and not isinstance(v, bool) for v in value):
        return [str(v) for v in value] if several else ",".join(map(str, value))
    if isinstance(value, str | int | float | bool):
        return [str(value)] if several else value
    raise refuse(f"{where} is {value!r}: an option is a text, a number, true or false, or a list of texts or numbers")
