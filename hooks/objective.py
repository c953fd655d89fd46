"""What is measured of a model's output: the next-token loss, or an objective that the user gives."""

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

from ln_probe.hooks.model import HookedModel, device_of, evaluating, missing_head, run, vocabulary_size

# From the model's output and the token ids [batch pos] to the mean loss of each prompt [batch]; lower is better.
Loss = Callable[[Any, Tensor], Tensor]

# In a causal model a later token changes earlier logits only by the rounding of another batch row (1e-2 in bf16).
_SAME_LOGITS = 2e-2


# Why a model has no next-token loss.
BIDIRECTIONAL = (
    "attention is bidirectional, so the model sees the tokens that a next-token loss asks for; give loss= to measure "
    "another"
)


def too_few_outputs(outputs: int, vocabulary: int) -> str:
    """Why a model with fewer outputs than tokens has no next-token loss."""
    return (
        f"the model has {outputs} outputs for {vocabulary} tokens, so no next-token loss; give loss= to measure another"
    )


class ObjectiveError(ValueError):
    """A loss function that cannot be used: names it, what it returned and what is needed."""


@dataclass(frozen=True)
class Objective:
    """A loss of each prompt, and what it is a sum over.

    Attributes:
        function: the user's loss: from the model's output and token ids [batch pos] to the mean loss of each prompt
            [batch], in floating point, lower is better; None: the mean next-token loss, in nats per token.
        name: `module:function`, for provenance; "next-token loss" for the default.
    """

    function: Loss | None = None
    name: str = "next-token loss"

    @classmethod
    def of(cls, given: object) -> Objective:
        """From None, a function, the text "module:function" or an `Objective`.

        Raises:
            ObjectiveError: no such module or function, or something that cannot be called.
        """
        if isinstance(given, Objective):
            return given
        if given is None:
            return cls()
        function, named = given, "loss"
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__name__)}"
        if isinstance(given, str):
            name, named = given, f"loss {given!r}"
            module, _, attribute = given.partition(":")
            if not (module and attribute):
                raise ObjectiveError(f"loss must be written module:function, got {given!r}")
            try:
                home = importlib.import_module(module)
            except Exception as error:  # whatever the module raises while it is imported
                raise ObjectiveError(
                    f"{named} cannot be imported ({error}): is the module on the Python path?"
                ) from error
            if not hasattr(home, attribute):
                raise ObjectiveError(f"{named}: the module {module} has no {attribute!r}")
            function = getattr(home, attribute)
        if not callable(function):
            raise ObjectiveError(
                f"{named} must be a function of (output, tokens) that returns a tensor [batch], got "
                f"{type(function).__name__}"
            )
        return cls(function, name)

    @property
    def unit(self) -> str:
        """What a mean is given in: nats/token, or "units of module:function" under a loss of the user's."""
        return "nats/token" if self.function is None else f"units of {self.name}"

    def weight(self, tokens: Int[Tensor, " pos"]) -> int:
        """What a prompt counts in a mean over prompts: the tokens it predicts, or 1 under a loss of the user's."""
        return max(0, len(tokens) - 1) if self.function is None else 1

    def sums(self, output: Any, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """The loss of each prompt times its weight, float64; differentiable where the loss is.

        Args:
            output: of the model, with `return_type="logits"`.
            tokens: equal in length.

        Raises:
            ObjectiveError: the user's loss raised, or returned something that is not one finite number per prompt.
        """
        if self.function is None:
            logits = output[:, :-1] if output.dtype in (torch.float32, torch.float64) else output[:, :-1].float()
            wanted = tokens[:, 1:].to(logits.device)
            losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            return losses.view(wanted.shape).sum(-1, dtype=torch.float64)
        try:
            found = self.function(output, tokens)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ObjectiveError(
                f"{self.name}(output, tokens [batch pos]) raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, Tensor):
            raise ObjectiveError(
                f"{self.name} must return a tensor [batch], a mean loss for each prompt; got {type(found).__name__}"
            )
        if found.shape != (len(tokens),) or not found.is_floating_point():
            raise ObjectiveError(
                f"{self.name} must return floating-point numbers [{len(tokens)}], a mean loss for each prompt; got "
                f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
            )
        return found.double()

    def obstacle(self, model: HookedModel) -> str:
        """Why no loss of the model means anything; empty if it does, or if the user's loss decides. Two short passes.

        A head that was not in the checkpoint leaves no loss, because every loss is computed from the model's output.
        """
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
        if float((wide[0, :-1] - wide[1, :-1]).abs().max()) > _SAME_LOGITS * float(wide.abs().max().clamp_min(1.0)):
            return BIDIRECTIONAL
        return ""

    def check(self, model: HookedModel, tokens: Int[Tensor, " pos"]) -> None:
        """Try the user's loss on one prompt: shape, finiteness, and the same value twice.

        Raises:
            ObjectiveError: says what it returned and what to do.
        """
        if self.function is None:
            return
        row = tokens[None].to(device_of(model))
        with evaluating(model):
            output = run(model, row, return_type="logits")
            with torch.no_grad():
                first, second = (float(self.sums(output, row)[0]) for _ in range(2))
        if not math.isfinite(first):
            raise ObjectiveError(f"{self.name} returned {first} on the first prompt: it must be finite")
        if first != second:
            raise ObjectiveError(
                f"{self.name} returned {first!r} and then {second!r} on the same output: make it deterministic (fix "
                "its seed, switch dropout off)"
            )
