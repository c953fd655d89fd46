"""Which worker does which unit next, and what becomes of those that fail.

A worker stays with its checkpoint while there is work on it, then takes one that nobody has begun, and only then helps
with one that others hold: so every checkpoint is loaded once, or (when there are more workers than checkpoints) once
per worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ln_probe.batch.plan import CALIBRATION, REPORT, WEIGHTS, Unit
from ln_probe.batch.suite import Target
from ln_probe.batch.work import DAMAGED, DIED, DONE, RETURNED, Outcome

# How often a unit may take its worker with it (killed, out of memory) before its checkpoint counts as failed: a
# machine that is taken away twice is bad luck, three times is the unit's doing.
ATTEMPTS = 3
# How often results may turn out damaged before it is the disk that is damaged.
REPAIRS = 3


_COUNTED = {Unit(CALIBRATION), Unit(REPORT)}  # as long as they are not done, running or not


@dataclass
class _Work:
    """What is left to do on one checkpoint."""

    target: Target
    waiting: deque[Unit]
    calibrate: bool  # still to be done, before anything else
    reports: bool  # whether a report is to be made at the end
    running: set[Unit] = field(default_factory=set)
    begun: bool = False
    died: int = 0
    repaired: int = 0
    error: str = ""
    finished: bool = False

    def ready(self) -> Unit | None:
        """A unit that can be done now."""
        if self.error or self.finished:
            return None
        if self.calibrate:
            if Unit(CALIBRATION) not in self.running:
                return Unit(CALIBRATION)
            return next((u for u in self.waiting if u.kind == WEIGHTS), None)  # which need no calibration
        if self.waiting:
            return self.waiting[0]
        if self.reports and not self.running:
            return Unit(REPORT)
        return None


class Schedule:
    """The units of a run that are left to do.

    Args:
        todo: the units of every checkpoint whose results are not there yet.
        reports: make the reports too (a slice does not).
    """

    def __init__(self, todo: Mapping[Target, Iterable[Unit]], *, reports: bool = True) -> None:
        self._works: list[_Work] = []
        for target, units in todo.items():
            left = list(units)
            calibrate = Unit(CALIBRATION) in left
            waiting = deque(u for u in left if u.kind != CALIBRATION)
            self._works.append(_Work(target, waiting, calibrate, reports))
        self._held: dict[int, _Work] = {}

    def __len__(self) -> int:
        """Units left, running ones included."""
        return sum(
            len(w.waiting) + w.calibrate + w.reports + len(w.running - _COUNTED)
            for w in self._works
            if not w.finished and not w.error
        )

    def left(self) -> Iterable[Unit]:
        for w in self._works:
            if not w.finished and not w.error:
                yield from [Unit(CALIBRATION)] * w.calibrate
                yield from w.waiting
                yield from [Unit(REPORT)] * w.reports

    @property
    def targets(self) -> list[Target]:
        return [w.target for w in self._works]

    @property
    def errors(self) -> dict[Target, str]:
        """The checkpoints that failed, and why."""
        return {w.target: w.error for w in self._works if w.error}

    def next(self, worker: int) -> tuple[Target, Unit] | None:
        """What this worker does next; None if there is nothing for it now."""
        mine = self._held.get(worker)
        candidates = [
            *([mine] if mine is not None else []),
            *(w for w in self._works if not w.begun),
            *sorted((w for w in self._works if w.begun), key=lambda w: -len(w.waiting)),
        ]
        for work in candidates:
            unit = work.ready()
            if unit is not None:
                self._held[worker] = work
                work.begun = True
                work.running.add(unit)
                if unit in work.waiting:
                    work.waiting.remove(unit)
                return work.target, unit
        return None

    def ended(self, target: Target, unit: Unit, outcome: Outcome) -> None:
        """Take note of how a unit ended."""
        work = next(w for w in self._works if w.target == target)
        work.running.discard(unit)
        if outcome.state == DONE:
            work.died = 0
            if unit.kind == CALIBRATION:
                work.calibrate = False
            if unit.kind == REPORT or (not work.reports and not work.waiting and not work.running):
                work.finished = not work.calibrate
            return
        if work.error:
            return
        if outcome.state == DIED:
            work.died += 1
            if work.died >= ATTEMPTS:
                work.error = (
                    f"its worker died {work.died} times during {unit.kind} ({outcome.error}); if it was out of memory, "
                    "use fewer --workers"
                )
                return
        elif outcome.state == DAMAGED:
            work.repaired += 1
            if work.repaired > REPAIRS:
                work.error = f"results keep being damaged ({outcome.error}): check the disk"
                return
        elif outcome.state != RETURNED:
            work.error = outcome.error
            return
        for again in (*outcome.again, unit):
            if again.kind == CALIBRATION:
                work.calibrate = True
            elif again.kind != REPORT and again not in work.waiting:
                work.waiting.appendleft(again)
