"""What can be said of a large model within half a minute: its norms, and the loss without a term, on a few prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from jaxtyping import Int
from torch import Tensor, nn

from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.decomposition import Decomposition
from ln_probe.analyses.probes.protocol import Context, Probe
from ln_probe.hooks.frozen_scale import FROZEN
from ln_probe.hooks.model import HookedModel
from ln_probe.loading.provenance import source_of
from ln_probe.measuring.assembly import assemble, provenance
from ln_probe.measuring.passes import Passes
from ln_probe.measuring.settings import Settings
from ln_probe.prompting.prompts import summary
from ln_probe.reporting.exhibits import Exhibits
from ln_probe.reporting.report import Report

PROMPTS, TOKENS = 4, 32  # of the first prompts so many, so much of each


def looked_for(settings: Settings) -> tuple[Probe, ...]:
    """The probes of a first look, of those that are asked for; empty: there is nothing to look at quickly."""
    quick: tuple[Probe, ...] = (Decomposition(), Causal(single_norm_prompts=0, scales=(FROZEN,)))
    return tuple(p for p in quick if p.name in settings.probes)


def first_look(
    model: HookedModel,
    settings: Settings,
    rows: Sequence[Int[Tensor, " _"]],
    source: str,
    name_of: Callable[[int], str],
) -> Report:
    """A report of the first prompts' beginnings.

    Args:
        model: in evaluation mode.
        settings: of the whole report.
        rows: token ids of the prompts; source: what they are called.
        name_of: the string of a token id.

    Raises:
        ValueError: none of the probes that are asked for has a quick part.
    """
    probes = looked_for(settings)
    if not probes:
        raise ValueError(f"nothing of {', '.join(settings.probes)} can be said quickly")
    first = [row[:TOKENS] for row in rows[:PROMPTS]]
    settings = replace(settings, probes=tuple(p.name for p in probes), max_tokens=TOKENS)
    passes = Passes(model, settings, probes=probes)
    numbered = list(enumerate(first))
    calibration = passes.calibrate(numbered)
    pieces = {name: [piece] for name, piece in passes.measure(numbered, calibration).items()}
    made_of = provenance(
        source_of(cast(nn.Module, model)),
        summary(source, first, name_of),
        settings,
        calibration,
        int(model.cfg.d_model),
        probes,
    )
    return assemble(
        probes,
        pieces,
        Context(calibration, settings.layers, lambda p, i: name_of(int(first[p][i])), settings.keys, settings.seed),
        exhibits=Exhibits(),
        provenance=made_of,
        notes=calibration.notes,
    )
