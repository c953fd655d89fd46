"""The two passes over the prompts.

The first, *calibration*, collects statistics of every norm (the constants that replace sigma among them) and of the
queries. In the second, which needs these, the probes observe every prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ln_probe.analyses.constants import (
    CALIBRATION,
    OWN_MEANS,
    QUERY_RADIUS_QUANTILE,
    Calibration,
    Constants,
    grouped,
    halves_of,
    observed_radius,
)
from ln_probe.analyses.probes import decomposition
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import Failure, Probe, ProbeResults, Run
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.decomposition import SiteStatistics
from ln_probe.analyses.probes.edited_runs import PRIMARY_SITES, SINGLE_NORM_PROMPTS
from ln_probe.analyses.progress import tell, tell_inner
from ln_probe.hooks.attention import Form, Heads, Reached, UnsupportedAttentionError, read_heads
from ln_probe.hooks.constants import Constant, fit, mean_sigmas
from ln_probe.hooks.edits import members
from ln_probe.hooks.model import HookedModel, device_of, in_missing_head, missing_head, n_layers
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.norms import attention_inputs, layers_in_words
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.stream import AttentionInput, stream_together
from ln_probe.hooks.text import CALIBRATION as CALIBRATION_PART
from ln_probe.hooks.text import bundled_prompts, default_tokens, tokenizer_of
from ln_probe.prompts import BUNDLED, Prompts, summary
from ln_probe.settings import Settings


class Passes:
    """The passes over the prompts of one model in evaluation mode.

    Args:
        probes, objective: of the measurement.

    Raises:
        ValueError: a layer or head that does not exist.
    """

    def __init__(
        self, model: HookedModel, settings: Settings, *, probes: Sequence[Probe], objective: Objective
    ) -> None:
        settings.check(model)
        self.model, self.settings, self.probes, self.objective = model, settings, probes, objective
        every = attention_inputs(model)
        self.left_out = [n.name for n in every if in_missing_head(model, n.module)]
        # Norms, and identities where attention reads the stream itself.
        self.inputs = [n for n in every if n.name not in self.left_out]
        self.sites = [n for n in self.inputs if not n.is_identity]
        self.layers = sorted(set(range(n_layers(model)) if settings.layers is None else settings.layers))
        self.heads = None if settings.heads is None else sorted(set(settings.heads))
        # d_model, and how many layers and heads the model has, asked for or not
        self.shape = {
            "d_model": int(model.cfg.d_model),
            "layers": n_layers(model),
            "heads": int(getattr(model.cfg, "n_heads", 0)),
        }
        self._forms: dict[int, tuple[int, Form]] = {}  # by layer: length of the longest prompt, form of its scores
        self._reached: dict[int, dict[str, Reached | None]] = {}  # by layer and norm
        self.attends = any(n.attention_layers for n in self.inputs)
        self.wants_heads = self.attends and any(p.needs.attention for p in self.probes)

    def _batches(
        self, stage: str, prompts: Sequence[Tensor], watchers: Callable[[int], object] = lambda _: None
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield the prompts that go through the model together, and report progress.

        Prompts keep their order. Neighbours share a batch if they are of one length and `watchers` are equal for both.
        """
        first = 0
        while first < len(prompts):
            end = first + 1
            while (
                end < len(prompts)
                and watchers(end) == watchers(first)
                and len(prompts[end]) == len(prompts[first])
                and self._fits(end - first + 1, len(prompts[first]))
            ):
                end += 1
            tell(stage, first, float(len(prompts)), "prompts")
            yield [(number, prompts[number]) for number in range(first, end)]
            first = end

    def _fits(self, count: int, length: int) -> bool:
        """Return whether so many prompts of this length go through the model together."""
        if (limit := self.settings.batch_size) is not None:
            return count <= limit
        memory = self._gpu_memory
        if not memory or not all(p.interleaved for p in self.probes):
            return False  # on a CPU one prompt keeps all cores busy
        cfg: Any = self.model.cfg
        token = 8 * max(int(getattr(cfg, "d_vocab", 0)), 40 * int(cfg.d_model))  # bytes that live at a time
        return count * length * (token + 16 * self.shape["heads"] * length) <= memory

    @cached_property
    def _gpu_memory(self) -> int:
        """Bytes that a batch may take; 0 on a CPU."""
        device = device_of(self.model)
        return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0

    def _heads_of(self, seen: AttentionInput, *, again: bool = False) -> Heads:
        """Return the weights and maps of a layer's heads; `again`: the first pass has checked its scores already."""
        length = len(seen.y)
        longest, form = self._forms.get(seen.layer, (0, None))
        decided = form if longest >= length else None  # to one token any form fits: the longest prompt tells
        known = decided if again else None
        heads = read_heads(seen, self.sites, known)
        heads = replace(heads, known=self._reached.setdefault(seen.layer, {}))
        if decided is not None:
            return decided.of(heads)
        self._forms[seen.layer] = length, heads.form
        return heads

    def calibrate(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        *,
        groups: Sequence[Hashable] | None = None,
        calibration: Prompts | None = None,
        default: bool = False,
    ) -> Calibration:
        """Run the first pass over all prompts.

        Args:
            prompts: token ids of each.
            groups: a label for each prompt; prompts with equal labels form one group. None: equal prompts do.
            calibration: other text that the constants come from; None: the constants of a prompt are means over all
                prompts outside its group.
            default: whether these are the model's default prompts.

        Raises:
            ValueError: another number of labels than prompts, or calibration text that cannot be used.
        """
        rows = [row.numpy().astype(np.int64).tobytes() for row in prompts]  # equal ones form a group
        grouping = _groups(rows, groups)
        on_overlap = () if calibration is None else _overlap(rows, calibration)
        # The norm that attention reads can stand in the block before (post-norm): its constant is needed too.
        wanted = self.settings.layers
        statistics = [
            SiteStatistics(s)
            for s in self.sites
            if wanted is None or s.layer in wanted or set(s.attention_layers) & set(self.layers)
        ]
        by_name = {s.site.name: s for s in statistics}
        unsupported: dict[int, str] = {}
        bidirectional = False
        observed: dict[int, list[np.ndarray]] = defaultdict(list)
        unbounded: set[int] = set()
        batch: list[tuple[int, Tensor]] = []
        frozen = [s.site for s in statistics]
        places = {site.name: place for place, site in enumerate(frozen)}
        sums: list[np.ndarray] = []  # of sigma, of each prompt: [2 site 2], sums and counts

        def on_norm(place: int, site: Norm, x: Tensor, y: Tensor) -> None:
            if site.name in by_name:
                number, row = batch[place]
                added = by_name[site.name].add(x, y, heads=max(1, len(x) // len(row)))
                if site.name in places:
                    sums[number][:, places[site.name]] = added

        def on_attention(_: int, seen: AttentionInput) -> None:
            nonlocal bidirectional
            tell_inner(f"layer {seen.layer + 1} of {n_layers(self.model)}")
            bidirectional |= not seen.causal
            if seen.layer in unsupported:
                return
            try:
                heads = self._heads_of(seen)
            except UnsupportedAttentionError as error:
                unsupported[seen.layer] = str(error)
                return
            radius = observed_radius(heads, seen.norm, seen.y)
            if radius is None:
                unbounded.add(seen.layer)
            else:
                observed[seen.layer].append(radius.numpy())

        for batch in self._batches("first pass", prompts):  # the callbacks read it
            sums += [np.zeros((2, len(frozen), 2)) for _ in batch]
            stream_together(
                self.model,
                torch.stack([row for _, row in batch]),
                self.inputs,
                layers=self.layers,
                on_norm=on_norm,
                on_attention=on_attention if self.wants_heads else None,
            )
        stacked = np.stack(sums) if sums else np.zeros((0, 2, len(frozen), 2))
        measured = Constants(tuple(places), grouping, stacked[:, 0], stacked[:, 1])
        constants, calibrated_on, on_constants = self._constants(frozen, measured, calibration)
        notes = self._notes(statistics, unsupported, bidirectional, sorted(unbounded))
        return Calibration(
            norms=decomposition.layernorms_table(statistics, constants),
            constants=constants,
            calibrated_on=calibrated_on,
            optimal=self._optimal(constants, rows, default=default),
            radii={
                layer: np.quantile(np.concatenate(radii), QUERY_RADIUS_QUANTILE, axis=0)
                for layer, radii in observed.items()
            },
            unsupported=unsupported,
            notes=(*notes, *on_overlap, *on_constants, *constants.notes()),
            first=tuple(prompts[:SINGLE_NORM_PROMPTS]),
        )

    def _constants(
        self, sites: Sequence[Norm], measured: Constants, calibration: Prompts | None
    ) -> tuple[Constants, dict[str, Any], tuple[str, ...]]:
        """Return the constants, what provenance says of the prompts that they come from, and notes.

        They come from the user's `calibration`, else from the other prompts (`measured`); where all prompts form one
        group, from the model's calibration windows, else the bundled passages, else the prompts' own means.
        """
        notes: tuple[str, ...] = ()
        if calibration is not None:
            tokens, source = calibration.tokens, f"{CALIBRATION} ({calibration.source})"
        elif measured.group_count > 1 or not measured.group_count or not sites:
            return measured, {}, ()
        else:
            own = bundled_prompts(self.model)
            if own is None and tokenizer_of(self.model) is None:
                note = (
                    "there is one group of prompts and no other text, so the constants are the means of these prompts "
                    "themselves: give more prompts, or calibration="
                )
                return replace(measured, source=OWN_MEANS), {}, (note,)
            tokens = tuple(default_tokens(self.model, CALIBRATION_PART))
            source = f"{CALIBRATION} ({BUNDLED if own is None else own.source})"
            note = "there is one group of prompts only, so the constants are"
            notes = (f"{note} {source}: give more prompts, or calibration=",)
        given = mean_sigmas(self.model, sites, tokens)
        return replace(measured, source=source, given=given), summary(source, tokens), notes

    def _optimal(
        self, constants: Constants, rows: Sequence[bytes], *, default: bool
    ) -> dict[str, tuple[Mapping[str, Constant], Mapping[str, Constant]]]:
        """Return the loss-optimal constants of the primary contrasts' groups of norms, fitted on each half of the prompts.

        A bundled model brings them for its default prompts; otherwise they are fitted on request. Without the probe
        that measures them there are none.
        """
        if not any(p.name == Causal.name for p in self.probes):
            return {}
        ids = [torch.from_numpy(np.frombuffer(row, np.int64).copy()) for row in rows]
        shipped = vars(self.model).get("shipped_constants")
        if default and shipped and shipped["prompts_sha256"] == summary("", ids)["sha256"]:
            return dict(shipped["halves"])
        fits: dict[str, tuple[Mapping[str, Constant], Mapping[str, Constant]]] = {}
        for group in PRIMARY_SITES if self.settings.optimal else ():
            norms = [n for n in members(self.sites, group) if n.scales and n.name in constants.sites]
            if norms and constants.group_count > 1 and not self.objective.obstacle(self.model):
                tell(f"fitting loss-optimal constants ({group})")
                options = {"start": constants.pooled, "objective": self.objective}
                half = halves_of(constants.groups.tolist())
                of_half = [[row for row, number in zip(ids, half, strict=True) if number == i] for i in (0, 1)]
                first, second = (fit(self.model, norms, some, **options) for some in of_half)
                fits[group] = first, second
        return fits

    def measure(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        calibration: Calibration,
        token: Callable[[int, int], str],
        *,
        default: bool = False,
    ) -> dict[str, ProbeResults | Failure]:
        """Run the second pass over all prompts and return each probe's results by its name.

        Args:
            token: the string at (prompt, position).
            default: whether these are the model's default prompts, of which a probe takes no more than `Probe.prompts`.
        """
        run = Run(
            self.model,
            self.sites,
            self.layers,
            self.heads,
            calibration,
            token,
            missing_head(self.model),
            self.objective,
            self.settings.seed,
        )
        watching = [_ProbeObserver(p, run, p.prompts if default else None) for p in self.probes]
        for batch in self._batches("second pass", prompts, lambda n: [w.takes(n) for w in watching]):
            self._watch(batch, [w for w in watching if w.takes(batch[0][0])], calibration)
        return {w.probe.name: w.results() for w in watching}

    def _watch(
        self,
        batch: Sequence[tuple[int, Int[Tensor, " _"]]],
        watching: Sequence[_ProbeObserver],
        calibration: Calibration,
    ) -> None:
        """Run one batch and pass its events to the probes."""
        norms = [w for w in watching if w.probe.needs.norms]
        attention = [w for w in watching if w.probe.needs.attention and self.attends]

        def on_norm(place: int, site: Norm, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
            for w in norms:
                w.call("norm", batch[place][0], site, x, y)

        def on_attention(place: int, seen: AttentionInput) -> None:
            attended = self.attended(batch[place][0], seen, calibration)
            for w in attention:
                tell_inner(f"{w.probe.name}, layer {seen.layer + 1} of {n_layers(self.model)}")
                w.call("attention", batch[place][0], attended)

        if norms or attention:
            stream_together(
                self.model,
                torch.stack([row for _, row in batch]),
                self.inputs,
                layers=self.layers,
                on_norm=on_norm if norms else None,
                on_attention=on_attention if attention else None,
            )
        for number, row in batch:
            for w in watching:
                if w.probe.needs.output:
                    tell_inner(w.probe.name)
                    w.call("prompt", number, row)
                w.call("end", number)

    def attended(self, number: int, seen: AttentionInput, calibration: Calibration) -> AttentionLayer:
        """Return a layer of prompt `number` under every variant of its norm."""

        def read() -> Heads | None:
            return None if seen.layer in calibration.unsupported else self._heads_of(seen, again=True)

        return AttentionLayer(seen, read, calibration, number, self.heads)

    def _notes(
        self,
        statistics: list[SiteStatistics],
        unsupported: Mapping[int, str],
        bidirectional: bool,
        unbounded: Sequence[int],
    ) -> tuple[str, ...]:
        notes = []
        identities = [n.layer for n in self.inputs if n.is_identity]
        if not self.sites:
            notes.append(
                "the model has no normalization: there is no site to decompose, and attention reads the stream itself; "
                "its keys and queries are measured as they are"
            )
        elif not self.attends:
            idle = " and ".join(p.name for p in self.probes if p.needs.attention)
            unmeasured = f": {idle} {'were' if ' and ' in idle else 'was'} not measured" if idle else ""
            notes.append(f"no norm of this model is read by attention{unmeasured}")
        if identities and self.sites:
            notes.append(f"attention reads the residual stream itself, with no norm, in {layers_in_words(identities)}")
        if self.left_out:
            notes.append(
                f"{', '.join(self.left_out)} was not measured: it belongs to the head, which was drawn at random"
            )
        if unbounded:
            notes.append(
                f"nothing bounds the queries of {layers_in_words(unbounded)} (no scaling before them), so there are no "
                "margins and no attainable attention there"
            )
        notes += [f"head space was not measured. {text}" for text in unsupported.values()]
        if bidirectional:
            notes.append("attention is not causal: every query sees all keys")
        if beyond := [s for s in statistics if s.reconstruction_error > s.reconstruction_bound]:
            worst = max(beyond, key=lambda s: s.reconstruction_error)
            notes.append(
                f"{len(beyond)} of {len(statistics)} norms differ from the sum of their terms by more than "
                f"rounding in {str(worst.dtype).removeprefix('torch.')} explains (reconstruction_bound), most "
                f"{worst.site.name}, by {worst.reconstruction_error:.1e}: do they compute in a lower precision?"
            )
        if any(s.kind in ("rmsnorm", "scaling_only") for s in self.sites):
            notes.append(
                "RMSNorm has no projection: columns about the ones-direction describe its input, not what it does"
            )
        return tuple(notes)


class _ProbeObserver:
    """A probe's observer; its first exception ends its part, and no other's."""

    def __init__(self, probe: Probe, run: Run, limit: int | None) -> None:
        self.probe, self.limit = probe, limit
        self.failure: Failure | None = None
        self._observer = self._guard(probe.start, run)

    def takes(self, prompt: int) -> bool:
        """Return whether the probe measures a prompt."""
        return self.limit is None or prompt < self.limit

    def call(self, event: str, *given: object) -> Any:
        """Call a method of the observer, unless it has failed."""
        return None if self.failure is not None else self._guard(getattr(self._observer, event), *given)

    def results(self) -> ProbeResults | Failure:
        results = self.call("finish")
        return results if self.failure is None else self.failure

    def _guard(self, work: Callable[..., Any], *given: object) -> Any:
        try:
            return work(*given)
        except Exception as error:
            self.failure = Failure.of(self.probe.name, error)


def _groups(rows: Sequence[bytes], labels: Sequence[Hashable] | None) -> Int64[np.ndarray, " prompt"]:
    if labels is None:
        return grouped(rows)
    if isinstance(labels, str | Set | Mapping) or not isinstance(labels, Sized):  # a set has no order
        raise TypeError(f"groups must be a list of labels, one for each prompt, got {labels!r}")
    if len(labels) != len(rows):
        raise ValueError(
            f"groups must hold a label for each prompt: got {len(labels)} labels for {len(rows)} prompts (or one for "
            "skipped prompts too; prompts with equal labels form one group)"
        )
    if (odd := next((label for label in labels if not isinstance(label, Hashable)), None)) is not None:
        raise TypeError(f"groups: a label must be a text, a number or a tuple (hashable), got {odd!r}")
    if any(isinstance(label, Tensor) for label in labels):
        raise TypeError("groups: a label is a tensor, which equals no other one: give numbers (tensor.tolist())")
    if any(isinstance(label, float | np.floating | np.datetime64) and label != label for label in labels):
        raise ValueError("groups: a label is nan, which equals no label, itself included: give it a name")
    return grouped(labels)


def _overlap(rows: Sequence[bytes], calibration: Prompts) -> tuple[str, ...]:
    """Return a note on prompts that the calibration text holds too."""
    if max(map(len, calibration.tokens)) < 2:
        raise ValueError(
            f"calibration: its {len(calibration.tokens)} prompts have one token each, and constants are means over "
            "positions: give at least two tokens"
        )
    there = {row.numpy().astype(np.int64).tobytes() for row in calibration.tokens}
    same = sum(row in there for row in rows)
    if same == len(rows) and there == set(rows):
        raise ValueError(
            f"calibration: these are the {len(rows)} prompts that are measured: leave it out (the constants of a "
            "prompt are then means over the others), or give other text"
        )
    if not same:
        return ()
    return (
        f"{same} of {len(rows)} prompts are in the calibration text too: their own sigma is part of their constants",
    )
