"""Doing what a run still lacks, and saying how it ended."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from ln_probe.batch.endings import DONE, SOME_FAILED, refuse
from ln_probe.batch.options import Means, Telling

if TYPE_CHECKING:
    from ln_probe.batch.claiming import Claimed
    from ln_probe.batch.drive import Slice
    from ln_probe.batch.engines import Engine
    from ln_probe.batch.plan import Run
    from ln_probe.batch.progress import Display
    from ln_probe.batch.schedule import Schedule
    from ln_probe.batch.suite import Target


def go(
    run: Run,
    claimed: Claimed,
    means: Means,
    workers: int | None,
    part: Slice | None,
    telling: Telling,
) -> None:
    """Do what is missing of a run, or of a slice of it, and exit."""
    from ln_probe.batch.drive import calibrated_deviations, remains
    from ln_probe.batch.progress import Display
    from ln_probe.batch.schedule import Schedule

    targets = claimed.targets
    with Display(0, 1, quiet=telling.quiet) as display:
        for target in claimed.removed:
            display.say(f"{target.label}: its report, made in another way, was removed (--fresh)")
        for target in targets:
            if target.error:
                display.say(f"{target.label}: failed: {target.error}")
        todo = remains(run, targets, display, fresh=means.fresh, part=part)
        schedule = Schedule(todo, reports=part is None)
        work(run, schedule, display, means, workers)
    if part is None:
        heard = {*schedule.errors, *(t for t in targets if t.error)}
        end(run, targets, schedule.errors, telling.as_json, claimed.earlier, heard)
        return
    failed = {**schedule.errors, **{t: t.error for t in targets if t.error}}
    done = sum(len(units) for t, units in todo.items() if t not in failed)
    deviations = {t: whys for t in todo if t not in failed and (whys := calibrated_deviations(run, t))}
    if telling.as_json:
        about = {
            "slice": asdict(part),
            "units": done,
            "failed": _plain(failed),
            "deviations": _plain(deviations, "deviations"),
        }
        typer.echo(json.dumps(about, indent=1))
    else:
        _say_deviations(deviations)
        more = f", {len(failed)} models failed" if failed else ""
        typer.echo(f"slice {part.number}/{part.count}: {done} units done{more}", err=True)
    raise typer.Exit(SOME_FAILED if failed or deviations else DONE)


def _plain(found: Mapping[Target, str] | Mapping[Target, Sequence[str]], what: str = "error") -> list[dict[str, Any]]:
    return [{"model": t.name, "revision": t.revision, what: value} for t, value in found.items()]


def _say_deviations(deviations: Mapping[Target, Sequence[str]]) -> None:
    for target, whys in deviations.items():
        for why in whys:
            typer.echo(f"{target.label}: not all as asked: {why}", err=True)


def work(run: Run, schedule: Schedule, display: Display, means: Means, workers: int | None) -> None:
    """Have all units of the schedule done; exits where nobody can go on."""
    from ln_probe.batch.drive import StoppedError, drive
    from ln_probe.batch.engines import LocalEngine

    if not len(schedule):
        return
    engine = _engine(run, schedule, means, workers)
    display.workers = engine.workers
    if isinstance(engine, LocalEngine):
        display.pulses = engine.pulses
    try:
        drive(engine, schedule, display)
    except StoppedError as error:
        typer.echo(f"ln-probe: {error}", err=True)
        raise typer.Exit(SOME_FAILED) from error
    finally:
        engine.close()


def check_engine(means: Means) -> None:
    """Exit if the engine that is asked for cannot be had; nothing is written before."""
    if means.engine != "ray":
        return
    from ln_probe.batch.ray_engine import RayError, connect

    try:
        connect(means.address, means.gpus)
    except RayError as error:
        raise refuse(str(error)) from error


def _engine(run: Run, schedule: Schedule, means: Means, workers: int | None) -> Engine:
    from ln_probe.analyses.geometry.compiled import available
    from ln_probe.batch.cost import default_workers
    from ln_probe.batch.engines import InProcess, LocalEngine

    if means.engine == "ray":
        from ln_probe.batch.ray_engine import RayEngine

        return RayEngine(run, workers, address=means.address, gpus=means.gpus)
    if workers == 0:
        return InProcess(run)
    if workers is not None:
        return LocalEngine(run, min(workers, len(schedule)))
    count = min(default_workers(run, schedule.targets), len(schedule))
    return LocalEngine(run, count, max(1, available() // count))


def end(
    run: Run,
    targets: Sequence[Target],
    errors: Mapping[Target, str],
    as_json: bool,
    earlier: Sequence[Target] = (),
    said: Collection[Target] = (),
) -> None:
    """Write the index, say what was done, and exit.

    Args:
        targets: of this command; earlier: of earlier ones, which are listed and decide nothing.
        errors: why checkpoints failed; said: those whose failure has been said already.
    """
    from ln_probe.batch.drive import write_index
    from ln_probe.batch.store import StorageError

    try:
        ended = write_index(run, targets, errors, earlier)
    except StorageError as error:
        typer.echo(f"ln-probe: {error}", err=True)
        raise typer.Exit(SOME_FAILED) from error
    index = run.out / "index.html"
    if as_json:
        models = [
            {
                "model": t.name,
                "revision": t.revision,
                "error": ended.failed.get(t),
                "page": None if t in ended.failed else str(run.out / t.folder / "report.html"),
                "failed_probes": list(ended.probes.get(t, ())),
                "deviations": list(ended.deviations.get(t, ())),
            }
            for t in (*earlier, *targets)
        ]
        typer.echo(json.dumps({"index": str(index), "models": models}, indent=1))
    failures = {t: ended.failed[t] for t in targets if t in ended.failed}
    probes = {t: ended.probes[t] for t in targets if t in ended.probes}
    deviations = {t: ended.deviations[t] for t in targets if t in ended.deviations}
    if not as_json:
        for target, why in failures.items():
            if target not in said:
                typer.echo(f"{target.label}: failed: {why}", err=True)
        for target, whys in probes.items():
            for why in whys:
                typer.echo(f"{target.label}: {why}", err=True)
        _say_deviations(deviations)
        more = f"; {len(earlier)} of earlier commands beside them" if earlier else ""
        typer.echo(f"{index}: {len(targets) - len(failures)} of {len(targets)} models{more}", err=True)
    raise typer.Exit(SOME_FAILED if failures or probes or deviations else DONE)


def nothing_to_do(targets: Sequence[Target], as_json: bool) -> None:
    """No model can be found: say so, write nothing, and exit."""
    if as_json:
        models = [{"model": t.name, "revision": t.revision, "error": t.error, "page": None} for t in targets]
        typer.echo(json.dumps({"index": None, "models": models}, indent=1))
    for target in () if as_json else targets:
        typer.echo(f"{target.label}: failed: {target.error}", err=True)
    raise typer.Exit(SOME_FAILED)
