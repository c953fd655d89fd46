"""The commands `report`, `plan` and `merge`. Heavy imports happen inside them."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ln_probe.analyses.probes.registry import listing
from ln_probe.batch.arguments import (
    check_layers,
    check_precision,
    check_writable,
    layers,
    not_there_yet,
    remove_again,
)

if TYPE_CHECKING:
    from ln_probe.batch.claiming import Claimed
    from ln_probe.batch.drive import Slice
    from ln_probe.batch.engines import Engine
    from ln_probe.batch.plan import Run, Unit
    from ln_probe.batch.progress import Display
    from ln_probe.batch.schedule import Schedule
    from ln_probe.batch.suite import Target
    from ln_probe.measuring.settings import Settings

DONE, SOME_FAILED, BAD_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130
ENGINES = ("local", "ray")

Models = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]…", help="Names or paths; none means the bundled checkpoints.")
]
Prompts = Annotated[
    str | None, typer.Option(help="A .txt, .jsonl or .npy file, a data set (folder or hf:NAME), or 'sampled'.")
]
Out = Annotated[Path, typer.Option(help="Folder for the reports.")]
Probes = Annotated[str | None, typer.Option(help=f"Comma-separated; default: all of ln_probe's own. {listing()}.")]
Layers = Annotated[str | None, typer.Option(help="Comma-separated layers, ranges as 3-5; default all.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longer prompts are cut.")]
MaxPrompts = Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")]
Shard = Annotated[int | None, typer.Option(min=1, help="Prompts in a work unit.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit; Pythia: step1000.")]
Checkpoints = Annotated[str | None, typer.Option(help="Training steps, 0,1000,…, or 'all'.")]
Keys = Annotated[str, typer.Option(help="Rows of the keys table: 'hardest' or 'all'.")]
KeysSample = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Keys measured of each head, each among all. 0: all. Default: all, unless that would take over an hour.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of sampled prompts and keys.")]
Vocab = Annotated[Path | None, typer.Option(help="Token strings for a model without a tokenizer: JSON, or one a line.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read .bin/.pt weights (weights_only).")]
EngineName = Annotated[str, typer.Option("--engine", help="'local' processes or a 'ray' cluster.")]
Address = Annotated[str | None, typer.Option(help="Of the Ray cluster; 'auto' finds one, none starts one here.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0, help="Processes, each with one checkpoint and one thread; 0: none but this. Default: the machine's."
    ),
]
Gpus = Annotated[float, typer.Option(min=0, help="GPUs per Ray worker, fractions too.")]
UnitOf = Annotated[str | None, typer.Option("--unit", metavar="K/N", help="Only slice K of N; join with merge.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Do finished models again.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress display.")]


def refuse(message: str) -> typer.Exit:
    typer.echo(f"ln-probe: {message}", err=True)
    return typer.Exit(BAD_ARGUMENTS)


@dataclass(frozen=True)
class Wish:
    """What decides the tables, as it was typed."""

    models: tuple[str, ...]
    prompts: str | None
    probes: str | None
    layers: str | None
    keys: str
    max_tokens: int
    max_prompts: int | None
    shard: int | None
    seed: int
    dtype: str
    device: str | None
    revision: str | None
    checkpoints: str | None
    allow_pickle: bool
    vocab: Path | None = None
    keys_sample: int | None = None
    quiet: bool = False


def report(
    model: Models = None,
    prompts: Prompts = None,
    out: Out = Path("reports"),
    probes: Probes = None,
    layers: Layers = None,
    max_tokens: MaxTokens = 512,
    max_prompts: MaxPrompts = None,
    device: Device = None,
    dtype: Dtype = "float32",
    revision: Revision = None,
    checkpoints: Checkpoints = None,
    keys: Keys = "hardest",
    keys_sample: KeysSample = None,
    seed: Seed = 0,
    allow_pickle: AllowPickle = False,
    vocab: Vocab = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    gpus: Gpus = 0.0,
    shard: Shard = None,
    unit: UnitOf = None,
    dry_run: DryRun = False,
    fresh: Fresh = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """One folder per checkpoint (OUT/<name>/) and OUT/index.html. Run again, it goes on where it stopped."""
    wish = Wish(
        tuple(model or ()),
        prompts,
        probes,
        layers,
        keys,
        max_tokens,
        max_prompts,
        shard,
        seed,
        dtype,
        device,
        revision,
        checkpoints,
        allow_pickle,
        vocab,
        keys_sample,
        quiet,
    )
    if engine not in ENGINES:
        raise refuse(f"--engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if dry_run:
        _plan(wish, out, workers, as_json)
        return
    part = _slice(unit)
    if part is not None and fresh:
        raise refuse("--fresh would delete what other slices have done: delete the folder instead")
    settings = _settings(wish)
    writable(out)
    targets = _targets(wish)
    _check_layers(settings, targets)
    if all(t.error for t in targets):
        _nothing_to_do(targets, as_json)

    from ln_probe.batch.claiming import claim
    from ln_probe.batch.drive import BlockedError, BusyError, check_places, locked
    from ln_probe.batch.plan import WORK_FOLDER

    with ExitStack() as lock:
        made, new = not_there_yet(out), not (out / WORK_FOLDER).exists()
        try:
            lock.enter_context(locked(out, part))
            try:
                with _claiming(out):
                    run = _run(wish, settings, out, out / WORK_FOLDER / "corpus")
                    claimed = claim(run, targets, fresh=fresh)
                    check_places(run, claimed.targets)
            except (FileNotFoundError, ValueError, ConnectionError):
                if part is None:  # other slices may have begun meanwhile
                    remove_again(made, out / WORK_FOLDER, new=new)
                raise
        except (BusyError, BlockedError, FileNotFoundError, ValueError, ConnectionError) as error:
            raise refuse(str(error)) from error
        except OSError as error:
            raise refuse(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
        _go(run, claimed, engine, address, workers, gpus, part, fresh, as_json, quiet)


def plan(
    model: Models = None,
    prompts: Prompts = None,
    out: Out = Path("reports"),
    probes: Probes = None,
    layers: Layers = None,
    max_tokens: MaxTokens = 512,
    max_prompts: MaxPrompts = None,
    device: Device = None,
    dtype: Dtype = "float32",
    revision: Revision = None,
    checkpoints: Checkpoints = None,
    keys: Keys = "hardest",
    keys_sample: KeysSample = None,
    seed: Seed = 0,
    allow_pickle: AllowPickle = False,
    vocab: Vocab = None,
    workers: Workers = None,
    shard: Shard = None,
    as_json: AsJson = False,
) -> None:
    """The work units of a report and what they are expected to cost; nothing is loaded or written."""
    wish = Wish(
        tuple(model or ()),
        prompts,
        probes,
        layers,
        keys,
        max_tokens,
        max_prompts,
        shard,
        seed,
        dtype,
        device,
        revision,
        checkpoints,
        allow_pickle,
        vocab,
        keys_sample,
    )
    _plan(wish, out, workers, as_json)


def merge(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of the slices.")],
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Join the slices made with `report --unit K/N` into reports and an index."""
    from ln_probe.batch.claiming import reopen
    from ln_probe.batch.drive import BusyError, locked, remains
    from ln_probe.batch.progress import Display
    from ln_probe.batch.schedule import Schedule

    try:
        run, targets = reopen(folder)
        writable(folder)
    except (FileNotFoundError, ValueError) as error:
        raise refuse(str(error)) from error
    try:
        with locked(folder), Display(len(targets), 1, quiet=quiet) as display:
            todo = remains(run, targets, display)
            missing = {t: f"{_names(units)} missing: run its slice again" for t, units in todo.items() if units}
            for target, why in missing.items():
                display.say(f"{target.label}: {why}")
            schedule = Schedule({t: () for t in todo if t not in missing})
            _work(run, schedule, display, "local", None, workers, 0.0)
            _end(run, targets, {**schedule.errors, **missing}, as_json, said={*schedule.errors, *missing})
    except BusyError as error:
        raise refuse(str(error)) from error


def _names(units: Sequence[Unit]) -> str:
    shown = ", ".join(map(str, units[:3]))
    return f"{len(units)} unit{'s' * (len(units) > 1)} ({shown}{', …' * (len(units) > 3)})"


def _go(
    run: Run,
    claimed: Claimed,
    engine: str,
    address: str | None,
    workers: int | None,
    gpus: float,
    part: Slice | None,
    fresh: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from ln_probe.batch.drive import remains
    from ln_probe.batch.progress import Display
    from ln_probe.batch.schedule import Schedule

    targets = claimed.targets
    with Display(0, 1, quiet=quiet) as display:
        for target in claimed.removed:
            display.say(f"{target.label}: its report, made in another way, was removed (--fresh)")
        for target in targets:
            if target.error:
                display.say(f"{target.label}: failed: {target.error}")
        todo = remains(run, targets, display, fresh=fresh, part=part)
        schedule = Schedule(todo, reports=part is None)
        _work(run, schedule, display, engine, address, workers, gpus)
    if part is None:
        heard = {*schedule.errors, *(t for t in targets if t.error)}
        _end(run, targets, schedule.errors, as_json, claimed.earlier, heard)
        return
    failed = {**schedule.errors, **{t: t.error for t in targets if t.error}}
    done = sum(len(units) for t, units in todo.items() if t not in failed)
    said = f"slice {part.number}/{part.count}: {done} units done" + (f", {len(failed)} models failed" if failed else "")
    if as_json:
        typer.echo(json.dumps({"slice": asdict(part), "units": done, "failed": _plain(failed)}, indent=1))
    else:
        typer.echo(said, err=True)
    raise typer.Exit(SOME_FAILED if failed else DONE)


def _plain(errors: Mapping[Target, str]) -> list[dict[str, Any]]:
    return [{"model": t.name, "revision": t.revision, "error": error} for t, error in errors.items()]


def _work(
    run: Run,
    schedule: Schedule,
    display: Display,
    engine_name: str,
    address: str | None,
    workers: int | None,
    gpus: float,
) -> None:
    """Have all units of the schedule done; exits where nobody can go on."""
    from ln_probe.batch.drive import StoppedError, drive
    from ln_probe.batch.engines import LocalEngine

    if not len(schedule):
        return
    engine = _engine(run, schedule, engine_name, address, workers, gpus)
    display.workers = engine.workers
    if isinstance(engine, LocalEngine):
        display.pulses = engine.pulses
    try:
        drive(engine, schedule, display)
    except StoppedError as error:
        typer.echo(f"ln-probe: {error}", err=True)
        raise typer.Exit(SOME_FAILED) from error
    except KeyboardInterrupt:
        typer.echo("ln-probe: stopped; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        engine.close()


def _engine(run: Run, schedule: Schedule, name: str, address: str | None, workers: int | None, gpus: float) -> Engine:
    from ln_probe.batch.cost import default_workers
    from ln_probe.batch.engines import InProcess, LocalEngine, processors

    if name == "ray":
        from ln_probe.batch.ray_engine import RayEngine, RayError

        try:
            return RayEngine(run, workers, address=address, gpus=gpus)
        except RayError as error:
            raise refuse(str(error)) from error
    if workers == 0:
        return InProcess(run)
    if workers is not None:
        return LocalEngine(run, min(workers, len(schedule)))
    count = min(default_workers(run, schedule.targets), len(schedule))
    return LocalEngine(run, count, max(1, processors() // count))


def _end(
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
            }
            for t in (*earlier, *targets)
        ]
        typer.echo(json.dumps({"index": str(index), "models": models}, indent=1))
    failures = {t: ended.failed[t] for t in targets if t in ended.failed}
    probes = {t: ended.probes[t] for t in targets if t in ended.probes}
    if not as_json:
        for target, why in failures.items():
            if target not in said:
                typer.echo(f"{target.label}: failed: {why}", err=True)
        for target, whys in probes.items():
            for why in whys:
                typer.echo(f"{target.label}: {why}", err=True)
        more = f"; {len(earlier)} of earlier commands beside them" if earlier else ""
        typer.echo(f"{index}: {len(targets) - len(failures)} of {len(targets)} models{more}", err=True)
    raise typer.Exit(SOME_FAILED if failures or probes else DONE)


def _nothing_to_do(targets: Sequence[Target], as_json: bool) -> None:
    """No model can be found: say so, write nothing, and exit."""
    if as_json:
        models = [{"model": t.name, "revision": t.revision, "error": t.error, "page": None} for t in targets]
        typer.echo(json.dumps({"index": None, "models": models}, indent=1))
    for target in () if as_json else targets:
        typer.echo(f"{target.label}: failed: {target.error}", err=True)
    raise typer.Exit(SOME_FAILED)


def _plan(wish: Wish, out: Path, workers: int | None, as_json: bool) -> None:
    from ln_probe.batch.cost import cost, default_workers, prompt_lengths
    from ln_probe.batch.show import cost_table

    settings = _settings(wish)
    targets = _targets(wish)
    _check_layers(settings, targets)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run = _run(wish, settings, out, Path(scratch))
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            raise refuse(str(error)) from error
        lengths = prompt_lengths(run.corpus, Path(scratch) / run.corpus.folder)
    count = workers or default_workers(run, targets)
    costs = [(t, None if t.error else cost(run, t, lengths)) for t in targets]
    there = {t: sum(run.path(t, u).is_file() for u in run.units()) for t in targets if not t.error}
    if as_json:
        rows = [
            {
                "model": t.name,
                "revision": t.revision,
                "error": t.error or None,
                "folder": str(out / t.folder),
                "units_there": there.get(t, 0),
            }
            | {k: None if v != v else v for k, v in ({} if c is None else asdict(c)).items()}
            for t, c in costs
        ]
        typer.echo(json.dumps({"workers": count, "shards": run.corpus.shards, "models": rows}, indent=1))
    else:
        typer.echo(cost_table(run, costs, there, count))
    raise typer.Exit(SOME_FAILED if any(t.error for t in targets) else DONE)


def _targets(wish: Wish) -> list[Target]:
    import ln_probe
    from ln_probe.batch.suite import SuiteError, suite
    from ln_probe.measuring.live import Live

    names = wish.models or tuple(ln_probe.bundled_models())
    if not names:
        raise refuse("no model given, and this installation has no bundled checkpoints")
    if not wish.quiet:
        typer.echo(f"looking for {', '.join(names[:4])}{', …' * (len(names) > 4)}", err=True)
    try:
        with Live(quiet=wish.quiet):
            return suite(names, wish.checkpoints, wish.revision, allow_pickle=wish.allow_pickle)
    except SuiteError as error:
        raise refuse(str(error)) from error


def _settings(wish: Wish) -> Settings:
    from ln_probe.analyses.probes.protocol import ProbeError
    from ln_probe.analyses.probes.registry import DEFAULT, chosen, entries
    from ln_probe.measuring.settings import KEYS, Settings
    from ln_probe.prompting.sources import check_source
    from ln_probe.prompting.vocabulary import read_vocabulary

    known = ", ".join(entries())
    wanted = DEFAULT if wish.probes is None else tuple(p.strip() for p in wish.probes.split(",") if p.strip())
    if unknown := [p for p in wanted if p not in entries()]:
        raise refuse(f"unknown probe {unknown[0]!r}: choose from {known}")
    if not wanted:
        raise refuse(f"--probes {wish.probes!r} names no probe: choose from {known}")
    try:
        chosen(wanted)
    except ProbeError as error:
        raise refuse(str(error)) from error
    if wish.keys not in KEYS:
        raise refuse(f"--keys must be one of {', '.join(KEYS)}, got {wish.keys!r}")
    if wish.prompts not in (None, "sampled"):
        try:
            check_source(str(wish.prompts))
        except (FileNotFoundError, ValueError) as error:
            raise refuse(str(error)) from error
    vocab = None if wish.vocab is None else str(wish.vocab.resolve())
    if vocab is not None:
        try:
            read_vocabulary(vocab)
        except (FileNotFoundError, ValueError) as error:
            raise refuse(str(error)) from error
    try:
        check_precision(wish.dtype, wish.device)
        wanted_layers = None if wish.layers is None else layers(wish.layers)
    except ValueError as error:
        raise refuse(str(error)) from error
    return Settings(wanted, wanted_layers, None, wish.keys, wish.max_tokens, wish.seed, vocab, wish.keys_sample)


def _check_layers(settings: Settings, targets: Sequence[Target]) -> None:
    try:
        check_layers(settings.layers, targets)
    except ValueError as error:
        raise refuse(str(error)) from error


def _run(wish: Wish, settings: Settings, out: Path, corpus: Path) -> Run:
    from ln_probe.batch.plan import Run
    from ln_probe.prompting.shards import PER_SHARD, divide

    sharded = divide(wish.prompts, corpus, wish.shard or PER_SHARD, wish.max_prompts)
    command = shlex.join(["ln-probe", *sys.argv[1:]])
    return Run(out, settings, sharded, wish.dtype, wish.device, wish.allow_pickle, command)


def _claiming(out: Path) -> Any:
    """Slices that start together read the prompts one after another."""
    from filelock import FileLock

    (out / ".ln_probe").mkdir(parents=True, exist_ok=True)
    return FileLock(out / ".ln_probe" / "claim.lock")


def _slice(text: str | None) -> Slice | None:
    from ln_probe.batch.drive import Slice

    try:
        return None if text is None else Slice.parse(text)
    except ValueError as error:
        raise refuse(str(error)) from error


def writable(out: Path) -> None:
    """Exit if a folder cannot be written to."""
    try:
        check_writable(out)
    except OSError as error:
        raise refuse(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
