"""What many public functions require of their arguments, checked before any work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LARGEST_SEED = 10**18  # torch takes 63 bits


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


def check_text(name: str, value: object) -> None:
    """Raise TypeError for what is not a text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {received(value)}")


def path_of(value: Any, name: str = "path") -> Path:
    """The path that a text or a `pathlib.Path` names; TypeError for anything else, ValueError for an empty text."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a text or a pathlib.Path, got {received(value)}")
    if value == "":
        here = ": write . for the current folder" if name == "folder" else ": give a path"
        raise ValueError(f"{name} is empty{here}")
    return Path(value)
