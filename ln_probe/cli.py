"""The command line: `ln-probe report`, `plan`, `merge`, `models`. Heavy imports happen inside the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ln_probe.batch import commands

app = typer.Typer(
    help="What does LayerNorm do for this model's attention?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        import ln_probe

        typer.echo(f"ln-probe {ln_probe.__version__}")
        raise typer.Exit(commands.DONE)


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


if __name__ == "__main__":
    main()
