"""What a run shows while it is under way."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ln_probe.batch.plan import PROMPTS, REPORT, Unit
from ln_probe.batch.suite import Target
from ln_probe.batch.work import DIED, DONE, NO_STORAGE, RETURNED, Outcome


class Display:
    """Units done, tokens a second, time left and failures: a live line on a terminal, plain lines elsewhere.

    All durations are taken from a clock that only runs forward.
    """

    def __init__(self, total: int, workers: int, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.workers = workers
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._done: Counter[str] = Counter()
        self.tokens, self.failed, self.begun = 0, 0, time.monotonic()
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("units"),
            TimeElapsedColumn(), TextColumn("{task.fields[rest]}"),
            console=self.console, disable=quiet or not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=total, rest="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def began(self, target: Target, unit: Unit) -> None:
        shard = f" {unit.shard}" if unit.kind == PROMPTS else ""
        self._bar.update(self._task, description=f"{target.label}: {unit.kind}{shard}")

    def ended(self, target: Target, unit: Unit, outcome: Outcome, left: Iterable[Unit]) -> None:
        if outcome.state == DONE:
            self._seconds[unit.kind] += outcome.seconds
            self._done[unit.kind] += 1
            self.tokens += outcome.tokens
            if unit.kind == REPORT:
                self.say(f"{target.label}: done")
        elif outcome.state == DIED:
            self.say(f"{target.label}: {outcome.error} during {unit.kind} {unit.shard}; trying again")
        elif outcome.state not in (RETURNED, NO_STORAGE):  # which ends the run, and is said there
            self.failed += 1
            self.say(f"{target.label}: {outcome.state}: {outcome.error}")
        units = list(left)
        rest = f"{self.tokens / max(1e-9, time.monotonic() - self.begun):.0f} tokens/s · {_time(self.left(units))} left"
        if self.failed:
            rest += f" · {self.failed} failed"
        done = sum(self._done.values())
        self._bar.update(self._task, completed=done, total=done + len(units), rest=rest)

    def left(self, units: Iterable[Unit]) -> float:
        """Seconds expected, from what units of each kind took so far; NaN while nothing is known."""
        known = {kind: self._seconds[kind] / self._done[kind] for kind in self._done}
        if not known:
            return float("nan")
        typical = max(known.values())
        return sum(known.get(unit.kind, typical) for unit in units) / self.workers


def _time(seconds: float) -> str:
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
