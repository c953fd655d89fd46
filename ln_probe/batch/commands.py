"""The commands `report`, `plan` and `merge`. Heavy imports happen inside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from ln_probe.analyses.machinery.files import Undo, temporary_folder
from ln_probe.analyses.probes.text import encodable
from ln_probe.batch.endings import DONE, SOME_FAILED, refuse, writable
from ln_probe.batch.options import Folder, Means, Out, Telling, Wish, Workers, takes
from ln_probe.batch.running import check_engine, end, go, nothing_to_do, work
from ln_probe.batch.wishes import check_targets, claiming, run_of, settings_of, slice_of, targets_of

if TYPE_CHECKING:
    from ln_probe.batch.plan import Unit

ENGINES = ("local", "ray")


@takes(Wish, Means, Workers, Out, Telling)
def report(wish: Wish, means: Means, processes: Workers, into: Out, telling: Telling) -> None:
    """One folder per checkpoint (OUT/<name>/) and OUT/index.html. Re-run the same command to resume."""
    out = into.out
    if means.engine not in ENGINES:
        raise refuse(f"--engine must be one of {', '.join(ENGINES)}, got {means.engine!r}")
    if means.dry_run:
        _plan(wish, processes, into, telling)
        return
    part = slice_of(means.unit)
    if part is not None and means.fresh:
        raise refuse("--fresh would delete what other slices have done: delete the folder instead")
    settings = settings_of(wish)
    writable(out)
    targets = targets_of(wish, quiet=telling.quiet)
    check_targets(wish, settings, targets)
    if all(t.error for t in targets):
        nothing_to_do(targets, telling.as_json)

    check_engine(means)

    from ln_probe.batch.claiming import claim, others
    from ln_probe.batch.drive import BusyError, locked
    from ln_probe.batch.plan import WORK_FOLDER

    undo = Undo(out, out / WORK_FOLDER)
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(out, part))
            with claiming(out):
                run = run_of(wish, settings, out, out / WORK_FOLDER / "corpus")
                claimed = claim(run, targets, fresh=means.fresh)
        except BusyError as error:
            undo(lambda path: part is None or not path.name.startswith(part.lock))
            raise refuse(str(error)) from error
        except (OSError, ValueError) as error:
            if part is None:
                undo()
            else:
                lock.close()
                with suppress(BusyError), locked(out):  # else other slices are at work
                    undo(others(out, part))
            if isinstance(error, ValueError | FileNotFoundError | ConnectionError):
                raise refuse(str(error)) from error
            raise refuse(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
        go(run, claimed, means, processes.workers, part, telling)


@takes(Wish, Workers, Out, Telling)
def plan(wish: Wish, processes: Workers, into: Out, telling: Telling) -> None:
    """The work units of a report and what they are expected to cost; nothing is loaded or written."""
    _plan(wish, processes, into, telling)


@takes(Folder, Workers, Telling)
def merge(slices: Folder, processes: Workers, telling: Telling) -> None:
    """Join the slices made with `report --unit K/N` into reports and an index."""
    from ln_probe.batch.claiming import reopen
    from ln_probe.batch.drive import BusyError, locked, remains
    from ln_probe.batch.progress import Display
    from ln_probe.batch.schedule import Schedule

    folder = slices.folder
    try:
        run, targets = reopen(folder)
        writable(folder)
    except (FileNotFoundError, ValueError) as error:
        raise refuse(str(error)) from error
    try:
        with locked(folder), Display(len(targets), 1, quiet=telling.quiet) as display:
            todo = remains(run, targets, display)
            missing = {t: f"{_names(units)} missing: run its slice again" for t, units in todo.items() if units}
            for target, why in missing.items():
                display.say(f"{target.label}: {why}")
            schedule = Schedule({t: () for t in todo if t not in missing})
            work(run, schedule, display, Means(), processes.workers)
            end(run, targets, {**schedule.errors, **missing}, telling.as_json, said={*schedule.errors, *missing})
    except BusyError as error:
        raise refuse(str(error)) from error


def _names(units: Sequence[Unit]) -> str:
    shown = ", ".join(map(str, units[:3]))
    return f"{len(units)} unit{'s' * (len(units) > 1)} ({shown}{', …' * (len(units) > 3)})"


def _plan(wish: Wish, processes: Workers, into: Out, telling: Telling) -> None:
    from ln_probe.batch.cost import cost, default_workers, prompt_lengths
    from ln_probe.batch.show import cost_table

    settings = settings_of(wish)
    targets = targets_of(wish, quiet=telling.quiet)
    check_targets(wish, settings, targets)
    with temporary_folder() as scratch:
        try:
            run = run_of(wish, settings, into.out, scratch)
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            raise refuse(str(error)) from error
        lengths = prompt_lengths(run.corpus, scratch / run.corpus.folder)
    count = processes.workers or default_workers(run, targets)
    costs = [(t, None if t.error else cost(run, t, lengths)) for t in targets]
    there = {t: sum(run.path(t, u).is_file() for u in run.units()) for t in targets if not t.error}
    if telling.as_json:
        rows = [
            {
                "model": t.name,
                "revision": t.revision,
                "error": t.error or None,
                "folder": str(into.out / t.folder),
                "units_there": there.get(t, 0),
            }
            | {k: None if v != v else v for k, v in ({} if c is None else asdict(c)).items()}
            for t, c in costs
        ]
        typer.echo(json.dumps({"workers": count, "shards": run.corpus.shards, "models": rows}, indent=1))
    else:
        typer.echo(encodable(cost_table(run, costs, there, count)))
    raise typer.Exit(SOME_FAILED if any(t.error for t in targets) else DONE)
