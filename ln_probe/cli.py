"""The command line: `ln-probe report | plan | merge | models | lab | env`. Heavy imports happen inside the commands."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from ln_probe.analyses.machinery.worker import check_stopped, stop_on_signals
from ln_probe.analyses.probes.text import encodable
from ln_probe.batch import commands, endings
from ln_probe.batch.options import count_option


class _Commands(typer.core.TyperGroup):
    """All commands: stopped by a signal, each says how to resume."""

    def invoke(self, context: Any) -> Any:
        try:
            try:
                return super().invoke(context)
            except typer.Exit:
                raise
            except Exception:
                check_stopped()  # a module that was interrupted while it was imported raises anything
                raise
        except KeyboardInterrupt as stop:
            raise endings.interrupted(stop) from None


app = typer.Typer(
    cls=_Commands,
    help="What does LayerNorm do for this model's attention?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="From-scratch experiments, published figures beside their own.", no_args_is_help=True)
app.add_typer(lab, name="lab")


def main() -> None:
    """The command, with a last word for what nothing else has caught."""
    stop_on_signals()
    try:
        app()
    except (SystemExit, GeneratorExit):
        raise
    except KeyboardInterrupt as stop:
        sys.exit(endings.interrupted(stop).exit_code)
    except BaseException as error:  # a tokenizer written in Rust raises PanicException, which is no Exception
        if endings.traceback_wanted():
            raise
        typer.echo(f"ln-probe: {endings.last_words(error)}", err=True)
        sys.exit(endings.SOME_FAILED)
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
        raise typer.Exit(endings.DONE)


@app.command()
def models(
    bundled: Annotated[bool, typer.Option("--bundled", help="Only the bundled ones, one a line.")] = False,
) -> None:
    """Names that load: the bundled checkpoints, and what else `report` takes."""
    import ln_probe

    names = ln_probe.bundled_models()
    if bundled:
        typer.echo("\n".join(names))
        return
    typer.echo("bundled:\n" + "\n".join(f"  {n}" for n in names))
    typer.echo(
        "by hub name (needs a network or a filled cache):\n"
        "  gpt2, gpt2-medium, …   pythia-70m, pythia-160m, … (--revision step1000)   opt-125m   gpt-neo-125M\n"
        "  any owner/name of a GPT-2, GPT-NeoX, OPT, GPT-Neo, Llama-family or Gemma checkpoint\n"
        "from disk:\n  a Hugging Face folder, a .gguf file, a lab run's folder"
    )


app.command()(commands.report)
app.command()(commands.plan)
app.command()(commands.merge)


@app.command()
def env() -> None:
    """Versions, TransformerLens's worlds, devices: what a report of a fault should say."""
    from ln_probe.report import environment

    typer.echo("\n".join(f"{name}: {found}" for name, found in environment().items()))


@lab.command("list")
def lab_list() -> None:
    """The experiments, what they repeat and how long they take (on one core unless it says otherwise)."""
    from ln_probe.analyses.lab.experiments import EXPERIMENTS

    for name, found in EXPERIMENTS.items():
        text = "  needs --text" if found.needs_text else ""
        typer.echo(
            f"{name}: {found.summary}\n  {found.source}\n"
            f"  {found.seeds} seeds: {found.duration}; --quick ({found.quick_seeds}): {found.quick_duration}{text}"
        )


@lab.command("run")
def lab_run(
    name: Annotated[str, typer.Argument(help="One of `ln-probe lab list`.")],
    seeds: Annotated[
        int | None, count_option(None, least=1, most=10_000, help="How many; default: the experiment's own.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default lab-runs/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A size that takes minutes.")] = False,
    text: Annotated[list[Path] | None, typer.Option(help="A text file (UTF-8); may be repeated.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer's folder; else made from the text.")] = None,
    jobs: Annotated[int, count_option(None, least=1, most=10_000, help="Processes that train side by side.")] = 1,
    collect: Annotated[bool, typer.Option("--collect", help="Train nothing: tables of what runs reached.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train an experiment's models and write tables and plots; re-run the same command to resume."""
    import ln_probe
    from ln_probe.analyses.lab import experiments

    try:
        known = experiments.find(name)
    except experiments.UnknownExperimentError as error:
        raise endings.refuse(str(error)) from error
    folder = out or Path("lab-runs") / name
    endings.writable(folder)
    request = experiments.Request(
        out=folder,
        seeds=tuple(range(seeds or (known.quick_seeds if quick else known.seeds))),
        quick=quick,
        texts=tuple(text or ()),
        tokenizer=tokenizer,
        jobs=jobs,
        collect=collect,
        progress=not quiet and sys.stderr.isatty(),
    )
    from ln_probe.measuring.live import Live

    command = shlex.join(["ln-probe", *sys.argv[1:]])
    try:
        with Live(quiet=quiet or request.progress):  # on a terminal the runs draw their own bars
            results = experiments.run(name, request, command=command, ln_probe_version=ln_probe.__version__)
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        raise endings.refuse(str(error)) from error
    typer.echo(results.summary.to_string(index=False, float_format=lambda v: f"{v:.4g}"))
    for sentence in results.conclusions:
        typer.echo(sentence)
    for failure in results.diverged:
        typer.echo(f"diverged: {failure}", err=True)
    from ln_probe.page.lab import write_lab_page

    page = write_lab_page(folder)
    typer.echo(f"{page}; results.json, {', '.join([*results.tables, *results.figures])} beside it", err=True)
    raise typer.Exit(endings.SOME_FAILED if results.diverged else endings.DONE)


@lab.command("compile")
def lab_compile(
    program: Annotated[Path, typer.Argument(help="A C-RASP program (docs/compiler.md).")],
    out: Annotated[Path, typer.Option(help="Folder for the model, which `ln-probe report` takes.")],
    construction: Annotated[str, typer.Option(help="What makes truth values: scaling, clip, rounding.")] = "scaling",
    norm: Annotated[str, typer.Option(help="layernorm, scaling_only, projection_only, none.")] = "layernorm",
    alphabet: Annotated[str | None, typer.Option(help="Letters of words; default: those of the program.")] = None,
    letters: Annotated[int, count_option(None, least=1, most=100_000, help="The longest word.")] = 511,
) -> None:
    """Compile a C-RASP program to a transformer's weights; what does not fit is named with line and column."""
    from ln_probe.analyses.lab.compiler.compiled_folder import save_compiled
    from ln_probe.analyses.lab.compiler.crasp_compiler import compile_program
    from ln_probe.analyses.lab.depth.crasp import parse
    from ln_probe.analyses.machinery.files import read_text
    from ln_probe.batch.option_file import LARGEST

    if construction not in (known := ("scaling", "clip", "rounding")):
        raise endings.refuse(f"unknown construction {construction!r}: known ones are {', '.join(known)}")
    endings.writable(out.parent)
    try:
        source = read_text(program, LARGEST, "utf-8-sig")  # editors on Windows write a byte order mark
        made = compile_program(parse(source), construction, norm, alphabet=alphabet, n_ctx=letters + 1)  # type: ignore[arg-type]
        save_compiled(made, out)
    except (OSError, ValueError) as error:
        raise endings.refuse(f"{program}: {error}") from error
    grid = made.precision
    typer.echo(
        f"{encodable(str(out))}: depth {made.depth}, {made.layers} layers ({made.attending} attend), "
        f"d_model {made.model.cfg.d_model}, tokens BOS {' '.join(made.alphabet)}"
        + ("" if grid is None else f"; fixed precision of {grid.bits} bits, {grid.fraction} behind the point")
    )


if __name__ == "__main__":
    main()
