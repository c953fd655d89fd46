"""What can be seen to be wrong with a command before anything is loaded or written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ln_probe.batch.suite import Target

# Layers that can be asked for by number; the deepest language models have some hundreds.
LAYERS_AT_MOST = 10_000


def layers(text: str) -> tuple[int, ...]:
    """Layers and ranges of layers, 0,3-5, in order.

    Raises:
        ValueError: something else, no layer, or one beyond LAYERS_AT_MOST.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or len(first) + len(last) > 2 * 9:
            raise ValueError(f"--layers takes numbers and ranges such as 0,3-5, got {_short(text)}")
        start, end = int(first), int(last or first)
        if max(start, end) >= LAYERS_AT_MOST:
            raise ValueError(f"--layers {_short(text)}: no model has a layer {max(start, end)}")
        found.update(range(start, end + 1))
    if not found:
        raise ValueError(f"--layers {_short(text)} names no layer")
    return tuple(sorted(found))


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")


def check_precision(dtype: str, device: str | None) -> None:
    """Raise ValueError for a format or a device that there is not."""
    from ln_probe.models import device_named, dtype_named

    dtype_named(dtype)
    if device is not None:
        device_named(device)


def check_layers(wanted: Sequence[int] | None, targets: Sequence[Target]) -> None:
    """Raise ValueError if a layer is asked for that a model lacks, as far as its configuration says how many it has."""
    from ln_probe.batch.cost import shape_of

    for target in targets if wanted else ():
        count = shape_of(target).get("layers")
        wrong = [layer for layer in wanted or () if count is not None and layer >= count]
        if wrong:
            raise ValueError(f"no layer {wrong[0]}: {target.label} has layers 0 … {int(count or 0) - 1}")


def check_writable(out: Path) -> None:
    """Raise OSError if a folder cannot be written to, or not be made."""
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    with tempfile.TemporaryFile(dir=there):
        pass


def not_there_yet(out: Path) -> list[Path]:
    """The folders that writing to `out` will make, the innermost first."""
    return [p for p in (out.absolute(), *out.absolute().parents) if not p.exists()]


def remove_again(made: Sequence[Path], work: Path, *, new: bool) -> None:
    """Undo what a command that was refused has made: its working folder, if it was new, and folders that are empty."""
    if new:
        shutil.rmtree(work, ignore_errors=True)
    for folder in made:
        if not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()
