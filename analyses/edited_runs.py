"""What a model loses when projection, scaling or both are taken away: the loss, the predictions, the attention.

Every norm alone, and every group of them (what attention reads, what MLPs read, the final norm, all), is run under the
four variants with scale frozen at the site's two mean sigmas, at position 0 and elsewhere (`ln_probe.hooks.without`).
On each prompt, against the unedited model:

    delta_loss       change of the mean next-token loss, nats
    kl               KL(unedited ‖ edited) of the next-token distributions, mean over positions, nats
    top1_agreement   share of positions with the same most likely token
    entropy_change   change of attention entropy over log(visible keys), mean over layers, heads and queries

and of groups also with the other ways of taking scaling away:

    delta_loss_uniform    one constant everywhere: makes an attention sink's vectors longer by as much as its sigma is
                          larger, and measures that (SmolLM2-135M, layer 16: +32.1 nats, +0.003 with two constants)
    delta_loss_resampled  every token with the sigma of a calibration token drawn at random

Single norms are measured on the first prompts alone (SINGLE_NORM_PROMPTS).

A prompt is held at a time, with the logits of the unedited model alone; what edited passes have in common is computed
once (`shared_passes`).

Loss under a frozen scale: Heimersheim 2024; Baroni et al. 2025, "Transformers Don't Need LayerNorm at Inference Time".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.attention_spread import entropy_ratio
from ln_probe.analyses.next_tokens import Sums
from ln_probe.analyses.shared_passes import Job, SharedPasses
from ln_probe.hooks.edits import Edit
from ln_probe.hooks.frozen_scale import FROZEN, RESAMPLED, SCALES, UNIFORM, Constant, Divisor, Resampled, Sigmas
from ln_probe.hooks.interventions import GROUPS, make_edit, members, why_nothing
from ln_probe.hooks.masks import is_causal, window_of
from ln_probe.hooks.model import HookedModel, blocks, evaluating, vocabulary_size
from ln_probe.hooks.positions import Positions
from ln_probe.hooks.sentinel import lost_edits
from ln_probe.hooks.sites import Site
from ln_probe.hooks.variants import VARIANTS, takes_projection, takes_scaling

MEASURES = ("nll", "nll_uniform", "nll_resampled", "predicted", "kl", "agree", "positions", "entropy", "queries")
PROMPT_COLUMNS = ("prompt", "sites", "variant", *MEASURES, "divisor", "divisor_first", "matched", "no_op")
_OF_GROUPS = ("nll_uniform", "nll_resampled")

# Prompts on which norms are taken one by one: the fewest at which a sign test (p = 2^-11 if all agree) survives Holm's
# correction over a hundred norms.
SINGLE_NORM_PROMPTS = 12

# (site, scaling goes, projection goes): two variants that do the same to every norm are one computation.
_Signature = tuple[tuple[str, bool, bool], ...]


@dataclass(frozen=True)
class _Row:
    sites: str
    variant: str
    members: tuple[Site, ...]

    @property
    def is_group(self) -> bool:
        return self.sites in GROUPS

    @property
    def signature(self) -> _Signature:
        """What is really taken away; empty if that is nothing, so that the unedited model is its own answer."""
        found = ((s.name, takes_scaling(s, self.variant), takes_projection(s, self.variant)) for s in self.members)
        return tuple(f for f in found if f[1] or f[2])


class EditedRuns:
    """What the causal table of one model is made of: `measure` a prompt at a time.

    Args:
        model: any hooked model.
        sites: its norms (those of some layers alone: groups then hold only these).
        constants: what replaces sigma, by site (a number: the same at position 0).
        sigmas: to draw resampled ones from; without them there are none.
        seed: of resampled sigmas.
        single_norm_prompts: on how many of the first prompts norms are taken one by one.
        scales: what is tried in place of the sigmas of groups, FROZEN among them.
        matched: whether the constants are the sites' own mean sigmas.
        meaningless: why nothing that is computed from logits means anything; empty if it does.
    """

    def __init__(
        self,
        model: HookedModel,
        sites: Sequence[Site],
        constants: Mapping[str, Constant | float],
        *,
        sigmas: Mapping[str, Sigmas] | None = None,
        seed: int = 0,
        single_norm_prompts: int = SINGLE_NORM_PROMPTS,
        scales: Collection[str] = SCALES,
        matched: bool = True,
        meaningless: str = "",
    ) -> None:
        self.model, self.matched, self.meaningless, self.seed = model, matched, meaningless, seed
        self.constants = {name: Constant.of(given) for name, given in constants.items()}
        self.sigmas, self.single_norm_prompts, self.scales = sigmas or {}, single_norm_prompts, scales
        self.lost = lost_edits(model, sites)
        self.nothing = {variant: why_nothing(model, sites, variant) for variant in VARIANTS}
        groups = [(g, tuple(members(sites, g))) for g in GROUPS]
        chosen = [(g, found) for g, found in groups if found] + [(s.name, (s,)) for s in sites]
        self.rows = [_Row(name, variant, found) for name, found in chosen for variant in VARIANTS]
        self.sites = {s.name: s for s in sites}
        self.causal: bool | None = None  # known after the first pass over more than one token
        self.outputs = vocabulary_size(model)
        self._layers: list[Any] = [getattr(block, "attn", None) for block in blocks(model)]
        self.attentions = [
            (layer, pattern)
            for layer, block in enumerate(blocks(model))
            if (pattern := dict(_children(getattr(block, "attn", None))).get("hook_pattern")) is not None
        ]

    @property
    def no_loss(self) -> str:
        """Why the model has no next-token loss; empty if it has one. Known after the first prompt."""
        if self.causal is False:
            return "attention is bidirectional, so the model sees the tokens that a next-token loss asks for"
        if self.outputs < vocabulary_size(self.model):
            return (
                f"the model has {self.outputs} outputs for {vocabulary_size(self.model)} tokens, so no next-token loss"
            )
        return ""

    def measure(self, prompt: int, tokens: Int[Tensor, " pos"]) -> pd.DataFrame:
        """Sums over one prompt, a row per (sites, variant); columns PROMPT_COLUMNS. NaN where nothing can be said.

        What it gives depends on the prompt alone, so that prompts can be measured in any order, or elsewhere.
        """
        with evaluating(self.model), torch.no_grad():
            passes = SharedPasses(self.model, list(self.sites.values()), self.attentions, self._entropies)
            unedited = passes.unedited(tokens)
            self.outputs = unedited.vocabulary
            wanted = self.rows if prompt < self.single_norm_prompts else [r for r in self.rows if r.is_group]
            jobs: dict[tuple[_Signature, str], Job] = {}
            for row in wanted:
                if row.signature and not self._is_lost(row):
                    jobs |= {(row.signature, way): job for way, job in self._jobs(row, len(tokens), prompt)}
            effects = passes.effects(tokens, unedited, jobs)
            intact = unedited.reference.itself() | dict(
                zip(("entropy", "queries"), map(math.fsum, zip(*unedited.entropy.values(), strict=True)), strict=False)
            )
        rows = [
            {"prompt": prompt, "sites": row.sites, "variant": row.variant}
            | self._sums(row, intact, effects, len(tokens))
            | self._about(row)
            for row in wanted
        ]
        return pd.DataFrame(rows, columns=list(PROMPT_COLUMNS))

    def _is_lost(self, row: _Row) -> bool:
        return bool(row.signature) and any(s.name in self.lost for s in row.members)

    def _jobs(self, row: _Row, length: int, prompt: int) -> Iterator[tuple[str, Job]]:
        """The ways in which a row is run: of groups whose scaling goes, more than one."""
        yield FROZEN, Job(self._edits(row, FROZEN, length, prompt))
        taken = [s for s in row.members if takes_scaling(s, row.variant)]
        if row.is_group and taken and not self.no_loss:
            if UNIFORM in self.scales:
                yield UNIFORM, Job(self._edits(row, UNIFORM, length, prompt), whole=False)
            if RESAMPLED in self.scales and all(s.name in self.sigmas for s in taken):
                yield RESAMPLED, Job(self._edits(row, RESAMPLED, length, prompt), whole=False)

    def _edits(self, row: _Row, scale: str, length: int, prompt: int) -> list[Edit]:
        positions = Positions()
        positions.shape = (1, length)  # of its own row of the batch
        return [
            make_edit(
                s, row.variant, self._divisor(s, scale, prompt) if takes_scaling(s, row.variant) else None, positions
            )
            for s in row.members
        ]

    def _divisor(self, site: Site, scale: str, prompt: int) -> Divisor | None:
        constant = self.constants.get(site.name)
        if scale == RESAMPLED:
            # Drawn anew for every prompt, and the same whoever measures it.
            return Resampled(self.sigmas[site.name], f"{self.seed}/{site.name}/{prompt}")
        return constant.uniform if constant is not None and scale == UNIFORM else constant

    def _sums(
        self, row: _Row, intact: Sums, effects: Mapping[tuple[_Signature, str], Sums], length: int
    ) -> dict[str, float]:
        """The sums of one row over one prompt."""
        if self._is_lost(row):
            return dict.fromkeys(MEASURES, math.nan)
        found = effects[row.signature, FROZEN] if row.signature else intact
        losses = {"nll": found["nll"]} | dict.fromkeys(_OF_GROUPS, math.nan)
        if row.is_group:
            if any(takes_scaling(s, row.variant) for s in row.members):
                ways = {"nll_uniform": UNIFORM, "nll_resampled": RESAMPLED}
                losses |= {
                    m: effects[row.signature, w]["nll"] for m, w in ways.items() if (row.signature, w) in effects
                }
            else:
                losses |= dict.fromkeys(_OF_GROUPS, found["nll"])
        compared = {"kl": found["kl"], "agree": found["agree"]}
        overflowed = math.isnan(found["kl"]) and not math.isnan(intact["kl"])
        if self.no_loss or self.meaningless:
            losses = dict.fromkeys(losses, math.nan)
        if self.meaningless:
            compared = dict.fromkeys(compared, math.nan)
        return {
            **losses,
            **compared,
            "predicted": float(length - 1),
            "positions": float(length),
            "entropy": math.nan if overflowed else found.get("entropy", math.nan),
            "queries": found.get("queries", 0.0),
        }

    def _about(self, row: _Row) -> dict[str, Any]:
        """What is known of a row without running it; `no_op`: why nothing changes at any member, empty if it does."""
        reasons = [self.nothing[row.variant].get(s.name, "") for s in row.members]
        alone = row.members[0] if len(row.members) == 1 else None
        return {
            "divisor": self.constants[alone.name].rest if alone and takes_scaling(alone, row.variant) else math.nan,
            "divisor_first": (
                self.constants[alone.name].first if alone and takes_scaling(alone, row.variant) else math.nan
            ),
            "matched": self.matched,
            "no_op": "; ".join(sorted(set(reasons))) if all(reasons) else "",
        }

    def notes(self) -> list[str]:
        """What a reader has to know about this model; complete once a prompt was measured."""
        said = [f"causal: {reason}" for reason in self.lost.values()]
        if any("ignores the mean" in reason for reason in self.nothing["no_projection"].values()):
            said.append(
                "causal: the weights that read these norms are centred (folding the norms does that), so a model "
                "without projection is the same by construction: load it unfolded to learn what projection does"
            )
        if self.meaningless:
            said.append(f"causal: losses, KL and top-1 agreement are left out: {self.meaningless}")
        elif self.no_loss:
            said.append(f"causal: losses are left out: {self.no_loss}")
        return said

    def _entropies(self, layer: int, pattern: Float[Tensor, "head query key"]) -> Float[Tensor, "head later"]:
        """Of queries that had a choice: all but the first, or all in a bidirectional model."""
        wide = pattern if pattern.dtype in (torch.float32, torch.float64) else pattern.float()
        if self.causal is None or self.causal:
            if self.causal is None and len(pattern[0]) > 1:
                self.causal = is_causal(pattern)
            if self.causal is not False:
                return entropy_ratio(wide, window=window_of(self._layers[layer], wide))[:, 1:]
        entropy: Tensor = torch.special.entr(wide).sum(-1) / math.log(pattern.shape[-1])
        return entropy


def _children(module: Any) -> Iterator[tuple[str, nn.Module]]:
    return module.named_children() if isinstance(module, nn.Module) else iter(())
