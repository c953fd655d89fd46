"""The command line: `ln-probe report | freezing-cost | models | lab | env`.

Heavy imports happen inside the commands, after their arguments have been checked.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from ln_probe.analyses.probes import BUILT_IN, DEFAULT, listing
from ln_probe.analyses.text import whole_number
from ln_probe.models import bundled_models

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ln_probe.batch import Target

SOME_FAILED, BAD_ARGUMENTS, STOPPED = 1, 2, 130  # exit statuses
MAX_SEEDS = 10_000
MAX_LAYERS = 10_000  # the deepest language models have some hundreds


class ArgumentError(typer.TyperException):
    """An argument that the command cannot be run with."""

    exit_code = BAD_ARGUMENTS


class _Commands(typer.core.TyperGroup):
    """Commands whose errors are one line each."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command and exit with its status."""
        try:
            status = super().main(*args, **{**options, "standalone_mode": False})
        except typer.TyperException as error:
            typer.echo(f"ln-probe: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        if status == STOPPED:
            typer.echo("ln-probe: stopped; repeat the command to resume", err=True)
        sys.exit(status or 0)


app = typer.Typer(
    cls=_Commands,
    help="What does LayerNorm do for this model's attention?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="Experiments that train small models from scratch.", no_args_is_help=True)
app.add_typer(lab, name="lab")


def _file(text: str) -> Path:
    """Return the absolute path of a file that exists."""
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {text!r}")
    return path


def _file_or_folder(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not text or not path.exists():
        raise typer.BadParameter(f"there is no file or folder {text!r}")
    return path


def _probes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in BUILT_IN:
            raise typer.BadParameter(f"there is no probe {name!r}: {_suggestion(name, BUILT_IN)}")
    return names


def _layers(text: str) -> tuple[int, ...]:
    """Return the layers of a list such as 0,3-5, in order."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start, end = whole_number(first), whole_number(last if dash else first)
        if start is None or end is None or not start <= end < MAX_LAYERS:
            raise typer.BadParameter(f"{text!r:.60} is no list of layers such as 0,3-5")
        layers.update(range(start, end + 1))
    return tuple(sorted(layers))


def _loss(text: str) -> str:
    module, _, function = text.partition(":")
    if not (module and function):
        raise typer.BadParameter(f"{text!r} is not written MODULE:FUNCTION")
    return text


def _suggestion(name: str, names: Iterable[str]) -> str:
    """Return what to write instead of an unknown name."""
    known = list(names)
    close = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"


Prompts = Annotated[
    Path | None,
    typer.Option(parser=_file, metavar="FILE", help="A .txt (a prompt per paragraph) or .jsonl; default: bundled."),
]
MaxPrompts = Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longer prompts are cut.")]
Groups = Annotated[
    Path | None,
    typer.Option(parser=_file, metavar="FILE", help="A label per prompt, one a line: equal labels form one group."),
]
Loss = Annotated[
    str | None,
    typer.Option(parser=_loss, metavar="MODULE:FUNCTION", help="Another loss: (output, tokens) -> loss per prompt."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")]
Dtype = Annotated[Literal["float32", "float64", "bfloat16", "float16"] | None, typer.Option(help="Of the weights.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read .bin and .pt weights (weights_only).")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        import ln_probe

        typer.echo(f"ln-probe {ln_probe.__version__}")
        raise typer.Exit


@app.command()
def models() -> None:
    """List the models that can be loaded."""
    typer.echo("bundled (each is one trained model; other seeds may differ):")
    typer.echo("\n".join(f"  {name}" for name in bundled_models()))
    _echo_wrapped(
        "from the hub (needs a network or a filled cache):\n"
        "  gpt2, gpt2-medium, …   pythia-70m, pythia-160m, … (pythia-70m@step1000)   opt-125m   gpt-neo-125M\n"
        "  any owner/name of a GPT-2, GPT-NeoX, OPT, GPT-Neo, Llama-family or Gemma checkpoint\n"
        "from disk:\n  a Hugging Face folder, a .gguf file, a lab run's folder"
    )


@app.command()
def report(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGETS]…",
            help="Names, NAME@REVISION, or paths. None: rebuild the index of the reports in --out.",
        ),
    ] = None,
    from_file: Annotated[
        Path | None, typer.Option("--from", parser=_file, metavar="FILE", help="More targets, one a line.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Training steps of each target: 0,1000,… or all.")
    ] = None,
    prompts: Prompts = None,
    max_prompts: MaxPrompts = None,
    max_tokens: MaxTokens = 512,
    groups: Groups = None,
    loss: Loss = None,
    probes: Annotated[
        Any, typer.Option(parser=_probes, metavar="NAMES", help=f"Separated by commas; default: all. {listing()}.")
    ] = None,
    layers: Annotated[Any, typer.Option(parser=_layers, metavar="LAYERS", help="Such as 0,3-5; default: all.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            parser=_file_or_folder,
            metavar="FILE",
            help="For a model without one: a tokenizer's folder, or its token strings (JSON, or one a line).",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="A folder per report, and index.html.")] = Path("reports"),
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Checkpoints measured side by side, a process each; default: one per processor, at most 4."
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes here, or a Ray cluster that shares --out.")
    ] = "local",
    device: Device = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace reports of other weights or settings.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write a report on each checkpoint and an index; repeat the command to resume.

    A report that is there, of the same weights and settings, is skipped.
    """
    from ln_probe import batch
    from ln_probe.analyses.progress import ProgressLine

    names = [*(targets or ()), *_listed(from_file)]
    if not names:
        if not any(out.glob("*/report.json")):
            raise ArgumentError(f"{out} holds no reports: name a model to measure, such as lm-layernorm")
        typer.echo(f"{_index(out, {})} (nothing was measured: name a model for that)")
        return
    chosen = [_target(name) for name in names]
    if checkpoints is not None:
        try:
            chosen = [step for target in chosen for step in target.at_steps(checkpoints)]
        except (OSError, ValueError) as error:
            raise ArgumentError(str(error)) from error
    settings = batch.Settings(
        prompts=prompts,
        max_prompts=max_prompts,
        max_tokens=max_tokens,
        groups=groups,
        loss=loss,
        probes=probes or DEFAULT,
        layers=layers,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        allow_pickle=allow_pickle,
        overwrite=overwrite,
        progress=not quiet and len(chosen) == 1,
    )
    failures = dict[str, str]()
    try:
        with batch.locked(chosen, out), ProgressLine(quiet=quiet):
            if engine == "ray":
                outcomes = batch.ray_outcomes(chosen, settings, out, workers)
            else:
                outcomes = batch.local_outcomes(chosen, settings, out, workers or batch.default_workers(chosen, device))
            for outcome in outcomes:
                if outcome.error:
                    failures[str(outcome.target)] = outcome.error
                state = "already there" if outcome.skipped else "done"
                typer.echo(f"{outcome.target}: {outcome.error or state}", err=True)
            index = _index(out, failures)
    except batch.BatchError as error:
        raise ArgumentError(str(error)) from error
    except OSError as error:
        raise ArgumentError(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
    typer.echo(f"{index}: {len(chosen) - len(failures)} of {len(chosen)} reports")
    if failures:
        raise typer.Exit(SOME_FAILED)


def _listed(path: Path | None) -> list[str]:
    """Return the targets in a file: one a line, without empty lines and comments (#)."""
    if path is None:
        return []
    from ln_probe.analyses.files import FileError, read_text

    try:
        lines = [line.partition("#")[0].strip() for line in read_text(path).splitlines()]
    except (OSError, FileError) as error:
        raise ArgumentError(f"--from: {error}") from error
    if not any(lines):
        raise ArgumentError(f"--from {path} names no model")
    return [line for line in lines if line]


def _target(text: str) -> Target:
    """Return the target that a text names; raise ArgumentError where it is no model's name, as far as can be seen."""
    from ln_probe.batch import Target
    from ln_probe.models import kind_of

    try:
        target = Target.parse(text)
        kind = kind_of(target.name, Path(target.name).expanduser())
    except (OSError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    if kind == "hub" and "/" not in target.name and (close := get_close_matches(target.name, bundled_models(), n=2)):
        raise ArgumentError(f"no model is called {target.name!r}: did you mean {' or '.join(close)}?")
    return target


def _index(out: Path, failures: dict[str, str]) -> Path:
    from ln_probe.page.index import write_index

    return write_index(out, failures)


@app.command("freezing-cost")
def freezing_cost(
    model: Annotated[str, typer.Argument(help="A name, NAME@REVISION, or a path.")],
    prompts: Prompts = None,
    max_prompts: MaxPrompts = None,
    max_tokens: MaxTokens = 512,
    groups: Groups = None,
    loss: Loss = None,
    device: Device = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a script.")] = False,
    quiet: Quiet = False,
) -> None:
    """Print how much freezing scaling raises the loss, with its CI: the first number of a report, alone."""
    target = _target(model)
    import ln_probe
    from ln_probe.arguments import read_groups

    try:
        loaded = ln_probe.load_model(
            target.name, revision=target.revision, device=device, dtype=dtype, allow_pickle=allow_pickle
        )
        cost = ln_probe.freezing_cost(
            loaded,
            prompts,
            max_prompts=max_prompts,
            max_tokens=max_tokens,
            groups=None if groups is None else read_groups(groups)[:max_prompts],
            loss=loss,
            progress=not quiet,
        )
    except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        typer.echo(f"ln-probe: {target}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(SOME_FAILED) from error
    typer.echo(json.dumps({"model": str(target), **cost.plain}, indent=1) if as_json else f"{target}: {cost}")


@app.command()
def env() -> None:
    """Print versions, model classes and devices, for a bug report."""
    from ln_probe.report import environment

    typer.echo("\n".join(f"{name}: {value}" for name, value in environment().items()))


@lab.command("list")
def lab_list() -> None:
    """List the experiments, what they repeat and how long they take (on one core unless it says otherwise)."""
    from ln_probe.analyses.lab.experiments import EXPERIMENTS

    for name, experiment in EXPERIMENTS.items():
        whole, quick = experiment.duration
        _echo_wrapped(
            f"{name}: {experiment.summary}\n  {experiment.source}\n"
            f"  seeds {experiment.seeds}: {whole}; --quick, seeds {experiment.quick_seeds}: {quick}"
            + "  needs --text"
            * experiment.needs_text
        )


def _echo_wrapped(text: str) -> None:
    """Print lines, broken between words where a terminal is narrower."""
    width = shutil.get_terminal_size(fallback=(1000, 24)).columns
    for line in text.splitlines():
        typer.echo(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False))


@lab.command("run")
def lab_run(
    name: Annotated[str, typer.Argument(help="One of `ln-probe lab list`.")],
    seeds: Annotated[
        int | None, typer.Option(min=1, max=MAX_SEEDS, help="How many; default: the experiment's own.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Default: lab-runs/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A size that takes minutes.")] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(parser=_file, metavar="FILE", help="A text file (UTF-8); may be repeated."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(parser=_file_or_folder, metavar="FOLDER", help="A tokenizer's; default: made from the text."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train side by side.")] = 1,
    quiet: Quiet = False,
    device: Annotated[str, typer.Option(help="To train on: cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Train an experiment's models and write tables and plots; repeat the command to resume."""
    from ln_probe.analyses.lab import experiments

    if name not in experiments.EXPERIMENTS:
        raise ArgumentError(f"there is no experiment {name!r}: {_suggestion(name, experiments.EXPERIMENTS)}")
    import ln_probe
    from ln_probe.models import device_named
    from ln_probe.page.lab import write_lab_page

    experiment = experiments.EXPERIMENTS[name]
    folder = out or Path("lab-runs") / name
    try:
        device_named(device)
        request = experiments.Request(
            out=folder,
            seeds=tuple(range(seeds or (experiment.quick_seeds if quick else experiment.seeds))),
            quick=quick,
            texts=tuple(text or ()),
            tokenizer=tokenizer,
            jobs=jobs,
            progress=not quiet,
            device=device,
        )
        command = shlex.join(["ln-probe", *sys.argv[1:]])
        results = experiments.run(name, request, command=command, ln_probe_version=ln_probe.__version__)
    except (ImportError, OSError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    typer.echo(results.summary.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    for failure in results.diverged:
        typer.echo(f"diverged: {failure}", err=True)
    typer.echo(f"{write_lab_page(folder)}; results.json, {', '.join([*results.tables, *results.figures])} next to it")
    if results.diverged:
        raise typer.Exit(SOME_FAILED)


if __name__ == "__main__":
    app()
