"""The progress of a long call, and the processes and threads that it runs in.

tell("second pass", 3, 64, "prompts")  # microseconds where no `ProgressLine` is open
tell_inner("layer 3 of 12")  # of the prompt that is being measured
tell_left(40.0)  # seconds of the whole call
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_INTERVAL_S = 30.0  # between plain lines
_CELL_INTERVAL_S = 0.25  # between updates in a notebook
_LEAST_LEFT_S = 3.0  # less is not shown


class ProgressLine:
    """A line that moves on a terminal or in a notebook; elsewhere a line every half minute.

    Inside another one it shows nothing of its own.

    Args:
        quiet: show nothing.
        on_left: called with the seconds left, instead of showing them.
    """

    def __init__(self, *, quiet: bool = False, on_left: Callable[[float], None] | None = None) -> None:
        self.stage, self.inner, self.left, self.on_left = "", "", math.nan, on_left
        self.started = self.stage_started = time.monotonic()
        self._printed = self.started - _INTERVAL_S + 1.0  # the first plain line after a second
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
        self._moves = not quiet and (self._console.is_terminal or self._console.is_jupyter)
        renderable = partial(Text, no_wrap=True, overflow="ellipsis")
        self._live = Live(console=self._console, transient=True, get_renderable=lambda: renderable(str(self)))
        self._outer: ProgressLine | None = None
        self._cell: Any = None  # where a notebook shows the line

    def __enter__(self) -> ProgressLine:
        global _line
        self._outer, _line = _line, _line or self
        if self._moves and self._outer is None:
            if self._console.is_jupyter:
                self._cell = import_module("IPython.display").DisplayHandle()
                self._cell.display({"text/plain": str(self)}, raw=True)
            else:
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _line
        _line = self._outer
        self._live.stop()
        if self._cell is not None:
            self._cell.update({}, raw=True)  # of which a notebook shows and saves nothing

    def __str__(self) -> str:
        seconds = int(time.monotonic() - self.started)
        left = f", {about(self.left)} left" if self.left >= _LEAST_LEFT_S else ""  # NaN: not known yet
        return f"{seconds // 60}:{seconds % 60:02d}  {self.stage}{left}" + f" ({self.inner})" * bool(self.inner)

    def show(self, inner: str) -> None:
        """Set what is done in the stage; print a plain line where none moves and the last is old enough."""
        self.inner, now = inner, time.monotonic()
        if self._cell is not None and now - self._printed >= _CELL_INTERVAL_S:
            self._printed = now
            self._cell.update({"text/plain": str(self)}, raw=True)
        elif not self._moves and now - self._printed >= _INTERVAL_S:
            self._printed = now
            self._console.print(str(self), markup=False)


_line: ProgressLine | None = None  # the open one of this process


def tell(stage: str, done: float = 0.0, total: float = math.nan, unit: str = "") -> None:
    """Set what this process is doing, and how much of it is done.

    The time left is a share of the time so far, except for prompts: several things are measured there (`tell_left`).
    """
    if _line is not None:
        count = "" if math.isnan(total) else f": {done:.0f} of {total:.0f} {unit}"
        if not _line.stage.startswith(stage):
            _line.stage_started = time.monotonic()
        _line.stage = f"{stage}{count}".rstrip()
        if done and unit != "prompts":
            _line.left = (time.monotonic() - _line.stage_started) * (total / done - 1)
        _line.show("")


def tell_inner(text: str) -> None:
    """Set what is being done for the prompt at hand; the stage and its count stay."""
    if _line is not None:
        _line.show(text)


def tell_delay(text: str) -> None:
    """Set what the call waits for; empty: nothing. A terminal without a `ProgressLine` gets it as a line."""
    if _line is not None:
        _line.show(text)
    elif text and sys.stderr.isatty():
        print(f"ln_probe: {text}", file=sys.stderr)


def tell_left(seconds: float) -> None:
    """Set how many seconds the call still takes."""
    if _line is not None:
        _line.left = seconds
        if _line.on_left is not None:
            _line.on_left(seconds)


class TimeLeft:
    """Estimates the time that work of several kinds still takes: what is left of each, at its pace so far.

    Args:
        counts: how many steps of each kind there are.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = counts
        self.seconds: dict[str, list[float]] = {kind: [] for kind in counts}

    def add(self, kind: str, seconds: float, count: int = 1) -> None:
        """Note how long the next steps of a kind took together."""
        self.seconds[kind] += [seconds / count] * count

    @property
    def left(self) -> float:
        """The seconds left. The first step of a kind also prepares: from the second on it does not count."""
        total = 0.0
        for kind, seconds in self.seconds.items():
            typical = seconds[len(seconds) > 1 :]
            total += (self.counts[kind] - len(seconds)) * sum(typical) / max(1, len(typical))
        return total


def about(seconds: float) -> str:
    """Return a time as it can be estimated: "about 40 s", "about 3 min"."""
    if seconds >= 100:
        return f"about {seconds / 60:.0f} min"
    step = 1 if seconds < 15 else 5 if seconds < 60 else 10
    return f"about {step * round(seconds / step)} s"


# -------------------------------------------------------- processes and threads


def follow_parent() -> None:
    """Leave Ctrl-C to the parent process, and end when it does, for whatever reason. Call first in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def available_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_blas_thread() -> AbstractContextManager[Any]:
    """Let NumPy's and SciPy's matrix products use one thread inside a `with` block.

    Theirs would wait for each other, and for torch's: with two processors `selectability` took twice as long.
    """
    limit: AbstractContextManager[Any] = _blas_libraries().limit(limits=1, user_api="blas")
    return limit


@cache
def _blas_libraries() -> Any:  # (to look for them takes 2 ms, and every layer asks)
    from threadpoolctl import ThreadpoolController

    import_module("scipy.linalg")  # its BLAS can only be limited once it is loaded
    return ThreadpoolController()
