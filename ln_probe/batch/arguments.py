"""What can be seen to be wrong with a command before anything is loaded or written."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ln_probe.analyses.probes.text import quoted, whole_number

if TYPE_CHECKING:
    from ln_probe.batch.suite import Target

# Layers and heads that can be asked for by number; the deepest and widest language models have some hundreds.
AT_MOST = 10_000


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Layers, or heads, and ranges of them, 0,3-5, in order.

    Args:
        text: as typed.
        what: "layer" or "head".

    Raises:
        ValueError: something else, none, or one beyond AT_MOST.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start, end = whole_number(first), whole_number(last if dash else first)
        if start is None or end is None:
            raise ValueError(f"--{what}s takes numbers and ranges such as 0,3-5, got {quoted(text)}")
        if max(start, end) >= AT_MOST:
            raise ValueError(f"--{what}s {quoted(text)}: no model has a {what} {max(start, end)}")
        found.update(range(start, end + 1))
    if not found:
        raise ValueError(f"--{what}s {quoted(text)} names no {what}")
    return tuple(sorted(found))


def check_precision(dtype: str | None, device: str | None) -> None:
    """Raise ValueError for a format or a device that there is not."""
    from ln_probe.models import device_named, dtype_named

    if dtype is not None:
        dtype_named(dtype)
    if device is not None:
        device_named(device)


def check_formats(dtype: str | None, targets: Sequence[Target]) -> None:
    """Raise ValueError if a compiled program is asked for in a format in which it is another function."""
    from ln_probe.analyses.lab.arithmetic import arithmetic_of
    from ln_probe.models import dtype_named, kind_of, other_function

    for target in targets if dtype is not None else ():
        path = Path(target.name).expanduser()
        if target.error or kind_of(target.name, path) != "lab":
            continue
        try:
            own = arithmetic_of(path)
        except (OSError, ValueError):  # as loading it will say
            continue
        if own.bound and own.dtype != dtype_named(str(dtype)):
            raise ValueError(other_function(target.name, own.dtype, dtype_named(str(dtype))))


def check_layers(wanted: Sequence[int] | None, targets: Sequence[Target]) -> None:
    """Raise ValueError if a layer is asked for that a model lacks, as far as its configuration says how many it has."""
    _check(wanted, targets, "layer")


def check_heads(wanted: Sequence[int] | None, targets: Sequence[Target]) -> None:
    """Raise ValueError if a head is asked for that a model lacks, as far as its configuration says how many it has."""
    _check(wanted, targets, "head")


def _check(wanted: Sequence[int] | None, targets: Sequence[Target], what: str) -> None:
    from ln_probe.batch.cost import shape_of

    for target in targets if wanted else ():
        count = shape_of(target).get(f"{what}s")
        wrong = [number for number in wanted or () if count is not None and number >= count]
        if wrong:
            raise ValueError(f"no {what} {wrong[0]}: {target.label} has {what}s 0 … {int(count or 0) - 1}")


def check_writable(out: Path) -> None:
    """Raise OSError if a folder cannot be written to, or not be made."""
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    with tempfile.TemporaryFile(dir=there):
        pass
