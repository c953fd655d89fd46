"""How the loss, the predictions and the attention change when projection, scaling or both are removed.

Every norm alone, and every group of norms (those that attention reads, those that MLPs read, the final norm, all), is
run under every variant, and compared with the intact model. Frozen scaling divides by two constants a norm, one at
position 0 and one elsewhere: the prompt's own (`ln_probe.analyses.constants`).

The primary contrasts that freeze scaling are also run with one constant for all positions (an attention sink's vectors
become longer by as much as its sigma is larger: SmolLM2-135M, layer 16, +32.1 nats; with two constants +0.003), and
with loss-optimal constants, where there are some. The derivatives of their loss by the constants are kept: the interval
of `causal` includes the choice of constants. Single norms are measured on the first prompts alone
(SINGLE_NORM_PROMPTS), all of them to second order (`norm_estimates`), and exactly those that `leading` says.

A prompt is held at a time, with the logits of the unedited model alone; what edited passes have in common is computed
once (`shared_passes`).

Loss under a frozen scale: Heimersheim 2024; Baroni et al. 2025, "Transformers Don't Need LayerNorm at Inference Time".
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.probes.leading import every_one_is_run, with_largest
from ln_probe.analyses.probes.shared_passes import Job, SharedPasses, Sums
from ln_probe.hooks.constants import (
    FROZEN,
    OPTIMAL,
    UNIFORM,
    Constant,
    GradientError,
    edited_loss,
    loss_and_gradients,
)
from ln_probe.hooks.edits import GROUPS, members, no_op
from ln_probe.hooks.model import (
    HookedModel,
    at_least_float32,
    device_of,
    dtype_of,
    evaluating,
    hooks_on,
    tensors_in,
    vocabulary_size,
)
from ln_probe.hooks.norm import SCALING_FROZEN, VARIANTS, Norm, Variant
from ln_probe.hooks.norm_edits import NormEdit, lost_edits
from ln_probe.hooks.task import BIDIRECTIONAL, Objective, too_few_outputs

_LOSSES = ("nll", "nll_uniform", "nll_optimal", "estimate")
MEASURES = (*_LOSSES, "predicted", "kl", "agree", "positions", "entropy", "queries")
PROMPT_COLUMNS = ("prompt", "sites", "variant", *MEASURES, "no_op")
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

# A whole pass and shared passes with the same constants give one loss, to rounding (relative; float32: 2e-6 measured;
# some norms compute in float32 in a model of any format).
_SAME_LOSS, _SAME_HALF = {torch.float64: 1e-6, torch.float32: 1e-4}, 3e-2

# A derivative by the constants that promises a larger change than freezing itself and this, nats a token, is checked.
STEEP = 0.05

# Each norm with what the variant changes there: two variants that do the same to every norm are one computation.
_Signature = tuple[tuple[str, frozenset[str]], ...]


@dataclass(frozen=True)
class _Row:
    sites: str
    variant: Variant
    members: tuple[Norm, ...]

    @property
    def is_group(self) -> bool:
        return self.sites in GROUPS

    @property
    def is_frozen_primary(self) -> bool:
        """Whether it is a primary contrast that freezes scaling."""
        return self.sites in PRIMARY_SITES and self.variant is SCALING_FROZEN

    @property
    def frozen(self) -> list[Norm]:
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
        uniform: whether primary contrasts that freeze scaling are run with one constant for all positions too.
        primary_only: whether nothing but the primary contrasts is run, and of them the loss alone.
        errors: standard errors of the constants, by site, at position 0 and elsewhere: derivatives of the primary
            contrasts are kept, as they hold over steps of this size; None: no derivatives.
        objective: the loss.
        meaningless: why nothing that is computed from logits means anything; empty if it does.
        note: what a reader has to know about the choice of norms.
    """

    def __init__(
        self,
        model: HookedModel,
        sites: Sequence[Norm],
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
        note: str = "",
    ) -> None:
        self.model, self.meaningless, self.note = model, meaningless, note
        self.objective = Objective() if objective is None else objective
        same = {} if callable(constants) else {name: Constant.of(given) for name, given in constants.items()}
        self.constants_of = constants if callable(constants) else lambda _prompt: same
        self.optimal, self.single_norm_prompts, self.uniform = optimal, single_norm_prompts, uniform
        self.errors = errors
        self.no_gradient = ""  # why there is no gradient by the constants; known after the first prompt
        self.gradients: list[dict[str, Any]] = []
        self.too_steep: list[str] = []  # the primary contrasts with a derivative that holds over smaller steps alone
        self.lost = lost_edits(model, sites)
        self.nothing = {v: {s.name: why for s in sites if (why := no_op(s, v))} for v in VARIANTS}
        chosen = [(g, found) for g in GROUPS if (found := tuple(members(sites, g)))] + [(s.name, (s,)) for s in sites]
        self.rows = [_Row(name, variant, found) for name, found in chosen for variant in VARIANTS.values()]
        self.whole = not primary_only
        if primary_only:
            self.rows = [r for r in self.rows if r.sites in PRIMARY_SITES]
            self.rows = [r for r in self.rows if r.variant.primary or not r.variant.is_edit]
        self.sites = {s.name: s for s in sites}
        self.causal: bool | None = None  # known after the first pass over more than one token
        self.outputs = vocabulary_size(model)
        self.exact = frozenset(self._chosen(first) if exact is None else exact)
        if unknown := sorted(self.exact - set(self.sites)):
            raise ValueError(f"exact: {unknown[0]!r} is no norm that is measured ({', '.join(self.sites)})")

    @property
    def no_loss(self) -> str:
        """Why the model has no next-token loss; empty if it has one, or the user gave a loss. Known after the first
        prompt."""
        wanted = vocabulary_size(self.model)
        if self.objective.function is not None or (self.causal is not False and self.outputs >= wanted):
            return ""
        return BIDIRECTIONAL if self.causal is False else too_few_outputs(self.outputs, wanted)

    def measure(self, prompt: int, tokens: Int[Tensor, " pos"]) -> pd.DataFrame:
        """Return sums over one prompt, a row per (sites, variant); columns PROMPT_COLUMNS. NaN where unknown."""
        with evaluating(self.model), torch.no_grad():
            passes = SharedPasses(self.model, self.objective, tokens, self.causal)
            self.causal, self.outputs = passes.causal, passes.vocabulary
            constants, intact = self.constants_of(prompt), passes.sums
            wanted = self.rows if prompt < self.single_norm_prompts else [r for r in self.rows if r.is_group]
            jobs: dict[tuple[_Signature, str], Job] = {}
            for row in wanted:
                if self._is_run(row):
                    jobs |= {(row.signature, way): job for way, job in self._jobs(row, prompt, constants)}
            effects = passes.effects(jobs)
        self._differentiate(prompt, tokens, effects, intact["nll"])
        estimates = self._estimates(wanted, tokens, constants)
        rows = [
            {"prompt": prompt, "sites": row.sites, "variant": row.variant.name}
            | self._sums(row, intact, effects, tokens)
            | {"estimate": sum(estimates.get((row.sites, row.variant.name), [math.nan])), "no_op": self._no_op(row)}
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
            if not row.is_frozen_primary or not row.signature or self._is_lost(row):
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
                {"prompt": prompt, "sites": row.sites, "site": site, "first": holds * first, "rest": holds * rest}
                for site, (first, rest) in found.items()
            ]

    def _holds(
        self,
        sites: Sequence[Norm],
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
            rows, pairs = tokens[None].to(device_of(self.model)), {name: c.pair for name, c in moved.items()}
            after = float(edited_loss(self.model, sites, rows, pairs, SCALING_FROZEN.name, self.objective))
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
        if few or not single or not self.single_norm_prompts or not self._is_estimated:
            return names
        if self.objective.obstacle(self.model):
            return names
        estimates = (self._estimates(single, tokens, self.constants_of(i)) for i, tokens in enumerate(first))
        return with_largest(estimates, LEADING_NORMS) or names

    @property
    def _is_estimated(self) -> bool:
        """Whether there is a next-token loss, of which alone there are estimates."""
        return self.objective.function is None and not (self.no_loss or self.meaningless)

    def _estimates(
        self, rows: Sequence[_Row], tokens: Int[Tensor, " pos"], constants: Mapping[str, Constant]
    ) -> dict[tuple[str, str], tuple[float, float]]:
        """Both terms of the estimated change of the summed loss of one prompt under each edit of a single norm, by
        (norm, variant); 0 where nothing is edited. Nothing where there is no loss, or a loss of the user's."""
        single = [r for r in rows if not r.is_group and r.variant.is_edit and not self._is_lost(r)]
        if not single or not self._is_estimated:
            return {}
        keys = {(r.sites, r.variant.name): r for r in single}
        if len(tokens) < 2:  # nothing is predicted
            return dict.fromkeys(keys, (0.0, 0.0))
        edits = {key: self._edits(r, constants)[0] for key, r in keys.items() if r.signature}
        found = norm_estimates(self.model, tokens, edits) if edits else {}
        idle = {key: (0.0, 0.0) for key, r in keys.items() if not r.signature}
        return found | idle if found or not edits else {}

    def _jobs(self, row: _Row, prompt: int, constants: Mapping[str, Constant]) -> Iterator[tuple[str, Job]]:
        """Yield the ways in which a row is run: more than one of primary contrasts that freeze scaling."""
        yield FROZEN, Job(self._edits(row, constants), whole=self.whole)
        if row.is_frozen_primary and row.frozen and not self.no_loss:
            if self.uniform:
                one = {name: Constant.of(c).uniform for name, c in constants.items()}
                yield UNIFORM, Job(self._edits(row, one), whole=False)
            if self.optimal is not None:
                best = self.optimal(row.sites, prompt)
                if all(s.name in best for s in row.frozen):
                    yield OPTIMAL, Job(self._edits(row, best), whole=False)

    def _edits(self, row: _Row, constants: Mapping[str, Constant]) -> list[NormEdit]:
        pairs = {name: Constant.of(c).pair for name, c in constants.items()}
        changed = [s for s in row.members if row.variant.effect(s)]
        return [NormEdit.of(s, row.variant.name, pairs.get(s.name)) for s in changed]

    def _sums(
        self,
        row: _Row,
        intact: Sums,
        effects: Mapping[tuple[_Signature, str], Sums],
        tokens: Int[Tensor, " pos"],
    ) -> dict[str, float]:
        """The sums of one row over one prompt."""
        unknown, predicted = dict.fromkeys(MEASURES, math.nan), float(self.objective.weight(tokens))
        if self._is_lost(row):
            return unknown
        if row.signature and not self._is_run(row):
            return unknown | {"predicted": predicted}
        found = effects[row.signature, FROZEN] if row.signature else intact
        losses = {"nll": found["nll"]} | dict.fromkeys(_OF_GROUPS, math.nan)
        if row.is_frozen_primary:
            ways = {m: effects.get((row.signature, way)) if row.frozen else found for m, way in _OF_GROUPS.items()}
            losses |= {m: sums["nll"] for m, sums in ways.items() if sums is not None}
        overflowed = math.isnan(found["kl"]) and not math.isnan(intact["kl"])
        if self.no_loss or self.meaningless:
            losses = dict.fromkeys(losses, math.nan)
        return {
            **losses,
            "kl": math.nan if self.meaningless else found["kl"],
            "agree": math.nan if self.meaningless else found["agree"],
            "predicted": predicted,
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
        said = [note for note in (self.note, *(f"causal: {reason}" for reason in self.lost.values())) if note]
        if len(self.exact) < len(self.sites) and self.single_norm_prompts:
            said.append(
                f"causal: {len(self.exact)} of {len(self.sites)} norms were run exactly one by one, those with the "
                f"largest estimates; the others are estimated to second order, and count as tests where p-values of "
                "single norms are adjusted"
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


# --------------------------------------------------------------------------------------------- second-order estimates

_Key = TypeVar("_Key", bound=Hashable)


def norm_estimates(
    model: HookedModel, tokens: Int[Tensor, " pos"], edits: Mapping[_Key, NormEdit]
) -> dict[_Key, tuple[float, float]]:
    """Return the estimated change of the summed next-token loss of one prompt under each edit of one norm.

        estimate = Σ <g, Δ> + ½ Σ <s, Δ>²

    over the vectors of a prompt, with Δ the change of the norm's output y in the intact model, g the gradient of the
    loss at y, and s the same gradient if the next tokens were drawn from the model's own predictions. The first sum is
    the first-order estimate of attribution patching (Nanda 2023; Kramár et al. 2024). Frozen scaling makes some vectors
    longer and others shorter, so that this sum nearly cancels, while the loss rises all the same: it is at a minimum.
    The second sum is that rise, the KL divergence from the intact predictions to second order (s sᵀ is the Fisher
    information in expectation; Amari 1998), with vectors at different positions taken to be independent.

    Tokens are drawn with a seed that is made of the prompt, so the result depends on the prompt alone.

    Args:
        model: any hooked model with a next-token loss.
        tokens: of the prompt.
        edits: by any key.

    Returns:
        Both sums for each key, in nats; nothing if the loss has no gradient at any norm.
    """
    norms = {edit.norm.name: edit.norm for edit in edits.values()}
    seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in norms}

    def record(name: str, _m: Any, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        """Record the norm's input and output, with a leaf for the gradient there."""
        x = tensors_in(args, kwargs)[0]
        seen[name].append((x.detach(), y.detach(), torch.zeros_like(y, requires_grad=True)))
        return y + seen[name][-1][-1]

    rows = tokens[None].to(device_of(model))
    recorders = [(norm.module, partial(record, name)) for name, norm in norms.items()]
    with evaluating(model), torch.enable_grad(), hooks_on(recorders):
        logits = at_least_float32(model(rows, return_type="logits"))[0, :-1]
        leaves = [leaf for calls in seen.values() for *_, leaf in calls]
        if not logits.requires_grad:
            return {}
        shares = logits.detach().softmax(-1).cpu()
        seed = zlib.crc32(tokens.cpu().numpy().astype(np.int64).tobytes())  # (one seed would give all the same draws)
        drawn = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(seed))[:, 0].to(logits.device)
        losses = [F.cross_entropy(logits, labels, reduction="sum") for labels in (rows[0, 1:], drawn)]
        found = [torch.autograd.grad(x, leaves, retain_graph=x is losses[0], allow_unused=True) for x in losses]
    if all(g is None or not bool(g.any()) for g in found[0]):
        return {}
    slopes = {id(leaf): pair for leaf, *pair in zip(leaves, *found, strict=True) if pair[0] is not None}
    estimates: dict[_Key, tuple[float, float]] = {}
    with torch.no_grad():
        for key, edit in edits.items():
            first, second = 0.0, torch.zeros(())
            edit.positions.direct, edit.positions.shape = True, (1, len(tokens))
            for x, y, leaf in seen[edit.norm.name]:
                if id(leaf) in slopes:
                    change = at_least_float32(edit.output(x, y)) - at_least_float32(y)
                    own, of_drawn = (slope * change for slope in slopes[id(leaf)])
                    first += float(own.sum(dtype=torch.float64))
                    second = second.to(y.device) + of_drawn.sum(-1, dtype=torch.float64)  # all calls read one vector
            estimates[key] = first, 0.5 * float((second**2).sum())
    return estimates
