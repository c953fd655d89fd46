"""What to measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ln_probe.analyses.arguments import LARGEST_SEED, check_flags, received
from ln_probe.analyses.files import read_text, sha256_of_file
from ln_probe.analyses.probes.registry import DEFAULT, entries
from ln_probe.hooks.model import HookedModel, n_layers, whole_number

KEYS = ("hardest", "all")


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """A list of layers or heads.

    Raises:
        TypeError: it is none.
    """
    try:
        if not isinstance(values, str | bytes):
            return tuple(whole_number(v, what) for v in values)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{what} must be a list of whole numbers, such as [0, 1], got {values!r}")


def from_the_end(layers: Iterable[int], count: int) -> tuple[int, ...]:
    """Indices of layers, negative ones counted from the end; what is out of range stays as it was given."""
    return tuple(i + count if -count <= i < 0 else i for i in whole_numbers(layers, "layers"))


@dataclass(frozen=True)
class Settings:
    """What to measure: probes, layers and heads (None: all), rows of the `keys` table, the seed of samples, a file of
    token strings for a model without a tokenizer, how many keys of a head are measured (0: all; None: all unless that
    would take too long), how many prompts go through the model together (None: as many as pay), text that constants
    come from and a file of group labels (with the hash of what they held; None: leave-one-out means, and equal prompts
    form groups), a loss as `module:function` (None: of the next token), and whether loss-optimal constants are fitted.
    """

    probes: tuple[str, ...] = DEFAULT
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    keys: str = "hardest"
    max_tokens: int = 512
    seed: int = 0
    tokenizer: str | None = None
    keys_sample: int | None = None
    batch_size: int | None = None
    calibration: str | None = None
    calibration_sha256: str | None = None
    groups: str | None = None
    groups_sha256: str | None = None
    loss: str | None = None
    optimal: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.probes, str) or not self.probes:
            raise ValueError(f"unknown probes {self.probes!r}: give a list of {', '.join(entries())}")
        if self.keys not in KEYS:
            raise ValueError(f"keys must be one of {', '.join(KEYS)}, got {self.keys!r}")
        for name, least, what in (
            ("max_tokens", 2, "a number of tokens, 2 or more (one token alone predicts nothing)"),
            ("seed", 0, "a whole number, 0 or more and at most 10^18"),
            ("batch_size", 1, "a number of prompts, 1 or more"),
            ("keys_sample", 0, "a number of keys per head (0: all of them)"),
        ):
            given = getattr(self, name)
            if given is None and name in ("batch_size", "keys_sample"):
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
        """As JSON has it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Settings:
        """The settings that `plain` was made from; further entries are ignored."""
        values: dict[str, Any] = {f.name: plain[f.name] for f in fields(cls) if f.name in plain}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**values)

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
    """The group labels of a file, a line for each prompt.

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


def check_unchanged(path: str, sha256: str | None) -> None:
    """Raise ValueError if a file is not what it was when the run was planned."""
    if sha256_of_file(Path(path)) != sha256:
        raise ValueError(f"{path} changed after the run began: start the run again")
