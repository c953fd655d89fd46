"""The options of `report`, `plan` and `merge`, each declared once, and what a command is given of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ln_probe.analyses.probes.registry import listing
from ln_probe.analyses.probes.text import quoted, whole_number
from ln_probe.batch.option_file import read_options

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
class Wish:
    """What decides the tables, as it was typed."""

    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]…", help="Names or paths; none means the bundled checkpoints."),
    ] = None
    revision: Annotated[str | None, _of(MODELS, help="Branch, tag or commit; Pythia: step1000.")] = None
    checkpoints: Annotated[str | None, _of(MODELS, help="Training steps, 0,1000,…, or 'all'.")] = None
    device: Annotated[str | None, _of(MODELS, help="cpu, cuda, cuda:1.")] = None
    dtype: Annotated[
        str | None,
        _of(MODELS, help="float32, float64, bfloat16 or float16; default float32, a compiled program's own float64."),
    ] = None
    allow_pickle: Annotated[bool, _of(MODELS, "--allow-pickle", help="Read .bin/.pt weights (weights_only).")] = False
    vocab: Annotated[
        Path | None, _of(MODELS, help="Token strings for a model without a tokenizer: JSON, or one a line.")
    ] = None
    prompts: Annotated[
        str | None, _of(PROMPTS, help="A .txt, .jsonl or .npy file, a data set (folder or hf:NAME), or 'sampled'.")
    ] = None
    max_tokens: Annotated[int, count_option(PROMPTS, least=1, help="Longer prompts are cut.")] = 512
    max_prompts: Annotated[int | None, count_option(PROMPTS, least=1, help="Only the first so many prompts.")] = None
    seed: Annotated[int, count_option(PROMPTS, least=0, most=10**18, help="Of sampled prompts and keys.")] = 0
    calibration: Annotated[
        Path | None,
        _of(PROMPTS, metavar="FILE", help="Text that constants come from. Default: the other prompts (leave-one-out)."),
    ] = None
    groups: Annotated[
        Path | None,
        _of(PROMPTS, metavar="FILE", help="A label a line for each prompt: equal labels form one prompt group."),
    ] = None
    loss: Annotated[
        str | None,
        _of(MEASURED, metavar="MODULE:FUNCTION", help="Another loss: (output, tokens) -> mean per prompt [batch]."),
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
        _of(MEASURED, help="Heads measured, drawn, and kept as attention patterns, written alike; default all."),
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
            help="A TOML file of these options (max-tokens = 256); what is typed counts before it.",
        ),
    ] = None


@dataclass(frozen=True)
class Means:
    """Who does the work, and how much of it; the tables do not depend on it."""

    engine: Annotated[str, _of(WORK, help="'local' processes or a 'ray' cluster.")] = "local"
    address: Annotated[str | None, _of(WORK, help="Of the Ray cluster; 'auto' finds one, none starts one here.")] = None
    gpus: Annotated[float, _of(WORK, min=0, help="GPUs per Ray worker, fractions too.")] = 0.0
    unit: Annotated[str | None, _of(WORK, metavar="K/N", help="Only slice K of N; join with merge.")] = None
    dry_run: Annotated[bool, _of(WORK, "--dry-run", help="Say what would be done, and stop.")] = False
    fresh: Annotated[bool, _of(WORK, "--fresh", help="Do finished models again.")] = False


@dataclass(frozen=True)
class Workers:
    """How many processes."""

    workers: Annotated[
        int | None,
        count_option(
            WORK,
            least=0,
            help="Processes, each with one checkpoint and one thread; 0: none but this. Default: the machine's.",
        ),
    ] = None


@dataclass(frozen=True)
class Out:
    """Where reports go."""

    out: Annotated[Path, _of(OUTPUT, help="Folder for the reports.")] = Path("reports")


@dataclass(frozen=True)
class Folder:
    """Where slices of reports lie."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of the slices.")]


@dataclass(frozen=True)
class Telling:
    """What is said meanwhile and in the end."""

    as_json: Annotated[bool, _of(OUTPUT, "--json", help="Print what was done as JSON.")] = False
    quiet: Annotated[bool, _of(OUTPUT, "--quiet", help="No progress display.")] = False


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command line's face of a function: an option for every field of `groups`, an object of each to the function.

    Typer reads options off a function's signature, which is put together here of the fields.
    """

    def of(run: Callable[..., None]) -> Callable[..., None]:
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for group in groups
            for hints in [get_type_hints(group, include_extras=True)]
            for field in fields(group)
        ]

        def command(**given: Any) -> None:
            run(*(group(**{field.name: given[field.name] for field in fields(group)}) for group in groups))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = {option.name: option.annotation for option in options}
        return command

    return of
