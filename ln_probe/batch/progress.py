"""What a run shows while it is under way."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from types import TracebackType

from ln_probe.analyses.machinery.pulse import Pulse
from ln_probe.batch.plan import CALIBRATION, PROMPTS, REPORT, WEIGHTS, Unit
from ln_probe.batch.suite import Target
from ln_probe.batch.work import DIED, DONE, NO_STORAGE, RETURNED, Outcome
from ln_probe.measuring.live import Live, duration, here, left_of


class Display:
    """Units done and under way, what each worker is doing, tokens a second, time left and failures.

    Attributes:
        workers: how many there are.
        pulses: asks what they are doing, by worker; this very process, if it is not set.
    """

    def __init__(self, total: int, workers: int, *, quiet: bool = False) -> None:
        self.workers, self._total = workers, total
        self.pulses: Callable[[], Iterable[Pulse]] = lambda: ()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._done: Counter[str] = Counter()
        self._running: dict[tuple[Target, Unit], float] = {}
        self._left: list[Unit] = []
        self.tokens, self.failed, self.begun = 0, 0, time.monotonic()
        self._live = Live(self.line, quiet=quiet)

    def __enter__(self) -> Display:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        self._live.say(text)

    def began(self, target: Target, unit: Unit) -> None:
        self._running[target, unit] = time.monotonic()

    def ended(self, target: Target, unit: Unit, outcome: Outcome, left: Iterable[Unit]) -> None:
        self._running.pop((target, unit), None)
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
        self._left = list(left)
        self._total = sum(self._done.values()) + len(self._left)

    def line(self) -> str:
        """All of it in one line."""
        running = [f"{t.label}: {_named(u)}" for t, u in list(self._running)]
        doing = [f"{p}{left_of(p)}" for p in self.pulses() if p.what] or [text for text in [here()] if text]
        parts = [" + ".join(running) or "starting", "; ".join(doing)]
        if self._total:
            parts.append(f"{sum(self._done.values())} of {self._total} units")
        if self.tokens:
            parts.append(f"{self.tokens / max(1e-9, time.monotonic() - self.begun):.0f} tokens/s")
        rest = self.left(self._left)
        if rest == rest:
            parts.append(f"{duration(rest)} left")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return " · ".join(p for p in parts if p)

    def left(self, units: Iterable[Unit]) -> float:
        """Seconds expected, from what units of each kind took so far; NaN as long as some kind was never done."""
        known = {kind: self._seconds[kind] / self._done[kind] for kind in self._done}
        running, now = list(self._running.items()), time.monotonic()
        waiting = Counter(u.kind for u in units)
        waiting[CALIBRATION] -= sum(u.kind == CALIBRATION for (_, u), _ in running)  # which counts until it is done
        kinds = {u.kind for (_, u), _ in running} | {kind for kind, count in waiting.items() if count > 0}
        if not kinds or kinds - known.keys() - {REPORT}:
            return float("nan")
        begun = sum(max(0.0, known.get(u.kind, 0.0) - (now - since)) for (_, u), since in running)
        return (begun + sum(known.get(k, 0.0) * max(0, n) for k, n in waiting.items())) / max(1, self.workers)


def _named(unit: Unit) -> str:
    if unit.kind == WEIGHTS:
        return f"{unit.probe}"
    return f"{unit.kind} {unit.shard}" if unit.kind == PROMPTS else unit.kind
