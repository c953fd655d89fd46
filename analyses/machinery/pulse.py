"""What this process is doing, in a few words: said where the work is, read by whoever shows it, here or elsewhere.

    tell("gpt2: downloading", 120e6, 548e6, "B")

Saying something costs a microsecond; it reaches other processes through a small file, at most twice a second.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_SIZE = 1024  # bytes of the file: longer texts are cut
_EVERY = 0.5  # seconds between two writes


@dataclass(frozen=True)
class Pulse:
    """What is going on.

    Attributes:
        what: a stage, in words; empty: nothing.
        done, total: how much of it, and of how much; NaN if that is not known.
        unit: of both; "B" are bytes.
        since: when the stage began, in seconds of `time.time`.
    """

    what: str = ""
    done: float = 0.0
    total: float = math.nan
    unit: str = ""
    since: float = 0.0

    def __str__(self) -> str:
        if not self.what:
            return ""
        if math.isnan(self.total):
            return self.what if not self.done else f"{self.what}: {_amount(self.done, self.unit)}"
        if self.unit == "B":
            return f"{self.what}: {_amount(self.done, 'B')} of {_amount(self.total, 'B')}"
        return f"{self.what}: {self.done:.0f} of {self.total:.0f} {self.unit}".rstrip()


def _amount(value: float, unit: str) -> str:
    return f"{value / 1e6:.0f} MB" if unit == "B" else f"{value:.0f} {unit}".rstrip()


class _Slot:
    """The one of this process."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.file: int | None = None
        self.written = -math.inf


_slot = _Slot()


def tell(what: str, done: float = 0.0, total: float = math.nan, unit: str = "") -> None:
    """Say what is going on from now on; an empty `what`: nothing any more."""
    same = what == _slot.pulse.what
    _slot.pulse = Pulse(what, float(done), float(total), unit, _slot.pulse.since if same else time.time())
    if _slot.file is not None and (not same or time.monotonic() - _slot.written >= _EVERY):
        _slot.written = time.monotonic()
        plain = {k: v for k, v in asdict(_slot.pulse).items() if v == v}
        text = json.dumps(plain | {"what": what[: _SIZE // 8]}).encode()
        try:
            os.pwrite(_slot.file, text.ljust(_SIZE), 0)
        except OSError:  # a full disk is told of where results are written
            _slot.file = None


def now() -> Pulse:
    """What this process said last."""
    return _slot.pulse


def write_to(path: Path) -> None:
    """Let other processes read it, from this file, which is made."""
    _slot.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _slot.written = -math.inf


def read(path: Path) -> Pulse:
    """What the process that writes to this file said last; nothing, if there is none or it is writing now."""
    try:
        return Pulse(**json.loads(path.read_bytes()[:_SIZE]))
    except (OSError, ValueError, TypeError):
        return Pulse()
