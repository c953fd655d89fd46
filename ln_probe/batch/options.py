"""The options of commands: declared once, read from a file, checked, and made into a run."""

from __future__ import annotations

import inspect
import math
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ln_probe.analyses.arguments import LARGEST_SEED
from ln_probe.analyses.files import FileError, read_text, sha256_of_file
from ln_probe.analyses.probes.registry import listing
from ln_probe.analyses.text import counted, quoted, whole_number
from ln_probe.batch.exits import refuse, refusing, writable

if TYPE_CHECKING:
    from typer import Context

    from ln_probe.batch.run import Run
    from ln_probe.batch.suite import Target
    from ln_probe.settings import Settings
else:  # what is handed to a callback is of the class below the one that typer exports
    Context = typer.Context.__base__

LARGEST = 2**20  # bytes of a file of options


def read_options(context: Context, path: Path | None) -> Path | None:
    """Put a file's options in the place of the command's defaults (a callback of the option that names it)."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_read(context, path)}
    return path


def _read(context: Context, path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(read_text(path, LARGEST))
    except (OSError, FileError, tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise refuse(f"--config {path} cannot be read ({said}): give a TOML file such as max-tokens = 256") from error
    known = {
        _spelled(name): option
        for option in context.command.params
        for name in (option.opts[-1], option.name or "")
        if option.name not in ("config", "help")
    }
    if unknown := [key for key in found if _spelled(key) not in known]:
        options = ", ".join(sorted({option.opts[-1].lstrip("-") for option in known.values()}))
        raise refuse(f"--config {path}: unknown option {unknown[0]!r}; {context.command.name} takes {options}")
    values: dict[str, Any] = {}
    for key, value in found.items():
        option = known[_spelled(key)]
        where = f"--config {path}: {key}"
        values[str(option.name)] = typed = _value(value, where, several=option.nargs != 1)
        try:
            option.process_value(context, typed)
        except typer.BadParameter as error:  # it would name an option that was not typed
            raise refuse(f"{where} is {value!r}: {error.message}") from error
    return values


def _spelled(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _value(value: Any, where: str, *, several: bool) -> Any:
    """As the command line would have it: a list is written with commas."""
    if isinstance(value, list) and all(isinstance(v, str | int) and not isinstance(v, bool) for v in value):
        return [str(v) for v in value] if several else ",".join(map(str, value))
    if isinstance(value, str | int | float | bool):
        return [str(value)] if several else value
    raise refuse(f"{where} is {value!r}: an option is a text, a number, true or false, or a list of texts or numbers")


def typed_path(value: str | Path) -> Path:
    """Parse a path; an empty one would be the current folder."""
    if not str(value):
        raise typer.BadParameter("the name is empty: give a path (this folder is .)")
    return Path(value)


def _gpus(value: str | float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise typer.BadParameter(f"{quoted(str(value))} is not a number of GPUs per worker, 0 or more, fractions too")
    return number


# The groups of `--help`.
MODELS, PROMPTS, MEASURED = "Models", "Prompts", "What is measured"
WORK, OUTPUT = "How the work is done", "Output"


def _of(group: str, *names: str, **given: Any) -> Any:
    return typer.Option(*names, rich_help_panel=group, **given)


def count_option(group: str | None, *names: str, least: int, most: int = 10**9, **given: Any) -> Any:
    """An option that takes a whole number from `least` to `most`."""

    def parsed(value: str | int) -> int:
        number = whole_number(str(value), len(str(most)))
        if number is None or not least <= number <= most:
            raise typer.BadParameter(f"{quoted(str(value))} is not a whole number from {least} to {most}")
        return number

    return typer.Option(*names, rich_help_panel=group, parser=parsed, metavar="INTEGER", **given)


@dataclass(frozen=True)
class MeasureOptions:
    """The options of every command that measures: how a model is loaded, on which prompts, by which loss."""

    revision: Annotated[str | None, _of(MODELS, help="Branch, tag or commit; Pythia: step1000.")] = None
    device: Annotated[str | None, _of(MODELS, help="cpu, cuda, cuda:1.")] = None
    dtype: Annotated[
        str | None,
        _of(MODELS, help="float32, float64, bfloat16 or float16; default float32."),
    ] = None
    allow_pickle: Annotated[bool, _of(MODELS, "--allow-pickle", help="Read .bin/.pt weights (weights_only).")] = False
    prompts: Annotated[
        str | None,
        _of(PROMPTS, help="A .txt (a prompt a paragraph), .jsonl, .npy or data set (folder, hf:NAME), or 'sampled'."),
    ] = None
    max_tokens: Annotated[int, count_option(PROMPTS, least=2, help="Longer prompts are cut.")] = 512
    max_prompts: Annotated[int | None, count_option(PROMPTS, least=1, help="Only the first so many prompts.")] = None
    seed: Annotated[int, count_option(PROMPTS, least=0, most=LARGEST_SEED, help="Of sampled prompts and keys.")] = 0
    calibration: Annotated[
        Path | None,
        _of(PROMPTS, metavar="FILE", help="Text that constants come from. Default: the other prompts (leave-one-out)."),
    ] = None
    groups: Annotated[
        Path | None,
        _of(
            PROMPTS,
            metavar="FILE",
            help="A line per prompt with its label (its document, say): equal labels form one group.",
        ),
    ] = None
    loss: Annotated[
        str | None,
        _of(MEASURED, metavar="MODULE:FUNCTION", help="Another loss: (output, tokens) -> mean loss of each prompt."),
    ] = None


@dataclass(frozen=True)
class ReportOptions(MeasureOptions):
    """The options that decide the tables, as they were typed."""

    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]…", help="Names, name@revision, or paths; none means the bundled checkpoints."),
    ] = None
    suite: Annotated[
        Path | None,
        _of(MODELS, metavar="FILE", help="A list of names and paths, one a line, such as pythia-70m@step1000."),
    ] = None
    checkpoints: Annotated[str | None, _of(MODELS, help="Training steps, 0,1000,…, or 'all'.")] = None
    vocab: Annotated[
        Path | None, _of(MODELS, help="Token strings for a model without a tokenizer: JSON, or one a line.")
    ] = None
    optimal: Annotated[bool, _of(MEASURED, "--optimal", help="Fit loss-optimal constants too (minutes per model).")] = (
        False
    )
    probes: Annotated[
        str | None, _of(MEASURED, help=f"Comma-separated; default: all of ln_probe's own. {listing()}.")
    ] = None
    layers: Annotated[str | None, _of(MEASURED, help="Comma-separated layers, ranges as 3-5; default all.")] = None
    heads: Annotated[
        str | None,
        _of(MEASURED, help="Heads measured, drawn, and kept as attention patterns, written as --layers; default all."),
    ] = None
    keys: Annotated[str, _of(MEASURED, help="Rows of the keys table: 'hardest' or 'all'.")] = "hardest"
    keys_sample: Annotated[
        int | None,
        count_option(
            MEASURED,
            least=0,
            help="Keys measured of each head, each among all. 0: all. Default: all, unless that would take over an "
            "hour.",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        count_option(
            MEASURED,
            least=1,
            help="Prompts that go through the model together. Default: 1 on a CPU, on a GPU by memory.",
        ),
    ] = None
    shard: Annotated[int | None, count_option(WORK, least=1, help="Prompts in a work unit.")] = None
    strict: Annotated[
        bool,
        _of(
            MEASURED,
            "--strict",
            help="Fail a model where something else than asked would be measured (a tokenizer that does not load, "
            "skipped prompts, layers left over in the weights).",
        ),
    ] = False
    # Its callback has put the file's options in the place of defaults by the time the command runs.
    config: Annotated[
        Path | None,
        _of(
            OUTPUT,
            metavar="FILE",
            is_eager=True,
            callback=read_options,
            help="A TOML file of these options (max-tokens = 256); options on the command line override it.",
        ),
    ] = None


@dataclass(frozen=True)
class Execution:
    """Where the work is done, and how much of it; the tables do not depend on these options."""

    engine: Annotated[str, _of(WORK, help="'local' processes or a 'ray' cluster.")] = "local"
    address: Annotated[str | None, _of(WORK, help="Of the Ray cluster; 'auto' finds one, none starts one here.")] = None
    gpus: Annotated[float, _of(WORK, parser=_gpus, metavar="FLOAT", help="GPUs per Ray worker, fractions too.")] = 0.0
    unit: Annotated[str | None, _of(WORK, metavar="K/N", help="Only slice K of N; join with merge.")] = None
    dry_run: Annotated[bool, _of(WORK, "--dry-run", help="Say what would be done, and stop.")] = False
    fresh: Annotated[bool, _of(WORK, "--fresh", help="Do finished models again.")] = False
    disk: Annotated[
        str | None,
        _of(
            WORK,
            metavar="SIZE",
            help="Download within so much disk space, such as 2GB: the next checkpoint while one is measured; each is "
            "deleted when its report is made. Default: the hub's cache, and nothing is deleted.",
        ),
    ] = None


Workers = Annotated[
    int | None,
    count_option(
        WORK,
        least=0,
        help="Processes, a checkpoint and a thread each; 0: this one. Default: what processors and memory allow.",
    ),
]
Out = Annotated[Path, _of(OUTPUT, parser=typed_path, metavar="PATH", help="Folder for the reports.")]
REPORTS = Path("reports")


@dataclass(frozen=True)
class Output:
    """What the command prints."""

    as_json: Annotated[bool, _of(OUTPUT, "--json", help="Print what was done as JSON.")] = False
    quiet: Annotated[bool, _of(OUTPUT, "--quiet", help="No progress display.")] = False


def takes(run: Callable[..., None]) -> Callable[..., None]:
    """The command line's face of a function: for a parameter that is a dataclass, an option for each of its fields.

    Typer reads options off a function's signature.
    """
    hints = get_type_hints(run, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options = []
    for name, parameter in inspect.signature(run).parameters.items():
        of_group = inspect.signature(groups[name], eval_str=True) if name in groups else None
        inside = of_group.parameters.values() if of_group else [parameter.replace(annotation=hints[name])]
        options += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in inside]

    def command(**given: Any) -> None:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        run(**made, **given)

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command


# Layers and heads that can be asked for by number; the deepest and widest language models have some hundreds.
AT_MOST = 10_000


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Layers, or heads (`what`), and ranges of them, 0,3-5, in order.

    Raises:
        ValueError: something else, none, or one beyond AT_MOST.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start, end = whole_number(first), whole_number(last if dash else first)
        if start is None or end is None:
            raise ValueError(f"--{what}s takes numbers and ranges such as 0,3-5, got {quoted(text)}")
        if max(start, end) >= AT_MOST:
            raise ValueError(f"--{what}s {quoted(text)}: no model has a {what} {max(start, end)}")
        found.update(range(start, end + 1))
    if not found:
        raise ValueError(f"--{what}s {quoted(text)} names no {what}")
    return tuple(sorted(found))


def asked(options: ReportOptions, out: Path, disk: int | None, *, quiet: bool) -> tuple[Settings, list[Target]]:
    """What is measured and of which checkpoints; exits where that makes no sense, or `out` cannot be written to."""
    settings = settings_of(options)
    writable(out)
    targets = _targets(options, out, disk, quiet=quiet)
    for target in targets:
        _check_target(options, settings, target)
    return settings, targets


def _targets(options: ReportOptions, out: Path, disk: int | None, *, quiet: bool) -> list[Target]:
    """The checkpoints asked for; exits where the list makes no sense, or `disk` bytes have no room for one of them."""
    import ln_probe
    from ln_probe.analyses.progress import ProgressLine
    from ln_probe.batch.downloads import within
    from ln_probe.batch.suite import SuiteError, listed, suite

    names = tuple(options.model or ())
    if options.suite is not None:
        with refusing(SuiteError):
            names += tuple(listed(options.suite))
    names = names or tuple(ln_probe.bundled_models())
    if not names:
        raise refuse("no model given, and this installation has no bundled checkpoints")
    if not quiet:
        typer.echo(f"looking for {', '.join(names[:4])}{', …' * (len(names) > 4)}", err=True)
    with refusing(SuiteError), ProgressLine(quiet=quiet):
        found = suite(names, options.checkpoints, options.revision, allow_pickle=options.allow_pickle)
        return found if disk is None else within(found, disk, out)


def check_values(options: MeasureOptions) -> None:
    """Raise ValueError or FileNotFoundError for values that are seen to be wrong before a model is loaded."""
    from ln_probe.hooks.objective import Objective
    from ln_probe.models import device_named, dtype_named
    from ln_probe.prompt_sources import check_source, entries, is_dataset
    from ln_probe.settings import read_groups

    if options.prompts not in (None, "sampled"):
        check_source(str(options.prompts))
    if options.dtype is not None:
        dtype_named(options.dtype)
    if options.device is not None:
        device_named(options.device)
    if options.groups is not None:
        with _naming("groups", ": give a UTF-8 text file with a label a line, a line for each prompt"):
            read_groups(options.groups)
    if (given := options.calibration) is not None:
        if is_dataset(str(given)):
            kind = "folder" if given.is_dir() else "data set"
            raise ValueError(f"--calibration {given} is a {kind}: give a .txt, .jsonl or .npy file")
        with _naming("calibration"):
            for _ in entries(given):  # every one is read
                pass
        measured = Path(options.prompts or "")
        if options.max_prompts is None and measured.is_file() and sha256_of_file(measured) == sha256_of_file(given):
            raise ValueError(
                f"--calibration {given} holds the prompts that are measured: leave it out (the constants of a prompt "
                "are then means over the others), or give other text"
            )
    Objective.of(options.loss)


@contextmanager
def _naming(option: str, advice: str = "") -> Iterator[None]:
    """Errors of a file name the option that it was given to."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"--{option}: {error}{advice}") from error


def check_labels(groups: Path | None, count: int | None) -> None:
    """Raise ValueError if a file of group labels has not `count`, one for each prompt; None: the model decides that."""
    from ln_probe.settings import read_groups

    if groups is not None and count is not None and (found := len(read_groups(groups))) != count:
        raise ValueError(
            f"--groups {groups} holds {counted(found, 'label')} for {counted(count, 'prompt')}: write one label a "
            "line, a line for each prompt, skipped ones too (equal labels form one group)"
        )


def settings_of(options: ReportOptions) -> Settings:
    """What is measured, and how; exits where that makes no sense."""
    from ln_probe.analyses.probes.registry import DEFAULT, chosen, entries
    from ln_probe.prompts import read_vocabulary
    from ln_probe.settings import KEYS, Settings

    known = ", ".join(entries())
    probes = DEFAULT if options.probes is None else tuple(p.strip() for p in options.probes.split(",") if p.strip())
    vocab = None if options.vocab is None else str(options.vocab.absolute())
    calibration, groups = (None if f is None else str(f.resolve()) for f in (options.calibration, options.groups))
    with refusing(FileNotFoundError, ValueError):
        if unknown := [p for p in probes if p not in entries()]:
            raise ValueError(f"unknown probe {unknown[0]!r}: choose from {known}")
        if not probes:
            raise ValueError(f"--probes {options.probes!r} names no probe: choose from {known}")
        chosen(probes)
        if options.keys not in KEYS:
            raise ValueError(f"--keys must be one of {', '.join(KEYS)}, got {options.keys!r}")
        if vocab is not None:
            read_vocabulary(vocab)
        check_values(options)
        same = ("keys", "max_tokens", "seed", "keys_sample", "batch_size", "loss", "optimal")
        return Settings(
            probes=probes,
            layers=None if options.layers is None else numbers(options.layers, "layer"),
            heads=None if options.heads is None else numbers(options.heads, "head"),
            vocab=vocab,
            calibration=calibration,
            calibration_sha256=None if calibration is None else sha256_of_file(Path(calibration)),
            groups=groups,
            groups_sha256=None if groups is None else sha256_of_file(Path(groups)),
            **{name: getattr(options, name) for name in same},
        )


def _check_target(options: ReportOptions, settings: Settings, target: Target) -> None:
    """Exit if a model lacks a layer or a head that is asked for, as far as its configuration says how many it has."""
    from ln_probe.batch.cost import shape_of

    for what, wanted in (("layer", settings.layers), ("head", settings.heads)):
        count = shape_of(target).get(f"{what}s", math.inf) if wanted else math.inf
        if wrong := [number for number in wanted or () if number >= count]:
            raise refuse(f"no {what} {wrong[0]}: {target.label} has {what}s 0 … {count - 1:.0f}")


def run_of(options: ReportOptions, settings: Settings, out: Path, corpus: Path) -> Run:
    """The run, its prompts divided into shards in the folder `corpus`."""
    from ln_probe.batch.run import Run
    from ln_probe.batch.shards import divide

    sharded = divide(options.prompts, corpus, options.shard, options.max_prompts)
    check_labels(options.groups, None if options.prompts in (None, "sampled") else sharded.count)
    command = shlex.join(["ln-probe", *sys.argv[1:]])
    return Run(out, settings, sharded, options.dtype, options.device, options.allow_pickle, options.strict, command)
