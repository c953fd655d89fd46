"""From a model and prompts to a `Report`."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import ln_probe
from ln_probe.analyses import causal_table, key_tables, selectability, uniformity
from ln_probe.hooks.model import check_model, evaluating
from ln_probe.loading.provenance import ModelSource
from ln_probe.models import source_of
from ln_probe.passes import PROBES, Calibration, Passes, Settings, effects_table
from ln_probe.prompting.prompts import make_prompts
from ln_probe.recording import marked
from ln_probe.report import Report

TRAINING = "the model was in training mode: it was measured in evaluation mode (no dropout) and left in training mode"


def analyze(
    model: object,
    prompts: Sequence[str] | str | Path | Tensor | None = None,
    *,
    probes: Sequence[str] = PROBES,
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
        probes: any of "decomposition", "selectability", "uniformity", "causal", "unembedding".
        layers, heads: indices to look at; None means all.
        keys: "hardest" (and a seeded sample) or "all" rows in the `keys` table.
        max_tokens: longer prompts are cut, and the report says so.
        seed: of sampled prompts and sampled keys.
        progress: show a progress bar.

    Raises:
        TypeError: not a TransformerLens model.
        ValueError: an unknown probe, a layer or head that does not exist, unusable prompts, NaN activations (names
            the site).
    """
    hooked = check_model(model)
    settings = Settings(
        probes=probes if isinstance(probes, str) else tuple(probes),  # type: ignore[arg-type]  # a string is refused
        layers=None if layers is None else tuple(layers),
        heads=None if heads is None else tuple(heads),
        keys=keys, max_tokens=max_tokens, seed=seed,
    )  # fmt: skip
    settings.check(hooked)
    clock = _Clock()
    was_training = cast(nn.Module, model).training
    with evaluating(hooked):
        ready = make_prompts(hooked, prompts, max_tokens=max_tokens, seed=seed)
        passes = Passes(hooked, settings, progress=progress)
        clock.lap("preparation")
        prompts_by_number = list(enumerate(ready.tokens))
        calibration = passes.calibrate(prompts_by_number)
        clock.lap("first pass")
        measured = passes.measure(prompts_by_number, calibration)
        clock.lap("second pass")
        unembedding, notes = passes.unembedding(ready.name_of)
        blocks = key_tables.by_place(measured.keys)
        found_heads, found_keys = key_tables.tables(
            blocks, calibration.radii, lambda p, i: ready.strings[p][i],
            every=keys == "all", seed=seed,
        )  # fmt: skip
        effects, causal_notes = effects_table([] if measured.effects is None else [measured.effects], seed)
        clock.lap("tables")
        exhibits = marked(passes.record(ready.tokens, ready.strings, count=len(ready.tokens)), blocks)
        clock.lap("exhibits")
    return Report(
        layernorms=calibration.layernorms,
        heads=found_heads,
        keys=found_keys,
        causal=effects,
        unembedding=unembedding,
        provenance=provenance(
            source_of(cast(nn.Module, model)), ready.summary, settings, calibration, int(hooked.cfg.d_model)
        )
        | {"started": clock.started, "seconds": clock.laps},
        notes=(*ready.notes, *calibration.notes, *measured.notes, *causal_notes, *notes, *(TRAINING,) * was_training),
        exhibits=exhibits,
    )


def provenance(
    source: ModelSource, prompts: dict[str, Any], settings: Settings, calibration: Calibration, d_model: int
) -> dict[str, Any]:
    """Where tables come from, as plain JSON: the part that is the same whenever and however they are made."""
    return {
        "ln_probe": ln_probe.__version__,
        "model": asdict(source),
        "prompts": prompts,
        "arguments": settings.plain,
        "constants": dict(calibration.constants),
        "thresholds": _thresholds(),
        "random_angle_deg": uniformity.random_angle(d_model, seed=settings.seed),
        "versions": _versions(),
    }


class _Clock:
    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 3), now


def _thresholds() -> dict[str, float]:
    from ln_probe.analyses.geometry.key_coordinates import RANK_TOLERANCE, TAU
    from ln_probe.hooks.attention import PATTERN_TOLERANCE
    from ln_probe.hooks.sites import SAME_OUTPUT
    from ln_probe.hooks.state import CENTRED

    return {
        "tau": TAU,
        "rank_tolerance": RANK_TOLERANCE,
        "pattern_tolerance_float32": PATTERN_TOLERANCE[torch.float32],
        "centred": CENTRED,
        "same_output": SAME_OUTPUT,
        "query_radius_quantile": selectability.QUERY_RADIUS_QUANTILE,
        "keys_hardest_per_variant": key_tables.HARDEST_PER_VARIANT,
        "keys_sampled": key_tables.SAMPLED,
        "causal_resamples": causal_table.RESAMPLES,
        "causal_confidence": causal_table.CONFIDENCE,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # pragma: no cover - a vendored install
            found[name] = "unknown"
    return found
