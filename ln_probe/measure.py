"""Measure a model: `analyze` returns a `Report`."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pandas as pd
from torch import nn

from ln_probe import __version__
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.geometry.decide import compilation
from ln_probe.analyses.probes import BUILT_IN, DEFAULT
from ln_probe.analyses.probes.base import Failure, Probe, ProbeError, ProbeResults, chosen
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.analyses.progress import ProgressLine, one_blas_thread
from ln_probe.analyses.schema import TableError
from ln_probe.analyses.text import check_flags
from ln_probe.exhibits import AttentionRecorder, Exhibits
from ln_probe.guard import REFUSE, hooked_model, indices, seed_of, unchanged
from ln_probe.hooks.model import whole_number
from ln_probe.hooks.task import Loss, Objective
from ln_probe.loading.source import source_of
from ln_probe.passes import measure_norms, second_pass
from ln_probe.prompts import read_token_names
from ln_probe.report import Report, versions

TRAINING = "the model was in training mode: it was measured in evaluation mode (no dropout) and left in training mode"


class ProbeFailedWarning(UserWarning):
    """A probe failed; the others' results are in the report."""


def analyze(
    model: object,
    prompts: Any = None,
    *,
    max_prompts: int | None = None,
    probes: str | Probe | Sequence[str | Probe] = DEFAULT,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    tokenizer: Any = None,
    prepend_bos: bool | None = None,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    loss: Loss | str | None = None,
    optimal: bool = False,
    hooks: str = REFUSE,
) -> Report:
    """Measure what LayerNorm does in `model`, and return a report.

    Args:
        model: HookedTransformer, TransformerBridge or lab model (see `load_model`), or a Hugging Face `PreTrainedModel`
            in memory, which is wrapped for the measurement and not changed.
        prompts: a text or a list of texts; token ids as a tensor, array or lists ([pos], [batch pos] or ragged), or a
            tokenizer's output (padding by its attention_mask is left out); a data set of `datasets`; a `pathlib.Path`
            to a `.txt` or `.jsonl`; None for the model's default prompts (64 windows of held-out text for a bundled
            model, else the bundled passages; a model without a tokenizer needs prompts).
        max_prompts: measure only the first so many prompts.
        probes: names of built-in probes ("decomposition", "selectability", "uniformity", "causal", "head_effects",
            "sinks"), or `ln_probe.analyses.probes.base.Probe` objects of your own; one or a list.
        layers, heads: indices to measure; None means all. A negative layer counts from the end.
        max_tokens: longer prompts are cut, and the report says so.
        seed: of resamples.
        batch_size: how many neighbouring prompts of one length go through the model together. Numbers agree with those
            of single prompts to the rounding of matrix products. None: 1 on a CPU, on a GPU as its memory allows.
        progress: show a live progress line on a terminal or in a notebook, elsewhere a line every half minute.
        tokenizer: of a Hugging Face model in memory (other models have one); for a model without a tokenizer, its
            token strings: a list, or a file (JSON, or one token per line).
        prepend_bos: whether prompts that are texts begin with the tokenizer's first token; None: as the model was
            trained.
        calibration: text that the constants of frozen scaling come from, in any form that `prompts` takes. None: the
            constants of a prompt are the mean sigmas over all prompts outside its group (leave-one-out).
        groups: a label for each prompt; prompts with equal labels form one group, which is left out and resampled as
            one. None: equal prompts form a group.
        loss: another objective than the next-token loss: a function of (output, tokens [batch pos]) that returns the
            mean loss of each prompt [batch], lower is better; or its name as "module:function".
        optimal: fit loss-optimal constants too (minutes); a bundled model on its default prompts brings its own.
        hooks: what happens to hooks on the model that neither TransformerLens nor ln_probe nor the loader installed.
            "refuse": an error names them. "keep": the model is measured with them, and a note names them.

    A probe that fails is named in `Report.failures`, in the notes and in a ProbeFailedWarning; the other probes'
    results stay.

    Returns:
        A `Report`: tables as DataFrames, findings, and data for pictures and pages.

    Raises:
        TypeError: not a TransformerLens or Hugging Face model; prompts that hold no text and no token ids.
        ValueError: an unknown probe, a layer or head that does not exist, unusable prompts, NaN activations (names
            the site); a Hugging Face model that TransformerLens has no bridge for, or whose bridge is not the model.
        ModelStateError: the model is inside `without`, under autocast, compiled, or has hooks; or a parameter changed
            during the measurement. Names it.
        ProbeError: a probe that cannot be used (names it), or all of them failed.
        ObjectiveError: a loss that does not return one finite number per prompt, or not twice the same.
        FileNotFoundError: a file of prompts that does not exist.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> report = ln_probe.analyze(model, probes=["causal"])
        >>> report.findings()[0]
    """
    check_flags(progress=progress, optimal=optimal)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    token_names = None
    if isinstance(tokenizer, str | Path | list | tuple):
        token_names = read_token_names(tokenizer)
    hooked, on_hooks = hooked_model(model, tokenizer if token_names is None else None, hooks)
    cfg: Any = hooked.cfg
    shape = {
        "d_model": int(cfg.d_model),
        "layers": len(hooked.blocks),
        "heads": int(getattr(cfg, "n_heads", 0)),
    }
    chosen_probes, objective = chosen(probes), Objective.of(loss)
    if any(probe.needs.attention for probe in chosen_probes):
        compilation.start()  # the first pass goes on beside it
    arguments: dict[str, Any] = {
        "probes": [probe.name for probe in chosen_probes],
        "layers": None if layers is None else indices(layers, "layer", shape["layers"]),
        "heads": None if heads is None else indices(heads, "head", shape["heads"]),
        "max_tokens": whole_number(max_tokens, "max_tokens", 2),
        "seed": seed_of(seed),
        "tokenizer": str(tokenizer) if isinstance(tokenizer, str | Path) else None,
        "batch_size": None if batch_size is None else whole_number(batch_size, "batch_size", 1),
        "loss": None if loss is None else objective.name,
        "optimal": bool(optimal),
    }
    was_training, default = cast(nn.Module, model).training, prompts is None
    quiet = ProgressLine(quiet=not progress)
    with quiet, unchanged(hooked), one_blas_thread(), ThreadPoolExecutor(1) as background:
        source = background.submit(source_of, cast(nn.Module, hooked))  # hashing many weights takes seconds
        start = measure_norms(
            hooked,
            prompts,
            probes=chosen_probes,
            loss=objective,
            calibration=calibration,
            groups=groups,
            token_names=token_names,
            prepend_bos=prepend_bos,
            max_prompts=max_prompts,
            layers=arguments["layers"],
            heads=arguments["heads"],
            max_tokens=arguments["max_tokens"],
            seed=arguments["seed"],
            batch_size=arguments["batch_size"],
            optimal=arguments["optimal"],
        )
        run = start.run
        recorder = None
        if start.maps is not None:
            recorder = AttentionRecorder(run.strings, run.layers, run.heads or range(shape["heads"]))
        results = second_pass(start, chosen_probes, recorder, default=default)
        about_model = {**asdict(source.result()), "norms": {n.name: n.kind for n in run.norms}}
        report = assemble(
            chosen_probes,
            results,
            run.constants,
            exhibits=Exhibits() if recorder is None else recorder.exhibits(),
            provenance={
                "model": about_model,
                "shape": shape,
                "arguments": arguments,
                "loss": {"name": objective.name, "unit": objective.unit},
                "started": started,
                **start.provenance,
                "ln_probe": __version__,
                "versions": versions(),
            },
            notes=(*on_hooks, *start.notes),
        )
    for failure in report.failures:
        warnings.warn(str(failure), ProbeFailedWarning, stacklevel=2)
    if report.failures and len(report.failures) == len(chosen_probes):
        raise ProbeError("; ".join(map(str, report.failures)))
    return replace(report, notes=(*report.notes, *([TRAINING] if was_training else [])))


# ------------------------------------------------------------------- the report


def assemble(
    probes: Sequence[Probe],
    results: Mapping[str, ProbeResults | Failure],
    constants: Constants,
    *,
    exhibits: Exhibits,
    provenance: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Report:
    """Make a report of the probes' results.

    Args:
        exhibits: for pictures.
        notes: for the reader, before those of the probes.

    A probe that failed, or whose tables do not match their declarations, is named in the report's failures and notes,
    and its tables are empty; the others' results stand.
    """
    tables = {table.name: table for table in TABLES}
    tables |= {table.name: table for probe in probes for table in probe.tables}
    filled: dict[str, list[pd.DataFrame]] = {}
    failures: list[Failure] = []
    complete: dict[str, ProbeResults] = {}
    for probe in probes:
        result = results[probe.name]
        try:
            if not isinstance(result, ProbeResults | Failure):
                raise TypeError(f"its observer's finish returned a {type(result).__name__}, not ProbeResults")
            frames = {} if isinstance(result, Failure) else dict(result.tables)
            names = [table.name for table in probe.tables]
            if extra := [name for name in frames if name not in names]:
                raise TableError(f"it returned a table {extra[0]!r}, and declares {', '.join(names)}")
            for name, frame in frames.items():
                tables[name].check(tables[name].merged([*filled.get(name, ()), frame]))
        except Exception as error:
            result = Failure(probe.name, f"{type(error).__name__}: {error}")
        if isinstance(result, Failure):
            failures.append(result)
            continue
        complete[probe.name] = result
        for name, frame in frames.items():
            filled.setdefault(name, []).append(frame)
    probe_notes = [note for result in complete.values() for note in result.notes]
    losses = [result.token_losses for result in complete.values()]
    how = {name: dict(result.provenance) for name, result in complete.items() if result.provenance}
    return Report(
        tables={name: table.merged(filled.get(name, ())) for name, table in tables.items()},
        provenance={**how, **provenance},
        notes=tuple(dict.fromkeys((*notes, *probe_notes, *map(str, failures)))),
        exhibits=replace(exhibits, token_losses=next((one for one in losses if one is not None), None)),
        constants=constants,
        declared=tables,
        probes=tuple(p for p in probes if p.name not in BUILT_IN),
        failures=tuple(failures),
    )
