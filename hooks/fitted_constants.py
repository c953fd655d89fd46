"""What a fit of loss-optimal constants gives, and the JSON in which a checkpoint brings its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ln_probe.hooks.frozen_scale import Constant
from ln_probe.hooks.one_line import OneLine

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
        """From what `to_json` gave.

        Raises:
            ValueError: something else.
        """
        try:
            return cls(
                tuple(
                    Descent(**(d | {"constants": {n: Constant.of(c) for n, c in d["constants"].items()}}))
                    for d in content
                )
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a fit of constants as to_json writes it ({_what(error)}): fit them again") from None


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
        """From what `to_json` gave.

        Raises:
            ValueError: something else.
        """
        try:
            half, (first, second) = tuple(map(int, content["half"])), content["fits"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not halves as to_json writes them ({_what(error)}): fit them again") from None
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
        """From what `to_json` gave.

        Raises:
            ValueError: something else.
        """
        try:
            hashes = str(content["weights_sha256"]), str(content["prompts_sha256"])
            every = {group: Fit.of_json(found["every"]) for group, found in content["groups"].items()}
            halves = {group: Halves.of_json(found["halves"]) for group, found in content["groups"].items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not constants as bench/optimal.py writes them ({_what(error)}): run it again") from None
        return cls(*hashes, every, halves)


def _what(error: Exception) -> str:
    """What is wrong with the content: a KeyError is only the name of what is missing."""
    return f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
