"""The probe `causal`: how the loss changes without projection, scaling or both, with intervals over prompts.

Groups of norms (those that attention reads, those that MLPs read, the final norm, all) are run under every edit on
every prompt. Frozen scaling divides by two constants a norm, one at position 0 and one elsewhere: the prompt's own
(`ln_probe.analyses.constants`). The primary contrasts that freeze scaling are also run with one constant for all
positions (a sink's vectors become longer by as much as its sigma is larger: SmolLM2-135M, layer 16, +32.1 nats; with
two constants +0.003), and with loss-optimal constants, where there are some; their intervals include the choice of
constants (`shifts`). Single norms are run with scaling frozen: all on every prompt where that is affordable, in
a large model those with the largest estimates on odd prompts, on the even ones.

Loss under a frozen scale: Heimersheim 2024; Baroni et al. 2025, "Transformers Don't Need LayerNorm at Inference Time".
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.edited_passes import (
    ESTIMATED_PROMPTS,
    EditedPasses,
    PlainAttention,
    Silent,
    choosing_prompts,
    is_affordable,
    largest,
)
from ln_probe.analyses.probes.tables import CAUSAL, CAUSAL_PROMPTS
from ln_probe.analyses.probes.wording import PRIMARY
from ln_probe.analyses.text import counted
from ln_probe.hooks.constants import FROZEN, OPTIMAL, UNIFORM, Constant, GradientError, slopes_of
from ln_probe.hooks.edits import GROUPS, members
from ln_probe.hooks.model import HookedModel, at_least_float32, device_of, evaluating, hooks_on, tensors_in
from ln_probe.hooks.norm import EDITS, SCALING_FROZEN, Norm, Variant
from ln_probe.hooks.norm_edits import NormEdit, installed
from ln_probe.hooks.norms import structure_of

# The contrasts fixed before the data are those of primary variants ({scaling frozen, projection removed}) at
# these groups of norms. All others are exploratory.
PRIMARY_SITES = ("attention", "all")
# Derivatives by the constants are means over at most so many prompts, evenly spread.
GRADIENT_PROMPTS = 16
# A derivative that promises a larger change than freezing itself and this, nats a token, is checked.
STEEP = 0.05


@dataclass(frozen=True)
class Contrast:
    """A row of the table: some norms, and what is removed there.

    Attributes:
        sites: name of a norm, or of a group of norms.
        variant: what is removed.
        norms: that have what is removed.
    """

    sites: str
    variant: Variant
    norms: tuple[Norm, ...]

    @property
    def is_group(self) -> bool:
        return self.sites in GROUPS

    @property
    def is_frozen_primary(self) -> bool:
        """Whether it is a primary contrast that freezes scaling."""
        return self.sites in PRIMARY_SITES and self.variant is SCALING_FROZEN

    @property
    def family(self) -> str:
        """The contrasts that a p-value is Holm-adjusted with."""
        if not self.is_group:
            return f"exploratory: single norms, {self.variant.name}"
        return PRIMARY if self.variant.primary and self.sites in PRIMARY_SITES else "exploratory: groups"

    @property
    def effect(self) -> frozenset[tuple[str, frozenset[str]]]:
        """Each norm with what is removed there: contrasts with one effect are one computation."""
        return frozenset((norm.name, self.variant.effect(norm)) for norm in self.norms)

    def edits(self, constants: Mapping[str, Constant]) -> list[NormEdit]:
        """Return its edits with these constants."""
        pairs = {name: constant.pair for name, constant in constants.items()}
        return [NormEdit.of(norm, self.variant.name, pairs.get(norm.name)) for norm in self.norms]


class Causal(Probe):
    """How the loss changes when groups of norms, or single norms, lose a term.

    Args:
        single_norms: whether norms are taken one by one, too.
        every_norm: whether each of them is run exactly however large the model is.
        primary_only: whether only the primary contrasts are measured, with mean constants.
    """

    def __init__(self, single_norms: bool = True, every_norm: bool = False, primary_only: bool = False) -> None:
        self.single_norms = single_norms and not primary_only
        self.every_norm, self.primary_only = every_norm, primary_only

    name = "causal"
    summary = "how the loss changes when a term is removed"
    tables = (CAUSAL, CAUSAL_PROMPTS)
    needs = Needs(output=True)

    def start(self, run: Run) -> Observer:
        if not run.measured_norms:
            return Observer()
        if run.obstacle:
            return Silent(f"causal: the loss is not applicable: {run.obstacle}")
        return _Watching(run, self)


def unchanging(norms: Iterable[Norm]) -> dict[str, str]:
    """Return the variants that change nothing at any of these norms, and why."""
    norms = list(norms)
    kinds = " and ".join(sorted({norm.kind for norm in norms}))
    idle = [variant for variant in EDITS if not any(map(variant.effect, norms))]
    return {variant.name: f"{kinds} has no {' or '.join(sorted(variant.removes))}" for variant in idle}


class _Watching(Observer):
    """Measures the summed losses of each prompt."""

    def __init__(self, run: Run, probe: Causal) -> None:
        self.run, self.model, norms = run, run.model, run.measured_norms
        self.lost = structure_of(self.model).lost_at(norms)
        groups = [(group, tuple(members(norms, group))) for group in GROUPS]
        rows = [Contrast(g, v, tuple(n for n in some if v.effect(n))) for g, some in groups for v in EDITS]
        rows += [Contrast(norm.name, SCALING_FROZEN, (norm,)) for norm in norms if norm.scales and probe.single_norms]
        if probe.primary_only:
            rows = [row for row in rows if row.family == PRIMARY]
        self.rows = [row for row in rows if row.norms and not any(norm.name in self.lost for norm in row.norms)]
        self.no_op = unchanging(norms)
        self.singles = [row for row in self.rows if not row.is_group]
        self.is_exact = probe.every_norm or is_affordable(self.model, len(self.singles), run.prompts)
        self.choosing = set() if self.is_exact else choosing_prompts(run.constants.groups)
        self.chosen = [row.sites for row in self.singles] if self.is_exact else list[str]()
        self.mean_only = probe.primary_only
        self.plain = PlainAttention.of(self.model, max(run.prompts, key=len))
        count = min(GRADIENT_PROMPTS, len(run.prompts))
        self.with_gradients = set(np.linspace(0, len(run.prompts) - 1, count).astype(int).tolist())
        self.weights: dict[int, int] = {}
        self.intact: dict[int, float] = {}
        self.losses: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
        self.by_token: dict[int, dict[str, Float[np.ndarray, " next"]]] = defaultdict(dict)  # of all norms, by variant
        self.estimates: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        self.gradients: dict[str, dict[int, dict[str, tuple[float, float]]]] = defaultdict(dict)
        self.no_gradient = ""  # why there is no gradient by the constants
        self.too_steep: list[str] = []

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        weight = self.run.loss.weight(tokens)
        if not weight:
            return
        self.weights[prompt] = weight
        rows = [row for row in self.rows if row.is_group] + (self.singles if self.is_exact else [])
        with evaluating(self.model), self.plain.replaced() if self.plain else nullcontext():
            self._run(prompt, tokens, rows)
            if prompt in self.with_gradients and self.run.constants.given is None:
                self._differentiate(prompt, tokens)
            if self.singles and self.run.loss.function is None and (prompt < ESTIMATED_PROMPTS or not self.is_exact):
                constants = self.run.constants.of(prompt)
                edits = {row.sites: row.edits(constants)[0] for row in self.singles}
                for sites, terms in norm_estimates(self.model, tokens, edits).items():
                    self.estimates[sites][prompt] = terms

    def _run(self, prompt: int, tokens: Int[Tensor, " _"], rows: Sequence[Contrast]) -> None:
        """Run the intact model and contrasts on a prompt, and keep the losses."""
        passes = EditedPasses(self.model, self.run.loss, tokens)
        self.intact[prompt] = float(passes.by_token.sum())
        constants = self.run.constants.of(prompt)
        jobs: dict[tuple[Any, str], list[NormEdit]] = {}
        places: dict[tuple[str, str, str], tuple[Any, str]] = {}
        for row in rows:
            for way, by_norm in self._constants(row, prompt, constants).items():
                places[row.sites, row.variant.name, way] = row.effect, way
                jobs.setdefault((row.effect, way), row.edits(by_norm))
        losses = dict(zip(jobs, passes.losses(list(jobs.values())), strict=True))
        for place, job in places.items():
            self.losses[place][prompt] = losses[job]
        if self.run.loss.function is None:
            numbers, intact = {job: number for number, job in enumerate(jobs)}, passes.by_token.cpu().numpy()
            self.by_token[prompt]["loss"] = intact
            for (sites, variant, way), job in places.items():
                if sites == "all" and way == FROZEN:
                    edited = passes.edited_by_token[numbers[job]].double().cpu().numpy()
                    self.by_token[prompt][variant] = edited - intact

    def _constants(
        self, row: Contrast, prompt: int, constants: Mapping[str, Constant]
    ) -> dict[str, Mapping[str, Constant]]:
        """Return the constants with which a contrast is run: more than one kind of primary ones."""
        ways: dict[str, Mapping[str, Constant]] = {FROZEN: constants}
        if row.is_frozen_primary and not self.mean_only:
            ways[UNIFORM] = {name: constant.uniform for name, constant in constants.items()}
            optimal = self.run.constants.optimal_of(row.sites, prompt)
            if all(norm.name in optimal for norm in row.norms):
                ways[OPTIMAL] = optimal
        return ways

    def _differentiate(self, prompt: int, tokens: Int[Tensor, " pos"]) -> None:
        """Keep the derivatives of the primary contrasts that freeze scaling by the constants."""
        constants = self.run.constants.of(prompt)
        for row in self.rows:
            if not row.is_frozen_primary or self.no_gradient:
                continue
            leaves = {norm.name: constants[norm.name].pair.requires_grad_() for norm in row.norms}
            with torch.enable_grad():
                edited = self._edited_loss(row, tokens, leaves)
            try:
                slopes = slopes_of(edited, leaves)
            except GradientError as error:
                self.no_gradient = str(error)
                return
            loss = float(edited.detach())
            holds = self._holds(row, tokens, constants, slopes, loss, loss - self.intact[prompt])
            if holds < 1 and row.sites not in self.too_steep:
                self.too_steep.append(row.sites)
            self.gradients[row.sites][prompt] = {n: (holds * a, holds * b) for n, (a, b) in slopes.items()}

    def _edited_loss(self, row: Contrast, tokens: Int[Tensor, " pos"], pairs: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of a prompt with scaling frozen at these constants, by norm."""
        rows = tokens[None].to(device_of(self.model.parameters()))
        edits = [NormEdit.of(norm, row.variant.name, pairs[norm.name]) for norm in row.norms]
        with installed(self.model, edits):
            return self.run.loss.sums(self.model(rows, return_type="logits"), rows).sum()

    def _holds(
        self,
        row: Contrast,
        tokens: Int[Tensor, " pos"],
        constants: Mapping[str, Constant],
        slopes: Mapping[str, tuple[float, float]],
        loss: float,
        change: float,
    ) -> float:
        """Return which part of a derivative holds when every constant moves by its standard error, steepest way up.

        1, unless the derivative promises a larger change than freezing scaling itself (and than STEEP a token):
        in a deep model with outlier tokens it can be a million times too large.
        """
        errors = self.run.constants.standard_errors
        promised = sum(abs(g) * e for name in slopes for g, e in zip(slopes[name], errors[name], strict=True))
        if not promised > abs(change) + STEEP * len(tokens):
            return 1.0
        pairs = {}
        for name, slope in slopes.items():
            steps = zip((constants[name].first, constants[name].rest), slope, errors[name], strict=True)
            pairs[name] = Constant(*(max(c + math.copysign(e, g), c / 2) for c, g, e in steps)).pair
        with torch.no_grad():
            after = float(self._edited_loss(row, tokens, pairs))
        return min(1.0, abs(after - loss) / promised) if math.isfinite(after) else 1.0

    def finish(self) -> ProbeResults:
        if not self.is_exact:
            choosing = ({s: by[p] for s, by in self.estimates.items() if p in by} for p in self.choosing)
            self.chosen = largest(choosing)
            rows = [row for row in self.singles if row.sites in self.chosen]
            with evaluating(self.model), self.plain.replaced() if self.plain else nullcontext():
                for prompt in self.weights:
                    if prompt not in self.choosing and rows:
                        self._run(prompt, self.run.prompts[prompt], rows)
        moved = shifts(self.run.constants, self.gradients)
        tables = {CAUSAL.name: self._table(moved), CAUSAL_PROMPTS.name: self._by_prompt(moved)}
        return ProbeResults(tables, self._notes(), {"no_op": self.no_op}, self._by_token())

    def _table(self, moved: Mapping[str, Float[np.ndarray, " prompt"]]) -> pd.DataFrame:
        """Return the `causal` table."""
        rows = []
        for row in self.rows if self.weights else ():
            key, constants = (row.sites, row.variant.name), self.run.constants
            losses = self.losses[*key, FROZEN]
            if not losses and not self.estimates[row.sites]:
                continue
            prompts = np.array(list(losses or self.estimates[row.sites]))
            weights = self._of(self.weights, prompts)
            frame: dict[str, Any] = {"sites": row.sites, "variant": row.variant.name, "family": row.family}
            if losses:
                intact, change = self._of(self.intact, prompts), self._changes(losses)
                moved_here = moved[row.sites][prompts] if row.is_frozen_primary and row.sites in moved else 0.0
                found = over_groups(change + moved_here, weights, prompts, constants, self.run.strata, self.run.seed)
                frame |= {
                    "loss": (intact + change).sum() / weights.sum(),
                    "delta_loss": change.sum() / weights.sum(),
                    "delta_loss_low": found.low,
                    "delta_loss_high": found.high,
                    "p": found.p,
                    "equivalence_bound": found.bound,
                    "prompts_worse": int((change > 0).sum()) if np.isfinite(change).all() else math.nan,
                }
            if uniform := self.losses.get((*key, UNIFORM)):
                frame["delta_loss_uniform"] = self._changes(uniform).sum() / weights.sum()
            if optimal := self.losses.get((*key, OPTIMAL)):
                change = self._changes(optimal)
                found = over_groups(change, weights, prompts, constants, self.run.strata, self.run.seed)
                frame["delta_loss_optimal"] = change.sum() / weights.sum()
                frame |= {"delta_loss_optimal_low": found.low, "delta_loss_optimal_high": found.high}
            if not row.is_group and (estimates := self.estimates[row.sites]):
                tokens = self._of(self.weights, np.array(list(estimates)))
                frame["estimate"] = sum(map(sum, estimates.values())) / tokens.sum()
            rows.append(frame | {"n": len(prompts)})
        table = pd.DataFrame(rows, columns=CAUSAL.names) if rows else CAUSAL.empty()
        for same in table.groupby("family").groups.values():
            table.loc[same, "p"] = statistics.holm(
                table.loc[same, "p"].to_numpy(float), table.loc[same, "delta_loss"].notna().to_numpy()
            )
        return table

    def _by_prompt(self, moved: Mapping[str, Float[np.ndarray, " prompt"]]) -> pd.DataFrame:
        """Return the `causal_prompts` table: means over each prompt, of what was run."""
        rows, strata = [], self.run.strata or [""] * len(self.run.constants.groups)
        for prompt, weight in sorted(self.weights.items()):
            for row in self.rows:
                loss = self.losses[row.sites, row.variant.name, FROZEN].get(prompt)
                if loss is None:
                    continue
                shift = moved[row.sites][prompt] if row.is_frozen_primary and row.sites in moved else 0.0
                intact = self.intact[prompt] / weight
                place = (prompt, strata[prompt], row.sites, row.variant.name)
                rows.append((*place, intact, loss / weight - intact, shift, weight))
        return pd.DataFrame(rows, columns=CAUSAL_PROMPTS.names) if rows else CAUSAL_PROMPTS.empty()

    def _by_token(self) -> pd.DataFrame | None:
        """Return the losses of single tokens: `prompt`, `position`, `token`, `loss`, and changes by variant."""
        frames = []
        for prompt, columns in self.by_token.items():
            strings = self.run.strings[prompt][1:]
            place = {"prompt": prompt, "position": range(1, 1 + len(strings)), "token": list(strings)}
            changes = {v.name: columns.get(v.name, math.nan) for v in EDITS if v.primary}
            frames.append(pd.DataFrame(place | {"loss": columns["loss"]} | changes))
        return pd.concat(frames, ignore_index=True) if frames else None

    @staticmethod
    def _of(values: Mapping[int, float], prompts: Iterable[int]) -> Float[np.ndarray, " prompt"]:
        return np.array([values[prompt] for prompt in prompts], float)

    def _changes(self, losses: Mapping[int, float]) -> Float[np.ndarray, " prompt"]:
        return np.array([loss - self.intact[prompt] for prompt, loss in losses.items()], float)

    def _notes(self) -> list[str]:
        """Return what a reader has to know."""
        notes = [f"causal: {reason}" for reason in self.lost.values()]
        if not self.weights:
            return [*notes, "causal: nothing is predicted: every prompt has one token"]
        if len(self.chosen) < len(self.singles):
            notes.append(
                f"causal: {len(self.chosen)} of {len(self.singles)} norms were run one by one on the even prompts, "
                "those with the largest estimates on the odd ones; the others are estimated to second order"
            )
        if endless := [f"{s} {v}" for (s, v, _), by in self.losses.items() if not np.isfinite(list(by.values())).all()]:
            where = ", ".join(dict.fromkeys(endless))
            notes.append(f"causal: the edited model's loss is not finite, so there are no numbers: {where}")
        if self.too_steep:
            notes.append(
                f"causal: the loss is too steep in the constants for a derivative ({', '.join(self.too_steep)}): the "
                "intervals use the change over one standard error of the constants instead"
            )
        if self.no_gradient:
            notes.append(f"causal: intervals do not include the choice of constants: {self.no_gradient}")
        groups = len(np.unique(self.run.constants.groups[list(self.weights)]))
        if groups < statistics.LEAST_GROUPS:
            notes.append(
                f"causal: not tested ({counted(groups, 'prompt group')}): confidence intervals need "
                f"{statistics.LEAST_GROUPS}, so loss changes are of these prompts alone"
            )
        return notes


def over_groups(
    change: Float[np.ndarray, " prompt"],
    weights: Float[np.ndarray, " prompt"],
    prompts: Int64[np.ndarray, " prompt"],
    constants: Constants,
    strata: Sequence[str],
    seed: int,
) -> statistics.MeanInference:
    """Return interval and p of a summed change over the prompt groups, resampled within strata.

    Args:
        change, weights: of each prompt that was measured: summed change, tokens.
        prompts: their numbers.
        constants: hold the groups of all prompts.
        strata: the stratum of each of all prompts; empty: there is one.
        seed: of resamples.
    """
    groups = constants.groups[prompts]
    sums, tokens = (statistics.by_group(values, groups) for values in (change, weights))
    if not strata:
        return statistics.infer_mean(sums, tokens, seed=seed)
    first = np.unique(groups, return_index=True)[1]
    names = np.array([strata[prompt] for prompt in prompts])
    numbers = np.unique(names, return_inverse=True)[1][first]
    return statistics.infer_mean(sums, tokens, numbers, seed=seed)


def shifts(
    constants: Constants, gradients: Mapping[str, Mapping[int, Mapping[str, tuple[float, float]]]]
) -> dict[str, Float[np.ndarray, " prompt"]]:
    """Return what each prompt adds to the summed loss change through other prompts' constants, to first order.

    That is Σ_s g_s (S_s − c_s m_s), summed over norms s and both kinds of position, with S and m the prompt's sum and
    count of sigma, c the pooled constant, and g_s the derivative of the summed change by c_s over the count. It sums to
    0 over the prompts.

    Args:
        constants: of every prompt.
        gradients: of each primary contrast, by some of the prompts and by norm.
    """
    moved: dict[str, np.ndarray] = {}
    for sites, by_prompt in gradients.items():
        prompts, total = list(by_prompt), np.zeros(len(constants.groups))
        for site in next(iter(by_prompt.values())):
            slopes = np.sum([by_prompt[prompt][site] for prompt in prompts], axis=0)
            counts = constants.counts[prompts, constants.sites.index(site)].sum(0)
            total += constants.centered(site)[0] @ (slopes / np.maximum(counts, 1.0))
        moved[sites] = total
    return moved


def norm_estimates(
    model: HookedModel, tokens: Int[Tensor, " pos"], edits: Mapping[str, NormEdit]
) -> dict[str, tuple[float, float]]:
    """Return the estimated change of a prompt's summed next-token loss under each edit of one norm.

        estimate = Σ <g, Δ> + ½ Σ <s, Δ>²

    over the vectors of a prompt, with Δ the change of the norm's output y in the intact model, g the gradient of the
    loss at y, and s the same gradient if the next tokens were drawn from the model's own predictions. The first sum is
    the first-order estimate of attribution patching (Nanda 2023; Kramár et al. 2024). Frozen scaling makes some vectors
    longer and others shorter, so that this sum nearly cancels, while the loss rises all the same: it is at a minimum.
    The second sum is that rise, the KL divergence from the intact predictions to second order (s sᵀ is the Fisher
    information in expectation; Amari 1998), with vectors at different positions taken to be independent.

    Tokens are drawn with a seed that depends on the prompt alone.

    Returns:
        Both sums of each edit, in nats; nothing if the loss has no gradient at any norm.
    """
    norms = {edit.norm.name: edit.norm for edit in edits.values()}
    calls: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in norms}

    def record(name: str, _m: Any, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        """Record the norm's input and output, with a leaf for the gradient there."""
        x = tensors_in(args, kwargs)[0]
        calls[name].append((x.detach(), y.detach(), torch.zeros_like(y, requires_grad=True)))
        return y + calls[name][-1][-1]

    rows = tokens[None].to(device_of(model.parameters()))
    with torch.enable_grad(), hooks_on([(norm.module, partial(record, name)) for name, norm in norms.items()]):
        logits = at_least_float32(model(rows, return_type="logits"))[0, :-1]
        leaves = [leaf for each in calls.values() for *_, leaf in each]
        if not logits.requires_grad:
            return {}
        seed = zlib.crc32(tokens.cpu().numpy().astype(np.int64).tobytes())
        shares, generator = logits.detach().softmax(-1).cpu(), torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(shares, 1, generator=generator)[:, 0].to(logits.device)
        losses = [F.cross_entropy(logits, labels, reduction="sum") for labels in (rows[0, 1:], drawn)]
        found = [torch.autograd.grad(x, leaves, retain_graph=x is losses[0], allow_unused=True) for x in losses]
    slopes = {id(leaf): pair for leaf, *pair in zip(leaves, *found, strict=True) if pair[0] is not None}
    estimates: dict[str, tuple[float, float]] = {}
    for name, edit in edits.items():
        first, second = 0.0, torch.zeros(())
        edit.positions.begin((1, len(tokens)))
        for x, y, leaf in calls[edit.norm.name]:
            if id(leaf) in slopes:
                change = at_least_float32(edit.output(x)).detach() - at_least_float32(y)
                own, of_drawn = (slope * change for slope in slopes[id(leaf)])
                first += float(own.sum(dtype=torch.float64))
                second = second.to(y.device) + of_drawn.sum(-1, dtype=torch.float64)
        estimates[name] = first, 0.5 * float((second**2).sum())
    return estimates if slopes else {}
