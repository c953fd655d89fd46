"""Results whose fields are tensors or long mappings show themselves in one line, as a cell of a notebook needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

LINE = 160  # characters of a whole line
TEXT = 40  # of a text in it
FEW = 4  # entries of a tuple, list or mapping that are written out


class OneLine:
    """A dataclass (made with `repr=False`) that shows its fields in a line: shapes of tensors, sizes of lists."""

    def __repr__(self) -> str:
        shown = [f.name for f in fields(self) if f.repr and not f.name.startswith("_")]  # type: ignore[arg-type]
        text = f"{type(self).__name__}({', '.join(f'{name}={brief(getattr(self, name))}' for name in shown)})"
        return text if len(text) <= LINE else text[: LINE - 2] + "…)"


def brief(value: Any) -> str:
    """A value in a few words."""
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"<{str(value.dtype).removeprefix('torch.')} {' × '.join(map(str, shape))}>"
    if shape is not None:
        return f"{value.item():.4g}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value if len(value) <= TEXT else value[: TEXT - 1] + "…")
    if isinstance(value, Mapping):
        if len(value) > FEW:
            return f"<{len(value)} entries>"
        return "{" + ", ".join(f"{key!r}: {brief(v)}" for key, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        if len(value) > FEW:
            return f"<{len(value)} of them>"
        inside = ", ".join(map(brief, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return " ".join(repr(value).split())
