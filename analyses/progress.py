"""The progress of a long call: a line that moves on a terminal or in a notebook, elsewhere a line every half minute.

    tell("gpt2: downloading", 120e6, 548e6, "B")
    tell_inner("layer 3 of 12")  # of the prompt that is being measured

`tell` costs microseconds where no `ProgressLine` is open.
"""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

_INTERVAL_S = 30.0  # between plain lines
_GUESS_S, _GUESS_SHARE = 3.0, 0.02  # the remaining time is not shown before both have passed: it would be a guess


class ProgressLine:
    """Shows the current stage until it is closed; inside another one it shows nothing of its own.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.stage, self.inner, self.delay = "", "", ""
        self.started = self.stage_started = time.monotonic()
        self.share = 0.0
        self._console = None if quiet else console
        self._printed = self.started - _INTERVAL_S + 1.0  # the first plain line after a second
        self._live: Live | None = None
        self._outer: ProgressLine | None = None

    def __enter__(self) -> ProgressLine:
        global _line
        self._outer, _line = _line, _line or self
        if self._console is not None and self._outer is None and _moves(self._console):
            self._live = Live(
                get_renderable=lambda: Text(str(self), no_wrap=True, overflow="ellipsis"),
                console=self._console,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _line
        _line = self._outer
        if self._live is not None:
            self._live.stop()

    def __str__(self) -> str:
        details = "; ".join(text for text in (self.inner, self.delay) if text)
        text = f"{clock(time.monotonic() - self.started)}  {self.stage}" + f" ({details})" * bool(details)
        spent = time.monotonic() - self.stage_started
        if spent < _GUESS_S or not _GUESS_SHARE <= self.share < 1:
            return text
        return f"{text} · {clock(spent * (1 - self.share) / self.share)} left"

    def refresh(self) -> None:
        """Print a plain line, where none moves and the last one is old enough."""
        if self._live is None and self._console is not None and time.monotonic() - self._printed >= _INTERVAL_S:
            self._printed = time.monotonic()
            self._console.print(str(self), markup=False)


_line: ProgressLine | None = None  # the open one of this process


def tell(stage: str, done: float = 0.0, total: float = math.nan, unit: str = "") -> None:
    """Set what this process is doing, and how much of it is done; "B" are bytes."""
    if _line is None:
        return
    scale, shown_unit = (1e6, "MB") if unit == "B" else (1.0, unit)
    count = "" if math.isnan(total) else f": {done / scale:.0f} of {total / scale:.0f} {shown_unit}"
    if not _line.stage.startswith(stage):
        _line.stage_started = time.monotonic()
    _line.stage, _line.inner = f"{stage}{count}".rstrip(), ""
    _line.share = done / total if total > 0 else 0.0
    _line.refresh()


def tell_inner(text: str) -> None:
    """Set what is being done for the prompt at hand; the stage and its count stay."""
    if _line is not None:
        _line.inner = text
        _line.refresh()


def tell_delay(text: str) -> None:
    """Set what the stage waits for; empty: nothing. A terminal without a `ProgressLine` gets it as a line."""
    if _line is not None:
        _line.delay = text
        _line.refresh()
    elif text and _moves(console := Console(stderr=True, highlight=False)):
        console.print(f"ln_probe: {text}", markup=False)


def _moves(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def clock(seconds: float) -> str:
    """Return h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
