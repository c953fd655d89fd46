"""Constants that replace sigma: for each norm, one at position 0 and one at the other positions.

Position 0 has its own constant because attention sinks are there: in SmolLM2-135M their sigma is hundreds of times the
others', and a single constant would make their vectors hundreds of times too long (Heimersheim 2024 treats the first
position separately for the same reason). Loss-optimal constants (optimal ablation: Li & Janson 2024) are searched over
the logarithms of all constants together by L-BFGS-B (scipy), from the mean sigmas.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from ln_probe.hooks.model import Facts, HookedModel, device_of, evaluating, facts_of, run
from ln_probe.hooks.norm import VARIANTS, Norm
from ln_probe.hooks.norm_edits import NormEdit, installed
from ln_probe.hooks.norms import Structure
from ln_probe.hooks.stream import stream
from ln_probe.hooks.task import Objective, default_tokens, twins

_COMPARED = 2048  # entries of each parameter that show whether it was changed
SCALES = FROZEN, UNIFORM, OPTIMAL = "frozen", "uniform", "optimal"


@dataclass(frozen=True)
class Constant:
    """What a norm divides by instead of its sigma.

    Attributes:
        first: at position 0; rest: elsewhere.
    """

    first: float
    rest: float

    @classmethod
    def of(cls, given: object) -> Constant:
        """Return the constant that a number (everywhere the same), a pair, or {"first": …, "rest": …} stands for.

        Raises:
            ValueError: something else, or a number that is not positive and finite.
        """
        if isinstance(given, Constant):
            return given
        try:
            pair: Any = [given["first"], given["rest"]] if isinstance(given, Mapping) else given
            first, rest = map(float, pair if isinstance(pair, tuple | list) else (pair, pair))
        except (TypeError, ValueError, KeyError, RuntimeError):
            first = rest = math.nan
        if not (0 < first < math.inf and 0 < rest < math.inf):
            raise ValueError(f'a constant is a positive number or {{"first": number, "rest": number}}, got {given!r}')
        return cls(first, rest)

    @property
    def plain(self) -> dict[str, float]:
        """As JSON has it."""
        return {"first": self.first, "rest": self.rest}

    @property
    def pair(self) -> Float64[Tensor, " 2"]:
        """Both numbers as a tensor."""
        return torch.tensor([self.first, self.rest], dtype=torch.float64)

    @property
    def uniform(self) -> Constant:
        """The one constant for all positions."""
        return Constant(self.rest, self.rest)


def mean_sigmas(model: HookedModel, norms: Sequence[Norm], prompts: Iterable[Int[Tensor, " _"]]) -> dict[str, Constant]:
    """Return the mean sigma of each norm over the tokens of some prompts, at position 0 and elsewhere.

    Costs one forward pass a prompt. Without other positions, the mean at position 0 stands for them.

    Raises:
        ActivationError: a norm's input or output is not finite.
    """
    sigmas: dict[str, tuple[list[Any], list[Any]]] = {norm.name: ([], []) for norm in norms}
    length = 0

    def on_norm(norm: Norm, x: Tensor, _y: Tensor) -> None:
        sigma = norm.sigma(x.double())[:, 0].cpu().numpy()
        heads = max(1, len(x) // length)
        for each, part in zip(sigmas[norm.name], (sigma[:heads], sigma[heads:]), strict=True):
            each.append(part)

    with evaluating(model):
        for row in prompts:
            length = len(row)
            stream(model, row, norms, on_norm=on_norm)
    means: dict[str, Constant] = {}
    for name, both in sigmas.items():
        if both[0]:
            first, rest = map(np.concatenate, both)
            means[name] = Constant(float(first.mean()), float((rest if len(rest) else first).mean()))
    return means


def weights_sample(parameters: Iterable[Tensor]) -> Float[Tensor, " entry"]:
    """Return some entries of every parameter, evenly spaced: edits through `.data` change no version count."""
    return torch.cat([p.detach().flatten()[:: 1 + p.numel() // _COMPARED] for p in parameters])


def bundled_constants(facts: Facts, parameters: Iterable[Tensor]) -> Mapping[str, Any]:
    """Return the loss-optimal constants that a bundled model brings; empty if its weights have changed."""
    sample = weights_sample(parameters)
    is_same = torch.equal(facts.bundled_constants.get("sample", sample).to(sample), sample)
    return facts.bundled_constants if is_same else {}


def default_means(model: HookedModel, structure: Structure) -> Mapping[str, Constant]:
    """Return the mean sigmas of a model's norms over its default prompts.

    They are measured again where the modules, a parameter, the tokenizer or the model's prompts have changed. Of
    edits through `.data`, which PyTorch does not count, those are seen that change an entry of `weights_sample`.
    """
    facts, parameters = facts_of(model), list(model.parameters())
    origin = facts.tokenizer, facts.bundled_prompts, [(p.data_ptr(), p._version) for p in parameters]
    sample, known = weights_sample(parameters), structure.constants
    if known is None or known[0] != origin or not torch.equal(known[1], sample):
        structure.constants = known = origin, sample, mean_sigmas(model, structure.norms, default_tokens(facts))
    means: Mapping[str, Constant] = known[2]
    return means


def given_constants(scale: object, names: Sequence[str]) -> dict[str, Constant]:
    """Return the constants of these norms that `scale` gives: one for all, or a mapping with one by name.

    Raises:
        ValueError: something else; a name is missing, or a constant is not positive and finite.
    """
    if isinstance(scale, str):
        raise ValueError(f"scale is one of {', '.join(map(repr, SCALES))}, a number or a mapping, got {scale!r}")
    if not isinstance(scale, Mapping):
        return dict.fromkeys(names, Constant.of(scale))
    if missing := [name for name in names if name not in scale]:
        raise ValueError(f"scale has no entry for {some(missing)}")
    return {name: Constant.of(scale[name]) for name in names}


def some(names: Sequence[str]) -> str:
    """Return names for a message; of many the first six."""
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")


# ------------------------------------------------------- loss-optimal constants

# A fit has converged where no derivative of the mean loss by the logarithm of a constant is larger, in nats/token: a
# change of any constant by 1 % then changes the loss by less than 1e-6. In float32, rounding leaves derivatives of
# about 5e-5 (lm-layernorm, 32 prompts of 128 tokens).
GRADIENT = 1e-4
# Evaluations of the loss and its gradient; lm-layernorm's nine norms take about 100.
MOST_EVALUATIONS = 300
# Steps that L-BFGS-B remembers: as many as a small model has constants, so that it knows the curvature along all.
MEMORY = 20
# A constant stays within this factor of its norm's mean sigmas. At position 0 one moved by a factor of 24; a
# norm whose best constant is infinite (its reader is best switched off) would otherwise never converge.
REACH = 100.0
# Tokens and logits that pass through the model at once: as many as keep one core's matrix products busy, and 128 MB.
TOKENS_AT_ONCE, LOGITS_AT_ONCE = 1024, 1 << 25

NEXT_TOKEN = Objective()

_Vector = Float64[np.ndarray, " constant"]  # a number for each constant, in the order first, rest of each norm


class GradientError(ValueError):
    """A loss that has no gradient at the constants, so that they cannot be fitted."""


def fit(
    model: HookedModel,
    norms: Sequence[Norm],
    prompts: Sequence[Int[Tensor, " _"]],
    *,
    start: Mapping[str, Constant],
    variant: str = "no_scaling",
    objective: Objective = NEXT_TOKEN,
) -> dict[str, Constant]:
    """Return the constants that minimize the mean loss over some prompts, for all norms together.

    Takes minutes for a small model: some hundred forward and backward passes over all prompts. Warns if the fit did not
    converge.

    Args:
        norms: that are edited together; those that do not scale have no constant.
        prompts: token ids of each.
        start: the mean sigmas of these norms, by name.
        variant: "no_scaling" or "both_removed".
        objective: the loss; a prompt's is multiplied by its weight (`Objective.weight`).

    Raises:
        ValueError: no norm that scales, no prompt with a loss, or a loss that is not finite.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]  # a third of a second, needed here alone

    facts = facts_of(model)
    with evaluating(model):
        obstacle = objective.obstacle(facts, run(model, twins(facts), return_type="logits"))
    if obstacle:
        raise ValueError(f"there is no loss to minimize: {obstacle}")
    names = [norm.name for norm in norms if "scaling" in VARIANTS[variant].effect(norm)]
    missing = [name for name in names if name not in start] if names else [norm.name for norm in norms]
    if missing or not names:
        raise ValueError(f"there is no constant for {some(missing)} ({variant})")
    counted = [row for row in prompts if objective.weight(row)]
    if not counted:
        raise ValueError("none of these prompts has a loss: give prompts of at least two tokens")
    weight = sum(objective.weight(row) for row in counted)
    device = device_of(model.parameters())
    batches = [rows.to(device) for rows in _batches(counted, facts.vocabulary)]

    def mean_loss(logs: _Vector) -> tuple[float, _Vector]:
        leaves = {name: constant.pair.requires_grad_() for name, constant in _constants(names, logs).items()}
        total, gradient = 0.0, np.zeros(len(logs))
        for rows in batches:
            with torch.enable_grad(), evaluating(model):
                edits = [NormEdit.of(n, variant, leaves.get(n.name)) for n in norms if VARIANTS[variant].effect(n)]
                with installed(model, edits):
                    loss = objective.sums(model(rows, return_type="logits"), rows).sum()
            slopes = slopes_of(loss, leaves)
            total += float(loss.detach())
            gradient += np.array([slopes[n] for n in names]).ravel()
        if not math.isfinite(total):
            raise ValueError(f"the loss is {total} at some constants: load the model with dtype='float32'")
        return total / weight, gradient * np.exp(logs) / weight

    means = np.log([(start[n].first, start[n].rest) for n in names])
    reach = np.stack([means.min(1) - math.log(REACH), means.max(1) + math.log(REACH)], axis=1).repeat(2, axis=0)
    options = {"maxcor": MEMORY, "ftol": 0.0, "gtol": GRADIENT, "maxfun": MOST_EVALUATIONS}
    result = minimize(mean_loss, means.ravel(), jac=True, method="L-BFGS-B", bounds=reach, options=options)
    largest = float(np.abs(result.jac).max())
    if not result.success and largest > GRADIENT:
        warnings.warn(
            f"the fit of loss-optimal constants did not converge (a derivative is {largest:.1e})", stacklevel=3
        )
    return _constants(names, result.x)


def slopes_of(loss: Float64[Tensor, ""], leaves: Mapping[str, Float64[Tensor, " 2"]]) -> dict[str, tuple[float, float]]:
    """Return the derivatives of a loss by each norm's constants, at position 0 and elsewhere.

    Raises:
        GradientError: the loss has no gradient at the constants, as in a model that rounds its activations.
    """
    if not loss.requires_grad:
        raise GradientError("the loss has no gradient, so no constants can be fitted")
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = ((0.0, 0.0) if slope is None else (float(slope[0]), float(slope[1])) for slope in slopes)
    return dict(zip(leaves, gradients, strict=True))


def _batches(prompts: Sequence[Int[Tensor, " _"]], vocabulary: int) -> Iterator[Int[Tensor, "batch pos"]]:
    """Yield the prompts in batches of equal length."""
    by_length: dict[int, list[Tensor]] = defaultdict(list)
    for row in prompts:
        by_length[len(row)].append(row)
    for length, rows in by_length.items():
        most = max(1, min(TOKENS_AT_ONCE // length, LOGITS_AT_ONCE // (length * vocabulary)))
        yield from torch.stack(rows).split(most)


def _constants(names: Sequence[str], logs: _Vector) -> dict[str, Constant]:
    pairs = np.exp(logs).reshape(-1, 2).tolist()
    return {name: Constant(first, rest) for name, (first, rest) in zip(names, pairs, strict=True)}
