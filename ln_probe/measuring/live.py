"""One live display for everything that takes time: a line that moves on a terminal, plain lines anywhere else.

Without a terminal (a log, a batch job) something is said after a second, and then at least every half a minute, so that
nobody has to wonder whether a run is still alive. All durations are taken from a clock that only runs forward.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from io import TextIOBase
from types import TracebackType
from typing import IO, cast

import rich.live
from rich.console import Console
from rich.text import Text

from ln_probe.analyses.machinery import pulse

FIRST = 0.5  # seconds after which something is said, so that with Python's own start it is within two
EVERY = 25.0  # seconds between lines: thirty are promised, and a busy machine is late
_TICK, _FRAMES = 0.25, 4
# Seconds and share of a stage from which on what is left is told: before, it would be a guess.
_SOONEST, _LEAST = 3.0, 0.02


class Live:
    """Shows what is going on while it lasts.

    Args:
        status: one line about it; by default what this process says of itself (`pulse`).
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
        self.begun = time.monotonic()
        self._next = self.begun + FIRST
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._moving: rich.live.Live | None = None

    def __enter__(self) -> Live:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        pulse.tell("")
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
                except (OSError, ValueError):  # nobody reads any more: no reason to stop working
                    return


def here() -> str:
    """What this process is doing, and how long that will take as far as can be told."""
    found = pulse.now()
    return f"{found}{left_of(found)}" if found.what else ""


def left_of(found: pulse.Pulse) -> str:
    """How much time a stage has left, at its pace until now; empty while that would be a guess."""
    if math.isnan(found.total) or found.total <= 0:
        return ""
    share, spent = found.done / found.total, time.time() - found.since
    if share < _LEAST or spent < _SOONEST or share >= 1:
        return ""
    return f" · {duration(spent * (1 - share) / share)} left"


def duration(seconds: float) -> str:
    """In words; "?" if it is not known."""
    if math.isnan(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
