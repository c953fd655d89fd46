"""Who does which unit, and when: the schedule, worker processes of this machine, the loop, progress, the index."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from ln_probe.analyses import progress
from ln_probe.analyses.files import remove_listed, temporary_folder, write_text
from ln_probe.analyses.processes import check_stopped, follow_parent, starting_workers
from ln_probe.analyses.progress import Progress, ProgressLine, duration, here, left_of
from ln_probe.batch.downloads import Downloads
from ln_probe.batch.results import DAMAGED, DIED, DONE, NO_STORAGE, RETURNED, DamagedError, Outcome, Stored, storing
from ln_probe.batch.run import (
    CALIBRATION,
    INDEX_FILE,
    PROMPTS,
    REPORT,
    WEIGHTS,
    Run,
    Slice,
    Unit,
    awaited,
    is_done,
    remove_partial,
)
from ln_probe.batch.suite import Target
from ln_probe.report import Report, load_report

# How often a unit may take its worker with it (killed, out of memory) before its checkpoint counts as failed: a
# machine that is taken away twice is bad luck, three times is the unit's doing.
ATTEMPTS = 3
# How often results may turn out damaged before it is the disk that is damaged.
REPAIRS = 3


@dataclass(eq=False)
class _Work:
    """The work that remains on one checkpoint: units that wait, in order, and those that are being done."""

    target: Target
    waiting: dict[Unit, None]
    running: set[Unit] = field(default_factory=set)
    begun: bool = False
    died: int = 0
    repaired: int = 0
    error: str = ""

    def ready(self) -> Unit | None:
        """A unit that can be done now."""
        calibration = Unit(CALIBRATION)
        if calibration in self.waiting:
            return calibration
        if calibration in self.running:
            return next((u for u in self.waiting if u.kind == WEIGHTS), None)  # which need no calibration
        last = len(self.waiting) == 1 and not self.running
        return next((u for u in self.waiting if u.kind != REPORT or last), None)

    def ended(self, unit: Unit, outcome: Outcome) -> None:
        """Take note of how a unit ended; one that failed for no fault of the checkpoint's waits again."""
        self.running.discard(unit)
        if outcome.state == DONE:
            self.died = 0
            return
        self.died += outcome.state == DIED
        self.repaired += outcome.state == DAMAGED
        if self.died >= ATTEMPTS:
            error = (
                f"its worker died {self.died} times during {unit.kind} ({outcome.error}); if it was out of memory, use "
                "fewer --workers"
            )
        elif self.repaired > REPAIRS:
            error = f"results keep being damaged ({outcome.error}): check the disk"
        else:
            error = "" if outcome.state in (DIED, DAMAGED, RETURNED) else outcome.error
        self.error = self.error or error
        again = {} if self.error else {u: None for u in (*outcome.again, unit) if u not in self.running}
        self.waiting = {} if self.error else again | self.waiting


class Schedule:
    """The units of a run that are left to do, of every checkpoint, and (but for a slice) the reports.

    `failed`: the checkpoints that failed before, and why.
    """

    def __init__(
        self, todo: Mapping[Target, Iterable[Unit]], failed: Mapping[Target, str] | None = None, *, reports: bool = True
    ) -> None:
        last, self._failed = [Unit(REPORT)] * reports, failed or {}
        self._of = {target: _Work(target, dict.fromkeys([*units, *last])) for target, units in todo.items()}
        self._open = {target: work for target, work in self._of.items() if work.waiting}  # neither finished nor failed
        self._held: dict[int, _Work] = {}
        self.awaited: Collection[Target] = ()  # not to be begun: their files are not here yet

    def __len__(self) -> int:
        """Units left, running ones included."""
        return sum(len(w.waiting) + len(w.running) for w in self._open.values())

    def left(self) -> Iterable[Unit]:
        """The units that no worker has begun."""
        for w in self._open.values():
            yield from w.waiting

    @property
    def targets(self) -> list[Target]:
        return list(self._of)

    @property
    def begun(self) -> set[Target]:
        """The checkpoints that a worker has begun."""
        return {t for t, w in self._of.items() if w.begun}

    @property
    def over(self) -> set[Target]:
        """The checkpoints that are finished or failed; no worker is at one of them."""
        return self._of.keys() - self._open.keys()

    @property
    def errors(self) -> dict[Target, str]:
        """The checkpoints that failed, and why."""
        return {**{t: w.error for t, w in self._of.items() if w.error}, **self._failed}

    def next(self, worker: int) -> tuple[Target, Unit] | None:
        """What this worker does next; None if there is nothing for it now."""
        mine = self._held.get(worker)
        candidates = [
            *([mine] if mine is not None else []),
            *(w for w in self._open.values() if not w.begun and w.target not in self.awaited),
            *sorted((w for w in self._open.values() if w.begun), key=lambda w: -len(w.waiting)),
        ]
        for work in candidates:
            unit = work.ready()
            if unit is not None:
                self._held[worker] = work
                work.begun = True
                work.running.add(unit)
                del work.waiting[unit]
                return work.target, unit
        return None

    def ended(self, target: Target, unit: Unit, outcome: Outcome) -> None:
        """Take note of how a unit ended."""
        work = self._of[target]
        work.ended(unit, outcome)
        if not work.waiting and not work.running:
            self._open.pop(target, None)


THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
THREADS = 1  # of torch and BLAS in every worker: with it the bytes of a result are the same on any number of workers


class Engine(ABC):
    """Workers that do one unit at a time each."""

    workers: int

    def stages(self) -> list[Progress]:
        """What the busy workers are doing, as far as that is known."""
        return [progress.now()]

    def available(self) -> set[int]:
        """The workers that there are now; machines come and go."""
        return set(range(self.workers))

    @abstractmethod
    def submit(self, worker: int, target: Target, unit: Unit) -> None:
        """Give an idle worker something to do."""

    @abstractmethod
    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        """Outcomes that arrived since the last call, by worker; empty if none did within `seconds`."""

    @abstractmethod
    def close(self) -> None:
        """End all workers, also those at work."""


class LocalEngine(Engine):
    """A process per worker. One that is killed is replaced; all of them end when this process does.

    `processors`: that the geometry of each may use; its results do not depend on them.
    """

    def __init__(self, run: Run, workers: int, processors: int = 1) -> None:
        self.run, self.workers, self.processors = run, workers, processors
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._running: dict[Connection, int] = {}
        self._open = ExitStack()
        self._signs = self._open.enter_context(temporary_folder())

    def stages(self) -> list[Progress]:
        return [progress.read(self._signs / str(worker)) for worker in sorted(self._running.values())]

    def submit(self, worker: int, target: Target, unit: Unit) -> None:
        if worker not in self._processes:
            context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
            self._pipes[worker], other = context.Pipe()
            given = (other, self.run, self.processors, self._signs / str(worker))
            self._processes[worker] = context.Process(target=_serve, args=given, daemon=True)
            with _few_threads(), starting_workers():
                self._processes[worker].start()
            other.close()
        with suppress(OSError):  # it has ended: `wait` says so
            self._pipes[worker].send((target, unit))
        self._running[self._pipes[worker]] = worker

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        ended = []
        for pipe in cast("list[Connection]", wait(list(self._running), seconds)):
            worker = self._running.pop(pipe)
            try:
                outcome: Outcome = pipe.recv()
            except (EOFError, OSError):
                del self._pipes[worker]
                process = self._processes.pop(worker)
                process.join()
                outcome = Outcome(DIED, f"the worker process ended (exit code {process.exitcode})")
            ended.append((worker, outcome))
        return ended

    def close(self) -> None:
        busy = set(self._running.values())
        for worker, process in self._processes.items():
            # Idle ones end by themselves, and free what they hold: terminated, they would leave semaphores behind.
            if worker in busy:
                process.terminate()
            self._pipes[worker].close()
        for process in self._processes.values():
            process.join()
        for held in (self._processes, self._pipes, self._running):
            held.clear()
        self._open.close()


class InProcess(Engine):
    """No worker processes: units are done here, one after another (for debugging, and for tests)."""

    workers = 1

    def __init__(self, run: Run) -> None:
        import torch

        from ln_probe.batch.worker import Worker

        self._threads = torch.get_num_threads()
        self._worker = Worker(run)
        self._next: tuple[Target, Unit] | None = None

    def submit(self, worker: int, target: Target, unit: Unit) -> None:
        self._next = target, unit

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        if self._next is None:
            return []
        (target, unit), self._next = self._next, None
        return [(0, self._worker.do(target, unit))]

    def close(self) -> None:
        import torch

        torch.set_num_threads(self._threads)


@contextmanager
def _few_threads() -> Iterator[None]:
    """Processes started inside use one thread in libraries that decide once, when they are imported."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(THREADS)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(jobs: Connection, run: Run, processors: int, sign: Path) -> None:
    """Do what is sent, as long as the other end is open: a worker process."""
    try:
        follow_parent()
        progress.write_to(sign)
        progress.tell("starting")
        from ln_probe.batch.worker import Worker

        worker = Worker(run, processors)
    except Exception as error:  # the process would print a traceback
        print(f"ln-probe: a worker cannot start: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    with suppress(EOFError, OSError):
        while True:
            outcome = worker.do(*jobs.recv())
            progress.tell("")
            jobs.send(outcome)


class Display(ProgressLine):
    """Units done and under way, what each worker is doing (`stages`), tokens a second, time left and failures."""

    def __init__(self, total: int = 0, *, quiet: bool = False) -> None:
        super().__init__(self.line, quiet=quiet)
        self.workers, self._total = 1, total
        self.stages: Callable[[], Iterable[Progress]] = lambda: ()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._done: Counter[str] = Counter()
        self._running: dict[tuple[Target, Unit], float] = {}
        self._left: list[Unit] = []
        self.tokens, self.failed = 0, 0

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
        elif outcome.state not in (RETURNED, NO_STORAGE):  # which ends the run, and is reported there
            self.failed += 1
            self.say(f"{target.label}: {outcome.state}: {outcome.error}")
        self._left = list(left)
        self._total = sum(self._done.values()) + len(self._left) + len(self._running)

    def line(self) -> str:
        """All of it in one line."""
        running = [f"{t.label}: {_named(u)}" for t, u in list(self._running)]
        doing = [f"{p}{left_of(p)}" for p in self.stages() if p.what] or [text for text in [here()] if text]
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
        kinds = {u.kind for (_, u), _ in running} | waiting.keys()
        if not kinds or kinds - known.keys() - {REPORT}:
            return float("nan")
        begun = sum(max(0.0, known.get(u.kind, 0.0) - (now - since)) for (_, u), since in running)
        return (begun + sum(known.get(k, 0.0) * n for k, n in waiting.items())) / max(1, self.workers)


def _named(unit: Unit) -> str:
    if unit.kind == WEIGHTS:
        return f"{unit.probe}"
    return f"{unit.kind} {unit.shard}" if unit.kind == PROMPTS else unit.kind


_TICK = 0.5  # seconds between two looks at Ctrl-C while nothing ends


class StoppedError(RuntimeError):
    """The run cannot go on for any of its checkpoints."""


def remains(
    run: Run, targets: Sequence[Target], display: Display, *, fresh: bool = False, part: Slice | None = None
) -> dict[Target, list[Unit]]:
    """The work that remains: checkpoints without a report, with the units whose results are not there, or damaged."""
    if part is None:
        remove_partial(run, targets)
        chosen = {target: list(run.units()) for target in targets if not target.error}
    else:
        chosen = part.units(run, targets)
    todo: dict[Target, list[Unit]] = {}
    for target, units in chosen.items():
        if fresh:
            remove_listed(run.folder(target), run.unit_files())
        elif part is None:
            done, why = is_done(run, target)
            if done and not awaited(run, target):
                display.say(f"{target.label}: already done")
                continue
            if why:
                display.say(f"{target.label}: {why}; doing it again")
        todo[target] = []
        for unit in units:
            path = run.path(target, unit)
            try:
                Stored(path, run.unit_key(target, unit))
            except FileNotFoundError:
                todo[target].append(unit)
            except DamagedError as error:
                display.say(f"{target.label}: {error}; doing it again")
                path.unlink(missing_ok=True)
                todo[target].append(unit)
    return todo


def drive(engine: Engine, schedule: Schedule, display: Display, downloads: Downloads | None = None) -> None:
    """Have the units done; checkpoints of `downloads` when they are here.

    Raises:
        StoppedError: nothing can be stored any more, or all machines are gone.
        KeyboardInterrupt: a signal has asked to stop.
    """
    idle, running = set(range(engine.workers)), dict[int, tuple[Target, Unit]]()
    while True:
        check_stopped()
        if downloads is not None:
            schedule.awaited = downloads.awaited
        for worker in sorted(idle & engine.available()):
            job = schedule.next(worker)
            if job is None:
                continue
            idle.discard(worker)
            running[worker] = job
            display.began(*job)
            engine.submit(worker, *job)
        if downloads is not None:
            downloads.advance(schedule.begun, schedule.over)
        if not running:
            if downloads is not None and downloads.busy:
                downloads.wait(_TICK)
                continue
            if len(schedule):
                raise StoppedError(f"no worker is left for {len(schedule)} units: run the same command again")
            return
        for worker, outcome in engine.wait(_TICK):
            target, unit = running.pop(worker)
            idle.add(worker)
            schedule.ended(target, unit, outcome)
            display.ended(target, unit, outcome, schedule.left())
            if outcome.state == NO_STORAGE:
                raise StoppedError(outcome.error)


def calibrated_deviations(run: Run, target: Target) -> tuple[str, ...]:
    """How a checkpoint's measurement differs from what was asked for, before its report is made."""
    unit = Unit(CALIBRATION)
    try:
        info = Stored(run.path(target, unit), run.unit_key(target, unit)).info
    except (FileNotFoundError, DamagedError):
        return ()
    return Report(provenance={"model": info["model"], "prompts": info["prompts"]}).deviations


@dataclass(frozen=True)
class Ended:
    """How a run ended for one checkpoint.

    Attributes:
        error: why it has no report; empty if it has one.
        probes: which probes failed in the report.
        deviations: how what was measured differs from what was asked for.
    """

    target: Target
    error: str = ""
    probes: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()


def write_index(
    run: Run, targets: Sequence[Target], errors: Mapping[Target, str], earlier: Sequence[Target] = ()
) -> list[Ended]:
    """OUT/index.html: every checkpoint of the folder, with its report or the reason why there is none.

    `earlier` are those of earlier commands; their messages are of those times. They come first.
    """
    from ln_probe.page.index import IndexEntry, for_index, index_page

    entries, ended = list[IndexEntry](), list[Ended]()
    everything = [*earlier, *targets]
    labels = Counter(t.label for t in everything if not t.error)
    for target in everything:
        label = target.label if labels[target.label] < 2 else f"{target.label} ({target.folder})"
        error, report = errors.get(target, target.error), None
        if not error:
            done, why = is_done(run, target)
            try:
                report = load_report(run.out / target.folder) if done else None
            except (OSError, ValueError) as problem:
                why = str(problem)
            if report is None:
                error = f"not finished{f' ({why})' if why else ''}: run its command again"
            elif target in targets:
                error = run.refusal(report.deviations)
        if report is None or error:
            error = f"in an earlier command ({target.failed}): {error}" if target.failed else error
            ended.append(Ended(target, error))
            entries.append(IndexEntry(label, error=error))
        else:
            ended.append(Ended(target, "", tuple(map(str, report.failures)), report.deviations))
            found = for_index(report, sum(e.report is not None for e in entries))
            entries.append(IndexEntry(label, f"{target.folder}/report.html", found))
    with storing(run.out):
        write_text(run.out / INDEX_FILE, index_page(entries))
    return ended
