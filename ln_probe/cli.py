"""The command line: `ln-probe report | freezing-cost | models | lab | env`.

Arguments are checked before anything heavy is imported: a wrong one ends within a fifth of a second.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from ln_probe.analyses.probes import BUILT_IN, DEFAULT, listing
from ln_probe.analyses.text import counted, whole_number
from ln_probe.models import BUNDLED, kind_of, layers_of, load_as_trained

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ln_probe.batch import Target

SOME_FAILED, BAD_ARGUMENTS, STOPPED = 1, 2, 130  # exit statuses
MAX_SEEDS = 10_000
MAX_LAYERS = 10_000  # the deepest language models have some hundreds
MEASURED, RUNNING = "What is measured", "How it runs"  # the two groups of options


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
            _echo_error(_in_our_words(error.format_message()))
            sys.exit(error.exit_code)
        if status == STOPPED:
            _echo_error("stopped; repeat the command to resume")
        sys.exit(status or 0)


def _in_our_words(message: str) -> str:
    """Return typer's message on a wrong word in the form of all others."""
    message = " ".join(message.split())
    if match := re.fullmatch(
        r"No such (option|command):? '?([^' ]*)'?\.?(?: \(?(?:Possible options:|Did you mean) (.*)\W)?", message
    ):
        kind, word, others = match.groups()
        close = get_close_matches(word, re.findall(r"[\w-]+", others or ""), n=2, cutoff=0.3)
        return f"there is no {kind} {word!r}" + f": did you mean {' or '.join(close)}?" * bool(close)
    return re.sub(r"^Invalid value for '?([^' ]+)'?: (Value error, )?", r"\1: ", message)


def _echo_error(message: str) -> None:
    """Print one line on standard error, broken between words on a terminal."""
    line = f"ln-probe: {message}"
    columns = shutil.get_terminal_size().columns
    typer.echo(textwrap.fill(line, columns, break_on_hyphens=False) if sys.stderr.isatty() else line, err=True)


app = typer.Typer(
    cls=_Commands,
    help="What does LayerNorm do for this model's attention?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="Experiments that train small models from scratch.", no_args_is_help=True)
app.add_typer(lab, name="lab")


# ---------------------------------------------------------------- single values


def _file(text: str) -> Path:
    """Return the absolute path of a file that exists."""
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise typer.BadParameter(f"{text!r} is a folder" if path.is_dir() else f"there is no file {text!r}")
    return path


def _prompts_file(text: str) -> Path:
    path = _file(text)
    if path.suffix not in (".txt", ".jsonl"):
        raise typer.BadParameter(f"{text!r} is neither a .txt nor a .jsonl")
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
    if "." not in module and find_spec(module) is None:  # (a package would be imported to look into it)
        raise typer.BadParameter(f"there is no module {module!r} on Python's path (PYTHONPATH)")
    return text


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", text):
        raise typer.BadParameter(f"{text!r} is no device such as cpu, cuda, cuda:1 or mps")
    return text


def _engine(text: str) -> str:
    if text not in ("local", "ray"):
        raise typer.BadParameter(f"{text!r} is neither local nor ray")
    if text == "ray" and find_spec("ray") is None:
        raise typer.BadParameter("the package ray is missing: pip install ray")
    return text


def _suggestion(name: str, names: Iterable[str]) -> str:
    """Return what to write instead of an unknown name."""
    known = list(names)
    close = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"


def _measured(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=MEASURED, **more)


def _running(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=RUNNING, **more)


Prompts = Annotated[
    Path | None,
    _measured("A .txt (a prompt per paragraph) or .jsonl; default: bundled.", parser=_prompts_file, metavar="FILE"),
]
MaxPrompts = Annotated[int | None, _measured("Only the first so many prompts.", min=1)]
MaxTokens = Annotated[int, _measured("Longer prompts are cut.", min=2)]
Groups = Annotated[
    Path | None,
    _measured("A label per prompt, one a line: equal labels form one group.", parser=_file, metavar="FILE"),
]
Loss = Annotated[
    str | None,
    _measured("Another loss: (output, tokens) -> loss per prompt.", parser=_loss, metavar="MODULE:FUNCTION"),
]
Device = Annotated[
    str | None, _running("cpu, cuda, cuda:1, mps; default: a GPU if there is one.", parser=_device, metavar="DEVICE")
]
Dtype = Annotated[Literal["float32", "float64", "bfloat16", "float16"] | None, _running("Of the weights.")]
AllowPickle = Annotated[bool, _running("Read .bin and .pt weights (weights_only).", "--allow-pickle")]
Quiet = Annotated[bool, _running("No progress.", "--quiet")]


# --------------------------------------------------------------------- commands


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        import ln_probe

        typer.echo(f"ln-probe {ln_probe.__version__}")
        raise typer.Exit


@app.command()
def models() -> None:
    """List the models that can be loaded."""
    width = max(map(len, BUNDLED))
    bundled = "\n".join(f"  {name:{width}}  {about}" for name, about in BUNDLED.items())
    typer.echo("bundled (small language models trained on three books, 4 layers of 16 heads):")
    _echo_wrapped(bundled, indent=width + 4)
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
            metavar="TARGETS",
            help="Names, NAME@REVISION, or paths. None: rebuild the index of the reports in --out.",
        ),
    ] = None,
    from_file: Annotated[
        Path | None, _measured("More targets, one a line.", "--from", parser=_file, metavar="FILE")
    ] = None,
    checkpoints: Annotated[
        str | None, _measured("Training steps of each target: 0,1000,… or all.", metavar="STEPS")
    ] = None,
    prompts: Prompts = None,
    max_prompts: MaxPrompts = None,
    max_tokens: MaxTokens = 512,
    groups: Groups = None,
    loss: Loss = None,
    probes: Annotated[
        Any, _measured(f"Separated by commas; default: all. {listing()}.", parser=_probes, metavar="NAMES")
    ] = None,
    layers: Annotated[Any, _measured("Such as 0,3-5; default: all.", parser=_layers, metavar="LAYERS")] = None,
    tokenizer: Annotated[
        Path | None,
        _measured(
            "For a model without one: a tokenizer's folder, or its token strings (JSON, or one a line).",
            parser=_file_or_folder,
            metavar="FILE",
        ),
    ] = None,
    out: Annotated[Path, _running("A folder per report, and index.html.", metavar="FOLDER")] = Path("reports"),
    workers: Annotated[
        int | None,
        _running("Checkpoints measured side by side, a process each; default: one per processor, at most 4.", min=1),
    ] = None,
    engine: Annotated[
        str, _running("local: processes here; ray: a cluster that shares --out.", parser=_engine, metavar="ENGINE")
    ] = "local",
    device: Device = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    overwrite: Annotated[bool, _running("Replace reports of other weights or settings.", "--overwrite")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a report on each checkpoint and an index; repeat the command to resume.

    A report that is there, of the same weights and settings, is skipped.
    """
    from ln_probe import batch

    names = [*(targets or ()), *_listed(from_file)]
    if not names:
        if not any(out.glob("*/report.json")):
            raise ArgumentError(f"{out} holds no reports: name a model to measure, such as lm-layernorm")
        typer.echo(f"{batch.write_pages(out, {}, [])[0]} (nothing was measured: name a model for that)")
        return
    chosen = [_target(name, layers or ()) for name in names]
    try:
        if groups is not None:
            batch.read_labels(groups)
        if checkpoints is not None:
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
        progress=not quiet,
    )
    failures = dict[str, str]()
    try:
        with batch.locked(chosen, out), _progress(quiet):
            if engine == "ray":
                outcomes = batch.ray_outcomes(chosen, settings, out, workers)
            else:
                outcomes = batch.local_outcomes(chosen, settings, out, workers or batch.default_workers(chosen, device))
            for outcome in outcomes:
                if outcome.error:
                    failures[str(outcome.target)] = outcome.error
                state = "already there" if outcome.skipped else "done"
                typer.echo(f"{outcome.target}: {outcome.error or state}", err=True)
            written = [target for target in chosen if str(target) not in failures]
            index, answers = batch.write_pages(out, failures, written if len(chosen) <= _SUMMARIZED else [])
    except batch.BatchError as error:
        raise ArgumentError(str(error)) from error
    except OSError as error:
        raise ArgumentError(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
    _echo_wrapped("\n".join(answers))
    typer.echo(f"{len(chosen) - len(failures)} of {len(chosen)} reports; open {index}")
    if failures:
        raise typer.Exit(SOME_FAILED)


_SUMMARIZED = 4  # models whose results are printed at the end


@contextmanager
def _progress(quiet: bool) -> Iterator[None]:
    """Show at once that something happens; then a progress line."""
    from ln_probe.analyses.progress import ProgressLine, tell

    if not (quiet or sys.stderr.isatty()):
        typer.echo("loading PyTorch …", err=True)
    with ProgressLine(quiet=quiet):
        tell("loading PyTorch …")
        yield


def _listed(path: Path | None) -> list[str]:
    """Return the targets in a file: one a line, without empty lines and comments (#)."""
    if path is None:
        return []
    from ln_probe.analyses.text import FileError, read_text

    try:
        lines = [line.partition("#")[0].strip() for line in read_text(path).splitlines()]
    except (OSError, FileError) as error:
        raise ArgumentError(f"--from: {error}") from error
    if not any(lines):
        raise ArgumentError(f"--from {path} names no model")
    return [line for line in lines if line]


def _target(text: str, layers: Iterable[int] = ()) -> Target:
    """Return the target that a text names.

    Raises:
        ArgumentError: it is no model's name, as far as can be seen without loading it, or the model lacks a layer.
    """
    from ln_probe.batch import Target
    from ln_probe.loading.pretrained import official_name, read_config

    try:
        target = Target.parse(text)
        path = Path(target.name).expanduser()
        kind, count = kind_of(target.name, path), None
        if kind == "hub":
            official_name(target.name, also=BUNDLED)
        elif kind == "folder":
            count = read_config(path).get("num_hidden_layers")
        elif kind in ("bundled", "lab"):
            count = layers_of(target.name, path)
    except (OSError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    if isinstance(count, int) and (missing := [layer for layer in layers if layer >= count]):
        raise ArgumentError(f"{target} has no layer {missing[0]}: it has layers 0 to {count - 1}")
    return target


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
    """Print how much freezing scaling, and removing projection, raise the loss, with CIs; writes nothing."""
    from ln_probe.batch import read_labels

    target = _target(model)
    try:
        labels = None if groups is None else read_labels(groups)[:max_prompts]
    except (OSError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    try:
        with _progress(quiet):
            options: dict[str, Any] = {"device": device, "dtype": dtype, "allow_pickle": allow_pickle}
            loaded = load_as_trained(target.name, revision=target.revision, **options)
            import ln_probe

            cost = ln_probe.freezing_cost(
                loaded,
                prompts,
                max_prompts=max_prompts,
                max_tokens=max_tokens,
                groups=labels,
                loss=loss,
                progress=not quiet,
            )
    except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        _echo_error(f"{target}: {' '.join(str(error).split())}")
        raise typer.Exit(SOME_FAILED) from error
    if as_json:
        typer.echo(json.dumps({"model": str(target), **cost.plain}, indent=1))
    else:
        _, _, rest = str(cost).partition("\n\n")
        _echo_wrapped(f"{target}: {cost.sentence}\n\n{rest}")


@app.command()
def env() -> None:
    """Print versions, model classes and devices, for a bug report."""
    from ln_probe.report import environment

    typer.echo("\n".join(f"{name}: {value}" for name, value in environment().items()))


@lab.command("list")
def lab_list() -> None:
    """List the experiments by the publication they repeat, and how long they take (one core unless it says more)."""
    from ln_probe.analyses.lab.experiments import EXPERIMENTS

    def publication(name: str) -> str:
        match = re.match(r"(.*\d{4})(, .*)?$", EXPERIMENTS[name].source)
        return match[1] if match else EXPERIMENTS[name].source

    names = sorted(EXPERIMENTS, key=lambda name: [*map(publication, EXPERIMENTS)].index(publication(name)))
    for source, group in groupby(names, publication):
        typer.echo(source)
        for name in group:
            experiment = EXPERIMENTS[name]
            whole, quick = experiment.duration
            of = experiment.source.removeprefix(source).removeprefix(", ")
            text = "; needs --text" * experiment.needs_text
            _echo_wrapped(
                f"  {name}: {experiment.summary}{f' ({of})' * bool(of)}\n"
                f"      {counted(experiment.seeds, 'seed')}: {whole}; "
                f"--quick, {counted(experiment.quick_seeds, 'seed')}: {quick}{text}"
            )


def _echo_wrapped(text: str, indent: int = 6) -> None:
    """Print lines, broken between words where a terminal is narrower."""
    width = shutil.get_terminal_size(fallback=(1000, 24)).columns
    for line in text.splitlines():
        typer.echo(textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False) or "")


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
    device: Annotated[
        str, typer.Option(parser=_device, metavar="DEVICE", help="To train on: cpu, cuda, cuda:1.")
    ] = "cpu",
) -> None:
    """Train an experiment's models and write tables and plots; repeat the command to resume."""
    from ln_probe.analyses.lab import experiments

    if name not in experiments.EXPERIMENTS:
        raise ArgumentError(f"there is no experiment {name!r}: {_suggestion(name, experiments.EXPERIMENTS)}")
    experiment = experiments.EXPERIMENTS[name]
    folder = out or Path("lab-runs") / name
    if experiment.needs_text and not text:
        raise ArgumentError(f"{name} needs text: give --text FILE")
    if not quiet:
        typer.echo("loading PyTorch …", err=True)
    import ln_probe
    from ln_probe.models import device_named
    from ln_probe.page.lab import write_lab_page

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
