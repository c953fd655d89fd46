"""What is measured of a model's output: the next-token loss, or a loss that the user gives."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.hooks.model import (
    HookedModel,
    at_least_float32,
    device_of,
    evaluating,
    missing_head,
    run,
    vocabulary_size,
)

# From the model's output and the token ids [batch pos] to the mean loss of each prompt [batch]; lower is better.
Loss = Callable[[Any, Tensor], Tensor]
# In a causal model a later token changes earlier logits only by the rounding of another batch row (1e-2 in bf16).
_SAME_LOGITS = 2e-2
BIDIRECTIONAL = "attention is bidirectional, so the model sees the tokens that a next-token loss asks for; give loss="


def too_few_outputs(outputs: int, vocabulary: int) -> str:
    """Return why a model with fewer outputs than tokens has no next-token loss."""
    return f"the model has {outputs} outputs for {vocabulary} tokens, so there is no next-token loss; give loss="


class ObjectiveError(ValueError):
    """A loss that cannot be used: names it and what it returned."""


@dataclass(frozen=True)
class Objective:
    """A loss of each prompt, and its weight in a mean over prompts.

    Attributes:
        function: the user's loss; None: the mean next-token loss, in nats per token.
        name: `module:function`, for provenance; "next-token loss" for the default.
    """

    function: Loss | None = None
    name: str = "next-token loss"

    @classmethod
    def of(cls, given: object) -> Objective:
        """Return the objective for None, a function, or the text "module:function".

        Raises:
            ObjectiveError: no such module or function, or something that cannot be called.
        """
        if given is None:
            return cls()
        function, name = (
            given,
            f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__name__)}",
        )
        if isinstance(given, str):
            module, _, attribute = given.partition(":")
            try:
                function, name = getattr(importlib.import_module(module), attribute), given
            except Exception as error:  # whatever the module raises while it is imported
                raise ObjectiveError(f"loss {given!r} must be module:function ({error})") from error
        if not callable(function):
            raise ObjectiveError(f"loss must be a function of (output, tokens), got {type(function).__name__}")
        return cls(function, name)

    @property
    def unit(self) -> str:
        """What a mean is given in: nats/token, or "units of module:function" under a loss of the user's."""
        return "nats/token" if self.function is None else f"units of {self.name}"

    def weight(self, tokens: Int[Tensor, " pos"]) -> int:
        """Return what a prompt counts in a mean over prompts: the tokens it predicts, or 1 under a user's loss."""
        return max(0, len(tokens) - 1) if self.function is None else 1

    def sums(self, output: Any, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """Return the loss of each prompt times its weight, float64; differentiable where the loss is.

        Args:
            output: of the model, with `return_type="logits"`.
            tokens: equal in length.

        Raises:
            ObjectiveError: the user's loss raised, or returned something else than one number per prompt.
        """
        if self.function is None:
            logits, wanted = at_least_float32(output[:, :-1]), tokens[:, 1:].to(output.device)
            losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            return losses.view(wanted.shape).sum(-1, dtype=torch.float64)
        try:
            losses = self.function(output, tokens)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ObjectiveError(f"{self.name}(output, tokens) raised {type(error).__name__}: {error}") from error
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != [len(tokens)] or not losses.is_floating_point():
            raise ObjectiveError(f"{self.name} must return floating-point numbers [{len(tokens)}], got {shape}")
        return losses.double()

    def obstacle(self, model: HookedModel) -> str:
        """Return why no loss of the model means anything; empty if it does, or if the user's loss decides."""
        if reason := missing_head(model):
            return reason
        if self.function is not None:
            return ""
        size = vocabulary_size(model)
        tokens = torch.linspace(1, size - 1, 4).long().repeat(2, 1)
        tokens[1, -1] = 0
        with evaluating(model):
            logits = run(model, tokens, return_type="logits")
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[-1] < size:
            outputs = logits.shape[-1] if isinstance(logits, Tensor) and logits.ndim else 0
            return too_few_outputs(outputs, size)
        wide = logits.float()
        ahead = float((wide[0, :-1] - wide[1, :-1]).abs().max())
        return BIDIRECTIONAL if ahead > _SAME_LOGITS * float(wide.abs().max().clamp_min(1.0)) else ""

    def check(self, model: HookedModel, tokens: Int[Tensor, " pos"]) -> None:
        """Raise ObjectiveError if the user's loss of one prompt is not finite, or another value the second time."""
        if self.function is None:
            return
        row = tokens[None].to(device_of(model))
        with evaluating(model), torch.no_grad():
            output = run(model, row, return_type="logits")
            first, second = (float(self.sums(output, row)[0]) for _ in range(2))
        if not math.isfinite(first) or first != second:
            raise ObjectiveError(
                f"{self.name} returned {first} and {second} on one output: it must be finite and fixed"
            )
