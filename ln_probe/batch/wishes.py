"""What a wish comes to: settings, checkpoints, a run; what makes no sense is refused."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ln_probe.batch.arguments import check_formats, check_heads, check_layers, check_precision, numbers
from ln_probe.batch.endings import refuse
from ln_probe.batch.options import Wish

if TYPE_CHECKING:
    from ln_probe.batch.drive import Slice
    from ln_probe.batch.plan import Run
    from ln_probe.batch.suite import Target
    from ln_probe.settings import Settings


def targets_of(wish: Wish, *, quiet: bool) -> list[Target]:
    """The checkpoints asked for; exits where the list makes no sense."""
    import ln_probe
    from ln_probe.batch.suite import SuiteError, suite
    from ln_probe.measuring.live import Live

    names = tuple(wish.model or ()) or tuple(ln_probe.bundled_models())
    if not names:
        raise refuse("no model given, and this installation has no bundled checkpoints")
    if not quiet:
        typer.echo(f"looking for {', '.join(names[:4])}{', …' * (len(names) > 4)}", err=True)
    try:
        with Live(quiet=quiet):
            return suite(names, wish.checkpoints, wish.revision, allow_pickle=wish.allow_pickle)
    except SuiteError as error:
        raise refuse(str(error)) from error


def settings_of(wish: Wish) -> Settings:
    """What is measured, and how; exits where that makes no sense."""
    from ln_probe.analyses.machinery.files import sha256_of_file
    from ln_probe.analyses.probes.base import ProbeError
    from ln_probe.analyses.probes.registry import DEFAULT, chosen, entries
    from ln_probe.hooks.objective import Objective
    from ln_probe.prompt_sources import check_source
    from ln_probe.prompts import read_vocabulary
    from ln_probe.settings import KEYS, Settings, read_groups

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
    vocab = None if wish.vocab is None else str(wish.vocab.absolute())
    if vocab is not None:
        try:
            read_vocabulary(vocab)
        except (FileNotFoundError, ValueError) as error:
            raise refuse(str(error)) from error
    try:
        check_precision(wish.dtype, wish.device)
        layers = None if wish.layers is None else numbers(wish.layers, "layer")
        heads = None if wish.heads is None else numbers(wish.heads, "head")
    except ValueError as error:
        raise refuse(str(error)) from error
    calibration, groups = (None if f is None else str(f.resolve()) for f in (wish.calibration, wish.groups))
    try:
        if groups is not None:
            read_groups(groups)
        if calibration is not None:
            check_source(calibration)
        Objective.of(wish.loss)
    except (FileNotFoundError, ValueError) as error:
        raise refuse(str(error)) from error
    return Settings(
        wanted,
        layers,
        heads,
        wish.keys,
        wish.max_tokens,
        wish.seed,
        vocab,
        wish.keys_sample,
        wish.batch_size,
        calibration,
        None if calibration is None else sha256_of_file(Path(calibration)),
        groups,
        None if groups is None else sha256_of_file(Path(groups)),
        wish.loss,
        wish.optimal,
    )


def check_targets(wish: Wish, settings: Settings, targets: Sequence[Target]) -> None:
    """Exit if a model lacks a layer or a head that is asked for, or is another function in the format asked for."""
    try:
        check_formats(wish.dtype, targets)
        check_layers(settings.layers, targets)
        check_heads(settings.heads, targets)
    except ValueError as error:
        raise refuse(str(error)) from error


def run_of(wish: Wish, settings: Settings, out: Path, corpus: Path) -> Run:
    """The run, its prompts divided into shards in the folder `corpus`."""
    from ln_probe.batch.plan import Run
    from ln_probe.batch.shards import divide

    sharded = divide(wish.prompts, corpus, wish.shard, wish.max_prompts)
    command = shlex.join(["ln-probe", *sys.argv[1:]])
    return Run(out, settings, sharded, wish.dtype, wish.device, wish.allow_pickle, wish.strict, command)


def claiming(out: Path) -> Any:
    """Slices that start together read the prompts one after another."""
    from filelock import FileLock

    (out / ".ln_probe").mkdir(parents=True, exist_ok=True)
    return FileLock(out / ".ln_probe" / "claim.lock")


def slice_of(text: str | None) -> Slice | None:
    """The slice K/N."""
    from ln_probe.batch.drive import Slice

    try:
        return None if text is None else Slice.parse(text)
    except ValueError as error:
        raise refuse(str(error)) from error
