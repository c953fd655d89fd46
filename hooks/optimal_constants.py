"""Loss-optimal constants: what replaces each norm's sigma so that the model's loss is smallest with scaling frozen.

The mean of sigma is one choice of constant, and the loss increase depends on the choice. The constants that minimize
the loss, one for position 0 and one for the other positions of each norm, give the smallest increase that freezing can
have: optimal ablation (Li & Janson 2024, "Optimal ablation for interpretability"). They are fitted on some prompts and
measured on others (`fit_halves`), because constants look better on the prompts that they were fitted on.

The loss is minimized over the logarithms of all constants together by L-BFGS-B (scipy), from two starts:

    mean     the mean sigmas
    doubled  twice the mean sigmas
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor

from ln_probe.hooks.edits import Positions, installed
from ln_probe.hooks.model import HookedModel, OneLine, device_of, evaluating, vocabulary_size
from ln_probe.hooks.norm import Site
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.scales import Constant, Divisor, some
from ln_probe.hooks.variants import VARIANTS, VariantEdit

# Mean losses that differ by less (nats/token) are the same optimum: descents of lm-layernorm that converged from
# different starts end up to 4e-6 apart.
SAME_LOSS = 1e-5


@dataclass(frozen=True, repr=False)
class Descent(OneLine):
    """One minimization, from one start.

    Attributes:
        start: the name of the start.
        evaluations: of the loss and its gradient.
        loss_start, loss: mean loss at the start and at the lowest point, in the objective's unit.
        gradient: the largest derivative of the mean loss by the logarithm of a constant at the lowest point; constants
            that are at their bound and would leave it do not count.
        converged: whether `gradient` is small enough (`ln_probe.hooks.optimal_constants.GRADIENT`).
        reason: why the descent ended.
        constants: at the lowest point, by site.
    """

    start: str
    evaluations: int
    loss_start: float
    loss: float
    gradient: float
    converged: bool
    reason: str
    constants: Mapping[str, Constant]


@dataclass(frozen=True, repr=False)
class Fit(OneLine):
    """Constants that minimize the loss on some prompts.

    Attributes:
        descents: from each start.
    """

    descents: tuple[Descent, ...]

    @property
    def best(self) -> Descent:
        """The descent that ended at the smallest loss; of those that differ by rounding, one that converged."""
        lowest = min(descent.loss for descent in self.descents)
        near = [descent for descent in self.descents if descent.loss <= lowest + SAME_LOSS]
        return min(near, key=lambda descent: (not descent.converged, descent.loss))

    @property
    def constants(self) -> dict[str, Constant]:
        """The loss-optimal constants, by site."""
        return dict(self.best.constants)

    @property
    def converged(self) -> bool:
        """Whether the best descent converged."""
        return self.best.converged

    @property
    def table(self) -> pd.DataFrame:
        """A row for each start: the attributes of `Descent` but its constants."""
        return pd.DataFrame([{k: v for k, v in vars(d).items() if k != "constants"} for d in self.descents])

    def to_json(self) -> list[dict[str, Any]]:
        """As `of_json` reads it."""
        return [asdict(descent) for descent in self.descents]

    @classmethod
    def of_json(cls, content: Any) -> Fit:
        """From what `to_json` gave; ValueError for anything else."""
        with _reading("a fit of constants as to_json writes it"):
            constants = [{name: Constant.of(c) for name, c in given["constants"].items()} for given in content]
            return cls(tuple(Descent(**given | {"constants": c}) for given, c in zip(content, constants, strict=True)))


@dataclass(frozen=True, repr=False)
class Halves(OneLine):
    """Constants that were fitted on one half of the prompts, to be measured on the other, both ways.

    Attributes:
        half: of each prompt, 0 or 1.
        fits: on each half.
    """

    half: tuple[int, ...]
    fits: tuple[Fit, Fit]

    def of(self, prompt: int) -> dict[str, Constant]:
        """The constants that were fitted on the half that this prompt is not in."""
        return self.fits[1 - self.half[prompt]].constants

    @property
    def table(self) -> pd.DataFrame:
        """A row for each half that constants were fitted on and each start; as `Fit.table` otherwise."""
        return pd.concat([f.table.assign(half=half) for half, f in enumerate(self.fits)], ignore_index=True)

    def to_json(self) -> dict[str, Any]:
        """As `of_json` reads it."""
        return {"half": "".join(map(str, self.half)), "fits": [fit.to_json() for fit in self.fits]}

    @classmethod
    def of_json(cls, content: Any) -> Halves:
        """From what `to_json` gave; ValueError for anything else."""
        with _reading("halves as to_json writes them", ValueError):
            half, (first, second) = tuple(map(int, content["half"])), content["fits"]
        return cls(half, (Fit.of_json(first), Fit.of_json(second)))


@dataclass(frozen=True, repr=False)
class Shipped(OneLine):
    """Loss-optimal constants that a checkpoint brings, in `optimal.json` beside its weights (`bench/optimal.py`).

    Attributes:
        weights_sha256: of the file of weights that they were fitted to.
        prompts_sha256: of the token ids of the prompts, as a report's `provenance["prompts"]` has it.
        every: by group of norms ("attention", "all"), the fit on all prompts.
        halves: by group of norms, the fits on each half of the prompts.
    """

    weights_sha256: str
    prompts_sha256: str
    every: Mapping[str, Fit]
    halves: Mapping[str, Halves]

    def to_json(self) -> dict[str, Any]:
        """As `of_json` reads it."""
        groups = {g: {"every": self.every[g].to_json(), "halves": self.halves[g].to_json()} for g in self.every}
        return {"weights_sha256": self.weights_sha256, "prompts_sha256": self.prompts_sha256, "groups": groups}

    @classmethod
    def of_json(cls, content: Any) -> Shipped:
        """From what `to_json` gave; ValueError for anything else."""
        with _reading("constants as bench/optimal.py writes them", again="run it again"):
            every = {group: Fit.of_json(found["every"]) for group, found in content["groups"].items()}
            halves = {group: Halves.of_json(found["halves"]) for group, found in content["groups"].items()}
            return cls(str(content["weights_sha256"]), str(content["prompts_sha256"]), every, halves)


@contextmanager
def _reading(what: str, *more: type[Exception], again: str = "fit them again") -> Iterator[None]:
    """Turn errors of the code that reads JSON content into a ValueError that says what it is not."""
    wrong: tuple[type[Exception], ...] = (AttributeError, KeyError, TypeError, *more)
    try:
        yield
    except wrong as error:
        why = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"not {what} ({why}): {again}") from None


# A fit has converged where no derivative of the mean loss by the logarithm of a constant is larger, in nats/token: a
# change of any constant by 1 % then changes the loss by less than 1e-6. In float32, rounding leaves derivatives of
# about 5e-5 (lm-layernorm, 32 prompts of 128 tokens).
GRADIENT = 1e-4
# A line search can fail in a narrow valley. L-BFGS-B then begins anew at the lowest point, as long as that lowers the
# mean loss by this much (nats/token).
LEAST_FALL = 1e-6
# Evaluations of the loss and its gradient from one start; lm-layernorm's nine norms take about 100.
MOST_EVALUATIONS = 300
# Steps that L-BFGS-B remembers: as many as a small model has constants, so that it knows the curvature along all.
MEMORY = 20
# A constant stays within this factor of its norm's mean sigmas. Position 0 has been seen to move by a factor of 24; a
# norm whose best constant is infinite (its reader is best switched off) would otherwise never converge.
REACH = 100.0
# The second start halves what every norm gives to its readers: attention is flatter and MLPs do less. It is far from
# the mean sigmas in every coordinate, and nothing grows. Half the mean sigmas, or one constant for all positions where
# an attention sink's sigma is hundreds of times larger, let the stream of a deep model overflow.
DOUBLED = 2.0
# Tokens and logits that pass through the model at once: as many as keep one core's matrix products busy, and 128 MB.
TOKENS_AT_ONCE, LOGITS_AT_ONCE = 1024, 1 << 25
# Factor of a constant whose gradient is 0: large enough that rounded activations change with it.
_TRIAL = 1.1

_Vector = Float64[np.ndarray, " constant"]  # a number for each constant, in the order first, rest of each norm


class GradientError(ValueError):
    """A loss that has no gradient at the constants, so that they cannot be fitted."""


class _Leaf:
    """A constant of which gradients are taken, by its values at position 0 and elsewhere."""

    def __init__(self, constant: Constant, device: torch.device) -> None:
        pair = [constant.first, constant.rest]
        self.values = torch.tensor(pair, dtype=torch.float64, device=device, requires_grad=True)

    def at(self, first: Bool[Tensor, "*batch 1"], like: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """As `Constant.at`."""
        values = self.values.to(like)
        return torch.where(first, values[0], values[1])


def fit(
    model: HookedModel,
    sites: Sequence[Site],
    prompts: Sequence[Int[Tensor, " _"]],
    *,
    start: Mapping[str, Constant],
    variant: str = "no_scaling",
    objective: Objective | None = None,
) -> Fit:
    """Fit the constants that minimize the mean loss over some prompts, for all norms together.

    Takes minutes for a small model: some hundred forward and backward passes over all prompts from each start.

    Args:
        sites: the norms that are edited together; those that do not scale have no constant.
        start: the mean sigmas of these norms, by site name.
        variant, objective: as for `loss_and_gradients`.

    Raises:
        ValueError: no norm that scales, no prompt with a loss, the model has no next-token loss, a missing or
            non-positive start, or a loss that is not finite at the start.
        GradientError: the loss has no gradient at the constants.
    """
    wanted = Objective() if objective is None else objective
    if obstacle := wanted.obstacle(model):
        raise ValueError(f"there is no loss to minimize: {obstacle}")
    names = _frozen(sites, variant, start, "start")
    if wrong := next((n for n in names if not min(start[n].first, start[n].rest) > 0), None):
        raise ValueError(f"start: the constants of {wrong} must be positive, got {start[wrong].plain}")
    counted = [row for row in prompts if wanted.weight(row)]
    if not counted:
        raise ValueError(f"none of these {len(prompts)} prompts has a loss: give prompts of at least two tokens")
    weight = sum(wanted.weight(row) for row in counted)
    batches = list(_batches(counted, vocabulary_size(model)))

    def mean_loss(logs: _Vector) -> tuple[float, _Vector]:
        constants = _constants(names, logs)
        total, gradient = 0.0, np.zeros(len(logs))
        for rows in batches:
            loss, found = loss_and_gradients(model, sites, rows, constants, variant=variant, objective=wanted)
            total += loss
            gradient += np.array([found[n] for n in names]).ravel()
        return total / weight, gradient * np.exp(logs) / weight

    means = np.log([(start[n].first, start[n].rest) for n in names])
    reach = np.stack([means.min(1) - math.log(REACH), means.max(1) + math.log(REACH)], axis=1).repeat(2, axis=0)
    starts = {"mean": means.ravel(), "doubled": means.ravel() + math.log(DOUBLED)}
    return Fit(tuple(_descend(names, label, mean_loss, logs, reach) for label, logs in starts.items()))


def fit_halves(
    model: HookedModel,
    sites: Sequence[Site],
    prompts: Sequence[Int[Tensor, " _"]],
    groups: Sequence[Hashable],
    *,
    start: Mapping[str, Constant],
    objective: Objective | None = None,
) -> Halves:
    """Fit constants on each half of the prompt groups, so that every prompt is measured with constants of the other.

    Groups alternate between the halves in the order in which they first occur.

    Args:
        groups: of each prompt; prompts of one group are never on both sides.

    Raises:
        ValueError: fewer than two groups, or not one for each prompt; otherwise as `fit`.
        GradientError: as `fit`.
    """
    if len(groups) != len(prompts):
        raise ValueError(f"groups must name a group for each of the {len(prompts)} prompts, got {len(groups)}")
    order = list(dict.fromkeys(groups))
    if len(order) < 2:
        raise ValueError(
            f"constants are fitted on one half of the prompt groups and measured on the other: {len(order)} group "
            "cannot be divided, give at least two"
        )
    half = tuple(order.index(group) % 2 for group in groups)
    of_half = [[row for row, mine in zip(prompts, half, strict=True) if mine == number] for number in (0, 1)]
    first, second = (fit(model, sites, rows, start=start, objective=objective) for rows in of_half)
    return Halves(half, (first, second))


def loss_and_gradients(
    model: HookedModel,
    sites: Sequence[Site],
    tokens: Int[Tensor, "*batch pos"],
    constants: Mapping[str, Constant],
    *,
    variant: str = "no_scaling",
    objective: Objective | None = None,
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the loss with constants for the sigmas of some norms, and its derivatives by these constants.

    One forward and one backward pass. The model's parameters get no gradients, and dropout is off.

    Args:
        sites: the norms that are edited; those that do not scale have no constant.
        tokens: one prompt, or several of equal length.
        constants: of each of these norms that scales, by site name; each positive.
        variant: "no_scaling" or "both_removed".
        objective: the loss; None: the next-token loss.

    Returns:
        The sum of the loss over the prompts, each times its weight (`Objective.weight`); and for each norm that scales
        the derivatives of this sum by its constant at position 0 and by the one elsewhere.

    Raises:
        ValueError: no norm of these has a constant under this variant, or a constant is missing.
        GradientError: the loss has no gradient at the constants, as in a model that rounds its activations.
        ObjectiveError: the user's loss did not return one number per prompt.
    """
    wanted = Objective() if objective is None else objective
    names = _frozen(sites, variant, constants, "constants")
    rows = (tokens[None] if tokens.ndim == 1 else tokens).to(device_of(model))
    leaves = {name: _Leaf(constants[name], rows.device) for name in names}
    with torch.enable_grad():
        loss = edited_loss(model, sites, rows, leaves, variant, wanted)
        if not loss.requires_grad:
            raise GradientError(
                f"{wanted.name} has no gradient, so constants cannot be fitted: the model computes without gradients, "
                'or the loss is a step function. Use the mean constants (scale="frozen") or another loss'
            )
        found = torch.autograd.grad(loss, [leaf.values for leaf in leaves.values()], allow_unused=True)
    gradients = {
        name: (0.0, 0.0) if g is None else (float(g[0]), float(g[1])) for name, g in zip(leaves, found, strict=True)
    }
    total = float(loss.detach())
    # A gradient of exactly 0 is right where nothing reads the norm (an output matrix of zeros, as some models start),
    # and wrong where the model rounds what it computes from the norm: then the constant does change the loss.
    if blocked := [name for name, pair in gradients.items() if pair == (0.0, 0.0)]:
        moved = {n: Constant(_TRIAL * constants[n].first, _TRIAL * constants[n].rest) for n in blocked}
        with torch.no_grad():
            other = float(edited_loss(model, sites, rows, {**constants, **moved}, variant, wanted))
        if other != total:
            raise GradientError(
                f"{blocked[0]}: its constant changes the loss, but the gradient of {wanted.name} is 0 there, so "
                "constants cannot be fitted: the model rounds its activations or stops gradients. Use the mean "
                'constants (scale="frozen")'
            )
    return total, gradients


def edited_loss(
    model: HookedModel,
    sites: Sequence[Site],
    rows: Int[Tensor, "batch pos"],
    divisors: Mapping[str, Divisor],
    variant: str,
    objective: Objective,
) -> Float64[Tensor, ""]:
    """The summed loss of some prompts under these divisors."""
    positions = Positions()
    edits = [VariantEdit(s, variant, divisors.get(s.name), positions) for s in sites]
    with evaluating(model), installed(model, edits):
        return objective.sums(model(rows, return_type="logits"), rows).sum()


def _frozen(sites: Sequence[Site], variant: str, constants: Mapping[str, Constant], argument: str) -> list[str]:
    """The names of those norms whose sigma a variant replaces by one of these constants.

    Raises:
        ValueError: there are none, or a constant is missing.
    """
    frozen = [s.name for s in sites if VARIANTS[variant].takes_scaling(s)]
    if not frozen:
        raise ValueError(
            f"variant {variant!r} replaces the sigma of none of these {len(sites)} norms, so there are no constants "
            'to fit: use "no_scaling" or "both_removed", and norms that scale'
        )
    if missing := [name for name in frozen if name not in constants]:
        raise ValueError(f"{argument} has no entry for {some(missing)}")
    return frozen


def _batches(prompts: Sequence[Int[Tensor, " _"]], vocabulary: int) -> Iterator[Int[Tensor, "batch pos"]]:
    """The prompts in batches of equal length."""
    by_length: dict[int, list[Tensor]] = defaultdict(list)
    for row in prompts:
        by_length[len(row)].append(row)
    for length, rows in by_length.items():
        most = max(1, min(TOKENS_AT_ONCE // length, LOGITS_AT_ONCE // (length * vocabulary)))
        yield from torch.stack(rows).split(most)


def _constants(names: Sequence[str], logs: Float64[np.ndarray, " constant"]) -> dict[str, Constant]:
    pairs = np.exp(logs).reshape(-1, 2).tolist()
    return {name: Constant(first, rest) for name, (first, rest) in zip(names, pairs, strict=True)}


def _descend(
    names: Sequence[str],
    label: str,
    mean_loss: Callable[[_Vector], tuple[float, _Vector]],
    start: _Vector,
    bounds: Float64[np.ndarray, "constant 2"],
) -> Descent:
    """Minimize the loss from one start; the lowest point that was evaluated counts."""
    logs, gradient = start, np.zeros_like(start)
    losses: list[float] = []

    def stuck() -> tuple[Bool[np.ndarray, " constant"], float]:
        """Which constants are at a bound that their derivative pushes them beyond, and the largest derivative of the
        others."""
        at_bound = ((logs <= bounds[:, 0]) & (gradient > 0)) | ((logs >= bounds[:, 1]) & (gradient < 0))
        return at_bound, float(np.abs(np.where(at_bound, 0.0, gradient)).max())

    def evaluate(at: _Vector) -> tuple[float, _Vector]:
        nonlocal logs, gradient
        loss, slope = mean_loss(at)
        if not (math.isfinite(loss) and np.isfinite(slope).all()):
            if not losses:
                raise ValueError(
                    f"the loss is {loss} with the constants of the start {label!r}: check that the model's loss is "
                    "finite with scaling frozen, or load it with dtype='float32'"
                )
            # The constants let activations overflow: worse than any other point, so that the line search goes back.
            losses.append(math.inf)
            return max(filter(math.isfinite, losses)) + 1.0, np.zeros_like(slope)
        if loss < min(losses, default=math.inf):
            logs, gradient = at.copy(), slope
        losses.append(loss)
        return loss, slope

    before = math.inf
    while len(losses) < MOST_EVALUATIONS:
        options = {"maxcor": MEMORY, "ftol": 0.0, "gtol": GRADIENT, "maxfun": MOST_EVALUATIONS - len(losses)}
        minimize(evaluate, logs, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        at_bound, largest = stuck()
        if largest <= GRADIENT or before - min(losses) < LEAST_FALL:
            break
        before = min(losses)
    if largest <= GRADIENT:
        reason = f"no derivative above {GRADIENT:g}"
    elif len(losses) < MOST_EVALUATIONS:
        reason = f"no step lowers the loss by {LEAST_FALL:g}"
    else:
        reason = f"{len(losses)} evaluations"
    if held := dict.fromkeys(names[int(i) // 2] for i in np.flatnonzero(at_bound)):
        reason += f"; at {REACH:g} times or a {REACH:g}th of the mean: {', '.join(held)}"
    return Descent(
        label, len(losses), losses[0], min(losses), largest, largest <= GRADIENT, reason, _constants(names, logs)
    )
