"""The command line: `ln-probe report | models | lab`. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ln_probe.render.page import IndexEntry
    from ln_probe.report import Report

DONE, SOME_FAILED, BAD_ARGUMENTS = 0, 1, 2

app = typer.Typer(
    help="What does LayerNorm do for this model's attention?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="From-scratch experiments, published figures beside their own.", no_args_is_help=True)
app.add_typer(lab, name="lab")


def main() -> None:
    app()


def _refuse(message: str) -> typer.Exit:
    typer.echo(f"ln-probe: {message}", err=True)
    return typer.Exit(BAD_ARGUMENTS)


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


@app.command()
def report(
    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]…", help="Names or paths; none means the bundled checkpoints."),
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="A .txt, .jsonl or .npy file, or 'sampled'.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("reports"),
    probes: Annotated[str | None, typer.Option(help="Comma-separated; default all.")] = None,
    layers: Annotated[str | None, typer.Option(help="Comma-separated layers, ranges as 3-5; default all.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are cut.")] = 512,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; Pythia: step1000.")] = None,
    keys: Annotated[str, typer.Option(help="Rows of the keys table: 'hardest' or 'all'.")] = "hardest",
    seed: Annotated[int, typer.Option(help="Of sampled prompts and keys.")] = 0,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read .bin/.pt weights (weights_only).")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do finished models again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """One folder per model (OUT/<name>/) and OUT/index.html. Finished models are skipped when it is run again."""
    import ln_probe
    from ln_probe.probing import KEYS, PROBES

    names = list(model or ln_probe.bundled_models())
    wanted = list(PROBES) if probes is None else [p.strip() for p in probes.split(",") if p.strip()]
    if not names:
        raise _refuse("no model given, and this installation has no bundled checkpoints")
    if unknown := [p for p in wanted if p not in PROBES]:
        raise _refuse(f"unknown probe {unknown[0]!r}: choose from {', '.join(PROBES)}")
    if keys not in KEYS:
        raise _refuse(f"--keys must be one of {', '.join(KEYS)}, got {keys!r}")
    if prompts not in (None, "sampled") and not Path(prompts).is_file():
        raise _refuse(f"no prompts file {prompts!r}")
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise _refuse(f"{repeated[0]!r} is given twice")
    _check_writable(out)
    request = {
        "prompts": prompts, "probes": wanted, "layers": _numbers(layers), "max_tokens": max_tokens, "dtype": dtype,
        "revision": revision, "keys": keys, "seed": seed,
    }  # fmt: skip
    from ln_probe.analyses.files import write_atomically
    from ln_probe.render.page import IndexEntry, index_page

    entries: list[IndexEntry] = []
    for name, folder in zip(names, _folders(names, out), strict=True):
        typer.echo(f"{name} …", err=True)
        try:
            found, skipped = _one(name, folder, request, device, allow_pickle, fresh, not quiet)
        except Exception as error:  # one model must not take the others with it
            entries.append(IndexEntry(name, error=f"{type(error).__name__}: {error}"))
            typer.echo(f"  failed: {error}", err=True)
        else:
            entries.append(IndexEntry(name, f"{folder.name}/report.html", found))
            typer.echo(f"  {'already done' if skipped else 'done'}: {folder / 'report.html'}", err=True)
        write_atomically(out / "index.html", index_page(entries).encode())
    failed = [e for e in entries if e.error]
    if as_json:
        done = [
            {"model": e.name, "page": str(out / e.href) if e.href else None, "error": e.error or None} for e in entries
        ]
        typer.echo(json.dumps({"index": str(out / "index.html"), "models": done}, indent=1))
    else:
        typer.echo(f"{out / 'index.html'}: {len(entries) - len(failed)} of {len(entries)} models", err=True)
    raise typer.Exit(SOME_FAILED if failed else DONE)


@lab.command("list")
def lab_list() -> None:
    """The experiments, what they repeat and how long they take on two cores."""
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
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; default: the experiment's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default lab-runs/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A size that takes minutes.")] = False,
    text: Annotated[list[Path] | None, typer.Option(help="A text file (UTF-8); may be repeated.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer's folder; else made from the text.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train side by side.")] = 1,
    collect: Annotated[bool, typer.Option("--collect", help="Train nothing: tables of what runs reached.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train an experiment's models and write tables and plots; run again, it goes on where it stopped."""
    import ln_probe
    from ln_probe.analyses.lab import experiments

    try:
        known = experiments.find(name)
    except experiments.UnknownExperimentError as error:
        raise _refuse(str(error)) from error
    folder = out or Path("lab-runs") / name
    _check_writable(folder.parent)
    request = experiments.Request(
        out=folder, seeds=tuple(range(seeds or (known.quick_seeds if quick else known.seeds))), quick=quick,
        texts=tuple(text or ()), tokenizer=tokenizer, jobs=jobs, collect=collect,
        progress=not quiet and sys.stderr.isatty(),
    )  # fmt: skip
    try:
        results = experiments.run(
            name, request, command=shlex.join(["ln-probe", *sys.argv[1:]]), ln_probe_version=ln_probe.__version__
        )
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        raise _refuse(str(error)) from error
    typer.echo(results.summary.to_string(index=False, float_format=lambda v: f"{v:.4g}"))
    for sentence in results.conclusions:
        typer.echo(sentence)
    for failure in results.diverged:
        typer.echo(f"diverged: {failure}", err=True)
    typer.echo(f"{folder}: results.json, {', '.join([*results.tables, *results.figures])}", err=True)
    raise typer.Exit(SOME_FAILED if results.diverged else DONE)


def _one(
    name: str,
    folder: Path,
    request: dict[str, Any],
    device: str | None,
    allow_pickle: bool,
    fresh: bool,
    progress: bool,
) -> tuple[Report, bool]:
    """The report of one model, made or found; whether it was found."""
    import ln_probe
    from ln_probe.report import REPORT_FILE, load_report

    asked = request | {"model": name, "ln_probe": ln_probe.__version__}
    if not fresh and (folder / REPORT_FILE).exists():
        try:
            held = load_report(folder)
        except (ValueError, OSError) as error:
            typer.echo(f"  {error}; doing it again", err=True)
        else:
            if held.provenance.get("request") == asked:
                return held, True
    loaded = ln_probe.load_model(
        name, device=device, dtype=request["dtype"], revision=request["revision"], allow_pickle=allow_pickle
    )
    made = ln_probe.analyze(
        loaded, request["prompts"], probes=request["probes"], layers=request["layers"], keys=request["keys"],
        max_tokens=request["max_tokens"], seed=request["seed"], progress=progress and sys.stderr.isatty(),
    )  # fmt: skip
    made = replace(
        made,
        provenance={**made.provenance, "request": asked, "command": shlex.join(["ln-probe", *sys.argv[1:]])},
    )
    made.save(folder)
    return made, False


def _folders(names: list[str], out: Path) -> list[Path]:
    """OUT/<slug> for each model; a number is added where two names would share a folder."""
    from ln_probe.report import slug

    taken: dict[str, int] = {}
    found = []
    for name in names:
        short = slug(name)
        taken[short] = taken.get(short, 0) + 1
        found.append(out / (short if taken[short] == 1 else f"{short}-{taken[short]}"))
    return found


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError:
            raise _refuse(f"--layers takes numbers and ranges such as 0,3-5, got {text!r}") from None
    if not found:
        raise _refuse(f"--layers {text!r} names no layer")
    return sorted(set(found))


def _check_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _refuse(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error


if __name__ == "__main__":
    main()
