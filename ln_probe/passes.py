"""The two passes over the prompts, and what each is for.

The first, *calibration*, takes statistics of every norm (and with them the constants that replace sigma) and of the
queries that occur. The second, which needs them, asks of every layer what its queries can select; it can be made on
any part of the prompts, in any order, and the parts joined afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from ln_probe import recording
from ln_probe.analyses import causal, causal_table, decomposition, selectability, unembedding
from ln_probe.analyses.key_tables import KeyRows
from ln_probe.analyses.selectability import Selectability
from ln_probe.exhibits import Exhibits
from ln_probe.hooks.attention import Heads, UnsupportedAttentionError, read_heads
from ln_probe.hooks.capture import AttentionInput, return_free_memory, stream
from ln_probe.hooks.model import HookedModel, n_layers, read_unembedding
from ln_probe.hooks.sites import Site, find_sites
from ln_probe.loading.pretrained import NO_HEAD
from ln_probe.models import source_of

PROBES = ("decomposition", "selectability", "uniformity", "causal", "unembedding")
KEYS = ("hardest", "all")


@dataclass(frozen=True)
class Settings:
    """What to measure: probes, layers and heads (None: all), rows of the `keys` table, and the seed of samples."""

    probes: tuple[str, ...] = PROBES
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    keys: str = "hardest"
    max_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.probes, str) or not self.probes or any(p not in PROBES for p in self.probes):
            raise ValueError(f"unknown probes {self.probes!r}: give a list of {', '.join(PROBES)}")
        if self.keys not in KEYS:
            raise ValueError(f"keys must be one of {', '.join(KEYS)}, got {self.keys!r}")

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Settings:
        """The settings that `plain` was made from; further entries are ignored."""
        values: dict[str, Any] = {f.name: plain[f.name] for f in fields(cls)}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**values)

    def check(self, model: HookedModel) -> None:
        """Raise ValueError if the model lacks a layer or a head that is asked for."""
        for what, wanted, count in (
            ("layer", self.layers, n_layers(model)),
            ("head", self.heads, int(getattr(model.cfg, "n_heads", 0))),
        ):
            wrong = [i for i in wanted or () if not 0 <= i < count]
            if wrong:
                raise ValueError(f"no {what} {wrong[0]}: the model has {what}s 0 … {count - 1}")
            if wanted is not None and not len(wanted):
                raise ValueError(f"an empty list of {what}s leaves nothing to analyze: None means all")


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the first pass finds out.

    Attributes:
        layernorms: the table of that name, a row per site; empty if the probe was not asked for.
        constants: c of each site, by name.
        radii: rho of each layer whose queries are bounded, by head.
        unsupported: why head space is left out, by layer.
        notes: what a reader has to know about this model, in sentences.
    """

    layernorms: pd.DataFrame
    constants: Mapping[str, float]
    radii: Mapping[int, Float64[np.ndarray, " head"]]
    unsupported: Mapping[int, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """What the second pass finds out about some of the prompts.

    Attributes:
        keys: of every (layer, space, variant).
        effects: sums over each prompt under every edit (`causal.PROMPT_COLUMNS`); None if not asked for.
        notes: what a reader has to know about the edits, in sentences.
    """

    keys: list[KeyRows]
    effects: pd.DataFrame | None = None
    notes: tuple[str, ...] = ()


def effects_table(effects: Sequence[pd.DataFrame], seed: int) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The `causal` table and notes on it, from the pieces that were measured; empty without any."""
    return causal_table.table(effects, seed=seed), tuple(causal_table.notes_on(effects))


class Passes:
    """The passes over the prompts of one model.

    Raises:
        ValueError: a layer or head that the model does not have.
    """

    def __init__(self, model: HookedModel, settings: Settings, *, progress: bool = False) -> None:
        settings.check(model)
        self.model, self.settings, self.progress = model, settings, progress
        self.sites = find_sites(model)
        self.layers = sorted(set(range(n_layers(model)) if settings.layers is None else settings.layers))
        self.heads = None if settings.heads is None else sorted(set(settings.heads))
        self.attends = any("attention" in s.reads.split("+") for s in self.sites)
        self.wants_heads = self.attends and bool({"selectability", "uniformity"} & set(settings.probes))

    def _bar(self, text: str, prompts: Iterable[tuple[int, Tensor]]) -> Any:
        return tqdm(prompts, desc=text, unit="prompt", disable=not self.progress, leave=False)

    def _wanted(self, site: Site) -> bool:
        return self.settings.layers is None or site.layer in self.settings.layers

    def _heads_of(self, seen: AttentionInput) -> Heads:
        norms = {s.reads: s for s in self.sites if s.layer == seen.layer and s.reads in ("query", "key")}
        return read_heads(seen.layer, seen.attn, norms, seen.y, seen.pattern, seen.cos_sin)

    def calibrate(self, prompts: Iterable[tuple[int, Int[Tensor, " _"]]]) -> Calibration:
        """The first pass, over all prompts (number and token ids) in their order."""
        # The norm that attention reads can stand in the block before (post-norm): its constant is needed too.
        statistics = [
            decomposition.SiteStatistics(s)
            for s in self.sites
            if self._wanted(s) or set(s.attention_layers) & set(self.layers)
        ]
        by_name = {s.site.name: s for s in statistics}
        unsupported: dict[int, str] = {}
        bidirectional = False
        observed: dict[int, list[np.ndarray]] = defaultdict(list)
        length = 0

        def on_norm(site: Site, x: Tensor, y: Tensor) -> None:
            if site.name in by_name:
                by_name[site.name].add(x, y, heads=max(1, len(x) // length))

        def on_attention(seen: AttentionInput) -> None:
            nonlocal bidirectional
            bidirectional |= not seen.causal
            if seen.layer in unsupported:
                return
            try:
                heads = self._heads_of(seen)
            except UnsupportedAttentionError as error:
                unsupported[seen.layer] = str(error)
                return
            radius = selectability.observed_radius(heads, seen.site, seen.y)
            if radius is not None:
                observed[seen.layer].append(radius.numpy())

        for _, row in self._bar("norms", prompts):
            length = len(row)
            stream(
                self.model, row, self.sites, on_norm=on_norm, layers=self.layers,
                on_attention=on_attention if self.wants_heads else None,
            )  # fmt: skip
        return_free_memory()
        return Calibration(
            layernorms=decomposition.table(
                [s for s in statistics if "decomposition" in self.settings.probes and self._wanted(s.site)]
            ),
            constants={s.site.name: s.constant for s in statistics},
            radii={
                layer: np.quantile(np.concatenate(found), selectability.QUERY_RADIUS_QUANTILE, axis=0)
                for layer, found in observed.items()
            },
            unsupported=unsupported,
            notes=self._notes(statistics, unsupported, bidirectional),
        )

    def measure(self, prompts: Sequence[tuple[int, Int[Tensor, " _"]]], calibration: Calibration) -> Measured:
        """The second pass, over any of the prompts (number and token ids)."""
        keys = self._keys(prompts, calibration) if self.wants_heads else []
        members = [s for s in self.sites if s.name in calibration.constants]
        if "causal" not in self.settings.probes or not members:
            return Measured(keys)
        notes = source_of(cast(nn.Module, self.model)).notes
        effects = causal.Causal(
            self.model,
            members,
            calibration.constants,
            meaningless=next((n for n in notes if n.startswith(NO_HEAD)), ""),
        )
        found = [effects.measure(number, row) for number, row in self._bar("without terms", prompts)]
        return_free_memory()
        every = pd.concat(found, ignore_index=True) if found else None
        return Measured(keys, every, tuple(effects.notes()))

    def _keys(self, prompts: Iterable[tuple[int, Tensor]], calibration: Calibration) -> list[KeyRows]:
        found = Selectability(
            calibration.constants, calibration.radii, select="selectability" in self.settings.probes,
            uniform="uniformity" in self.settings.probes, heads=self.heads,
        )  # fmt: skip
        bar = self._bar("keys", prompts)
        for number, row in bar:

            def on_attention(seen: AttentionInput, number: int = number) -> None:
                bar.set_postfix(layer=seen.layer)
                supported = seen.layer not in calibration.unsupported
                found.add(number, seen, self._heads_of(seen) if supported else None)

            stream(self.model, row, self.sites, on_attention=on_attention, layers=self.layers)
        return found.rows()

    def record(self, prompts: Sequence[Int[Tensor, " _"]], tokens: Sequence[Sequence[str]], *, count: int) -> Exhibits:
        """What is kept of the first prompts (ids, strings) for pictures, of `count` in all; keys are not marked yet.

        Nothing, if no keys are asked for: the pass would cost as much as the statistics of the norms themselves.
        """
        wanted = self.settings.layers
        if not {"selectability", "uniformity"} & set(self.settings.probes):
            return Exhibits()
        return recording.record(
            self.model, self.sites, prompts, tokens, count=count, attention=self.wants_heads, layers=self.layers,
            heads=range(int(getattr(self.model.cfg, "n_heads", 0))) if self.heads is None else self.heads,
            drawn=[s.name for s in self.sites if wanted is None or s.layer in wanted],
        )  # fmt: skip

    def unembedding(self, name_of: Any) -> tuple[pd.DataFrame, tuple[str, ...]]:
        """The `unembedding` table and notes; empty if not asked for, or if there is no unembedding behind a norm."""
        nothing = pd.DataFrame(columns=list(unembedding.COLUMNS))
        if "unembedding" not in self.settings.probes or not self.sites:
            return nothing, ()
        final = [s for s in self.sites if s.reads == "unembed"]
        weights = read_unembedding(self.model)
        if not final or weights is None:
            return nothing, ("the unembedding was not measured: the model shows no W_U behind a final norm",)
        found, undecided = unembedding.measure(*weights, final[0], name_of)
        if not undecided:
            return found, ()
        note = (
            f"{undecided} of {len(weights[0])} tokens of the unembedding are undecided: solving for all would cost "
            "too much, so the hardest were solved for, and the easy ones decided by a query that selects them"
        )
        return found, (note,)

    def _notes(
        self, statistics: list[decomposition.SiteStatistics], unsupported: Mapping[int, str], bidirectional: bool
    ) -> tuple[str, ...]:
        notes = []
        if not self.sites:
            notes.append("the model has no normalization: there is no site to decompose, and no norm before attention")
        elif not self.attends:
            notes.append("no norm of this model is read by attention: selectability and uniformity were not measured")
        notes += [f"head space was not measured. {text}" for text in unsupported.values()]
        if bidirectional:
            notes.append(
                "attention is not causal: every query sees all keys, and first_unselectable_at does not apply (NaN)"
            )
        if wrong := [s for s in self.sites if "is not centred as the others" in s.evidence]:
            notes.append(
                f"{wrong[0].name} may have been folded wrongly: {wrong[0].evidence}. Compare with the unfolded model: "
                "ln_probe.hooks.check_equivalent(raw, folded)"
            )
        if beyond := [s for s in statistics if s.reconstruction_error > s.reconstruction_bound]:
            worst = max(beyond, key=lambda s: s.reconstruction_error)
            notes.append(
                f"{len(beyond)} of {len(statistics)} norms differ from the sum of their terms by more than "
                f"rounding in {str(worst.dtype).removeprefix('torch.')} explains (reconstruction_bound), most "
                f"{worst.site.name}, by {worst.reconstruction_error:.1e}: do they compute in a lower precision?"
            )
        centred = sum("centred" in s.state for s in self.sites)
        if centred:
            notes.append(
                f"{centred} of {len(self.sites)} norms read a stream that is already centred, so projection is a no-op "
                "there by construction: its zeros are not findings"
            )
        if any(s.kind in ("rmsnorm", "scaling_only") for s in self.sites):
            notes.append(
                "RMSNorm has no projection: columns about the ones-direction describe its input, not what it does"
            )
        if self.wants_heads and any(s.site.projects and s.everywhere.mean(0) > 0 for s in statistics):
            notes.append("no_projection is not size-matched: its vectors are longer by 1/sqrt(1 - mean_share)")
        if "causal" in self.settings.probes and statistics and len(statistics) < len(self.sites):
            chosen = ", ".join(map(str, self.layers))
            notes.append(f"groups of the causal table hold the norms of layers {chosen} alone")
        return tuple(notes)
