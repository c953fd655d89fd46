"""Measure a model: `analyze` returns a `Report`; `freezing_cost` and `norm_constants`, its first numbers alone."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import nn

from ln_probe import __version__
from ln_probe.analyses.arguments import check_flags
from ln_probe.analyses.constants import Calibration, Constants
from ln_probe.analyses.geometry.check import TAU
from ln_probe.analyses.geometry.keys import RANK_TOLERANCE
from ln_probe.analyses.probes import columns as declared
from ln_probe.analyses.probes.base import Failure, Probe, ProbeError, ProbeResults
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.columns import CAUSAL
from ln_probe.analyses.probes.decomposition import Decomposition
from ln_probe.analyses.probes.registry import BUILT_IN, DEFAULT, chosen
from ln_probe.analyses.probes.uniformity import random_angle
from ln_probe.analyses.processes import one_blas_thread
from ln_probe.analyses.progress import ProgressLine, tell
from ln_probe.analyses.schema import TableError
from ln_probe.exhibits import Exhibits
from ln_probe.guard import REFUSE, check_finite, hooked_model, unchanged
from ln_probe.headline import FreezingCost
from ln_probe.hooks.attention import PATTERN_TOLERANCE
from ln_probe.hooks.model import HookedModel, n_layers
from ln_probe.hooks.norm import SAME_OUTPUT, SCALING_FROZEN
from ln_probe.hooks.objective import Loss, Objective
from ln_probe.loading.provenance import ModelSource, source_of
from ln_probe.passes import Passes
from ln_probe.prompts import Prompts, calibration_prompts, make_prompts, read_token_names
from ln_probe.recording import marked, record
from ln_probe.report import Report, versions
from ln_probe.settings import Settings, from_the_end, whole_numbers

TRAINING = "the model was in training mode: it was measured in evaluation mode (no dropout) and left in training mode"


class ProbeFailedWarning(UserWarning):
    """A probe failed; the others' results are in the report."""


def analyze(
    model: object,
    prompts: Any = None,
    *,
    max_prompts: int | None = None,
    probes: Sequence[str | Probe] = DEFAULT,
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
            "sinks"), or `ln_probe.analyses.probes.base.Probe` objects of your own.
        layers, heads: indices to measure; None means all. A negative layer counts from the end.
        max_tokens: longer prompts are cut, and the report says so.
        seed: of random draws: resamples, and the random angle.
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
            "refuse": an error that names them. "keep": the model is measured with them, and a note names them.

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
    check_flags(progress=progress)
    token_names = None
    if isinstance(tokenizer, str | Path | list | tuple):
        token_names = read_token_names(tokenizer)
    hooked, on_hooks = hooked_model(model, tokenizer if token_names is None else None, hooks)
    chosen_probes = _probes(probes)
    objective = Objective.of(loss)
    settings = Settings(
        probes=tuple(p if isinstance(p, str) else p.name for p in probes),
        layers=None if layers is None else from_the_end(layers, n_layers(hooked)),
        heads=None if heads is None else whole_numbers(heads, "heads"),
        max_tokens=max_tokens,
        seed=seed,
        tokenizer=str(tokenizer) if isinstance(tokenizer, str | Path) else None,
        batch_size=batch_size,
        loss=None if loss is None else objective.name,
        optimal=optimal,
    )
    settings.check(hooked)
    clock = _Clock()
    was_training = cast(nn.Module, model).training
    default = prompts is None
    with (
        ProgressLine(quiet=not progress),
        unchanged(hooked),
        one_blas_thread(),
    ):
        passes, ready, calibrated = _first_pass(
            hooked,
            settings,
            chosen_probes,
            objective,
            prompts,
            calibration,
            groups,
            prepend_bos,
            token_names,
            clock,
            max_prompts,
        )
        results = passes.measure(ready.tokens, calibrated, lambda p, i: ready.strings[p][i], default=default)
        clock.lap("second pass")
        tell("pictures of attention")
        exhibits = record(passes, ready.tokens, ready.strings, calibrated)
        clock.lap("exhibits")
        source = source_of(cast(nn.Module, hooked))
        report = assemble(
            chosen_probes,
            results,
            calibrated.constants,
            exhibits=exhibits,
            provenance=provenance(source, ready.summary, settings, calibrated, passes.shape, chosen_probes, objective),
            notes=(*ready.notes, *calibrated.notes),
        )
    clock.lap("tables")
    for failure in report.failures:
        warnings.warn(str(failure), ProbeFailedWarning, stacklevel=2)
    if report.failures and len(report.failures) == len(chosen_probes):
        raise ProbeError("; ".join(map(str, report.failures)))
    notes = (*on_hooks, *report.notes, *([TRAINING] if was_training else []))
    timed = {"started": clock.started, "seconds": clock.laps}
    return replace(report, notes=notes, provenance={**report.provenance, **timed})


def _probes(probes: Sequence[str | Probe]) -> tuple[Probe, ...]:
    names = ", ".join(BUILT_IN)
    if isinstance(probes, str) or not isinstance(probes, Iterable):
        raise ValueError(f"unknown probes {probes!r}: give a list of {names}")
    if not probes or any(isinstance(p, str) and p not in BUILT_IN for p in probes):
        raise ValueError(f"unknown probes {tuple(probes)!r}: give a list of {names}")
    return chosen(tuple(probes))


def _first_pass(
    model: HookedModel,
    settings: Settings,
    probes: Sequence[Probe],
    objective: Objective,
    prompts: Any,
    calibration: Any,
    groups: Sequence[Hashable] | None,
    prepend_bos: bool | None = None,
    token_names: Mapping[int, str] | None = None,
    clock: _Clock | None = None,
    max_prompts: int | None = None,
) -> tuple[Passes, Prompts, Calibration]:
    """Prepare the prompts, check the model and the loss on the first one, and run the first pass."""
    clock = clock or _Clock()
    tell("preparing prompts")
    how: dict[str, Any] = {"max_tokens": settings.max_tokens, "prepend_bos": prepend_bos}
    ready = make_prompts(model, prompts, token_names=token_names, max_prompts=max_prompts, **how)
    other = None if calibration is None else calibration_prompts(model, calibration, **how)
    check_finite(model, ready.tokens[0])
    objective.check(model, ready.tokens[0])
    passes = Passes(model, settings, probes=probes, objective=objective)
    clock.lap("preparation")
    labels = groups.tolist() if groups is not None and hasattr(groups, "tolist") else groups  # a tensor's are equal
    calibrated = passes.calibrate(ready.tokens, groups=labels, calibration=other, default=prompts is None)
    clock.lap("first pass")
    return passes, ready, calibrated


class _Clock:
    """Measures the seconds of each stage."""

    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 3), now


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
        exhibits: for pictures, their keys not marked yet.
        notes: for the reader, before those of the probes.

    A probe that failed, or whose tables do not match their declarations, is named in the report's failures and notes,
    and its tables are empty; the others' results stand.
    """
    tables = {t.name: t for t in (*declared.BUILT_IN, *(t for p in probes for t in p.tables))}
    filled: dict[str, list[pd.DataFrame]] = {}
    failures: list[Failure] = []
    complete: list[ProbeResults] = []
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
                tables[name].check(tables[name].complete(*filled.get(name, ()), frame))
        except Exception as error:
            result = Failure.of(probe.name, error)
        if isinstance(result, Failure):
            failures.append(result)
            continue
        complete.append(result)
        for name, frame in frames.items():
            filled.setdefault(name, []).append(frame)
    filled[declared.SCALE_SUMS.name] = [declared.SCALE_SUMS.check(constants.to_table())]
    probe_notes = [note for result in complete for note in result.notes]
    return Report(
        tables={name: table.complete(*filled.get(name, ())) for name, table in tables.items()},
        provenance=dict(provenance),
        notes=tuple(dict.fromkeys((*notes, *probe_notes, *map(str, failures)))),
        exhibits=marked(exhibits, [mark for result in complete for mark in result.marks]),
        declared=tables,
        probes=tuple(p for p in probes if p.name not in BUILT_IN),
        failures=tuple(failures),
    )


def provenance(
    source: ModelSource,
    prompts: Mapping[str, Any],
    settings: Settings,
    calibration: Calibration,
    shape: Mapping[str, int],
    probes: Sequence[Probe] = (),
    objective: Objective | None = None,
) -> dict[str, Any]:
    """Describe as plain JSON where tables come from: the part that does not depend on when and how they are made."""
    objective = Objective() if objective is None else objective
    return {
        "ln_probe": __version__,
        "model": asdict(source),
        "shape": dict(shape),
        "prompts": dict(prompts),
        "arguments": settings.plain,
        "constants": {name: c.plain for name, c in calibration.constants.pooled.items()},
        "calibration": {
            "constants": calibration.constants.source,
            "given": calibration.constants.given is not None,
            "groups": calibration.constants.group_count,
            "effective_groups": calibration.constants.effective_groups,
            **calibration.calibrated_on,
        },
        "loss": {"name": objective.name, "unit": objective.unit},
        "thresholds": _thresholds(probes),
        "random_angle_deg": random_angle(shape["d_model"], seed=settings.seed),
        "versions": versions(),
    }


def _thresholds(probes: Sequence[Probe]) -> dict[str, float]:
    """Return the thresholds that tables depend on: the shared ones, the built-in probes' and those of `probes`."""
    found = {
        "tau": TAU,
        "rank_tolerance": RANK_TOLERANCE,
        "pattern_tolerance_float32": PATTERN_TOLERANCE[torch.float32],
        "same_output": SAME_OUTPUT,
    }
    for probe in (*chosen(DEFAULT), *probes):
        found |= probe.thresholds
    return found


def freezing_cost(
    model: object,
    prompts: Any = None,
    *,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    loss: Loss | str | None = None,
    max_prompts: int | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
    progress: bool = True,
    hooks: str = REFUSE,
) -> FreezingCost:
    """Measure how much freezing LayerNorm's scaling raises the loss: the first number of a report, alone.

    Args:
        model, prompts, calibration, groups, loss, max_prompts, max_tokens, seed, tokenizer, progress, hooks: as for
            `ln_probe.analyze`; the numbers are those of its `causal` table.

    Returns:
        The loss increase at every norm with its CI, the other primary contrasts, and the constants.

    Raises:
        TypeError, ValueError, ModelStateError, FileNotFoundError: as `ln_probe.analyze`; ValueError also where the loss is
            not applicable (says why).

    Example:
        >>> cost = ln_probe.freezing_cost(ln_probe.load_model("lm-layernorm"))
        >>> cost
        Freezing scaling at every norm raises the loss by … nats/token (…)
        >>> print(cost)  # all primary contrasts, prompts and constants; on the command line: ln-probe freezing-cost
    """
    check_flags(progress=progress)
    objective = Objective.of(loss)
    probe = Causal(single_norm_prompts=0, uniform=False, primary_only=True)
    hooked, on_hooks = hooked_model(model, tokenizer, hooks)
    settings = Settings(probes=(probe.name,), max_tokens=max_tokens, seed=seed)
    with ProgressLine(quiet=not progress), unchanged(hooked), one_blas_thread():
        passes, ready, calibrated = _first_pass(
            hooked, settings, [probe], objective, prompts, calibration, groups, max_prompts=max_prompts
        )
        results = passes.measure(ready.tokens, calibrated, lambda _p, _i: "", default=prompts is None)[probe.name]
    if isinstance(results, Failure):
        raise ProbeError(str(results))
    table = results.tables["causal"] if results.tables else CAUSAL.empty()
    frozen = table[(table["family"] == "primary") & (table["variant"] == SCALING_FROZEN.name)]
    rows = frozen[frozen["sites"] == "all"]
    asked = (note for note in results.notes if "single norms" not in note)  # which no one asked for here
    notes = (*ready.notes, *calibrated.notes, *asked, *on_hooks)
    if not len(rows) or frozen["delta_loss"].isna().all():
        why = "; ".join(n for n in notes if n.startswith("causal: ")) or "the model has no normalization"
        raise ValueError(f"freezing_cost is not applicable: {why}")
    row = rows.iloc[0]
    findings = probe.findings(
        {"causal": table}, {"prompts": {"source": ready.source}, "loss": {"unit": objective.unit}}
    )
    return FreezingCost(
        float(row["delta_loss"]),
        float(row["delta_loss_low"]),
        float(row["delta_loss_high"]),
        float(row["loss"] - row["delta_loss"]),
        table,
        calibrated.constants,
        findings[0].text,
        ready.summary,
        objective.unit,
        tuple(dict.fromkeys(notes)),
    )


def norm_constants(
    model: object,
    prompts: Any = None,
    *,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
    progress: bool = True,
    hooks: str = REFUSE,
) -> Constants:
    """Measure the constants that replace each norm's sigma when scaling is frozen: one forward pass per prompt.

    Args:
        model, prompts, calibration, groups, max_tokens, seed, tokenizer, progress, hooks: as for `ln_probe.analyze`.

    Returns:
        The constants: `.of(i)` those of prompt i (means over the prompts outside its group), `.pooled` those over all
        prompts, `.observed` the mean sigmas.

    Raises:
        TypeError, ValueError, ModelStateError, FileNotFoundError: as `ln_probe.analyze`.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> scale = ln_probe.norm_constants(model).pooled
        >>> with ln_probe.hooks.without(model, "scaling", scale=scale): ...
    """
    check_flags(progress=progress)
    probe = Decomposition()
    hooked, _ = hooked_model(model, tokenizer, hooks)
    settings = Settings(probes=(probe.name,), max_tokens=max_tokens, seed=seed)
    with ProgressLine(quiet=not progress), unchanged(hooked):
        return _first_pass(hooked, settings, [probe], Objective(), prompts, calibration, groups)[2].constants
