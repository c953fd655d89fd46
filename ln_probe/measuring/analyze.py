"""From a model and prompts to a `Report`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from torch import nn

from ln_probe.analyses.machinery import pulse
from ln_probe.analyses.probes.protocol import Context, Failure, Piece, Probe, ProbeError
from ln_probe.analyses.probes.registry import DEFAULT, chosen, entries
from ln_probe.hooks.exclusive import exclusive
from ln_probe.hooks.model import check_model, evaluating, n_layers
from ln_probe.loading.in_memory import bridged, is_hugging_face
from ln_probe.loading.provenance import source_of
from ln_probe.measuring.assembly import assemble, provenance
from ln_probe.measuring.live import Live
from ln_probe.measuring.passes import Passes
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
) -> Report:
    """What LayerNorm does in `model`: norms term by term, keys that attention can select, how uniformly it attends.

    Args:
        model: HookedTransformer, TransformerBridge or lab model (see `load_model`), or a Hugging Face `PreTrainedModel`
            in memory, which is wrapped for the measurement and stays as it is.
        prompts: a text or a list of texts; token ids as a tensor, array or lists ([pos], [batch pos] or ragged), or
            what a tokenizer returned (its attention_mask counts); a `pathlib.Path` to a file; `ln_probe.sampled(n)` for
            sequences of the model's own; None for the bundled prompts.
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

    Of two calls on the same model in two threads, the second waits.

    A probe that fails is named in `Report.failures`, in its notes and in a ProbeFailedWarning; the others' results
    stand.

    Raises:
        TypeError: not a TransformerLens or Hugging Face model; prompts that hold no text and no token ids.
        ValueError: an unknown probe, a layer or head that does not exist, unusable prompts, NaN activations (names
            the site); a Hugging Face model that TransformerLens has no bridge for, or whose bridge is not the model.
        ProbeError: a probe that cannot be used (names it and its package), or all of them failed.
    """
    given = model
    if is_hugging_face(model):
        model = bridged(model, tokenizer)
    elif tokenizer is not None:
        raise ValueError(
            f"tokenizer= is for a Hugging Face model in memory: a {type(model).__name__} brings its own "
            "(model.tokenizer)"
        )
    hooked = check_model(model)
    found = _probes(probes)
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
    )
    settings.check(hooked)
    clock = _Clock()
    was_training = cast(nn.Module, given).training
    with Live(quiet=not progress), exclusive(hooked), evaluating(hooked):
        pulse.tell("preparing prompts")
        if vocab is not None:
            name_tokens(hooked, vocab)
        ready = make_prompts(hooked, prompts, max_tokens=max_tokens, seed=seed, prepend_bos=prepend_bos)
        passes = Passes(hooked, settings, probes=found)
        clock.lap("preparation")
        numbered = list(enumerate(ready.tokens))
        calibration = passes.calibrate(numbered)
        clock.lap("first pass")
        pieces: dict[str, list[Piece | Failure]] = {
            n: [p] for n, p in passes.measure(numbered, calibration, default=prompts is None).items()
        }
        clock.lap("second pass")
        pieces |= {p.name: [passes.weigh(p)] for p in found if p.needs.nothing}
        clock.lap("weights")
        pulse.tell("pictures of attention")
        exhibits = passes.record(ready.tokens, ready.strings, calibration, count=len(ready.tokens))
        clock.lap("exhibits")
    source = source_of(cast(nn.Module, model))
    report = assemble(
        found,
        pieces,
        Context(calibration, settings.layers, lambda p, i: ready.strings[p][i], keys, seed),
        exhibits=exhibits,
        provenance=provenance(source, ready.summary, settings, calibration, int(hooked.cfg.d_model), found)
        | {"started": clock.started, "seconds": clock.laps},
        notes=(*ready.notes, *calibration.notes),
    )
    clock.lap("tables")
    for failure in report.failures:
        warnings.warn(str(failure), ProbeFailedWarning, stacklevel=2)
    if report.failures and len(report.failures) == len(found):
        raise ProbeError("; ".join(map(str, report.failures)))
    return report.with_notes(TRAINING) if was_training else report


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
