"""Running a run: what is there already, who does the rest, and the index at the end."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ln_probe.analyses.machinery.files import FileError, read_json, remove_listed, write_atomically, write_text
from ln_probe.analyses.machinery.worker import check_stopped
from ln_probe.analyses.probes.text import quoted, whole_number
from ln_probe.batch.engines import Engine
from ln_probe.batch.finished import awaited, is_done, remove_partial
from ln_probe.batch.plan import CALIBRATION, INDEX_FILE, WORK_FOLDER, Run, Unit, slice_of
from ln_probe.batch.progress import Display
from ln_probe.batch.schedule import Schedule
from ln_probe.batch.store import DamagedError, Stored, storing
from ln_probe.batch.suite import Target
from ln_probe.batch.work import NO_STORAGE

_TICK = 0.5  # seconds between two looks at Ctrl-C while nothing ends


class BusyError(RuntimeError):
    """Another process is writing this folder."""


class StoppedError(RuntimeError):
    """The run cannot go on for any of its checkpoints."""


@dataclass(frozen=True)
class Slice:
    """Part `number` (from 1) of `count`, for job arrays."""

    number: int
    count: int

    @property
    def lock(self) -> str:
        """How the names of the files begin that it holds while it is at work."""
        return f"slice-{self.number}-of-{self.count}."

    @classmethod
    def parse(cls, text: str) -> Slice:
        """K/N; ValueError otherwise."""
        number, count = (whole_number(part) for part in text.partition("/")[::2])
        if number is None or count is None or not 1 <= number <= count:
            raise ValueError(f"--unit takes K/N with K from 1 to N, such as 3/16, got {quoted(text)}")
        return cls(number, count)


@contextmanager
def locked(out: Path, part: Slice | None = None) -> Iterator[None]:
    """Keep other drivers out of the folder; slices of one run may be there together.

    The operating system lets go of the lock when the process ends, however it ends, and whatever the clock says.

    Raises:
        BusyError: another driver (or the same slice) is at work.
    """
    work = out / WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    whole = work / "driver.lock"
    with ExitStack() as stack:
        if part is None:
            _hold(stack, whole, out)
            for other in sorted(work.glob("slice-*.lock")):
                with ExitStack() as brief:
                    _hold(brief, other, out)
        else:
            _hold(stack, work / f"{part.lock}lock", out)
            with ExitStack() as brief:
                _hold(brief, whole, out)
        yield


def _hold(stack: ExitStack, path: Path, out: Path) -> None:
    who = path.with_suffix(".json")
    try:
        stack.enter_context(FileLock(path, timeout=0))
    except Timeout:
        try:
            held = read_json(who)
            by = f"process {held['process']} on {held['machine']}"
        except (OSError, FileError, KeyError, TypeError):
            by = "another process"
        raise BusyError(f"{out} is being written by {by}: wait for it, or choose another --out") from None
    write_atomically(who, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode())


def remains(
    run: Run, targets: Sequence[Target], display: Display, *, fresh: bool = False, part: Slice | None = None
) -> dict[Target, list[Unit]]:
    """What is left to do: checkpoints without a report, with the units whose results are not there, or damaged."""
    if part is None:
        remove_partial(run, targets)
    chosen = None if part is None else slice_of(run, targets, part.number, part.count)
    todo: dict[Target, list[Unit]] = {}
    for target in targets:
        if target.error or (chosen is not None and target not in chosen):
            continue
        if fresh and part is None:
            remove_listed(run.folder(target), run.unit_files())
        elif part is None:
            done, why = is_done(run, target)
            if done and not awaited(run, target):
                display.say(f"{target.label}: already done")
                continue
            if why:
                display.say(f"{target.label}: {why}; doing it again")
        todo[target] = []
        for unit in run.units():
            if chosen is not None and unit not in chosen[target]:
                continue
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


def drive(engine: Engine, schedule: Schedule, display: Display) -> None:
    """Have the units done.

    Raises:
        StoppedError: nothing can be stored any more, or all machines are gone.
        KeyboardInterrupt: a signal has asked to stop.
    """
    idle, running = set(range(engine.workers)), dict[int, tuple[Target, Unit]]()
    while True:
        check_stopped()
        for worker in sorted(idle & engine.available()):
            job = schedule.next(worker)
            if job is None:
                continue
            idle.discard(worker)
            running[worker] = job
            display.began(*job)
            engine.submit(worker, *job)
        if not running:
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
    from ln_probe.report import Report

    unit = Unit(CALIBRATION)
    try:
        info = Stored(run.path(target, unit), run.unit_key(target, unit)).info
    except (FileNotFoundError, DamagedError):
        return ()
    return Report(provenance={"model": info["model"], "prompts": info["prompts"]}).deviations


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        failed: why checkpoints have no report.
        probes: which probes failed in the reports that there are.
        deviations: how what was measured in them differs from what was asked for.
    """

    failed: Mapping[Target, str]
    probes: Mapping[Target, tuple[str, ...]]
    deviations: Mapping[Target, tuple[str, ...]]


def write_index(
    run: Run, targets: Sequence[Target], errors: Mapping[Target, str], earlier: Sequence[Target] = ()
) -> Ended:
    """OUT/index.html: every checkpoint of the folder, with its report or the reason why there is none.

    `earlier` are those of earlier commands; what is told of them is of those times.
    """
    from ln_probe.page.index import IndexEntry, index_page
    from ln_probe.report import load_report

    entries, failures = [], dict[Target, str]()
    probes, deviations = dict[Target, tuple[str, ...]](), dict[Target, tuple[str, ...]]()
    everything = [*earlier, *targets]
    labels = Counter(t.label for t in everything if not t.error)
    for target in everything:
        label = target.label if labels[target.label] < 2 else f"{target.label} ({target.folder})"
        error = errors.get(target, target.error)
        if not error:
            done, why = is_done(run, target)
            try:
                report = load_report(run.out / target.folder) if done else None
            except (OSError, ValueError) as problem:
                report, why = None, str(problem)
            if report is None:
                error = f"not finished{f' ({why})' if why else ''}: run its command again"
            elif target in targets and (refused := run.refusal(report.deviations)):
                error = refused
            else:
                entries.append(IndexEntry(label, f"{target.folder}/report.html", report))
                if report.failures:
                    probes[target] = tuple(map(str, report.failures))
                if report.deviations:
                    deviations[target] = report.deviations
        if error:
            failures[target] = f"in an earlier command ({target.failed}): {error}" if target.failed else error
            entries.append(IndexEntry(label, error=failures[target]))
    with storing(run.out):
        write_text(run.out / INDEX_FILE, index_page(entries))
    return Ended(failures, probes, deviations)
