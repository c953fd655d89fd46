"""From a model and prompts to a `Report`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from ln_probe.analyses.probes.protocol import Context, Failure, Piece, Probe, ProbeError
from ln_probe.analyses.probes.registry import DEFAULT, chosen, entries
from ln_probe.hooks.model import check_model, evaluating
from ln_probe.loading.provenance import source_of
from ln_probe.measuring.assembly import assemble, provenance
from ln_probe.measuring.passes import Passes
from ln_probe.measuring.settings import Settings
from ln_probe.prompting.prompts import make_prompts
from ln_probe.reporting.report import Report

TRAINING = "the model was in training mode: it was measured in evaluation mode (no dropout) and left in training mode"


class ProbeFailedWarning(UserWarning):
    """A probe failed; the others' results are in the report."""


def analyze(
    model: object,
    prompts: Sequence[str] | str | Path | Tensor | None = None,
    *,
    probes: Sequence[str | Probe] = DEFAULT,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    keys: str = "hardest",
    max_tokens: int = 512,
    seed: int = 0,
    progress: bool = True,
) -> Report:
    """What LayerNorm does in `model`: norms term by term, keys that attention can select, how uniformly it attends.

    Args:
        model: HookedTransformer, TransformerBridge or lab model (see `load_model`).
        prompts: texts, token ids [batch pos], a file, "sampled", or None for the bundled prompts.
        probes: names ("decomposition", "selectability", "uniformity", "causal", "unembedding", on request "writers" and
            "attribution", those of other packages) or `Probe` objects.
        layers, heads: indices to look at; None means all.
        keys: "hardest" (and a seeded sample) or "all" rows in the `keys` table.
        max_tokens: longer prompts are cut, and the report says so.
        seed: of sampled prompts and sampled keys.
        progress: show a progress bar.

    A probe that fails is named in `Report.failures`, in its notes and in a ProbeFailedWarning; the others' results
    stand.

    Raises:
        TypeError: not a TransformerLens model.
        ValueError: an unknown probe, a layer or head that does not exist, unusable prompts, NaN activations (names
            the site).
        ProbeError: a probe that cannot be used (names it and its package), or all of them failed.
    """
    hooked = check_model(model)
    found = _probes(probes)
    settings = Settings(
        probes=tuple(p if isinstance(p, str) else p.name for p in probes),
        layers=None if layers is None else tuple(layers),
        heads=None if heads is None else tuple(heads),
        keys=keys,
        max_tokens=max_tokens,
        seed=seed,
    )
    settings.check(hooked)
    clock = _Clock()
    was_training = cast(nn.Module, model).training
    with evaluating(hooked):
        ready = make_prompts(hooked, prompts, max_tokens=max_tokens, seed=seed)
        passes = Passes(hooked, settings, probes=found, progress=progress)
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
        exhibits = passes.record(ready.tokens, ready.strings, count=len(ready.tokens))
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
