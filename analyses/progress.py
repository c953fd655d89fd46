"""What this process is doing, and the line that shows it.

    tell("gpt2: downloading", 120e6, 548e6, "B")
    tell_inner("layer 3 of 12")  # of the prompt that is being measured

They cost microseconds and reach other processes through a small file, at most twice a second. `ProgressLine` shows a
line that moves on a terminal, and plain lines anywhere else: one after a second, then at least one every 30 seconds.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from io import TextIOBase
from pathlib import Path
from typing import IO, cast

import rich.live
from rich.console import Console
from rich.text import Text

_SIZE, _LETTERS = 2048, 64  # bytes of the file, and letters of its texts (a stage: twice as many): longer ones are cut
_EVERY = 0.5  # seconds between two writes


@dataclass(frozen=True)
class Progress:
    """What a process is doing.

    Attributes:
        what: the stage, as text; empty if there is none.
        done, total: how much of it is done, and of how much; NaN if that is not known.
        unit: of both; "B" are bytes.
        since: when the stage began, in seconds of `time.time`.
        inner: what is being done for the prompt at hand.
        delay: what the stage waits for.
    """

    what: str = ""
    done: float = 0.0
    total: float = math.nan
    unit: str = ""
    since: float = 0.0
    inner: str = ""
    delay: str = ""

    def __str__(self) -> str:
        if not self.what:
            return ""
        size, of, unit = (1e6, " MB of", "MB") if self.unit == "B" else (1.0, " of", self.unit)
        text = self.what
        if not math.isnan(self.total):
            text += f": {self.done / size:.0f}{of} {self.total / size:.0f} {unit}"
        elif self.done:
            text += f": {self.done / size:.0f} {unit}"
        more = "; ".join(text for text in (self.inner, self.delay) if text)
        return f"{text.rstrip()} ({more})" if more else text.rstrip()


_progress = Progress()  # of this process
_file: int | None = None  # from which other processes read it
_written = -math.inf
_lines = 0  # `ProgressLine`s of this process
_delay_printed = False


def tell(what: str, done: float = 0.0, total: float = math.nan, unit: str = "") -> None:
    """Set what this process is doing from now on; an empty `what`: nothing."""
    same = what == _progress.what
    since = _progress.since if same else time.time()
    _set(Progress(what, float(done), float(total), unit, since, delay=_progress.delay), at_once=not same)


def tell_inner(text: str) -> None:
    """Set what is being done for the prompt at hand; the stage and its count stay."""
    _set(replace(_progress, inner=text), at_once=False)


def tell_delay(text: str) -> None:
    """Set what the stage waits for; empty: nothing. A terminal on which no `ProgressLine` is shown gets one line."""
    global _delay_printed
    _set(replace(_progress, delay=text), at_once=True)
    if text and not _delay_printed and not _lines and _file is None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        if console.is_terminal or console.is_jupyter:
            _delay_printed = True
            console.print(f"ln_probe: {text}", markup=False)


def _set(found: Progress, *, at_once: bool) -> None:
    global _progress, _file, _written
    _progress = found
    if _file is not None and (at_once or time.monotonic() - _written >= _EVERY):
        _written = time.monotonic()
        plain = {k: v for k, v in asdict(found).items() if v == v}
        cut = {"what": found.what[: 2 * _LETTERS], "inner": found.inner[:_LETTERS], "delay": found.delay[:_LETTERS]}
        text = json.dumps(plain | cut).encode()
        try:
            os.pwrite(_file, text.ljust(_SIZE), 0)
        except OSError:  # the code that writes results reports a full disk
            _file = None


def now() -> Progress:
    """What this process is doing."""
    return _progress


def write_to(path: Path) -> None:
    """Make a file from which other processes can `read` what this one is doing."""
    global _file, _written
    _file, _written = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), -math.inf


def read(path: Path) -> Progress:
    """What the process that writes to this file is doing; empty if there is none, or if it is writing now."""
    try:
        return Progress(**json.loads(path.read_bytes()[:_SIZE]))
    except (OSError, ValueError, TypeError):
        return Progress()


FIRST = 0.5  # seconds until the first line, so that it appears within two, Python's own start included
EVERY = 25.0  # seconds between lines: thirty are documented, and a busy machine is late
_TICK, _FRAMES = 0.25, 4
# The remaining time of a stage is shown after so many seconds and such a share of it: earlier, it would be a guess.
_SOONEST, _LEAST = 3.0, 0.02


class ProgressLine:
    """Shows what is going on until it is left.

    Args:
        status: one line about it; by default what this process is doing (`now`).
        quiet: show nothing but what is `say`d.
        stream: where to; standard error by default.
    """

    def __init__(
        self, status: Callable[[], str] | None = None, *, quiet: bool = False, stream: TextIOBase | None = None
    ) -> None:
        self.status = status or here
        self.quiet = quiet
        self.console = Console(
            file=cast("IO[str] | None", stream), stderr=stream is None, highlight=False, soft_wrap=True
        )
        self.begun = self._next = time.monotonic()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._moving: rich.live.Live | None = None

    def __enter__(self) -> ProgressLine:
        global _lines
        _lines += 1
        self.begun = time.monotonic()
        self._next = self.begun + FIRST
        if self.quiet:
            return self
        if self.console.is_terminal or self.console.is_jupyter:
            self._moving = rich.live.Live(
                get_renderable=self._line, console=self.console, transient=True, refresh_per_second=_FRAMES
            )
            self._moving.start()
        else:
            self._thread = threading.Thread(target=self._run, daemon=True, name="ln-probe display")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _lines
        _lines -= 1
        self._over.set()
        tell("")
        if self._thread is not None:
            self._thread.join()
        if self._moving is not None:
            self._moving.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self.console.print(text, markup=False)
            self._next = time.monotonic() + EVERY

    def _line(self) -> Text:
        return Text(f"{clock(time.monotonic() - self.begun)}  {self.status()}", no_wrap=True, overflow="ellipsis")

    def _run(self) -> None:
        while not self._over.wait(_TICK):
            if time.monotonic() >= self._next and (text := self.status()):
                try:
                    self.say(f"{clock(time.monotonic() - self.begun)}  {text}")
                except (OSError, ValueError):  # the reader is gone; the work continues
                    return


def here() -> str:
    """What this process is doing, and the time left if it can be estimated."""
    return f"{_progress}{left_of(_progress)}"


def left_of(found: Progress) -> str:
    """The time a stage has left, at its speed until now; empty as long as that would be a guess."""
    if math.isnan(found.total) or found.total <= 0:
        return ""
    share, spent = found.done / found.total, time.time() - found.since
    if share < _LEAST or spent < _SOONEST or share >= 1:
        return ""
    return f" · {duration(spent * (1 - share) / share)} left"


def duration(seconds: float) -> str:
    """As text; "?" if it is not known."""
    if math.isnan(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
