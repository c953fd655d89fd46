"""Warn about public names, arguments and values that will be removed (docs/stability.md)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module


def deprecated(name: str, instead: str, since: str, gone: str, *, level: int = 1) -> None:
    """Warn (`DeprecationWarning`) that a name, an argument or a value will be removed.

    Args:
        name: what was used, as it is written.
        instead: what to write now.
        since: the version that warns first.
        gone: the version that removes it.
        level: callers between this and the line that the warning names; 1: the caller of the function that calls this.
    """
    message = f"{name} is deprecated since ln_probe {since} and will be gone in {gone}: use {instead}"
    warnings.warn(message, DeprecationWarning, stacklevel=level + 2)


def renamed(module: str, names: Mapping[str, str], since: str, gone: str) -> Callable[[str], object]:
    """Return the `__getattr__` of a module whose public names had other names before; each warns.

    Args:
        module: the module's name; names: new names by old ones; since, gone: as of `deprecated`.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        deprecated(f"{module}.{name}", f"{module}.{names[name]}", since, gone)
        return getattr(import_module(module), names[name])

    return find
