"""From a model and prompts to a `Report`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from torch import nn

from ln_probe.analyses.machinery import pulse
from ln_probe.analyses.probes.protocol import Context, Failure, Piece, Probe, ProbeError
from ln_probe.analyses.probes.registry import DEFAULT, chosen, entries
from ln_probe.hooks.model import n_layers
from ln_probe.hooks.objective import Loss, Objective
from ln_probe.loading.provenance import source_of
from ln_probe.measuring.assembly import assemble, provenance
from ln_probe.measuring.given_constants import calibration_prompts
from ln_probe.measuring.live import Live
from ln_probe.measuring.passes import Passes
from ln_probe.measuring.seal import REFUSE, Seal, hooked_model
from ln_probe.measuring.settings import Settings, from_the_end, whole_numbers
from ln_probe.prompting.prompts import make_prompts
from ln_probe.prompting.vocabulary import name_tokens
from ln_probe.reporting.report import Report

TRAINING = "the model was in training mode: it was measured in evaluation mode (no dropout) and left in training mode"


class ProbeFailedWarning(UserWarning):
    """A probe failed; the others' results are in the report."""


def analyze(
    model: object,
    prompts: Any = None,
    *,
    probes: Sequence[str | Probe] = DEFAULT,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    keys: str = "hardest",
    max_tokens: int = 512,
    seed: int = 0,
    vocab: str | Path | None = None,
    keys_sample: int | None = None,
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
    """What LayerNorm does in `model`: norms term by term, keys that attention can select, how uniformly it attends.

    Args:
        model: HookedTransformer, TransformerBridge or lab model (see `load_model`), or a Hugging Face `PreTrainedModel`
            in memory, which is wrapped for the measurement and stays as it is.
        prompts: a text or a list of texts; token ids as a tensor, array or lists ([pos], [batch pos] or ragged), or
            what a tokenizer returned (its attention_mask counts); a `pathlib.Path` to a file; `ln_probe.sampled(n)` for
            sequences of the model's own; None for the model's default prompts (64 windows of held-out text for a
            bundled model, else the bundled passages, else its own samples).
        probes: names ("decomposition", "selectability", "uniformity", "causal", "unembedding", on request "writers"
            and "attribution", those of other packages) or `Probe` objects.
        layers, heads: indices to look at; None means all. A negative layer counts from the end.
        keys: "hardest" (and a seeded sample) or "all" rows in the `keys` table.
        max_tokens: longer prompts are cut, and the report says so.
        seed: of sampled prompts and sampled keys.
        vocab: file of token strings for a model without a tokenizer (JSON, or a token a line); names among them such
            as `<EOS>` are the end tokens that sampled sequences stop at.
        batch_size: how many prompts go through the model together: neighbours nearly of a length, padded; numbers agree
            with those of single prompts to the rounding of matrix products. None: 1 on a CPU, on a GPU as its memory
            allows.
        progress: show what is going on: a live line on a terminal or in a notebook, elsewhere a line every half minute.
        keys_sample: how many keys of each head are measured (of the longest prompt; of shorter ones fewer in
            proportion), each among all others; fractions and quantiles then have intervals. 0: all keys. None: all,
            unless they would take more than about an hour of one core; the report says so.
        tokenizer: of a Hugging Face model in memory; the others bring their own.
        prepend_bos: whether prompts that are texts begin with the tokenizer's first token; None: as the model was
            trained.
        calibration: text that the constants of frozen scaling come from, in any form that `prompts` takes. None: the
            constants of a prompt are the mean sigmas over all prompts outside its group (leave-one-out).
        groups: a label for each prompt; prompts with equal labels form one group, which is left out and resampled as
            one. None: equal prompts form a group.
        loss: another objective than the next-token loss: a function of (output, tokens [batch pos]) that returns the
            mean loss of each prompt [batch], lower is better; or its name as "module:function".
        optimal: fit loss-optimal constants too (minutes); a bundled model on its default prompts brings its own.
        hooks: what happens to hooks on the model that neither TransformerLens nor ln_probe nor the loader installed
            (those of accelerate belong to the model). "refuse": if they change the output or a norm's input on the
            first prompt, by a single bit, they are an error; else a note says that they were switched off during the
            measurement. "keep": the model is measured with them, the intact model included, and the report says so.

    The model is sealed while it is measured: `analyze` compares versions and checksums of all weights at the start, at
    the end and around every probe of another package. Of two calls on the same model in two threads, the second waits;
    a pass of the model itself in another thread raises there.

    A probe that fails is named in `Report.failures`, in its notes and in a ProbeFailedWarning; the others' results
    stand.

    Raises:
        TypeError: not a TransformerLens or Hugging Face model; prompts that hold no text and no token ids.
        ValueError: an unknown probe, a layer or head that does not exist, unusable prompts, NaN activations (names
            the site); a Hugging Face model that TransformerLens has no bridge for, or whose bridge is not the model.
        SealError: the model is inside `without`, under autocast, compiled, or under hooks that change what it computes;
            or a weight was changed, or a hook added, during the measurement. Names it.
        ProbeError: a probe that cannot be used (names it and its package), or all of them failed.
        ObjectiveError: a loss that does not return one finite number per prompt, or not twice the same.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> report = ln_probe.analyze(model, probes=["causal"])
        >>> report.findings()[0]
    """
    hooked, on_original = hooked_model(model, tokenizer, hooks)
    found = _probes(probes)
    objective = Objective.of(loss)
    settings = Settings(
        probes=tuple(p if isinstance(p, str) else p.name for p in probes),
        layers=None if layers is None else from_the_end(layers, n_layers(hooked)),
        heads=None if heads is None else whole_numbers(heads, "heads"),
        keys=keys,
        max_tokens=max_tokens,
        seed=seed,
        vocab=None if vocab is None else str(vocab),
        keys_sample=keys_sample,
        batch_size=batch_size,
        loss=None if loss is None else objective.name,
        optimal=optimal,
    )
    settings.check(hooked)
    clock = _Clock()
    was_training = cast(nn.Module, model).training
    with Live(quiet=not progress), Seal(hooked, hooks) as seal:
        pulse.tell("preparing prompts")
        if vocab is not None:
            name_tokens(hooked, vocab)
        ready = make_prompts(hooked, prompts, max_tokens=max_tokens, seed=seed, prepend_bos=prepend_bos)
        other = None if calibration is None else calibration_prompts(hooked, calibration, max_tokens, seed, prepend_bos)
        seal.compare(ready.tokens[0])
        objective.check(hooked, ready.tokens[0])
        passes = Passes(hooked, settings, probes=found, objective=objective, seal=seal)
        clock.lap("preparation")
        numbered = list(enumerate(ready.tokens))
        calibrated = passes.calibrate(numbered, groups=groups, calibration=other, default=prompts is None)
        clock.lap("first pass")
        pieces: dict[str, list[Piece | Failure]] = {
            n: [p] for n, p in passes.measure(numbered, calibrated, default=prompts is None).items()
        }
        clock.lap("second pass")
        pieces |= {p.name: [passes.weigh(p)] for p in found if p.needs.nothing}
        clock.lap("weights")
        pulse.tell("pictures of attention")
        exhibits = passes.record(ready.tokens, ready.strings, calibrated, count=len(ready.tokens))
        clock.lap("exhibits")
        report = assemble(
            found,
            pieces,
            Context(calibrated, settings.layers, lambda p, i: ready.strings[p][i], keys, seed),
            exhibits=exhibits,
            provenance=provenance(
                source_of(cast(nn.Module, hooked)),
                ready.summary,
                settings,
                calibrated,
                int(hooked.cfg.d_model),
                found,
                objective,
            )
            | seal.plain,
            notes=(*ready.notes, *calibrated.notes),
        )
    clock.lap("tables")
    for failure in report.failures:
        warnings.warn(str(failure), ProbeFailedWarning, stacklevel=2)
    if report.failures and len(report.failures) == len(found):
        raise ProbeError("; ".join(map(str, report.failures)))
    notes = (*on_original, *seal.notes, *report.notes, *([TRAINING] if was_training else []))
    timed = {"started": clock.started, "seconds": clock.laps}
    return replace(report, notes=notes, provenance={**report.provenance, **timed})


def _probes(probes: Sequence[str | Probe]) -> tuple[Probe, ...]:
    known = entries()
    if isinstance(probes, str) or not probes or any(isinstance(p, str) and p not in known for p in probes):
        given = probes if isinstance(probes, str) else tuple(probes)
        raise ValueError(f"unknown probes {given!r}: give a list of {', '.join(known)}")
    return chosen(tuple(probes))


class _Clock:
    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 3), now
