"""The probe `head_effects`: how the loss changes when one head alone reads its norm without a term.

Of one head: its queries, keys and values are made of the edited norm's output, so its output z changes; nothing else
does. The intact pass gives every head's z and edited z, and one more pass a head gives the loss: from the heads'
block on, a row of a batch each. Where that costs too much (`edited_passes.EXACT_WORK`), the gradient of the loss at z
estimates it,

    estimate = sum over positions of <d loss / d z, z_edited - z>

(attribution patching: Nanda 2023; Kramár et al. 2024), and the heads with the largest estimates on odd prompts are run
on the even ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeError, ProbeResults, Run
from ln_probe.analyses.probes.causal import over_groups, unchanging
from ln_probe.analyses.probes.edited_passes import (
    ESTIMATED_PROMPTS,
    EditedPasses,
    PlainAttention,
    Silent,
    choosing_prompts,
    is_affordable,
    largest,
)
from ln_probe.analyses.probes.statistics import holm
from ln_probe.analyses.probes.tables import HEAD_EFFECTS
from ln_probe.hooks.model import (
    Hook,
    attentions,
    by_head,
    evaluating,
    head_count,
    hooks_on,
    z_point,
)
from ln_probe.hooks.norm import EDITS, SCALING_FROZEN, VARIANTS, Norm
from ln_probe.hooks.norm_edits import NormEdit, z_of
from ln_probe.hooks.norms import structure_of

Place = tuple[int, int, str]  # layer, head, variant


class HeadEffects(Probe):
    """How the loss changes when single heads read their norm without a term.

    Args:
        variants: what is removed; by default scaling alone.
        every_head: whether each head is run exactly however large the model is.

    Raises:
        ProbeError: an unknown variant.
    """

    def __init__(self, variants: Sequence[str] = (SCALING_FROZEN.name,), every_head: bool = False) -> None:
        names = [variant.name for variant in EDITS]
        if unknown := [name for name in variants if name not in names]:
            raise ProbeError(f"there is no variant {unknown[0]!r}: give some of {', '.join(names)}")
        self.variants, self.every_head = tuple(variants), every_head

    name = "head_effects"
    summary = "how the loss changes when one head reads its norm without a term"
    tables = (HEAD_EFFECTS,)
    needs = Needs(output=True)

    def start(self, run: Run) -> Observer:
        reading = {layer: norm for norm in run.measured_norms for layer in norm.attention_layers}
        norms = {layer: reading[layer] for layer in sorted(set(run.layers) & set(reading))}
        if not norms:
            return Observer()
        if run.obstacle:
            return Silent(f"head_effects: nothing was measured: {run.obstacle}")
        lost = structure_of(run.model).lost_at(list(dict.fromkeys(norms.values())))
        norms = {layer: norm for layer, norm in norms.items() if norm.name not in lost}
        watching = _Watching(run, self, norms, [f"head_effects: {reason}" for reason in lost.values()])
        try:
            watching.check()
        except ValueError as error:  # attention without hook points, or that does not read the norm's output
            return Silent(f"head_effects: nothing was measured: {error}")
        return watching


class _IntactHeads:
    """The heads of one prompt in the intact model: what its intact pass records.

    Attributes:
        z: heads' outputs [pos head d_head], by layer.
        edited: the same with the edited norm, by layer and variant.
        leaves: zeros that are added to the outputs, for the gradient there, by layer.
    """

    def __init__(self, watching: _Watching, prompt: int) -> None:
        self._layers, self._norms, self._counts = watching.layers, watching.norms, watching.counts
        self._constants = watching.run.constants.of(prompt)
        self._variants = watching.variants
        self._read: dict[str, tuple[Tensor, Tensor]] = {}
        self._inside = False
        self.z: dict[int, Tensor] = {}
        self.edited: dict[tuple[int, str], Tensor] = {}
        self.leaves: dict[int, Tensor] = {}

    def hooks(self) -> tuple[list[Hook], list[Hook]]:
        """Return the hooks and pre-hooks of the intact pass."""
        after: list[Hook] = [(norm.module, partial(self._on_norm, norm)) for norm in self._norms.values()]
        after += [(z_point(self._layers[layer]), partial(self._on_z, layer)) for layer in self._norms]
        before: list[Hook] = [(self._layers[layer], partial(self._on_attention, layer)) for layer in self._norms]
        return after, before

    def _on_norm(self, norm: Norm, _m: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        if not self._inside:
            x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
            self._read[norm.name] = x.detach(), y.detach()

    def _on_attention(self, layer: int, attn: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the attention on what the edited norm gives."""
        norm = self._norms[layer]
        x, y = self._read[norm.name]
        for variant in self._variants:
            if not VARIANTS[variant].effect(norm):
                continue
            edit = NormEdit.of(norm, variant, self._constants[norm.name].pair)
            edit.positions.begin(tuple(x.shape[:2]))
            self._inside = True
            try:
                with torch.no_grad():
                    z = z_of(attn, args, kwargs, y, edit.output(x).to(y.dtype))
            finally:
                self._inside = False
            self.edited[layer, variant] = by_head(z, self._counts[layer])[0]

    def _on_z(self, layer: int, _m: nn.Module, _args: Any, _kwargs: Any, z: Tensor) -> Tensor | None:
        if self._inside:
            return None
        self.z[layer] = by_head(z.detach(), self._counts[layer])[0]
        if not torch.is_grad_enabled():
            return None
        self.leaves[layer] = torch.zeros_like(z, requires_grad=True)
        return z + self.leaves[layer]


class _Watching(Observer):
    """Measures each prompt's summed loss with each head edited."""

    def __init__(self, run: Run, probe: HeadEffects, norms: Mapping[int, Norm], notes: Sequence[str]) -> None:
        self.run, self.norms, self.notes, self.variants = run, norms, notes, probe.variants
        self.layers = attentions(run.model.blocks)
        self.counts = {layer: head_count(self.layers[layer], run.model.cfg) for layer in norms}
        self.places: list[Place] = [
            (layer, head, variant)
            for layer, norm in norms.items()
            for head in range(self.counts[layer])
            if run.heads is None or head in run.heads
            for variant in self.variants
            if VARIANTS[variant].effect(norm)
        ]
        self.is_exact = probe.every_head or is_affordable(run.model, len(self.places), run.prompts)
        self.choosing = set() if self.is_exact else choosing_prompts(run.constants.groups)
        self.chosen = list(self.places) if self.is_exact else list[Place]()
        self.plain = PlainAttention.of(run.model, max(run.prompts, key=len))
        self.weights: dict[int, int] = {}
        self.intact: dict[int, float] = {}
        self.losses: dict[Place, dict[int, float]] = defaultdict(dict)
        self.estimates: dict[Place, dict[int, float]] = defaultdict(dict)

    def check(self) -> None:
        """Raise ValueError if the heads of this model cannot be edited one by one: a pass over two tokens."""
        with evaluating(self.run.model):
            EditedPasses(self.run.model, self.run.loss, self.run.prompts[0][:2], *_IntactHeads(self, 0).hooks())

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        if weight := self.run.loss.weight(tokens) if self.places else 0:
            self.weights[prompt] = weight
            self._measure(prompt, tokens, estimated=prompt < ESTIMATED_PROMPTS or not self.is_exact)

    def _measure(self, prompt: int, tokens: Int[Tensor, " pos"], *, estimated: bool) -> None:
        """Run the intact model on a prompt, the chosen heads, and the gradient if wanted."""
        heads = _IntactHeads(self, prompt)
        with evaluating(self.run.model):
            passes = EditedPasses(self.run.model, self.run.loss, tokens, *heads.hooks(), differentiable=estimated)
            self.intact[prompt] = float(passes.by_token.sum())
            if estimated:
                slopes = torch.autograd.grad(passes.loss, list(heads.leaves.values()))
                by_layer = dict(zip(heads.leaves, slopes, strict=True))
                for layer, head, variant in self.places:
                    change = heads.edited[layer, variant][:, head] - heads.z[layer][:, head]
                    slope = by_head(by_layer[layer], self.counts[layer])[0, :, head]
                    self.estimates[layer, head, variant][prompt] = float((slope * change).sum(dtype=torch.float64))
            together: dict[tuple[int, str], list[int]] = {}
            for layer, head, variant in self.chosen:
                together.setdefault((layer, variant), []).append(head)
            with self.plain.replaced() if self.plain else nullcontext():
                for (layer, variant), some in together.items():
                    edited = {head: heads.edited[layer, variant][:, head] for head in some}
                    losses = passes.losses_of_heads(layer, heads.z[layer], edited, partial(self._replaced, layer))
                    for head, loss in zip(some, losses, strict=True):
                        self.losses[layer, head, variant][prompt] = loss

    def _replaced(self, layer: int, z: Float[Tensor, "row pos head d_head"]) -> AbstractContextManager[None]:
        """Run the model with these outputs of a layer's heads."""
        if self.plain is not None:
            return self.plain.with_heads(layer, z)

        def replace(_m: nn.Module, _args: Any, _kwargs: Any, value: Tensor) -> Tensor:
            return z.reshape(value.shape).to(value.dtype)

        return hooks_on([(z_point(self.layers[layer]), replace)])

    def finish(self) -> ProbeResults:
        notes = [*self.notes]
        if not self.is_exact:
            choosing = ({place: [by[p]] for place, by in self.estimates.items() if p in by} for p in self.choosing)
            self.chosen = largest(choosing)
            for prompt in self.weights:
                if prompt not in self.choosing and self.chosen:
                    self._measure(prompt, self.run.prompts[prompt], estimated=False)
            notes.append(
                f"head_effects: {len(self.chosen)} of {len(self.places)} heads were run exactly on the even prompts, "
                "those with the largest estimates on the odd ones; the others are estimated"
            )
        return ProbeResults({HEAD_EFFECTS.name: self._table()}, notes, {"no_op": unchanging(self.norms.values())})

    def _table(self) -> pd.DataFrame:
        """Return the `head_effects` table."""
        rows = []
        for place in self.places if self.weights else ():
            row: dict[str, Any] = dict(zip(("layer", "head", "variant"), place, strict=True))
            if estimates := self.estimates[place]:
                row["estimate"] = sum(estimates.values()) / sum(self.weights[prompt] for prompt in estimates)
            row["n"] = len(estimates)
            if losses := self.losses[place]:
                prompts = np.array(list(losses))
                change = np.array([loss - self.intact[prompt] for prompt, loss in losses.items()])
                weights = np.array([self.weights[prompt] for prompt in losses], float)
                found = over_groups(change, weights, prompts, self.run.constants, self.run.strata, self.run.seed)
                row |= {
                    "delta_loss": change.sum() / weights.sum(),
                    "delta_loss_low": found.low,
                    "delta_loss_high": found.high,
                    "p": found.p,
                    "prompts_worse": int((change > 0).sum()) if np.isfinite(change).all() else math.nan,
                    "n": len(prompts),
                }
            rows.append(row)
        table = pd.DataFrame(rows, columns=HEAD_EFFECTS.names) if rows else HEAD_EFFECTS.empty()
        for same in table.groupby("variant").groups.values():
            ran = table.loc[same, "delta_loss"].notna().to_numpy()
            table.loc[same, "p"] = holm(table.loc[same, "p"].to_numpy(float), ran)
        return table
