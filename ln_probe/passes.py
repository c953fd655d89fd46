"""The two passes over the prompts.

The first, *calibration*, collects statistics of every norm (the constants that replace sigma among them) and of the
queries. In the second, which needs these, the probes observe every prompt. The second pass can be run on any part of
the prompts, in any order; the pieces are joined afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ln_probe.analyses.constants import (
    CALIBRATION,
    DEFAULT_SAMPLE,
    OWN_MEANS,
    QUERY_RADIUS_QUANTILE,
    SAMPLE_ABOVE,
    Calibration,
    Constants,
    EmpiricalQueries,
    KeySample,
    grouped,
    observed_radius,
    plain_queries,
)
from ln_probe.analyses.probes import decomposition
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import Failure, Piece, Probe, Shape, View
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.decomposition import SiteStatistics
from ln_probe.analyses.probes.edited_runs import PRIMARY_SITES, SINGLE_NORM_PROMPTS
from ln_probe.analyses.probes.registry import chosen
from ln_probe.analyses.progress import tell, tell_inner
from ln_probe.hooks.attention import Form, Heads, Reached, UnsupportedAttentionError, read_heads
from ln_probe.hooks.capture import AttentionInput, looks_ahead, return_free_memory, stream_together
from ln_probe.hooks.default_tokens import CALIBRATION as CALIBRATION_PART
from ln_probe.hooks.default_tokens import bundled_prompts, bundled_texts, encode, tokenizer_of
from ln_probe.hooks.interventions import members
from ln_probe.hooks.model import (
    HookedModel,
    context_length,
    device_of,
    in_missing_head,
    missing_head,
    n_layers,
    stretches_positions,
)
from ln_probe.hooks.norm import Site
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.optimal_constants import Halves, Shipped, fit_halves
from ln_probe.hooks.products import fast_products
from ln_probe.hooks.scales import mean_sigmas
from ln_probe.hooks.sites import facts_of, layers_in_words
from ln_probe.observers import BackgroundWorker, GuardedObserver, is_foreign
from ln_probe.prompts import Prompts, name_tokens, namer, naming_notes, summary
from ln_probe.seal import Seal
from ln_probe.settings import Settings

# Prompts go through the model together if at least so much of what goes through is no padding.
FILLED = 0.75

# Forward passes over all prompts that fitting loss-optimal constants takes (two groups of norms, two halves, two
# starts, about 100 evaluations of three passes each for lm-layernorm), and multiplications per second of one core.
_FITTING_PASSES, _MULTIPLICATIONS = 1200.0, 2.5e10

Pieces = dict[str, Piece | Failure]  # by name of the probe


class Passes:
    """The passes over the prompts of one model in evaluation mode.

    Args:
        probes, objective: those that were asked for; None: as the settings name them.
        seal: checked between passes and around probes of other packages.

    Raises:
        ValueError: a layer, head or probe that does not exist.
    """

    def __init__(
        self,
        model: HookedModel,
        settings: Settings,
        *,
        probes: Sequence[Probe] | None = None,
        objective: Objective | None = None,
        seal: Seal | None = None,
    ) -> None:
        settings.check(model)
        self.seal = seal
        self.objective = Objective.of(settings.loss) if objective is None else objective
        if settings.vocab is not None:
            name_tokens(model, settings.vocab)
        self.model, self.settings = model, settings
        self.probes = chosen(settings.probes if probes is None else probes)
        found = facts_of(model)
        self.left_out = [s.name for s in (*found.sites, *found.unknown) if in_missing_head(model, s.module)]
        self.found = replace(
            found,
            sites=tuple(s for s in found.sites if s.name not in self.left_out),
            unknown=tuple(s for s in found.unknown if s.name not in self.left_out),
        )
        self.sites = list(self.found.sites)
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
        self.attends = any(s.attention_layers for s in self.found.read)
        self.wants_heads = self.attends and any(p.needs.attention for p in self.probes)

    def _batches(
        self, stage: str, prompts: Iterable[tuple[int, Tensor]], kind: Callable[[int], object] = lambda _: None
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield the prompts that go through the model together, report progress, and check the seal after each batch.

        Prompts keep their order. Neighbours share a batch if they are nearly of a length and `kind` is equal for both.
        """
        total = float(len(prompts)) if isinstance(prompts, Sized) else math.nan

        def divided() -> Iterator[list[tuple[int, Tensor]]]:
            batch: list[tuple[int, Tensor]] = []
            for number, row in prompts:
                fits = batch and kind(batch[0][0]) == kind(number) and self._fits([len(r) for _, r in batch], len(row))
                if batch and not fits:
                    yield batch
                    batch = []
                batch.append((number, row))
            if batch:
                yield batch

        done = 0
        for batch in divided():
            tell(stage, done, total, "prompts")
            yield batch
            if self.seal is not None:
                self.seal.rest()
            done += len(batch)

    def _fits(self, lengths: Sequence[int], length: int) -> bool:
        """Whether a prompt of this length may join a batch of prompts of these lengths."""
        limit = self.settings.batch_size
        batching = limit is not None or all(p.interleaved for p in self.probes if p.needs.prompts)
        if not batching or (limit is None and not self._gpu_memory) or len(lengths) + 1 > (limit or math.inf):
            return False  # on a CPU one prompt keeps all cores busy
        lengths = [*lengths, length]
        padded = max(lengths) * len(lengths)
        cfg: Any = self.model.cfg
        token = 8 * max(int(getattr(cfg, "d_vocab", 0)), 40 * int(cfg.d_model))  # bytes that live at a time
        if limit is None and padded * (token + 16 * self.shape["heads"] * max(lengths)) > self._gpu_memory:
            return False
        return min(lengths) == max(lengths) or (sum(lengths) >= FILLED * padded and self._takes_padding)

    @cached_property
    def _takes_padding(self) -> bool:
        """Whether padding after its end leaves the results of a prompt unchanged."""
        return not (stretches_positions(self.model) or looks_ahead(self.model, self.found.read))

    @cached_property
    def _gpu_memory(self) -> int:
        """Bytes that a batch may take, and bytes that may wait for the CPU; 0 on a CPU."""
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
        prompts: Iterable[tuple[int, Int[Tensor, " _"]]],
        *,
        groups: Sequence[Hashable] | None = None,
        calibration: Prompts | None = None,
        default: bool = False,
    ) -> Calibration:
        """Run the first pass over all prompts.

        Args:
            prompts: number (from 0) and token ids of each, in order.
            groups: a label for each prompt; prompts with equal labels form one group. None: equal prompts do.
            calibration: other text that the constants come from; None: the constants of a prompt are means over all
                prompts outside its group.
            default: whether these are the model's default prompts.

        Raises:
            ValueError: another number of labels than prompts, or calibration text that cannot be used.
        """
        prompts = list(prompts)
        rows = [row.numpy().astype(np.int64).tobytes() for _, row in prompts]  # equal ones form a group
        grouping = _groups(rows, groups)
        on_overlap = () if calibration is None else _overlap(rows, calibration)
        # The norm that attention reads can stand in the block before (post-norm): its constant is needed too.
        wanted = self.settings.layers
        statistics = [
            SiteStatistics(s)
            for s in (*self.sites, *(s for s in self.found.unknown if not s.bare))
            if wanted is None or s.layer in wanted or set(s.attention_layers) & set(self.layers)
        ]
        by_name = {s.site.name: s for s in statistics}
        unsupported: dict[int, str] = {}
        bidirectional = False
        observed: dict[int, list[np.ndarray]] = defaultdict(list)
        occurred: dict[int, EmpiricalQueries] = defaultdict(EmpiricalQueries)
        batch: list[tuple[int, Tensor]] = []
        lengths: list[float] = []
        frozen = [s.site for s in statistics if not s.site.stands_in]
        places = {site.name: place for place, site in enumerate(frozen)}
        sums: list[np.ndarray] = []  # of sigma, of each prompt: [2 site 2], sums and counts

        def on_norm(place: int, site: Site, x: Tensor, y: Tensor) -> None:
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
            queries = plain_queries(heads, seen.y)
            occurred[seen.layer].add(queries.numpy())
            radius = observed_radius(heads, seen.site, queries)
            if radius is not None:
                observed[seen.layer].append(radius.numpy())

        with fast_products(self.model):
            for batch in self._batches("first pass", prompts):  # the callbacks read it
                lengths += [float(len(row)) for _, row in batch]
                sums += [np.zeros((2, len(frozen), 2)) for _ in batch]
                stream_together(
                    self.model,
                    [row for _, row in batch],
                    self.found.read,
                    layers=self.layers,
                    on_norm=on_norm,
                    on_attention=on_attention if self.wants_heads else None,
                )
        stacked = np.stack(sums) if sums else np.zeros((0, 2, len(frozen), 2))
        measured = Constants(tuple(places), grouping, stacked[:, 0], stacked[:, 1])
        constants, calibrated_on, on_constants = self._constants(frozen, measured, calibration)
        optimal = self._optimal(constants, rows, default=default)
        if not optimal:
            passes = _FITTING_PASSES * sum(lengths) * sum(p.numel() for _, p in self.model.named_parameters())
            calibrated_on = {**calibrated_on, "optimal_minutes": round(passes / _MULTIPLICATIONS / 60, 1)}
        return_free_memory()
        sample = self._sample(lengths)
        notes = self._notes(statistics, unsupported, bidirectional, sorted(set(occurred) - set(observed)))
        notes = (*notes, *on_overlap, *on_constants, *constants.notes())
        return Calibration(
            norms=decomposition.layernorms_table(statistics, constants),
            constants=constants,
            calibrated_on=calibrated_on,
            optimal=optimal,
            radii={
                layer: np.quantile(np.concatenate(found), QUERY_RADIUS_QUANTILE, axis=0)
                for layer, found in observed.items()
            },
            unsupported=unsupported,
            notes=notes if sample is None else (*notes, sample.note),
            empirical={layer: found.ellipsoid() for layer, found in occurred.items()},
            sample=sample,
            first=tuple(torch.tensor(np.frombuffer(row, np.int64)) for row in rows[:SINGLE_NORM_PROMPTS]),
        )

    def _constants(
        self, sites: Sequence[Site], measured: Constants, calibration: Prompts | None
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
            if (own := bundled_prompts(self.model)) is not None:
                tokens, source = own.calibration, f"{CALIBRATION} ({own.source})"
            elif tokenizer_of(self.model) is not None:
                tokens = tuple(encode(self.model, text) for text in bundled_texts(CALIBRATION_PART))
                source = f"{CALIBRATION} (bundled)"
            else:
                note = (
                    "there is one group of prompts and no other text, so the constants are the means of these prompts "
                    "themselves: give more prompts, or calibration="
                )
                return replace(measured, source=OWN_MEANS), {}, (note,)
            tokens = tuple(row[: context_length(self.model)] for row in tokens)
            note = "there is one group of prompts only, so the constants are"
            notes = (f"{note} {source}: give more prompts, or calibration=",)
        given = mean_sigmas(self.model, sites, tokens)
        return replace(measured, source=source, given=given), summary(source, tokens), notes

    def _optimal(self, constants: Constants, rows: Sequence[bytes], *, default: bool) -> dict[str, Halves]:
        """Return the loss-optimal constants of the primary contrasts' groups of norms.

        A bundled model brings them for its default prompts; otherwise they are fitted on request. Without the probe
        that measures them there are none.
        """
        if not any(p.name == Causal.name for p in self.probes):
            return {}
        ids = [torch.from_numpy(np.frombuffer(row, np.int64).copy()) for row in rows]
        shipped = vars(self.model).get("shipped_constants")
        if default and isinstance(shipped, Shipped) and shipped.prompts_sha256 == summary("", ids)["sha256"]:
            return dict(shipped.halves)
        found: dict[str, Halves] = {}
        for group in PRIMARY_SITES if self.settings.optimal else ():
            sites = [s for s in members(self.sites, group) if s.scales and s.name in constants.sites]
            if sites and constants.group_count > 1 and not self.objective.obstacle(self.model):
                tell(f"fitting loss-optimal constants ({group})")
                found[group] = fit_halves(
                    self.model,
                    sites,
                    ids,
                    constants.groups.tolist(),
                    start=constants.pooled,
                    objective=self.objective,
                )
        return found

    def _sample(self, lengths: Sequence[float]) -> KeySample | None:
        """Return the sample of keys to measure; None: all, on request or because that is fast enough."""
        wanted = self.settings.keys_sample
        probe = next((p for p in self.probes if p.samples_keys), None)
        if wanted == 0 or probe is None or not self.wants_heads or not lengths:
            return None
        heads = self.shape["heads"] if self.heads is None else len(self.heads)
        seconds = probe.cost(Shape(len(self.layers), heads, tuple(lengths))).seconds
        longest = int(max(lengths))
        count = DEFAULT_SAMPLE if wanted is None else wanted
        if count >= longest or (wanted is None and seconds <= SAMPLE_ABOVE):
            return None
        return KeySample(count, longest, self.settings.seed, seconds)

    def measure(
        self, prompts: Sequence[tuple[int, Int[Tensor, " _"]]], calibration: Calibration, *, default: bool = False
    ) -> Pieces:
        """Run the second pass over any of the prompts (number and token ids) and return each probe's piece.

        `default`: these are the model's default prompts, of which a probe takes no more than `Probe.prompts`.
        """
        asked = [p for p in self.probes if p.needs.prompts]
        if not asked:
            return {}
        view = self._view(calibration)
        alone = sum(map(is_foreign, asked)) < 2
        with fast_products(self.model), BackgroundWorker(self._gpu_memory) as beside:
            watching = [GuardedObserver(p, view, p.prompts if default else None, self.seal, alone=alone) for p in asked]
            for batch in self._batches("second pass", prompts, lambda n: [w.takes(n) for w in watching]):
                self._watch(batch, [w for w in watching if w.takes(batch[0][0])], calibration, beside)
        return_free_memory()
        return {w.probe.name: w.piece() for w in watching}

    def _watch(
        self,
        batch: Sequence[tuple[int, Int[Tensor, " _"]]],
        watching: Sequence[GuardedObserver],
        calibration: Calibration,
        beside: BackgroundWorker,
    ) -> None:
        """Run one batch and pass its events to the probes.

        Attention is evaluated on a separate thread where there is a GPU. A probe that runs the model itself has to
        wait for that thread, so it comes last.
        """
        norms = [w for w in watching if w.probe.needs.norms]
        attention = [w for w in watching if w.probe.needs.attention and self.attends]
        large = any(w.probe.needs.variants for w in attention)

        def on_norm(place: int, site: Site, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
            number = batch[place][0]
            for w in norms if not site.stands_in else ():
                if w in attention and beside.room:
                    beside.do(partial(w.call, "norm", number, site, x.clone(), y.clone()), x.nbytes + y.nbytes)
                else:
                    w.call("norm", number, site, x, y)

        def on_attention(place: int, seen: AttentionInput) -> None:
            if beside.room:  # later blocks may write where these are now
                seen = replace(seen, x=seen.x.clone(), y=seen.y.clone(), pattern=seen.pattern.clone())
            beside.do(partial(look, batch[place][0], seen), seen.x.nbytes + seen.y.nbytes + seen.pattern.nbytes)

        def look(number: int, seen: AttentionInput) -> None:
            attended = self.attended(number, seen, calibration)
            if large:
                return_free_memory()
            for w in attention:
                tell_inner(f"{w.probe.name}, layer {seen.layer + 1} of {n_layers(self.model)}")
                w.call("attention", number, attended)
            if large:
                return_free_memory()

        if norms or attention:
            stream_together(
                self.model,
                [row for _, row in batch],
                self.found.read,
                layers=self.layers,
                on_norm=on_norm if norms else None,
                on_attention=on_attention if attention else None,
            )
        for number, row in batch:
            for w in sorted(watching, key=lambda w: w in attention):
                if w.probe.needs.output:
                    if w in attention:
                        beside.finish()
                    tell_inner(w.probe.name)
                    w.call("prompt", number, row)
                if w in attention:
                    beside.do(partial(w.call, "end", number))
                else:
                    w.call("end", number)

    def attended(self, number: int, seen: AttentionInput, calibration: Calibration) -> AttentionLayer:
        """Return a layer of prompt `number` under every variant of its norm."""

        def read() -> Heads | None:
            return None if seen.layer in calibration.unsupported else self._heads_of(seen, again=True)

        return AttentionLayer(seen, read, calibration, number, self.heads)

    def weigh(self, probe: Probe) -> Piece | Failure:
        """Return the piece of a probe that needs no prompts."""
        tell(probe.name)
        piece = GuardedObserver(probe, self._view(None), None, self.seal).piece()
        return_free_memory()
        return piece

    def _view(self, calibration: Calibration | None) -> View:
        of_model = namer(self.model), missing_head(self.model)
        return View(self.model, self.sites, self.layers, self.heads, calibration, *of_model, self.objective)

    def _notes(
        self,
        statistics: list[SiteStatistics],
        unsupported: Mapping[int, str],
        bidirectional: bool,
        unbounded: Sequence[int],
    ) -> tuple[str, ...]:
        notes = [] if self.settings.vocab is None else naming_notes(self.model)
        if not self.sites and not self.found.unknown:
            notes.append(
                "the model has no normalization: there is no site to decompose, and attention reads the stream itself; "
                "its keys and queries are measured as they are"
            )
        elif not self.attends:
            idle = " and ".join(p.name for p in self.probes if p.needs.attention)
            unmeasured = f": {idle} {'were' if ' and ' in idle else 'was'} not measured" if idle else ""
            notes.append(f"no norm of this model is read by attention{unmeasured}")
        notes += self.found.notes
        if self.left_out:
            notes.append(
                f"{', '.join(self.left_out)} was not measured: it belongs to the head, which was drawn at random"
            )
        if unbounded:
            notes.append(
                f"nothing bounds the queries of {layers_in_words(unbounded)} (no scaling before them): margins and "
                "attainable attention there are over the empirical set, the ellipsoid of mean and covariance of the "
                "queries that occurred, holding 95 % of them (`queries` in the heads table)"
            )
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
        return tuple(notes)


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
