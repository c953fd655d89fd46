"""From a model and prompts to a `Report`: the two passes over the prompts and what each is for.

The first pass takes statistics of every norm (and with them the constants that replace sigma) and of the queries that
occur; the second, which needs them, asks of every layer what its queries can select.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import ln_probe
from ln_probe.analyses import causal, causal_table, decomposition, selectability, unembedding, uniformity
from ln_probe.analyses.selectability import Selectability
from ln_probe.hooks.attention import Heads, UnsupportedAttentionError, read_heads
from ln_probe.hooks.capture import AttentionInput, stream
from ln_probe.hooks.model import HookedModel, check_model, evaluating, n_layers, read_unembedding
from ln_probe.hooks.sites import Site, find_sites
from ln_probe.loading.pretrained import NO_HEAD
from ln_probe.models import source_of
from ln_probe.prompts import Prompts, make_prompts
from ln_probe.report import Report

PROBES = ("decomposition", "selectability", "uniformity", "causal", "unembedding")
KEYS = ("hardest", "all")


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
    _check_arguments(hooked, probes, layers, heads, keys)
    clock = _Clock()
    was_training = cast(nn.Module, model).training
    source = source_of(cast(nn.Module, model))
    with evaluating(hooked):
        ready = make_prompts(hooked, prompts, max_tokens=max_tokens, seed=seed)
        sites = find_sites(hooked)
        clock.lap("preparation")
        run = _Run(hooked, ready, sites, probes, layers, heads, progress)
        run.first_pass()
        clock.lap("first pass")
        run.second_pass()
        clock.lap("second pass")
        effects = run.causal(seed, next((n for n in source.notes if n.startswith(NO_HEAD)), ""))
        clock.lap("causal")
        tables = run.tables(every=keys == "all", seed=seed) | {"causal": effects}
        clock.lap("tables")
    provenance = {
        "ln_probe": ln_probe.__version__,
        "model": asdict(source),
        "prompts": {
            "source": ready.source, "count": len(ready.tokens), "tokens": sum(map(len, ready.tokens)),
            "longest": max(map(len, ready.tokens)), "sha256": ready.sha256,
        },
        "arguments": {
            "probes": list(probes), "layers": None if layers is None else list(layers),
            "heads": None if heads is None else list(heads), "keys": keys, "max_tokens": max_tokens, "seed": seed,
        },
        "constants": run.constants(),
        "thresholds": _thresholds(),
        "random_angle_deg": uniformity.random_angle(int(hooked.cfg.d_model), seed=seed),
        "versions": _versions(),
        "started": clock.started,
        "seconds": clock.laps,
    }  # fmt: skip
    notes = [*ready.notes, *run.notes()]
    if was_training:
        notes.append(
            "the model was in training mode: it was measured in evaluation mode (no dropout) and left in training mode"
        )
    return Report(**tables, provenance=provenance, notes=tuple(notes))


def _check_arguments(
    model: HookedModel,
    probes: Sequence[str],
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    keys: str,
) -> None:
    if isinstance(probes, str) or not probes or any(p not in PROBES for p in probes):
        raise ValueError(f"unknown probes {probes!r}: give a list of {', '.join(PROBES)}")
    if keys not in KEYS:
        raise ValueError(f"keys must be one of {', '.join(KEYS)}, got {keys!r}")
    for what, wanted, count in (
        ("layer", layers, n_layers(model)),
        ("head", heads, int(getattr(model.cfg, "n_heads", 0))),
    ):
        wrong = [i for i in wanted or () if not 0 <= i < count]
        if wrong:
            raise ValueError(f"no {what} {wrong[0]}: the model has {what}s 0 … {count - 1}")
        if wanted is not None and not len(wanted):
            raise ValueError(f"an empty list of {what}s leaves nothing to analyze: None means all")


class _Clock:
    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 3), now


class _Run:
    """One call of `analyze`: the state that its two passes share."""

    def __init__(
        self,
        model: HookedModel,
        prompts: Prompts,
        sites: list[Site],
        probes: Sequence[str],
        layers: Sequence[int] | None,
        heads: Sequence[int] | None,
        progress: bool,
    ) -> None:
        self.model, self.prompts, self.sites, self.probes = model, prompts, sites, probes
        self.layers = sorted(set(range(n_layers(model)) if layers is None else layers))
        self.heads = None if heads is None else sorted(set(heads))
        self.progress = progress
        self.every_layer = layers is None
        # The norm that attention reads can stand in the block before (post-norm): its constant is needed too.
        self.statistics = [
            decomposition.SiteStatistics(s)
            for s in sites
            if self._wanted(s) or set(s.attention_layers) & set(self.layers)
        ]
        self.unsupported: dict[int, str] = {}
        self.observed: dict[int, list[Tensor]] = defaultdict(list)
        self.attends = any("attention" in s.reads.split("+") for s in sites)
        self.wants_heads = self.attends and bool({"selectability", "uniformity"} & set(probes))
        self.result: Selectability | None = None
        self.skipped: list[str] = []
        self.bidirectional = False

    def _wanted(self, site: Site) -> bool:
        return self.every_layer or site.layer in self.layers

    def _bar(self, text: str) -> Any:
        return tqdm(
            list(enumerate(self.prompts.tokens)),
            desc=text,
            unit="prompt",
            disable=not self.progress,
            leave=False,
        )

    def _heads_of(self, seen: AttentionInput) -> Heads | None:
        if seen.layer in self.unsupported:
            return None
        norms = {s.reads: s for s in self.sites if s.layer == seen.layer and s.reads in ("query", "key")}
        try:
            return read_heads(seen.layer, seen.attn, norms, seen.y, seen.pattern, seen.cos_sin)
        except UnsupportedAttentionError as error:
            self.unsupported[seen.layer] = str(error)
            return None

    def first_pass(self) -> None:
        by_name = {s.site.name: s for s in self.statistics}

        def on_norm(site: Site, x: Tensor, y: Tensor) -> None:
            if site.name in by_name:
                rows = len(x) // length if length else 1
                by_name[site.name].add(x, y, heads=max(1, rows))

        def on_attention(seen: AttentionInput) -> None:
            if (heads := self._heads_of(seen)) is not None:
                radius = selectability.observed_radius(heads, seen.site, seen.y)
                if radius is not None:
                    self.observed[seen.layer].append(radius)

        for _, row in self._bar("norms"):
            length = len(row)
            stream(
                self.model, row, self.sites, on_norm=on_norm, layers=self.layers,
                on_attention=on_attention if self.wants_heads else None,
            )  # fmt: skip

    def second_pass(self) -> None:
        if not self.wants_heads:
            return
        radii = {
            layer: torch.cat(found).quantile(selectability.QUERY_RADIUS_QUANTILE, dim=0)
            for layer, found in self.observed.items()
        }
        self.result = Selectability(
            self.constants(), radii, select="selectability" in self.probes, uniform="uniformity" in self.probes,
            heads=self.heads,
        )  # fmt: skip
        bar = self._bar("keys")
        for number, row in bar:

            def on_attention(seen: AttentionInput, number: int = number) -> None:
                assert self.result is not None
                bar.set_postfix(layer=seen.layer)
                self.bidirectional |= not seen.causal
                self.result.add(number, seen, self._heads_of(seen))

            stream(self.model, row, self.sites, on_attention=on_attention, layers=self.layers)

    def constants(self) -> dict[str, float]:
        return {s.site.name: s.constant for s in self.statistics}

    def tables(self, *, every: bool, seed: int) -> dict[str, pd.DataFrame]:
        statistics = [s for s in self.statistics if "decomposition" in self.probes and self._wanted(s.site)]
        empty_heads = pd.DataFrame(columns=list(selectability.HEAD_COLUMNS))
        empty_keys = pd.DataFrame(columns=list(selectability.KEY_COLUMNS))
        return {
            "layernorms": decomposition.table(statistics),
            "heads": self.result.heads_table() if self.result else empty_heads,
            "unembedding": self.unembedding(),
            "keys": self.result.keys_table(self.prompts.strings, every=every, seed=seed) if self.result else empty_keys,
        }

    def causal(self, seed: int, meaningless: str) -> pd.DataFrame:
        """The `causal` table; empty if not asked for, or if there is no norm to edit."""
        if "causal" not in self.probes or not self.statistics:
            return pd.DataFrame(columns=list(causal_table.COLUMNS))
        effects = causal.Causal(
            self.model, [s.site for s in self.statistics], self.constants(), meaningless=meaningless
        )
        measured = [effects.measure(number, row) for number, row in self._bar("without terms")]
        self.skipped += [*effects.notes(), *causal_table.notes_on(measured)]
        if len(self.statistics) < len(self.sites):
            chosen = ", ".join(map(str, self.layers))
            self.skipped.append(f"groups of the causal table hold the norms of layers {chosen} alone")
        return causal_table.table(measured, seed=seed)

    def unembedding(self) -> pd.DataFrame:
        """The `unembedding` table; empty if not asked for, or if the model shows no unembedding behind a final norm."""
        nothing = pd.DataFrame(columns=list(unembedding.COLUMNS))
        if "unembedding" not in self.probes or not self.sites:
            return nothing
        final = [s for s in self.sites if s.reads == "unembed"]
        weights = read_unembedding(self.model)
        if not final or weights is None:
            self.skipped.append("the unembedding was not measured: the model shows no W_U behind a final norm")
            return nothing
        found, undecided = unembedding.measure(*weights, final[0], self.prompts.name_of)
        if undecided:
            self.skipped.append(
                f"{undecided} of {len(weights[0])} tokens of the unembedding are undecided: solving for all would cost "
                "too much, so the hardest were solved for, and the easy ones decided by a query that selects them"
            )
        return found

    def notes(self) -> list[str]:
        notes = []
        if not self.sites:
            notes.append("the model has no normalization: there is no site to decompose, and no norm before attention")
        elif not self.attends:
            notes.append("no norm of this model is read by attention: selectability and uniformity were not measured")
        notes += [f"head space was not measured. {text}" for text in self.unsupported.values()]
        if self.bidirectional:
            notes.append(
                "attention is not causal: every query sees all keys, and first_unselectable_at does not apply (NaN)"
            )
        wrong = [s for s in self.sites if "is not centred as the others" in s.evidence]
        if wrong:
            notes.append(
                f"{wrong[0].name} may have been folded wrongly: {wrong[0].evidence}. Compare with the unfolded model: "
                "ln_probe.hooks.check_equivalent(raw, folded)"
            )
        notes += self.skipped
        beyond = [s for s in self.statistics if s.reconstruction_error > s.reconstruction_bound]
        if beyond:
            worst = max(beyond, key=lambda s: s.reconstruction_error)
            notes.append(
                f"{len(beyond)} of {len(self.statistics)} norms differ from the sum of their terms by more than "
                f"rounding in {str(worst.dtype).removeprefix('torch.')} explains (reconstruction_bound), most "
                f"{worst.site.name}, by {worst.reconstruction_error:.1e}: do they compute in a lower precision?"
            )
        states = {s.state for s in self.sites}
        if any("centred" in s for s in states):
            count = sum("centred" in s.state for s in self.sites)
            notes.append(
                f"{count} of {len(self.sites)} norms read a stream that is already centred, so projection is a no-op "
                "there by construction: its zeros are not findings"
            )
        if any(s.kind in ("rmsnorm", "scaling_only") for s in self.sites):
            notes.append(
                "RMSNorm has no projection: columns about the ones-direction describe its input, not what it does"
            )
        shares = [s for s in self.statistics if s.site.projects and s.everywhere.mean(0) > 0]
        if self.result is not None and shares:
            notes.append("no_projection is not size-matched: its vectors are longer by 1/sqrt(1 - mean_share)")
        return notes


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
        "keys_hardest_per_variant": selectability.HARDEST_PER_VARIANT,
        "keys_sampled": selectability.SAMPLED,
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
