"""The command line, `ln-probe report | freezing-cost | plan | merge | models | lab | env`.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from ln_probe.analyses.files import Undo, temporary_folder
from ln_probe.analyses.processes import check_stopped
from ln_probe.analyses.text import counted, encodable
from ln_probe.batch import exits
from ln_probe.batch.exits import DONE, SOME_FAILED, refuse, refusing, writable
from ln_probe.batch.options import (
    LARGEST,
    REPORTS,
    Execution,
    MeasureOptions,
    Out,
    Output,
    ReportOptions,
    Workers,
    asked,
    check_values,
    count_option,
    run_of,
    takes,
    typed_path,
)

if TYPE_CHECKING:
    from ln_probe.batch.downloads import Downloads
    from ln_probe.batch.pool import Display, Engine, Schedule
    from ln_probe.batch.run import Claimed, Run, Slice, Unit
    from ln_probe.batch.suite import Target


class _Commands(typer.core.TyperGroup):
    """All commands: stopped by a signal, each says how to resume; an unknown one is answered with those that exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}: choose from {', '.join(self.commands)}.")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **given: Any) -> Any:
        try:
            try:
                return super().main(*args, **given)
            except SystemExit as end:
                cause = end.__context__.__cause__ if end.__context__ else None
                if isinstance(cause, KeyboardInterrupt):  # typer's answer is 130, without a word
                    raise cause from None
                raise
            except Exception:
                check_stopped()  # a module that was interrupted while it was imported raises anything
                raise
        except KeyboardInterrupt as stop:
            sys.exit(exits.interrupted(stop))


app = typer.Typer(
    cls=_Commands,
    help="What does LayerNorm do for this model's attention?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(
    cls=_Commands, help="From-scratch experiments, published figures beside their own.", no_args_is_help=True
)
app.add_typer(lab, name="lab")


def main() -> None:
    """The command, with a last word for what nothing else has caught."""
    try:
        app()
    except (SystemExit, GeneratorExit):
        raise
    except KeyboardInterrupt as stop:
        sys.exit(exits.interrupted(stop))
    except BaseException as error:  # a tokenizer written in Rust raises PanicException, which is no Exception
        if os.environ.get(exits.TRACEBACK):
            raise
        typer.echo(f"ln-probe: {exits.last_words(error)}", err=True)
        sys.exit(SOME_FAILED)
    finally:  # from here on there is nothing left to save
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        import ln_probe

        typer.echo(f"ln-probe {ln_probe.__version__}")
        raise typer.Exit(DONE)


@app.command()
def models(
    bundled: Annotated[bool, typer.Option("--bundled", help="Only the bundled ones, one a line.")] = False,
) -> None:
    """List models you can load: the bundled checkpoints, and what else `report` takes."""
    import ln_probe

    names = ln_probe.bundled_models()
    if bundled:
        typer.echo("\n".join(names))
        return
    typer.echo("bundled (each is one trained model; other seeds may differ):\n" + "\n".join(f"  {n}" for n in names))
    typer.echo(
        _between_words(
            "by hub name (needs a network or a filled cache):\n"
            "  gpt2, gpt2-medium, …   pythia-70m, pythia-160m, … (--revision step1000)   opt-125m   gpt-neo-125M\n"
            "  any owner/name of a GPT-2, GPT-NeoX, OPT, GPT-Neo, Llama-family or Gemma checkpoint\n"
            "from disk:\n  a Hugging Face folder, a .gguf file, a lab run's folder"
        )
    )


@app.command()
@takes
def report(
    *,
    options: ReportOptions,
    execution: Execution,
    workers: Workers = None,
    out: Out = REPORTS,
    output: Output,
) -> None:
    """One folder per checkpoint (OUT/<name>/) and OUT/index.html. Re-run the same command to resume."""
    from filelock import FileLock

    from ln_probe.batch.downloads import bytes_of
    from ln_probe.batch.run import WORK_FOLDER, BusyError, Slice, claim, kept, locked

    if execution.engine not in ("local", "ray"):
        raise refuse(f"--engine must be one of local, ray, got {execution.engine!r}")
    with refusing(ValueError):
        bound = None if execution.disk is None else bytes_of(execution.disk)
        part = None if execution.unit is None else Slice.parse(execution.unit)
    if execution.engine != "ray" and (execution.address is not None or execution.gpus):
        raise refuse("--address and --gpus are about a Ray cluster: add --engine ray, or leave them out")
    if part is not None and execution.fresh:
        raise refuse("--fresh would delete what other slices have done: delete the folder instead")
    if execution.dry_run:
        estimate(options, workers, out, output, bound)
    settings, targets = asked(options, out, bound, quiet=output.quiet)
    if all(t.error for t in targets):
        if output.as_json:
            print_json(index=None, models=[_row(t, error=t.error, page=None) for t in targets])
        for target in () if output.as_json else targets:
            typer.echo(f"{target.label}: failed: {target.error}", err=True)
        raise typer.Exit(SOME_FAILED)
    if execution.engine == "ray":
        from ln_probe.batch.ray_pool import RayError, connect

        with refusing(RayError):  # nothing is written before
            connect(execution.address, execution.gpus)
    undo = Undo(out, out / WORK_FOLDER)
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(out, part))
            with FileLock(out / WORK_FOLDER / "claim.lock"):  # slices that start together read the prompts in turn
                run = run_of(options, settings, out, out / WORK_FOLDER / "corpus")
                claimed = claim(run, targets, fresh=execution.fresh)
        except BusyError as error:
            undo(lambda path: part is None or not path.name.startswith(part.lock))
            raise refuse(str(error)) from error
        except (OSError, ValueError) as error:
            lock.close()
            with suppress(BusyError), locked(out):  # else other slices are at work
                undo(kept(out, part))
            if isinstance(error, ValueError | FileNotFoundError | ConnectionError):
                raise refuse(str(error)) from error
            raise refuse(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
        carry_out(run, claimed, execution, workers, part, output, bound)


@app.command("freezing-cost")
@takes
def freezing_cost(
    *,
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A name, name@revision, or a path.")],
    options: MeasureOptions,
    output: Output,
) -> None:
    """The first number of a report alone, in a minute: how much freezing scaling raises the loss, with its CI."""
    import ln_probe
    from ln_probe.batch.suite import suite
    from ln_probe.prompts import make_prompts
    from ln_probe.settings import read_groups

    with refusing(OSError, ValueError):
        check_values(options)
        (target,) = suite([name], None, options.revision, allow_pickle=options.allow_pickle)
        prompts = None if options.prompts is None else Path(options.prompts)
        groups = None if options.groups is None else read_groups(options.groups)
    measuring: dict[str, Any] = {"prompts": prompts, "groups": groups}
    measuring |= {name: getattr(options, name) for name in ("calibration", "loss", "max_tokens", "seed")}
    loading = {name: getattr(options, name) for name in ("device", "dtype", "allow_pickle")}
    why = target.error
    try:
        if not why:
            model: Any = ln_probe.load_model(target.name, revision=target.revision, **loading)
            measuring["prompts"] = make_prompts(
                model, prompts, max_tokens=options.max_tokens, max_prompts=options.max_prompts
            )
            cost = ln_probe.freezing_cost(model, **measuring, progress=not output.quiet)
    except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        why = exits.why_failed(error)
    if why:
        typer.echo(f"{target.label}: failed: {why}", err=True)
        raise typer.Exit(SOME_FAILED)
    if output.as_json:
        print_json(model=target.label, **cost.plain)
    else:
        typer.echo(f"{target.label}: {cost}")


@app.command()
@takes
def plan(*, options: ReportOptions, workers: Workers = None, out: Out = REPORTS, output: Output) -> None:
    """The work units of a report and what they are expected to cost; nothing is loaded or written."""
    estimate(options, workers, out, output)


@app.command()
@takes
def merge(
    *,
    folder: Annotated[Path, typer.Argument(parser=typed_path, metavar="DIR", help="The --out of the slices.")],
    workers: Workers = None,
    output: Output,
) -> None:
    """Join the slices made with `report --unit K/N` into reports and an index."""
    from ln_probe.batch.pool import Display, Schedule, remains
    from ln_probe.batch.run import BusyError, locked, reopen

    with refusing(FileNotFoundError, ValueError):
        run, targets = reopen(folder)
        writable(folder)
    display = Display(len(targets), quiet=output.quiet)
    with refusing(BusyError), locked(folder), display:
        todo = remains(run, targets, display)
        missing = {t: f"{_names(units)} missing: run its slice again" for t, units in todo.items() if units}
        for target, why in missing.items():
            display.say(f"{target.label}: {why}")
        schedule = Schedule({t: () for t in todo if t not in missing}, missing)
        work(run, schedule, display, Execution(), workers)
        end(run, targets, schedule.errors, output)


def _names(units: Sequence[Unit]) -> str:
    shown = ", ".join(map(str, units[:3]))
    return f"{len(units)} unit{'s' * (len(units) > 1)} ({shown}{', …' * (len(units) > 3)})"


def estimate(
    options: ReportOptions, workers: int | None, out: Path, output: Output, disk: int | None = None
) -> NoReturn:
    """Print what a report is expected to cost, and exit."""
    from ln_probe.batch.cost import cost, cost_table, default_workers, prompt_lengths

    settings, targets = asked(options, out, disk, quiet=output.quiet)
    with temporary_folder() as scratch:
        with refusing(FileNotFoundError, ValueError, ConnectionError):
            run = run_of(options, settings, out, scratch)
        lengths = prompt_lengths(run.corpus, scratch / run.corpus.name)
    count = workers or default_workers(run, targets)
    costs = {t: None if t.error else cost(run, t, lengths) for t in targets}
    there = {t: 0 if t.error else sum(run.path(t, u).is_file() for u in run.units()) for t in targets}
    if output.as_json:
        rows = [
            _row(t, error=t.error or None, folder=str(out / t.folder), units_there=there[t])
            | {k: None if v != v else v for k, v in ({} if c is None else asdict(c)).items()}
            for t, c in costs.items()
        ]
        print_json(workers=count, shards=run.corpus.shards, models=rows)
    else:
        typer.echo(encodable(cost_table(run, costs, there, count)))
    raise typer.Exit(SOME_FAILED if any(t.error for t in targets) else DONE)


def print_json(**content: Any) -> None:
    typer.echo(json.dumps(content, indent=1))


def _row(target: Target, **more: Any) -> dict[str, Any]:
    return {"model": target.name, "revision": target.revision, **more}


def carry_out(
    run: Run,
    claimed: Claimed,
    execution: Execution,
    workers: int | None,
    part: Slice | None,
    output: Output,
    disk: int | None,
) -> None:
    """Do what is missing of a run, or of a slice of it, and exit."""
    from ln_probe.batch.downloads import Downloads, folder_of
    from ln_probe.batch.pool import Display, Schedule, calibrated_deviations, remains

    targets = claimed.targets
    failed = {t: t.error for t in targets if t.error}
    display = Display(quiet=output.quiet)
    with display:
        for target in claimed.removed:
            display.say(f"{target.label}: its report, made in another way, was removed (--fresh)")
        for target, why in failed.items():
            display.say(f"{target.label}: failed: {why}")
        todo = remains(run, targets, display, fresh=execution.fresh, part=part)
        schedule = Schedule(todo, failed, reports=part is None)
        downloads = None
        if disk is not None:
            run = replace(run, downloads=folder_of(run, part))
            downloads = Downloads(folder_of(run, part), disk, todo, allow_pickle=run.allow_pickle)
        work(run, schedule, display, execution, workers, downloads)
    if part is None:
        end(run, targets, schedule.errors, output, claimed.earlier)
    failed = schedule.errors
    done = {t: len(units) for t, units in todo.items() if t not in failed}
    deviations = {t: whys for t in done if (whys := calibrated_deviations(run, t))}
    if output.as_json:
        print_json(
            slice=asdict(part),
            units=sum(done.values()),
            failed=[_row(t, error=why) for t, why in failed.items()],
            deviations=[_row(t, deviations=whys) for t, whys in deviations.items()],
        )
    else:
        lines = [f"{t.label}: not all as asked: {why}" for t, whys in deviations.items() for why in whys]
        more = f", {len(failed)} models failed" if failed else ""
        lines.append(f"slice {part.number}/{part.count}: {sum(done.values())} units done{more}")
        typer.echo("\n".join(lines), err=True)
    raise typer.Exit(SOME_FAILED if failed or deviations else DONE)


def work(
    run: Run,
    schedule: Schedule,
    display: Display,
    execution: Execution,
    workers: int | None,
    downloads: Downloads | None = None,
) -> None:
    """Have all units of the schedule done; exits where no process can continue."""
    from ln_probe.batch.pool import StoppedError, drive

    with ExitStack() as opened:
        if downloads is not None:
            opened.callback(downloads.close)
        if not len(schedule):
            return
        engine = _engine(run, schedule, execution, workers)
        opened.callback(engine.close)
        display.workers = engine.workers
        display.stages = lambda: [*engine.stages(), *([] if downloads is None else [downloads.stage()])]
        with refusing(StoppedError, status=SOME_FAILED):
            drive(engine, schedule, display, downloads)


def _engine(run: Run, schedule: Schedule, execution: Execution, workers: int | None) -> Engine:
    from ln_probe.analyses.geometry.compiled import available
    from ln_probe.batch.cost import default_workers
    from ln_probe.batch.pool import InProcess, LocalEngine

    if execution.engine == "ray":
        from ln_probe.batch.ray_pool import RayEngine

        return RayEngine(run, workers, address=execution.address, gpus=execution.gpus)
    if workers == 0:
        return InProcess(run)
    if workers is not None:
        return LocalEngine(run, min(workers, len(schedule)))
    count = min(default_workers(run, schedule.targets), len(schedule))
    return LocalEngine(run, count, max(1, available() // count))


def end(
    run: Run, targets: Sequence[Target], errors: Mapping[Target, str], output: Output, earlier: Sequence[Target] = ()
) -> NoReturn:
    """Write the index, say what was done, and exit.

    Args:
        targets: of this command; earlier: of earlier ones, which are listed and decide nothing.
        errors: why checkpoints failed, as far as that has been said already.
    """
    from ln_probe.batch.pool import write_index
    from ln_probe.batch.results import StorageError

    with refusing(StorageError, status=SOME_FAILED):
        ended = write_index(run, targets, errors, earlier)
    index, mine = run.out / "index.html", ended[len(earlier) :]
    if output.as_json:
        models = [
            _row(
                e.target,
                error=e.error or None,
                page=None if e.error else str(run.out / e.target.folder / "report.html"),
                failed_probes=e.probes,
                deviations=e.deviations,
            )
            for e in ended
        ]
        print_json(index=str(index), models=models)
    else:
        lines = [f"{e.target.label}: failed: {e.error}" for e in mine if e.error and e.target not in errors]
        lines += [f"{e.target.label}: {why}" for e in mine for why in e.probes]
        lines += [f"{e.target.label}: not all as asked: {why}" for e in mine for why in e.deviations]
        more = f"; {len(earlier)} of earlier commands next to them" if earlier else ""
        lines.append(f"{index}: {sum(not e.error for e in mine)} of {len(mine)} models{more}")
        typer.echo("\n".join(lines), err=True)
    raise typer.Exit(SOME_FAILED if any(e.error or e.probes or e.deviations for e in mine) else DONE)


@app.command()
def env() -> None:
    """Versions, TransformerLens's worlds, devices: what to paste into a bug report."""
    from ln_probe.report import environment

    typer.echo("\n".join(f"{name}: {found}" for name, found in environment().items()))


@lab.command("list")
def lab_list() -> None:
    """The experiments, what they repeat and how long they take (on one core unless it says otherwise)."""
    from ln_probe.analyses.lab.experiments import EXPERIMENTS

    for name, found in EXPERIMENTS.items():
        text = "  needs --text" if found.needs_text else ""
        seeds, (whole, quick) = counted(found.seeds, "seed"), found.duration
        typer.echo(
            _between_words(
                f"{name}: {found.summary}\n  {found.source}\n"
                f"  {seeds}: {whole}; --quick ({found.quick_seeds}): {quick}{text}"
            )
        )


def _between_words(text: str) -> str:
    """Break lines that are longer than the terminal is wide; output that goes elsewhere stays as it is."""
    width = shutil.get_terminal_size(fallback=(1000, 24)).columns
    lines = (textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(part for line in lines for part in line)


@lab.command("run")
def lab_run(
    name: Annotated[str, typer.Argument(help="One of `ln-probe lab list`.")],
    seeds: Annotated[
        int | None, count_option(None, least=1, most=10_000, help="How many; default: the experiment's own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=typed_path, metavar="PATH", help="Folder; default lab-runs/NAME.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A size that takes minutes.")] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(parser=typed_path, metavar="PATH", help="A text file (UTF-8); may be repeated."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(parser=typed_path, metavar="PATH", help="A tokenizer's folder; else made from the text."),
    ] = None,
    jobs: Annotated[int, count_option(None, least=1, most=10_000, help="Processes that train side by side.")] = 1,
    collect: Annotated[bool, typer.Option("--collect", help="Train nothing: tables of what runs reached.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
    device: Annotated[str, typer.Option(help="To train on: cpu, cuda, cuda:1, …")] = "cpu",
) -> None:
    """Train an experiment's models and write tables and plots; re-run the same command to resume."""
    import ln_probe
    from ln_probe.analyses.lab import experiments
    from ln_probe.models import device_named

    with refusing(experiments.UnknownExperimentError, ValueError):
        known = experiments.find(name)
        device_named(device)
    folder = out or Path("lab-runs") / name
    writable(folder)
    request = experiments.Request(
        out=folder,
        seeds=tuple(range(seeds or (known.quick_seeds if quick else known.seeds))),
        quick=quick,
        texts=tuple(text or ()),
        tokenizer=tokenizer,
        jobs=jobs,
        collect=collect,
        progress=not quiet and sys.stderr.isatty(),
        device=device,
    )
    from ln_probe.analyses.progress import ProgressLine

    command = shlex.join(["ln-probe", *sys.argv[1:]])
    line = ProgressLine(quiet=quiet or request.progress)  # on a terminal the runs draw their own bars
    with refusing(FileExistsError, FileNotFoundError, ImportError, ValueError), line:
        results = experiments.run(name, request, command=command, ln_probe_version=ln_probe.__version__)
    typer.echo(results.summary.to_string(index=False, float_format=lambda v: f"{v:.4g}"))
    for sentence in results.conclusions:
        typer.echo(sentence)
    for failure in results.diverged:
        typer.echo(f"diverged: {failure}", err=True)
    from ln_probe.page.lab import write_lab_page

    page = write_lab_page(folder)
    typer.echo(f"{page}; results.json, {', '.join([*results.tables, *results.figures])} next to it", err=True)
    raise typer.Exit(SOME_FAILED if results.diverged else DONE)


@lab.command("compile")
def lab_compile(
    program: Annotated[Path, typer.Argument(help="A C-RASP program (docs/compiler.md).")],
    out: Annotated[
        Path,
        typer.Option(parser=typed_path, metavar="PATH", help="Folder for the model, which `ln-probe report` takes."),
    ],
    construction: Annotated[str, typer.Option(help="What makes truth values: scaling, clip, rounding.")] = "scaling",
    norm: Annotated[str, typer.Option(help="layernorm, scaling_only, projection_only, none.")] = "layernorm",
    alphabet: Annotated[str | None, typer.Option(help="Letters of words; default: those of the program.")] = None,
    letters: Annotated[int, count_option(None, least=1, most=100_000, help="The longest word.")] = 511,
) -> None:
    """Compile a C-RASP program to a transformer's weights; what does not fit is named with line and column."""
    from ln_probe.analyses.files import read_text

    with refusing(ImportError):
        from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse
        from ln_probe.analyses.lab.crasp.crasp_compiler import compile_program, save_compiled

    if construction not in (known := ("scaling", "clip", "rounding")):
        raise refuse(f"unknown construction {construction!r}: known ones are {', '.join(known)}")
    writable(out)
    try:
        source = read_text(program, LARGEST, "utf-8-sig")  # editors on Windows write a byte order mark
        made = compile_program(parse(source), construction, norm, alphabet=alphabet, n_ctx=letters + 1)  # type: ignore[arg-type]
        save_compiled(made, out)
    except (CRaspError, FileNotFoundError) as error:
        raise refuse(f"{program}: {getattr(error, 'strerror', None) or error}") from error
    except (OSError, ValueError) as error:  # these say themselves what they are about
        raise refuse(str(error)) from error
    grid = made.precision
    typer.echo(
        f"{encodable(str(out))}: depth {made.depth}, {made.layers} layers ({made.attending} attend), "
        f"d_model {made.model.cfg.d_model}, tokens BOS {' '.join(made.alphabet)}"
        + ("" if grid is None else f"; fixed precision of {grid.bits} bits, {grid.fraction} behind the point")
    )


if __name__ == "__main__":
    main()
