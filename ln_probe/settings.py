"""What to measure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ln_probe.analyses.arguments import LARGEST_SEED, check_flags, received
from ln_probe.analyses.files import read_text
from ln_probe.analyses.probes.registry import DEFAULT
from ln_probe.hooks.model import HookedModel, n_layers, whole_number


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """Return a list of layers or heads as a tuple.

    Raises:
        TypeError: it is no list of whole numbers.
    """
    try:
        if not isinstance(values, str | bytes):
            return tuple(whole_number(v, what) for v in values)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{what} must be a list of whole numbers, such as [0, 1], got {values!r}")


def from_the_end(layers: Iterable[int], count: int) -> tuple[int, ...]:
    """Return indices of layers, negative ones counted from the end; what is out of range stays as it was given."""
    return tuple(i + count if -count <= i < 0 else i for i in whole_numbers(layers, "layers"))


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        probes: their names.
        layers, heads: that are measured; None: all.
        max_tokens: of a prompt; longer ones are cut.
        seed: of samples and resamples.
        tokenizer: a file of token strings, for a model without a tokenizer.
        batch_size: how many prompts go through the model together; None: as many as pay.
        loss: as `module:function`; None: of the next token.
        optimal: whether loss-optimal constants are fitted.
    """

    probes: tuple[str, ...] = DEFAULT
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    max_tokens: int = 512
    seed: int = 0
    tokenizer: str | None = None
    batch_size: int | None = None
    loss: str | None = None
    optimal: bool = False

    def __post_init__(self) -> None:
        for name, least, what in (
            ("max_tokens", 2, "a number of tokens, 2 or more (one token alone predicts nothing)"),
            ("seed", 0, "a whole number, 0 or more and at most 10^18"),
            ("batch_size", 1, "a number of prompts, 1 or more"),
        ):
            given = getattr(self, name)
            if given is None and name == "batch_size":
                continue
            try:
                object.__setattr__(self, name, whole_number(given, name, least))
                if name == "seed" and self.seed > LARGEST_SEED:
                    raise ValueError
            except ValueError:
                raise ValueError(f"{name} must be {what}, got {received(given)}") from None
        check_flags(optimal=self.optimal)
        object.__setattr__(self, "optimal", bool(self.optimal))

    @property
    def plain(self) -> dict[str, Any]:
        """The settings as plain JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    def check(self, model: HookedModel) -> None:
        """Raise ValueError if the model lacks a layer or a head that is asked for."""
        for what, wanted, count in (
            ("layer", self.layers, n_layers(model)),
            ("head", self.heads, int(getattr(model.cfg, "n_heads", 0))),
        ):
            wrong = [i for i in wanted or () if not 0 <= i < count]
            if wrong:
                raise ValueError(f"no {what} {wrong[0]}: the model has {what}s 0 … {count - 1}")
            if wanted is not None and not len(wanted):
                raise ValueError(f"an empty list of {what}s leaves nothing to analyze: None means all")


def read_groups(path: str | Path) -> list[str]:
    """Return the group labels of a file, a line for each prompt.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no label.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no groups file {str(path)!r}")
    labels = read_text(path).splitlines()
    if not labels or not all(label.strip() for label in labels):
        empty = next((n for n, label in enumerate(labels, start=1) if not label.strip()), 1)
        raise ValueError(f"{path}: line {empty} holds no label; write one label a line, a line for each prompt")
    return labels
