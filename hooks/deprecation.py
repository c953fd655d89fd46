"""Warn about public names, arguments and values that will be removed (docs/stability.md)."""

from __future__ import annotations

import warnings


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
