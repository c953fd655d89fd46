"""Measure a model: `analyze` returns a `Report`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import nn

from ln_probe import __version__
from ln_probe.analyses.constants import CALIBRATION, OWN_MEANS, Constants, Halves, group_numbers, halves_of
from ln_probe.analyses.geometry.check import TAU
from ln_probe.analyses.geometry.decide import start_compilation
from ln_probe.analyses.geometry.keys import RANK_TOLERANCE
from ln_probe.analyses.probes import BUILT_IN, DEFAULT
from ln_probe.analyses.probes.base import Failure, Probe, ProbeError, ProbeResults, Run, chosen
from ln_probe.analyses.probes.causal import PRIMARY_SITES, Causal
from ln_probe.analyses.probes.decomposition import NormStatistics
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.analyses.probes.uniformity import LayerMaps
from ln_probe.analyses.progress import ProgressLine, one_blas_thread, tell
from ln_probe.analyses.schema import TableError
from ln_probe.analyses.text import check_flags
from ln_probe.exhibits import AttentionRecorder, Exhibits
from ln_probe.guard import REFUSE, hooked_model, indices, seed_of, token_limit, unchanged
from ln_probe.hooks.attention import PATTERN_TOLERANCE
from ln_probe.hooks.constants import fit, mean_sigmas
from ln_probe.hooks.edits import members
from ln_probe.hooks.model import HookedModel, in_missing_head, n_layers, whole_number
from ln_probe.hooks.norm import SAME_OUTPUT, Norm
from ln_probe.hooks.norms import attention_inputs, layers_in_words
from ln_probe.hooks.task import CALIBRATION as CALIBRATION_PART
from ln_probe.hooks.task import Loss, Objective, bundled_prompts, default_tokens, tokenizer_of
from ln_probe.loading.source import source_of
from ln_probe.passes import batch_limit, check_finite, first_pass, second_pass
from ln_probe.prompts import BUNDLED, Prompts, calibration_prompts, make_prompts, read_token_names, summary
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
    check_flags(progress=progress, optimal=optimal)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    token_names = None
    if isinstance(tokenizer, str | Path | list | tuple):
        token_names = read_token_names(tokenizer)
    hooked, on_hooks = hooked_model(model, tokenizer if token_names is None else None, hooks)
    cfg: Any = hooked.cfg
    shape = {"d_model": int(cfg.d_model), "layers": n_layers(hooked), "heads": int(getattr(cfg, "n_heads", 0))}
    chosen_probes, objective = chosen(probes), Objective.of(loss)
    if any(probe.needs.attention for probe in chosen_probes):
        start_compilation()  # the first pass goes on beside it
    arguments: dict[str, Any] = {
        "probes": [probe.name for probe in chosen_probes],
        "layers": None if layers is None else indices(layers, "layer", shape["layers"]),
        "heads": None if heads is None else indices(heads, "head", shape["heads"]),
        "max_tokens": token_limit(max_tokens),
        "seed": seed_of(seed),
        "tokenizer": str(tokenizer) if isinstance(tokenizer, str | Path) else None,
        "batch_size": None if batch_size is None else whole_number(batch_size, "batch_size", 1),
        "loss": None if loss is None else objective.name,
        "optimal": bool(optimal),
    }
    was_training, default = cast(nn.Module, model).training, prompts is None
    with ProgressLine(quiet=not progress), unchanged(hooked), one_blas_thread():
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
            **{name: arguments[name] for name in ("layers", "heads", "max_tokens", "seed", "batch_size", "optimal")},
        )
        run = start.run
        recorder = None
        if start.maps is not None:
            recorder = AttentionRecorder(run.strings, run.layers, run.heads or range(shape["heads"]))
        results = second_pass(run, chosen_probes, start.inputs, start.limit, start.maps, recorder, default=default)
        about_model = {**asdict(source_of(cast(nn.Module, hooked))), "norms": {n.name: n.kind for n in run.norms}}
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
                **provenance(chosen_probes),
            },
            notes=(*on_hooks, *start.notes),
        )
    for failure in report.failures:
        warnings.warn(str(failure), ProbeFailedWarning, stacklevel=2)
    if report.failures and len(report.failures) == len(chosen_probes):
        raise ProbeError("; ".join(map(str, report.failures)))
    return replace(report, notes=(*report.notes, *([TRAINING] if was_training else [])))


# ------------------------------------------------------------------------------------- prompts, norms and constants


@dataclass(frozen=True, eq=False)
class Start:
    """A measurement up to the constants.

    Attributes:
        run: all that probes get.
        inputs: the model's norms, and identities where attention reads the stream.
        limit: how many prompts of a length go through the model together.
        maps: of attention layers; None: no probe needs attention.
        provenance: where prompts and constants come from, as plain JSON.
        notes: for the reader.
    """

    run: Run
    inputs: Sequence[Norm]
    limit: Callable[[int], int]
    maps: LayerMaps | None
    provenance: Mapping[str, Any]
    notes: Sequence[str]


def measure_norms(
    model: HookedModel,
    prompts: Any,
    *,
    probes: Sequence[Probe],
    max_tokens: int,
    seed: int,
    loss: Objective | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    token_names: Mapping[int, str] | None = None,
    prepend_bos: bool | None = None,
    max_prompts: int | None = None,
    batch_size: int | None = None,
    optimal: bool = False,
) -> Start:
    """Prepare the prompts, check model and loss on the first one, run the first pass, and choose the constants.

    Args:
        model: in evaluation mode; the others as of `analyze`, checked.
    """
    tell("preparing prompts")
    how: dict[str, Any] = {"max_tokens": max_tokens, "prepend_bos": prepend_bos}
    ready = make_prompts(model, prompts, token_names=token_names, max_prompts=max_prompts, **how)
    other = None if calibration is None else calibration_prompts(model, calibration, **how)
    group_of = group_numbers(ready.tokens, groups)
    on_overlap = () if other is None else _overlap(ready, other)
    loss = Objective() if loss is None else loss
    check_finite(model, ready.tokens[0])
    loss.check(model, ready.tokens[0])
    every = attention_inputs(model)
    of_random_head = [norm.name for norm in every if in_missing_head(model, norm.module)]  # (BERT's head has a norm)
    inputs = [norm for norm in every if norm.name not in of_random_head]
    norms = [norm for norm in inputs if not norm.is_identity]
    measured = list(range(n_layers(model))) if layers is None else sorted(set(layers))
    # The norm that attention reads can stand in the block before (post-norm): its constant is needed too.
    statistics = [
        NormStatistics(norm)
        for norm in norms
        if layers is None or norm.layer in measured or set(norm.attention_layers) & set(measured)
    ]
    looking = [p.name for p in probes if p.needs.attention]
    maps = LayerMaps(norms) if looking and any(norm.attention_layers for norm in inputs) else None
    limit = batch_limit(model, batch_size)
    sums = first_pass(model, ready.tokens, inputs, statistics, measured, limit, maps)
    means = Constants(tuple(s.site.name for s in statistics), group_of, sums[:, 0], sums[:, 1])
    constants, calibrated_on, on_constants = _constants(model, means, [s.site for s in statistics], other)
    if any(p.name == Causal.name for p in probes):
        shipped = _shipped(model, ready) if prompts is None else None
        if shipped is None and optimal:
            shipped = _fitted(model, norms, constants, ready, loss)
        constants = replace(constants, optimal=shipped or {})
    of_heads = None if heads is None else sorted(set(heads))
    run = Run(
        model,
        norms,
        constants,
        measured,
        of_heads,
        loss,
        ready.tokens,
        ready.strings,
        statistics,
        seed,
        ready.strata if groups is None else tuple(map(str, groups)),
    )
    notes = [*ready.notes, *_notes(inputs, looking, of_random_head), *(() if maps is None else maps.notes())]
    notes += [*on_overlap, *on_constants, *constants.notes()]
    about = {
        "prompts": dict(ready.summary),
        "constants": {name: c.plain for name, c in constants.pooled.items()},
        "calibration": {
            "constants": constants.source,
            "given": constants.given is not None,
            "groups": constants.group_count,
            "effective_groups": constants.effective_groups,
            **calibrated_on,
        },
    }
    return Start(run, inputs, limit, maps, about, notes)


def _overlap(prompts: Prompts, calibration: Prompts) -> tuple[str, ...]:
    """Return a note on prompts that the calibration text holds too.

    Raises:
        ValueError: the calibration text cannot be used.
    """
    if max(map(len, calibration.tokens)) < 2:
        raise ValueError("calibration: its prompts have one token each, and constants need at least two tokens")
    rows, others = ([tuple(row.tolist()) for row in given.tokens] for given in (prompts, calibration))
    if set(rows) == set(others):
        raise ValueError(
            f"calibration: these are the {len(rows)} prompts that are measured: leave it out (the constants of a "
            "prompt are then means over the others), or give other text"
        )
    if not (same := sum(row in set(others) for row in rows)):
        return ()
    return (
        f"{same} of {len(rows)} prompts are in the calibration text too: their own sigma is part of their constants",
    )


def _constants(
    model: HookedModel, measured: Constants, norms: Sequence[Norm], calibration: Prompts | None
) -> tuple[Constants, dict[str, Any], tuple[str, ...]]:
    """Return the constants, what provenance says of the prompts that they come from, and notes.

    They come from the user's `calibration`, else from the other prompts (`measured`); where all prompts form one
    group, from the model's calibration windows, else the bundled passages, else the prompts' own means.
    """
    notes: tuple[str, ...] = ()
    if calibration is not None:
        tokens, source = calibration.tokens, f"{CALIBRATION} ({calibration.source})"
    elif measured.group_count > 1 or not measured.group_count or not norms:
        return measured, {}, ()
    else:
        own = bundled_prompts(model)
        if own is None and tokenizer_of(model) is None:
            note = (
                "there is one group of prompts and no other text, so the constants are the means of these prompts "
                "themselves: give more prompts, or calibration="
            )
            return replace(measured, source=OWN_MEANS), {}, (note,)
        tokens = tuple(default_tokens(model, CALIBRATION_PART))
        source = f"{CALIBRATION} ({BUNDLED if own is None else own.source})"
        note = "there is one group of prompts only, so the constants are"
        notes = (f"{note} {source}: give more prompts, or calibration=",)
    given = mean_sigmas(model, norms, tokens)
    return replace(measured, source=source, given=given), summary(source, tokens), notes


def _shipped(model: HookedModel, prompts: Prompts) -> dict[str, Halves] | None:
    """Return the loss-optimal constants that a bundled model brings for its default prompts."""
    shipped = vars(model).get("shipped_constants")
    if not shipped or shipped["prompts_sha256"] != summary("", prompts.tokens)["sha256"]:
        return None
    return dict(shipped["halves"])


def _fitted(
    model: HookedModel, norms: Sequence[Norm], constants: Constants, prompts: Prompts, loss: Objective
) -> dict[str, Halves]:
    """Return loss-optimal constants of the primary contrasts' groups of norms, fitted on each half of the prompts."""
    halves: dict[str, Halves] = {}
    half = halves_of(constants.groups.tolist())
    for group in PRIMARY_SITES:
        frozen = [n for n in members(norms, group) if n.scales and n.name in constants.sites]
        if not frozen or constants.group_count < 2 or loss.obstacle(model):
            continue
        tell(f"fitting loss-optimal constants ({group})")
        of_half = [[row for row, number in zip(prompts.tokens, half, strict=True) if number == i] for i in (0, 1)]
        first, second = (fit(model, frozen, rows, start=constants.pooled, objective=loss) for rows in of_half)
        halves[group] = first, second
    return halves


def _notes(inputs: Sequence[Norm], looking: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """Return what a reader has to know about the norms of a model.

    Args:
        looking: the probes that need attention.
        left_out: names of norms that are not measured.
    """
    notes = []
    identities = [norm.layer for norm in inputs if norm.is_identity]
    if len(identities) == len(inputs):
        notes.append(
            "the model has no normalization: there is no site to decompose, and attention reads the stream itself; "
            "its keys and queries are measured as they are"
        )
    elif not any(norm.attention_layers for norm in inputs):
        verb = "were" if len(looking) > 1 else "was"
        unmeasured = f": {' and '.join(looking)} {verb} not measured" if looking else ""
        notes.append(f"no norm of this model is read by attention{unmeasured}")
    if 0 < len(identities) < len(inputs):
        notes.append(f"attention reads the residual stream itself, with no norm, in {layers_in_words(identities)}")
    if left_out:
        notes.append(f"{', '.join(left_out)} was not measured: it belongs to the head, which was drawn at random")
    return notes


# -------------------------------------------------------------------------------------------------------- the report


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
    tables = {table.name: table for table in (*TABLES, *(table for probe in probes for table in probe.tables))}
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
    how = {name: dict(result.provenance) for name, result in complete.items() if result.provenance}
    return Report(
        tables={name: table.merged(filled.get(name, ())) for name, table in tables.items()},
        provenance={**how, **provenance},
        notes=tuple(dict.fromkeys((*notes, *probe_notes, *map(str, failures)))),
        exhibits=exhibits,
        constants=constants,
        declared=tables,
        probes=tuple(p for p in probes if p.name not in BUILT_IN),
        failures=tuple(failures),
    )


def provenance(probes: Sequence[Probe]) -> dict[str, Any]:
    """Return versions, and the thresholds that tables depend on: the shared ones and those of probes, as plain JSON."""
    thresholds = {
        "tau": TAU,
        "rank_tolerance": RANK_TOLERANCE,
        "pattern_tolerance_float32": PATTERN_TOLERANCE[torch.float32],
        "same_output": SAME_OUTPUT,
    }
    for probe in (*chosen(DEFAULT), *probes):
        thresholds |= probe.thresholds
    return {"ln_probe": __version__, "thresholds": thresholds, "versions": versions()}
