"""The probe `head_effects`: how the loss changes when one head alone reads its norm without a term.

Of one head: its queries, keys and values are made of the edited norm's output, so its output z changes; nothing else
does. One pass gives every head's z and edited z and the gradient of the loss at z:

    estimate = sum over positions of <d loss / d z, z_edited - z>

(attribution patching: Nanda 2023; Kramár et al. 2024), and one more pass for each head and term gives the loss itself.
Those passes run together, a row of a batch each, from the block of the head on: blocks before it return what they
returned in the first pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int, Int64
from torch import Tensor, nn

from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.leading import (
    EXACT_WORK,
    agreement,
    every_one_is_run,
    other_prompts,
    with_largest,
)
from ln_probe.analyses.probes.shared_passes import TOKENS_AT_ONCE, mapped, passed_over
from ln_probe.analyses.probes.statistics import by_group, holm, interval, sign_test
from ln_probe.analyses.probes.tables import HEAD_EFFECTS
from ln_probe.hooks.constants import Constant
from ln_probe.hooks.edits import no_op
from ln_probe.hooks.model import (
    Hook,
    HookedModel,
    attention_of,
    blocks,
    by_head,
    device_of,
    evaluating,
    head_count,
    hooks_on,
    missing_head,
    run,
    vocabulary_size,
    z_point,
)
from ln_probe.hooks.norm import EDITS, Norm
from ln_probe.hooks.norm_edits import (
    InterventionError,
    NormEdit,
    Readers,
    lost_edits,
    z_of,
)
from ln_probe.hooks.task import Objective

COLUMNS = ("prompt", "layer", "head", "variant", "nll", "estimate", "intact", "predicted", "no_op")

# Heads of a large model that are run exactly (`leading`).
LEADING = 8
# Calibration prompts that choose the leading heads: not those that are measured, so the choice does not bias effects.
CHOOSING = 2
_LOGITS = 1 << 25  # numbers of logits held at once: 128 MB in float32


@dataclass
class _First:
    """One prompt in the unedited model."""

    outputs: list[Any] = field(default_factory=list)
    z: dict[int, Tensor] = field(default_factory=dict)
    edited: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    gradient: dict[int, Tensor] = field(default_factory=dict)
    nll: float = math.nan


class HeadRuns:
    """Effects of single heads in one model: `measure` a prompt at a time.

    Args:
        model: any hooked model.
        sites: its norms.
        constants: what replaces sigma, by site.
        constants_of: the same for a prompt, by its number; None: `constants`, with which leading heads are chosen too.
        layers, heads: that are measured (heads None: all).
        exact: (layer, head) that are run exactly; None: as EXACT_WORK says. Empty: estimates alone.
        objective: the loss.
        meaningless: why nothing that is computed from logits means anything; empty if it does.

    Raises:
        ValueError: `exact` names a head that is not there.
    """

    def __init__(
        self,
        model: HookedModel,
        sites: Sequence[Norm],
        constants: Mapping[str, Constant],
        *,
        layers: Sequence[int],
        constants_of: Callable[[int], Mapping[str, Constant]] | None = None,
        heads: Sequence[int] | None = None,
        exact: Collection[tuple[int, int]] | None = None,
        objective: Objective | None = None,
        meaningless: str = "",
    ) -> None:
        self.model = model
        self.objective = Objective() if objective is None else objective
        self.constants = constants  # of the prompt that is measured
        self.constants_of: Callable[[int], Mapping[str, Constant]] = lambda _prompt: constants
        reading = {layer: s for s in sites for layer in s.attention_layers if s.name in constants}
        self.sites = {layer: reading[layer] for layer in sorted(set(layers) & set(reading))}
        self.heads = {
            layer: [h for h in range(head_count(model, layer)) if heads is None or h in heads] for layer in self.sites
        }
        self.nothing = {v.name: {s.name: why for s in self.sites.values() if (why := no_op(s, v.name))} for v in EDITS}
        self.every = [(layer, head) for layer, some in self.heads.items() for head in some]
        self.lost: dict[str, str] = {}
        self.silent = meaningless or (self.objective.obstacle(model) if self.sites else "")
        self.exact: frozenset[tuple[int, int]] = frozenset()
        if self.sites and not self.silent:
            by_norm: dict[str, dict[int, tuple[int, ...] | None]] = {}
            for layer, site in self.sites.items():
                by_norm.setdefault(site.name, {})[layer] = tuple(self.heads[layer])
            try:
                Readers("qkv", by_norm).check(model)
            except InterventionError as error:  # this attention has no hook points of queries, keys and values
                self.silent = str(error)
            else:
                self.lost = lost_edits(model, list(dict.fromkeys(self.sites.values())))
                self.exact = frozenset(self._chosen() if exact is None else exact)
        if unknown := sorted(self.exact - set(self.every)):
            raise ValueError(f"exact: {unknown[0]} is no (layer, head) that is measured")
        if constants_of is not None:
            self.constants_of = constants_of

    def _chosen(self) -> list[tuple[int, int]]:
        if every_one_is_run(self.model, len(self.every)):
            return self.every

        def estimates(tokens: Int[Tensor, " pos"]) -> dict[tuple[tuple[int, int], str], tuple[float]]:
            rows = self.measure(0, tokens).to_dict("records")
            return {((int(r["layer"]), int(r["head"])), str(r["variant"])): (float(r["estimate"]),) for r in rows}

        return with_largest(map(estimates, other_prompts(self.model, CHOOSING)), LEADING)

    def notes(self) -> list[str]:
        """What a reader has to know about this model."""
        if self.silent:
            return [f"head_effects: nothing was measured: {self.silent}"]
        said = [f"head_effects: {reason}" for reason in self.lost.values()]
        if 0 < len(self.exact) < len(self.every):
            said.append(
                f"head_effects: {len(self.exact)} of {len(self.every)} heads were run exactly, those with the largest "
                f"estimates on {CHOOSING} calibration prompts; the others are estimated"
            )
        return said

    def measure(self, prompt: int, tokens: Int[Tensor, " pos"]) -> pd.DataFrame:
        """Return sums over one prompt, a row per (layer, head, variant); columns COLUMNS.

        `nll` and `intact`: of the edited and the unedited model; `estimate`: of their difference.
        """
        self.constants = self.constants_of(prompt)
        if self.silent or len(tokens) < 2 or not self.sites:
            return pd.DataFrame(columns=list(COLUMNS))
        with evaluating(self.model):
            first = self._first(tokens)
            exact = self._exact(tokens, first)
        rows: list[tuple[Any, ...]] = []
        for layer, site in self.sites.items():
            for variant in self.nothing:
                why = self.nothing[variant].get(site.name, "")
                change = None if why else first.edited[layer, variant] - first.z[layer]
                for head in self.heads[layer]:
                    estimate, nll = 0.0, first.nll
                    if change is not None:
                        estimate = float((first.gradient[layer][:, head] * change[:, head]).sum(dtype=torch.float64))
                        nll = exact.get((layer, head, variant), math.nan)
                    elif (layer, head) not in self.exact:
                        nll = math.nan
                    if site.name in self.lost:
                        estimate = nll = math.nan
                    weight = self.objective.weight(tokens)
                    rows.append((prompt, layer, head, variant, nll, estimate, first.nll, weight, why))
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def _first(self, tokens: Int[Tensor, " pos"]) -> _First:
        found = _First()
        read: dict[str, list[tuple[Tensor, Tensor]]] = {}
        inside = False
        shifts: dict[int, Tensor] = {}

        def norm(site: Norm, _m: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
            if not inside:
                x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
                read.setdefault(site.name, []).append((x.detach(), y.detach()))

        def attention(layer: int, site: Norm, _m: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal inside
            for variant in self.nothing:
                if self.nothing[variant].get(site.name):
                    continue
                inside = True
                try:
                    with torch.no_grad():
                        x, y = read[site.name][-1]
                        edited = self._edited(site, variant, x, y)
                        z = z_of(self.model, layer, args, kwargs, y, edited)
                finally:
                    inside = False
                if z is None:  # (what `lost_edits` has found out before)
                    raise ValueError(f"{site.name}: the attention of block {layer} does not read this norm's output")
                found.edited[layer, variant] = by_head(z, head_count(self.model, layer))[0]

        def handed_on(layer: int, _m: nn.Module, _args: Any, _kwargs: Any, z: Tensor) -> Tensor | None:
            if inside:
                return None
            shifts[layer] = torch.zeros_like(z, requires_grad=True)
            found.z[layer] = by_head(z.detach(), head_count(self.model, layer))[0]
            return z + shifts[layer]

        def done(*seen: Any) -> None:
            found.outputs.append(mapped(Tensor.detach, seen[-1]))

        after: list[Hook] = [(site.module, partial(norm, site)) for site in self.sites.values()]
        after += [(z_point(self.model, layer), partial(handed_on, layer)) for layer in self.sites]
        after += [(block, done) for block in blocks(self.model)]
        before = [(attention_of(self.model, i), partial(attention, i, site)) for i, site in self.sites.items()]
        with hooks_on(after, before):
            with torch.enable_grad():
                row = tokens[None].to(device_of(self.model))
                loss = self.objective.sums(self.model(row, return_type="logits"), row).sum()
            gradients = torch.autograd.grad(loss, list(shifts.values()))
        found.nll = float(loss.detach())
        for layer, gradient in zip(shifts, gradients, strict=True):
            found.gradient[layer] = by_head(gradient, head_count(self.model, layer))[0]
        if len(found.outputs) != len(blocks(self.model)):  # blocks that run twice, or not at all, cannot be passed over
            found.outputs = []
        return found

    def _edited(self, site: Norm, variant: str, x: Tensor, y: Tensor) -> Tensor:
        """Return the norm's output under a variant, from its input and output in one prompt."""
        edit = NormEdit.of(site, variant, self.constants[site.name].pair)
        edit.positions.direct, edit.positions.shape = True, (int(x.shape[0]), int(x.shape[1]))
        return edit.output(x, y)

    def _exact(self, tokens: Int[Tensor, " pos"], first: _First) -> dict[tuple[int, int, str], float]:
        found: dict[tuple[int, int, str], float] = {}
        at_once = max(1, min(_LOGITS // vocabulary_size(self.model), TOKENS_AT_ONCE) // len(tokens))
        for layer in self.sites:
            variants = [v.name for v in EDITS if (layer, v.name) in first.edited]
            wanted = [(h, v) for h in self.heads[layer] if (layer, h) in self.exact for v in variants]
            for at in range(0, len(wanted), at_once):
                some = wanted[at : at + at_once]
                for (head, variant), nll in zip(some, self._losses(tokens, first, layer, some), strict=True):
                    found[layer, head, variant] = nll
        return found

    def _losses(
        self, tokens: Int[Tensor, " pos"], first: _First, layer: int, rows: Sequence[tuple[int, str]]
    ) -> list[float]:
        """The summed loss of the prompt with one head edited, for each of (head, variant)."""

        def replaced(_m: nn.Module, _args: Any, _kwargs: Any, z: Tensor) -> Tensor:
            out = z.clone(memory_format=torch.contiguous_format)
            heads = by_head(out, head_count(self.model, layer))
            for row, (head, variant) in enumerate(rows):
                heads[row, :, head] = first.edited[layer, variant][:, head]
            return out

        start = layer if first.outputs else 0
        with (
            passed_over(blocks(self.model)[:start], first.outputs, len(rows)),
            hooks_on([(z_point(self.model, layer), replaced)]),
        ):
            batch = tokens.expand(len(rows), -1).to(device_of(self.model))
            output = run(self.model, batch, return_type="logits")
        return [float(x) for x in self.objective.sums(output, batch)]


# ------------------------------------------------------------------------------------------------------------ the probe

# Of the default ones, for a head costs a pass for each of three terms: a sign test (p = 2^-11 if all twelve agree)
# survives Holm's correction over the 72 heads that are run at most, under one term.
PROMPTS = 12


class HeadEffects(Probe):
    name = "head_effects"
    summary = "how the loss changes when one head reads its norm without a term"
    tables = (HEAD_EFFECTS,)
    needs = Needs(output=True)
    interleaved = True
    prompts = PROMPTS
    thresholds = {  # noqa: RUF012 - constants
        "head_effects_exact_work": EXACT_WORK,
        "head_effects_leading": LEADING,
        "head_effects_choosing_prompts": CHOOSING,
    }

    def start(self, run: Run) -> Observer:
        constants = run.constants
        runs = HeadRuns(
            run.model,
            run.norms,
            constants.pooled,
            constants_of=constants.of,
            layers=run.layers,
            heads=run.heads,
            objective=run.loss,
            meaningless=missing_head(run.model),
        )
        return _Watching(runs, constants.groups, run.seed)


class _Watching(Observer):
    def __init__(self, runs: HeadRuns, groups: Int64[np.ndarray, " prompt"], seed: int) -> None:
        self.runs, self.groups, self.seed = runs, groups, seed
        self.sums: list[pd.DataFrame] = []  # of each prompt

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        if len(sums := self.runs.measure(prompt, tokens)):
            self.sums.append(sums)

    def finish(self) -> ProbeResults:
        effects = table(self.sums, self.groups, seed=self.seed)
        notes = [f"head_effects: first-order estimates and exact effects of {t}" for t in agreement(effects, "heads")]
        return ProbeResults({HEAD_EFFECTS.name: effects}, [*self.runs.notes(), *notes])


def table(
    measured: Sequence[pd.DataFrame], groups: Int64[np.ndarray, " prompt"] | None = None, *, seed: int = 0
) -> pd.DataFrame:
    """Return the `head_effects` table from what `HeadRuns.measure` gave for each prompt.

    `groups`: of prompts by their number, each its own where it is None.
    """
    if not measured:
        return HEAD_EFFECTS.empty()
    sums = pd.concat(measured, ignore_index=True).sort_values("prompt", kind="stable")
    rows = []
    for (layer, head, variant), mine in sums[sums["no_op"] == ""].groupby(["layer", "head", "variant"], sort=False):
        predicted, at = mine["predicted"].to_numpy(float), mine["prompt"].to_numpy(int)
        members = at if groups is None else groups[at]
        change = (mine["nll"] - mine["intact"]).to_numpy(float)
        low, high = interval(by_group(change, members), by_group(predicted, members), seed=seed)
        known = bool(np.isfinite(change).all())
        rows.append(
            {
                "layer": layer,
                "head": head,
                "variant": variant,
                "delta_loss": change.sum() / predicted.sum(),
                "delta_loss_low": low,
                "delta_loss_high": high,
                "p": sign_test(by_group(change, members)) if known else math.nan,
                "prompts_worse": int((change > 0).sum()) if known else math.nan,
                "estimate": float(mine["estimate"].sum() / predicted.sum()),
                "n": len(mine),
            }
        )
    effects = HEAD_EFFECTS.frame(rows)
    # (For the heads under one term: the smallest over all terms is not needed.)
    return effects.assign(p=effects.groupby("variant")["p"].transform(lambda p: holm(p.to_list())))
