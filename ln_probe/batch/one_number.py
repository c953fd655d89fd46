"""What `ln-probe freezing-cost` does: one model, one number, on the terminal; nothing is written."""

from __future__ import annotations

import json
from typing import Any, cast

import typer

from ln_probe.batch import exits
from ln_probe.batch.options import MeasureOptions, OneModel, Output, check_labels, check_values


def run(model: OneModel, options: MeasureOptions, output: Output) -> None:
    """Measure the model and print the cost of freezing its scaling; exits where that makes no sense or fails."""
    import ln_probe
    from ln_probe.batch.suite import suite
    from ln_probe.hooks.model import HookedModel
    from ln_probe.prompt_sources import prompts_named
    from ln_probe.prompts import make_prompts
    from ln_probe.settings import read_groups

    with exits.refusing(OSError, ValueError):
        check_values(options)
        (target,) = suite([model.name], None, options.revision, allow_pickle=options.allow_pickle)
        prompts, count = prompts_named(options.prompts, options.max_prompts)
        check_labels(options.groups, count)
        measuring: dict[str, Any] = {
            "prompts": prompts,
            "groups": None if options.groups is None else read_groups(options.groups),
        }
    measuring |= {name: getattr(options, name) for name in ("calibration", "loss", "max_tokens", "seed")}
    loading = {name: getattr(options, name) for name in ("device", "dtype", "allow_pickle")}
    if target.error:
        raise _failed(target.label, target.error)
    try:
        loaded = ln_probe.load_model(target.name, revision=target.revision, **loading)
        if options.prompts is None and (most := options.max_prompts) is not None:
            hooked = cast(HookedModel, loaded)
            measuring["prompts"] = make_prompts(hooked, max_tokens=options.max_tokens, seed=options.seed, most=most)
        cost = ln_probe.freezing_cost(loaded, **measuring, progress=not output.quiet)
    except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise _failed(target.label, exits.why_failed(error)) from error
    if output.as_json:
        typer.echo(json.dumps({"model": target.label, **cost.plain}, indent=1))
    else:
        typer.echo(f"{target.label}: {cost}")


def _failed(name: str, why: str) -> typer.Exit:
    typer.echo(f"{name}: failed: {why}", err=True)
    return typer.Exit(exits.SOME_FAILED)
