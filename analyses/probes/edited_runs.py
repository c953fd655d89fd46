"""How the loss, the predictions and the attention change when projection, scaling or both are removed.

Every norm alone, and every group of norms (those that attention reads, those that MLPs read, the final norm, all), is
run under the four variants. Frozen scaling divides by two constants a norm, one at position 0 and one elsewhere: the
prompt's own (`ln_probe.analyses.constants`). On each prompt, against the intact model:

    delta_loss       change of the mean loss: of the next token in nats, or of the user's objective
    kl               KL(unedited ‖ edited) of the next-token distributions, mean over positions, nats
    top1_agreement   share of positions with the same most likely token
    entropy_change   change of attention entropy over log(visible keys), mean over layers, heads and queries

and of groups also with other constants:

    delta_loss_uniform    one constant for all positions: an attention sink's vectors become longer by as much as its
                          sigma is larger (SmolLM2-135M, layer 16: +32.1 nats; with two constants +0.003)
    delta_loss_optimal    loss-optimal constants, fitted on other prompts (primary contrasts, where there are some)

Of the primary contrasts that freeze scaling, the derivatives of the loss by the constants are kept: the interval of
`causal` includes the choice of constants by them. Single norms are measured on the first prompts alone
(SINGLE_NORM_PROMPTS), all of them to second order (`norm_estimates`), and exactly those that `leading` says.

A prompt is held at a time, with the logits of the unedited model alone; what edited passes have in common is computed
once (`shared_passes`).

Loss under a frozen scale: Heimersheim 2024; Baroni et al. 2025, "Transformers Don't Need LayerNorm at Inference Time".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses.probes.leading import every_one_is_run, with_largest
from ln_probe.analyses.probes.norm_estimates import norm_estimates
from ln_probe.analyses.probes.shared_passes import Job, SharedPasses, Sums
from ln_probe.analyses.probes.uniformity import entropy_ratio
from ln_probe.hooks.capture import is_causal, window_of
from ln_probe.hooks.edits import Edit, Positions
from ln_probe.hooks.interventions import GROUPS, lost_edits, members, why_nothing
from ln_probe.hooks.model import (
    HookedModel,
    at_least_float32,
    attentions,
    child_of,
    device_of,
    dtype_of,
    evaluating,
    vocabulary_size,
)
from ln_probe.hooks.norm import Site
from ln_probe.hooks.objective import BIDIRECTIONAL, Objective, too_few_outputs
from ln_probe.hooks.optimal_constants import GradientError, edited_loss, loss_and_gradients
from ln_probe.hooks.scales import FROZEN, OPTIMAL, UNIFORM, Constant
from ln_probe.hooks.sites import facts_of
from ln_probe.hooks.variants import SCALING_FROZEN, VARIANTS, Variant, VariantEdit

_LOSSES = ("nll", "nll_uniform", "nll_optimal", "estimate")
MEASURES = (*_LOSSES, "predicted", "kl", "agree", "positions", "entropy", "queries")
PROMPT_COLUMNS = ("prompt", "sites", "variant", *MEASURES, "no_op")
GRADIENT_COLUMNS = ("prompt", "sites", "site", "first", "rest")
_UNKNOWN = (math.nan, math.nan)
_OF_GROUPS = {"nll_uniform": UNIFORM, "nll_optimal": OPTIMAL}

# The contrasts that are fixed before the data are those of primary variants ({scaling frozen, projection removed}) at
# these groups of norms. All others are exploratory.
PRIMARY_SITES = ("attention", "all")

# Prompts on which norms are taken one by one: the fewest at which a sign test (p = 2^-11 if all agree) survives Holm's
# correction over a hundred norms.
SINGLE_NORM_PROMPTS = 12

# Norms of a large model that are run exactly (`leading`): they hold the ten largest changes of all models in
# bench/results/single-norms.csv (8 hold eight of them in SmolLM2-135M).
LEADING_NORMS = 12

# A whole pass and shared passes with the same constants give one loss, to rounding (relative; float32: 2e-6 measured).
_SAME_LOSS, _SAME_HALF = {torch.float64: 1e-9, torch.float32: 1e-4}, 3e-2

# A derivative by the constants that promises a larger change than freezing itself and this, nats a token, is checked.
STEEP = 0.05

# Each norm with what the variant changes there: two variants that do the same to every norm are one computation.
_Signature = tuple[tuple[str, frozenset[str]], ...]


@dataclass(frozen=True)
class _Row:
    sites: str
    variant: Variant
    members: tuple[Site, ...]

    @property
    def is_group(self) -> bool:
        return self.sites in GROUPS

    @property
    def is_primary(self) -> bool:
        return self.sites in PRIMARY_SITES and self.variant.primary

    @property
    def frozen(self) -> list[Site]:
        """The norms whose sigma a constant replaces."""
        return [s for s in self.members if self.variant.takes_scaling(s)]

    @property
    def signature(self) -> _Signature:
        """What is changed; empty if nothing is, so that the result is that of the unedited model."""
        return tuple((s.name, effect) for s in self.members if (effect := self.variant.effect(s)))


class EditedRuns:
    """What the causal table of one model is made of: `measure` a prompt at a time.

    Args:
        model: any hooked model.
        sites: its norms (those of some layers alone: groups then hold only these).
        constants: what replaces sigma, by site (a number: the same at position 0); or a function that gives this for
            the number of a prompt (`Constants.of`).
        optimal: loss-optimal constants for a group of norms on a prompt, `optimal(group, prompt)`; None: there are
            none.
        single_norm_prompts: on how many of the first prompts norms are taken one by one.
        first: the first prompts that will be measured, on which leading norms are chosen; none: every norm is run.
        exact: names of the norms that are run exactly; None: as `leading` says. Empty: estimates alone.
        uniform: whether groups are run with one constant for all positions too.
        primary_only: whether nothing but the primary contrasts is run, and of them the loss alone.
        errors: standard errors of the constants, by site, at position 0 and elsewhere: derivatives of the primary
            contrasts are kept, as they hold over steps of this size; None: no derivatives.
        objective: the loss.
        meaningless: why nothing that is computed from logits means anything; empty if it does.
    """

    def __init__(
        self,
        model: HookedModel,
        sites: Sequence[Site],
        constants: Mapping[str, Constant | float] | Callable[[int], Mapping[str, Constant]],
        *,
        optimal: Callable[[str, int], Mapping[str, Constant]] | None = None,
        single_norm_prompts: int = SINGLE_NORM_PROMPTS,
        first: Sequence[Int[Tensor, " _"]] = (),
        exact: Collection[str] | None = None,
        uniform: bool = True,
        primary_only: bool = False,
        errors: Mapping[str, tuple[float, float]] | None = None,
        objective: Objective | None = None,
        meaningless: str = "",
    ) -> None:
        self.model, self.meaningless = model, meaningless
        self.objective = Objective() if objective is None else objective
        self.constants_of = constants if callable(constants) else _always(constants)
        self.optimal, self.single_norm_prompts, self.uniform = optimal, single_norm_prompts, uniform
        self.errors = errors
        self.no_gradient = ""  # why there is no gradient by the constants; known after the first prompt
        self.gradients: list[dict[str, Any]] = []
        self.too_steep: list[str] = []  # the primary contrasts with a derivative that holds over smaller steps alone
        self.lost = lost_edits(model, sites)
        self.nothing = {variant: why_nothing(facts_of(model), sites, variant) for variant in VARIANTS}
        groups = [(g, tuple(members(sites, g))) for g in GROUPS]
        chosen = [(g, found) for g, found in groups if found] + [(s.name, (s,)) for s in sites]
        self.rows = [_Row(name, variant, found) for name, found in chosen for variant in VARIANTS.values()]
        self.whole = not primary_only
        if primary_only:
            self.rows = [r for r in self.rows if r.is_primary or (r.sites in PRIMARY_SITES and not r.variant.is_edit)]
        self.sites = {s.name: s for s in sites}
        self.causal: bool | None = None  # known after the first pass over more than one token
        self.outputs = vocabulary_size(model)
        self._layers = attentions(model)
        points = {layer: child_of(attn, "hook_pattern") for layer, attn in self._layers.items()}
        self.attentions = [(layer, point) for layer, point in points.items() if point is not None]
        self.exact = frozenset(self._chosen(first) if exact is None else exact)
        if unknown := sorted(self.exact - set(self.sites)):
            raise ValueError(f"exact: {unknown[0]!r} is no norm that is measured ({', '.join(self.sites)})")

    @property
    def no_loss(self) -> str:
        """Why the model has no next-token loss; empty if it has one, or the user gave a loss. Known after the first
        prompt."""
        if self.objective.function is not None:
            return ""
        if self.causal is False:
            return BIDIRECTIONAL
        if self.outputs < vocabulary_size(self.model):
            return too_few_outputs(self.outputs, vocabulary_size(self.model))
        return ""

    def measure(self, prompt: int, tokens: Int[Tensor, " pos"]) -> pd.DataFrame:
        """Sums over one prompt, a row per (sites, variant); columns PROMPT_COLUMNS. NaN where nothing can be said.

        What it gives depends on the prompt alone, so that prompts can be measured in any order, or elsewhere.
        """
        with evaluating(self.model), torch.no_grad():
            passes = SharedPasses(
                self.model, list(self.sites.values()), self.attentions, self._entropies, self.objective
            )
            unedited = passes.unedited(tokens)
            self.outputs = unedited.vocabulary
            wanted = self.rows if prompt < self.single_norm_prompts else [r for r in self.rows if r.is_group]
            effects: dict[tuple[_Signature, str], Sums] = {}
            for standard in (True, False):  # apart, because a row's rounding depends on the batch that it is in
                jobs: dict[tuple[_Signature, str], Job] = {}
                for row in wanted:
                    if row.variant.standard == standard and self._is_run(row):
                        jobs |= {(row.signature, way): job for way, job in self._jobs(row, len(tokens), prompt)}
                missing = {key: job for key, job in jobs.items() if key not in effects}
                effects |= passes.effects(tokens, unedited, missing)
            intact = unedited.sums | dict(
                zip(("entropy", "queries"), map(math.fsum, zip(*unedited.entropy.values(), strict=True)), strict=False)
            )
        self._differentiate(prompt, tokens, effects, intact["nll"])
        estimates = self._estimates(wanted, tokens, self.constants_of(prompt))
        rows = [
            {"prompt": prompt, "sites": row.sites, "variant": row.variant.name}
            | self._sums(row, intact, effects, tokens)
            | {"estimate": sum(estimates.get((row.sites, row.variant.name), _UNKNOWN)), "no_op": self._no_op(row)}
            for row in wanted
        ]
        return pd.DataFrame(rows, columns=list(PROMPT_COLUMNS))

    def _differentiate(
        self,
        prompt: int,
        tokens: Int[Tensor, " pos"],
        effects: Mapping[tuple[_Signature, str], Sums],
        intact: float,
    ) -> None:
        """Keep the derivatives of the primary contrasts by the constants.

        Raises:
            ValueError: the loss of this pass is not that of the shared passes, which had the same constants.
        """
        if self.errors is None or self.no_gradient or self.no_loss or self.meaningless or len(tokens) < 2:
            return
        constants = self.constants_of(prompt)
        for row in self.rows:
            is_wanted = row.sites in PRIMARY_SITES and row.variant is SCALING_FROZEN
            if not is_wanted or not row.signature or self._is_lost(row):
                continue
            frozen = row.frozen
            try:
                loss, found = loss_and_gradients(self.model, frozen, tokens, constants, objective=self.objective)
            except GradientError as error:
                self.no_gradient = str(error)
                return
            shared = effects[row.signature, FROZEN]["nll"]
            if abs(loss - shared) > _SAME_LOSS.get(dtype_of(self.model), _SAME_HALF) * max(1.0, abs(shared)):
                raise ValueError(
                    f"prompt {prompt}, scaling frozen at {row.sites}: with the same constants a whole pass gives "
                    f"a loss of {loss:.6g} and shared passes give {shared:.6g}. Please report this with the output of "
                    "`ln-probe env`"
                )
            holds = self._holds(frozen, tokens, constants, found, loss, loss - intact)
            if holds < 1 and row.sites not in self.too_steep:
                self.too_steep.append(row.sites)
            self.gradients += [
                dict(zip(GRADIENT_COLUMNS, (prompt, row.sites, site, holds * first, holds * rest), strict=True))
                for site, (first, rest) in found.items()
            ]

    def _holds(
        self,
        sites: Sequence[Site],
        tokens: Int[Tensor, " pos"],
        constants: Mapping[str, Constant],
        gradients: Mapping[str, tuple[float, float]],
        loss: float,
        change: float,
    ) -> float:
        """Which part of a derivative holds when every constant moves by its standard error, the steepest way up.

        1, unless the derivative promises a change larger than that of freezing scaling itself (and than STEEP a token):
        in a deep model with outlier tokens it can be a million times too large.
        """
        assert self.errors is not None
        promised = sum(abs(g) * e for s in sites for g, e in zip(gradients[s.name], self.errors[s.name], strict=True))
        if not promised > abs(change) + STEEP * len(tokens):
            return 1.0
        moved = {}
        for s in sites:
            held = (constants[s.name].first, constants[s.name].rest)
            steps = zip(held, gradients[s.name], self.errors[s.name], strict=True)
            moved[s.name] = Constant(*(max(c + math.copysign(e, g), c / 2) for c, g, e in steps))
        with torch.no_grad():
            rows = tokens[None].to(device_of(self.model))
            after = float(edited_loss(self.model, sites, rows, moved, SCALING_FROZEN.name, self.objective))
        return min(1.0, abs(after - loss) / promised) if math.isfinite(after) else 1.0

    def _is_lost(self, row: _Row) -> bool:
        return bool(row.signature) and any(s.name in self.lost for s in row.members)

    def _is_run(self, row: _Row) -> bool:
        """Whether a pass says what the edit does; otherwise it does nothing, is lost, or is estimated."""
        return bool(row.signature) and not self._is_lost(row) and (row.is_group or row.sites in self.exact)

    def _chosen(self, first: Sequence[Int[Tensor, " _"]]) -> list[str]:
        """The norms that are run exactly: all of a small model, and where there is no loss to estimate or nothing to
        choose with."""
        names, single = list(self.sites), [r for r in self.rows if not r.is_group]
        few = every_one_is_run(self.model, len(names)) or len(names) <= LEADING_NORMS
        if few or not single or not self.single_norm_prompts or self.meaningless:
            return names
        if self.objective.function is not None or self.objective.obstacle(self.model):
            return names
        estimates = (self._estimates(single, tokens, self.constants_of(i)) for i, tokens in enumerate(first))
        return with_largest(estimates, LEADING_NORMS) or names

    def _estimates(
        self, rows: Sequence[_Row], tokens: Int[Tensor, " pos"], constants: Mapping[str, Constant]
    ) -> dict[tuple[str, str], tuple[float, float]]:
        """Both terms of the estimated change of the summed loss of one prompt under each edit of a single norm, by
        (norm, variant); 0 where nothing is edited. Nothing where there is no loss, or a loss of the user's."""
        single = [r for r in rows if not r.is_group and r.variant.is_edit and not self._is_lost(r)]
        if not single or self.no_loss or self.meaningless or self.objective.function is not None:
            return {}
        keys = {(r.sites, r.variant.name): r for r in single}
        if len(tokens) < 2:  # nothing is predicted
            return dict.fromkeys(keys, (0.0, 0.0))
        edits = {key: self._edits(r, constants, len(tokens))[0] for key, r in keys.items() if r.signature}
        found = norm_estimates(self.model, tokens, edits) if edits else {}
        idle = {key: (0.0, 0.0) for key, r in keys.items() if not r.signature}
        return found | idle if found or not edits else {}

    def _jobs(self, row: _Row, length: int, prompt: int) -> Iterator[tuple[str, Job]]:
        """The ways in which a row is run: of groups whose scaling is frozen, more than one."""
        constants = self.constants_of(prompt)
        yield FROZEN, Job(self._edits(row, constants, length), whole=self.whole)
        if row.is_group and row.frozen and not self.no_loss:
            if self.uniform:
                one = {name: Constant.of(c).uniform for name, c in constants.items()}
                yield UNIFORM, Job(self._edits(row, one, length), whole=False)
            if self.optimal is not None and row.sites in PRIMARY_SITES and row.variant is SCALING_FROZEN:
                best = self.optimal(row.sites, prompt)
                if all(s.name in best for s in row.frozen):
                    yield OPTIMAL, Job(self._edits(row, best, length), whole=False)

    def _edits(self, row: _Row, constants: Mapping[str, Constant], length: int) -> list[Edit]:
        positions = Positions()
        positions.shape = (1, length)  # of this row of the batch
        return [
            VariantEdit(s, row.variant.name, constants.get(s.name) if row.variant.takes_scaling(s) else None, positions)
            for s in row.members
        ]

    def _sums(
        self,
        row: _Row,
        intact: Sums,
        effects: Mapping[tuple[_Signature, str], Sums],
        tokens: Int[Tensor, " pos"],
    ) -> dict[str, float]:
        """The sums of one row over one prompt."""
        if self._is_lost(row):
            return dict.fromkeys(MEASURES, math.nan)
        if row.signature and not self._is_run(row):
            return dict.fromkeys(MEASURES, math.nan) | {"predicted": float(self.objective.weight(tokens))}
        found = effects[row.signature, FROZEN] if row.signature else intact
        same = found["nll"] if row.is_group and not row.frozen else math.nan
        losses = {"nll": found["nll"]} | dict.fromkeys(_OF_GROUPS, same)
        if row.is_group and row.frozen:
            ways = {m: effects.get((row.signature, way)) for m, way in _OF_GROUPS.items()}
            losses |= {m: sums["nll"] for m, sums in ways.items() if sums is not None}
        compared = {"kl": found["kl"], "agree": found["agree"]}
        overflowed = math.isnan(found["kl"]) and not math.isnan(intact["kl"])
        if self.no_loss or self.meaningless:
            losses = dict.fromkeys(losses, math.nan)
        if self.meaningless:
            compared = dict.fromkeys(compared, math.nan)
        return {
            **losses,
            **compared,
            "predicted": float(self.objective.weight(tokens)),
            "positions": float(len(tokens)),
            "entropy": math.nan if overflowed else found.get("entropy", math.nan),
            "queries": found.get("queries", 0.0),
        }

    def _no_op(self, row: _Row) -> str:
        """Why nothing changes at any member; empty if something does."""
        reasons = [self.nothing[row.variant.name].get(s.name, "") for s in row.members]
        return "; ".join(sorted(set(reasons))) if all(reasons) else ""

    def notes(self) -> list[str]:
        """What a reader has to know about this model; complete once a prompt was measured."""
        said = [f"causal: {reason}" for reason in self.lost.values()]
        if len(self.exact) < len(self.sites) and self.single_norm_prompts:
            said.append(
                f"causal: {len(self.exact)} of {len(self.sites)} norms were run exactly one by one, those with the "
                f"largest estimates; the others are estimated to second order, and count as tests where p-values of "
                "single norms are adjusted"
            )
        if any("ignores the mean" in reason for by_site in self.nothing.values() for reason in by_site.values()):
            said.append(
                "causal: the weights that read these norms are centred (folding the norms does that), so a model "
                "without projection is the same by construction: load it unfolded to learn what projection does"
            )
        if self.meaningless:
            said.append(f"causal: losses, KL and top-1 agreement are left out: {self.meaningless}")
        elif self.no_loss:
            said.append(f"causal: the loss is not applicable: {self.no_loss}")
        if self.too_steep:
            said.append(
                f"causal: the loss is too steep in the constants for a derivative ({', '.join(self.too_steep)}): the "
                "intervals use the change over one standard error of the constants instead"
            )
        if self.no_gradient:
            said.append(f"causal: intervals do not include the choice of constants: {self.no_gradient}")
        return said

    def _entropies(self, layer: int, pattern: Float[Tensor, "head query key"]) -> Float[Tensor, "head later"]:
        """Of queries that had a choice: all but the first, or all in a bidirectional model."""
        wide = at_least_float32(pattern)
        if self.causal is None or self.causal:
            if self.causal is None and len(pattern[0]) > 1:
                self.causal = is_causal(pattern)
            if self.causal is not False:
                return entropy_ratio(wide, window=window_of(self._layers[layer], wide))[:, 1:]
        entropy: Tensor = torch.special.entr(wide).sum(-1) / math.log(pattern.shape[-1])
        return entropy


def _always(constants: Mapping[str, Constant | float]) -> Callable[[int], Mapping[str, Constant]]:
    """The same constants for every prompt."""
    same = {name: Constant.of(given) for name, given in constants.items()}
    return lambda _prompt: same
